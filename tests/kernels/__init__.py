# SPDX-License-Identifier: Apache-2.0
"""Small tcgen05 kernels for sm_100a, to be executed on Hopper after rewriting, or on Blackwell.

`KERNELS` holds what a test needs to compile, run and judge each of them:

    kernel = KERNELS["gemm"]
    for parameters in kernel.sweep:
        function = kernel.build(arch="sm_100a", **parameters)
        inputs = kernel.make_inputs(seed, **parameters)  # on the CPU
        expected = kernel.reference(*inputs, **parameters)
        function(*inputs_on_the_gpu, out_like_expected)  # writes the last argument

Inputs are small integers and scales are powers of two, so that every sum is exact in float32
whatever its order: results are compared bit for bit, and one wrong element shows.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch

from . import chain, gemm, ts_gemm
from .parts import Bug

TORCH_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}
SCALE = 2.0**-4  # of S in chain
TILES = (2, 3, 5)  # of m, n, k in the inputs of a GEMM: grids of both axes, phases that flip twice
CHAIN_TILES = (3, 5)  # of queries and keys in the inputs of chain


@dataclass(frozen=True)
class Kernel:
    """One kernel with the parameters to sweep and the means to judge its result.

    build(arch=, **parameters) returns what `cute.compile` does; make_inputs(seed, **parameters)
    the arguments of a launch but the last, on the CPU; reference(*inputs, **parameters) the
    float32 matrix that the launch must write to its last argument. tolerance bounds the largest
    absolute error; 0.0 asks for equality. bugs: what the parameter `bug` may be, built upon
    `buggy` as the other parameters.
    """

    build: Callable
    sweep: tuple[dict, ...]
    make_inputs: Callable
    reference: Callable
    tolerance: float
    bugs: dict[str, Bug]
    buggy: dict


def _integers(seed: int, *shapes, dtype: str):
    """One matrix of integers in -4..4 per (rows, columns, major)."""
    generator = torch.Generator().manual_seed(seed)
    for rows, columns, major in shapes:
        shape = (rows, columns) if major == "K" else (columns, rows)
        values = torch.randint(-4, 5, shape, generator=generator).to(TORCH_DTYPES[dtype])
        yield values if major == "K" else values.T


def gemm_inputs(seed: int, *, dtype="bf16", m=128, n=128, a_major="K", b_major="K", **_):
    """(A, B) for gemm and ts_gemm."""
    rows, columns, k = TILES[0] * m, TILES[1] * n, TILES[2] * gemm.TILE_K
    return tuple(_integers(seed, (rows, k, a_major), (columns, k, b_major), dtype=dtype))


def gemm_reference(a, b, *, negate_a=False, negate_b=False, **_):
    """D = (-)A (-)B^T in float32."""
    sign = -1.0 if negate_a != negate_b else 1.0
    return (sign * (a.double() @ b.double().T)).float()


def chain_inputs(seed: int, *, dtype="bf16", n=128, d=128, **_):
    """(Q, K, V transposed, scale) for chain."""
    queries, keys = CHAIN_TILES[0] * chain.TILE_M, CHAIN_TILES[1] * n
    shapes = (queries, d, "K"), (keys, d, "K"), (d, keys, "MN")
    return (*_integers(seed, *shapes, dtype=dtype), SCALE)


def chain_reference(q, k, v, scale, **_):
    """O = P V with P = scale Q K^T rounded to the dtype of the inputs."""
    p = (scale * (q.double() @ k.double().T)).to(q.dtype)
    return (p.double() @ v.double().T).float()


def _entries(**axes):
    """Parameter sets of a list of axes, varied together: element i of each."""
    return tuple(dict(zip(axes, values)) for values in zip(*axes.values(), strict=True))


GEMM_SWEEP = (
    *_entries(dtype=("bf16", "fp16")),
    *_entries(n=(8, 16, 64, 192, 256)),
    *_entries(m=(64,) * 6, n=(8, 16, 64, 128, 192, 256)),
    *_entries(m=(64,) * 2, load=("16x128b", "16x64b")),
    *_entries(a_major=("K", "MN", "MN"), b_major=("MN", "K", "MN")),
    *_entries(swizzle_a=(64, 32, 0), swizzle_b=(32, 0, 64)),
    *_entries(a_major=("MN",) * 3, swizzle_a=(64, 32, 0)),
    *_entries(b_major=("MN",) * 3, swizzle_b=(64, 32, 0)),
    *_entries(b_major=("MN",) * 4, n=(192, 32, 16, 8), swizzle_b=(128, 64, 32, 0)),
    {"m": 64, "n": 192, "a_major": "MN", "b_major": "MN", "dtype": "fp16"},
    *_entries(negate_a=(True, False, True), negate_b=(False, True, True)),
    *_entries(pair=(True,) * 4, m=(128,) * 4, n=(16, 64, 128, 256)),
    *_entries(pair=(True,) * 5, m=(256,) * 5, n=(16, 64, 128, 192, 256)),
    {"pair": True, "m": 256, "a_major": "MN", "b_major": "MN", "dtype": "fp16"},
    {"pair": True, "m": 128, "a_major": "MN", "b_major": "MN", "n": 256},
    *_entries(pair=(True,) * 3, m=(256, 256, 128), swizzle_a=(64, 32, 0), swizzle_b=(0, 64, 32)),
    {"pair": True, "m": 256, "n": 32, "b_major": "MN", "swizzle_b": 32, "negate_a": True},
)
TS_SWEEP = (
    *_entries(dtype=("bf16", "fp16")),
    *_entries(n=(16, 64, 192, 256)),
    *_entries(b_major=("MN",) * 4, n=(256, 192, 128, 64), dtype=("bf16", "fp16") * 2),
    *_entries(b_major=("MN", "K"), n=(32, 32), swizzle_b=(64, 32)),
    *_entries(
        m=(64,) * 4,
        n=(128, 64, 256, 128),
        store=("16x128b", "16x256b", "16x64b", "16x128b"),
        load=("16x256b", "16x128b", "16x64b", "16x256b"),
        dtype=("bf16", "bf16", "fp16", "fp16"),
        b_major=("K", "K", "K", "MN"),
    ),
)
CHAIN_SWEEP = _entries(
    n=(128, 64, 128, 64, 128), d=(128, 128, 64, 64, 128), dtype=("bf16",) * 4 + ("fp16",)
)
KERNELS = {
    "gemm": Kernel(gemm.build, GEMM_SWEEP, gemm_inputs, gemm_reference, 0.0, gemm.BUGS, {"n": 64}),
    "ts_gemm": Kernel(ts_gemm.build, TS_SWEEP, gemm_inputs, gemm_reference, 0.0, {}, {}),
    "chain": Kernel(
        chain.build, CHAIN_SWEEP, chain_inputs, chain_reference, 0.0, chain.BUGS, {"n": 64}
    ),
}


def label(parameters: dict) -> str:
    """A name for a parameter set, for test ids and file names."""
    words = []
    for name, value in parameters.items():
        words.append(name if value is True else f"{name}={value}" if value is not False else "")
    return "-".join(word for word in words if word) or "default"
