# SPDX-License-Identifier: Apache-2.0
"""What callers give the library op, checked before anything is launched. Runs: host."""

from __future__ import annotations

import numbers

import torch
from torch import Tensor

from .envelope import check_shapes, check_tensors, checked_scale
from .masks import LENGTHS, check_dense, check_sequences, described, window
from .model.sequences import OPEN
from .stage import Stage
from .transforms import refusal

ALTERNATIVE = "torch.nn.functional.scaled_dot_product_attention runs everywhere"


def refuse_deterministic(deterministic: bool) -> None:
    """ValueError where it is wanted."""
    if deterministic:
        raise ValueError(
            "deterministic=True does not exist yet: dK and dV have the same bits each time, dQ "
            f"is added up in no fixed order. Leave it out; {ALTERNATIVE}"
        )


def checked_values(tensors, packed: bool, lengths, options: tuple, window_size) -> tuple:
    """(max_seqlen_q, max_seqlen_k, scale, left, right) in use.

    Args: tensors, (q, k, v); packed, whether `lengths` are of packed sequences; options,
    (max_seqlen_q, max_seqlen_k, softmax_scale, causal) as the caller gave them.
    Raises TypeError or ValueError for what the operator cannot refuse well; it checks the rest.
    """
    most_q, most_k, softmax_scale, causal = options
    _check_arguments(tensors, packed)
    scale = checked_scale(softmax_scale, max(tensors[0].shape[-1], 1))  # 0 is refused later
    sides = window(causal, window_size)
    if packed:
        _check_types(lengths)
    return _number("max_seqlen_q", most_q), _number("max_seqlen_k", most_k), scale, *sides


def _check_arguments(tensors, packed: bool) -> None:
    layout = "(total, heads, head_dim)" if packed else "(batch, seqlen, heads, head_dim)"
    for name, x in zip("qkv", tensors):
        if not isinstance(x, Tensor):
            raise TypeError(f"{name} must be a torch.Tensor; got {described(x)}")
        check_dense(name, x)
        if x.dim() != (3 if packed else 4):
            raise ValueError(f"{name} must be {layout}; got {tuple(x.shape)}")
    if not torch.compiler.is_compiling():
        why = refusal(dict(zip("qkv", tensors)))
        if why:
            raise TypeError(f"flash_ladder's attention {why}")


def _check_types(lengths) -> None:
    """Of cu_seqlens and seqused."""
    for name, x in zip(LENGTHS, lengths):
        if not isinstance(x, Tensor) and (x is not None or name.startswith("cu")):
            raise TypeError(f"{name} must be an int32 tensor; got {described(x)}")
        check_dense(name, x)


def number_in(x):
    """The number that a CPU tensor holds; anything else as it is."""
    return x.item() if isinstance(x, Tensor) and x.dim() == 0 and x.device.type == "cpu" else x


def _number(name: str, value) -> int | None:
    """An int of a maximum."""
    if value is None or (torch.compiler.is_compiling() and isinstance(value, int)):
        return value
    if isinstance(value, bool) or not isinstance(value, numbers.Integral):
        raise TypeError(
            f"{name} must be an int, or a CPU tensor that holds one; got {described(value)}"
        )
    return min(int(value), OPEN)


def check_inputs(stage: Stage, q, k, v, lengths) -> tuple[Tensor, Tensor, Tensor]:
    """TypeError or ValueError unless these fit each other and the stage; sizes may be symbols.

    Returns tensors like these but for their numbers, their memory and the heads of k and v, as many
    as q has.
    """
    check_tensors(stage, {"q": q, "k": k, "v": v})
    shapes = f"q {tuple(q.shape)}, k {tuple(k.shape)}, v {tuple(v.shape)}"
    if not q.dim() == k.dim() == v.dim() in (3, 4):
        raise ValueError(
            f"q, k and v must be (batch, seqlen, heads, head_dim) or (total, heads, head_dim); got "
            f"{shapes}"
        )
    check_sequences(q, k, lengths[:2], lengths[2:])
    check_shapes(stage, *(x[None] if x.dim() == 3 else x for x in (q, k, v)), grouped_heads=True)
    heads, own = q.shape[-2], k.shape[-2]
    if own < 1 or heads % own:
        raise ValueError(
            f"q has {heads} heads, k and v {own}; need in q a multiple of those of k and v, which "
            f"need at least one; got {shapes}"
        )
    return tuple(
        x.new_empty(x.shape[-1]).expand(*x.shape[:-2], heads, x.shape[-1]) for x in (q, k, v)
    )
