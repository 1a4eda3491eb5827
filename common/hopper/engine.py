# SPDX-License-Identifier: Apache-2.0
"""``engine.cu`` as PTX for Hopper, and what the host shares with it: constants, structs, faults.

``engine_ptx()`` compiles with NVRTC, or with nvcc where NVRTC is missing, and keeps the result in
the disk cache of ``common.compile``. The layouts of ``Control`` and ``Fault`` are those of the
structs of the same names in ``engine.cu``; a test holds them together. Runs: host.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import os
import pathlib
import re
import shutil
import subprocess
import tempfile

from ..compile import cache_folder

SOURCE = pathlib.Path(__file__).with_name("engine.cu")
ARCH = "compute_90a"
ENGINE_THREADS = 160
POISON = 0x7FC0DEAD
TMEM_BYTES = 262144
SLOT_BYTES = TMEM_BYTES + 65536
MAX_WAITS = 256
MAX_MAIN_THREADS = 864
MAGIC = 0xF1A54C0DE0ADD2E5  # the value of fl_control until the host knows the address
FLAG_EAGER = 1
FLAG_UNCOMMITTED = 2
LOG_UNIT, LOG_HEADER = 16, 4  # bytes; units before a log's first record
DELAYS = ("mma", "tma", "tmem", "start")  # order of Control.delay_ns

_U32, _U64 = ctypes.c_uint32, ctypes.c_uint64


class Control(ctypes.Structure):
    """What the engine reads: settings and addresses in device memory."""

    _fields_ = (
        ("slots", _U32),
        ("flags", _U32),
        ("seed", _U32),
        ("timeout_ms", _U32),
        ("delay_ns", _U32 * 4),
        ("slot_memory", _U64),
        ("slot_table", _U64),
        ("fault", _U64),
        ("log", _U64),
        ("log_clusters", _U32),
        ("log_units", _U32),
        ("skip", _U32),
        ("reserved", _U32),
    )


class Wait(ctypes.Structure):
    """A warp that has waited for longer than a tenth of the timeout."""

    _fields_ = tuple((name, _U32) for name in ("cta", "warp", "line", "barrier", "parity", "kind"))


class Fault(ctypes.Structure):
    """What the engine writes before it ends a kernel; ``claimed`` is 2 once it is complete."""

    _fields_ = (
        ("claimed", _U32),
        ("code", _U32),
        ("line", _U32),
        ("cta", _U32 * 3),
        ("warp", _U32),
        ("lane", _U32),
        ("values", _U32 * 4),
        ("waits", _U32),
        ("reserved", _U32 * 3),
        ("wait", Wait * MAX_WAITS),
    )


WAIT_KINDS = {
    1: "mbarrier",
    2: "cluster barrier",
    3: "room in the engine's queue",
    4: "a free slot of tensor memory",
    5: "work for the engine",
}
POISON_READERS = {0: "a load", 1: "an MMA that accumulates", 2: "an MMA that takes A from there"}
OPERANDS = {0: "A", 1: "B"}
UNSUPPORTED_REASONS = {
    1: "a cluster of more than two CTAs",
    2: "the number of threads (a multiple of 32, at most 864)",
    3: "cta_group::2 from a CTA that does not lead a pair",
    4: "cta_group::1 and cta_group::2 in one kernel",
    5: "the shape of a bulk copy",
    6: "A in tensor memory declared MN-major",
}

# Code -> name, and a sentence about values {0} to {3}; the names are those of enum FaultCode.
FAULTS: dict[int, tuple[str, str]] = {
    1: ("TIMEOUT", "waited {3} ms for {2:wait} (barrier {0:#x}, parity {1})"),
    2: (
        "BAD_SMEM_DESCRIPTOR",
        "shared-memory descriptor 0x{1:08x}{0:08x} of {2:operand} has a reserved bit, a base "
        "offset, or a swizzle mode that 16-bit operands do not have",
    ),
    3: (
        "BAD_INSTRUCTION_DESCRIPTOR",
        "instruction descriptor {0:#010x} is not a dense kind::f16 MMA with float32 accumulators "
        "and a shape that cta_group::{1} has",
    ),
    4: (
        "WRONG_LANE_QUARTER",
        "tensor memory address {0:#010x} is not at the start of the lanes of warp {1} ({2} lanes)",
    ),
    5: (
        "TMEM_OUT_OF_RANGE",
        "{1} columns at tensor memory address {0:#010x} leave the 128 lanes x 512 columns, or the "
        "lane is one that the shape does not allow",
    ),
    6: (
        "TMEM_NOT_ALLOCATED",
        "{1} columns at tensor memory address {0:#010x} are not all allocated "
        "(allocated blocks of 32 columns: {2:#018b})",
    ),
    7: ("POISON_READ", "{1:reader} read tensor memory never written, at {0:#010x}"),
    8: (
        "TMEM_OVERFLOW",
        "no {0} adjacent columns are free (allocated blocks of 32 columns: {1:#018b})",
    ),
    9: (
        "TMEM_LEAK",
        "tensor memory is still allocated at exit (blocks of 32 columns: {0:#018b})",
    ),
    10: (
        "BAD_DEALLOC",
        "dealloc of {1} columns at {0:#x}, where an allocation of {2} columns starts",
    ),
    11: (
        "MISALIGNED_SWIZZLE_BASE",
        "shared-memory descriptor 0x{1:08x}{0:08x} of {2:operand} starts outside the first row of "
        "its swizzle pattern",
    ),
    12: ("ALLOC_AFTER_RELINQUISH", "alloc of {0} columns after relinquish_alloc_permit"),
    13: ("UNSUPPORTED", "the engine does not do {0:unsupported} (values {1}, {2})"),
    14: ("UNCOMMITTED", "{0} MMAs were never committed"),
    15: (
        "EARLY_DEALLOC",
        "dealloc of {1} columns at {0:#x} while the MMA of PTX line {2} on them may still run",
    ),
    16: (
        "BAD_ALLOC",
        "alloc of {0} columns: not a power of two from 32 to 512, or more than the {1} columns of "
        "the allocation before",
    ),
    17: ("LOG_OVERFLOW", "the log of a cluster is full ({0} units of 16 bytes)"),
}
_WORDS = {
    "wait": WAIT_KINDS,
    "operand": OPERANDS,
    "reader": POISON_READERS,
    "unsupported": UNSUPPORTED_REASONS,
}


class _Word(int):
    """A fault value that a template may also show as a word, such as ``{2:wait}``."""

    def __format__(self, spec: str) -> str:
        if spec in _WORDS:
            return _WORDS[spec].get(int(self), f"case {int(self)}")
        return format(int(self), spec)


def fault_sentence(code: int, values) -> tuple[str, str]:
    """(name, sentence) of a fault."""
    name, template = FAULTS.get(code, (f"FAULT_{code}", "values {0:#x}, {1:#x}, {2:#x}, {3:#x}"))
    return name, template.format(*map(_Word, values))


class EngineCompilerMissing(RuntimeError):
    """Neither NVRTC nor nvcc is there; the message says which package brings one."""


class EngineCompileError(RuntimeError):
    """The compiler refused engine.cu; the message holds its words."""


@functools.cache
def engine_ptx() -> str:
    """PTX of engine.cu for sm_90a; ``fl_control`` holds ``MAGIC`` in 16 hex digits.

    Raises EngineCompilerMissing or EngineCompileError.
    """
    compiler, version = find_compiler()
    parts = (SOURCE.read_bytes(), pathlib.Path(__file__).read_bytes(), version.encode())
    digest = hashlib.sha256(b"\0".join(parts)).hexdigest()
    path = cache_folder() / f"engine-{digest[:24]}.ptx"
    try:
        return path.read_text()
    except OSError:
        text = _tidy(compiler())
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, scratch = tempfile.mkstemp(prefix=".engine-", dir=path.parent)
    with os.fdopen(handle, "w") as file:
        file.write(text)
    os.replace(scratch, path)  # other processes see all of it or nothing
    return text


def find_compiler():
    """(function that returns PTX, version) of NVRTC, else of nvcc; EngineCompilerMissing."""
    nvrtc = _nvrtc()
    if nvrtc is not None:
        return functools.partial(_compile_nvrtc, nvrtc), f"nvrtc {nvrtc.nvrtcVersion()[1:]}"
    nvcc = shutil.which("nvcc")
    if nvcc is None:
        raise EngineCompilerMissing(
            "execution on Hopper compiles CUDA C++: pip install nvidia-cuda-nvrtc cuda-bindings "
            "(CUDA 12: nvidia-cuda-nvrtc-cu12), or put nvcc on PATH"
        )
    words = subprocess.run([nvcc, "--version"], capture_output=True, text=True).stdout
    return functools.partial(_compile_nvcc, nvcc), f"nvcc {words.split()[-1]}"


def _nvrtc():
    """The NVRTC bindings if they and the library can be loaded, else None."""
    try:
        from cuda.bindings import nvrtc

        nvrtc.nvrtcVersion()
    except Exception:  # the bindings raise their own error types when the library is missing
        return None
    return nvrtc


def _compile_nvrtc(nvrtc) -> str:
    source = SOURCE.read_bytes()
    _, program = nvrtc.nvrtcCreateProgram(source, SOURCE.name.encode(), 0, [], [])
    options = [f"--gpu-architecture={ARCH}", "--std=c++17", "--relocatable-device-code=true"]
    arguments = [option.encode() for option in options]
    if _failed(nvrtc.nvrtcCompileProgram(program, len(arguments), arguments)):
        log = b" " * nvrtc.nvrtcGetProgramLogSize(program)[1]
        nvrtc.nvrtcGetProgramLog(program, log)
        raise EngineCompileError(f"NVRTC refused engine.cu: {log.decode().strip()[:2000]}")
    text = b" " * nvrtc.nvrtcGetPTXSize(program)[1]
    nvrtc.nvrtcGetPTX(program, text)
    nvrtc.nvrtcDestroyProgram(program)
    return text.decode().rstrip(" \0")


def _failed(result) -> bool:
    return int(result[0]) != 0


def _compile_nvcc(nvcc: str) -> str:
    with tempfile.TemporaryDirectory() as folder:
        out = pathlib.Path(folder) / "engine.ptx"
        command = [nvcc, f"-arch={ARCH}", "-std=c++17", "-rdc=true", "-ptx", "-o", str(out)]
        done = subprocess.run([*command, str(SOURCE)], capture_output=True, text=True)
        if done.returncode:
            raise EngineCompileError(f"nvcc refused engine.cu: {done.stderr.strip()[:2000]}")
        return out.read_text()


def _tidy(ptx: str) -> str:
    """Write fl_control's value in hex and drop hashes from the names of internal functions."""
    ptx, found = re.subn(
        r"(\bfl_control = )-?\w+;", rf"\g<1>0x{MAGIC:016X};", ptx.replace("\r", "")
    )
    if found != 1:
        raise EngineCompileError(f"fl_control is initialised {found} times in the engine's PTX")
    names = re.findall(r"\.func\s*(?:\([^)]*\)\s*)?(_Z\w+)", ptx)
    for name in sorted(names, key=len, reverse=True):
        ptx = ptx.replace(name, f"fl_internal_{_plain(name)}")
    return ptx


def _plain(name: str) -> str:
    """The function's own name in a mangled one, such as `fail` in `_ZN39_INTERNAL_..4failEj`."""
    scope = re.match(r"_ZN(\d+)", name)
    rest = name[scope.end() + int(scope[1]) :] if scope else name.removeprefix("_ZL")
    length = re.match(r"\d+", rest)
    return rest[length.end() :][: int(length[0])]
