# SPDX-License-Identifier: Apache-2.0
"""D = A B^T by tcgen05.mma with both operands in shared memory, in one CTA or a pair.

A CTA (or pair) computes one tile of D. One warp loads tiles of A and B into a ring by TMA, one
warp issues the MMAs, then all four warps copy the accumulator from TMEM to global memory.
"""

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64
from cutlass.cute.nvgpu import tcgen05

from .parts import (
    ALIGN_BYTES,
    DTYPES,
    Bug,
    all_threads,
    compile_kernel,
    fence_after,
    load_op,
    make_mma,
    matrix,
    operand_layout,
    stage_bytes,
    store_accumulator,
    tma_load,
    tma_views,
    with_reserved_bit,
)

STAGES = 2  # tiles of A and B in the ring
TILE_K = 64  # elements of K in a tile: four MMAs
LOAD_WARP, MMA_WARP, ALLOC_WARP = 0, 1, 2
BUGS = {
    "missing_wait": Bug("values order", "the epilogue reads D before the MMAs wrote it"),
    "wrong_phase": Bug("values hang order", "the MMA warp runs one pass ahead of the loads"),
    "wrong_arrive_count": Bug("hang", "d_full expects two arrivals and gets one"),
    "early_dealloc": Bug("tmem order", "TMEM is freed while MMAs write it and before it is read"),
    "leak": Bug("tmem lint", "TMEM is never freed: the next CTA on the SM hangs in alloc"),
    "reserved_descriptor_bit": Bug("form", "bit 53 of the descriptors of A is set"),
    "wait_on_wrong_barrier": Bug("values order", "the epilogue waits for the first tile, not D"),
    "missing_expect_tx": Bug("values hang order", "a tile counts as loaded when none of it is"),
}


@dataclass(frozen=True)
class Gemm:
    """Compile-time parameters; m and n are those of the instruction (of the pair, if there is one).

    swizzle_a, swizzle_b: bytes of a swizzle row, 0 for none. load: shape of tcgen05.ld, "" for the
    one that suits m. bug: a name of BUGS.
    """

    dtype: str = "bf16"
    m: int = 128
    n: int = 128
    a_major: str = "K"
    b_major: str = "K"
    swizzle_a: int = 128
    swizzle_b: int = 128
    pair: bool = False
    negate_a: bool = False
    negate_b: bool = False
    load: str = ""
    bug: str = ""

    @property
    def ctas(self):
        return 2 if self.pair else 1

    @property
    def load_shape(self):
        """Without a pair, M = 64 occupies 16 of every 32 lanes: 32x32b has no use for them."""
        return self.load or ("16x256b" if self.m == 64 else "32x32b")

    @property
    def d_columns(self):
        """Columns of D in TMEM: with M = 128, a pair keeps half of N in half of the lanes."""
        return self.n // 2 if self.pair and self.m == 128 else self.n

    @property
    def tmem_columns(self):
        """Columns allocated: a power of two, at least 32."""
        return max(32, 1 << (self.d_columns - 1).bit_length())


@cute.struct
class Storage:
    full: cute.struct.MemRange[Int64, STAGES]
    empty: cute.struct.MemRange[Int64, STAGES]
    d_full: Int64
    tmem_address: Int32


@cute.jit
def gemm(mA: cute.Tensor, mB: cute.Tensor, mD: cute.Tensor, config: cutlass.Constexpr, stream):
    """Launch D = (-)A (-)B^T. Runs: host.

    Args: mA (m, k), mB (n, k) in config.dtype, contiguous along k (major K) or along m, n (MN);
    mD (m, n) float32, contiguous along n. m, n multiples of the tile, k of TILE_K.
    """
    dtype = DTYPES[config.dtype]
    mma = make_mma(dtype, (config.m, config.n), config.a_major, config.b_major, ctas=config.ctas)
    tile = (config.m, config.n, TILE_K)
    shape_a = mma.partition_shape_A((config.m, TILE_K))  # ((m / CTAs, 16), 1, TILE_K / 16)
    shape_b = mma.partition_shape_B((config.n, TILE_K))  # ((n / CTAs, 16), 1, TILE_K / 16)
    layout_a = operand_layout(shape_a, config.a_major, config.swizzle_a, dtype, STAGES)
    layout_b = operand_layout(shape_b, config.b_major, config.swizzle_b, dtype, STAGES)
    load_a, mA_tma = tma_load(mma, "A", mA, layout_a, tile, config.ctas)
    load_b, mB_tma = tma_load(mma, "B", mB, layout_b, tile, config.ctas)
    tiles_m, tiles_n = mD.shape[0] // config.m, mD.shape[1] // config.n
    operands = (load_a, load_b), (mA_tma, mB_tma), (layout_a, layout_b)
    gemm_kernel(mma, *operands, mD, config).launch(
        grid=(tiles_m * config.ctas, tiles_n, 1),
        block=(128, 1, 1),
        cluster=(2, 1, 1) if config.pair else None,
        stream=stream,
    )


@cute.kernel
def gemm_kernel(
    mma: cute.TiledMma,
    loads: tuple[cute.CopyAtom, cute.CopyAtom],
    tensors: tuple[cute.Tensor, cute.Tensor],
    layouts: tuple[cute.ComposedLayout, cute.ComposedLayout],
    mD: cute.Tensor,
    config: cutlass.Constexpr,
):
    """One tile of D. Runs: 128 threads a CTA. Args: TMA atoms, TMA tensors, layouts of (A, B)."""
    tidx, _, _ = cute.arch.thread_idx()
    warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
    block_m, block_n, _ = cute.arch.block_idx()
    rank = block_m % config.ctas
    tile = (config.m, config.n, TILE_K)
    dtype = DTYPES[config.dtype]

    smem = cutlass.memory.SmemAllocator()
    storage = smem.allocate(Storage)
    sA, sB = [
        smem.allocate_tensor(dtype, layout.outer, ALIGN_BYTES, layout.inner) for layout in layouts
    ]  # (*shape of a stage, STAGES)
    if warp == LOAD_WARP:
        initialise(storage, config.bug)
    if warp == ALLOC_WARP:
        cute.arch.alloc_tmem(config.tmem_columns, storage.tmem_address, config.pair)
        cute.arch.relinquish_tmem_alloc_permit(config.pair)
    all_threads(config.pair)  # barriers are initialised, the TMEM address is written
    tmem = cute.arch.retrieve_tmem_ptr(Float32, 16, storage.tmem_address)
    shape_d = mma.partition_shape_C(tile[:2])  # ((m / CTAs, n), 1, 1)
    tDtD = cute.make_tensor(tmem, mma.make_fragment_C(shape_d).layout)  # as shape_d

    at = (block_m // config.ctas, block_n, None)
    mine = mma.get_slice(rank)
    gA = cute.local_tile(tensors[0], tile, at, proj=(1, None, 1))  # (m, TILE_K, K_TILES)
    gB = cute.local_tile(tensors[1], tile, at, proj=(None, 1, 1))  # (n, TILE_K, K_TILES)
    gD = cute.local_tile(mD, tile, at, proj=(1, 1, None))  # (m, n)
    k_tiles = cute.size(gA, mode=[2])
    if warp == LOAD_WARP:
        tDgA = mine.partition_A(gA)  # ((m / CTAs, 16), 1, TILE_K / 16, K_TILES)
        tDgB = mine.partition_B(gB)  # ((n / CTAs, 16), 1, TILE_K / 16, K_TILES)
        load_tiles(loads, (sA, sB), (tDgA, tDgB), storage, rank, config)
    elif warp == MMA_WARP and rank == 0:
        multiply(mma, tDtD, sA, sB, k_tiles, storage, config)

    if cutlass.const_expr(config.bug == "early_dealloc"):
        release(tmem, config, warp)
    if cutlass.const_expr(config.bug == "wait_on_wrong_barrier"):
        cute.arch.mbarrier_wait(storage.full.data_ptr(), 0)
    elif cutlass.const_expr(config.bug != "missing_wait"):
        cute.arch.mbarrier_wait(storage.d_full.ptr, 0)  # the last commit of the MMA warp arrives
    fence_after()
    tDgD = mine.partition_C(gD)  # as shape_d
    store_accumulator(tDtD, tDgD, tidx, load_op(config.load_shape, config.d_columns))
    if cutlass.const_expr(config.bug not in ("early_dealloc", "leak")):
        release(tmem, config, warp)


@cute.jit
def initialise(storage, bug: cutlass.Constexpr):
    """Initialise the barriers. Runs: one warp; the others must pass a barrier before use."""
    with cute.arch.elect_one():
        for stage in cutlass.range_constexpr(STAGES):
            # arrivals: the load warp of rank 0, and the bytes; a commit of its MMA warp
            cute.arch.mbarrier_init(storage.full.data_ptr() + stage, 1)
            cute.arch.mbarrier_init(storage.empty.data_ptr() + stage, 1)
        # arrivals: a commit of the MMA warp of rank 0
        cute.arch.mbarrier_init(storage.d_full.ptr, 2 if bug == "wrong_arrive_count" else 1)
    cute.arch.mbarrier_init_fence()


@cute.jit
def load_tiles(loads, shared, parts, storage, rank, config: cutlass.Constexpr):
    """Load this CTA's part of every tile of A and B. Runs: LOAD_WARP of each CTA, converged.

    Args: TMA atoms, shared memory and global memory of (A, B). In a pair the bytes of both CTAs
    arrive at the barrier of rank 0.
    """
    tAsA, tAgA = tma_views(loads[0], shared[0], parts[0])  # (TMA, STAGES), (TMA, K_TILES)
    tBsB, tBgB = tma_views(loads[1], shared[1], parts[1])  # (TMA, STAGES), (TMA, K_TILES)
    tile_bytes = config.ctas * (stage_bytes(shared[0]) + stage_bytes(shared[1]))
    k_tiles = cute.size(tAgA, mode=[1])
    for k_tile in cutlass.range(k_tiles, unroll=1):
        stage, phase = k_tile % STAGES, k_tile // STAGES % 2
        full, empty = storage.full.data_ptr() + stage, storage.empty.data_ptr() + stage
        cute.arch.mbarrier_wait(empty, phase ^ 1)  # the MMA warp's commit arrives
        if rank == 0:
            with cute.arch.elect_one():  # the MMA warp waits
                if cutlass.const_expr(config.bug == "missing_expect_tx"):
                    cute.arch.mbarrier_arrive(full)
                else:
                    cute.arch.mbarrier_arrive_and_expect_tx(full, tile_bytes)
        cute.copy(loads[0], tAgA[None, k_tile], tAsA[None, stage], tma_bar_ptr=full)
        cute.copy(loads[1], tBgB[None, k_tile], tBsB[None, stage], tma_bar_ptr=full)
    for k_tile in cutlass.range(k_tiles, k_tiles + STAGES, unroll=1):
        stage, phase = k_tile % STAGES, k_tile // STAGES % 2
        empty = storage.empty.data_ptr() + stage
        cute.arch.mbarrier_wait(empty, phase ^ 1)  # no commit arrives after this CTA's exit


@cute.jit
def multiply(mma, tDtD, sA, sB, k_tiles, storage, config: cutlass.Constexpr):
    """Issue D = A B^T over all tiles. Runs: MMA_WARP of rank 0, converged."""
    tDrA = mma.make_fragment_A(sA)  # (1, 1, TILE_K / 16, STAGES) descriptors
    tDrB = mma.make_fragment_B(sB)  # (1, 1, TILE_K / 16, STAGES) descriptors
    if cutlass.const_expr(config.bug == "reserved_descriptor_bit"):
        tDrA = with_reserved_bit(tDrA)
    group = tcgen05.CtaGroup(config.ctas)
    told = 0b11 if config.pair else None  # CTAs that a commit tells
    mma.set(tcgen05.Field.NEGATE_A, config.negate_a)
    mma.set(tcgen05.Field.NEGATE_B, config.negate_b)
    mma.set(tcgen05.Field.ACCUMULATE, False)
    for k_tile in cutlass.range(k_tiles, unroll=1):
        stage, phase = k_tile % STAGES, k_tile // STAGES % 2
        full, empty = storage.full.data_ptr() + stage, storage.empty.data_ptr() + stage
        if cutlass.const_expr(config.bug == "wrong_phase"):
            phase = phase ^ 1
        cute.arch.mbarrier_wait(full, phase)  # the load warp and TMA arrive
        for k_block in cutlass.range_constexpr(TILE_K // 16):
            at = (None, None, k_block, stage)
            cute.gemm(mma, tDtD, tDrA[at], tDrB[at], tDtD)
            mma.set(tcgen05.Field.ACCUMULATE, True)
        with cute.arch.elect_one():
            tcgen05.commit(empty, told, group)  # the load warps wait
    with cute.arch.elect_one():
        tcgen05.commit(storage.d_full.ptr, told, group)  # the epilogue of both CTAs waits


@cute.jit
def release(tmem: cute.Pointer, config: cutlass.Constexpr, warp):
    """Free TMEM once every thread of the CTA or pair has come here."""
    all_threads(config.pair)
    if warp == ALLOC_WARP:
        cute.arch.dealloc_tmem(tmem, config.tmem_columns, config.pair)


def build(arch="sm_100a", **parameters):
    """Compile for `arch`; parameters are those of Gemm."""
    config = Gemm(**parameters)
    dtype = DTYPES[config.dtype]
    tensors = matrix(dtype, config.a_major), matrix(dtype, config.b_major), matrix(Float32, "K")
    return compile_kernel(gemm, *tensors, config, arch=arch)
