# SPDX-License-Identifier: Apache-2.0
"""D = A B^T with A in tensor memory: global memory -> registers -> TMEM, B by TMA.

Four warps copy tiles of A into a ring in TMEM and finally D out of it, one warp loads tiles of B,
one warp issues the MMAs.
"""

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64
from cutlass.cute.nvgpu import tcgen05

from .parts import (
    ALIGN_BYTES,
    DTYPES,
    all_threads,
    compile_kernel,
    fence_after,
    fence_before,
    load_op,
    make_mma,
    matrix,
    operand_layout,
    stage_bytes,
    store_accumulator,
    store_op,
    tma_load,
    tma_views,
)

STAGES = 2  # tiles of A (TMEM) and of B (shared memory)
TILE_K = 64  # elements of K in a tile: four MMAs
A_COLUMNS = TILE_K // 2  # TMEM columns of a tile of A: two 16-bit elements in each
COPY_THREADS = 128  # of the warps that copy A and D
MMA_WARP, LOAD_WARP = 4, 5
THREADS = 192


@dataclass(frozen=True)
class TsGemm:
    """Compile-time parameters. store, load: shapes of tcgen05.st (A) and tcgen05.ld (D).

    With m = 64 both must be 16-lane shapes: A and D occupy 16 of every 32 lanes.
    """

    dtype: str = "bf16"
    m: int = 128
    n: int = 128
    b_major: str = "K"
    swizzle_b: int = 128
    store: str = "32x32b"
    load: str = "32x32b"

    @property
    def tmem_columns(self):
        """Columns allocated: D, then the ring of A."""
        return max(32, 1 << (self.n + STAGES * A_COLUMNS - 1).bit_length())


@cute.struct
class Storage:
    a_full: cute.struct.MemRange[Int64, STAGES]
    b_full: cute.struct.MemRange[Int64, STAGES]
    empty: cute.struct.MemRange[Int64, STAGES]
    d_full: Int64
    tmem_address: Int32


@cute.jit
def ts_gemm(mA: cute.Tensor, mB: cute.Tensor, mD: cute.Tensor, config: cutlass.Constexpr, stream):
    """Launch D = A B^T. Runs: host.

    Args: mA (m, k), contiguous along k, and mB (n, k) in config.dtype; mD (m, n) float32,
    contiguous along n. m, n multiples of the tile, k of TILE_K.
    """
    dtype = DTYPES[config.dtype]
    mma = make_mma(dtype, (config.m, config.n), b_major=config.b_major, a_in_tmem=True)
    tile = (config.m, config.n, TILE_K)
    shape_b = mma.partition_shape_B((config.n, TILE_K))  # ((n, 16), 1, TILE_K / 16)
    layout_b = operand_layout(shape_b, config.b_major, config.swizzle_b, dtype, STAGES)
    load_b, mB_tma = tma_load(mma, "B", mB, layout_b, tile)
    ts_gemm_kernel(mma, mA, load_b, mB_tma, mD, layout_b, config).launch(
        grid=(mD.shape[0] // config.m, mD.shape[1] // config.n, 1),
        block=(THREADS, 1, 1),
        stream=stream,
    )


@cute.kernel
def ts_gemm_kernel(
    mma: cute.TiledMma,
    mA: cute.Tensor,
    load_b: cute.CopyAtom,
    mB: cute.Tensor,
    mD: cute.Tensor,
    layout_b: cute.ComposedLayout,
    config: cutlass.Constexpr,
):
    """One tile of D. Runs: THREADS threads."""
    tidx, _, _ = cute.arch.thread_idx()
    warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
    block_m, block_n, _ = cute.arch.block_idx()
    tile = (config.m, config.n, TILE_K)
    dtype = DTYPES[config.dtype]

    smem = cutlass.memory.SmemAllocator()
    storage = smem.allocate(Storage)
    sB = smem.allocate_tensor(dtype, layout_b.outer, ALIGN_BYTES, layout_b.inner)  # (B, STAGES)
    if warp == LOAD_WARP:
        initialise(storage)
    if warp == MMA_WARP:
        cute.arch.alloc_tmem(config.tmem_columns, storage.tmem_address)
        cute.arch.relinquish_tmem_alloc_permit()
    all_threads()  # barriers are initialised, the TMEM address is written
    tmem = cute.arch.retrieve_tmem_ptr(Float32, 16, storage.tmem_address)
    shape_d = mma.partition_shape_C(tile[:2])  # ((m, n), 1, 1)
    shape_a = mma.partition_shape_A((config.m, TILE_K))  # ((m, 16), 1, TILE_K / 16)
    tDtD = cute.make_tensor(tmem, mma.make_fragment_C(shape_d).layout)  # as shape_d
    layout_a = mma.make_fragment_A(cute.append(shape_a, STAGES)).layout
    columns_a = cute.recast_ptr(tmem + config.n, dtype=dtype)  # behind D
    tDtA = cute.make_tensor(columns_a, layout_a)  # (*shape_a, STAGES)

    at = (block_m, block_n, None)
    whole = mma.get_slice(0)
    gA = cute.local_tile(mA, tile, at, proj=(1, None, 1))  # (m, TILE_K, K_TILES)
    gB = cute.local_tile(mB, tile, at, proj=(None, 1, 1))  # (n, TILE_K, K_TILES)
    gD = cute.local_tile(mD, tile, at, proj=(1, 1, None))  # (m, n)
    if warp == LOAD_WARP:
        tDgB = whole.partition_B(gB)  # ((n, 16), 1, TILE_K / 16, K_TILES)
        load_tiles(load_b, sB, tDgB, storage)
    elif warp == MMA_WARP:
        multiply(mma, tDtD, tDtA, sB, cute.size(gA, mode=[2]), storage)
    else:
        tDgA = whole.partition_A(gA)  # ((m, 16), 1, TILE_K / 16, K_TILES)
        copy_in(tDgA, tDtA, storage, tidx, store_op(config.store, A_COLUMNS))
        cute.arch.mbarrier_wait(storage.d_full.ptr, 0)  # the MMA warp's last commit arrives
        fence_after()
        tDgD = whole.partition_C(gD)  # as shape_d
        store_accumulator(tDtD, tDgD, tidx, load_op(config.load, config.n))
    all_threads()  # D has been read
    if warp == MMA_WARP:
        cute.arch.dealloc_tmem(tmem, config.tmem_columns)


@cute.jit
def initialise(storage):
    """Initialise the barriers. Runs: one warp; the others must pass a barrier before use."""
    with cute.arch.elect_one():
        for stage in cutlass.range_constexpr(STAGES):
            # arrivals: the copying threads; the load warp, and the bytes; a commit
            cute.arch.mbarrier_init(storage.a_full.data_ptr() + stage, COPY_THREADS)
            cute.arch.mbarrier_init(storage.b_full.data_ptr() + stage, 1)
            cute.arch.mbarrier_init(storage.empty.data_ptr() + stage, 1)
        cute.arch.mbarrier_init(storage.d_full.ptr, 1)  # arrivals: a commit
    cute.arch.mbarrier_init_fence()


@cute.jit
def load_tiles(load_b, sB, tDgB, storage):
    """Load every tile of B. Runs: LOAD_WARP, converged."""
    tBsB, tBgB = tma_views(load_b, sB, tDgB)  # (TMA, STAGES), (TMA, K_TILES)
    for k_tile in cutlass.range(cute.size(tBgB, mode=[1]), unroll=1):
        stage, phase = k_tile % STAGES, k_tile // STAGES % 2
        full, empty = storage.b_full.data_ptr() + stage, storage.empty.data_ptr() + stage
        cute.arch.mbarrier_wait(empty, phase ^ 1)  # the MMA warp's commit arrives
        with cute.arch.elect_one():
            cute.arch.mbarrier_arrive_and_expect_tx(full, stage_bytes(sB))  # the MMA warp waits
        cute.copy(load_b, tBgB[None, k_tile], tBsB[None, stage], tma_bar_ptr=full)


@cute.jit
def multiply(mma, tDtD, tDtA, sB, k_tiles, storage):
    """Issue D = A B^T over all tiles. Runs: MMA_WARP, converged."""
    tDrB = mma.make_fragment_B(sB)  # (1, 1, TILE_K / 16, STAGES) descriptors
    mma.set(tcgen05.Field.ACCUMULATE, False)
    for k_tile in cutlass.range(k_tiles, unroll=1):
        stage, phase = k_tile % STAGES, k_tile // STAGES % 2
        cute.arch.mbarrier_wait(storage.b_full.data_ptr() + stage, phase)  # load warp, TMA arrive
        cute.arch.mbarrier_wait(storage.a_full.data_ptr() + stage, phase)  # copying threads arrive
        fence_after()
        for k_block in cutlass.range_constexpr(TILE_K // 16):
            at = (None, None, k_block, stage)
            cute.gemm(mma, tDtD, tDtA[at], tDrB[at], tDtD)
            mma.set(tcgen05.Field.ACCUMULATE, True)
        with cute.arch.elect_one():
            tcgen05.commit(storage.empty.data_ptr() + stage)  # load warp and copying warps wait
    with cute.arch.elect_one():
        tcgen05.commit(storage.d_full.ptr)  # the copying warps wait


@cute.jit
def copy_in(tDgA, tDtA, storage, tidx, op: cutlass.Constexpr):
    """Copy every tile of A to the ring in TMEM. Runs: COPY_THREADS threads.

    Args: tDgA ((m, 16), 1, TILE_K / 16, K_TILES), global; tDtA the same with STAGES, TMEM.
    """
    atom = cute.make_copy_atom(op, tDtA.element_type)
    copy = tcgen05.make_tmem_copy(atom, tDtA[None, None, None, 0])
    mine = copy.get_slice(tidx)
    tDgA_r2t = mine.partition_S(tDgA)  # (R2T, 1, 1, 1, K_TILES)
    tDtA_r2t = mine.partition_D(tDtA)  # (R2T, 1, 1, 1, STAGES)
    rA = cute.make_rmem_tensor(tDgA_r2t[None, None, None, None, 0].shape, tDtA.element_type)
    for k_tile in cutlass.range(cute.size(tDgA, mode=[3]), unroll=1):
        stage, phase = k_tile % STAGES, k_tile // STAGES % 2
        cute.autovec_copy(tDgA_r2t[None, None, None, None, k_tile], rA)
        cute.arch.mbarrier_wait(storage.empty.data_ptr() + stage, phase ^ 1)  # a commit arrives
        fence_after()
        cute.copy(copy, rA, tDtA_r2t[None, None, None, None, stage])
        cute.arch.fence_view_async_tmem_store()
        fence_before()
        cute.arch.mbarrier_arrive(storage.a_full.data_ptr() + stage)  # the MMA warp waits


def build(arch="sm_100a", **parameters):
    """Compile for `arch`; parameters are those of TsGemm."""
    config = TsGemm(**parameters)
    dtype = DTYPES[config.dtype]
    tensors = matrix(dtype, "K"), matrix(dtype, config.b_major), matrix(Float32, "K")
    return compile_kernel(ts_gemm, *tensors, config, arch=arch)
