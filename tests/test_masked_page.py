# SPDX-License-Identifier: Apache-2.0
"""Numbers on the page of stage 08: its command, its masked tiles, how large the step is."""

import re
import shutil

import pytest
from flash_ladder import load
from flash_ladder.common import derived
from flash_ladder.common.diff import stage_diff_stats
from flash_ladder.common.fences import stage_folder
from flash_ladder.common.model.sequences import OPEN, Sequence

PAGE = (load(8).folder / "README.md").read_text(encoding="utf-8")
TEXT = " ".join(PAGE.split())


def test_the_commands_beside_the_table_print_what_stands_behind_them(ladder):
    """How busy the SMs are and the TFLOP/s of the table's row, without a mask and with it."""
    lines = re.findall(r"^flash-ladder (model 8 .*?) +# (.*) \(D\)$", PAGE, re.M)
    rates = []
    for command, shown in lines:
        printed = " ".join(ladder(*command.split())[1].split())
        assert shown in printed.replace("(busy", "busy").replace("time)", "time")
        rates.append(re.search(r"^busy \d+% of the time, [\d.]+ ms, ([\d,]+) TFLOP/s$", shown)[1])
    full, causal = (rate.replace(",", "") for rate in rates)
    assert re.search(rf"\| 8192 \| {full} \(D\) \| {causal} \(D\) \|", TEXT)


def test_the_page_says_what_a_causal_mask_costs():
    """Three factors whose product is the share: ends and one tile, idle SMs, masked tiles."""
    on = derived.machine("B200")
    sizes = [derived.Sizes(8192, 64, 128, causal=mask) for mask in (False, True)]
    full, causal = (derived.simulate(load(8), on, size) for size in sizes)
    sequence, mask = Sequence(0, 8192, 0, 8192), (OPEN, 0)
    rows = range(0, 8192, 256)
    visited = [load(8).model.visited_tiles(row, 256, sequence, mask)[1] for row in rows]
    tile, ends = full.phases.per_tile, full.phases.prologue + full.phases.epilogue
    bare = sum(visited) / len(visited) * tile + ends  # a CTA, did masked tiles take no longer
    left = causal.time.flop / full.time.flop * (64 * tile + ends) / bare
    busy = [report.time.balance for report in (full, causal)]
    idle = left * busy[1] / busy[0]
    mean = busy[1] * on["sms"] * causal.time.cycles / causal.time.ctas
    assert idle * bare / mean == pytest.approx(causal.time.tflops / full.time.tflops)
    assert f"only query tile 1 sees: that leaves {left:.3f} (D)" in TEXT
    told = f"busy {busy[1]:.0%} of the time instead of {busy[0]:.0%}: {idle:.2f} is left (D)"
    assert told.replace("%", " %") in TEXT
    assert f"Masked tiles take longer, {round(mean - bare, -1):.0f} cycles a CTA (D)" in TEXT


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
