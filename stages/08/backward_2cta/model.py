# SPDX-License-Identifier: Apache-2.0
"""The schedule of the backward pass on the SM model: a coroutine for each warp role. Runs: host.

Functions are named as in the kernel; each role waits, arrives, copies and multiplies in its order.
Left out: issue slots of MMA, LOAD and RELAY.
"""

import math

import torch

from ...common.model import (
    OPEN,
    Global,
    GradientRun,
    Machine,
    Pair,
    Role,
    Sequences,
    Sm,
    gradient_run,
)
from ...common.plan import THREADS_PER_WARP
from ..model import unmasked_queries, unseen, visited_queries
from . import config

# Issue slots of a warp for an element of its rows, by what its compiled loop has.
SLOTS_P = 2.95  # from S to P: waits, loads, FMA, exp2, conversion, store
SLOTS_DS = 2.38  # from dP to dS: with subtraction and product instead
SLOTS_DQ = 1.89  # of dQ: load, store, waits, the reductions' issue
SLOTS_MASK = 4  # 2 comparisons, 2 selections, all on the ALU
LEADER = 0  # rank of the CTA that issues the MMAs of both
REDUNDANT = {  # why the model does not miss a synchronisation (common.mutation)
    "* fence_before in all_of_both": "alloc and dealloc, on the other side, are synchronous",
    "* fence_after in all_of_both": "alloc and dealloc, on the other side, are synchronous",
    "REDUCE sync dq_slot": "the four warps of a role are one agent here; the log has each",
    "COMPUTE? fence_before in store_block #1": "after wait_ld only dealloc, synchronous, follows",
    "LOAD wait * in load #2": "memory that a late commit writes is still there in the model",
}


def run(
    q,
    k,
    v,
    dout,
    stats,
    softmax_scale: float,
    machine: Machine,
    max_ctas: int | None = None,
    window: tuple[int, int] = (OPEN, OPEN),
    sequences: Sequences | None = None,
) -> GradientRun:
    """dQ, dK, dV of checked CPU tensors q, dout (b, sq, h, d), k, v (b, sk, h, d).

    stats (b, h, tiles, 2, TILE): of each row LSE * log2(e), +inf where there is no row or it sees
    nothing, and the sum of O * dO less dLSE; the tiles of a sequence follow those of the one before
    it. max_ctas counts pairs. window, (left, right); sequences: every batch entry is one when None.
    """
    unit, given = config.CTAS * config.TILE, sequences or Sequences.whole(q, k)

    def cluster(batch: int, head: int, n_block: int, dq_accum: torch.Tensor):
        entry, sequence, first_key = given.entry(batch), given.rows[batch], n_block * unit
        tiles = visited_queries(first_key, unit, sequence, window)
        if tiles[0] == tiles[1]:
            return None
        keys, queries = sequence.keys(first_key, first_key + unit), sequence.queries()
        which = ((q, queries), (dout, queries), (k, keys), (v, keys))
        tensors = (x[entry, rows, head] for x, rows in which)
        first_tile = sequence.begin_q // config.TILE + batch - entry
        of_tiles = stats[entry, head, first_tile:]
        place = (sequence, first_key, tiles, window)
        work = Cluster(machine, *tensors, of_tiles, softmax_scale, *place)
        work.start()
        return work.pair, lambda: work.result(dq_accum, keys.stop - keys.start)

    return gradient_run(machine, q, k, softmax_scale, unit, cluster, max_ctas, given)


class Cluster:
    """The tensors of a pair and its CTAs; q, dout (len_q, d), k, v (its keys, d).

    Copies fill with zeros what a sequence does not have, and write nothing there: here the tensors
    have it, as zeros. tiles, the query tiles (m_min, m_max) that both CTAs visit.
    """

    def __init__(
        self,
        machine: Machine,
        q,
        dout,
        k,
        v,
        stats,
        softmax_scale: float,
        sequence,
        first_key,
        tiles,
        window,
    ):
        self.head_dim, tile = q.shape[1], config.TILE
        self.sequence, self.first_key, self.window = sequence, first_key, window
        self.m_min, self.m_max = tiles
        self.m_tiles = self.m_max - self.m_min
        self.softmax_scale, self.scale_log2 = softmax_scale, softmax_scale * math.log2(math.e)
        fill = lambda x, rows: torch.nn.functional.pad(x, (0, 0, 0, rows - len(x)))
        rows, keys = math.ceil(len(q) / tile) * tile, config.CTAS * tile
        self.q, self.dout = Global("q", fill(q, rows)), Global("dout", fill(dout, rows))
        self.k, self.v = Global("k", fill(k, keys)), Global("v", fill(v, keys))
        self.stats = Global("stats", stats[: rows // tile].reshape(-1))
        self.dq_accum = Global("dq_accum", torch.zeros(rows, self.head_dim))
        self.dk, self.dv = (
            Global(name, k.new_full((keys, self.head_dim), math.nan)) for name in ("dk", "dv")
        )
        self.pair = Pair(machine, config.plan(self.head_dim))
        self.ctas = [Cta(self, sm) for sm in self.pair.sms]

    def result(self, dq_accum: torch.Tensor, keys: int) -> tuple[torch.Tensor, torch.Tensor]:
        """(dk, dv) of its `keys` keys; adds dQ of the sequence (len_q, d) to dq_accum."""
        dq_accum += self.dq_accum.tensor[: len(dq_accum)]
        return self.dk.tensor[:keys], self.dv.tensor[:keys]

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
    def has_keys(self) -> bool:
        """Whether the sequence has any of them."""
        return self.first_key + self.own_keys.start < self.sequence.len_k

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


def load_statistics(role: Role, cta: Cta, step: int):
    """LSE and D of a query tile."""
    tile, slot, numbers = cta.m_min + step, step % cta.sStats.stages, 2 * config.TILE  # LSE, then D
    source = cta.stats.tile(columns=slice(tile * numbers, (tile + 1) * numbers))
    role.expect_tx(f"stats_full[{slot}]", cta.sStats.bytes)
    role.arrive(f"stats_full[{slot}]")  # COMPUTE waits
    role.tma_load(source, cta.sStats[slot], f"stats_full[{slot}]", tile=step)


def load(role: Role, cta: Cta):
    """LOAD: the key tiles once, then the halves of every query tile in the order of their use."""
    keys = cta.own_keys if cta.has_keys else slice(config.TILE)  # the leader's stand in
    load_half(role, cta, cta.k.tile(keys), cta.sK[0], "k_full")
    for step in range(cta.m_tiles + 1):
        first = (cta.m_min + step) * config.TILE
        rows = slice(first, first + config.TILE)
        before = slice(first - config.TILE, first)
        start = first + cta.own_half.start
        start = start if start < cta.sequence.len_q else first  # as do its queries
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
                load_half(role, cta, cta.v.tile(keys), cta.sV[0], "v_full")
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


def hide(role: Role, cta: Cta, s: torch.Tensor, half: int, step: int):
    """-inf for the queries of a tile that do not see a key."""
    yield from role.execute("mask", step, alu=SLOTS_MASK * s.numel(), issue=slots(SLOTS_MASK, s))
    first_query = (cta.m_min + step) * config.TILE + half * config.HALF
    first_key = cta.first_key + cta.own_keys.start
    hidden = unseen(first_key, first_query, s.shape, cta.sequence, cta.window)
    return s.masked_fill(hidden, -math.inf)


def probabilities(role: Role, cta: Cta, half: int, slot: int, step: int, masked: bool):
    """P = exp2(scale S - LSE) of this warpgroup's queries, in registers and tensor memory."""
    parts = []
    whole = yield from role.tmem_load(cta.tS.part(half * config.HALF, config.HALF), step)
    yield from role.wait_ld()
    role.fence_before()
    role.arrive("s_read", to=LEADER)  # MMA waits
    if masked:
        whole = yield from hide(role, cta, whole, half, step)
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
    first_key, tiles = cta.first_key + cta.own_keys.start, (cta.m_min, cta.m_max)
    m_low, m_high = unmasked_queries(first_key, config.TILE, cta.sequence, cta.window, *tiles)
    for turn in range(cta.m_tiles):
        masked = not m_low <= cta.m_min + turn < m_high
        yield from step(role, cta, number, half, turn, masked)
    yield from epilogue(role, cta, half)


def step(role: Role, cta: Cta, number: int, half: int, turn: int, masked: bool):
    """One S to P and dP to dS. masked: not every query sees all of the CTA's keys."""
    target = cta.sdX[0] if number else cta.sdS[0].part(cta.own_keys)
    slot, parity = turn % cta.sStats.stages, turn // cta.sStats.stages % 2
    yield from role.wait(f"stats_full[{slot}]", parity, turn)  # LOAD and TMA arrive
    yield from role.wait("s_full", turn % 2, turn)  # MMA's commit arrives
    role.fence_after()
    p = yield from probabilities(role, cta, half, slot, turn, masked)
    role.fence_before()
    role.arrive("p_full", to=LEADER)  # MMA waits
    yield from role.wait("dp_full", turn % 2, turn)  # MMA's commit arrives
    role.fence_after()
    ds = yield from differences(role, cta, half, slot, p, turn)
    yield from role.wait("dq_full", turn % 2 ^ 1, turn)  # MMA's commit arrives
    yield from role.execute("stage dS", turn, smem=target.bytes)
    role.write(target, ds)
    role.fence_proxy()
    role.fence_before()
    role.arrive("ds_full", to=LEADER)  # MMA waits
    if number == 1:
        role.arrive("dx_staged")  # RELAY waits


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
    start = (cta.m_min + m_tile) * config.TILE + cta.own_half.start
    for half in range(2):  # of the lanes, which have the same rows and other columns
        lanes = slice(half * config.HALF, (half + 1) * config.HALF)
        column = half * cta.head_dim // 2 + number * config.SLICE
        target = slice(start, start + config.HALF), slice(column, column + config.SLICE)
        if start < cta.sequence.len_q:
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
    if cta.has_keys:
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
