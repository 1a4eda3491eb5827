# SPDX-License-Identifier: Apache-2.0
"""What an executed log proves: races by the happens-before checker, and misuse of barriers.

    verdict = check_log(decode(data), plan)
    verdict.errors, verdict.warnings, verdict.a1_edges

Every step of the log is told to `common.ordering`, as the SM model tells it its own. Timing plays
no part: two accesses that no barrier orders are reported even when this run's order was right.
Phases of barriers are followed from the arrivals and bytes in the log. Global memory is not looked
at, nor are lanes of one warp held apart. Runs: host.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from .hopper.log import Log
from .hopper.steps import Step, steps
from .ordering import Ordering, Race
from .plan import THREADS_PER_WARP, Plan

FENCE_EDGES = (
    "wait::ld",
    "wait::st",
    "tcgen05.before",
    "tcgen05.after",
    "fence.proxy.async",
    "bulk fence",
)  # missing edges that are a missing fence: ptxas may make some of them nothing
CLUSTER = "the cluster barrier"
REMOTE_SCOPE = "an arrival in the other CTA needs .release.cluster, it has the default, .cta"
INIT_FENCE = "no fence.mbarrier_init or fence.proxy.async follows its initialisation"


class LogMismatch(ValueError):
    """A log that no run can have written: a wait passed that nothing had completed."""


@dataclass(frozen=True)
class Finding:
    """One fault. `fence`: a fence is missing, the barriers are right."""

    text: str
    fence: bool
    count: int = 1

    def __str__(self) -> str:
        return self.text + (f" [{self.count} times]" if self.count > 1 else "")


@dataclass(frozen=True)
class Verdict:
    """What a log shows. errors and warnings: see `check_log`; a1_edges: pairs of MMAs in order by
    rule A1 only, as (first, second); events: records in the log."""

    errors: tuple[Finding, ...]
    warnings: tuple[Finding, ...]
    a1_edges: tuple[tuple[str, str], ...]
    events: int
    size: int

    @property
    def clean(self) -> bool:
        """Whether nothing is wrong."""
        return not self.errors


def check_log(log: Log, plan: Plan | None = None, ours: bool = True, mode: str = "practice"):
    """The verdict on a log; names come from the plan. Raises LogMismatch.

    ours: a missing fence, or an arrival in the other CTA whose scope is not the cluster, is an
    error; of a peer's kernel it is a warning, because the hardware at hand makes no difference and
    upstream does so. mode: see `Ordering`.
    """
    replay = _Replay(log, steps(log, plan), mode, ours)
    replay.run()
    found = [*replay.findings, *map(_finding, replay.order.races())]
    fences = [row for row in found if row.fence]
    errors = found if ours else [row for row in found if not row.fence]
    edges = dict.fromkeys((race.first.op, race.second.op) for race in replay.order.a1_edges())
    return Verdict(
        tuple(errors), () if ours else tuple(fences), tuple(edges), len(log.events), log.size
    )


def _finding(race: Race) -> Finding:
    return Finding(race.text, race.missing in FENCE_EDGES, race.count)


@dataclass
class Phase:
    """Where an mbarrier, or a named or cluster barrier, stands: arrivals and bytes to come."""

    count: int
    number: int = 0
    pending: int = 0
    bytes: int = 0
    came: list[str] = field(default_factory=list)

    def __post_init__(self):
        self.pending = self.count

    def arrive(self, arrivals: int, expected: int = 0, delivered: int = 0) -> bool:
        """Count; True when that completes the phase."""
        self.pending -= arrivals
        self.bytes += expected - delivered
        if self.pending > 0 or self.bytes:
            return False
        self.number, self.pending = self.number + 1, self.pending + self.count
        return True


class _Replay:
    """One pass over the steps. Agents are warps."""

    def __init__(self, log: Log, found: list[Step], mode: str, ours: bool):
        self.log, self.steps, self.order, self.ours = log, found, Ordering(mode), ours
        self.findings: list[Finding] = []
        self.phases: dict[str, Phase] = {}
        self.inits: dict[str, set[str]] = {}  # barriers that an agent initialised, not yet fenced
        self.cells: dict[str, int] = {}  # the cell that stands for an mbarrier's state
        self.used: set[tuple[str, str]] = set()  # (agent, barrier) whose first use is recorded
        self.groups: dict[str, list[list[str]]] = {}  # bulk groups of an agent, the open one last
        self.uncommitted: dict[str, int] = {}
        self.columns: dict[int, dict[int, int]] = {}  # by rank: first column -> columns
        self.came: dict[tuple[str, str], int] = {}  # phase at which an agent came to a barrier
        self.complete = 0  # phases of the cluster barrier
        agents = sorted({step.agent for step in found})
        self.present, self.gone = dict.fromkeys(agents, 0), dict.fromkeys(agents, 0)  # lanes
        for agent in agents:
            self.order.thread(agent)
            self.groups[agent], self.inits[agent] = [[]], set()

    def run(self) -> None:
        """Tell the checker everything, then look at what is left."""
        for step in self.steps:
            self.at = (step.op, f"PTX line {step.line}")
            VERBS[step.verb](self, step)
        self._leaks()

    def _report(self, text: str, fence: bool = False) -> None:
        finding = Finding(text, fence)
        if finding not in self.findings:
            self.findings.append(finding)

    def _touch(self, agent: str, step: Step, proxy: str | None = None) -> None:
        for memory, cells in step.reads:
            self.order.read(agent, memory, cells, *self.at, proxy=proxy)
        for memory, cells in step.writes:
            self.order.write(agent, memory, cells, *self.at, proxy=proxy)

    # ---- barriers --------------------------------------------------------------------------

    def _phase(self, step: Step, barrier: str) -> Phase:
        """The state of an mbarrier; using it is a read of what initialised it."""
        if barrier not in self.phases:
            raise LogMismatch(f"{step.agent}: {step.op} before {barrier} is initialised")
        if (step.agent, barrier) not in self.used:
            self.used.add((step.agent, barrier))
            cell = self.cells[barrier]
            self.order.read(step.agent, "mbarriers", ((cell, cell + 1),), *self.at)
        return self.phases[barrier]

    def _check_fenced(self, step: Step, barrier: str) -> None:
        """Copies and commits arrive through the async proxy."""
        for agent, barriers in self.inits.items():
            if barrier in barriers:
                text = f"{step.agent}: {step.op} ({self.at[1]}) uses {barrier}: {INIT_FENCE}"
                self._report(f"{text} by {agent}", fence=True)

    def _init(self, step: Step) -> None:
        old = self.phases.get(step.what)
        if old and (old.pending != old.count or old.bytes):
            self._report(f"{step.agent}: {step.op} ({self.at[1]}) in mid-phase")
        self.phases[step.what] = Phase(step.numbers[0])
        cell = self.cells.setdefault(step.what, len(self.cells))
        self.used.add((step.agent, step.what))
        self.inits[step.agent].add(step.what)
        self.order.write(step.agent, "mbarriers", ((cell, cell + 1),), *self.at)

    def _wait(self, step: Step) -> None:
        phase, (parity,) = self._phase(step, step.what), step.numbers
        late = (phase.number - 1) % 2 != parity
        if phase.number - 1 - late < -1:
            raise LogMismatch(
                f"{step.agent}: {step.op}, parity {parity} ({self.at[1]}) has passed, but phase 0 "
                f"is not complete: {phase.pending} arrivals, {phase.bytes} bytes to come"
            )
        scope = "relaxed" if step.facts["scope"] == "relaxed" else "cluster"
        self.order.wait(step.agent, step.what, *self.at, scope=scope, late=late)

    def _arrive(self, step: Step) -> None:
        phase, (arrivals, expected) = self._phase(step, step.what), step.numbers
        if arrivals:
            self.order.arrive(step.agent, step.what, *self.at, scope=self._scope(step))
        self._count(step.what, phase, arrivals, expected)

    def _scope(self, step: Step) -> str:
        """A peer's arrival in the other CTA counts whatever its scope, with a warning."""
        scope, remote = step.facts["scope"], step.what.partition("@")[2] != str(step.rank)
        if scope != "cta" or self.ours or self.log.ctas == 1 or not remote:
            return scope
        self._report(f"{step.op} ({step.agent}, {self.at[1]}): {REMOTE_SCOPE}", fence=True)
        return "cluster"

    def _count(self, barrier: str, phase: Phase, arrivals=0, expected=0, delivered=0) -> None:
        if phase.arrive(arrivals, expected, delivered):
            self.order.complete(barrier)

    def _complete(self, step: Step) -> None:
        self._count(step.what, self._phase(step, step.what), delivered=step.numbers[0])

    def _commit(self, step: Step) -> None:
        self.uncommitted.pop(step.agent, None)
        for barrier, arrivals in step.targets:
            phase = self._phase(step, barrier)
            self._check_fenced(step, barrier)
            self.order.commit(step.agent, barrier, *self.at)
            self._count(barrier, phase, arrivals)

    def _bar_arrive(self, step: Step) -> None:
        """Each phase of a named barrier may be for another number of threads."""
        phase = self.phases.setdefault(step.what, Phase(step.numbers[0]))
        if phase.pending == phase.count:
            phase.count = phase.pending = step.numbers[0]
        elif phase.count != step.numbers[0]:
            self._report(f"{step.agent}: {step.op} for {step.numbers[0]} threads, of {phase.count}")
        self.came[step.agent, step.what] = phase.number
        self.order.arrive(step.agent, step.what, *self.at)
        self._count(step.what, phase, step.lanes.bit_count())

    def _bar_wait(self, step: Step) -> None:
        phase, came = self.phases.get(step.what), self.came.get((step.agent, step.what))
        if came is None or phase.number <= came:
            raise LogMismatch(f"{step.agent}: {step.op} ({self.at[1]}) has passed too early")
        self.order.wait(step.agent, step.what, *self.at)

    def _cluster_arrive(self, step: Step) -> None:
        scope = "relaxed" if step.facts["scope"] == "relaxed" else "cluster"
        self.order.arrive(step.agent, CLUSTER, *self.at, scope=scope)
        self.came.setdefault((step.agent, CLUSTER), self.complete)
        self._present(step)

    def _cluster_wait(self, step: Step) -> None:
        if self.came.pop((step.agent, CLUSTER), self.complete) >= self.complete:
            raise LogMismatch(f"{step.agent}: {step.op} ({self.at[1]}) has passed too early")
        self.order.wait(step.agent, CLUSTER, *self.at)

    def _exit(self, step: Step) -> None:
        """A thread that has left counts as present at cluster barriers from now on."""
        self.gone[step.agent] += step.lanes.bit_count()
        if any(self.present.values()):
            self._present(step)

    def _present(self, step: Step) -> None:
        if step.verb != "exit":
            self.present[step.agent] += step.lanes.bit_count()
        missing = [
            agent
            for agent in self.present
            if max(self.present[agent], self.gone[agent]) < THREADS_PER_WARP
        ]
        if not missing:
            self.order.complete(CLUSTER)
            self.complete += 1
            self.present = dict.fromkeys(self.present, 0)

    # ---- fences, own waits -----------------------------------------------------------------

    def _fence(self, step: Step) -> None:
        if step.what in ("mbarrier_init", "proxy.async"):
            self.inits[step.agent].clear()
        if step.what == "bulk.commit":
            self.groups[step.agent].append([])
        elif step.what == "mbarrier_init":  # with it a relaxed arrive releases the barriers' state
            self.order.fence(step.agent, "acq_rel", *self.at)
        elif step.what != "proxy.async.global":
            self.order.fence(step.agent, step.what, *self.at)

    def _bulk_wait(self, step: Step) -> None:
        """Groups are forgotten once they are read: a write after that is not looked at."""
        *closed, last = self.groups[step.agent]
        waited = closed[: max(0, len(closed) - step.numbers[0])]
        for strand in (strand for group in waited for strand in group):
            self.order.finish(strand, read=step.facts["read"])
        self.groups[step.agent] = [*closed[len(waited) :], last]

    # ---- memory ----------------------------------------------------------------------------

    def _access(self, step: Step) -> None:
        self._touch(step.agent, step)

    def _allocation(self, step: Step) -> None:
        held, (first, columns) = self.columns.setdefault(step.rank, {}), step.numbers
        if step.verb == "alloc":
            held[first] = columns
        elif held.pop(first, None) != columns:
            self._report(f"{step.agent} frees {columns} columns at {first}, not allocated so")
        if step.facts.get("pair") and step.verb == "alloc":  # both CTAs take part, as at a barrier
            step.reads = ()
        self._touch(step.agent, step)

    def _tmem(self, step: Step) -> None:
        strand = self.order.issue(step.agent, step.verb, *self.at)
        self._touch(strand, step, "tensor")

    def _mma(self, step: Step) -> None:
        self.uncommitted[step.agent] = step.line
        self._touch(self.order.issue(step.agent, "mma", *self.at, **step.facts), step)

    def _load(self, step: Step) -> None:
        kind = "tma.load" if step.verb == "load" else "dsmem.copy"
        strand = self.order.issue(step.agent, kind, *self.at)
        self._touch(strand, step, "async")
        for barrier, size in step.targets:
            phase = self._phase(step, barrier)
            self._check_fenced(step, barrier)
            self.order.arrive(strand, barrier, *self.at)
            self._count(barrier, phase, delivered=size)

    def _store(self, step: Step) -> None:
        kind = "tma.store" if step.verb == "store" else "reduce"
        strand = self.order.issue(step.agent, kind, *self.at)
        self._touch(strand, step, "async")
        self.groups[step.agent][-1].append(strand)

    # ---- the end ---------------------------------------------------------------------------

    def _leaks(self) -> None:
        for name, phase in self.phases.items():
            if phase.pending != phase.count or phase.bytes:
                self._report(
                    f"{name} is left in mid-phase: {phase.pending} of {phase.count} arrivals and "
                    f"{phase.bytes} bytes to come"
                )
        for agent, line in self.uncommitted.items():
            self._report(f"{agent} never committed the MMAs of PTX line {line}")
        for agent, groups in self.groups.items():
            if any(groups):
                self._report(f"{agent} never waited for a bulk copy out of shared memory")
        for rank, held in self.columns.items():
            if held:
                self._report(
                    f"CTA {rank} did not free {sum(held.values())} columns of tensor memory"
                )


VERBS: dict[str, Callable[[_Replay, Step], None]] = {
    "init": _Replay._init,
    "wait": _Replay._wait,
    "arrive": _Replay._arrive,
    "complete": _Replay._complete,
    "commit": _Replay._commit,
    "bar.arrive": _Replay._bar_arrive,
    "bar.wait": _Replay._bar_wait,
    "cluster.arrive": _Replay._cluster_arrive,
    "cluster.wait": _Replay._cluster_wait,
    "exit": _Replay._exit,
    "fence": _Replay._fence,
    "bulk.wait": _Replay._bulk_wait,
    "read": _Replay._access,
    "write": _Replay._access,
    "update": _Replay._access,
    "alloc": _Replay._allocation,
    "dealloc": _Replay._allocation,
    "tmem.ld": _Replay._tmem,
    "tmem.st": _Replay._tmem,
    "mma": _Replay._mma,
    "load": _Replay._load,
    "copy": _Replay._load,
    "store": _Replay._store,
    "reduce": _Replay._store,
}
