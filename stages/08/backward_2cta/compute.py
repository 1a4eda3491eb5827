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
from .relay import arrive_at_leader


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
    tS, tP, rP, sLSE: cute.Tensor, bars, scale_log2: Float32, queries, masked, tidx: Int32
):
    """P = exp2(scale S - LSE) of this thread's key, in registers and tensor memory.

    Runs: 128 threads, converged; thread = lane = key. Args: tS ((TILE, HALF), 1, 1) float32, tP
    ((TILE, 16), 1, HALF / 16) 16-bit in TMEM, overlapping; rP (HALF,) Float32, written; sLSE
    (HALF,) Float32 shared, log2 units, +inf where a query sees nothing; queries, (first, last) of
    the columns that see the key; masked, whether any do not, static. The caller has waited for S. P
    takes columns of S that this thread has read: all are, before the first is written. Arrives:
    s_read. Numerics: float32, MUFU.
    """
    load_columns(tS, rP, 0, tidx)
    fence_before()
    arrive_at_leader(bars.s_read.data_ptr())
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
def differences(tdP, tdS, rP: cute.Tensor, rdS: cute.Tensor, sD: cute.Tensor, tidx: Int32):
    """dS = P (dP - D) of this thread's key, in registers and tensor memory.

    Runs: as probabilities. Args: tdP, tdS, as tS and tP there; rP (HALF,) Float32; rdS (HALF,)
    16-bit, written; sD (HALF,) Float32 shared. The caller has waited for dP.
    """
    for part in cutlass.range_constexpr(config.HALF // config.CHUNK):
        rdP = cute.make_rmem_tensor((config.CHUNK,), Float32)
        load_columns(tdP, rdP, part, tidx)
        rD = cute.make_rmem_tensor((config.CHUNK,), Float32)
        cute.autovec_copy(cute.local_tile(sD, (config.CHUNK,), (part,)), rD)
        p = cute.local_tile(rP, (config.CHUNK,), (part,))
        for i in cutlass.range_constexpr(0, config.CHUNK, 2):
            x = arith.add2((rdP[i], rdP[i + 1]), (-rD[i], -rD[i + 1]))
            rdP[i], rdP[i + 1] = arith.mul2((p[i], p[i + 1]), x)
        row = cute.local_tile(rdS, (config.CHUNK,), (part,))
        row.store(rdP.load().to(rdS.element_type))
        store_columns(row, tdS, part, tidx)
    cute.arch.fence_view_async_tmem_store()


@cute.jit
def stage(rdS: cute.Tensor, sdS: cute.Tensor):
    """Write dS of this thread's key to its row (HALF,) 16-bit of shared memory, which is free.

    Cost: HALF * 2 bytes of shared memory.
    """
    width = config.COPY_BYTES * 8 // sdS.element_type.width  # elements of one shared store
    for block in cutlass.range_constexpr(config.HALF // width):
        piece = cute.local_tile(rdS, (width,), (block,))
        cute.autovec_copy(piece, cute.local_tile(sdS, (width,), (block,)))


@cute.jit
def step(turn, number, smem, tmem, bars, scale_log2: Float32, rank, queries, masked, tidx: Int32):
    """Turn S into P and dP into dS for half of the queries of a tile. Runs: as compute.

    Args: turn, how many tiles were before; queries, (first, last) that see this thread's key,
    counted from the first tile; masked, whether some of this tile do not see all of the CTA's keys,
    static.
    """
    half, block = number ^ rank, 2 if number == 1 else rank
    tS, tP, tdP, tdS = tmem["half"](half)
    rP = cute.make_rmem_tensor((config.HALF,), Float32)
    rdS = cute.make_rmem_tensor((config.HALF,), smem["sdS"].element_type)
    turn = cutlass.Uint32(turn)  # its remainders are single instructions
    slot, parity = Int32(turn % config.STATS_STAGES), Int32(turn // config.STATS_STAGES % 2)
    sLSE = cute.local_tile(smem["sStats"][0, None, slot], (config.HALF,), (half,))
    sD = cute.local_tile(smem["sStats"][1, None, slot], (config.HALF,), (half,))
    columns = None
    if cutlass.const_expr(masked):
        before = Int32(turn) * config.TILE + half * config.HALF
        columns = (queries[0] - before, queries[1] - before)
    cute.arch.mbarrier_wait(bars.stats_full.data_ptr() + slot, parity)  # LOAD and TMA arrive
    cute.arch.mbarrier_wait(bars.s_full.data_ptr(), Int32(turn % 2))  # MMA's commit arrives
    fence_after()
    probabilities(tS, tP, rP, sLSE, bars, scale_log2, columns, masked, tidx)
    fence_before()
    arrive_at_leader(bars.p_full.data_ptr())
    cute.arch.mbarrier_wait(bars.dp_full.data_ptr(), Int32(turn % 2))  # MMA's commit arrives
    fence_after()
    differences(tdP, tdS, rP, rdS, sD, tidx)
    cute.arch.mbarrier_wait(bars.dq_full.data_ptr(), Int32(turn % 2 ^ 1))  # MMA's commit arrives
    stage(rdS, smem["sdS_rows"][tidx, None, block])
    cute.arch.fence_proxy("async.shared", space="cta")  # sdS, sdX: then MMA, a copy reads them
    fence_before()
    arrive_at_leader(bars.ds_full.data_ptr())
    if number == 1:
        cute.arch.mbarrier_arrive(bars.dx_staged.data_ptr())  # RELAY waits


@cute.jit
def seen_by(sizes, lengths, window, m_min, tidx: Int32):
    """(first, last) query that sees this thread's key, counted from query tile m_min on.

    Runs: as compute. Anew for each loop: over the one between them it would take registers.
    """
    where, rank = place(sizes)
    _, len_q, _, len_k = sequence(lengths, where[2], sizes[2], sizes[3])
    key, before = (where[0] * config.CTAS + rank) * config.TILE + tidx, m_min * config.TILE
    first, last = visible_queries(key, (len_q, len_k), window)
    last = last if key < len_k else Int32(-1)  # no one sees a key that is not there
    return first - before, last - before


@cute.jit
def compute(number, smem, tmem, bars, outputs, scales, sizes, lengths, tiles, window, tidx: Int32):
    """Turn S into P and dP into dS for half of each tile's queries; then write half of dV and dK.

    Runs: the 128 threads of COMPUTE0 or COMPUTE1 (number 0 or 1), converged; thread = lane = key.
    Args: smem, tmem by name; outputs, see epilogue; scales, (scale_log2, softmax_scale); sizes,
    lengths, window of the kernel; tiles, (m_min, m_max), of which those with a mask come first and
    last; tidx in the warpgroup. COMPUTE0 has the queries whose dQ this CTA adds, and writes dS to
    sdS; COMPUTE1 has the peer's, and writes to sdX, the third block. Waits: stats_full, s_full,
    dp_full, dq_full. Arrives: s_read, p_full, ds_full, dx_staged.
    """
    where, rank = place(sizes)
    rows = sequence(lengths, where[2], sizes[2], sizes[3])
    of_sequence, (m_min, m_max) = (rows[1], rows[3]), tiles
    first_key = (where[0] * config.CTAS + rank) * config.TILE
    m_low, m_high = unmasked_queries(first_key, config.TILE, of_sequence, window, m_min, m_max)
    uniform = cute.arch.make_warp_uniform
    low, high, m_tiles = uniform(m_low - m_min), uniform(m_high - m_min), uniform(m_max - m_min)
    for start, stop, masked in ((Int32(0), low, True), (low, high, False), (high, m_tiles, True)):
        queries = None
        if cutlass.const_expr(masked):
            queries = seen_by(sizes, lengths, window, m_min, tidx)
        for turn in cutlass.range(start, stop, unroll=1):
            step(turn, number, smem, tmem, bars, scales[0], rank, queries, masked, tidx)
    epilogue(number ^ rank, smem, tmem, bars, outputs, scales[1], sizes, lengths, tidx)
