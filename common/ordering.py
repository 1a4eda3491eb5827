# SPDX-License-Identifier: Apache-2.0
"""Happens-before checker: which conflicting accesses does no barrier, fence or wait order?

    order = Ordering()
    order.thread("SOFTMAX0"), order.thread("MMA")
    st = order.issue("SOFTMAX0", "tmem.st", "st P", "model.py:30")
    order.write(st, "tmem", ((0, 256),), "st P", "model.py:30")
    order.fence("SOFTMAX0", "wait.st", "wait::st", "model.py:31")
    ...
    order.races()

Fed by the SM model while it runs and by the logs of executed kernels. Timing plays no part: what
no rule orders is reported even if it never went wrong. Events must come in an order that could
have happened (an arrive before the wait that sees it); a strand's accesses may be recorded at any
time between its issue and its end, those of one thread's MMAs in the order of issue. The cost is
linear in the number of events for a given number of threads. Agents are threads, declared with
`thread`, and strands, named by `issue`.

Approximated: a thread is a whole warp role, whose fences and accesses are those of all its lanes;
the last write of a cell and the reads since stand for its history (at most 16 unordered ones of a
role and kind are kept), so that behind a first race on a cell others can hide. Runs: host.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from .ordering_clock import COPIES, KINDS, NOTHING, STORES, Barrier, Message, Strand, Thread
from .ordering_race import Access, Intervals, Memory, Party, Race, explain, overlap
from .ordering_rules import missing_edge, sentence

__all__ = ["Ordering", "OrderingError", "Party", "Race", "explain", "replay"]

MODES = ("practice", "ptx")
SCOPES = ("cta", "cluster", "gpu", "relaxed")
FENCES = (
    "tcgen05.before",
    "tcgen05.after",
    "proxy.async",
    "wait.ld",
    "wait.st",
    "bulk.wait",
    "bulk.wait.read",
    "acq_rel",
)
VERBS = (
    "thread",
    "read",
    "write",
    "fence",
    "issue",
    "feeds",
    "arrive",
    "commit",
    "complete",
    "wait",
    "finish",
    "sync",
)


class OrderingError(ValueError):
    """Events that make no sense; the message says which agent and what is allowed."""


class Ordering:
    """Vector clocks over the events of one run.

    Mode "practice" accepts rule A1 (MMAs of one thread execute in order) and lists the pairs that
    only it orders; mode "ptx" reports them as races.
    """

    def __init__(self, mode: str = "practice"):
        if mode not in MODES:
            raise OrderingError(f"mode {mode!r} is unknown; allowed: {MODES}")
        self.mode = mode
        self._threads: dict[str, Thread] = {}
        self._strands: dict[str, Strand] = {}  # those not known to be done
        self._barriers: dict[str, Barrier] = {}
        self._memories: dict[str, Memory] = {}
        self._found: dict[tuple, Race] = {}

    # ---- agents ----------------------------------------------------------------------------

    def thread(self, agent: str) -> None:
        """Declare a thread: a warp role that acts as one. "ROLE@1" is in CTA 1 of its cluster."""
        if agent in self._threads:
            raise OrderingError(f"thread {agent!r} is declared twice")
        self._threads[agent] = Thread(agent, len(self._threads))

    def _thread(self, agent: str) -> Thread:
        if agent not in self._threads:
            raise OrderingError(f"no thread {agent!r}; threads are {list(self._threads)}")
        return self._threads[agent]

    def _strand(self, name: str) -> Strand:
        if name not in self._strands:
            raise OrderingError(f"no strand {name!r} is under way: it was not issued or has ended")
        return self._strands[name]

    def _end(self, strands: Iterable[Strand]) -> None:
        """Forget strands that somebody knows to be done; no access of theirs can follow."""
        for strand in strands:
            strand.views = NOTHING
            self._strands.pop(strand.name, None)

    def issue(
        self, agent: str, kind: str, op: str, line: str, name: str | None = None, **facts
    ) -> str:
        """Start a strand, which knows what its issuer knows; returns its name.

        Facts: of an "mma" cta_group (1), accumulator (intervals) and shape; of a "reduce"
        ordered=True where the order of sums matters. A multicast copy is a strand for each CTA.
        """
        thread = self._thread(agent)
        if kind not in KINDS:
            raise OrderingError(f"{agent} issues {kind!r}; strand kinds are {KINDS}")
        thread.step()
        thread.issued[kind] = thread.issued.get(kind, 0) + 1
        name = name or f"{agent}/{kind}#{thread.issued[kind]}"
        if name in self._strands or name in self._threads:
            raise OrderingError(f"agent {name!r} exists already")
        facts = {key: _frozen(value) for key, value in facts.items()}
        strand = self._strands[name] = Strand(name, thread, kind, op, line, facts)
        if kind == "mma":
            thread.running.append(strand)
        elif kind not in COPIES:
            thread.outstanding[kind][name] = strand
        return name

    # ---- accesses --------------------------------------------------------------------------

    def read(
        self,
        agent: str,
        memory: str,
        intervals: Intervals,
        op: str,
        line: str,
        proxy: str | None = None,
    ) -> None:
        """`agent`, a thread or a strand, reads cells; `proxy` is checked if it is given."""
        self._access(agent, "read", memory, intervals, op, line, proxy)

    def write(
        self,
        agent: str,
        memory: str,
        intervals: Intervals,
        op: str,
        line: str,
        proxy: str | None = None,
    ) -> None:
        """`agent` writes cells; a "reduce" strand adds to them."""
        self._access(agent, "write", memory, intervals, op, line, proxy)

    def _access(self, agent, mode, memory, intervals, op, line, proxy) -> None:
        doer = self._threads.get(agent) or self._strand(agent)
        intervals = _frozen(intervals)
        if not intervals or any(start >= stop for start, stop in intervals):
            raise OrderingError(f"{op} ({agent}, {line}): empty intervals {intervals} of {memory}")
        if isinstance(doer, Thread):
            allowed = ("generic",)
            doer.step()
        else:
            allowed = ("async", "tensor") if doer.kind == "mma" else ("async",)
            allowed = ("tensor",) if doer.kind.startswith("tmem") else allowed
            mode = "add" if doer.kind == "reduce" and mode == "write" else mode
        if proxy is not None and proxy not in allowed:
            raise OrderingError(f"{op} ({agent}, {line}): proxy {proxy!r}, allowed: {allowed}")
        access = Access(doer, mode, memory, intervals).at(op, line)
        cells = self._memories.setdefault(memory, Memory(_replaces))
        for earlier in cells.access(access):
            self._compare(earlier, access)

    def _compare(self, a: Access, b: Access) -> None:
        missing = missing_edge(a, b)
        if missing is None:
            return
        key = (a.op, a.line, b.op, b.line, missing == "A1")
        if key in self._found:
            self._found[key].count += 1
            return
        cells = overlap(a.intervals, b.intervals)
        self._found[key] = Race(
            _party(a),
            _party(b),
            missing,
            sentence(a, b, missing, cells),
            cells,
            needs_a1=missing == "A1",
        )

    # ---- a thread's own fences and waits ---------------------------------------------------

    def fence(self, agent: str, kind: str, op: str, line: str) -> None:
        """A fence, or a wait for the thread's own strands (all those outstanding)."""
        thread = self._thread(agent)
        if kind not in FENCES:
            raise OrderingError(f"{op} ({agent}, {line}): fence {kind!r}; kinds are {FENCES}")
        tick = thread.step()
        views = thread.views
        if kind == "tcgen05.before":
            thread.before_tick = tick
        elif kind == "tcgen05.after":
            thread.views = views._replace(tensor_seen=views.tensor)
        elif kind == "proxy.async":
            thread.views = views._replace(proxy_seen=views.proxy, proxy_tick=tick)
        elif kind == "acq_rel":
            thread.acquire(thread.deferred)
            thread.deferred, thread.fenced = Message(), thread.message()
        elif kind.startswith("wait"):
            self._wait_own(thread, f"tmem.{kind[-2:]}")
        else:
            for store in STORES:
                self._wait_own(thread, store, reads_only=kind == "bulk.wait.read")

    def _wait_own(self, thread: Thread, kind: str, reads_only: bool = False) -> None:
        strands = list(thread.outstanding[kind].values())
        for strand in strands:
            strand.done(thread.index, thread.tick, reads_only)
        if not reads_only:
            self._end(strands)
            thread.outstanding[kind].clear()

    def feeds(self, load: str, op: str, line: str) -> None:
        """A tcgen05.st that its thread issues next uses the registers of `load`: it has ended.

        Nothing happens when the load has ended already, at a wait.ld.
        """
        strand = self._strands.get(load)
        if strand and strand.kind != "tmem.ld":
            raise OrderingError(f"{op} ({line}): {load} is {strand.kind}; only a tmem.ld feeds")
        if strand:
            self._finish(strand)

    def finish(self, strand: str, read: bool = False) -> None:
        """A bulk wait_group reaches one bulk store or reduction; `read`: only wait_group.read."""
        stores = self._strand(strand)
        if stores.kind not in STORES:
            raise OrderingError(f"{strand} is {stores.kind}; a bulk wait is for {STORES}")
        self._finish(stores, read)

    def _finish(self, strand: Strand, reads_only: bool = False) -> None:
        strand.done(strand.thread.index, strand.thread.step(), reads_only)
        if not reads_only:
            del strand.thread.outstanding[strand.kind][strand.name]
            self._end([strand])

    # ---- between threads -------------------------------------------------------------------

    def _barrier(self, name: str) -> Barrier:
        if name not in self._barriers:
            self._barriers[name] = Barrier(name)
        return self._barriers[name]

    def arrive(self, agent: str, barrier: str, op: str, line: str, scope: str = "cluster") -> None:
        """Release: a thread arrives, or a copy has delivered its bytes (a strand; any scope).

        Scope "cta" does not reach waiters of another CTA; "relaxed" releases of memory only what
        came before the last fence.acq_rel.
        """
        target = self._barrier(barrier)
        if agent not in self._threads:
            strand = self._strand(agent)
            if strand.kind not in COPIES:
                raise OrderingError(f"{op} ({agent}, {line}): only {COPIES} arrive by themselves")
            strand.barriers.append(barrier)
            target.arrive_strand(strand)
            return
        thread = self._thread(agent)
        _check_scope(scope, op, agent, line)
        thread.step()
        message = thread.relaxed_message() if scope == "relaxed" else thread.message()
        target.arrive(message, thread.cta, scope != "cta")

    def commit(self, agent: str, barrier: str, op: str, line: str) -> None:
        """tcgen05.commit: arrives when the MMAs that `agent` has issued so far are done.

        Implies the tcgen05 before-fence; does not release the thread's generic accesses. A
        multicast is one commit for each barrier.
        """
        thread = self._thread(agent)
        thread.before_tick = thread.step()
        for strand in reversed(thread.running):
            if strand.number <= thread.committed:
                break
            strand.barriers.append(barrier)
        thread.committed = thread.issued.get("mma", 0)
        self._barrier(barrier).commit(thread)

    def complete(self, barrier: str) -> None:
        """The phase of `barrier` is complete: waits from now on see what has arrived."""
        self._barrier(barrier).complete()

    def wait(
        self,
        agent: str,
        barrier: str,
        op: str,
        line: str,
        scope: str = "cluster",
        late: bool = False,
    ) -> None:
        """Acquire the completed phases of `barrier` (none yet: a fresh barrier, nothing).

        `late`: told of when one more phase has been completed than the wait was for.
        """
        thread, source = self._thread(agent), self._barrier(barrier)
        _check_scope(scope, op, agent, line)
        thread.step()
        self._end(source.take(thread, late))
        message = source.message(thread.cta, scope != "cta", late)
        if scope == "relaxed":
            thread.acquire_relaxed(message)
        else:
            thread.acquire(message)

    def sync(self, agents: Sequence[str], name: str, op: str, line: str) -> None:
        """A named or cluster barrier that all `agents` have reached: each releases and acquires."""
        threads = [self._thread(agent) for agent in agents]
        everything = Message()
        for thread in threads:
            thread.step()
            everything = everything.joined(thread.message())
        for thread in threads:
            thread.acquire(everything)

    # ---- results ---------------------------------------------------------------------------

    def races(self) -> list[Race]:
        """Unordered pairs, each pair of operations and lines once, in the order found."""
        return [race for race in self._found.values() if self.mode == "ptx" or not race.needs_a1]

    def a1_edges(self) -> list[Race]:
        """Pairs that only rule A1 orders (in mode "ptx" they are races as well)."""
        return [race for race in self._found.values() if race.needs_a1]


def replay(events: Iterable[tuple], mode: str = "practice") -> Ordering:
    """The checker after `events`: tuples of a verb and its arguments, keywords as a last dict."""
    order = Ordering(mode)
    for event in events:
        verb, *arguments = event
        if verb not in VERBS:
            raise OrderingError(f"event {event!r}: verbs are {VERBS}")
        keywords = arguments.pop() if arguments and isinstance(arguments[-1], dict) else {}
        getattr(order, verb)(*arguments, **keywords)
    return order


def _frozen(value):
    """Lists of lists, as a log may have them, as tuples."""
    return tuple(_frozen(item) for item in value) if isinstance(value, list | tuple) else value


def _check_scope(scope: str, op: str, agent: str, line: str) -> None:
    if scope not in SCOPES:
        raise OrderingError(f"{op} ({agent}, {line}): scope {scope!r}; scopes are {SCOPES}")


def _party(access: Access) -> Party:
    return Party(
        access.thread.name,
        access.kind,
        access.op,
        access.line,
        access.memory,
        access.intervals,
        access.mode,
    )


def _replaces(old: Access, new: Access) -> bool:
    """Whether everything ordered after the read `new` is ordered after the read `old` too."""
    if old.thread is not new.thread or old.kind != new.kind:
        return False
    if old.kind == "mma":
        return old.strand.pipeline == new.strand.pipeline
    return missing_edge(old, new) is None
