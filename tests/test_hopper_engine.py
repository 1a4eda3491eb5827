# SPDX-License-Identifier: Apache-2.0
"""The Hopper engine without a GPU: it compiles, keeps its ABI, and computes the right addresses."""

import ctypes
import pathlib
import random
import re
import shutil
import subprocess

import pytest
from flash_ladder.common import ptx, sass
from flash_ladder.common.hopper import engine, session
from flash_ladder.common.hopper.layouts import (
    SWIZZLE_SPANS,
    DescriptorError,
    InstructionDescriptor,
    SmemDescriptor,
    d_position,
    decode_instruction_descriptor,
    decode_smem_descriptor,
    element_address,
    encode_instruction_descriptor,
    encode_smem_descriptor,
)
from flash_ladder.common.hopper.rewrite import PTX_VERSION

SOURCE = engine.SOURCE.read_text()
U32, U64 = "b32", "b64"
# Function -> (result, parameters), as rewritten kernels call it.
ABI = {
    "fl_enter": (U64, [U32, U32]),
    "fl_engine": (None, [U64, U32, U32]),
    "fl_exit": (None, [U64]),
    "fl_fault": (None, [U32] * 6),
    "fl_wait_failed": (None, [U64, U32, U32, U32, U32, U64]),
    "fl_tmem": (U64, [U64, U32, U32, U32, U32]),
    "fl_push_mma": (None, [U64, U32, U32, U32, U64, U64, U32, U32]),
    "fl_push_commit": (None, [U64, U32, U32, U32, U32]),
    "fl_push_tma": (None, [U64, U32, U32, U32, U64, U64, U32, U32, *[U32] * 5]),
    "fl_alloc": (None, [U64, U32, U32, U32]),
    "fl_dealloc": (None, [U64, U32, U32, U32]),
    "fl_relinquish": (None, [U64, U32]),
    "fl_cluster_arrive": (None, [U64, U32, U32]),
    "fl_cluster_wait": (None, [U64, U32, U32]),
    "fl_log_start": (U64, [U32, U32]),
    "fl_log_skip": (U32, []),
    "fl_log": (None, [U64, U32, U32, U32]),
    "fl_log_words": (None, [U64, *[U32] * 7]),
    "fl_log_shared": (None, [U64, *[U32] * 5]),
    "fl_log_mma": (None, [U64, U32, U32, U32, U32, U64, U64, U32]),
    "fl_log_copy": (None, [U64, U32, U32, U32, U32, U64, *[U32] * 6]),
}


@pytest.fixture(scope="module")
def module_text():
    try:
        return engine.engine_ptx()
    except engine.EngineCompilerMissing as missing:
        pytest.skip(str(missing))


def _caller():
    """A kernel in PTX that calls every function of the ABI, as a rewritten one does."""
    lines = [".visible .entry caller() .reqntid 288, 1, 1 {", ".reg .b32 %r; .reg .b64 %rd;"]
    for name, (result, parameters) in ABI.items():
        lines.append("{")
        for i, kind in enumerate(parameters):
            register = "%rd" if kind == U64 else "%r"
            lines.append(f".param .{kind} p{i}; st.param.{kind} [p{i}], {register};")
        arguments = ", ".join(f"p{i}" for i in range(len(parameters)))
        if result:
            lines.append(f".param .{result} out; call (out), {name}, ({arguments});")
            lines.append(f"ld.param.{result} {'%rd' if result == U64 else '%r'}, [out];")
        else:
            lines.append(f"call {name}, ({arguments});")
        lines.append("}")
    return "\n".join([*lines, "ret; }", ""])


def test_a_kernel_that_calls_the_engine_assembles_for_sm_90a(module_text, tmp_path):
    try:
        ptxas = sass.find_tool("ptxas")
    except sass.MissingTool as missing:
        pytest.skip(str(missing))
    source = tmp_path / "engine.ptx"
    text = re.sub(r"(?m)^\.version .*$", f".version {PTX_VERSION}", module_text)  # as the rewriter
    source.write_text(text + _caller())
    command = [ptxas, "-arch=sm_90a", "-o", str(tmp_path / "engine.cubin"), str(source)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_the_gpu_harness_compiles(tmp_path):
    nvcc = shutil.which("nvcc")
    if nvcc is None:
        pytest.skip("no nvcc on PATH")
    source = tmp_path / "harness.cu"
    harness = pathlib.Path(__file__).parent / "hopper_gpu" / "harness.cu"
    source.write_text(SOURCE + harness.read_text())
    command = [nvcc, "-arch=compute_90a", "-std=c++17", "-ptx", "-o", str(tmp_path / "harness.ptx")]
    done = subprocess.run([*command, str(source)], capture_output=True, text=True)
    assert done.returncode == 0 and not done.stderr, done.stderr


def test_exported_functions_are_those_of_the_abi(module_text):
    headers = [s for s in ptx.read(module_text).module() if s.opcode == ".func"]
    visible = {s.operands[0]: s.text for s in headers if ".visible" in s.text}
    found = {}
    for name, text in visible.items():
        result, parameters = re.fullmatch(
            rf"\.visible \.func\s*(\(.*?\))?\s*{name}\s*\((.*)\)", text
        ).groups()
        types = re.findall(r"\.param \.(\w+)", parameters)
        found[name] = (re.search(r"\.param \.(\w+)", result)[1] if result else None, types)
    assert found == ABI


def test_fl_control_is_a_constant_that_can_be_found(module_text):
    assert module_text.count(f"fl_control = 0x{engine.MAGIC:016X};") == 1


def test_a_missing_compiler_says_what_to_install(monkeypatch):
    monkeypatch.setattr(engine, "_nvrtc", lambda: None)
    monkeypatch.setattr(engine.shutil, "which", lambda name: None)
    with pytest.raises(engine.EngineCompilerMissing, match="pip install nvidia-cuda-nvrtc"):
        engine.find_compiler()


def _constant(name):
    expression = re.search(rf"constexpr u32 {name} = ([^;]+);", SOURCE)[1]
    names = {"TMEM_BYTES": engine.TMEM_BYTES}
    return eval(expression, {"__builtins__": {}}, names)


def _enum(name):
    body = re.search(rf"enum {name} : u32 \{{(.*?)\}};", SOURCE, re.DOTALL)[1]
    return {int(value): key for key, value in re.findall(r"(\w+) = (\d+)", body)}


def test_constants_agree_with_the_source():
    for name in (
        "ENGINE_THREADS",
        "POISON",
        "TMEM_BYTES",
        "SLOT_BYTES",
        "MAX_WAITS",
        "MAX_MAIN_THREADS",
        "FLAG_EAGER",
        "FLAG_UNCOMMITTED",
    ):
        assert _constant(name) == getattr(engine, name), name
    assert f"0x{engine.MAGIC:X}ull" in SOURCE
    assert len(_enum("DelayKind")) == len(engine.DELAYS)


@pytest.mark.parametrize("struct", [engine.Control, engine.Wait, engine.Fault])
def test_structs_agree_with_the_source(struct):
    name = struct.__name__
    size = re.search(rf"static_assert\(sizeof\({name}\) == (\d+)", SOURCE)[1]
    assert ctypes.sizeof(struct) == int(size)
    body = re.search(rf"struct {name} \{{(.*?)\}};", SOURCE, re.DOTALL)[1]
    body = re.sub(r"//.*", "", body)
    fields = []
    for declaration in body.split(";"):
        kind, _, names = declaration.strip().partition(" ")
        for field in filter(None, names.split(",")):
            plain = re.sub(r"\[.*", "", field).strip()
            count = re.search(r"\[(\w+)\]", field)
            fields.append((plain, kind, count and count[1]))
    kinds = {"u32": ctypes.c_uint32, "u64": ctypes.c_uint64, "Wait": engine.Wait}
    wanted = []
    for plain, kind, count in fields:
        length = {"MAX_WAITS": engine.MAX_WAITS}.get(count) or (int(count) if count else 0)
        wanted.append((plain, kinds[kind] * length if length else kinds[kind]))
    assert [(field, ctypes.sizeof(kind)) for field, kind in struct._fields_] == [
        (field, ctypes.sizeof(kind)) for field, kind in wanted
    ]


def test_every_fault_has_a_sentence():
    assert {code: name for code, (name, _) in engine.FAULTS.items()} == _enum("FaultCode")
    for code in engine.FAULTS:
        name, sentence = engine.fault_sentence(code, (1, 0, 1, 3))
        assert name and "{" not in sentence
    assert engine.fault_sentence(99, (1, 2, 3, 4)) == ("FAULT_99", "values 0x1, 0x2, 0x3, 0x4")
    assert set(engine.WAIT_KINDS) == set(_enum("WaitKind"))
    assert set(engine.POISON_READERS) == set(_enum("PoisonReader"))
    assert set(engine.UNSUPPORTED_REASONS) == set(_enum("UnsupportedReason"))


def test_a_timeout_names_barriers_lines_and_waiting_warps():
    fault = engine.Fault(claimed=2, code=1, line=2, cta=(3, 0, 0), warp=4, lane=5)
    fault.values[:] = (1 << 24 | 0x408, 1, 1, 2000)
    fault.waits = 3
    fault.wait[0] = engine.Wait(3, 4, 2, 1 << 24 | 0x408, 1, 1)
    fault.wait[1] = engine.Wait(3, 4, 2, 1 << 24 | 0x408, 1, 1)
    fault.wait[2] = engine.Wait(2, 0, 1, 0, 1, 2)
    with pytest.raises(session.HopperExecutionError) as caught:
        session.check_fault(fault, "first\n\tmbarrier.try_wait  p, [r], 1;\n", {0x408: "s_full"})
    error = caught.value
    assert (error.code, error.name, error.cta, error.warp, error.lane) == (
        (1, "TIMEOUT", (3, 0, 0), 4, 5)
    )
    assert error.line == 2 and error.text == "mbarrier.try_wait p, [r], 1;"
    assert len(error.waits) == 2 and error.waits[0].kind == "cluster barrier"
    text = str(error)
    assert "waited 2000 ms for mbarrier" in text
    assert "mbarrier s_full (offset 0x408 of CTA rank 1)" in text
    assert "CTA 2 warp 0: the cluster barrier, phase parity 1, PTX line 1 `first`" in text


def test_a_fault_without_ptx_is_readable_and_none_is_silent():
    session.check_fault(engine.Fault())
    fault = engine.Fault(claimed=2, code=7, line=31, values=(0x0020_0005, 1, 0, 0))
    message = str(session.HopperExecutionError(fault))
    assert message == (
        "POISON_READ: an MMA that accumulates read tensor memory never written, at 0x00200005, "
        "PTX line 31 (CTA (0, 0, 0), warp 0, lane 0)"
    )


def test_known_descriptors():
    plain = InstructionDescriptor(64, 128, bf16=True)
    assert encode_instruction_descriptor(plain) == 0x4200490
    assert decode_instruction_descriptor(0x4200490, 1) == plain
    full = InstructionDescriptor(256, 240, False, True, False, True, True)
    assert decode_instruction_descriptor(encode_instruction_descriptor(full), 2) == full
    # 128-byte swizzle, K-major, dense: groups of 8 rows of 128 bytes are 1024 bytes apart.
    wide = SmemDescriptor(0x8420, 16, 1024, 128)
    word = encode_smem_descriptor(wide)
    assert word == 2 << 61 | 1 << 46 | 64 << 32 | 1 << 16 | 0x842
    with pytest.raises(DescriptorError) as caught:
        decode_smem_descriptor(word | 1 << 52, mn_major=False)
    assert caught.value.fault == "BAD_SMEM_DESCRIPTOR"
    with pytest.raises(DescriptorError, match="160 bytes into the 1024-byte") as caught:
        decode_smem_descriptor(word + (0x80 >> 4), mn_major=False)
    assert caught.value.fault == "MISALIGNED_SWIZZLE_BASE"


@pytest.mark.parametrize(
    ("span", "mn_major", "row", "k", "address"),
    [
        (16, False, 9, 8, 16 + 1024 + 2048),  # row group: SBO, second half of K: LBO
        (16, True, 9, 8, 2 + 1024 + 2048),  # MN-major: second block of 8: SBO, second half: LBO
        (32, False, 4, 8, (128 + 16) ^ 16),
        (64, True, 0, 2, 128 ^ 16),
        (64, True, 32, 0, 2048),  # block of 32 along MN: LBO
        (128, False, 1, 0, 128 ^ 16),
        (128, False, 8, 8, 1024 + 16),
        (128, True, 0, 3, 384 ^ 48),
        (128, True, 64, 8, 2048 + 1024),
    ],
)
def test_known_addresses(span, mn_major, row, k, address):
    descriptor = SmemDescriptor(0, 2048, 1024, span)
    assert element_address(descriptor, row, k, mn_major) == address


def test_positions_of_accumulators():
    assert d_position(128, 64, 1, 77, 5) == (0, 77, 5)
    assert d_position(64, 64, 1, 17, 5) == (0, 33, 5)
    assert d_position(64, 64, 1, 17, 5, lane_offset=16) == (0, 49, 5)
    assert d_position(256, 64, 2, 130, 5) == (1, 2, 5)
    assert d_position(128, 64, 2, 70, 40) == (1, 70, 8)


HOST_PROGRAM = """
#include "%s"
extern "C" {
u32 host_check_operand(u64 word, int mn) { return check_operand(word, mn); }
u32 host_element(u64 word, int mn, u32 row, u32 k) {
    return element_address(decode_operand(word, mn), row, k);
}
u32 host_check_instruction(u32 word, u32 group) { return check_instruction(word, group); }
u32 host_m(u32 word) { return decode_instruction(word).m; }
u32 host_n(u32 word) { return decode_instruction(word).n; }
u32 host_flags(u32 word) {
    return is_bf16(word) | a_is_mn_major(word) << 1 | b_is_mn_major(word) << 2 |
           (sign_masks(word, 13) != 0) << 3 | (sign_masks(word, 14) != 0) << 4;
}
u32 host_row(u32 m, u32 group, u32 lane) { return row_of_lane(m, group, lane); }
u32 host_columns(u32 word, u32 group) {
    return accumulator_columns(decode_instruction(word), group);
}
u32 host_units(u32 column, u32 columns) { return unit_mask(column, columns); }
}
"""


@pytest.fixture(scope="module")
def host(tmp_path_factory):
    """The pure functions of engine.cu, compiled for this machine."""
    compiler = shutil.which("g++") or shutil.which("clang++") or shutil.which("c++")
    if compiler is None:
        pytest.skip("no C++ compiler on PATH")
    folder = tmp_path_factory.mktemp("host")
    source, library = folder / "host.cpp", folder / "host.so"
    source.write_text(HOST_PROGRAM % engine.SOURCE)
    command = [compiler, "-std=c++17", "-O1", "-Wall", "-Werror", "-shared", "-fPIC"]
    subprocess.run([*command, "-o", str(library), str(source)], check=True)
    loaded = ctypes.CDLL(str(library))
    for name in ("check_operand", "element"):
        getattr(loaded, f"host_{name}").argtypes = [ctypes.c_uint64, *[ctypes.c_uint32] * 3][
            : 2 if name == "check_operand" else 4
        ]
    return loaded


def _fault_of(decode, *arguments):
    try:
        decode(*arguments)
    except DescriptorError as error:
        return {name: code for code, (name, _) in engine.FAULTS.items()}[error.fault]
    return 0


def test_engine_and_python_agree_on_matrix_descriptors(host):
    draw = random.Random(1)
    for _ in range(4000):
        span = draw.choice(list(SWIZZLE_SPANS.values()))
        mn_major = draw.random() < 0.5
        start = draw.randrange(0, 1 << 17, 16)
        if draw.random() < 0.8:  # mostly aligned, with an advance that may or may not be legal
            start = start // (8 * span) * 8 * span + 16 * draw.randrange(10)
        leading, stride = (16 * draw.randrange(512) for _ in range(2))
        word = encode_smem_descriptor(SmemDescriptor(start, leading, stride, span))
        if draw.random() < 0.2:
            word ^= 1 << draw.choice([14, 15, 30, 31, *range(46, 64)])
        fault = _fault_of(decode_smem_descriptor, word, mn_major)
        assert host.host_check_operand(word, mn_major) == fault, hex(word)
        if fault == 0:
            row, k = draw.randrange(256), draw.randrange(16)
            wanted = element_address(decode_smem_descriptor(word, mn_major), row, k, mn_major)
            assert host.host_element(word, mn_major, row, k) == wanted, (hex(word), row, k)


def test_engine_and_python_agree_on_instruction_descriptors(host):
    draw = random.Random(2)
    for _ in range(4000):
        group = draw.choice([1, 2])
        m, n = draw.choice([64, 128, 256]), 8 * draw.randrange(34)
        flags = [draw.random() < 0.5 for _ in range(5)]
        word = encode_instruction_descriptor(InstructionDescriptor(m, n, *flags))
        if draw.random() < 0.3:
            word ^= 1 << draw.randrange(32)
        fault = _fault_of(decode_instruction_descriptor, word, group)
        assert host.host_check_instruction(word, group) == fault, hex(word)
        if fault == 0:
            read = decode_instruction_descriptor(word, group)
            assert (host.host_m(word), host.host_n(word)) == (read.m, read.n)
            bits = (read.bf16, read.a_mn_major, read.b_mn_major, read.negate_a, read.negate_b)
            assert host.host_flags(word) == sum(bit << i for i, bit in enumerate(bits))


@pytest.mark.parametrize(("m", "group"), [(64, 1), (128, 1), (128, 2), (256, 2)])
def test_engine_and_python_agree_on_accumulators(host, m, group):
    n = 96
    word = encode_instruction_descriptor(InstructionDescriptor(m, n, True))
    columns = host.host_columns(word, group)
    used = set()
    for row in range(m):
        for column in range(n):
            cta, lane, at = d_position(m, n, group, row, column)
            assert at < columns and lane < 128 and cta < group
            assert host.host_row(m, group, lane) == (row if group == 1 else row % (m // 2))
            used.add((cta, lane, at))
    assert len(used) == m * n


def test_unit_masks_cover_the_touched_blocks_of_columns(host):
    for column, columns in [(0, 1), (0, 512), (31, 2), (480, 32), (32, 64), (511, 1)]:
        units = {c // 32 for c in range(column, column + columns)}
        assert host.host_units(column, columns) == sum(1 << unit for unit in units)
