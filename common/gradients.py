# SPDX-License-Identifier: Apache-2.0
"""The op of a stage with its gradients: preprocess, a backward part, postprocess.

Note [Memory of a backward]
    Between the passes q, k, v, out and lse are kept. The backward allocates dq, dk and dv (of
    grouped heads also dk and dv of each head of q, before they are added up) and, for its own time,
    a float32 sum for dq, 4*b*sq*h*d bytes, and statistics of 8*b*h*sq bytes. At 32 k tokens, 16
    heads and head dim 128 those are 268 MB and 4 MB. dO is copied where a kernel cannot
    load it as it lies: innermost stride other than 1 (an expanded dO has 0), other strides or start
    no multiples of 16 bytes.

Runs: host.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from . import reference
from .envelope import TILE_ROWS, Problem, check, check_model_options, recorded
from .launch import (
    contiguous_like,
    current_execution,
    execution,
    forward,
    kernel_for,
    loadable,
    mask_arguments,
    start,
)
from .masks import Mask
from .model.sequences import OPEN, Sequences
from .stage import Part, Stage
from .transforms import refusal

LOG2_E = math.log2(math.e)


def attention(stage: Stage, q, k, v, softmax_scale, return_lse: bool, mask: dict):
    """See `Stage.attention`, of which `mask` holds options; differentiable where an input requires
    grad.

    `check` has refused gradients of a stage that has none. Gradients of out and of lse are those
    of torch's autograd; they exist once, a second derivative raises RuntimeError.
    See Note [Memory of a backward].
    """
    problem = check(stage, q, k, v, softmax_scale, **mask)
    q, k, v = problem.batched(q, k, v)
    out, lse = attend(stage, problem, q, k, v)
    if problem.mask and problem.mask.packed:
        out, lse = out[0], lse[0]
    return (out, lse) if return_lse else out


def attend(stage: Stage, problem: Problem, q, k, v) -> tuple[Tensor, Tensor]:
    """(out, lse) of checked tensors (b, s, h, d); differentiable where an input requires grad."""
    if recorded(q, k, v):
        return _Attention.apply(q, k, v, stage, problem)
    return forward(stage, problem, *map(loadable, (q, k, v)))


class _Attention(torch.autograd.Function):
    """The forward kernel; its gradient is `_Gradient`, in the mode of execution of the forward."""

    @staticmethod
    def forward(ctx, q, k, v, stage: Stage, problem: Problem):
        out, lse = forward(stage, problem, *map(loadable, (q, k, v)))
        lengths = (problem.mask and problem.mask.lengths) or ()  # a change in place is found
        ctx.save_for_backward(q, k, v, out, lse, *lengths)
        ctx.set_materialize_grads(False)  # what of dout and dlse is not asked for stays None
        ctx.stage, ctx.problem, ctx.execution = stage, problem, current_execution()
        return out, lse

    @staticmethod
    def backward(ctx, dout, dlse):
        if dout is None and dlse is None:
            return None, None, None, None, None
        q, k, v, out, lse, *lengths = ctx.saved_tensors
        problem = ctx.problem
        if lengths:  # hooks on saved tensors may have kept other ones
            problem = replace(problem, mask=problem.mask.with_lengths(*lengths))
        given = q, k, v, out, lse, dout, dlse, ctx.stage, problem
        with execution(*ctx.execution):  # autograd calls this in a thread of its own
            recorded = torch.is_grad_enabled()  # with create_graph=True
            gradients = _Gradient.apply(*given) if recorded else _gradients(*given)
        return (*gradients, None, None)


class _Gradient(torch.autograd.Function):
    """(dq, dk, dv) by the kernels; a node of its own, so that differentiating it says why not."""

    @staticmethod
    def forward(ctx, *given):
        ctx.stage = given[-2]
        return _gradients(*given)

    @staticmethod
    def backward(ctx, *_):
        raise RuntimeError(
            f"the gradients of stage {ctx.stage.tag} cannot be differentiated again: its backward "
            "has no backward. Leave out create_graph=True, or take torch's own attention there"
        )


def _gradients(q, k, v, out, lse, dout, dlse, stage: Stage, problem: Problem) -> tuple:
    """(dq, dk, dv) by the kernels."""
    saved = Saved(*map(loadable, (q, k, v, out, lse)))  # hooks on saved tensors give any strides
    workspace = Workspace.empty(saved, mask=problem.mask)
    backward(stage, problem, saved, dout, dlse, workspace)
    return workspace.dq, workspace.dk, workspace.dv


@dataclass(frozen=True)
class Saved:
    """What the forward leaves for the backward, `loadable`: its inputs, out (b, sq, h, d), lse
    (b, h, sq)."""

    q: Tensor
    k: Tensor
    v: Tensor
    out: Tensor
    lse: Tensor


@dataclass(frozen=True)
class Workspace:
    """What the backward writes.

    stats (b, h, tiles, 2, 128) float32: `statistics`; dq_accum (b, sq, h, d) float32, the sum
    over keys before it is scaled; dq, dk, dv: the gradients, in the dtype and shape of the inputs,
    dk and dv of each head of q.
    """

    stats: Tensor
    dq_accum: Tensor
    dq: Tensor
    dk: Tensor
    dv: Tensor

    @classmethod
    def empty(cls, saved: Saved, make=contiguous_like, mask: Mask | None = None) -> Workspace:
        """make: as `contiguous_like`, gives each tensor. Kernels write all of the gradients; they
        are 0 where none is started."""
        q, k, v = saved.q, saved.k, saved.v
        batch, seqlen, heads, _ = q.shape
        stats = (batch, heads, tiles_of_statistics(seqlen, mask), 2, TILE_ROWS)
        sums = make(q, stats, torch.float32), make(q, None, torch.float32)
        of_keys = None if k.shape[2] == heads else (*k.shape[:2], heads, k.shape[3])
        made = cls(*sums, make(q), make(k, of_keys), make(v, of_keys))
        if mask and mask.sees_nothing:
            torch._foreach_zero_([made.dq, made.dk, made.dv])  # one launch
        return made


def tiles_of_statistics(seqlen_q: int, mask: Mask | None) -> int:
    """Tiles of statistics of a batch entry; each packed sequence begins a tile of its own."""
    if mask and mask.packed:
        return seqlen_q // TILE_ROWS + mask.batch
    return math.ceil(seqlen_q / TILE_ROWS)


def backward(
    stage: Stage,
    problem: Problem,
    saved: Saved,
    dout: Tensor | None,
    dlse: Tensor | None,
    workspace: Workspace,
    part: Part | None = None,
    tell: Callable | None = None,
) -> None:
    """Write the gradients of sum(out * dout) + sum(lse * dlse) by the stage's kernels.

    Args: problem and saved of the forward; dout (b, sq, h, d) in q's dtype, dlse (b, h, sq)
    float32, any strides, 0 where None; part: the stage's usual one when None; tell: see
    `kernel_for`. Runs on the current stream of the tensors' device.
    """
    if problem.mask and problem.mask.sees_nothing:
        return
    device, part = saved.q.device, part or stage.backward(problem.head_dim)
    sources = stage.part("preprocess"), part, stage.part("postprocess")
    first, main, last = (kernel_for(source, problem, device, tell) for source in sources)
    dout = torch.zeros_like(saved.out) if dout is None else loadable(dout)
    dlse = _zero(device).expand_as(saved.lse) if dlse is None else loadable(dlse)
    of_q = problem.mask.arguments_of_q if problem.mask else ()
    rows = saved.out, dout, saved.lse, dlse
    start(first, *rows, workspace.stats, workspace.dq_accum, *of_q)
    start_backward(main, problem, saved, dout, workspace)
    start(last, workspace.dq_accum, workspace.dq, problem.softmax_scale, *of_q)


_ZEROS: dict[torch.device, Tensor] = {}


def _zero(device: torch.device) -> Tensor:
    """A float32 0 on a device that nobody writes: made once, since a fill costs a launch.

    A CUDA graph that is being captured gets one of its own.
    """
    capturing = device.type == "cuda" and torch.cuda.is_current_stream_capturing()
    if capturing or device not in _ZEROS:
        made = torch.zeros((), dtype=torch.float32, device=device)  # not torch's default dtype
        if capturing:
            return made
        if device.type == "cuda":
            torch.cuda.current_stream(device).synchronize()  # other streams read it as well
        _ZEROS[device] = made
    return _ZEROS[device]


def start_backward(kernel, problem: Problem, saved: Saved, dout: Tensor, workspace: Workspace):
    """Start the kernel of a backward part; stats are there, dq_accum is 0, dout is `loadable`."""
    scale = problem.softmax_scale
    gradients = workspace.dq_accum, workspace.dk, workspace.dv
    inputs = saved.q, saved.k, saved.v, dout, workspace.stats
    start(kernel, *inputs, *gradients, scale * LOG2_E, scale, *mask_arguments(problem))


@torch.no_grad()
def statistics(
    out: Tensor,
    lse: Tensor,
    dout: Tensor,
    dlse: Tensor | None = None,
    mask: Mask | None = None,
) -> Tensor:
    """What preprocess writes to stats, by torch: LSE * log2(e), and D = rowsum(O * dO) - dLSE.

    Args: out, dout (b, sq, h, d) of one dtype; lse, dlse (b, h, sq) float32, natural log. Returns
    (b, h, tiles, 2, 128) float32, contiguous, a sequence's tiles one after the other. Rows beyond a
    sequence, and those that see no key (LSE = -inf), have inf and 0: P = exp2(S - inf) is 0.
    """
    d = (out.float() * dout.float()).sum(-1).transpose(1, 2)
    d = d if dlse is None else d - dlse
    blind = lse == -math.inf
    both = torch.stack([(lse * LOG2_E).masked_fill(blind, math.inf), d.masked_fill(blind, 0.0)], 2)
    rows = TILE_ROWS * tiles_of_statistics(out.shape[1], mask)
    stats = both.new_zeros(*both.shape[:3], rows)  # (b, h, 2, rows)
    stats[:, :, 0] = math.inf
    given = mask.sequences() if mask else Sequences.whole(out, out)
    for number, row in enumerate(given.rows):
        entry, first = given.entry(number), given.first_tile(number, TILE_ROWS) * TILE_ROWS
        stats[entry, ..., first : first + row.len_q] = both[entry, ..., row.queries()]
    return stats.unflatten(-1, (-1, TILE_ROWS)).transpose(2, 3).contiguous()


def simulate(part: Part, given: dict, softmax_scale, machine, max_ctas, mask: dict):
    """See `Part.simulate`; `given` has its tensors by name, None where one is left out."""
    from .model import B200

    if part.model is None:
        raise ValueError(f"part {part.tag} has no model")
    check_model_options(machine, max_ctas)
    q, k, v = (given[name] for name in "qkv")
    with torch.no_grad():  # inputs of a backward may require grad: nothing is recorded
        problem = check(part, q, k, v, softmax_scale, need_cuda=False, **mask)
    _check_upstream(q, given)
    if (given["out"] is None) != (given["lse"] is None):
        raise ValueError("out and lse belong to one forward: give both, or neither")
    given = dict(zip(given, problem.batched(*given.values())))
    q, k, v = (given[name] for name in "qkv")
    out, lse, dout = (given[name] for name in ("out", "lse", "dout"))
    if out is None:
        truth = oracle_forward(problem, q, k, v)
        out, lse = truth.out, truth.lse
    stats = statistics(out, lse, dout, given["dlse"], problem.mask)
    numbers = problem.softmax_scale, machine or B200, max_ctas
    with torch.no_grad():
        if problem.mask is None:
            return part.model.run(q, k, v, loadable(dout), stats, *numbers)
        run = part.model.run(q, k, v, loadable(dout), stats, *numbers, *problem.mask.of_model())
        return problem.mask.of_run(run)


@torch.no_grad()
def oracle_forward(problem: Problem, q: Tensor, k: Tensor, v: Tensor) -> Saved:
    """What a forward would leave if it made no error: the oracle's out, rounded once, and lse.

    q, k, v (b, s, h, d), of packed sequences with b = 1.
    """
    mask = problem.mask
    if mask is None:
        truth = reference.attention(q, k, v, softmax_scale=problem.softmax_scale)
        return Saved(q, k, v, truth.out.to(q.dtype), truth.lse.float())
    out = torch.zeros_like(q)
    lse = q.new_full((q.shape[0], q.shape[2], q.shape[1]), -math.inf, dtype=torch.float32)
    sides = tuple(None if side == OPEN else side for side in (mask.left, mask.right))
    given = mask.sequences()
    for number, row in enumerate(given.rows):
        entry, queries, keys = given.entry(number), row.queries(), row.keys()
        truth = reference.attention(
            q[entry, queries][None],
            k[entry, keys][None],
            v[entry, keys][None],
            softmax_scale=problem.softmax_scale,
            window_size=sides,
        )
        out[entry, queries], lse[entry, :, queries] = truth.out[0].to(q.dtype), truth.lse[0].float()
    return Saved(q, k, v, out, lse)


def _check_upstream(q: Tensor, given: dict) -> None:
    """TypeError or ValueError unless dout, out, lse, dlse fit q; all but dout may be None."""
    why = refusal(given, "it records no derivatives, call it outside")
    if why:
        raise TypeError(f"the model of a backward {why}")
    *batch, seqlen, heads, _ = q.shape  # no batch where sequences are packed
    like_q, of_rows = (q.shape, q.dtype), ((*batch, heads, seqlen), torch.float32)
    wanted = {"dout": like_q, "out": like_q, "lse": of_rows, "dlse": of_rows}
    for name, (shape, dtype) in wanted.items():
        x = given[name]
        if x is None and name != "dout":
            continue
        if not isinstance(x, Tensor) or x.dtype != dtype or x.device != q.device:
            raise TypeError(f"{name} must be a {dtype} tensor on {q.device}; got {_what(x)}")
        if x.shape != shape:
            raise ValueError(f"{name} must have shape {tuple(shape)}; got {tuple(x.shape)}")


def _what(x) -> str:
    return f"{x.dtype} on {x.device}" if isinstance(x, Tensor) else type(x).__name__
