# SPDX-License-Identifier: Apache-2.0
"""Host launch and the kernel of stage 08: one CTA computes 256 query rows of one head."""

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64
from cutlass.cute.nvgpu import cpasync, tcgen05

from ..common.tcgen05 import (
    ALIGN_BYTES,
    fence_after,
    fence_before,
    operand_layout,
    tma_load,
)
from . import config
from .blank import blind_rows, fill_lse, fill_zeros, unused_rows
from .correction import correction
from .epilogue import epilogue
from .lengths import ragged, sequence, turned
from .load import load
from .mask import visited_tiles
from .mma import make_mmas, mma
from .softmax import softmax


def shared_storage(stages: int):
    """The mbarriers of the plan, in its order, and where the address of tensor memory is written.

    Runs: trace. `stages`: slots of the ring of K and V.
    """
    by_tile = cute.struct.MemRange[Int64, config.Q_TILES]

    @cute.struct
    class Barriers:
        kv_full: cute.struct.MemRange[Int64, stages]
        kv_empty: cute.struct.MemRange[Int64, stages]
        q_full: by_tile
        s_full: by_tile
        p_full: by_tile
        p_rest: by_tile
        o_rescaled: by_tile
        stats_full: by_tile
        stats_empty: by_tile
        o_full: by_tile
        o_staged: by_tile
        tmem_address: Int32

    return Barriers


@cute.jit
def attention(
    mQ: cute.Tensor,
    mK: cute.Tensor,
    mV: cute.Tensor,
    mO: cute.Tensor,
    mLSE: cute.Tensor,
    scale_log2: Float32,
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
    """Launch attention over tiles of 256 query rows of every sequence.

    Runs: host. Args: mQ, mO (b, sq, h, d), mK, mV (b, sk, hk, d) bf16 or fp16, d static, h a
    multiple of hk; mLSE (b, h, sq) Float32; of packed sequences, which lie one after the other, b
    is 1; scale_log2 = softmax_scale * log2(e); cu_seqlens and seqused, addresses as in
    `rows_of_side`; batch, how many sequences; max_seqlen, no one is longer; left, right, see
    mask.py; stream. All rows of mO and mLSE are written. What is allowed is in config.ENVELOPE and
    was checked before.
    """
    _, _, heads, head_dim = mQ.shape
    dtype = mQ.element_type
    tile_n, stages = config.TILE_N[head_dim], config.KV_STAGES[head_dim]
    mma_s, mma_o = make_mmas(dtype, head_dim)
    tile_qk, tile_pv = (config.TILE_M, tile_n, head_dim), (config.TILE_M, head_dim, tile_n)
    shape_q = mma_s.partition_shape_A((config.TILE_M, head_dim))  # ((TILE_M, 16), 1, d / 16)
    shape_k = mma_s.partition_shape_B((tile_n, head_dim))  # ((tile_n, 16), 1, d / 16)
    shape_v = mma_o.partition_shape_B((head_dim, tile_n))  # ((d, 16), 1, tile_n / 16)
    layout_q = operand_layout(shape_q, "K", dtype, config.Q_TILES)
    layout_k = operand_layout(shape_k, "K", dtype, stages)
    layout_v = operand_layout(shape_v, "MN", dtype, stages)
    atom_o = tcgen05.make_smem_layout_atom(tcgen05.SmemLayoutAtomKind.K_SW128, dtype)
    shape_o = (config.TILE_M, head_dim, config.Q_TILES)
    layout_o = cute.tile_to_shape(atom_o, shape_o, order=(0, 1, 2))  # (TILE_M, d, 2)
    loads = (
        tma_load(mma_s, "A", ragged(mQ), layout_q, tile_qk),  # (sq, d, h, b, 1 + sq)
        tma_load(mma_s, "B", ragged(mK, heads), layout_k, tile_qk),  # (sk, d, h, b, 1 + sk)
        tma_load(mma_o, "B", turned(ragged(mV, heads)), layout_v, tile_pv),  # (d, sk, ...)
    )
    store_o, mO_tma = cpasync.make_tiled_tma_atom(
        cpasync.CopyBulkTensorTileS2GOp(),
        ragged(mO),  # (sq, d, h, b, 1 + sq)
        cute.select(layout_o, mode=[0, 1]),
        (config.TILE_M, head_dim),
    )
    atoms = (*[load_x for load_x, _ in loads], store_o)
    tensors = (*[tensor for _, tensor in loads], mO_tma)
    layouts = (layout_q, layout_k, layout_v, layout_o)
    num_m_blocks = cute.ceil_div(max_seqlen_q, config.TILE_M * config.Q_TILES)
    sizes = (num_m_blocks, mQ.shape[1], mK.shape[1], batch)
    lengths = (cu_seqlens_q, cu_seqlens_k, seqused_q, seqused_k, max_seqlen_q, max_seqlen_k)
    attention_kernel(
        atoms,
        tensors,
        layouts,
        (mO, mLSE),
        scale_log2,
        sizes,
        lengths,
        (left, right),
        head_dim,
        dtype,
    ).launch(
        grid=(num_m_blocks * heads * batch, 1, 1),
        block=(config.plan(head_dim).threads, 1, 1),
        min_blocks_per_mp=1,
        stream=stream,
    )


@cute.kernel
def attention_kernel(
    atoms: tuple,
    tensors: tuple,
    layouts: tuple,
    results: tuple,
    scale_log2: Float32,
    sizes: tuple,
    lengths: tuple,
    window: tuple,
    head_dim: cutlass.Constexpr,
    dtype: cutlass.Constexpr,
):
    """One CTA: two query tiles against the key tiles that they see, from the last to the first.

    Runs: 512 threads, by role. The 1-D grid counts query tiles fastest, then heads, then batch.
    Args: atoms, tensors, layouts of Q, K, V (TMA loads) and O (TMA store); results, (mO, mLSE);
    sizes, (num_m_blocks, sq, sk, batch); lengths, see `sequence`; window, (left, right).
    """
    block, _, _ = cute.arch.block_idx()
    num_m_blocks, heads = sizes[0], results[1].shape[1]
    where = (block % num_m_blocks, block // num_m_blocks % heads, block // num_m_blocks // heads)
    rows = sequence(lengths, where[2], sizes[1], sizes[2])
    first_row, tile_rows = where[0] * config.Q_TILES * config.TILE_M, config.Q_TILES * config.TILE_M
    tiles = visited_tiles(first_row, tile_rows, (rows[1], rows[3]), window)
    mO, mLSE = results
    blank(mO, mLSE, where, rows, tiles, sizes, lengths[0])
    if tiles[0] < tiles[1]:
        by_role(
            atoms, tensors, layouts, mLSE, scale_log2, where, rows, tiles, window, head_dim, dtype
        )


@cute.jit
def blank(mO, mLSE, where, rows, tiles, sizes, cu_seqlens_q: Int64):
    """Write O = 0 and LSE = -inf for a CTA that sees no key, and a part of the unused rows.

    Runs: 512 threads. Args: mO, mLSE as in attention; where, (m_block, head, batch); rows of the
    sequence, see `sequence`; tiles, (n_min, n_max); sizes as in attention_kernel.
    """
    tile_rows = config.Q_TILES * config.TILE_M
    blind = blind_rows(where[0] * tile_rows, tile_rows, rows[0], rows[1], tiles)
    unused = unused_rows(cu_seqlens_q, rows[0], rows[1], sizes[1], where[2], sizes[3])
    for idle, part in ((blind, (0, 1)), (unused, (where[0], sizes[0]))):
        fill_zeros(mO, where, idle, part, 512)
        fill_lse(mLSE, where, idle, part, 512)


@cute.jit
def by_role(
    atoms,
    tensors,
    layouts,
    mLSE: cute.Tensor,
    scale_log2: Float32,
    where,
    rows,
    tiles,
    window,
    head_dim: cutlass.Constexpr,
    dtype: cutlass.Constexpr,
):
    """Shared and tensor memory of a CTA, and its roles.

    Runs: 512 threads. Args: where, (m_block, head, batch); rows of the sequence, see `sequence`;
    tiles, the key tiles (n_min, n_max) to visit, at least one.
    """
    tidx, _, _ = cute.arch.thread_idx()
    warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
    stages, num_n_blocks = config.KV_STAGES[head_dim], tiles[1] - tiles[0]

    allocator = cutlass.memory.SmemAllocator()
    bars = allocator.allocate(shared_storage(stages))
    stats_layout = cute.make_layout((config.Q_TILES, config.TILE_M, 2))
    sStats = allocator.allocate_tensor(Float32, stats_layout, 128)  # (2, TILE_M, 2)
    sQ, sK = [
        allocator.allocate_tensor(dtype, layout.outer, ALIGN_BYTES, layout.inner)
        for layout in layouts[:2]
    ]  # ((TILE_M, 16), 1, d / 16, 2), ((tile_n, 16), 1, d / 16, STAGES)
    iterator_v = cute.recast_ptr(sK.iterator, layouts[2].inner)
    sV = cute.make_tensor(iterator_v, layouts[2].outer)  # ((d, 16), 1, tile_n / 16, STAGES)
    sO = allocator.allocate_tensor(dtype, layouts[3].outer, ALIGN_BYTES, layouts[3].inner)
    smem = (sQ, sK, sV, sO)
    if warp == config.MMA:
        initialise(bars, stages)
        cute.arch.alloc_tmem(config.TMEM_COLUMNS, bars.tmem_address)
        cute.arch.relinquish_tmem_alloc_permit()
    fence_before()
    cute.arch.barrier(barrier_id=0, number_of_threads=512)  # start: all wait for MMA
    fence_after()
    address = cute.arch.retrieve_tmem_ptr(Float32, 16, bars.tmem_address)
    tmem = tuple(tensor_memory(address, tile, head_dim, dtype) for tile in range(config.Q_TILES))

    if warp >= config.MMA:
        cute.arch.setmaxregister_decrease(config.REGISTERS["other"])
        if warp == config.LOAD:
            load(atoms, tensors, smem, bars, where, rows, tiles, head_dim, dtype)
        elif warp == config.MMA:
            mma(smem, tmem, bars, num_n_blocks, stages)
            for tile in cutlass.range_constexpr(config.Q_TILES):
                cute.arch.mbarrier_wait(bars.o_staged.data_ptr() + tile, 0)  # CORRECTION arrives
            fence_after()
            cute.arch.dealloc_tmem(address, config.TMEM_COLUMNS)
        elif warp == config.EPILOGUE:
            epilogue(atoms[3], tensors[3], sO, bars, where, rows)
    elif warp >= config.CORRECTION.start:
        cute.arch.setmaxregister_decrease(config.REGISTERS["correction"])
        lane = tidx - config.CORRECTION.start * 32
        correction(tmem, bars, sStats, sO, mLSE, scale_log2, num_n_blocks, where, rows, lane)
    elif warp >= config.SOFTMAX1.start:
        cute.arch.setmaxregister_increase(config.REGISTERS["softmax"])
        lane = tidx - config.SOFTMAX1.start * 32
        softmax(1, tmem[1], bars, sStats, scale_log2, where, rows, tiles, window, lane)
    else:
        cute.arch.setmaxregister_increase(config.REGISTERS["softmax"])
        softmax(0, tmem[0], bars, sStats, scale_log2, where, rows, tiles, window, tidx)


def tensor_memory(address, tile: int, head_dim: int, dtype):
    """(S, P, O) of a query tile as tensors in tensor memory. Runs: trace.

    Shapes ((TILE_M, tile_n), 1, 1), ((TILE_M, 16), 1, tile_n / 16), ((TILE_M, d), 1, 1).
    """
    mma_s, mma_o = make_mmas(dtype, head_dim)
    tile_n = config.TILE_N[head_dim]
    layout_s = mma_s.make_fragment_C(mma_s.partition_shape_C((config.TILE_M, tile_n))).layout
    layout_p = mma_o.make_fragment_A(mma_o.partition_shape_A((config.TILE_M, tile_n))).layout
    layout_o = mma_o.make_fragment_C(mma_o.partition_shape_C((config.TILE_M, head_dim))).layout
    start_p = cute.recast_ptr(address + config.TMEM_P[tile], dtype=dtype)
    return (
        cute.make_tensor(address + config.TMEM_S[tile], layout_s),
        cute.make_tensor(start_p, layout_p),
        cute.make_tensor(address + config.TMEM_O[tile], layout_o),
    )


@cute.jit
def initialise(bars, stages: cutlass.Constexpr):
    """Initialise the mbarriers. Runs: MMA; the others must pass a barrier before use."""
    with cute.arch.elect_one():
        for slot in cutlass.range_constexpr(stages):
            cute.arch.mbarrier_init(bars.kv_full.data_ptr() + slot, 1)  # LOAD, and the bytes
            cute.arch.mbarrier_init(bars.kv_empty.data_ptr() + slot, 1)  # MMA's commit
        for tile in cutlass.range_constexpr(config.Q_TILES):
            cute.arch.mbarrier_init(bars.q_full.data_ptr() + tile, 1)  # LOAD, and the bytes
            cute.arch.mbarrier_init(bars.s_full.data_ptr() + tile, 1)  # MMA's commit
            cute.arch.mbarrier_init(bars.p_full.data_ptr() + tile, 128)  # the tile's softmax
            cute.arch.mbarrier_init(bars.p_rest.data_ptr() + tile, 128)  # the tile's softmax
            cute.arch.mbarrier_init(bars.o_rescaled.data_ptr() + tile, 128)  # CORRECTION
            cute.arch.mbarrier_init(bars.stats_full.data_ptr() + tile, 128)  # the tile's softmax
            cute.arch.mbarrier_init(bars.stats_empty.data_ptr() + tile, 128)  # CORRECTION
            cute.arch.mbarrier_init(bars.o_full.data_ptr() + tile, 1)  # MMA's commit
            cute.arch.mbarrier_init(bars.o_staged.data_ptr() + tile, 128)  # CORRECTION
    cute.arch.mbarrier_init_fence()
