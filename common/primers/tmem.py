# SPDX-License-Identifier: Apache-2.0
"""Tensor memory: who reaches which lanes, and what a kernel keeps in its columns. Runs: host."""

from __future__ import annotations

import flash_ladder

from ..model.tmem import LANES, QUARTER_LANES, QUARTERS
from ..plan import TMEM_COLUMNS, TmemRegion
from .svg import Board

STAGE, HEAD_DIM = 6, 128  # whose plan the map shows


def regions() -> tuple[TmemRegion, ...]:
    """Tensor memory of the plan that the map shows."""
    return flash_ladder.load(STAGE).config.plan(HEAD_DIM).tmem


def draw_lanes() -> Board:
    """The array of lanes and columns; beside each quarter the warps that reach it."""
    board = Board(186)
    board.text(120, 14, f"{TMEM_COLUMNS} columns of 32 bits")
    board.arrow(250, 10, 296, 10)
    for quarter in range(QUARTERS):
        y = 24 + 38 * quarter
        first = quarter * QUARTER_LANES
        board.box(120, y, 180, 36, "tmem", f"lanes {first} to {first + QUARTER_LANES - 1}")
        board.box(4, y + 6, 88, 24, "plain", f"warps {quarter}, {quarter + 4}, …")
        board.arrow(92, y + 14, 118, y + 14)
        board.arrow(118, y + 24, 94, y + 24)
    board.box(316, 24, 40, 150, "mma", "tensor\ncore", small=True)
    board.arrow(300, 99, 314, 99)
    board.arrow(314, 111, 302, 111)
    return board


def draw_map() -> Board:
    """The columns of the map: what does not lie in another region above, what does below."""
    board, scale = Board(118), 350 / TMEM_COLUMNS
    rows = regions()
    hosts = {name for row in rows for name in row.aliases}
    for row in rows:
        y = 60 if row.name in hosts else 26
        kind = "mma" if row.name[0] == "O" else "exp" if row.name[0] == "P" else "tmem"
        board.box(4 + row.column * scale, y, row.columns * scale, 30, kind, row.name)
    for column in range(0, TMEM_COLUMNS + 1, LANES):
        x, anchor = 4 + column * scale, "end" if column == TMEM_COLUMNS else "middle"
        board.text(max(x, 10), 16, str(column), anchor, small=True)
        board.line(x, 19, x, 25)
    board.text(4, 108, "S, then P in half of its columns; O stays: 32-bit columns", small=True)
    return board
