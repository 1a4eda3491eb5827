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
    cycles = round(tile)
    once = sum(round(part, -1) for part in (full.phases.prologue, full.phases.epilogue))
    shown = f"½ · (64 · {cycles} + {once:.0f}) / (33 · {cycles} + {once:.0f})"
    assert sum(visited) / len(visited) == 33 and len(visited) == 32
    assert (64 * cycles + once) / (33 * cycles + once) / 2 == pytest.approx(left, abs=5e-4)
    assert f"That leaves {left:.3f} (D: {shown}, with {cycles} cycles a key tile)" in TEXT
    told = f"busy {busy[1]:.0%} of the time instead of {busy[0]:.0%}: {idle:.2f} is left (D)"
    assert told.replace("%", " %") in TEXT
    assert f"Masked tiles take longer, {round(mean - bare, -1):.0f} cycles a CTA (D)" in TEXT
    balanced = causal.time.tflops / full.time.tflops * busy[0] / busy[1]
    assert f"the second, without which the share would be {balanced:.2f} (D)" in TEXT


def test_one_of_a_causal_ctas_key_tiles_is_hidden():
    """Half of it the tile that only query tile 1 sees, half the upper halves of the diagonals."""
    window, sequence = (OPEN, 0), Sequence(0, 1024, 0, 1024)
    unseen = load(8).model.unseen
    of_tile = lambda row, key: unseen(key, row, (128, 128), sequence, window).sum().item()
    for first in range(0, 1024, 256):
        tiles = load(8).model.visited_tiles(first, 256, sequence, window)
        hidden = [[of_tile(row, 128 * n) for n in range(*tiles)] for row in (first, first + 128)]
        diagonal = 128 * 127 // 2
        assert hidden[0] == [0] * (tiles[1] - 2) + [diagonal, 128 * 128]
        assert hidden[1] == [0] * (tiles[1] - 1) + [diagonal]
    words = "One of the 33 is hidden: half of it is the tile that only query tile 1 sees, half the"
    assert words in TEXT


def test_the_page_says_what_a_mask_costs_a_tile():
    cycles = load(8).model.SLOTS_MASK * 128 * 128 / derived.machine("B200")["alu"]
    assert f"with {cycles:.0f} cycles more of the ALU a query tile (D: 4 · 128² operations" in TEXT


def test_the_page_says_how_much_denormals_added_up_to():
    """As the model did: exp2(-inf) of an emulated exponential was 2**-127."""
    emulated = 2 * sum(load(8).config.EMULATED[128])
    digits = f"{emulated * 2.0**-127:.1e}".split("e")
    assert f"{digits[0]} · 10^−{-int(digits[1])} a key tile (D: {emulated} · 2^−127)" in TEXT
    assert f"V's rows in the {emulated} emulated columns" in TEXT


def test_the_page_says_how_rows_are_counted_twice():
    """Row r of a sequence is x = s - len + r, y = begin + len: element x + y - s of the tensor."""
    found = re.search(r"Let s = (\d+), and rows 0 to (\d+) be a sequence: y = (\d+)", TEXT)
    rows, last, end = map(int, found.groups())
    x = rows - (last + 1)
    assert end == last + 1 and x + end - rows == 0
    told = f"and row 0 is x = {x}. Row {end}, the next sequence's first, would be x = {rows},"
    assert told in TEXT
    cu_seqlens = list(map(int, re.search(r"tensor\(\[(.*?)\]", PAGE)[1].split(",")))
    begin, end = cu_seqlens[-2:]
    x = cu_seqlens[-1] - (end - begin)
    assert x + end - rows == begin and cu_seqlens[-1] == rows
    shown = f"x = {rows} − {end - begin} = {x}: row {x} + {end} − {rows} = {begin}"
    assert f"y = {end} and {shown}" in TEXT


def test_the_page_says_what_stands_for_an_open_side():
    assert f"For the kernel ∞ is 2^{OPEN.bit_length() - 1}," in TEXT and OPEN.bit_count() == 1


def test_the_page_quotes_the_branch_of_the_kernel():
    branch = re.search(r"called under `(if .*?)`", TEXT)[1]
    source = (load(8).folder / "kernel.py").read_text(encoding="utf-8")
    assert f"    {branch}\n        by_role(\n" in source


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
    assert "two key tiles have a mask, in three of the four (query tile, key tile) pairs" in TEXT


def test_the_page_says_which_rows_see_nothing():
    """Queries and keys of its first question, and those with which CTA 0 visits no tile."""
    model, window = load(8).model, (OPEN, 0)
    assert model.visited_tiles(0, 256, Sequence(0, 300, 0, 200), window) == (0, 2)
    assert model.visible_keys(99, Sequence(0, 300, 0, 200), window)[1] == -1
    assert model.visible_keys(255, Sequence(0, 300, 0, 200), window)[1] == 155
    assert model.visited_tiles(0, 256, Sequence(0, 500, 0, 200), window) == (0, 0)
    assert model.visible_keys(255, Sequence(0, 500, 0, 200), window)[1] == -45
    assert "rows 0 to 99" in TEXT and "see keys 0 to 155" in TEXT and "255, stands at −45" in TEXT


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
    told = f"`COMPUTE` gets {now['compute']} registers a thread instead of {before['compute']}"
    given = {before[role] - now[role] for role in ("reduce", "other")}
    assert told in TEXT and len(given) == 1
    assert f"REDUCE and the other roles give up {given.pop()} each (D)" in TEXT
    for name in ("", "preprocess", "backward_1cta", "postprocess"):
        sources = [load(number).part(name) if name else load(number) for number in (7, 8)]
        for head_dim in sources[0].config.ENVELOPE.head_dims:
            roles = [
                [(role.name, role.registers) for role in source.config.plan(head_dim).roles]
                for source in sources
            ]
            assert roles[0] == roles[1]
