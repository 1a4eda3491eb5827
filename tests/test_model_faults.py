# SPDX-License-Identifier: Apache-2.0
"""A whole schedule on the SM model: right numbers, cost, and faults planted in it by name."""

import importlib.util
import pathlib
import time

import pytest
import torch
from flash_ladder.common import reference
from flash_ladder.common.model import B200, BarrierFault, Deadlock, Role, Sm, observe
from flash_ladder.common.model.source import caller_line
from flash_ladder.common.ordering import Ordering
from flash_ladder.common.plan import Arrival, Barrier, Plan, PlanError, SmemBuffer, TmemRegion
from flash_ladder.common.plan import Role as PlanRole

FILE = pathlib.Path(__file__).with_name("model_schedules.py")
SPEC = importlib.util.spec_from_file_location("model_schedules", FILE)
model_schedules = importlib.util.module_from_spec(SPEC)
SPEC.loader.exec_module(model_schedules)


def _tensors(keys: int, head_dim: int = 128, dtype=torch.bfloat16):
    generator = torch.Generator().manual_seed(0)
    rows = (256, keys, keys)
    return [torch.randn(n, head_dim, generator=generator).to(dtype) for n in rows]


def _program(keys=512, kind=model_schedules.Program, ordering="practice", **options):
    q, k, v = _tensors(keys, **options)
    return kind(q, k, v, q.shape[1] ** -0.5, ordering=Ordering(ordering) if ordering else None)


def _findings(kind=model_schedules.Program, skip=None) -> list[str]:
    """What the checks say of a program that comes to an end."""
    with observe(skip=skip):
        program = _program(kind=kind)
    program.sm.run()
    return program.sm.findings()


def _leave_out(role: str, verb: str, name: str = ""):
    """A `skip` for `observe`."""
    return lambda agent, v, barrier, line: (agent, v) == (role, verb) and barrier.startswith(name)


# ---- the schedule as it should be ----------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("head_dim", [64, 128])
def test_the_schedule_is_right_and_ordered(head_dim, dtype):
    program = _program(head_dim=head_dim, dtype=dtype)
    program.sm.run()
    q, k, v = (x.tensor[None, :, None] for x in (program.q, program.k, program.v))
    truth = reference.attention(q, k, v)
    assert (program.out.tensor - truth.out[0, :, 0]).abs().max() < 4e-3
    assert (program.lse - truth.lse[0, 0]).abs().max() < 1e-5
    assert program.sm.findings() == []
    assert len(program.sm.ordering.a1_edges()) == 2  # S over P, for either query tile


def test_ptx_alone_does_not_order_s_over_p():
    program = _program(ordering="ptx")
    program.sm.run()
    findings = program.sm.findings()
    assert len(findings) == 2 and all("only rule A1 orders" in text for text in findings)


def test_the_tensor_core_does_its_work_and_no_more():
    program = _program(keys=1024)
    cycles = program.sm.run()
    spans = [span for span in program.sm.trace if span.engine == "tensor"]
    busy = sum(span.end - span.start for span in spans)
    # 8 key tiles x 2 query tiles x 2 products of 512 cycles; QK fills the port, so a tile that
    # arrives (32 KiB: 256 cycles of the port; two Q, 16 of K and V) may hold it up
    ideal, fills = 8 * 2 * 2 * 512, (2 + 16) * 256
    assert ideal <= busy <= ideal + fills and busy < cycles
    touched = {row[2:4] for row in program.sm.tmem.log}  # (way, region), by MMAs and by threads
    both_ways = {(way, f"{r}{s}") for way in ("read", "write") for r in "SPO" for s in "01"}
    assert touched == both_ways
    exp = sum((s.end - s.start) * s.share for s in program.sm.trace if s.engine == "mufu")
    assert exp == pytest.approx(8 * 2 * 1024)


def test_cost_is_small_and_linear_in_tiles():
    seconds, cycles, spans = [], [], []
    for keys in (1024, 2048, 4096):
        program, start = _program(keys, ordering=None), time.perf_counter()
        cycles.append(program.sm.run())
        seconds.append(time.perf_counter() - start)
        spans.append(len(program.sm.trace))
    assert seconds[0] < 15
    assert spans[2] - spans[1] == pytest.approx(2 * (spans[1] - spans[0]), rel=0.02)
    assert cycles[2] - cycles[1] == pytest.approx(2 * (cycles[1] - cycles[0]), rel=0.02)


# ---- faults --------------------------------------------------------------------------------


def _says(findings: list[str], *words: str) -> bool:
    return any(all(word in text for word in words) for text in findings)


def test_a_missing_wait_is_a_race():
    findings = _findings(skip=_leave_out("MMA", "wait", "kv_full"))
    assert _says(findings, "O0 (MMA, tests/model_schedules.py:", "load sKV[1] (LOAD,", "kv_full[1]")


def test_a_missing_commit_is_a_deadlock_that_names_everyone():
    with pytest.raises(Deadlock) as stuck:
        _findings(skip=_leave_out("MMA", "commit", "s_full0"))
    text = str(stuck.value)
    for part in (
        "SOFTMAX0 waits for s_full0 (parity 0, now in phase 0: MMA 1 to come) at tests/model_sch",
        "MMA waits for p_ready0 (parity 0, now in phase 0: SOFTMAX0 128, CORRECTION 128 to come)",
        "LOAD waits for kv_empty[1] (parity 0, now in phase 0: MMA 1 to come) at tests/model_sche",
    ):
        assert part in text


def test_a_role_that_arrives_twice_is_named():
    class Twice(model_schedules.Program):
        def tell_correction(self, role, s, values):
            yield from super().tell_correction(role, s, values)
            if s == 0:
                role.arrive("p_ready0")

    found = r"SOFTMAX0 arrives again in phase \d of p_ready0: 256 .* to come: CORRECTION 128"
    with pytest.raises(BarrierFault, match=found):
        _findings(Twice)


def test_a_sole_producer_that_arrives_twice_is_found_too():
    class Twice(model_schedules.Program):
        def tell_correction(self, role, s, values):
            yield from super().tell_correction(role, s, values)
            if s == 0:
                role.arrive("stats_full0")

    with pytest.raises(Deadlock, match=r"stats_full0 .* SOFTMAX0 128 to come"):
        _findings(Twice)


def test_a_wrong_parity_is_found(monkeypatch):
    right = Role.wait

    def wrong(role, barrier, parity, tile=-1):
        return right(role, barrier, 1 - parity if barrier == "s_full1" else parity, tile)

    monkeypatch.setattr(Role, "wait", wrong)
    findings = _findings_or_deadlock()
    assert _says(findings, "SOFTMAX1: tmem_load reads S1, part of which was never written")


def _findings_or_deadlock(kind=model_schedules.Program) -> list[str]:
    program = _program(kind=kind)
    try:
        program.sm.run()
    except (Deadlock, BarrierFault) as fault:
        return [str(fault), *program.sm.findings()]
    return program.sm.findings()


@pytest.mark.parametrize(
    ("role", "verb", "missing"),
    [
        ("SOFTMAX0", "wait_ld", "wait::ld is missing between it and the release by SOFTMAX0"),
        ("SOFTMAX0", "wait_st", "wait::st is missing between it and the release by SOFTMAX0"),
        ("CORRECTION", "fence_before", "fence::before_thread_sync is missing before CORRECTION's"),
        ("MMA", "fence_after", "fence::after_thread_sync is missing after MMA's wait"),
        ("CORRECTION", "fence_proxy", "fence.proxy.async by CORRECTION is missing"),
    ],
)
def test_a_release_without_its_fence_is_a_race(role, verb, missing):
    assert _says(_findings(skip=_leave_out(role, verb)), missing)


def test_a_consumer_one_stage_behind_reads_the_wrong_slot():
    class Behind(model_schedules.Program):
        def mma_pv(self, role, s, slot, n_block):
            super().mma_pv(role, s, (slot - 1) % model_schedules.RING, n_block)

    findings = _findings(Behind)
    assert _says(findings, "load sKV[", "O0 (MMA,", "has read them before")


def _moved(monkeypatch, **changes):
    """The schedule with its plan changed."""
    plan = model_schedules.plan(128).with_changes(**changes)
    monkeypatch.setattr(model_schedules, "plan", lambda head_dim: plan)


def test_overlapping_regions_of_tensor_memory_are_found(monkeypatch):
    rows = [row for row in model_schedules.plan(128).tmem if row.name != "P0"]
    with pytest.raises(PlanError, match=r"tensor memory S1 .* overlaps P0"):
        _moved(monkeypatch, tmem=(*rows, TmemRegion("P0", 160, 64)))
        _program()
    _moved(monkeypatch, tmem=(*rows, TmemRegion("P0", 160, 64, aliases=("S1", "P1"))))
    findings = _findings_or_deadlock()
    assert _says(findings, "tmem columns 160-223", "store P0 (SOFTMAX0", "S1 (MMA")


def test_overlapping_buffers_of_shared_memory_are_found(monkeypatch):
    rows = [row for row in model_schedules.plan(128).smem if row.name != "sStats"]
    stats = SmemBuffer("sStats", 1024, 2, aliases=("sKV",))
    _moved(monkeypatch, smem=(*rows, stats))
    findings = _findings_or_deadlock()
    assert _says(findings, "smem bytes 65536-66559", "write sStats[0] (SOFTMAX0", "load sKV[0] (LO")


# ---- leaks ---------------------------------------------------------------------------------

MMA = (False, (128, 32, 64))
PLAN = Plan(
    roles=(PlanRole("CALC", range(0, 4), 128), PlanRole("LOAD", range(4, 8), 40)),
    smem=(SmemBuffer("sA", 4096),),
    tmem=(TmemRegion("D", 0, 32),),
    barriers=(
        Barrier("full", (Arrival("LOAD", "tma"),), (Arrival("CALC"),), "a tile", tx_bytes=1),
        Barrier("done", (Arrival("CALC", "warp"),), (Arrival("LOAD"),), "a tile"),
        Barrier("all", (Arrival("CALC"),), (Arrival("LOAD"),), "everyone", kind="named", number=1),
    ),
    launch_registers=88,
)


def test_what_a_cta_leaves_behind():
    def calc(role):
        yield from role.alloc(32)
        role.arrive("done", 3)
        role.arrive("all")
        slot = role.sm.buffer("sA", (32, 64), torch.bfloat16)[0]
        role.mma(role.sm.tmem.view("D"), role.sm.tmem.view("D", slot.buffer.dtype), slot, *MMA)
        line.append(caller_line(1))

    def load(role):
        role.expect_tx("full", 4096)
        role.arrive("full")
        slot = role.sm.buffer("sA", (32, 64), torch.bfloat16)[0]
        role.write(slot, torch.zeros(32, 64))
        role.tma_store(slot, torch.zeros(32, 64, dtype=torch.bfloat16))
        yield from role.latency("never", 0)

    line, sm = [], Sm(B200, PLAN)
    sm.start("CALC", calc)
    sm.start("LOAD", load)
    sm.run()
    mma = f"tests/test_model_faults.py:{int(line[0].split(':')[1]) - 1}"
    assert sm.findings() == [
        f"CALC: mma D reads D, part of which was never written ({mma})",
        "barrier left in mid-phase: full: phase 0, 4096 B to come",
        "barrier left in mid-phase: done: phase 0, CALC 1 to come",
        "barrier left in mid-phase: all: phase 0, 128 of 256 threads came",
        "CALC did not free columns 0 ... 31 of tmem",
        f"CALC never committed 1 MMAs, the first at {mma}",
        "CALC ends with 88 registers, not the plan's 128",
        "LOAD never waited for 1 bulk groups",
        "LOAD ends with 88 registers, not the plan's 40",
    ]


def test_bytes_that_nobody_expected_are_left_over():
    def load(role):
        role.arrive("full")  # without expect_tx: the phase ends too early
        slot = role.sm.buffer("sA", (32, 64), torch.bfloat16)[0]
        role.tma_load(torch.zeros(32, 64, dtype=torch.bfloat16), slot, "full")
        yield from role.setmaxnreg(40)

    sm = Sm(B200, PLAN)
    sm.start("LOAD", load)
    sm.run()
    assert sm.findings() == ["barrier left in mid-phase: full: phase 1, LOAD 1 and -4096 B to come"]
