# SPDX-License-Identifier: Apache-2.0
"""Copying tiles from global to shared memory by TMA."""

import cutlass
import cutlass.cute as cute
from cutlass import Int32

from ..common.tcgen05 import stage_bytes, tma_views
from . import config
from .lengths import rows_of
from .mma import make_mmas


@cute.jit
def load_tile(load: cute.CopyAtom, views, tile: Int32, slot: Int32, full, size: Int32):
    """Announce the bytes of one tile at the barrier `full`, where MMA waits, and start its copy.

    Runs: one warp, converged; one lane issues. Args: load, the TMA atom; views, (global (TMA, n),
    shared (TMA, STAGES)); tile and slot, which of them; size in bytes.
    """
    with cute.arch.elect_one():
        cute.arch.mbarrier_arrive_and_expect_tx(full, size)
    cute.copy(load, views[0][None, tile], views[1][None, slot], tma_bar_ptr=full)


@cute.jit
def tile_views(
    atoms, tensors, smem, where, rows, head_dim: cutlass.Constexpr, dtype: cutlass.Constexpr
):
    """((global, shared) tiles of Q, of K, of V), as TMA copies them.

    Runs: any warp. Args: atoms and tensors of Q, K, V; smem, (sQ, sK, sV, sO); where, (m_block,
    head, batch); rows of the sequence, see `sequence`. Returns: Q (TMA, m) and (TMA, Q_TILES), K
    and V (TMA, n) and (TMA, STAGES).
    """
    _, head, batch = where
    begin_q, len_q, begin_k, len_k = rows
    mQ = rows_of(tensors[0], begin_q, len_q, head, batch)  # (len_q, d)
    mK = rows_of(tensors[1], begin_k, len_k, head, batch)  # (len_k, d)
    mV = rows_of(tensors[2], begin_k, len_k, head, batch, axis=1)  # (d, len_k)
    tile_n = config.TILE_N[head_dim]
    tile_q, tile_k, tile_v = (config.TILE_M, head_dim), (tile_n, head_dim), (head_dim, tile_n)
    gQ = cute.local_tile(mQ, tile_q, (None, 0))  # (TILE_M, d, m)
    gK = cute.local_tile(mK, tile_k, (None, 0))  # (tile_n, d, n)
    gV = cute.local_tile(mV, tile_v, (0, None))  # (d, tile_n, n)
    mma_s, mma_o = make_mmas(dtype, head_dim)
    part_s, part_o = mma_s.get_slice(0), mma_o.get_slice(0)
    tQsQ, tQgQ = tma_views(atoms[0], smem[0], part_s.partition_A(gQ))  # (TMA, 2), (TMA, m)
    tKsK, tKgK = tma_views(atoms[1], smem[1], part_s.partition_B(gK))  # (TMA, STAGES), (TMA, n)
    tVsV, tVgV = tma_views(atoms[2], smem[2], part_o.partition_B(gV))  # (TMA, STAGES), (TMA, n)
    return (tQgQ, tQsQ), (tKgK, tKsK), (tVgV, tVsV)


@cute.jit
def load(
    atoms,
    tensors,
    smem,
    bars,
    where,
    rows,
    tiles,
    head_dim: cutlass.Constexpr,
    dtype: cutlass.Constexpr,
):
    """Load both query tiles and, in turn, the visited tiles of K and V.

    Runs: LOAD, converged. Args: as tile_views; tiles, (n_min, n_max). Waits: kv_empty. Arrives:
    q_full, kv_full, where MMA waits.
    """
    query, key, value = tile_views(atoms, tensors, smem, where, rows, head_dim, dtype)
    for tile in cutlass.range_constexpr(config.Q_TILES):
        last = (rows[1] - 1) // config.TILE_M  # stands in for a tile without rows
        m_tile = cutlass.min(where[0] * config.Q_TILES + tile, last)
        q_full = bars.q_full.data_ptr() + tile
        load_tile(atoms[0], query, m_tile, tile, q_full, stage_bytes(smem[0]))
    n_min, n_max = tiles
    kv_bytes, stages = stage_bytes(smem[1]), config.KV_STAGES[head_dim]
    for turn in cutlass.range(
        2 * (n_max - n_min), unroll=1
    ):  # K and V of one key tile, then the next
        n_block = n_max - 1 - turn // 2
        slot = turn % stages
        empty = bars.kv_empty.data_ptr() + slot
        cute.arch.mbarrier_wait(empty, turn // stages % 2 ^ 1)  # MMA's commit arrives
        full = bars.kv_full.data_ptr() + slot
        if turn % 2 == 0:
            load_tile(atoms[1], key, n_block, slot, full, kv_bytes)
        else:
            load_tile(atoms[2], value, n_block, slot, full, kv_bytes)
