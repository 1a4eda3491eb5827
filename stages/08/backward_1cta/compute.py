# SPDX-License-Identifier: Apache-2.0
"""From S to P and from dP to dS, for half of the queries of a tile; a thread has one key."""

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32
from cutlass.cute.nvgpu import tcgen05

from ...common import arith
from ...common.tcgen05 import fence_after, fence_before, tmem_copy
from ..lengths import sequence
from ..mask import hide, unmasked_queries, visible_queries
from . import config
from .epilogue import epilogue, place
from .mma import position, ring


@cute.jit
def load_columns(tX: cute.Tensor, rX: cute.Tensor, first: cutlass.Constexpr, tidx: Int32):
    """Copy columns of this thread's lane of tensor memory to registers; complete on return.

    Runs: 128 threads, converged; thread = lane. Args: tX ((TILE, n), 1, 1) float32 in TMEM; rX
    (m,) Float32, m columns from the CHUNK `first` on.
    """
    load = tmem_copy(tcgen05.Ld32x32bOp(tcgen05.Repetition(config.CHUNK)), tX)
    tX_t2r = load.get_slice(tidx).partition_S(tX)  # (T2R, n / CHUNK, 1, 1)
    layout = cute.make_layout(((config.CHUNK, 1),))  # T2R of one thread
    for part in cutlass.range_constexpr(cute.size(rX) // config.CHUNK):
        rX_i = cute.make_tensor(rX.iterator + part * config.CHUNK, layout)  # (T2R)
        cute.copy(load, tX_t2r[None, first + part, 0, 0], rX_i)
    cute.arch.fence_view_async_tmem_load()


@cute.jit
def store_columns(rX: cute.Tensor, tX: cute.Tensor, part, tidx: Int32):
    """Store a CHUNK of 16-bit values to this thread's lane, two to a column.

    Runs: as load_columns. Args: rX (CHUNK,) bf16 or fp16; tX ((TILE, 16), 1, n / 16) in TMEM. The
    caller waits for the store.
    """
    op = tcgen05.St32x32bOp(tcgen05.Repetition(config.CHUNK // 2))
    store = tmem_copy(op, tX, rX.element_type)
    tX_r2t = store.get_slice(tidx).partition_D(tX)  # (R2T, 1, 1, n / CHUNK)
    rX_r2t = cute.make_tensor(rX.iterator, cute.make_layout(((config.CHUNK, 1),)))  # (R2T)
    cute.copy(store, rX_r2t, tX_r2t[None, 0, 0, part])


@cute.jit
def probabilities(tS, tP, rP, sLSE: cute.Tensor, scale_log2: Float32, queries, masked, tidx: Int32):
    """P = exp2(scale S - LSE) of this thread's key, in registers and tensor memory.

    Runs: 128 threads, converged; thread = lane = key. Args: tS ((TILE, HALF), 1, 1) float32, tP
    ((TILE, 16), 1, HALF / 16) 16-bit in TMEM, overlapping; rP (HALF,) Float32, written; sLSE
    (HALF,) Float32 shared, log2 units, +inf where a query sees nothing; queries, (first, last) of
    the columns that see the key; masked, whether any do not, static. The caller has waited for S. P
    takes columns of S that this thread has read: all are, before the first is written. Numerics:
    float32, MUFU.
    """
    load_columns(tS, rP, 0, tidx)
    if cutlass.const_expr(masked):
        hide(rP, queries[0], queries[1])
    for part in cutlass.range_constexpr(config.HALF // config.CHUNK):
        rLSE = cute.make_rmem_tensor((config.CHUNK,), Float32)
        cute.autovec_copy(cute.local_tile(sLSE, (config.CHUNK,), (part,)), rLSE)
        row = cute.local_tile(rP, (config.CHUNK,), (part,))
        for i in cutlass.range_constexpr(0, config.CHUNK, 2):
            minus_lse = -rLSE[i], -rLSE[i + 1]
            x = arith.fma2((row[i], row[i + 1]), (scale_log2, scale_log2), minus_lse)
            row[i], row[i + 1] = arith.exp2(x[0]), arith.exp2(x[1])
        rP_16 = cute.make_rmem_tensor((config.CHUNK,), tP.element_type)
        rP_16.store(row.load().to(tP.element_type))
        store_columns(rP_16, tP, part, tidx)
    cute.arch.fence_view_async_tmem_store()


@cute.jit
def differences(tdP, tdS, rP: cute.Tensor, sD: cute.Tensor, sdS: cute.Tensor, tidx: Int32):
    """dS = P (dP - D) of this thread's key, in tensor memory and in shared memory.

    Runs: as probabilities. Args: tdP, tdS, as tS and tP there; rP (HALF,) Float32; sD (HALF,)
    Float32 shared; sdS (HALF,) 16-bit shared, this key's row. The caller has waited for dP and for
    sdS. Cost: HALF * 2 bytes of shared memory.
    """
    width = config.COPY_BYTES * 8 // sdS.element_type.width  # elements of one shared store
    for part in cutlass.range_constexpr(config.HALF // config.CHUNK):
        rdP = cute.make_rmem_tensor((config.CHUNK,), Float32)
        load_columns(tdP, rdP, part, tidx)
        rD = cute.make_rmem_tensor((config.CHUNK,), Float32)
        cute.autovec_copy(cute.local_tile(sD, (config.CHUNK,), (part,)), rD)
        p = cute.local_tile(rP, (config.CHUNK,), (part,))
        for i in cutlass.range_constexpr(0, config.CHUNK, 2):
            x = arith.add2((rdP[i], rdP[i + 1]), (-rD[i], -rD[i + 1]))
            rdP[i], rdP[i + 1] = arith.mul2((p[i], p[i + 1]), x)
        rdS = cute.make_rmem_tensor((config.CHUNK,), tdS.element_type)
        rdS.store(rdP.load().to(tdS.element_type))
        store_columns(rdS, tdS, part, tidx)
        for block in cutlass.range_constexpr(config.CHUNK // width):
            piece = cute.local_tile(rdS, (width,), (block,))
            column = part * (config.CHUNK // width) + block
            cute.autovec_copy(piece, cute.local_tile(sdS, (width,), (column,)))
    cute.arch.fence_view_async_tmem_store()


@cute.jit
def step(
    turn, half, smem, tmem, bars, scale_log2: Float32, key_tiles, queries, masked, tidx: Int32
):
    """Turn S into P and dP into dS for half of the queries of a tile. Runs: as compute.

    Args: turn, how many pairs of tiles were before; queries, (first, last) that see this thread's
    key of the first key tile, counted from the first query tile; masked, whether some of this tile
    do not see all of the CTA's keys, static.
    """
    tS, tP, tdP, tdS = tmem["half"](half)
    rP = cute.make_rmem_tensor((config.HALF,), Float32)
    unsigned = cutlass.Uint32  # of which remainders are single instructions
    m_tile, key_tile = position(turn, key_tiles)
    slot, parity = map(Int32, ring(unsigned(m_tile), cute.size(smem["sQ"], mode=[3])))
    phase = Int32(unsigned(turn) % 2)
    sLSE = cute.local_tile(smem["sStats"][0, None, slot], (config.HALF,), (half,))
    sD = cute.local_tile(smem["sStats"][1, None, slot], (config.HALF,), (half,))
    columns = None
    if cutlass.const_expr(masked):
        columns = seen_columns(queries, m_tile, half, key_tile)
    if key_tile == 0:
        cute.arch.mbarrier_wait(bars.q_full.data_ptr() + slot, parity)  # LOAD and TMA arrive
    cute.arch.mbarrier_wait(bars.s_full.data_ptr(), phase)  # MMA's commit arrives
    fence_after()
    probabilities(tS, tP, rP, sLSE, scale_log2, columns, masked, tidx)
    fence_before()
    cute.arch.mbarrier_arrive(bars.p_full.data_ptr())  # MMA waits
    cute.arch.mbarrier_wait(bars.dp_full.data_ptr(), phase)  # MMA's commit arrives
    fence_after()
    sdS = cute.local_tile(smem["sdS_rows"][tidx, None, key_tile], (config.HALF,), (half,))
    differences(tdP, tdS, rP, sD, sdS, tidx)
    cute.arch.fence_proxy("async.shared", space="cta")  # sdS: written by threads, read by MMA
    fence_before()
    cute.arch.mbarrier_arrive(bars.ds_full.data_ptr())  # MMA waits


@cute.jit
def seen_by(given, head_dim: cutlass.Constexpr, m_min, tidx: Int32):
    """(first query, last query, keys) of this thread's key of the first key tile.

    Runs: as compute. Queries that see it, before the ends of the sequence, counted from query tile
    m_min on; keys, how many of the sequence there are from it on. Anew for each loop: over the one
    between them it would take registers.
    """
    sizes, lengths, window = given
    where = place(sizes)
    _, len_q, _, len_k = sequence(lengths, where[2], sizes[2], sizes[3])
    key = where[0] * config.KEY_TILES[head_dim] * config.TILE + tidx
    first, last = visible_queries(key, (len_q, len_k), window)
    before = m_min * config.TILE
    return first - before, last - before, len_k - key


@cute.jit
def seen_columns(queries, m_tile, half, key_tile):
    """(first, last) column of a half tile whose query sees this thread's key of a key tile."""
    first, last, keys = queries
    skipped = key_tile * config.TILE  # keys; the next is seen one query later
    before = m_tile * config.TILE + half * config.HALF - skipped
    last = last - before if skipped < keys else Int32(-1)  # no one sees a key that is not there
    return first - before, last


@cute.jit
def compute(half, smem, tmem, bars, outputs, scales, given, tiles, key_tiles, tidx: Int32):
    """Turn S into P and dP into dS for half of each tile's queries; then write half of dV and dK.

    Runs: the 128 threads of COMPUTE0 or COMPUTE1, converged; thread = lane = key. Args: half, 0 or
    1; smem, tmem by name; outputs, see epilogue; scales, (scale_log2, softmax_scale); given,
    (sizes, lengths, window) of the kernel; tiles, (m_min, m_max), of which those with a mask come
    first and last; key_tiles of this CTA; tidx in the warpgroup. Waits: q_full, s_full, dp_full.
    Arrives: p_full, ds_full, where MMA waits. sdS is free when dP is there: MMA commits dP after
    the dQ that read it.
    """
    (sizes, lengths, window), (m_min, m_max) = given, tiles
    head_dim = cute.size(smem["sK"], mode=[2]) * 16
    where, keys = place(sizes), key_tiles * config.TILE
    rows = sequence(lengths, where[2], sizes[2], sizes[3])
    first_key = where[0] * config.KEY_TILES[head_dim] * config.TILE
    m_low, m_high = unmasked_queries(first_key, keys, (rows[1], rows[3]), window, m_min, m_max)
    low, high, end = ((m_tile - m_min) * key_tiles for m_tile in (m_low, m_high, m_max))
    for start, stop, masked in ((Int32(0), low, True), (low, high, False), (high, end, True)):
        queries = None
        if cutlass.const_expr(masked):
            queries = seen_by(given, head_dim, m_min, tidx)
        for turn in cutlass.range(start, stop, unroll=1):
            step(turn, half, smem, tmem, bars, scales[0], key_tiles, queries, masked, tidx)
    epilogue(half, smem, tmem, bars, outputs, scales[1], sizes, lengths, key_tiles, tidx)
