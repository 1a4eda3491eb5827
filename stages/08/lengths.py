# SPDX-License-Identifier: Apache-2.0
"""Where the sequences of a batch lie, and TMA views of them that end where they end."""

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64


@cute.jit
def sequence(lengths, batch: Int32, seqlen_q: Int32, seqlen_k: Int32):
    """(begin_q, len_q, begin_k, len_k): first row of a batch entry in Q and in K, and their rows.

    Runs: whole warps; the same values in every lane. Args: lengths, (cu_seqlens_q, cu_seqlens_k,
    seqused_q, seqused_k, max_seqlen_q, max_seqlen_k) as in `rows_of_side`; seqlen_q, seqlen_k, rows
    of Q and K.
    """
    cu_q, cu_k, used_q, used_k, most_q, most_k = lengths
    begin_q, len_q = rows_of_side(cu_q, used_q, most_q, batch, seqlen_q)
    begin_k, len_k = rows_of_side(cu_k, used_k, most_k, batch, seqlen_k)
    uniform = cute.arch.make_warp_uniform
    return uniform(begin_q), uniform(len_q), uniform(begin_k), uniform(len_k)


@cute.jit
def rows_of_side(cu_seqlens: Int64, seqused: Int64, most: Int32, batch: Int32, seqlen: Int32):
    """(first row, rows) of a batch entry in Q or in K, never outside the tensor.

    Runs: any thread. Args: cu_seqlens, address of (b + 1,) Int32, where the sequences begin and the
    last ends, 0 where each entry has the rows of its own; seqused, address of (b,) Int32, how many
    rows count, 0 for all; most, no sequence has more; seqlen, rows of the tensor.
    """
    begin, length = Int32(0), seqlen
    if cu_seqlens != 0:
        gEnds = numbers(cu_seqlens, batch)  # (2,)
        begin = cutlass.min(cutlass.max(gEnds[0], 0), seqlen)
        end = cutlass.min(cutlass.max(gEnds[1], 0), seqlen)
        length = cutlass.max(cutlass.min(end - begin, most), 0)
    if seqused != 0:
        gUsed = numbers(seqused, batch)  # (2,), of which the second may not exist
        length = cutlass.max(cutlass.min(gUsed[0], length), 0)
    return begin, length


def numbers(address: Int64, first: Int32):
    """Two of the Int32 in global memory at an address, from number `first` on. Runs: trace."""
    start = cute.make_ptr(Int32, address, cute.AddressSpace.gmem, assumed_align=4)
    return cute.make_tensor(start + Int64(first), cute.make_layout(2))


def ragged(mX: cute.Tensor, heads=None):
    """The tensor (b, s, h, d) as (s, d, h, b, 1 + s), for a TMA descriptor. Runs: trace.

    Rows are counted twice: element (x, ..., y) is row x + y - s. With y = the end of a sequence,
    x = s is the row behind its last one, and what is beyond that TMA fills with zeros when it
    loads, and does not write when it stores: one descriptor for sequences of any length. It starts
    s rows before the tensor; what lies there is never addressed. heads, of the result: a multiple
    of h, of which as many in turn are one head of the tensor.
    """
    batch, seqlen, own, head_dim = mX.shape
    of_batch, of_row, of_head, _ = mX.stride
    if heads is not None:
        own, of_head = (heads // own, own), (0, of_head)
    layout = cute.make_layout(
        (seqlen, head_dim, own, batch, seqlen + 1), stride=(of_row, 1, of_head, of_batch, of_row)
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
