# SPDX-License-Identifier: Apache-2.0
"""Normalising a row and writing it."""

import cutlass
import cutlass.cute as cute
from cutlass import Float32

from ..common import arith
from . import config


@cute.jit
def store_row(rO: cute.Tensor, gO_row: cute.Tensor, row_sum: Float32):
    """Write O / row_sum in the output's dtype.

    Runs: every thread, on its own row. Args: rO (d,) Float32, unnormalised; gO_row (d,) bf16 or
    fp16, global, unit stride, 16-byte aligned. Numerics: one rounding, after the division.
    """
    width = config.COPY_BYTES * 8 // gO_row.element_type.width  # elements of one global store
    rO_out = cute.make_rmem_tensor((width,), gO_row.element_type)
    inverse = 1.0 / row_sum
    for block in cutlass.range_constexpr(cute.size(rO) // width):
        part = cute.local_tile(rO, (width,), (block,))
        rO_out.store((part.load() * inverse).to(gO_row.element_type))
        cute.autovec_copy(rO_out, cute.local_tile(gO_row, (width,), (block,)))


@cute.jit
def logsumexp(row_max: Float32, row_sum: Float32, scale_log2: Float32):
    """Natural log of the sum of exp(softmax_scale * S) over a row, from its final statistics."""
    return (row_max * scale_log2 + cute.math.log2(row_sum, fastmath=True)) * arith.LN2
