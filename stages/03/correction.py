# SPDX-License-Identifier: Apache-2.0
"""Rescaling O in tensor memory."""

import cutlass
import cutlass.cute as cute
from cutlass import Float32
from cutlass.cute.nvgpu import tcgen05

from ..common.tcgen05 import tmem_copy
from . import config


@cute.jit
def rescale(tOtO: cute.Tensor, acc_scale: Float32, tidx: cutlass.Int32):
    """Multiply this thread's row of O by `acc_scale`; complete on return.

    Runs: 128 threads, converged; thread = lane. Args: tOtO ((TILE_M, d), 1, 1) float32 in TMEM.
    The caller has waited for the last PV. Cost: d loaded, d stored, a row.
    """
    load = tmem_copy(tcgen05.Ld32x32bOp(tcgen05.Repetition(config.CHUNK)), tOtO)
    store = tmem_copy(tcgen05.St32x32bOp(tcgen05.Repetition(config.CHUNK)), tOtO)
    tOtO_t2r = load.get_slice(tidx).partition_S(tOtO)  # (T2R, d / CHUNK, 1, 1)
    tOtO_r2t = store.get_slice(tidx).partition_D(tOtO)  # (R2T, d / CHUNK, 1, 1)
    rO = cute.make_rmem_tensor(cute.make_layout(((config.CHUNK, 1),)), Float32)  # (T2R)
    for part in cutlass.range_constexpr(cute.size(tOtO_t2r, mode=[1])):
        cute.copy(load, tOtO_t2r[None, part, 0, 0], rO)
        cute.arch.fence_view_async_tmem_load()
        rO.store(rO.load() * acc_scale)
        cute.copy(store, rO, tOtO_r2t[None, part, 0, 0])
    cute.arch.fence_view_async_tmem_store()
