# SPDX-License-Identifier: Apache-2.0
"""What the test kernels share: fences, operand layouts, TMEM copies, compiling and stand-ins."""

import tempfile
from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import BFloat16, Float16, Float32, Int64
from cutlass._mlir.dialects import nvvm
from cutlass.cute.nvgpu import OperandMajorMode, cpasync, tcgen05
from cutlass.cute.runtime import make_fake_stream, make_fake_tensor
from cutlass.cutlass_dsl import dsl_user_op

DTYPES = {"bf16": BFloat16, "fp16": Float16}
MAJORS = {"K": OperandMajorMode.K, "MN": OperandMajorMode.MN}
SWIZZLES = {0: "INTER", 32: "SW32", 64: "SW64", 128: "SW128"}  # bytes of a row -> DSL's name
ALIGN_BYTES = 1024  # of an operand tile in shared memory: a whole 128-byte swizzle pattern


class Bug(NamedTuple):
    """A planted bug. seen_as: where it must show, in at least one place.

    values: wrong numbers (memory was poisoned before the launch); hang: a wait that never ends;
    order: an access that no barrier orders; tmem: columns used after they were freed, or never
    freed; form: an operand that is refused; lint: the text of the PTX alone.
    """

    seen_as: str  # words, separated by blanks
    fault: str


@dsl_user_op
def fence_before(*, loc=None, ip=None):
    """tcgen05.fence::before_thread_sync: earlier TMEM accesses precede the signal that follows."""
    nvvm.tcgen05_fence(nvvm.Tcgen05FenceKind.BEFORE_THREAD_SYNC, loc=loc, ip=ip)


@dsl_user_op
def fence_after(*, loc=None, ip=None):
    """tcgen05.fence::after_thread_sync: later TMEM accesses follow the wait that precedes."""
    nvvm.tcgen05_fence(nvvm.Tcgen05FenceKind.AFTER_THREAD_SYNC, loc=loc, ip=ip)


def make_mma(dtype, shape, a_major="K", b_major="K", *, a_in_tmem=False, ctas=1):
    """tcgen05.mma kind::f16 with float32 accumulators, shape (M, N) of the pair. Runs: trace."""
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


def operand_layout(shape, major: str, swizzle: int, dtype, stages: int):
    """Shared-memory layout of `stages` operand tiles. Runs: trace.

    shape: MMA-partitioned tile ((MN, 16), REST_MN, REST_K); swizzle: bytes, 0 for none. The
    result is (*shape, stages), composed with the swizzle. Along the contiguous axis a tile must
    span whole swizzle rows; along the other it is tiled first where the axis allows it.
    """
    kind = getattr(tcgen05.SmemLayoutAtomKind, f"{major}_{SWIZZLES[swizzle]}")
    atom = tcgen05.make_smem_layout_atom(kind, dtype)
    order = (1, 2, 3) if major == "K" else (2, 1, 3)
    return tcgen05.tile_to_mma_shape(atom, cute.append(shape, stages), order=order)


def tma_load(mma, operand: str, mX, layout, tile, ctas=1):
    """TMA atom and tensor that load one stage of `operand` ("A", "B") of the MMA. Runs: trace.

    layout: from `operand_layout`; tile: (M, N, K) of the whole tile of a CTA or pair.
    """
    make = getattr(cute.nvgpu, f"make_tiled_tma_atom_{operand}")
    op = cpasync.CopyBulkTensorTileG2SOp(tcgen05.CtaGroup(ctas))
    cluster = (ctas, 1, 1, 1)  # (V, M, N, K)
    atom, tensor = make(op, mX, cute.select(layout, mode=[0, 1, 2]), tile, mma, cluster)
    return atom, tensor


def tma_views(load, sX, tXgX):
    """(TMA, STAGES) of shared memory and (TMA, ...) of global memory for cute.copy. Runs: trace."""
    groups = [cute.group_modes(tensor, 0, 3) for tensor in (sX, tXgX)]
    return cpasync.tma_partition(load, 0, cute.make_layout(1), *groups)


def stage_bytes(sX):
    """Bytes of one stage of a shared operand. Runs: trace."""
    return cute.size(sX.shape[:3]) * sX.element_type.width // 8


@cute.jit
def all_threads(pair: cutlass.Constexpr = False):
    """All threads of the CTA or pair wait for all, with TMEM accesses ordered across it."""
    fence_before()
    if cutlass.const_expr(pair):
        cute.arch.cluster_arrive()
        cute.arch.cluster_wait()
    else:
        cute.arch.barrier()
    fence_after()


def load_op(shape: str, columns: int):
    """The tcgen05.ld of `shape` whose repeats divide `columns` and fill at most 64 registers."""
    ops = {
        "32x32b": (tcgen05.Ld32x32bOp, 1, 64),
        "16x64b": (tcgen05.Ld16x64bOp, 2, 64),
        "16x128b": (tcgen05.Ld16x128bOp, 4, 32),
        "16x256b": (tcgen05.Ld16x256bOp, 8, 16),
    }  # shape -> operation, columns of one repeat, most repeats
    op, width, most = ops[shape]
    repeats = most
    while columns % (repeats * width):
        repeats //= 2
    return op(tcgen05.Repetition(repeats))


def store_op(shape: str, columns: int):
    """The tcgen05.st of `shape` whose repeats cover `columns` (at most 64)."""
    ops = {
        "32x32b": (tcgen05.St32x32bOp, 1),
        "16x64b": (tcgen05.St16x64bOp, 2),
        "16x128b": (tcgen05.St16x128bOp, 4),
        "16x256b": (tcgen05.St16x256bOp, 8),
    }  # shape -> operation, columns of one repeat
    op, width = ops[shape]
    return op(tcgen05.Repetition(columns // width))


@cute.jit
def with_reserved_bit(fragment: cute.Tensor):
    """The same operand with bit 53 of its shared-memory descriptors set, which must be zero."""
    number = tcgen05.smem_descriptor_to_int(fragment.iterator) | Int64(1 << 53)
    return cute.make_tensor(tcgen05.int_to_smem_descriptor(number), fragment.layout)


@cute.jit
def store_accumulator(tXtX: cute.Tensor, tXgX: cute.Tensor, tidx, op: cutlass.Constexpr):
    """Copy a float32 accumulator from TMEM to global memory; the loads are complete on return.

    Runs: 128 threads of 4 aligned warps, converged; each warp owns 32 lanes. Args: tXtX and tXgX
    (MMA, 1, 1) of one CTA, TMEM and global. Waits for its own loads only: the caller has waited
    for the MMA.
    """
    copy = tcgen05.make_tmem_copy(cute.make_copy_atom(op, Float32), tXtX)
    mine = copy.get_slice(tidx)
    tXtX_t2r = mine.partition_S(tXtX)  # (T2R, REST, 1, 1)
    tXgX_t2r = mine.partition_D(tXgX)  # (T2R, REST, 1, 1)
    tXtX_t2r = cute.group_modes(tXtX_t2r, 1, cute.rank(tXtX_t2r))  # (T2R, REST)
    tXgX_t2r = cute.group_modes(tXgX_t2r, 1, cute.rank(tXgX_t2r))  # (T2R, REST)
    rX = cute.make_rmem_tensor(tXgX_t2r[None, 0].shape, Float32)  # (T2R)
    for part in cutlass.range_constexpr(cute.size(tXgX_t2r, mode=[1])):
        cute.copy(copy, tXtX_t2r[None, part], rX)
        cute.arch.fence_view_async_tmem_load()
        cute.autovec_copy(rX, tXgX_t2r[None, part])


def matrix(dtype, major: str):
    """Stand-in for a matrix (rows, columns) whose contiguous axis is the columns if major is K."""
    rows, columns = cute.sym_int(divisibility=8), cute.sym_int(divisibility=8)
    step = cute.sym_int64(divisibility=8)
    stride = (step, 1) if major == "K" else (1, step)
    return make_fake_tensor(dtype, (rows, columns), stride, assumed_align=16)


def compile_kernel(host, *arguments, arch="sm_100a"):
    """Compile `host(*arguments, stream)`: callable on CUDA tensors, with `__ptx__`, `__cubin__`."""
    stream = make_fake_stream(use_tvm_ffi_env_stream=True)
    with tempfile.TemporaryDirectory(prefix="flash-ladder-") as folder:
        options = f"--gpu-arch {arch} --keep-ptx --keep-cubin --enable-tvm-ffi --dump-dir {folder}"
        return cute.compile(host, *arguments, stream, options=options)
