# SPDX-License-Identifier: Apache-2.0
"""Tensor memory, MMA and TMA helpers that are finished being taught. Runs: trace time, device."""

import cutlass.cute as cute
from cutlass import Float32, Int32
from cutlass._mlir.dialects import llvm, nvvm
from cutlass.cute.nvgpu import OperandMajorMode, cpasync, tcgen05
from cutlass.cutlass_dsl import dsl_user_op

ALIGN_BYTES = 1024  # of an operand tile in shared memory: a whole 128-byte swizzle pattern
MAJORS = {"K": OperandMajorMode.K, "MN": OperandMajorMode.MN}


@dsl_user_op
def fence_before(*, loc=None, ip=None):
    """tcgen05.fence::before_thread_sync: earlier TMEM accesses precede the signal that follows."""
    nvvm.tcgen05_fence(nvvm.Tcgen05FenceKind.BEFORE_THREAD_SYNC, loc=loc, ip=ip)


@dsl_user_op
def fence_after(*, loc=None, ip=None):
    """tcgen05.fence::after_thread_sync: later TMEM accesses follow the wait that precedes."""
    nvvm.tcgen05_fence(nvvm.Tcgen05FenceKind.AFTER_THREAD_SYNC, loc=loc, ip=ip)


@dsl_user_op
def copy_to_peer(source, target, barrier, size: int, rank, *, loc=None, ip=None):
    """cp.async.bulk of `size` bytes to shared memory of the CTA `rank` of the cluster.

    source, target, barrier: shared pointers of this CTA; the copy goes to target's place in the
    other one, its bytes count on the other's barrier. Runs: one thread. The DSL would leave the
    barrier in this CTA, and takes no pointer to another for it: its address is given as a number.
    """
    at = {"loc": loc, "ip": ip}
    its_target, its_barrier = (
        cute.arch.map_dsmem_ptr(pointer, rank, **at).to_llvm_ptr(**at)
        for pointer in (target, barrier)
    )
    number = llvm.ptrtoint(Int32.mlir_type, its_barrier, **at)
    its_barrier = llvm.inttoptr(llvm.PointerType.get(cute.AddressSpace.smem), number, **at)
    given = its_target, source.to_llvm_ptr(**at), its_barrier, Int32(size).ir_value(**at)
    nvvm.cp_async_bulk_shared_cluster_shared_cta(*given, **at)


def make_mma(dtype, shape, *, a_major="K", b_major="K", a_in_tmem=False, ctas=1):
    """tcgen05.mma kind::f16 with float32 accumulators, shape (M, N) of the CTA or pair."""
    source = tcgen05.OperandSource.TMEM if a_in_tmem else tcgen05.OperandSource.SMEM
    op = tcgen05.MmaF16BF16Op(
        dtype,
        Float32,
        (*shape, 16),
        tcgen05.CtaGroup(ctas),
        source,
        MAJORS[a_major],
        MAJORS[b_major],
    )
    return cute.make_tiled_mma(op)


def operand_layout(shape, major: str, dtype, stages: int):
    """Shared-memory layout of `stages` operand tiles, 128-byte swizzled.

    shape: MMA-partitioned tile ((MN, 16), REST_MN, REST_K). Result: (*shape, stages).
    """
    kind = getattr(tcgen05.SmemLayoutAtomKind, f"{major}_SW128")
    atom = tcgen05.make_smem_layout_atom(kind, dtype)
    order = (1, 2, 3) if major == "K" else (2, 1, 3)
    return tcgen05.tile_to_mma_shape(atom, cute.append(shape, stages), order=order)


def tma_load(mma, operand: str, mX, layout, tile, ctas=1):
    """TMA atom and tensor that load one stage of `operand` ("A", "B"); tile: (M, N, K).

    In a pair each CTA loads its part, and the bytes count on the barrier of the leader.
    """
    make = getattr(cute.nvgpu, f"make_tiled_tma_atom_{operand}")
    op = cpasync.CopyBulkTensorTileG2SOp(tcgen05.CtaGroup(ctas))
    stage = cute.select(layout, mode=[0, 1, 2])
    return make(op, mX, stage, tile, mma, (ctas, 1, 1, 1))


def tma_views(load, sX, tXgX):
    """(TMA, STAGES) of shared memory and (TMA, ...) of global memory for cute.copy."""
    groups = [cute.group_modes(tensor, 0, 3) for tensor in (sX, tXgX)]
    return cpasync.tma_partition(load, 0, cute.make_layout(1), *groups)


def tmem_copy(op, tX, dtype=Float32):
    """Tiled copy between registers and the tensor-memory tensor `tX` by a tcgen05.ld or st."""
    return tcgen05.make_tmem_copy(cute.make_copy_atom(op, dtype), tX)


def permuted(mX: cute.Tensor, mode):
    """The same tensor with its modes in the order `mode`."""
    return cute.make_tensor(mX.iterator, cute.select(mX.layout, mode=mode))


def stage_bytes(sX):
    """Bytes of one stage of a shared operand ((MN, 16), REST_MN, REST_K, STAGES)."""
    return cute.size(sX.shape[:3]) * sX.element_type.width // 8
