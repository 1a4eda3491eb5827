# SPDX-License-Identifier: Apache-2.0
"""Copying tiles from global to shared memory by TMA."""

import cutlass
import cutlass.cute as cute
from cutlass import Int32

from ..common.tcgen05 import tma_views
from . import config
from .mma import make_mmas


@cute.jit
def load_tile(load: cute.CopyAtom, views, tile: Int32, slot: Int32, full, size: Int32):
    """Announce the bytes of one tile at the barrier `full`, where warp 0 waits, and start its copy.

    Runs: one warp, converged; one lane issues. Args: load, the TMA atom; views, (global (TMA, n),
    shared (TMA, STAGES)); tile and slot, which of them; size in bytes.
    """
    with cute.arch.elect_one():
        cute.arch.mbarrier_arrive_and_expect_tx(full, size)
    cute.copy(load, views[0][None, tile], views[1][None, slot], tma_bar_ptr=full)


@cute.jit
def tile_views(atoms, tensors, smem, where, head_dim: cutlass.Constexpr, dtype: cutlass.Constexpr):
    """((global, shared) tiles of Q, of K, of V), as TMA copies them.

    Runs: any warp. Args: atoms and tensors of Q, K, V; smem, (sQ, sK, sV, sO); where, (m_block,
    head, batch). Returns: Q (TMA, m) and (TMA, Q_TILES), K and V (TMA, n) and (TMA, STAGES).
    """
    _, head, batch = where
    tile_n = config.TILE_N[head_dim]
    tile_q, tile_k, tile_v = (config.TILE_M, head_dim), (tile_n, head_dim), (head_dim, tile_n)
    gQ = cute.local_tile(tensors[0][None, None, head, batch], tile_q, (None, 0))  # (TILE_M, d, m)
    gK = cute.local_tile(tensors[1][None, None, head, batch], tile_k, (None, 0))  # (tile_n, d, n)
    gV = cute.local_tile(tensors[2][None, None, head, batch], tile_v, (0, None))  # (d, tile_n, n)
    mma_s, mma_o = make_mmas(dtype, head_dim)
    part_s, part_o = mma_s.get_slice(0), mma_o.get_slice(0)
    tQsQ, tQgQ = tma_views(atoms[0], smem[0], part_s.partition_A(gQ))  # (TMA, 2), (TMA, m)
    tKsK, tKgK = tma_views(atoms[1], smem[1], part_s.partition_B(gK))  # (TMA, STAGES), (TMA, n)
    tVsV, tVgV = tma_views(atoms[2], smem[2], part_o.partition_B(gV))  # (TMA, STAGES), (TMA, n)
    return (tQgQ, tQsQ), (tKgK, tKsK), (tVgV, tVsV)
