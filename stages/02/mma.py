# SPDX-License-Identifier: Apache-2.0
"""The two matrix products of attention on the tensor core."""

import cutlass
import cutlass.cute as cute
from cutlass import Int32
from cutlass.cute.nvgpu import tcgen05

from ..common.tcgen05 import make_mma
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
    Arrives: s_full, where everyone waits. Cost: d / 16 MMAs of 128 x 128 x 16.
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
def mma_pv(tOtP: cute.Tensor, sV: cute.Tensor, tOtO: cute.Tensor, slot: Int32, accumulate):
    """Issue O += P V (O = P V unless `accumulate`).

    Runs: one warp, converged; one lane issues. Args: tOtP ((TILE_M, 16), 1, tile_n / 16) in TMEM;
    sV ((d, 16), 1, tile_n / 16, STAGES) shared; tOtO ((TILE_M, d), 1, 1) float32 in TMEM.
    Cost: tile_n / 16 MMAs of 128 x d x 16.
    """
    head_dim = cute.size(tOtO, mode=[0, 1])
    _, mma_o = make_mmas(sV.element_type, head_dim)
    tOrV = mma_o.make_fragment_B(sV)  # (1, 1, tile_n / 16, STAGES) descriptors
    for k_block in cutlass.range_constexpr(cute.size(tOrV, mode=[2])):
        mma_o.set(tcgen05.Field.ACCUMULATE, True if k_block else accumulate)
        cute.gemm(mma_o, tOtO, tOtP[None, None, k_block], tOrV[None, None, k_block, slot], tOtO)


@cute.jit
def commit(barrier):
    """Let `barrier` arrive when all MMAs issued so far are done. Runs: one warp, converged."""
    with cute.arch.elect_one():
        tcgen05.commit(barrier)
