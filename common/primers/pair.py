# SPDX-License-Identifier: Apache-2.0
"""Two CTAs with one MMA: who holds what, and the swap of dS. Runs: host."""

from __future__ import annotations

import flash_ladder

from ..hopper.layouts import d_position
from ..roofline import OPERAND_BYTES, PIECE, backward
from .svg import Board

STAGE, PART, HEAD_DIM = 7, "backward_2cta", 128
MMA_M, MMA_N, MMA_K = 2 * PIECE, PIECE, 16


def plan():
    """The plan of the pair's kernel."""
    return flash_ladder.load(STAGE).part(PART).config.plan(HEAD_DIM)


def operand_bytes(pair: bool) -> int:
    """Bytes of shared memory that a CTA reads for one MMA with K = 16, both operands there."""
    b_rows = MMA_N // 2 if pair else MMA_N
    return (PIECE + b_rows) * MMA_K * OPERAND_BYTES


def draw_mma() -> Board:
    """A, B and the result of a 256 x 128 MMA over the two CTAs."""
    board = Board(206)
    for cta in range(2):
        x, rows = 4 + 190 * cta, MMA_M // 2
        first, half = cta * rows, MMA_N // 2
        board.box(x, 2, 162, 202)
        board.text(x + 8, 17, f"CTA {cta}" + (", the leader" if cta == 0 else ""))
        board.box(x + 8, 26, 146, 40, "smem", f"A: rows {first} to {first + rows - 1}")
        label = f"B: rows {cta * half} to {(cta + 1) * half - 1}"
        board.box(x + 8, 72, 146, 28, "smem", label)
        board.box(x + 8, 114, 146, 24, "mma", "tensor core")
        board.arrow(x + 81, 100, x + 81, 112)
        rank, lane, _ = d_position(MMA_M, MMA_N, 2, first, 0)
        assert (rank, lane) == (cta, 0)
        label = f"result: rows {first} to {first + rows - 1}\nin lanes 0 to {rows - 1}"
        board.box(x + 8, 152, 146, 44, "tmem", label)
        board.arrow(x + 81, 138, x + 81, 150)
    board.arrow(158, 88, 200, 122)
    board.arrow(202, 88, 160, 122)
    return board


def draw_swap() -> Board:
    """dS of both CTAs by halves of the queries, before and after the swap."""
    board = Board(192)
    board.text(4, 14, "dS as computed: all queries, own keys")
    board.text(4, 184, "dS as dQ needs it: own queries, all keys")
    for cta in range(2):
        x, kind = 30 + 180 * cta, ("mma", "exp")[cta]
        for half in range(2):
            y = 22 + 26 * half
            board.box(x, y, 110, 26, kind, f"queries {64 * half} to {64 * half + 63}", small=True)
        board.text(x + 116, 52, f"CTA {cta}", small=True)
        for part in range(2):
            colour = ("mma", "exp")[part]
            label = f"keys of {part}"
            board.box(x + 55 * part, 112, 55, 34, colour, label, small=True)
        queries = f"queries {64 * cta} to {64 * cta + 63}"
        board.text(x + 55, 160, queries, "middle", small=True)
    board.arrow(142, 64, 206, 110, "mma")
    board.arrow(208, 36, 114, 110, "exp")
    return board


def shared_memory_rows() -> list[tuple[str, float, float]]:
    """(purpose, cycles of one CTA alone, cycles of a CTA of a pair) of a backward tile."""
    alone, paired = backward().smem_parts, backward(pair=True).smem_parts
    return [(name, alone.get(name, 0.0), cycles) for name, cycles in paired.items()]
