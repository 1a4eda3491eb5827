# SPDX-License-Identifier: Apache-2.0
"""The plan finds on the host what would hang or fault on the device."""

from dataclasses import replace

import pytest
from flash_ladder import load
from flash_ladder.common.plan import (
    MAX_SMEM_BYTES,
    Arrival,
    Barrier,
    Plan,
    PlanError,
    Role,
    SmemBuffer,
    TmemRegion,
)

ROLES = (
    Role("SOFTMAX0", range(0, 4), registers=192),
    Role("SOFTMAX1", range(4, 8), registers=192),
    Role("CORRECTION", range(8, 12), registers=80),
    Role("MMA", range(12, 13), registers=48),
    Role("LOAD", range(13, 14), registers=48),
    Role("EMPTY", range(14, 16), registers=48),
)
KV_FULL = Barrier(
    "kv_full",
    producers=(Arrival("LOAD", "tma"),),
    consumers=(Arrival("MMA", "one"),),
    guards="K or V",
    stages=3,
    tx_bytes=128 * 128 * 2,
)
P_FULL = Barrier(
    "p_full",
    producers=(Arrival("SOFTMAX0"), Arrival("CORRECTION", "warp")),
    consumers=(Arrival("MMA", "one"),),
    guards="P",
)
ROWS_DONE = Barrier(
    "rows_done",
    producers=(Arrival("SOFTMAX0"),),
    consumers=(Arrival("CORRECTION"),),
    guards="row sums",
    kind="named",
    number=1,
    stages=2,
)
GOOD = Plan(
    roles=ROLES,
    launch_registers=128,
    smem=(SmemBuffer("sQ", 32768, 2, 1024), SmemBuffer("sK", 32768, 3, 1024)),
    tmem=(
        TmemRegion("S0", 0, 128),
        TmemRegion("S1", 128, 128),
        TmemRegion("O", 256, 256),
        TmemRegion("P0", 64, 64, aliases=("S0",)),
    ),
    barriers=(KV_FULL, P_FULL, ROWS_DONE),
)
ONE_WARP = Plan(roles=(Role("ALL", range(0, 1)),))


def _budgets(*registers: int, launch: int) -> Plan:
    """One role to a warpgroup."""
    roles = tuple(
        Role(f"GROUP{i}", range(4 * i, 4 * i + 4), registers=count)
        for i, count in enumerate(registers)
    )
    return Plan(roles=roles, launch_registers=launch)


def _barriers(*barriers: Barrier) -> Plan:
    return GOOD.with_changes(barriers=barriers)


def _smem(*buffers: SmemBuffer) -> Plan:
    return ONE_WARP.with_changes(smem=buffers)


def _tmem(*regions: TmemRegion) -> Plan:
    return ONE_WARP.with_changes(tmem=regions)


def test_a_plan_like_the_last_stages_passes():
    assert GOOD.check() is GOOD
    assert GOOD.threads == 512


@pytest.mark.parametrize(
    "plan",
    [
        _budgets(192, 192, 80, 48, launch=128),  # 512 registers a thread place in four warpgroups
        _budgets(240, 240, 24, launch=168),
        _budgets(168, 168, 168, launch=168),
        _smem(SmemBuffer("sQ", MAX_SMEM_BYTES)),
        _tmem(TmemRegion("S", 0, 512)),
        _tmem(TmemRegion("S", 511, 1)),
        Plan(roles=(Role("A", range(0, 32)),)),
        _barriers(replace(ROWS_DONE, number=0)),
        _barriers(replace(ROWS_DONE, number=14)),
    ],
)
def test_plans_up_to_the_limit_pass(plan):
    plan.check()


BAD = {
    "no role": (Plan(roles=()), r"warps \[0\] have no role"),
    "role without warps": (Plan(roles=(Role("A", range(0)),)), "role A has no warps"),
    "role twice": (
        Plan(roles=(Role("A", range(0, 4)), Role("A", range(4, 8)))),
        r"roles: \['A'\] declared twice",
    ),
    "warp in two roles": (
        Plan(roles=(Role("A", range(0, 4)), Role("B", range(3, 8)))),
        "warp 3 belongs to both A and B",
    ),
    "warp without role": (
        Plan(roles=(Role("A", range(0, 4)), Role("B", range(5, 8)))),
        r"warps \[4\] have no role; name them EMPTY",
    ),
    "33 warps": (Plan(roles=(Role("A", range(0, 33)),)), "1056 threads a CTA; the limit is 1024"),
    "pool exceeded": (
        _budgets(192, 192, 80, 56, launch=128),
        r"register pool exceeded.*GROUP3 4 x 56 = 2080 a thread place.*128 x 16 = 2048",
    ),
    "pool without launch": (
        Plan(roles=(Role("A", range(0, 4), registers=128),)),
        "need launch_registers",
    ),
    "launch over the SM": (_budgets(168, 168, 168, 168, launch=168), "168 registers x 512 threads"),
    "budget not a multiple of 8": (_budgets(100, 100, launch=128), "setmaxnreg 100"),
    "budget too small": (_budgets(16, 128, launch=128), "setmaxnreg 16 is not a multiple of 8 in"),
    "budget too large": (_budgets(264, 24, launch=168), "setmaxnreg 264"),
    "half a warpgroup": (
        Plan(roles=(Role("A", range(0, 6), registers=128),), launch_registers=128),
        "whole warpgroups of 4 warps; the CTA has 6",
    ),
    "two budgets in a warpgroup": (
        GOOD.with_changes(roles=(*ROLES[:3], replace(ROLES[3], registers=24), *ROLES[4:])),
        r"warps 12 \.\.\. 15 share one setmaxnreg.*MMA 24, LOAD 48, EMPTY 48",
    ),
    "tmem beyond 512": (_tmem(TmemRegion("O", 385, 128)), r"O: columns 385 \.\.\. 512 leave"),
    "tmem before 0": (_tmem(TmemRegion("O", -8, 128)), r"O: columns -8"),
    "tmem empty": (_tmem(TmemRegion("O", 8, 0)), "O: 0 columns"),
    "tmem overlap": (
        _tmem(TmemRegion("S", 0, 128), TmemRegion("P", 127, 64)),
        r"S \(columns 0 \.\.\. 127\) overlaps P \(columns 127 \.\.\. 190\); declare the alias",
    ),
    "tmem unknown alias": (
        _tmem(TmemRegion("P", 0, 64, aliases=("S",))),
        r"tmem: P aliases unknown \['S'\]",
    ),
    "smem too large": (
        _smem(SmemBuffer("sQ", MAX_SMEM_BYTES - 1024), SmemBuffer("sK", 1032)),
        r"shared memory 232456 B exceeds 232448 B \(sQ 231424, sK 1032\)",
    ),
    "smem alignment": (_smem(SmemBuffer("sQ", 1024, align=48)), "sQ: alignment 48"),
    "smem no slots": (_smem(SmemBuffer("sQ", 1024, stages=0)), "sQ: 0 slots of 1024 bytes"),
    "smem no bytes": (_smem(SmemBuffer("sQ", 0)), "sQ: 1 slots of 0 bytes"),
    "smem unknown alias": (
        _smem(SmemBuffer("sO", 1024, aliases=("sQ",))),
        r"smem: sO aliases unknown \['sQ'\]",
    ),
    "smem alias of a later buffer": (
        _smem(SmemBuffer("sO", 1024, aliases=("sQ",)), SmemBuffer("sQ", 1024)),
        "sO aliases sQ, which comes later",
    ),
    "smem alias not aligned": (
        _smem(
            SmemBuffer("sK", 128), SmemBuffer("sQ", 128), SmemBuffer("sO", 8, 1, 256, "", ("sQ",))
        ),
        "sO: starts at byte 128, not a multiple of 256",
    ),
    "smem alias reaches further": (
        _smem(
            SmemBuffer("sQ", 1024),
            SmemBuffer("sK", 1024),
            SmemBuffer("sO", 1025, aliases=("sQ",)),
        ),
        r"sK \(bytes 1024 \.\.\. 2047\) overlaps sO \(bytes 0 \.\.\. 1024\)",
    ),
    "unknown role": (
        _barriers(replace(P_FULL, consumers=(Arrival("EPILOGUE"),))),
        r"no role 'EPILOGUE'; roles are \['SOFTMAX0'",
    ),
    "unknown unit": (
        _barriers(replace(P_FULL, producers=(Arrival("MMA", "lane"),))),
        "arrival unit 'lane' is unknown",
    ),
    "unknown kind": (_barriers(replace(P_FULL, kind="semaphore")), "kind 'semaphore' is unknown"),
    "no producer": (_barriers(replace(P_FULL, producers=())), "needs a producer and a consumer"),
    "no consumer": (_barriers(replace(P_FULL, consumers=())), "needs a producer and a consumer"),
    "no stages": (_barriers(replace(P_FULL, stages=0)), "p_full: 0 stages"),
    "barrier twice": (_barriers(P_FULL, P_FULL), r"barriers: \['p_full'\] declared twice"),
    "bytes without copy": (
        _barriers(replace(P_FULL, tx_bytes=1024)),
        "p_full expects bytes, but no producer is a TMA copy",
    ),
    "copy without bytes": (
        _barriers(replace(KV_FULL, tx_bytes=0)),
        "kv_full: a TMA copy arrives, but tx_bytes is 0",
    ),
    "named without number": (_barriers(replace(ROWS_DONE, number=None)), "number None is not in"),
    "named 16": (
        _barriers(replace(ROWS_DONE, number=16, stages=1)),
        "number 16 is not in 0 ... 15",
    ),
    "named up to 16": (_barriers(replace(ROWS_DONE, number=15)), "number 16 is not in 0 ... 15"),
    "named clash": (
        _barriers(ROWS_DONE, replace(ROWS_DONE, name="rows_read", number=2)),
        "named barrier 2 is both rows_done and rows_read",
    ),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_plans_are_refused(name):
    plan, words = BAD[name]
    with pytest.raises(PlanError, match=words):
        plan.check()


@pytest.mark.parametrize(
    ("unit", "count"), [("thread", 128), ("warp", 4), ("one", 1), ("commit", 1), ("tma", 1)]
)
def test_arrivals_follow_from_the_role(unit, count):
    assert Arrival("CORRECTION", unit).count(GOOD) == count
    assert Arrival("CORRECTION", unit, ctas=2).count(GOOD) == 2 * count  # both CTAs of a pair


def test_mbarrier_counts_its_producers():
    assert KV_FULL.arrivals(GOOD) == 1
    assert P_FULL.arrivals(GOOD) == 128 + 4
    larger = GOOD.with_changes(
        roles=(Role("SOFTMAX0", range(0, 8)), Role("CORRECTION", range(8, 9)))
    )
    assert P_FULL.arrivals(larger) == 256 + 1


def test_named_barrier_counts_each_role_once():
    assert ROWS_DONE.arrivals(GOOD) == 256
    both = replace(ROWS_DONE, consumers=ROWS_DONE.producers)
    assert both.arrivals(GOOD) == 128


def test_look_up_by_name():
    assert GOOD.role("MMA") is ROLES[3] and GOOD.barrier("p_full") is P_FULL
    with pytest.raises(PlanError, match=r"no role 'X'; roles are"):
        GOOD.role("X")
    with pytest.raises(PlanError, match=r"no barrier 'X'; barriers are \['kv_full', 'p_full'"):
        GOOD.barrier("X")


@pytest.mark.parametrize(
    ("buffers", "size"),
    [
        ((), 0),
        ((SmemBuffer("a", 100), SmemBuffer("b", 8, stages=3, align=8)), 104 + 24),
        ((SmemBuffer("a", 8, align=8), SmemBuffer("b", 100, align=1024)), 1024 + 100),
        ((SmemBuffer("a", 4096), SmemBuffer("b", 1024, 2, aliases=("a",))), 4096),
        ((SmemBuffer("a", 1024), SmemBuffer("b", 4096, aliases=("a",)), SmemBuffer("c", 8)), 4104),
    ],
)
def test_smem_bytes(buffers, size):
    assert _smem(*buffers).check().smem_bytes == size


def test_an_alias_is_declared_on_either_side():
    first, second = TmemRegion("S", 0, 128), TmemRegion("P", 64, 64)
    _tmem(replace(first, aliases=("P",)), second).check()
    _tmem(first, replace(second, aliases=("S",))).check()
    _tmem(first, replace(second, column=128)).check()  # side by side: no overlap


def test_shared_memory_is_aligned_to_powers_of_two_up_to_1024():
    allowed = []
    for align in range(1, 2049):
        try:
            _smem(SmemBuffer("sQ", 8, align=align)).check()
            allowed.append(align)
        except PlanError:
            continue
    assert allowed == [8, 16, 32, 64, 128, 256, 512, 1024]


# ---- where the mbarriers lie ---------------------------------------------------------------


def _mbarriers(*rows: tuple[str, int]) -> dict[str, int]:
    """Offsets of mbarriers: (name, slots)."""
    barriers = tuple(replace(P_FULL, name=name, stages=slots) for name, slots in rows)
    return replace(GOOD, barriers=barriers).mbarrier_offsets


def test_mbarriers_lie_in_the_order_of_the_table():
    assert GOOD.mbarrier_offsets == {
        "kv_full[0]": 0,
        "kv_full[1]": 8,
        "kv_full[2]": 16,
        "p_full": 24,
    }
    assert list(_mbarriers(("b", 1), ("a", 2))) == ["b", "a[0]", "a[1]"]
    assert _mbarriers() == {}


def test_mbarriers_of_the_query_tiles_lie_next_to_each_other():
    offsets = _mbarriers(("q0", 1), ("kv", 2), ("s0", 1), ("q1", 1), ("s1", 1), ("done", 1))
    assert list(offsets) == ["q0", "q1", "kv[0]", "kv[1]", "s0", "s1", "done"]
    assert list(offsets.values()) == list(range(0, 56, 8))
    assert list(_mbarriers(("r0", 2), ("x", 1), ("r1", 2))) == [
        "r0[0]",
        "r0[1]",
        "r1[0]",
        "r1[1]",
        "x",
    ]


def test_other_barriers_have_no_place_in_memory():
    cluster = replace(ROWS_DONE, name="both", kind="cluster", number=None, stages=1)
    plan = replace(GOOD, barriers=(ROWS_DONE, cluster, P_FULL))
    assert plan.mbarrier_offsets == {"p_full": 0}


@pytest.mark.parametrize("number", [2, 3, 4])
@pytest.mark.parametrize("head_dim", [64, 128])
def test_the_mbarriers_of_a_stage_fit_their_buffer(number, head_dim):
    plan = load(number).config.plan(head_dim)
    buffer = next(row for row in plan.smem if row.name == "barriers")
    offsets = sorted(plan.mbarrier_offsets.values())
    assert plan.smem_offsets["barriers"] == 0  # names of an executed log count from there
    assert offsets == list(range(0, 8 * len(offsets), 8)) and offsets[-1] < buffer.total_bytes
