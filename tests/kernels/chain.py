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
from cutlass.cute.nvgpu import cpasync, tcgen05

from .parts import (
    ALIGN_BYTES,
    DTYPES,
    Bug,
    compile_kernel,
    fence_after,
    fence_before,
    load_op,
    make_mma,
    matrix,
    operand_layout,
    store_accumulator,
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
    mma_qk = make_mma(dtype, (TILE_M, config.n))
    mma_pv = make_mma(dtype, (TILE_M, config.d), b_major="MN", a_in_tmem=True)
    tile_qk, tile_pv = (TILE_M, config.n, config.d), (TILE_M, config.d, config.n)
    shape_q = mma_qk.partition_shape_A((TILE_M, config.d))  # ((TILE_M, 16), 1, d / 16)
    shape_k = mma_qk.partition_shape_B((config.n, config.d))  # ((n, 16), 1, d / 16)
    shape_v = mma_pv.partition_shape_B((config.d, config.n))  # ((d, 16), 1, n / 16)
    layout_q = operand_layout(shape_q, "K", 128, dtype, 1)
    layout_k = operand_layout(shape_k, "K", 128, dtype, STAGES)
    layout_v = operand_layout(shape_v, "MN", 128, dtype, STAGES)
    op = cpasync.CopyBulkTensorTileG2SOp()
    load_q, mQ_tma = cute.nvgpu.make_tiled_tma_atom_A(
        op, mQ, cute.select(layout_q, mode=[0, 1, 2]), tile_qk, mma_qk
    )
    load_k, mK_tma = cute.nvgpu.make_tiled_tma_atom_B(
        op, mK, cute.select(layout_k, mode=[0, 1, 2]), tile_qk, mma_qk
    )
    load_v, mV_tma = cute.nvgpu.make_tiled_tma_atom_B(
        op, mV, cute.select(layout_v, mode=[0, 1, 2]), tile_pv, mma_pv
    )
    loads = (load_q, load_k, load_v)
    layouts = (layout_q, layout_k, layout_v)
    tensors = (mQ_tma, mK_tma, mV_tma)
    chain_kernel(mma_qk, mma_pv, loads, tensors, mO, scale, layouts, config).launch(
        grid=(mO.shape[0] // TILE_M, 1, 1), block=(THREADS, 1, 1), stream=stream
    )


@cute.kernel
def chain_kernel(
    mma_qk: cute.TiledMma,
    mma_pv: cute.TiledMma,
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
    kv_full, kv_empty = storage.kv_full.data_ptr(), storage.kv_empty.data_ptr()
    s_full, p_full, o_full = storage.s_full.ptr, storage.p_full.ptr, storage.o_full.ptr

    if warp == MMA_WARP:
        with cute.arch.elect_one():
            cute.arch.mbarrier_init(storage.q_full.ptr, 1)  # the MMA warp, and the bytes
            for stage in cutlass.range_constexpr(STAGES):
                cute.arch.mbarrier_init(kv_full + stage, 1)  # the MMA warp, and the bytes
                cute.arch.mbarrier_init(kv_empty + stage, 1)  # a commit
            cute.arch.mbarrier_init(s_full, 1)  # a commit
            cute.arch.mbarrier_init(p_full, EPILOGUE_THREADS + (bug == "wrong_arrive_count"))
            cute.arch.mbarrier_init(o_full, 1)  # a commit
        cute.arch.mbarrier_init_fence()
        cute.arch.alloc_tmem(config.tmem_columns, storage.tmem_address)
        cute.arch.relinquish_tmem_alloc_permit()
    fence_before()
    cute.arch.barrier()  # all wait for all: barriers are initialised, the TMEM address is written
    fence_after()
    tmem = cute.arch.retrieve_tmem_ptr(Float32, 16, storage.tmem_address)
    shape_s = mma_qk.partition_shape_C((TILE_M, config.n))  # ((TILE_M, n), 1, 1)
    shape_o = mma_pv.partition_shape_C((TILE_M, config.d))  # ((TILE_M, d), 1, 1)
    shape_p = mma_pv.partition_shape_A((TILE_M, config.n))  # ((TILE_M, 16), 1, n / 16)
    tStS = cute.make_tensor(tmem, mma_qk.make_fragment_C(shape_s).layout)  # as shape_s
    tOtO = cute.make_tensor(tmem + config.n, mma_pv.make_fragment_C(shape_o).layout)  # as shape_o
    layout_p = mma_pv.make_fragment_A(shape_p).layout
    tOtP = cute.make_tensor(cute.recast_ptr(tmem, dtype=dtype), layout_p)  # as shape_p

    n_tiles = tensors[1].shape[0] // config.n
    if warp == MMA_WARP:
        mma_warp(mma_qk, mma_pv, loads, tensors, (sQ, sK, sV), (tStS, tOtP, tOtO), storage, config)
    else:
        for n_tile in cutlass.range(n_tiles, unroll=1):
            phase = (n_tile + (bug == "wrong_phase")) % 2
            if cutlass.const_expr(bug == "wait_on_wrong_barrier"):
                cute.arch.mbarrier_wait(kv_full + n_tile % STAGES, n_tile // STAGES % 2)
            elif cutlass.const_expr(bug != "missing_wait"):
                cute.arch.mbarrier_wait(s_full, phase)  # the MMA warp's commit arrives
            fence_after()
            convert(mma_qk, mma_pv, tStS, tOtP, scale, tidx, bug)
            if cutlass.const_expr(bug != "missing_store_wait"):
                cute.arch.fence_view_async_tmem_store()
            if cutlass.const_expr(bug != "missing_fence"):
                fence_before()
            cute.arch.mbarrier_arrive(p_full)  # the MMA warp waits
        cute.arch.mbarrier_wait(o_full, 0)  # the MMA warp's last commit arrives
        fence_after()
        gO = cute.local_tile(mO, (TILE_M, config.d), (m_block, 0))  # (TILE_M, d)
        tOgO = mma_pv.get_slice(0).partition_C(gO)  # ((TILE_M, d), 1, 1)
        store_accumulator(tOtO, tOgO, tidx, load_op("32x32b", config.d))
    if cutlass.const_expr(bug != "early_dealloc"):
        fence_before()
        cute.arch.barrier()  # all wait for all: O has been read
        fence_after()
    if cutlass.const_expr(bug != "leak"):
        if warp == MMA_WARP:
            cute.arch.dealloc_tmem(tmem, config.tmem_columns)


@cute.jit
def mma_warp(mma_qk, mma_pv, loads, tensors, shared, tmem, storage, config: cutlass.Constexpr):
    """Load Q, K, V and issue S = Q K^T and O += P V for every key tile. Runs: MMA_WARP, converged.

    Args: (Q, K, V) as TMA atoms, TMA tensors and shared tensors; tmem = (S, P, O).
    """
    dtype = DTYPES[config.dtype]
    m_block, _, _ = cute.arch.block_idx()
    (sQ, sK, sV), (tStS, tOtP, tOtO) = shared, tmem
    kv_full, kv_empty = storage.kv_full.data_ptr(), storage.kv_empty.data_ptr()
    gQ = cute.local_tile(tensors[0], (TILE_M, config.d), (m_block, 0))  # (TILE_M, d)
    gK = cute.local_tile(tensors[1], (config.n, config.d), (None, 0))  # (n, d, N_TILES)
    gV = cute.local_tile(tensors[2], (config.d, config.n), (0, None))  # (d, n, N_TILES)
    whole_qk, whole_pv = mma_qk.get_slice(0), mma_pv.get_slice(0)
    parts = (
        whole_qk.partition_A(gQ),  # ((TILE_M, 16), 1, d / 16)
        whole_qk.partition_B(gK),  # ((n, 16), 1, d / 16, N_TILES)
        whole_pv.partition_B(gV),  # ((d, 16), 1, n / 16, N_TILES)
    )
    one = cute.make_layout(1)
    (tQsQ, tQgQ), (tKsK, tKgK), (tVsV, tVgV) = [
        cpasync.tma_partition(load, 0, one, cute.group_modes(s, 0, 3), cute.group_modes(part, 0, 3))
        for load, s, part in zip(loads, shared, parts)
    ]  # each (TMA, STAGES) and (TMA, N_TILES), Q (TMA, 1) and (TMA)
    tSrQ = mma_qk.make_fragment_A(sQ)  # (1, 1, d / 16, 1) descriptors
    tSrK = mma_qk.make_fragment_B(sK)  # (1, 1, d / 16, STAGES) descriptors
    tOrV = mma_pv.make_fragment_B(sV)  # (1, 1, n / 16, STAGES) descriptors
    if cutlass.const_expr(config.bug == "reserved_descriptor_bit"):
        tSrQ = with_reserved_bit(tSrQ)
    q_bytes = TILE_M * config.d * dtype.width // 8
    kv_bytes = 2 * config.n * config.d * dtype.width // 8

    n_tiles = cute.size(gK, mode=[2])
    with cute.arch.elect_one():
        cute.arch.mbarrier_arrive_and_expect_tx(storage.q_full.ptr, q_bytes)  # this warp waits
    cute.copy(loads[0], tQgQ, tQsQ[None, 0], tma_bar_ptr=storage.q_full.ptr)
    mma_pv.set(tcgen05.Field.ACCUMULATE, False)
    for n_iter in cutlass.range(n_tiles + 1, unroll=1):  # loads tile n_iter, multiplies the last
        stage = n_iter % STAGES
        # the commit after PV(n_iter - 2) arrives: the stage is free, and so are S and P
        cute.arch.mbarrier_wait(kv_empty + stage, n_iter // STAGES % 2 ^ 1)
        if n_iter < n_tiles:
            full = kv_full + stage
            with cute.arch.elect_one():  # this warp waits
                if cutlass.const_expr(config.bug == "missing_expect_tx"):
                    cute.arch.mbarrier_arrive(full)
                else:
                    cute.arch.mbarrier_arrive_and_expect_tx(full, kv_bytes)
            cute.copy(loads[1], tKgK[None, n_iter], tKsK[None, stage], tma_bar_ptr=full)
            cute.copy(loads[2], tVgV[None, n_iter], tVsV[None, stage], tma_bar_ptr=full)
        if n_iter == 0:
            cute.arch.mbarrier_wait(storage.q_full.ptr, 0)  # this warp and TMA arrived
        else:
            n_tile = n_iter - 1
            last = n_tile % STAGES
            cute.arch.mbarrier_wait(kv_full + last, n_tile // STAGES % 2)  # this warp, TMA arrive
            for k_block in cutlass.range_constexpr(config.d // 16):
                mma_qk.set(tcgen05.Field.ACCUMULATE, k_block != 0)
                a, b = tSrQ[None, None, k_block, 0], tSrK[None, None, k_block, last]
                cute.gemm(mma_qk, tStS, a, b, tStS)
            with cute.arch.elect_one():
                tcgen05.commit(storage.s_full.ptr)  # the epilogue waits
            if cutlass.const_expr(config.bug != "p_before_written"):
                cute.arch.mbarrier_wait(storage.p_full.ptr, n_tile % 2)  # the epilogue arrives
            fence_after()
            for k_block in cutlass.range_constexpr(config.n // 16):
                a, b = tOtP[None, None, k_block], tOrV[None, None, k_block, last]
                cute.gemm(mma_pv, tOtO, a, b, tOtO)
                mma_pv.set(tcgen05.Field.ACCUMULATE, True)
            with cute.arch.elect_one():
                tcgen05.commit(kv_empty + last)  # this warp waits
    with cute.arch.elect_one():
        tcgen05.commit(storage.o_full.ptr)  # the epilogue waits


@cute.jit
def convert(mma_qk, mma_pv, tStS, tOtP, scale: Float32, tidx, bug: cutlass.Constexpr):
    """Replace a row of float32 S in TMEM by 16-bit P = scale S. Runs: EPILOGUE_THREADS threads.

    P takes the first half of the columns of S; chunk by chunk, so that what a store overwrites
    has been loaded before.
    """
    dtype = tOtP.element_type
    n = cute.size(tOtP, mode=[0, 1]) * cute.size(tOtP, mode=[2])
    op_s = tcgen05.Ld32x32bOp(tcgen05.Repetition(CHUNK))
    op_p = tcgen05.St32x32bOp(tcgen05.Repetition(CHUNK // 2))
    copy_s = tcgen05.make_tmem_copy(cute.make_copy_atom(op_s, Float32), tStS)
    copy_p = tcgen05.make_tmem_copy(cute.make_copy_atom(op_p, dtype), tOtP)
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
        if cutlass.const_expr(bug != "missing_load_wait"):
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
