# SPDX-License-Identifier: Apache-2.0
"""The schedule of the backward pass on the SM model: a coroutine for each warp role. Runs: host.

Functions are named as in the kernel; each role waits, arrives, copies and multiplies in its order.
Left out: issue slots of MMA, LOAD and RELAY.
"""

import math

import torch

from ...common.model import Global, GradientRun, Machine, Pair, Role, Sm, gradient_run
from ...common.plan import THREADS_PER_WARP
from . import config

# Issue slots of a warp for an element of its rows, by what its compiled loop has.
SLOTS_P = 2.88  # from S to P: waits, loads, FMA, exp2, conversion, store
SLOTS_DS = 2.44  # from dP to dS: with subtraction and product instead
SLOTS_DQ = 1.06  # of dQ: load, store, waits, the reductions' issue
LEADER = 0  # rank of the CTA that issues the MMAs of both
REDUNDANT = {  # why the model does not miss a synchronisation (common.mutation)
    "* fence_before in all_of_both": "alloc and dealloc, on the other side, are synchronous",
    "* fence_after in all_of_both": "alloc and dealloc, on the other side, are synchronous",
    "REDUCE sync dq_slot": "the four warps of a role are one agent here; the log has each",
    "COMPUTE? fence_before in store_block #1": "after wait_ld only dealloc, synchronous, follows",
    "LOAD wait * in load #2": "memory that a late commit writes is still there in the model",
}


def run(
    q, k, v, dout, stats, softmax_scale: float, machine: Machine, max_ctas: int | None = None
) -> GradientRun:
    """dQ, dK, dV of checked CPU tensors q, dout (b, sq, h, d), k, v (b, sk, h, d).

    stats (b, h, m, 2, TILE): of each row LSE * log2(e), and the sum of O * dO less dLSE. max_ctas
    counts pairs.
    """
    unit = config.CTAS * config.TILE

    def cluster(batch: int, head: int, n_block: int, dq_accum: torch.Tensor):
        keys = slice(n_block * unit, (n_block + 1) * unit)
        queries = slice(None)
        which = ((q, queries), (dout, queries), (k, keys), (v, keys))
        tensors = [x[batch, rows, head] for x, rows in which]
        work = Cluster(machine, *tensors, stats[batch, head], dq_accum, softmax_scale)
        work.start()
        there = slice(len(tensors[2]))
        return work.pair, lambda: (work.dk.tensor[there], work.dv.tensor[there])

    return gradient_run(machine, q, k, softmax_scale, unit, cluster, max_ctas)


class Cluster:
    """The tensors of a pair and its CTAs; q, dout (sq, d), k, v (its keys, d).

    Copies fill with zeros what a tensor does not have, and write nothing there: here the tensors
    have it, as zeros.
    """

    def __init__(self, machine: Machine, q, dout, k, v, stats, dq_accum, softmax_scale: float):
        self.head_dim, tile = q.shape[1], config.TILE
        self.softmax_scale, self.scale_log2 = softmax_scale, softmax_scale * math.log2(math.e)
        self.m_tiles, self.key_tiles = len(q) // tile, len(k) // tile
        self.q, self.dout = Global("q", q), Global("dout", dout)
        whole = torch.zeros(2, config.CTAS * tile, self.head_dim, dtype=k.dtype)
        whole[0, : len(k)], whole[1, : len(v)] = k, v
        self.k, self.v = Global("k", whole[0]), Global("v", whole[1])
        nothing = torch.zeros(2 * tile)  # of a tile behind the last
        self.stats = Global("stats", torch.cat([stats.reshape(-1), nothing]))
        self.dq_accum = Global("dq_accum", dq_accum)
        self.dk, self.dv = (
            Global(name, torch.full_like(whole[0], math.nan)) for name in ("dk", "dv")
        )
        self.pair = Pair(machine, config.plan(self.head_dim))
        self.ctas = [Cta(self, sm) for sm in self.pair.sms]

    def start(self):
        """Put every role of both CTAs to work."""
        for name, work in (
            ("REDUCE", reduce),
            ("COMPUTE0", lambda role, cta: compute(role, cta, 0)),
            ("COMPUTE1", lambda role, cta: compute(role, cta, 1)),
            ("MMA", mma),
            ("LOAD", load),
            ("RELAY", relay),
            ("EMPTY", lambda role, cta: ()),
        ):
            self.pair.start(name, lambda role, work=work: kernel(role, self, work))


class Cta:
    """The memories of one CTA of a `Cluster`, whose tensors it shares."""

    def __init__(self, cluster: Cluster, sm: Sm):
        self.cluster, self.sm, self.rank = cluster, sm, sm.rank
        d, tile, half, dtype = cluster.head_dim, config.TILE, config.HALF, cluster.q.tensor.dtype
        self.there = self.rank < cluster.key_tiles
        shapes = {
            **dict.fromkeys(("sK", "sV"), (tile, d)),
            "sKt": (config.CTAS * tile, d // 2),
            **dict.fromkeys(("sQ", "sdO"), (half, d)),
            **dict.fromkeys(("sQt", "sdOt", "sdV", "sdK"), (tile, d // 2)),
            "sdX": (tile, half),
            "sdS": (config.CTAS * tile, half),
        }
        for name, shape in shapes.items():
            setattr(self, name, sm.buffer(name, shape, dtype))
        self.sStats = sm.buffer("sStats", (2 * tile,), torch.float32, swizzled=False)
        self.sdQ = sm.buffer("sdQ", (tile, config.SLICE), torch.float32)
        for name in ("S", "dP", "dQ", "dV", "dK"):
            setattr(self, f"t{name}", sm.tmem.view(name))
        self.tP = [sm.tmem.view(f"P{half}", dtype) for half in range(2)]
        self.tdS = [sm.tmem.view(f"dS{half}", dtype) for half in range(2)]

    def __getattr__(self, name: str):
        return getattr(self.cluster, name)

    @property
    def own_keys(self) -> slice:
        """Rows of K, V, dK and dV in the cluster that are this CTA's."""
        return slice(self.rank * config.TILE, (self.rank + 1) * config.TILE)

    @property
    def own_half(self) -> slice:
        """Of a query tile's rows the half that is this CTA's."""
        return slice(self.rank * config.HALF, (self.rank + 1) * config.HALF)

    @property
    def own_columns(self) -> slice:
        """Of the columns the half that is this CTA's."""
        wide = self.head_dim // 2
        return slice(self.rank * wide, (self.rank + 1) * wide)


# ---- load ----------------------------------------------------------------------------------


def load_half(role: Role, cta: Cta, source, target, full: str, step: int = -1):
    """One CTA's part of an operand of both; the bytes count at the leader, who expects all."""
    if cta.rank == LEADER:
        role.expect_tx(full, config.CTAS * target.bytes)
        role.arrive(full)  # MMA waits
    role.tma_load(source, target, full, to_barrier_rank=LEADER, tile=step)


def load_statistics(role: Role, cta: Cta, m_tile: int):
    """LSE and D of a query tile; zeros where there are no keys, so that dS is 0 there."""
    tile = m_tile if cta.there else cta.m_tiles
    slot, numbers = m_tile % cta.sStats.stages, 2 * config.TILE  # LSE, then D
    source = cta.stats.tile(columns=slice(tile * numbers, (tile + 1) * numbers))
    role.expect_tx(f"stats_full[{slot}]", cta.sStats.bytes)
    role.arrive(f"stats_full[{slot}]")  # COMPUTE waits
    role.tma_load(source, cta.sStats[slot], f"stats_full[{slot}]", tile=m_tile)


def load(role: Role, cta: Cta):
    """LOAD: the key tiles once, then the halves of every query tile in the order of their use."""
    load_half(role, cta, cta.k.tile(cta.own_keys), cta.sK[0], "k_full")
    for step in range(cta.m_tiles + 1):
        rows = slice(step * config.TILE, (step + 1) * config.TILE)
        before = slice(rows.start - config.TILE, rows.start)
        start = rows.start + cta.own_half.start
        own_rows = slice(start, start + config.HALF)
        if step < cta.m_tiles:
            yield from role.wait("q_empty", step % 2 ^ 1, step)  # MMA's commit arrives
            load_half(role, cta, cta.q.tile(own_rows), cta.sQ[0], "q_full", step)
        if step > 0:
            yield from role.wait("qt_empty", step % 2, step - 1)  # MMA's commit arrives
            half = cta.q.tile(before, cta.own_columns)
            load_half(role, cta, half, cta.sQt[0], "qt_full", step - 1)
        if step < cta.m_tiles:
            load_statistics(role, cta, step)
            if step == 0:
                load_half(role, cta, cta.v.tile(cta.own_keys), cta.sV[0], "v_full")
            yield from role.wait("do_empty", step % 2 ^ 1, step)  # MMA's commit arrives
            load_half(role, cta, cta.dout.tile(own_rows), cta.sdO[0], "do_full", step)
            if step == 0:
                load_half(role, cta, cta.k.tile(columns=cta.own_columns), cta.sKt[0], "kt_full")
            yield from role.wait("dot_empty", step % 2 ^ 1, step)  # MMA's commit arrives
            load_half(
                role, cta, cta.dout.tile(rows, cta.own_columns), cta.sdOt[0], "dot_full", step
            )
    for empty in ("q_empty", "qt_empty", "do_empty", "dot_empty"):
        yield from role.wait(empty, (cta.m_tiles - 1) % 2)  # MMA's last commits arrive


# ---- mma -----------------------------------------------------------------------------------


def mma_transposed(role: Role, cta: Cta, sA, sB, tD, op: str, step: int):
    """Issue S = K Q^T, unscaled, or dP = V dO^T: a CTA's keys, both CTAs' halves of the queries."""
    shape = (config.CTAS * config.TILE, config.TILE, cta.head_dim)
    role.mma(tD, sA[0], sB[0], False, shape, pair=True, op=op, tile=step)


def mma_add(role: Role, cta: Cta, tD, halves, sB, op: str, step: int):
    """Issue dV += P dO or dK += dS Q: A in tensor memory in halves, B both CTAs' halves of d."""
    shape = (config.CTAS * config.TILE, cta.head_dim, config.HALF)
    for half, tA in enumerate(halves):
        rows = slice(half * config.HALF, (half + 1) * config.HALF)
        add = step > 0 or half > 0
        role.mma(tD, tA, sB[0].part(rows).T, add, shape, pair=True, op=op, tile=step)


def mma_dq(role: Role, cta: Cta, step: int):
    """Issue dQ = dS^T K over both CTAs' keys: a CTA's rows of dQ, both CTAs' halves of d."""
    shape = (config.TILE, cta.head_dim, config.CTAS * config.TILE)
    role.mma(cta.tdQ, cta.sdS[0].T, cta.sKt[0].T, False, shape, pair=True, op="dQ", tile=step)


def scores(role: Role, cta: Cta, step: int):
    """S of a step, when its query tile is there."""
    yield from role.wait("q_full", step % 2, step)  # LOAD and TMA arrive
    mma_transposed(role, cta, cta.sK, cta.sQ, cta.tS, "S", step)
    role.commit("s_full", multicast=True)  # COMPUTE waits
    role.commit("q_empty", multicast=True)  # LOAD waits


def add_dk(role: Role, cta: Cta, step: int):
    """dK of a step, when dS is in tensor memory."""
    yield from role.wait("ds_full", step % 2, step)  # COMPUTE of both CTAs arrives
    role.fence_after()
    yield from role.wait("qt_full", step % 2, step)  # LOAD and TMA arrive
    mma_add(role, cta, cta.tdK, cta.tdS, cta.sQt, "dK", step)
    role.commit("qt_empty", multicast=True)  # LOAD waits


def dp(role: Role, cta: Cta, step: int):
    """dP of a step, when dO is there."""
    yield from role.wait("do_full", step % 2, step)  # LOAD and TMA arrive
    mma_transposed(role, cta, cta.sV, cta.sdO, cta.tdP, "dP", step)
    role.commit("dp_full", multicast=True)  # COMPUTE waits
    role.commit("do_empty", multicast=True)  # LOAD waits


def dq(role: Role, cta: Cta, step: int):
    """dQ of a step, when the halves of dS were swapped and the S after it was read."""
    if step == 0:
        yield from role.wait("kt_full", 0, step)  # LOAD and TMA arrive
    if step < cta.m_tiles - 1:
        yield from role.wait("s_read", step % 2 ^ 1, step)  # COMPUTE of both CTAs arrives
        role.fence_after()
    yield from role.wait("dx_both", step % 2, step)  # RELAY of both CTAs arrives
    mma_dq(role, cta, step)
    role.commit("dq_full", multicast=True)  # REDUCE and COMPUTE wait


def add_dv(role: Role, cta: Cta, step: int):
    """dV of a step, when P is there."""
    yield from role.wait("p_full", step % 2, step)  # COMPUTE of both CTAs arrives
    role.fence_after()
    yield from role.wait("dot_full", step % 2, step)  # LOAD and TMA arrive
    mma_add(role, cta, cta.tdV, cta.tP, cta.sdOt, "dV", step)
    role.commit("dot_empty", multicast=True)  # LOAD waits


def mma(role: Role, cta: Cta):
    """MMA of the leader: S, dP and dV of a step; between them dK and dQ of the step before."""
    if cta.rank != LEADER:
        return
    yield from role.wait("k_full", 0)  # LOAD and TMA arrive
    for step in range(cta.m_tiles + 1):
        if step > 1:  # S and the next dQ overwrite dQ
            yield from role.wait("dq_read", step % 2, step - 2)  # REDUCE of both CTAs arrives
            role.fence_after()
        if step < cta.m_tiles:
            yield from scores(role, cta, step)
        else:
            role.commit("dv_full", multicast=True)  # COMPUTE waits
        if step > 0:
            yield from add_dk(role, cta, step - 1)
        else:
            yield from role.wait("v_full", 0)  # LOAD and TMA arrive
        if step < cta.m_tiles:
            yield from dp(role, cta, step)
        if step > 0:
            yield from dq(role, cta, step - 1)
        if step < cta.m_tiles:
            yield from add_dv(role, cta, step)
    role.commit("dk_full", multicast=True)  # COMPUTE waits


# ---- compute -------------------------------------------------------------------------------


def probabilities(role: Role, cta: Cta, half: int, slot: int, step: int):
    """P = exp2(scale S - LSE) of this warpgroup's queries, in registers and tensor memory."""
    parts = []
    whole = yield from role.tmem_load(cta.tS.part(half * config.HALF, config.HALF), step)
    yield from role.wait_ld()
    role.fence_before()
    role.arrive("s_read", to=LEADER)  # MMA waits
    for part in range(0, config.HALF, config.CHUNK):
        s = whole[:, part : part + config.CHUNK]
        lse = role.read(statistics(cta, slot, 0, half * config.HALF + part), by_all=True)
        amounts = {"mufu": s.numel(), "cvt": 0.5 * s.numel(), "issue": slots(SLOTS_P, s)}
        yield from role.execute("P", step, fma=s.numel(), smem=broadcast(role, s), **amounts)
        p = torch.exp2(s * cta.scale_log2 - lse)
        columns = config.CHUNK // 2  # two to a column
        yield from role.tmem_store(cta.tP[half].part(part // 2, columns), p, step)
        parts.append(p)
    yield from role.wait_st()
    return torch.cat(parts, dim=1)


def differences(role: Role, cta: Cta, half: int, slot: int, p, step: int):
    """dS = P (dP - D) of this warpgroup's queries, in registers and tensor memory."""
    parts = []
    for part in range(0, config.HALF, config.CHUNK):
        first = half * config.HALF + part
        dp = yield from role.tmem_load(cta.tdP.part(first, config.CHUNK), step)
        yield from role.wait_ld()
        d = role.read(statistics(cta, slot, 1, first), by_all=True)
        amounts = {"cvt": 0.5 * dp.numel(), "issue": slots(SLOTS_DS, dp)}
        moved = broadcast(role, dp)
        yield from role.execute("dS", step, fma=2 * dp.numel(), smem=moved, **amounts)
        ds = p[:, part : part + config.CHUNK] * (dp - d)
        yield from role.tmem_store(cta.tdS[half].part(part // 2, config.CHUNK // 2), ds, step)
        parts.append(ds)
    yield from role.wait_st()
    return torch.cat(parts, dim=1)


def statistics(cta: Cta, slot: int, row: int, first: int):
    """LSE (row 0) or D (row 1) of a CHUNK of queries from `first` on: (1, CHUNK)."""
    start = row * config.TILE + first
    return cta.sStats[slot].part(columns=slice(start, start + config.CHUNK))


def broadcast(role: Role, values: torch.Tensor) -> float:
    """Bytes of the port that reading a number for each column takes: every warp by 16 bytes."""
    loads = values.numel() / THREADS_PER_WARP * 4 / config.COPY_BYTES
    return loads * role.sm.machine["smem_broadcast_passes"] * role.sm.machine["smem"]


def slots(per_element: float, values: torch.Tensor) -> float:
    """Warp instructions for all of `values`."""
    return per_element * values.numel() / THREADS_PER_WARP


def compute(role: Role, cta: Cta, number: int):
    """COMPUTE0 or COMPUTE1: S to P and dP to dS for half of the queries; half of the outputs."""
    half = number ^ cta.rank  # COMPUTE1 has the queries whose dQ is the peer's
    target = cta.sdX[0] if number else cta.sdS[0].part(cta.own_keys)
    for step in range(cta.m_tiles):
        slot, parity = step % cta.sStats.stages, step // cta.sStats.stages % 2
        yield from role.wait(f"stats_full[{slot}]", parity, step)  # LOAD and TMA arrive
        yield from role.wait("s_full", step % 2, step)  # MMA's commit arrives
        role.fence_after()
        p = yield from probabilities(role, cta, half, slot, step)
        role.fence_before()
        role.arrive("p_full", to=LEADER)  # MMA waits
        yield from role.wait("dp_full", step % 2, step)  # MMA's commit arrives
        role.fence_after()
        ds = yield from differences(role, cta, half, slot, p, step)
        yield from role.wait("dq_full", step % 2 ^ 1, step)  # MMA's commit arrives
        yield from role.execute("stage dS", step, smem=target.bytes)
        role.write(target, ds)
        role.fence_proxy()
        role.fence_before()
        role.arrive("ds_full", to=LEADER)  # MMA waits
        if number == 1:
            role.arrive("dx_staged")  # RELAY waits
    yield from epilogue(role, cta, half)


# ---- relay ---------------------------------------------------------------------------------


def relay(role: Role, cta: Cta):
    """RELAY: copy half of dS to the peer, and tell the leader when the peer's has come."""
    for step in range(cta.m_tiles):
        role.expect_tx("dx_full", cta.sdX.bytes)
        role.arrive("dx_full")  # RELAY itself waits
        yield from role.wait("dx_staged", step % 2, step)  # COMPUTE1 arrives
        role.dsmem_copy(cta.sdX[0], cta.sdS[0].part(cta.own_keys), "dx_full", step)
        yield from role.wait("dx_full", step % 2, step)  # the peer's copy arrives
        role.arrive("dx_both", to=LEADER)  # MMA waits


# ---- reduce --------------------------------------------------------------------------------


def reduce(role: Role, cta: Cta):
    """REDUCE: every dQ to registers at once, then in slices to shared memory and outside."""
    for m_tile in range(cta.m_tiles):
        yield from role.wait("dq_full", m_tile % 2, m_tile)  # MMA's commit arrives
        role.fence_after()
        dq = yield from role.tmem_load(cta.tdQ, m_tile)
        yield from role.wait_ld()
        role.fence_before()
        role.arrive("dq_read", to=LEADER)  # MMA waits
        for number, part in enumerate(dq.split(config.SLICE, dim=1)):
            yield from add_slice(role, cta, part, m_tile, number)
    yield from role.bulk_wait(read=True)


def add_slice(role: Role, cta: Cta, values: torch.Tensor, m_tile: int, number: int):
    """Stage a slice of dQ and add it to global memory, when the slice before has left."""
    yield from role.bulk_wait(read=True)
    yield from role.sync("dq_slot", m_tile)
    amounts = {"smem": 4 * values.numel(), "issue": slots(SLOTS_DQ, values)}
    yield from role.execute("stage dQ", m_tile, **amounts)
    role.write(cta.sdQ[0], values)
    role.fence_proxy()
    yield from role.sync("dq_slot", m_tile)
    start = m_tile * config.TILE + cta.own_half.start
    for half in range(2):  # of the lanes, which have the same rows and other columns
        lanes = slice(half * config.HALF, (half + 1) * config.HALF)
        column = half * cta.head_dim // 2 + number * config.SLICE
        target = slice(start, start + config.HALF), slice(column, column + config.SLICE)
        role.reduce_add(cta.sdQ[0].part(lanes), cta.dq_accum.tile(*target), m_tile)


# ---- epilogue ------------------------------------------------------------------------------


def epilogue(role: Role, cta: Cta, half: int):
    """dV, then dK: each warpgroup has half of the columns."""
    yield from role.wait("dv_full", 0)  # MMA's commit arrives
    role.fence_after()
    yield from store_block(role, cta, cta.tdV, 1.0, cta.sdV[half], cta.dv, half)
    yield from role.wait("dk_full", 0)  # MMA's commit arrives
    role.fence_after()
    yield from store_block(role, cta, cta.tdK, cta.softmax_scale, cta.sdK[half], cta.dk, half)
    yield from role.bulk_wait(read=True)


def store_block(role: Role, cta: Cta, tD, scale: float, staged, target: Global, half: int):
    """A block of output, times `scale`, to shared memory and from there to global memory."""
    wide = cta.head_dim // 2
    column = half * wide
    for part in range(0, wide, config.CHUNK):
        values = yield from role.tmem_load(tD.part(column + part, config.CHUNK))
        yield from role.wait_ld()
        n = values.numel()
        yield from role.execute("output", fma=n, cvt=0.5 * n, smem=2 * n)
        role.write(staged.part(columns=slice(part, part + config.CHUNK)), values * scale)
    role.fence_proxy()
    role.fence_before()
    yield from role.sync("staged")
    role.tma_store(staged, target.tile(cta.own_keys, slice(column, column + wide)))


# ---- kernel --------------------------------------------------------------------------------


def kernel(role: Role, cluster: Cluster, work):
    """What every role does: all meet when MMA has tensor memory, work, and meet again."""
    if role.name == "MMA":
        yield from role.alloc(config.TMEM_COLUMNS)
    yield from all_of_both(role, "start")
    yield from role.setmaxnreg(role.budget)
    yield from work(role, cluster.ctas[role.sm.rank])
    yield from all_of_both(role, "end")
    if role.name == "MMA":
        role.dealloc()


def all_of_both(role: Role, barrier: str):
    """All threads of both CTAs wait for all, with accesses to tensor memory ordered across it."""
    role.fence_before()
    yield from role.sync(barrier)
    role.fence_after()
