# SPDX-License-Identifier: Apache-2.0
"""Runs the engine's functions on an sm_90 GPU through a kernel of our own (``harness.cu``).

Operands are small integers, so float32 results are exact in any order and compared bit for bit.
Operand images are laid out by ``layouts.element_address``, which knows nothing of the engine.

``python tests/hopper_gpu/harness.py fault NAME`` provokes one fault and prints its name (a trap
costs the CUDA context, hence a process each).
"""

from __future__ import annotations

import ctypes
import functools
import os
import pathlib
import sys
from dataclasses import dataclass, field

import numpy as np
import torch

if __name__ == "__main__":
    sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[2]))
    import conftest  # noqa: F401  registers the packages of a bare checkout

from flash_ladder.common.hopper import engine, layouts
from flash_ladder.common.hopper.session import HopperExecutionError, Session

U32, U64 = ctypes.c_uint32, ctypes.c_uint64
MAX_PUSHES = 64
TMEM_A, COMMIT = 4, 8
BULK = 6


class Push(ctypes.Structure):
    """One MMA; descriptors are relative to the start of dynamic shared memory."""

    _fields_ = (
        ("kind", U32),
        ("d", U32),
        ("instruction", U32),
        ("accumulate", U32),
        ("a", U64),
        ("b", U64),
    )


class Job(ctypes.Structure):
    """What one launch does; mirrors the struct in harness.cu, which states its size."""

    _fields_ = (
        ("smem", U64 * 2),
        ("tmem", U64 * 2),
        ("out_smem", U64 * 2),
        ("out_tmem", U64 * 2),
        ("source", U64),
        *((name, U32) for name in ("smem_bytes", "tmem_columns", "alloc_columns", "pushes")),
        ("shape", U32),
        ("bytes", U32),
        ("destination", U32),
        ("coordinate", U32 * 2),
        ("peer_barrier", U32),
        ("action", U32),
        ("blocks", U32),
        ("push", Push * MAX_PUSHES),
    )


def skip_reason() -> str | None:
    """Why the harness cannot run here, or None."""
    if not torch.cuda.is_available():
        return "no CUDA GPU here"
    if torch.cuda.get_device_capability() != (9, 0):
        return f"needs an sm_90 GPU; this is {torch.cuda.get_device_name()}"
    if engine._nvrtc() is None:
        return "needs NVRTC: pip install nvidia-cuda-nvrtc cuda-bindings"
    return None


def _call(function, *arguments):
    """The result of a driver call; raises RuntimeError for its error code."""
    error, *result = function(*arguments)
    if int(error):
        raise RuntimeError(f"{function.__name__} failed: {error}")
    return result[0] if result else None


@functools.cache
def session() -> Session:
    """The session of this process."""
    return Session(slots=4 * 132)


@functools.cache
def module():
    """The engine and the harness as one loaded module that is bound to the session."""
    from cuda.bindings import driver, nvrtc

    folder = pathlib.Path(__file__).parent
    source = engine.SOURCE.read_text() + (folder / "harness.cu").read_text()
    magic = f"0x{engine.MAGIC:X}"
    assert source.count(magic) == 1
    source = source.replace(magic, hex(session().address))
    program = _call(nvrtc.nvrtcCreateProgram, source.encode(), b"harness.cu", 0, [], [])
    options = [b"--gpu-architecture=sm_90a", b"--std=c++17"]
    if int(nvrtc.nvrtcCompileProgram(program, len(options), options)[0]):
        log = b" " * _call(nvrtc.nvrtcGetProgramLogSize, program)
        nvrtc.nvrtcGetProgramLog(program, log)
        raise RuntimeError(log.decode())
    cubin = b" " * _call(nvrtc.nvrtcGetCUBINSize, program)
    _call(nvrtc.nvrtcGetCUBIN, program, cubin)
    return _call(driver.cuModuleLoadData, cubin)


def launch(kernel: str, job: Job, grid: int = 1, threads: int = 288) -> None:
    """Launch and wait; raises HopperExecutionError for a fault."""
    from cuda.bindings import driver

    made = session()
    function = _call(driver.cuModuleGetFunction, module(), kernel.encode())
    shared = job.smem_bytes + 64
    limit = driver.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
    _call(driver.cuFuncSetAttribute, function, limit, shared)
    device = torch.frombuffer(bytearray(job), dtype=torch.uint8).cuda()
    torch.cuda.synchronize()
    arguments = ((device.data_ptr(),), (ctypes.c_void_p,))
    _call(driver.cuLaunchKernel, function, grid, 1, 1, threads, 1, 1, shared, 0, arguments, 0)
    try:
        torch.cuda.synchronize()
    finally:
        made.check()


@dataclass
class Image:
    """Shared memory of one CTA, filled operand by operand."""

    data: np.ndarray = field(default_factory=lambda: np.zeros(98304, dtype=np.uint16))
    used: int = 0

    def place(self, values: np.ndarray, span: int, mn_major: bool) -> list[int]:
        """Lay out values (rows, K) of 16 bits; one descriptor for each 16 of K."""
        rows, depth = values.shape
        width = span // 2
        base = -(-self.used // 1024) * 1024
        descriptors = []
        for k in range(0, depth, 16):
            if mn_major:
                group = 8 * span  # 8 of K times one swizzled row along MN
                blocks = depth // 8 * group
                leading, stride = (group, blocks) if span == 16 else (blocks, group)
                start = base + k // 8 * group
            else:
                tile = -(-rows // 8) * 8 * span
                leading, stride = tile, 8 * span
                start = base + k // width * tile + k % width * 2
            descriptor = layouts.SmemDescriptor(start, leading, stride, span)
            descriptors.append(layouts.encode_smem_descriptor(descriptor))
            for row in range(rows):
                for inner in range(16):
                    at = layouts.element_address(descriptor, row, inner, mn_major)
                    self.data[at // 2] = values[row, k + inner]
                    self.used = max(self.used, at + 2)
        return descriptors


@dataclass(frozen=True)
class Case:
    """One product D = (+-A)(+-B)^T [+ D] with K = 16 * steps."""

    m: int = 128
    n: int = 128
    cta_group: int = 1
    a_span: int = 128
    b_span: int = 128
    a_mn_major: bool = False
    b_mn_major: bool = False
    tmem_a: bool = False
    bf16: bool = True
    negate_a: bool = False
    negate_b: bool = False
    accumulate: bool = False
    steps: int = 4
    column: int = 0
    lane: int = 0

    @property
    def name(self) -> str:
        """For test ids: what differs from the default."""
        default = Case()
        parts = [
            f"{key}={value}"
            for key, value in vars(self).items()
            if value != getattr(default, key) or key in ("m", "n")
        ]
        return ",".join(parts)


def _bits(values: torch.Tensor, bf16: bool) -> np.ndarray:
    kind = torch.bfloat16 if bf16 else torch.float16
    return values.to(kind).view(torch.int16).numpy().view(np.uint16)


def _lanes(case: Case, rows: range) -> list[tuple[int, int]]:
    """(row of A, lane) pairs of one CTA for A in tensor memory; layout B needs A twice."""
    pairs = []
    for row in rows:
        local = row % (case.m // case.cta_group)
        if case.m == 64:
            pairs.append((row, local // 16 * 32 + local % 16 + case.lane))
        elif case.cta_group == 2 and case.m == 128:
            pairs += [(row, local), (row, local + 64)]
        else:
            pairs.append((row, local))
    return pairs


def _positions(case: Case) -> tuple[np.ndarray, ...]:
    """Index of D's elements, row by row, in an array [CTA, column, lane] of tensor memory."""
    found = np.empty((3, case.m, case.n), dtype=np.int64)
    for row in range(case.m):
        for column in range(case.n):
            cta, lane, at = layouts.d_position(
                case.m, case.n, case.cta_group, row, column, case.lane
            )
            found[:, row, column] = cta, case.column + at, lane
    return tuple(found)


def _operands(case: Case, a: np.ndarray, b: np.ndarray, tmem: np.ndarray):
    """(shared-memory images, words for A, words for B); A goes to `tmem` if the case says so."""
    groups, a_column = case.cta_group, 256
    images = [Image() for _ in range(groups)]
    for rank, image in enumerate(images):
        rows = range(rank * case.m // groups, (rank + 1) * case.m // groups)
        if case.tmem_a:
            packed = a[:, 0::2] | a[:, 1::2].astype(np.uint32) << 16
            for row, lane in _lanes(case, rows):
                tmem[rank, a_column : a_column + 8 * case.steps, lane] = packed[row]
            a_words = [(case.lane << 16) + a_column + 8 * i for i in range(case.steps)]
        else:
            a_words = image.place(a[rows.start : rows.stop], case.a_span, case.a_mn_major)
        half = slice(rank * case.n // groups, (rank + 1) * case.n // groups)
        b_words = image.place(b[half], case.b_span, case.b_mn_major)
    return images, a_words, b_words


def run(case: Case) -> None:
    """Run a case and compare every element, and that nothing else was written."""
    generator = torch.Generator().manual_seed(case.m * 1000 + case.n)
    draw = lambda *shape: torch.randint(-4, 5, shape, generator=generator).float()
    depth = 16 * case.steps
    a, b, d = draw(case.m, depth), draw(case.n, depth), draw(case.m, case.n)
    sign = (-1 if case.negate_a else 1) * (-1 if case.negate_b else 1)
    wanted = sign * (a @ b.T) + (d if case.accumulate else 0)
    place = _positions(case)
    tmem = np.full((case.cta_group, 512, 128), engine.POISON, dtype=np.uint32)
    if case.accumulate:
        tmem[place] = d.numpy().view(np.uint32)
    words = _operands(case, _bits(a, case.bf16), _bits(b, case.bf16), tmem)
    after = _launch_case(case, tmem, *words)
    before = tmem.copy()
    before[place] = wanted.numpy().view(np.uint32)
    zeros = (before | after) & 0x7FFFFFFF == 0  # -0 and 0
    different = np.nonzero((before != after) & ~zeros)
    assert not len(different[0]), (
        f"{len(different[0])} cells differ, first at (CTA, column, lane) "
        f"{[int(axis[0]) for axis in different]}"
    )


def _launch_case(case: Case, tmem, images, a_words, b_words) -> np.ndarray:
    """Tensor memory of each CTA afterwards."""
    instruction = layouts.encode_instruction_descriptor(
        layouts.InstructionDescriptor(
            case.m,
            case.n,
            case.bf16,
            case.a_mn_major,
            case.b_mn_major,
            case.negate_a,
            case.negate_b,
        )
    )
    job = Job(smem_bytes=196608, tmem_columns=512, alloc_columns=512, pushes=case.steps)
    keep = []
    for rank, image in enumerate(images):
        given = torch.from_numpy(image.data.view(np.int16)).cuda()
        start = torch.from_numpy(tmem[rank].view(np.int32)).cuda()
        keep += [given, start, torch.zeros_like(start)]
        job.smem[rank], job.tmem[rank] = given.data_ptr(), start.data_ptr()
        job.out_tmem[rank] = keep[-1].data_ptr()
    kind = case.cta_group | (TMEM_A if case.tmem_a else 0)
    d = case.lane << 16 | case.column
    for i, (a, b) in enumerate(zip(a_words, b_words)):
        job.push[i] = Push(kind, d, instruction, case.accumulate or i > 0, a, b)
    pair = case.cta_group == 2
    launch("harness_pair" if pair else "harness", job, grid=2 if pair else 1)
    return np.stack([keep[3 * r + 2].cpu().numpy().view(np.uint32) for r in range(len(images))])


def tensor_map(matrix: torch.Tensor, rows: int, columns: int, span: int):
    """A 2-D CUtensorMap over a 16-bit matrix, in device memory."""
    from cuda.bindings import driver

    swizzles = driver.CUtensorMapSwizzle
    swizzle = {
        16: swizzles.CU_TENSOR_MAP_SWIZZLE_NONE,
        32: swizzles.CU_TENSOR_MAP_SWIZZLE_32B,
        64: swizzles.CU_TENSOR_MAP_SWIZZLE_64B,
        128: swizzles.CU_TENSOR_MAP_SWIZZLE_128B,
    }[span]
    height, width = matrix.shape
    u32, u64 = driver.cuuint32_t, driver.cuuint64_t
    made = _call(
        driver.cuTensorMapEncodeTiled,
        driver.CUtensorMapDataType.CU_TENSOR_MAP_DATA_TYPE_BFLOAT16,
        2,
        matrix.data_ptr(),
        [u64(width), u64(height)],
        [u64(2 * width)],
        [u32(columns), u32(rows)],
        [u32(1), u32(1)],
        driver.CUtensorMapInterleave.CU_TENSOR_MAP_INTERLEAVE_NONE,
        swizzle,
        driver.CUtensorMapL2promotion.CU_TENSOR_MAP_L2_PROMOTION_NONE,
        driver.CUtensorMapFloatOOBfill.CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE,
    )
    words = bytearray(ctypes.string_at(made.getPtr(), 128))
    return torch.frombuffer(words, dtype=torch.uint8).cuda()


def run_load(pair: bool, bulk: bool) -> None:
    """A TMA load arrives, swizzled, on the own barrier or (pair) on that of the leader."""
    rows, columns, span, destination = 8, 64, 128, 2048
    matrix = torch.arange(32 * columns, dtype=torch.int16).view(32, columns).cuda()
    source = matrix if bulk else tensor_map(matrix, rows, columns, span)
    job = Job(
        smem_bytes=8192,
        source=source.data_ptr(),
        shape=BULK if bulk else 2,
        bytes=rows * columns * 2,
        destination=destination,
        peer_barrier=pair,
    )
    job.coordinate[1] = 8
    outs = [torch.zeros(4096, dtype=torch.int16, device="cuda") for _ in range(2)]
    empty = torch.zeros(4096, dtype=torch.int16, device="cuda")
    for rank in range(2):
        job.smem[rank], job.out_smem[rank] = empty.data_ptr(), outs[rank].data_ptr()
    launch("harness_pair" if pair else "harness", job, grid=2 if pair else 1)
    for rank in range(2 if pair else 1):
        wanted = np.zeros(4096, dtype=np.int16)
        tile = matrix.cpu().numpy()[0 if bulk else 8 + 8 * rank :][:rows]
        for row in range(rows):
            for column in range(columns):
                at = destination + row * 128 + column * 2
                wanted[(at if bulk else layouts.swizzle_address(at, span)) // 2] = tile[row, column]
        assert np.array_equal(outs[rank].cpu().numpy(), wanted), f"CTA {rank}"


def _mma_job(**changes) -> Job:
    """One legal MMA on zeros, with changes to its words."""
    values = {"pushes": 1, "alloc_columns": 512, "action": 0} | {
        key: changes.pop(key) for key in ("alloc_columns", "action", "pushes") if key in changes
    }
    job = Job(smem_bytes=65536, tmem_columns=512, **values)
    operand = layouts.encode_smem_descriptor(layouts.SmemDescriptor(0, 16, 1024, 128))
    instruction = layouts.encode_instruction_descriptor(
        layouts.InstructionDescriptor(128, 128, True)
    )
    push = {"kind": 1, "d": 0, "instruction": instruction, "accumulate": 0}
    job.push[0] = Push(**({**push, "a": operand, "b": operand} | changes))
    zeros = torch.zeros(65536, dtype=torch.uint8, device="cuda")
    job.smem[0], job.keep = zeros.data_ptr(), zeros
    return job


OPERAND = layouts.encode_smem_descriptor(layouts.SmemDescriptor(0, 16, 1024, 128))
INSTRUCTION = layouts.encode_instruction_descriptor(layouts.InstructionDescriptor(128, 128, True))
# Provocation -> (fault, line, changes of _mma_job, settings). Lines are those in harness.cu.
FAULTS = {
    "constant bits": ("BAD_SMEM_DESCRIPTOR", 100, {"a": OPERAND & ~(7 << 46)}, {}),
    "base offset": ("BAD_SMEM_DESCRIPTOR", 100, {"b": OPERAND | 1 << 49}, {}),
    "absolute leading": ("BAD_SMEM_DESCRIPTOR", 100, {"b": OPERAND | 1 << 52}, {}),
    "reserved bit": ("BAD_SMEM_DESCRIPTOR", 100, {"a": OPERAND | 1 << 57}, {}),
    "swizzle mode": ("BAD_SMEM_DESCRIPTOR", 100, {"a": OPERAND | 1 << 61}, {}),
    "swizzle base": ("MISALIGNED_SWIZZLE_BASE", 100, {"a": OPERAND + 8}, {}),
    "sparse": ("BAD_INSTRUCTION_DESCRIPTOR", 100, {"instruction": INSTRUCTION | 4}, {}),
    "float16 D": ("BAD_INSTRUCTION_DESCRIPTOR", 100, {"instruction": INSTRUCTION & ~16}, {}),
    "mixed types": ("BAD_INSTRUCTION_DESCRIPTOR", 100, {"instruction": INSTRUCTION ^ 128}, {}),
    "D leaves columns": ("TMEM_OUT_OF_RANGE", 100, {"d": 400}, {}),
    "D lane": ("TMEM_OUT_OF_RANGE", 100, {"d": 16 << 16}, {}),
    "D not allocated": ("TMEM_NOT_ALLOCATED", 100, {"d": 200, "alloc_columns": 256}, {}),
    "accumulate poison": ("POISON_READ", 100, {"accumulate": 1}, {}),
    "A poison": ("POISON_READ", 100, {"kind": 1 | TMEM_A, "a": 256}, {}),
    "A in TMEM MN-major": (
        "UNSUPPORTED",
        100,
        {"kind": 1 | TMEM_A, "a": 256, "instruction": INSTRUCTION | 1 << 15},
        {},
    ),
    "pair without a pair": ("UNSUPPORTED", 100, {"kind": 2}, {}),
    "leak": ("TMEM_LEAK", 0, {"action": 1}, {}),
    "wrong quarter": ("WRONG_LANE_QUARTER", 50, {"action": 2}, {}),
    "columns out of range": ("TMEM_OUT_OF_RANGE", 51, {"action": 3}, {}),
    "overflow": ("TMEM_OVERFLOW", 52, {"action": 4}, {}),
    "dealloc of another size": ("BAD_DEALLOC", 53, {"action": 5}, {}),
    "alloc after relinquish": (
        "ALLOC_AFTER_RELINQUISH",
        58,
        {"action": 6, "alloc_columns": 256},
        {},
    ),
    "odd size": ("BAD_ALLOC", 1, {"alloc_columns": 48}, {}),
    "early dealloc": ("EARLY_DEALLOC", 13, {"action": 7}, {}),
    "timeout": ("TIMEOUT", 54, {"action": 8}, {"timeout_ms": 300}),
    "cluster timeout": ("TIMEOUT", 11, {"action": 9}, {"timeout_ms": 300}),
    "uncommitted": (
        "UNCOMMITTED",
        0,
        {"action": 10},
        {"eager": True, "report_uncommitted": True},
    ),
}


def provoke(name: str) -> str:
    """Run one provocation; returns "NAME line" of the fault, followed by its message."""
    _, _, changes, settings = FAULTS[name]
    session().settings(**settings)
    try:
        launch("harness", _mma_job(**changes))
    except HopperExecutionError as error:
        return f"{error.name} {error.line}\n{error}"
    return "none 0"


def main() -> None:
    """Entry of the fault processes."""
    print(provoke(sys.argv[2]), flush=True)
    os._exit(0)  # the context may be lost, and destructors would complain


if __name__ == "__main__":
    main()
