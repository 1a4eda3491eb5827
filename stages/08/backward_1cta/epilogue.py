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
    """(n_block, head, batch) of this CTA. Runs: whole warps.

    The 1-D grid counts units of KEY_TILES key tiles fastest, then heads, then batch. Args: sizes,
    (units, heads, sq, sk). Computed anew at each call: the compiler keeps nothing.
    """
    block = cute.arch.make_warp_uniform(cute.arch.block_idx()[0])
    units, heads = sizes[0], sizes[1]
    return block % units, block // units % heads, block // units // heads


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
def store_block(
    half, tD, scale: Float32, sD: cute.Tensor, output, where, rows, key_tiles, tidx: Int32
):
    """Stage this warpgroup's block of dV or dK and write it to global memory by TMA.

    Runs: both warpgroups; the first warp of each issues. Args: sD (TILE, HALF, 2) shared; output,
    (the TMA atom, its tensor, a `ragged` one); where, (n_block, head, batch); rows, see `sequence`.
    The block is half of the columns, or with two key tiles one of them. Rows beyond the sequence
    are not written.
    """
    store, mD = output
    n_block, head, batch = where
    head_dim = cute.size(mD, mode=[1])
    there = half * config.HALF < key_tiles * head_dim
    if there:
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
    key_tile, column = half * config.HALF // head_dim, half * config.HALF % head_dim // config.HALF
    n_tile = n_block * config.KEY_TILES[head_dim] + key_tile
    if there and cute.arch.make_warp_uniform(tidx // 32) == 0:
        cute.copy(store, tDsD[None, half], tDgD[None, n_tile, column])
        cute.arch.cp_async_bulk_commit_group()


@cute.jit
def epilogue(
    half, smem, tmem, bars, outputs, softmax_scale: Float32, sizes, lengths, key_tiles, tidx: Int32
):
    """Write dV as soon as it is complete, then dK.

    Runs: COMPUTE0 or COMPUTE1, converged. Args: smem, tmem by name; outputs, (dV's, dK's) as in
    store_block. Waits: dv_full, dk_full. Arrives: dkv_read, where MMA waits.
    """
    cute.arch.mbarrier_wait(bars.dv_full.data_ptr(), 0)  # MMA's commit arrives
    fence_after()
    where = place(sizes)  # anew, as the rows: in the loop they would take registers
    rows = sequence(lengths, where[2], sizes[2], sizes[3])
    one, (dv, dk) = Float32(1.0), outputs
    store_block(half, tmem["dV_all"], one, smem["sdV"], dv, where, rows, key_tiles, tidx)
    cute.arch.mbarrier_wait(bars.dk_full.data_ptr(), 0)  # MMA's commit arrives
    fence_after()
    store_block(half, tmem["dK_all"], softmax_scale, smem["sdK"], dk, where, rows, key_tiles, tidx)
    fence_before()
    cute.arch.mbarrier_arrive(bars.dkv_read.data_ptr())  # MMA waits
    if cute.arch.make_warp_uniform(tidx // 32) == 0:
        cute.arch.cp_async_bulk_wait_group(0, read=True)
