# SPDX-License-Identifier: Apache-2.0
"""Accesses, where they meet, and what is said about two that no edge orders.

Cells are integers. Tensor memory ("tmem...") counts column * 4 + lane quarter, shared memory
("smem...") bytes / 4; any other memory counts whatever its user counts. Runs: host.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from .ordering_clock import Strand, Thread, Views

Intervals = tuple[tuple[int, int], ...]
QUARTERS = 4  # lane quarters of a tensor memory column
SMEM_CELL = 4  # bytes
SHOWN = 4  # places in a message
KEPT = 16  # unordered readers of one thread and kind that a cell remembers
DOES = {"read": "reads", "write": "writes", "add": "adds to"}
FIRST = -(1 << 62)  # before any cell


class Access:
    """A read, write or add (reduction) of a thread, or of a strand that it issued."""

    __slots__ = ("intervals", "line", "memory", "mode", "op", "strand", "thread", "tick", "views")

    def __init__(self, doer: Thread | Strand, mode: str, memory: str, intervals: Intervals):
        self.strand = doer if isinstance(doer, Strand) else None
        self.thread: Thread = doer.thread if isinstance(doer, Strand) else doer
        self.tick: int = doer.tick
        self.views: Views = doer.views
        self.mode, self.memory, self.intervals = mode, memory, intervals
        self.op = self.line = ""

    def at(self, op: str, line: str) -> Access:
        """Itself, with its name and source line."""
        self.op, self.line = op, line
        return self

    @property
    def kind(self) -> str:
        """ "generic", or the kind of the strand."""
        return self.strand.kind if self.strand else "generic"

    @property
    def commutes(self) -> bool:
        """A reduction whose place among other reductions does not matter."""
        return self.mode == "add" and not self.strand.facts.get("ordered", False)


def conflict(a: Access, b: Access) -> bool:
    """Whether the order of two accesses to one cell can matter."""
    both_read = a.mode == "read" and b.mode == "read"
    return a is not b and not both_read and not (a.commutes and b.commutes)


@dataclass(frozen=True)
class Cell:
    """State of some cells: the last write, and the reductions and reads since."""

    write: Access | None = None
    adds: tuple[Access, ...] = ()
    reads: tuple[Access, ...] = ()

    def earlier(self) -> Iterator[Access]:
        """Everything remembered, oldest kind first."""
        if self.write:
            yield self.write
        yield from self.adds
        yield from self.reads


class Memory:
    """An interval map from cells to `Cell`; a write unites what it covers."""

    def __init__(self, replaces: Callable[[Access, Access], bool]):
        self._replaces = replaces  # whether a later read makes an earlier one redundant
        self._starts = [FIRST]
        self._cells = [Cell()]

    def access(self, access: Access) -> list[Access]:
        """Record an access; the earlier ones it conflicts with, each once."""
        earlier: dict[int, Access] = {}
        replaced: dict[int, bool] = {}
        for start, stop in access.intervals:
            i, j = self._split(start), self._split(stop)
            for cell in self._cells[i:j]:
                for other in cell.earlier():
                    if conflict(other, access):
                        earlier[id(other)] = other
            if access.mode == "write":
                self._starts[i:j] = [start]
                self._cells[i:j] = [Cell(access)]
                continue
            for k in range(i, j):
                self._cells[k] = self._with(self._cells[k], access, replaced)
        return list(earlier.values())

    def _split(self, at: int) -> int:
        """Index of the piece that starts at `at`, which is made if there is none."""
        index = bisect_left(self._starts, at)
        if index == len(self._starts) or self._starts[index] != at:
            self._starts.insert(index, at)
            self._cells.insert(index, self._cells[index - 1])
        return index

    def _with(self, cell: Cell, access: Access, replaced: dict[int, bool]) -> Cell:
        old = cell.reads if access.mode == "read" else cell.adds
        kept = []
        for other in old:
            if id(other) not in replaced:
                replaced[id(other)] = other is access or self._replaces(other, access)
            if not replaced[id(other)]:
                kept.append(other)
        alike = [other for other in kept if _doer(other) == _doer(access)]
        if len(alike) >= KEPT:
            kept.remove(alike[0])
        new = (*kept, access)
        return Cell(cell.write, *((cell.adds, new) if access.mode == "read" else (new, cell.reads)))


def _doer(access: Access) -> tuple[int, str]:
    return access.thread.index, access.kind


@dataclass(frozen=True)
class Party:
    """One side of a race: who did what, and where in the source."""

    agent: str
    kind: str  # "generic", or the kind of the strand: "mma", "tmem.ld", "tma.load", ...
    op: str
    line: str
    memory: str
    intervals: Intervals
    mode: str  # "read", "write", "add"

    def __str__(self) -> str:
        return f"{self.op} ({self.agent}, {self.line})"


@dataclass
class Race:
    """Two accesses that conflict, and the edge that would order them.

    `missing` is a key of LESSONS, `text` one sentence about this pair, `count` how often the pair
    of source lines was found unordered, `intervals` what both touch (the first time).
    """

    first: Party
    second: Party
    missing: str
    text: str
    intervals: Intervals
    needs_a1: bool = False
    count: int = 1

    def __str__(self) -> str:
        return self.text


LESSONS = {
    "wait": "A wait acquires only what arrived on that barrier, in phases that are complete. Let "
    "the second party wait for a barrier on which the first arrives after its access.",
    "wait::ld": "tcgen05.ld is asynchronous: that its registers are used later says nothing to "
    "other threads. Run wait::ld before the arrive that hands the columns back (or let "
    "the values feed a st). PTX 9.7.16.6.",
    "wait::st": "tcgen05.st is asynchronous and is done only at wait::st, which must come before "
    "the arrive. PTX 9.7.16.6.",
    "commit": "An arrive of the thread that issued an MMA says that it was issued, not that it is "
    "done: use tcgen05.commit. It covers the MMAs issued before it by the same thread, "
    "not ld or st. PTX 9.7.16.6.",
    "tcgen05.before": "Across threads a tcgen05 access is published by fence::before_thread_sync "
    "between its completion and the arrive. PTX 9.7.16.6.4.",
    "tcgen05.after": "After the wait, fence::after_thread_sync must come before the next tcgen05 "
    "operation, also where the wait is for the thread's own commit. PTX 9.7.16.6.4.",
    "fence.proxy.async": "MMAs and bulk copies go through the async proxy, which need not see a "
    "generic write until the writer itself runs fence.proxy.async after it and before its arrive. "
    "PTX 9.7.13.4; hardware rules 4.2.",
    "bulk.wait": "A bulk store or reduction has written only when its group is waited for "
    "(wait_group, not .read) by the thread that issued it.",
    "bulk.wait.read": "A bulk store or reduction reads shared memory after it was issued; "
    "wait_group.read by the issuing thread says that the source may be overwritten.",
    "bulk fence": "Results of bulk stores travel to another thread's accesses through generic "
    "flags: the issuer fences (fence.proxy.async.global) after wait_group and before its release, "
    "and an acquirer that goes on with bulk operations fences before them.",
    "copy": "That a copy was issued is known, not that it is done: its bytes are counted on the "
    "mbarrier it was given, and only a wait there sees them.",
    "A1": "Rule A1: MMAs of one thread with one cta_group execute in order, reads of A from tensor "
    "memory included. PTX promises it only for the same accumulator and shape; all public kernels "
    "rely on more. Mode 'practice' accepts the edge and lists it.",
}


def overlap(a: Intervals, b: Intervals) -> Intervals:
    """Cells that are in both."""
    both = {(max(s, t), min(u, v)) for s, u in a for t, v in b if max(s, t) < min(u, v)}
    return tuple(sorted(both))


def place(memory: str, intervals: Intervals) -> str:
    """Intervals in the units that people think in, the first few of many."""
    parts = _lane_quarters(intervals) if memory.startswith("tmem") else []
    for start, stop in () if parts else intervals:
        if memory.startswith("tmem"):
            parts.append(_columns(start, stop))
        elif memory.startswith("smem"):
            parts.append(f"bytes {start * SMEM_CELL}-{stop * SMEM_CELL - 1}")
        else:
            parts.append(f"cells {start}-{stop - 1}" if stop - start > 1 else f"cell {start}")
    if len(parts) > SHOWN:
        parts[SHOWN:] = [f"and {len(parts) - SHOWN} more"]
    return f"{memory} {', '.join(parts)}"


def _lane_quarters(intervals: Intervals) -> list[str]:
    """Neighbouring columns of one lane quarter as one part; empty when it is something else."""
    quarters = {start % QUARTERS for start, stop in intervals if stop == start + 1}
    columns = [start // QUARTERS for start, _ in intervals]
    whole = columns == list(range(columns[0], columns[0] + len(columns)))
    if len(quarters) != 1 or len(columns) < 2 or any(b != a + 1 for a, b in intervals) or not whole:
        return []
    return [f"columns {columns[0]}-{columns[-1]} (lane quarter {quarters.pop()})"]


def _columns(start: int, stop: int) -> str:
    first, last = start // QUARTERS, (stop - 1) // QUARTERS
    text = f"columns {first}-{last}" if last > first else f"column {first}"
    if start % QUARTERS == 0 and stop % QUARTERS == 0:
        return text
    return f"{text} (lane quarter {start % QUARTERS} to {(stop - 1) % QUARTERS})"


def explain(race: Race) -> str:
    """A race told at length: the sentence, both sides, and the rule behind the missing edge."""
    times = f"; found {race.count} times" if race.count > 1 else ""
    rows = [race.text + times]
    for label, party in (("first", race.first), ("second", race.second)):
        where = place(party.memory, party.intervals)
        how = "generic proxy" if party.kind == "generic" else f"strand: {party.kind}"
        rows.append(f"  {label}: {party} {DOES[party.mode]} {where} [{how}]")
    rows.append(f"  missing: {race.missing}")
    rows.append(f"  rule: {LESSONS[race.missing]}")
    return "\n".join(rows)
