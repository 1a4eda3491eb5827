# SPDX-License-Identifier: Apache-2.0
"""The SM and its ceilings, from the machines' figures and the roofline formulas. Runs: host.

docs/js/ceilings.js computes what common/roofline.py does; tests/test_primers.py compares them.
"""

from __future__ import annotations

from ..model.machine import B200, H200, MACHINES
from ..plan import MAX_SMEM_BYTES, REGISTERS_PER_SM
from ..roofline import DSMEM_PASSES, HEAD_DIMS, MULTIPLE, PIECE, RESOURCES, backward, forward
from .svg import Board

FIGURES = ("clock", "sms", "tensor", "smem", "mufu")  # what the formulas take of a machine
SLIDERS = {"tensor": (2048, 16384, 1024), "smem": (64, 256, 32), "mufu": (4, 64, 4)}
MAX_TILE = 512  # of the tile's sliders
RATES = (  # figure, label, kind of its bars
    ("tensor", "tensor core, FLOP", "mma"),
    ("mufu", "exponentials", "exp"),
    ("smem", "shared memory, bytes", "smem"),
    ("fma", "float32 FMA", "plain"),
)


def machines() -> dict[str, dict[str, float]]:
    """Figures of the machines that the formulas fit: those with tensor memory."""
    return {
        name: {key: machine[key] for key in FIGURES}
        for name, machine in MACHINES.items()
        if "tmem" in machine.figures
    }


def settings() -> dict:
    """What the sliders start from."""
    return {
        "machines": machines(),
        "sliders": SLIDERS,
        "piece": PIECE,
        "multiple": MULTIPLE,
        "maxTile": MAX_TILE,
        "maxHeadDim": HEAD_DIMS[-1],
        "passes": DSMEM_PASSES,
    }


HEADINGS = ("resource", "cycles a tile", "TFLOP/s, all SMs")


def rows() -> list[list[str]]:
    """The three ceilings of the paper's first tile, as text."""
    row = forward()
    return [
        [name, f"{row.cycles[key]:.0f}", f"{row.ceilings[key]:.0f}"]
        for key, name in RESOURCES.items()
    ]


def more() -> list[tuple]:
    """A table for readers without scripts: a tile of each kernel on each machine."""
    kernels = {
        f"{name}{', pair' * pair}": (formula, pair)
        for name, formula in (("forward", forward), ("backward", backward))
        for pair in (False, True)
    }
    found = [
        (name, machine, formula(pair=pair, machine=MACHINES[machine]))
        for name, (formula, pair) in kernels.items()
        for machine in machines()
    ]
    rows = [
        [
            f"{name}, {machine}",
            *(f"{row.cycles[key]:.0f}" for key in RESOURCES),
            f"{row.tflops:.0f}",
        ]
        for name, machine, row in found
    ]
    headings = ("kernel, machine", *RESOURCES.values(), "TFLOP/s at most")
    speeds = ", ".join(
        f"{name} of {figures['sms']:g} SMs at {figures['clock'] / 1e9:g} GHz"
        for name, figures in machines().items()
    )
    caption = f"cycles of one CTA for a tile of {PIECE} × {PIECE}, head dim 128; {speeds}"
    return [(caption, headings, rows)]


def draw_sm() -> Board:
    """One SM: four sub-partitions, and what they share."""
    board = Board(262)
    board.box(2, 2, 356, 258)
    board.text(10, 18, "one SM of a B200, rates a cycle")
    registers = REGISTERS_PER_SM * 4 // 4 // 1024
    for part in range(4):
        x = 10 + 86 * part
        board.box(x, 26, 82, 118)
        board.text(x + 41, 39, "sub-partition", "middle", small=True)
        issue = f"{B200['issue'] / 4:g} instruction"
        board.box(x + 4, 44, 74, 18, "plain", issue, small=True)
        board.box(x + 4, 64, 74, 18, "plain", f"FMA: {B200['fma'] / 4:g} lanes", small=True)
        board.box(x + 4, 84, 74, 18, "exp", f"MUFU: {B200['mufu'] / 4:g}", small=True)
        board.box(x + 4, 104, 74, 34, "plain", f"registers\n{registers} KiB", small=True)
    board.box(10, 150, 340, 26, "mma", f"tensor core: {B200['tensor']:g} FLOP")
    board.box(10, 182, 340, 26, "tmem", "tensor memory: 128 lanes × 512 columns, 256 KiB")
    shared = f"shared memory: {MAX_SMEM_BYTES // 1024} KiB, {B200['smem']:g} bytes"
    board.box(10, 214, 218, 26, "smem", shared)
    board.box(234, 214, 116, 26, "plain", "copy engine (TMA)")
    board.text(10, 254, "a path of its own leads to L2 and memory", small=True)
    return board


def draw_growth() -> Board:
    """Rates of an SM, Hopper's beside Blackwell's."""
    board = Board(146)
    board.text(4, 14, "rates of an SM a cycle")
    for column, machine in enumerate((H200, *_blackwells())):
        board.text(130 + 80 * column, 14, machine.name)
    for number, (key, name, kind) in enumerate(RATES):
        y = 24 + 30 * number
        board.text(4, y + 14, name)
        for column, machine in enumerate((H200, *_blackwells())):
            x = 130 + 80 * column
            ratio = machine[key] / H200[key]
            board.box(x, y, 34 * ratio, 20, kind)
            board.text(x + 4, y + 14, f"{machine[key]:g}", small=True)
    return board


def _blackwells() -> list:
    return [MACHINES[name] for name in machines()]
