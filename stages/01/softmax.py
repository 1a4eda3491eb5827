# SPDX-License-Identifier: Apache-2.0
"""The online softmax of one query row; the text every later stage keeps."""

import cutlass
import cutlass.cute as cute
from cutlass import Float32

from ..common import arith


@cute.jit
def update_max(rS: cute.Tensor, row_max: Float32, scale_log2: Float32):
    """The row's maximum including one more key tile, and what that makes of everything before.

    Runs: every thread that owns a row, on its own registers; nothing is exchanged.
    Args: rS (tile_n,) Float32, unscaled scores of this row, any even length; row_max, unscaled,
    before this tile, -inf at the first; scale_log2 = softmax_scale * log2(e).
    Returns: (row_max, acc_scale); earlier P, sum and O must be multiplied by acc_scale.
    Numerics: float32; a NaN score makes row_max, and so the row, NaN. Cost: per score 1 max.
    """
    new_max = arith.max_of(rS, row_max)
    return new_max, arith.exp2((row_max - new_max) * scale_log2)


@cute.jit
def exponentials(
    rS: cute.Tensor, row_max: Float32, row_sum: Float32, acc_scale: Float32, scale_log2: Float32
):
    """Turn scores into probabilities in place and add them up.

    Runs: as update_max. Args: rS (tile_n,) unscaled scores; row_max and acc_scale from
    update_max; row_sum of the tiles before, 0 at the first. Writes: rS, the unnormalised
    P = exp2((S - row_max) * scale_log2). Returns: row_sum with this tile.
    Cost: per score 1 FMA, 1 exp2, 1 add. See paper section 3.1, Milakov 2018.
    """
    minus_max = -row_max * scale_log2
    for i in cutlass.range_constexpr(0, cute.size(rS), 2):
        x = arith.fma2((rS[i], rS[i + 1]), (scale_log2, scale_log2), (minus_max, minus_max))
        rS[i] = arith.exp2(x[0])
        rS[i + 1] = arith.exp2(x[1])
    return arith.sum_of(rS, row_sum * acc_scale)
