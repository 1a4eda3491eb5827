# SPDX-License-Identifier: Apache-2.0
"""SASS instructions: classes, pipes, rates with their status, and what the counts mean.

Counts are exact. Rates turn them into cycles of one of the four sub-partitions of an SM, and each
rate says how sure it is: *documented* by NVIDIA, *implied* by the stall counts that ptxas writes
between independent neighbours, or *assumed*.
"""

import collections
import functools
import itertools
import re
from dataclasses import dataclass
from typing import NamedTuple

SUB_PARTITIONS = 4  # of an SM; a warp instruction issues on one of them


@dataclass(frozen=True)
class Rate:
    """A number of the machine model; `status` is documented, implied or assumed."""

    value: int
    unit: str
    status: str
    source: str


RATES = {
    "issue": Rate(1, "clk/warp instruction", "documented", "one per clock per sub-partition"),
    "mufu": Rate(8, "clk/warp instruction", "documented", "16 results/clk/SM"),
    "fma": Rate(1, "clk/warp instruction", "documented", "128 FP32 FMA/clk/SM"),
    "fma2": Rate(
        2,
        "clk/warp instruction",
        "implied",
        "ptxas places independent neighbours 2 clk apart: packing saves issue slots, not FMA time",
    ),
    "imad": Rate(2, "clk/warp instruction", "assumed", "64 IMAD/clk/SM, on the FMA pipe"),
    "alu": Rate(
        2,
        "clk/warp instruction",
        "implied",
        "ptxas places FMNMX3, FSEL and F2FP 2 clk apart; other integer operations assumed alike",
    ),
    "tensor": Rate(8192, "FLOP/clk/SM", "documented", "dense bf16 and fp16, sm_100"),
    "shared": Rate(128, "byte/clk/SM", "documented", "32 banks of 4 bytes"),
}
# Architectures that differ: 64 FP32 lanes per SM.
RATES_OF = {
    "sm_80": RATES | {"fma": Rate(2, "clk/warp instruction", "documented", "64 FP32 FMA/clk/SM")},
}
_SHARED_PIPE = {"fma2": "fma", "imad": "fma"}  # rates of their own, pipe of another

# Opcode classes, first match wins. Third field: pipe, None = issue slot only.
_CLASSES = (
    ("EX2", r"MUFU\.EX2", "mufu"),
    ("MUFU", r"MUFU", "mufu"),
    ("FFMA2", r"FFMA2", "fma2"),
    ("FMUL2", r"FMUL2", "fma2"),
    ("FADD2", r"FADD2", "fma2"),
    ("FFMA", r"FFMA", "fma"),
    ("FMUL", r"FMUL", "fma"),
    ("FADD", r"FADD", "fma"),
    ("FMNMX3", r"FMNMX3", "alu"),
    ("FMNMX", r"FMNMX", "alu"),
    ("F2FP", r"F2FP", "alu"),
    ("FSEL", r"FSEL|FSETP|FSET|FCHK", "alu"),
    ("LDTM", r"LDTM", None),
    ("STTM", r"STTM", None),
    ("MMA", r"UTC[A-Z]*MMA|HGMMA|HMMA|QGMMA|IGMMA|OMMA|QMMA", None),
    ("UTC", r"UTC|WARPGROUP", None),
    ("TMALD", r"UTMALDG|UBLKCP|UTMAPF|UBLKPF", None),
    ("TMARED", r"UTMAREDG|UBLKRED", None),
    ("TMAST", r"UTMASTG|UTMACMDFLUSH", None),
    ("LDS", r"LDS|LDSM", None),
    ("STS", r"STS|STSM|STAS", None),
    ("SPILL", r"LDL|STL", None),
    ("GMEM", r"LDG|STG|LDGSTS|LD\b|ST\b|RED\b|REDG|ATOM", None),
    ("SYNCS", r"SYNCS", None),
    ("BAR", r"BAR|UCGABAR|BARRIER", None),
    ("SHFL", r"SHFL|REDUX|VOTE|MATCH|CREDUX", None),
    ("MOV", r"IMAD\.(MOV|U32)|MOV|CS2R|HFMA2", None),
    ("IMAD", r"IMAD|IDP", "imad"),
    (
        "INT",
        r"IADD|VIADD|IADD3|LOP3|LOP|SHF|LEA|ISETP|SEL|PRMT|R2P|P2R|PLOP3|VIMNMX|IABS|FLO|POPC|I2F"
        r"|F2I|I2I|IMNMX|BREV|SGXT|BMSK|LDC|S2R|HADD2|HMUL2|HSET|HMNMX",
        "alu",
    ),
    ("UNI", r"U[A-Z]|R2UR|S2UR|CS2UR|LDCU|ULDC|REDUX", None),
    (
        "CTRL",
        r"BRA|BRX|JMP|BSSY|BSYNC|BREAK|CALL|RET|EXIT|BPT|WARPSYNC|ELECT|NANOSLEEP|YIELD|KILL",
        None,
    ),
    ("FENCE", r"FENCE|MEMBAR|DEPBAR|ERRBAR|CCTL|LDGDEPBAR|ACQ|PREEXIT", None),
    ("NOP", r"NOP", None),
)
_PREFIXES = ("UNI", "UTC", "MMA", "CTRL")  # classes whose pattern may be the start of a longer name
_COMPILED = [
    (name, re.compile(rf"(?:{pattern})" + ("" if name in _PREFIXES else r"(?![A-Z0-9])")), pipe)
    for name, pattern, pipe in _CLASSES
]
CLASS_NAMES = (*(name for name, _, _ in _CLASSES), "OTHER")


@functools.cache
def classify(opcode: str) -> tuple[str, str | None]:
    """Return (class, pipe) of a SASS opcode; the pipe is None if it takes an issue slot only."""
    for name, pattern, pipe in _COMPILED:
        if pattern.match(opcode):
            return name, pipe
    return "OTHER", None


@dataclass(slots=True)
class Instruction:
    """One SASS instruction with the scheduling that ptxas wrote into it.

    ``address`` in bytes from the start of the kernel; ``guard`` such as ``"@!P0"``; ``targets``
    the labels named. ``live_registers`` (general, uniform) as nvdisasm counts them, (0, 0) where it
    cannot. ``stall`` in
    cycles; ``write_board`` and ``read_board`` are the scoreboards (0..5, 7 = none) set when the
    result or the sources are done, ``wait_mask`` the scoreboards waited for.
    """

    address: int
    guard: str | None
    opcode: str
    arguments: str
    targets: tuple[str, ...]
    live_registers: tuple[int, int] = (0, 0)
    stall: int = 1
    write_board: int = 7
    read_board: int = 7
    wait_mask: int = 0

    def schedule(self, high: int):
        """Take the scheduling fields from the upper 64 bits of the encoding."""
        self.stall, self.write_board = high >> 41 & 15, high >> 46 & 7
        self.read_board, self.wait_mask = high >> 49 & 7, high >> 52 & 63


def count(instructions) -> collections.Counter:
    """Return how many instructions of each class there are."""
    return collections.Counter(classify(i.opcode)[0] for i in instructions)


def pipe_of(opcode: str) -> str | None:
    """Return the pipe an opcode occupies: mufu, fma, alu or None."""
    pipe = classify(opcode)[1]
    return _SHARED_PIPE.get(pipe, pipe)


def pipe_cycles(instructions, arch: str = "sm_100a") -> collections.Counter:
    """Return the cycles of one sub-partition by resource (issue, mufu, fma, alu) for one warp."""
    rates, cycles = RATES_OF.get(arch, RATES), collections.Counter()
    for instruction in instructions:
        cycles["issue"] += rates["issue"].value
        kind = classify(instruction.opcode)[1]
        if kind:
            cycles[pipe_of(instruction.opcode)] += rates[kind].value
    return cycles


def tmem_registers(instructions, opcode: str) -> int:
    """Return the 32-bit registers per thread that LDTM or STTM instructions move."""
    total = 0
    for instruction in instructions:
        if instruction.opcode.startswith(opcode):
            name = instruction.opcode + instruction.arguments.split(" ")[0]
            repeat = re.search(r"\.x(\d+)", name) or re.search(r"\bx(\d+)\b", instruction.arguments)
            total += int(repeat[1]) if repeat else 1
    return total


def shared_bytes(instructions, class_name: str) -> int:
    """Return the bytes one warp moves by LDS or STS (class name); bank conflicts are not seen."""
    total = 0
    for instruction in instructions:
        if classify(instruction.opcode)[0] == class_name:
            bits = re.search(r"\.(\d+)", instruction.opcode)
            known = bits and bits[1] in ("8", "16", "64", "128", "256")
            total += 32 * (int(bits[1]) // 8 if known else 4)
    return total


def exp2_split(instructions) -> tuple[int, int]:
    """Return exponentials per thread in (hardware, emulation).

    Emulation is known by the add towards minus infinity that takes the integer part; any other
    pattern is not counted.
    """
    hardware = sum(i.opcode.startswith("MUFU.EX2") for i in instructions)
    emulated = sum(
        2 if i.opcode.startswith("FADD2") else 1
        for i in instructions
        if i.opcode.startswith(("FADD2.", "FADD.")) and ".RM" in i.opcode
    )
    return hardware, emulated


class Mma(NamedTuple):
    """A tcgen05 MMA of K = 16: shape (None if the descriptor was not found), source of A, pair."""

    m: int | None
    n: int | None
    a_in_tmem: bool
    pair: bool

    def __str__(self):
        source = "TS" if self.a_in_tmem else "SS"
        return f"{self.m}x{self.n} {source}{' pair' if self.pair else ''}"


def is_tensor_memory_mma(instruction: Instruction) -> bool:
    """True for the SASS of tcgen05.mma (UTCHMMA and relatives)."""
    return bool(re.match(r"UTC[A-Z]*MMA", instruction.opcode))


def decode_descriptor(word: int) -> tuple[int, int] | None:
    """Return (M, N) of a kind::f16 instruction descriptor, None if `word` does not look like one.

    Fields: PTX ISA, "Instruction descriptor", D type in bits 4-5, N/8 in 17-22, M/16 in 24-28.
    """
    m, n = ((word >> 24) & 0x1F) * 16, ((word >> 17) & 0x3F) * 8
    valid = (word >> 4) & 3 in (0, 1) and m in (64, 128, 256) and 8 <= n <= 256
    return (m, n) if valid else None


_MOVES = ("UMOV", "MOV", "USEL", "SEL", "R2UR", "IMAD.U32", "IMAD.MOV")


def _trace_descriptor(instructions, at: int, register: str) -> tuple[int, int] | None:
    """Follow `register` back from instruction `at`, through moves and selects, to a constant."""
    for earlier in reversed(instructions[:at]):
        written = re.match(r"(U?R\d+)\b,?\s*(.*)", earlier.arguments)
        if not written or written[1] != register:
            continue
        for word in re.findall(r"0x[0-9a-f]+", written[2]):
            if decode_descriptor(int(word, 16)):
                return decode_descriptor(int(word, 16))
        source = re.search(r"\b(U?R\d+)\b", written[2])
        if not source or not earlier.opcode.startswith(_MOVES):
            return None
        register = source[1]
    return None


def mma_list(instructions, wanted) -> list[Mma]:
    """Return the tcgen05 MMAs among `wanted`, which are part of a kernel's `instructions`.

    A descriptor that cannot be followed takes the shape of a neighbour of the same kind.
    """
    index = {id(instruction): at for at, instruction in enumerate(instructions)}
    found: list[Mma] = []
    for instruction in filter(is_tensor_memory_mma, wanted):
        register = re.search(r"idesc\[(UR\d+)\]", instruction.arguments)
        shape = register and _trace_descriptor(instructions, index[id(instruction)], register[1])
        from_tmem, pair = instruction.arguments.startswith("tmem"), ".2CTA" in instruction.opcode
        found.append(Mma(*(shape or (None, None)), from_tmem, pair))
    for order in (range(len(found)), reversed(range(len(found)))):
        previous = None
        for at in order:
            if found[at].m is None and previous and previous[2:] == found[at][2:]:
                found[at] = Mma(*previous[:2], *found[at][2:])
            previous = found[at] if found[at].m else previous
    return found


def issue_intervals(instructions) -> dict[str, collections.Counter]:
    """Return, for neighbours of one class, how often ptxas left how many cycles between them."""
    found: dict[str, collections.Counter] = {}
    for first, second in itertools.pairwise(instructions):
        kind = classify(first.opcode)[0]
        if kind == classify(second.opcode)[0]:
            found.setdefault(kind, collections.Counter())[first.stall] += 1
    return found
