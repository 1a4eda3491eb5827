# SPDX-License-Identifier: Apache-2.0
"""The ladder's numbers are those of the stages' pages, and come from the kernels they name."""

from pathlib import Path

import flash_ladder
import pytest
from flash_ladder.common import rungs


def page(number: int, part: str = "") -> str:
    return (flash_ladder.load(number).part(part).folder / "README.md").read_text(encoding="utf-8")


@pytest.mark.parametrize("head_dim", [128, 64])
def test_cycles_are_those_of_the_page_of_stage_04(head_dim):
    shown = [round(rungs.rung(number, "", head_dim).cycles) for number in (3, 4)]
    assert f"\n| head dim {head_dim} | {shown[0]} | {shown[1]} |" in page(4)


def test_cycles_are_those_of_the_pages_of_the_backward():
    one, one_64, pair = rungs.rungs(7)
    assert [rung.kernel.tag for rung in (one, pair)] == ["07/backward_1cta", "07/backward_2cta"]
    assert f"| cycles | {one.cycles:.0f} | {one_64.cycles:.0f} |" in page(7)
    assert f"| cycles | {pair.cycles:.0f} | {one.cycles:.0f} |" in page(7, "backward_2cta")


def test_the_start_page_says_what_04_costs_and_06_saves():
    """At head dim 64 in the model: 04 more than 03, 06 less than 05 by under half a percent."""
    three, four, five, six = (rungs.rung(number, "", 64).cycles for number in (3, 4, 5, 6))
    index = Path(__file__).parent.parent / "docs" / "index.md"
    text = " ".join(index.read_text(encoding="utf-8").split())
    assert f"04 costs {100 * (four / three - 1):.0f} % at head dim 64 in the model (D)" in text
    assert "06 saves tensor-memory traffic, not cycles" in text
    assert 0 <= 1 - six / five < 0.005 < 1 - five / four


@pytest.mark.parametrize("number", flash_ladder.built())
def test_every_rung_is_right(number):
    found = rungs.rungs(number)
    assert found and all(verdict.ok for rung in found for verdict in rung.verdicts)
    assert [rung.kernel.number for rung in found] == [number] * len(found)


def test_forward_rungs_have_the_same_inputs():
    """Same-precision torch errs by the same on all of them."""
    found = [rungs.rung(number, "", 128) for number in flash_ladder.built()]
    assert len({rung.verdicts[0]["rms_abs"].baseline for rung in found}) == 1
