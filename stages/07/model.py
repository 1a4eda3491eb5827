# SPDX-License-Identifier: Apache-2.0
"""Stage 07's schedule on the SM model: a coroutine for each warp role. Runs: host.

Functions are named as in the kernel; each role waits, arrives, copies and multiplies in its order.
Left out: issue slots of copies, MMAs and barriers, and the factor's exp2 (1 a row).
"""

import math

import torch

from ..common.model import Global, Machine, PipelineState, Role, Run, Sm, TmemView, grid_run
from ..common.plan import THREADS_PER_WARP
from . import config

LN2 = math.log(2.0)

# Issue slots of a warp per score of its rows: 4.19 in the compiled loop at head dim 128.
SLOTS_MAX = 0.5  # a 3-input max takes two scores
SLOTS_EXP = 2.79  # FMA and add packed by two, exp2, conversion of two, and everything else
SLOTS_EMULATED = 4.1  # more for an emulated one: 3.29 without, 4.19 with 28 of 128
SLOTS_RESCALE = 90 / 128  # per column of O: 90 in the compiled loop of CORRECTION at head dim 128
REDUNDANT = {  # why the model does not miss a synchronisation (common.mutation)
    "* fence_before in begin": "only alloc came before, which is synchronous",
    "* fence_after in begin": "start orders alloc alone, which is synchronous",
    "SOFTMAX? wait stats_empty? in softmax #1": "S full follows o_rescaled, which follows the read",
    "SOFTMAX? fence_before in softmax #1": "CORRECTION touches O alone; s_full released its PV",
    "MMA wait o_staged0": "CORRECTION stages tile 1 after tile 0: o_staged1 implies it",
    "CORRECTION fence_before in correction #1": "after wait_ld only dealloc, synchronous, follows",
    "MMA fence_after in mma": "only dealloc follows, which is synchronous",
}
REDUNDANT_COMPILED = {  # the same where one verb became several instructions (device_mutation)
    "EPILOGUE bulk_wait": "the wait after the second tile covers the first",
}


def run(q, k, v, softmax_scale: float, machine: Machine, max_ctas: int | None = None) -> Run:
    """Full attention of checked CPU tensors q (b, sq, h, d), k and v (b, sk, h, d)."""
    tile_m = config.Q_TILES * config.TILE_M

    def cta(batch: int, head: int, m_block: int):
        rows = slice(m_block * tile_m, (m_block + 1) * tile_m)
        tensors = q[batch, rows, head], k[batch, :, head], v[batch, :, head]
        work = Cta(machine, *tensors, softmax_scale / LN2)
        work.start()
        return work.sm, lambda: (work.out.tensor, work.lse)

    return grid_run(machine, q, k, tile_m, cta, max_ctas)


class Cta:
    """The tensors, memories and roles of one CTA; q (rows, d), k and v (sk, d)."""

    def __init__(self, machine: Machine, q, k, v, scale_log2: float):
        self.head_dim, self.scale_log2 = q.shape[1], scale_log2
        tile_n = config.TILE_N[self.head_dim]
        self.num_n_blocks = len(k) // tile_n
        self.sm = Sm(machine, config.plan(self.head_dim))
        rows = config.Q_TILES * config.TILE_M
        beyond = rows - len(q)  # rows of the last CTA beyond the tensor: TMA fills in zeros
        self.q = Global("q", torch.nn.functional.pad(q, (0, 0, 0, beyond)))
        self.k, self.v = Global("k", k), Global("v", v)
        self.out = Global("out", q.new_full((rows, self.head_dim), math.nan))
        self.lse = torch.full((rows,), math.nan)
        self.sQ = self.sm.buffer("sQ", (config.TILE_M, self.head_dim), q.dtype)
        self.sKV = self.sm.buffer("sKV", (tile_n, self.head_dim), q.dtype)
        self.sO = self.sm.buffer("sO", (config.TILE_M, self.head_dim), q.dtype)
        self.sStats = self.sm.buffer("sStats", (rows, 2), torch.float32)
        view = self.sm.tmem.view
        self.tS = [view(f"S{tile}") for tile in range(config.Q_TILES)]
        self.tP = [view(f"P{tile}", q.dtype) for tile in range(config.Q_TILES)]
        self.tO = [view(f"O{tile}") for tile in range(config.Q_TILES)]

    def start(self):
        """Put every role to work."""
        for name, coroutine in (
            ("SOFTMAX0", lambda role: softmax(role, self, 0)),
            ("SOFTMAX1", lambda role: softmax(role, self, 1)),
            ("CORRECTION", lambda role: correction(role, self)),
            ("MMA", lambda role: mma(role, self)),
            ("EPILOGUE", lambda role: epilogue(role, self)),
            ("LOAD", lambda role: load(role, self)),
            ("EMPTY", begin),
        ):
            self.sm.start(name, coroutine)


# ---- load ----------------------------------------------------------------------------------


def load_tile(role: Role, source: Global, m_tile: int, target, full: str, tile: int = -1):
    """Announce the bytes of one tile at the barrier `full` and start its copy."""
    rows = target.shape[0]
    role.expect_tx(full, target.bytes)
    role.arrive(full)  # MMA waits
    role.tma_load(source.tile(slice(m_tile * rows, (m_tile + 1) * rows)), target, full, tile=tile)


def load(role: Role, cta: Cta):
    """LOAD: both query tiles and, in turn, every tile of K and V."""
    yield from begin(role)
    for tile in range(config.Q_TILES):
        load_tile(role, cta.q, tile, cta.sQ[tile], f"q_full{tile}")
    ring = PipelineState(config.KV_STAGES[cta.head_dim], parity=1)
    for n_block in reversed(range(cta.num_n_blocks)):
        for source in (cta.k, cta.v):
            yield from role.wait(f"kv_empty[{ring.slot}]", ring.parity, n_block)  # MMA arrives
            full = f"kv_full[{ring.slot}]"
            load_tile(role, source, n_block, cta.sKV[ring.slot], full, n_block)
            ring.advance()


# ---- mma -----------------------------------------------------------------------------------


def mma_qk(role: Role, cta: Cta, tile: int, slot: int, n_block: int):
    """Issue S = Q K^T, unscaled, and let `s_full` arrive when it is done."""
    sQ, sK, tS = cta.sQ[tile], cta.sKV[slot], cta.tS[tile]
    shape = (config.TILE_M, sK.shape[0], cta.head_dim)
    role.mma(tS, sQ, sK, False, shape, op=f"S{tile}", tile=n_block)
    role.commit(f"s_full{tile}")  # the tile's softmax waits


def mma_pv(role: Role, cta: Cta, tile: int, slot: int, accumulate: bool, phase: int, n_block: int):
    """Issue O += P V (O = P V unless `accumulate`), the last keys when their part of P is there."""
    tP, sV, tO = cta.tP[tile], cta.sKV[slot], cta.tO[tile]
    first, keys = config.P_FIRST * config.CHUNK, sV.shape[0]
    for start, stop in ((0, first), (first, keys)):
        if start:
            yield from role.wait(f"p_rest{tile}", phase, n_block)  # its softmax arrives
            role.fence_after()
        part_p = tP.part(start // 2, (stop - start) // 2)  # two to a column
        part_v = sV.part(slice(start, stop)).T
        shape = (config.TILE_M, cta.head_dim, stop - start)
        role.mma(tO, part_p, part_v, accumulate or start > 0, shape, op=f"O{tile}", tile=n_block)


def wait_for_p(role: Role, tile: int, phase: int, n_block: int):
    """Return when P of a query tile has begun and its O is rescaled."""
    yield from role.wait(f"p_full{tile}", phase, n_block)  # its softmax arrives
    yield from role.wait(f"o_rescaled{tile}", phase, n_block)  # CORRECTION arrives
    role.fence_after()


def mma(role: Role, cta: Cta):
    """MMA: every S = Q K^T and O += P V, the two query tiles in turn; frees tensor memory."""
    yield from begin(role)
    ring, last = PipelineState(config.KV_STAGES[cta.head_dim]), cta.num_n_blocks - 1
    yield from role.wait("kv_full[0]", 0, last)  # LOAD and TMA arrive: the first K
    for tile in range(config.Q_TILES):
        yield from role.wait(f"q_full{tile}", 0)  # LOAD and TMA arrive
        mma_qk(role, cta, tile, 0, last)
    role.commit("kv_empty[0]")  # LOAD waits
    ring.advance()
    for n_iter in range(1, cta.num_n_blocks):
        yield from mma_both(role, cta, n_iter, ring)
    yield from role.wait(f"kv_full[{ring.slot}]", ring.parity, 0)  # LOAD and TMA arrive: the last V
    for tile in range(config.Q_TILES):
        yield from wait_for_p(role, tile, last % 2, 0)
        yield from mma_pv(role, cta, tile, ring.slot, last != 0, last % 2, 0)
        role.commit(f"o_full{tile}")  # CORRECTION waits
    for tile in range(config.Q_TILES):
        yield from role.wait(f"o_staged{tile}", 0)  # CORRECTION arrives
    role.fence_after()
    role.dealloc()


def mma_both(role: Role, cta: Cta, n_iter: int, ring: PipelineState):
    """O += P V of the key tile before, then S of this one, for both query tiles."""
    n_block, slot, parity = cta.num_n_blocks - 1 - n_iter, ring.slot, ring.parity
    ring.advance()
    yield from role.wait(f"kv_full[{slot}]", parity, n_block + 1)  # LOAD and TMA arrive: V
    for tile in range(config.Q_TILES):
        phase = (n_iter - 1) % 2
        yield from wait_for_p(role, tile, phase, n_block + 1)
        yield from mma_pv(role, cta, tile, slot, n_iter != 1, phase, n_block + 1)
        if tile == config.Q_TILES - 1:
            role.commit(f"kv_empty[{slot}]")  # LOAD waits
        if tile == 0:
            yield from role.wait(f"kv_full[{ring.slot}]", ring.parity, n_block)  # LOAD: K
        mma_qk(role, cta, tile, ring.slot, n_block)
    role.commit(f"kv_empty[{ring.slot}]")  # LOAD waits
    ring.advance()


# ---- softmax -------------------------------------------------------------------------------


def update_max(role: Role, s: torch.Tensor, row_max: torch.Tensor, scale_log2: float, tile: int):
    """The rows' reference points with these scores, and the factor for what was before."""
    amounts = {"alu": 0.5 * s.numel(), "issue": slots(SLOTS_MAX, s)}
    yield from role.execute("max", tile, **amounts)
    new_max = torch.maximum(row_max, s.amax(dim=1))  # both propagate NaN
    step = (row_max - new_max) * scale_log2
    keep = step >= -config.THRESHOLD  # false when it is NaN
    return torch.where(keep, row_max, new_max), torch.where(keep, 1.0, torch.exp2(step))


def exp2_emulated(x: torch.Tensor):
    """2**x by floor, polynomial and exponent; only the roundings of FMA are not the kernel's."""
    x = torch.fmax(x, torch.tensor(config.SMALLEST))  # NaN is a missing operand, as in the kernel
    n = x.floor()
    p = torch.full_like(x, config.POLYNOMIAL[-1])
    for c in reversed(config.POLYNOMIAL[:-1]):
        p = p * (x - n) + c
    return torch.ldexp(p, n)


def exponentials(role: Role, s, row_max, scale_log2: float, pairs: int, tile: int):
    """P of a CHUNK of scores, `pairs` pairs of a row on the FMA units, spread evenly.

    Per score 1 FMA, 1 add and half a conversion, which takes two; 1 exp2 on the MUFU, or 3 adds, 3
    FMAs, 1 max and 1 shift with add.
    """
    n, share = s.numel(), 2 * pairs / config.CHUNK
    amounts = {
        "mufu": (1 - share) * n,
        "fma": (2 + 6 * share) * n,
        "alu": 2 * share * n,
        "cvt": 0.5 * n,
        "issue": slots(SLOTS_EXP + share * SLOTS_EMULATED, s),
    }
    yield from role.execute("exp", tile, **amounts)
    x = s * scale_log2 - (row_max * scale_log2)[:, None]
    half = config.CHUNK // 2
    emulated = [pair * pairs % half < pairs for pair in range(half) for _ in range(2)]
    return torch.where(torch.tensor(emulated), exp2_emulated(x), torch.exp2(x))


def load_scores(role: Role, tS: TmemView, tile: int):
    """S from tensor memory to registers; complete on return."""
    s = yield from role.tmem_load(tS, tile)
    yield from role.wait_ld()
    return s


def probabilities(role: Role, cta: Cta, s, row_max, tile: int, n_block: int):
    """A row of S to P, in registers and, rounded, in tensor memory, in two parts."""
    parts = []
    for part, pairs in enumerate(config.EMULATED[cta.head_dim]):
        chunk = s[:, part * config.CHUNK : (part + 1) * config.CHUNK]
        p = yield from exponentials(role, chunk, row_max, cta.scale_log2, pairs, n_block)
        columns = config.CHUNK // 2  # two to a column
        yield from role.tmem_store(cta.tP[tile].part(part * columns, columns), p, n_block)
        parts.append(p)
        if part == config.P_FIRST - 1:
            yield from role.wait_st()
            role.fence_before()
            role.arrive(f"p_full{tile}")  # MMA waits
    yield from role.wait_st()
    role.fence_before()
    role.arrive(f"p_rest{tile}")  # MMA waits
    return torch.cat(parts, dim=1)


def softmax(role: Role, cta: Cta, tile: int):
    """SOFTMAX0 or SOFTMAX1: every S of one query tile to P; leaves the rows' statistics behind."""
    yield from begin(role)
    row_max = torch.full((config.TILE_M,), -math.inf)
    row_sum = torch.zeros(config.TILE_M)
    for n_iter in range(cta.num_n_blocks):
        n_block = cta.num_n_blocks - 1 - n_iter
        yield from role.wait(f"s_full{tile}", n_iter % 2, n_block)  # MMA's commit arrives
        yield from role.wait(f"stats_empty{tile}", n_iter % 2 ^ 1, n_block)  # CORRECTION arrives
        role.fence_after()
        s = yield from load_scores(role, cta.tS[tile], n_block)
        row_max, acc_scale = yield from update_max(role, s, row_max, cta.scale_log2, n_block)
        yield from write_stats(role, cta, tile, acc_scale[:, None])
        role.fence_before()
        role.arrive(f"stats_full{tile}")  # CORRECTION waits
        p = yield from probabilities(role, cta, s, row_max, tile, n_block)
        row_sum = row_sum * acc_scale + p.sum(dim=1)
    yield from role.wait(f"stats_empty{tile}", cta.num_n_blocks % 2 ^ 1)  # CORRECTION arrives
    yield from write_stats(role, cta, tile, torch.stack([row_sum, row_max], dim=1))
    role.arrive(f"stats_full{tile}")  # CORRECTION waits


def write_stats(role: Role, cta: Cta, tile: int, values: torch.Tensor):
    """(TILE_M, 1 or 2) numbers of the rows to sStats."""
    yield from role.execute("stats", smem=4 * values.numel())
    role.write(stats(cta, tile, values.shape[1]), values)


def stats(cta: Cta, tile: int, columns: int):
    """The first `columns` numbers of each row of a query tile in sStats."""
    rows = slice(tile * config.TILE_M, (tile + 1) * config.TILE_M)
    return cta.sStats[0].part(rows, slice(columns))


def slots(per_element: float, values: torch.Tensor) -> float:
    """Warp instructions for all of `values`."""
    return per_element * values.numel() / THREADS_PER_WARP


# ---- correction ----------------------------------------------------------------------------


def rescale(role: Role, tO: TmemView, acc_scale: torch.Tensor, tile: int):
    """O times the factor (lanes,), in tensor memory, a CHUNK at a time; complete on return."""
    role.fence_after()  # S is full, so the PV before it is done
    for part in chunks(tO):
        out = yield from role.tmem_load(part, tile)
        yield from role.wait_ld()
        amounts = {"fma": out.numel(), "issue": slots(SLOTS_RESCALE, out)}
        yield from role.execute("rescale", tile, **amounts)
        yield from role.tmem_store(part, out * acc_scale[:, None], tile)
    yield from role.wait_st()
    role.fence_before()


def rescale_where_needed(role: Role, tO: TmemView, acc_scale: torch.Tensor, tile: int):
    """Each warp votes whether any of its rows moved; the others leave their O alone."""
    factors = acc_scale.split(THREADS_PER_WARP)
    voted = [q for q, rows in enumerate(factors) if (rows != 1).any()]
    if len(voted) == len(factors):
        yield from rescale(role, tO, acc_scale, tile)
        return
    yield from role.by_quarter(
        {q: lambda warp, q=q: rescale(warp, tO.quarter(q), factors[q], tile) for q in voted}
    )


def correction(role: Role, cta: Cta):
    """CORRECTION: O at the reference point of each new key tile; then the output."""
    yield from begin(role)
    for tile in range(config.Q_TILES):
        yield from role.wait(f"stats_full{tile}", 0, cta.num_n_blocks - 1)  # its softmax arrives
        role.arrive(f"stats_empty{tile}")  # its softmax waits
        role.arrive(f"o_rescaled{tile}")  # MMA waits
    for n_iter in range(1, cta.num_n_blocks):
        n_block = cta.num_n_blocks - 1 - n_iter
        for tile in range(config.Q_TILES):
            yield from role.wait(f"stats_full{tile}", n_iter % 2, n_block)  # its softmax arrives
            acc_scale = role.read(stats(cta, tile, 1))[:, 0]
            role.arrive(f"stats_empty{tile}")  # its softmax waits
            yield from rescale_where_needed(role, cta.tO[tile], acc_scale, n_block)
            role.arrive(f"o_rescaled{tile}")  # MMA waits
    for tile in range(config.Q_TILES):
        yield from role.wait(f"stats_full{tile}", cta.num_n_blocks % 2)  # its softmax arrives
        row_sum, row_max = role.read(stats(cta, tile, 2)).T
        yield from role.wait(f"o_full{tile}", 0)  # MMA's last commit arrives
        role.fence_after()
        yield from stage_row(role, cta, tile, row_sum)
        yield from logsumexp(role, cta, tile, row_max, row_sum)
        role.fence_proxy()
        role.fence_before()
        role.arrive(f"o_staged{tile}")  # EPILOGUE and MMA wait


def chunks(tO: TmemView) -> list[TmemView]:
    """O in parts of CHUNK columns."""
    return [tO.part(at, config.CHUNK) for at in range(0, tO.columns, config.CHUNK)]


# ---- epilogue ------------------------------------------------------------------------------


def stage_row(role: Role, cta: Cta, tile: int, row_sum: torch.Tensor):
    """Write O / row_sum to shared memory, rounded once; the TMA store needs a fence first."""
    for at, part in zip(range(0, cta.head_dim, config.CHUNK), chunks(cta.tO[tile])):
        out = yield from role.tmem_load(part)
        yield from role.wait_ld()
        amounts = {"fma": out.numel(), "cvt": 0.5 * out.numel(), "smem": 2 * out.numel()}
        yield from role.execute("normalise", **amounts)
        columns = slice(at, at + config.CHUNK)
        role.write(cta.sO[tile].part(columns=columns), out * (1.0 / row_sum)[:, None])


def store_tile(role: Role, cta: Cta, tile: int):
    """Write a staged output tile to global memory by TMA; its part of sO is free on return."""
    rows = slice(tile * config.TILE_M, (tile + 1) * config.TILE_M)
    role.tma_store(cta.sO[tile], cta.out.tile(rows))
    yield from role.bulk_wait(read=True)


def epilogue(role: Role, cta: Cta):
    """EPILOGUE: store both output tiles as they become ready."""
    yield from begin(role)
    for tile in range(config.Q_TILES):
        yield from role.wait(f"o_staged{tile}", 0)  # CORRECTION arrives
        yield from store_tile(role, cta, tile)


def logsumexp(role: Role, cta: Cta, tile: int, row_max: torch.Tensor, row_sum: torch.Tensor):
    """Write the natural log of the sum of exp(softmax_scale * S) over each row."""
    rows = slice(tile * config.TILE_M, (tile + 1) * config.TILE_M)
    yield from role.execute("logsumexp", mufu=config.TILE_M, gmem=4 * config.TILE_M)
    cta.lse[rows] = (row_max * cta.scale_log2 + torch.log2(row_sum)) * LN2


# ---- kernel --------------------------------------------------------------------------------


def begin(role: Role):
    """What every role does first: MMA allocates tensor memory, all meet, take their registers."""
    if role.name == "MMA":
        yield from role.alloc(config.TMEM_COLUMNS)
    role.fence_before()
    yield from role.sync("start")  # all wait for MMA
    role.fence_after()
    yield from role.setmaxnreg(role.budget)
