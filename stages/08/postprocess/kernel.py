# SPDX-License-Identifier: Apache-2.0
"""Scaling and rounding the sum of dQ."""

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64

from ..blank import fill_zeros, unused_rows
from ..lengths import rows_of_side
from . import config


@cute.jit
def postprocess(
    mdQ_accum: cute.Tensor,
    mdQ: cute.Tensor,
    softmax_scale: Float32,
    cu_seqlens_q: Int64,
    seqused_q: Int64,
    batch: Int32,
    max_seqlen_q: Int32,
    stream,
):
    """Launch one CTA for each tile of 128 query rows of every sequence.

    Runs: host. Args: mdQ_accum (b, sq, h, d) Float32, the sum of dS K over all keys; mdQ
    (b, sq, h, d) bf16 or fp16, d static, rows of 16-byte steps; softmax_scale; cu_seqlens_q,
    seqused_q, batch, max_seqlen_q as in preprocess; stream. Rows that no sequence has become 0.
    """
    heads, head_dim = mdQ.shape[2], mdQ.shape[3]
    num_m_blocks = cute.ceil_div(max_seqlen_q, config.TILE_M)
    of_q = (cu_seqlens_q, seqused_q, max_seqlen_q)
    postprocess_kernel(mdQ_accum, mdQ, softmax_scale, of_q, num_m_blocks, batch).launch(
        grid=(num_m_blocks * heads * batch, 1, 1),
        block=(config.plan(head_dim).threads, 1, 1),
        stream=stream,
    )


@cute.kernel
def postprocess_kernel(
    mdQ_accum: cute.Tensor,
    mdQ: cute.Tensor,
    softmax_scale: Float32,
    of_q: tuple,
    num_m_blocks: Int32,
    entries: Int32,
):
    """One CTA: dQ of its tile, and of a part of the rows that no sequence has.

    Runs: 128 threads, converged. The 1-D grid counts query tiles fastest, then heads, then batch.
    """
    tidx, _, _ = cute.arch.thread_idx()
    block, _, _ = cute.arch.block_idx()
    m_block, heads = block % num_m_blocks, mdQ.shape[2]
    head, batch = block // num_m_blocks % heads, block // num_m_blocks // heads
    begin, len_q = rows_of_side(*of_q, batch, Int32(mdQ.shape[1]))
    entry = cutlass.min(batch, mdQ.shape[0] - 1)  # a packed tensor has one
    first = m_block * config.TILE_M
    gdQ_accum, gdQ = [
        cute.domain_offset((begin + first, 0), mX[entry, None, head, None])
        for mX in (mdQ_accum, mdQ)
    ]  # (rows, d)
    scale_rows(gdQ_accum, gdQ, softmax_scale, len_q - first, tidx)
    unused = unused_rows(of_q[0], begin, len_q, Int32(mdQ.shape[1]), batch, entries)
    fill_zeros(mdQ, (m_block, head, batch), unused, (m_block, num_m_blocks), config.THREADS)


@cute.jit
def scale_rows(gX: cute.Tensor, gY: cute.Tensor, scale: Float32, rows: Int32, tidx: Int32):
    """Write Y = X * scale for the first TILE_M of `rows` rows; none where it is not positive.

    Runs: all threads; neighbours take neighbouring 16 bytes of Y, and 32 of X in two loads. Args:
    gX (rows, d) Float32, gY (rows, d) bf16 or fp16, global, 16-byte aligned rows. Numerics: one
    rounding in float32, one to Y. Cost: 6 d bytes a row.
    """
    head_dim = gY.shape[1]
    width = config.COPY_BYTES * 8 // gY.element_type.width  # elements of one store
    chunks = head_dim // width  # a row's stores
    rX = cute.make_rmem_tensor((width,), Float32)
    rY = cute.make_rmem_tensor((width,), gY.element_type)
    for step in cutlass.range_constexpr(config.TILE_M * chunks // config.THREADS):
        chunk = tidx + step * config.THREADS
        row, column = chunk // chunks, chunk % chunks
        if row < rows:
            cute.autovec_copy(cute.local_tile(gX[row, None], (width,), (column,)), rX)
            rY.store((rX.load() * scale).to(gY.element_type))
            cute.autovec_copy(rY, cute.local_tile(gY[row, None], (width,), (column,)))
