# SPDX-License-Identifier: Apache-2.0
"""Copying a tile from global to shared memory."""

import cutlass
import cutlass.cute as cute
from cutlass import Float32

from . import config


@cute.jit
def load_tile(gX: cute.Tensor, sX: cute.Tensor, tidx: cutlass.Int32, threads: cutlass.Constexpr):
    """Copy one tile to shared memory, widened to float32; readers must pass a barrier first.

    Runs: all `threads` threads of the CTA; neighbouring threads take neighbouring 16 bytes.
    Args: gX (rows, d) bf16 or fp16, global, unit stride along d, 16-byte aligned rows;
    sX (rows, d) Float32, shared. Cost: rows * d * 2 bytes read, twice as many written.
    """
    rows, head_dim = gX.shape
    width = config.COPY_BYTES * 8 // gX.element_type.width  # elements of one global load
    chunks = head_dim // width  # a row's loads
    narrow = cute.make_rmem_tensor((width,), gX.element_type)
    wide = cute.make_rmem_tensor((width,), Float32)
    for step in cutlass.range_constexpr(rows * chunks // threads):
        chunk = tidx + step * threads
        row, column = chunk // chunks, chunk % chunks
        cute.autovec_copy(cute.local_tile(gX[row, None], (width,), (column,)), narrow)
        wide.store(narrow.load().to(Float32))
        cute.autovec_copy(wide, cute.local_tile(sX[row, None], (width,), (column,)))
