# SPDX-License-Identifier: Apache-2.0
"""The five matrix products of the backward pass on the tensor cores of a pair."""

import cutlass
import cutlass.cute as cute
from cutlass import Int32
from cutlass.cute.nvgpu import tcgen05

from ...common.tcgen05 import fence_after, make_mma
from . import config

LEADER = 0  # rank of the CTA that issues the MMAs of both
BOTH = 0b11  # CTAs that a commit tells


def make_mmas(dtype, head_dim: int):
    """The MMAs of S and dP; of dV and dK (A in TMEM); of dQ (A turned). Runs: trace.

    Every function makes its own: setting a field in a branch would change the caller's.
    """
    keys, ctas = config.CTAS * config.TILE, config.CTAS
    mma_s = make_mma(dtype, (keys, config.TILE), ctas=ctas)
    mma_add = make_mma(dtype, (keys, head_dim), b_major="MN", a_in_tmem=True, ctas=ctas)
    mma_q = make_mma(dtype, (config.TILE, head_dim), a_major="MN", b_major="MN", ctas=ctas)
    return mma_s, mma_add, mma_q


@cute.jit
def commit(barrier):
    """Let `barrier` of both CTAs arrive when all MMAs issued so far are done.

    Runs: one warp, converged.
    """
    with cute.arch.elect_one():
        tcgen05.commit(barrier, BOTH, tcgen05.CtaGroup(config.CTAS))


@cute.jit
def mma_transposed(sA: cute.Tensor, sB: cute.Tensor, tD: cute.Tensor, full, empty):
    """Issue S = K Q^T or dP = V dO^T, and let `full` and `empty` arrive when it is done.

    Runs: one warp, converged; one lane issues. Args, of this CTA: sA ((TILE, 16), 1, d / 16, 1) and
    sB ((HALF, 16), 1, d / 16, 1) shared; tD ((TILE, TILE), 1, 1) float32 in TMEM, a lane for each
    key. Arrives: full, where COMPUTE waits; empty, where LOAD does. Cost: d / 16 MMAs of 256 x 128
    x 16.
    """
    mma_s, _, _ = make_mmas(sA.element_type, cute.size(sA, mode=[2]) * 16)
    tA = mma_s.make_fragment_A(sA)  # (1, 1, d / 16, 1) descriptors
    tB = mma_s.make_fragment_B(sB)  # (1, 1, d / 16, 1) descriptors
    for k_block in cutlass.range_constexpr(cute.size(tA, mode=[2])):
        mma_s.set(tcgen05.Field.ACCUMULATE, k_block != 0)
        cute.gemm(mma_s, tD, tA[None, None, k_block, 0], tB[None, None, k_block, 0], tD)
    commit(full)
    commit(empty)


@cute.jit
def mma_add(halves, sB: cute.Tensor, tD: cute.Tensor, accumulate, empty):
    """Issue dV += P dO or dK += dS Q (= unless `accumulate`), and let `empty` arrive after it.

    Runs: one warp, converged; one lane issues. Args, of this CTA: halves, two of ((TILE, 16), 1,
    HALF / 16) 16-bit in TMEM; sB ((d / 2, 16), 1, TILE / 16, 1) shared; tD ((TILE, d), 1, 1)
    float32 in TMEM. Arrives: empty, where LOAD waits. Cost: TILE / 16 MMAs of 256 x d x 16.
    """
    _, mma_add, _ = make_mmas(sB.element_type, cute.size(tD, mode=[0, 1]))
    tB = mma_add.make_fragment_B(sB)  # (1, 1, TILE / 16, 1) descriptors
    blocks = config.HALF // 16
    for k_block in cutlass.range_constexpr(2 * blocks):
        mma_add.set(tcgen05.Field.ACCUMULATE, True if k_block else accumulate)
        a = halves[k_block // blocks][None, None, k_block % blocks]
        cute.gemm(mma_add, tD, a, tB[None, None, k_block, 0], tD)
    commit(empty)


@cute.jit
def mma_dq(sdS: cute.Tensor, sKt: cute.Tensor, tdQ: cute.Tensor, full):
    """Issue dQ = dS^T K over both CTAs' keys, and let `full` arrive when it is done.

    Runs: one warp, converged; one lane issues. Args, of this CTA: sdS ((HALF, 16), 1, TILE / 8, 1),
    a row for each query, and sKt ((d / 2, 16), 1, TILE / 8, 1) shared; tdQ ((HALF, d), 1, 1)
    float32 in TMEM. Arrives: full, where REDUCE and COMPUTE wait. Cost: TILE / 8 MMAs of 128 x d x
    16.
    """
    _, _, mma_q = make_mmas(sdS.element_type, cute.size(tdQ, mode=[0, 1]))
    tA = mma_q.make_fragment_A(sdS)  # (1, 1, TILE / 8, 1) descriptors
    tB = mma_q.make_fragment_B(sKt)  # (1, 1, TILE / 8, 1) descriptors
    for k_block in cutlass.range_constexpr(cute.size(tA, mode=[2])):
        mma_q.set(tcgen05.Field.ACCUMULATE, k_block != 0)
        cute.gemm(mma_q, tdQ, tA[None, None, k_block, 0], tB[None, None, k_block, 0], tdQ)
    commit(full)


@cute.jit
def scores(smem, tmem, bars, step):
    """Issue S of a step, when its query tile is there. Runs: MMA. Waits: q_full."""
    cute.arch.mbarrier_wait(bars.q_full.data_ptr(), step % 2)  # LOAD and TMA arrive
    full, empty = bars.s_full.data_ptr(), bars.q_empty.data_ptr()
    mma_transposed(smem["sK"], smem["sQ"], tmem["S"], full, empty)


@cute.jit
def add_dk(smem, tmem, bars, step):
    """Issue dK of a step, when dS is in tensor memory. Runs: MMA. Waits: ds_full, qt_full."""
    cute.arch.mbarrier_wait(bars.ds_full.data_ptr(), step % 2)  # COMPUTE of both CTAs arrives
    fence_after()
    cute.arch.mbarrier_wait(bars.qt_full.data_ptr(), step % 2)  # LOAD and TMA arrive
    mma_add(tmem["dS"], smem["sQt"], tmem["dK"], step != 0, bars.qt_empty.data_ptr())


@cute.jit
def dp(smem, tmem, bars, step):
    """Issue dP of a step, when dO is there. Runs: MMA. Waits: do_full."""
    cute.arch.mbarrier_wait(bars.do_full.data_ptr(), step % 2)  # LOAD and TMA arrive
    full, empty = bars.dp_full.data_ptr(), bars.do_empty.data_ptr()
    mma_transposed(smem["sV"], smem["sdO"], tmem["dP"], full, empty)


@cute.jit
def dq(smem, tmem, bars, m_tiles, step):
    """Issue dQ of a step, when the halves of dS were swapped and the S after it was read.

    Runs: MMA. Waits: kt_full, s_read, dx_both.
    """
    if step == 0:
        cute.arch.mbarrier_wait(bars.kt_full.data_ptr(), 0)  # LOAD and TMA arrive
    if step < m_tiles - 1:
        parity = step % 2 ^ 1
        cute.arch.mbarrier_wait(bars.s_read.data_ptr(), parity)  # COMPUTE of both CTAs arrives
        fence_after()
    cute.arch.mbarrier_wait(bars.dx_both.data_ptr(), step % 2)  # RELAY of both CTAs arrives
    mma_dq(smem["sdS"], smem["sKt"], tmem["dQ_mma"], bars.dq_full.data_ptr())


@cute.jit
def add_dv(smem, tmem, bars, step):
    """Issue dV of a step, when P is there. Runs: MMA. Waits: p_full, dot_full."""
    cute.arch.mbarrier_wait(bars.p_full.data_ptr(), step % 2)  # COMPUTE of both CTAs arrives
    fence_after()
    cute.arch.mbarrier_wait(bars.dot_full.data_ptr(), step % 2)  # LOAD and TMA arrive
    mma_add(tmem["P"], smem["sdOt"], tmem["dV"], step != 0, bars.dot_empty.data_ptr())


@cute.jit
def mma(smem, tmem, bars, m_tiles: Int32):
    """Issue S, dP and dV of a step, and between them dK and dQ of the step before.

    Runs: MMA of the leader, converged. Args: smem, tmem, tensors by name (`shared_tensors`,
    `tensor_memory`). S follows the dV that reads the P in its columns, dP the dK that reads dS: one
    thread's MMAs run in order. Waits: k_full, v_full, dq_read, and those of the products. Arrives:
    dv_full, dk_full, where COMPUTE waits.
    """
    cute.arch.mbarrier_wait(bars.k_full.data_ptr(), 0)  # LOAD and TMA arrive
    for step in cutlass.range(m_tiles + 1, unroll=1):
        if step > 1:  # S and the next dQ overwrite dQ
            cute.arch.mbarrier_wait(bars.dq_read.data_ptr(), step % 2)  # REDUCE of both arrives
            fence_after()
        if step < m_tiles:
            scores(smem, tmem, bars, step)
        else:
            commit(bars.dv_full.data_ptr())  # COMPUTE waits
        if step > 0:
            add_dk(smem, tmem, bars, step - 1)
        else:
            cute.arch.mbarrier_wait(bars.v_full.data_ptr(), 0)  # LOAD and TMA arrive
        if step < m_tiles:
            dp(smem, tmem, bars, step)
        if step > 0:
            dq(smem, tmem, bars, m_tiles, step - 1)
        if step < m_tiles:
            add_dv(smem, tmem, bars, step)
    commit(bars.dk_full.data_ptr())  # COMPUTE waits
