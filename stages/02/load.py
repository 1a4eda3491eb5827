# SPDX-License-Identifier: Apache-2.0
"""Copying a tile from global to shared memory by TMA."""

import cutlass.cute as cute


@cute.jit
def load_tile(load: cute.CopyAtom, tXgX: cute.Tensor, tXsX: cute.Tensor, full):
    """Start the copy of one tile; its bytes count for the barrier `full`.

    Runs: one warp, converged; one lane issues. Args: load, the TMA atom; tXgX (TMA) global, tXsX
    (TMA) shared; full, an mbarrier whose bytes are announced. Whoever reads the tile waits for it.
    """
    cute.copy(load, tXgX, tXsX, tma_bar_ptr=full)
