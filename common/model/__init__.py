# SPDX-License-Identifier: Apache-2.0
"""The SM model: a stage's schedule as coroutines that compute real numbers and derive cycles.

It executes this project's own description of a schedule (`stages/NN/model.py`), never compiled
code. Cycles are derived from the figures in `machine.py`; nothing here is a measurement.
"""

from .barrier import BarrierFault, MBarrier, NamedBarrier
from .machine import B200, H200, MACHINES, Figure, Machine
from .run import Run, grid_run
from .sm import ENGINES, Buffer, Deadlock, Role, Sm, Span

__all__ = [
    "B200",
    "ENGINES",
    "H200",
    "MACHINES",
    "BarrierFault",
    "Buffer",
    "Deadlock",
    "Figure",
    "MBarrier",
    "Machine",
    "NamedBarrier",
    "Role",
    "Run",
    "Sm",
    "Span",
    "grid_run",
]
