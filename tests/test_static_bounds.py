# SPDX-License-Identifier: Apache-2.0
"""Stages 05 and 06, compiled: the bounds they were built for, the numbers on their pages."""

import functools
import re

import pytest
from flash_ladder import load
from flash_ladder.common.compile import compile_stage
from flash_ladder.common.sass import MissingTool, report

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
    "FMA cycles": "fma",
    "tensor core cycles": "tensor",
    "ceiling of the tensor core": "ceiling",
    "3/4 of P, one warp": "p_first",
    "all of P, one warp": "p_all",
    "two warps of a sub-partition, a tile": "two_warps",
    "correction, slots, O skipped": "skipped",
    "correction, slots, O rescaled": "rescaled",
}


@functools.cache
def facts(number: int, head_dim: int) -> dict[str, float]:
    """What the compiled kernel shows, bf16, sm_100a; skips without the page's assembler."""
    try:
        kernel = compile_stage(load(number), dtype="bfloat16", head_dim=head_dim)
        found = report(kernel.cubin, d_qk=head_dim)
    except MissingTool as missing:
        pytest.skip(str(missing))
    if found.resources.ptxas != PTXAS:
        pytest.skip(f"the pages are of ptxas {PTXAS}; here is {found.resources.ptxas}")
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
