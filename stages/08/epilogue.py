# SPDX-License-Identifier: Apache-2.0
"""Normalising a row and writing it."""

import cutlass
import cutlass.cute as cute
from cutlass import Float32
from cutlass.cute.nvgpu import cpasync, tcgen05

from ..common import arith
from ..common.tcgen05 import tmem_copy
from . import config
from .lengths import rows_of


@cute.jit
def stage_row(tOtO: cute.Tensor, sO: cute.Tensor, row_sum: Float32, tidx: cutlass.Int32):
    """Write O / row_sum of this thread's row to shared memory, in the output's dtype.

    Runs: 128 threads, converged; thread = lane. Args: tOtO ((TILE_M, d), 1, 1) float32 in TMEM,
    complete; sO (TILE_M, d) bf16 or fp16, shared. The TMA store must pass a proxy fence and a
    barrier first. Numerics: one rounding, after the division; 0 where the row has seen no key.
    """
    width = config.COPY_BYTES * 8 // sO.element_type.width  # elements of one shared store
    load = tmem_copy(tcgen05.Ld32x32bOp(tcgen05.Repetition(config.CHUNK)), tOtO)
    tOtO_t2r = load.get_slice(tidx).partition_S(tOtO)  # (T2R, d / CHUNK, 1, 1)
    rO = cute.make_rmem_tensor(cute.make_layout(((config.CHUNK, 1),)), Float32)  # (T2R)
    rO_out = cute.make_rmem_tensor((width,), sO.element_type)
    inverse = Float32(0.0) if row_sum == 0.0 else 1.0 / row_sum
    for part in cutlass.range_constexpr(cute.size(tOtO_t2r, mode=[1])):
        cute.copy(load, tOtO_t2r[None, part, 0, 0], rO)
        cute.arch.fence_view_async_tmem_load()
        row = cute.make_tensor(rO.iterator, cute.make_layout(config.CHUNK))
        for block in cutlass.range_constexpr(config.CHUNK // width):
            piece = cute.local_tile(row, (width,), (block,))
            rO_out.store((piece.load() * inverse).to(sO.element_type))
            column = part * (config.CHUNK // width) + block
            cute.autovec_copy(rO_out, cute.local_tile(sO[tidx, None], (width,), (column,)))


@cute.jit
def store_tile(store: cute.CopyAtom, mO_tma: cute.Tensor, sO: cute.Tensor, tile, where, rows):
    """Write a staged output tile to global memory by TMA; its part of sO is free on return.

    Runs: one warp, converged; one lane issues. Args: store, the TMA atom; mO_tma, a `ragged` one;
    sO (TILE_M, d, Q_TILES) shared; tile of the CTA; where, (m_block, head, batch); rows, see
    `sequence`. Rows beyond the sequence are not written.
    """
    m_block, head, batch = where
    tile_q = (config.TILE_M, cute.size(sO, mode=[1]))
    mO = rows_of(mO_tma, rows[0], rows[1], head, batch)  # (len_q, d)
    gO = cute.local_tile(mO, tile_q, (None, 0))  # (TILE_M, d, m)
    tOsO, tOgO = cpasync.tma_partition(
        store, 0, cute.make_layout(1), cute.group_modes(sO, 0, 2), cute.group_modes(gO, 0, 2)
    )  # (TMA, Q_TILES), (TMA, m)
    m_tile = m_block * config.Q_TILES + tile
    if m_tile * config.TILE_M < rows[1]:
        cute.copy(store, tOsO[None, tile], tOgO[None, m_tile])
    cute.arch.cp_async_bulk_commit_group()
    cute.arch.cp_async_bulk_wait_group(0, read=True)


@cute.jit
def epilogue(store: cute.CopyAtom, mO_tma: cute.Tensor, sO: cute.Tensor, bars, where, rows):
    """Store both output tiles as they become ready.

    Runs: EPILOGUE, converged. Args: as store_tile. Waits: o_staged.
    """
    for tile in cutlass.range_constexpr(config.Q_TILES):
        cute.arch.mbarrier_wait(bars.o_staged.data_ptr() + tile, 0)  # CORRECTION arrives
        store_tile(store, mO_tma, sO, tile, where, rows)


@cute.jit
def logsumexp(row_max: Float32, row_sum: Float32, scale_log2: Float32):
    """Natural log of the sum of exp(softmax_scale * S) over a row, from its final statistics."""
    return (row_max * scale_log2 + cute.math.log2(row_sum, fastmath=True)) * arith.LN2
