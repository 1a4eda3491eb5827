# SPDX-License-Identifier: Apache-2.0
"""The SM model: a stage's schedule as coroutines that compute real numbers and derive cycles.

It executes this project's own description of a schedule (`stages/NN/model.py`), never compiled
code. Cycles are derived from the figures in `machine.py`; nothing here is a measurement.
"""

from .barrier import BarrierFault, MBarrier, ModelFault, NamedBarrier, PipelineState
from .engines import ENGINES, PARTS, Span
from .machine import B200, B300, H200, MACHINES, Figure, Machine
from .memory import Buffer, Global, Slot, Tile
from .role import Role
from .run import GradientRun, Run, gradient_run, grid_run
from .sequences import OPEN, Sequence, Sequences
from .sm import Budget, Deadlock, NoOrdering, Pair, Sm, TooManyEvents, observe
from .tmem import Tmem, TmemView

__all__ = [
    "B200",
    "B300",
    "ENGINES",
    "H200",
    "MACHINES",
    "OPEN",
    "PARTS",
    "BarrierFault",
    "Budget",
    "Buffer",
    "Deadlock",
    "Figure",
    "Global",
    "GradientRun",
    "MBarrier",
    "Machine",
    "ModelFault",
    "NamedBarrier",
    "NoOrdering",
    "Pair",
    "PipelineState",
    "Role",
    "Run",
    "Sequence",
    "Sequences",
    "Slot",
    "Sm",
    "Span",
    "Tile",
    "Tmem",
    "TmemView",
    "TooManyEvents",
    "gradient_run",
    "grid_run",
    "observe",
]
