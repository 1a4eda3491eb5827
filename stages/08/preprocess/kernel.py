# SPDX-License-Identifier: Apache-2.0
"""Statistics of the query rows of one tile, and zeros where dQ will be added up."""

import math

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64

from ...common import arith
from ..lengths import sequence
from . import config


@cute.jit
def preprocess(
    mO: cute.Tensor,
    mdO: cute.Tensor,
    mLSE: cute.Tensor,
    mdLSE: cute.Tensor,
    mStats: cute.Tensor,
    mdQ_accum: cute.Tensor,
    lengths: Int64,
    batch: Int32,
    max_seqlen_q: Int32,
    stream,
):
    """Launch one CTA for each tile of 128 query rows of every sequence.

    Runs: host. Args: mO, mdO (b, sq, h, d) bf16 or fp16, d static, rows of 16-byte steps; mLSE,
    mdLSE (b, h, sq) Float32, natural log, mdLSE with any strides; mStats (b, h, tiles, 2, 128)
    Float32; mdQ_accum (b, sq, h, d) Float32; of packed sequences b is 1, and the first tile of
    number n is begin_q / 128 + n; lengths, see `sequence`; batch, how many sequences; max_seqlen_q,
    no one is longer; stream.
    """
    heads, head_dim = mO.shape[2], mO.shape[3]
    num_m_blocks = cute.ceil_div(max_seqlen_q, config.TILE_M)
    tensors = (mO, mdO, mLSE, mdLSE, mStats, mdQ_accum)
    preprocess_kernel(tensors, lengths, num_m_blocks).launch(
        grid=(num_m_blocks * heads * batch, 1, 1),
        block=(config.plan(head_dim).threads, 1, 1),
        stream=stream,
    )


@cute.kernel
def preprocess_kernel(tensors: tuple, lengths: Int64, num_m_blocks: Int32):
    """One CTA: the statistics and the zeros of its tile, if the sequence has it.

    Runs: 128 threads, converged. The 1-D grid counts query tiles fastest, then heads, then batch.
    Writes: mStats[..., 0, row] = LSE * log2(e), mStats[..., 1, row] = D, mdQ_accum = 0 where the
    sequence has the row; (+inf, 0) where it has not, or the row sees no key: exp2(S - inf) is 0.
    Numerics: float32; D as in row_dots. Cost: per row 4 d bytes read, 4 d written.
    """
    mO, mdO, mLSE, mdLSE, mStats, mdQ_accum = tensors
    tidx, _, _ = cute.arch.thread_idx()
    block, _, _ = cute.arch.block_idx()
    m_block, heads = block % num_m_blocks, mO.shape[2]
    head, batch = block // num_m_blocks % heads, block // num_m_blocks // heads
    begin, len_q, _, _ = sequence(lengths, batch, mO.shape[1], Int32(0))
    entry, rows = cutlass.min(batch, mO.shape[0] - 1), len_q - m_block * config.TILE_M
    if rows > 0:
        tile = (config.TILE_M, mO.shape[3])
        gO, gdO, gdQ = [
            cute.local_tile(
                cute.domain_offset((begin, 0), mX[entry, None, head, None]), tile, (m_block, 0)
            )
            for mX in (mO, mdO, mdQ_accum)
        ]  # (TILE_M, d)
        gLSE, gdLSE = [
            cute.local_tile(
                cute.domain_offset((begin,), mX[entry, head, None]), (config.TILE_M,), (m_block,)
            )
            for mX in (mLSE, mdLSE)
        ]  # (TILE_M,)
        first_tile = begin // config.TILE_M + batch - entry
        gStats = mStats[entry, head, first_tile + m_block, None, None]  # (2, TILE_M)
        row, dot = row_dots(gO, gdO, rows, tidx)
        there = cutlass.min(row, rows - 1)
        lse, d = gLSE[there], dot - gdLSE[there]
        if row >= rows or lse == -Float32.inf:
            lse, d = Float32(math.inf), Float32(0.0)
        gStats[0, row], gStats[1, row] = lse * arith.LOG2_E, d
        fill_zeros(gdQ, rows, tidx)


@cute.jit
def row_dots(gO: cute.Tensor, gdO: cute.Tensor, rows: Int32, tidx: Int32):
    """(row, rowsum(O * dO)): of every row of a tile one thread has the sum.

    Runs: all threads, converged; neighbours take neighbouring 16 bytes, so that d / 8 of them,
    lanes of one warp, share a row. There are as many steps as such lanes: each keeps the sum of one
    step. Args: gO, gdO (TILE_M, d) bf16 or fp16, global, of which `rows` are there; a row behind
    them reads the last. Numerics: products and sums in float32, d / 8 partial sums of 8, added up
    in a tree. Cost: a thread takes d FMAs and d / 8 * log2(d / 8) shuffles.
    """
    tile_m, head_dim = gO.shape
    width = config.COPY_BYTES * 8 // gO.element_type.width  # elements of one load
    lanes = head_dim // width  # that share a row
    column = tidx % lanes
    rO = cute.make_rmem_tensor((width,), gO.element_type)
    rdO = cute.make_rmem_tensor((width,), gO.element_type)
    dot = Float32(0.0)
    for step in cutlass.range_constexpr(tile_m * lanes // config.THREADS):
        row = cutlass.min((tidx + step * config.THREADS) // lanes, rows - 1)
        cute.autovec_copy(cute.local_tile(gO[row, None], (width,), (column,)), rO)
        cute.autovec_copy(cute.local_tile(gdO[row, None], (width,), (column,)), rdO)
        products = rO.load().to(Float32) * rdO.load().to(Float32)
        part = products.reduce(cute.ReductionOp.ADD, Float32(0.0), 0)
        total = cute.arch.warp_reduction_sum(part, threads_in_group=lanes)
        if column == step:
            dot = total
    return (tidx + column * config.THREADS) // lanes, dot


@cute.jit
def fill_zeros(gX: cute.Tensor, rows: Int32, tidx: Int32):
    """Write zeros to a tile. Runs: all threads; neighbours take neighbouring 16 bytes.

    Args: gX (TILE_M, d) Float32, global, 16-byte aligned rows, of which `rows` are there; a row
    behind them is the last once more.
    """
    tile_m, head_dim = gX.shape
    width = config.COPY_BYTES * 8 // gX.element_type.width  # elements of one store
    chunks = head_dim // width  # a row's stores
    zeros = cute.make_rmem_tensor((width,), gX.element_type)
    zeros.fill(0.0)
    for step in cutlass.range_constexpr(tile_m * chunks // config.THREADS):
        chunk = tidx + step * config.THREADS
        row = cutlass.min(chunk // chunks, rows - 1)
        cute.autovec_copy(zeros, cute.local_tile(gX[row, None], (width,), (chunk % chunks,)))
