# SPDX-License-Identifier: Apache-2.0
"""Outputs that show what a launch left out or wrote too much, and inputs that it must not write.

Runs: host.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from . import numerics

GUARD = 256  # elements before and after an output that must stay untouched


def guarded(shape: tuple[int, ...], dtype: torch.dtype, device) -> tuple[Tensor, Callable]:
    """A poisoned tensor inside poisoned storage, and a check that its surroundings still are."""
    size = torch.Size(shape).numel()
    storage = numerics.poison_(torch.empty(size + 2 * GUARD, dtype=dtype, device=device))

    def check_guards() -> None:
        outside = torch.cat([storage[:GUARD], storage[-GUARD:]])
        changed = 2 * GUARD - numerics.unwritten(outside)
        assert not changed, f"{changed} elements outside the output were written"

    return storage[GUARD:-GUARD].view(shape), check_guards


class Guards:
    """Of one or more launches: copies of the inputs, given by name, and guards of the outputs.

    What is no tensor is left out.
    """

    def __init__(self, **inputs: object):
        self._inputs = {name: x for name, x in inputs.items() if isinstance(x, Tensor)}
        self._before = {name: x.clone() for name, x in self._inputs.items()}
        self._checks: list[Callable] = []

    def output(self, x: Tensor, shape=None, dtype: torch.dtype | None = None) -> Tensor:
        """A poisoned, guarded output, as `launch.contiguous_like`."""
        made, check_guards = guarded(
            x.shape if shape is None else shape, dtype or x.dtype, x.device
        )
        self._checks.append(check_guards)
        return made

    def check(self) -> None:
        """AssertionError when memory beside an output, or an input, was written."""
        for check_guards in self._checks:
            check_guards()
        for name, x in self._inputs.items():
            assert torch.equal(_bits(self._before[name]), _bits(x)), f"{name} was written"


def _bits(x: Tensor) -> Tensor:
    return x.contiguous().view(torch.int16)
