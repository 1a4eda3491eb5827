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
    """Rows of a tensor that no sequence uses, (first, end) each: behind an entry, outside of all.

    Runs: any thread. Args: cu_seqlens, as in `rows_of_side`; begin and length of the sequence;
    seqlen, rows of the tensor; batch, which of how many `entries`. Outside are the rows behind the
    last sequence, and then those before the first: row r of `seqlen` or more is row r - seqlen.
    """
    end, first_outside, end_outside = seqlen, seqlen, seqlen
    if cu_seqlens != 0:
        end = row_within(cu_seqlens, batch + 1, seqlen)
        first_outside = row_within(cu_seqlens, entries, seqlen)
        end_outside = seqlen + row_within(cu_seqlens, Int32(0), seqlen)
    return (begin + length, end), (first_outside, end_outside)


@cute.jit
def row_within(cu_seqlens: Int64, number: Int32, seqlen: Int32):
    """One number of cu_seqlens, 0 ... seqlen. Runs: any thread."""
    return cutlass.min(cutlass.max(numbers(cu_seqlens, number)[0], 0), seqlen)


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
    row = rows[0] + Int64(part[0]) * at_once + tidx // chunks  # 64 bits: far CTAs are beyond 2**31
    while row < rows[1]:
        at = row
        if row >= seqlen:
            at = row - seqlen
        gX = mX[entry, at, head, None]  # (d)
        cute.autovec_copy(zeros, cute.local_tile(gX, (width,), (tidx % chunks,)))
        row += Int64(part[1]) * at_once


@cute.jit
def fill_lse(mLSE: cute.Tensor, where, rows, part, threads: cutlass.Constexpr):
    """Write -inf to the same rows of mLSE (b, h, s) Float32. Runs, args: as fill_zeros."""
    tidx, _, _ = cute.arch.thread_idx()
    _, head, batch = where
    seqlen = mLSE.shape[2]
    entry = cutlass.min(batch, mLSE.shape[0] - 1)  # a packed tensor has one
    row = rows[0] + Int64(part[0]) * threads + tidx
    while row < rows[1]:
        at = row
        if row >= seqlen:
            at = row - seqlen
        mLSE[entry, head, at] = -Float32.inf
        row += Int64(part[1]) * threads
