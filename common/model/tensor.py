# SPDX-License-Identifier: Apache-2.0
"""The tensor core: MMAs executed in the order issued, on real numbers; tcgen05.commit.

An MMA of depth K is K/16 instructions. Each takes the longer of its arithmetic and its operands'
way through the shared-memory port, the next starts then; the result can be waited for a fixed
latency later. The queue never fills, and issuing takes the issuer no time. Operands hold values
already rounded to their dtype; sums are float32.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import simpy
import torch

from .barrier import ModelFault
from .memory import Slot
from .tmem import LANES, QUARTER_LANES, TmemView

if TYPE_CHECKING:
    from .role import Role
    from .sm import Sm

MMA_K = 16  # depth of one instruction for 16-bit operands
FULL_ROWS = 128  # rows that one SM multiplies at full rate; with 64 rows it takes as long
HALF_LAYOUT_LANES = [QUARTER_LANES * (row // 16) + row % 16 for row in range(64)]  # M = 64


@dataclass
class Mma:
    """One MMA verb: D (+)= A B^T, shape (M, N, K), in one CTA or by a pair."""

    role: Role
    d: TmemView
    a: Slot | TmemView
    b: Slot
    accumulate: bool
    shape: tuple[int, int, int]
    pair: bool
    op: str
    tile: int
    line: str
    finished: simpy.Event = field(repr=False)

    @property
    def halves(self) -> bool:
        """Whether each CTA of a pair keeps 64 rows, as two halves of N in its lane halves."""
        return self.pair and self.shape[0] == 128

    def check(self) -> None:
        """ModelFault for a shape that the tensor core does not have or operands of another."""
        m, n, k = self.shape
        rows, step = ((128, 256), 16) if self.pair else ((64, 128), 8 if m == 64 else 16)
        if m not in rows or n % step or not step <= n <= 256 or k % MMA_K or k < MMA_K:
            raise ModelFault(
                f"{self.op}: no MMA of M={m}, N={n}, K={k}; M is in {rows}, N a multiple of {step} "
                f"up to 256, K a multiple of {MMA_K}"
            )
        ctas = 2 if self.pair else 1
        own = m // ctas
        wanted = {"D": (LANES, n // 2 if self.halves else n), "B": (n // ctas, k)}
        wanted["A"] = (LANES if isinstance(self.a, TmemView) else own, k)
        for name, operand in (("D", self.d), ("A", self.a), ("B", self.b)):
            if operand.shape != wanted[name]:
                raise ModelFault(
                    f"{self.op}: {name} is {operand.name} of {operand.shape}; M={m}, N={n}, K={k} "
                    f"needs {wanted[name]} in each CTA (rows of B are N, its columns K)"
                )
        dtypes = [x.dtype if isinstance(x, TmemView) else x.buffer.dtype for x in (self.a, self.b)]
        if dtypes not in ([torch.bfloat16] * 2, [torch.float16] * 2):
            raise ModelFault(f"{self.op}: A and B are {dtypes}; both must be bfloat16 or float16")
        if self.d.dtype != torch.float32:
            raise ModelFault(f"{self.op}: D is {self.d.dtype}; accumulators are float32")


class TensorCore:
    """The MMA queue of one SM; of a pair, the issuing CTA's queue feeds both tensor cores."""

    def __init__(self, sm: Sm):
        self.sm, self.env = sm, sm.env
        self.uncommitted: dict[str, list[Mma]] = {}
        self.pair: bool | None = None
        self._issued: dict[str, list[Mma]] = {}
        self._queue: deque[Mma] = deque()
        self._work = self.env.event()
        self.env.process(self._run())

    def submit(self, mma: Mma) -> None:
        """Issue: put it at the end of the queue."""
        if self.pair not in (None, mma.pair):
            raise ModelFault(f"{mma.op}: a kernel uses cta_group 1 or 2, not both ({mma.line})")
        self.pair = mma.pair
        self._issued.setdefault(mma.role.agent, []).append(mma)
        self.uncommitted.setdefault(mma.role.agent, []).append(mma)
        self._queue.append(mma)
        if not self._work.triggered:
            self._work.succeed()

    def commit(self, role: Role, arrive) -> None:
        """Call `arrive()` when all MMAs that the role has issued so far have finished."""
        self.uncommitted.pop(role.agent, None)
        earlier = self._issued.get(role.agent, [])
        pending = [mma.finished for mma in earlier if not mma.finished.processed]
        self._issued[role.agent] = [mma for mma in earlier if not mma.finished.processed]

        def later():
            yield self.env.all_of(pending)
            arrive()

        self.env.process(later())

    def _sms(self, mma: Mma) -> list[Sm]:
        return self.sm.pair.sms if mma.pair else [self.sm]

    def _run(self):
        while True:
            if not self._queue:
                self._work = self.env.event()
                yield self._work
            mma = self._queue.popleft()
            start, sms = self.env.now, self._sms(mma)
            results = self._multiply(mma, sms)
            m, n, k = mma.shape
            rows = m // 2 if mma.pair else FULL_ROWS
            interval = 2 * rows * n * MMA_K / self.sm.machine["tensor"]
            for _ in range(k // MMA_K):
                end = max(self.env.now + interval, *(self._fetch(mma, sm) for sm in sms))
                yield self.env.timeout(end - self.env.now)
            for sm, values in zip(sms, results):
                d, end = mma.d.on(sm.tmem), self.env.now
                d.put(values)
                sm.tmem.log.append((start, end, "write", d.name, d.column, d.columns))
                if isinstance(mma.a, TmemView):
                    a = mma.a
                    sm.tmem.log.append((start, end, "read", a.name, a.column, a.columns))
                sm.engines.record(mma.role.agent, "tensor", mma.op, mma.tile, start, end)
            self.env.process(self._finish(mma))

    def _finish(self, mma: Mma):
        """The published latencies run to the end of a wait: what waking takes is in them."""
        machine = self.sm.machine
        kind = "mma_ts_latency" if isinstance(mma.a, TmemView) else "mma_ss_latency"
        latency = machine[kind] + (machine["mma_pair_latency"] if mma.pair else 0)
        yield self.env.timeout(max(0.0, latency - machine["mbarrier_latency"]))
        mma.finished.succeed()

    def _fetch(self, mma: Mma, sm: Sm) -> float:
        """Operands of one instruction through an SM's shared-memory port; when they are there."""
        operands = [mma.b] if isinstance(mma.a, TmemView) else [mma.a, mma.b]
        size = sum(slot.bytes for slot in operands) * MMA_K / mma.shape[2]
        start, end = sm.engines.take("smem", size)
        sm.engines.record(mma.role.agent, "smem", mma.op, mma.tile, start, end, join=True)
        return end

    def _multiply(self, mma: Mma, sms: list[Sm]) -> list[torch.Tensor]:
        """What D holds afterwards in each SM, as lanes x columns."""
        for sm in sms:
            self._report_unwritten(mma, sm)
        b = torch.cat([mma.b.on(sm.smem).get() for sm in sms])
        results = []
        for sm in sms:
            old = mma.d.on(sm.tmem).get()
            in_tmem = isinstance(mma.a, TmemView)
            a = (mma.a.on(sm.tmem) if in_tmem else mma.a.on(sm.smem)).get()
            if mma.halves:  # each half of the lanes has one half of N, and its own copy of A
                a_halves = a.chunk(2) if in_tmem else (a, a)
                new = torch.cat([half @ part.T for half, part in zip(a_halves, b.chunk(2))])
                results.append(old + new if mma.accumulate else new)
            elif mma.shape[0] == len(HALF_LAYOUT_LANES):  # the other lanes stay as they are
                new = (a[HALF_LAYOUT_LANES] if in_tmem else a) @ b.T
                result = old.clone()
                result[HALF_LAYOUT_LANES] = old[HALF_LAYOUT_LANES] + new if mma.accumulate else new
                results.append(result)
            else:
                results.append(old + a @ b.T if mma.accumulate else a @ b.T)
        return results

    @staticmethod
    def _report_unwritten(mma: Mma, sm: Sm) -> None:
        a = mma.a.on(sm.tmem) if isinstance(mma.a, TmemView) else mma.a.on(sm.smem)
        operands = [a, mma.b.on(sm.smem), *([mma.d.on(sm.tmem)] if mma.accumulate else [])]
        for operand in operands:
            if operand.unwritten:
                sm.report_unwritten(mma.role.agent, mma.op, operand.name, mma.line)
