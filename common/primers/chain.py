# SPDX-License-Identifier: Apache-2.0
"""How a kernel is verified without its GPU, as a chain of steps. Runs: host."""

from __future__ import annotations

from .. import topics
from .svg import Board

LEFT, WIDE, ROW = 8, 168, 44  # of the main chain
STEPS = ("model", "facts", "execution", "log", "conformance", "evidence")


def labels() -> dict[str, str]:
    """What each box says, with its count."""
    n = {name: topics.number(value) for name, value in topics.totals().items()}
    return {
        "model": "SM model\nraces, deadlocks, numbers",
        "facts": f"facts of compiled code\n{n['facts']} declared",
        "execution": f"execution on Hopper\n{n['cases']} problems",
        "log": f"executed log\n{n['records']} records",
        "conformance": f"conformance\n{n['steps']} steps",
        "evidence": f"evidence.json\nhash of {n['kernels']} kernels",
        "mutation": f"mutation\n{n['sites']} statements",
        "adversaries": f"adversaries\n{n['adversary_cases']} problems",
        "sanitizer": f"compute-sanitizer\n{n['sanitized']} kernels",
    }


def draw() -> Board:
    """The chain from model to evidence on the left, what tests its links on the right."""
    board, text = Board(2 + len(STEPS) * ROW), labels()
    kinds = {"model": "exp", "facts": "smem", "evidence": "tmem"}
    for row, name in enumerate(STEPS):
        y = 4 + ROW * row
        board.box(LEFT, y, WIDE, 32, kinds.get(name, "mma"), text[name], small=True)
        if row:
            board.arrow(LEFT + WIDE / 2, y - 12, LEFT + WIDE / 2, y - 1)
    for name, row in (("adversaries", 1), ("mutation", 3), ("sanitizer", 2)):
        y = 4 + ROW * row
        board.box(228, y, 124, 32, "plain", text[name], small=True)
    right = LEFT + WIDE
    board.arrow(228, 20 + ROW, right + 1, 16 + 2 * ROW)
    board.arrow(228, 20 + 2 * ROW, right + 1, 20 + 2 * ROW)
    board.arrow(228, 16 + 3 * ROW, right + 1, 24 + 2 * ROW)
    board.arrow(228, 20 + 3 * ROW, right + 1, 20 + 3 * ROW)
    board.line(right, 20 + 4 * ROW, right + 26, 20 + 4 * ROW, "exp")
    board.line(right + 26, 20 + 4 * ROW, right + 26, 20, "exp")
    board.arrow(right + 26, 20, right + 1, 20, "exp")
    board.text(right + 32, 24, "must be equal", small=True)
    return board
