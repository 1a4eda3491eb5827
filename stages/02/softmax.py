# SPDX-License-Identifier: Apache-2.0
"""The online softmax of one query row; the text every later stage keeps."""

import cutlass
import cutlass.cute as cute
from cutlass import Float32
from cutlass.cute.nvgpu import tcgen05

from ..common import arith
from ..common.tcgen05 import tmem_copy
from . import config


@cute.jit
def update_max(rS: cute.Tensor, row_max: Float32, scale_log2: Float32):
    """The row's maximum including one more key tile, and what that makes of everything before.

    Runs: every thread that owns a row, on its own registers; nothing is exchanged.
    Args: rS (tile_n,) Float32, unscaled scores of this row, any even length; row_max, unscaled,
    before this tile, -inf at the first; scale_log2 = softmax_scale * log2(e).
    Returns: (row_max, acc_scale); earlier P, sum and O must be multiplied by acc_scale.
    Numerics: float32; a NaN score makes row_max, and so the row, NaN. Cost: per score 1 max.
    """
    new_max = arith.max_of(rS, row_max)
    return new_max, arith.exp2((row_max - new_max) * scale_log2)


@cute.jit
def exponentials(
    rS: cute.Tensor, row_max: Float32, row_sum: Float32, acc_scale: Float32, scale_log2: Float32
):
    """Turn scores into probabilities in place and add them up.

    Runs: as update_max. Args: rS (tile_n,) unscaled scores; row_max and acc_scale from
    update_max; row_sum of the tiles before, 0 at the first. Writes: rS, the unnormalised
    P = exp2((S - row_max) * scale_log2). Returns: row_sum with this tile.
    Cost: per score 1 FMA, 1 exp2, 1 add. See paper section 3.1, Milakov 2018.
    """
    minus_max = -row_max * scale_log2
    for i in cutlass.range_constexpr(0, cute.size(rS), 2):
        x = arith.fma2((rS[i], rS[i + 1]), (scale_log2, scale_log2), (minus_max, minus_max))
        rS[i] = arith.exp2(x[0])
        rS[i + 1] = arith.exp2(x[1])
    return arith.sum_of(rS, row_sum * acc_scale)


@cute.jit
def load_scores(tStS: cute.Tensor, rS: cute.Tensor, tidx: cutlass.Int32):
    """Copy this thread's row of S from tensor memory to registers; complete on return.

    Runs: 128 threads, converged; thread = lane. Args: tStS ((TILE_M, tile_n), 1, 1) float32 in
    TMEM; rS (tile_n,) Float32. The caller has waited for S.
    """
    op = tcgen05.Ld32x32bOp(tcgen05.Repetition(config.CHUNK))
    copy = tmem_copy(op, tStS)
    tStS_t2r = copy.get_slice(tidx).partition_S(tStS)  # (T2R, tile_n / CHUNK, 1, 1)
    layout = cute.make_layout(((config.CHUNK, 1),))  # T2R of one thread
    for part in cutlass.range_constexpr(cute.size(rS) // config.CHUNK):
        rS_i = cute.make_tensor(rS.iterator + part * config.CHUNK, layout)  # (T2R)
        cute.copy(copy, tStS_t2r[None, part, 0, 0], rS_i)
    cute.arch.fence_view_async_tmem_load()


@cute.jit
def store_probabilities(rP: cute.Tensor, tOtP: cute.Tensor, tidx: cutlass.Int32):
    """Round this thread's row of P to 16 bits and store it to tensor memory; complete on return.

    Runs: 128 threads, converged. Args: rP (tile_n,) Float32; tOtP ((TILE_M, 16), 1, tile_n / 16)
    bf16 or fp16 in TMEM, two to a column.
    """
    dtype = tOtP.element_type
    op = tcgen05.St32x32bOp(tcgen05.Repetition(config.CHUNK // 2))
    copy = tmem_copy(op, tOtP, dtype)
    tOtP_r2t = copy.get_slice(tidx).partition_D(tOtP)  # (R2T, 1, 1, tile_n / CHUNK)
    for part in cutlass.range_constexpr(cute.size(rP) // config.CHUNK):
        row = cute.local_tile(rP, (config.CHUNK,), (part,))
        rP_i = cute.make_rmem_tensor(cute.make_layout(((config.CHUNK, 1),)), dtype)  # (R2T)
        rP_i.store(row.load().to(dtype).reshape(rP_i.shape))
        cute.copy(copy, rP_i, tOtP_r2t[None, 0, 0, part])
    cute.arch.fence_view_async_tmem_store()
