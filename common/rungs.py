# SPDX-License-Identifier: Apache-2.0
"""What each rung of the ladder gains: cycles of a tile and error, both from the SM model.

All derived: the model runs the stage's schedule with the figures of a B200 and computes real
numbers. The inputs are the same for all rungs of a kind. Runs: host, under a second a rung.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import flash_ladder

from . import derived, inputs, judging
from .model import B200
from .numerics import Comparison
from .stage import KernelSource

HEAD_DIMS = (128, 64)
TILE = 128  # queries and keys of a tile, whatever tiles the stage itself has
VISITED = 8  # tiles, where errors are counted
GENERATOR = "gaussian"


@dataclass(frozen=True)
class Rung:
    """One kernel on the SM model.

    cycles: of a CTA, for 128 queries and 128 keys, in the steady state. verdicts: on out and lse,
    or on the gradients.
    """

    kernel: KernelSource
    head_dim: int
    cycles: float
    verdicts: tuple[Comparison, ...]


def _tiles_in_one(kernel: KernelSource, head_dim: int) -> float:
    """Tiles of 128 queries and 128 keys in what `derived.steady_cycles` counts."""
    if kernel.kind == "backward":
        return 1.0
    queries = kernel.config.TILE_M * getattr(kernel.config, "Q_TILES", 1)
    return queries * kernel.config.TILE_N[head_dim] / TILE**2


def _run(kernel: KernelSource, head_dim: int):
    """All CTAs of two owned tiles, each of which visits VISITED tiles: (problem, run)."""
    sizes = (2 * TILE, VISITED * TILE)
    queries, keys = sizes[::-1] if kernel.kind == "backward" else sizes
    shape = {"batch": 1, "seqlen_q": queries, "seqlen_k": keys, "heads": 1, "head_dim": head_dim}
    problem = inputs.make(GENERATOR, **shape)
    return problem, kernel.simulate_problem(problem, machine=B200)


@cache
def rung(number: int, part: str, head_dim: int) -> Rung:
    """Stage `number`, or one of its parts that compute gradients, at a head dim it accepts."""
    kernel = flash_ladder.load(number).part(part)
    cycles = derived.steady_cycles(kernel, B200, head_dim) / _tiles_in_one(kernel, head_dim)
    problem, run = _run(kernel, head_dim)
    if kernel.kind == "backward":
        verdicts = judging.judge_gradients(problem, run.dq, run.dk, run.dv)
    else:
        verdicts = judging.judge(problem, run.out, run.lse, kernel)
    return Rung(kernel, head_dim, cycles, tuple(verdicts))


def rungs(number: int) -> list[Rung]:
    """What stage `number` brings, at each head dim: its backward parts where they are new, else its
    forward."""
    stage = flash_ladder.load(number)
    before = flash_ladder.load(number - 1) if number - 1 in flash_ladder.built() else None
    new = before and stage.backwards and not before.backwards
    return [
        rung(number, kernel.name, head_dim)
        for kernel in (stage.backwards if new else [stage])
        for head_dim in HEAD_DIMS
        if head_dim in kernel.config.ENVELOPE.head_dims
    ]
