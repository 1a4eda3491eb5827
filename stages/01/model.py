# SPDX-License-Identifier: Apache-2.0
"""Stage 01's schedule on the SM model: one role, one thing after the other. Runs: host."""

import math

import torch

from ..common.model import Machine, Role, Run, Slot, Sm, grid_run
from ..common.plan import THREADS_PER_WARP
from . import config

LN2 = math.log(2.0)
WORD = 4  # bytes of a float32
VECTOR = 4  # float32 words of one 16-byte shared-memory load, and FMAs it feeds
REDUNDANT = {  # why the model does not miss a synchronisation (common.mutation)
    "COMPUTE sync kv_full": "128 threads act as one here, which has written the tile it reads; "
    "a GPU needs it, and check_facts finds it in the compiled code",
    "COMPUTE sync kv_empty": "128 threads act as one here, which has read the tile it overwrites; "
    "a GPU needs it, and check_facts finds it in the compiled code",
}


def run(q, k, v, softmax_scale: float, machine: Machine, max_ctas: int | None = None) -> Run:
    """Full attention of checked CPU tensors q (b, sq, h, d), k and v (b, sk, h, d)."""
    scale_log2 = softmax_scale / LN2

    def cta(batch: int, head: int, m_block: int):
        rows = slice(m_block * config.TILE_M, (m_block + 1) * config.TILE_M)
        tile = (q[batch, rows, head].float(), k[batch, :, head].float(), v[batch, :, head].float())
        sm = Sm(machine, config.plan(q.shape[3]))
        result = {}
        sm.start("COMPUTE", lambda role: compute(role, *tile, scale_log2, result))
        return sm, lambda: (result["out"], result["lse"])

    return grid_run(machine, q, k, config.TILE_M, cta, max_ctas)


def compute(role: Role, q, k, v, scale_log2: float, result: dict):
    """All 128 threads: q (TILE_M, d) against k and v (sk, d), float32; writes `result`."""
    rows, head_dim = q.shape
    tile_n = config.TILE_N[head_dim]
    sQ = role.sm.buffer("sQ", (rows, head_dim), torch.float32)[0]
    sK = role.sm.buffer("sK", (tile_n, head_dim), torch.float32)[0]
    sV = role.sm.buffer("sV", (tile_n, head_dim), torch.float32)[0]
    out = torch.zeros(rows, head_dim)
    row_max = torch.full((rows,), -math.inf)
    row_sum = torch.zeros(rows)

    yield from load_tile(role, q, sQ)
    for n_block in reversed(range(len(k) // tile_n)):
        keys = slice(n_block * tile_n, (n_block + 1) * tile_n)
        yield from load_tile(role, k[keys], sK, n_block)
        yield from load_tile(role, v[keys], sV, n_block)
        yield from role.sync("kv_full", n_block)
        s = yield from mma_qk(role, sQ, sK, n_block)
        step = online_softmax_step(s, row_max, row_sum, scale_log2)
        p, row_max, row_sum, acc_scale = step
        yield from role.execute(
            "softmax", n_block, mufu=s.numel(), fma=2 * s.numel(), alu=s.numel()
        )
        out = out * acc_scale[:, None]
        yield from role.execute("rescale", n_block, fma=out.numel())
        out = yield from mma_pv(role, p, sV, out, n_block)
        yield from role.sync("kv_empty", n_block)

    yield from role.execute("store", fma=out.numel(), gmem=out.numel() * 2)
    result["out"] = out / row_sum[:, None]
    result["lse"] = (row_max * scale_log2 + torch.log2(row_sum)) * LN2


def load_tile(role: Role, source: torch.Tensor, target: Slot, tile: int = -1):
    """Global to shared memory, 16-bit in, float32 out; every thread waits for its own loads."""
    yield from role.latency("load", role.sm.machine["gmem_latency"], tile)
    size = source.numel()
    yield from role.execute("load", tile, gmem=size * 2, alu=size, smem=size * WORD)
    role.write(target, source)


def mma_qk(role: Role, sQ: Slot, sK: Slot, tile: int):
    """S = Q K^T (TILE_M, tile_n)."""
    q, k = role.read(sQ), role.read(sK)
    own = q.numel() * WORD  # a thread reads its row of Q once, and no other thread does
    yield from role.execute("mma_qk", tile, **products(role, q.numel() * len(k), own))
    return q @ k.T


def mma_pv(role: Role, p: torch.Tensor, sV: Slot, out: torch.Tensor, tile: int):
    """O + P V (TILE_M, d)."""
    v = role.read(sV)
    yield from role.execute("mma_pv", tile, **products(role, p.numel() * v.shape[1]))
    return out + p @ v


def products(role: Role, fmas: int, own_bytes: int = 0) -> dict[str, float]:
    """Engine use of `fmas` FMAs: one broadcast 16-byte load of each warp feeds VECTOR of them."""
    loads = fmas / VECTOR / THREADS_PER_WARP
    passes = role.sm.machine["smem_broadcast_passes"]
    return {"fma": fmas, "smem": loads * passes * role.sm.machine["smem"] + own_bytes}


def online_softmax_step(s, row_max, row_sum, scale_log2: float):
    """As the kernel's: scores (TILE_M, tile_n) to (P, row_max, row_sum, acc_scale)."""
    new_max = torch.maximum(row_max, s.amax(dim=1))  # both propagate NaN
    acc_scale = torch.exp2((row_max - new_max) * scale_log2)
    p = torch.exp2(s * scale_log2 - (new_max * scale_log2)[:, None])
    return p, new_max, row_sum * acc_scale + p.sum(dim=1), acc_scale
