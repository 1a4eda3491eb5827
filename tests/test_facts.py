# SPDX-License-Identifier: Apache-2.0
"""PTX facts, lints (each fires on the bad and is silent on the good) and declared-fact checks."""

import json

import pytest
from flash_ladder.common import facts
from flash_ladder.common.facts import (
    FACT_NAMES,
    RULES,
    SASS_FACT_NAMES,
    compare_with,
    flat,
    lint,
    ptx_facts,
)

HEAD = """.version 8.8
.target sm_100a
.address_size 64
.extern .shared .align 1024 .b8 smem[];
.shared .align 8 .b64 barriers[4];
"""


def kernel(body, header=".reqntid 128, 2, 1"):
    """A module with one kernel whose registers need no declaration of their own."""
    declared = ".reg .b32 %r<99>; .reg .b64 %rd<9>; .reg .pred %p<9>; .reg .f32 %f<9>;"
    return f"{HEAD}.visible .entry k(.param .u64 a)\n{header}\n{{\n{declared}\n{body}\nret;\n}}\n"


def facts_of(body, header=".reqntid 128, 2, 1"):
    return ptx_facts(kernel(body, header))


def test_launch_and_memory():
    found = facts_of(
        """.local .align 16 .b8 depot[48]; .shared .align 4 .v2 .f32 rows[2][8];
        ld.local.b32 %r1, [depot]; st.local.v4.b32 [depot], {%r1, %r1, %r1, %r1};""",
        ".reqntid 128, 2, 1\n.reqnctapercluster 2, 1, 1\n.maxnreg 168\n.minnctapersm 1",
    )
    assert (found.entry, found.target, found.version) == ("k", "sm_100a", "8.8")
    assert (found.threads, found.cluster) == (256, 2)
    assert (found.max_registers, found.min_ctas_per_sm) == (168, 1)
    assert found.static_shared_bytes == 4 * 8 + 2 * 8 * 8
    assert (found.local_bytes, found.local_accesses) == (48, 2)
    other = facts_of("", ".maxntid 64")
    assert (other.threads, other.cluster, other.max_registers) == (64, None, None)
    assert facts_of("", "").threads is None
    assert (flat(found)["cluster_ctas"], flat(other)["cluster_ctas"]) == (2, 0)


def test_mbarriers_and_named_barriers():
    found = facts_of("""
    mov.b32 %r1, 128; mov.b32 %r2, %tid.x;
    mbarrier.init.shared.b64 [barriers], 1; mbarrier.init.shared.b64 [barriers+8], %r1;
    mbarrier.init.shared::cta.b64 [barriers+16], %r2;
    mbarrier.arrive.shared.b64 %rd1, [barriers];
    mbarrier.arrive.expect_tx.shared.b64 _, [barriers], 64;
    mbarrier.expect_tx.relaxed.cta.shared::cta.b64 [barriers], 64;
    mbarrier.try_wait.parity.shared::cta.b64 %p1, [barriers], %r2;
    mbarrier.test_wait.parity.shared::cta.b64 %p1, [barriers], %r2;
    bar.sync 0; barrier.sync 2, 416; bar.arrive 1, %r1; bar.sync %r2, 64; bar.sync %r2, 64;
    bar.warp.sync -1; barrier.cluster.arrive.relaxed;""")
    assert found.mbarrier_inits == (1, 128, None)
    assert (found.mbarrier_arrives, found.mbarrier_expects, found.mbarrier_waits) == (2, 2, 2)
    assert found.named_barriers == {
        "sync 0": 1,
        "sync 2, 416": 1,
        "arrive 1, 128": 1,
        "sync ?, 64": 2,
    }


def test_tensor_memory():
    found = facts_of("""
    setmaxnreg.dec.sync.aligned.u32 24; setmaxnreg.inc.sync.aligned.u32 192;
    mov.b32 %r1, 512;
    tcgen05.alloc.cta_group::1.sync.aligned.shared::cta.b32 [smem], %r1;
    tcgen05.mma.cta_group::1.kind::f16 [%r2], %rd1, %rd2, %r3, %p1;
    tcgen05.mma.cta_group::2.kind::f16.collector::a::discard [%r2], [%r4 + 0x8], %rd2, %r3, 1;
    tcgen05.mma.ws.cta_group::1.kind::f16 [%r2], %rd1, %rd2, %r3, 1;
    tcgen05.commit.cta_group::1.mbarrier::arrive::one.shared::cluster.b64 [barriers];
    tcgen05.ld.sync.aligned.32x32b.x2.b32 {%r5, %r6}, [%r2];
    tcgen05.ld.sync.aligned.16x256b.x1.b32 {%r5, %r6, %r7, %r8}, [%r2];
    tcgen05.wait::ld.sync.aligned;
    tcgen05.st.sync.aligned.32x32b.x2.b32 [%r2], {%r5, %r6}; tcgen05.wait::st.sync.aligned;
    tcgen05.fence::before_thread_sync; tcgen05.fence::after_thread_sync;
    fence.proxy.async.shared::cta; fence.proxy.async; fence.mbarrier_init.release.cluster;
    tcgen05.dealloc.cta_group::1.sync.aligned.b32 %r2, %r1;
    tcgen05.relinquish_alloc_permit.cta_group::1.sync.aligned;""")
    assert found.setmaxnreg == (("dec", 24), ("inc", 192))
    assert (found.tmem_allocs, found.tmem_deallocs, found.tmem_relinquishes) == ((512,), 1, 1)
    assert found.mma == {
        "f16 cta_group::1 SS": 1,
        "f16 cta_group::2 TS": 1,
        "f16 cta_group::1 SS ws": 1,
    }
    assert sum(found.commits.values()) == 1
    assert found.tmem_loads == {"32x32b.x2": 1, "16x256b.x1": 1}
    assert (found.tmem_load_registers, found.tmem_store_registers) == (6, 2)
    assert (found.tmem_load_waits, found.tmem_store_waits) == (1, 1)
    assert sum(found.fences.values()) == 5
    names = flat(found)
    assert (names["mma"], names["mma_ss"], names["mma_ts"], names["mma_pair"]) == (3, 2, 1, 1)
    assert (names["tmem_columns"], names["tmem_fences"], names["proxy_fences"]) == (512, 2, 2)


def test_copies_arithmetic_and_memory():
    found = facts_of("""
    cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes
        [smem], [%rd1, {%r1, %r2}], [barriers];
    cp.async.bulk.tensor.2d.global.shared::cta.tile.bulk_group [%rd1, {%r1, %r2}], [smem];
    cp.reduce.async.bulk.global.shared::cta.bulk_group.add.f32 [%rd1], [smem], 64;
    cp.async.bulk.shared::cluster.shared::cta.mbarrier::complete_tx::bytes [%r1], [smem], 64, [%r2];
    cp.async.bulk.commit_group; cp.async.bulk.wait_group.read 0;
    ex2.approx.ftz.f32 %f1, %f2; fma.rn.f32 %f1, %f1, %f2, %f3;
    fma.rn.f32x2 %rd1, %rd2, %rd3, %rd4;
    add.rm.f32x2 %rd1, %rd1, %rd2; add.rm.ftz.f32 %f1, %f1, %f2; add.s32 %r1, %r1, 1;
    max.f32 %f1, %f1, %f2; max.s32 %r1, %r1, %r2;
    cvt.rn.bf16x2.f32 %r1, %f1, %f2; cvt.u64.u32 %rd1, %r1;
    ld.global.nc.v4.b32 {%r1, %r2, %r3, %r4}, [%rd1];
    st.global.b16 [%rd1], %rs1; ld.param.u64 %rd1, [a];
    ld.shared.v2.b64 {%rd1, %rd2}, [smem];
    st.shared::cta.f32 [smem], %f1; st.shared.f32 [smem], %f1;""")
    names = flat(found)
    copies = ("tma_loads", "tma_stores", "tma_reductions", "dsmem_copies")
    assert [names[name] for name in copies] == [1, 1, 1, 1]
    assert (names["ex2"], names["fma"], names["fma_f32x2"], names["floor_adds"]) == (1, 1, 1, 3)
    assert (names["max"], names["cvt_pack"]) == (1, 1)
    assert found.memory == {
        "ld.global 16": 1,
        "st.global 2": 1,
        "ld.shared 16": 1,
        "st.shared 4": 2,
    }
    assert "add.s32" not in found.arithmetic and "cvt.u64.u32" not in found.arithmetic


def test_as_dict_is_json_and_entries_are_chosen():
    text = kernel("setmaxnreg.inc.sync.aligned.u32 192;")
    assert json.loads(json.dumps(ptx_facts(text).as_dict()))["setmaxnreg"] == [["inc", 192]]
    two = text + ".visible .entry other() .reqntid 32 { ret; }\n"
    assert ptx_facts(two, "other").threads == 32
    for wrong in (None, "third"):
        with pytest.raises(ValueError, match=r"k, other"):
            ptx_facts(two, wrong)


# Lines of a softmax warp, an MMA warp and an epilogue, so that a test can leave one out.
WAIT_S = "mbarrier.try_wait.parity.shared::cta.b64 %p1, [barriers], %r1;"
AFTER, BEFORE = "tcgen05.fence::after_thread_sync;", "tcgen05.fence::before_thread_sync;"
LOAD = "tcgen05.ld.sync.aligned.32x32b.x2.b32 {%r5, %r6}, [%r2];"
STORE = "tcgen05.st.sync.aligned.32x32b.x2.b32 [%r2], {%r5, %r6};"
WAIT_LD, WAIT_ST = "tcgen05.wait::ld.sync.aligned;", "tcgen05.wait::st.sync.aligned;"
ARRIVE_P = "mbarrier.arrive.shared.b64 _, [barriers+8];"
WAIT_P = "mbarrier.try_wait.parity.shared::cta.b64 %p1, [barriers+8], %r1;"
TILE = "st.shared.v4.b32 [smem], {%r5, %r6, %r7, %r8};"
PROXY = "fence.proxy.async.shared::cta;"
MMA = "tcgen05.mma.cta_group::1.kind::f16 [%r2], %rd1, %rd2, %r3, 1;"
COMMIT = "tcgen05.commit.cta_group::1.mbarrier::arrive::one.shared::cluster.b64 [barriers];"
BULK = "cp.async.bulk.tensor.2d.global.shared::cta.tile.bulk_group [%rd1, {%r1, %r2}], [smem];"
MMA_WARP = [WAIT_P, AFTER, MMA, COMMIT, "bra $end;"]
SOFTMAX = [WAIT_S, AFTER, LOAD, WAIT_LD, STORE, WAIT_ST, TILE, PROXY, BEFORE, ARRIVE_P]
GROUP, WAIT_GROUP = "cp.async.bulk.commit_group;", "cp.async.bulk.wait_group.read 0;"
EPILOGUE = [TILE, PROXY, "bar.sync 1, 128;", BULK, GROUP, WAIT_GROUP]


def rules(lines):
    return [finding.rule for finding in lint(kernel("\n".join([*lines, "$end:"])))]


def without(lines, line):
    assert line in lines
    return [other for other in lines if other != line]


def test_good_code_has_no_findings():
    assert rules([*MMA_WARP, *SOFTMAX, "bra $end;", *EPILOGUE]) == []


@pytest.mark.parametrize(
    ("line", "rule"),
    [
        (WAIT_LD, ["tmem-load-use", "tmem-load-wait"]),
        (WAIT_ST, ["tmem-store-wait"]),
        (BEFORE, ["tmem-fence-before"]),
        (AFTER, ["tmem-fence-after"]),
        (PROXY, ["proxy-fence"]),
    ],
)
def test_softmax_lints_fire(line, rule):
    assert rules([*MMA_WARP, *without(SOFTMAX, line)]) == rule


def test_other_lints_fire():
    assert rules([*without(MMA_WARP, AFTER), *SOFTMAX]) == ["tmem-fence-after"]
    assert rules(without(EPILOGUE, PROXY)) == ["proxy-fence"]
    too_late = [TILE, ARRIVE_P, PROXY]
    assert rules([*MMA_WARP, *too_late]) == ["proxy-fence"]
    global_only = [TILE, "fence.proxy.async.global;", "bar.sync 1, 128;", BULK, GROUP, WAIT_GROUP]
    assert rules(global_only) == ["proxy-fence"]
    assert rules(without(EPILOGUE, WAIT_GROUP)) == ["bulk-wait"]


def test_a_register_is_used_before_its_load_is_waited_for():
    copied = "mov.b64 %rd5, {%r5, %r6};"
    add = "add.f32 %f1, %f2, %f3; mov.b64 {%f3, %f4}, %rd5; add.f32 %f1, %f3, %f4;"
    assert rules([LOAD, copied, WAIT_LD, add]) == []
    assert rules([LOAD, copied, add, WAIT_LD]) == ["tmem-load-use"]
    assert rules([LOAD, "st.global.v2.b32 [%rd1], {%r5, %r6};", WAIT_LD]) == ["tmem-load-use"]
    assert rules([LOAD, "add.s32 %r7, %r8, 1;", WAIT_LD]) == []


def test_barriers_are_published_behind_a_fence():
    init, fence = "mbarrier.init.shared.b64 [barriers], 1;", "fence.mbarrier_init.release.cluster;"
    assert rules([init, fence, "bar.sync 0, 128;", COMMIT]) == []
    assert rules([init, PROXY, "bar.sync 0, 128;", COMMIT]) == []
    assert rules([init, "bar.sync 0, 128;", fence, COMMIT]) == ["mbarrier-init"]
    assert rules([init, "bar.sync 0, 128;", ARRIVE_P]) == []  # threads alone arrive


def test_a_return_of_others_is_no_end():
    guarded = ["@%p1 " + BULK, "@%p1 " + GROUP, "@!%p1 ret;", WAIT_GROUP]
    assert rules(guarded) == []


def test_lints_stay_silent_on_what_is_allowed():
    # a TMA-full barrier is not a hand-over of TMEM; scalars for other threads need no proxy fence
    full = "mbarrier.try_wait.parity.shared::cta.b64 %p1, [barriers+16], %r1;"
    assert rules([full, MMA, COMMIT]) == []
    statistics = ["st.shared.f32 [smem], %f1;", ARRIVE_P]
    assert rules([*MMA_WARP, *statistics]) == []
    # an unrelated arrival between the stores and their fence
    between = [TILE, ARRIVE_P, TILE, PROXY, ARRIVE_P]
    assert rules([*MMA_WARP, *between]) == []
    # what follows a jump is another path; a retry loop in inline assembly is not
    assert rules([LOAD, "bra $end;", ARRIVE_P]) == []
    retry = ["{ .reg .pred P1; L:", WAIT_S.replace("%p1", "P1"), "@P1 bra D; bra L; D: }"]
    assert rules([*MMA_WARP, *retry, LOAD, WAIT_LD, BEFORE, ARRIVE_P]) == ["tmem-fence-after"]


def test_allocation_lint():
    alloc = "tcgen05.alloc.cta_group::1.sync.aligned.shared::cta.b32 [smem], 512;"
    dealloc = "tcgen05.dealloc.cta_group::1.sync.aligned.b32 %r2, 512;"
    relinquish = "tcgen05.relinquish_alloc_permit.cta_group::1.sync.aligned;"
    assert rules([alloc, relinquish, dealloc]) == []
    assert rules([alloc, relinquish]) == ["tmem-alloc"]
    assert rules([alloc, dealloc]) == ["tmem-alloc"]
    assert rules([alloc.replace("512", "96"), relinquish, dealloc]) == ["tmem-alloc"]


def test_findings_name_rule_line_and_reason():
    text = kernel("\n".join([*without(EPILOGUE, PROXY), "$end:"]))
    (finding,) = lint(text)
    assert finding.rule in RULES
    assert text.splitlines()[finding.line - 1] == BULK
    assert str(finding).startswith(f"line {finding.line}: proxy-fence: ")


def test_comparison_accepts_and_reports():
    found = facts_of("mbarrier.init.shared.b64 [barriers], 1; ex2.approx.ftz.f32 %f1, %f2;")
    good = {"threads": 256, "mbarrier_inits": 1, "mbarrier_counts": "1", "ex2": (">=", 1)}
    assert compare_with(good, found) == []
    bad = {"threads": 128, "ex2": ("<=", 0), "registers": ("<=", 168)}
    first, second, third = compare_with(bad, found)
    assert "threads: declared == 128, compiled code has 256" in first
    assert "ex2: declared <= 0, compiled code has 1" in second
    assert "no SASS report" in third


def test_comparison_refuses_unknown_names_and_relations():
    found = facts_of("")
    with pytest.raises(ValueError, match=r"unknown facts exp, regs; known are: .*ex2"):
        compare_with({"exp": 1, "regs": 2}, found)
    with pytest.raises(ValueError, match="'<='"):
        compare_with({"ex2": ("<", 1)}, found)


def test_every_name_is_described_and_produced():
    assert set(flat(facts_of(""))) == set(FACT_NAMES) - SASS_FACT_NAMES
    assert all(text.endswith(("[PTX]", "[SASS]")) for text in FACT_NAMES.values())
    assert all(hasattr(facts, name) for name in facts.__all__)
