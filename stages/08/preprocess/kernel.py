# SPDX-License-Identifier: Apache-2.0
"""Statistics of the query rows of one tile, and zeros where dQ will be added up."""

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32

from ...common import arith
from . import config


@cute.jit
def preprocess(
    mO: cute.Tensor,
    mdO: cute.Tensor,
    mLSE: cute.Tensor,
    mdLSE: cute.Tensor,
    mStats: cute.Tensor,
    mdQ_accum: cute.Tensor,
    stream,
):
    """Launch one CTA for each tile of 128 query rows.

    Runs: host. Args: mO, mdO (b, sq, h, d) bf16 or fp16, d static, rows of 16-byte steps; mLSE,
    mdLSE (b, h, sq) Float32, natural log, mdLSE with any strides; mStats (b, h, sq / 128, 2, 128)
    Float32; mdQ_accum (b, sq, h, d) Float32; stream. sq is a multiple of 128.
    """
    batch, seqlen_q, heads, head_dim = mO.shape
    num_m_blocks = seqlen_q // config.TILE_M
    preprocess_kernel(mO, mdO, mLSE, mdLSE, mStats, mdQ_accum, num_m_blocks).launch(
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
    num_m_blocks: Int32,
):
    """One CTA: the statistics and the zeros of its tile.

    Runs: 128 threads, converged. The 1-D grid counts query tiles fastest, then heads, then batch.
    Writes: mStats[..., 0, row] = LSE * log2(e), mStats[..., 1, row] = D, mdQ_accum = 0.
    Numerics: float32; D as in row_dots. Cost: per row 4 d bytes read, 4 d written.
    """
    tidx, _, _ = cute.arch.thread_idx()
    block, _, _ = cute.arch.block_idx()
    m_block, heads = block % num_m_blocks, mO.shape[2]
    head, batch = block // num_m_blocks % heads, block // num_m_blocks // heads
    tile = (config.TILE_M, mO.shape[3])
    gO, gdO, gdQ = [
        cute.local_tile(mX[batch, None, head, None], tile, (m_block, 0))
        for mX in (mO, mdO, mdQ_accum)
    ]  # (TILE_M, d)
    gLSE, gdLSE = [
        cute.local_tile(mX[batch, head, None], (config.TILE_M,), (m_block,)) for mX in (mLSE, mdLSE)
    ]  # (TILE_M,)
    gStats = mStats[batch, head, m_block, None, None]  # (2, TILE_M)
    gStats[0, tidx] = gLSE[tidx] * arith.LOG2_E
    row_dots(gO, gdO, gdLSE, gStats[1, None], tidx)
    fill_zeros(gdQ, tidx)


@cute.jit
def row_dots(gO: cute.Tensor, gdO: cute.Tensor, gdLSE: cute.Tensor, gD: cute.Tensor, tidx: Int32):
    """Write D = rowsum(O * dO) - dLSE of every row of a tile.

    Runs: all threads, converged; neighbours take neighbouring 16 bytes, so that d / 8 of them,
    lanes of one warp, share a row. There are as many steps as such lanes: each keeps the sum of one
    step, and stores one row. Args: gO, gdO (TILE_M, d) bf16 or fp16, global; gdLSE, gD (TILE_M,)
    Float32, global. Numerics: products and sums in float32, d / 8 partial sums of 8, added up in a
    tree. Cost: a thread takes d FMAs and d / 8 * log2(d / 8) shuffles.
    """
    rows, head_dim = gO.shape
    width = config.COPY_BYTES * 8 // gO.element_type.width  # elements of one load
    lanes = head_dim // width  # that share a row
    column = tidx % lanes
    rO = cute.make_rmem_tensor((width,), gO.element_type)
    rdO = cute.make_rmem_tensor((width,), gO.element_type)
    dot = Float32(0.0)
    for step in cutlass.range_constexpr(rows * lanes // config.THREADS):
        row = (tidx + step * config.THREADS) // lanes
        cute.autovec_copy(cute.local_tile(gO[row, None], (width,), (column,)), rO)
        cute.autovec_copy(cute.local_tile(gdO[row, None], (width,), (column,)), rdO)
        products = rO.load().to(Float32) * rdO.load().to(Float32)
        part = products.reduce(cute.ReductionOp.ADD, Float32(0.0), 0)
        total = cute.arch.warp_reduction_sum(part, threads_in_group=lanes)
        if column == step:
            dot = total
    row = (tidx + column * config.THREADS) // lanes
    gD[row] = dot - gdLSE[row]


@cute.jit
def fill_zeros(gX: cute.Tensor, tidx: Int32):
    """Write zeros to a tile. Runs: all threads; neighbours take neighbouring 16 bytes.

    Args: gX (rows, d) Float32, global, 16-byte aligned rows.
    """
    rows, head_dim = gX.shape
    width = config.COPY_BYTES * 8 // gX.element_type.width  # elements of one store
    chunks = head_dim // width  # a row's stores
    zeros = cute.make_rmem_tensor((width,), gX.element_type)
    zeros.fill(0.0)
    for step in cutlass.range_constexpr(rows * chunks // config.THREADS):
        chunk = tidx + step * config.THREADS
        cute.autovec_copy(
            zeros, cute.local_tile(gX[chunk // chunks, None], (width,), (chunk % chunks,))
        )
