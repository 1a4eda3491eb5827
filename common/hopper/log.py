# SPDX-License-Identifier: Apache-2.0
"""The executed log: what the warps of a rewritten kernel did, in an order in which it happened.

`record.py` says which statements are logged, `engine.cu` writes the records, `decode` reads them.
There is one log for each cluster (a CTA, or a pair). Runs: host.
"""

from __future__ import annotations

import enum
from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np

from ..plan import TMEM_COLUMNS
from .engine import LOG_HEADER, LOG_UNIT

NO_WORD = 0xFFFF  # of a lane that took no part
WORD = 4  # bytes; shared memory is counted in these
RELAXED, CLUSTER, GPU, READ_ONLY = 1, 2, 4, 8  # flags
TMEM_A, PAIR = 1, 2  # flags of tcgen05 operations: A in tensor memory, cta_group::2
WINDOW = 256  # records of a warp by which its lanes may come apart
OFFSET = 0xFFFFFF  # of a shared::cluster address; the CTA's rank stands above
ALONE = 0xFFFFFFFF  # mask of a commit that is no multicast


class Kind(enum.IntEnum):
    """What a record says, and in which words (a is the fourth; b to e are the next unit)."""

    FENCE = 1  # a: index in FENCES
    WAIT = 2  # a: barrier, b: parity; the wait has passed
    ARRIVE = 3  # a: barrier, b: arrivals of a lane (0: none), c: bytes that it expects
    COMPLETE = 4  # a: barrier, b: bytes
    INIT = 5  # a: barrier, b: arrivals of a phase
    COMMIT = 6  # a: barrier, b: CTAs (ALONE: no multicast), c: cta_group
    LOAD_TMEM = 7  # a: address, b: columns, c: lanes
    STORE_TMEM = 8  # as LOAD_TMEM
    ALLOC = 9  # a: column, b: columns, c: where the address was written
    DEALLOC = 10  # a: column, b: columns
    MMA = 11  # a: D, then descriptors of A (or its address) and B, instruction, accumulate
    LOAD = 12  # a: destination, b: barrier, c: bytes, d: tensor, e: fifth coordinate, the others
    STORE = 13  # a: source, then as LOAD
    REDUCE = 14  # as STORE
    COPY = 15  # to the peer's shared memory; a: source, b: destination, c: bytes, f: barrier
    READ = 16  # a: bytes of a lane | rank of the CTA << 16, then each lane's first word
    WRITE = 17  # as READ
    UPDATE = 18  # as READ: an atomic operation
    BAR_ARRIVE = 19  # a: named barrier, b: threads
    BAR_WAIT = 20  # a: named barrier; all have come
    CLUSTER_ARRIVE = 21
    CLUSTER_WAIT = 22
    BULK_WAIT = 23  # a: groups that may remain
    EXIT = 24


FENCES = (
    "tcgen05.before",
    "tcgen05.after",
    "wait.ld",
    "wait.st",
    "proxy.async",
    "proxy.async.global",
    "acq_rel",
    "mbarrier_init",
    "bulk.commit",
)
UNITS = {Kind.MMA: 3, Kind.LOAD: 3, Kind.STORE: 3, Kind.REDUCE: 3, Kind.COPY: 3}
UNITS |= dict.fromkeys((Kind.READ, Kind.WRITE, Kind.UPDATE), 5)
UNITS |= dict.fromkeys(
    (Kind.FENCE, Kind.CLUSTER_ARRIVE, Kind.CLUSTER_WAIT, Kind.BULK_WAIT, Kind.EXIT), 1
)
OTHERS = 2  # units of the other kinds
COPIES = (Kind.LOAD, Kind.STORE, Kind.REDUCE, Kind.COPY)
MAX_COPY = 1 << 18  # bytes: more than a CTA's shared memory
SHARED = (Kind.READ, Kind.WRITE, Kind.UPDATE)


class LogError(ValueError):
    """A log that cannot be read; the message says where."""


@dataclass(frozen=True, slots=True)
class Event:
    """One record. `lanes`: mask of those that took part; `words`: a, b, ... of its kind."""

    kind: Kind
    flags: int
    warp: int
    rank: int
    line: int
    lanes: int
    words: tuple[int, ...]
    cells: tuple[int, ...] = ()

    @property
    def count(self) -> int:
        """Lanes that took part."""
        return self.lanes.bit_count()


@dataclass(frozen=True)
class Log:
    """The events of one cluster in order.

    smem: first byte of dynamic shared memory; threads of a CTA (the kernel's own); ctas of the
    cluster; cta: index of its first one; size in bytes.
    """

    events: tuple[Event, ...]
    smem: int
    threads: int
    ctas: int
    cta: int
    size: int


def decode(data: bytes) -> Log:
    """The log in `data`: a header, then records. Raises LogError for what cannot be one."""
    words = np.frombuffer(data[: len(data) // LOG_UNIT * LOG_UNIT], "<u4").reshape(-1, 4)
    if len(words) < LOG_HEADER:
        raise LogError(f"{len(data)} bytes are less than a log's header")
    used, smem, threads, ctas = (int(x) for x in words[0])
    if not threads or ctas not in (1, 2):
        raise LogError(f"the header says {threads} threads, {ctas} CTAs: nothing was logged")
    if LOG_HEADER + used > len(words):
        raise LogError(f"the log has {used} units, the data {len(words) - LOG_HEADER}")
    body = words[LOG_HEADER : LOG_HEADER + used]
    events = tuple(_merged(_events(body)))
    size = (LOG_HEADER + used) * LOG_UNIT
    return Log(events, smem & OFFSET, threads, ctas, int(words[1][0]), size)


def _events(body: np.ndarray) -> Iterator[Event]:
    at, rows = 0, body.tolist()
    while at < len(rows):
        what, line, lanes, a = rows[at]
        try:
            kind = Kind(what & 0xFF)
        except ValueError as wrong:
            raise LogError(f"unit {at}: {what & 0xFF} is no kind of record") from wrong
        units, rest, cells = UNITS.get(kind, OTHERS), (), ()
        if at + units > len(rows):
            raise LogError(f"unit {at}: {kind.name} is cut off")
        if kind in SHARED:
            first = body[at + 1 : at + 5].view("<u2").ravel()
            words = range(-(-(a & 0xFFFF) // WORD))
            cells = tuple(sorted({int(x) + i for x in first[first != NO_WORD] for i in words}))
        else:
            rest = tuple(word for row in rows[at + 1 : at + units] for word in row)
        _check_words(kind, at, (a, *rest), cells)
        yield Event(
            kind, what >> 8 & 0xFF, what >> 16 & 0xFF, what >> 24, line, lanes, (a, *rest), cells
        )
        at += units


def _check_words(kind: Kind, at: int, words: tuple[int, ...], cells: tuple[int, ...]) -> None:
    """LogError for what no kernel can have done; the reader relies on it."""
    columns = {Kind.LOAD_TMEM, Kind.STORE_TMEM, Kind.ALLOC, Kind.DEALLOC}
    wrong = (
        (kind == Kind.FENCE and words[0] >= len(FENCES))
        or (kind in SHARED and not cells)
        or (kind in columns and not 0 < words[1] <= TMEM_COLUMNS)
        or (kind in columns and words[0] & 0xFFFF >= TMEM_COLUMNS)
        or (kind in COPIES and not 0 < words[2] <= MAX_COPY)
        or (kind == Kind.WAIT and words[1] > 1)
    )
    if wrong:
        raise LogError(f"unit {at}: {kind.name} of {', '.join(map(hex, words))} cannot be")


def _merged(events: Iterator[Event]) -> list[Event]:
    """One event for each statement that a warp executed, also where its lanes came apart.

    Lanes that come apart leave a record each, with those of other statements between. The n-th time
    that a lane executes a statement belongs to the n-th time of the other lanes, unless the lanes'
    own orders contradict. An event stands where its first record did, or behind what one of its
    lanes had done before.
    """
    warps: dict[tuple[int, int], _Warp] = {}
    for place, event in enumerate(events):
        warps.setdefault((event.rank, event.warp), _Warp()).add(place, event)
    placed = [row for warp in warps.values() for row in warp.placed()]
    return [event for _, _, event in sorted(placed, key=lambda row: row[:2])]


@dataclass(eq=False)
class _Step:
    """An event under construction. before: what its lanes did just before."""

    number: int
    place: int
    event: Event
    before: set[_Step]

    def follows(self, other: _Step) -> bool:
        """Whether some lane did `other` before this; looks a window back."""
        seen, waiting = {self}, [self]
        while waiting:
            step = waiting.pop()
            if step is other:
                return True
            fresh = {x for x in step.before if x.number > other.number - WINDOW} - seen
            seen |= fresh
            waiting += fresh
        return False


class _Warp:
    """The steps of one warp so far. Lanes are masks: there are few different ones."""

    def __init__(self):
        self.steps: list[_Step] = []
        self.last: list[tuple[int, _Step]] = []  # lanes, and what they did last
        self.times: dict[tuple, dict[int, int]] = {}  # of a statement, by lanes
        self.newest: dict[tuple, _Step] = {}  # by statement and time

    def add(self, place: int, event: Event) -> None:
        """Make a step of a record, or join it to the one that other lanes have made."""
        lanes, statement = event.lanes, (event.kind, event.flags, event.line, event.words)
        times = self.times.setdefault(statement, {})
        lowest = lanes & -lanes
        turn = sum(count for mask, count in times.items() if mask & lowest)
        times[lanes] = times.get(lanes, 0) + 1
        before = {step for mask, step in self.last if mask & lanes}
        step = self.newest.get((statement, turn))
        if step is None or step.event.lanes & lanes or any(x.follows(step) for x in before):
            step = _Step(len(self.steps), place, event, set())
            self.steps.append(step)
            self.newest[statement, turn] = step
        else:
            cells = tuple(sorted({*step.event.cells, *event.cells}))
            step.event = replace(step.event, lanes=step.event.lanes | lanes, cells=cells)
        step.before |= before
        rest = [(mask & ~lanes, other) for mask, other in self.last if mask & ~lanes]
        self.last = [*rest, (lanes, step)]

    def placed(self) -> Iterator[tuple[int, int, Event]]:
        """(place in the log, place among equals, event) of each step, behind what it follows."""
        places: dict[_Step, int] = {}
        for index, step in enumerate(self._in_order()):
            places[step] = max([step.place, *(places[x] for x in step.before)])
            yield places[step], index, step.event

    def _in_order(self) -> Iterator[_Step]:
        """The steps, each behind those before it."""
        done: set[_Step] = set()
        for first in self.steps:
            waiting = [first]
            while waiting:
                step = waiting[-1]
                missing = [x for x in step.before if x not in done]
                if step in done or not missing:
                    waiting.pop()
                    if step not in done:
                        done.add(step)
                        yield step
                else:
                    waiting += missing
