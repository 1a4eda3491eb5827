# SPDX-License-Identifier: Apache-2.0
"""Refusal of tensors that a transform of torch has wrapped: no kernel sees through one.

Runs: host.
"""

from __future__ import annotations

import torch
from torch._C import _functorch
from torch.autograd import forward_ad

MAPPED = (
    "cannot be mapped by torch.vmap: give it the batch as its first axis, (b, s, h, d); {name} is "
    "a mapped tensor"
)
REVERSE = "cannot be differentiated by torch.func (grad, vjp, jacrev); {name} is a tensor of one"
FORWARD = (
    "has no forward-mode derivative (torch.func.jvp and jacfwd, torch.autograd.forward_ad); {name} "
    "has a tangent"
)
BY_AUTOGRAD = (
    "use torch.autograd.grad or backward() on tensors that require grad, or torch's own "
    "scaled_dot_product_attention"
)


def refusal(named: dict[str, object], instead: str = BY_AUTOGRAD) -> str | None:
    """Why the first tensor of `named` that a transform has wrapped cannot be taken, as the end of
    a sentence; None when there is none.

    Transforms are torch.vmap, torch.func.grad and its like, forward-mode derivatives. instead: what
    to do where a derivative was wanted.
    """
    if _functorch.peek_interpreter_stack() is None and forward_ad._current_level < 0:
        return None
    for name, x in named.items():
        why = _transform(x) if isinstance(x, torch.Tensor) else None
        if why:
            return why.format(name=name) + ("" if why is MAPPED else f": {instead}")
    return None


def _transform(x: torch.Tensor) -> str | None:
    """What the outermost wrapper of a tensor is, of those that are refused."""
    if _functorch.is_batchedtensor(x):
        return MAPPED
    if forward_ad.unpack_dual(x).tangent is not None:
        return FORWARD
    return REVERSE if _functorch.is_gradtrackingtensor(x) else None
