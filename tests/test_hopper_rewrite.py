# SPDX-License-Identifier: Apache-2.0
"""Rewriting PTX for sm_90a: what passes, what is lowered, what is refused. No GPU."""

import pathlib
import re
import subprocess

import pytest
from flash_ladder.common.compile import compile_stage
from flash_ladder.common.device_mutation import sites
from flash_ladder.common.hopper import operations, record
from flash_ladder.common.hopper.log import FENCES, Kind
from flash_ladder.common.hopper.rewrite import HopperRewriteError, rewrite, rewriter_hash
from flash_ladder.common.ptx import read
from flash_ladder.common.sass import MissingTool, find_tool
from flash_ladder.common.stage import Stage

from tests.recorded_logs import CODES, todays_ptx_of

HEAD = """.version 8.8
.target sm_100a
.address_size 64
.extern .shared .align 1024 .b8 smem[];
.visible .entry k(.param .b64 p0, .param .align 64 .b8 p1[128])
.reqntid 192, 1, 1
.minnctapersm 1
{
.reg .pred %p<4>; .reg .b16 %h<4>; .reg .b32 %r<64>; .reg .f32 %f<8>; .reg .b64 %rd<16>;
.reg .b128 %q<2>;
"""
TAIL = "ret;\n}\n"

# The engine's functions as declarations, so that rewritten kernels assemble on their own.
ENGINE = {
    "fl_enter": ("b64", "b32 b32"),
    "fl_engine": ("", "b64 b32 b32"),
    "fl_exit": ("", "b64"),
    "fl_fault": ("", "b32 b32 b32 b32 b32 b32"),
    "fl_wait_failed": ("", "b64 b32 b32 b32 b32 b64"),
    "fl_tmem": ("b64", "b64 b32 b32 b32 b32"),
    "fl_push_mma": ("", "b64 b32 b32 b32 b64 b64 b32 b32"),
    "fl_push_commit": ("", "b64 b32 b32 b32 b32"),
    "fl_push_tma": ("", "b64 b32 b32 b32 b64 b64 b32 b32 b32 b32 b32 b32 b32"),
    "fl_alloc": ("", "b64 b32 b32 b32"),
    "fl_dealloc": ("", "b64 b32 b32 b32"),
    "fl_relinquish": ("", "b64 b32"),
    "fl_cluster_arrive": ("", "b64 b32 b32"),
    "fl_cluster_wait": ("", "b64 b32 b32"),
}
LOG_ENGINE = {
    "fl_log_start": ("b64", "b32 b32"),
    "fl_log_skip": ("b32", ""),
    "fl_log": ("", "b64 b32 b32 b32"),
    "fl_log_words": ("", "b64" + 7 * " b32"),
    "fl_log_shared": ("", "b64" + 5 * " b32"),
    "fl_log_mma": ("", "b64 b32 b32 b32 b32 b64 b64 b32"),
    "fl_log_copy": ("", "b64 b32 b32 b32 b32 b64" + 6 * " b32"),
}


def declarations(log: bool = False) -> str:
    lines = []
    for name, (result, arguments) in (ENGINE | (LOG_ENGINE if log else {})).items():
        returned = f"(.param .{result} r) " if result else ""
        passed = ", ".join(f".param .{kind} a{i}" for i, kind in enumerate(arguments.split()))
        lines.append(f".extern .func {returned}{name} ({passed});")
    return "\n".join(lines)


def kernel(*statements: str) -> str:
    """A module whose only kernel uses tensor memory and then does `statements`."""
    alloc = "tcgen05.alloc.cta_group::1.sync.aligned.shared::cta.b32 [%r1], 512;"
    return HEAD + "\n".join([alloc, *statements]) + "\n" + TAIL


def assembled(ptx: str, tmp_path) -> None:
    """Assert that ptxas takes the rewritten kernel for sm_90a."""
    try:
        ptxas = find_tool("ptxas")
    except MissingTool as missing:
        pytest.skip(str(missing))
    source = tmp_path / "k.ptx"
    source.write_text(ptx)
    command = [ptxas, "-arch=sm_90a", "-c", "-O0", str(source), "-o", str(tmp_path / "k.o")]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[:3000]


def registers(count: int, first: int = 8) -> str:
    return "{" + ", ".join(f"%r{first + i}" for i in range(count)) + "}"


LOWERED = {
    "alloc pair": "tcgen05.alloc.cta_group::2.sync.aligned.shared::cta.b32 [%r1+4], %r2;",
    "dealloc": "tcgen05.dealloc.cta_group::1.sync.aligned.b32 %r1, 512;",
    "relinquish": "tcgen05.relinquish_alloc_permit.cta_group::1.sync.aligned;",
    "wait ld": "tcgen05.wait::ld.sync.aligned;",
    "wait st": "tcgen05.wait::st.sync.aligned;",
    "fence before": "tcgen05.fence::before_thread_sync;",
    "fence after": "tcgen05.fence::after_thread_sync;",
    "ld x1": "tcgen05.ld.sync.aligned.32x32b.x1.b32 {%r8}, [%r1];",
    "ld x32": f"tcgen05.ld.sync.aligned.32x32b.x32.b32 {registers(32)}, [%r1+64];",
    "ld 16x64b": f"tcgen05.ld.sync.aligned.16x64b.x4.b32 {registers(4)}, [%r1];",
    "ld 16x128b": f"tcgen05.ld.sync.aligned.16x128b.x4.b32 {registers(8)}, [%r1];",
    "ld 16x256b": f"tcgen05.ld.sync.aligned.16x256b.x4.b32 {registers(16)}, [%r1];",
    "st": f"tcgen05.st.sync.aligned.32x32b.x16.b32 [%r1], {registers(16)};",
    "mma SS": "tcgen05.mma.cta_group::1.kind::f16 [%r1], %rd1, %rd2, %r3, %p1;",
    "mma TS": "tcgen05.mma.cta_group::1.kind::f16 [%r1], [%r2+32], %rd2, %r3, 1;",
    "mma pair": "tcgen05.mma.cta_group::2.kind::f16 [%r1], %rd1, %rd2, %r3, !%p1;",
    "mma collector": "@%p2 tcgen05.mma.cta_group::2.kind::f16.collector::a::discard "
    "[%r1], %rd1, %rd2, %r3, {%r4, %r5, %r6, %r7, %r4, %r5, %r6, %r7}, %p1;",
    "commit": "tcgen05.commit.cta_group::1.mbarrier::arrive::one.shared::cluster.b64 [%r1];",
    "commit pair": "tcgen05.commit.cta_group::2.mbarrier::arrive::one.shared::cluster"
    ".multicast::cluster.b64 [%r1+8], %h1;",
    "tma": "cp.async.bulk.tensor.4d.shared::cta.global.tile.mbarrier::complete_tx::bytes"
    ".L2::cache_hint [%r1+1024], [%rd1, {%r2, %r3, %r4, %r5}], [%r6], %rd2;",
    "tma pair": "cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes"
    ".L2::cache_hint.cta_group::2 [%r1], [%rd1, {%r2, %r3}], [%r6], %rd2;",
    "tma plain": "cp.async.bulk.tensor.2d.shared::cluster.global.tile"
    ".mbarrier::complete_tx::bytes [%r1], [%rd1, {%r2, 0}], [%r6+16];",
    "bulk": "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes "
    "[%r1], [%rd1+256], %r3, [%r6];",
    "bulk hinted": "cp.async.bulk.shared::cta.global.mbarrier::complete_tx::bytes.L2::cache_hint "
    "[%r1], [%rd1], 4096, [%r6], %rd2;",
    "wait": "mbarrier.try_wait.parity.shared.b64 %p1, [%r1+8], %r2, 10000000;",
    "wait guarded": "@%p2 mbarrier.try_wait.parity.shared::cta.b64 %p1, [%r1], %r2;",
    "wait for token": "mbarrier.try_wait.shared.b64 %p1, [%r1+-8], %rd1, %r2;",
    "wait relaxed": "@%p1 mbarrier.try_wait.parity.relaxed.cluster.shared::cta.b64 "
    "%p1, [%r1+0x10], 1, %r2;",
    "test wait": "mbarrier.test_wait.parity.acquire.cta.shared::cta.b64 %p1, [smem+8], %r2;",
    "commit to a symbol": "tcgen05.commit.cta_group::1.mbarrier::arrive::one.shared::cluster.b64 "
    "[smem+8];",
    "try cancel": "clusterlaunchcontrol.try_cancel.async.shared::cta"
    ".mbarrier::complete_tx::bytes.b128 [%r1], [%r2+8];",
    "try cancel for all": "@%p1 clusterlaunchcontrol.try_cancel.async.shared::cta"
    ".mbarrier::complete_tx::bytes.multicast::cluster::all.b128 [%r1], [%r2];",
    "is canceled": "clusterlaunchcontrol.query_cancel.is_canceled.pred.b128 %p1, %q1;",
    "first cta": "clusterlaunchcontrol.query_cancel.get_first_ctaid.v4.b32.b128 "
    "{%r1, %r2, %r3, _}, %q1;",
    "cluster arrive": "barrier.cluster.arrive.relaxed.aligned;",
    "cluster wait": "barrier.cluster.wait.acquire;",
    "setmaxnreg": "setmaxnreg.inc.sync.aligned.u32 192;",
    "launch dependents": "griddepcontrol.launch_dependents;",
    "barrier of all": "bar.sync 1;",
    "reduction of all": "@%p1 barrier.cta.red.popc.aligned.u32 %r1, %r2, !%p2;",
    "ntid as 64 bits": "cvt.u64.u32 %rd1, %ntid.x;",
    "fma2": "fma.rn.f32x2 %rd1, %rd2, %rd3, %rd4;",
    "add2 down": "add.rm.ftz.f32x2 %rd1, %rd2, %rd3;",
    "mul2": "mul.f32x2 %rd1, %rd2, %rd2;",
    "max3": "max.NaN.f32 %f1, %f2, %f3, %f4;",
    "mixed fma": "fma.rn.f32.bf16 %f1, %h1, %h2, %f3;",
    "mixed add": "add.f32.f16 %f1, %h1, %f3;",
    "load 256 bits": f"ld.global.v8.b32 {registers(8)}, [%rd1+32];",
    "relaxed load": f"ld.relaxed.gpu.global.v8.b32 {registers(8)}, [%rd1+-32];",
    "load over own address": "ld.global.v4.b64 {%rd1, %rd2, %rd3, %rd4}, [%rd1];",
    "store 256 bits": "@!%p1 st.global.v4.b64 [%rd1], {%rd2, %rd3, %rd4, %rd5};",
}


@pytest.mark.parametrize("name", LOWERED)
def test_lowering_assembles(name, tmp_path):
    text = rewrite(kernel(LOWERED[name]), declarations())
    opcode = next(word for word in LOWERED[name].rstrip(";").split() if not word.startswith("@"))
    code = "\n".join(line for line in text.splitlines() if not line.startswith("//"))
    if not opcode.startswith(("mbarrier", "bar", "max", "setmaxnreg", "cvt")):
        assert not re.search(rf"(?m)^(@\S+ )?{re.escape(opcode)}[ ;]", code), "still there"
    assembled(text, tmp_path)


NATIVE = (
    "mbarrier.init.shared.b64 [%r1], 1;",
    "mbarrier.arrive.expect_tx.shared.b64 %rd1, [%r1], %r2;",
    "elect.sync %r3|%p1, -1;",
    "bar.sync 2, 64;",
    "bar.red.and.pred %p1, 2, 64, %p2;",
    "barrier.cta.arrive.aligned %r1, 64;",
    "bar.warp.sync -1;",
    "red.global.add.noftz.bf16x2 [%rd1], %r1;",
    "atom.global.v8.bf16.add.noftz {%h1, %h2, %h3, %h1, %h2, %h3, %h1, %h2}, [%rd1], "
    "{%h1, %h2, %h3, %h1, %h2, %h3, %h1, %h2};",
    "cp.async.bulk.commit_group;",
    "cp.async.bulk.wait_group.read 0;",
    "cp.async.bulk.tensor.4d.global.shared::cta.tile.bulk_group.L2::cache_hint "
    "[%rd1, {%r1, %r2, %r3, %r4}], [%r5], %rd2;",
    "cp.reduce.async.bulk.global.shared::cta.bulk_group.add.f32 [%rd1], [%r1], %r2;",
    "fence.proxy.async.shared::cta;",
    "ex2.approx.ftz.f32 %f1, %f2;",
    "max.f32 %f1, %f2, %f3;",
    "mapa.shared::cluster.u32 %r1, %r2, 0;",
)


@pytest.mark.parametrize("statement", NATIVE)
def test_native_passes_unchanged(statement, tmp_path):
    text = rewrite(kernel(statement), declarations())
    assert statement in text
    assembled(text, tmp_path)


REFUSED = {
    "other kind": "tcgen05.mma.cta_group::1.kind::tf32 [%r1], %rd1, %rd2, %r3, %p1;",
    "weight stationary": "tcgen05.mma.ws.cta_group::1.kind::f16 [%r1], %rd1, %rd2, %r3, %p1;",
    "sparse": "tcgen05.mma.sp.cta_group::1.kind::f16 [%r1], %rd1, %rd2, [%r4], %r3, %p1;",
    "scaled accumulator": "tcgen05.mma.cta_group::1.kind::f16 [%r1], %rd1, %rd2, %r3, %p1, 2;",
    "copy to tmem": "tcgen05.cp.cta_group::1.128x256b [%r1], %rd1;",
    "packed load": "tcgen05.ld.sync.aligned.32x32b.x1.pack::16b.b32 {%r8}, [%r1];",
    "wrong register count": "tcgen05.ld.sync.aligned.32x32b.x4.b32 {%r8, %r9}, [%r1];",
    "multicast load": "cp.async.bulk.tensor.2d.shared::cluster.global.tile"
    ".mbarrier::complete_tx::bytes.multicast::cluster [%r1], [%rd1, {%r2, %r3}], [%r6], %h1;",
    "multicast bulk load": "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes"
    ".multicast::cluster [%r1], [%rd1], %r3, [%r6], %h1;",
    "gather": "cp.async.bulk.tensor.2d.shared::cta.global.tile::gather4"
    ".mbarrier::complete_tx::bytes [%r1], [%rd1, {%r2, %r3, %r4, %r5, %r6}], [%r6];",
    "fp4 conversion": "cvt.rn.satfinite.e2m1x2.f32 %h1, %f1, %f2;",
    "float reduction": "redux.sync.max.f32 %f1, %f2, -1;",
    "8-bit matrix": "ldmatrix.sync.aligned.m16n16.x1.trans.shared.b8 {%r1, %r2}, [%r3];",
    "bulk zero": "st.bulk.weak.shared::cta [%rd1], 64, 0;",
    "stochastic rounding": "cvt.rs.f16x2.f32 %r1, %f1, %f2, %r2;",
    "byte mask": "cp.async.bulk.global.shared::cta.bulk_group.cp_mask [%rd1], [%r1], %r3, %h1;",
    "256 bits somewhere": "ld.v4.b64 {%rd1, %rd2, %rd3, %rd4}, [%rd1];",
    "max3 of absolutes": "max.abs.f32 %f1, %f2, %f3, %f4;",
    "reducing load": "tcgen05.ld.red.sync.aligned.32x32b.x2.max.f32 {%f1, %f2}, %f3, [%r1];",
    "wait on a generic address": "mbarrier.try_wait.parity.b64 %p1, [%rd1], %r2;",
    "ntid as a vector": "mov.v4.u32 {%r1, %r2, %r3, %r4}, %ntid;",
    "unknown barrier": "barrier.relaxed.sync 1;",
    "unknown operation": "hypercube.rotate %r1, %r2;",
    "our register": ".reg .b64 %fl_slot;",
    "our label": "$fl_main:",
}


@pytest.mark.parametrize("name", REFUSED)
def test_refusal_names_line_and_text(name):
    ptx = kernel("mov.u32 %r1, %tid.x;", REFUSED[name])
    line = ptx[: ptx.index(REFUSED[name])].count("\n") + 1
    with pytest.raises(HopperRewriteError) as refused:
        rewrite(ptx, declarations())
    assert f"line {line}:" in str(refused.value)
    assert REFUSED[name].rstrip(";") in str(refused.value)


def test_threads_are_appended_and_limits_dropped():
    text = rewrite(kernel(), declarations())
    assert ".reqntid 352, 1, 1" in text and ".minnctapersm" not in text
    assert ".target sm_90a" in text and "sm_100a" not in re.sub(r"//.*", "", text)


def test_ntid_is_that_of_the_kernel():
    for kind in ("mov.u32 %r5", "mov.s32 %r5", "mov.u16 %h1"):
        assert f"{kind}, 192;" in rewrite(kernel(f"{kind}, %ntid.x;"), declarations())
    text = rewrite(kernel(LOWERED["ntid as 64 bits"]), declarations())
    assert re.search(r"mov.b32 (\S+), 192;\ncvt.u64.u32 %rd1, \1;", text)


def test_barriers_count_the_kernels_threads():
    for given, wanted in (
        ("bar.sync 1", "bar.sync 1, 192"),
        ("barrier.sync %r1", "barrier.sync %r1, 192"),
        ("bar.red.popc.u32 %r1, 0, %p1", "bar.red.popc.u32 %r1, 0, 192, %p1"),
        ("barrier.red.or.pred %p2, %r1, !%p1", "barrier.red.or.pred %p2, %r1, 192, !%p1"),
    ):
        assert f"\n{wanted};" in rewrite(kernel(given + ";"), declarations())


@pytest.mark.parametrize(
    "name", [name for name in LOWERED if "wait" in name and "mbarrier" in LOWERED[name]]
)
def test_every_wait_is_counted(name):
    assert "call fl_wait_failed" in rewrite(kernel(LOWERED[name]), declarations())


def test_every_row_of_the_table_is_tried():
    tried = [*LOWERED.values(), *NATIVE, *REFUSED.values(), "ret;"]
    opcodes = [re.sub(r"^@\S+ ", "", text).rstrip(";").split()[0] for text in tried]
    for pattern, lowering in operations.TABLE:
        assert any(map(pattern.fullmatch, opcodes)), lowering.__name__


def test_names_of_inline_assembly_stay_its_own(tmp_path):
    """Operands may be called what the arguments of a call are called."""
    block = "{ .reg .b64 a4, a5; .reg .b32 result; mov.b64 a4, %rd1; mov.b64 a5, %rd2; "
    block += "mov.b32 result, 0; tcgen05.mma.cta_group::1.kind::f16 [result], a4, a5, result, 1; }"
    assembled(rewrite(kernel(block), declarations()), tmp_path)


def test_device_function_refused():
    helper = ".func helper()\n{\nret;\n}\n"
    with pytest.raises(HopperRewriteError, match=r"line 5: .*device functions"):
        rewrite(kernel().replace(".visible", helper + ".visible"), declarations())
    declared = kernel().replace(".visible", ".extern .func helper();\n.visible")
    assert ".extern .func helper();" in rewrite(declared, declarations())


def test_kernel_whose_first_statement_is_a_block(tmp_path):
    ptx = kernel().replace("tcgen05.alloc", "{ .reg .b32 t; mov.b32 t, 1; }\ntcgen05.alloc")
    assembled(rewrite(ptx, declarations()), tmp_path)


def test_threads_must_be_exact_and_leave():
    with pytest.raises(HopperRewriteError, match=r"line 5: .*reqntid"):
        rewrite(kernel().replace(".reqntid", ".maxntid"), declarations())
    for tail in ("}\n", "@%p1 ret;\n}\n"):
        with pytest.raises(HopperRewriteError, match="does not end with ret"):
            rewrite(kernel().removesuffix(TAIL) + tail, declarations())


@pytest.mark.parametrize("threads", ("48", "896", "64, 2"))
def test_thread_counts_refused(threads):
    with pytest.raises(HopperRewriteError, match="threads"):
        rewrite(kernel().replace("192, 1, 1", threads), declarations())


def test_guard_skips_all_of_a_lowering(tmp_path):
    text = rewrite(kernel("@!%p3 " + LOWERED["mma SS"]), declarations())
    skip = re.search(r"@%p3 bra (\$fl_skip_\d+);", text)
    assert skip and text.index(f"{skip[1]}:") > text.index("call fl_push_mma")


@pytest.mark.parametrize("guard", ("@%p3", "@ %p3", "@!%p3", "@! %p3", "@ ! %p3"))
def test_guards_with_spaces(guard, tmp_path):
    text = rewrite(kernel(f"{guard} ret;"), declarations())
    opposite = "" if "!" in guard else "!"
    assert re.search(rf"\n@{opposite}%p3 bra \$fl_skip_\d+;\n", text)
    assembled(text, tmp_path)


def test_kernel_without_tensor_memory_keeps_its_threads(tmp_path):
    ptx = HEAD + "fma.rn.f32x2 %rd1, %rd2, %rd3, %rd4;\nbar.sync 0;\n" + TAIL
    text = rewrite(ptx, "")
    assert ".reqntid 192, 1, 1" in text and "fl_" not in text.replace("%fl_", "")
    assembled(text, tmp_path)


def test_fragment_offsets():
    """A 16-lane load covers each word of its 16 x columns block once; thread bases are disjoint."""
    bases = {
        "32x32b": lambda t: (t, 0),
        "16x64b": lambda t: (t // 4 + 8 * (t % 2), t // 2 % 2),
        "16x128b": lambda t: (t // 4, t % 4),
        "16x256b": lambda t: (t // 4, t % 4 * 2),
    }
    for shape, base in bases.items():
        words = set()
        for thread in range(32):
            lane, column = base(thread)
            for offset in operations.transfer_offsets(shape, 2):
                words.add((lane + offset % 512 // 4, column + offset // 512))
        lanes = 32 if shape == "32x32b" else 16
        columns = operations.transfer_columns(shape, 2)
        assert words == {(lane, column) for lane in range(lanes) for column in range(columns)}


def printed(ptx: str) -> str:
    """What the rewriter would print if it lowered nothing."""
    bare = (":", "{", "}", ".version", ".target", ".address_size", ".file", ".loc")
    bare += (".entry", ".func")
    statements = read(ptx).statements
    return "\n".join(s.text + ("" if s.opcode in bare else ";") for s in statements)


def compiled(name: str) -> str:
    """PTX for sm_100a of stage 01 or of a test kernel."""
    pytest.importorskip("cutlass", reason="needs the CuTe DSL")
    if name == "stage 01":
        return compile_stage(Stage(1)).ptx
    from tests.kernels import KERNELS

    return KERNELS[name].build(**KERNELS[name].sweep[-1]).__ptx__


COMPILED = ("stage 01", "gemm", "ts_gemm", "chain")


@pytest.mark.parametrize("name", COMPILED)
def test_round_trip_of_compiled_code(name):
    ptx = compiled(name)
    first, again = read(ptx).statements, read(printed(ptx)).statements
    assert [(s.opcode, s.operands, s.predicate) for s in first] == [
        (s.opcode, s.operands, s.predicate) for s in again
    ]


@pytest.mark.parametrize("name", COMPILED)
def test_compiled_code_rewritten_assembles(name, tmp_path):
    text = rewrite(compiled(name), declarations())
    assert not re.search("f32x2|tcgen05", re.sub(r"//.*", "", text))
    assembled(text, tmp_path)


@pytest.mark.parametrize("name", ("rewrite.py", "engine.cu", "ptx.py"))
def test_rewriter_hash_tells_sources_apart(name, monkeypatch):
    before, original = rewriter_hash(), pathlib.Path.read_bytes
    assert before == rewriter_hash() and len(before) == 64

    def changed(path):
        return original(path) + b"\n" * (path.name == name)

    monkeypatch.setattr(pathlib.Path, "read_bytes", changed)
    assert rewriter_hash() != before


@pytest.mark.parametrize(
    "after", ("mov.u32 %r1, %r2;\n", ".global .align 4 .b32 later;\n", "mov.u32 %r1, %r2\n")
)
def test_text_after_the_kernel_refused(after):
    assert rewrite(kernel() + ".section .debug_info\n{\n.b8 1\n}\n", declarations())
    line = kernel().count("\n") + 1
    with pytest.raises(ValueError, match=rf"line {line}: .*(follow|after)"):
        rewrite(kernel() + after, declarations())


@pytest.mark.parametrize("text", ("mov.b64 %rd1, {%ntid.x, %r3};", "mov.u32 %r1, %nwarpid;"))
def test_size_of_the_cta_in_another_form_refused(text):
    with pytest.raises(HopperRewriteError, match="size of a CTA"):
        rewrite(kernel(text), declarations())


def test_file_that_was_cut_off_names_the_open_brace():
    line = kernel()[: kernel().index("{")].count("\n") + 1
    with pytest.raises(ValueError, match=rf"line {line}: .*not closed"):
        rewrite(kernel().removesuffix(TAIL), declarations())


# ---- with the log --------------------------------------------------------------------------

NOT_LOGGED = ("wait for token", "try cancel", "try cancel for all", "is canceled", "first cta")
LOGGED = {name: text for name, text in LOWERED.items() if name not in NOT_LOGGED}
LOGGED |= {text: text for text in NATIVE}
LINE = kernel().count("\n", 0, kernel().index("ret;")) + 1  # of the first statement of `kernel`
SKIPS = re.compile(r"setp\.eq\.b32 (%\S+), %fl_skip, (\d+);\n@\1 bra (\$fl_out_\d+);")
OPTIONAL = re.compile(
    r"mbarrier\.(arrive|try_wait|test_wait)|bar(rier)?\.(?!warp)|fence\.|cp\.async\.bulk\.wait_group"
    r"|tcgen05\.(wait|fence|commit)"
)
FENCES_LEFT_OUT = {
    "fence.acq_rel.cluster;": "acq_rel",
    "membar.gl;": "acq_rel",
    "fence.proxy.async;": "proxy.async",
    "fence.proxy.async.global;": "proxy.async.global",
    "fence.mbarrier_init.release.cluster;": "mbarrier_init",
    "tcgen05.fence::before_thread_sync;": "tcgen05.before",
    "tcgen05.fence::after_thread_sync;": "tcgen05.after",
    "tcgen05.wait::ld.sync.aligned;": "wait.ld",
    "tcgen05.wait::st.sync.aligned;": "wait.st",
}


def logged(*statements: str) -> str:
    """A kernel rewritten with the log, from its first statement on."""
    text = rewrite(kernel(*statements), declarations(log=True), log=True)
    return text[text.index("fl_alloc, (") :]


def calls(text: str) -> list[tuple[str, list[str]]]:
    """(function, arguments) of each call of the log, but for those of the allocation and exit."""
    found = []
    for block in re.findall(r"\{\n((?:\.param .*\n)+call .*)\n\}", text):
        name = re.search(r"call (?:\(.*\), )?(\w+)", block)[1]
        if name.startswith("fl_log"):
            found.append((name, re.findall(r"\], (.*);$", block, re.M)))
    assert found[0][1][1] == str(Kind.ALLOC) and found[-1][1][1] == str(Kind.EXIT)
    return found[1:-1]


def value(text: str, register: str) -> str:
    """What a register was last set to."""
    found = re.findall(rf"mov\.\w+ {re.escape(register)}, (.*);", text)
    return value(text, found[-1]) if found else register


@pytest.mark.parametrize("name", LOGGED)
def test_with_the_log_every_wait_arrival_and_fence_can_be_left_out(name, tmp_path):
    text = logged(LOGGED[name])
    statement = next(s for s in read(kernel(LOGGED[name])).statements if s.line == LINE)
    optional = bool(OPTIONAL.match(statement.opcode))
    skips = SKIPS.findall(text)
    assert [int(line) for _, line, _ in skips] == [LINE] * optional
    assert record.optional(statement) == optional
    for _, _, label in skips:
        assert text.count(f"\n{label}:\n") == 1
    assembled(rewrite(kernel(LOGGED[name]), declarations(log=True), log=True), tmp_path)


@pytest.mark.parametrize("guard", ["", "@%p2 ", "@!%p2 "])
def test_a_wait_that_is_left_out_sets_its_predicate(guard):
    text = logged(guard + "mbarrier.try_wait.parity.shared.b64 %p1, [%r1+8], %r2;")
    ((_, _, out),) = SKIPS.findall(text)
    tail = text[text.index(f"{out}:") :]
    end = re.match(r"\$fl_out_\d+:\nsetp\.eq\.b32 %p1, 0, 0;\n(\$fl_end_\d+):\n", tail)
    assert end, tail[:200]
    body = text[: text.index(f"{out}:")]
    assert body.rstrip().endswith(f"bra {end[1]};")  # what is not left out does not come here
    passed, record_of_wait = body.index(f"@!%p1 bra {end[1]};"), body.rindex("call fl_log_words")
    assert body.index("try_wait") < passed < record_of_wait
    if guard:
        opposite = "@!%p2" if guard == "@%p2 " else "@%p2"
        (skip,) = re.findall(rf"\n{re.escape(opposite)} bra (\$fl_skip_\d+);", text)
        assert text.index("bra " + skip) < text.index("%fl_skip,") < text.index(f"{out}:")
        assert text.index(f"\n{skip}:") > text.index(f"{end[1]}:")


@pytest.mark.parametrize(
    "statement",
    [LOWERED["commit"], LOWERED["mma SS"], LOWERED["tma"], NATIVE[1], "st.shared.b32 [%r1], %r2;"],
)
def test_a_predicate_covers_a_statement_and_its_log(statement, tmp_path):
    text = logged("@%p2 " + statement)
    (skip,) = re.findall(r"\n@!%p2 bra (\$fl_skip_\d+);", text)
    inside = text[text.index("bra " + skip) : text.index(f"\n{skip}:")]
    assert inside.count("call fl_log") == 1 and "@%p2" not in inside
    opcode = statement.split()[0]
    assert opcode.startswith(("tcgen05", "cp")) or f"\n{opcode} " in inside
    assembled(rewrite(kernel("@%p2 " + statement), declarations(log=True), log=True), tmp_path)


@pytest.mark.parametrize("statement", FENCES_LEFT_OUT)
def test_fences_are_logged_by_name_and_can_be_left_out(statement):
    text = logged(statement)
    (call,) = calls(text)
    assert call[0] == "fl_log" and call[1][1:3] == [str(Kind.FENCE), str(LINE)]
    assert value(text, call[1][3]) == str(FENCES.index(FENCES_LEFT_OUT[statement]))
    assert len(SKIPS.findall(text)) == 1


WORDS = {  # statement -> (kind | flags << 8, words that follow the line)
    "mbarrier.init.shared.b64 [%r1+16], 3;": (Kind.INIT, ["%r1", "3", "0", "0", "0"]),
    "mbarrier.arrive.shared.b64 %rd1, [%r1];": (Kind.ARRIVE, ["%r1", "1", "0", "0", "0"]),
    "mbarrier.arrive.shared.b64 _, [%r1], 2;": (Kind.ARRIVE, ["%r1", "2", "0", "0", "0"]),
    "mbarrier.arrive.expect_tx.release.cluster.shared::cluster.b64 _, [%r1], %r2;": (
        Kind.ARRIVE | 2 << 8,
        ["%r1", "1", "%r2", "0", "0"],
    ),
    "mbarrier.expect_tx.relaxed.cta.shared.b64 [%r1], 64;": (
        Kind.ARRIVE | 1 << 8,
        ["%r1", "0", "64", "0", "0"],
    ),
    "mbarrier.complete_tx.relaxed.cta.shared.b64 [%r1], 64;": (
        Kind.COMPLETE | 1 << 8,
        ["%r1", "64", "0", "0", "0"],
    ),
    "mbarrier.try_wait.parity.shared.b64 %p1, [%r1], %r2;": (
        Kind.WAIT,
        ["%r1", "%r2", "0", "0", "0"],
    ),
    "bar.arrive %r1, 64;": (Kind.BAR_ARRIVE, ["%r1", "64", "0", "0", "0"]),
    LOWERED["commit"]: (Kind.COMMIT, ["%r1", "0xFFFFFFFF", "1", "0", "0"]),
    LOWERED["dealloc"]: (Kind.DEALLOC, ["%r1", "512", "0", "0", "0"]),
    LOWERED["ld x32"]: (Kind.LOAD_TMEM, ["%r1", "32", "32", "0", "0"]),
    LOWERED["ld 16x256b"]: (Kind.LOAD_TMEM, ["%r1", "32", "16", "0", "0"]),
    LOWERED["st"]: (Kind.STORE_TMEM, ["%r1", "16", "32", "0", "0"]),
}


@pytest.mark.parametrize("statement", WORDS)
def test_the_words_of_a_record(statement):
    text = logged(statement)
    ((name, arguments),) = calls(text)
    what, words = WORDS[statement]
    assert name == "fl_log_words"
    assert arguments[:3] == ["%fl_log", str(int(what)), str(LINE)]
    assert [value(text, argument) for argument in arguments[3:]] == words


def test_a_barrier_of_all_threads_arrives_and_waits():
    text = logged("bar.sync 1;")
    assert [arguments[1] for _, arguments in calls(text)] == [
        str(Kind.BAR_ARRIVE),
        str(Kind.BAR_WAIT),
    ]
    for _, arguments in calls(text):
        assert [value(text, argument) for argument in arguments[3:5]] == ["1", "192"]
    middle = text.index("\nbar.sync 1, 192;")
    assert text.index("call fl_log_words", text.index("%fl_skip,")) < middle
    assert middle < text.rindex("call fl_log_words")


@pytest.mark.parametrize(
    ("statement", "kind", "size", "lanes"),
    [
        ("ld.shared.b32 %r1, [%r2+4];", Kind.READ, 4, 32),
        ("ld.volatile.shared.v4.f32 {%f1, %f2, %f3, %f4}, [%r2];", Kind.READ, 16, 32),
        ("st.shared::cluster.b64 [%r2], %rd1;", Kind.WRITE, 8, 32),
        ("atom.shared.add.u32 %r1, [%r2], %r3;", Kind.UPDATE, 4, 32),
        ("stmatrix.sync.aligned.m8n8.x2.shared.b16 [%r2], {%r3, %r4};", Kind.WRITE, 16, 16),
        ("ldmatrix.sync.aligned.m8n8.x1.trans.shared.b16 {%r3}, [%r2];", Kind.READ, 16, 8),
    ],
)
def test_accesses_of_shared_memory_are_logged(statement, kind, size, lanes, tmp_path):
    text = logged(statement)
    ((name, arguments),) = calls(text)
    assert name == "fl_log_shared" and arguments[1:3] == [str(int(kind)), str(LINE)]
    assert value(text, arguments[3]) == "%r2" and arguments[4:] == [str(size), str(lanes)]
    assert not SKIPS.findall(text)  # memory is never left out
    assembled(rewrite(kernel(statement), declarations(log=True), log=True), tmp_path)


MISSED = {
    **{name: LOWERED[name] for name in NOT_LOGGED},
    "remote store": "st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.b32 "
    "[%r1], %r2, [%r3];",
    "remote reduction": "red.async.relaxed.cluster.shared::cluster.mbarrier::complete_tx::bytes"
    ".inc.u32 [%r1], %r2, [%r3];",
    "load of any memory": "ld.b32 %r1, [%rd1];",
    "old asynchronous copy": "cp.async.ca.shared.global [%r1], [%rd1], 16;",
    "its arrival": "cp.async.mbarrier.arrive.shared.b64 [%r1];",
    "arrival without completion": "mbarrier.arrive.noComplete.shared.b64 %rd1, [%r1], 1;",
    "arrival for good": "mbarrier.arrive_drop.shared.b64 %rd1, [%r1];",
    "other fence": "fence.proxy.async::generic.acquire.sync_restrict::shared::cluster.cluster;",
}


@pytest.mark.parametrize("name", MISSED)
def test_what_the_log_would_miss_is_refused(name):
    with pytest.raises(
        HopperRewriteError, match=f"line {LINE}: operation .* log's list"
    ) as refused:
        logged(MISSED[name])
    assert MISSED[name].removeprefix("@%p1 ").rstrip(";") in str(refused.value)
    assert rewrite(kernel(MISSED[name]), declarations())  # without the log it is taken


@pytest.mark.parametrize("name", LOGGED)
def test_without_the_log_there_is_nothing_of_it(name):
    text = rewrite(kernel(LOGGED[name]), declarations())
    assert not re.search(r"fl_log|%fl_skip|\$fl_(out|end)_", text)


def test_a_kernel_without_tensor_memory_has_no_log():
    ptx = HEAD + "bar.sync 0;\nst.shared.b32 [%r1], %r2;\n" + TAIL
    assert rewrite(ptx, "", log=True) == rewrite(ptx, "")


def test_the_log_is_found_once_on_entry(tmp_path):
    text = rewrite(kernel(), declarations(log=True), log=True)
    for call in ("fl_log_start", "fl_log_skip"):
        assert len(re.findall(rf"call \(fl_result\), {call}\b", text)) == 1
    assert text.index("call (fl_result), fl_log_start") < text.index("$fl_main:\n")
    assembled(text, tmp_path)


@pytest.mark.parametrize("tag", CODES)
def test_stages_are_rewritten_with_the_log(tag, tmp_path):
    ptx = todays_ptx_of(tag)
    text = rewrite(ptx, declarations(log=True), log=True)
    assert [int(line) for _, line, _ in SKIPS.findall(text)] == [s.line for s in sites(ptx)]
    assert not re.search("fl_log|%fl_skip", rewrite(ptx, declarations()))
    assembled(text, tmp_path)
