# SPDX-License-Identifier: Apache-2.0
"""What a call of the op costs the host: Python, checks and allocation, without its kernels.

`python -m flash_ladder.common.overhead --out docs/data/overhead.json` on a machine with a CUDA GPU
and flash-attn-4. Kernels are replaced by functions that do nothing, ours and theirs; theirs are
never compiled. Microseconds a call are those of the fastest of many short rounds, which take turns:
what other work on the host adds is left out of both. Runs: host.
"""

from __future__ import annotations

import contextlib
import datetime
import importlib.metadata
import json
import os
import pathlib
import time
from collections.abc import Callable, Iterator
from typing import Annotated
from unittest import mock

import torch
import typer

CALLS, ROUNDS = 100, 45
SHAPES = {  # q (b, sq, h, d), heads of k and v; without b: sequences of 512 rows
    "b2 sq2048 h16 d128": ((2, 2048, 16, 128), 16),
    "b1 sq128 h8 d64": ((1, 128, 8, 64), 8),
    "b2 sq2048 h16/4 d128": ((2, 2048, 16, 128), 4),
    "n8 sq4096 h16 d128": ((4096, 16, 128), 16),
}
PACKED_ROWS = 512


class _Nothing:
    """A kernel that is not started."""

    @staticmethod
    def function(*_arguments):
        pass


@contextlib.contextmanager
def without_kernels() -> Iterator[None]:
    """While open, neither this package nor flash-attn-4 starts a kernel of its own."""
    from . import launch, op
    from .hopper.redirect import compile_replaced

    targets = os.environ | {
        "FLASH_ATTENTION_ARCH": "sm_100",
        "CUTE_DSL_ARCH": "sm_100a",
        "FLASH_ATTENTION_NUM_SMS": "148",
    }
    with contextlib.ExitStack() as stack:
        stack.enter_context(mock.patch.dict(os.environ, targets))
        stack.enter_context(mock.patch.dict(launch._KERNELS, clear=True))
        stack.enter_context(mock.patch.object(launch, "_find_kernel", lambda *_: _Nothing))
        stack.enter_context(mock.patch.object(op, "check_device", lambda device: None))
        stack.enter_context(compile_replaced(lambda *_: lambda *_, **__: None))
        yield


def microseconds(functions: dict[str, Callable[[], object]]) -> dict[str, float]:
    """Time of a call of each in its fastest round, in turns."""
    times: dict[str, list[float]] = {name: [] for name in functions}
    for _ in range(ROUNDS + 1):  # the first warms up
        for name, function in functions.items():
            torch.cuda.synchronize()
            start = time.perf_counter()
            for _ in range(CALLS):
                function()
            times[name].append((time.perf_counter() - start) / CALLS * 1e6)
    return {name: round(min(rows[1:]), 1) for name, rows in times.items()}


class _Allocates(torch.autograd.Function):
    """What autograd and torch's allocator cost anybody: a result of q's shape, and gradients."""

    @staticmethod
    def forward(ctx, q, k, v):
        out = torch.empty_like(q)
        ctx.save_for_backward(q, k, v, out)
        return out

    @staticmethod
    def backward(ctx, dout):
        return tuple(map(torch.empty_like, ctx.saved_tensors[:3]))


def _calls(function: Callable, tensors, options: dict, training: bool) -> Callable[[], object]:
    """A forward, or a forward and a backward."""
    if not training:
        return lambda: function(*tensors, causal=True, **options)
    q, k, v = (x.detach().requires_grad_() for x in tensors)
    dout = torch.ones_like(q)

    def both():
        out = function(q, k, v, causal=True, **options)
        out = out[0] if isinstance(out, tuple) else out
        return torch.autograd.grad(out, (q, k, v), dout)

    return both


def measure() -> dict:
    """Microseconds a call by shape, of ours and of flash-attn-4, and of `_Allocates`."""
    from . import op

    found = {}
    with without_kernels():
        from flash_attn.cute import interface as theirs

        for name, (shape, heads) in SHAPES.items():
            of_keys = (*shape[:-2], heads, shape[-1])
            tensors = [torch.randn(x, device="cuda").bfloat16() for x in (shape, of_keys, of_keys)]
            packed = len(shape) == 3
            called = "flash_attn_varlen_func" if packed else "flash_attn_func"
            functions = {
                "flash_ladder": getattr(op, called),
                "flash-attn-4": getattr(theirs, called),
            }
            options = _lengths(shape[0]) if packed else {}
            for training in (False, True):
                if training:
                    functions["autograd alone"] = lambda *given, **_: _Allocates.apply(*given)
                calls = {key: _calls(f, tensors, options, training) for key, f in functions.items()}
                kind = "forward and backward" if training else "forward"
                found[f"{name}, {kind}"] = microseconds(calls)
    return found


def _lengths(rows: int) -> dict:
    """Those of packed sequences, as both take them."""
    ends = torch.arange(0, rows + 1, PACKED_ROWS, dtype=torch.int32, device="cuda")
    most = {"max_seqlen_q": PACKED_ROWS, "max_seqlen_k": PACKED_ROWS}
    return {"cu_seqlens_q": ends, "cu_seqlens_k": ends, **most}


def main(out: Annotated[pathlib.Path, typer.Option(help="Where to write the JSON.")]) -> None:
    """Measure and write."""
    rows = measure()
    found = {
        "date": datetime.date.today().isoformat(),
        "gpu": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "flash-attn-4": importlib.metadata.version("flash-attn-4"),
        "command": "python -m flash_ladder.common.overhead",
        "microseconds": rows,
    }
    out.write_text(json.dumps(found, indent=1) + "\n")
    print(json.dumps(rows, indent=1))


if __name__ == "__main__":
    typer.run(main)
