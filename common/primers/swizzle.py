# SPDX-License-Identifier: Apache-2.0
"""Swizzled shared memory and descriptors, by common/hopper/layouts.py. Runs: host."""

from __future__ import annotations

from ..hopper.layouts import (
    InstructionDescriptor,
    SmemDescriptor,
    encode_instruction_descriptor,
    encode_smem_descriptor,
    swizzle_address,
)
from .svg import Board

SPAN = 128  # bytes of a swizzled row
ROWS = 8  # of the repeating pattern
CHUNK = 16  # bytes that stay together
BANK_BYTES, BANKS = 4, 32
SHOWN = 3  # the logical chunk that the drawing marks in every row

_SMEM = ("start / 16", "leading / 16", "stride / 16", "const", "base", "swizzle")
_SMEM_BITS = ((0, 13), (16, 29), (32, 45), (46, 48), (49, 51), (61, 63))
_INSTRUCTION = ("D", "A", "B", "T", "N / 8", "M / 16")
_INSTRUCTION_BITS = ((4, 5), (7, 9), (10, 12), (15, 16), (17, 22), (24, 28))
SMEM_FIELDS = dict(zip(_SMEM, _SMEM_BITS))  # name: first and last bit
INSTRUCTION_FIELDS = dict(zip(_INSTRUCTION, _INSTRUCTION_BITS))
K_TILE = SmemDescriptor(start=ROWS * SPAN, leading=CHUNK, stride=ROWS * SPAN, swizzle=SPAN)
QK = InstructionDescriptor(m=128, n=128, bf16=True)
PV = InstructionDescriptor(m=128, n=128, bf16=True, b_mn_major=True)


def address(row: int, chunk: int, swizzled: bool) -> int:
    """First byte of a 16-byte chunk of a row in an aligned tile, rows of SPAN bytes."""
    plain = row * SPAN + chunk * CHUNK
    return swizzle_address(plain, SPAN) if swizzled else plain


def passes(addresses: list[int]) -> int:
    """Accesses that one bank needs at least for 16-byte chunks at these addresses."""
    words = {at // BANK_BYTES + word for at in addresses for word in range(CHUNK // BANK_BYTES)}
    banks = [word % BANKS for word in words]
    return max(banks.count(bank) for bank in set(banks))


def column(chunk: int, swizzled: bool) -> list[int]:
    """Addresses of the same chunk of the 8 rows of a pattern."""
    return [address(row, chunk, swizzled) for row in range(ROWS)]


def draw_pattern() -> Board:
    """Which chunk lies where, plain and swizzled; one logical column is marked."""
    board, side = Board(206), 20
    for half, swizzled in enumerate((False, True)):
        left = 16 + 180 * half
        board.text(left, 14, "128-byte swizzle" if swizzled else "plain rows of 128 bytes")
        for row in range(ROWS):
            if not half:
                board.text(4, 36 + side * row, str(row), small=True)
            for chunk in range(SPAN // CHUNK):
                place = address(row, chunk, swizzled) - row * SPAN
                x, y = left + side * (place // CHUNK), 22 + side * row
                kind = "exp" if chunk == SHOWN else "plain"
                board.box(x, y, side, side, kind, str(chunk), small=True)
        count = passes(column(SHOWN, swizzled))
        plural = "pass" if count == 1 else "passes"
        board.text(left, 198, f"chunk {SHOWN} of all rows: {count} {plural}", small=True)
    return board


def fields(word: int, table) -> dict[str, int]:
    """The values of a descriptor's fields by name."""
    return {
        name: word >> low & ((1 << (high - low + 1)) - 1) for name, (low, high) in table.items()
    }


def _draw_fields(board: Board, y: float, word: int, table, first_bit: int) -> None:
    """32 bits from first_bit on, high bits left, each field with its name, value and bits."""
    scale, values = 11, fields(word, table)
    board.box(4, y, 32 * scale, 32, "faint")
    for name, (low, high) in table.items():
        if not first_bit <= low < first_bit + 32:
            continue
        width, x = (high - low + 1) * scale, 4 + (first_bit + 31 - high) * scale
        board.box(x, y, width, 32, "smem", f"{name}\n{values[name]}", small=True)
        board.text(x + width / 2, y + 43, f"{high}-{low}", "middle", small=True)


def draw_descriptors() -> Board:
    """The matrix descriptor of a tile of K, and the instruction descriptor of S = Q K^T."""
    board = Board(196)
    board.text(4, 12, "matrix descriptor, upper and lower 32 bits")
    word = encode_smem_descriptor(K_TILE)
    _draw_fields(board, 18, word, SMEM_FIELDS, 32)
    _draw_fields(board, 70, word, SMEM_FIELDS, 0)
    board.text(4, 136, "instruction descriptor")
    _draw_fields(board, 142, encode_instruction_descriptor(QK), INSTRUCTION_FIELDS, 0)
    return board
