# SPDX-License-Identifier: Apache-2.0
"""The five matrix products of the backward pass on the tensor core."""

import cutlass
import cutlass.cute as cute
from cutlass import Int32
from cutlass.cute.nvgpu import tcgen05

from ...common.tcgen05 import fence_after, make_mma
from . import config


def make_mmas(dtype, head_dim: int):
    """The MMAs of S and dP; of dV and dK (A in TMEM); of dQ (A turned). Runs: trace.

    Every function makes its own: setting a field in a branch would change the caller's.
    """
    mma_s = make_mma(dtype, (config.TILE, config.TILE))
    mma_add = make_mma(dtype, (config.TILE, head_dim), b_major="MN", a_in_tmem=True)
    mma_q = make_mma(dtype, (config.TILE, head_dim), a_major="MN", b_major="MN")
    return mma_s, mma_add, mma_q


@cute.jit
def commit(barrier):
    """Let `barrier` arrive when all MMAs issued so far are done. Runs: one warp, converged."""
    with cute.arch.elect_one():
        tcgen05.commit(barrier)


@cute.jit
def position(step: Int32, key_tiles):
    """(query tile, key tile) of a step; key_tiles is 1 or 2, the key tile changes faster."""
    return step >> (key_tiles - 1), step & (key_tiles - 1)


@cute.jit
def ring(turn: Int32, stages: cutlass.Constexpr):
    """(slot, parity) of a turn in a ring."""
    return turn % stages, turn // stages % 2


@cute.jit
def mma_transposed(sA: cute.Tensor, sB: cute.Tensor, tD: cute.Tensor, tile, slot, full):
    """Issue S = K Q^T or dP = V dO^T, and let `full` arrive when it is done.

    Runs: one warp, converged; one lane issues. Args: sA ((TILE, 16), 1, d / 16, KEY_TILES) and sB
    ((TILE, 16), 1, d / 16, STAGES) shared; tD ((TILE, TILE), 1, 1) float32 in TMEM, a lane for each
    key. Arrives: full, where COMPUTE waits. Cost: d / 16 MMAs of 128 x 128 x 16.
    """
    mma_s, _, _ = make_mmas(sA.element_type, cute.size(sA, mode=[2]) * 16)
    tA = mma_s.make_fragment_A(sA)  # (1, 1, d / 16, KEY_TILES) descriptors
    tB = mma_s.make_fragment_B(sB)  # (1, 1, d / 16, STAGES) descriptors
    for k_block in cutlass.range_constexpr(cute.size(tA, mode=[2])):
        mma_s.set(tcgen05.Field.ACCUMULATE, k_block != 0)
        a, b = tA[None, None, k_block, tile], tB[None, None, k_block, slot]
        cute.gemm(mma_s, tD, a, b, tD)
    commit(full)


@cute.jit
def mma_add(halves, sB: cute.Tensor, tD: cute.Tensor, slot, accumulate):
    """Issue dV += P dO or dK += dS Q (= unless `accumulate`).

    Runs: one warp, converged; one lane issues. Args: halves, two of ((TILE, 16), 1, HALF / 16)
    16-bit in TMEM; sB ((d, 16), 1, TILE / 16, STAGES) shared; tD ((TILE, d), 1, 1) float32 in TMEM.
    Cost: TILE / 16 MMAs of 128 x d x 16.
    """
    _, mma_add, _ = make_mmas(sB.element_type, cute.size(tD, mode=[0, 1]))
    tB = mma_add.make_fragment_B(sB)  # (1, 1, TILE / 16, STAGES) descriptors
    blocks = config.HALF // 16
    for k_block in cutlass.range_constexpr(2 * blocks):
        mma_add.set(tcgen05.Field.ACCUMULATE, True if k_block else accumulate)
        a = halves[k_block // blocks][None, None, k_block % blocks]
        cute.gemm(mma_add, tD, a, tB[None, None, k_block, slot], tD)


@cute.jit
def mma_dq(sdS: cute.Tensor, sKt: cute.Tensor, tdQ: cute.Tensor, key_tiles, bars):
    """Issue dQ = dS^T K over the CTA's key tiles.

    Runs: one warp, converged; one lane issues. Args: sdS ((TILE, 16), 1, TILE / 16, KEY_TILES), a
    row for each query, and sKt ((d, 16), 1, TILE / 16, KEY_TILES) shared; tdQ ((TILE, d), 1, 1)
    float32 in TMEM. Arrives: dq_full, where REDUCE waits. Cost: TILE / 16 MMAs of 128 x d x 16 for
    each key tile.
    """
    _, _, mma_q = make_mmas(sdS.element_type, cute.size(tdQ, mode=[0, 1]))
    tA = mma_q.make_fragment_A(sdS)  # (1, 1, TILE / 16, KEY_TILES) descriptors
    tB = mma_q.make_fragment_B(sKt)  # (1, 1, TILE / 16, KEY_TILES) descriptors
    for tile in cutlass.range(key_tiles, unroll=1):
        for k_block in cutlass.range_constexpr(cute.size(tA, mode=[2])):
            mma_q.set(tcgen05.Field.ACCUMULATE, True if k_block else tile != 0)
            a, b = tA[None, None, k_block, tile], tB[None, None, k_block, tile]
            cute.gemm(mma_q, tdQ, a, b, tdQ)
    commit(bars.dq_full.data_ptr())


@cute.jit
def scores(smem, tmem, bars, key_tiles, step):
    """Issue S of a step, when its query tile is there. Runs: MMA. Waits: q_full."""
    sK, sQ = smem["sK"], smem["sQ"]
    m_tile, key_tile = position(step, key_tiles)
    slot, parity = ring(m_tile, cute.size(sQ, mode=[3]))
    if key_tile == 0:
        cute.arch.mbarrier_wait(bars.q_full.data_ptr() + slot, parity)  # LOAD and TMA arrive
    mma_transposed(sK, sQ, tmem["S"], key_tile, slot, bars.s_full.data_ptr())


@cute.jit
def dp_and_dv(smem, tmem, bars, key_tiles, step):
    """Issue dP of a step, when dO is there and dQ has left its columns; dV, when P is there.

    Runs: MMA. Waits: do_full, dq_read, p_full. Arrives: dp_full, do_empty.
    """
    sV, sdO = smem["sV"], smem["sdO"]
    m_tile, key_tile = position(step, key_tiles)
    slot, parity = ring(m_tile, cute.size(sdO, mode=[3]))
    if key_tile == 0:
        cute.arch.mbarrier_wait(bars.do_full.data_ptr() + slot, parity)  # LOAD and TMA arrive
        cute.arch.mbarrier_wait(bars.dq_read.data_ptr(), m_tile % 2 ^ 1)  # REDUCE arrives
        fence_after()
    mma_transposed(sV, sdO, tmem["dP"], key_tile, slot, bars.dp_full.data_ptr())
    cute.arch.mbarrier_wait(bars.p_full.data_ptr(), step % 2)  # COMPUTE arrives
    fence_after()
    mma_add(tmem["P"], smem["sdOt"], tmem["dV"](key_tile), slot, m_tile != 0)
    if key_tile == key_tiles - 1:
        commit(bars.do_empty.data_ptr() + slot)  # LOAD waits


@cute.jit
def dk_and_dq(smem, tmem, bars, key_tiles, step):
    """Issue dK of a step, when dS is there, and after the last key tile dQ.

    Runs: MMA. Waits: ds_full. Arrives: q_empty, dq_full.
    """
    m_tile, key_tile = position(step, key_tiles)
    slot, _ = ring(m_tile, cute.size(smem["sQ"], mode=[3]))
    cute.arch.mbarrier_wait(bars.ds_full.data_ptr(), step % 2)  # COMPUTE arrives
    fence_after()
    mma_add(tmem["dS"], smem["sQt"], tmem["dK"](key_tile), slot, m_tile != 0)
    if key_tile == key_tiles - 1:
        commit(bars.q_empty.data_ptr() + slot)  # LOAD waits
        mma_dq(smem["sdS"], smem["sKt"], tmem["dQ"], key_tiles, bars)


@cute.jit
def mma(smem, tmem, bars, m_tiles: Int32, key_tiles):
    """Issue S of a step before dK and dQ of the last one, dP and dV after.

    Runs: MMA, converged. Args: smem, tmem, tensors by name (`shared_tensors`, `tensor_memory`);
    key_tiles of this CTA. S follows the dV that reads the P in its columns, dQ and, of a second key
    tile, dP follow the dK that reads dS: one thread's MMAs run in order. Waits: k_full, v_full, and
    those of the products. Arrives: dv_full, dk_full, where COMPUTE waits.
    """
    steps = m_tiles * key_tiles
    cute.arch.mbarrier_wait(bars.k_full.data_ptr(), 0)  # LOAD and TMA arrive
    for step in cutlass.range(steps + 1, unroll=1):
        if step < steps:
            scores(smem, tmem, bars, key_tiles, step)
        else:
            commit(bars.dv_full.data_ptr())  # COMPUTE waits
        if step > 0:
            dk_and_dq(smem, tmem, bars, key_tiles, step - 1)
        else:
            cute.arch.mbarrier_wait(bars.v_full.data_ptr(), 0)  # LOAD and TMA arrive
        if step < steps:
            dp_and_dv(smem, tmem, bars, key_tiles, step)
    commit(bars.dk_full.data_ptr())  # COMPUTE waits
