# SPDX-License-Identifier: Apache-2.0
"""Stages 05 to 08, compiled: bounds they were built for, numbers of their pages and models."""

import functools
import json
import re
from pathlib import Path

import pytest
from flash_ladder import load
from flash_ladder.common import derived
from flash_ladder.common.compile import compile_stage
from flash_ladder.common.contract import read_kernel
from flash_ladder.common.model import B200
from flash_ladder.common.sass import MissingTool, SassReport
from flash_ladder.common.sass_isa import tmem_registers
from flash_ladder.common.sass_loops import inclusive
from flash_ladder.common.sass_model import p_latency, replay, softmax_loop, steady_loop

ROOT = Path(__file__).parent.parent
PTXAS = "V12.9.83"  # the assembler that the pages name
BOUNDS = {  # by head dim: of a query tile and a key tile
    128: {
        "mufu": 840,
        "slots": 4.3,
        "p_first": 1035,
        "p_all": 1285,
        "skipped": 10,
        "ceiling": 0.99,
    },
    64: {"mufu": 744, "slots": 4.8, "p_first": 1035, "p_all": 1285, "skipped": 10, "ceiling": 0.69},
}
ROWS = {  # of the tables on the pages
    "softmax loop, slots a score": "slots",
    "MUFU cycles": "mufu",
    "FMA cycles, softmax alone": "fma",
    "tensor core cycles": "tensor",
    "ceiling of the tensor core": "ceiling",
    "3/4 of P, one warp": "p_first",
    "all of P, one warp": "p_all",
    "two warps of a sub-partition, a tile": "two_warps",
    "correction, slots, O skipped": "skipped",
    "correction, slots, O rescaled": "rescaled",
}


@functools.cache
def compiled(number: int, head_dim: int, name: str = "", **other: str) -> SassReport:
    """Machine code of a stage or part, bf16, sm_100a, or `other` dtype or arch; skips without the
    page's assembler."""
    kernel = load(number).part(name) if name else load(number)
    options = {"dtype": "bfloat16", **other}
    try:
        _, found = read_kernel(compile_stage(kernel, head_dim=head_dim, **options))
    except MissingTool as missing:
        pytest.skip(str(missing))
    if found.resources.ptxas != PTXAS:
        pytest.skip(f"the pages are of ptxas {PTXAS}; here is {found.resources.ptxas}")
    return found


def facts(number: int, head_dim: int) -> dict[str, float]:
    """What the compiled forward shows."""
    found = compiled(number, head_dim)
    model, cycles = found.model, found.model.cycles
    return {
        "slots": model.slots_per_element,
        "mufu": cycles["softmax_mufu"],
        "fma": cycles["softmax_fma"],
        "tensor": cycles["tensor"],
        "ceiling": model.ceiling,
        "p_first": model.p_latency[0],
        "p_all": model.p_latency[1],
        "two_warps": model.replay_two_warps,
        "skipped": cycles["correction_issue_min"],
        "rescaled": cycles["correction_issue_max"],
    }


@pytest.mark.parametrize("head_dim", BOUNDS)
@pytest.mark.parametrize("number", [5, 6])
def test_the_stages_keep_their_bounds(dsl, number, head_dim):
    found, bounds = facts(number, head_dim), dict(BOUNDS[head_dim])
    assert found["ceiling"] >= bounds.pop("ceiling")
    if number == 5:  # rescales O each time
        del bounds["skipped"]
    assert all(found[name] <= bound for name, bound in bounds.items()), found


@pytest.mark.parametrize("number", [5, 6])
def test_the_page_shows_what_the_code_shows(dsl, number):
    """Every cell of the tables that is a fact of stages 04 to 06."""
    page, compared = (load(number).folder / "README.md").read_text(encoding="utf-8"), 0
    head = re.search(rf"^\|[^|]*\| 0{number - 1}, d 128 \|.*$", page, re.M)
    columns = [(int(s), int(d)) for s, d in re.findall(r"(0\d), d (\d+)", head[0])]
    for line in page[head.end() :].split("\n\n")[0].splitlines():
        label, *cells = (cell.strip() for cell in line.strip("|").split("|"))
        if label in ROWS:
            for (stage, head_dim), cell in zip(columns, cells):
                if cell != "–":
                    wanted = facts(stage, head_dim)[ROWS[label]]
                    decimals = len(cell.partition(".")[2])
                    assert float(cell) == pytest.approx(wanted, abs=0.51 * 10.0**-decimals), line
                    compared += 1
    assert compared >= 24


def test_page_05_says_where_its_prediction_fails(dsl):
    """Times of three quarters of P at head dim 128 for another dtype and another arch."""
    text = " ".join((load(5).folder / "README.md").read_text(encoding="utf-8").split())
    others = {"dtype": "float16"}, {"arch": "sm_103a"}
    late = [compiled(5, 128, **other).model.p_latency[0] for other in others]
    told = "In fp16 three quarters take {:.0f}, for `sm_103a` {:.0f}, beyond the bound of"
    told = f"{told.format(*late)} {BOUNDS[128]['p_first']} (D)"
    assert min(late) > BOUNDS[128]["p_first"] and told in text
    rounds = [512 + time + 512 for time in late]  # S, three quarters of P, PV
    told = f"(with {late[0]:.0f} it is {rounds[0]:.0f}, with {late[1]:.0f} {rounds[1]:.0f}: beyond)"
    assert min(rounds) > 2048 and told in text
    assert "Prediction (i) holds only in bf16 on `sm_100a`:" in text


def _page_05() -> str:
    return " ".join((load(5).folder / "README.md").read_text(encoding="utf-8").split())


def _copies(found: SassReport) -> list:
    """The loops of SOFTMAX0 and SOFTMAX1, that of fewer instructions first."""
    loops = [row for row in found.kernel.loops if row.counts["EX2"]]
    assert len(loops) == 2
    return sorted(loops, key=lambda loop: len(loop.instructions))


def test_page_05_says_what_both_copies_of_the_loop_take(dsl):
    """Of bf16 at head dim 128; the table has the one that the report takes, of fewer instructions:
    that in which P comes later, but two warps take less."""
    found = compiled(5, 128)
    loops = _copies(found)
    assert loops[0] is softmax_loop(found.kernel)
    (table, other), two = [p_latency(loop) for loop in loops], replay(loops[1].instructions, 2)
    assert len(loops[0].instructions) < len(loops[1].instructions)
    assert table == found.model.p_latency and all(a > b for a, b in zip(table, other))
    assert two > found.model.replay_two_warps
    assert all(time <= BOUNDS[128][name] for time, name in zip(table, ("p_first", "p_all")))
    told = "in the other P takes {} and {} cycles, and two warps {:.0f} (D)"
    assert f"of fewer instructions; {told.format(*other, two)}" in _page_05()
    assert "three quarters of P take {} cycles, all of it {}.".format(*table) in _page_05()


def test_page_05_says_what_an_emulated_exponential_costs(dsl):
    """From the counts of the loops of stages 04 and 05; 43 of 128 is where slots and MUFU meet."""
    before, after = (compiled(number, 128).model for number in (4, 5))
    n, cycles = after.exp2_emulated, (before.cycles, after.cycles)
    named = {name: [row[f"softmax_{name}"] for row in cycles] for name in ("mufu", "issue", "fma")}
    text = _page_05()
    for name, (a, b) in named.items():
        high, low = max(a, b), min(a, b)
        assert f"({high:.0f} − {low:.0f}) / {n}" in text, name
    mufu, slots, fma = (abs(a - b) / n for a, b in named.values())
    told = "spares the MUFU {:.0f} cycles. It adds {:.1f} issue slots and {:.0f} cycles of the FMA"
    assert told.format(mufu, slots, fma) in text
    a, b = (model.slots_per_element for model in (before, after))
    assert named["issue"] == [128 * a, 128 * b] and f"({b:.2f} and {a:.2f} a score, times" in text
    issue = before.cycles["issue_all_max"]
    issue_64 = compiled(4, 64).model.cycles["issue_all_max"]
    pipe = before.cycles["softmax_fma"] + 128  # CORRECTION multiplies 128 columns of O
    told = (
        f"Without emulation a tile has {issue} issue slots and {pipe:.0f} cycles of the FMA pipe,"
    )
    assert f"{told} correction included (D)." in text
    assert f"At head dim 64 the {issue} slots are {issue_64}." in text
    level, level_64 = (
        round((named["mufu"][0] - total) / (mufu + round(slots, 1))) for total in (issue, issue_64)
    )
    assert f"level at about {level} of 128, at head dim 64 at about {level_64} (D: " in text
    assert (
        f"{issue} + {slots:.1f} · {level} ≈ {named['mufu'][0]:.0f} − {mufu:.0f} · {level})" in text
    )


def test_page_05_says_what_the_replay_leaves_of_the_gain(dsl):
    """Head dim 64: two warps replayed need more than the model's cycles of a tile."""
    tile = [derived.steady_cycles(load(number), B200, 64) / 2 for number in (4, 5)]
    two = compiled(5, 64).model.replay_two_warps
    told = f"In the replay, where two warps share a sub-partition, it takes {two:.0f}; if that is"
    told += f" right, it is at most {100 * (tile[0] / two - 1):.0f} % faster (D)"
    assert tile[1] < two and told in _page_05()


def test_page_05_says_when_o_is_rescaled(dsl):
    """Replayed: from the first load of S to `stats_full`, and a turn of four of CORRECTION."""
    found = compiled(5, 128)
    softmax = softmax_loop(found.kernel).instructions
    first = next(at for at, row in enumerate(softmax) if row.opcode.startswith("LDTM"))
    arrives = next(at for at, row in enumerate(softmax) if row.opcode.startswith("SYNCS.ARRIVE"))
    stats = replay(softmax[first : arrives + 1], 1)
    turns = replay(inclusive(found.kernel, steady_loop(found.kernel, "correction"), 1), 1)
    rescaled = round(turns / 4)  # unrolled by two, of two query tiles
    late, soon = (p_latency(loop)[0] for loop in _copies(found))
    told = f"`CORRECTION` needs {rescaled} more: in the replay O is rescaled in time, after 411 +"
    told += f" {rescaled} ="
    told += f" {411 + rescaled} cycles, before the {late} (other copy: {soon}) of 3/4 of P"
    assert stats == pytest.approx(411, abs=1.5) and told in _page_05()
    assert 411 + rescaled < soon < late


# ---- the backward --------------------------------------------------------------------------

BACKWARD = (("backward_2cta", 128), ("backward_1cta", 128), ("backward_1cta", 64))


OF_THE_BACKWARD = {  # of the tables on the pages of stage 07: what of the report it is
    "slots an element": lambda found: found.model.slots_per_element,
    "MMA warp, slots a tile": lambda found: found.model.cycles["mma_warp_issue"],
    "shared memory by the report": lambda found: found.model.cycles["smem"],
    "ceiling of the tensor core": lambda found: found.model.ceiling,
    "local memory accesses": lambda found: found.spill_instructions,
}
COLUMNS = {"pair, d 128": BACKWARD[0], "one CTA, d 128": BACKWARD[1], "one CTA, d 64": BACKWARD[2]}


def _same(cell: str, value: float) -> bool:
    """Whether a cell shows a value, rounded to its decimals."""
    decimals = len(cell.partition(".")[2])
    return float(cell) == pytest.approx(value, abs=0.51 * 10.0**-decimals)


SHOWN_07 = {  # page: the rows of its table
    "": OF_THE_BACKWARD.keys() - {"MMA warp, slots a tile"},
    "backward_2cta": OF_THE_BACKWARD.keys(),
}
PAGES_07 = {  # page: the columns of its table
    "": ("one CTA, d 128", "one CTA, d 64", "upstream, d 64"),
    "backward_2cta": ("pair, d 128", "upstream's pair", "one CTA, d 128"),
}


def _page_07(part: str) -> str:
    return (load(7).part(part).folder / "README.md").read_text(encoding="utf-8")


def _row(page: str, label: str) -> list[str]:
    """Cells of the one row of a page that begins with `label`."""
    (row,) = re.findall(rf"^\| ?{label} \|(.*)\|$", page, re.M)
    return [cell.strip() for cell in row.split("|")]


@pytest.mark.parametrize("part", PAGES_07)
def test_pages_07_show_what_the_code_of_the_backward_shows(dsl, part):
    """Every cell of our columns; upstream's kernels are not ours to compile."""
    page, compared = _page_07(part), 0
    assert f"| | {' | '.join(PAGES_07[part])} |" in page
    for label, value in OF_THE_BACKWARD.items():
        if label not in SHOWN_07[part]:
            continue
        for column, cell in zip(PAGES_07[part], _row(page, label), strict=True):
            if column in COLUMNS:
                name, head_dim = COLUMNS[column]
                assert _same(cell, value(compiled(7, head_dim, name))), (label, column)
                compared += 1
    assert compared == 2 * len(SHOWN_07[part])


def test_pages_07_say_what_issues(dsl):
    issued = OF_THE_BACKWARD["MMA warp, slots a tile"](compiled(7, 128, "backward_2cta"))
    page = " ".join(_page_07("backward_2cta").split())
    (cycles,) = re.findall(r"\| cycles \| (\d+) \|", page)
    assert f"The MMA warp issues for {issued:.0f} of the {cycles} cycles below (D)" in page
    assert f"| exponentials, cycles of the MUFU | {facts(6, 128)['mufu']:.0f} |" in _page_07("")
    assert "by the paper's count the ceiling is 0.95 (D: 2560 / 2688)" in page
    assert round(2560 / 2688, 2) == 0.95


UPSTREAM = json.loads((ROOT / "docs" / "data" / "upstream.json").read_text())["figures"]
OF_UPSTREAM = ("slots", "mma", "smem", "ceiling", "local")  # in the order of OF_THE_BACKWARD


def test_pages_show_upstreams_figures():
    """What the same report counted in upstream's kernels, which are not compiled here."""
    for part, at, d in (("", 2, 64), ("backward_2cta", 1, 128)):
        for label, name in zip(OF_THE_BACKWARD, OF_UPSTREAM):
            if label not in SHOWN_07[part]:
                continue
            cell = _row(_page_07(part), label)[at]
            assert float(cell) == UPSTREAM[f"backward, d {d}"][name], (part, label)
    slots = {name: row["slots"] for name, row in UPSTREAM.items()}
    wide, narrow = slots["backward, d 128"], slots["backward, d 64"]
    told = {
        "": f"own kernels, have {wide} at head dim 128, in a pair, and {narrow} at 64",
        "backward_2cta": f"upstream's has {wide}",
    }
    for part, words in told.items():
        assert f"{words} (D: counted" in " ".join(_page_07(part).split())
    page = (load(8).folder / "README.md").read_text(encoding="utf-8")
    assert f"upstream's causal kernel {slots['forward, causal, d 128']} (D)" in page
    for label, kind, d in (("pair", "backward", 128), ("one CTA", "backward", 64)):
        (row,) = re.findall(rf"^\| {label}, d {d} \|(.*)\|$", page, re.M)
        shown = [float(cell) for cell in row.split("|")[2:4]]
        assert shown == [slots[f"{kind}, d {d}"], slots[f"{kind}, causal, d {d}"]]


def test_page_08_shows_what_the_code_shows(dsl):
    """Slots of the loops that mask nothing, in stages 07 and 08."""
    page = (load(8).folder / "README.md").read_text(encoding="utf-8")
    for column, (name, head_dim) in COLUMNS.items():
        (row,) = re.findall(rf"^\| {column} \|(.*)\|$", page, re.M)
        for number, cell in zip((7, 8), row.split("|")):
            found = compiled(number, head_dim, name)
            assert _same(cell.strip(), found.model.slots_per_element), (column, number)
    mma = [
        compiled(number, 128, "backward_2cta").model.cycles["mma_warp_issue"] for number in (8, 7)
    ]
    text = " ".join(page.split())
    assert "the MMA warp takes {:.0f} slots a tile instead of {:.0f}:".format(*mma) in text
    more = [
        compiled(8, head_dim, "backward_1cta").model.slots_per_element
        / compiled(7, head_dim, "backward_1cta").model.slots_per_element
        for head_dim in (128, 64)
    ]
    told = "the loop has {:.0f} % more at head dim 128 and {:.0f} % more at 64 (D)"
    assert told.format(*(100 * ratio - 100 for ratio in more)) in text
    loops = [facts(number, 128)["slots"] for number in (7, 8)]
    assert "28 emulated | {:.2f} (D) | {:.2f} (D) |".format(*loops) in page


OTHER_SHARE = """
import conftest
from flash_ladder import load
from flash_ladder.common.compile import compile_stage
from flash_ladder.common.sass import report
stage = load({number})
assert 2 * sum(stage.config.EMULATED[128]) == 16
found = report(compile_stage(stage, dtype="bfloat16", head_dim=128).cubin, d_qk=128)
print(found.resources.ptxas, found.model.slots_per_element, found.spill_instructions)
"""


@pytest.mark.parametrize("number", [7, 8])
def test_with_16_emulated_exponentials_the_loop_is_as_light_as_page_08_says(
    dsl, number, copy_sources, run_python
):
    """At most 4.1 slots a score with masks; as many as without, within 1 %."""
    folder = copy_sources("other share")
    path = folder / "stages" / f"{number:02d}" / "config.py"
    text, old = path.read_text(), "128: (0, 4, 3, 7)"
    assert text.count(old) == 1
    path.write_text(text.replace(old, "128: (0, 2, 2, 4)"))
    ptxas, slots, spills = run_python(OTHER_SHARE.format(number=number), folder).split()
    if ptxas != PTXAS:
        pytest.skip(f"the pages are of ptxas {PTXAS}; here is {ptxas}")
    assert float(slots) <= 4.1 and spills == "0"
    page = (load(8).folder / "README.md").read_text(encoding="utf-8")
    (row,) = re.findall(r"^\| forward, d 128, 16 emulated \|(.*)\|$", page, re.M)
    assert _same(row.split("|")[number - 7].strip(), float(slots))


def _slots(loop, elements: int) -> dict[str, float]:
    """Issue slots for an element, before and after the wait for dP: the first behind all exp2."""
    codes = [instruction.opcode for instruction in loop.instructions]
    last = max(at for at, code in enumerate(codes) if code.startswith("MUFU.EX2"))
    wait = next(at for at in range(last, len(codes)) if "TRYWAIT" in codes[at])
    return {"SLOTS_P": wait / elements, "SLOTS_DS": (len(codes) - wait) / elements}


@pytest.mark.parametrize(("name", "head_dim"), BACKWARD)
@pytest.mark.parametrize("number", [7, 8])
def test_the_models_issue_what_the_compiled_backward_does(dsl, number, name, head_dim):
    """Slots of P, dS and dQ, within 1 %."""
    kernel, part = compiled(number, head_dim, name).kernel, load(number).part(name)
    whole = inclusive(kernel, steady_loop(kernel, "dq-reduce"), 1)
    found = _slots(softmax_loop(kernel), part.config.HALF)
    found["SLOTS_DQ"] = len(whole) / tmem_registers(whole, "LDTM")
    by_head_dim = lambda value: value[head_dim] if isinstance(value, dict) else value
    declared = {key: by_head_dim(getattr(part.model, key)) for key in found}
    assert declared == pytest.approx(found, rel=0.01)


@pytest.mark.parametrize(("name", "head_dim"), (("", 128), ("", 64), *BACKWARD))
def test_the_models_issue_what_a_compiled_mask_does(dsl, name, head_dim):
    """Slots of a score by which the loops that mask differ from the one without, within 4 %."""
    stage, kernel = load(8), compiled(8, head_dim, name).kernel
    part, plain = stage.part(name) if name else stage, softmax_loop(kernel)
    elements = part.config.HALF if name else part.config.TILE_N[head_dim]
    size = lambda loop: len(loop.instructions) / elements
    masked = [
        loop for loop in kernel.loops if loop.counts["EX2"] and size(loop) > 1.5 * size(plain)
    ]
    assert len(masked) == (2 if name else 4)  # before and behind; of both query tiles
    for loop in masked:
        assert part.model.SLOTS_MASK == pytest.approx(size(loop) - size(plain), rel=0.04)
