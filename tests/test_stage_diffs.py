# SPDX-License-Identifier: Apache-2.0
"""How large the step to each stage is, and that it stays as large as its page says.

A step should have at most 150 changed lines in 5 files, 15 % of them moved. Where one idea needs
more, BUDGETS says how much and why. `model.py` restates the schedule and is not counted.
"""

from itertools import pairwise
from typing import NamedTuple

import flash_ladder
import pytest
from flash_ladder.common.diff import DiffStats, stage_diff_stats
from flash_ladder.common.fences import stage_folder

WRITTEN = [n for n in flash_ladder.STAGES if (stage_folder(n) / "kernel.py").is_file()]
STEPS = list(pairwise(WRITTEN))


class Budget(NamedTuple):
    """What a step may change: lines, files, share of lines that only moved; why it is that much."""

    changed: int = 150
    files: int = 5
    moved_share: float = 0.15
    reason: str = "the target of every step"


BUDGETS = {
    (1, 2): Budget(
        460, 7, reason="tensor memory for registers, MMAs for FMA loops, TMA for thread copies"
    ),
    (2, 3): Budget(355, 6, reason="one sequence becomes four roles with a loop and barriers each"),
    (3, 4): Budget(125, 5, 0.17, "normalising and LSE move to the new warpgroup as they are"),
    (7, 8): Budget(375, 9, reason="masks and lengths concern every role that knows a tile"),
    (5, 6): Budget(20, 5, 0.32, "three of few lines move into the branch that a vote takes"),
}


def measure(a: int, b: int) -> DiffStats:
    """The size of a step, models left out."""
    return stage_diff_stats(stage_folder(a), stage_folder(b), without=("model.py",))


@pytest.mark.parametrize("step", STEPS, ids=lambda step: f"{step[0]:02d}-{step[1]:02d}")
def test_step_stays_within_its_budget(step):
    stats, budget = measure(*step), BUDGETS.get(step, Budget())
    files, moved = len(stats.files), f"{stats.moved_share:.1%} moved"
    size = f"+{stats.added} -{stats.removed}, {files} files, {moved}"
    print(f"\n{step[0]:02d} -> {step[1]:02d}: {size}; budget {budget}")
    assert stats.changed <= budget.changed, f"{size}: {budget.reason}"
    assert len(stats.files) <= budget.files, f"{stats.files}: {budget.reason}"
    assert round(stats.moved_share, 2) <= budget.moved_share, f"{size}: {budget.reason}"


def test_a_larger_budget_has_a_reason_and_is_used():
    assert set(BUDGETS) <= set(STEPS)
    for step, budget in BUDGETS.items():
        stats, target = measure(*step), Budget()
        assert budget.reason != target.reason
        assert (
            stats.changed > target.changed
            or len(stats.files) > target.files
            or stats.moved_share > target.moved_share
        ), f"{step} fits the target: no budget of its own"


@pytest.mark.parametrize("step", STEPS, ids=lambda step: f"{step[0]:02d}-{step[1]:02d}")
def test_page_says_how_large_the_step_is(step):
    stats = measure(*step)
    page = (stage_folder(step[1]) / "README.md").read_text(encoding="utf-8")
    assert f"{stats.added} lines come, {stats.removed} go" in " ".join(page.split())
