# SPDX-License-Identifier: Apache-2.0
"""Descriptors of ``tcgen05.mma`` kind::f16 and where they put elements: the bit tables as code.

Independent of ``engine.cu``: the layouts are evaluated from their canonical (shape : stride) form,
while the engine uses shifts and masks; a test compares the two. Elements have 16 bits, addresses
are bytes in the CTA's shared-memory window. Sources: PTX ISA 9.1, tables 40 and 42 and sections
9.7.16.3 and 9.7.16.10.5. Runs: host.
"""

from __future__ import annotations

from dataclasses import dataclass

ATOM = 8  # elements in 16 bytes, the unit T of the canonical layouts
SWIZZLE_SPANS = {0: 16, 6: 32, 4: 64, 2: 128}  # field value -> bytes of one swizzled row
_LIMIT = 1 << 18


class DescriptorError(ValueError):
    """A descriptor says something that the hardware, or this project's engine, does not allow.

    ``fault`` is the name of the fault that the engine raises for it.
    """

    def __init__(self, fault: str, sentence: str):
        super().__init__(sentence)
        self.fault = fault


@dataclass(frozen=True)
class SmemDescriptor:
    """A matrix operand in shared memory; all in bytes, ``swizzle`` is the bytes of a row or 16."""

    start: int
    leading: int
    stride: int
    swizzle: int


@dataclass(frozen=True)
class InstructionDescriptor:
    """What one MMA computes: D (m x n) from A (m x 16) and B (n x 16)."""

    m: int
    n: int
    bf16: bool
    a_mn_major: bool = False
    b_mn_major: bool = False
    negate_a: bool = False
    negate_b: bool = False


def _bits(value: int, first: int, last: int) -> int:
    return value >> first & ((1 << (last - first + 1)) - 1)


def encode_smem_descriptor(descriptor: SmemDescriptor) -> int:
    """The 64 bits of a descriptor with base offset 0."""
    code = {span: field for field, span in SWIZZLE_SPANS.items()}[descriptor.swizzle]
    word = 1 << 46 | code << 61
    for value, at in ((descriptor.start, 0), (descriptor.leading, 16), (descriptor.stride, 32)):
        if value % 16 or not 0 <= value < _LIMIT:
            raise ValueError(f"{value} is not a multiple of 16 below {_LIMIT}")
        word |= value // 16 << at
    return word


def decode_smem_descriptor(word: int, mn_major: bool) -> SmemDescriptor:
    """Read a 64-bit matrix descriptor; the instruction descriptor says which way it is major.

    Raises DescriptorError for reserved bits, a swizzle mode that 16-bit elements do not have, and a
    start address that is not in the first row of a swizzle pattern.
    """
    constant, mode = _bits(word, 46, 48), _bits(word, 61, 63)
    reserved = {
        "bits 14-15": _bits(word, 14, 15),
        "bits 30-31": _bits(word, 30, 31),
        "base offset (49-51)": _bits(word, 49, 51),
        "absolute leading dimension (52)": _bits(word, 52, 52),
        "bits 53-60": _bits(word, 53, 60),
    }
    wrong = [name for name, value in reserved.items() if value]
    if constant != 1:
        wrong.append(f"bits 46-48 are {constant}, not 1")
    if mode not in SWIZZLE_SPANS:
        wrong.append(f"swizzle mode {mode}")
    if wrong:
        raise DescriptorError("BAD_SMEM_DESCRIPTOR", f"descriptor {word:#018x}: {', '.join(wrong)}")
    span = SWIZZLE_SPANS[mode]
    start = _bits(word, 0, 13) * 16
    room = span - (16 if mn_major else 32)  # K-major, 16 elements of K must stay in the row
    if mode and start % (8 * span) > room:
        raise DescriptorError(
            "MISALIGNED_SWIZZLE_BASE",
            f"start {start:#x} is {start % (8 * span)} bytes into the {8 * span}-byte pattern "
            f"of a {span}-byte swizzle",
        )
    return SmemDescriptor(start, _bits(word, 16, 29) * 16, _bits(word, 32, 45) * 16, span)


def encode_instruction_descriptor(descriptor: InstructionDescriptor) -> int:
    """The 32 bits of a kind::f16 instruction descriptor with float32 accumulators."""
    word = 1 << 4 | descriptor.bf16 << 7 | descriptor.bf16 << 10
    word |= descriptor.negate_a << 13 | descriptor.negate_b << 14
    word |= descriptor.a_mn_major << 15 | descriptor.b_mn_major << 16
    return word | descriptor.n // 8 << 17 | descriptor.m // 16 << 24


def decode_instruction_descriptor(word: int, cta_group: int) -> InstructionDescriptor:
    """Read a kind::f16 instruction descriptor; raises DescriptorError for what it cannot say."""
    m, n = _bits(word, 24, 28) * 16, _bits(word, 17, 22) * 8
    a_type, b_type, d_type = _bits(word, 7, 9), _bits(word, 10, 12), _bits(word, 4, 5)
    wrong = []
    for name, first, last in (
        ("sparsity", 0, 2),
        ("saturate", 3, 3),
        ("bit 6", 6, 6),
        ("bit 23", 23, 23),
        ("bit 29", 29, 29),
        ("shift of .ws", 30, 31),
    ):
        if _bits(word, first, last):
            wrong.append(name)
    if d_type != 1:
        wrong.append(f"D type {d_type} is not float32")
    if a_type != b_type or a_type > 1:
        wrong.append(f"types {a_type} and {b_type} of A and B")
    if m not in ((128, 256) if cta_group == 2 else (64, 128)):
        wrong.append(f"M = {m}")
    step = 8 * cta_group
    if not step <= n <= 256 or n % step:
        wrong.append(f"N = {n}")
    if wrong:
        raise DescriptorError(
            "BAD_INSTRUCTION_DESCRIPTOR",
            f"instruction descriptor {word:#010x}, cta_group {cta_group}: {', '.join(wrong)}",
        )
    flags = [bool(_bits(word, bit, bit)) for bit in (15, 16, 13, 14)]
    return InstructionDescriptor(m, n, bool(a_type), *flags)


def canonical_layout(descriptor: SmemDescriptor, mn_major: bool) -> tuple[tuple, tuple]:
    """((row shape, row strides), (k shape, k strides)) in elements, before the swizzle.

    The last extent of rows has no end; k is 16 = 8 x 2.
    """
    span = descriptor.swizzle // 2
    leading, stride = descriptor.leading // 2, descriptor.stride // 2
    if not mn_major:
        between = leading if descriptor.swizzle == 16 else ATOM
        return ((8, None), (span, stride)), ((ATOM, 2), (1, between))
    if descriptor.swizzle == 16:
        return ((ATOM, 1, None), (1, ATOM, stride)), ((8, 2), (ATOM, leading))
    return ((ATOM, span // ATOM, None), (1, ATOM, leading)), ((8, 2), (span, stride))


def _offset(index: int, shape: tuple, strides: tuple) -> int:
    total = 0
    for extent, stride in zip(shape, strides):
        digit = index if extent is None else index % extent
        index = 0 if extent is None else index // extent
        total += digit * stride
    return total


def swizzle_address(address: int, span: int) -> int:
    """Swizzle<b, 4, 3> with 2^b = span / 16: address bit 4 + i takes bit 7 + i, i < b."""
    for i in range((span // 16).bit_length() - 1):
        address ^= (address >> (7 + i) & 1) << (4 + i)
    return address


def element_address(descriptor: SmemDescriptor, row: int, k: int, mn_major: bool) -> int:
    """Byte address of element (row along M or N, k) of an operand; 0 <= k < 16."""
    rows, ks = canonical_layout(descriptor, mn_major)
    elements = _offset(row, *rows) + _offset(k, *ks)
    return swizzle_address(descriptor.start + 2 * elements, descriptor.swizzle)


def d_position(
    m: int, n: int, cta_group: int, row: int, column: int, lane_offset: int = 0
) -> tuple[int, int, int]:
    """(CTA rank, TMEM lane, TMEM column from the first) of element (row, column) of D.

    lane_offset: 0 or 16, the lane of D's address, which only M = 64 may have.
    """
    if cta_group == 1 and m == 64:
        return 0, row // 16 * 32 + row % 16 + lane_offset, column
    if cta_group == 1:
        return 0, row, column
    cta, row = divmod(row, m // 2)
    if m == 256:
        return cta, row, column
    half, column = divmod(column, n // 2)
    return cta, row + 64 * half, column
