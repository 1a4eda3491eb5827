# SPDX-License-Identifier: Apache-2.0
"""Copying this CTA's tiles, and its halves of the shared ones, to shared memory by TMA."""

import cutlass
import cutlass.cute as cute
from cutlass import Int32
from cutlass.cute.nvgpu import cpasync

from ...common.tcgen05 import stage_bytes, tma_views
from ..lengths import rows_of
from . import config
from .mma import LEADER, make_mmas


def operands(dtype, head_dim: int) -> dict:
    """What LOAD brings, by name: (MMA, "A" or "B" of it, major mode, (M, N, K)). Runs: trace.

    "t": turned. A query tile's rows are N of S and dP, and K of dV and dK; K's rows M and K.
    """
    mma_s, mma_add, mma_q = make_mmas(dtype, head_dim)
    tile, keys = config.TILE, config.CTAS * config.TILE
    rows, turned = (keys, tile, head_dim), (keys, head_dim, tile)
    return {
        "K": (mma_s, "A", "K", rows),
        "V": (mma_s, "A", "K", rows),
        "Kt": (mma_q, "B", "MN", (tile, head_dim, keys)),
        "Q": (mma_s, "B", "K", rows),
        "Qt": (mma_add, "B", "MN", turned),
        "dO": (mma_s, "B", "K", rows),
        "dOt": (mma_add, "B", "MN", turned),
    }


@cute.jit
def announce(full, size: Int32):
    """Arrive at the barrier `full` with the bytes that are to come. Runs: one warp, converged."""
    with cute.arch.elect_one():
        cute.arch.mbarrier_arrive_and_expect_tx(full, size)  # MMA, COMPUTE or RELAY waits


@cute.jit
def tile_views(atoms, tensors, smem, where, rank, rows, head_dim: cutlass.Constexpr):
    """(global, shared) tiles of what LOAD brings, as TMA copies them.

    Runs: any warp. Args: atoms and tensors by name; smem by name; where, (n_block, head, batch);
    rank of this CTA; rows of the sequence, see `sequence`. A CTA without keys gets the leader's.
    Returns: by name (TMA, n) or (TMA, m), and (TMA, STAGES); of Q, dO also the leader's (TMA, m);
    the statistics have all tiles, of which the sequence's follow those of the sequences before it.
    """
    _, head, batch = where
    begin_q, len_q, begin_k, len_k = rows
    views = {}
    for name, (mma, side, major, shape) in operands(smem["sK"].element_type, head_dim).items():
        tile = (shape[0 if side == "A" else 1], shape[2])
        at, axis = ((None, 0), 0) if major == "K" else ((0, None), 1)
        begin, length = (begin_k, len_k) if name in ("K", "V", "Kt") else (begin_q, len_q)
        mX = rows_of(tensors[name], begin, length, head, batch, axis)  # (length, d) or (d, length)
        gX = cute.local_tile(mX, tile, at)  # (M or N, K, n)
        own = rank
        if cutlass.const_expr(side == "A"):
            own = rank if (where[0] * config.CTAS + rank) * config.TILE < len_k else Int32(LEADER)
        part, leader = mma.get_slice(own), mma.get_slice(LEADER)
        gX_own = getattr(part, f"partition_{side}")(gX)  # ((this CTA's M or N, 16), 1, K / 16, n)
        tXsX, tXgX = tma_views(atoms[name], smem[f"s{name}"], gX_own)  # (TMA, 1), (TMA, n)
        gX_leader = getattr(leader, f"partition_{side}")(gX)  # ((its M or N, 16), 1, K / 16, n)
        views[name] = (tXgX, tXsX, tma_views(atoms[name], smem[f"s{name}"], gX_leader)[1])
    sStats = cute.group_modes(smem["sStats"], 0, 2)
    entry = cutlass.min(batch, cute.size(tensors["stats"], mode=[3]) - 1)
    gStats = cute.local_tile(tensors["stats"][None, None, head, entry], (2, config.TILE), (None, 0))
    tXsX, tXgX = cpasync.tma_partition(
        atoms["stats"], 0, cute.make_layout(1), sStats, cute.group_modes(gStats, 0, 2)
    )  # (TMA, STATS_STAGES), (TMA, m)
    views["stats"] = (tXgX, tXsX)
    return views


@cute.jit
def load_half(load: cute.CopyAtom, views, sX: cute.Tensor, index: Int32, full, rank, there=True):
    """Start the copy of this CTA's part of an operand, of the leader's if it is not `there`.

    Runs: LOAD. The bytes of both CTAs count on the leader's barrier `full`, where MMA waits.
    """
    if rank == LEADER:
        announce(full, config.CTAS * stage_bytes(sX))
    if there:
        cute.copy(load, views[0][None, index], views[1][None, 0], tma_bar_ptr=full)
    else:
        cute.copy(load, views[2][None, index], views[1][None, 0], tma_bar_ptr=full)


@cute.jit
def load_statistics(load: cute.CopyAtom, views, step: Int32, tile: Int32, bars):
    """Start the copy of LSE and D of a query tile.

    Runs: LOAD. Args: tile, which of all statistics. Arrives: stats_full, where COMPUTE waits.
    """
    slot = step % config.STATS_STAGES
    full = bars.stats_full.data_ptr() + slot
    announce(full, config.STATS_BYTES)
    cute.copy(load, views[0][None, tile], views[1][None, slot], tma_bar_ptr=full)


@cute.jit
def load(atoms, tensors, smem, bars, where, rank, rows, tiles, head_dim: cutlass.Constexpr):
    """Load the key tiles once, then the halves of every query tile in the order of their use.

    Runs: LOAD, converged. Args: as tile_views; tiles, (m_min, m_max). Waits: q_empty, qt_empty,
    do_empty, dot_empty. Arrives: all of `load_half`, stats_full. A slot of sStats is free when the
    dK of its tile is done, for which the Qt of the next waited.
    """
    views = tile_views(atoms, tensors, smem, where, rank, rows, head_dim)
    part = lambda name, index, full, *there: load_half(
        atoms[name], views[name], smem[f"s{name}"], index, full.data_ptr(), rank, *there
    )
    m_min, m_tiles = tiles[0], tiles[1] - tiles[0]
    entry = cutlass.min(where[2], cute.size(tensors["stats"], mode=[3]) - 1)
    first_tile = rows[0] // config.TILE + where[2] - entry  # of the sequence's statistics
    part("K", where[0], bars.k_full)
    for step in cutlass.range(m_tiles + 1, unroll=1):
        m_tile = m_min + step
        there = m_tile * config.TILE + rank * config.HALF < rows[1]  # its half of the queries
        if step < m_tiles:
            cute.arch.mbarrier_wait(bars.q_empty.data_ptr(), step % 2 ^ 1)  # MMA's commit arrives
            part("Q", m_tile, bars.q_full, there)
        if step > 0:
            cute.arch.mbarrier_wait(bars.qt_empty.data_ptr(), step % 2)  # MMA's commit arrives
            part("Qt", m_tile - 1, bars.qt_full)
        if step < m_tiles:
            load_statistics(atoms["stats"], views["stats"], step, first_tile + m_tile, bars)
            if step == 0:
                part("V", where[0], bars.v_full)
            cute.arch.mbarrier_wait(bars.do_empty.data_ptr(), step % 2 ^ 1)  # MMA's commit arrives
            part("dO", m_tile, bars.do_full, there)
            if step == 0:
                part("Kt", where[0], bars.kt_full)
            cute.arch.mbarrier_wait(bars.dot_empty.data_ptr(), step % 2 ^ 1)  # MMA's commit arrives
            part("dOt", m_tile, bars.dot_full)
    for empty in (bars.q_empty, bars.qt_empty, bars.do_empty, bars.dot_empty):
        cute.arch.mbarrier_wait(empty.data_ptr(), (m_tiles - 1) % 2)  # MMA's last commits arrive
