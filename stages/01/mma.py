# SPDX-License-Identifier: Apache-2.0
"""The two matrix products of attention, as FMAs of one thread for its row."""

import cutlass
import cutlass.cute as cute
from cutlass import Float32

VECTOR = 4  # float32 words of one 16-byte shared-memory load


@cute.jit
def mma_qk(sQ_row: cute.Tensor, sK: cute.Tensor, rS: cute.Tensor):
    """S = Q K^T for one query row, unscaled.

    Runs: every thread, on its own row; all threads read the same word of sK (a broadcast).
    Args: sQ_row (d,) and sK (tile_n, d) Float32, shared. Writes: rS (tile_n,) Float32.
    Cost: tile_n * d FMAs a thread, one 16-byte shared load for 4 of them.
    """
    rQ = cute.make_rmem_tensor((VECTOR,), Float32)
    rK = cute.make_rmem_tensor((VECTOR,), Float32)
    rS.fill(0.0)
    for k_block in cutlass.range(cute.size(sQ_row) // VECTOR):
        cute.autovec_copy(cute.local_tile(sQ_row, (VECTOR,), (k_block,)), rQ)
        for n in cutlass.range(cute.size(rS), unroll_full=True):
            cute.autovec_copy(cute.local_tile(sK[n, None], (VECTOR,), (k_block,)), rK)
            for k in cutlass.range_constexpr(VECTOR):
                rS[n] = rQ[k] * rK[k] + rS[n]


@cute.jit
def mma_pv(rP: cute.Tensor, sV: cute.Tensor, rO: cute.Tensor):
    """O += P V for one query row.

    Runs: every thread, on its own row; all threads read the same word of sV (a broadcast).
    Args: rP (tile_n,) Float32; sV (tile_n, d) Float32, shared. Updates: rO (d,) Float32.
    Cost: tile_n * d FMAs a thread, one 16-byte shared load for 4 of them.
    """
    rV = cute.make_rmem_tensor((cute.size(rO),), Float32)
    for n in cutlass.range(cute.size(rP), unroll_full=True):
        cute.autovec_copy(sV[n, None], rV)
        rO.store(rP[n] * rV.load() + rO.load())
