# SPDX-License-Identifier: Apache-2.0
"""Everything that happens to O between the products: rescaling, and the end."""

import cutlass
import cutlass.cute as cute
from cutlass import Float32
from cutlass.cute.nvgpu import tcgen05

from ..common.tcgen05 import fence_after, fence_before, tmem_copy
from . import config
from .epilogue import logsumexp, stage_row


@cute.jit
def rescale(tOtO: cute.Tensor, acc_scale: Float32, tidx: cutlass.Int32):
    """Multiply this thread's row of O by `acc_scale`; complete on return.

    Runs: 128 threads, converged; thread = lane. Args: tOtO ((TILE_M, d), 1, 1) float32 in TMEM.
    The caller has waited for the last PV. Cost: d loaded, d stored, a row.
    """
    load = tmem_copy(tcgen05.Ld32x32bOp(tcgen05.Repetition(config.CHUNK)), tOtO)
    store = tmem_copy(tcgen05.St32x32bOp(tcgen05.Repetition(config.CHUNK)), tOtO)
    tOtO_t2r = load.get_slice(tidx).partition_S(tOtO)  # (T2R, d / CHUNK, 1, 1)
    tOtO_r2t = store.get_slice(tidx).partition_D(tOtO)  # (R2T, d / CHUNK, 1, 1)
    rO = cute.make_rmem_tensor(cute.make_layout(((config.CHUNK, 1),)), Float32)  # (T2R)
    for part in cutlass.range_constexpr(cute.size(tOtO_t2r, mode=[1])):
        cute.copy(load, tOtO_t2r[None, part, 0, 0], rO)
        cute.arch.fence_view_async_tmem_load()
        rO.store(rO.load() * acc_scale)
        cute.copy(store, rO, tOtO_r2t[None, part, 0, 0])
    cute.arch.fence_view_async_tmem_store()


@cute.jit
def correction(tmem, bars, sStats, sO, mLSE, scale_log2: Float32, num_n_blocks, where, rows, tidx):
    """Keep O at the reference point of each new key tile; normalise, stage and describe it.

    Runs: the 128 threads of CORRECTION, converged; thread = lane = query row, both tiles in turn.
    Args: tmem, (S, P, O) by query tile; sStats as in softmax; sO (TILE_M, d, 2) shared; mLSE
    (b, h, sq) Float32; where, (m_block, head, batch); rows, see `sequence`. Waits: stats_full,
    o_full. Arrives: stats_empty, where the tile's softmax waits; o_rescaled (MMA); o_staged
    (EPILOGUE and MMA).
    """
    for tile in cutlass.range_constexpr(config.Q_TILES):
        cute.arch.mbarrier_wait(bars.stats_full.data_ptr() + tile, 0)  # the tile's softmax arrives
        cute.arch.mbarrier_arrive(bars.stats_empty.data_ptr() + tile)  # the tile's softmax waits
        cute.arch.mbarrier_arrive(bars.o_rescaled.data_ptr() + tile)  # MMA waits: O is empty
    for n_iter in cutlass.range(1, num_n_blocks, unroll=2):
        for tile in cutlass.range_constexpr(config.Q_TILES):
            stats_full = bars.stats_full.data_ptr() + tile
            cute.arch.mbarrier_wait(stats_full, n_iter % 2)  # the tile's softmax arrives
            acc_scale = sStats[tile, tidx, 0]
            cute.arch.mbarrier_arrive(bars.stats_empty.data_ptr() + tile)  # its softmax waits
            if cute.arch.vote_any_sync(acc_scale != 1.0):  # else this warp's rows stay as they are
                fence_after()  # S is full, so the PV before it is done
                rescale(tmem[tile][2], acc_scale, tidx)
                fence_before()
            cute.arch.mbarrier_arrive(bars.o_rescaled.data_ptr() + tile)  # MMA waits
    m_block, head, batch = where
    entry = cutlass.min(batch, mLSE.shape[0] - 1)  # a packed tensor has one
    for tile in cutlass.range_constexpr(config.Q_TILES):
        stats_full = bars.stats_full.data_ptr() + tile
        cute.arch.mbarrier_wait(stats_full, num_n_blocks % 2)  # the tile's softmax arrives
        row_sum, row_max = sStats[tile, tidx, 0], sStats[tile, tidx, 1]
        cute.arch.mbarrier_wait(bars.o_full.data_ptr() + tile, 0)  # MMA's last commit arrives
        fence_after()
        stage_row(tmem[tile][2], sO[None, None, tile], row_sum, tidx)
        row = (m_block * config.Q_TILES + tile) * config.TILE_M + tidx
        if row < rows[1]:
            mLSE[entry, head, rows[0] + row] = logsumexp(row_max, row_sum, scale_log2)
        cute.arch.fence_proxy("async.shared", space="cta")  # sO: written by threads, read by TMA
        fence_before()
        cute.arch.mbarrier_arrive(bars.o_staged.data_ptr() + tile)  # EPILOGUE and MMA wait
