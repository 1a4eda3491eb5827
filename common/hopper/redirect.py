# SPDX-License-Identifier: Apache-2.0
"""Executing other people's sm_100a CuTe DSL kernels on Hopper: `cute.compile` redirected.

Inside `redirected(device)`, what a program compiles with `cute.compile` is rewritten and comes back
as a function that runs on the Hopper GPU. Used for the peer test. Runs: host.
"""

from __future__ import annotations

import contextlib
import pathlib
import tempfile
from collections.abc import Iterator

import torch

from .build import build
from .run import HopperKernel, loaded


class _Compile:
    """Stands in for `cute.compile`; everything but the call goes to the original."""

    def __init__(self, original, device_index: int, folder: pathlib.Path):
        self._original, self._device_index, self._folder = original, device_index, folder
        self.kernels: list[HopperKernel] = []

    def __call__(self, function, *arguments, **keywords):
        import cutlass.cute as cute

        number = len(self.kernels)
        target = self._folder / str(number)
        target.mkdir()
        cute.compile = self._original
        try:
            found = build(function, arguments, target, f"peer_{number}", **keywords)
        finally:
            cute.compile = self
        kernel = loaded(f"peer {number}", found, self._device_index)
        self.kernels.append(kernel)
        return kernel.function

    def __getitem__(self, options):
        raise ValueError("cute.compile[...] is not redirected; pass options= instead")

    def __getattr__(self, name):
        return getattr(self._original, name)


@contextlib.contextmanager
def redirected(device: torch.device) -> Iterator[list[HopperKernel]]:
    """While open, `cute.compile` gives functions that execute on the Hopper GPU `device`.

    Yields the list of kernels compiled so far. The redirection is not thread-safe.
    """
    import cutlass.cute as cute

    original = cute.compile
    index = torch.cuda.current_device() if device.index is None else device.index
    with tempfile.TemporaryDirectory(prefix="flash-ladder-peer-") as scratch:
        cute.compile = _Compile(original, index, pathlib.Path(scratch))
        try:
            yield cute.compile.kernels
        finally:
            cute.compile = original
