# SPDX-License-Identifier: Apache-2.0
"""The library op: `flash_attn_func` and `flash_attn_varlen_func`, by the last stage's kernels.

Two operators are registered with torch, flash_ladder::attention and its gradient, with fake
kernels and autograd: torch.compile traces through them without a break. Runs: host.

Note [Known problems]
    An operator of torch that is written in Python costs the host more than all else of a call, and
    checks come next. So a call that nobody traces, with options, shapes, strides and dtypes that
    were found right before, goes to the kernels directly, by an autograd.Function that saves what
    the operator saves: activation checkpointing may meet one in the forward and the other when it
    computes again. The addresses of cu_seqlens and seqused are taken anew each time.

Note [Grouped heads]
    With h query heads and hk heads of K and V, query head i reads head i // (h / hk), in place. dK
    and dV are computed for each query head and rounded to 16 bits, and then added up in float32. A
    later stage packs the heads of a group instead.

Note [Copies]
    A kernel loads q, k, v and dO as they lie where the last axis is contiguous, and the other
    strides and the start are multiples of 16 bytes. What lies otherwise is copied, in the forward
    and again in the backward: no copy is kept in between.
"""

from __future__ import annotations

import functools
import sys
import warnings

import torch
from torch import Tensor
from torch.autograd import forward_ad

from .compile import CompileKey
from .envelope import ALIGN_BYTES, Problem, check_all, recorded
from .gradients import Saved, Workspace, backward
from .launch import forward, loadable, modes
from .masks import LENGTHS, with_fields
from .model.sequences import OPEN
from .op_inputs import (
    ALTERNATIVE,
    check_inputs,
    checked_values,
    number_in,
    refuse_deterministic,
)
from .stage import Stage

LAST = 8  # the stage whose kernels are used

Window = tuple[int | None, int | None]


def flash_attn_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Window = (None, None),
    deterministic: bool = False,
    return_lse: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """softmax(mask(q k^T * softmax_scale)) v.

    Args:
        q: (b, sq, h, d), bf16 or fp16, on a CUDA GPU; d is 64 or 128. See Note [Copies].
        k, v: (b, sk, hk, d) like q; h is a multiple of hk. See Note [Grouped heads].
        softmax_scale: a positive number, by which q k^T is multiplied; None means d**-0.5.
        causal, window_size: which query sees which key, in keys, by Note [Which query sees which
            key] of `common.masks`; causal is aligned bottom-right, a side of the window is open
            where it is None or -1.
        deterministic: True is refused until a stage has such a backward.
        return_lse: whether to return (out, lse) instead of out.

    Returns: out (b, sq, h, d) in q's dtype; lse (b, h, sq) float32, natural logarithm. Both can be
    differentiated, once. Rows that see no key have out 0 and lse -inf.

    Raises: TypeError or ValueError before anything is launched: what was given, what is allowed.
    `common.compile.DslMissing` without the CuTe DSL. RuntimeError when a gradient is differentiated
    again, or under torch.vmap.
    """
    refuse_deterministic(deterministic)
    out, lse = _attend(q, k, v, _NONE, (None, None, softmax_scale, causal), window_size)
    return (out, lse) if return_lse else out


def flash_attn_varlen_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int | Tensor | None = None,
    max_seqlen_k: int | Tensor | None = None,
    seqused_q: Tensor | None = None,
    seqused_k: Tensor | None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Window = (None, None),
    deterministic: bool = False,
    return_lse: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """`flash_attn_func` of sequences that lie one after the other.

    Args:
        q: (total_q, h, d), bf16 or fp16, on a CUDA GPU; d is 64 or 128.
        k, v: (total_k, hk, d) like q; h is a multiple of hk.
        cu_seqlens_q, cu_seqlens_k: (n + 1,) int32 on q's device; sequence i has the rows from
            cu_seqlens[i] to cu_seqlens[i + 1]. Zero lengths are allowed. They must not fall, else
            all results are undefined: pad them with their last number.
        max_seqlen_q, max_seqlen_k: no sequence is longer, an int or a CPU tensor that holds one;
            total_q and total_k when None, which starts more thread blocks than there is work for.
        seqused_q, seqused_k: (n,) int32 on q's device: how many of its rows a sequence uses.
        softmax_scale, causal, window_size, deterministic, return_lse: as in `flash_attn_func`.

    Returns: out (total_q, h, d) in q's dtype; lse (h, total_q) float32, natural logarithm. Rows
    that no sequence uses have out 0, lse -inf and no gradient, and what they hold, NaN too, reaches
    nothing. Lengths are read on the GPU alone: one that goes beyond its tensor or its maximum is
    cut there.

    Raises: as `flash_attn_func`.
    """
    refuse_deterministic(deterministic)
    lengths = cu_seqlens_q, cu_seqlens_k, seqused_q, seqused_k
    most = number_in(max_seqlen_q), number_in(max_seqlen_k)
    out, lse = _attend(q, k, v, lengths, (*most, softmax_scale, causal), window_size)
    return (out, lse) if return_lse else out


_KNOWN: dict[tuple, tuple[Problem, tuple]] = {}  # with the values of _OPTIONS
MOST_KNOWN = 1024  # See Note [Known problems]


def _attend(q, k, v, lengths: tuple, options: tuple, window_size) -> tuple[Tensor, Tensor]:
    """(out, lse), by torch's dispatcher or past it.

    As the caller gave them: lengths, those of _OPTIONS; options, (max_seqlen_q, max_seqlen_k,
    softmax_scale, causal); window_size.
    """
    key, known = _look_up(q, k, v, lengths, options, window_size)
    if known is None:  # what must be said is raised here
        values = checked_values((q, k, v), lengths is not _NONE, lengths, options, window_size)
        problem = _problem(q, k, v, (*lengths, *values)) if key else None
        found = torch.ops.flash_ladder.attention(q, k, v, *lengths, *values)
        if key:
            if len(_KNOWN) >= MOST_KNOWN:
                _KNOWN.clear()
            _KNOWN[key] = problem, values
        return found
    if recorded(q, k, v):
        return _ShortCut.apply(q, k, v, (*known, lengths))
    return _forward(_with_lengths(known[0], lengths), q, k, v)


def _look_up(q, k, v, lengths: tuple, options: tuple, window_size) -> tuple:
    """(key of calls like this, what is known of them); None for what is not there: calls that
    torch wants to see, or that checks will refuse, have no key."""
    given = (q, k, v) if lengths is _NONE else (q, k, v, *lengths)
    if _traced() or not _PLAIN.issuperset(map(type, given)):
        return None, None
    try:  # 1 and True are equal, but of two types
        values = *options, *window_size
        key = *map(_layout, given), values, *map(type, values)
        return key, _KNOWN.get(key)
    except (TypeError, RuntimeError):  # no window, not to be hashed; sparse or nested tensors
        return None, None


class _ShortCut(torch.autograd.Function):
    """`attention` of a known problem, differentiable; see Note [Known problems]."""

    @staticmethod
    def forward(ctx, q, k, v, options: tuple):
        problem, ctx.values, ctx.lengths = options
        ctx.problem = _with_lengths(problem, ctx.lengths)
        out, lse = _forward(ctx.problem, q, k, v)
        saved = () if ctx.lengths is _NONE else ctx.lengths
        ctx.save_for_backward(q, k, v, out, lse, *saved)
        ctx.set_materialize_grads(False)  # what of dout and dlse is not asked for stays None
        return out, lse

    @staticmethod
    def backward(ctx, dout, dlse):
        q, k, v, out, lse, *lengths = ctx.saved_tensors
        if _traced() or torch.is_grad_enabled() or _batched(dout, dlse):  # create_graph=True
            dout = torch.zeros_like(out) if dout is None else dout
            dlse = torch.zeros_like(lse) if dlse is None else dlse
            given = dout, dlse, q, k, v, out, lse, *(lengths or _NONE), *ctx.values
            gradients = torch.ops.flash_ladder.attention_backward(*given)
        else:
            problem = ctx.problem
            if any(x is not y for x, y in zip(lengths, ctx.lengths)):  # a hook has kept others
                problem = _with_lengths(problem, lengths)
            gradients = _backward(problem, dout, dlse, q, k, v, out, lse)
        return *gradients, None


_NONE = (None,) * 4  # lengths of a batch whose entries have all their rows
_PLAIN = {Tensor, torch.nn.Parameter, type(None)}


def _batched(*gradients: Tensor | None) -> bool:
    """Whether they come from autograd.grad(..., is_grads_batched=True)."""
    batched = torch._C._functorch.is_legacy_batchedtensor
    return any(x is not None and batched(x) for x in gradients)


def _layout(x: Tensor | None) -> tuple | None:
    """All of a tensor that checks look at."""
    if x is None:
        return None
    return x.shape, x.stride(), x.dtype, x.device, x.data_ptr() % ALIGN_BYTES


_PRE_DISPATCH = torch._C.DispatchKey.PreDispatch


def _traced() -> bool:
    """Whether torch.compile, torch.jit.trace, torch.func, forward-mode derivatives or a mode of
    torch, one of functions (torch.device too) or of operators, wants to see what is called."""
    return bool(
        torch.compiler.is_compiling()
        or torch._C._len_torch_dispatch_stack()
        or torch._C._len_torch_function_stack()
        or torch._C._dispatch_tls_is_dispatch_key_included(_PRE_DISPATCH)
        or torch._C._functorch.peek_interpreter_stack() is not None
        or torch._C._get_tracing_state() is not None
        or forward_ad._current_level >= 0
    )


# ---- the operators -------------------------------------------------------------------------

_OPTIONS = (
    "Tensor? cu_seqlens_q, Tensor? cu_seqlens_k, Tensor? seqused_q, Tensor? seqused_k, "
    "SymInt? max_seqlen_q, SymInt? max_seqlen_k, float softmax_scale, SymInt left, SymInt right"
)


@functools.cache
def last_stage() -> Stage:
    """The stage whose kernels the op uses."""
    return Stage(LAST)


@torch.library.custom_op(
    "flash_ladder::attention",
    mutates_args=(),
    schema=f"(Tensor q, Tensor k, Tensor v, {_OPTIONS}) -> (Tensor, Tensor)",
)
def attention(q, k, v, *options):
    """(out, lse); see `flash_attn_func`. options: those of the schema."""
    problem = _with_lengths(_problem(q, k, v, options), options[:4])
    return _forward(problem, q, k, v)


@torch.library.custom_op(
    "flash_ladder::attention_backward",
    mutates_args=(),
    schema="(Tensor dout, Tensor dlse, Tensor q, Tensor k, Tensor v, Tensor out, Tensor lse, "
    f"{_OPTIONS}) -> (Tensor, Tensor, Tensor)",
)
def attention_backward(dout, dlse, q, k, v, out, lse, *options):
    """(dq, dk, dv), from what `attention` was given and returned."""
    problem = _with_lengths(_problem(q, k, v, options), options[:4])
    return _backward(problem, dout, dlse, q, k, v, out, lse)


def _forward(problem: Problem, q, k, v) -> tuple[Tensor, Tensor]:
    """(out, lse) of a checked problem."""
    out, lse = run_forward(problem, *_as_kernels_take(q, k, v))
    return (out[0], lse[0]) if q.dim() == 3 else (out, lse)


def _backward(problem: Problem, dout, dlse, q, k, v, out, lse):
    """(dq, dk, dv) of the same; dout and dlse may be None, for 0, and strides any."""
    _alert_not_deterministic()
    rest = out, lse, dout, dlse
    out4, lse4, dout4, dlse4 = problem.batched(*rest)
    saved = Saved(*_as_kernels_take(q, k, v), loadable(out4), loadable(lse4))
    dq, dk, dv = run_backward(problem, saved, dout4, dlse4)
    dk, dv = (_sum_of_groups(x, k.shape[-2]) for x in (dk, dv))
    return (dq[0], dk[0], dv[0]) if q.dim() == 3 else (dq, dk, dv)


def _with_lengths(problem: Problem, lengths) -> Problem:
    mask = problem.mask.with_lengths(*lengths)
    return problem if mask is problem.mask else with_fields(problem, mask=mask)


def run_forward(problem: Problem, q, k, v) -> tuple[Tensor, Tensor]:
    """(out, lse) of checked tensors (b, s, h, d) by the stage's kernel."""
    return forward(last_stage(), problem, q, k, v, _tell)


def run_backward(problem: Problem, saved: Saved, dout, dlse) -> tuple[Tensor, Tensor, Tensor]:
    """(dq, dk, dv) of the same by the stage's kernels."""
    workspace = Workspace.empty(saved, mask=problem.mask)
    backward(last_stage(), problem, saved, dout, dlse, workspace, tell=_tell)
    return workspace.dq, workspace.dk, workspace.dv


def _alert_not_deterministic() -> None:
    """What torch's own operators do of which the same holds."""
    if not torch.are_deterministic_algorithms_enabled():
        return
    text = (
        "the backward of flash_ladder's attention is not deterministic: dQ is added up in no fixed "
        "order; torch.use_deterministic_algorithms(True) was set. Set it with warn_only=True, or "
        "to False for this backward"
    )
    if not torch.is_deterministic_algorithms_warn_only_enabled():
        raise RuntimeError(text)
    warnings.warn(text, stacklevel=2)


def _problem(q, k, v, options) -> Problem:
    """The checked problem, of tensors as kernels take them, without `lengths`; launches nothing.

    Raises TypeError or ValueError for what no kernel takes.
    """
    lengths, (*most, scale, left, right) = options[:4], options[4:]
    stand_ins = check_inputs(last_stage(), q, k, v, lengths)
    sides = tuple(None if side == OPEN else side for side in (left, right))
    given = dict(zip(LENGTHS, lengths), max_seqlen_q=most[0], max_seqlen_k=most[1])
    problem = check_all(last_stage(), *stand_ins, scale, need_cuda=None, window_size=sides, **given)
    check_device(q.device)
    return problem


def _as_kernels_take(q, k, v) -> tuple[Tensor, Tensor, Tensor]:
    """(b, s, h, d), copied where it must be; see Note [Copies]."""
    if q.dim() == 3:
        q, k, v = q[None], k[None], v[None]
    return loadable(q), loadable(k), loadable(v)


def check_device(device: torch.device) -> None:
    """ValueError, with alternatives, for a device that no kernel runs on."""
    if device.type == "cuda" and modes(last_stage(), device):
        return
    what = f"q, k and v are on {str(device)!r}"
    if device.type == "cuda":
        major, minor = torch.cuda.get_device_capability(device)
        what = f"{torch.cuda.get_device_name(device)} has compute capability {major}.{minor}"
    raise ValueError(
        "flash_ladder's attention runs on CUDA GPUs of compute capability 10.0 and 10.3 (B200, "
        f"B300), and on 9.0 (H100, H200) slowly, in software; {what}. {ALTERNATIVE}"
    )


def _sum_of_groups(x: Tensor, heads: int) -> Tensor:
    """dK or dV (b, s, h, d) of a head for each of q's as one of `heads` heads; torch adds up 16-bit
    numbers in float32 and rounds once."""
    return x if x.shape[2] == heads else x.unflatten(2, (heads, -1)).sum(3)


def _tell(key: CompileKey) -> None:
    """Say on stderr what takes long."""
    print(f"flash_ladder: compiling {key.name}, once, for seconds", file=sys.stderr)


# ---- what torch wants to know --------------------------------------------------------------


@attention.register_fake
def _(q, k, v, *options):
    check_inputs(last_stage(), q, k, v, options[:4])
    *batch, seqlen, heads, _ = q.shape
    return torch.empty_like(q, memory_format=torch.contiguous_format), q.new_empty(
        (*batch, heads, seqlen), dtype=torch.float32
    )


@attention_backward.register_fake
def _(dout, dlse, q, k, v, out, lse, *options):
    check_inputs(last_stage(), q, k, v, options[:4])
    return tuple(torch.empty_like(x, memory_format=torch.contiguous_format) for x in (q, k, v))


def _save(ctx, inputs, output):
    q, k, v, *options = inputs
    lengths, ctx.numbers = options[:4], options[4:]
    ctx.save_for_backward(q, k, v, *output, *lengths)


def _differentiate(ctx, dout, dlse):
    q, k, v, out, lse, *lengths = ctx.saved_tensors
    gradients = torch.ops.flash_ladder.attention_backward(
        dout, dlse, q, k, v, out, lse, *lengths, *ctx.numbers
    )
    return (*gradients, *(None,) * (len(lengths) + len(ctx.numbers)))


def _refuse_second(ctx, *_):
    raise RuntimeError(
        "the gradients of flash_ladder's attention cannot be differentiated again: its backward "
        "has no backward. Leave out create_graph=True, or take torch's own attention there"
    )


def _refuse_vmap(info, in_dims, *_):
    raise RuntimeError(
        "flash_ladder's attention cannot be mapped by torch.vmap: give it the batch as its first "
        "axis, (b, s, h, d)"
    )


attention.register_autograd(_differentiate, setup_context=_save)
attention_backward.register_autograd(_refuse_second)
attention.register_vmap(_refuse_vmap)
attention_backward.register_vmap(_refuse_vmap)
