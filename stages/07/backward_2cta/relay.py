# SPDX-License-Identifier: Apache-2.0
"""Swapping halves of dS with the peer, through distributed shared memory."""

import cutlass
import cutlass.cute as cute
from cutlass import Int32
from cutlass._mlir.dialects import nvvm
from cutlass.cute.nvgpu import cpasync

from .load import announce
from .mma import LEADER

CLUSTER = nvvm.MemScopeKind.CLUSTER


@cute.jit
def arrive_at_leader(barrier):
    """Arrive on the leader's `barrier`, where MMA waits. Runs: each thread that calls it."""
    cute.arch.mbarrier_arrive(barrier, LEADER, scope=CLUSTER)


@cute.jit
def relay(sdX: cute.Tensor, sdS: cute.Tensor, bars, rank, m_tiles: Int32):
    """Copy dS of the peer's rows of dQ to the peer, and tell MMA when its copy has come.

    Runs: RELAY, converged; one lane copies. Args: sdX, and sdS, where the peer has the dS of this
    CTA's keys, (TILE * HALF,) 16-bit shared. Waits: dx_staged, dx_full. Arrives: dx_full, dx_both.
    Cost: TILE * HALF * 2 bytes to the peer.
    """
    size = cute.size(sdX) * sdX.element_type.width // 8
    copy = cute.make_copy_atom(
        cpasync.CopyBulkS2SOp(), sdX.element_type, num_bits_per_copy=size * 8
    )
    dx_full = bars.dx_full.data_ptr()
    for step in cutlass.range(m_tiles, unroll=1):
        announce(dx_full, size)  # RELAY itself waits
        cute.arch.mbarrier_wait(bars.dx_staged.data_ptr(), step % 2)  # COMPUTE1 arrives
        with cute.arch.elect_one():
            cute.copy(copy, sdX, sdS, mbar_ptr=dx_full, cta_rank=rank ^ 1)
        cute.arch.mbarrier_wait(dx_full, step % 2)  # the peer's copy arrives
        with cute.arch.elect_one():
            arrive_at_leader(bars.dx_both.data_ptr())
