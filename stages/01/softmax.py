# SPDX-License-Identifier: Apache-2.0
"""The online softmax of one query row; the text every later stage keeps."""

import cutlass
import cutlass.cute as cute
from cutlass import Float32

from ..common import arith


@cute.jit
def online_softmax_step(rS: cute.Tensor, row_max: Float32, row_sum: Float32, scale_log2: Float32):
    """Turn one key tile's scores into probabilities and move the row's statistics along.

    Runs: every thread that owns a row, on its own registers; nothing is exchanged.
    Args: rS (tile_n,) Float32, unscaled scores of this row, any even length; row_max (unscaled)
    and row_sum before this tile, -inf and 0 at the first; scale_log2 = softmax_scale * log2(e).
    Returns: (row_max, row_sum, acc_scale) after this tile; rS now holds the unnormalised
    P = exp2((S - row_max) * scale_log2); acc_scale is what earlier P, sum and O must be
    multiplied by. Numerics: float32; a NaN score makes row_max, and so the row, NaN.
    Cost: per score 1 max, 1 FMA, 1 exp2, 1 add. See paper section 3.1, Milakov 2018.
    """
    new_max = arith.max_of(rS, row_max)
    acc_scale = arith.exp2((row_max - new_max) * scale_log2)
    minus_max = -new_max * scale_log2
    for i in cutlass.range_constexpr(0, cute.size(rS), 2):
        x = arith.fma2((rS[i], rS[i + 1]), (scale_log2, scale_log2), (minus_max, minus_max))
        rS[i] = arith.exp2(x[0])
        rS[i + 1] = arith.exp2(x[1])
    return new_max, arith.sum_of(rS, row_sum * acc_scale), acc_scale
