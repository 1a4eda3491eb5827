# SPDX-License-Identifier: Apache-2.0
"""From S to P and from dP to dS, for half of the queries of a tile; a thread has one key."""

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32
from cutlass.cute.nvgpu import tcgen05

from ...common import arith
from ...common.tcgen05 import fence_after, fence_before, tmem_copy
from ..mask import hide, unmasked_queries, visible_queries
from . import config
from .epilogue import epilogue
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
def probabilities(
    tS,
    tP,
    rP,
    sLSE: cute.Tensor,
    scale_log2: Float32,
    queries,
    masked: cutlass.Constexpr,
    tidx: Int32,
):
    """P = exp2(scale S - LSE) of this thread's key, in registers and tensor memory.

    Runs: 128 threads, converged; thread = lane = key. Args: tS ((TILE, HALF), 1, 1) float32, tP
    ((TILE, 16), 1, HALF / 16) 16-bit in TMEM, overlapping; rP (HALF,) Float32, written; sLSE
    (HALF,) Float32 shared, log2 units, +inf where a query sees nothing; queries, (first, last) of
    the columns that see the key; masked, whether any may not. The caller has waited for S. P takes
    columns of S that this thread has read: all are, before the first is written. Numerics: float32,
    MUFU.
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
def step(turn, half, smem, tmem, bars, scale_log2: Float32, key_tiles, bounds, masked, tidx: Int32):
    """Turn S into P and dP into dS for half of the queries of a tile. Runs: as compute.

    Args: turn, how many steps were before; bounds, (first, last) query that sees this thread's
    first key, counted from the first visited tile on; masked, whether some may not, static.
    """
    tS, tP, tdP, tdS = tmem["half"](half)
    rP = cute.make_rmem_tensor((config.HALF,), Float32)
    m_tile, key_tile = position(turn, key_tiles)
    slot, parity = ring(m_tile, cute.size(smem["sQ"], mode=[3]))
    sLSE = cute.local_tile(smem["sStats"][0, None, slot], (config.HALF,), (half,))
    sD = cute.local_tile(smem["sStats"][1, None, slot], (config.HALF,), (half,))
    queries = None
    if cutlass.const_expr(masked):
        queries = columns(bounds, m_tile * config.TILE + half * config.HALF, key_tile * config.TILE)
    if key_tile == 0:
        cute.arch.mbarrier_wait(bars.q_full.data_ptr() + slot, parity)  # LOAD and TMA arrive
    cute.arch.mbarrier_wait(bars.s_full.data_ptr(), turn % 2)  # MMA's commit arrives
    fence_after()
    probabilities(tS, tP, rP, sLSE, scale_log2, queries, masked, tidx)
    fence_before()
    cute.arch.mbarrier_arrive(bars.p_full.data_ptr())  # MMA waits
    cute.arch.mbarrier_wait(bars.dp_full.data_ptr(), turn % 2)  # MMA's commit arrives
    fence_after()
    sdS = cute.local_tile(smem["sdS_rows"][tidx, None, key_tile], (config.HALF,), (half,))
    differences(tdP, tdS, rP, sD, sdS, tidx)
    cute.arch.fence_proxy("async.shared", space="cta")  # sdS: written by threads, read by MMA
    fence_before()
    cute.arch.mbarrier_arrive(bars.ds_full.data_ptr())  # MMA waits


@cute.jit
def columns(bounds, before: Int32, further: Int32):
    """(first, last) of the columns, `before` queries further on, that see a key `further` on.

    Runs: any thread. Args: bounds, (first, last, keys that are there from this one on). No one sees
    a key that is not there.
    """
    first, last, keys = bounds
    shift = further - before
    return first + shift, (last + shift if further < keys else Int32(-1))


@cute.jit
def compute(half, smem, tmem, bars, outputs, scales, place, tiles, window, tidx: Int32):
    """Turn S into P and dP into dS for half of each tile's queries; then write half of dV and dK.

    Runs: the 128 threads of COMPUTE0 or COMPUTE1, converged; thread = lane = key. Args: half, 0 or
    1; smem, tmem by name; outputs, see epilogue; scales, (scale_log2, softmax_scale); place,
    (where, rows, key_tiles); tiles, (m_min, m_max), of which those with a mask come first and last;
    window, (left, right); tidx in the warpgroup. Waits: q_full, s_full, dp_full. Arrives: p_full,
    ds_full, where MMA waits. sdS is free when dP is there: MMA commits dP after the dQ that read
    it.
    """
    where, rows, key_tiles = place
    lengths, (m_min, m_max) = (rows[1], rows[3]), tiles
    unit = config.KEY_TILES[cute.size(outputs[0][1], mode=[1])] * config.TILE
    first_key, keys = where[0] * unit, key_tiles * config.TILE
    m_low, m_high = unmasked_queries(first_key, keys, lengths, window, m_min, m_max)
    first, last = visible_queries(first_key + tidx, lengths, window)
    before = m_min * config.TILE
    bounds = (first - before, last - before, rows[3] - first_key - tidx)
    parts = ((m_min, m_low, True), (m_low, m_high, False), (m_high, m_max, True))
    for start, stop, masked in parts:
        first_turn, turns = (start - m_min) * key_tiles, (stop - m_min) * key_tiles
        for turn in cutlass.range(first_turn, turns, unroll=1):
            step(turn, half, smem, tmem, bars, scales[0], key_tiles, bounds, masked, tidx)
    epilogue(half, smem, tmem, bars, outputs, scales[1], place, tidx)
