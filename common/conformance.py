# SPDX-License-Identifier: Apache-2.0
"""Whether a kernel did what its model does: an executed log against a run of `model.py`.

Each warp's sequence of waits, arrivals, fences, MMAs, loads and stores must be that of its role in
the model, with the same barriers, phases, bytes, columns and tiles. Not compared: when barriers are
initialised, reads of the address of tensor memory, setmaxnreg, what goes through registers and
global memory, and which words of a buffer the lanes of a warp read and write (how many, and of
which slot, is). Runs: host.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from .envelope import TILE_ROWS
from .grid import Place
from .hopper.log import TMEM_A, WORD, Log
from .hopper.steps import QUARTERS, Names, Step, steps
from .model.notes import Intervals, Note
from .plan import THREADS_PER_WARP, Plan, Role

STATISTICS = 2 * TILE_ROWS  # numbers of a query tile: LSE and D of each row
AROUND = 4  # steps shown before and after a mismatch
ISSUED = ("load", "store", "reduce", "bulk.wait", "mma", "commit", "expect", "alloc", "dealloc")
IN_SHARED = ("read", "write", "load", "store", "reduce", "copy")
LEFT_OUT = ("init", "exit")
SILENT_FENCES = ("mbarrier_init", "bulk.commit")


@dataclass(frozen=True)
class Act:
    """A step or a note in the words of both. where: PTX line, or the model's line.

    barrier: its name in the plan, where `what` is none.
    """

    verb: str
    what: str
    numbers: tuple
    where: str
    barrier: str = ""

    @property
    def key(self) -> tuple:
        """What must be equal."""
        return self.verb, self.what, self.numbers

    def __str__(self) -> str:
        numbers = f" {', '.join(map(str, self.numbers))}" if self.numbers else ""
        return f"{self.verb} {self.what}".rstrip() + numbers


@dataclass(frozen=True)
class Difference:
    """The first place where a warp did something else; text shows both sides around it."""

    agent: str
    text: str

    def __str__(self) -> str:
        return f"{self.agent}: {self.text}"


@dataclass(frozen=True)
class Conformance:
    """differences: one for each warp that has any; acts: compared; lines: for each PTX line that
    was reached, the (role, line of the model, barrier or place) that it stands for."""

    differences: tuple[Difference, ...]
    acts: int
    lines: dict[int, frozenset[tuple[str, str, str]]]

    @property
    def exact(self) -> bool:
        """Whether every warp did what its role does."""
        return not self.differences


def conform(log: Log, notes: Sequence[Note], plan: Plan, place: Place) -> Conformance:
    """Compare the log of a CTA, or of a pair, with the notes of its model.

    place: of the CTA or pair, to know which tiles it has to load and store. Without notes it has
    nothing to do, and its threads end at once.
    """
    found = steps(log, plan)
    suffixes = [f"@{rank}" for rank in range(log.ctas)] if log.ctas > 1 else [""]
    tensors = _tensors(found, notes, plan, suffixes[0])
    busy = suffixes if notes else []  # CTAs that have anything to do
    differences = _initialised(found, plan, busy) + _warps(found, plan, log.ctas)
    lines, count = {}, 0
    for (rank, suffix), role in itertools.product(enumerate(suffixes), plan.roles):
        wanted = [note for note in notes if note.agent == role.name + suffix]
        of_cta = [step for step in found if step.rank == rank]
        for index, warp in enumerate(role.warps):
            did = list(_acts(of_cta, warp, log, tensors))
            mine = [note for note in wanted if note.quarter in (None, warp % QUARTERS)]
            should = list(_wanted(mine, plan, role, place))
            agent = (f"{role.name}.{index}" if len(role.warps) > 1 else role.name) + suffix
            pairs, difference = _match(did, should, plan, role, index)
            count += len(pairs)
            for act, note in pairs:
                line = int(act.where.rpartition(" ")[2])
                name = note.barrier or _row(note.what)
                lines.setdefault(line, set()).add((role.name, note.where, name))
            if difference:
                differences.append(Difference(agent, difference))
    return Conformance(
        tuple(differences), count, {line: frozenset(names) for line, names in lines.items()}
    )


def _row(what: str) -> str:
    """The name in the plan of a barrier, without slot and CTA."""
    return what.partition("@")[0].partition("[")[0]


def _initialised(found: list[Step], plan: Plan, suffixes: list[str]) -> list[Difference]:
    """Barriers whose arrivals of a phase are not the plan's, or that only one side has."""
    did = {step.what: step.numbers[0] for step in found if step.verb == "init"}
    should = {
        name + suffix: plan.barrier(_row(name)).arrivals(plan)
        for name in plan.mbarrier_offsets
        for suffix in suffixes
    }
    wrong = sorted(name for name in did.keys() | should.keys() if did.get(name) != should.get(name))
    return [
        Difference(
            name, f"initialised with {did.get(name)} arrivals, the plan has {should.get(name)}"
        )
        for name in wrong
    ]


def _warps(found: list[Step], plan: Plan, ctas: int) -> list[Difference]:
    """Warps that the plan does not have, and those whose threads did not all come to an end."""
    warps = [warp for role in plan.roles for warp in role.warps]
    planned = set(itertools.product(range(ctas), warps))
    ends = Counter({(step.rank, step.warp): 0 for step in found})
    for step in found:
        ends[step.rank, step.warp] += step.lanes.bit_count() if step.verb == "exit" else 0
    strange = sorted(ends.keys() - planned)
    unfinished = sorted(where for where in planned if ends[where] != THREADS_PER_WARP)
    called = lambda rank, warp: f"warp {warp}" + (f" of CTA {rank}" if ctas > 1 else "")
    return [
        *[Difference(called(*where), "the plan has no such warp") for where in strange],
        *[Difference(called(*where), "the log does not show its end") for where in unfinished],
    ]


def _tensors(found: list[Step], notes: Sequence[Note], plan: Plan, suffix: str) -> dict[int, str]:
    """Number of each tensor map in the log -> its tensor in the model, copy by copy.

    A tensor may have several maps. suffix: of the CTA that is looked at, the first.
    """
    names: dict[int, str] = {}
    for role in plan.roles:
        used = _neighbours_joined([n for n in notes if n.agent == role.name + suffix and n.source])
        mine = [s for s in found if s.rank == 0 and s.warp in role.warps and _copies(s)]
        for step, note in zip(mine, used):
            names.setdefault(step.numbers[2], note.source)
    return names


def _copies(step: Step) -> bool:
    return step.verb in ("load", "store", "reduce")


# ---- a kernel's steps ----------------------------------------------------------------------


def _acts(found: list[Step], warp: int, log: Log, tensors: dict[int, str]) -> Iterator[Act]:
    """What one warp did."""
    mine = [step for step in found if step.warp == warp and step.verb not in LEFT_OUT]
    mine = [step for step in mine if not (step.verb == "fence" and step.what in SILENT_FENCES)]
    mine = [step for step in mine if step.what != "barriers"]  # the address of tensor memory
    for step, after in itertools.zip_longest(mine, mine[1:]):
        where, whole = f"PTX line {step.line}", step.lanes.bit_count()
        if step.verb == "bar.arrive":
            synced = after and after.verb == "bar.wait" and after.what == step.what
            yield Act("sync" if synced else "bar.arrive", step.what, step.numbers, where)
        elif step.verb == "cluster.arrive":
            synced = after and after.verb == "cluster.wait"
            yield Act("sync" if synced else "cluster.arrive", "cluster", (), where)
        elif step.verb == "copy":
            yield Act("copy", step.what, _copy_to_peer(step, log), where)
        elif step.verb == "arrive":
            arrivals, expected = step.numbers
            if expected:
                yield Act("expect", step.what, (expected,), where)
            if arrivals:
                yield Act("arrive", step.what, (arrivals,), where)
        elif _copies(step):
            start, size, tensor, _, *coordinates = step.numbers
            barriers = tuple(barrier for barrier, _ in step.targets)
            name, columns = tensors.get(tensor, f"tensor {tensor}"), step.facts["columns"]
            numbers = (start - log.smem, size, *barriers, name, columns, *coordinates)
            yield Act(step.verb, step.what, numbers, where)
        elif step.verb == "mma":
            yield Act("mma", step.what, _mma(step, log), where)
        elif step.verb in ("tmem.ld", "tmem.st"):
            yield Act(step.verb, step.what, (*step.numbers[:2], whole), where)
        elif step.verb == "bulk.wait":
            yield Act("bulk.wait", "read" if step.facts["read"] else "", step.numbers, where)
        elif step.verb in ("fence", "wait"):  # of the whole warp, whose lanes are one thread here
            part = "" if whole == THREADS_PER_WARP else f" of {whole} lanes only"
            yield Act(step.verb, step.what + part, step.numbers, where)
        elif step.verb not in ("bar.wait", "cluster.wait"):
            yield Act(step.verb, step.what, step.numbers, where)


def _copy_to_peer(step: Step, log: Log) -> tuple:
    """First byte, bytes, the place in the peer, the barrier there."""
    (start, size), (barrier, _) = step.numbers, step.targets[0]
    ((memory, cells),) = step.writes
    return start - log.smem, size, memory, _moved(memory, cells, log), barrier


def _mma(step: Step, log: Log) -> tuple:
    """Columns of D, shape, form, where each instruction's operands start, cells of A and B."""
    form, starts = step.instruction, []
    for record in step.records:
        in_tmem = record.flags & TMEM_A
        a, b = record.words[1], record.words[3]
        starts.append(((a & 0xFFFF) if in_tmem else _start(a, log), _start(b, log)))
    reads = sorted((memory, _moved(memory, cells, log)) for memory, cells in step.reads)
    unusual = [x for x in (form.negate_a, form.negate_b) if x]
    turned = form.a_mn_major, form.b_mn_major
    return (*step.numbers, form.bf16, *turned, tuple(starts), *reads, *unusual)


def _start(descriptor: int, log: Log) -> int:
    """First byte of an operand, counted from the first that the plan knows."""
    return (descriptor & 0x3FFF) * 16 - log.smem


def _moved(memory: str, cells, log: Log):
    """Cells of shared memory counted from the first byte that the plan knows."""
    base = log.smem // WORD if memory.startswith("smem") else 0
    return tuple((start - base, stop - base) for start, stop in cells)


# ---- a model's notes -----------------------------------------------------------------------


def _wanted(notes: Sequence[Note], plan: Plan, role: Role, place: Place) -> Iterator[Act]:
    """What each warp of a role should do; shares are those of one warp."""
    warps, names = len(role.warps), Names(plan)
    for note in _neighbours_joined(notes):
        what, numbers = note.what, note.numbers
        if note.verb in IN_SHARED:
            what = _first_name(what, plan, names)
        if note.verb in ("read", "write"):
            numbers = (numbers[0] // warps,)
        elif note.verb == "arrive" and numbers[0] > 1:
            numbers = (numbers[0] // warps,)
        elif note.verb in ("tmem.ld", "tmem.st"):
            what, numbers = names.columns(*numbers), (*numbers, 32)
        elif note.verb == "mma":
            what, numbers = names.columns(*numbers[:2]), (*numbers, *sorted(note.places))
        elif note.verb in ("load", "store", "reduce"):
            start, size, row, columns = numbers
            barriers = tuple(barrier for barrier, _ in note.places)
            if row is None and place.ragged:
                columns = tuple(column + place.ragged.first_tile * STATISTICS for column in columns)
            at = _coordinates(row, note.source, place)
            numbers = (start, size, *barriers, note.source, columns, *at)
        elif note.verb == "copy":
            (memory, cells), (barrier, _) = note.places
            numbers = (*numbers, memory, cells, barrier)
        elif note.verb == "sync" and plan.barrier(_row(what)).kind == "cluster":
            yield Act("sync", "cluster", (), note.line, what)
            continue
        elif note.verb == "sync":
            numbers = (plan.barrier(_row(what)).arrivals(plan),)
        yield Act(note.verb, what, numbers, note.line)


def _first_name(what: str, plan: Plan, names: Names) -> str:
    """The name of a slot of shared memory, or of the earlier buffer that it shares the place of."""
    name, _, index = what.partition("[")
    (buffer,) = (row for row in plan.smem if row.name == name)
    return names.shared(plan.smem_offsets[name] + int(index[:-1] or 0) * buffer.slot_bytes)


def _neighbours_joined(notes: Sequence[Note]) -> Iterator[Note]:
    """Accesses of neighbouring columns, MMAs that add up, boxes side by side as one, as in
    `steps`."""
    held = None
    for note in notes:
        joined = held and (_one_access(held, note) or _one_sum(held, note) or _one_copy(held, note))
        if held and not joined:
            yield held
        held = joined or note
    if held:
        yield held


def _one_access(before: Note, note: Note) -> Note | None:
    """Both as one access to tensor memory; None where they are not next to each other."""
    same = (before.verb, before.what) == (note.verb, note.what)
    if not (same and note.verb in ("tmem.ld", "tmem.st")) or sum(before.numbers) != note.numbers[0]:
        return None
    return replace(before, numbers=(before.numbers[0], before.numbers[1] + note.numbers[1]))


def _one_sum(before: Note, note: Note) -> Note | None:
    """Both as one MMA of the depth of both; None where the second does not add to the first.

    numbers: column, columns, accumulate, M, N, K, bf16, A and B turned, starts; see `Role.mma`.
    """
    if (before.verb, before.what) != (note.verb, note.what) or note.verb != "mma":
        return None
    a, b = before.numbers, note.numbers
    if (*a[:2], *a[3:5], *a[6:9]) != (*b[:2], *b[3:5], *b[6:9]) or not b[2]:
        return None
    places = tuple(
        (memory, _union(mine, others))
        for (memory, mine), (_, others) in zip(before.places, note.places)
    )
    return replace(before, numbers=(*a[:5], a[5] + b[5], *a[6:9], a[9] + b[9]), places=places)


def _one_copy(before: Note, note: Note) -> Note | None:
    """Both as one reduction; None where they are not of the same rows, the second from the bytes
    and to the columns further on."""
    if (before.verb, before.source) != (note.verb, note.source) or note.verb != "reduce":
        return None
    (start, size, row, columns), (next_start, more, next_row, others) = before.numbers, note.numbers
    if start + size != next_start or row != next_row or others[0] <= columns[-1]:
        return None
    return replace(before, numbers=(start, size + more, row, columns + others))


def _union(*places: Intervals) -> Intervals:
    """All intervals of some places, those that touch made one."""
    found: list[tuple[int, int]] = []
    for start, stop in sorted(row for place in places for row in place):
        if found and start <= found[-1][1]:
            start, stop = found[-1][0], max(found.pop()[1], stop)
        found.append((start, stop))
    return tuple(found)


def _coordinates(row: int | None, source: str, place: Place) -> tuple[int, int, int, int]:
    """Of a copy, behind the column; those that its tensor lacks are logged as 0."""
    entry = place.ragged.entry if place.ragged else place.batch
    if row is None:
        return place.head, entry, 0, 0
    row += place.block * place.rows if source in place.divided else 0
    row, end = place.ragged.coordinates(source, row) if place.ragged else (row, 0)
    return row, place.head, entry, end


# ---- comparison ----------------------------------------------------------------------------


def _only_first(act: Act, plan: Plan, role: Role) -> bool:
    """Whether one warp does this for its role."""
    if act.verb in ISSUED:
        return True
    if act.verb == "arrive":
        producers = plan.barrier(_row(act.what)).producers
        by_warp = any(row.role == role.name and row.unit == "warp" for row in producers)
        return act.numbers == (1,) and not by_warp
    if act.verb != "wait":
        return False
    consumers = plan.barrier(_row(act.what)).consumers
    return any(row.role == role.name and row.unit != "thread" for row in consumers)


def _match(did, should, plan: Plan, role: Role, index: int):
    """(pairs that correspond, what differs or None) of one warp.

    In a role of several warps the first issues what one thread issues; a fence before such a step
    may be missing in the others.
    """
    pairs, at = [], 0
    for position, act in enumerate(should):
        if index and _only_first(act, plan, role):
            continue
        following = should[position + 1] if position + 1 < len(should) else None
        if at < len(did) and did[at].key == act.key:
            pairs.append((did[at], act))
            at += 1
        elif not (
            index
            and act.verb == "fence"
            and following is not None
            and _only_first(following, plan, role)
        ):
            return pairs, _shown(did, at, should, position)
    return pairs, None if at == len(did) else _shown(did, at, should, len(should))


def _shown(did: Sequence[Act], at: int, should: Sequence[Act], position: int) -> str:
    """Both sides around the first mismatch."""
    rows = ["the kernel and the model part here"]
    for title, acts, here in (("kernel", did, at), ("model", should, position)):
        rows.append(f"  {title}:")
        for index in range(max(0, here - AROUND), min(len(acts), here + AROUND + 1)):
            mark = ">" if index == here else " "
            rows.append(f"  {mark} {acts[index]}  ({acts[index].where})")
        if here >= len(acts):
            rows.append("  > nothing more")
    return "\n".join(rows)
