# SPDX-License-Identifier: Apache-2.0
"""Host launch and the kernel: a pair of CTAs computes dK, dV of its keys, their part of dQ."""

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64
from cutlass.cute.nvgpu import cpasync, tcgen05

from ...common.tcgen05 import (
    ALIGN_BYTES,
    fence_after,
    fence_before,
    operand_layout,
    tma_load,
)
from ..blank import blind_rows, fill_zeros, unused_rows
from ..lengths import ragged, sequence, turned
from ..mask import visited_queries
from . import config
from .compute import compute
from .epilogue import place
from .load import load, operands
from .mma import LEADER, make_mmas, mma
from .reduce import reduce
from .relay import relay


def shared_storage():
    """The mbarriers of the plan, in its order, and where the address of tensor memory is written.

    Runs: trace.
    """
    slots = lambda stages: cute.struct.MemRange[Int64, stages]

    @cute.struct
    class Barriers:
        k_full: slots(1)
        v_full: slots(1)
        kt_full: slots(1)
        q_full: slots(1)
        q_empty: slots(1)
        qt_full: slots(1)
        qt_empty: slots(1)
        stats_full: slots(config.STATS_STAGES)
        do_full: slots(1)
        do_empty: slots(1)
        dot_full: slots(1)
        dot_empty: slots(1)
        s_full: slots(1)
        s_read: slots(1)
        p_full: slots(1)
        dp_full: slots(1)
        ds_full: slots(1)
        dq_full: slots(1)
        dq_read: slots(1)
        dx_staged: slots(1)
        dx_full: slots(1)
        dx_both: slots(1)
        dv_full: slots(1)
        dk_full: slots(1)
        tmem_address: Int32

    return Barriers


def operand_layouts(dtype, head_dim: int) -> dict:
    """Shared-memory layouts by name: what LOAD brings, dS as dQ's MMA reads it, rows to copy.

    Runs: trace.
    """
    layouts = {}
    for name, (op, side, major, shape) in operands(dtype, head_dim).items():
        tile = (shape[0 if side == "A" else 1], shape[2])
        part = getattr(op, f"partition_shape_{side}")(tile)  # ((this CTA's, 16), 1, K / 16)
        layouts[f"s{name}"] = operand_layout(part, major, dtype, 1)
    _, _, mma_q = make_mmas(dtype, head_dim)
    keys = config.CTAS * config.TILE
    shape_ds = mma_q.partition_shape_A((config.TILE, keys))  # ((HALF, 16), 1, TILE / 8)
    return layouts | {
        "sdS": operand_layout(shape_ds, "MN", dtype, 1),
        "sdX": rows_layout(dtype, (config.TILE, config.HALF, 1)),
        "sdS_rows": rows_layout(dtype, (config.TILE, config.HALF, config.CTAS + 1)),
        "sdQ": rows_layout(Float32, (config.HALF, config.SLICE, 2)),
        "sdV": rows_layout(dtype, (config.TILE, config.HALF, 2)),
        "sdK": rows_layout(dtype, (config.TILE, config.HALF, 2)),
    }


def rows_layout(dtype, shape):
    """Layout of (rows, columns, slots), 128-byte swizzled, as TMA and a K-major operand have it."""
    atom = tcgen05.make_smem_layout_atom(tcgen05.SmemLayoutAtomKind.K_SW128, dtype)
    return cute.tile_to_shape(atom, shape, order=(0, 1, 2))


@cute.jit
def backward(
    mQ: cute.Tensor,
    mK: cute.Tensor,
    mV: cute.Tensor,
    mdO: cute.Tensor,
    mStats: cute.Tensor,
    mdQ_accum: cute.Tensor,
    mdK: cute.Tensor,
    mdV: cute.Tensor,
    scale_log2: Float32,
    softmax_scale: Float32,
    cu_seqlens_q: Int64,
    cu_seqlens_k: Int64,
    seqused_q: Int64,
    seqused_k: Int64,
    batch: Int32,
    max_seqlen_q: Int32,
    max_seqlen_k: Int32,
    left: Int32,
    right: Int32,
    stream,
):
    """Launch the backward pass over pairs of key tiles of every sequence.

    Runs: host. Args: mQ, mdO (b, sq, h, d), mK, mV (b, sk, hk, d), mdK, mdV (b, sk, h, d) bf16 or
    fp16, d static, h a multiple of hk: mdK and mdV are those of each head of Q. mStats
    (b, h, tiles, 2, TILE) Float32, see preprocess; mdQ_accum (b, sq, h, d) Float32, added to; of
    packed sequences, which lie one after the other, b is 1; softmax_scale, scale_log2 =
    softmax_scale * log2(e); cu_seqlens and seqused, addresses as in `rows_of_side`; batch, how many
    sequences; max_seqlen, no one is longer; left, right, see mask.py; stream. All rows of mdK and
    mdV are written. What is allowed is in config.ENVELOPE and was checked before.
    """
    heads, head_dim = mQ.shape[2], mQ.shape[3]
    dtype, layouts = mQ.element_type, operand_layouts(mQ.element_type, mQ.shape[3])
    given = {"K": mK, "V": mV, "Kt": mK, "Q": mQ, "Qt": mQ, "dO": mdO, "dOt": mdO}
    made = {"stats": load_statistics(mStats)}
    for name, (op, side, major, shape) in operands(dtype, head_dim).items():
        mX = ragged(given[name], heads)  # (s, d, h, b, 1 + s)
        mX = mX if major == "K" else turned(mX)  # (d, s, h, b, 1 + s)
        made[name] = tma_load(op, side, mX, layouts[f"s{name}"], shape, config.CTAS)
    add, store = cpasync.CopyReduceBulkTensorTileS2GOp(), cpasync.CopyBulkTensorTileS2GOp()
    for name, copy, mX in (("dQ", add, mdQ_accum), ("dV", store, mdV), ("dK", store, mdK)):
        made[name] = copy_of_rows(copy, ragged(mX), layouts[f"s{name}"])
    atoms = {name: atom for name, (atom, _) in made.items()}
    tensors = {name: tensor for name, (_, tensor) in made.items()}
    pairs = cute.ceil_div(max_seqlen_k, config.CTAS * config.TILE)
    sizes = (pairs, heads, mQ.shape[1], mK.shape[1], batch)
    lengths = (cu_seqlens_q, cu_seqlens_k, seqused_q, seqused_k, max_seqlen_q, max_seqlen_k)
    scales, window = (scale_log2, softmax_scale), (left, right)
    backward_kernel(
        atoms, tensors, layouts, (mdK, mdV), scales, sizes, lengths, window, head_dim, dtype
    ).launch(
        grid=(config.CTAS * pairs * heads * batch, 1, 1),
        block=(config.plan(head_dim).threads, 1, 1),
        cluster=(config.CTAS, 1, 1),
        min_blocks_per_mp=1,
        stream=stream,
    )


def load_statistics(mStats: cute.Tensor):
    """TMA atom and tensor (2 * m, TILE, h, b) that load LSE and D of a query tile. Runs: trace."""
    batch, heads, m_tiles, _, tile = mStats.shape
    layout = cute.make_layout(
        (2 * m_tiles, tile, heads, batch), stride=(tile, 1, mStats.stride[1], mStats.stride[0])
    )
    return cpasync.make_tiled_tma_atom(
        cpasync.CopyBulkTensorTileG2SOp(),
        cute.make_tensor(mStats.iterator, layout),
        cute.make_layout((2, tile), stride=(tile, 1)),
        (2, tile),
    )


def copy_of_rows(op, mX: cute.Tensor, layout):
    """TMA atom and tensor that copy a slot of `rows_layout` to mX, `ragged`. Runs: trace."""
    slot = cute.select(layout, mode=[0, 1])
    return cpasync.make_tiled_tma_atom(
        op, mX, slot, tuple(cute.product_each(layout.outer.shape)[:2])
    )


@cute.kernel
def backward_kernel(
    atoms,
    tensors,
    layouts,
    results: tuple,
    scales,
    sizes,
    lengths: tuple,
    window,
    head_dim: cutlass.Constexpr,
    dtype: cutlass.Constexpr,
):
    """One CTA of a pair: its key tile against the query tiles that see the pair's, first to last.

    Runs: 512 threads, by role. The 1-D grid counts the CTAs of a pair fastest, then pairs of key
    tiles, then heads, then batch. Args: atoms, tensors, layouts by name; results, (mdK, mdV);
    scales, (scale_log2, softmax_scale); sizes, (pairs, heads, sq, sk, batch); lengths, see
    `sequence`; window, (left, right).
    """
    blank(results, sizes, lengths, window)
    where, rank = place(sizes)
    rows = sequence(lengths, where[2], sizes[2], sizes[3])
    unit = config.CTAS * config.TILE
    tiles = visited_queries(where[0] * unit, unit, (rows[1], rows[3]), window)
    if tiles[0] < tiles[1]:
        by_role(
            atoms,
            tensors,
            layouts,
            scales,
            sizes,
            lengths,
            where,
            rank,
            rows,
            tiles,
            window,
            head_dim,
            dtype,
        )


@cute.jit
def blank(results, sizes, lengths, window):
    """Write zeros for the keys of a pair that no query sees, and a part of the unused ones.

    Runs: 512 threads. Args: as in backward_kernel. Keeps nothing for what follows: registers are
    scarce.
    """
    where, rank = place(sizes)
    rows = sequence(lengths, where[2], sizes[2], sizes[3])
    unit = config.CTAS * config.TILE
    tiles = visited_queries(where[0] * unit, unit, (rows[1], rows[3]), window)
    cta = where[0] * config.CTAS + rank
    blind = blind_rows(cta * config.TILE, config.TILE, rows[2], rows[3], tiles)
    unused = unused_rows(lengths[1], rows[2], rows[3], sizes[3], where[2], sizes[4])
    for idle, part in ((blind, (0, 1)), (unused, (cta, config.CTAS * sizes[0]))):
        for mX in results:
            fill_zeros(mX, where, idle, part, 512)


@cute.jit
def by_role(
    atoms,
    tensors,
    layouts,
    scales,
    sizes,
    lengths,
    where,
    rank,
    rows,
    tiles,
    window,
    head_dim: cutlass.Constexpr,
    dtype: cutlass.Constexpr,
):
    """Shared and tensor memory of a CTA, and its roles.

    Runs: 512 threads. Args: where, (n_block, head, batch); rank of this CTA; rows of the sequence,
    see `sequence`; tiles, the query tiles (m_min, m_max) to visit, at least one.
    """
    tidx, _, _ = cute.arch.thread_idx()
    warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
    m_tiles = tiles[1] - tiles[0]

    allocator = cutlass.memory.SmemAllocator()
    bars = allocator.allocate(shared_storage())
    smem = shared_tensors(allocator, layouts, dtype)
    if warp == config.MMA:
        initialise(bars, head_dim)
        cute.arch.alloc_tmem(config.TMEM_COLUMNS, bars.tmem_address, True)
        cute.arch.relinquish_tmem_alloc_permit(True)
    all_of_both()  # start
    address = cute.arch.retrieve_tmem_ptr(Float32, 16, bars.tmem_address)
    tmem = tensor_memory(address, head_dim, dtype)

    if warp >= config.MMA:
        cute.arch.setmaxregister_decrease(config.REGISTERS["other"])
        if warp == config.LOAD:
            load(atoms, tensors, smem, bars, where, rank, rows, tiles, head_dim)
        elif warp == config.RELAY:
            relay(smem["sdS_rows"], bars, rank, m_tiles)
        elif warp == config.MMA and rank == LEADER:
            mma(smem, tmem, bars, m_tiles)
    elif warp >= config.COMPUTE0.start:
        cute.arch.setmaxregister_increase(config.REGISTERS["compute"])
        number, lane = (warp - config.COMPUTE0.start) // 4, tidx % 128
        outputs = [(atoms[name], tensors[name]) for name in ("dV", "dK")]
        compute(number, smem, tmem, bars, outputs, scales, sizes, lengths, tiles, window, lane)
    else:
        cute.arch.setmaxregister_decrease(config.REGISTERS["reduce"])
        place = (where, rank, rows)
        reduce(atoms["dQ"], tensors["dQ"], smem, tmem["dQ"], bars, place, tiles, tidx)
    all_of_both()  # end
    if warp == config.MMA:
        cute.arch.dealloc_tmem(address, config.TMEM_COLUMNS, True)


@cute.jit
def all_of_both():
    """All threads of both CTAs wait for all, with accesses to tensor memory ordered across it."""
    fence_before()
    cute.arch.cluster_arrive()
    cute.arch.cluster_wait()
    fence_after()


def shared_tensors(allocator, layouts, dtype) -> dict:
    """Tensors in shared memory by name, in the plan's order; staged ones overlap.

    sdS_rows: the two blocks of sdS, a row for each key, and sdX as the third.
    """
    shape = (2, config.TILE, config.STATS_STAGES)
    stats = cute.make_layout(shape, stride=(config.TILE, 1, 2 * config.TILE))
    smem = {"sStats": allocator.allocate_tensor(Float32, stats, 128)}
    for name in ("K", "V", "Kt", "Q", "Qt", "dO", "dOt", "dS", "dX", "dQ"):
        kind, layout = Float32 if name == "dQ" else dtype, layouts[f"s{name}"]
        smem[f"s{name}"] = allocator.allocate_tensor(kind, layout.outer, ALIGN_BYTES, layout.inner)
    for name, below in {"sdS_rows": "sdS", "sdV": "sdO", "sdK": "sQ"}.items():
        iterator = cute.recast_ptr(smem[below].iterator, layouts[name].inner)
        smem[name] = cute.make_tensor(iterator, layouts[name].outer)
    return smem


def tensor_memory(address, head_dim: int, dtype) -> dict:
    """Tensors in tensor memory by name. Runs: trace.

    S, dP ((TILE, TILE), 1, 1) and dV, dK ((TILE, d), 1, 1) float32; P, dS: two of ((TILE, 16), 1,
    HALF / 16) 16-bit; dQ ((TILE, d / 2), 1, 1), as the lanes have it; dQ_mma ((HALF, d), 1, 1), as
    its MMA does; half: (S, P, dP, dS) of half of the queries.
    """
    mma_s, mma_add, mma_q = make_mmas(dtype, head_dim)
    keys, half_tile = config.CTAS * config.TILE, make_mmas(dtype, config.HALF)[1]
    accumulator = lambda mma, rows, n: mma.make_fragment_C(mma.partition_shape_C((rows, n))).layout
    whole = accumulator(mma_s, keys, config.TILE)
    columns = accumulator(half_tile, keys, config.HALF)
    layout_d = accumulator(mma_add, keys, head_dim)
    layout_a = mma_add.make_fragment_A(mma_add.partition_shape_A((keys, config.HALF))).layout
    at = lambda column, layout: cute.make_tensor(address + column, layout)
    pairs = lambda column: cute.make_tensor(
        cute.recast_ptr(address + column, dtype=dtype), layout_a
    )

    first = lambda columns, half: columns[0] + half * (columns[1] - columns[0])

    def by_half(half):
        p, ds = (pairs(first(place, half)) for place in (config.TMEM_P, config.TMEM_DS))
        s, dp = (
            at(start + half * config.HALF, columns) for start in (config.TMEM_S, config.TMEM_DP)
        )
        return s, p, dp, ds

    return {
        "S": at(config.TMEM_S, whole),
        "dP": at(config.TMEM_DP, whole),
        "P": [pairs(column) for column in config.TMEM_P],
        "dS": [pairs(column) for column in config.TMEM_DS],
        "dV": at(config.TMEM_DV, layout_d),
        "dK": at(config.TMEM_DK, layout_d),
        "dQ": at(config.TMEM_DQ, columns),
        "dQ_mma": at(config.TMEM_DQ, accumulator(mma_q, config.TILE, head_dim)),
        "half": by_half,
    }


@cute.jit
def initialise(bars, head_dim: cutlass.Constexpr):
    """Initialise the mbarriers as the plan has them; the others pass a barrier before use.

    Runs: MMA, converged. They lie one after the other, k_full first.
    """
    plan = config.plan(head_dim)
    names = [name.partition("[")[0] for name in plan.mbarrier_offsets]
    arrivals = [plan.barrier(name).arrivals(plan) for name in names]
    with cute.arch.elect_one():
        for index in cutlass.range_constexpr(len(arrivals)):
            cute.arch.mbarrier_init(bars.k_full.data_ptr() + index, arrivals[index])
    cute.arch.mbarrier_init_fence()
