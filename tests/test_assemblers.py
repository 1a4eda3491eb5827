# SPDX-License-Identifier: Apache-2.0
"""The same PTX by another assembler, and the table of docs/exp2.md. Runs: compile."""

import pathlib

import pytest
from flash_ladder import load
from flash_ladder.common import contract, sass
from flash_ladder.common.compile import compile_stage

PAGE = pathlib.Path(__file__).parent.parent / "docs" / "exp2.md"
NAMES = {"V12.9.83": "12.9.83", "V13.0.88": "13.0.88, 13.4.59", "V13.4.59": "13.0.88, 13.4.59"}


def row(number: int, head_dim: int, ptxas: str) -> tuple[str, str]:
    """(version, line of the page's table)."""
    kernel = compile_stage(load(number), head_dim=head_dim)
    try:
        report = contract.read_kernel(kernel, ptxas)[1]
    except sass.MissingTool as missing:
        pytest.skip(str(missing))
    model, version = report.model, report.resources.ptxas
    skipped = f"{model.cycles['correction_issue_min']:g}" if number == 6 else "–"
    cells = [f"{number:02d}", head_dim, NAMES.get(version), f"{model.slots_per_element:.2f}"]
    cells += [f"{model.cycles['softmax_mufu']:g}", *model.p_latency]
    cells += [f"{model.replay_two_warps:.0f}", skipped]
    cells += [f"{model.cycles['correction_issue_max']:g}", model.live_registers]
    return version, "| " + " | ".join(map(str, cells)) + " |"


@pytest.mark.parametrize("ptxas", ["", "ptxas"])
@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("number", [5, 6])
def test_the_page_shows_what_an_assembler_makes(dsl, number, head_dim, ptxas):
    version, line = row(number, head_dim, ptxas)
    if version not in NAMES:
        pytest.skip(f"the page has no {version}")
    assert line in PAGE.read_text(encoding="utf-8").splitlines(), line


def test_the_assembler_named_is_the_one_that_runs(dsl, tmp_path):
    kernel = compile_stage(load(1))
    called = tmp_path / "ptxas"
    called.write_text("#!/bin/sh\necho these words; exit 3\n")
    called.chmod(0o755)
    with pytest.raises(sass.ToolFailed, match="failed with code 3: these words"):
        contract.read_kernel(kernel, str(called))
