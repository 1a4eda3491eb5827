# SPDX-License-Identifier: Apache-2.0
"""Tensor memory of one SM: 128 lanes x 512 columns of 32 bits, allocated in columns.

A view reads its columns as float32 (one value a column) or as packed bf16 or fp16 (two values a
column, the lower one in the low half). What was never written since it was allocated reads as NaN.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import simpy
import torch

from ..plan import TMEM_COLUMNS, Plan
from .barrier import ModelFault

LANES = 128
QUARTERS = 4  # of 32 lanes; a warp reaches the quarter of its number modulo 4
QUARTER_LANES = LANES // QUARTERS
SMALLEST_ALLOCATION = 32  # columns


class Tmem:
    """Tensor memory as an array of bits, with its allocations."""

    def __init__(self, env: simpy.Environment, plan: Plan, name: str):
        self.env, self.plan, self.name = env, plan, name
        self.bits = torch.full((LANES, TMEM_COLUMNS), -1, dtype=torch.int32)  # all ones is a NaN
        self.written = np.zeros(TMEM_COLUMNS * QUARTERS, bool)
        self.allocations: dict[str, tuple[int, int]] = {}  # agent to (first column, columns)
        self.freed = env.event()
        self.log: list[tuple[float, float, str, str, int, int]] = []
        """What touched it: start, end (cycles), "read" or "write", view, column, columns."""

    def view(self, name: str, dtype: torch.dtype = torch.float32) -> TmemView:
        """The plan's region `name`, all lanes."""
        rows = {row.name: row for row in self.plan.tmem}
        if name not in rows:
            raise ValueError(f"the plan has no tensor memory {name!r}; it has {list(rows)}")
        return TmemView(self, name, rows[name].column, rows[name].columns, dtype)

    def find(self, columns: int) -> int | None:
        """First column of a free run of `columns`, aligned to that; None when there is none."""
        if columns not in (32, 64, 128, 256, 512):
            raise ModelFault(
                f"tcgen05.alloc of {columns} columns; allowed: 32, 64, 128, 256 and 512"
            )
        for first in range(0, TMEM_COLUMNS, columns):
            taken = self.allocations.values()
            if all(first + columns <= at or at + size <= first for at, size in taken):
                return first
        return None

    def allocate(self, agent: str, first: int, columns: int) -> None:
        """Columns `first` on belong to this CTA from now on; what they hold is undefined."""
        if agent in self.allocations:
            raise ModelFault(f"{agent} allocates tensor memory twice; free the first before")
        self.allocations[agent] = (first, columns)
        self.bits[:, first : first + columns] = -1
        self.written[first * QUARTERS : (first + columns) * QUARTERS] = False

    def free(self, agent: str) -> tuple[int, int]:
        """Give the agent's columns back; returns (first column, columns)."""
        if agent not in self.allocations:
            raise ModelFault(f"{agent} frees tensor memory that it did not allocate")
        done, self.freed = self.freed, self.env.event()
        done.succeed()
        return self.allocations.pop(agent)


@dataclass(frozen=True)
class TmemView:
    """Columns of some lanes, read as `dtype` (float32, or bfloat16 and float16 in pairs)."""

    tmem: Tmem
    name: str
    column: int
    columns: int  # of 32 bits
    dtype: torch.dtype = torch.float32
    lanes: tuple[int, int] = (0, LANES)

    def part(self, first: int, columns: int) -> TmemView:
        """`columns` 32-bit columns from `first` (counted from this view's first) on."""
        if first < 0 or columns < 1 or first + columns > self.columns:
            last = first + columns - 1
            raise ValueError(f"{self.name} has {self.columns} columns; got {first} ... {last}")
        return replace(self, column=self.column + first, columns=columns)

    def packed(self, dtype: torch.dtype) -> TmemView:
        """The same columns as pairs of 16-bit values."""
        return replace(self, dtype=dtype)

    def quarter(self, number: int) -> TmemView:
        """The 32 lanes that warps of number modulo 4 reach."""
        return replace(self, lanes=(number * QUARTER_LANES, (number + 1) * QUARTER_LANES))

    def on(self, tmem: Tmem) -> TmemView:
        """The same place in another SM's tensor memory."""
        return replace(self, tmem=tmem)

    @property
    def shape(self) -> tuple[int, int]:
        """(lanes, values in a lane)."""
        return self.lanes[1] - self.lanes[0], self.columns * (4 // self.dtype.itemsize)

    @property
    def bytes(self) -> int:
        """Bytes of all lanes."""
        return (self.lanes[1] - self.lanes[0]) * self.columns * 4

    @property
    def quarters(self) -> range:
        """Lane quarters that it touches."""
        return range(self.lanes[0] // QUARTER_LANES, -(-self.lanes[1] // QUARTER_LANES))

    @property
    def memory(self) -> str:
        """Name of the memory for the ordering checker."""
        return self.tmem.name

    def starts(self, step: int) -> list[int]:
        """First 32-bit column of each `step` values of a lane."""
        return list(range(self.column, self.column + self.columns, step * self.dtype.itemsize // 4))

    @property
    def cells(self) -> tuple[tuple[int, int], ...]:
        """Intervals of cells (column * 4 + quarter), for the ordering checker."""
        if len(self.quarters) == QUARTERS:
            return ((self.column * QUARTERS, (self.column + self.columns) * QUARTERS),)
        first, last = self.quarters[0], self.quarters[-1] + 1
        columns = range(self.column, self.column + self.columns)
        return tuple((c * QUARTERS + first, c * QUARTERS + last) for c in columns)

    def _values(self) -> torch.Tensor:
        """A view of the values."""
        wide = 4 // self.dtype.itemsize
        columns = slice(self.column * wide, (self.column + self.columns) * wide)
        return self.tmem.bits.view(self.dtype)[slice(*self.lanes), columns]

    def check_allocated(self, agent: str) -> None:
        """ModelFault unless every column belongs to an allocation."""
        owned = self.tmem.allocations.values()
        stop = self.column + self.columns
        if not any(at <= self.column and stop <= at + size for at, size in owned):
            raise ModelFault(
                f"{agent} uses {self.name}, columns {self.column} ... {stop - 1} of "
                f"{self.tmem.name}, which are not allocated"
            )

    def get(self) -> torch.Tensor:
        """The values as float32, of `shape`."""
        return self._values().float()

    def put(self, values: torch.Tensor) -> None:
        """Replace the values, rounded to `dtype`."""
        self._values().copy_(values.to(self.dtype))
        for start, stop in self.cells:
            self.tmem.written[start:stop] = True

    @property
    def unwritten(self) -> bool:
        """Whether a cell of it has not been written since it was allocated."""
        return not all(self.tmem.written[a:b].all() for a, b in self.cells)
