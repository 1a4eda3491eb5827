# SPDX-License-Identifier: Apache-2.0
"""O = (scale Q K^T) V over tiles of keys: the protocol of attention without its softmax.

Warp 4 loads tiles by TMA and issues every MMA. Warps 0 to 3 take S out of TMEM, scale it, put it
back as 16-bit P over the columns of S, and at the end copy O to global memory. Each key tile flips
the phase of every barrier but o_full.
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
    fence_before,
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

TILE_M = 128  # query rows: one per thread of the epilogue
STAGES = 2  # tiles of K and V in the ring
EPILOGUE_THREADS = 128
MMA_WARP = 4
THREADS = 160
CHUNK = 32  # columns of S that a thread converts at once
BUGS = {
    "missing_wait": Bug("values hang order", "S is read before its MMA wrote it"),
    "wrong_phase": Bug("values hang order", "the epilogue runs one key tile ahead of S"),
    "wrong_arrive_count": Bug("hang", "p_full expects one arrival more than there are threads"),
    "p_before_written": Bug("values hang order", "PV multiplies the bits of S, not P"),
    "early_dealloc": Bug("tmem order", "TMEM is freed while PV writes O and before O is read"),
    "leak": Bug("tmem lint", "TMEM is never freed: the next CTA on the SM hangs in alloc"),
    "reserved_descriptor_bit": Bug("form", "bit 53 of the descriptors of Q is set"),
    "wait_on_wrong_barrier": Bug("values hang order", "the epilogue waits for K instead of S"),
    "missing_expect_tx": Bug("values hang order", "a tile counts as loaded when none of it is"),
    "missing_store_wait": Bug("lint", "P is handed over without tcgen05.wait::st"),
    "missing_load_wait": Bug("lint", "S is overwritten, and TMEM released, without wait::ld"),
    "missing_fence": Bug("lint", "P is handed over without tcgen05.fence::before_thread_sync"),
}


@dataclass(frozen=True)
class Chain:
    """Compile-time parameters: keys in a tile, head dim, a name of BUGS or none."""

    dtype: str = "bf16"
    n: int = 128
    d: int = 128
    bug: str = ""

    @property
    def tmem_columns(self):
        """Columns allocated: S and P, then O."""
        return 1 << (self.n + self.d - 1).bit_length()


@cute.struct
class Storage:
    q_full: Int64
    kv_full: cute.struct.MemRange[Int64, STAGES]
    kv_empty: cute.struct.MemRange[Int64, STAGES]
    s_full: Int64
    p_full: Int64
    o_full: Int64
    tmem_address: Int32


def make_mmas(config: Chain):
    """The MMAs of S = Q K^T and O = P V. Runs: trace.

    Every function makes its own: `set` in a branch changes the object of the caller, too.
    """
    dtype = DTYPES[config.dtype]
    mma_qk = make_mma(dtype, (TILE_M, config.n))
    mma_pv = make_mma(dtype, (TILE_M, config.d), b_major="MN", a_in_tmem=True)
    return mma_qk, mma_pv


@cute.jit
def chain(
    mQ: cute.Tensor,
    mK: cute.Tensor,
    mV: cute.Tensor,
    scale: Float32,
    mO: cute.Tensor,
    config: cutlass.Constexpr,
    stream,
):
    """Launch O = (scale Q K^T) V. Runs: host.

    Args: mQ (m, d), mK (keys, d), mV (d, keys) in config.dtype, all contiguous along d; mO (m, d)
    float32. m a multiple of TILE_M, keys of config.n; config.d is d.
    """
    dtype = DTYPES[config.dtype]
    mma_qk, mma_pv = make_mmas(config)
    tile_qk, tile_pv = (TILE_M, config.n, config.d), (TILE_M, config.d, config.n)
    shape_q = mma_qk.partition_shape_A((TILE_M, config.d))  # ((TILE_M, 16), 1, d / 16)
    shape_k = mma_qk.partition_shape_B((config.n, config.d))  # ((n, 16), 1, d / 16)
    shape_v = mma_pv.partition_shape_B((config.d, config.n))  # ((d, 16), 1, n / 16)
    layout_q = operand_layout(shape_q, "K", 128, dtype, 1)
    layout_k = operand_layout(shape_k, "K", 128, dtype, STAGES)
    layout_v = operand_layout(shape_v, "MN", 128, dtype, STAGES)
    load_q, mQ_tma = tma_load(mma_qk, "A", mQ, layout_q, tile_qk)
    load_k, mK_tma = tma_load(mma_qk, "B", mK, layout_k, tile_qk)
    load_v, mV_tma = tma_load(mma_pv, "B", mV, layout_v, tile_pv)
    loads = (load_q, load_k, load_v)
    layouts = (layout_q, layout_k, layout_v)
    tensors = (mQ_tma, mK_tma, mV_tma)
    chain_kernel(loads, tensors, mO, scale, layouts, config).launch(
        grid=(mO.shape[0] // TILE_M, 1, 1), block=(THREADS, 1, 1), stream=stream
    )


@cute.kernel
def chain_kernel(
    loads: tuple[cute.CopyAtom, cute.CopyAtom, cute.CopyAtom],
    tensors: tuple[cute.Tensor, cute.Tensor, cute.Tensor],
    mO: cute.Tensor,
    scale: Float32,
    layouts: tuple[cute.ComposedLayout, cute.ComposedLayout, cute.ComposedLayout],
    config: cutlass.Constexpr,
):
    """TILE_M rows of O against all keys. Runs: THREADS threads."""
    tidx, _, _ = cute.arch.thread_idx()
    warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
    m_block, _, _ = cute.arch.block_idx()
    dtype = DTYPES[config.dtype]
    bug = config.bug

    smem = cutlass.memory.SmemAllocator()
    storage = smem.allocate(Storage)
    sQ, sK, sV = [
        smem.allocate_tensor(dtype, layout.outer, ALIGN_BYTES, layout.inner) for layout in layouts
    ]  # (Q, 1), (K, STAGES), (V, STAGES)
    if warp == MMA_WARP:
        initialise(storage, bug)
        cute.arch.alloc_tmem(config.tmem_columns, storage.tmem_address)
        cute.arch.relinquish_tmem_alloc_permit()
    all_threads()  # barriers are initialised, the TMEM address is written
    tmem = cute.arch.retrieve_tmem_ptr(Float32, 16, storage.tmem_address)
    mma_qk, mma_pv = make_mmas(config)
    shape_s = mma_qk.partition_shape_C((TILE_M, config.n))  # ((TILE_M, n), 1, 1)
    shape_o = mma_pv.partition_shape_C((TILE_M, config.d))  # ((TILE_M, d), 1, 1)
    shape_p = mma_pv.partition_shape_A((TILE_M, config.n))  # ((TILE_M, 16), 1, n / 16)
    tStS = cute.make_tensor(tmem, mma_qk.make_fragment_C(shape_s).layout)  # as shape_s
    tOtO = cute.make_tensor(tmem + config.n, mma_pv.make_fragment_C(shape_o).layout)  # as shape_o
    layout_p = mma_pv.make_fragment_A(shape_p).layout
    tOtP = cute.make_tensor(cute.recast_ptr(tmem, dtype=dtype), layout_p)  # as shape_p

    if warp == MMA_WARP:
        shared, tmem_tensors = (sQ, sK, sV), (tStS, tOtP, tOtO)
        mma_warp(loads, tensors, shared, tmem_tensors, storage, config)
    else:
        for n_tile in cutlass.range(tensors[1].shape[0] // config.n, unroll=1):
            wait_for_s(storage, n_tile, bug)
            fence_after()
            convert(tStS, tOtP, scale, tidx, config)
            if cutlass.const_expr(bug != "missing_store_wait"):
                cute.arch.fence_view_async_tmem_store()
            if cutlass.const_expr(bug != "missing_fence"):
                fence_before()
            cute.arch.mbarrier_arrive(storage.p_full.ptr)  # the MMA warp waits
        cute.arch.mbarrier_wait(storage.o_full.ptr, 0)  # the MMA warp's last commit arrives
        fence_after()
        gO = cute.local_tile(mO, (TILE_M, config.d), (m_block, 0))  # (TILE_M, d)
        tOgO = mma_pv.get_slice(0).partition_C(gO)  # as shape_o
        store_accumulator(tOtO, tOgO, tidx, load_op("32x32b", config.d))
    if cutlass.const_expr(bug != "early_dealloc"):
        all_threads()  # O has been read
    if cutlass.const_expr(bug != "leak"):
        if warp == MMA_WARP:
            cute.arch.dealloc_tmem(tmem, config.tmem_columns)


@cute.jit
def initialise(storage, bug: cutlass.Constexpr):
    """Initialise the barriers. Runs: MMA_WARP; the others must pass a barrier before use."""
    with cute.arch.elect_one():
        cute.arch.mbarrier_init(storage.q_full.ptr, 1)  # arrivals: the MMA warp, and the bytes
        for stage in cutlass.range_constexpr(STAGES):
            # arrivals: the MMA warp, and the bytes; a commit
            cute.arch.mbarrier_init(storage.kv_full.data_ptr() + stage, 1)
            cute.arch.mbarrier_init(storage.kv_empty.data_ptr() + stage, 1)
        cute.arch.mbarrier_init(storage.s_full.ptr, 1)  # arrivals: a commit
        more = 1 if bug == "wrong_arrive_count" else 0
        cute.arch.mbarrier_init(storage.p_full.ptr, EPILOGUE_THREADS + more)
        cute.arch.mbarrier_init(storage.o_full.ptr, 1)  # arrivals: a commit
    cute.arch.mbarrier_init_fence()


@cute.jit
def wait_for_s(storage, n_tile, bug: cutlass.Constexpr):
    """Return when S of a key tile is complete. Runs: the epilogue."""
    if cutlass.const_expr(bug == "wait_on_wrong_barrier"):
        full = storage.kv_full.data_ptr() + n_tile % STAGES
        cute.arch.mbarrier_wait(full, n_tile // STAGES % 2)
    elif cutlass.const_expr(bug == "wrong_phase"):
        cute.arch.mbarrier_wait(storage.s_full.ptr, n_tile % 2 ^ 1)
    elif cutlass.const_expr(bug != "missing_wait"):
        cute.arch.mbarrier_wait(storage.s_full.ptr, n_tile % 2)  # the MMA warp's commit arrives


@cute.jit
def mma_warp(loads, tensors, shared, tmem, storage, config: cutlass.Constexpr):
    """Load Q, K, V; issue S = Q K^T and O += P V for every key tile. Runs: MMA_WARP, converged.

    Args: (Q, K, V) as TMA atoms, TMA tensors and shared memory; (S, P, O) in TMEM.
    """
    m_block, _, _ = cute.arch.block_idx()
    gQ = cute.local_tile(tensors[0], (TILE_M, config.d), (m_block, 0))  # (TILE_M, d)
    gK = cute.local_tile(tensors[1], (config.n, config.d), (None, 0))  # (n, d, N_TILES)
    gV = cute.local_tile(tensors[2], (config.d, config.n), (0, None))  # (d, n, N_TILES)
    whole_qk, whole_pv = [mma.get_slice(0) for mma in make_mmas(config)]
    tSgQ = whole_qk.partition_A(gQ)  # ((TILE_M, 16), 1, d / 16)
    tSgK = whole_qk.partition_B(gK)  # ((n, 16), 1, d / 16, N_TILES)
    tOgV = whole_pv.partition_B(gV)  # ((d, 16), 1, n / 16, N_TILES)
    tQsQ, tQgQ = tma_views(loads[0], shared[0], tSgQ)  # (TMA, 1), (TMA)
    k_views = tma_views(loads[1], shared[1], tSgK)  # (TMA, STAGES), (TMA, N_TILES)
    v_views = tma_views(loads[2], shared[2], tOgV)  # (TMA, STAGES), (TMA, N_TILES)

    q_full = storage.q_full.ptr
    with cute.arch.elect_one():
        cute.arch.mbarrier_arrive_and_expect_tx(q_full, stage_bytes(shared[0]))  # this warp waits
    cute.copy(loads[0], tQgQ, tQsQ[None, 0], tma_bar_ptr=q_full)
    n_tiles = cute.size(gK, mode=[2])
    for n_iter in cutlass.range(n_tiles + 1, unroll=1):  # loads n_iter, multiplies n_iter - 1
        # the commit after PV(n_iter - 2) arrives: the stage is free, and so are S and P
        empty = storage.kv_empty.data_ptr() + n_iter % STAGES
        cute.arch.mbarrier_wait(empty, n_iter // STAGES % 2 ^ 1)
        if n_iter < n_tiles:
            load_kv(loads, shared, (k_views, v_views), storage, n_iter, config.bug)
        if n_iter == 0:
            cute.arch.mbarrier_wait(q_full, 0)  # this warp and TMA arrived
        else:
            multiply(shared, tmem, storage, n_iter - 1, config)
    with cute.arch.elect_one():
        tcgen05.commit(storage.o_full.ptr)  # the epilogue waits


@cute.jit
def load_kv(loads, shared, views, storage, n_tile, bug: cutlass.Constexpr):
    """Load a tile of K and of V; its stage is free. Runs: MMA_WARP, converged."""
    stage = n_tile % STAGES
    full = storage.kv_full.data_ptr() + stage
    with cute.arch.elect_one():  # this warp waits
        if cutlass.const_expr(bug == "missing_expect_tx"):
            cute.arch.mbarrier_arrive(full)
        else:
            kv_bytes = stage_bytes(shared[1]) + stage_bytes(shared[2])
            cute.arch.mbarrier_arrive_and_expect_tx(full, kv_bytes)
    (tKsK, tKgK), (tVsV, tVgV) = views
    cute.copy(loads[1], tKgK[None, n_tile], tKsK[None, stage], tma_bar_ptr=full)
    cute.copy(loads[2], tVgV[None, n_tile], tVsV[None, stage], tma_bar_ptr=full)


@cute.jit
def multiply(shared, tmem, storage, n_tile, config: cutlass.Constexpr):
    """Issue S = Q K^T, then O = P V or O += P V once P is there. Runs: MMA_WARP, converged."""
    mma_qk, mma_pv = make_mmas(config)
    tStS, tOtP, tOtO = tmem
    tSrQ = mma_qk.make_fragment_A(shared[0])  # (1, 1, d / 16, 1) descriptors
    tSrK = mma_qk.make_fragment_B(shared[1])  # (1, 1, d / 16, STAGES) descriptors
    tOrV = mma_pv.make_fragment_B(shared[2])  # (1, 1, n / 16, STAGES) descriptors
    if cutlass.const_expr(config.bug == "reserved_descriptor_bit"):
        tSrQ = with_reserved_bit(tSrQ)
    stage = n_tile % STAGES
    full = storage.kv_full.data_ptr() + stage
    cute.arch.mbarrier_wait(full, n_tile // STAGES % 2)  # this warp and TMA arrive
    for k_block in cutlass.range_constexpr(config.d // 16):
        mma_qk.set(tcgen05.Field.ACCUMULATE, k_block != 0)
        q, k = tSrQ[None, None, k_block, 0], tSrK[None, None, k_block, stage]
        cute.gemm(mma_qk, tStS, q, k, tStS)
    with cute.arch.elect_one():
        tcgen05.commit(storage.s_full.ptr)  # the epilogue waits
    if cutlass.const_expr(config.bug != "p_before_written"):
        cute.arch.mbarrier_wait(storage.p_full.ptr, n_tile % 2)  # the epilogue arrives
    fence_after()
    for k_block in cutlass.range_constexpr(config.n // 16):
        mma_pv.set(tcgen05.Field.ACCUMULATE, True if k_block else n_tile != 0)
        p, v = tOtP[None, None, k_block], tOrV[None, None, k_block, stage]
        cute.gemm(mma_pv, tOtO, p, v, tOtO)
    with cute.arch.elect_one():
        tcgen05.commit(storage.kv_empty.data_ptr() + stage)  # this warp waits


@cute.jit
def convert(tStS, tOtP, scale: Float32, tidx, config: cutlass.Constexpr):
    """Replace a row of float32 S in TMEM by 16-bit P = scale S. Runs: EPILOGUE_THREADS threads.

    P takes the first half of the columns of S; chunk by chunk, so that what a store overwrites
    has been loaded before.
    """
    dtype, n = tOtP.element_type, config.n
    op_s = tcgen05.Ld32x32bOp(tcgen05.Repetition(CHUNK))
    op_p = tcgen05.St32x32bOp(tcgen05.Repetition(CHUNK // 2))
    copy_s = tcgen05.make_tmem_copy(cute.make_copy_atom(op_s, Float32), tStS)
    copy_p = tcgen05.make_tmem_copy(cute.make_copy_atom(op_p, dtype), tOtP)
    mma_qk, mma_pv = make_mmas(config)
    coordinates = cute.make_identity_tensor((TILE_M, n))
    tScS = mma_qk.get_slice(0).partition_C(coordinates)  # ((TILE_M, n), 1, 1)
    tOcP = mma_pv.get_slice(0).partition_A(coordinates)  # ((TILE_M, 16), 1, n / 16)
    mine_s, mine_p = copy_s.get_slice(tidx), copy_p.get_slice(tidx)
    tStS_t2r = mine_s.partition_S(tStS)  # (T2R, n / CHUNK, 1, 1)
    tOtP_r2t = mine_p.partition_D(tOtP)  # (R2T, 1, 1, n / CHUNK)
    rS = cute.make_rmem_tensor(mine_s.partition_D(tScS)[None, 0, 0, 0].shape, Float32)  # (T2R)
    rP = cute.make_rmem_tensor(mine_p.partition_S(tOcP)[None, 0, 0, 0].shape, dtype)  # (R2T)
    for part in cutlass.range_constexpr(n // CHUNK):
        cute.copy(copy_s, tStS_t2r[None, part, 0, 0], rS)
        if cutlass.const_expr(config.bug != "missing_load_wait"):
            cute.arch.fence_view_async_tmem_load()
        for pair in cutlass.range_constexpr(CHUNK // 2):
            two = (rS[2 * pair], rS[2 * pair + 1])
            rS[2 * pair], rS[2 * pair + 1] = cute.arch.mul_packed_f32x2(two, (scale, scale))
        rP.store(rS.load().to(dtype).reshape(rP.shape))
        cute.copy(copy_p, rP, tOtP_r2t[None, 0, 0, part])


def build(arch="sm_100a", **parameters):
    """Compile for `arch`; parameters are those of Chain."""
    config = Chain(**parameters)
    dtype = DTYPES[config.dtype]
    q, k, v, o = matrix(dtype, "K"), matrix(dtype, "K"), matrix(dtype, "MN"), matrix(Float32, "K")
    return compile_kernel(chain, q, k, v, Float32(1.0), o, config, arch=arch)
