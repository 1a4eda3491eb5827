# SPDX-License-Identifier: Apache-2.0
"""Copies that run by themselves: TMA loads, stores and reductions, and copies to the peer CTA.

A copy is issued, waits out a latency, then moves in chunks: the path to global memory (or to the
peer) sets the pace, and each chunk also takes the shared-memory port. Data appear when all of them
have moved.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import simpy

from .barrier import MBarrier
from .memory import Slot, Tile

if TYPE_CHECKING:
    from .sm import Sm

CHUNK = 2048  # bytes; small enough for MMA operands to get between


@dataclass
class BulkCopy:
    """A store or reduction: `read` when its shared memory is free, `done` when all is written.

    `awaited`: its role has waited for one of the two (the end of a kernel waits for the writes).
    """

    strand: object
    read: simpy.Event
    done: simpy.Event
    awaited: bool = False


class CopyEngine:
    """The asynchronous copies of one SM."""

    def __init__(self, sm: Sm):
        self.sm, self.env = sm, sm.env
        room = sm.machine["tma_in_flight"]
        self._room = simpy.Container(self.env, capacity=room, init=room)

    def _issue(self, agent: str, op: str, tile: int):
        """One instruction after the other."""
        start, end = self.sm.engines.hold("tma", self.sm.machine["tma_issue"])
        self.sm.engines.record(agent, "tma", op, tile, start, end)
        yield self.env.timeout(end - self.env.now)

    def _move(
        self,
        agent: str,
        op: str,
        tile: int,
        size: int,
        path: str,
        sms: tuple[Sm, ...],
        passes: float = 1,
    ):
        """Chunks along `path` of this SM and, in `passes`, through the ports of `sms`."""
        engines, last = self.sm.engines, self.env.now
        for offset in range(0, size, CHUNK):
            chunk = min(CHUNK, size - offset)
            start, end = engines.take(path, chunk)
            engines.record(agent, path, op, tile, start, end, join=True)
            yield self.env.timeout(end - self.env.now)
            for sm in sms:
                start, end = sm.engines.take("smem", chunk * passes)
                sm.engines.record(agent, "smem", op, tile, start, end, join=True)
                last = max(last, end)
        yield self.env.timeout(max(0.0, last - self.env.now))

    def load(self, agent: str, source: Tile, target: Slot, barrier: MBarrier, arrive, tile: int):
        """Global to shared memory; bytes count on `barrier`. Coroutine."""
        op = f"load {target.name}"
        yield from self._issue(agent, op, tile)
        size = min(target.bytes, self._room.capacity)
        yield self._room.get(size)
        yield self.env.timeout(self.sm.machine["tma_latency"])
        passes = self.sm.machine["smem_fill_passes"]
        yield from self._move(agent, op, tile, target.bytes, "gmem", (self.sm,), passes)
        self._room.put(size)
        target.put(source.values)
        arrive()
        barrier.complete_tx(target.bytes)

    def store(self, agent: str, source: Slot, target: Tile, copy: BulkCopy, add: bool, tile: int):
        """Shared to global memory, adding in float32 when `add`. Coroutine."""
        op = f"{'reduce' if add else 'store'} {source.name}"
        yield from self._issue(agent, op, tile)
        if add:
            start, end = self.sm.engines.take("reduce", source.bytes)
            self.sm.engines.record(agent, "reduce", op, tile, start, end)
            start, drained = self.sm.engines.take("smem", source.bytes)
            self.sm.engines.record(agent, "smem", op, tile, start, drained)
            yield self.env.timeout(max(end, drained) - self.env.now)
        else:
            yield from self._move(agent, op, tile, source.bytes, "gmem", (self.sm,))
        values = source.get().to(target.values.dtype, copy=True)  # its slot may be written again
        copy.read.succeed()
        yield self.env.timeout(self.sm.machine["gmem_latency"])
        target.values.copy_(target.values + values if add else values)
        copy.done.succeed()

    def to_peer(self, agent: str, source: Slot, target: Slot, barrier: MBarrier, arrive, tile: int):
        """Own to the peer's shared memory; bytes count on the peer's `barrier`. Coroutine."""
        op = f"copy {source.name}"
        yield from self._issue(agent, op, tile)
        yield self.env.timeout(self.sm.machine["dsmem_latency"])
        sms = (self.sm, self.sm.peer)
        yield from self._move(agent, op, tile, source.bytes, "dsmem", sms)
        target.put(source.get())
        arrive()
        barrier.complete_tx(source.bytes)
