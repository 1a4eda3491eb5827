# SPDX-License-Identifier: Apache-2.0
"""The gpu tier of the contract for gradients, by each backward part of a stage.

It runs between preprocess and postprocess, after the stage's own forward. Every launch writes into
poisoned memory with guards around it; see `poisoned.py`. Runs: host.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import replace

import torch
from torch import Tensor

from . import inputs, numerics
from .contract import Case, judge_gradients
from .envelope import TILE_ROWS, check
from .gradients import (
    Saved,
    Workspace,
    backward,
    oracle_forward,
    start_backward,
    statistics,
)
from .launch import forward, kernel_for, loadable
from .masks import Mask
from .poisoned import Guards
from .stage import Part, Stage

REPEATS = 20
UNIT = 2.0**-24  # half the spacing of float32 numbers at 1


def run_gradients(
    stage: Stage, part: Part, problem: inputs.Problem, dlse: Tensor | None = None
) -> Workspace:
    """All that a backward writes, from the stage's own forward, into poisoned, guarded memory.

    Raises AssertionError when an input, or memory beside an output, was written.
    """
    tensors, lengths = (problem.q, problem.k, problem.v), problem.options
    checked = check(stage, *tensors, problem.softmax_scale, **lengths)
    q, k, v, dout, dlse = checked.batched(*tensors, problem.dout, dlse)
    q, k, v = map(loadable, (q, k, v))
    saved = Saved(q, k, v, *forward(stage, checked, q, k, v))
    guards = Guards(**vars(saved), dout=dout, dlse=dlse, **lengths)
    workspace = Workspace.empty(saved, guards.output, checked.mask)
    backward(stage, checked, saved, dout, dlse, workspace, part)
    torch.cuda.synchronize(q.device)
    guards.check()
    _check_sums_written(workspace, checked.mask)
    if checked.mask and checked.mask.packed:
        names = ("dq", "dk", "dv")
        workspace = replace(workspace, **{name: getattr(workspace, name)[0] for name in names})
    return workspace


def _check_sums_written(made: Workspace, mask: Mask | None) -> None:
    """Of stats and dq_accum all is written that a sequence has rows of, if anything is launched."""
    parts = {"stats": [made.stats], "dq_accum": [made.dq_accum]}
    if mask and mask.sees_nothing:
        return
    if mask:
        given, parts = mask.sequences(), {"stats": [], "dq_accum": []}
        for number, row in enumerate(given.rows):
            entry, first = given.entry(number), given.first_tile(number, TILE_ROWS)
            tiles = slice(first, first + math.ceil(row.len_q / TILE_ROWS))
            parts["stats"].append(made.stats[entry, :, tiles])
            parts["dq_accum"].append(made.dq_accum[entry, row.queries()])
    for name, written in parts.items():
        missing = sum(numerics.unwritten(x) for x in written)
        assert not missing, f"{missing} elements of {name} were never written"


def run_part(part: Part, problem: inputs.Problem) -> tuple[Tensor, Tensor, Tensor]:
    """(dq_accum, dk, dv) of a backward part alone, after an exact forward and preprocess.

    Packed sequences keep their batch of one.
    """
    tensors, lengths = (problem.q, problem.k, problem.v), problem.options
    checked = check(part, *tensors, problem.softmax_scale, **lengths)
    q, k, v, dout = checked.batched(*tensors, problem.dout)
    q, k, v, dout = map(loadable, (q, k, v, dout))
    saved = oracle_forward(checked, q, k, v)
    guards = Guards(q=q, k=k, v=v, dout=dout, **lengths)
    workspace = Workspace.empty(saved, guards.output, checked.mask)
    workspace.stats.copy_(statistics(saved.out, saved.lse, dout, mask=checked.mask))
    workspace.dq_accum.zero_()
    if not (checked.mask and checked.mask.sees_nothing):
        start_backward(kernel_for(part, checked, q.device), checked, saved, dout, workspace)
    torch.cuda.synchronize(q.device)
    guards.check()
    return workspace.dq_accum, workspace.dk, workspace.dv


def check_gradient_case(stage: Stage, case: Case) -> list[numerics.Comparison]:
    """The kernels compute the gradients of the case within tolerance on this machine's GPU."""
    problem, dlse = case.problem("cuda"), case.dlse("cuda")
    return _judged(problem, run_gradients(stage, stage.part(case.part), problem, dlse), dlse)


def _judged(problem: inputs.Problem, made: Workspace, dlse=None) -> list[numerics.Comparison]:
    verdicts = judge_gradients(problem, made.dq, made.dk, made.dv, dlse)
    return [verdict.check() for verdict in verdicts]


def _some(part: Part, **changes) -> Case:
    envelope = part.config.ENVELOPE
    sizes = {"seqlen_q": 256, "seqlen_k": 384, "batch": 2, "heads": 3}
    kernel = {"dtype": envelope.dtypes[0], "head_dim": envelope.head_dims[-1], "part": part.name}
    return Case(**{"generator": "llm_like", **kernel, **sizes, **changes})


def _each(stage: Stage, **changes) -> Iterator[tuple[Part, inputs.Problem]]:
    """(part, a problem) for every backward part and head dim of it."""
    for part in stage.backwards:
        for head_dim in part.config.ENVELOPE.head_dims:
            yield part, _some(part, head_dim=head_dim, **changes).problem("cuda")


def _gradients(stage: Stage, tensors, dout, dlse=None) -> tuple[Tensor, ...]:
    """(dq, dk, dv) by autograd through `attention`."""
    leaves = [x.detach().requires_grad_() for x in tensors]
    out, lse = stage.attention(*leaves, return_lse=True)
    pairs = [(y, dy) for y, dy in ((out, dout), (lse, dlse)) if dy is not None]
    return torch.autograd.grad([y for y, _ in pairs], leaves, [dy for _, dy in pairs])


def _problems(stage: Stage, **changes) -> Iterator[inputs.Problem]:
    """A problem of every head dim, for the part that `attention` takes there."""
    for head_dim in stage.config.ENVELOPE.head_dims:
        yield _some(stage.backward(head_dim), head_dim=head_dim, **changes).problem("cuda")


def _assert_same(wanted, found, tiles: int) -> None:
    """dk and dv bit for bit; dq up to the order of its sum of `tiles` float32 terms.

    Two orders differ by at most twice (tiles - 1) roundings at the size of the sum of magnitudes,
    for which twice the largest |dq| stands in, and may round to 16-bit neighbours.
    """
    for name, was, now in zip(("dk", "dv"), wanted[1:], found[1:]):
        assert torch.equal(was, now), f"{name} differs"
    was, now = (x.double() for x in (wanted[0], found[0]))
    noise = 4 * (tiles - 1) * UNIT * was.abs().max()
    spacing = 2 * torch.maximum(*(numerics.half_ulp(x, wanted[0].dtype) for x in (was, now)))
    apart = ((was - now).abs() > (noise + spacing if tiles > 1 else 0)).sum().item()
    assert not apart, f"{apart} elements of dq differ by more than the order of their sum explains"


def gradients_large(stage: Stage) -> None:
    """4096 queries and keys, at every head dim."""
    for part in stage.backwards:
        for head_dim in part.config.ENVELOPE.head_dims:
            sizes = {"seqlen_q": 4096, "seqlen_k": 4096, "batch": 1, "heads": 2}
            problem = _some(part, head_dim=head_dim, **sizes).problem("cuda")
            _judged(problem, run_gradients(stage, part, problem))


def gradients_statistics(stage: Stage) -> None:
    """What preprocess writes is what torch computes, up to the order of a row's sum."""
    for part, problem in _each(stage):
        dlse = _some(part, of_lse=True).dlse("cuda")
        made = run_gradients(stage, part, problem, dlse).stats
        checked = check(stage, problem.q, problem.k, problem.v, problem.softmax_scale)
        out, lse = forward(stage, checked, problem.q, problem.k, problem.v)
        magnitudes = statistics(out.abs(), lse.abs(), problem.dout.abs(), -dlse.abs())
        bound = 2 * problem.q.shape[3] * UNIT * magnitudes
        wrong = ((made - statistics(out, lse, problem.dout, dlse)).abs() > bound).sum().item()
        assert not wrong, f"{wrong} statistics are wrong"


def gradients_softmax_scale(stage: Stage) -> None:
    """A scale of the caller's own."""
    for part, made in _each(stage):
        problem = replace(made, softmax_scale=0.3)
        _judged(problem, run_gradients(stage, part, problem))


def gradients_zero_dout(stage: Stage) -> None:
    """Exact zeros."""
    for part, problem in _each(stage):
        problem.dout.zero_()
        made = run_gradients(stage, part, problem)
        for name in ("dq", "dk", "dv"):
            found = torch.count_nonzero(getattr(made, name)).item()
            assert not found, f"{found} elements of {name} are not 0"


def gradients_repeats(stage: Stage) -> None:
    """dk and dv have the same bits every time; dq, up to the order of its sum."""
    for part, problem in _each(stage):
        tiles = problem.k.shape[1] // 128
        runs = (run_gradients(stage, part, problem) for _ in range(1 + REPEATS))
        first, *others = [(made.dq, made.dk, made.dv) for made in runs]
        for again in others:
            _assert_same(first, again, tiles)


def gradients_live_nan(stage: Stage) -> None:
    """NaN in a live row of any input reaches what depends on it, and nothing else."""
    for name in ("q", "k", "v", "dout"):
        for part, problem in _each(stage):
            getattr(problem, name)[0, 5, 1, 7] = float("nan")
            _judged(problem, run_gradients(stage, part, problem))


def gradients_autograd(stage: Stage) -> None:
    """Autograd gives what the checked launches do, of out, of lse alone, and of both."""
    for problem in _problems(stage):
        part = stage.backward(problem.q.shape[3])
        tensors, tiles = (problem.q, problem.k, problem.v), problem.k.shape[1] // 128
        dlse = _some(part, of_lse=True).dlse("cuda")
        for dout, of_lse in ((problem.dout, None), (problem.dout, dlse), (None, dlse)):
            found = _gradients(stage, tensors, dout, of_lse)
            start = torch.zeros_like(problem.q) if dout is None else dout
            given = replace(problem, dout=start)
            made = run_gradients(stage, part, given, of_lse)
            _judged(given, made, of_lse)
            _assert_same((made.dq, made.dk, made.dv), found, tiles)


def gradients_strided_dout(stage: Stage) -> None:
    """dO that lies otherwise: transposed, one for the whole batch, one number for all."""
    for problem in _problems(stage):
        tensors, tiles = (problem.q, problem.k, problem.v), problem.k.shape[1] // 128
        one, number = problem.dout[:1], problem.dout[:1, :1, :1, :1]
        for dout in (
            problem.dout.transpose(1, 2).contiguous().transpose(1, 2),
            one.expand_as(problem.dout),
            number.expand_as(problem.dout),
        ):
            wanted = _gradients(stage, tensors, dout.contiguous())
            _assert_same(wanted, _gradients(stage, tensors, dout), tiles)


def gradients_strided_views(stage: Stage) -> None:
    """(b, h, s, d) storage of Q, K, V; K and V with stride 0 along the batch."""
    for problem in _problems(stage):
        tensors, tiles = (problem.q, problem.k, problem.v), problem.k.shape[1] // 128
        turned = [x.transpose(1, 2).contiguous().transpose(1, 2) for x in tensors]
        wanted = _gradients(stage, tensors, problem.dout)
        _assert_same(wanted, _gradients(stage, turned, problem.dout), tiles)
        shared = [problem.q, *(x[:1].expand_as(x) for x in tensors[1:])]
        wanted = _gradients(stage, [x.contiguous() for x in shared], problem.dout)
        _assert_same(wanted, _gradients(stage, shared, problem.dout), tiles)


def gradients_side_stream(stage: Stage) -> None:
    """The backward waits for work queued before it on a stream other than the default one."""
    for problem in _problems(stage):
        tensors, tiles = (problem.q, problem.k, problem.v), problem.k.shape[1] // 128
        wanted = _gradients(stage, tensors, problem.dout)
        late = torch.full_like(problem.dout, float("nan"))
        torch.cuda.synchronize()
        with torch.cuda.stream(torch.cuda.Stream()):
            torch.cuda._sleep(20_000_000)
            late.copy_(problem.dout)
            found = _gradients(stage, tensors, late)
        torch.cuda.synchronize()
        _assert_same(wanted, found, tiles)


def gradients_many_heads(stage: Stage) -> None:
    """Batch x heads of 71 280, beyond what a second or third grid axis can count."""
    head_dim = stage.config.ENVELOPE.head_dims[0]
    sizes = {"batch": 1, "heads": 1, "seqlen_q": 128, "seqlen_k": 128, "head_dim": head_dim}
    base = _some(stage.backward(head_dim), **sizes).problem("cuda")
    tensors = base.q, base.k, base.v
    wanted = _gradients(stage, tensors, base.dout)
    many = [x.expand(264, -1, 270, -1) for x in (*tensors, base.dout)]
    found = _gradients(stage, many[:3], many[3])
    _assert_same([x.expand_as(y) for x, y in zip(wanted, found)], found, 1)


def gradients_far_offsets(stage: Stage) -> None:
    """Element offsets beyond 2**31 in each tensor that comes in, by strides."""
    for problem in _problems(stage, heads=1):
        far, tiles, tensors = 2**31 + 1024, problem.k.shape[1] // 128, []
        given = problem.q, problem.k, problem.v, problem.dout
        for x in given:
            storage = torch.empty(far + x[0].numel(), dtype=x.dtype, device=x.device)
            tensors.append(storage.as_strided(x.shape, (far, *x.stride()[1:])).copy_(x))
        wanted = _gradients(stage, given[:3], given[3])
        _assert_same(wanted, _gradients(stage, tensors[:3], tensors[3]), tiles)


GRADIENT_CHECKS: dict[str, Callable[[Stage], None]] = {
    check.__name__: check
    for check in (
        gradients_large,
        gradients_statistics,
        gradients_softmax_scale,
        gradients_zero_dout,
        gradients_repeats,
        gradients_live_nan,
        gradients_autograd,
        gradients_strided_dout,
        gradients_strided_views,
        gradients_side_stream,
        gradients_many_heads,
        gradients_far_offsets,
    )
}
