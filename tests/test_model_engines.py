# SPDX-License-Identifier: Apache-2.0
"""Engines of the SM model against cycles computed by hand, and numbers against plain torch."""

import math

import pytest
import torch
from flash_ladder.common.model import (
    B200,
    B300,
    H200,
    Deadlock,
    Global,
    ModelFault,
    Pair,
    PipelineState,
    Sm,
)
from flash_ladder.common.plan import Arrival, Barrier, Plan, Role, SmemBuffer, TmemRegion

BF16 = torch.bfloat16
ANY = (Arrival("MMA", "one"), Arrival("CALC", "one"), Arrival("MORE", "one"))


def _plan(calc=None, rest=None, **changes) -> Plan:
    """MMA and MORE are a warp each, CALC a warpgroup; calc, rest: registers of it, of the others.

    Everyone may wait at every barrier.
    """
    return Plan(
        roles=(
            Role("CALC", range(0, 4), calc),
            Role("MMA", range(4, 5), rest),
            Role("MORE", range(5, 6), rest),
            Role("EMPTY", range(6, 8), rest),
        ),
        smem=(SmemBuffer("sA", 65536, 1, 1024), SmemBuffer("sB", 65536, 2, 1024)),
        tmem=(
            TmemRegion("D", 0, 256),
            TmemRegion("P", 64, 64, aliases=("D",)),
            TmemRegion("E", 256, 256),
        ),
        barriers=(
            Barrier("done", (Arrival("MMA", "commit"),), ANY, "results of MMA"),
            Barrier("done_more", (Arrival("MORE", "commit"),), ANY, "results of MORE"),
            Barrier("full", (Arrival("MMA", "tma"),), ANY, "a tile", stages=3, tx_bytes=1),
        ),
        **changes,
    )


def _run(*, machine=B200, plan=None, **coroutines) -> tuple[Sm, float]:
    """Run roles (CALC=..., MMA=..., MORE=...) alone on an SM; the SM and the cycles it took."""
    sm = Sm(machine, plan or _plan())
    for name, coroutine in coroutines.items():
        sm.start(name, coroutine)
    return sm, sm.run()


def _fill(slot, seed=0) -> torch.Tensor:
    """Random values in a slot, without the model noticing; what they are after rounding."""
    values = torch.randn(slot.shape, generator=torch.Generator().manual_seed(seed))
    slot.put(values)
    return slot.get().clone()


# ---- machines ------------------------------------------------------------------------------


def test_figures_can_be_changed_by_name():
    changed = B200.with_changes({"mufu": 32, "smem": 113})
    assert (changed["mufu"], changed["smem"], changed["fma"]) == (32, 113, 128)
    assert changed.name == "B200 (mufu=32, smem=113)" and B200["mufu"] == 16
    assert changed.figures["mufu"].unit == B200.figures["mufu"].unit
    assert changed.figures["mufu"].source == "set by hand (was 16)"
    assert B300["mufu"] == 32


@pytest.mark.parametrize("value", [0, -1, math.nan, math.inf])
def test_a_figure_must_be_positive(value):
    with pytest.raises(ValueError, match="mufu must be a positive number"):
        B200.with_changes({"mufu": value})


def test_changing_an_unknown_figure_lists_the_known_ones():
    with pytest.raises(ValueError, match=r"B200 has no figure 'muffin'; .* gmem, .* mufu"):
        B200.with_changes({"muffin": 1})


def test_a_plan_with_tensor_memory_needs_a_machine_with_it():
    with pytest.raises(ValueError, match="uses tensor memory, which H200 does not have"):
        Sm(H200, _plan())


# ---- tensor core ---------------------------------------------------------------------------

PUBLISHED_INTERVALS = {  # cycles an instruction, N = 64, 80, 96, 112, 128, 256 (SemiAnalysis)
    ("SS", 128, False): (48, 52, 56, 60, 64, 128),
    ("TS", 128, False): (32, 40, 48, 56, 64, 128),
    ("SS", 64, False): (32, 40, 48, 56, 64, 128),
    ("SS", 256, True): (43, 45.3, 49.4, 56, 64, 128),
    ("TS", 256, True): (32, 40, 48, 56, 64, 128),
    ("SS", 128, True): (25, 27, 29, 30, 32, 64),
    ("TS", 128, True): (18, 20, 24, 28, 32, 64),
}


def _mma_time(kind, m, n, pair, k) -> float:
    """Cycles from the issue of one MMA verb of depth k to the end of the wait for its commit."""
    sms = Pair(B200, _plan()).sms if pair else [Sm(B200, _plan())]
    own = m // len(sms)
    for sm in sms:
        sm.tmem.allocate("test", 0, 512)
    columns = n // 2 if pair and m == 128 else n
    d, b = sms[0].tmem.view("D").part(0, columns), (n // len(sms), k)
    a = sms[0].tmem.view("E", BF16).part(0, k // 2)
    if kind == "SS":
        a = sms[0].buffer("sA", (own, k), BF16)[0]

    def mma(role):
        slot = role.sm.buffer("sB", b, BF16)[0]
        role.mma(d, a, slot, False, (m, n, k), pair)
        role.commit("done")
        yield from role.wait("done", 0)

    sms[0].start("MMA", mma)
    return sms[0].run()


@pytest.mark.parametrize("key", PUBLISHED_INTERVALS, ids=str)
def test_intervals_between_mmas(key):
    kind, m, pair = key
    for n, published in zip((64, 80, 96, 112, 128, 256), PUBLISHED_INTERVALS[key]):
        found = (_mma_time(kind, m, n, pair, 112) - _mma_time(kind, m, n, pair, 16)) / 6
        slack = 3.5 if pair else 0.01  # pairs of narrow tiles are up to 3 cycles slower
        assert found == pytest.approx(published, abs=slack), n


def test_latency_of_one_mma():
    for n in (64, 128, 256):  # the measured latency holds for 1-CTA M = 128 exactly
        assert _mma_time("TS", 128, n, False, 16) == pytest.approx(104 + n / 2)
        assert _mma_time("TS", 256, n, True, 16) == pytest.approx(104 + 34 + n / 2)
    assert _mma_time("SS", 128, 128, False, 16) == pytest.approx(136 + 64)
    assert _mma_time("SS", 128, 256, False, 16) == pytest.approx(136 + 128)
    # a narrow SS tile waits for its operands: 48 cycles instead of 32
    assert _mma_time("SS", 128, 64, False, 16) == pytest.approx(136 + 48)


def test_other_traffic_at_the_port_delays_operands():
    def mma(role):
        sm = role.sm
        sm.tmem.allocate("test", 0, 512)
        sA, sB = (sm.buffer(name, (128, 16), BF16)[0] for name in ("sA", "sB"))
        role.mma(sm.tmem.view("D").part(0, 128), sA, sB, False, (128, 128, 16))
        role.commit("done")
        yield from role.execute("store", smem=1280)  # asks at 0, before the tensor core starts
        yield from role.wait("done", 0)

    sm, cycles = _run(MMA=mma)
    assert cycles == pytest.approx(10 + 64 + 136)
    port = [(span.op, span.start, span.end) for span in sm.trace if span.engine == "smem"]
    assert port == [("store", 0, 10), ("mma D", 10, 74)]


def test_mmas_execute_in_the_order_issued_and_accumulate():
    def mma(role):
        sm = role.sm
        sm.tmem.allocate("test", 0, 512)
        sA = sm.buffer("sA", (128, 64), BF16)[0]
        sB = sm.buffer("sB", (64, 128), BF16)  # stored as (K, N)
        a, b = _fill(sA), [_fill(sB[i], 1 + i) for i in range(2)]
        d = sm.tmem.view("D").part(0, 128)
        for i in range(2):
            role.mma(d, sA, sB[i].T, i > 0, (128, 128, 64))
        role.commit("done")
        yield from role.wait("done", 0)
        assert torch.allclose(d.get(), a @ b[0] + a @ b[1], atol=1e-4)

    _, cycles = _run(MMA=mma)
    assert cycles == pytest.approx(2 * 4 * 64 + 136)


def test_m_64_uses_half_of_the_lanes():
    def mma(role):
        sm = role.sm
        sm.tmem.allocate("test", 0, 512)
        d = sm.tmem.view("D").part(0, 32)
        d.put(torch.full((128, 32), 7.0))
        sA, sB = (sm.buffer(*x, BF16)[0] for x in (("sA", (64, 32)), ("sB", (32, 32))))
        expected = _fill(sA) @ _fill(sB).T
        role.mma(d, sA, sB, True, (64, 32, 32))
        role.commit("done")
        yield from role.wait("done", 0)
        found = d.get().view(4, 32, 32)
        assert torch.allclose(found[:, :16].reshape(64, 32), expected + 7)
        assert (found[:, 16:] == 7).all()

    _run(MMA=mma)


def test_a_from_tensor_memory_is_packed():
    def mma(role):
        sm = role.sm
        sm.tmem.allocate("test", 0, 512)
        p, sB = sm.tmem.view("P", BF16), sm.buffer("sB", (64, 128), BF16)[0]
        values, b = torch.randn(128, 128), _fill(sB)
        p.put(values)
        role.mma(sm.tmem.view("E").part(0, 64), p, sB, False, (128, 64, 128))
        role.commit("done")
        yield from role.wait("done", 0)
        found = sm.tmem.view("E").part(0, 64).get()
        assert torch.allclose(found, values.to(BF16).float() @ b.T, atol=1e-3)

    _run(MMA=mma)


@pytest.mark.parametrize(
    ("shape", "match"),
    [
        ((96, 128, 128), r"no MMA of M=96"),
        ((128, 72, 128), r"N a multiple of 16"),
        ((128, 128, 24), r"K a multiple of 16"),
        ((128, 64, 128), r"D is D of \(128, 128\).* needs \(128, 64\)"),
    ],
)
def test_shapes_are_checked(shape, match):
    def mma(role):
        sm = role.sm
        sA, sB = (sm.buffer(name, (128, 128), BF16)[0] for name in ("sA", "sB"))
        role.mma(sm.tmem.view("D").part(0, 128), sA, sB, False, shape)
        yield from ()

    with pytest.raises(ModelFault, match=match):
        _run(MMA=mma)


def test_a_commit_covers_the_threads_own_earlier_mmas_only():
    ends = {}

    def issue(role, name, barrier):
        sm = role.sm
        sA, sB = (sm.buffer(x, (128, 16), BF16)[0] for x in ("sA", "sB"))
        for _ in range(2):
            role.mma(sm.tmem.view(name).part(0, 128), sA, sB, False, (128, 128, 16))
            if name == "D" and barrier:
                role.commit(barrier)
                barrier = None
        if barrier:
            role.commit(barrier)

    def mma(role):
        role.sm.tmem.allocate("test", 0, 512)
        issue(role, "D", "done")
        yield from role.wait("done", 0)
        ends["MMA"] = role.env.now

    def more(role):
        role.commit("done_more")  # it has issued nothing yet
        yield from role.wait("done_more", 0)
        ends["nothing"] = role.env.now
        issue(role, "E", "done_more")
        yield from role.wait("done_more", 1)
        ends["MORE"] = role.env.now

    _run(MMA=mma, MORE=more)
    assert ends["MMA"] == 64 + 136  # the first of its two
    assert ends["nothing"] == B200["mbarrier_latency"]
    assert ends["MORE"] == 2 * 64 + 2 * 64 + 136  # behind both of MMA's


# ---- tensor memory -------------------------------------------------------------------------


def test_packed_pairs_share_the_bits_of_float32():
    sm = Sm(B200, _plan())
    d, p = sm.tmem.view("D"), sm.tmem.view("P", BF16)
    assert d.get().isnan().all() and p.get().isnan().all() and p.shape == (128, 128)
    assert p.packed(torch.float16).get().isnan().all()
    p.put(torch.tensor([1.0, -2.0]).repeat(128, 64))
    assert sm.tmem.bits[5, 64].item() == 0x3F80 - (0x4000 << 16)  # lower value in the lower half
    assert d.unwritten and not p.unwritten
    assert d.get()[:, :64].isnan().all() and d.get()[:, 128:].isnan().all()
    d.put(torch.full((128, 256), 3.0))
    assert not (p.get() == 1).any()


def test_cells_of_views():
    view = Sm(B200, _plan()).tmem.view("D")
    assert view.cells == ((0, 1024),)
    assert view.part(64, 32).cells == ((256, 384),)
    assert view.part(2, 2).quarter(3).cells == ((11, 12), (15, 16))
    with pytest.raises(ValueError, match=r"D has 256 columns; got 250 \.\.\. 257"):
        view.part(250, 8)


def test_loads_and_stores_take_a_column_a_clock():
    def calc(role):
        yield from role.alloc(512)
        view = role.sm.tmem.view("D").part(0, 64)
        yield from role.tmem_store(view, torch.ones(128, 64))
        assert role.env.now == 64 and view.get().isnan().all()  # on its way
        yield from role.wait_st()
        assert role.env.now == 64 + 30
        values = yield from role.tmem_load(view)
        assert (values == 1).all() and role.env.now == 64 + 30 + 64 + 30
        yield from role.wait_ld()
        role.dealloc()

    sm, cycles = _run(CALC=calc)
    assert cycles == 188 and sm.findings() == []


def test_a_warp_reaches_its_quarter_only():
    def more(role):  # warp 5 is in sub-partition 1
        yield from role.alloc(32)
        view = role.sm.tmem.view("D").part(0, 32)
        yield from role.tmem_store(view.quarter(1), torch.ones(32, 32))
        yield from role.tmem_load(view)

    with pytest.raises(ModelFault, match=r"MORE: load D needs lane quarters \[0, 1, 2, 3\]; .*\[1"):
        _run(MORE=more)


def test_allocations_wait_for_room():
    times = {}

    def mma(role):
        assert (yield from role.alloc(256)) == 0
        yield from role.latency("hold", 500)
        role.dealloc()

    def more(role):
        yield from role.latency("later", 1)
        yield from role.alloc(512)
        times["MORE"] = role.env.now
        role.dealloc()

    sm, _ = _run(MMA=mma, MORE=more)
    assert times == {"MORE": 500} and sm.leaks() == []


def test_what_is_not_allocated_cannot_be_used():
    with pytest.raises(ModelFault, match=r"CALC uses D, columns 0 ... 255 of tmem, .* not allocat"):
        _run(CALC=lambda role: role.tmem_load(role.sm.tmem.view("D")))
    with pytest.raises(ModelFault, match="alloc of 48 columns; allowed: 32, 64"):
        _run(CALC=lambda role: role.alloc(48))


def test_unwritten_tensor_memory_is_nan_and_reported():
    def calc(role):
        yield from role.alloc(512)
        values = yield from role.tmem_load(role.sm.tmem.view("E"))
        assert values.isnan().all()
        role.dealloc()

    sm, _ = _run(CALC=calc)
    assert len(sm.reports) == 1
    assert sm.reports[0].startswith("CALC: tmem_load reads E, part of which was never written (")
    assert "test_model_engines.py:" in sm.reports[0]


# ---- shared memory -------------------------------------------------------------------------


def test_a_buffer_lies_in_blocks_of_128_bytes():
    slot = Sm(B200, _plan()).buffer("sB", (256, 128), BF16)[1]
    start = (65536 + 65536) // 4  # behind sA and slot 0
    assert slot.cells == ((start, start + 16384),)
    left = slot.part(columns=slice(0, 64))
    assert left.cells == ((start, start + 8192),)
    half = slot.part(rows=slice(128, 256), columns=slice(64, 128))
    assert half.cells == ((start + 8192 + 4096, start + 16384),)
    narrow = slot.part(rows=slice(0, 2), columns=slice(8, 16))
    assert narrow.cells == ((start + 4, start + 8), (start + 36, start + 40))
    values = _fill(slot)
    assert torch.equal(half.get(), values[128:, 64:]) and torch.equal(slot.T.get(), values.T)
    half.put(torch.zeros(128, 64))
    assert (slot.get()[128:, 64:] == 0).all() and torch.equal(slot.get()[:128], values[:128])
    assert half.T.shape == (64, 128) and slot.name == "sB[1]"


def test_buffers_must_fit_the_plan():
    sm = Sm(B200, _plan())
    with pytest.raises(ValueError, match=r"sA: .* are 131072 B, but the plan gives a slot 65536 B"):
        sm.buffer("sA", (256, 256), BF16)
    with pytest.raises(ValueError, match="no shared-memory buffer 'sX'"):
        sm.buffer("sX", (2, 2), BF16)
    with pytest.raises(IndexError, match="sB has 2 slots; got 2"):
        sm.buffer("sB", (2, 2), BF16)[2]


# ---- copies --------------------------------------------------------------------------------


def _load_time(size: int) -> float:
    """Cycles from a load's issue until its waiter goes on, alone on the machine."""
    chunks = [2048] * (size // 2048)
    landed = B200["tma_issue"] + B200["tma_latency"] + sum(chunks) / B200["gmem"]
    return landed + chunks[-1] / B200["smem"]


def _tma(role, source, slot, barrier):
    role.expect_tx(barrier, slot.bytes)
    role.arrive(barrier)
    role.tma_load(source, slot, barrier)


def test_a_load_brings_values_and_bytes():
    source = torch.randn(64, 64).to(BF16)

    def mma(role):
        slot = role.sm.buffer("sA", (64, 64), BF16)[0]
        _tma(role, source, slot, "full[0]")
        assert slot.unwritten
        yield from role.wait("full[0]", 0)
        assert torch.equal(slot.get(), source.float())

    sm, cycles = _run(MMA=mma)
    assert cycles == pytest.approx(_load_time(8192) + B200["mbarrier_latency"])
    port = [span for span in sm.trace if span.engine == "smem"]
    assert sum(span.end - span.start for span in port) == pytest.approx(8192 / 128)


def test_bytes_in_flight_are_limited():
    ends = []

    def mma(role):
        slots = [role.sm.buffer("sB", (128, 128), BF16)[i % 2] for i in range(3)]
        for i, slot in enumerate(slots):
            _tma(role, torch.zeros(128, 128, dtype=BF16), slot, f"full[{i}]")
        for i in range(3):
            yield from role.wait(f"full[{i}]", 0)
            ends.append(role.env.now - B200["mbarrier_latency"])

    _run(MMA=mma)
    # two of 32 KiB fill the 64 KiB; the third starts its latency when the first has landed
    rest = B200["tma_latency"] + 16 * 2048 / B200["gmem"] + 16
    assert ends[2] - ends[0] == pytest.approx(rest)


def test_a_store_frees_its_source_before_it_is_done():
    out, times = Global("out", torch.zeros(64, 64, dtype=BF16)), []

    def mma(role):
        slot = role.sm.buffer("sA", (64, 64), BF16)[0]
        role.write(slot, torch.ones(64, 64))
        role.fence_proxy()
        role.tma_store(slot, out.tile())
        yield from role.bulk_wait(read=True)
        times.append(role.env.now)
        assert (out.tensor == 0).all()
        yield from role.bulk_wait()
        assert (out.tensor == 1).all()

    sm, cycles = _run(MMA=mma)
    assert times == [pytest.approx(50 + 8192 / 75 + 16)]
    assert cycles == pytest.approx(times[0] + B200["gmem_latency"]) and sm.leaks() == []


def test_reductions_add_and_groups_can_be_kept():
    dq, times = Global("dq", torch.full((32, 32), 2.0)), []

    def mma(role):
        slot = role.sm.buffer("sA", (16, 32), torch.float32)[0]
        role.write(slot, torch.ones(16, 32))
        for _ in range(2):
            role.reduce_add(slot, dq.tile(slice(0, 16)))
        yield from role.bulk_wait(keep=1)
        times.append(role.env.now)
        yield from role.bulk_wait()
        times.append(role.env.now)

    _run(MMA=mma)
    assert (dq.tensor[:16] == 4).all() and (dq.tensor[16:] == 2).all()
    each = 2048 / B200["reduce"]
    assert times[0] == pytest.approx(50 + each + B200["gmem_latency"])
    assert times[1] == pytest.approx(times[0] + each)


def test_a_load_of_another_shape_is_an_error():
    def mma(role):
        slot = role.sm.buffer("sA", (64, 64), BF16)[0]
        role.tma_load(torch.zeros(32, 64, dtype=BF16), slot, "full[0]")
        yield from ()

    with pytest.raises(ModelFault, match=r"MMA loads \(32, 64\) into sA of \(64, 64\)"):
        _run(MMA=mma)


# ---- sub-partitions, registers, pipelines --------------------------------------------------


def test_roles_in_different_sub_partitions_do_not_share_pipes():
    def work(role):
        yield from role.execute("exp", mufu=100, cvt=64, issue=5)

    sm, cycles = _run(MMA=work, MORE=work)  # warps 4 and 5
    assert cycles == 25  # 100 results at 4 a clock in each
    assert {span.parts for span in sm.trace} == {(0,), (1,)}


def test_roles_in_one_sub_partition_do():
    def work(role):
        yield from role.execute("exp", mufu=100)

    # CALC: 25 in each of four; MMA's 100 in sub-partition 0 come after that: 25/4 + 25
    assert _run(CALC=work, MMA=work)[1] == 31.25


def test_registers_come_from_a_pool():
    plan, times = _plan(launch_registers=128, calc=208, rest=48), {}

    def take(role):
        yield from role.setmaxnreg(208)
        times[role.name] = role.env.now

    def give(role, delay, registers=48):
        yield from role.latency("before", delay)
        yield from role.setmaxnreg(registers)

    sm = Sm(B200, plan)
    sm.start("CALC", take)
    for delay, name in enumerate(("MMA", "MORE", "EMPTY")):
        sm.start(name, lambda role, delay=delay: give(role, 10 * delay))
    sm.run()
    assert times == {"CALC": 20}  # 4 warps x 80 more = 80 of each of the 4 others
    assert sm.pool.free == 0 and sm.leaks() == []


def test_registers_that_nobody_gives_are_a_deadlock():
    sm = Sm(B200, _plan(launch_registers=128, calc=208, rest=48))
    sm.start("CALC", lambda role: role.setmaxnreg(208))
    sm.start("MMA", lambda role: role.setmaxnreg(48))
    with pytest.raises(
        Deadlock, match=r"CALC waits for 320 registers a thread place \(the pool has 80\)"
    ):
        sm.run()


def test_registers_must_be_those_of_the_plan():
    with pytest.raises(ModelFault, match="CALC: setmaxnreg 200, but the plan says 208"):
        plan = _plan(launch_registers=128, calc=208, rest=48)
        _run(plan=plan, CALC=lambda role: role.setmaxnreg(200))
    with pytest.raises(ModelFault, match="needs launch_registers"):
        _run(CALC=lambda role: role.setmaxnreg(200))


def test_pipeline_state_flips_its_parity_with_each_turn():
    state, seen = PipelineState(3, parity=1), []
    for _ in range(7):
        seen.append((state.slot, state.parity))
        state.advance()
    assert seen == [(0, 1), (1, 1), (2, 1), (0, 0), (1, 0), (2, 0), (0, 1)]
