# SPDX-License-Identifier: Apache-2.0
"""Where the sequences of a batch lie, and TMA views of them that end where they end."""

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64


@cute.jit
def sequence(lengths: Int64, batch: Int32, seqlen_q: Int32, seqlen_k: Int32):
    """(begin_q, len_q, begin_k, len_k): first row of a batch entry in Q and in K, and their rows.

    Runs: whole warps; the same values in every lane. Args: lengths, address of (b, 4) Int32 in
    global memory that holds them, or 0 where every entry has all rows of its tensors.
    """
    begin_q, len_q, begin_k, len_k = Int32(0), seqlen_q, Int32(0), seqlen_k
    if lengths != 0:
        table = cute.make_ptr(Int32, lengths, cute.AddressSpace.gmem, assumed_align=16)
        row = cute.make_tensor(table + 4 * Int64(batch), cute.make_layout(4))
        begin_q, len_q = row[0], row[1]
        begin_k, len_k = row[2], row[3]
    uniform = cute.arch.make_warp_uniform
    return uniform(begin_q), uniform(len_q), uniform(begin_k), uniform(len_k)


def ragged(mX: cute.Tensor):
    """The tensor (b, s, h, d) as (s, d, h, b, 1 + s), for a TMA descriptor. Runs: trace.

    Rows are counted twice: element (x, ..., y) is row x + y - s. With y = the end of a sequence,
    x = s is the row behind its last one, and what is beyond that TMA fills with zeros when it
    loads, and does not write when it stores: one descriptor for sequences of any length. It starts
    s rows before the tensor; what lies there is never addressed.
    """
    batch, seqlen, heads, head_dim = mX.shape
    of_batch, of_row, of_head, _ = mX.stride
    layout = cute.make_layout(
        (seqlen, head_dim, heads, batch, seqlen + 1), stride=(of_row, 1, of_head, of_batch, of_row)
    )
    return cute.make_tensor(mX.iterator - seqlen * of_row, layout)


def turned(mX: cute.Tensor):
    """The `ragged` view with its first two modes exchanged: (d, s, h, b, 1 + s). Runs: trace."""
    return cute.make_tensor(mX.iterator, cute.select(mX.layout, mode=[1, 0, 2, 3, 4]))


def rows_of(mX: cute.Tensor, begin: Int32, length: Int32, head: Int32, batch: Int32, axis: int = 0):
    """The rows of one sequence and head of a `ragged` TMA tensor: (rows, d). Runs: trace.

    axis: of the rows, 1 for a `turned` view, which gives (d, rows). A packed tensor has one batch
    entry, which holds the rows of all. A copy must have at least one of the rows: of a box that is
    wholly beyond, TMA looks up the address that the descriptor starts at.
    """
    entry = cutlass.min(batch, cute.size(mX, mode=[3]) - 1)
    mX_sequence = mX[None, None, head, entry, begin + length]  # (s, d)
    beyond = cute.size(mX, mode=[axis]) - length
    return cute.domain_offset((0, beyond) if axis else (beyond, 0), mX_sequence)
