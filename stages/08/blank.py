# SPDX-License-Identifier: Apache-2.0
"""Zeros in the rows of results that nothing is computed for.

They are the rows of a CTA that visits no tile, and those that no sequence uses.
"""

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64

from .lengths import numbers

COPY_BYTES = 16  # one store of a thread


@cute.jit
def blind_rows(first: Int32, rows: Int32, begin: Int32, length: Int32, tiles):
    """(first, end) of a CTA's rows in a tensor if it visits no tile; none if it does.

    Runs: any thread. Args: first, of its rows in the sequence; rows, how many; begin and length of
    the sequence; tiles, those to visit, (first, end).
    """
    end = cutlass.min(first + rows, length)
    if tiles[0] < tiles[1]:
        end = first
    return begin + first, begin + end


@cute.jit
def unused_rows(cu_seqlens: Int64, begin: Int32, length: Int32, seqlen: Int32, batch, entries):
    """(first, end) of the rows between those that a batch entry uses and those of the next.

    Runs: any thread. Args: cu_seqlens, as in `rows_of_side`; begin and length of the sequence;
    seqlen, rows of the tensor; batch, which of how many `entries`. Behind the last sequence come
    the rows before the first: row r of `seqlen` or more is row r - seqlen.
    """
    end = seqlen
    if cu_seqlens != 0:
        following, end = batch + 1, Int32(0)
        if following == entries:
            following, end = Int32(0), seqlen
        end += cutlass.min(cutlass.max(numbers(cu_seqlens, following)[0], 0), seqlen)
    return begin + length, end


@cute.jit
def fill_zeros(mX: cute.Tensor, where, rows, part, threads: cutlass.Constexpr):
    """Write zeros to a part of some rows of a result.

    Runs: all threads of a CTA; neighbours take neighbouring 16 bytes. Args: mX (b, s, h, d) bf16 or
    fp16, global, 16-byte aligned rows; where, (block, head, batch); rows, (first, end) as of
    `unused_rows`; part, (which, of how many) CTAs that share them.
    """
    tidx, _, _ = cute.arch.thread_idx()
    _, head, batch = where
    _, seqlen, _, head_dim = mX.shape
    entry = cutlass.min(batch, mX.shape[0] - 1)  # a packed tensor has one
    width = COPY_BYTES * 8 // mX.element_type.width  # elements of one store
    chunks = head_dim // width  # a row's stores
    at_once = threads // chunks  # rows of a CTA
    zeros = cute.make_rmem_tensor((width,), mX.element_type)
    zeros.fill(0.0)
    first = rows[0] + part[0] * at_once + tidx // chunks
    for row in cutlass.range(first, rows[1], part[1] * at_once, unroll=1):
        gX = mX[entry, row % seqlen, head, None]  # (d)
        cute.autovec_copy(zeros, cute.local_tile(gX, (width,), (tidx % chunks,)))


@cute.jit
def fill_lse(mLSE: cute.Tensor, where, rows, part, threads: cutlass.Constexpr):
    """Write -inf to the same rows of mLSE (b, h, s) Float32. Runs, args: as fill_zeros."""
    tidx, _, _ = cute.arch.thread_idx()
    _, head, batch = where
    entry = cutlass.min(batch, mLSE.shape[0] - 1)  # a packed tensor has one
    first = rows[0] + part[0] * threads + tidx
    for row in cutlass.range(first, rows[1], part[1] * threads, unroll=1):
        mLSE[entry, head, row % mLSE.shape[2]] = -Float32.inf
