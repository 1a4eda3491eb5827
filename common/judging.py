# SPDX-License-Identifier: Apache-2.0
"""Results of a problem against the oracle, by the tolerance rule, also with masks and lengths.

Packed sequences are judged as a dense batch that holds each of them from its first row on, so that
oracle and yardstick see one sequence at a time. Rows that see nothing, that nothing sees, or that
no sequence uses must be exactly 0, and their LSE -inf. Runs: host.
"""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from . import inputs, numerics, reference
from .stage import KernelSource

ROUNDINGS = 4  # of D and of dP, which cancel where a query sees one key; `statistics_error` has one


def judge(
    problem: inputs.Problem, out: Tensor, lse: Tensor, source: KernelSource | None = None
) -> list[numerics.Comparison]:
    """Compare a forward result with the oracle, by the tolerance rule. Returns both verdicts.

    source: the stage that made it, whose exponentials may have an error of their own.
    """
    dense = _Dense.of(problem)
    given = dense.problem
    tensors, options = (given.q, given.k, given.v), _options(given)
    truth = reference.attention(*tensors, **options)
    yardstick = reference.same_precision(*tensors, **options)
    blind = _unseen(given)[0][..., None] & ~truth.ignore[..., 0]
    floor = (numerics.half_ulp(truth.lse, lse.dtype) + exp2_error(source)).nan_to_num(0.0, 0.0, 0.0)
    made, made_lse = dense.queries(out), dense.statistics(lse)
    verdicts = [
        numerics.compare(made, truth.out, yardstick[0], ignore=truth.ignore, name="out"),
        numerics.compare(made_lse, truth.lse, yardstick[1], floor=floor, name="lse"),
    ]
    spoiled = _not_zero(made, blind), _not_zero(dense.unused_queries(out))
    stray = int((dense.unused_statistics(lse) != -math.inf).sum())
    return [_complain(verdicts[0], *spoiled), _complain(verdicts[1], stray, what="-inf")]


def exp2_error(source: KernelSource | None) -> float:
    """Largest relative error of a stage's emulated exp2; 0 for one that emulates none.

    A sum of exponentials is off by as much where one key has all of it, and LSE is its logarithm.
    In out it cancels, but for what the rounding of P hides.
    """
    coefficients = getattr(source and source.config, "POLYNOMIAL", None)
    if coefficients is None:
        return 0.0
    f = torch.linspace(0.0, 1.0, 1025, dtype=torch.float64)
    polynomial = sum(c * f**power for power, c in enumerate(coefficients))
    return (polynomial / torch.exp2(f) - 1).abs().max().item()


def judge_gradients(
    problem: inputs.Problem, dq: Tensor, dk: Tensor, dv: Tensor, dlse: Tensor | None = None
) -> list[numerics.Comparison]:
    """Compare gradients with the oracle's, by the tolerance rule. Returns the verdicts on each."""
    dense = _Dense.of(problem)
    given = dense.problem
    tensors, options = (given.q, given.k, given.v, given.dout), _options(given)
    dlse = None if dlse is None else dense.statistics(dlse, fill=0.0)
    truth = reference.attention_backward(*tensors, dlse=dlse, **options)
    yardstick = reference.same_precision_backward(*tensors, dlse=dlse, **options)
    of_out = reference.stored_output_error(*tensors, out_dtype=given.q.dtype, **options)
    of_d = reference.statistics_error(*tensors, **options)
    ignored = {"dq": truth.ignore_q, "dk": truth.ignore_k, "dv": truth.ignore_k}
    blind, unseen = _unseen(given)
    found = []
    for name, made in {"dq": dq, "dk": dk, "dv": dv}.items():
        of_query = name == "dq"
        there = dense.queries(made) if of_query else dense.keys(made)
        right = getattr(truth, name)
        floor = numerics.half_ulp(right, there.dtype)
        floor = floor + getattr(of_out, name).abs() + ROUNDINGS * getattr(of_d, name).abs()
        rule = {"floor": floor.nan_to_num(0.0, 0.0), "ignore": ignored[name], "rows": False}
        verdict = numerics.compare(there, right, getattr(yardstick, name), name=name, **rule)
        unused = dense.unused_queries(made) if of_query else dense.unused_keys(made)
        nobodys = (blind if of_query else unseen)[..., None] & ~ignored[name][..., 0]
        spoiled = _not_zero(there, nobodys), _not_zero(unused)
        found.append(_complain(verdict, *spoiled))
    return found


@dataclass(frozen=True)
class _Dense:
    """A problem as a dense batch. rows_q, rows_k: of packed tensors, which row is where in it, (n,
    longest), beyond the end where there is none; None for a problem that is dense already."""

    problem: inputs.Problem
    rows_q: Tensor | None = None
    rows_k: Tensor | None = None

    @classmethod
    def of(cls, problem: inputs.Problem) -> _Dense:
        """The dense batch of a problem, on its device."""
        options = dict(problem.options)
        if "cu_seqlens_q" not in options:
            return cls(problem)
        rows = [_rows(options, side, getattr(problem, side)) for side in "qk"]
        q, dout = (_gathered(x, rows[0], 0.0) for x in (problem.q, problem.dout))
        k, v = (_gathered(x, rows[1], 0.0) for x in (problem.k, problem.v))
        return cls(replace(problem, q=q, k=k, v=v, dout=dout, options=options), *rows)

    def queries(self, x: Tensor) -> Tensor:
        """(b, sq, ...) of the dense batch from rows of queries."""
        return x if self.rows_q is None else _gathered(x, self.rows_q, 0.0)

    def keys(self, x: Tensor) -> Tensor:
        """The same from rows of keys."""
        return x if self.rows_k is None else _gathered(x, self.rows_k, 0.0)

    def statistics(self, x: Tensor, fill: float = -math.inf) -> Tensor:
        """(b, h, sq) of the dense batch; `fill` where it has rows and no sequence does."""
        return x if self.rows_q is None else _gathered(x.T, self.rows_q, fill).transpose(1, 2)

    def unused_queries(self, x: Tensor) -> Tensor:
        """What belongs to no sequence, in rows of queries."""
        return x[:0] if self.rows_q is None else x[_unused(self.rows_q, len(x))]

    def unused_keys(self, x: Tensor) -> Tensor:
        """The same in rows of keys."""
        return x[:0] if self.rows_k is None else x[_unused(self.rows_k, len(x))]

    def unused_statistics(self, x: Tensor) -> Tensor:
        """The same of (h, total_q)."""
        return self.unused_queries(x.T if self.rows_q is not None else x)


def _rows(options: dict, side: str, x: Tensor) -> Tensor:
    """Rows of one side by sequence; leaves its used lengths in `options` instead of cu_seqlens."""
    bounds, most = (
        options.pop(f"cu_seqlens_{side}").tolist(),
        options.pop(f"max_seqlen_{side}", None),
    )
    lengths = [stop - start for start, stop in itertools.pairwise(bounds)]
    lengths = lengths if most is None else [min(length, int(most)) for length in lengths]
    used = options.get(f"seqused_{side}")
    used = lengths if used is None else map(min, lengths, used.tolist())
    options[f"seqused_{side}"] = used = torch.tensor(list(used), dtype=torch.int32, device=x.device)
    place = torch.arange(max(lengths, default=0), device=x.device)
    starts = torch.tensor(bounds[:-1], dtype=torch.long, device=x.device)
    return torch.where(place < used[:, None], starts[:, None] + place, len(x))


def _gathered(x: Tensor, rows: Tensor, fill: float) -> Tensor:
    """Rows of x by number, `fill` for the number behind the last."""
    return torch.cat([x, x.new_full((1, *x.shape[1:]), fill)])[rows]


def _unused(rows: Tensor, count: int) -> Tensor:
    """Bool (count,): in no sequence."""
    found = torch.ones(count + 1, dtype=torch.bool, device=rows.device)
    found[rows.flatten()] = False
    return found[:count]


def _options(problem: inputs.Problem) -> dict:
    """Arguments of the oracle but for the tensors."""
    return {"softmax_scale": problem.softmax_scale, **problem.options}


def _unseen(problem: inputs.Problem) -> tuple[Tensor, Tensor]:
    """Queries of a dense problem that see no key, (b, sq), and keys that none sees, (b, sk)."""
    sizes = *problem.q.shape[:2], problem.k.shape[1]
    seen = reference.visibility(*sizes, **problem.options, device=problem.q.device)
    return ~seen.any(2), ~seen.any(1)


def _not_zero(x: Tensor, rows: Tensor | None = None) -> int:
    """Elements, of some rows, that are not exactly 0."""
    return int(torch.count_nonzero(x if rows is None else x[rows]))


def _complain(verdict: numerics.Comparison, *wrong: int, what: str = "0") -> numerics.Comparison:
    """The verdict with one problem more where elements are not what nobody's rows must be."""
    if not sum(wrong):
        return verdict
    text = f"{sum(wrong)} elements of rows that see nothing, or of no sequence, are not {what}"
    return replace(verdict, problems=(*verdict.problems, text))
