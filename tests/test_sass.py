# SPDX-License-Identifier: Apache-2.0
"""The SASS report on kernels compiled here: one by the DSL for three architectures, one from PTX."""

import json
import subprocess

import pytest
from flash_ladder.common import sass
from flash_ladder.common.facts import FACT_NAMES, compare_with, flat, ptx_facts
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
    assert decode_descriptor(0x10210490) == (256, 128 + 8 - 8 if False else 128)
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
    assert replay(code("MUFU.EX2"), 2) == 8  # two warps share the pipe
    load, use = code("LDS R1, [R2]", "NOP")
    load.write_board, use.wait_mask = 0, 1
    assert replay([load, use], 1) == 29  # latency of LDS, then the use


def test_missing_tool_names_the_package(monkeypatch):
    monkeypatch.setenv("PATH", "")
    monkeypatch.setenv("CUDA_HOME", "/nonexistent")
    monkeypatch.setattr(sass.sys, "path", [])
    with pytest.raises(sass.MissingTool, match="install nvidia-cuda-nvdisasm"):
        sass.find_tool("nvdisasm")


@pytest.mark.skipif(bool(NO_DISASSEMBLER), reason=NO_DISASSEMBLER)
def test_what_is_not_a_cubin_is_refused(tmp_path, capsys):
    with pytest.raises(sass.ToolFailed, match="nvdisasm failed"):
        sass.report(b"not a cubin")
    file = tmp_path / "x.cubin"
    file.write_bytes(b"no")
    assert sass.main([str(file)]) == 1 and "nvdisasm failed" in capsys.readouterr().err


# --- a SIMT kernel from the DSL ------------------------------------------------------------------


@pytest.fixture(scope="module")
def simt(tmp_path_factory):
    """{arch: (PTX, cubin)} of an attention row per thread over keys in shared memory."""
    if NO_DISASSEMBLER:
        pytest.skip(NO_DISASSEMBLER)
    cutlass = pytest.importorskip("cutlass", reason="nvidia-cutlass-dsl is not installed")
    from _simt_kernel import launch

    cute, built = cutlass.cute, {}
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
