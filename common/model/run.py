# SPDX-License-Identifier: Apache-2.0
"""Running a whole grid on the SM model, CTA by CTA, and what comes out of it."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch

from .engines import ENGINES, Span
from .machine import Machine
from .notes import Note
from .sequences import Sequences
from .sm import Pair, Sm

Result = Callable[[], tuple[torch.Tensor, torch.Tensor]]


@dataclass(frozen=True, repr=False)
class Run:
    """The result of a model run; times are derived from `machine`, never measured.

    Where CTAs work in pairs, a pair counts as one CTA.

    Attributes:
        machine: whose figures the cycles come from.
        out: (b, sq, h, d) in the inputs' dtype, NaN where no CTA ran.
        lse: (b, h, sq) float32, natural logarithm, NaN where no CTA ran.
        cta_cycles: clock cycles of each CTA that ran, from its start to its end.
        trace: what the first CTA with work did on which engine, from which cycle to which.
        ctas: how many the whole grid has.
        flop: floating-point operations of the products of the whole grid, of visible pairs alone.
        findings: of each CTA that ran: reads of unwritten memory, leaks, and races if an ordering
            checker observed it; empty when all is well.
        tmem_log: what touched the first CTA's tensor memory, as `Tmem.log`.
        notes: what the roles of each CTA did, for comparison with an executed log.
    """

    machine: Machine
    out: torch.Tensor
    lse: torch.Tensor
    cta_cycles: tuple[float, ...]
    trace: tuple[Span, ...]
    ctas: int
    flop: float
    findings: tuple[str, ...] = ()
    tmem_log: tuple[tuple[float, float, str, str, int, int], ...] = ()
    notes: tuple[tuple[Note, ...], ...] = ()

    def __repr__(self) -> str:
        """What was computed and for how long, in a line; traces and notes are long."""
        shapes = ", ".join(f"{name} {tuple(x.shape)}" for name, x in self._results().items())
        cycles = f"at most {max(self.cta_cycles, default=0.0):.0f} cycles each"
        ran = f"{len(self.cta_cycles)} of {self.ctas} CTAs or pairs, {cycles}"
        return (
            f"<{type(self).__name__} on {self.machine.name}: {shapes}; {ran}; "
            f"{len(self.findings)} findings>"
        )

    def _results(self) -> dict[str, torch.Tensor]:
        return {"out": self.out, "lse": self.lse}

    @property
    def seconds(self) -> float:
        """Derived time of the whole grid, s: waves of one CTA per SM, at the mean CTA's cycles."""
        waves = math.ceil(self.ctas / self.machine["sms"])
        return waves * sum(self.cta_cycles) / len(self.cta_cycles) / self.machine["clock"]

    @property
    def tflops(self) -> float:
        """Derived 1e12 floating-point operations (of the two products) a second."""
        return self.flop / self.seconds / 1e12

    def busy(self) -> dict[str, float]:
        """Share of a CTA's cycles in which each engine was busy, from 0 to 1, by its name.

        Of the first CTA that had work, of a pair the leader's engines.
        """
        spent = {name: 0.0 for name in ENGINES}
        for span in self.trace:
            if span.engine in spent and span.rank == 0:
                spent[span.engine] += (span.end - span.start) * span.share
        whole = next(cycles for cycles in self.cta_cycles if cycles)
        return {name: cycles / whole for name, cycles in spent.items()}

    def spent_on(self) -> dict[str, float]:
        """Cycles of the first CTA by operation, summed over engines' spans that end last."""
        spent: dict[str, float] = {}
        now = 0.0
        for span in sorted(self.trace, key=lambda row: row.end):
            if span.end > now:
                spent[span.op] = spent.get(span.op, 0.0) + span.end - now
                now = span.end
        return spent


@dataclass(frozen=True, repr=False)
class GradientRun(Run):
    """The result of a backward pass: out is dQ, NaN where a CTA is missing; lse is empty.

    Attributes:
        dk, dv: (b, sk, h, d) in the inputs' dtype, NaN where no CTA ran.
    """

    dk: torch.Tensor | None = None
    dv: torch.Tensor | None = None

    @property
    def dq(self) -> torch.Tensor:
        """(b, sq, h, d) in the inputs' dtype; the same as out."""
        return self.out

    def _results(self) -> dict[str, torch.Tensor]:
        return {"dq": self.dq, "dk": self.dk, "dv": self.dv}


def gradient_run(
    machine: Machine,
    q: torch.Tensor,
    k: torch.Tensor,
    softmax_scale: float,
    unit: int,
    cta: Callable[[int, int, int, torch.Tensor], tuple[Sm | Pair, Result] | None],
    max_ctas: int | None = None,
    sequences: Sequences | None = None,
) -> GradientRun:
    """Run the CTAs of a backward grid: units of `unit` keys fastest, then heads, then batch.

    `cta(batch, head, n_block, dq_accum)` gives an `Sm` (or `Pair`) ready to run, which adds to
    dq_accum (len_q, d) float32, and a function that returns its dk and dv (keys, d) afterwards; or
    None where a unit has nothing to do. sequences: every batch entry is one when None.
    """
    _, _, heads, head_dim = k.shape
    given = sequences or Sequences.whole(q, k)
    dk, dv = torch.zeros_like(k), torch.zeros_like(k)
    accum = torch.zeros(q.shape[0], heads, q.shape[1], head_dim)
    blocks = math.ceil(given.longest[1] / unit)
    ran = _Ran(blocks, heads, len(given.rows), max_ctas)
    for b, head, n_block, wanted in ran.places():
        entry, row = given.entry(b), given.rows[b]
        keys = row.keys(n_block * unit, (n_block + 1) * unit)
        if not wanted:
            dk[entry, keys, head] = dv[entry, keys, head] = math.nan
            continue
        result = ran.run(cta(b, head, n_block, accum[entry, head, row.queries()]))
        if result:
            dk[entry, keys, head], dv[entry, keys, head] = result
    complete = len(ran.cycles) == ran.ctas
    dq = (accum * softmax_scale if complete else accum * math.nan).to(q.dtype).transpose(1, 2)
    flop = 10.0 * heads * head_dim * given.pairs
    return GradientRun(machine, dq, torch.empty(0), **ran.fields(), flop=flop, dk=dk, dv=dv)


def grid_run(
    machine: Machine,
    q: torch.Tensor,
    k: torch.Tensor,
    tile_m: int,
    cta: Callable[[int, int, int], tuple[Sm | Pair, Result] | None],
    max_ctas: int | None = None,
    sequences: Sequences | None = None,
) -> Run:
    """Run the CTAs of a forward grid: query tiles fastest, then heads, then batch.

    `cta(batch, head, m_block)` gives an `Sm` (or `Pair`) ready to run and a function that returns
    its out (tile_m, d) and lse (tile_m,) afterwards, of which rows beyond the sequence are dropped;
    or None where a CTA has nothing to do: its rows of out are 0, of lse -inf. sequences: every
    batch entry is one when None.
    """
    batch, seqlen_q, heads, head_dim = q.shape
    given = sequences or Sequences.whole(q, k)
    out = torch.zeros_like(q, memory_format=torch.contiguous_format)
    lse = torch.full((batch, heads, seqlen_q), -math.inf)
    blocks = math.ceil(given.longest[0] / tile_m)
    ran = _Ran(blocks, heads, len(given.rows), max_ctas)
    for b, head, m_block, wanted in ran.places():
        entry, row = given.entry(b), given.rows[b]
        rows = row.queries(m_block * tile_m, (m_block + 1) * tile_m)
        if not wanted:
            out[entry, rows, head] = lse[entry, head, rows] = math.nan
            continue
        result = ran.run(cta(b, head, m_block))
        if result:
            tile_out, tile_lse = (values[: rows.stop - rows.start] for values in result)
            out[entry, rows, head], lse[entry, head, rows] = tile_out.to(q.dtype), tile_lse
    return Run(machine, out, lse, **ran.fields(), flop=4.0 * heads * head_dim * given.pairs)


class _Ran:
    """What the CTAs (or pairs) of a grid leave behind, one after the other."""

    def __init__(self, blocks: int, heads: int, batch: int, max_ctas: int | None):
        if max_ctas is not None and max_ctas < 1:
            raise ValueError(f"max_ctas must be at least 1; got {max_ctas}")
        self.blocks, self.heads, self.ctas = blocks, heads, blocks * heads * batch
        self.wanted = self.ctas if max_ctas is None else min(self.ctas, max_ctas)
        self.cycles: list[float] = []
        self.findings: list[str] = []
        self.notes: list[tuple[Note, ...]] = []
        self.first: dict[str, tuple] = {"trace": (), "tmem_log": ()}

    def places(self) -> Iterator[tuple[int, int, int, bool]]:
        """(batch entry, head, block, whether it is to run), blocks fastest."""
        for number in range(self.ctas):
            of_head, wanted = number // self.blocks, number < self.wanted
            yield of_head // self.heads, of_head % self.heads, number % self.blocks, wanted

    def run(
        self, work: tuple[Sm | Pair, Result] | None
    ) -> tuple[torch.Tensor, torch.Tensor] | None:
        """Run one to its end; returns its result, None of one that has nothing to do."""
        number = len(self.cycles)
        if work is None:
            self.cycles.append(0.0)
            self.notes.append(())
            return None
        sm, result = work
        self.cycles.append(sm.run())
        if not self.first["trace"]:
            leader = sm.sms[0] if isinstance(sm, Pair) else sm
            self.first = {"trace": tuple(sm.trace), "tmem_log": tuple(leader.tmem.log)}
        self.notes.append(tuple(sm.notes))
        self.findings += [f"CTA {number}: {finding}" for finding in sm.findings()]
        return result()

    def fields(self) -> dict:
        """Of a `Run`, all but its tensors, machine and flop."""
        lists = {"findings": tuple(self.findings), "notes": tuple(self.notes)}
        return {"cta_cycles": tuple(self.cycles), "ctas": self.ctas, **self.first, **lists}
