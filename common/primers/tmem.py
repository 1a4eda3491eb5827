# SPDX-License-Identifier: Apache-2.0
"""Tensor memory: who reaches which lanes, and what a kernel keeps in its columns. Runs: host."""

from __future__ import annotations

import flash_ladder

from ..model.tmem import LANES, QUARTER_LANES, QUARTERS
from ..plan import TMEM_COLUMNS, Plan, TmemRegion
from .svg import Board

STAGE, HEAD_DIM = 6, 128  # whose plan the primer shows
KINDS = {"S": "tmem", "dP": "tmem", "P": "exp", "dS": "exp"}  # colours; others are accumulators


def plan() -> Plan:
    """The plan whose map the primer shows."""
    return flash_ladder.load(STAGE).config.plan(HEAD_DIM)


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


def rows_of(plan: Plan) -> list[list[TmemRegion]]:
    """The regions of a plan in rows: one that shares columns with another lies below it."""
    rows: list[list[TmemRegion]] = []
    for region in plan.tmem:
        end = region.column + region.columns
        for row in rows:
            if all(
                end <= other.column or other.column + other.columns <= region.column
                for other in row
            ):
                row.append(region)
                break
        else:
            rows.append([region])
    return rows


def unused(plan: Plan) -> list[tuple[int, int]]:
    """(first column, columns) of what no region of a plan has."""
    found, at = [], 0
    for region in sorted(plan.tmem, key=lambda row: row.column):
        if region.column > at:
            found.append((at, region.column - at))
        at = max(at, region.column + region.columns)
    return [*found, (at, TMEM_COLUMNS - at)] if at < TMEM_COLUMNS else found


def draw_map(plan: Plan) -> Board:
    """The columns of a plan; below a region what shares its columns at another time.

    Colours: what an MMA accumulates over tiles, what threads read at each tile, what they write as
    an operand.
    """
    rows = rows_of(plan)
    board, scale = Board(30 + 34 * len(rows)), 350 / TMEM_COLUMNS
    for level, row in enumerate(rows):
        for region in row:
            kind = KINDS.get(region.name.rstrip("0123456789"), "mma")
            x, width = 4 + region.column * scale, region.columns * scale
            board.box(x, 26 + 34 * level, width, 30, kind, region.name, small=width < 40)
    for column, columns in unused(plan):
        board.box(4 + column * scale, 26, columns * scale, 30, "faint", "free", small=True)
    for column in range(0, TMEM_COLUMNS + 1, LANES):
        x, anchor = 4 + column * scale, "end" if column == TMEM_COLUMNS else "middle"
        board.text(max(x, 10), 16, str(column), anchor, small=True)
        board.line(x, 19, x, 25)
    return board
