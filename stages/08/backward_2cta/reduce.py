# SPDX-License-Identifier: Apache-2.0
"""Adding half of dQ of both CTAs' keys to that of all others, in global memory."""

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32
from cutlass.cute.nvgpu import cpasync, tcgen05

from ...common.tcgen05 import fence_after, fence_before, tmem_copy
from ..lengths import rows_of
from . import config
from .relay import arrive_at_leader


@cute.jit
def load_row(tdQ: cute.Tensor, tidx: Int32):
    """This thread's half of a row of dQ in registers; complete on return.

    Runs: 128 threads, converged; thread = lane. Args: tdQ ((TILE, d / 2), 1, 1) float32 in TMEM.
    Returns: (d / 2,) Float32.
    """
    load = tmem_copy(tcgen05.Ld32x32bOp(tcgen05.Repetition(config.CHUNK)), tdQ)
    tdQ_t2r = load.get_slice(tidx).partition_S(tdQ)  # (T2R, d / 2 / CHUNK, 1, 1)
    rdQ = cute.make_rmem_tensor((cute.size(tdQ, mode=[0, 1]),), Float32)
    layout = cute.make_layout(((config.CHUNK, 1),))  # T2R of one thread
    for part in cutlass.range_constexpr(cute.size(rdQ) // config.CHUNK):
        rdQ_i = cute.make_tensor(rdQ.iterator + part * config.CHUNK, layout)  # (T2R)
        cute.copy(load, tdQ_t2r[None, part, 0, 0], rdQ_i)
    cute.arch.fence_view_async_tmem_load()
    return rdQ


@cute.jit
def add_slice(reduce: cute.CopyAtom, views, rdQ, sdQ, row_block, there, number, tidx: Int32):
    """Stage a SLICE of dQ, when the one before has left, and add it to global memory.

    Runs: 128 threads, converged; warp 0 issues. Args: reduce, the TMA atom; views, (shared (TMA,
    2), global (TMA, 2 m, d / SLICE)); rdQ (SLICE,) Float32, this thread's; sdQ (HALF, SLICE, 2)
    Float32 shared: the lower lanes' rows with the lower columns, the upper lanes' with the upper;
    there, whether the sequence has any of the rows.
    """
    width = config.COPY_BYTES * 8 // 32  # elements of one shared store
    warp = cute.arch.make_warp_uniform(tidx // 32)
    if warp == 0:
        cute.arch.cp_async_bulk_wait_group(0, read=True)  # of the slice before
    cute.arch.barrier(barrier_id=1, number_of_threads=128)  # dq_slot: all wait for warp 0
    row = sdQ[tidx % config.HALF, None, tidx // config.HALF]
    for block in cutlass.range_constexpr(config.SLICE // width):
        piece = cute.local_tile(rdQ, (width,), (block,))
        cute.autovec_copy(piece, cute.local_tile(row, (width,), (block,)))
    cute.arch.fence_proxy("async.shared", space="cta")  # sdQ: written by threads, read by TMA
    cute.arch.barrier(barrier_id=1, number_of_threads=128)  # dq_slot: warp 0 waits for all
    if warp == 0:
        if there:
            for half in cutlass.range_constexpr(2):
                column = half * (config.HALF // config.SLICE) + number
                cute.copy(reduce, views[0][None, half], views[1][None, row_block, column])
        cute.arch.cp_async_bulk_commit_group()


@cute.jit
def reduce(atom: cute.CopyAtom, mdQ, smem, tdQ, bars, place, tiles, tidx: Int32):
    """Take every dQ out of tensor memory at once, then add it to global memory in slices.

    Runs: the 128 threads of REDUCE, converged; thread = lane: row lane % HALF of this CTA's, in the
    upper half of the lanes the upper half of the columns. Args: atom, the TMA reduction; mdQ, a
    `ragged` Float32; tdQ ((TILE, d / 2), 1, 1) float32 in TMEM; place, (where, rank, rows); tiles,
    (m_min, m_max). Rows beyond the sequence are not added. Waits: dq_full. Arrives: dq_read.
    """
    (_, head, batch), rank, rows = place
    mdQ_rows = rows_of(mdQ, rows[0], rows[1], head, batch)  # (len_q, d)
    tile = (config.HALF, config.SLICE)
    gdQ = cute.local_tile(mdQ_rows, tile, (None, None))  # (HALF, SLICE, 2 m, n)
    sdQ, one = smem["sdQ"], cute.make_layout(1)
    views = cpasync.tma_partition(
        atom, 0, one, cute.group_modes(sdQ, 0, 2), cute.group_modes(gdQ, 0, 2)
    )  # (TMA, 2), (TMA, 2 m, d / SLICE)
    for step in cutlass.range(tiles[1] - tiles[0], unroll=1):
        cute.arch.mbarrier_wait(bars.dq_full.data_ptr(), step % 2)  # MMA's commit arrives
        fence_after()
        rdQ = load_row(tdQ, tidx)  # (d / 2,)
        fence_before()
        arrive_at_leader(bars.dq_read.data_ptr())
        for number in cutlass.range_constexpr(cute.size(rdQ) // config.SLICE):
            part = cute.local_tile(rdQ, (config.SLICE,), (number,))
            row_block = (tiles[0] + step) * config.CTAS + rank
            there = row_block * config.HALF < rows[1]
            add_slice(atom, views, part, sdQ, row_block, there, number, tidx)
    if cute.arch.make_warp_uniform(tidx // 32) == 0:
        cute.arch.cp_async_bulk_wait_group(0, read=True)
