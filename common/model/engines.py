# SPDX-License-Identifier: Apache-2.0
"""Engines as queues served in the order asked, and the trace of what they did.

The arithmetic pipes, warp issue and tensor-memory access exist once in each of four sub-partitions,
with a fourth of the SM's rate; warp w works in sub-partition w modulo 4. The shared-memory port
and the paths to global memory are the whole SM's; reductions have one of their own, as they leave
the SM where loads arrive. A request keeps its engine until it is served:
roles that should share an engine more finely ask for it in smaller pieces, as instructions do.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import simpy

from .machine import Machine

PARTS = 4  # sub-partitions
IN_PARTS = ("fma", "alu", "mufu", "cvt", "issue", "tmem")
WHOLE = ("smem", "gmem", "reduce", "dsmem", "tma", "tensor")
ENGINES = (*IN_PARTS, *WHOLE)


@dataclass(frozen=True)
class Span:
    """`role` did `op` on `engine` from `start` to `end` (cycles); `tile` is the key tile or -1.

    `parts`: the sub-partitions it used, empty for an engine of the whole SM and for waiting;
    `rank`: the CTA of a pair on whose SM it was.
    """

    role: str
    engine: str
    op: str
    tile: int
    start: float
    end: float
    parts: tuple[int, ...] = ()
    rank: int = 0

    @property
    def share(self) -> float:
        """Part of the SM's engine that was busy: 1, or a fourth for each sub-partition."""
        return len(self.parts) / PARTS if self.parts else 1.0


class Engines:
    """The engines of one SM. Times in cycles; amounts in the units of the machine's figures."""

    def __init__(self, env: simpy.Environment, machine: Machine, rank: int):
        self.env, self.machine, self.rank = env, machine, rank
        self.trace: list[Span] = []
        self._free: dict[tuple[str, int], float] = {}
        self._last: dict[tuple, int] = {}

    def take(self, engine: str, amount: float, part: int = -1) -> tuple[float, float]:
        """Queue for an engine, from now on; returns when it starts and ends with `amount`."""
        rate = self.machine[engine] / (PARTS if part >= 0 else 1)
        return self.hold(engine, amount / rate, part)

    def hold(self, engine: str, cycles: float, part: int = -1) -> tuple[float, float]:
        """As `take`, for a number of cycles."""
        start = max(self.env.now, self._free.get((engine, part), 0.0))
        self._free[engine, part] = start + cycles
        return start, start + cycles

    def use(
        self, role: str, engine: str, op: str, tile: int, amount: float, warps: Mapping[int, int]
    ) -> float:
        """A role asks for `amount` in all, shared out among its warps; returns when it is done.

        `warps`: how many of them are in each sub-partition.
        """
        if engine not in ENGINES:
            raise KeyError(f"there is no engine {engine!r}; engines are {ENGINES}")
        if engine in WHOLE:
            start, end = self.take(engine, amount)
            self.record(role, engine, op, tile, start, end)
            return end
        total = sum(warps.values())
        together: dict[tuple[float, float], tuple[int, ...]] = {}
        for part, count in sorted(warps.items()):
            times = self.take(engine, amount * count / total, part)
            together[times] = (*together.get(times, ()), part)
        for (start, end), parts in together.items():
            self.trace.append(Span(role, engine, op, tile, start, end, parts, self.rank))
        return max(end for _, end in together)

    def record(
        self, role: str, engine: str, op: str, tile: int, start: float, end: float, join=False
    ) -> None:
        """Add a span; `join` extends the last one of this kind where they touch."""
        key = (role, engine, op, tile)
        last = self._last.get(key)
        if join and last is not None and self.trace[last].end == start:
            self.trace[last] = replace(self.trace[last], end=end)
            return
        self._last[key] = len(self.trace)
        self.trace.append(Span(role, engine, op, tile, start, end, rank=self.rank))
