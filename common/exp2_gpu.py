# SPDX-License-Identifier: Apache-2.0
"""2^x on a GPU: the MUFU's error at every fraction, and the kernel's arithmetic against the model.

`python -m flash_ladder.common.exp2_gpu` measures on a Hopper GPU, where the code for sm_100a runs
rewritten, and writes docs/data/exp2-gpu.json; two minutes with 16 cores. Runs: measurement.
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import json
import multiprocessing
import os
import pathlib
import tempfile
import time
from collections.abc import Callable, Iterator

import cutlass
import cutlass.cute as cute
import numpy as np
import torch
from cutlass import Float32
from cutlass.cute.runtime import make_fake_stream, make_fake_tensor

from .. import load
from . import arith, exp2, exp2_study, float32, studies
from .hopper.redirect import redirected
from .ptx import ptx_hash
from .verification import driver

COMMAND = "python -m flash_ladder.common.exp2_gpu"
STAGE = 5  # whose emulation is compared
THREADS = 256
BLOCK = 1 << 26  # float32 patterns at a time
PIECE = 1 << 12  # of a worker, as large as its cache likes
PATTERNS = 1 << 32
SHARES = ("same", "within_one")
SMALL = exp2.CONSTANT << 23  # bits of 2^-26, below which `exp2.exhaustive` counts as a whole


# --- on the GPU ---------------------------------------------------------------------------------


@cute.kernel
def map_kernel(mX: cute.Tensor, mY: cute.Tensor, function: cutlass.Constexpr):
    """y = function(x) for a pair of each thread. Runs: THREADS threads, 2 * THREADS elements."""
    tidx, _, _ = cute.arch.thread_idx()
    block, _, _ = cute.arch.block_idx()
    i = 2 * (block * THREADS + tidx)
    if i < mX.shape[0]:
        mY[i], mY[i + 1] = function((mX[i], mX[i + 1]))


@cute.jit
def map_pairs(mX: cute.Tensor, mY: cute.Tensor, function: cutlass.Constexpr, stream):
    """Apply a function of pairs to mX (n,) Float32, n even, and write mY (n,). Runs: host."""
    blocks = cute.ceil_div(mX.shape[0], 2 * THREADS)
    map_kernel(mX, mY, function).launch(grid=(blocks, 1, 1), block=(THREADS, 1, 1), stream=stream)


@cute.jit
def mufu(x):
    """(2**x0, 2**x1) by the MUFU, as the stages compute what they do not emulate."""
    return arith.exp2(x[0]), arith.exp2(x[1])


def emulated() -> Callable:
    """What STAGE computes in place of `mufu`."""
    return load(STAGE).module("softmax").exp2_emulated


FUNCTIONS = {"mufu": lambda: mufu, "emulated": emulated}


def _arguments(name: str) -> tuple:
    """Stand-ins for the arguments of `map_pairs`."""
    size = cute.sym_int(divisibility=2)
    flat = [make_fake_tensor(Float32, (size,), (1,), assumed_align=8) for _ in range(2)]
    return (*flat, FUNCTIONS[name](), make_fake_stream(use_tvm_ffi_env_stream=True))


def compiled_ptx(name: str) -> str:
    """PTX for sm_100a of one of FUNCTIONS."""
    with tempfile.TemporaryDirectory() as folder:
        options = f"--gpu-arch sm_100a --keep-ptx --dump-dir {folder}"
        return cute.compile(map_pairs, *_arguments(name), options=options).__ptx__


@contextlib.contextmanager
def functions(device: torch.device) -> Iterator[dict[str, Callable]]:
    """While open, FUNCTIONS on flat CUDA float32 tensors of even length, compiled and rewritten."""
    with redirected(device):
        yield {name: _compiled(name) for name in FUNCTIONS}


def _compiled(name: str) -> Callable[[torch.Tensor], torch.Tensor]:
    kernel = cute.compile(map_pairs, *_arguments(name))

    def apply(x: torch.Tensor) -> torch.Tensor:
        y = torch.empty_like(x)
        kernel(x, y)
        return y

    return apply


# --- what is measured ---------------------------------------------------------------------------


def on_arrays(function: Callable, device: str = "cuda") -> Callable[[np.ndarray], np.ndarray]:
    """The same on numpy arrays of any length."""

    def apply(x: np.ndarray) -> np.ndarray:
        even = np.resize(x, x.size + x.size % 2)
        return function(torch.from_numpy(even).to(device)).cpu().numpy()[: x.size]

    return apply


def mufu_errors(function: Callable) -> dict:
    """Rows as in docs/data/exp2.json: of the MUFU, and of polynomials, in 16 bits, against it.

    Every float32 of [0, 1]; that the MUFU gives 1 for all below 2^-26 is checked one by one.
    """
    small = torch.arange(SMALL, dtype=torch.int32, device="cuda").view(torch.float32)
    assert (function(small) == 1).all(), "the MUFU is not constant below 2^-26"
    names = [f"one {n}" for n in exp2_study.SHOWN]
    everything = exp2_study.polynomials(exp2_study.SHOWN)
    mufu, ours = on_arrays(function), {name: everything[name] for name in names}
    found = exp2.exhaustive({"mufu": mufu, **ours}, reference=mufu)
    shares = {
        name: {kind: {key: found[name][kind][key] for key in SHARES} for kind in exp2.DROPPED}
        for name in ("ideal", *names)
    }
    for kind, row in shares.pop("ideal").items():
        found["mufu"][kind] |= row  # how often the two agree is the same seen from either side
    return {"mufu": found["mufu"], "against_mufu": shares}


def compare(function: Callable, patterns: int = PATTERNS) -> dict:
    """The kernel's 2^x and `exp2.exp2` of it, bit for bit, at every float32 pattern.

    Returns compared, different and the first differing pattern (None).
    """
    pool = multiprocessing.get_context("fork").Pool(os.cpu_count())
    different, first = 0, None
    with pool:
        for start in range(0, patterns, BLOCK):
            x = torch.arange(start, start + BLOCK, device="cuda").to(torch.int32)
            found = function(x.view(torch.float32)).cpu().numpy()
            jobs = [
                (start + at, found[at : at + BLOCK // 256]) for at in range(0, BLOCK, BLOCK // 256)
            ]
            for count, at in pool.imap(_differences, jobs):
                different += count
                first = at if first is None else first
    return {"compared": patterns, "different": different, "first": first}


def _differences(job: tuple[int, np.ndarray]) -> tuple[int, int | None]:
    """(how many, the first pattern or None) where a run of results is not the model's."""
    start, found = job
    coefficients = load(STAGE).config.POLYNOMIAL
    count, first = 0, None
    for at in range(0, found.size, PIECE):
        mine = found[at : at + PIECE]
        patterns = np.arange(start + at, start + at + mine.size, dtype=np.uint32)
        wanted = exp2.exp2(float32.from_bits(patterns), coefficients)
        wrong = np.flatnonzero(float32.bits(mine) != float32.bits(wanted))
        if wrong.size and first is None:
            first = start + at + int(wrong[0])
        count += wrong.size
    return count, first


# --- command ------------------------------------------------------------------------------------


def measure() -> dict:
    """Everything that docs/data/exp2-gpu.json holds; needs a Hopper GPU."""
    start = time.perf_counter()
    with functions(torch.device("cuda")) as found:
        compared = compare(found["emulated"])
        errors = mufu_errors(found["mufu"])
    provenance = {
        "command": COMMAND,
        "date": datetime.date.today().isoformat(),
        "gpu": torch.cuda.get_device_name(),
        "driver": driver(),
        "seconds": round(time.perf_counter() - start),
    }
    return {
        "what": "2^x on a GPU: error of ex2.approx; emulation of stage 05 against exp2.exp2",
        "provenance": provenance,
        "ptx_sha256": {name: ptx_hash(compiled_ptx(name)) for name in FUNCTIONS},
        "emulated": compared,
        **errors,
    }


if __name__ == "__main__":
    parser = argparse.ArgumentParser(prog=COMMAND, description="2^x on a Hopper GPU.")
    out = exp2_study.GPU_RESULTS
    parser.add_argument("--out", type=pathlib.Path, default=out, help="where the JSON goes")
    asked = parser.parse_args()
    studies.require_checkout(asked.out.parent)
    asked.out.write_text(json.dumps(measure(), indent=1) + "\n", encoding="utf-8")
    print(asked.out)
