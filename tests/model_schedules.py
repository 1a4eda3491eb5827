# SPDX-License-Identifier: Apache-2.0
"""A whole attention schedule as a test program of the SM model; not a stage of the ladder.

One CTA, two query tiles of 128 rows in ping-pong: LOAD and MMA warps, two softmax warpgroups, a
correction warpgroup, a ring of key and value slots, P aliased on S.
"""

import math

import torch
from flash_ladder.common.model import B200, Global, PipelineState, Sm
from flash_ladder.common.plan import Arrival, Barrier, Plan, Role, SmemBuffer, TmemRegion

ROWS, KEYS, RING = 128, 128, 3  # rows of a query tile, keys of a tile, slots of the ring
LN2 = math.log(2.0)
CALC = ("SOFTMAX0", "SOFTMAX1", "CORRECTION")


def plan(head_dim: int) -> Plan:
    """Resources of the CTA."""
    tile = ROWS * head_dim * 2
    return Plan(
        roles=(
            Role("SOFTMAX0", range(0, 4), 192),
            Role("SOFTMAX1", range(4, 8), 192),
            Role("CORRECTION", range(8, 12), 80),
            Role("MMA", range(12, 13), 48),
            Role("LOAD", range(13, 14), 48),
            Role("EMPTY", range(14, 16), 48),
        ),
        smem=(
            SmemBuffer("sQ", tile, 2, 1024),
            SmemBuffer("sKV", tile, RING, 1024),
            SmemBuffer("sO", tile, 2, 1024),
            SmemBuffer("sStats", 2 * ROWS * 4, 2),
        ),
        tmem=(
            TmemRegion("S0", 0, KEYS),
            TmemRegion("P0", KEYS // 2, KEYS // 2, aliases=("S0",)),
            TmemRegion("S1", KEYS, KEYS),
            TmemRegion("P1", KEYS + KEYS // 2, KEYS // 2, aliases=("S1",)),
            TmemRegion("O0", 2 * KEYS, head_dim),
            TmemRegion("O1", 2 * KEYS + head_dim, head_dim),
        ),
        barriers=(*_mbarriers(tile), *_named()),
        launch_registers=128,
    )


def _mbarriers(tile: int) -> list[Barrier]:
    load, commit = (Arrival("LOAD", "tma"),), (Arrival("MMA", "commit"),)
    mma, correction = Arrival("MMA", "one"), Arrival("CORRECTION")
    rows = [
        Barrier("q_full", load, (mma,), "sQ holds a query tile", stages=2, tx_bytes=tile),
        Barrier("kv_full", load, (mma,), "a slot holds a tile", stages=RING, tx_bytes=tile),
        Barrier("kv_empty", commit, (Arrival("LOAD", "one"),), "a slot is free", stages=RING),
    ]
    for s in range(2):
        softmax = Arrival(f"SOFTMAX{s}")
        rows += [
            Barrier(f"s_full{s}", commit, (softmax,), "S is computed"),
            Barrier(f"p_ready{s}", (softmax, correction), (mma,), "P is written, O rescaled"),
            Barrier(f"o_full{s}", commit, (correction,), "O is final"),
            Barrier(f"stats_full{s}", (softmax,), (correction,), "factors are written"),
            Barrier(f"stats_empty{s}", (correction,), (softmax,), "factors were read"),
        ]
    return rows


def _named() -> list[Barrier]:
    mma, others = (Arrival("MMA"),), tuple(Arrival(role) for role in CALC)
    return [
        Barrier("tmem_ready", mma, others, "columns are allocated", kind="named", number=1),
        Barrier("tmem_done", others, mma, "columns may be freed", kind="named", number=2),
    ]


class Program:
    """The roles' coroutines; q (256, d), k and v (keys, d) in a 16-bit dtype."""

    def __init__(self, q, k, v, scale: float, machine=B200, ordering=None):
        self.d, self.dtype, self.tiles = q.shape[1], q.dtype, len(k) // KEYS
        self.scale_log2 = scale / LN2
        self.sm = Sm(machine, plan(self.d), ordering)
        self.q, self.k, self.v = Global("q", q), Global("k", k), Global("v", v)
        self.out = Global("out", torch.full_like(q, math.nan))
        self.lse = torch.full((len(q),), math.nan)
        tile = (ROWS, self.d)
        self.sQ, self.sO = (self.sm.buffer(name, tile, q.dtype) for name in ("sQ", "sO"))
        self.sKV = self.sm.buffer("sKV", (KEYS, self.d), q.dtype)
        self.sStats = self.sm.buffer("sStats", (2, ROWS), torch.float32)
        view = self.sm.tmem.view
        self.tS = [view("S0"), view("S1")]
        self.tP = [view("P0", q.dtype), view("P1", q.dtype)]
        self.tO = [view("O0"), view("O1")]
        for name, coroutine in (
            ("SOFTMAX0", lambda role: self.softmax(role, 0)),
            ("SOFTMAX1", lambda role: self.softmax(role, 1)),
            ("CORRECTION", self.correction),
            ("MMA", self.mma),
            ("LOAD", self.load),
            ("EMPTY", lambda role: role.setmaxnreg(48)),
        ):
            self.sm.start(name, coroutine)

    def load(self, role):
        """K, Q0, Q1, V of the last tile, then K and V of each earlier one."""
        yield from role.setmaxnreg(48)
        ring = PipelineState(RING, parity=1)
        for n_block in reversed(range(self.tiles)):
            rows = slice(n_block * KEYS, (n_block + 1) * KEYS)
            yield from self.load_slot(role, ring, self.k.tile(rows), n_block)
            for s in range(2) if n_block == self.tiles - 1 else ():
                source = self.q.tile(slice(s * ROWS, (s + 1) * ROWS))
                role.expect_tx(f"q_full[{s}]", self.sQ.bytes)
                role.arrive(f"q_full[{s}]")
                role.tma_load(source, self.sQ[s], f"q_full[{s}]")
            yield from self.load_slot(role, ring, self.v.tile(rows), n_block)

    def load_slot(self, role, ring, source, n_block):
        """One tile into the next slot of the ring."""
        yield from role.wait(f"kv_empty[{ring.slot}]", ring.parity, n_block)
        full = f"kv_full[{ring.slot}]"
        role.expect_tx(full, self.sKV.bytes)
        role.arrive(full)
        role.tma_load(source, self.sKV[ring.slot], full, tile=n_block)
        ring.advance()

    def mma(self, role):
        """Both products of both query tiles, always one S ahead."""
        yield from role.setmaxnreg(48)
        yield from role.alloc(512)
        yield from role.sync("tmem_ready")
        ring, parity = PipelineState(RING), 0
        yield from role.wait(f"kv_full[{ring.slot}]", ring.parity)
        for s in range(2):
            yield from role.wait(f"q_full[{s}]", 0)
            self.mma_qk(role, s, ring.slot, self.tiles - 1)
        role.commit(f"kv_empty[{ring.slot}]")
        ring.advance()
        for n_block in reversed(range(self.tiles)):
            yield from role.wait(f"kv_full[{ring.slot}]", ring.parity, n_block)
            v_slot = ring.slot
            ring.advance()
            for s in range(2):
                yield from role.wait(f"p_ready{s}", parity, n_block)
                role.fence_after()
                self.mma_pv(role, s, v_slot, n_block)
                if n_block == 0:
                    role.commit(f"o_full{s}")
                elif s == 0:
                    yield from role.wait(f"kv_full[{ring.slot}]", ring.parity, n_block - 1)
                if s == 1:
                    role.commit(f"kv_empty[{v_slot}]")
                if n_block > 0:
                    self.mma_qk(role, s, ring.slot, n_block - 1)
            if n_block > 0:
                role.commit(f"kv_empty[{ring.slot}]")
                ring.advance()
            parity = 1 - parity
        yield from role.sync("tmem_done")
        role.dealloc()

    def mma_qk(self, role, s, slot, n_block):
        """S = Q K^T."""
        shape = (ROWS, KEYS, self.d)
        role.mma(self.tS[s], self.sQ[s], self.sKV[slot], False, shape, op=f"S{s}", tile=n_block)
        role.commit(f"s_full{s}")

    def mma_pv(self, role, s, slot, n_block):
        """O += P V."""
        first, shape = n_block == self.tiles - 1, (ROWS, self.d, KEYS)
        b = self.sKV[slot].T
        role.mma(self.tO[s], self.tP[s], b, not first, shape, op=f"O{s}", tile=n_block)

    def softmax(self, role, s):
        """P from S, one row a thread; the factor for O goes to the correction warps."""
        yield from role.setmaxnreg(192)
        yield from role.sync("tmem_ready")
        row_max, row_sum = torch.full((ROWS,), -math.inf), torch.zeros(ROWS)
        parity = 0
        for n_block in reversed(range(self.tiles)):
            yield from role.wait(f"s_full{s}", parity, n_block)
            role.fence_after()
            scores = yield from role.tmem_load(self.tS[s], n_block)
            yield from role.wait_ld()
            yield from role.execute("max", n_block, alu=ROWS * KEYS, issue=4 * KEYS)
            new_max = torch.maximum(row_max, scores.amax(dim=1))
            acc_scale = torch.exp2((row_max - new_max) * self.scale_log2)
            yield from role.wait(f"stats_empty{s}", 1 - parity, n_block)
            yield from self.tell_correction(role, s, torch.stack([acc_scale, acc_scale]))
            p = torch.exp2((scores - new_max[:, None]) * self.scale_log2)
            amounts = {"mufu": p.numel(), "fma": p.numel(), "cvt": p.numel(), "issue": 8 * KEYS}
            yield from role.execute("exp", n_block, **amounts)
            yield from role.tmem_store(self.tP[s], p, n_block)
            yield from role.wait_st()
            role.fence_before()
            role.arrive(f"p_ready{s}")
            yield from role.execute("sum", n_block, fma=p.numel(), issue=2 * KEYS)
            row_max, row_sum = new_max, row_sum * acc_scale + p.sum(dim=1)
            parity = 1 - parity
        yield from role.wait(f"stats_empty{s}", 1 - parity)
        yield from self.tell_correction(role, s, torch.stack([row_sum, row_max]))
        role.fence_before()
        yield from role.sync("tmem_done")

    def tell_correction(self, role, s, values):
        """Two numbers a row through shared memory."""
        yield from role.execute("stats", smem=ROWS * 4)
        role.write(self.sStats[s], values)
        role.arrive(f"stats_full{s}")

    def correction(self, role):
        """Rescales O, off the critical path, and brings it home."""
        yield from role.setmaxnreg(80)
        yield from role.sync("tmem_ready")
        parity = 0
        for n_block in reversed(range(self.tiles)):
            for s in range(2):
                yield from role.wait(f"stats_full{s}", parity, n_block)
                acc_scale = role.read(self.sStats[s])[0]
                role.arrive(f"stats_empty{s}")
                if n_block < self.tiles - 1:
                    yield from self.rescale(role, s, acc_scale, n_block)
                role.arrive(f"p_ready{s}")
            parity = 1 - parity
        for s in range(2):
            yield from role.wait(f"stats_full{s}", parity)
            row_sum, row_max = role.read(self.sStats[s])
            role.arrive(f"stats_empty{s}")
            yield from role.wait(f"o_full{s}", 0)
            role.fence_after()
            out = yield from role.tmem_load(self.tO[s])
            yield from role.wait_ld()
            yield from role.execute("scale", fma=out.numel(), cvt=out.numel(), smem=self.sO.bytes)
            role.write(self.sO[s], out / row_sum[:, None])
            role.fence_proxy()
            rows = slice(s * ROWS, (s + 1) * ROWS)
            role.tma_store(self.sO[s], self.out.tile(rows))
            self.lse[rows] = (row_max * self.scale_log2 + torch.log2(row_sum)) * LN2
        role.fence_before()
        yield from role.sync("tmem_done")
        yield from role.bulk_wait()

    def rescale(self, role, s, acc_scale, n_block):
        """O times the factor; that S is full implies that the last product with P is done."""
        role.fence_after()
        out = yield from role.tmem_load(self.tO[s], n_block)
        yield from role.wait_ld()
        yield from role.execute("rescale", n_block, fma=out.numel(), issue=2 * self.d)
        yield from role.tmem_store(self.tO[s], out * acc_scale[:, None], n_block)
        yield from role.wait_st()
        role.fence_before()
