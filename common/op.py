# SPDX-License-Identifier: Apache-2.0
"""The library op: `flash_attn_func` and `flash_attn_varlen_func`, by the last stage's kernels.

Two operators are registered with torch, flash_ladder::attention and its gradient, with fake
kernels and autograd: torch.compile traces through them without a break. Runs: host.

Note [Known problems]
    An operator of torch that is written in Python costs the host more than all else of a call, and
    checks come next. So a call that nobody traces, of tensors whose shapes, strides and dtypes were
    found right before, goes to the kernels directly, by the autograd of the stages. What depends on
    the numbers in cu_seqlens and seqused is made anew each time.

Note [Grouped heads]
    With h query heads and hk heads of K and V, query head i reads head i // (h / hk). K and V are
    copied for their query heads, to h / hk times their size; dK and dV of a group are added up in
    float32, each rounded to 16 bits before. A later stage packs the heads of a group instead.

Note [Copies]
    A kernel loads q, k, v and dO as they lie where the last axis is contiguous, and the other
    strides and the start are multiples of 16 bytes. What lies otherwise is copied once.
"""

from __future__ import annotations

import functools
import numbers
import sys
from dataclasses import replace

import torch
from torch import Tensor

from . import compile as compiling
from .envelope import ALIGN_BYTES, Problem, check
from .gradients import Saved, Workspace, attend, backward, loadable
from .launch import forward, modes
from .masks import window
from .model.sequences import OPEN
from .stage import Stage
from .transforms import refusal

LAST = 8  # the stage whose kernels are used
ALTERNATIVE = "torch.nn.functional.scaled_dot_product_attention runs everywhere"

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
    _check_arguments((q, k, v), 4, "(batch, seqlen, heads, head_dim)", deterministic)
    scale, sides = _scale(softmax_scale, q), window(causal, window_size)
    out, lse = _attend(q, k, v, ((None,) * 4, None, None, scale, *sides))
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
            cu_seqlens[i] to cu_seqlens[i + 1]. Zero lengths are allowed. They must not fall: rows
            of two sequences have undefined results.
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
    _check_arguments((q, k, v), 3, "(total, heads, head_dim)", deterministic)
    scale, sides = _scale(softmax_scale, q), window(causal, window_size)
    lengths = cu_seqlens_q, cu_seqlens_k, seqused_q, seqused_k
    most = _number("max_seqlen_q", max_seqlen_q), _number("max_seqlen_k", max_seqlen_k)
    out, lse = _attend(q, k, v, (lengths, *most, scale, *sides))
    return (out, lse) if return_lse else out


def _check_arguments(tensors, rank: int, layout: str, deterministic: bool) -> None:
    """What the operator cannot say well; the rest is checked when it runs."""
    if deterministic:
        raise ValueError(
            "deterministic=True does not exist yet; dK and dV have the same bits each time, dQ "
            "is added up in no fixed order. Leave it out, or use " + ALTERNATIVE
        )
    for name, x in zip("qkv", tensors):
        if not isinstance(x, Tensor):
            raise TypeError(f"{name} must be a torch.Tensor; got {type(x).__name__}")
        if x.dim() != rank:
            raise ValueError(f"{name} must be {layout}; got {tuple(x.shape)}")
    if not torch.compiler.is_compiling():
        why = refusal(dict(zip("qkv", tensors)))
        if why:
            raise TypeError(f"flash_ladder's attention {why}")


def _scale(softmax_scale, q: Tensor) -> float:
    if softmax_scale is None:
        return q.shape[-1] ** -0.5
    if isinstance(softmax_scale, bool) or not isinstance(softmax_scale, numbers.Real):
        raise TypeError(
            f"softmax_scale must be a number or None; got {type(softmax_scale).__name__}"
        )
    return float(softmax_scale)


def _number(name: str, value) -> int | None:
    """An int of an int or of a CPU tensor that holds one."""
    if isinstance(value, Tensor) and value.dim() == 0 and value.device.type == "cpu":
        return value.item()
    if isinstance(value, Tensor):
        raise TypeError(
            f"{name} must be an int, or a CPU tensor that holds one; got {value.shape} "
            f"on {value.device}"
        )
    whole = isinstance(value, numbers.Integral) and not isinstance(value, (bool, int))
    return int(value) if whole else value


_KNOWN: dict[tuple, tuple[Problem, bool]] = {}  # See Note [Known problems]
MOST_KNOWN = 1024


def _attend(q, k, v, options: tuple) -> tuple[Tensor, Tensor]:
    """(out, lse), by torch's dispatcher or past it. options: (lengths, *numbers of _OPTIONS)."""
    lengths = options[0]
    given = [x for x in (q, k, v, *lengths) if x is not None]
    if torch.compiler.is_compiling() or not all(type(x) in _PLAIN for x in given) or _traced():
        return torch.ops.flash_ladder.attention(q, k, v, *lengths, *options[1:])
    key = *[_layout(x) if x is not None else None for x in (q, k, v, *lengths)], options[1:]
    found = _KNOWN.get(key)
    if found:
        return _attend_known(*found, q, k, v, lengths)
    problem, tensors = _problem(q, k, v, (*lengths, *options[1:]))  # raises what must be said
    if len(_KNOWN) >= MOST_KNOWN:
        _KNOWN.clear()
    as_they_lie = all(x is y for x, y in zip(tensors, (q, k, v)))
    mask = replace(problem.mask, lengths=None)  # of this call alone
    _KNOWN[key] = replace(problem, mask=mask), as_they_lie
    return torch.ops.flash_ladder.attention(q, k, v, *lengths, *options[1:])


def _attend_known(problem: Problem, as_they_lie: bool, q, k, v, lengths) -> tuple[Tensor, Tensor]:
    """(out, lse) of a problem without `lengths` that was met before."""
    packed = q.dim() == 3
    if lengths != (None,) * 4:
        with torch.no_grad():
            rows = (q.shape[0], k.shape[0]) if packed else (q.shape[1], k.shape[1])
            mask = problem.mask.with_lengths(lengths[:2], lengths[2:], rows)
        problem = replace(problem, mask=mask)
    tensors = (q, k, v) if as_they_lie else _as_kernels_take(q, k, v)
    out, lse = attend(last_stage(), problem, *tensors)
    return (out[0], lse[0]) if packed else (out, lse)


_PLAIN = (Tensor, torch.nn.Parameter)


def _layout(x: Tensor) -> tuple:
    """All of a tensor that checks look at."""
    return x.shape, x.stride(), x.dtype, x.device, x.data_ptr() % ALIGN_BYTES


def _traced() -> bool:
    """Whether torch.func or a mode of torch wants to see what is called."""
    modes_open = torch._C._len_torch_dispatch_stack()
    return bool(modes_open) or torch._C._functorch.peek_interpreter_stack() is not None


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
    problem, (q4, k4, v4) = _problem(q, k, v, options)
    with _told_what_takes_long():
        out, lse = run_forward(problem, q4, k4, v4)
    return (out[0], lse[0]) if q.dim() == 3 else (out, lse)


@torch.library.custom_op(
    "flash_ladder::attention_backward",
    mutates_args=(),
    schema="(Tensor dout, Tensor dlse, Tensor q, Tensor k, Tensor v, Tensor out, Tensor lse, "
    f"{_OPTIONS}) -> (Tensor, Tensor, Tensor)",
)
def attention_backward(dout, dlse, q, k, v, out, lse, *options):
    """(dq, dk, dv), from what `attention` was given and returned."""
    problem, tensors = _problem(q, k, v, options)
    rest = (x[None] if q.dim() == 3 else x for x in (out, lse, dout, dlse))
    out4, lse4, dout4, dlse4 = rest
    with _told_what_takes_long():
        dq, dk, dv = run_backward(problem, Saved(*tensors, out4, lse4), dout4, dlse4)
    dk, dv = (_sum_of_groups(x, k.shape[-2]) for x in (dk, dv))
    return (dq[0], dk[0], dv[0]) if q.dim() == 3 else (dq, dk, dv)


def run_forward(problem: Problem, q, k, v) -> tuple[Tensor, Tensor]:
    """(out, lse) of checked tensors (b, s, h, d) by the stage's kernel."""
    return forward(last_stage(), problem, q, k, v)


def run_backward(problem: Problem, saved: Saved, dout, dlse) -> tuple[Tensor, Tensor, Tensor]:
    """(dq, dk, dv) of the same by the stage's kernels."""
    workspace = Workspace.empty(saved, mask=problem.mask)
    backward(last_stage(), problem, saved, dout, dlse, workspace)
    return workspace.dq, workspace.dk, workspace.dv


def _problem(q, k, v, options) -> tuple[Problem, tuple[Tensor, Tensor, Tensor]]:
    """The checked problem, and q, k, v as kernels take them: (b, s, h, d), a head for each of q's.

    Raises TypeError or ValueError for what no kernel takes.
    """
    cu_q, cu_k, used_q, used_k, max_q, max_k, scale, left, right = options
    sides = tuple(None if side == OPEN else side for side in (left, right))
    lengths = {"cu_seqlens_q": cu_q, "cu_seqlens_k": cu_k, "seqused_q": used_q}
    lengths |= {"seqused_k": used_k, "max_seqlen_q": max_q, "max_seqlen_k": max_k}
    given = {"window_size": sides, **lengths}
    tensors = _as_kernels_take(q, k, v)
    shown = [x[0] for x in tensors] if q.dim() == 3 else tensors
    problem = check(last_stage(), *shown, scale, need_cuda=None, **given)
    check_device(q.device)
    return problem, tensors


def _as_kernels_take(q, k, v) -> tuple[Tensor, Tensor, Tensor]:
    """(b, s, h, d), with a head for each of q's, copied where it must be; see Note [Copies]."""
    tensors = (q, _per_query_head(k, q), _per_query_head(v, q))
    return tuple(loadable(x[None] if q.dim() == 3 else x) for x in tensors)


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


def _per_query_head(x: Tensor, q: Tensor) -> Tensor:
    """K or V with a head for each of q's; see Note [Grouped heads]."""
    heads, own = q.shape[-2], x.shape[-2]
    if own < 1 or heads % own:
        raise ValueError(f"q has {heads} heads, k or v {own}; need a multiple of at least one")
    return x if own == heads else x.repeat_interleave(heads // own, dim=-2)


def _sum_of_groups(x: Tensor, heads: int) -> Tensor:
    """dK or dV (b, s, h, d) of a head for each of q's as one of `heads` heads."""
    if x.shape[2] == heads:
        return x
    return x.unflatten(2, (heads, -1)).sum(3, dtype=torch.float32).to(x.dtype)


def _told_what_takes_long():
    """While open, a compilation is announced on stderr."""
    return compiling.announced(
        lambda key: print(f"flash_ladder: compiling {key.name}, once, for seconds", file=sys.stderr)
    )


# ---- what torch wants to know --------------------------------------------------------------


@attention.register_fake
def _(q, k, v, *options):
    *batch, seqlen, heads, _ = q.shape
    return torch.empty_like(q, memory_format=torch.contiguous_format), q.new_empty(
        (*batch, heads, seqlen), dtype=torch.float32
    )


@attention_backward.register_fake
def _(dout, dlse, q, k, v, out, lse, *options):
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
