# SPDX-License-Identifier: Apache-2.0
"""The two matrix products of attention on the tensor core."""

import cutlass
import cutlass.cute as cute
from cutlass import Int32
from cutlass.cute.nvgpu import tcgen05

from ..common.tcgen05 import fence_after, make_mma
from . import config


def make_mmas(dtype, head_dim: int):
    """The MMAs S = Q K^T (both operands in shared memory) and O += P V (P in TMEM). Runs: trace.

    Every function makes its own: setting a field in a branch would change the caller's.
    """
    mma_s = make_mma(dtype, (config.TILE_M, config.TILE_N[head_dim]))
    mma_o = make_mma(dtype, (config.TILE_M, head_dim), b_major="MN", a_in_tmem=True)
    return mma_s, mma_o


@cute.jit
def mma_qk(sQ: cute.Tensor, sK: cute.Tensor, tStS: cute.Tensor, tile, slot: Int32, s_full):
    """Issue S = Q K^T, unscaled, and let `s_full` arrive when it is done.

    Runs: one warp, converged; one lane issues. Args: sQ ((TILE_M, 16), 1, d / 16, 2) and sK
    ((tile_n, 16), 1, d / 16, STAGES) shared; tStS ((TILE_M, tile_n), 1, 1) float32 in TMEM.
    Arrives: s_full, where the tile's softmax waits. Cost: d / 16 MMAs of 128 x 128 x 16.
    """
    head_dim = cute.size(sQ, mode=[2]) * 16
    mma_s, _ = make_mmas(sQ.element_type, head_dim)
    tSrQ = mma_s.make_fragment_A(sQ)  # (1, 1, d / 16, 2) descriptors
    tSrK = mma_s.make_fragment_B(sK)  # (1, 1, d / 16, STAGES) descriptors
    for k_block in cutlass.range_constexpr(cute.size(tSrQ, mode=[2])):
        mma_s.set(tcgen05.Field.ACCUMULATE, k_block != 0)
        q, k = tSrQ[None, None, k_block, tile], tSrK[None, None, k_block, slot]
        cute.gemm(mma_s, tStS, q, k, tStS)
    with cute.arch.elect_one():
        tcgen05.commit(s_full)


@cute.jit
def mma_pv(
    tOtP: cute.Tensor, sV: cute.Tensor, tOtO: cute.Tensor, slot: Int32, accumulate, p_rest, phase
):
    """Issue O += P V (O = P V unless `accumulate`), the last keys when their part of P is there.

    Runs: one warp, converged; one lane issues. Args: tOtP ((TILE_M, 16), 1, tile_n / 16) in TMEM;
    sV ((d, 16), 1, tile_n / 16, STAGES) shared; tOtO ((TILE_M, d), 1, 1) float32 in TMEM.
    Waits: p_rest. Cost: tile_n / 16 MMAs of 128 x d x 16.
    """
    head_dim = cute.size(tOtO, mode=[0, 1])
    _, mma_o = make_mmas(sV.element_type, head_dim)
    tOrV = mma_o.make_fragment_B(sV)  # (1, 1, tile_n / 16, STAGES) descriptors
    for k_block in cutlass.range_constexpr(cute.size(tOrV, mode=[2])):
        if cutlass.const_expr(k_block == config.P_FIRST * config.CHUNK // 16):
            cute.arch.mbarrier_wait(p_rest, phase)  # the tile's softmax arrives
            fence_after()
        mma_o.set(tcgen05.Field.ACCUMULATE, True if k_block else accumulate)
        cute.gemm(mma_o, tOtO, tOtP[None, None, k_block], tOrV[None, None, k_block, slot], tOtO)


@cute.jit
def next_slot(slot: Int32, phase: Int32, stages: cutlass.Constexpr):
    """The (slot, phase) after this one in a ring; the phase flips when the ring starts again."""
    slot += 1
    if slot == stages:
        slot = Int32(0)
        phase ^= 1
    return slot, phase


@cute.jit
def commit(barrier):
    """Let `barrier` arrive when all MMAs issued so far are done. Runs: one warp, converged."""
    with cute.arch.elect_one():
        tcgen05.commit(barrier)


@cute.jit
def wait_for_p(bars, tile, phase: Int32):
    """Return when P of a query tile has begun and its O is rescaled. Runs: MMA."""
    cute.arch.mbarrier_wait(bars.p_full.data_ptr() + tile, phase)  # the tile's softmax arrives
    cute.arch.mbarrier_wait(bars.o_rescaled.data_ptr() + tile, phase)  # CORRECTION arrives
    fence_after()


@cute.jit
def mma(smem, tmem, bars, num_n_blocks: Int32, stages: cutlass.Constexpr):
    """Issue every S = Q K^T and O += P V, the two query tiles in turn.

    Runs: MMA, converged. Args: smem, (sQ, sK, sV, sO); tmem, (S, P, O) by query tile. S of a tile
    is issued after the PV that reads the P in its columns: one thread's MMAs run in order.
    Waits: q_full, kv_full, p_full, p_rest, o_rescaled. Arrives: s_full, kv_empty, o_full.
    """
    sQ, sK, sV, _ = smem
    full, empty = bars.kv_full.data_ptr(), bars.kv_empty.data_ptr()
    slot, phase = Int32(0), Int32(0)
    cute.arch.mbarrier_wait(full, 0)  # LOAD and TMA arrive: the first K
    for tile in cutlass.range_constexpr(config.Q_TILES):
        cute.arch.mbarrier_wait(bars.q_full.data_ptr() + tile, 0)  # LOAD and TMA arrive
        mma_qk(sQ, sK, tmem[tile][0], tile, slot, bars.s_full.data_ptr() + tile)
    commit(empty)  # LOAD waits
    slot, phase = next_slot(slot, phase, stages)
    for n_iter in cutlass.range(1, num_n_blocks, unroll=1):
        slot_k, phase_k = next_slot(slot, phase, stages)
        cute.arch.mbarrier_wait(full + slot, phase)  # LOAD and TMA arrive: V of the tile before
        for tile in cutlass.range_constexpr(config.Q_TILES):
            tStS, tOtP, tOtO = tmem[tile]
            wait_for_p(bars, tile, (n_iter - 1) % 2)
            p_rest = bars.p_rest.data_ptr() + tile
            mma_pv(tOtP, sV, tOtO, slot, n_iter != 1, p_rest, (n_iter - 1) % 2)
            if cutlass.const_expr(tile == config.Q_TILES - 1):
                commit(empty + slot)  # LOAD waits
            if cutlass.const_expr(tile == 0):
                cute.arch.mbarrier_wait(full + slot_k, phase_k)  # LOAD and TMA arrive: K
            mma_qk(sQ, sK, tStS, tile, slot_k, bars.s_full.data_ptr() + tile)
        commit(empty + slot_k)  # LOAD waits
        slot, phase = next_slot(slot_k, phase_k, stages)
    cute.arch.mbarrier_wait(full + slot, phase)  # LOAD and TMA arrive: the last V
    for tile in cutlass.range_constexpr(config.Q_TILES):
        _, tOtP, tOtO = tmem[tile]
        phase_p = (num_n_blocks - 1) % 2
        wait_for_p(bars, tile, phase_p)
        p_rest = bars.p_rest.data_ptr() + tile
        mma_pv(tOtP, sV, tOtO, slot, num_n_blocks != 1, p_rest, phase_p)
        commit(bars.o_full.data_ptr() + tile)  # CORRECTION waits
