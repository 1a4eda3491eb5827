# SPDX-License-Identifier: Apache-2.0
"""Swapping halves of dS with the peer, through distributed shared memory."""

import cutlass
import cutlass.cute as cute
from cutlass import Int32
from cutlass._mlir.dialects import nvvm

from ...common.tcgen05 import copy_to_peer
from . import config
from .load import announce
from .mma import LEADER

CLUSTER = nvvm.MemScopeKind.CLUSTER


@cute.jit
def arrive_at_leader(barrier):
    """Arrive on the leader's `barrier`, where MMA waits, once for a warp.

    Runs: whole warps, converged. What its lanes did before is released with it.
    """
    cute.arch.sync_warp()
    with cute.arch.elect_one():
        cute.arch.mbarrier_arrive(barrier, LEADER, scope=CLUSTER)


@cute.jit
def relay(sdS_rows: cute.Tensor, bars, rank, m_tiles: Int32):
    """Copy dS of the peer's rows of dQ to the peer, and tell MMA when its copy has come.

    Runs: RELAY, converged; one lane copies. Args: sdS_rows (TILE, HALF, CTAS + 1) 16-bit shared: a
    block for the dS of each CTA's keys, then sdX. Waits: dx_staged, dx_full. Arrives: dx_full,
    dx_both. Cost: TILE * HALF * 2 bytes to the peer.
    """
    size = config.TILE * config.HALF * sdS_rows.element_type.width // 8
    place = lambda block: sdS_rows[None, None, block].iterator
    dx_full = bars.dx_full.data_ptr()
    for step in cutlass.range(m_tiles, unroll=1):
        announce(dx_full, size)  # RELAY itself waits
        cute.arch.mbarrier_wait(bars.dx_staged.data_ptr(), step % 2)  # COMPUTE1 arrives
        with cute.arch.elect_one():
            copy_to_peer(place(config.CTAS), place(rank), dx_full, size, rank ^ 1)
        cute.arch.mbarrier_wait(dx_full, step % 2)  # the peer's copy arrives
        arrive_at_leader(bars.dx_both.data_ptr())
