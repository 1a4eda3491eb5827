# SPDX-License-Identifier: Apache-2.0
"""Executing other people's sm_100a CuTe DSL kernels on Hopper: `cute.compile` redirected.

Inside `redirected(device)`, what a program compiles with `cute.compile` is rewritten and comes back
as a function that runs on the Hopper GPU. Used for the peer test and the test kernels. Runs: host.
"""

from __future__ import annotations

import contextlib
import pathlib
import tempfile
from collections.abc import Callable, Iterator

import torch

from .build import build
from .run import HopperKernel, loaded


class _Compile:
    """Stands in for `cute.compile`; everything but the call goes to the original."""

    def __init__(self, original, make: Callable):
        self._original, self._make = original, make

    def __call__(self, function, *arguments, **keywords):
        import cutlass.cute as cute

        cute.compile = self._original  # `make` compiles, too
        try:
            return self._make(function, arguments, keywords)
        finally:
            cute.compile = self

    def __getitem__(self, options):
        raise ValueError("cute.compile[...] is not redirected; pass options= instead")

    def __getattr__(self, name):
        return getattr(self._original, name)


@contextlib.contextmanager
def compile_replaced(make: Callable) -> Iterator[None]:
    """While open, `cute.compile(f, *a, **k)` returns `make(f, a, k)`. Not thread-safe."""
    import cutlass.cute as cute

    original = cute.compile
    cute.compile = _Compile(original, make)
    try:
        yield
    finally:
        cute.compile = original


@contextlib.contextmanager
def redirected(device: torch.device, log: bool = False) -> Iterator[list[HopperKernel]]:
    """While open, `cute.compile` gives functions that execute on the Hopper GPU `device`.

    log: rewritten with the log. Yields the list of kernels compiled so far. Not thread-safe.
    """
    index = torch.cuda.current_device() if device.index is None else device.index
    kernels: list[HopperKernel] = []
    with tempfile.TemporaryDirectory(prefix="flash-ladder-") as scratch:

        def make(function, arguments, keywords):
            number = len(kernels)
            folder = pathlib.Path(scratch) / str(number)
            folder.mkdir()
            found = build(function, arguments, folder, f"redirected_{number}", log, **keywords)
            kernels.append(loaded(found, index))
            return kernels[-1].function

        with compile_replaced(make):
            yield kernels
