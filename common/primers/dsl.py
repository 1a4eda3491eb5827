# SPDX-License-Identifier: Apache-2.0
"""Names and times of CuTe DSL code. Runs: host."""

from __future__ import annotations

from .svg import Board

NAME = (  # part of the example tSrQ, what it says, kind
    ("t", "a partition", "plain"),
    ("S", "of the product\nthat yields S", "mma"),
    ("r", "in registers\n(here: descriptors)", "exp"),
    ("Q", "of Q", "smem"),
)
TIMES = (  # heading, lines, kind
    ("host", "config.py, checks,\nshapes, launch:\nordinary Python", "plain"),
    ("trace time", "Python runs once:\nif, for, tuples,\nlayouts vanish", "smem"),
    ("run time", "what remains:\nInt32, Float32,\nloads, MMAs, waits", "mma"),
)


def draw_name() -> Board:
    """The parts of tSrQ."""
    board = Board(84)
    for number, (part, says, kind) in enumerate(NAME):
        x = 4 + 89 * number
        board.box(x, 4, 85, 30, kind, part)
        for row, line in enumerate(says.split("\n")):
            board.text(x + 42, 52 + 13 * row, line, "middle", small=True)
    return board


def draw_times() -> Board:
    """Host, trace time, run time."""
    board = Board(92)
    for number, (heading, says, kind) in enumerate(TIMES):
        x = 4 + 122 * number
        board.text(x + 54, 14, heading, "middle")
        board.box(x, 22, 108, 62, kind, says, small=True)
        if number:
            board.arrow(x - 13, 53, x - 1, 53)
    return board
