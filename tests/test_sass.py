# SPDX-License-Identifier: Apache-2.0
"""The SASS report on kernels compiled here: one by the DSL for three architectures, one in PTX."""

import json
import subprocess

import pytest
from flash_ladder.common import sass
from flash_ladder.common.facts import FACT_NAMES, compare_with, flat, ptx_facts, ptx_hash
from flash_ladder.common.sass_isa import (
    RATES,
    Instruction,
    Mma,
    classify,
    count,
    decode_descriptor,
    exp2_split,
    issue_intervals,
    pipe_cycles,
    shared_bytes,
    tmem_registers,
)
from flash_ladder.common.sass_loops import build_blocks, dominators, natural_loops, role_of
from flash_ladder.common.sass_model import Tile, mma_flop, mma_shared_bytes, replay, tile_model


def _missing(*names):
    """The reason to skip if a tool is not there, "" otherwise."""
    for name in names:
        try:
            sass.find_tool(name)
        except sass.MissingTool as error:
            return str(error)
    return ""


NO_DISASSEMBLER = _missing("nvdisasm", "cuobjdump")
NO_ASSEMBLER = NO_DISASSEMBLER or _missing("ptxas")


def code(*lines, stall=1):
    """Instructions from "OPCODE arguments" lines, 16 bytes each."""
    made = []
    for at, line in enumerate(lines):
        opcode, _, arguments = line.partition(" ")
        target = tuple(a for a in arguments.split() if a.startswith("."))
        made.append(Instruction(16 * at, None, opcode, arguments, target, stall=stall))
    return made


def test_classes_and_pipes():
    expected = {
        "MUFU.EX2": ("EX2", "mufu"),
        "FFMA2": ("FFMA2", "fma2"),
        "FFMA.FTZ": ("FFMA", "fma"),
        "FMNMX3": ("FMNMX3", "alu"),
        "F2FP.BF16.F32.PACK_AB": ("F2FP", "alu"),
        "LDSM.16.M88.4": ("LDS", None),
        "UTCHMMA.2CTA": ("MMA", None),
        "HMMA.16816.F32.BF16": ("MMA", None),
        "IMAD.MOV.U32": ("MOV", None),
        "LDL.64": ("SPILL", None),
        "UIADD3": ("UNI", None),
        "WHATEVER": ("OTHER", None),
    }
    assert {opcode: classify(opcode) for opcode in expected} == expected
    body = code("MUFU.EX2", "FFMA2", "FFMA", "IMAD", "F2FP", "NOP")
    assert pipe_cycles(body) == {"issue": 6, "mufu": 8, "fma": 5, "alu": 2}
    assert pipe_cycles(code("FFMA"), "sm_80")["fma"] == 2
    assert {rate.status for rate in RATES.values()} <= {"documented", "implied", "assumed"}


def test_widths_exponentials_and_intervals():
    body = code(
        "LDTM.x32 R4, tmem[UR1]", "STTM.16dp.x8 tmem", "STS.128 [R1], R4", "STS.U16 [R1], R4"
    )
    assert (tmem_registers(body, "LDTM"), tmem_registers(body, "STTM")) == (32, 8)
    assert shared_bytes(body, "STS") == 32 * (16 + 4)
    assert exp2_split(code("MUFU.EX2", "FADD2.RM", "FADD.FTZ.RM", "FADD")) == (1, 3)
    assert issue_intervals(code("FFMA2", "FFMA2", "FFMA2", "NOP", stall=2)) == {"FFMA2": {2: 2}}
    high = 5 << 41 | 1 << 46 | 2 << 49 | 0b101 << 52
    (one,) = code("NOP")
    one.schedule(high)
    assert (one.stall, one.write_board, one.read_board, one.wait_mask) == (5, 1, 2, 5)


def test_descriptors_and_mma_work():
    assert decode_descriptor(0x10210490) == (256, 128)
    assert decode_descriptor(0x8200490) == (128, 128) and decode_descriptor(0x40004040) is None
    one, pair = Mma(128, 128, False, False), Mma(256, 128, True, True)
    assert mma_flop([one, pair, Mma(None, None, False, False)]) == 2 * (2 * 128 * 128 * 16)
    assert mma_shared_bytes([one]) == 2 * 128 * 32 and mma_shared_bytes([pair]) == 64 * 32
    assert str(pair) == "256x128 TS pair"


def test_loops_nest_and_are_named():
    body = code(
        "MOV", "NOP", "FFMA", "BRA P0, .inner", "IADD3", "BRA P1, .outer", "EXIT"
    )  # outer: 1..5, inner: 2..3
    blocks = build_blocks(body, {".outer": 16, ".inner": 32})
    inner, outer = natural_loops(blocks, dominators(blocks))
    assert inner.parent is outer and outer.children == [inner] and outer.parent is None
    role = lambda *lines: role_of(count(code(*lines)), code(*lines))
    exponentials = ["MUFU.EX2"] * 8
    assert role(*exponentials) == "softmax"
    assert role(*exponentials, *["FFMA"] * 64) == "mainloop"
    assert role(*exponentials, "HGMMA.64x64x16.F32") == "mainloop"
    assert role(*["FFMA"] * 16, "LDS", "LDS") == "fma"
    assert role("UTCHMMA", "UTCBAR") == "mma" and role("LDTM.x32", "STTM.x32") == "correction"
    assert role("LDTM.x32", "UTMAREDG.2D") == "dq-reduce" and role("UTMALDG.4D") == "load"
    assert role("NOP") == "other"


def test_replay_follows_stalls_pipes_and_scoreboards():
    assert replay([], 1) == 0
    assert replay(code("NOP", "NOP", stall=3), 1) == 6
    assert replay(code("MUFU.EX2", "MUFU.EX2"), 1) == 16  # 8 cycles on the pipe each
    assert 8 <= replay(code("MUFU.EX2"), 2) < 9  # two warps share the pipe, neither starves
    load, use = code("LDS R1, [R2]", "NOP")
    load.write_board, use.wait_mask = 0, 1
    assert replay([load, use], 1) == 29  # latency of LDS, then the use


def test_missing_tool_names_the_package(monkeypatch):
    monkeypatch.setenv("PATH", "")
    monkeypatch.setenv("CUDA_HOME", "/nonexistent")
    monkeypatch.setattr(sass.sys, "path", [])
    with pytest.raises(sass.MissingTool, match="install nvidia-cuda-nvdisasm"):
        sass.find_tool("nvdisasm")


def test_a_wheel_of_this_interpreter_goes_before_an_older_toolkit_on_path(monkeypatch, tmp_path):
    toolkit, wheel = tmp_path / "toolkit", tmp_path / "site" / "nvidia" / "cu13" / "bin"
    for folder in (toolkit, wheel):
        folder.mkdir(parents=True)
        (folder / "nvdisasm").touch(mode=0o755)
    monkeypatch.setenv("PATH", str(toolkit))
    monkeypatch.setattr(sass.sys, "path", [str(tmp_path / "site")])
    assert sass.find_tool("nvdisasm") == str(wheel / "nvdisasm")
    (wheel / "nvdisasm").unlink()
    assert sass.find_tool("nvdisasm") == str(toolkit / "nvdisasm")


@pytest.mark.skipif(bool(NO_DISASSEMBLER), reason=NO_DISASSEMBLER)
def test_what_is_not_a_cubin_is_refused(tmp_path, capsys):
    with pytest.raises(sass.ToolFailed, match="nvdisasm failed"):
        sass.report(b"not a cubin")
    file = tmp_path / "x.cubin"
    file.write_bytes(b"no")
    assert sass.main([str(file)]) == 1 and "nvdisasm failed" in capsys.readouterr().err


# --- a SIMT kernel from the DSL ------------------------------------------------------------------


def _simt_kernel(cutlass):
    """An attention row per thread: 16 wide, keys in shared memory, 8 keys an iteration."""
    cute, rows, width = cutlass.cute, 128, 16

    @cute.kernel
    def attention(g_q: cute.Tensor, g_k: cute.Tensor, g_v: cute.Tensor, g_o: cute.Tensor):
        row, _, _ = cute.arch.thread_idx()
        layout = cute.make_layout((rows, width), stride=(width, 1))
        pointer = cute.arch.alloc_smem(cutlass.Float32, 2 * rows * width, alignment=128)
        s_k = cute.make_tensor(pointer, layout)
        s_v = cute.make_tensor(pointer + rows * width, layout)
        r_q = cute.make_rmem_tensor(width, cutlass.Float32)
        r_o = cute.make_rmem_tensor(width, cutlass.Float32)
        for i in cutlass.range_constexpr(width):
            s_k[row, i], s_v[row, i] = g_k[row, i], g_v[row, i]
            r_q[i], r_o[i] = g_q[row, i], cutlass.Float32(0)
        cute.arch.sync_threads()
        for first in cutlass.range(0, rows, 8):
            for key in cutlass.range_constexpr(8):
                score = cutlass.Float32(0)
                for i in cutlass.range_constexpr(width):
                    score += r_q[i] * s_k[first + key, i]
                weight = cute.math.exp2(score, fastmath=True)
                for i in cutlass.range_constexpr(width):
                    r_o[i] += weight * s_v[first + key, i]
        for i in cutlass.range_constexpr(width):
            g_o[row, i] = r_o[i]

    @cute.jit
    def launch(g_q: cute.Tensor, g_k: cute.Tensor, g_v: cute.Tensor, g_o: cute.Tensor):
        attention(g_q, g_k, g_v, g_o).launch(grid=(1, 1, 1), block=(rows, 1, 1))

    return launch


@pytest.fixture(scope="module")
def simt(tmp_path_factory):
    """{arch: (PTX, cubin)} of the SIMT kernel."""
    if NO_DISASSEMBLER:
        pytest.skip(NO_DISASSEMBLER)
    cutlass = pytest.importorskip("cutlass", reason="nvidia-cutlass-dsl is not installed")
    cute = pytest.importorskip("cutlass.cute", reason="nvidia-cutlass-dsl is not installed")
    launch, built = _simt_kernel(cutlass), {}
    for arch in ("sm_80", "sm_90a", "sm_100a"):
        tensors = [
            cute.runtime.make_fake_tensor(cutlass.Float32, (128, 16), stride=(16, 1))
            for _ in range(4)
        ]
        folder = tmp_path_factory.mktemp(arch)
        options = f"--gpu-arch {arch} --keep-ptx --keep-cubin --dump-dir {folder}"
        compiled = cute.compile(launch, *tensors, options=options)
        built[arch] = (compiled.__ptx__, compiled.__cubin__)
    return built


@pytest.mark.parametrize("arch", ["sm_80", "sm_90a", "sm_100a"])
def test_simt_kernel_is_reported_without_a_tile_model(simt, arch):
    ptx, cubin = simt[arch]
    one = sass.report(cubin)
    assert one.kernel.arch == arch and one.model is None
    assert one.resources.threads == 128 and one.resources.ptxas.startswith("V1")
    assert 30 < one.resources.registers <= 255 and one.spill_instructions == 0
    (loop,) = one.kernel.loops
    assert (loop.role, loop.innermost, loop.conditional) == ("mainloop", True, [])
    wanted = {"EX2": 8, "FFMA": 2 * 8 * 16, "LDS": 2 * 8 * 16 // 4}
    assert {name: loop.counts[name] for name in wanted} == wanted
    per_fma = 2 if arch == "sm_80" else 1
    names = flat(ptx_facts(ptx), one)
    assert names["loop_ffma_cycles"] == per_fma * 256 and names["loop_lds"] == 64
    assert names["mufu_ex2_sass"] == names["ex2"] == 8 and names["ffma_sass"] == names["fma"]
    assert "tile_cycles_tensor" not in names and set(names) <= set(FACT_NAMES)


def test_report_as_text_rows_and_json(simt):
    _, cubin = simt["sm_100a"]
    one = sass.report(cubin)
    text = one.text()
    assert "mainloop" in text and "FFMA=256" in text and "mufu 64, fma 256" in text
    row = dict(zip(sass.SUMMARY_COLUMNS, one.summary_row("mine"), strict=True))
    assert row["kernel"] == "mine" and row["tensor"] == "-" and row["spill all/loops"] == "0/0"
    assert json.loads(json.dumps(one.as_dict()))["counts"]["FFMA"] == 256


def test_command_line_prints_report_and_summary(simt, tmp_path, capsys):
    file = tmp_path / "kernel.cubin"
    file.write_bytes(simt["sm_100a"][1])
    assert sass.main([str(file)]) == 0
    assert capsys.readouterr().out.startswith("kernel   kernel_cutlass_attention")
    assert sass.main(["--summary", str(file)]) == 0
    assert capsys.readouterr().out.count("\n") == 3


def test_hash_is_the_same_for_a_second_compilation(simt, tmp_path):
    cutlass, cute = pytest.importorskip("cutlass"), pytest.importorskip("cutlass.cute")
    tensors = [
        cute.runtime.make_fake_tensor(cutlass.Float32, (128, 16), stride=(16, 1)) for _ in range(4)
    ]
    options = f"--gpu-arch sm_100a --keep-ptx --dump-dir {tmp_path}"
    again = cute.compile(_simt_kernel(cutlass), *tensors, options=options).__ptx__
    assert ptx_hash(again) == ptx_hash(simt["sm_100a"][0]) != ptx_hash(simt["sm_90a"][0])


# --- a tcgen05 kernel written by hand: it is counted, never run ---------------------------

TILE = 128
MMA_LOOP = """
MMA_LOOP:
    {{ .reg .pred P1; W: mbarrier.try_wait.parity.shared::cta.b64 P1, [bars], %r2;
    @P1 bra D; bra W; D: }}
    {mma}
    tcgen05.commit.cta_group::1.mbarrier::arrive::one.shared::cluster.b64 [bars];
    add.s32 %r1, %r1, -1; setp.ne.s32 %p1, %r1, 0; @%p1 bra MMA_LOOP;
    ret;
"""


def _attention_ptx(emulated: int) -> str:
    """A softmax loop over 128 scores per thread and an MMA loop, in warp-role regions."""
    issue = lambda a, predicate: (
        f"@%p3 tcgen05.mma.cta_group::1.kind::f16 [%r9], {a}, %rd2, 0x8200490, {predicate};"
    )
    mma = [issue("%rd1", "%p2" if k == 0 else 1) for k in range(TILE // 16)]
    mma += [issue("[%r8]", "%p2" if k == 0 else 1) for k in range(TILE // 16)]
    score = [f"%s{k}" for k in range(TILE)]
    loads = [
        f"tcgen05.ld.sync.aligned.32x32b.x32.b32 {{{', '.join(score[k : k + 32])}}}, [%r9 + {k}];"
        for k in range(0, TILE, 32)
    ]
    floors = [f"add.rm.f32 %s{k}, %s{k}, %f1;" for k in range(emulated)]
    exponentials = [f"ex2.approx.ftz.f32 %s{k}, %s{k};" for k in range(emulated, TILE)]
    packs = [f"cvt.rn.bf16x2.f32 %r{100 + k}, %s{2 * k}, %s{2 * k + 1};" for k in range(TILE // 2)]
    packed = ", ".join(f"%r{100 + k}" for k in range(TILE // 2))
    softmax = [
        "SOFTMAX_LOOP:",
        *loads,
        "tcgen05.wait::ld.sync.aligned;",
        *floors,
        *exponentials,
        *packs,
        f"tcgen05.st.sync.aligned.32x32b.x64.b32 [%r9], {{{packed}}};",
        "tcgen05.wait::st.sync.aligned; add.s32 %r1, %r1, -1; setp.ne.s32 %p1, %r1, 0;",
        "@%p1 bra SOFTMAX_LOOP; ret;",
    ]
    return f""".version 8.8
.target sm_100a
.address_size 64
.shared .align 8 .b64 bars[2];
.visible .entry attention(.param .u32 n, .param .u64 d)
.reqntid 256, 1, 1
.minnctapersm 1
{{
    .reg .b32 %r<200>; .reg .f32 %s<{TILE}>; .reg .f32 %f<4>; .reg .b64 %rd<4>; .reg .pred %p<4>;
    ld.param.u32 %r1, [n]; ld.param.u64 %rd1, [d]; ld.param.u64 %rd2, [d];
    mov.b32 %r2, 0; mov.b32 %r8, 64; mov.b32 %r9, 0; mov.b32 %f1, 0f4B400000;
    mov.u32 %r3, %tid.x; setp.lt.u32 %p2, %r3, 128; setp.eq.s32 %p3, %r2, 0;
    @%p2 bra SOFTMAX;
    setmaxnreg.dec.sync.aligned.u32 64;
    {MMA_LOOP.format(mma=chr(10).join(mma))}
SOFTMAX:
    setmaxnreg.inc.sync.aligned.u32 192;
    {chr(10).join(softmax)}
}}
"""


def _assemble(ptx, folder):
    """The path of a cubin for sm_100a."""
    if NO_ASSEMBLER:
        pytest.skip(NO_ASSEMBLER)
    (folder / "k.ptx").write_text(ptx)
    command = [sass.find_tool("ptxas"), "-arch=sm_100a", "k.ptx", "-o", "k.cubin"]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True)
    if "is not defined for option 'gpu-name'" in done.stderr:
        pytest.skip("the ptxas found is too old for sm_100a")
    assert done.returncode == 0, done.stderr
    return folder / "k.cubin"


@pytest.fixture(scope="module", params=[0, 32])
def attention(request, tmp_path_factory):
    """(emulated exponentials, PTX, report) of the handwritten kernel."""
    ptx = _attention_ptx(request.param)
    return request.param, ptx, sass.report(_assemble(ptx, tmp_path_factory.mktemp("attention")))


def test_tcgen05_kernel_has_roles_budgets_and_a_tile_model(attention):
    emulated, _, one = attention
    roles = {region.role: region.budget for region in one.kernel.regions if region.budget}
    assert roles == {"mma": 64, "softmax": 192}
    assert {loop.role for loop in one.kernel.loops} >= {"mma", "softmax"}
    assert one.kernel.wait_loops >= 1
    model = one.model
    assert (model.kind, model.elements_per_thread) == ("fwd", 128)
    assert (model.exp2_hardware, model.exp2_emulated) == (128 - emulated, emulated)
    assert model.mma.shapes == {"128x128 SS": 8, "128x128 TS": 8} and not model.mma.guessed
    cycles = model.cycles
    assert cycles["tensor"] == 2 * 128 * 128 * (128 + 128) / 8192
    assert cycles["softmax_mufu"] == 8 * (128 - emulated)
    assert cycles["smem"] == (3 * 128 * 128 * 2) / 128  # Q, K, V; P is in tensor memory
    assert model.tmem_load_bytes == 128 * 128 * 4 and model.tmem_store_bytes == 128 * 128 * 2
    assert model.bound_by == "tensor"
    assert model.replay_one_warp >= cycles["softmax_mufu"]


def test_tcgen05_kernel_agrees_with_its_declaration(attention):
    emulated, ptx, one = attention
    declared = {
        "threads": 256,
        "setmaxnreg_inc": "192",
        "setmaxnreg_dec": "64",
        "mma": 16,
        "mma_sass": 16,
        "ex2": 128 - emulated,
        "mufu_ex2_sass": 128 - emulated,
        "floor_adds": emulated,
        "exp2_emulated": emulated,
        "tmem_load_registers": 128,
        "stack_bytes": 0,
        "spill_instructions": ("<=", 0),
        "registers": ("<=", 255),
        "tensor_ceiling": (">=", 0.9),
    }
    assert compare_with(declared, ptx_facts(ptx), one) == []
    missing = {"correction_issue"}  # this kernel has no correction role
    assert set(flat(ptx_facts(ptx), one)) == set(FACT_NAMES) - missing
    (difference,) = compare_with({"registers": 1}, ptx_facts(ptx), one)
    assert difference.startswith("registers: declared == 1, compiled code has ")


def test_a_cubin_with_several_kernels_needs_reports(tmp_path):
    entries = "".join(f".visible .entry k{n}() {{ ret; }}" for n in range(2))
    cubin = _assemble(f".version 8.8\n.target sm_100a\n.address_size 64\n{entries}", tmp_path)
    assert {one.kernel.name for one in sass.reports(cubin)} == {"k0", "k1"}
    with pytest.raises(ValueError, match=r"k\d, k\d; use reports"):
        sass.report(cubin)


def test_tile_model_refuses_an_unknown_kind(attention):
    with pytest.raises(ValueError, match="'auto', 'fwd' or 'bwd'"):
        tile_model(attention[2].kernel, Tile(kind="forward"))
