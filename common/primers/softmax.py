# SPDX-License-Identifier: Apache-2.0
"""One row of attention with an online softmax, in float64. Runs: host.

docs/js/online-softmax.js computes the same in the browser; tests/test_primers.py compares the two,
and both with the oracle.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import flash_ladder

from .svg import Board

KEYS = 4  # of a tile of the example; a kernel's has 64 or 128
STAGE = 6  # whose threshold the stepper starts with
MAX_THRESHOLD = 16  # of the slider, log2
_USUAL = (
    *(1.2, -0.7, 2.1, 0.4),
    *(0.3, 1.8, -1.5, 0.9),
    *(2.9, -0.2, 1.1, 0.6),
    *(-0.9, 0.8, 1.4, 2.2),
    *(0.1, 12.4, 1.0, -1.1),
    *(1.7, 0.5, 3.0, -0.4),
)
ROWS = {  # scores in log2 units, in the order in which they come
    "one large score": _USUAL,
    "climbing by 3 a tile": tuple(i % KEYS / 2 + 3 * (i // KEYS) for i in range(len(_USUAL))),
    "largest tile first": tuple(9 - i % KEYS / 2 - 1.5 * (i // KEYS) for i in range(len(_USUAL))),
}
VALUES = tuple((7 * i % 11 - 5) / 4 for i in range(len(_USUAL)))  # a value row of one element


@dataclass(frozen=True)
class State:
    """What a row keeps between tiles, and what the last tile did to it.

    m, reference in log2 units; l, sum of exponentials; o, weighted sum of values, both relative to
    m; alpha, factor that the earlier l and o were multiplied by; top, largest score so far.
    """

    m: float = -math.inf
    l: float = 0.0
    o: float = 0.0
    alpha: float = 1.0
    top: float = -math.inf
    largest_p: float = 0.0


def step(state: State, scores: Sequence[float], values: Sequence[float], threshold: float) -> State:
    """The state after one more tile. m moves only when `top` exceeds it by more than threshold."""
    top = max(state.top, *scores)
    moves = not state.m - top >= -threshold  # at the first tile m is -inf
    m = top if moves else state.m
    alpha = 2.0 ** (state.m - m) if moves else 1.0
    p = [2.0 ** (score - m) for score in scores]
    return State(
        m,
        state.l * alpha + sum(p),
        state.o * alpha + sum(x * v for x, v in zip(p, values)),
        alpha,
        top,
        max(p),
    )


def run(scores: Sequence[float], values: Sequence[float], threshold: float) -> list[State]:
    """The state after each tile of KEYS scores."""
    states, state = [], State()
    for first in range(0, len(scores), KEYS):
        tile = slice(first, first + KEYS)
        state = step(state, scores[tile], values[tile], threshold)
        states.append(state)
    return states


def threshold() -> float:
    """log2 units by which a score may exceed m: that of the stage that introduces it."""
    return flash_ladder.load(STAGE).config.THRESHOLD


def settings() -> dict:
    """What the stepper starts from."""
    return {
        "keys": KEYS,
        "rows": {name: list(row) for name, row in ROWS.items()},
        "values": list(VALUES),
        "threshold": threshold(),
        "maxThreshold": MAX_THRESHOLD,
    }


HEADINGS = ("tile", "top", "m", "α", "l", "O", "largest P")


def rows() -> list[list[str]]:
    """The stepper's table for its first row, as text."""
    return [
        [str(number), *(f"{x:.4g}" for x in (s.top, s.m, s.alpha, s.l, s.o, s.largest_p))]
        for number, s in enumerate(run(_USUAL, VALUES, threshold()), 1)
    ]


def more() -> list[tuple]:
    """A table for readers without scripts: the scores of all rows, and how often they rescale."""

    def rescaled(limit: float) -> list[str]:
        states = (run(row, VALUES, limit)[1:] for row in ROWS.values())
        return [str(sum(state.alpha != 1 for state in row)) for row in states]

    def scores(row: Sequence[float], tile: int) -> str:
        return ", ".join(f"{score:g}" for score in row[tile * KEYS : (tile + 1) * KEYS])

    tiles = [
        [str(tile + 1), *(scores(row, tile) for row in ROWS.values())]
        for tile in range(len(_USUAL) // KEYS)
    ]
    counts = [[f"rescaled, threshold {limit:g}", *rescaled(limit)] for limit in (0, threshold())]
    return [("scores of the rows, in log2 units", ("tile", *ROWS), tiles + counts)]


def draw() -> Board:
    """Tiles of scores over the states they lead to."""
    board = Board(168)
    board.text(4, 14, "scores of one query, tile by tile")
    for tile in range(3):
        x = 60 + 92 * tile
        board.box(x, 24, 72, 30, "mma", f"S, tile {tile + 1}")
        board.arrow(x + 36, 54, x + 36, 96)
        board.text(x + 40, 72, "max", small=True)
        board.text(x + 40, 84, "exp2, sum", small=True)
        board.box(x, 98, 72, 30, "exp", "m, l, O")
        board.arrow(x - 18, 113, x - 2, 113)
        board.text(x - 12, 106, "· α", "middle", small=True)
    board.box(2, 98, 40, 30, "faint", "−∞, 0, 0", small=True)
    board.arrow(316, 113, 334, 113)
    board.text(338, 117, "…")
    board.text(4, 150, "after the last tile:  output = O / l,  LSE = m · ln 2 + ln l")
    return board
