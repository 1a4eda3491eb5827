# SPDX-License-Identifier: Apache-2.0
"""Shared memory as bytes that buffers are views of, and named tensors in global memory.

A buffer lies in memory as TMA's 128-byte swizzle puts it: blocks of 128 bytes of each row, one
block after the other, rows next to each other (the swizzle inside a block is left out: it moves
bytes only within 1024). What was never written reads as NaN and is reported.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, replace

import numpy as np
import torch

from ..plan import Plan
from .barrier import ModelFault

CELL = 4  # bytes of shared memory that the ordering checker takes as one cell
BLOCK = 128  # bytes of a row that lie together
Intervals = tuple[tuple[int, int], ...]


class Smem:
    """The shared memory of one CTA: real bytes, placed as the plan says, NaN until written."""

    def __init__(self, plan: Plan, name: str):
        self.plan, self.name = plan, name
        size = math.ceil(plan.smem_bytes / CELL) * CELL
        self.bytes = torch.full((size,), 0xFF, dtype=torch.uint8)  # NaN in every float format
        self.written = np.zeros(size // CELL, bool)
        self.buffers: dict[str, Buffer] = {}

    def buffer(
        self, name: str, shape: tuple[int, ...], dtype: torch.dtype, swizzled: bool = True
    ) -> Buffer:
        """The plan's buffer `name` as slots of `shape` (rows, columns) or (length,).

        swizzled: in blocks of 128 bytes of each row, where a row is a multiple of that; else row
        by row.
        """
        rows = {row.name: row for row in self.plan.smem}
        if name not in rows:
            raise ValueError(f"the plan has no shared-memory buffer {name!r}; it has {list(rows)}")
        row = rows[name]
        buffer = Buffer(self, name, tuple(shape), dtype, row.stages, row.slot_bytes, swizzled)
        if buffer.bytes > buffer.slot_bytes:
            raise ValueError(
                f"{name}: {tuple(shape)} of {dtype} are {buffer.bytes} B, but the plan gives a "
                f"slot {buffer.slot_bytes} B"
            )
        self.buffers[name] = buffer
        return buffer


@dataclass(frozen=True)
class Buffer:
    """A buffer of the plan: `buffer[slot]` is one of its `stages` slots."""

    smem: Smem
    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    stages: int
    slot_bytes: int
    swizzled: bool = True

    @property
    def bytes(self) -> int:
        """Bytes that a slot holds (the plan may give it more)."""
        return math.prod(self.shape) * self.dtype.itemsize

    def __getitem__(self, index: int) -> Slot:
        if not 0 <= index < self.stages:
            raise IndexError(f"{self.name} has {self.stages} slots; got {index}")
        rows, columns = (1, *self.shape)[-2:]
        return Slot(self, index, (0, rows), (0, columns))


@dataclass(frozen=True)
class Slot:
    """A slot of a buffer or, after `part`, a rectangle of it; `T` transposes what is read."""

    buffer: Buffer
    index: int
    rows: tuple[int, int]
    columns: tuple[int, int]
    transposed: bool = False

    @property
    def name(self) -> str:
        """Name for messages: the buffer's, with the slot where there are several."""
        return f"{self.buffer.name}[{self.index}]" if self.buffer.stages > 1 else self.buffer.name

    @property
    def T(self) -> Slot:
        """The same bytes read as the transposed matrix (the MMA's transpose bit)."""
        return replace(self, transposed=not self.transposed)

    def part(self, rows: slice = slice(None), columns: slice = slice(None)) -> Slot:
        """Rows and columns (of the matrix as stored) of this slot."""
        first, last = self.rows, self.columns
        rows_of = rows.indices(first[1] - first[0])
        columns_of = columns.indices(last[1] - last[0])
        return replace(
            self,
            rows=(first[0] + rows_of[0], first[0] + rows_of[1]),
            columns=(last[0] + columns_of[0], last[0] + columns_of[1]),
        )

    def on(self, smem: Smem) -> Slot:
        """The same place in another CTA's shared memory."""
        return replace(self, buffer=replace(self.buffer, smem=smem))

    @property
    def shape(self) -> tuple[int, int]:
        """(rows, columns) as read: swapped when transposed."""
        shape = (self.rows[1] - self.rows[0], self.columns[1] - self.columns[0])
        return shape[::-1] if self.transposed else shape

    @property
    def bytes(self) -> int:
        """Bytes of the rectangle."""
        return math.prod(self.shape) * self.buffer.dtype.itemsize

    @property
    def start(self) -> int:
        """First byte of the slot in the CTA's shared memory."""
        offset = self.buffer.smem.plan.smem_offsets[self.buffer.name]
        return offset + self.index * self.buffer.slot_bytes

    @property
    def first(self) -> int:
        """First byte of the rectangle."""
        return self.cells[0][0] * CELL

    @property
    def _block(self) -> int:
        """Bytes of a row that lie together: 128, or the row where that is no multiple."""
        row = self.buffer.shape[-1] * self.buffer.dtype.itemsize
        return BLOCK if row % BLOCK == 0 and self.buffer.swizzled else row

    @property
    def memory(self) -> str:
        """Name of the memory for the ordering checker."""
        return self.buffer.smem.name

    @property
    def block_columns(self) -> tuple[int, ...]:
        """First column of each block of the rows as stored, which is what one TMA box brings."""
        wide = self._block // self.buffer.dtype.itemsize
        return tuple(range(self.columns[0], self.columns[1], wide))

    def starts(self, step: int) -> list[int]:
        """First byte of each `step` columns as read, of the first row: what descriptors point to.

        A slot as stored has them along its rows, in blocks; a transposed one has a row for each.
        """
        item, block, all_rows = self.buffer.dtype.itemsize, self._block, (1, *self.buffer.shape)[-2]
        if self.transposed:
            rows = range(self.rows[0], self.rows[1], step)
            return [self.start + row * block for row in rows]
        columns = range(self.columns[0] * item, self.columns[1] * item, step * item)
        return [self.start + at // block * block * all_rows + at % block for at in columns]

    @property
    def cells(self) -> Intervals:
        """Intervals of cells, for the ordering checker."""
        item, block, all_rows = self.buffer.dtype.itemsize, self._block, (1, *self.buffer.shape)[-2]
        first, last = self.columns[0] * item, self.columns[1] * item
        found = []
        for number in range(first // block, -(-last // block)):
            left, right = max(first - number * block, 0), min(last - number * block, block)
            base = self.start + number * block * all_rows
            if (left, right) == (0, block):
                found.append((base + self.rows[0] * block, base + self.rows[1] * block))
            else:
                rows = range(self.rows[0], self.rows[1])
                found += [(base + row * block + left, base + row * block + right) for row in rows]
        return _joined((start // CELL, -(-stop // CELL)) for start, stop in found)

    def _matrix(self) -> torch.Tensor:
        """The whole slot as a strided view (rows, blocks, elements of a block)."""
        buffer = self.buffer
        flat = buffer.smem.bytes[self.start : self.start + buffer.bytes].view(buffer.dtype)
        wide = self._block // buffer.dtype.itemsize
        return flat.view(buffer.shape[-1] // wide, -1, wide).permute(1, 0, 2)

    def get(self) -> torch.Tensor:
        """The values as float32, of `shape`; what was never written is NaN."""
        whole = self._matrix().reshape(-1, self.buffer.shape[-1])
        values = whole[slice(*self.rows), slice(*self.columns)].float()
        return values.T if self.transposed else values

    def put(self, values: torch.Tensor) -> None:
        """Replace the values, rounded to the buffer's dtype."""
        values = values.reshape(self.shape)
        if self.transposed:
            values = values.T
        view = self._matrix()
        whole = view.reshape(-1, self.buffer.shape[-1]).clone()
        whole[slice(*self.rows), slice(*self.columns)] = values.to(self.buffer.dtype)
        view.copy_(whole.view(view.shape))
        for start, stop in self.cells:
            self.buffer.smem.written[start:stop] = True

    @property
    def unwritten(self) -> bool:
        """Whether a cell of it has never been written."""
        return not all(self.buffer.smem.written[a:b].all() for a, b in self.cells)


def _joined(intervals: Iterable[tuple[int, int]]) -> Intervals:
    """Ascending intervals, those that touch made one."""
    joined: list[tuple[int, int]] = []
    for start, stop in intervals:
        if joined and start <= joined[-1][1]:
            start = joined.pop()[0]
        joined.append((start, stop))
    return tuple(joined)


class Global:
    """A named tensor (rows, columns) or (length,) in global memory."""

    def __init__(self, name: str, tensor: torch.Tensor):
        self.name, self.tensor = name, tensor

    def tile(self, rows: slice = slice(None), columns: slice = slice(None)) -> Tile:
        """A rectangle of it."""
        height, width = (1, *self.tensor.shape)[-2:]
        return Tile(self, rows.indices(height)[:2], columns.indices(width)[:2])


@dataclass(frozen=True)
class Tile:
    """A rectangle of a global tensor."""

    source: Global
    rows: tuple[int, int]
    columns: tuple[int, int]

    @property
    def name(self) -> str:
        """Name of the memory for the ordering checker."""
        return f"global:{self.source.name}"

    @property
    def values(self) -> torch.Tensor:
        """A view of the elements."""
        width = self.source.tensor.shape[-1]
        return self.source.tensor.view(-1, width)[slice(*self.rows), slice(*self.columns)]

    @property
    def cells(self) -> Intervals:
        """Intervals of elements, row-major."""
        width = self.source.tensor.shape[-1]
        if self.columns == (0, width):
            return ((self.rows[0] * width, self.rows[1] * width),)
        starts = range(self.rows[0] * width, self.rows[1] * width, width)
        return tuple((row + self.columns[0], row + self.columns[1]) for row in starts)


def as_tile(target: Tile | Global | torch.Tensor) -> Tile:
    """What a copy verb was given as a tile; a bare tensor is a global of its own."""
    if isinstance(target, Tile):
        return target
    if isinstance(target, torch.Tensor):
        if not target.is_contiguous():
            raise ModelFault("copies take contiguous tensors; use Global(...).tile(...)")
        target = Global(f"tensor at {target.data_ptr():#x}", target)
    return target.tile()
