# SPDX-License-Identifier: Apache-2.0
"""The verbs of a warp role. Those that take time are coroutines (`yield from role.wait(...)`);
the others happen at once or are queued for an engine.

Every verb that touches memory or orders something is told to the ordering checker, with the line
of the stage's model that it stands on. A verb that only orders can be left out for an experiment:
see `Sm`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Generator, Mapping
from copy import copy
from typing import TYPE_CHECKING

import torch

from .barrier import BarrierFault, MBarrier, ModelFault, NamedBarrier
from .copies import BulkCopy
from .memory import Global, Slot, Tile, as_tile
from .notes import Note
from .source import caller_line
from .tensor import MMA_K, Mma
from .tmem import QUARTERS, TmemView

if TYPE_CHECKING:
    from .sm import Sm


class Role:
    """A warp role at work on an SM. `agent` is its name, in a pair with the CTA's rank."""

    def __init__(self, sm: Sm, name: str):
        self.sm, self.name, self.env, self.order = sm, name, sm.env, sm.ordering
        self.agent = name + sm.suffix
        row = sm.plan.role(name)
        self.threads, self.warps, self.budget = row.threads, len(row.warps), row.registers
        self.parts = Counter(warp % QUARTERS for warp in row.warps)
        self.registers = sm.plan.launch_registers
        self.bulk: list[BulkCopy] = []
        self._stores_done = 0.0
        self._quarter: int | None = None
        self._blocked: Callable[[], str] | None = None

    # ---- time ------------------------------------------------------------------------------

    def execute(self, op: str, tile: int = -1, **amounts: float) -> Generator:
        """Use engines side by side; done when the slowest is.

        Amounts are what the whole role asks of each engine: lane results for fma, alu, mufu and
        cvt, warp instructions for issue, bytes for smem and gmem.
        """
        use, now = self.sm.engines.use, self.env.now
        ends = [use(self.agent, e, op, tile, n, self.parts) for e, n in amounts.items()]
        yield self.env.timeout(max(ends, default=now) - now)

    def latency(self, op: str, cycles: float, tile: int = -1) -> Generator:
        """Wait `cycles` for something that keeps no engine busy."""
        start = self.env.now
        yield self.env.timeout(cycles)
        self.sm.engines.record(self.agent, "latency", op, tile, start, self.env.now)

    # ---- barriers --------------------------------------------------------------------------

    def wait(self, barrier: str, parity: int, tile: int = -1) -> Generator:
        """Wait at an mbarrier until the phase with `parity` has completed."""
        line = caller_line()
        if self.sm.skips(self.agent, "wait", barrier, line):
            return
        it = self._barrier(barrier, MBarrier, "consumers")
        passed = yield from self._block(
            it.wait(parity),
            lambda: f"{barrier} (parity {parity}, now in phase {it.phase}: {it.to_come()} to come)",
            line,
        )
        self.order.wait(self.agent, it.name, f"wait {barrier}", line)
        self._note("wait", it.name, line, parity)
        self.sm.engines.record(self.agent, "barrier", barrier, tile, passed, self.env.now)

    def sync(self, barrier: str, tile: int = -1) -> Generator:
        """Come to a named or cluster barrier and wait for everyone that it counts."""
        line = caller_line()
        if self.sm.skips(self.agent, "sync", barrier, line):
            return
        it = self._barrier(barrier, NamedBarrier, "producers", "consumers")
        self._note("sync", it.name, line)
        self.order.arrive(self.agent, it.name, f"sync {barrier}", line)
        opened = it.arrive(self.threads)
        phase = it.phase if not opened.triggered else it.phase - 1
        start = yield from self._block([opened], lambda: f"{barrier} (phase {phase})", line)
        self.order.wait(self.agent, it.name, f"sync {barrier}", line)
        yield self.env.timeout(self.sm.machine["barrier_latency"])
        self.sm.engines.record(self.agent, "barrier", barrier, tile, start, self.env.now)

    def arrive(self, barrier: str, count: int | None = None, to: int | None = None) -> None:
        """Arrive on an mbarrier (or, without waiting, on a named barrier).

        `count` arrivals, by default those that the plan gives this role; `to`: the rank of the CTA
        in the pair whose barrier it is, by default the own one.
        """
        line = caller_line()
        if self.sm.skips(self.agent, "arrive", barrier, line):
            return
        sm = self.sm if to is None else self.sm.at_rank(to)
        it = self._barrier(barrier, (MBarrier, NamedBarrier), "producers", sm=sm)
        self.order.arrive(self.agent, it.name, f"arrive {barrier}", line)
        if isinstance(it, NamedBarrier):
            self._note("bar.arrive", it.name, line)
            it.arrive(self.threads)
            return
        arrivals = self._share(it) if count is None else count
        self._note("arrive", it.name, line, arrivals)
        if sm is self.sm:
            it.arrive(arrivals, self.agent)
        else:
            self.env.process(self._remote(lambda: it.arrive(arrivals, self.agent)))

    def expect_tx(self, barrier: str, size: int, to: int | None = None) -> None:
        """The current phase of an mbarrier also waits for `size` bytes; `arrive` is separate."""
        line = caller_line()
        if self.sm.skips(self.agent, "expect_tx", barrier, line):
            return
        sm = self.sm if to is None else self.sm.at_rank(to)
        it = self._barrier(barrier, MBarrier, "producers", sm=sm)
        self._note("expect", it.name, line, size)
        it.expect_tx(size)

    def commit(self, barrier: str, multicast: bool = False) -> None:
        """One arrival when all MMAs that this role has issued so far have finished.

        `multicast`: on the barrier of this name in both CTAs of the pair.
        """
        line = caller_line()
        if self.sm.skips(self.agent, "commit", barrier, line):
            return
        sms = self.sm.pair.sms if multicast else [self.sm]
        found = [self._barrier(barrier, MBarrier, "producers", sm=sm) for sm in sms]
        for it in found:
            self.order.commit(self.agent, it.name, f"commit {barrier}", line)
        self._note("commit", ", ".join(it.name for it in found), line)

        def arrive():
            for it in found:
                it.arrive(1, self.agent)

        self.sm.tensor.commit(self, arrive)

    # ---- copies ----------------------------------------------------------------------------

    def tma_load(
        self,
        source: Tile | Global | torch.Tensor,
        target: Slot,
        barrier: str,
        to_barrier_rank: int | None = None,
        tile: int = -1,
    ) -> None:
        """Queue a copy from global to shared memory; its bytes count on `barrier` when all moved.

        `to_barrier_rank`: the CTA of the pair whose barrier counts them, by default the own one.
        """
        line, source = caller_line(), as_tile(source)
        if source.values.numel() * target.buffer.dtype.itemsize != target.bytes:
            shape = tuple(source.values.shape)
            raise ModelFault(f"{self.agent} loads {shape} into {target.name} of {target.shape}")
        sm = self.sm if to_barrier_rank is None else self.sm.at_rank(to_barrier_rank)
        it = self._barrier(barrier, MBarrier, "producers", sm=sm)
        op = f"load {target.name}"
        strand = self.order.issue(self.agent, "tma.load", op, line)
        self.order.read(strand, source.name, source.cells, op, line, proxy="async")
        self.order.write(strand, self.sm.smem.name, target.cells, op, line, proxy="async")
        arrive = lambda: self.order.arrive(strand, it.name, op, line)
        self._note_copy("load", target, source, line, it.name)
        load = self.sm.copies.load(self.agent, source, target, it, arrive, tile)
        self.env.process(load)

    def tma_store(self, source: Slot, target: Tile | torch.Tensor, tile: int = -1) -> None:
        """Queue a copy from shared to global memory, a bulk group of its own."""
        self._bulk("tma.store", source, target, False, caller_line(), tile)

    def reduce_add(self, source: Slot, target: Tile | torch.Tensor, tile: int = -1) -> None:
        """Queue an addition of shared to global memory, a bulk group of its own."""
        self._bulk("reduce", source, target, True, caller_line(), tile)

    def _bulk(self, kind: str, source: Slot, target, add: bool, line: str, tile: int) -> None:
        target = as_tile(target)
        op = f"{'reduce' if add else 'store'} {source.name}"
        if target.values.numel() * source.buffer.dtype.itemsize != source.bytes:
            raise ModelFault(f"{self.agent}: {op} of {source.shape} to {target.values.shape}")
        if source.unwritten:
            self.sm.report_unwritten(self.agent, op, source.name, line)
        strand = self.order.issue(self.agent, kind, op, line)
        self._note_copy("reduce" if add else "store", source, target, line)
        self.order.read(strand, self.sm.smem.name, source.cells, op, line, proxy="async")
        self.order.write(strand, target.name, target.cells, op, line, proxy="async")
        copy = BulkCopy(strand, self.env.event(), self.env.event())
        self.bulk.append(copy)
        self.env.process(self.sm.copies.store(self.agent, source, target, copy, add, tile))

    def bulk_wait(self, read: bool = False, keep: int = 0) -> Generator:
        """Wait until all but the `keep` newest bulk groups are done, or have read their source.

        `read`: only the latter, as wait_group.read.
        """
        line = caller_line()
        if self.sm.skips(self.agent, "bulk_wait", "", line):
            return
        waited = self.bulk[: len(self.bulk) - keep]
        events = [copy.read if read else copy.done for copy in waited]
        kind = "bulk.wait.read" if read else "bulk.wait"
        start = yield from self._block(events, lambda: f"{len(events)} bulk groups ({kind})", line)
        for it in waited:
            it.awaited = True
            self.order.finish(it.strand, read=read)
        if not read:
            self.bulk = self.bulk[len(waited) :]
        self._note("bulk.wait", "read" if read else "", line, keep)
        self.sm.engines.record(self.agent, "barrier", kind, -1, start, self.env.now)

    def dsmem_copy(self, source: Slot, target: Slot, barrier: str, tile: int = -1) -> None:
        """Queue a copy to the peer CTA's shared memory; its bytes count on the peer's barrier.

        `target`: a slot as this CTA names it; the copy goes to the same place in the peer.
        """
        line, op, peer = caller_line(), f"copy {source.name}", self.sm.peer
        target = target.on(peer.smem)
        it = self._barrier(barrier, MBarrier, "producers", sm=peer)
        places = ((target.memory, target.cells), (it.name, ()))
        numbers = source.first, source.bytes
        self.sm.notes.append(Note(self.agent, "copy", source.name, line, numbers, places))
        strand = self.order.issue(self.agent, "dsmem.copy", op, line)
        self.order.read(strand, self.sm.smem.name, source.cells, op, line, proxy="async")
        self.order.write(strand, peer.smem.name, target.cells, op, line, proxy="async")
        arrive = lambda: self.order.arrive(strand, it.name, op, line)
        self.env.process(self.sm.copies.to_peer(self.agent, source, target, it, arrive, tile))

    # ---- tensor core and tensor memory -----------------------------------------------------

    def mma(
        self,
        d: TmemView,
        a: Slot | TmemView,
        b: Slot,
        accumulate: bool,
        shape: tuple[int, int, int],
        pair: bool = False,
        op: str = "",
        tile: int = -1,
    ) -> None:
        """Queue D = A B^T, or D += A B^T: A (M, K), B (N, K), a B stored as (K, N) given as `.T`.

        `pair`: by both CTAs, named as in this one: M is both CTAs' rows, each holds its rows of A
        and D and half of B's rows.
        """
        line, op = caller_line(), op or f"mma {d.name}"
        mma = Mma(self, d, a, b, accumulate, shape, pair, op, tile, line, self.env.event())
        mma.check()
        facts = {"cta_group": 2 if pair else 1, "accumulator": d.cells, "shape": shape[:2]}
        strand = self.order.issue(self.agent, "mma", op, line, **facts)
        turned = isinstance(a, Slot) and a.transposed, b.transposed
        bf16 = b.buffer.dtype == torch.bfloat16
        starts = tuple(zip(a.starts(MMA_K), b.starts(MMA_K)))  # of A and B, by instruction
        numbers = (d.column, d.columns, int(accumulate), *shape, bf16, *turned, starts)
        sms = self.sm.pair.sms if pair else [self.sm]
        read = [x.on(sm.tmem if isinstance(x, TmemView) else sm.smem) for sm in sms for x in (a, b)]
        places = tuple((x.memory, x.cells) for x in read)
        self.sm.notes.append(Note(self.agent, "mma", d.name, line, numbers, places))
        for sm in sms:
            smem, tmem = sm.smem.name, sm.tmem.name
            self.order.read(strand, smem, b.cells, op, line, proxy="async")
            if isinstance(a, TmemView):
                a.on(sm.tmem).check_allocated(self.agent)
                self.order.read(strand, tmem, a.cells, op, line, proxy="tensor")
            else:
                self.order.read(strand, smem, a.cells, op, line, proxy="async")
            d.on(sm.tmem).check_allocated(self.agent)
            self.order.write(strand, tmem, d.cells, op, line, proxy="tensor")
        self.sm.tensor.submit(mma)

    def tmem_load(self, view: TmemView, tile: int = -1) -> Generator:
        """Tensor memory to registers; returns the values, float32 (lanes, values of a lane)."""
        line, op = caller_line(), f"load {view.name}"
        self._note("tmem.ld", view.name, line, view.column, view.columns)
        self._access(view, "tmem.ld", op, line, self.order.read)
        done = self._tmem_port(view, op, tile, "read")
        yield self.env.timeout(done + self.sm.machine["tmem_latency"] - self.env.now)
        if view.unwritten:
            self.sm.report_unwritten(self.agent, "tmem_load", view.name, line)
        return view.get().clone()

    def tmem_store(self, view: TmemView, values: torch.Tensor, tile: int = -1) -> Generator:
        """Registers to tensor memory, rounded to the view's dtype; in effect after `wait_st`."""
        line, op = caller_line(), f"store {view.name}"
        if tuple(values.shape) != view.shape:
            given = tuple(values.shape)
            raise ValueError(f"{self.agent} stores {given} to {view.name}, which is {view.shape}")
        self._note("tmem.st", view.name, line, view.column, view.columns)
        self._access(view, "tmem.st", op, line, self.order.write)
        taken, values = self._tmem_port(view, op, tile, "write"), values.clone()
        self._stores_done = taken + self.sm.machine["tmem_latency"]

        def later(delay):
            yield self.env.timeout(delay)
            view.put(values)

        self.env.process(later(self._stores_done - self.env.now))
        yield self.env.timeout(taken - self.env.now)

    def wait_ld(self) -> Generator:
        """tcgen05.wait::ld: this role's loads are done with tensor memory. Takes no time here:
        `tmem_load` returns with the values."""
        line = caller_line()
        if not self.sm.skips(self.agent, "wait_ld", "", line):
            self.order.fence(self.agent, "wait.ld", "wait_ld", line)
            self._note("fence", "wait.ld", line)
        yield from ()

    def wait_st(self) -> Generator:
        """tcgen05.wait::st: wait until this role's stores are in tensor memory."""
        line = caller_line()
        if self.sm.skips(self.agent, "wait_st", "", line):
            return
        yield self.env.timeout(max(0.0, self._stores_done - self.env.now))
        self.order.fence(self.agent, "wait.st", "wait_st", line)
        self._note("fence", "wait.st", line)

    def alloc(self, columns: int) -> Generator:
        """tcgen05.alloc: wait until `columns` are free and take them; returns the first."""
        line, tmem = caller_line(), self.sm.tmem

        def until_free():
            while tmem.find(columns) is None:
                yield tmem.freed

        yield from self._block(until_free(), lambda: f"{columns} free columns of {tmem.name}", line)
        first = tmem.find(columns)
        tmem.allocate(self.agent, first, columns)
        cells = ((first * QUARTERS, (first + columns) * QUARTERS),)
        self.order.read(self.agent, tmem.name, cells, "alloc", line)  # before anybody's first write
        self._note("alloc", "", line, first, columns)
        return first

    def dealloc(self) -> None:
        """tcgen05.dealloc of what this role allocated."""
        line, tmem = caller_line(), self.sm.tmem
        first, columns = tmem.free(self.agent)
        cells = ((first * QUARTERS, (first + columns) * QUARTERS),)
        self.order.write(self.agent, tmem.name, cells, "dealloc", line)
        self._note("dealloc", "", line, first, columns)

    # ---- fences, shared memory, registers --------------------------------------------------

    def fence_before(self) -> None:
        """tcgen05.fence::before_thread_sync."""
        self._fence("fence_before", "tcgen05.before")

    def fence_after(self) -> None:
        """tcgen05.fence::after_thread_sync."""
        self._fence("fence_after", "tcgen05.after")

    def fence_proxy(self) -> None:
        """fence.proxy.async: own generic accesses before later asynchronous ones."""
        self._fence("fence_proxy", "proxy.async")

    def _fence(self, verb: str, kind: str) -> None:
        line = caller_line(3)
        if not self.sm.skips(self.agent, verb, "", line):
            self.order.fence(self.agent, kind, verb, line)
            self._note("fence", kind, line)

    def read(self, slot: Slot, by_all: bool = False) -> torch.Tensor:
        """The values of a buffer's slot as they are now, float32. Takes no time: see `execute`.

        by_all: every thread reads all of it; else they share it.
        """
        line = caller_line()
        if slot.unwritten:
            self.sm.report_unwritten(self.agent, "read", slot.name, line)
        memory = slot.buffer.smem.name
        self.order.read(self.agent, memory, slot.cells, f"read {slot.name}", line)
        self._note("read", slot.name, line, slot.bytes * (self.threads if by_all else 1))
        return slot.get().clone()

    def write(self, slot: Slot, values: torch.Tensor) -> None:
        """Replace the values of a buffer's slot; shapes must agree. Takes no time."""
        line = caller_line()
        if tuple((1, *values.shape)[-2:]) != slot.shape:
            raise ValueError(
                f"{self.agent} writes {tuple(values.shape)} to {slot.name}, which is {slot.shape}"
            )
        memory = slot.buffer.smem.name
        self.order.write(self.agent, memory, slot.cells, f"write {slot.name}", line)
        self._note("write", slot.name, line, slot.bytes)
        slot.put(values)

    def setmaxnreg(self, registers: int) -> Generator:
        """Change the role's registers a thread; more are waited for until the pool has them."""
        line, pool = caller_line(), self.sm.pool
        if self.registers is None:
            raise ModelFault(f"{self.agent}: setmaxnreg needs launch_registers in the plan")
        if registers != self.budget:
            raise ModelFault(
                f"{self.agent}: setmaxnreg {registers}, but the plan says {self.budget}"
            )
        more = (registers - self.registers) * self.warps
        yield from self._block(
            pool.take(more),
            lambda: f"{more} registers a thread place (the pool has {pool.free})",
            line,
        )
        self.registers = registers

    # ---- how it is done --------------------------------------------------------------------

    def by_quarter(self, work: Mapping[int, Callable[[Role], Generator]]) -> Generator:
        """Warps that reach these quarters of the lanes do this side by side; done when all are.

        Each gets a role of its own, whose verbs are those of its warps.
        """
        ends = []
        for quarter, verbs in work.items():
            warps = copy(self)
            warps.parts, warps._quarter = Counter({quarter: 1}), quarter
            ends.append(self.env.process(verbs(warps)))
        yield self.env.all_of(ends)

    def _note(self, verb: str, what: str, line: str, *numbers: int) -> None:
        self.sm.notes.append(Note(self.agent, verb, what, line, numbers, quarter=self._quarter))

    def _note_copy(self, verb: str, slot: Slot, tile: Tile, line: str, barrier: str = "") -> None:
        """numbers: first byte, bytes, first row of the tile, first columns of its boxes.

        A tensor of one axis has no rows: None.
        """
        shift = tile.columns[0] - slot.columns[0]
        boxes = tuple(column + shift for column in slot.block_columns)
        row = tile.rows[0] if tile.source.tensor.dim() > 1 else None
        numbers = (slot.first, slot.bytes, row, boxes)
        places = ((barrier, ()),) if barrier else ()
        name = tile.source.name
        self.sm.notes.append(Note(self.agent, verb, slot.name, line, numbers, places, name))

    @property
    def waits_for(self) -> str:
        """What the role is blocked on right now, and the line; empty when it is not."""
        return self._blocked() if self._blocked else ""

    def _block(self, events, what: Callable[[], str], line: str) -> Generator:
        """Wait for events one after the other, knowing what for; returns when it began."""
        start = self.env.now
        self._blocked = lambda: f"{what()} at {line}"
        for event in events:
            if not event.processed:
                yield event
        self._blocked = None
        return start

    def _remote(self, action: Callable[[], None]) -> Generator:
        yield self.env.timeout(self.sm.machine["dsmem_latency"])
        action()

    def _barrier(self, name: str, kind, *sides: str, sm: Sm | None = None):
        """The barrier called `name`; the plan must know this role on one of `sides` of it."""
        barriers = (sm or self.sm).barriers
        if name not in barriers:
            name = name.removesuffix("[0]")  # a ring of one slot has no index in the plan
        if name not in barriers:
            raise BarrierFault(f"{self.agent} uses {name}; barriers are {list(barriers)}")
        if not isinstance(barriers[name], kind):
            raise BarrierFault(f"{self.agent}: wrong verb for {name}, a {type(barriers[name])}")
        row = self.sm.plan.barrier(name.partition("[")[0])
        roles = {arrival.role for side in sides for arrival in getattr(row, side)}
        if self.name not in roles:
            raise BarrierFault(
                f"{self.agent} is not among the {' or '.join(sides)} of {name}: {sorted(roles)}"
            )
        return barriers[name]

    def _share(self, it: MBarrier) -> int:
        row = self.sm.plan.barrier(it.name.partition("@")[0].partition("[")[0])
        own = [a for a in row.producers if a.role == self.name and a.unit != "commit"]
        if not own:
            raise BarrierFault(f"{self.agent} arrives on {it.name} by commit only")
        return sum(arrival.count(self.sm.plan) // arrival.ctas for arrival in own)

    def _access(self, view: TmemView, kind: str, op: str, line: str, record) -> None:
        """Checks of a tensor-memory access by threads, and its strand for the checker."""
        strange = set(view.quarters) - set(self.parts)
        if strange:
            raise ModelFault(
                f"{self.agent}: {op} needs lane quarters {sorted(view.quarters)}; its warps reach "
                f"{sorted(self.parts)}"
            )
        view.check_allocated(self.agent)
        strand = self.order.issue(self.agent, kind, op, line)
        record(strand, view.tmem.name, view.cells, op, line, proxy="tensor")

    def _tmem_port(self, view: TmemView, op: str, tile: int, way: str) -> float:
        parts = {part: 1 for part in view.quarters}
        end = self.sm.engines.use(self.agent, "tmem", op, tile, view.bytes, parts)
        self.sm.tmem.log.append((self.env.now, end, way, view.name, view.column, view.columns))
        return end
