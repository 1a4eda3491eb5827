# SPDX-License-Identifier: Apache-2.0
"""From the records of an executed log to steps, as a reader of the schedule thinks of them.

Records that belong together become one step: the MMAs of a product (an instruction has depth 16),
the boxes of a tile's copy, loads of neighbouring columns. Runs: host.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from ..plan import Plan
from .layouts import (
    InstructionDescriptor,
    decode_instruction_descriptor,
    decode_smem_descriptor,
    element_address,
)
from .log import (
    ALONE,
    CLUSTER,
    FENCES,
    OFFSET,
    PAIR,
    READ_ONLY,
    RELAXED,
    TMEM_A,
    WORD,
    Event,
    Kind,
    Log,
)

CHUNK = 16  # bytes that lie together whatever the layout
MMA_K = 16  # depth of one instruction
QUARTERS = 4  # of the lanes of tensor memory; a cell is column * 4 + quarter
TMEM_A_COLUMNS = 8  # of 32 bits, that 16 elements of A take
Intervals = tuple[tuple[int, int], ...]


class Names:
    """Words for barriers, warps and places; with a plan its own, else numbers."""

    def __init__(self, plan: Plan | None = None, smem: int = 0):
        self.plan, self.smem = plan, smem
        offsets = plan.mbarrier_offsets if plan else {}
        self._mbarriers = {smem + offset: name for name, offset in offsets.items()}
        self._roles = {warp: role for role in plan.roles for warp in role.warps} if plan else {}

    def mbarrier(self, address: int) -> str:
        """An mbarrier by its offset in shared memory."""
        return self._mbarriers.get(address & OFFSET, f"mbarrier {address & OFFSET:#x}")

    def named(self, number: int) -> str:
        """A named barrier."""
        for row in self.plan.barriers if self.plan else ():
            if row.kind == "named" and row.number <= number < row.number + row.stages:
                return row.name if row.stages == 1 else f"{row.name}[{number - row.number}]"
        return f"barrier {number}"

    def warp(self, warp: int) -> str:
        """A warp: its role, with its place in it where the role has several."""
        role = self._roles.get(warp)
        if role is None:
            return f"warp {warp}"
        return role.name if len(role.warps) == 1 else f"{role.name}.{warp - role.warps[0]}"

    def shared(self, start: int) -> str:
        """The buffer, and the slot where it has several, that holds a byte."""
        for buffer in self.plan.smem if self.plan else ():
            into = start - self.smem - self.plan.smem_offsets[buffer.name]
            if 0 <= into < buffer.total_bytes:
                slot = into // buffer.slot_bytes
                return f"{buffer.name}[{slot}]" if buffer.stages > 1 else buffer.name
        return f"shared {start:#x}"

    def columns(self, first: int, columns: int) -> str:
        """The smallest region of tensor memory that holds the columns."""
        holding = [
            row
            for row in (self.plan.tmem if self.plan else ())
            if row.column <= first and first + columns <= row.column + row.columns
        ]
        if holding:
            return min(holding, key=lambda row: row.columns).name
        return f"columns {first}-{first + columns - 1}"


@dataclass(slots=True)
class Step:
    """One step of a warp. `what`: a barrier, a fence, a place; `numbers`: as the verb has them.

    reads and writes: (memory, cells) that it touches, memories as `common.ordering` names them.
    line: of the sm_100a PTX, of the first record; lanes: mask of its lanes.
    """

    agent: str
    rank: int
    warp: int
    verb: str
    what: str
    line: int
    lanes: int
    numbers: tuple[int, ...] = ()
    targets: tuple[tuple[str, int], ...] = ()  # barriers, with the arrivals each gets
    reads: tuple[tuple[str, Intervals], ...] = ()
    writes: tuple[tuple[str, Intervals], ...] = ()
    facts: dict = field(default_factory=dict)
    instruction: InstructionDescriptor | None = None  # of an MMA
    records: list[Event] = field(default_factory=list)

    @property
    def op(self) -> str:
        """For messages: verb and place."""
        return f"{self.verb} {self.what}".rstrip()


def steps(log: Log, plan: Plan | None = None) -> list[Step]:
    """The steps of a cluster in an order that happened. Raises ValueError for a bad descriptor."""
    return _Reader(log, Names(plan, log.smem)).read()


def joined(cells: Iterable[int]) -> Intervals:
    """Numbers as ascending intervals."""
    found: list[list[int]] = []
    for cell in sorted(cells):
        if found and found[-1][1] == cell:
            found[-1][1] = cell + 1
        else:
            found.append([cell, cell + 1])
    return tuple((start, stop) for start, stop in found)


def span(start: int, size: int) -> Intervals:
    """Cells of `size` bytes of shared memory from `start` on."""
    return ((start // WORD, -(-(start + size) // WORD)),)


class _Reader:
    """Groups the records of each warp; a step stands where its first record did."""

    def __init__(self, log: Log, names: Names):
        self.log, self.names = log, names
        self.pair = log.ctas == 2
        self.tensors: dict[int, int] = {}  # address of a tensor map -> its number

    def read(self) -> list[Step]:
        found: list[list[Event]] = []
        newest: dict[tuple[int, int], list[Event]] = {}
        for event in self.log.events:
            group = newest.get((event.rank, event.warp))
            if group and _joins(group, event):
                group.append(event)
                continue
            newest[event.rank, event.warp] = [event]
            found.append(newest[event.rank, event.warp])
        return [self._step(group) for group in found]

    def _suffix(self, rank: int) -> str:
        return f"@{rank}" if self.pair else ""

    def _barrier(self, address: int) -> str:
        return self.names.mbarrier(address) + self._suffix(address >> 24)

    def _step(self, group: list[Event]) -> Step:
        event = group[0]
        agent = self.names.warp(event.warp) + self._suffix(event.rank)
        step = Step(agent, event.rank, event.warp, "", "", event.line, event.lanes, records=group)
        MAKERS[event.kind](self, step, event)
        return step

    # ---- what a step says, by kind ---------------------------------------------------------

    def _fence(self, step: Step, event: Event) -> None:
        step.verb, step.what = "fence", FENCES[event.words[0]]

    def _wait(self, step: Step, event: Event) -> None:
        step.verb, step.what = "wait", self._barrier(event.words[0])
        step.numbers, step.facts = (event.words[1],), _scope(event)

    def _arrive(self, step: Step, event: Event) -> None:
        barrier, each, size = event.words[:3]
        step.verb, step.what = "arrive", self._barrier(barrier)
        step.numbers = (each * event.count, size * event.count)
        step.facts = _scope(event)

    def _complete(self, step: Step, event: Event) -> None:
        step.verb, step.what = "complete", self._barrier(event.words[0])
        step.numbers = (event.words[1] * event.count,)

    def _init(self, step: Step, event: Event) -> None:
        step.verb, step.what = "init", self._barrier(event.words[0])
        step.numbers = (event.words[1],)

    def _commit(self, step: Step, event: Event) -> None:
        barrier, mask = event.words[:2]
        ranks = [rank for rank in range(self.log.ctas) if mask >> rank & 1]
        if mask == ALONE:
            ranks = [barrier >> 24]
        if not ranks:
            raise ValueError(f"PTX line {event.line}: a commit with mask {mask:#x} reaches no CTA")
        places = [self._barrier(barrier & OFFSET | rank << 24) for rank in ranks]
        step.verb, step.what = "commit", ", ".join(places)
        step.targets = tuple((place, 1) for place in places)

    def _tmem(self, step: Step, event: Event) -> None:
        address, columns, lanes = event.words[:3]
        first, quarter = address & 0xFFFF, (address >> 16) // 32
        columns = sum(record.words[1] for record in step.records)
        step.verb = "tmem.ld" if event.kind == Kind.LOAD_TMEM else "tmem.st"
        step.what, step.numbers = self.names.columns(first, columns), (first, columns, lanes)
        cells = tuple(
            (column * QUARTERS + quarter, column * QUARTERS + quarter + 1)
            for column in range(first, first + columns)
        )
        place = ((f"tmem{self._suffix(event.rank)}", cells),)
        step.reads, step.writes = (place, ()) if step.verb == "tmem.ld" else ((), place)

    def _allocate(self, step: Step, event: Event) -> None:
        first, columns, address = event.words[:3]
        step.verb = "alloc" if event.kind == Kind.ALLOC else "dealloc"
        step.facts = {"pair": bool(event.flags & PAIR)}
        step.numbers = (first, columns)
        cells = ((first * QUARTERS, (first + columns) * QUARTERS),)
        memory = f"tmem{self._suffix(event.rank)}"
        if step.verb == "dealloc":
            step.writes = ((memory, cells),)
        else:
            step.reads = ((memory, cells),)
            step.writes = ((f"smem{self._suffix(event.rank)}", span(address & OFFSET, 4)),)

    def _mma(self, step: Step, event: Event) -> None:
        in_tmem, pair = event.flags & TMEM_A, bool(event.flags & PAIR)
        instruction = decode_instruction_descriptor(event.words[5], 2 if pair else 1)
        d, depth = event.words[0] & 0xFFFF, MMA_K * len(step.records)
        halves = pair and instruction.m == 128
        width = instruction.n // 2 if halves else instruction.n
        step.verb, step.what = "mma", self.names.columns(d, width)
        step.numbers = (d, width, event.words[6], instruction.m, instruction.n, depth)
        b = _operand(step.records, 3, instruction, False, instruction.n // (2 if pair else 1))
        d_cells = ((d * QUARTERS, (d + width) * QUARTERS),)
        step.reads, step.writes = (), ()
        for rank in range(self.log.ctas) if pair else (event.rank,):
            smem, tmem = f"smem{self._suffix(rank)}", f"tmem{self._suffix(rank)}"
            a_reads = (tmem, _tmem_operand(step.records))
            if not in_tmem:
                rows = instruction.m // (2 if pair else 1)
                a_reads = (smem, _operand(step.records, 1, instruction, True, rows))
            step.reads += ((smem, b), a_reads)
            step.writes += ((tmem, d_cells),)
        shape = (instruction.m, instruction.n)
        step.facts = {"cta_group": 2 if pair else 1, "accumulator": d_cells, "shape": shape}
        step.instruction = instruction

    def _copy(self, step: Step, event: Event) -> None:
        smem, other, _, tensor = event.words[:4]
        size = sum(record.words[2] for record in step.records)
        number = self.tensors.setdefault(tensor, len(self.tensors)) if tensor else -1
        coordinates = *event.words[5:9], event.words[4]  # the fifth is apart
        columns = tuple(record.words[5] for record in step.records)  # of each box
        step.what = self.names.shared(smem & OFFSET)
        step.numbers = (smem & OFFSET, size, number, *coordinates)
        step.facts = {"columns": columns}
        memory = f"smem{self._suffix(smem >> 24 if self.pair else 0)}"
        place = ((memory, span(smem & OFFSET, size)),)
        step.verb = {Kind.LOAD: "load", Kind.STORE: "store", Kind.REDUCE: "reduce"}[event.kind]
        if event.kind == Kind.LOAD:
            step.writes, step.targets = place, ((self._barrier(other), size),)
        else:
            step.reads = place

    def _peer_copy(self, step: Step, event: Event) -> None:
        smem, there, size, barrier = event.words[0], event.words[1], event.words[2], event.words[5]
        step.verb, step.what = "copy", self.names.shared(smem & OFFSET)
        step.numbers = (smem & OFFSET, size)
        step.reads = ((f"smem{self._suffix(event.rank)}", span(smem & OFFSET, size)),)
        step.writes = ((f"smem{self._suffix(there >> 24)}", span(there & OFFSET, size)),)
        step.targets = ((self._barrier(barrier), size),)

    def _shared(self, step: Step, event: Event) -> None:
        cells = joined({cell for record in step.records for cell in record.cells})
        size = sum((record.words[0] & 0xFFFF) * record.count for record in step.records)
        rank = event.words[0] >> 16 if self.pair else 0
        step.verb = {Kind.READ: "read", Kind.WRITE: "write", Kind.UPDATE: "update"}[event.kind]
        step.what, step.numbers = self.names.shared(cells[0][0] * WORD), (size,)
        place = ((f"smem{self._suffix(rank)}", cells),)
        step.reads, step.writes = (place, ()) if event.kind == Kind.READ else ((), place)

    def _named(self, step: Step, event: Event) -> None:
        step.verb = "bar.arrive" if event.kind == Kind.BAR_ARRIVE else "bar.wait"
        step.what = self.names.named(event.words[0]) + self._suffix(event.rank)
        step.numbers = (event.words[1],)

    def _cluster(self, step: Step, event: Event) -> None:
        step.verb = "cluster.arrive" if event.kind == Kind.CLUSTER_ARRIVE else "cluster.wait"
        step.facts = _scope(event)

    def _bulk_wait(self, step: Step, event: Event) -> None:
        step.verb, step.numbers = "bulk.wait", (event.words[0],)
        step.facts = {"read": bool(event.flags & READ_ONLY)}

    def _exit(self, step: Step, event: Event) -> None:
        step.verb = "exit"


MAKERS: dict[Kind, Callable[[_Reader, Step, Event], None]] = {
    Kind.FENCE: _Reader._fence,
    Kind.WAIT: _Reader._wait,
    Kind.ARRIVE: _Reader._arrive,
    Kind.COMPLETE: _Reader._complete,
    Kind.INIT: _Reader._init,
    Kind.COMMIT: _Reader._commit,
    Kind.LOAD_TMEM: _Reader._tmem,
    Kind.STORE_TMEM: _Reader._tmem,
    Kind.ALLOC: _Reader._allocate,
    Kind.DEALLOC: _Reader._allocate,
    Kind.MMA: _Reader._mma,
    Kind.LOAD: _Reader._copy,
    Kind.STORE: _Reader._copy,
    Kind.REDUCE: _Reader._copy,
    Kind.COPY: _Reader._peer_copy,
    Kind.READ: _Reader._shared,
    Kind.WRITE: _Reader._shared,
    Kind.UPDATE: _Reader._shared,
    Kind.BAR_ARRIVE: _Reader._named,
    Kind.BAR_WAIT: _Reader._named,
    Kind.CLUSTER_ARRIVE: _Reader._cluster,
    Kind.CLUSTER_WAIT: _Reader._cluster,
    Kind.BULK_WAIT: _Reader._bulk_wait,
    Kind.EXIT: _Reader._exit,
}


def _scope(event: Event) -> dict:
    if event.flags & RELAXED:
        return {"scope": "relaxed"}
    return {"scope": "cluster" if event.flags & CLUSTER else "cta"}


def _joins(group: list[Event], event: Event) -> bool:
    """Whether a record continues the step that `group` holds."""
    last = group[-1]
    if last.kind != event.kind or last.flags != event.flags:
        return False
    a, b = last.words, event.words
    if event.kind == Kind.MMA:
        return a[0] == b[0] and a[5] == b[5] and b[6] == 1
    if event.kind in (Kind.LOAD_TMEM, Kind.STORE_TMEM):
        return a[2] == b[2] and a[0] + a[1] == b[0]
    if event.kind == Kind.LOAD:
        return a[1] == b[1] and a[0] + a[2] == b[0] and _next_box(a, b)
    if event.kind in (Kind.STORE, Kind.REDUCE):
        return a[0] + a[2] == b[0] and _next_box(a, b)
    if event.kind in (Kind.READ, Kind.WRITE):
        return a[0] >> 16 == b[0] >> 16
    return False


def _next_box(a: tuple[int, ...], b: tuple[int, ...]) -> bool:
    """Whether the second copy is of the same tensor and rows, columns further on."""
    return a[3] == b[3] and a[4] == b[4] and a[6:] == b[6:] and b[5] > a[5]


def _operand(records: list[Event], word: int, instruction, is_a: bool, rows: int) -> Intervals:
    words = tuple(record.words[word] | record.words[word + 1] << 32 for record in records)
    return _cells_of(words, instruction.a_mn_major if is_a else instruction.b_mn_major, rows)


@functools.lru_cache(maxsize=4096)
def _cells_of(descriptors: tuple[int, ...], mn_major: bool, rows: int) -> Intervals:
    """Cells that an operand of some descriptors, each of depth 16, covers."""
    cells: set[int] = set()
    for word in descriptors:
        cells |= _cells_of_one(word, mn_major, rows)
    return joined(cells)


@functools.lru_cache(maxsize=4096)
def _cells_of_one(word: int, mn_major: bool, rows: int) -> frozenset[int]:
    operand = decode_smem_descriptor(word, mn_major)
    if mn_major:  # 8 rows are contiguous
        places = ((row, k) for row in range(0, rows, 8) for k in range(MMA_K))
    else:
        places = ((row, k) for row in range(rows) for k in (0, 8))
    starts = (element_address(operand, row, k, mn_major) // WORD for row, k in places)
    return frozenset(start + word for start in starts for word in range(CHUNK // WORD))


def _tmem_operand(records: list[Event]) -> Intervals:
    cells = set()
    for record in records:
        first = record.words[1] & 0xFFFF
        cells |= set(range(first * QUARTERS, (first + TMEM_A_COLUMNS) * QUARTERS))
    return joined(cells)


__all__ = ["Names", "Step", "joined", "span", "steps"]
