# SPDX-License-Identifier: Apache-2.0
"""A ring of slots between LOAD, the copy engine and MMA, on the SM model's mbarriers. Runs: host.

docs/js/mbarrier.js does the same in the browser; tests/test_primers.py compares the two.
"""

from __future__ import annotations

import simpy

from ..model.barrier import BarrierFault, MBarrier, PipelineState
from .svg import Board

SLOTS = 2
TILE_BYTES = 128 * 128 * 2
PARTS = 2  # in which the copy engine delivers a tile
ROLES = ("LOAD", "copy engine", "MMA")
BUGS = {  # name: what a reader is told
    "no bug": "",
    "LOAD starts with parity 0": "LOAD waits for a phase of empty that nobody will end",
    "MMA does not arrive at empty": "LOAD stops after one turn of the ring",
    "LOAD does not wait for empty": "a tile can be overwritten before it is read",
    "LOAD expects half of the bytes": "full opens when half of the tile is there",
}


class Ring:
    """State of a ring and of the three who use it; `act` lets one of them take a step.

    LOAD takes two steps a tile (wait for empty; arrive at full, expect the bytes, issue the copy),
    the copy engine one for each part, MMA two (wait for full; read the slot, arrive at empty).
    """

    def __init__(self, bug: str = "no bug", slots: int = SLOTS):
        if bug not in BUGS:
            raise ValueError(f"bug {bug!r} is unknown; allowed: {', '.join(BUGS)}")
        env = simpy.Environment()
        self.bug, self.slots = bug, slots
        self.full = [MBarrier(env, f"full[{slot}]", 1) for slot in range(slots)]
        self.empty = [MBarrier(env, f"empty[{slot}]", 1) for slot in range(slots)]
        start = 0 if bug == "LOAD starts with parity 0" else 1
        self.load, self.mma = PipelineState(slots, start), PipelineState(slots, 0)
        self.waited = {"LOAD": False, "MMA": False}  # whether its wait has been passed
        self.copies: list[list[int]] = []  # [slot, parts to come], oldest first
        self.parts = [0] * slots  # parts of the newest tile that a slot holds
        self.unread = [False] * slots
        self.hazard, self.broken = "", False

    def act(self, role: str) -> str:
        """One step of `role`: "done", "blocked" or "fault", after which nothing goes on."""
        steps = {"LOAD": self._load, "copy engine": self._copy, "MMA": self._mma}
        try:
            if not self.broken:
                return "done" if steps[role]() else "blocked"
        except BarrierFault:
            self.broken = True
        return "fault"

    def _load(self) -> bool:
        slot = self.load.slot
        if not self.waited["LOAD"]:
            blind = self.bug == "LOAD does not wait for empty"
            self.waited["LOAD"] = blind or self.empty[slot].passes(self.load.parity)
            return self.waited["LOAD"]
        half = self.bug == "LOAD expects half of the bytes"
        self.full[slot].expect_tx(TILE_BYTES // (2 if half else 1))
        self.full[slot].arrive()
        if self.unread[slot]:
            self.hazard = "overwritten"
        self.parts[slot], self.unread[slot] = 0, True
        self.copies.append([slot, PARTS])
        self.load.advance()
        self.waited["LOAD"] = False
        return True

    def _copy(self) -> bool:
        if not self.copies:
            return False
        slot = self.copies[0][0]
        self.copies[0][1] -= 1
        if not self.copies[0][1]:
            self.copies.pop(0)
        self.parts[slot] += 1
        self.full[slot].complete_tx(TILE_BYTES // PARTS)
        return True

    def _mma(self) -> bool:
        slot = self.mma.slot
        if not self.waited["MMA"]:
            self.waited["MMA"] = self.full[slot].passes(self.mma.parity)
            return self.waited["MMA"]
        if self.parts[slot] < PARTS:
            self.hazard = "incomplete"
        self.unread[slot] = False
        if self.bug != "MMA does not arrive at empty":
            self.empty[slot].arrive()
        self.mma.advance()
        self.waited["MMA"] = False
        return True

    @property
    def barriers(self) -> list[MBarrier]:
        """All barriers, full before empty."""
        return [*self.full, *self.empty]


def settings() -> dict:
    """What the ring starts from."""
    return {"slots": SLOTS, "bytes": TILE_BYTES, "parts": PARTS, "bugs": BUGS, "roles": ROLES}


HEADINGS = ("barrier", "phase", "arrivals to come", "bytes to come", "parity 0", "parity 1")


def rows() -> list[list[str]]:
    """The barriers of a fresh ring, as text."""
    return [
        [
            barrier.name,
            *(str(x) for x in (barrier.phase, barrier.pending, barrier.tx_bytes)),
            *("passes" if barrier.passes(parity) else "waits" for parity in (0, 1)),
        ]
        for barrier in Ring().barriers
    ]


def in_turn(count: int, bug: str = "no bug", slots: int = SLOTS):
    """Yields (role, ring after its step) for at most `count` steps, until nobody can take one.

    MMA steps if it can, else the copy engine, else LOAD; a step that is blocked changes nothing.
    """
    ring = Ring(bug, slots)
    for _ in range(count):
        role = next((role for role in reversed(ROLES) if ring.act(role) != "blocked"), None)
        if role is None:
            return
        yield role, ring


def more() -> list[tuple]:
    """Tables for readers without scripts: two tiles in turn, and what each bug does."""
    steps = [
        [role, *(f"{b.phase}, {b.pending}, {b.tx_bytes}" for b in ring.barriers)]
        for role, ring in in_turn(_SHOWN)
    ]
    names = [barrier.name for barrier in Ring().barriers]
    caption = "two tiles, step by step: phase, arrivals and bytes to come"
    bugs = [[bug, told] for bug, told in BUGS.items() if told]
    return [
        (caption, ("step of", *names), steps),
        ("what a bug does", ("bug", "what happens"), bugs),
    ]


STEP = 24  # width of a step in the drawing
_SHOWN = 12  # steps, which two tiles take
_LABELS = {"LOAD": ("wait", "arr."), "copy engine": ("½", "½"), "MMA": ("wait", "arr.")}


def draw() -> Board:
    """Two tiles through a ring of one slot: who acts, and the phases of full and empty."""
    board, phases = Board(176), []
    for number, (role, ring) in enumerate(in_turn(_SHOWN, slots=1)):
        y = 8 + 30 * ROLES.index(role)
        label = _LABELS[role][number % 2]
        board.box(68 + STEP * number, y, STEP, 22, "exp" if label == "wait" else "mma", label, True)
        phases.append((ring.full[0].phase, ring.empty[0].phase))
    for number, role in enumerate(ROLES):
        board.text(4, 23 + 30 * number, role)
    for row, name in enumerate(("full", "empty")):
        y = 104 + 36 * row
        board.text(4, y + 15, name)
        _strip(board, y, [phase[row] for phase in phases])
    return board


def _strip(board: Board, y: float, after: list[int]) -> None:
    """The phases of a barrier over the steps; after: the phase behind each step."""
    before = [0, *after[:-1]]
    for phase in sorted(set(before)):
        first, size = before.index(phase), before.count(phase)
        label = f"phase {phase}" if size > 2 else str(phase)
        kind = "smem" if phase % 2 else "plain"
        board.box(68 + STEP * first, y, STEP * size, 24, kind, label, small=True)
