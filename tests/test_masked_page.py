# SPDX-License-Identifier: Apache-2.0
"""Numbers on the page of stage 08: its command, its masked tiles, how large the step is."""

import re
import shutil

import pytest
from flash_ladder import load
from flash_ladder.common.diff import stage_diff_stats
from flash_ladder.common.fences import stage_folder
from flash_ladder.common.model.sequences import OPEN, Sequence

TEXT = " ".join((load(8).folder / "README.md").read_text(encoding="utf-8").split())


def test_the_command_beside_the_table_gives_its_numbers(ladder):
    command = "flash-ladder model 8 --causal --seqlen 8192 --heads 64"
    assert f"`{command}`" in TEXT
    _, printed, _ = ladder(*command.split()[1:], "--json")
    tflops = re.search(r'"tflops": ([\d.]+)', printed)[1]
    assert re.search(rf"\| 8192 \| \d+ \(D\) \| {float(tflops):.0f} \(D\) \|", TEXT)


def test_the_page_says_how_many_tiles_a_causal_cta_masks():
    model, last = load(8).model, 8192 - 256
    sequence, window = Sequence(0, 8192, 0, 8192), (OPEN, 0)
    tiles = model.visited_tiles(last, 256, sequence, window)
    masked = [
        tiles[1] - model.unmasked_tiles(row, 128, sequence, window, *tiles)[1]
        for row in (last, last + 128)
    ]
    assert (tiles, masked) == ((0, 64), [2, 1])
    assert "a CTA masks 2 of up to 64 key tiles" in TEXT
    assert model.visited_tiles(0, 256, sequence, window) == (0, 2)
    assert "with 8192 tokens the last CTA visits 64 key tiles and the first 2 (D)" in TEXT
    assert "two key tiles have a mask, for three of their four query tiles" in TEXT


@pytest.mark.parametrize("part", load(8).parts)
def test_the_page_says_how_much_a_part_changes(part, tmp_path):
    copies = []
    for number in (7, 8):
        copies.append(tmp_path / str(number))
        ignored = shutil.ignore_patterns("model.py", "__*__")
        shutil.copytree(stage_folder(number) / part, copies[-1], ignore=ignored)
    stats = stage_diff_stats(*copies)
    assert re.search(rf"`{part}` (by )?{stats.added} and {stats.removed}( lines)?[,\s]", TEXT)


def test_the_page_says_how_the_pair_divides_its_registers():
    before, now = (load(number).part("backward_2cta").config.REGISTERS for number in (7, 8))
    assert f"`COMPUTE` gets {now['compute']} a thread instead of {before['compute']}" in TEXT
    assert f"REDUCE ({now['reduce']}, not {before['reduce']})" in TEXT
    assert f"the other roles ({now['other']}, not {before['other']})" in TEXT
    for name in ("", "preprocess", "backward_1cta", "postprocess"):
        sources = [load(number).part(name) if name else load(number) for number in (7, 8)]
        for head_dim in sources[0].config.ENVELOPE.head_dims:
            roles = [
                [(role.name, role.registers) for role in source.config.plan(head_dim).roles]
                for source in sources
            ]
            assert roles[0] == roles[1]
