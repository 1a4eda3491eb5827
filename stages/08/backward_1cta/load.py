# SPDX-License-Identifier: Apache-2.0
"""Copying tiles from global to shared memory by TMA."""

import cutlass
import cutlass.cute as cute
from cutlass import Int32
from cutlass.cute.nvgpu import cpasync

from ...common.tcgen05 import stage_bytes, tma_views
from ..lengths import rows_of
from . import config
from .mma import make_mmas, ring


@cute.jit
def announce(full, size: Int32):
    """Arrive at the barrier `full` with the bytes that are to come. Runs: one warp, converged."""
    with cute.arch.elect_one():
        cute.arch.mbarrier_arrive_and_expect_tx(full, size)  # MMA or COMPUTE waits


@cute.jit
def tile_views(atoms, tensors, smem, where, rows, head_dim: cutlass.Constexpr):
    """(global, shared) tiles of K, V, Q, dO and the statistics, as TMA copies them.

    Runs: any warp. Args: atoms and tensors by name; smem by name; where, (n_block, head, batch);
    rows of the sequence, see `sequence`. Returns: by name (TMA, n) or (TMA, m), and (TMA,
    KEY_TILES) or (TMA, STAGES); the statistics have all tiles, of which the sequence's follow those
    of the sequences before it.
    """
    _, head, batch = where
    begin_q, len_q, begin_k, len_k = rows
    sides = {"K": "A", "V": "A", "Q": "B", "dO": "B"}
    tile = (config.TILE, head_dim)
    part = make_mmas(smem["sK"].element_type, head_dim)[0].get_slice(0)
    views = {}
    for name, side in sides.items():
        begin, length = (begin_k, len_k) if side == "A" else (begin_q, len_q)
        mX = rows_of(tensors[name], begin, length, head, batch)  # (length, d)
        gX = cute.local_tile(mX, tile, (None, 0))  # (TILE, d, n)
        gX = getattr(part, f"partition_{side}")(gX)  # ((TILE, 16), 1, d / 16, n)
        tXsX, tXgX = tma_views(atoms[name], smem[f"s{name}"], gX)  # (TMA, STAGES), (TMA, n)
        views[name] = (tXgX, tXsX)
    sStats = cute.group_modes(smem["sStats"], 0, 2)
    entry = cutlass.min(batch, cute.size(tensors["stats"], mode=[3]) - 1)
    gStats = cute.local_tile(tensors["stats"][None, None, head, entry], (2, config.TILE), (None, 0))
    tXsX, tXgX = cpasync.tma_partition(
        atoms["stats"], 0, cute.make_layout(1), sStats, cute.group_modes(gStats, 0, 2)
    )  # (TMA, Q_STAGES), (TMA, m)
    views["stats"] = (tXgX, tXsX)
    return views


@cute.jit
def load_keys(load: cute.CopyAtom, views, first: Int32, key_tiles, size, full):
    """Start the copies of the CTA's tiles of K or V, all on the barrier `full`. Runs: LOAD."""
    announce(full, key_tiles * size)
    for tile in cutlass.range(key_tiles, unroll=1):
        cute.copy(load, views[0][None, first + tile], views[1][None, tile], tma_bar_ptr=full)


@cute.jit
def load(atoms, tensors, smem, bars, where, rows, tiles, key_tiles, head_dim: cutlass.Constexpr):
    """Load the key tiles once, then every query tile, its statistics and its dO.

    Runs: LOAD, converged. Args: as tile_views; tiles, (m_min, m_max). Waits: q_empty, do_empty.
    Arrives: k_full, v_full, do_full (MMA waits), q_full (COMPUTE, too).
    """
    views = tile_views(atoms, tensors, smem, where, rows, head_dim)
    size, first = stage_bytes(smem["sK"]), where[0] * config.KEY_TILES[head_dim]
    entry = cutlass.min(where[2], cute.size(tensors["stats"], mode=[3]) - 1)
    first_tile = rows[0] // config.TILE + where[2] - entry  # of the sequence's statistics
    load_keys(atoms["K"], views["K"], first, key_tiles, size, bars.k_full.data_ptr())
    for turn in cutlass.range(tiles[1] - tiles[0], unroll=1):
        m_tile = tiles[0] + turn
        slot, parity = ring(turn, config.Q_STAGES[head_dim])
        cute.arch.mbarrier_wait(bars.q_empty.data_ptr() + slot, parity ^ 1)  # MMA's commit arrives
        q_full = bars.q_full.data_ptr() + slot
        announce(q_full, size + config.STATS_BYTES)
        for name, tile in (("Q", m_tile), ("stats", first_tile + m_tile)):
            source, target = views[name]
            cute.copy(atoms[name], source[None, tile], target[None, slot], tma_bar_ptr=q_full)
        if turn == 0:
            load_keys(atoms["V"], views["V"], first, key_tiles, size, bars.v_full.data_ptr())
        slot, parity = ring(turn, config.DO_STAGES[head_dim])
        cute.arch.mbarrier_wait(bars.do_empty.data_ptr() + slot, parity ^ 1)  # MMA's commit arrives
        do_full = bars.do_full.data_ptr() + slot
        announce(do_full, size)
        source, target = views["dO"]
        cute.copy(atoms["dO"], source[None, m_tile], target[None, slot], tma_bar_ptr=do_full)
