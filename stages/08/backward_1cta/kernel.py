# SPDX-License-Identifier: Apache-2.0
"""Host launch and the kernel: one CTA computes dK and dV of its keys, and their part of dQ."""

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
from ..lengths import ragged, sequence
from ..mask import visited_queries
from . import config
from .compute import compute
from .load import load
from .mma import make_mmas, mma
from .reduce import reduce


def shared_storage(head_dim: int):
    """The mbarriers of the plan, in its order, and where the address of tensor memory is written.

    Runs: trace.
    """
    slots = lambda stages: cute.struct.MemRange[Int64, stages]
    q_slots, do_slots = slots(config.Q_STAGES[head_dim]), slots(config.DO_STAGES[head_dim])

    @cute.struct
    class Barriers:
        k_full: slots(1)
        v_full: slots(1)
        q_full: q_slots
        q_empty: q_slots
        do_full: do_slots
        do_empty: do_slots
        s_full: slots(1)
        p_full: slots(1)
        dp_full: slots(1)
        ds_full: slots(1)
        dq_full: slots(1)
        dq_read: slots(1)
        dv_full: slots(1)
        dk_full: slots(1)
        dkv_read: slots(1)
        tmem_address: Int32

    return Barriers


def operand_layouts(dtype, head_dim: int) -> dict:
    """Shared-memory layouts by name: each tile as it is loaded, and turned. Runs: trace."""
    mma_s, mma_add, mma_q = make_mmas(dtype, head_dim)
    key_tiles, tile = config.KEY_TILES[head_dim], (config.TILE, head_dim)
    q_stages, do_stages = config.Q_STAGES[head_dim], config.DO_STAGES[head_dim]
    shape_a = mma_s.partition_shape_A(tile)  # ((TILE, 16), 1, d / 16)
    shape_b = mma_s.partition_shape_B(tile)  # ((TILE, 16), 1, d / 16)
    shape_t = mma_add.partition_shape_B((head_dim, config.TILE))  # ((d, 16), 1, TILE / 16)
    shape_ds = mma_q.partition_shape_A((config.TILE, config.TILE))  # ((TILE, 16), 1, TILE / 16)
    return {
        "sK": operand_layout(shape_a, "K", dtype, key_tiles),
        "sKt": operand_layout(shape_t, "MN", dtype, key_tiles),
        "sV": operand_layout(shape_a, "K", dtype, key_tiles),
        "sQ": operand_layout(shape_b, "K", dtype, q_stages),
        "sQt": operand_layout(shape_t, "MN", dtype, q_stages),
        "sdO": operand_layout(shape_b, "K", dtype, do_stages),
        "sdOt": operand_layout(shape_t, "MN", dtype, do_stages),
        "sdS": operand_layout(shape_ds, "MN", dtype, key_tiles),
        "sdS_rows": rows_layout(dtype, (config.TILE, config.TILE, key_tiles)),
        "sdQ": rows_layout(Float32, (config.TILE, config.SLICE, config.DQ_SLOTS)),
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
    """Launch the backward pass over tiles of keys of every sequence.

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
    mma_s, _, _ = make_mmas(dtype, head_dim)
    tile = (config.TILE, config.TILE, head_dim)
    add, store = cpasync.CopyReduceBulkTensorTileS2GOp(), cpasync.CopyBulkTensorTileS2GOp()
    made = {
        "K": tma_load(mma_s, "A", ragged(mK, heads), layouts["sK"], tile),
        "V": tma_load(mma_s, "A", ragged(mV, heads), layouts["sV"], tile),
        "Q": tma_load(mma_s, "B", ragged(mQ), layouts["sQ"], tile),
        "dO": tma_load(mma_s, "B", ragged(mdO), layouts["sdO"], tile),
        "stats": load_statistics(mStats),
        "dQ": copy_of_rows(add, ragged(mdQ_accum), layouts["sdQ"]),
        "dV": copy_of_rows(store, ragged(mdV), layouts["sdV"]),
        "dK": copy_of_rows(store, ragged(mdK), layouts["sdK"]),
    }
    atoms = {name: atom for name, (atom, _) in made.items()}
    tensors = {name: tensor for name, (_, tensor) in made.items()}
    units = cute.ceil_div(max_seqlen_k, config.KEY_TILES[head_dim] * config.TILE)
    sizes = (units, heads, mQ.shape[1], mK.shape[1], batch)
    lengths = (cu_seqlens_q, cu_seqlens_k, seqused_q, seqused_k, max_seqlen_q, max_seqlen_k)
    scales, window = (scale_log2, softmax_scale), (left, right)
    backward_kernel(
        atoms, tensors, layouts, (mdK, mdV), scales, sizes, lengths, window, head_dim, dtype
    ).launch(
        grid=(units * heads * batch, 1, 1),
        block=(config.plan(head_dim).threads, 1, 1),
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
    """One CTA: its key tiles against the query tiles that see them, from the first to the last.

    Runs: 512 threads, by role. The 1-D grid counts units of KEY_TILES key tiles fastest, then
    heads, then batch. Args: atoms, tensors, layouts by name; results, (mdK, mdV); scales,
    (scale_log2, softmax_scale); sizes, (units, heads, sq, sk, batch); lengths, see `sequence`;
    window, (left, right).
    """
    block, _, _ = cute.arch.block_idx()
    units, heads = sizes[0], sizes[1]
    where = (block % units, block // units % heads, block // units // heads)
    rows = sequence(lengths, where[2], sizes[2], sizes[3])
    unit = config.KEY_TILES[head_dim] * config.TILE
    tiles = visited_queries(where[0] * unit, unit, (rows[1], rows[3]), window)
    blank(results, where, rows, tiles, sizes, unit, lengths[1])
    if tiles[0] < tiles[1]:
        by_role(atoms, tensors, layouts, scales, where, rows, tiles, window, head_dim, dtype)


@cute.jit
def blank(results, where, rows, tiles, sizes, unit: cutlass.Constexpr, cu_seqlens_k: Int64):
    """Write zeros for the keys of a CTA that no query sees, and a part of the unused ones.

    Runs: 512 threads. Args: results, (mdK, mdV); where, (n_block, head, batch); rows of the
    sequence, see `sequence`; tiles, (m_min, m_max); sizes as in backward_kernel; unit, keys of a
    CTA.
    """
    blind = blind_rows(where[0] * unit, unit, rows[2], rows[3], tiles)
    unused = unused_rows(cu_seqlens_k, rows[2], rows[3], sizes[3], where[2], sizes[4])
    for idle, part in ((blind, (0, 1)), (unused, (where[0], sizes[0]))):
        for mX in results:
            fill_zeros(mX, where, idle, part, 512)


@cute.jit
def by_role(
    atoms,
    tensors,
    layouts,
    scales,
    where,
    rows,
    tiles,
    window,
    head_dim: cutlass.Constexpr,
    dtype: cutlass.Constexpr,
):
    """Shared and tensor memory of a CTA, and its roles.

    Runs: 512 threads. Args: where, (n_block, head, batch); rows of the sequence, see `sequence`;
    tiles, the query tiles (m_min, m_max) to visit, at least one.
    """
    tidx, _, _ = cute.arch.thread_idx()
    warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
    m_tiles = tiles[1] - tiles[0]
    key_tiles = tiles_of(where[0], cute.ceil_div(rows[3], config.TILE), head_dim)

    allocator = cutlass.memory.SmemAllocator()
    bars = allocator.allocate(shared_storage(head_dim))
    smem = shared_tensors(allocator, layouts, head_dim, dtype)
    if warp == config.MMA:
        initialise(bars, head_dim)
        cute.arch.alloc_tmem(config.TMEM_COLUMNS, bars.tmem_address)
        cute.arch.relinquish_tmem_alloc_permit()
    fence_before()
    cute.arch.barrier(barrier_id=0, number_of_threads=512)  # start: all wait for MMA
    fence_after()
    address = cute.arch.retrieve_tmem_ptr(Float32, 16, bars.tmem_address)
    tmem = tensor_memory(address, head_dim, dtype)

    if warp >= config.MMA:
        cute.arch.setmaxregister_decrease(config.REGISTERS["other"])
        if warp == config.LOAD:
            load(atoms, tensors, smem, bars, where, rows, tiles, key_tiles, head_dim)
        elif warp == config.MMA:
            mma(smem, tmem, bars, m_tiles, key_tiles)
            cute.arch.mbarrier_wait(bars.dq_read.data_ptr(), (m_tiles - 1) % 2)  # REDUCE arrives
            cute.arch.mbarrier_wait(bars.dkv_read.data_ptr(), 0)  # COMPUTE arrives
            fence_after()
            cute.arch.dealloc_tmem(address, config.TMEM_COLUMNS)
    elif warp >= config.COMPUTE0.start:
        cute.arch.setmaxregister_increase(config.REGISTERS["compute"])
        half, lane = (warp - config.COMPUTE0.start) // 4, tidx % 128
        outputs = [(atoms[name], tensors[name]) for name in ("dV", "dK")]
        place = (where, rows, key_tiles)
        compute(half, smem, tmem, bars, outputs, scales, place, tiles, window, lane)
    else:
        cute.arch.setmaxregister_increase(config.REGISTERS["reduce"])
        reduce(atoms["dQ"], tensors["dQ"], smem, tmem["dQ"], bars, where, rows, tiles, tidx)


def tiles_of(n_block, n_tiles, head_dim: int):
    """Key tiles of a CTA: KEY_TILES, or one in the last CTA of an odd number. Runs: trace."""
    if config.KEY_TILES[head_dim] == 1:
        return 1
    left = n_tiles - n_block * config.KEY_TILES[head_dim]
    return cutlass.min(left, Int32(config.KEY_TILES[head_dim]))


def shared_tensors(allocator, layouts, head_dim: int, dtype) -> dict:
    """Tensors in shared memory by name, in the plan's order; turned and staged ones overlap."""
    shape = (2, config.TILE, config.Q_STAGES[head_dim])
    stats = cute.make_layout(shape, stride=(config.TILE, 1, 2 * config.TILE))
    smem = {"sStats": allocator.allocate_tensor(Float32, stats, 128)}
    for name in ("sK", "sV", "sQ", "sdO", "sdS", "sdQ"):
        kind = Float32 if name == "sdQ" else dtype
        layout = layouts[name]
        smem[name] = allocator.allocate_tensor(kind, layout.outer, ALIGN_BYTES, layout.inner)
    overlaps = {
        "sKt": "sK",
        "sQt": "sQ",
        "sdOt": "sdO",
        "sdS_rows": "sdS",
        "sdV": "sdO",
        "sdK": "sQ",
    }
    for name, below in overlaps.items():
        iterator = cute.recast_ptr(smem[below].iterator, layouts[name].inner)
        smem[name] = cute.make_tensor(iterator, layouts[name].outer)
    return smem


def tensor_memory(address, head_dim: int, dtype) -> dict:
    """Tensors in tensor memory by name. Runs: trace.

    S, dP ((TILE, TILE), 1, 1) float32; P, dS: two of ((TILE, 16), 1, HALF / 16) 16-bit; dV, dK: the
    ((TILE, d), 1, 1) float32 of a key tile, dV_all, dK_all ((TILE, 128), 1, 1) all of them; dQ
    ((TILE, d), 1, 1); half: (S, P, dP, dS) of half of the queries.
    """
    mma_s, mma_add, _ = make_mmas(dtype, head_dim)
    tile, half_tile = (config.TILE, config.TILE), make_mmas(dtype, config.HALF)[1]
    whole = mma_s.make_fragment_C(mma_s.partition_shape_C(tile)).layout
    columns = half_tile.make_fragment_C(
        half_tile.partition_shape_C((config.TILE, config.HALF))
    ).layout
    layout_a = mma_add.make_fragment_A(mma_add.partition_shape_A((config.TILE, config.HALF))).layout
    shape_d = mma_add.partition_shape_C((config.TILE, head_dim))
    layout_d = mma_add.make_fragment_C(shape_d).layout
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
        "dV": lambda key_tile: at(config.TMEM_DV + key_tile * head_dim, layout_d),
        "dK": lambda key_tile: at(config.TMEM_DK + key_tile * head_dim, layout_d),
        "dV_all": at(config.TMEM_DV, whole),
        "dK_all": at(config.TMEM_DK, whole),
        "dQ": at(config.TMEM_DP, layout_d),
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
