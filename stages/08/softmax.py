# SPDX-License-Identifier: Apache-2.0
"""The online softmax of one query row; the text every later stage keeps."""

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32
from cutlass.cute.nvgpu import tcgen05

from ..common import arith
from ..common.tcgen05 import fence_after, fence_before, tmem_copy
from . import config
from .mask import hide, unmasked_tiles, visible_keys


@cute.jit
def update_max(rS: cute.Tensor, row_max: Float32, scale_log2: Float32):
    """The reference point of a row with one more key tile, and what that makes of what was before.

    Runs: every thread that owns a row, on its own registers; nothing is exchanged.
    Args: rS (tile_n,) Float32, unscaled scores of this row, any even length; row_max, unscaled,
    before this tile, -inf at the first; scale_log2 = softmax_scale * log2(e).
    Returns: (row_max, acc_scale); earlier P, sum and O must be multiplied by acc_scale. row_max
    stays, and acc_scale is 1, while the true maximum exceeds it by at most THRESHOLD: P <= 256.
    Numerics: float32; a NaN score makes row_max, and so the row, NaN. Cost: per score 1 max.
    """
    new_max = arith.max_of(rS, row_max)
    step = (row_max - new_max) * scale_log2  # <= 0, -inf at the first tile
    acc_scale = Float32(1.0)
    if not step >= -config.THRESHOLD:  # also when it is NaN
        row_max = new_max
        acc_scale = arith.exp2(step)
    return row_max, acc_scale


@cute.jit
def exp2_emulated(x):
    """(2**x0, 2**x1) on FMA and integer units, for a pair of Float32; 0 for x <= -127.

    x = n + f with n = floor(x), 0 <= f <= 1: adding FLOOR, rounded down, leaves n in the low bits
    of the sum. 2**f is a polynomial, 2**n an addition to its exponent field. NaN does not stay NaN
    here: the row maximum carries it. Cost of a pair: 3 packed adds, 3 packed FMAs, 2 max, 2 shifts
    with add. See paper section 3.1.3.
    """
    low = Float32(config.SMALLEST)
    x = (cute.arch.fmax(x[0], low), cute.arch.fmax(x[1], low))
    floor, minus_floor = Float32(config.FLOOR), Float32(-config.FLOOR)
    shifted = cute.arch.add_packed_f32x2(x, (floor, floor), rnd="rm")
    n = arith.add2(shifted, (minus_floor, minus_floor))
    f = arith.add2(x, (-n[0], -n[1]))
    *rest, highest = (Float32(c) for c in config.POLYNOMIAL)
    p = (highest, highest)
    for c in reversed(rest):
        p = arith.fma2(p, f, (c, c))
    return insert_exponent(p[0], shifted[0]), insert_exponent(p[1], shifted[1])


@cute.jit
def insert_exponent(p: Float32, shifted: Float32):
    """p * 2**n for p in [1, 2]; n is in the low bits of `shifted`."""
    bits = p.bitcast(Int32) + (shifted.bitcast(Int32) << 23)
    return bits.bitcast(Float32)


@cute.jit
def exponentials(
    rS: cute.Tensor, row_max: Float32, scale_log2: Float32, emulated: cutlass.Constexpr
):
    """Turn scores of a row into probabilities in place, `emulated` pairs of them on the FMA units.

    Runs: as update_max. Args: rS (CHUNK,) unscaled scores; row_max from update_max. Writes: rS,
    the unnormalised P = exp2((S - row_max) * scale_log2). See paper section 3.1, Milakov 2018.
    """
    minus_max = -row_max * scale_log2
    pairs = cute.size(rS) // 2
    for pair in cutlass.range_constexpr(pairs):
        i = 2 * pair
        x = arith.fma2((rS[i], rS[i + 1]), (scale_log2, scale_log2), (minus_max, minus_max))
        if cutlass.const_expr(pair * emulated % pairs < emulated):
            rS[i], rS[i + 1] = exp2_emulated(x)
        else:
            rS[i], rS[i + 1] = arith.exp2(x[0]), arith.exp2(x[1])


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
def store_probabilities(rP: cute.Tensor, tOtP: cute.Tensor, part, tidx: cutlass.Int32):
    """Round a CHUNK of this thread's row of P to 16 bits and store it to tensor memory.

    Runs: 128 threads, converged. Args: rP (CHUNK,) Float32; tOtP ((TILE_M, 16), 1, tile_n / 16)
    bf16 or fp16 in TMEM, two to a column; part, which CHUNK. The caller waits for the store.
    """
    dtype = tOtP.element_type
    op = tcgen05.St32x32bOp(tcgen05.Repetition(config.CHUNK // 2))
    copy = tmem_copy(op, tOtP, dtype)
    tOtP_r2t = copy.get_slice(tidx).partition_D(tOtP)  # (R2T, 1, 1, tile_n / CHUNK)
    rP_i = cute.make_rmem_tensor(cute.make_layout(((config.CHUNK, 1),)), dtype)  # (R2T)
    rP_i.store(rP.load().to(dtype).reshape(rP_i.shape))
    cute.copy(copy, rP_i, tOtP_r2t[None, 0, 0, part])


@cute.jit
def probabilities(rS: cute.Tensor, row_max: Float32, scale_log2: Float32, tmem, bars, tile, tidx):
    """Turn a row of S into P, in registers and in tensor memory, in two parts.

    Runs: as softmax. Args: rS (tile_n,) Float32. Arrives: p_full after P_FIRST CHUNKs, p_rest after
    the last; MMA waits at both.
    """
    _, tOtP, tOtO = tmem
    emulated = config.EMULATED[cute.size(tOtO, mode=[0, 1])]
    for part in cutlass.range_constexpr(len(emulated)):
        row = cute.local_tile(rS, (config.CHUNK,), (part,))
        exponentials(row, row_max, scale_log2, emulated[part])
        store_probabilities(row, tOtP, part, tidx)
        if cutlass.const_expr(part == config.P_FIRST - 1):
            cute.arch.fence_view_async_tmem_store()
            fence_before()
            cute.arch.mbarrier_arrive(bars.p_full.data_ptr() + tile)  # MMA waits
    cute.arch.fence_view_async_tmem_store()
    fence_before()
    cute.arch.mbarrier_arrive(bars.p_rest.data_ptr() + tile)  # MMA waits


@cute.jit
def step(given, n_block, n_iter, row_max, row_sum, masked: cutlass.Constexpr):
    """Turn one S of a query tile into P. Runs: as softmax. Returns: (row_max, row_sum).

    Args: given, see softmax; n_block, the key tile; n_iter, how many were before; masked, whether
    a row of the query tile may not see all of it.
    """
    tile, tmem, bars, sStats, scale_log2, keys, tidx = given
    tStS, _, _ = tmem
    rS = cute.make_rmem_tensor((cute.size(tStS, mode=[0, 1]),), Float32)
    cute.arch.mbarrier_wait(bars.s_full.data_ptr() + tile, n_iter % 2)  # MMA's commit arrives
    stats_empty = bars.stats_empty.data_ptr() + tile  # here, so that no branch parts S from P
    cute.arch.mbarrier_wait(stats_empty, n_iter % 2 ^ 1)  # CORRECTION arrives
    fence_after()
    load_scores(tStS, rS, tidx)
    if cutlass.const_expr(masked):
        first = n_block * cute.size(rS)
        hide(rS, keys[0] - first, keys[1] - first)
    row_max, acc_scale = update_max(rS, row_max, scale_log2)
    reference = row_max
    if cutlass.const_expr(masked):
        if row_max == -Float32.inf:  # no key so far: P is 0, what was before is 0, too
            reference, acc_scale = Float32(0.0), Float32(1.0)
    sStats[tile, tidx, 0] = acc_scale
    fence_before()
    cute.arch.mbarrier_arrive(bars.stats_full.data_ptr() + tile)  # CORRECTION waits
    probabilities(rS, reference, scale_log2, tmem, bars, tile, tidx)
    row_sum = arith.sum_of(rS, row_sum * acc_scale)
    return row_max, row_sum


@cute.jit
def softmax(
    tile, tmem, bars, sStats: cute.Tensor, scale_log2: Float32, where, rows, tiles, window, tidx
):
    """Turn every S of one query tile into P; leave the rows' sums and maxima behind.

    Runs: the 128 threads of SOFTMAX0 or SOFTMAX1, converged; thread = lane = query row. Args: tile,
    0 or 1; tmem, (S, P, O) of that tile; bars; sStats (2, TILE_M, 2) Float32, shared, by tile and
    row: acc_scale while tiles come, at the end (row_sum, row_max); where, (m_block, head, batch);
    rows, see `sequence`; tiles, (n_min, n_max); window, (left, right); tidx in the warpgroup. Tiles
    with a mask come first and last, those between have none. Waits: s_full, stats_empty. Arrives:
    stats_full, where CORRECTION waits; p_full and p_rest, where MMA does.
    """
    lengths, (n_min, n_max) = (rows[1], rows[3]), tiles
    first_row = (where[0] * config.Q_TILES + tile) * config.TILE_M
    n_low, n_high = unmasked_tiles(first_row, config.TILE_M, lengths, window, n_min, n_max)
    first_key, last_key = visible_keys(first_row + tidx, lengths, window)
    keys = (first_key, cutlass.min(last_key, lengths[1] - 1))
    given = (tile, tmem, bars, sStats, scale_log2, keys, tidx)
    row_max, row_sum = -Float32.inf, Float32(0.0)
    parts = ((n_max, n_high, True), (n_high, n_low, False), (n_low, n_min, True))
    for start, stop, masked in parts:
        for n_iter in cutlass.range(n_max - start, n_max - stop, unroll=1):
            row_max, row_sum = step(given, n_max - 1 - n_iter, n_iter, row_max, row_sum, masked)
    num_n_blocks = n_max - n_min
    stats_empty = bars.stats_empty.data_ptr() + tile
    cute.arch.mbarrier_wait(stats_empty, num_n_blocks % 2 ^ 1)  # CORRECTION arrives
    sStats[tile, tidx, 0] = row_sum
    sStats[tile, tidx, 1] = row_max
    cute.arch.mbarrier_arrive(bars.stats_full.data_ptr() + tile)  # CORRECTION waits
