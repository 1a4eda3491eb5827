# SPDX-License-Identifier: Apache-2.0
"""One SM with one CTA on it, or the two SMs of a CTA pair: roles, engines, memories, findings.

A stage's `model.py` describes its schedule with the verbs of `Role`; it computes real numbers and
derives cycles. A role acts as one thread: what its own warps must order among themselves is not
seen. Left out: latencies of arithmetic instructions, bank conflicts, how warps of one sub-partition
interleave within one `execute`, and what issuing asynchronous operations costs their issuer.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager
from contextvars import ContextVar

import simpy
import torch

from ..plan import Barrier, Plan
from .barrier import MBarrier, NamedBarrier
from .copies import CopyEngine
from .engines import Engines, Span
from .machine import Machine
from .memory import Buffer, Smem
from .notes import Note
from .role import Role
from .tensor import TensorCore
from .tmem import Tmem

Skip = Callable[[str, str, str, str], bool]
_OBSERVED: ContextVar[tuple] = ContextVar("observed", default=(None, None, None))


class Deadlock(RuntimeError):
    """Nothing can happen any more; the message lists who waits for what."""


class TooManyEvents(RuntimeError):
    """A run took more events than its budget: it may never end."""


class Budget:
    """How many events runs may take together, and how many they took."""

    def __init__(self, limit: int):
        self.limit, self.used = limit, 0

    def spend(self, now: float) -> None:
        """One more event; TooManyEvents when there is none left."""
        if self.used == self.limit:
            raise TooManyEvents(f"at cycle {now:.0f}: still running after {self.limit} events")
        self.used += 1


class NoOrdering:
    """Stands in for `common.ordering.Ordering` where no accesses are checked."""

    def __getattr__(self, verb: str):
        return lambda *args, **kwargs: None

    def races(self) -> list:
        """None are looked for."""
        return []


@contextmanager
def observe(
    ordering: Callable[[], object] | None = None,
    skip: Skip | None = None,
    budget: Budget | None = None,
) -> Iterator:
    """Within it every new Sm or Pair gets its own `ordering()` and leaves out what `skip` says.

    `skip(agent, verb, barrier, line)` is asked at each call of a verb that only orders: wait, sync,
    arrive, expect_tx, commit, bulk_wait, wait_ld, wait_st, fence_before, fence_after, fence_proxy.
    `budget`: the events that all runs within it may take; TooManyEvents beyond.
    """
    token = _OBSERVED.set((ordering, skip, budget))
    try:
        yield
    finally:
        _OBSERVED.reset(token)


class RegisterPool:
    """Registers a thread place of all warps; setmaxnreg takes from it and gives back."""

    def __init__(self, env: simpy.Environment):
        self.env, self.free = env, 0
        self._more = env.event()

    def take(self, amount: int) -> Generator:
        """Wait for `amount` registers and take them; a negative amount gives back at once."""
        while amount > self.free:
            yield self._more
        self.free -= amount
        if amount < 0:
            done, self._more = self._more, self.env.event()
            done.succeed()


class Sm:
    """One SM running one CTA of `plan` on `machine`.

    `ordering`: a `common.ordering.Ordering` that hears of every access, barrier and fence.
    `pair`, `rank`: set by `Pair`. `reports`: what went wrong without stopping the run. `notes`:
    what the roles did, in order.
    """

    def __init__(
        self, machine: Machine, plan: Plan, ordering=None, pair: Pair | None = None, rank: int = 0
    ):
        self.machine, self.plan, self.pair, self.rank = machine, plan.check(), pair, rank
        if plan.tmem and "tmem" not in machine.figures:
            raise ValueError(f"the plan uses tensor memory, which {machine.name} does not have")
        make, self._skip, _ = _OBSERVED.get()
        self.ordering = ordering or (pair.ordering if pair else make() if make else NoOrdering())
        self.env = pair.env if pair else simpy.Environment()
        self.suffix = f"@{rank}" if pair else ""
        self.engines = Engines(self.env, machine, rank)
        self.trace: list[Span] = self.engines.trace
        self.barriers = dict(self._barriers())
        self.smem = Smem(plan, f"smem{self.suffix}")
        self.tmem = Tmem(self.env, plan, f"tmem{self.suffix}")
        self.tensor, self.copies = TensorCore(self), CopyEngine(self)
        self.pool = RegisterPool(self.env)
        self.reports: list[str] = []
        self.notes: list[Note] = []
        self.roles: list[tuple[Role, simpy.Process]] = []

    def _barriers(self) -> Iterator[tuple[str, MBarrier | NamedBarrier]]:
        for row in self.plan.barriers:
            for stage in range(row.stages):
                name = f"{row.name}[{stage}]" if row.stages > 1 else row.name
                yield name, self._barrier(row, name)

    def _barrier(self, row: Barrier, name: str) -> MBarrier | NamedBarrier:
        count, done = row.arrivals(self.plan), self.ordering.complete
        if row.kind == "cluster":
            if self.pair is None:
                raise ValueError(f"{name} is a barrier of a cluster; run the plan in a Pair")
            return self.pair.cluster_barrier(name, 2 * count)
        if row.kind == "named":
            return NamedBarrier(self.env, name + self.suffix, count, done)
        shares: dict[str, tuple[int, int]] = {}
        for arrival in row.producers:
            own = arrival.count(self.plan) // arrival.ctas + shares.get(arrival.role, (0, 1))[0]
            shares[arrival.role] = (own, arrival.ctas)
        latency = self.machine["mbarrier_latency"]
        return MBarrier(self.env, name + self.suffix, count, latency, shares, done)

    def buffer(
        self, name: str, shape: tuple[int, ...], dtype: torch.dtype, swizzled: bool = True
    ) -> Buffer:
        """The plan's shared-memory buffer `name`; `buffer[slot]` has `shape` (rows, columns)."""
        return self.smem.buffer(name, shape, dtype, swizzled)

    def start(self, role: str, coroutine: Callable[[Role], Generator]) -> None:
        """Let the warps of `role` run `coroutine(role)`."""
        at_work = Role(self, role)
        self.ordering.thread(at_work.agent)
        self.roles.append((at_work, self.env.process(coroutine(at_work))))

    @property
    def peer(self) -> Sm:
        """The SM of the other CTA of the pair."""
        return self.at_rank(1 - self.rank)

    def at_rank(self, rank: int) -> Sm:
        """The SM of a CTA of the pair."""
        if self.pair is None:
            raise ValueError("this CTA runs alone; a peer exists only in a Pair")
        return self.pair.sms[rank]

    def skips(self, agent: str, verb: str, barrier: str, line: str) -> bool:
        """Whether this call of a verb is to be left out."""
        return self._skip is not None and self._skip(agent, verb, barrier, line)

    def report_unwritten(self, agent: str, op: str, place: str, line: str) -> None:
        """Note, once for each line, a read of something that was never written."""
        text = f"{agent}: {op} reads {place}, part of which was never written ({line})"
        if text not in self.reports:
            self.reports.append(text)

    def leaks(self) -> list[str]:
        """What a finished CTA leaves behind that it should not."""
        found = [f"barrier left in mid-phase: {b!r}" for b in _busy(self.barriers.values())]
        for agent, (first, columns) in self.tmem.allocations.items():
            last = first + columns - 1
            found.append(f"{agent} did not free columns {first} ... {last} of {self.tmem.name}")
        for agent, mmas in self.tensor.uncommitted.items():
            found.append(f"{agent} never committed {len(mmas)} MMAs, the first at {mmas[0].line}")
        for role, _ in self.roles:
            if left := [copy for copy in role.bulk if not copy.awaited]:
                found.append(f"{role.agent} never waited for {len(left)} bulk groups")
            if role.budget is not None and role.registers != role.budget:
                found.append(
                    f"{role.agent} ends with {role.registers} registers, not the plan's "
                    f"{role.budget}"
                )
        return found

    def findings(self) -> list[str]:
        """Reports, leaks and races of this CTA (the races of a pair: see the Pair)."""
        races = [] if self.pair else self.ordering.races()
        return [*self.reports, *self.leaks(), *(str(race) for race in races)]

    def run(self) -> float:
        """Run until every role has returned; the cycles it took. Raises Deadlock, ModelFault."""
        return _run(self.env, [self])


class Pair:
    """The two SMs of a CTA pair: pair MMAs, remote arrivals, copies between their memories.

    `sms[0]` is the leader. Both run `plan`; agents and memories carry their rank ("MMA@0").
    """

    def __init__(self, machine: Machine, plan: Plan, ordering=None):
        make, *_ = _OBSERVED.get()
        self.env = simpy.Environment()
        self.ordering = ordering or (make() if make else NoOrdering())
        self._cluster: dict[str, NamedBarrier] = {}
        self.sms: list[Sm] = []
        for rank in range(2):
            self.sms.append(Sm(machine, plan, self.ordering, self, rank))

    def cluster_barrier(self, name: str, threads: int) -> NamedBarrier:
        """The barrier that both CTAs share."""
        if name not in self._cluster:
            made = NamedBarrier(self.env, name, threads, self.ordering.complete)
            self._cluster[name] = made
        return self._cluster[name]

    def start(self, role: str, coroutine: Callable[[Role], Generator]) -> None:
        """Let the warps of `role` run `coroutine(role)` in both CTAs."""
        for sm in self.sms:
            sm.start(role, coroutine)

    @property
    def notes(self) -> list[Note]:
        """Notes of both CTAs, one after the other."""
        return [note for sm in self.sms for note in sm.notes]

    @property
    def trace(self) -> list[Span]:
        """Spans of both SMs."""
        return [span for sm in self.sms for span in sm.trace]

    def findings(self) -> list[str]:
        """Reports and leaks of both CTAs, races among all their accesses."""
        both = [line for sm in self.sms for line in sm.findings()]
        return [*both, *(str(race) for race in self.ordering.races())]

    def run(self) -> float:
        """Run until every role has returned; the cycles it took. Raises Deadlock, ModelFault."""
        return _run(self.env, self.sms)


def _busy(barriers) -> list[MBarrier | NamedBarrier]:
    return [barrier for barrier in barriers if not barrier.idle]


def _run(env: simpy.Environment, sms: list[Sm]) -> float:
    *_, budget = _OBSERVED.get()
    if budget is None:
        env.run()
    while budget is not None and env.peek() < math.inf:
        budget.spend(env.now)
        env.step()
    stuck = [role for sm in sms for role, process in sm.roles if process.is_alive]
    if stuck:
        waits = "; ".join(f"{role.agent} waits for {role.waits_for}" for role in stuck)
        busy = [repr(barrier) for sm in sms for barrier in _busy(sm.barriers.values())]
        states = f". Barriers in mid-phase: {'; '.join(busy)}" if busy else ""
        raise Deadlock(f"at cycle {env.now:.0f}: {waits}{states}")
    return env.now
