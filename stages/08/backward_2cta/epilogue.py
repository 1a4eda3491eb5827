# SPDX-License-Identifier: Apache-2.0
"""Writing dV and dK: a block of HALF columns for each COMPUTE warpgroup."""

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32
from cutlass.cute.nvgpu import cpasync, tcgen05

from ...common.tcgen05 import fence_after, fence_before, tmem_copy
from ..lengths import rows_of, sequence
from . import config


@cute.jit
def place(sizes):
    """((n_block, head, batch), rank) of this CTA. Runs: whole warps.

    The 1-D grid counts the CTAs of a pair fastest, then pairs of key tiles, then heads, then batch.
    Args: sizes, (pairs, heads, sq, sk). Computed anew at each call: the compiler keeps nothing.
    """
    block = cute.arch.make_warp_uniform(cute.arch.block_idx()[0])
    pairs, heads = sizes[0], sizes[1]
    rank, pair = block % config.CTAS, block // config.CTAS
    return (pair % pairs, pair // pairs % heads, pair // pairs // heads), rank


@cute.jit
def stage_block(tD: cute.Tensor, first, scale: Float32, sD: cute.Tensor, tidx: Int32):
    """Write HALF columns of this thread's row, times `scale`, to shared memory in 16 bits.

    Runs: 128 threads, converged; thread = lane = key. Args: tD ((TILE, 128), 1, 1) float32 in TMEM,
    complete; first, the block's first CHUNK; sD (TILE, HALF) bf16 or fp16 shared. Numerics: one
    rounding, after the product.
    """
    width = config.COPY_BYTES * 8 // sD.element_type.width  # elements of one shared store
    load = tmem_copy(tcgen05.Ld32x32bOp(tcgen05.Repetition(config.CHUNK)), tD)
    tD_t2r = load.get_slice(tidx).partition_S(tD)  # (T2R, 128 / CHUNK, 1, 1)
    rD = cute.make_rmem_tensor(cute.make_layout(((config.CHUNK, 1),)), Float32)  # (T2R)
    rD_out = cute.make_rmem_tensor((width,), sD.element_type)
    for part in cutlass.range_constexpr(config.HALF // config.CHUNK):
        cute.copy(load, tD_t2r[None, first + part, 0, 0], rD)
        cute.arch.fence_view_async_tmem_load()
        row = cute.make_tensor(rD.iterator, cute.make_layout(config.CHUNK))
        for block in cutlass.range_constexpr(config.CHUNK // width):
            piece = cute.local_tile(row, (width,), (block,))
            rD_out.store((piece.load() * scale).to(sD.element_type))
            column = part * (config.CHUNK // width) + block
            cute.autovec_copy(rD_out, cute.local_tile(sD[tidx, None], (width,), (column,)))


@cute.jit
def store_block(half, tD, scale: Float32, sD: cute.Tensor, output, place, rows, tidx: Int32):
    """Stage this warpgroup's block of dV or dK and write it to global memory by TMA.

    Runs: both warpgroups; the first warp of each issues. Args: sD (TILE, HALF, 2) shared; output,
    (the TMA atom, its tensor, a `ragged` one); place, (where, rank); rows, see `sequence`. The
    block is half of the columns. Rows beyond the sequence are not written.
    """
    store, mD = output
    (n_block, head, batch), rank = place
    stage_block(tD, half * (config.HALF // config.CHUNK), scale, sD[None, None, half], tidx)
    cute.arch.fence_proxy("async.shared", space="cta")  # sD: written by threads, read by TMA
    fence_before()
    cute.arch.barrier(barrier_id=2, number_of_threads=256)  # staged: all wait for all
    mD_rows = rows_of(mD, rows[2], rows[3], head, batch)  # (len_k, d)
    tile = (config.TILE, config.HALF)
    gD = cute.local_tile(mD_rows, tile, (None, None))  # (TILE, HALF, n, d / HALF)
    tDsD, tDgD = cpasync.tma_partition(
        store, 0, cute.make_layout(1), cute.group_modes(sD, 0, 2), cute.group_modes(gD, 0, 2)
    )  # (TMA, 2), (TMA, n, d / HALF)
    n_tile = n_block * config.CTAS + rank
    if cute.arch.make_warp_uniform(tidx // 32) == 0:
        if n_tile * config.TILE < rows[3]:
            cute.copy(store, tDsD[None, half], tDgD[None, n_tile, half])
        cute.arch.cp_async_bulk_commit_group()


@cute.jit
def epilogue(half, smem, tmem, bars, outputs, softmax_scale: Float32, sizes, lengths, tidx: Int32):
    """Write dV as soon as it is complete, then dK.

    Runs: COMPUTE0 or COMPUTE1, converged. Args: smem, tmem by name; outputs, (dV's, dK's) as in
    store_block. Waits: dv_full, dk_full.
    """
    cute.arch.mbarrier_wait(bars.dv_full.data_ptr(), 0)  # MMA's commit arrives
    where, rank = place(sizes)  # anew, as the rows: in the loop they would take registers
    rows = sequence(lengths, where[2], sizes[2], sizes[3])
    fence_after()
    one, (dv, dk) = Float32(1.0), outputs
    store_block(half, tmem["dV"], one, smem["sdV"], dv, (where, rank), rows, tidx)
    cute.arch.mbarrier_wait(bars.dk_full.data_ptr(), 0)  # MMA's commit arrives
    fence_after()
    store_block(half, tmem["dK"], softmax_scale, smem["sdK"], dk, (where, rank), rows, tidx)
    if cute.arch.make_warp_uniform(tidx // 32) == 0:
        cute.arch.cp_async_bulk_wait_group(0, read=True)
