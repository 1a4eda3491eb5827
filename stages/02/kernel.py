# SPDX-License-Identifier: Apache-2.0
"""Host launch and the kernel of stage 02: one CTA computes 128 query rows of one head."""

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64
from cutlass.cute.nvgpu import cpasync, tcgen05

from ..common.tcgen05 import (
    ALIGN_BYTES,
    fence_after,
    fence_before,
    operand_layout,
    permuted,
    stage_bytes,
    tma_load,
    tma_views,
)
from . import config
from .correction import rescale
from .epilogue import logsumexp, stage_row, store_tile
from .load import load_tile
from .mma import make_mmas, mma_pv, mma_qk
from .softmax import exponentials, load_scores, store_probabilities, update_max


@cute.struct
class Barriers:
    """The mbarriers of the plan, and where the address of tensor memory is written."""

    q_full: Int64
    kv_full: Int64
    s_full: Int64
    o_full: Int64
    tmem_address: Int32


@cute.jit
def attention(
    mQ: cute.Tensor,
    mK: cute.Tensor,
    mV: cute.Tensor,
    mO: cute.Tensor,
    mLSE: cute.Tensor,
    scale_log2: Float32,
    stream,
):
    """Launch full attention over tiles of 128 query rows.

    Runs: host. Args: mQ, mO (b, sq, h, d), mK, mV (b, sk, h, d) bf16 or fp16, d static; mLSE
    (b, h, sq) Float32; scale_log2 = softmax_scale * log2(e); stream. What is allowed is in
    config.ENVELOPE and was checked before.
    """
    batch, seqlen_q, heads, head_dim = mQ.shape
    dtype = mQ.element_type
    tile_n = config.TILE_N[head_dim]
    mma_s, mma_o = make_mmas(dtype, head_dim)
    tile_qk, tile_pv = (config.TILE_M, tile_n, head_dim), (config.TILE_M, head_dim, tile_n)
    shape_q = mma_s.partition_shape_A((config.TILE_M, head_dim))  # ((TILE_M, 16), 1, d / 16)
    shape_k = mma_s.partition_shape_B((tile_n, head_dim))  # ((tile_n, 16), 1, d / 16)
    shape_v = mma_o.partition_shape_B((head_dim, tile_n))  # ((d, 16), 1, tile_n / 16)
    layout_q = operand_layout(shape_q, "K", dtype, 1)
    layout_k = operand_layout(shape_k, "K", dtype, 1)
    layout_v = operand_layout(shape_v, "MN", dtype, 1)
    atom_o = tcgen05.make_smem_layout_atom(tcgen05.SmemLayoutAtomKind.K_SW128, dtype)
    layout_o = cute.tile_to_shape(atom_o, (config.TILE_M, head_dim), order=(0, 1))  # (TILE_M, d)
    loads = (
        tma_load(mma_s, "A", permuted(mQ, [1, 3, 2, 0]), layout_q, tile_qk),  # (sq, d, h, b)
        tma_load(mma_s, "B", permuted(mK, [1, 3, 2, 0]), layout_k, tile_qk),  # (sk, d, h, b)
        tma_load(mma_o, "B", permuted(mV, [3, 1, 2, 0]), layout_v, tile_pv),  # (d, sk, h, b)
    )
    store_o, mO_tma = cpasync.make_tiled_tma_atom(
        cpasync.CopyBulkTensorTileS2GOp(),
        permuted(mO, [1, 3, 2, 0]),  # (sq, d, h, b)
        layout_o,
        (config.TILE_M, head_dim),
    )
    atoms = (*[load for load, _ in loads], store_o)
    tensors = (*[tensor for _, tensor in loads], mO_tma)
    layouts = (layout_q, layout_k, layout_v, layout_o)
    num_m_blocks = seqlen_q // config.TILE_M
    attention_kernel(
        atoms, tensors, layouts, mLSE, scale_log2, num_m_blocks, head_dim, dtype
    ).launch(
        grid=(num_m_blocks * heads * batch, 1, 1),
        block=(config.plan(head_dim).threads, 1, 1),
        stream=stream,
    )


@cute.kernel
def attention_kernel(
    atoms: tuple,
    tensors: tuple,
    layouts: tuple,
    mLSE: cute.Tensor,
    scale_log2: Float32,
    num_m_blocks: Int32,
    head_dim: cutlass.Constexpr,
    dtype: cutlass.Constexpr,
):
    """One CTA: its query tile against all keys of its head, from the last key tile to the first.

    Runs: 128 threads, converged. The 1-D grid counts query tiles fastest, then heads, then batch.
    Args: atoms, tensors, layouts of Q, K, V (TMA loads) and O (TMA store).
    """
    tidx, _, _ = cute.arch.thread_idx()
    warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
    block, _, _ = cute.arch.block_idx()
    heads = mLSE.shape[1]
    m_block = block % num_m_blocks
    head = block // num_m_blocks % heads
    batch = block // num_m_blocks // heads
    tile_n = config.TILE_N[head_dim]
    threads = config.plan(head_dim).threads

    smem = cutlass.memory.SmemAllocator()
    bars = smem.allocate(Barriers)
    sQ, sK, sV, sO = [
        smem.allocate_tensor(dtype, layout.outer, ALIGN_BYTES, layout.inner) for layout in layouts
    ]  # (Q, 1), (K, 1), (V, 1), (TILE_M, d)
    if warp == 0:
        with cute.arch.elect_one():
            cute.arch.mbarrier_init(bars.q_full.ptr, 1)  # arrives: warp 0, and the bytes
            cute.arch.mbarrier_init(bars.kv_full.ptr, 1)  # arrives: warp 0, and the bytes
            cute.arch.mbarrier_init(bars.s_full.ptr, 1)  # arrives: the commit after QK
            cute.arch.mbarrier_init(bars.o_full.ptr, 1)  # arrives: the commit after PV
        cute.arch.mbarrier_init_fence()
        cute.arch.alloc_tmem(config.TMEM_COLUMNS, bars.tmem_address)
        cute.arch.relinquish_tmem_alloc_permit()
    fence_before()
    cute.arch.barrier(barrier_id=0, number_of_threads=threads)  # start: all wait for warp 0
    fence_after()
    tmem = cute.arch.retrieve_tmem_ptr(Float32, 16, bars.tmem_address)
    mma_s, mma_o = make_mmas(dtype, head_dim)
    shape_s = mma_s.partition_shape_C((config.TILE_M, tile_n))  # ((TILE_M, tile_n), 1, 1)
    shape_p = mma_o.partition_shape_A((config.TILE_M, tile_n))  # ((TILE_M, 16), 1, tile_n / 16)
    shape_o = mma_o.partition_shape_C((config.TILE_M, head_dim))  # ((TILE_M, d), 1, 1)
    tStS = cute.make_tensor(tmem + config.TMEM_S, mma_s.make_fragment_C(shape_s).layout)
    tOtP = cute.make_tensor(
        cute.recast_ptr(tmem + config.TMEM_P, dtype=dtype), mma_o.make_fragment_A(shape_p).layout
    )
    tOtO = cute.make_tensor(tmem + config.TMEM_O, mma_o.make_fragment_C(shape_o).layout)

    tile_q, tile_k, tile_v = (config.TILE_M, head_dim), (tile_n, head_dim), (head_dim, tile_n)
    gQ = cute.local_tile(tensors[0][None, None, head, batch], tile_q, (m_block, 0))  # (TILE_M, d)
    gK = cute.local_tile(tensors[1][None, None, head, batch], tile_k, (None, 0))  # (tile_n, d, n)
    gV = cute.local_tile(tensors[2][None, None, head, batch], tile_v, (0, None))  # (d, tile_n, n)
    gO = cute.local_tile(tensors[3][None, None, head, batch], tile_q, (m_block, 0))  # (TILE_M, d)
    part_s, part_o = mma_s.get_slice(0), mma_o.get_slice(0)
    tQsQ, tQgQ = tma_views(atoms[0], sQ, part_s.partition_A(gQ))  # (TMA, 1), (TMA)
    tKsK, tKgK = tma_views(atoms[1], sK, part_s.partition_B(gK))  # (TMA, 1), (TMA, n)
    tVsV, tVgV = tma_views(atoms[2], sV, part_o.partition_B(gV))  # (TMA, 1), (TMA, n)
    one = cute.make_layout(1)
    tOsO, tOgO = cpasync.tma_partition(
        atoms[3], 0, one, cute.group_modes(sO, 0, 2), cute.group_modes(gO, 0, 2)
    )  # (TMA), (TMA)

    rS = cute.make_rmem_tensor((tile_n,), Float32)
    row_max = -Float32.inf
    row_sum = Float32(0.0)

    if warp == 0:
        with cute.arch.elect_one():
            cute.arch.mbarrier_arrive_and_expect_tx(bars.q_full.ptr, stage_bytes(sQ))
        load_tile(atoms[0], tQgQ, tQsQ[None, 0], bars.q_full.ptr)
        cute.arch.mbarrier_wait(bars.q_full.ptr, 0)  # TMA arrives
    num_n_blocks = cute.size(gK, mode=[2])
    for n_iter in cutlass.range(num_n_blocks, unroll=1):
        n_block = num_n_blocks - 1 - n_iter
        phase = n_iter % 2
        if warp == 0:
            with cute.arch.elect_one():
                kv_bytes = stage_bytes(sK) + stage_bytes(sV)
                cute.arch.mbarrier_arrive_and_expect_tx(bars.kv_full.ptr, kv_bytes)
            load_tile(atoms[1], tKgK[None, n_block], tKsK[None, 0], bars.kv_full.ptr)
            load_tile(atoms[2], tVgV[None, n_block], tVsV[None, 0], bars.kv_full.ptr)
            cute.arch.mbarrier_wait(bars.kv_full.ptr, phase)  # TMA arrives
            mma_qk(sQ, sK, tStS, bars.s_full.ptr)
        cute.arch.mbarrier_wait(bars.s_full.ptr, phase)  # warp 0's commit after QK arrives
        fence_after()
        load_scores(tStS, rS, tidx)
        row_max, acc_scale = update_max(rS, row_max, scale_log2)
        row_sum = exponentials(rS, row_max, row_sum, acc_scale, scale_log2)
        store_probabilities(rS, tOtP, tidx)
        if n_iter > 0:
            rescale(tOtO, acc_scale, tidx)
        fence_before()
        cute.arch.barrier(barrier_id=1, number_of_threads=threads)  # p_full: all wait for all
        if warp == 0:
            fence_after()
            mma_pv(tOtP, sV, tOtO, n_iter != 0, bars.o_full.ptr)
        cute.arch.mbarrier_wait(bars.o_full.ptr, phase)  # warp 0's commit after PV arrives
        fence_after()

    stage_row(tOtO, sO, row_sum, tidx)
    mLSE[batch, head, m_block * config.TILE_M + tidx] = logsumexp(row_max, row_sum, scale_log2)
    cute.arch.fence_proxy("async.shared", space="cta")  # sO: written by threads, read by TMA
    fence_before()
    cute.arch.barrier(barrier_id=0, number_of_threads=threads)  # end: all wait for all
    if warp == 0:
        fence_after()
        cute.arch.dealloc_tmem(tmem, config.TMEM_COLUMNS)
        store_tile(atoms[3], tOsO, tOgO)
