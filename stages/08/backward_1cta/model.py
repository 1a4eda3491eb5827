# SPDX-License-Identifier: Apache-2.0
"""The schedule of the backward pass on the SM model: a coroutine for each warp role. Runs: host.

Functions are named as in the kernel; each role waits, arrives, copies and multiplies in its order.
Left out: issue slots of MMA and LOAD.
"""

import math

import torch

from ...common.model import (
    OPEN,
    Global,
    GradientRun,
    Machine,
    Role,
    Sequences,
    Sm,
    gradient_run,
)
from ...common.plan import THREADS_PER_WARP
from ..model import unmasked_queries, unseen, visited_queries
from . import config

# Issue slots of a warp for an element of its rows, by what its compiled loop has.
SLOTS_P = {64: 2.92, 128: 2.83}  # from S to P: waits, loads, FMA, exp2, conversion, store
SLOTS_DS = {64: 2.7, 128: 2.3}  # from dP to dS: with subtraction and product instead
SLOTS_DQ = {64: 0.84, 128: 0.74}  # of dQ: load, store, waits, the reductions' issue
SLOTS_MASK = 4  # 2 comparisons, 2 selections, all on the ALU
REDUNDANT = {  # why the model does not miss a synchronisation (common.mutation)
    "* fence_before in begin": "only alloc came before, which is synchronous",
    "* fence_after in begin": "start orders alloc alone, which is synchronous",
    "COMPUTE? wait q_full in step": "S full follows the q_full that MMA waited for",
    "REDUCE sync dq_staged": "the four warps of a role are one agent here; the log has each",
    "COMPUTE? fence_before in store_block #1": "after wait_ld only dealloc, synchronous, follows",
    "COMPUTE? fence_before in epilogue #1": "after wait_ld only dealloc, synchronous, follows",
    "MMA fence_after in mma": "only dealloc follows, which is synchronous",
}
REDUNDANT_AT = {  # the same at one head dim
    64: {"LOAD wait do_empty": "the ring of Q is as long, and its q_empty comes after"},
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
    it. window, (left, right); sequences: every batch entry is one when None.
    """
    unit, given = config.KEY_TILES[q.shape[3]] * config.TILE, sequences or Sequences.whole(q, k)

    def cta(batch: int, head: int, n_block: int, dq_accum: torch.Tensor):
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
        work = Cta(machine, *tensors, of_tiles, softmax_scale, *place)
        work.start()
        return work.sm, lambda: work.result(dq_accum, keys.stop - keys.start)

    return gradient_run(machine, q, k, softmax_scale, unit, cta, max_ctas, given)


def whole_tiles(x: torch.Tensor) -> torch.Tensor:
    """Rows (n, d) with zeros behind them, up to whole tiles."""
    return torch.nn.functional.pad(x, (0, 0, 0, -len(x) % config.TILE))


class Cta:
    """The tensors, memories and roles of one CTA; q, dout (len_q, d), k, v (its keys, d).

    Copies fill with zeros what a sequence does not have, and write nothing there: here the tensors
    have it, as zeros. tiles, the query tiles (m_min, m_max) that it visits.
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
        self.sm = Sm(machine, config.plan(self.head_dim))
        q, dout, k, v = map(whole_tiles, (q, dout, k, v))
        self.key_tiles = len(k) // tile
        self.q, self.dout, self.k, self.v = map(Global, ("q", "dout", "k", "v"), (q, dout, k, v))
        self.stats = Global("stats", stats[: len(q) // tile].reshape(-1))
        self.dq_accum = Global("dq_accum", torch.zeros(q.shape))
        self.dk, self.dv = (Global(name, torch.full_like(k, math.nan)) for name in ("dk", "dv"))
        for name in ("sK", "sV", "sQ", "sdO"):
            setattr(self, name, self.sm.buffer(name, (tile, self.head_dim), q.dtype))
        self.sStats = self.sm.buffer("sStats", (2 * tile,), torch.float32, swizzled=False)
        self.sdS = self.sm.buffer("sdS", (tile, tile), q.dtype)
        self.sdQ = self.sm.buffer("sdQ", (tile, config.SLICE), torch.float32)
        self.sdV, self.sdK = (
            self.sm.buffer(name, (tile, config.HALF), q.dtype) for name in ("sdV", "sdK")
        )
        view = self.sm.tmem.view
        self.tS, self.tdP, self.tdQ = view("S"), view("dP"), view("dQ")
        self.tP = [view(f"P{half}", q.dtype) for half in range(2)]
        self.tdS = [view(f"dS{half}", q.dtype) for half in range(2)]
        self.tdV, self.tdK = (
            [view(name).part(tile * self.head_dim, self.head_dim) for tile in range(self.key_tiles)]
            for name in ("dV", "dK")
        )

    @property
    def steps(self) -> int:
        """Pairs of a query tile and a key tile; key tiles of one query tile follow each other."""
        return self.m_tiles * self.key_tiles

    def result(self, dq_accum: torch.Tensor, keys: int) -> tuple[torch.Tensor, torch.Tensor]:
        """(dk, dv) of its `keys` keys; adds dQ of the sequence (len_q, d) to dq_accum."""
        dq_accum += self.dq_accum.tensor[: len(dq_accum)]
        return self.dk.tensor[:keys], self.dv.tensor[:keys]

    def start(self):
        """Put every role to work."""
        for name, coroutine in (
            ("REDUCE", lambda role: reduce(role, self)),
            ("COMPUTE0", lambda role: compute(role, self, 0)),
            ("COMPUTE1", lambda role: compute(role, self, 1)),
            ("MMA", lambda role: mma(role, self)),
            ("LOAD", lambda role: load(role, self)),
            ("EMPTY", begin),
        ):
            self.sm.start(name, coroutine)


# ---- load ----------------------------------------------------------------------------------


def load_keys(role: Role, cta: Cta, source: Global, target, full: str):
    """The CTA's tiles of K or V, all on one barrier."""
    rows = config.TILE
    role.expect_tx(full, cta.key_tiles * target[0].bytes)
    role.arrive(full)  # MMA waits
    for tile in range(cta.key_tiles):
        role.tma_load(source.tile(slice(tile * rows, (tile + 1) * rows)), target[tile], full)


def load(role: Role, cta: Cta):
    """LOAD: the key tiles once, then every query tile, its statistics and its dO."""
    yield from begin(role)
    load_keys(role, cta, cta.k, cta.sK, "k_full")
    for m_tile in range(cta.m_tiles):
        start = (cta.m_min + m_tile) * config.TILE
        rows = slice(start, start + config.TILE)
        slot, parity = ring(m_tile, cta.sQ.stages)
        yield from role.wait(f"q_empty[{slot}]", parity ^ 1, m_tile)  # MMA's commit arrives
        role.expect_tx(f"q_full[{slot}]", cta.sQ.bytes + cta.sStats.bytes)
        role.arrive(f"q_full[{slot}]")  # MMA and COMPUTE wait
        role.tma_load(cta.q.tile(rows), cta.sQ[slot], f"q_full[{slot}]", tile=m_tile)
        numbers = slice(2 * rows.start, 2 * rows.stop)  # LSE, then D
        stats = cta.stats.tile(columns=numbers)
        role.tma_load(stats, cta.sStats[slot], f"q_full[{slot}]", tile=m_tile)
        if m_tile == 0:
            load_keys(role, cta, cta.v, cta.sV, "v_full")
        slot, parity = ring(m_tile, cta.sdO.stages)
        yield from role.wait(f"do_empty[{slot}]", parity ^ 1, m_tile)  # MMA's commit arrives
        role.expect_tx(f"do_full[{slot}]", cta.sdO.bytes)
        role.arrive(f"do_full[{slot}]")  # MMA waits
        role.tma_load(cta.dout.tile(rows), cta.sdO[slot], f"do_full[{slot}]", tile=m_tile)


def ring(turn: int, stages: int) -> tuple[int, int]:
    """(slot, parity) of a turn in a ring."""
    return turn % stages, turn // stages % 2


# ---- mma -----------------------------------------------------------------------------------


def mma_scores(role: Role, cta: Cta, key_tile: int, slot: int, step: int):
    """Issue S = K Q^T, unscaled, and let `s_full` arrive when it is done."""
    shape = (config.TILE, config.TILE, cta.head_dim)
    role.mma(cta.tS, cta.sK[key_tile], cta.sQ[slot], False, shape, op="S", tile=step)
    role.commit("s_full")  # COMPUTE waits


def mma_dp(role: Role, cta: Cta, key_tile: int, slot: int, step: int):
    """Issue dP = V dO^T, and let `dp_full` arrive when it is done."""
    shape = (config.TILE, config.TILE, cta.head_dim)
    role.mma(cta.tdP, cta.sV[key_tile], cta.sdO[slot], False, shape, op="dP", tile=step)
    role.commit("dp_full")  # COMPUTE waits


def mma_add(role: Role, cta: Cta, tD, halves, sB, accumulate: bool, op: str, step: int):
    """Issue dV += P dO or dK += dS Q: A in tensor memory in halves, B as it was loaded, turned."""
    shape = (config.TILE, cta.head_dim, config.HALF)
    for half, tA in enumerate(halves):
        rows = slice(half * config.HALF, (half + 1) * config.HALF)
        accumulate_now = accumulate or half > 0
        role.mma(tD, tA, sB.part(rows).T, accumulate_now, shape, op=op, tile=step)


def mma_dq(role: Role, cta: Cta, step: int):
    """Issue dQ = dS^T K over all key tiles of the CTA."""
    shape = (config.TILE, cta.head_dim, config.TILE)
    for tile in range(cta.key_tiles):
        role.mma(cta.tdQ, cta.sdS[tile].T, cta.sK[tile].T, tile > 0, shape, op="dQ", tile=step)
    role.commit("dq_full")  # REDUCE waits


def scores(role: Role, cta: Cta, step: int):
    """S of a step, when its query tile is there."""
    m_tile, key_tile = divmod(step, cta.key_tiles)
    slot, parity = ring(m_tile, cta.sQ.stages)
    if key_tile == 0:
        yield from role.wait(f"q_full[{slot}]", parity, step)  # LOAD and TMA arrive
    mma_scores(role, cta, key_tile, slot, step)


def dp_and_dv(role: Role, cta: Cta, step: int):
    """dP of a step, when dO is there and dQ has left the columns; dV, when P is there."""
    m_tile, key_tile = divmod(step, cta.key_tiles)
    slot, parity = ring(m_tile, cta.sdO.stages)
    if key_tile == 0:
        yield from role.wait(f"do_full[{slot}]", parity, step)  # LOAD and TMA arrive
        yield from role.wait("dq_read", m_tile % 2 ^ 1, step)  # REDUCE arrives
        role.fence_after()
    mma_dp(role, cta, key_tile, slot, step)
    yield from role.wait("p_full", step % 2, step)  # COMPUTE arrives
    role.fence_after()
    mma_add(role, cta, cta.tdV[key_tile], cta.tP, cta.sdO[slot], m_tile > 0, "dV", step)
    if key_tile == cta.key_tiles - 1:
        role.commit(f"do_empty[{slot}]")  # LOAD waits


def dk_and_dq(role: Role, cta: Cta, step: int):
    """dK of a step, when dS is there, and after the last key tile dQ."""
    m_tile, key_tile = divmod(step, cta.key_tiles)
    slot, _ = ring(m_tile, cta.sQ.stages)
    yield from role.wait("ds_full", step % 2, step)  # COMPUTE arrives
    role.fence_after()
    mma_add(role, cta, cta.tdK[key_tile], cta.tdS, cta.sQ[slot], m_tile > 0, "dK", step)
    if key_tile == cta.key_tiles - 1:
        role.commit(f"q_empty[{slot}]")  # LOAD waits
        mma_dq(role, cta, step)


def mma(role: Role, cta: Cta):
    """MMA: S of a step before dK and dQ of the last one, dP and dV after; frees tensor memory."""
    yield from begin(role)
    yield from role.wait("k_full", 0)  # LOAD and TMA arrive
    for step in range(cta.steps + 1):
        if step < cta.steps:
            yield from scores(role, cta, step)
        else:
            role.commit("dv_full")  # COMPUTE waits
        if step > 0:
            yield from dk_and_dq(role, cta, step - 1)
        else:
            yield from role.wait("v_full", 0)  # LOAD and TMA arrive
        if step < cta.steps:
            yield from dp_and_dv(role, cta, step)
    role.commit("dk_full")  # COMPUTE waits
    yield from role.wait("dq_read", (cta.m_tiles - 1) % 2)  # REDUCE arrives
    yield from role.wait("dkv_read", 0)  # COMPUTE arrives
    role.fence_after()
    role.dealloc()


# ---- compute -------------------------------------------------------------------------------


def hide(role: Role, cta: Cta, s: torch.Tensor, half: int, step: int):
    """-inf for the queries of a tile that do not see a key."""
    yield from role.execute("mask", step, alu=SLOTS_MASK * s.numel(), issue=slots(SLOTS_MASK, s))
    m_tile, key_tile = divmod(step, cta.key_tiles)
    first_query = (cta.m_min + m_tile) * config.TILE + half * config.HALF
    first_key = cta.first_key + key_tile * config.TILE
    hidden = unseen(first_key, first_query, s.shape, cta.sequence, cta.window)
    return s.masked_fill(hidden, -math.inf)


def probabilities(role: Role, cta: Cta, half: int, slot: int, step: int, masked: bool):
    """P = exp2(scale S - LSE) of this warpgroup's queries, in registers and tensor memory."""
    parts = []
    whole = yield from role.tmem_load(cta.tS.part(half * config.HALF, config.HALF), step)
    yield from role.wait_ld()
    if masked:
        whole = yield from hide(role, cta, whole, half, step)
    for part in range(0, config.HALF, config.CHUNK):
        s = whole[:, part : part + config.CHUNK]
        lse = role.read(statistics(cta, slot, 0, half * config.HALF + part), by_all=True)
        issue = slots(SLOTS_P[cta.head_dim], s)
        amounts = {"mufu": s.numel(), "cvt": 0.5 * s.numel(), "issue": issue}
        yield from role.execute("P", step, fma=s.numel(), smem=broadcast(role, s), **amounts)
        p = torch.exp2(s * cta.scale_log2 - lse)
        columns = config.CHUNK // 2  # two to a column
        yield from role.tmem_store(cta.tP[half].part(part // 2, columns), p, step)
        parts.append(p)
    yield from role.wait_st()
    return torch.cat(parts, dim=1)


def differences(role: Role, cta: Cta, half: int, slot: int, key_tile: int, p, step: int):
    """dS = P (dP - D) of this warpgroup's queries, in tensor and in shared memory."""
    for part in range(0, config.HALF, config.CHUNK):
        columns = slice(half * config.HALF + part, half * config.HALF + part + config.CHUNK)
        dp = yield from role.tmem_load(cta.tdP.part(columns.start, config.CHUNK), step)
        yield from role.wait_ld()
        d = role.read(statistics(cta, slot, 1, columns.start), by_all=True)
        amounts = {"cvt": 0.5 * dp.numel(), "issue": slots(SLOTS_DS[cta.head_dim], dp)}
        moved = broadcast(role, dp) + 2 * dp.numel()
        yield from role.execute("dS", step, fma=2 * dp.numel(), smem=moved, **amounts)
        ds = p[:, part : part + config.CHUNK] * (dp - d)
        yield from role.tmem_store(cta.tdS[half].part(part // 2, config.CHUNK // 2), ds, step)
        role.write(cta.sdS[key_tile].part(columns=columns), ds)
    yield from role.wait_st()


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


def compute(role: Role, cta: Cta, half: int):
    """COMPUTE0 or COMPUTE1: S to P and dP to dS for half of the queries; half of the outputs."""
    yield from begin(role)
    keys, tiles = cta.key_tiles * config.TILE, (cta.m_min, cta.m_max)
    m_low, m_high = unmasked_queries(cta.first_key, keys, cta.sequence, cta.window, *tiles)
    for turn in range(cta.steps):
        masked = not m_low <= cta.m_min + turn // cta.key_tiles < m_high
        yield from step(role, cta, half, turn, masked)
    yield from epilogue(role, cta, half)


def step(role: Role, cta: Cta, half: int, turn: int, masked: bool):
    """One S to P and dP to dS. masked: not every query sees all of the CTA's keys."""
    m_tile, key_tile = divmod(turn, cta.key_tiles)
    slot, parity = ring(m_tile, cta.sQ.stages)
    if key_tile == 0:
        yield from role.wait(f"q_full[{slot}]", parity, turn)  # LOAD and TMA arrive
    yield from role.wait("s_full", turn % 2, turn)  # MMA's commit arrives
    role.fence_after()
    p = yield from probabilities(role, cta, half, slot, turn, masked)
    role.fence_before()
    role.arrive("p_full")  # MMA waits
    yield from role.wait("dp_full", turn % 2, turn)  # MMA's commit arrives
    role.fence_after()
    yield from differences(role, cta, half, slot, key_tile, p, turn)
    role.fence_proxy()
    role.fence_before()
    role.arrive("ds_full")  # MMA waits


# ---- reduce --------------------------------------------------------------------------------


def reduce(role: Role, cta: Cta):
    """REDUCE: every dQ to registers at once, then in slices to shared memory and outside."""
    yield from begin(role)
    for m_tile in range(cta.m_tiles):
        yield from role.wait("dq_full", m_tile % 2, m_tile)  # MMA's commit arrives
        role.fence_after()
        dq = yield from role.tmem_load(cta.tdQ, m_tile)
        yield from role.wait_ld()
        role.fence_before()
        role.arrive("dq_read")  # MMA waits
        for number, part in enumerate(dq.split(config.SLICE, dim=1)):
            yield from add_slice(role, cta, part, m_tile, number)
    yield from role.bulk_wait(read=True)


def add_slice(role: Role, cta: Cta, values: torch.Tensor, m_tile: int, number: int):
    """Stage a slice of dQ and add it to global memory; the slot of the slice before is free."""
    slot = cta.sdQ[number % config.DQ_SLOTS]
    amounts = {"smem": 4 * values.numel(), "issue": slots(SLOTS_DQ[cta.head_dim], values)}
    yield from role.execute("stage dQ", m_tile, **amounts)
    role.write(slot, values)
    role.fence_proxy()
    yield from role.bulk_wait(read=True)
    yield from role.sync("dq_staged", m_tile)
    start = (cta.m_min + m_tile) * config.TILE
    rows = slice(start, start + config.TILE)
    columns = slice(number * config.SLICE, (number + 1) * config.SLICE)
    role.reduce_add(slot, cta.dq_accum.tile(rows, columns), m_tile)


# ---- epilogue ------------------------------------------------------------------------------


def epilogue(role: Role, cta: Cta, half: int):
    """dV, then dK: each warpgroup has a block of HALF columns, of its key tile or its half of d."""
    yield from role.wait("dv_full", 0)  # MMA's commit arrives
    role.fence_after()
    yield from store_block(role, cta, cta.tdV, 1.0, cta.sdV[half], cta.dv, half)
    yield from role.wait("dk_full", 0)  # MMA's commit arrives
    role.fence_after()
    yield from store_block(role, cta, cta.tdK, cta.softmax_scale, cta.sdK[half], cta.dk, half)
    role.fence_before()
    role.arrive("dkv_read")  # MMA waits
    yield from role.bulk_wait(read=True)


def store_block(role: Role, cta: Cta, tD, scale: float, staged, target: Global, half: int):
    """A block of output, times `scale`, to shared memory and from there to global memory."""
    key_tile, column = divmod(half * config.HALF, cta.head_dim)
    there = key_tile < cta.key_tiles
    for part in range(0, config.HALF if there else 0, config.CHUNK):
        values = yield from role.tmem_load(tD[key_tile].part(column + part, config.CHUNK))
        yield from role.wait_ld()
        n = values.numel()
        yield from role.execute("output", fma=n, cvt=0.5 * n, smem=2 * n)
        role.write(staged.part(columns=slice(part, part + config.CHUNK)), values * scale)
    role.fence_proxy()
    role.fence_before()
    yield from role.sync("staged")
    if there:
        rows = slice(key_tile * config.TILE, (key_tile + 1) * config.TILE)
        role.tma_store(staged, target.tile(rows, slice(column, column + config.HALF)))


# ---- kernel --------------------------------------------------------------------------------


def begin(role: Role):
    """What every role does first: MMA allocates tensor memory, all meet, take their registers."""
    if role.name == "MMA":
        yield from role.alloc(config.TMEM_COLUMNS)
    role.fence_before()
    yield from role.sync("start")  # all wait for MMA
    role.fence_after()
    yield from role.setmaxnreg(role.budget)
