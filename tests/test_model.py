# SPDX-License-Identifier: Apache-2.0
"""The SM model: barriers as PTX describes them, engines as queues, cycles that add up by hand."""

import math
import re

import pytest
import simpy
import torch
from flash_ladder import load
from flash_ladder.common import inputs, reference
from flash_ladder.common.model import (
    B200,
    ENGINES,
    H200,
    MACHINES,
    BarrierFault,
    Deadlock,
    Figure,
    Machine,
    MBarrier,
    NamedBarrier,
    Run,
    Sm,
    Span,
    grid_run,
    observe,
)
from flash_ladder.common.ordering import Ordering
from flash_ladder.common.plan import Arrival, Barrier, Plan, Role, SmemBuffer

RATES = {"fma": 100, "alu": 50, "mufu": 10, "smem": 100, "gmem": 20, "barrier_latency": 7}
RATES |= {"mbarrier_latency": 5, "tma_in_flight": 4096}
TOY = Machine("toy", {name: Figure(rate, "", "made up", "low") for name, rate in RATES.items()})
PLAN = Plan(
    roles=(Role("LOAD", range(0, 1)), Role("MMA", range(1, 4))),
    smem=(SmemBuffer("sK", 64),),
    barriers=(
        Barrier(
            "full",
            producers=(Arrival("LOAD", "tma"),),
            consumers=(Arrival("MMA"),),
            guards="a tile",
            tx_bytes=64,
        ),
        Barrier(
            "everyone",
            kind="named",
            number=1,
            producers=(Arrival("LOAD"),),
            consumers=(Arrival("MMA"),),
            guards="a tile",
        ),
    ),
)


def _sm(load=None, mma=None) -> Sm:
    """One CTA of PLAN on TOY with the coroutines given."""
    sm = Sm(TOY, PLAN)
    for name, coroutine in (("LOAD", load), ("MMA", mma)):
        if coroutine:
            sm.start(name, coroutine)
    return sm


# ---- mbarriers -----------------------------------------------------------------------------


def _mbarrier(count: int = 1) -> MBarrier:
    return MBarrier(simpy.Environment(), "full", count)


def test_a_fresh_mbarrier_passes_parity_1_only():
    barrier = _mbarrier()
    assert barrier.passes(1) and not barrier.passes(0)


def test_a_phase_ends_with_the_last_arrival():
    barrier = _mbarrier(count=3)
    barrier.arrive(2)
    assert (barrier.phase, barrier.pending) == (0, 1) and not barrier.passes(0)
    barrier.arrive()
    assert (barrier.phase, barrier.pending) == (1, 3)  # pending counts the next phase
    assert barrier.passes(0) and not barrier.passes(1)


def test_a_phase_waits_for_bytes_as_well():
    barrier = _mbarrier()
    barrier.expect_tx(64)
    barrier.arrive()
    barrier.complete_tx(32)
    assert barrier.phase == 0
    barrier.complete_tx(32)
    assert barrier.phase == 1


def test_bytes_may_come_before_they_are_expected():
    barrier = _mbarrier()
    barrier.complete_tx(64)
    assert barrier.phase == 0
    barrier.expect_tx(64)
    assert barrier.phase == 0  # no arrival yet
    barrier.arrive()
    assert barrier.phase == 1


def test_two_phases_ahead_looks_like_none():
    barrier = _mbarrier()
    barrier.arrive()
    assert barrier.passes(0)
    barrier.arrive()
    assert not barrier.passes(0) and barrier.passes(1)


def test_too_many_arrivals_are_a_fault():
    barrier = _mbarrier(count=2)
    with pytest.raises(BarrierFault, match="3 arrivals too many at full: phase 0, 2 arrivals"):
        barrier.arrive(3)
    barrier.expect_tx(8)
    barrier.arrive(2)
    with pytest.raises(
        BarrierFault, match="1 arrivals too many at full: phase 0, 0 arrivals and 8"
    ):
        barrier.arrive()


def test_count_0_is_a_fault():
    with pytest.raises(BarrierFault, match="full: initialised with count 0"):
        _mbarrier(count=0)


def test_a_waiter_goes_on_when_its_phase_ends():
    def load(role):
        yield from role.latency("fetch", 40)
        role.arrive("full")

    def mma(role):
        yield from role.wait("full", 1)  # passes at once
        assert role.sm.env.now == 0
        yield from role.wait("full", 0, tile=5)

    sm = _sm(load, mma)
    assert sm.run() == 45  # 5 cycles until the waiter notices
    assert sm.trace[-1] == Span("MMA", "barrier", "full", 5, 0, 45)


def test_a_waiter_that_comes_later_does_not_pay_for_the_signal():
    def load(role):
        role.arrive("full")
        yield from role.latency("done", 0)

    def mma(role):
        yield from role.latency("dawdle", 8)
        yield from role.wait("full", 0)

    sm = _sm(load, mma)
    assert sm.run() == 8


def test_a_waiter_with_the_wrong_parity_stays():
    def load(role):
        role.arrive("full")
        yield from role.latency("fetch", 40)

    def mma(role):
        yield from role.latency("dawdle", 1)
        yield from role.wait("full", 1)

    sm = _sm(load, mma)
    with pytest.raises(Deadlock) as stuck:
        sm.run()
    found = str(stuck.value)
    assert found.startswith(
        "at cycle 40: MMA waits for full (parity 1, now in phase 1: LOAD 1 to come) "
        "at tests/test_model.py:"
    )
    assert "mid-phase" not in found


# ---- named barriers ------------------------------------------------------------------------


def test_a_named_barrier_opens_for_all_at_once_and_restarts():
    ends = []

    def role_after(cycles):
        def coroutine(role):
            for turn in range(2):
                yield from role.latency("work", cycles)
                yield from role.sync("everyone", turn)
                ends.append(role.sm.env.now)

        return coroutine

    sm = _sm(role_after(10), role_after(25))
    assert sm.run() == 2 * (25 + 7)
    assert ends == [32, 32, 64, 64]
    assert sm.barriers["everyone"].phase == 2
    waits = {(s.role, s.tile): (s.start, s.end) for s in sm.trace if s.engine == "barrier"}
    assert waits["LOAD", 0] == (10, 32) and waits["MMA", 1] == (57, 64)


def test_too_many_threads_are_a_fault():
    barrier = NamedBarrier(simpy.Environment(), "everyone", 128)
    barrier.arrive(96)
    with pytest.raises(BarrierFault, match="64 threads too many at everyone: phase 0, 96 of 128"):
        barrier.arrive(64)


def test_a_role_alone_at_a_named_barrier_is_a_deadlock():
    sm = _sm(mma=lambda role: role.sync("everyone"))
    with pytest.raises(Deadlock, match=r"MMA waits for everyone \(phase 0\).*96 of 128 threads"):
        sm.run()


def test_a_deadlock_names_every_role_that_waits():
    sm = _sm(lambda role: role.sync("everyone"), lambda role: role.wait("full", 0))
    with pytest.raises(Deadlock, match=r"LOAD waits for everyone .*; MMA waits for full"):
        sm.run()


# ---- engines -------------------------------------------------------------------------------


def test_engines_work_side_by_side_and_the_slowest_counts():
    sm = _sm(lambda role: role.execute("step", 3, fma=250, mufu=50, smem=3000))
    assert sm.run() == 30
    assert sorted(sm.trace, key=lambda span: span.engine) == [
        Span("LOAD", "fma", "step", 3, 0, 10, (0,)),  # LOAD is warp 0: a fourth of the rate
        Span("LOAD", "mufu", "step", 3, 0, 20, (0,)),
        Span("LOAD", "smem", "step", 3, 0, 30),
    ]


def test_warps_work_in_sub_partitions_of_their_own():
    # MMA is warps 1, 2 and 3: 300 lane results of FMA are 100 in each, at 25 a cycle
    sm = _sm(lambda role: role.execute("a", fma=100), lambda role: role.execute("b", fma=300))
    assert sm.run() == 4
    assert sm.trace == [
        Span("LOAD", "fma", "a", -1, 0, 4, (0,)),
        Span("MMA", "fma", "b", -1, 0, 4, (1, 2, 3)),
    ]
    assert [span.share for span in sm.trace] == [1 / 4, 3 / 4]


def test_an_engine_that_does_not_exist_is_named():
    with pytest.raises(KeyError, match="no engine 'fmas'"):
        _sm(lambda role: role.execute("a", fmas=100)).run()


def test_an_engine_serves_in_the_order_asked():
    def load(role):
        yield from role.execute("first", smem=1000)  # 0 ... 10
        yield from role.execute("third", smem=500)  # asks at 10, waits until 30

    def mma(role):
        yield from role.latency("dawdle", 4)
        yield from role.execute("second", smem=2000)  # asks at 4, has it 10 ... 30

    sm = _sm(load, mma)
    assert sm.run() == 35
    turns = [(s.op, s.start, s.end) for s in sm.trace if s.engine == "smem"]
    assert turns == [("first", 0, 10), ("second", 10, 30), ("third", 30, 35)]


def test_roles_on_different_engines_do_not_hinder_each_other():
    sm = _sm(
        lambda role: role.execute("exp", mufu=25), lambda role: role.execute("scale", smem=1000)
    )
    assert sm.run() == 10
    assert {span.start for span in sm.trace} == {0}


def test_an_unknown_figure_is_named():
    with pytest.raises(KeyError, match="toy has no figure 'tensor'; it has"):
        TOY["tensor"]


@pytest.mark.parametrize("machine", MACHINES.values(), ids=MACHINES)
def test_machines_have_every_figure_with_its_source(machine):
    wanted = {"fma", "alu", "mufu", "smem", "gmem", "clock", "sms", "gmem_latency"}
    assert wanted <= set(machine.figures)
    for figure in machine.figures.values():
        assert figure.value > 0 and figure.unit and figure.source
        assert figure.confidence in ("high", "medium", "low")


# ---- buffers -------------------------------------------------------------------------------


def test_a_buffer_is_nan_until_written():
    found = []

    def load(role):
        slot = role.sm.buffer("sK", (2, 8), torch.float32)[0]
        found.append(role.read(slot))
        value = torch.ones(2, 8)
        role.write(slot, value)
        value += 1  # the buffer keeps what was written
        found.append(role.read(slot))
        role.write(slot, value)
        yield from role.latency("done", 1)
        found.append(role.read(slot))

    sm = _sm(load)
    sm.run()
    assert found[0].isnan().all() and found[0].shape == (2, 8)
    assert (found[1] == 1).all()  # a read is not changed by a later write
    assert (found[2] == 2).all()
    assert len(sm.reports) == 1
    assert sm.reports[0].startswith("LOAD: read reads sK, part of which was never written (tests/")


def test_a_write_of_another_shape_is_an_error():
    def load(role):
        role.write(role.sm.buffer("sK", (2, 8), torch.float32)[0], torch.ones(8, 2))
        yield from role.latency("never", 1)

    with pytest.raises(ValueError, match=r"LOAD writes \(8, 2\) to sK, which is \(2, 8\)"):
        _sm(load).run()


# ---- grids ---------------------------------------------------------------------------------


def _grid(batch: int, heads: int, blocks: int, max_ctas=None) -> tuple[Run, list]:
    """A grid of tiles of 2 rows whose output is the order in which its CTAs ran."""
    order = []

    def cta(b, head, m_block):
        order.append((b, head, m_block))
        turn = float(len(order))
        sm = _sm(lambda role: role.latency("work", 10 * turn))
        return sm, lambda: (torch.full((2, 8), turn), torch.full((2,), turn))

    q, k = torch.zeros(batch, 2 * blocks, heads, 8), torch.zeros(batch, 6, heads, 8)
    return grid_run(TOY, q, k, 2, cta, max_ctas), order


def test_query_tiles_come_first_then_heads_then_batch():
    run, order = _grid(batch=2, heads=3, blocks=2)
    assert order == [(b, h, m) for b in range(2) for h in range(3) for m in range(2)]
    assert run.ctas == 12 and run.cta_cycles == tuple(10.0 * turn for turn in range(1, 13))
    assert run.out[1, :, 2].unique().tolist() == [11, 12]
    assert run.out[0, :, 1, 0].tolist() == [3, 3, 4, 4] == run.lse[0, 1].tolist()
    assert run.flop == 4 * 2 * 3 * 4 * 6 * 8  # two products of 2 m n k each


def test_max_ctas_leaves_the_rest_nan():
    run, order = _grid(batch=1, heads=2, blocks=2, max_ctas=3)
    assert order == [(0, 0, 0), (0, 0, 1), (0, 1, 0)]
    assert run.out[0, 2:, 1].isnan().all() and run.lse[0, 1, 2:].isnan().all()
    assert run.out.isnan().sum() == 2 * 8 and run.lse.isnan().sum() == 2
    assert run.ctas == 4 and len(run.cta_cycles) == 3
    assert len(_grid(batch=1, heads=2, blocks=2, max_ctas=99)[1]) == 4


def test_at_least_one_cta_runs():
    with pytest.raises(ValueError, match="max_ctas must be at least 1; got 0"):
        _grid(batch=1, heads=1, blocks=1, max_ctas=0)


def test_time_counts_waves_of_one_cta_per_sm():
    machine = Machine(
        "tiny", {**TOY.figures, "clock": Figure(1e9, "Hz", "", ""), "sms": Figure(3, "", "", "")}
    )
    run = Run(machine, None, None, (100.0, 300.0), (), 7, 6e6)
    assert run.seconds == pytest.approx(3 * 200 / 1e9)
    assert run.tflops == pytest.approx(6e6 / 600e-9 / 1e12)


def test_busy_and_spent_on_account_for_every_cycle():
    def load(role):
        yield from role.latency("fetch", 30)  # 0 ... 30
        # 30 ... 50 by the one warp of LOAD at a fourth of the rate, smem until 40
        yield from role.execute("product", fma=500, smem=1000)
        yield from role.execute("exp", mufu=25)  # 50 ... 60

    sm = _sm(load)
    cycles = sm.run()
    assert {span.tile for span in sm.trace} == {-1}  # no tile was named
    run = Run(TOY, None, None, (cycles,), tuple(sm.trace), 1, 0.0)
    assert run.spent_on() == {"fetch": 30, "product": 20, "exp": 10}
    assert sum(run.spent_on().values()) == cycles
    busy = {"fma": 20 / 60 / 4, "mufu": 10 / 60 / 4, "smem": 10 / 60}  # a fourth of the pipes
    assert run.busy() == pytest.approx({name: 0 for name in ENGINES} | busy)


# ---- stage 01 ------------------------------------------------------------------------------


@pytest.mark.parametrize("machine", [B200, H200], ids=lambda machine: machine.name)
@pytest.mark.parametrize(("head_dim", "tile_n"), [(64, 64), (128, 32)])
def test_cycles_of_stage_01_by_hand(stage, machine, head_dim, tile_n):
    rows, tiles, word = 128, 256 // tile_n, 4
    given = inputs.make(
        "gaussian",
        batch=1,
        seqlen_q=rows,
        seqlen_k=256,
        heads=1,
        head_dim=head_dim,
        dtype=torch.bfloat16,
    )
    m = machine

    def load(elements):  # 2 bytes in, one conversion, a word out
        parts = (elements * 2 / m["gmem"], elements / m["alu"], elements * word / m["smem"])
        return m["gmem_latency"] + max(parts)

    scores, outputs = rows * tile_n, rows * head_dim
    fmas = scores * head_dim  # of one product
    port = fmas / 4 / 32 * m["smem_broadcast_passes"]  # a warp's 16-byte load feeds 4 FMAs a lane
    one_tile = (
        2 * load(tile_n * head_dim)
        + 2 * m["barrier_latency"]
        + max(fmas / m["fma"], port + outputs * word / m["smem"])  # QK reads Q once
        + max(scores / m["mufu"], 2 * scores / m["fma"], scores / m["alu"])  # softmax
        + outputs / m["fma"]  # rescale
        + max(fmas / m["fma"], port)  # PV
    )
    store = max(outputs / m["fma"], outputs * 2 / m["gmem"])
    run = stage.simulate(given.q, given.k, given.v, machine=machine)
    assert run.cta_cycles == pytest.approx([load(outputs) + tiles * one_tile + store])
    assert sum(run.spent_on().values()) == pytest.approx(run.cta_cycles[0])
    assert run.busy()["smem"] == max(run.busy().values())
    assert run.machine is machine


def test_stage_01_stops_after_max_ctas(stage):
    given = inputs.make(
        "gaussian", batch=2, seqlen_q=256, seqlen_k=128, heads=1, head_dim=64, dtype=torch.float16
    )
    run = stage.simulate(given.q, given.k, given.v, max_ctas=1)
    assert run.ctas == 4 and len(run.cta_cycles) == 1
    assert not run.out[0, :128].isnan().any() and run.out[0, 128:].isnan().all()
    assert run.out[1].isnan().all() and run.lse[1].isnan().all()
    truth = reference.attention(given.q, given.k, given.v)
    assert torch.allclose(run.out[0, :128].double(), truth.out[0, :128], atol=2e-3)


def test_stage_01_leaves_nothing_behind_and_has_no_races(stage):
    given = inputs.make(
        "gaussian", batch=1, seqlen_q=128, seqlen_k=256, heads=1, head_dim=128, dtype=torch.float16
    )
    with observe(Ordering):
        run = stage.simulate(given.q, given.k, given.v)
    assert run.findings == () and run.tmem_log == ()


def test_a_tile_read_before_it_is_loaded_gives_nan(stage, monkeypatch):
    right = stage.model.load_tile

    def forget_last_value_tile(role, source, target, tile=-1):
        if target.name == "sV" and tile == 3:  # the first visited
            yield from role.latency("forgotten", 0)
        else:
            yield from right(role, source, target, tile)

    monkeypatch.setattr(stage.model, "load_tile", forget_last_value_tile)
    given = inputs.make(
        "gaussian", batch=1, seqlen_q=128, seqlen_k=128, heads=1, head_dim=128, dtype=torch.float16
    )
    run = stage.simulate(given.q, given.k, given.v)
    assert run.out.isnan().all() and math.isfinite(run.lse.sum())
    assert any("read reads sV, part of which was never written" in text for text in run.findings)


# ---- what a run shows of itself --------------------------------------------------------------


def test_a_run_shows_shapes_and_cycles_in_a_line(stage):
    q, k = torch.zeros(1, 256, 2, 64).bfloat16(), torch.zeros(1, 128, 2, 64).bfloat16()
    assert re.fullmatch(
        r"<Run on B200: out \(1, 256, 2, 64\), lse \(1, 2, 256\); 3 of 4 CTAs or pairs, at most "
        r"\d+ cycles each; 0 findings>",
        repr(stage.simulate(q, k, k, max_ctas=3)),
    )
    run = load(7).part("backward_1cta").simulate(q, k, k, q)
    most = f"{max(run.cta_cycles):.0f}"
    assert repr(run) == (
        "<GradientRun on B200: dq (1, 256, 2, 64), dk (1, 128, 2, 64), dv (1, 128, 2, 64); 2 of 2 "
        f"CTAs or pairs, at most {most} cycles each; 0 findings>"
    )
    none = load(8).simulate(q[:0], k[:0], k[:0])
    assert repr(none).endswith("0 of 0 CTAs or pairs, at most 0 cycles each; 0 findings>")
