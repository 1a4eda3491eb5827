# SPDX-License-Identifier: Apache-2.0
"""A CTA pair on the SM model: MMAs of both, remote barriers, copies between the two."""

import pytest
import torch
from flash_ladder.common.model import B200, ModelFault, Pair, Sm
from flash_ladder.common.plan import Arrival, Barrier, Plan, Role, SmemBuffer, TmemRegion

BF16 = torch.bfloat16
BOTH = (Arrival("MMA", "one"), Arrival("CALC", "one"))


def _plan() -> Plan:
    """MMA is a warp, CALC a warpgroup; barriers that both may use."""
    one, commit, tma = (Arrival("MMA", kind) for kind in ("one", "commit", "tma"))
    return Plan(
        roles=(Role("CALC", range(0, 4)), Role("MMA", range(4, 5))),
        smem=(SmemBuffer("sA", 65536, 1, 1024), SmemBuffer("sB", 65536, 1, 1024)),
        tmem=(TmemRegion("D", 0, 256), TmemRegion("E", 256, 256)),
        barriers=(
            Barrier("done", (commit,), BOTH, "an MMA's result"),
            Barrier("full", (tma,), BOTH, "a tile", tx_bytes=1),
            Barrier("from_calc", (Arrival("CALC", ctas=2),), BOTH, "both CTAs' signal"),
            Barrier("pair", (one,), (one,), "both CTAs", kind="cluster"),
        ),
    )


def _fill(slot, seed=0) -> torch.Tensor:
    """Random values in a slot, without the model noticing; what they are after rounding."""
    values = torch.randn(slot.shape, generator=torch.Generator().manual_seed(seed))
    slot.put(values)
    return slot.get().clone()


def _pair_mma(m: int, in_tmem: bool):
    """D of a pair's MMA in both CTAs, and the operands of the whole."""
    pair, k, n = Pair(B200, _plan()), 32, 64
    own, columns = m // 2, n if m == 256 else n // 2
    a, b = [], []
    for rank, sm in enumerate(pair.sms):
        sm.tmem.allocate("test", 0, 512)
        sA, sB = sm.buffer("sA", (own, k), BF16)[0], sm.buffer("sB", (n // 2, k), BF16)[0]
        a.append(_fill(sA, rank)), b.append(_fill(sB, 5 + rank))
        sm.tmem.view("E", BF16).part(0, k // 2).put(a[-1].repeat(128 // own, 1))
    leader = pair.sms[0]
    d, waits = leader.tmem.view("D").part(0, columns), []

    def issue(role):
        source = role.sm.tmem.view("E", BF16).part(0, k // 2)
        if not in_tmem:
            source = role.sm.smem.buffers["sA"][0]
        role.mma(d, source, role.sm.smem.buffers["sB"][0], False, (m, n, k), pair=True)
        role.commit("done", multicast=True)
        yield from role.wait("done", 0)
        waits.append(role.env.now)

    def follow(role):
        yield from role.wait("done", 0)
        waits.append(role.env.now)

    leader.start("MMA", issue)
    pair.sms[1].start("CALC", follow)
    pair.run()
    assert len(waits) == 2 and waits[0] == waits[1]
    assert all(any(span.engine == "tensor" for span in sm.trace) for sm in pair.sms)
    return [d.on(sm.tmem).get() for sm in pair.sms], torch.cat(a) @ torch.cat(b).T


@pytest.mark.parametrize("in_tmem", [False, True], ids=["SS", "TS"])
def test_a_pair_of_256_rows(in_tmem):
    found, whole = _pair_mma(256, in_tmem)
    assert torch.allclose(torch.cat(found), whole, atol=1e-4)


@pytest.mark.parametrize("in_tmem", [False, True], ids=["SS", "TS"])
def test_a_pair_of_128_rows_splits_n_over_the_lane_halves(in_tmem):
    found, whole = _pair_mma(128, in_tmem)
    for rank, d in enumerate(found):
        rows = whole[64 * rank : 64 * rank + 64]
        assert torch.allclose(d, torch.cat([rows[:, :32], rows[:, 32:]]), atol=1e-4)


def test_remote_arrivals_and_the_cluster_barrier():
    pair, times = Pair(B200, _plan()), {}

    def calc(role):
        role.arrive("from_calc", to=0)  # 128 of 256 from each CTA
        yield from ()

    def mma(role):
        if role.sm.rank == 0:
            yield from role.wait("from_calc", 0)
            times["leader"] = role.env.now
        yield from role.sync("pair")
        times[role.agent] = role.env.now

    pair.start("CALC", calc)
    pair.start("MMA", mma)
    pair.run()
    signal = B200["dsmem_latency"] + B200["mbarrier_latency"]
    after = signal + B200["barrier_latency"]
    assert times == {"leader": signal, "MMA@0": after, "MMA@1": after}
    assert pair.findings() == []


def test_a_copy_to_the_peer_counts_there():
    pair, times = Pair(B200, _plan()), []
    slots = [sm.buffer("sA", (64, 64), BF16)[0] for sm in pair.sms]
    values = _fill(slots[0])

    def give(role):
        role.dsmem_copy(slots[0], slots[0], "full")
        yield from ()

    def take(role):
        role.expect_tx("full", 8192)
        role.arrive("full")
        yield from role.wait("full", 0)
        times.append(role.env.now)
        assert torch.equal(role.read(slots[1]), values)

    pair.sms[0].start("MMA", give)
    pair.sms[1].start("MMA", take)
    pair.run()
    copied = 50 + B200["dsmem_latency"] + 8192 / B200["dsmem"] + 16
    assert times == [pytest.approx(copied + B200["mbarrier_latency"])]
    assert pair.findings() == []


def test_bytes_may_count_at_the_leader():
    pair = Pair(B200, _plan())

    def load(role):
        slot = role.sm.buffer("sA", (64, 64), BF16)[0]
        if role.sm.rank == 0:
            role.expect_tx("full", 2 * slot.bytes)
            role.arrive("full")
        role.tma_load(torch.ones(64, 64, dtype=BF16), slot, "full", to_barrier_rank=0)
        if role.sm.rank == 0:
            yield from role.wait("full", 0)
            assert not any(sm.smem.buffers["sA"][0].unwritten for sm in pair.sms)

    pair.start("MMA", load)
    pair.run()
    assert pair.findings() == []


def test_a_lone_cta_has_no_peer():
    with pytest.raises(ValueError, match="pair is a barrier of a cluster; run the plan in a Pair"):
        Sm(B200, _plan())
    sm = Sm(B200, _plan().with_changes(barriers=_plan().barriers[:3]))
    with pytest.raises(ValueError, match="a peer exists only in a Pair"):
        sm.start("CALC", lambda role: role.arrive("from_calc", to=1))


def test_one_kernel_uses_one_cta_group():
    pair = Pair(B200, _plan())

    def mma(role):
        sm = role.sm
        sm.tmem.allocate("test", 0, 512)
        sm.peer.tmem.allocate("test", 0, 512)
        sA, sB = (sm.buffer(name, (128, 16), BF16)[0] for name in ("sA", "sB"))
        d = sm.tmem.view("D")
        role.mma(d, sA, sB, False, (256, 256, 16), pair=True)
        role.mma(d.part(0, 128), sA, sB, False, (128, 128, 16))
        yield from ()

    pair.sms[0].start("MMA", mma)
    with pytest.raises(ModelFault, match="a kernel uses cta_group 1 or 2, not both"):
        pair.run()
