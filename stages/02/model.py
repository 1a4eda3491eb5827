# SPDX-License-Identifier: Apache-2.0
"""Stage 02's schedule on the SM model: the kernel's steps, one after the other. Runs: host.

Functions are named as in the kernel; each role waits, arrives, copies and multiplies in its order.
Left out: issue slots of copies, MMAs and barriers, and the factor's exp2 (1 a row).
"""

import math

import torch

from ..common.model import Global, Machine, Role, Run, Sm, TmemView, grid_run
from ..common.plan import THREADS_PER_WARP
from . import config

LN2 = math.log(2.0)

# Issue slots of a warp per score of its rows. 3.85 are in the compiled loop of stage 03, whose
# softmax and rescaling are the same text; 3.29 are left in stage 04 without the rescaling.
SLOTS_MAX = 0.5  # a 3-input max takes two scores
SLOTS_EXP = 2.79  # FMA and add packed by two, exp2, conversion of two, and everything else
SLOTS_RESCALE = 0.56  # per column of O; as many columns as scores at head dim 128
REDUNDANT = {  # why the model does not miss a synchronisation (common.mutation)
    "COMPUTE fence_before in compute #1": "only alloc came before, which is synchronous",
    "COMPUTE fence_after in compute #1": "only alloc came before, which is synchronous",
    "COMPUTE sync *": "128 threads act as one here; a GPU needs it, check_facts looks for it",
    "COMPUTE fence_before in key_tile": "128 threads act as one here; a GPU needs it",
    "COMPUTE fence_after in key_tile #2": "128 threads act as one here; a GPU needs it",
    "COMPUTE wait_st in rescale": "the wait_st after P covers O as well",
    "COMPUTE fence_before in compute #2": "after wait_ld only dealloc, synchronous, follows",
    "COMPUTE fence_after in compute #2": "after wait_ld only dealloc, synchronous, follows",
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
        self.q, self.k, self.v = Global("q", q), Global("k", k), Global("v", v)
        self.out = Global("out", q.new_full((rows, self.head_dim), math.nan))
        self.lse = torch.full((rows,), math.nan)
        self.sQ = self.sm.buffer("sQ", (config.TILE_M, self.head_dim), q.dtype)
        self.sKV = self.sm.buffer("sKV", (tile_n, self.head_dim), q.dtype)
        self.sO = self.sm.buffer("sO", (config.TILE_M, self.head_dim), q.dtype)
        view = self.sm.tmem.view
        self.tS, self.tP, self.tO = [view("S")], [view("P", q.dtype)], [view("O")]

    def start(self):
        """Put every role to work."""
        self.sm.start("COMPUTE", lambda role: compute(role, self))


# ---- load ----------------------------------------------------------------------------------


def load_tile(role: Role, source: Global, m_tile: int, target, full: str, tile: int = -1):
    """Announce the bytes of one tile at the barrier `full` and start its copy."""
    rows = target.shape[0]
    role.expect_tx(full, target.bytes)
    role.arrive(full)  # COMPUTE waits
    role.tma_load(source.tile(slice(m_tile * rows, (m_tile + 1) * rows)), target, full, tile=tile)


# ---- mma -----------------------------------------------------------------------------------


def mma_qk(role: Role, cta: Cta, tile: int, slot: int, n_block: int):
    """Issue S = Q K^T, unscaled, and let `s_full` arrive when it is done."""
    sQ, sK, tS = cta.sQ[tile], cta.sKV[slot], cta.tS[tile]
    shape = (config.TILE_M, sK.shape[0], cta.head_dim)
    role.mma(tS, sQ, sK, False, shape, op=f"S{tile}", tile=n_block)
    role.commit("s_full")  # everyone waits


def mma_pv(role: Role, cta: Cta, tile: int, slot: int, accumulate: bool, n_block: int):
    """Issue O += P V (O = P V unless `accumulate`)."""
    tP, sV, tO = cta.tP[tile], cta.sKV[slot], cta.tO[tile]
    shape = (config.TILE_M, cta.head_dim, sV.shape[0])
    role.mma(tO, tP, sV.T, accumulate, shape, op=f"O{tile}", tile=n_block)


# ---- softmax -------------------------------------------------------------------------------


def update_max(role: Role, s: torch.Tensor, row_max: torch.Tensor, scale_log2: float, tile: int):
    """The rows' maxima including these scores (TILE_M, tile_n), and the factor for the past."""
    amounts = {"alu": 0.5 * s.numel(), "issue": slots(SLOTS_MAX, s)}
    yield from role.execute("max", tile, **amounts)
    new_max = torch.maximum(row_max, s.amax(dim=1))  # both propagate NaN
    return new_max, torch.exp2((row_max - new_max) * scale_log2)


def exponentials(role: Role, s, row_max, row_sum, acc_scale, scale_log2: float, tile: int):
    """(P, row_sum with this tile). A CHUNK at a time, so that roles can share the engines.

    Per score 1 exp2, 1 FMA, 1 add and half a conversion, which takes two.
    """
    for part in s.split(config.CHUNK, dim=1):
        n = part.numel()
        amounts = {"mufu": n, "fma": 2 * n, "cvt": 0.5 * n, "issue": slots(SLOTS_EXP, part)}
        yield from role.execute("exp", tile, **amounts)
    p = torch.exp2(s * scale_log2 - (row_max * scale_log2)[:, None])
    return p, row_sum * acc_scale + p.sum(dim=1)


def load_scores(role: Role, tS: TmemView, tile: int):
    """S from tensor memory to registers; complete on return."""
    s = yield from role.tmem_load(tS, tile)
    yield from role.wait_ld()
    return s


def store_probabilities(role: Role, p: torch.Tensor, tP: TmemView, tile: int):
    """P, rounded to 16 bits, to tensor memory; complete on return."""
    yield from role.tmem_store(tP, p, tile)
    yield from role.wait_st()


def slots(per_element: float, values: torch.Tensor) -> float:
    """Warp instructions for all of `values`."""
    return per_element * values.numel() / THREADS_PER_WARP


# ---- correction ----------------------------------------------------------------------------


def rescale(role: Role, tO: TmemView, acc_scale: torch.Tensor, tile: int):
    """O times the factor (TILE_M,), in tensor memory, a CHUNK at a time; complete on return."""
    for part in chunks(tO):
        out = yield from role.tmem_load(part, tile)
        yield from role.wait_ld()
        amounts = {"fma": out.numel(), "issue": slots(SLOTS_RESCALE, out)}
        yield from role.execute("rescale", tile, **amounts)
        yield from role.tmem_store(part, out * acc_scale[:, None], tile)
    yield from role.wait_st()


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


def logsumexp(role: Role, cta: Cta, tile: int, row_max: torch.Tensor, row_sum: torch.Tensor):
    """Write the natural log of the sum of exp(softmax_scale * S) over each row."""
    rows = slice(tile * config.TILE_M, (tile + 1) * config.TILE_M)
    yield from role.execute("logsumexp", mufu=config.TILE_M, gmem=4 * config.TILE_M)
    cta.lse[rows] = (row_max * cta.scale_log2 + torch.log2(row_sum)) * LN2


# ---- kernel --------------------------------------------------------------------------------


def compute(role: Role, cta: Cta):
    """COMPUTE: one query tile against all key tiles, then its output."""
    yield from role.alloc(config.TMEM_COLUMNS)
    role.fence_before()
    yield from role.sync("start_end")  # all wait for warp 0
    role.fence_after()
    row_max = torch.full((config.TILE_M,), -math.inf)
    row_sum = torch.zeros(config.TILE_M)
    load_tile(role, cta.q, 0, cta.sQ[0], "q_full")
    yield from role.wait("q_full", 0)  # COMPUTE and TMA arrive
    for n_iter in range(cta.num_n_blocks):
        row_max, row_sum = yield from key_tile(role, cta, n_iter, row_max, row_sum)
    yield from stage_row(role, cta, 0, row_sum)
    yield from logsumexp(role, cta, 0, row_max, row_sum)
    role.fence_proxy()
    role.fence_before()
    yield from role.sync("start_end")  # all wait for all
    role.fence_after()
    role.dealloc()
    yield from store_tile(role, cta, 0)


def key_tile(role: Role, cta: Cta, n_iter: int, row_max: torch.Tensor, row_sum: torch.Tensor):
    """One key tile: load, S, softmax, O, each waiting for the one before."""
    n_block, phase = cta.num_n_blocks - 1 - n_iter, n_iter % 2
    load_tile(role, cta.k, n_block, cta.sKV[0], "kv_full[0]", n_block)
    load_tile(role, cta.v, n_block, cta.sKV[1], "kv_full[1]", n_block)
    yield from role.wait("kv_full[0]", phase, n_block)  # COMPUTE and TMA arrive: K
    mma_qk(role, cta, 0, 0, n_block)
    yield from role.wait("s_full", phase, n_block)  # COMPUTE's commit arrives
    role.fence_after()
    s = yield from load_scores(role, cta.tS[0], n_block)
    row_max, acc_scale = yield from update_max(role, s, row_max, cta.scale_log2, n_block)
    if n_iter > 0:
        yield from rescale(role, cta.tO[0], acc_scale, n_block)
    p, row_sum = yield from exponentials(
        role, s, row_max, row_sum, acc_scale, cta.scale_log2, n_block
    )
    yield from store_probabilities(role, p, cta.tP[0], n_block)
    role.fence_before()
    yield from role.sync("p_full", n_block)  # all wait for all
    role.fence_after()
    yield from role.wait("kv_full[1]", phase, n_block)  # COMPUTE and TMA arrive: V
    mma_pv(role, cta, 0, 1, n_iter != 0, n_block)
    role.commit("o_full")  # everyone waits
    yield from role.wait("o_full", phase, n_block)  # COMPUTE's commit arrives
    role.fence_after()
    return row_max, row_sum
