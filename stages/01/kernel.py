# SPDX-License-Identifier: Apache-2.0
"""Host launch and the kernel of stage 01: one CTA computes 128 query rows of one head."""

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32

from . import config
from .epilogue import logsumexp, store_row
from .load import load_tile
from .mma import mma_pv, mma_qk
from .softmax import exponentials, update_max


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
    num_m_blocks = seqlen_q // config.TILE_M
    plan = config.plan(head_dim)
    attention_kernel(mQ, mK, mV, mO, mLSE, scale_log2, num_m_blocks).launch(
        grid=(num_m_blocks * heads * batch, 1, 1),
        block=(plan.threads, 1, 1),
        stream=stream,
    )


@cute.kernel
def attention_kernel(
    mQ: cute.Tensor,
    mK: cute.Tensor,
    mV: cute.Tensor,
    mO: cute.Tensor,
    mLSE: cute.Tensor,
    scale_log2: Float32,
    num_m_blocks: Int32,
):
    """One CTA: its query tile against all keys of its head, from the last key tile to the first.

    Runs: 128 threads, converged. The 1-D grid counts query tiles fastest, then heads, then batch.
    """
    tidx, _, _ = cute.arch.thread_idx()
    block, _, _ = cute.arch.block_idx()
    m_block = block % num_m_blocks
    head = block // num_m_blocks % mQ.shape[2]
    batch = block // num_m_blocks // mQ.shape[2]

    head_dim = mQ.shape[3]
    tile_n = config.TILE_N[head_dim]
    threads = config.plan(head_dim).threads
    tile_q, tile_kv = (config.TILE_M, head_dim), (tile_n, head_dim)
    gQ = cute.local_tile(mQ[batch, None, head, None], tile_q, (m_block, 0))  # (TILE_M, d)
    gK = cute.local_tile(mK[batch, None, head, None], tile_kv, (None, 0))  # (tile_n, d, tiles)
    gV = cute.local_tile(mV[batch, None, head, None], tile_kv, (None, 0))  # (tile_n, d, tiles)
    gO = cute.local_tile(mO[batch, None, head, None], tile_q, (m_block, 0))  # (TILE_M, d)

    smem = cutlass.memory.SmemAllocator()
    layout_q = cute.make_layout(tile_q, stride=(head_dim + config.ROW_PAD, 1))
    layout_kv = cute.make_layout(tile_kv, stride=(head_dim, 1))
    sQ = smem.allocate_tensor(Float32, layout_q, byte_alignment=128)  # (TILE_M, d)
    sK = smem.allocate_tensor(Float32, layout_kv, byte_alignment=128)  # (tile_n, d)
    sV = smem.allocate_tensor(Float32, layout_kv, byte_alignment=128)  # (tile_n, d)

    rS = cute.make_rmem_tensor((tile_n,), Float32)
    rO = cute.make_rmem_tensor((head_dim,), Float32)
    rO.fill(0.0)
    row_max = -Float32.inf
    row_sum = Float32(0.0)

    load_tile(gQ, sQ, tidx, threads)
    num_n_blocks = mK.shape[1] // tile_n
    for n_iter in cutlass.range(num_n_blocks):
        n_block = num_n_blocks - 1 - n_iter
        load_tile(gK[None, None, n_block], sK, tidx, threads)
        load_tile(gV[None, None, n_block], sV, tidx, threads)
        cute.arch.barrier(barrier_id=0, number_of_threads=threads)  # kv_full: all wait for all
        mma_qk(sQ[tidx, None], sK, rS)
        row_max, acc_scale = update_max(rS, row_max, scale_log2)
        row_sum = exponentials(rS, row_max, row_sum, acc_scale, scale_log2)
        rO.store(rO.load() * acc_scale)
        mma_pv(rS, sV, rO)
        cute.arch.barrier(barrier_id=1, number_of_threads=threads)  # kv_empty: all wait for all

    store_row(rO, gO[tidx, None], row_sum)
    mLSE[batch, head, m_block * config.TILE_M + tidx] = logsumexp(row_max, row_sum, scale_log2)
