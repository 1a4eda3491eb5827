# SPDX-License-Identifier: Apache-2.0
"""The online softmax of one query row; the text every later stage keeps."""

import cutlass
import cutlass.cute as cute
from cutlass import Float32
from cutlass.cute.nvgpu import tcgen05

from ..common import arith
from ..common.tcgen05 import fence_after, fence_before, tmem_copy
from . import config
from .correction import rescale
from .epilogue import logsumexp, stage_row


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


@cute.jit
def softmax(tile, tmem, bars, sO, mLSE, scale_log2: Float32, num_n_blocks, where, tidx):
    """Turn every S of one query tile into P, keep O at the same reference point; finish the rows.

    Runs: the 128 threads of SOFTMAX0 or SOFTMAX1, converged; thread = lane = query row. Args: tile,
    0 or 1; tmem, (S, P, O) of that tile; bars; sO (TILE_M, d, 2) shared; mLSE (b, h, sq) Float32;
    where, (m_block, head, batch); tidx in the warpgroup. Waits: s_full, o_full. Arrives: p_full,
    where MMA waits; o_staged, where EPILOGUE and MMA do.
    """
    tStS, tOtP, tOtO = tmem
    rS = cute.make_rmem_tensor((cute.size(tStS, mode=[0, 1]),), Float32)
    row_max = -Float32.inf
    row_sum = Float32(0.0)
    for n_iter in cutlass.range(num_n_blocks, unroll=1):
        cute.arch.mbarrier_wait(bars.s_full.data_ptr() + tile, n_iter % 2)  # MMA's commit arrives
        fence_after()  # S is full, so the PV before it is done
        load_scores(tStS, rS, tidx)
        row_max, acc_scale = update_max(rS, row_max, scale_log2)
        if n_iter > 0:
            rescale(tOtO, acc_scale, tidx)
        row_sum = exponentials(rS, row_max, row_sum, acc_scale, scale_log2)
        store_probabilities(rS, tOtP, tidx)
        fence_before()
        cute.arch.mbarrier_arrive(bars.p_full.data_ptr() + tile)  # MMA waits
    m_block, head, batch = where
    cute.arch.mbarrier_wait(bars.o_full.data_ptr() + tile, 0)  # MMA's last commit arrives
    fence_after()
    stage_row(tOtO, sO[None, None, tile], row_sum, tidx)
    row = (m_block * config.Q_TILES + tile) * config.TILE_M + tidx
    if row < mLSE.shape[2]:
        mLSE[batch, head, row] = logsumexp(row_max, row_sum, scale_log2)
    cute.arch.fence_proxy("async.shared", space="cta")  # sO: written by threads, read by TMA
    fence_before()
    cute.arch.mbarrier_arrive(bars.o_staged.data_ptr() + tile)  # EPILOGUE and MMA wait
