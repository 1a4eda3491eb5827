# SPDX-License-Identifier: Apache-2.0
"""One SM with one CTA on it: roles as coroutines, engines with rates, memories, a trace.

A stage's `model.py` describes its schedule with this API; it computes real numbers and derives
cycles. Engines are queues: what an engine is asked for is served in order at its rate. Not in
this first model: instruction latencies, bank conflicts, a split in sub-partitions.
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from dataclasses import dataclass

import simpy
import torch

from ..plan import Barrier, Plan
from .barrier import MBarrier, NamedBarrier
from .machine import Machine

ENGINES = ("fma", "alu", "mufu", "smem", "gmem")


class Deadlock(RuntimeError):
    """Nothing can happen any more; the message lists who waits for what."""


@dataclass(frozen=True)
class Span:
    """`role` did `op` on `engine` from `start` to `end` (cycles); `tile` is the key tile or -1."""

    role: str
    engine: str
    op: str
    tile: int
    start: float
    end: float


class Buffer:
    """An array in shared memory or registers; NaN until written. Read and write through a role."""

    def __init__(self, name: str, shape: tuple[int, ...]):
        self.name = name
        self.array = torch.full(shape, float("nan"))


class Role:
    """A warp role at work: the verbs that a stage's coroutine is written with."""

    def __init__(self, sm: Sm, name: str):
        self.sm, self.name = sm, name
        self.threads = sm.plan.role(name).threads
        self.waits_for = ""

    def execute(self, op: str, tile: int = -1, **amounts: float) -> Generator:
        """Use engines side by side; done when the slowest is.

        Amounts are what the whole role asks of each engine: lane results for fma, alu and mufu,
        bytes for smem and gmem.
        """
        yield self.sm.env.all_of(
            [
                self.sm.env.process(self.sm.serve(self.name, engine, op, tile, amount))
                for engine, amount in amounts.items()
            ]
        )

    def latency(self, op: str, cycles: float, tile: int = -1) -> Generator:
        """Wait `cycles` for something that keeps no engine busy."""
        start = self.sm.env.now
        yield self.sm.env.timeout(cycles)
        self.sm.trace.append(Span(self.name, "latency", op, tile, start, self.sm.env.now))

    def write(self, buffer: Buffer, value: torch.Tensor) -> None:
        """Replace the contents of `buffer`; shapes must agree."""
        if buffer.array.shape != value.shape:
            raise ValueError(f"{self.name} writes {tuple(value.shape)} to {buffer.name}")
        buffer.array = value.clone()

    def read(self, buffer: Buffer) -> torch.Tensor:
        """The contents of `buffer` as they are now."""
        return buffer.array

    def sync(self, name: str, tile: int = -1) -> Generator:
        """bar.sync: come to the named barrier and wait for everyone it counts."""
        barrier = self.sm.barriers[name]
        start = self.sm.env.now
        self.waits_for = f"{name} (phase {barrier.phase})"
        yield barrier.arrive(self.threads)
        self.waits_for = ""
        yield self.sm.env.timeout(self.sm.machine["barrier_latency"])
        self.sm.trace.append(Span(self.name, "barrier", name, tile, start, self.sm.env.now))

    def wait(self, name: str, parity: int, tile: int = -1) -> Generator:
        """Wait at an mbarrier until the phase with `parity` has completed."""
        barrier = self.sm.barriers[name]
        start = self.sm.env.now
        self.waits_for = f"{name} (parity {parity}, now in phase {barrier.phase})"
        yield from barrier.wait(parity)
        self.waits_for = ""
        self.sm.trace.append(Span(self.name, "barrier", name, tile, start, self.sm.env.now))

    def arrive(self, name: str, count: int = 1) -> None:
        """`count` arrivals of this role on an mbarrier."""
        self.sm.barriers[name].arrive(count)


class Sm:
    """One SM running one CTA of `plan` on `machine`."""

    def __init__(self, machine: Machine, plan: Plan):
        self.machine, self.plan = machine, plan.check()
        self.env = simpy.Environment()
        self.trace: list[Span] = []
        self.barriers = {row.name: self._barrier(row) for row in plan.barriers}
        self._engines = {name: simpy.Resource(self.env) for name in ENGINES}
        self._roles: list[tuple[Role, simpy.Process]] = []

    def _barrier(self, row: Barrier) -> MBarrier | NamedBarrier:
        kind = NamedBarrier if row.kind == "named" else MBarrier
        return kind(self.env, row.name, row.arrivals(self.plan))

    def start(self, role: str, coroutine: Callable[[Role], Generator]) -> None:
        """Let the warps of `role` run `coroutine(role)`."""
        at_work = Role(self, role)
        self._roles.append((at_work, self.env.process(coroutine(at_work))))

    def serve(self, role: str, engine: str, op: str, tile: int, amount: float) -> Generator:
        """Queue for an engine and keep it for amount / rate cycles."""
        with self._engines[engine].request() as turn:
            yield turn
            start = self.env.now
            yield self.env.timeout(amount / self.machine[engine])
            self.trace.append(Span(role, engine, op, tile, start, self.env.now))

    def run(self) -> float:
        """Run until every role has returned; the cycles it took. Raises Deadlock, BarrierFault."""
        self.env.run()
        stuck = [role for role, process in self._roles if process.is_alive]
        if stuck:
            waits = "; ".join(f"{role.name} waits for {role.waits_for}" for role in stuck)
            states = "; ".join(repr(barrier) for barrier in self.barriers.values())
            raise Deadlock(f"at cycle {self.env.now:.0f}: {waits}. Barriers: {states}")
        return self.env.now
