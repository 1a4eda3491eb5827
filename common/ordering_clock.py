# SPDX-License-Identifier: Apache-2.0
"""What the happens-before checker knows about threads, strands and barriers: vector clocks.

A thread counts its events; a clock says up to which count the events of each thread are known.
There are two entries a thread: its own doings (key `index`) and the completions that it acquired
at barriers (key `~index`). Strands have no entry: a strand remembers which threads know since when
that it is done, so clocks stay as small as the number of threads. Runs: host.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import deque
from collections.abc import Mapping
from types import MappingProxyType
from typing import NamedTuple

Clock = Mapping[int, int]  # never changed: threads share them
EMPTY: Clock = MappingProxyType({})

COPIES = ("tma.load", "dsmem.copy")  # their completion counts bytes on an mbarrier
STORES = ("tma.store", "reduce")  # their completion is waited for by the issuing thread
TENSOR = ("mma", "tmem.ld", "tmem.st")
KINDS = (*TENSOR, *COPIES, *STORES)


def join(a: Clock, b: Clock) -> Clock:
    """The later of two clocks, entry by entry; the arguments stay as they are."""
    if a is b or not b:
        return a
    if not a:
        return b
    out = dict(a)
    for key, tick in b.items():
        if tick > out.get(key, 0):
            out[key] = tick
    return out


class Message(NamedTuple):
    """What a release carries: three clocks, one for each kind of visibility."""

    base: Clock = EMPTY  # everything done
    proxy: Clock = EMPTY  # done before the doer's fence.proxy.async
    tensor: Clock = EMPTY  # done before the doer's tcgen05 before-fence

    def joined(self, other: Message) -> Message:
        """The later of the two."""
        return Message(*(join(a, b) for a, b in zip(self, other)))


class Views(NamedTuple):
    """What a thread knows at some point; a strand starts with its issuer's."""

    base: Clock = EMPTY
    proxy: Clock = EMPTY
    tensor: Clock = EMPTY
    proxy_seen: Clock = EMPTY  # `proxy` at the thread's own last fence.proxy.async
    tensor_seen: Clock = EMPTY  # `tensor` at the thread's own last tcgen05 after-fence
    proxy_tick: int = 0  # when that proxy fence was


NOTHING = Views()


class Prefix:
    """When a thread learnt that the first `number` MMAs of another one are done."""

    def __init__(self):
        self._numbers: list[int] = []
        self._ticks: list[int] = []

    def add(self, number: int, tick: int) -> None:
        """All MMAs up to `number` are known to be done since `tick`."""
        if not self._numbers or number > self._numbers[-1]:
            self._numbers.append(number)
            self._ticks.append(tick)

    def since(self, number: int) -> int | None:
        """Since when MMA `number` is known to be done, or None."""
        at = bisect_left(self._numbers, number)
        return self._ticks[at] if at < len(self._ticks) else None


class Thread:
    """A warp role, or whatever else acts as one thread. `cta` is what follows "@" in its name."""

    def __init__(self, name: str, index: int):
        self.name, self.index = name, index
        self.cta = name.partition("@")[2] or "0"
        self.tick = 0
        self.views = NOTHING
        self.before_tick = 0  # of the last tcgen05 before-fence or commit
        self.fenced = Message()  # released by relaxed arrives: as of the last fence.acq_rel
        self.deferred = Message()  # acquired by relaxed waits: counts from the next fence.acq_rel
        self.issued: dict[str, int] = {}  # strands so far, by kind
        self.outstanding: dict[str, dict[str, Strand]] = {kind: {} for kind in KINDS}  # by name
        self.running: deque[Strand] = deque()  # MMAs nobody knows to be done
        self.committed = 0  # MMAs covered by a commit
        self.known_mma: dict[int, Prefix] = {}  # thread index -> what it knows of these MMAs

    def step(self) -> int:
        """The next event's tick."""
        self.tick += 1
        return self.tick

    def message(self) -> Message:
        """What an arrive of this thread releases."""
        views = self.views
        return Message(
            {**views.base, self.index: self.tick},
            {**views.proxy, self.index: views.proxy_tick},
            {**views.tensor, self.index: self.before_tick},
        )

    def relaxed_message(self) -> Message:
        """A relaxed arrive: memory as of the last fence.acq_rel; tcgen05 fences count anyway."""
        return Message(self.fenced.base, self.fenced.proxy, self.message().tensor)

    def commit_message(self) -> Message:
        """A commit: what others released to the thread, not its own generic accesses."""
        return Message(self.views.base, self.views.proxy, self.message().tensor)

    def acquire_relaxed(self, message: Message) -> None:
        """A relaxed wait: tcgen05 operations are seen, memory from the next fence.acq_rel on."""
        self.deferred = self.deferred.joined(message)
        tensor = join(self.views.tensor, message.tensor)
        self.views = self.views._replace(tensor={**tensor, ~self.index: self.tick})

    def acquire(self, message: Message) -> None:
        """Know what `message` carries, from this tick on."""
        views = self.views
        self.views = views._replace(
            base={**join(views.base, message.base), ~self.index: self.tick},
            proxy=join(views.proxy, message.proxy),
            tensor={**join(views.tensor, message.tensor), ~self.index: self.tick},
        )


class Strand:
    """One asynchronous operation: issued at `tick`, knowing `views`."""

    def __init__(self, name: str, thread: Thread, kind: str, op: str, line: str, facts: dict):
        self.name, self.thread, self.kind, self.op, self.line = name, thread, kind, op, line
        self.facts = facts
        self.number = thread.issued[kind]
        self.tick, self.views = thread.tick, thread.views
        self.cta_group = facts.get("cta_group", 1)
        self.pipeline = (self.cta_group, facts.get("accumulator"), facts.get("shape"))
        self.barriers: list[str] = []  # that it arrives on
        self.reads_done: dict[int, int] = {}  # key of a thread -> tick since which it knows
        self.writes_done: dict[int, int] = self.reads_done if kind not in STORES else {}

    def done(self, key: int, tick: int, reads_only: bool = False) -> None:
        """A thread learns at `tick` that the strand is done, or has read its source."""
        self.reads_done.setdefault(key, tick)
        if not reads_only:
            self.writes_done.setdefault(key, tick)

    def completions(self, mode: str):
        """Who knows that the strand's reads (or writes) are done, and since when: (key, tick)."""
        if self.kind != "mma":
            yield from (self.reads_done if mode == "read" else self.writes_done).items()
            return
        for index, prefix in self.thread.known_mma.items():
            tick = prefix.since(self.number)
            if tick is not None:
                yield ~index, tick

    def message(self) -> Message:
        """What the end of the strand releases besides itself: what it started with."""
        return Message(self.views.base, self.views.proxy, self.views.tensor)


class Barrier:
    """An mbarrier or a flag in memory.

    What arrives adds to what arrived in earlier phases: arrivals are read-modify-writes of one
    word, so a waiter that skipped a phase has that phase's releases too.
    """

    def __init__(self, name: str):
        self.name = name
        self._pending: dict[str, Message] = {}  # by scope: "cluster", or the number of a CTA
        self._ready: dict[str, Message] = {}
        self._strands: list[Strand] = []
        self._ready_strands = 0
        self._taken: dict[int, int] = {}  # thread index -> strands it has seen the end of
        self._pending_mma: dict[int, tuple[Thread, int]] = {}
        self._ready_mma: dict[int, tuple[Thread, int]] = {}
        self._before = (self._ready, 0, self._ready_mma)  # as it was one phase ago

    def arrive(self, message: Message, cta: str, cluster: bool = True) -> None:
        """Add a release; one of CTA scope is for waiters of the same CTA."""
        for scope in ("cluster", cta) if cluster else (cta,):
            self._pending[scope] = self._pending.get(scope, Message()).joined(message)

    def arrive_strand(self, strand: Strand) -> None:
        """A copy has delivered its bytes."""
        self._strands.append(strand)
        self.arrive(strand.message(), strand.thread.cta)

    def commit(self, thread: Thread) -> None:
        """The MMAs that `thread` has issued so far are done."""
        self._pending_mma[thread.index] = (thread, thread.issued.get("mma", 0))
        self.arrive(thread.commit_message(), thread.cta)

    def complete(self) -> None:
        """Close the phase."""
        self._before = (self._ready, self._ready_strands, self._ready_mma)
        self._ready = dict(self._pending)
        self._ready_strands = len(self._strands)
        self._ready_mma = dict(self._pending_mma)

    def message(self, cta: str, cluster: bool = True, late: bool = False) -> Message:
        """What a wait of a thread of `cta` acquires; `late`: it passed before the last phase."""
        ready = self._before[0] if late else self._ready
        own = ready.get(cta, Message())
        return own.joined(ready.get("cluster", Message())) if cluster else own

    def take(self, thread: Thread, late: bool = False) -> list[Strand]:
        """Tell `thread` which strands are done; those that nobody knew of before."""
        ready = (self._ready, self._ready_strands, self._ready_mma)
        _, strands, mma = self._before if late else ready
        first = self._taken.get(thread.index, 0)
        self._taken[thread.index] = max(first, strands)
        ended = []
        for strand in self._strands[first:strands]:
            strand.done(~thread.index, thread.tick)
            ended.append(strand)
        for issuer, number in mma.values():
            issuer.known_mma.setdefault(thread.index, Prefix()).add(number, thread.tick)
            while issuer.running and issuer.running[0].number <= number:
                ended.append(issuer.running.popleft())
        return ended
