# SPDX-License-Identifier: Apache-2.0
"""Statistics of the query rows of one tile, and zeros where dQ will be added up."""

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64

from ...common import arith
from ..lengths import rows_of_side
from . import config


@cute.jit
def preprocess(
    mO: cute.Tensor,
    mdO: cute.Tensor,
    mLSE: cute.Tensor,
    mdLSE: cute.Tensor,
    mStats: cute.Tensor,
    mdQ_accum: cute.Tensor,
    cu_seqlens_q: Int64,
    seqused_q: Int64,
    batch: Int32,
    max_seqlen_q: Int32,
    stream,
):
    """Launch one CTA for each tile of 128 query rows of every sequence.

    Runs: host. Args: mO, mdO (b, sq, h, d) bf16 or fp16, d static, rows of 16-byte steps; mLSE,
    mdLSE (b, h, sq) Float32, natural log, mdLSE with any strides; mStats (b, h, tiles, 2, 128)
    Float32; mdQ_accum (b, sq, h, d) Float32; of packed sequences, which lie one after the other, b
    is 1; cu_seqlens_q, seqused_q, addresses as in `rows_of_side`; batch, how many sequences;
    max_seqlen_q, no one is longer; stream.
    """
    heads, head_dim = mO.shape[2], mO.shape[3]
    num_m_blocks = cute.ceil_div(max_seqlen_q, config.TILE_M)
    of_q = (cu_seqlens_q, seqused_q, max_seqlen_q)
    preprocess_kernel(mO, mdO, mLSE, mdLSE, mStats, mdQ_accum, of_q, num_m_blocks).launch(
        grid=(num_m_blocks * heads * batch, 1, 1),
        block=(config.plan(head_dim).threads, 1, 1),
        stream=stream,
    )


@cute.kernel
def preprocess_kernel(
    mO: cute.Tensor,
    mdO: cute.Tensor,
    mLSE: cute.Tensor,
    mdLSE: cute.Tensor,
    mStats: cute.Tensor,
    mdQ_accum: cute.Tensor,
    of_q: tuple,
    num_m_blocks: Int32,
):
    """One CTA: the statistics and the zeros of its tile; nothing where the sequence has no rows.

    Runs: 128 threads, converged. The 1-D grid counts query tiles fastest, then heads, then batch.
    Writes: mStats[..., 0, row] = LSE * log2(e), mStats[..., 1, row] = D, mdQ_accum = 0. Rows beyond
    the sequence, and those that see no key (LSE = -inf), get inf and 0: P = exp2(S - inf) is 0.
    Numerics: float32; D as in row_dots. Cost: per row 4 d bytes read, 4 d written.
    """
    tidx, _, _ = cute.arch.thread_idx()
    block, _, _ = cute.arch.block_idx()
    m_block, heads = block % num_m_blocks, mO.shape[2]
    head, batch = block // num_m_blocks % heads, block // num_m_blocks // heads
    begin, len_q = rows_of_side(*of_q, batch, Int32(mO.shape[1]))
    entry = cutlass.min(batch, mO.shape[0] - 1)  # a packed tensor has one
    rows = len_q - m_block * config.TILE_M  # of the sequence from this tile on
    if rows > 0:
        first = begin + m_block * config.TILE_M
        gO, gdO, gdQ = [
            cute.domain_offset((first, 0), mX[entry, None, head, None])
            for mX in (mO, mdO, mdQ_accum)
        ]  # (rows, d)
        gLSE, gdLSE = [
            cute.domain_offset((first,), mX[entry, head, None]) for mX in (mLSE, mdLSE)
        ]  # (rows,)
        tile = begin // config.TILE_M + batch - entry + m_block  # of the statistics
        gStats = mStats[entry, head, tile, None, None]  # (2, TILE_M)
        lse = Float32.inf
        if tidx < rows:
            lse = gLSE[tidx] * arith.LOG2_E
            if lse == -Float32.inf:
                lse = Float32.inf
        gStats[0, tidx] = lse
        row_dots(gO, gdO, gLSE, gdLSE, gStats[1, None], rows, tidx)
        fill_zeros(gdQ, rows, tidx)


@cute.jit
def row_dots(gO: cute.Tensor, gdO, gLSE, gdLSE, gD: cute.Tensor, rows: Int32, tidx: Int32):
    """Write D = rowsum(O * dO) - dLSE of every row of a tile, 0 where there is no row or no key.

    Runs: all threads, converged; neighbours take neighbouring 16 bytes, so that d / 8 of them,
    lanes of one warp, share a row. There are as many steps as such lanes: each keeps the sum of one
    step, and stores one row. Args: gO, gdO (rows, d) bf16 or fp16, global; gLSE, gdLSE (rows,), gD
    (TILE_M,) Float32, global. Numerics: products and sums in float32, d / 8 partial sums of 8,
    added up in a tree. Cost: a thread takes d FMAs and d / 8 * log2(d / 8) shuffles.
    """
    head_dim = gO.shape[1]
    width = config.COPY_BYTES * 8 // gO.element_type.width  # elements of one load
    lanes = head_dim // width  # that share a row
    column = tidx % lanes
    rO = cute.make_rmem_tensor((width,), gO.element_type)
    rdO = cute.make_rmem_tensor((width,), gO.element_type)
    dot = Float32(0.0)
    for step in cutlass.range_constexpr(config.TILE_M * lanes // config.THREADS):
        row = (tidx + step * config.THREADS) // lanes
        part = Float32(0.0)
        if row < rows:
            cute.autovec_copy(cute.local_tile(gO[row, None], (width,), (column,)), rO)
            cute.autovec_copy(cute.local_tile(gdO[row, None], (width,), (column,)), rdO)
            products = rO.load().to(Float32) * rdO.load().to(Float32)
            part = products.reduce(cute.ReductionOp.ADD, Float32(0.0), 0)
        total = cute.arch.warp_reduction_sum(part, threads_in_group=lanes)
        if column == step:
            dot = total
    row = (tidx + column * config.THREADS) // lanes
    d = Float32(0.0)
    if row < rows:
        if gLSE[row] != -Float32.inf:
            d = dot - gdLSE[row]
    gD[row] = d


@cute.jit
def fill_zeros(gX: cute.Tensor, rows: Int32, tidx: Int32):
    """Write zeros to the first TILE_M of `rows` rows.

    Runs: all threads; neighbours take neighbouring 16 bytes. Args: gX (rows, d) Float32, global,
    16-byte aligned rows.
    """
    head_dim = gX.shape[1]
    width = config.COPY_BYTES * 8 // gX.element_type.width  # elements of one store
    chunks = head_dim // width  # a row's stores
    zeros = cute.make_rmem_tensor((width,), gX.element_type)
    zeros.fill(0.0)
    for step in cutlass.range_constexpr(config.TILE_M * chunks // config.THREADS):
        chunk = tidx + step * config.THREADS
        if chunk // chunks < rows:
            target = cute.local_tile(gX[chunk // chunks, None], (width,), (chunk % chunks,))
            cute.autovec_copy(zeros, target)
