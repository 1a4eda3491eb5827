# SPDX-License-Identifier: Apache-2.0
"""What the tests of executed logs share: the recorded ones of `data/logs`, and small made-up ones.

A recorded log is named as in `index.json`, which says of which problem and of which PTX it is.
"""

import functools
import json
import lzma
import pathlib
from dataclasses import replace

import numpy as np
import pytest
from flash_ladder import load
from flash_ladder.common import contract, device_mutation, mutation
from flash_ladder.common.compile import compile_stage
from flash_ladder.common.conformance import conform
from flash_ladder.common.grid import Place
from flash_ladder.common.hopper.engine import LOG_UNIT
from flash_ladder.common.hopper.log import NO_WORD, OTHERS, SHARED, UNITS, Event, Kind, Log, decode
from flash_ladder.common.hopper.steps import steps
from flash_ladder.common.plan import THREADS_PER_WARP

FOLDER = pathlib.Path(__file__).with_name("data") / "logs"
INDEX = json.loads((FOLDER / "index.json").read_text(encoding="utf-8"))["logs"]
NAMES = sorted(INDEX)
STAGES = sorted({row["stage"] for row in INDEX.values()})
SMEM = 1024  # first byte of dynamic shared memory in made-up logs, as in real ones
ALL = 0xFFFFFFFF  # lanes


# ---- recorded ------------------------------------------------------------------------------


def names_of(stage: int) -> list[str]:
    """The recorded logs of a stage."""
    return [name for name in NAMES if INDEX[name]["stage"] == stage]


@functools.lru_cache
def data_of(name: str) -> bytes:
    """A recorded log as the GPU wrote it."""
    return lzma.decompress((FOLDER / f"{name}.log.xz").read_bytes())


@functools.lru_cache
def log_of(name: str) -> Log:
    """A recorded log."""
    return decode(data_of(name))


def plan_of(name: str):
    """The plan of the kernel that wrote it."""
    return load(INDEX[name]["stage"]).config.plan(INDEX[name]["head_dim"])


def place_of(name: str) -> Place:
    """The place of the CTA that wrote it."""
    config = load(INDEX[name]["stage"]).config
    return Place(*INDEX[name]["place"], config.Q_TILES * config.TILE_M)


def cta_of(name: str) -> int:
    """Index of that CTA in its grid."""
    row, (m_block, head, batch) = INDEX[name], INDEX[name]["place"]
    config = load(row["stage"]).config
    blocks = -(-row["seqlen_q"] // (config.Q_TILES * config.TILE_M))
    return m_block + blocks * (head + row["heads"] * batch)


@functools.lru_cache
def notes_of(name: str):
    """What the model's roles did as that CTA."""
    row = INDEX[name]
    sizes = (row[key] for key in ("head_dim", "seqlen_q", "seqlen_k", "batch", "heads"))
    problem = contract.Case(row["generator"], row["dtype"], *sizes).problem("cpu")
    run = load(row["stage"]).simulate(
        problem.q,
        problem.k,
        problem.v,
        softmax_scale=problem.softmax_scale,
        max_ctas=cta_of(name) + 1,
    )
    return run.notes[cta_of(name)]


def ptx_of(stage: int) -> str:
    """Today's PTX of the kernel that the logs are of; skips where nothing can be compiled."""
    reason = contract.compile_skip_reason()
    if reason:
        pytest.skip(reason)
    row = INDEX[names_of(stage)[0]]
    kernel = {"dtype": row["dtype"], "head_dim": row["head_dim"]}
    return compile_stage(load(stage), arch="sm_100a", **kernel).ptx


def without_line(log: Log, line: int) -> Log:
    """The log of a run that left a statement out and went on in the same order."""
    return replace(log, events=tuple(event for event in log.events if event.line != line))


def named_sites(stage: int) -> list[device_mutation.Site]:
    """What `device_mutation.named_sites` finds, from the recorded logs instead of a GPU's."""
    model = mutation.sites_of(mutation.stage_subject(load(stage)))
    reached: dict[int, dict[str, None]] = {}
    twins: dict[int, set] = {}
    for name in names_of(stage):
        log, plan = log_of(name), plan_of(name)
        for step in steps(log, plan):
            if step.verb != "bar.wait":
                reached.setdefault(step.line, {})[device_mutation.site_name(step)] = None
        for line, places in conform(log, notes_of(name), plan, place_of(name)).lines.items():
            twins.setdefault(line, set()).update(places)
    return [
        replace(
            site,
            name=", ".join(reached.get(site.line, ())),
            twins=tuple(
                row for row in model if device_mutation._is_twin(row, twins.get(site.line, ()))
            ),
        )
        for site in device_mutation.sites(ptx_of(stage))
    ]


# ---- made up -------------------------------------------------------------------------------


def event(kind: Kind, *words: int, warp=0, lanes=ALL, flags=0, rank=0, line=0, cells=()) -> Event:
    """A record; words that are left out are 0."""
    size = 1 if kind in SHARED else UNITS.get(kind, OTHERS) * 4 - 3
    padded = (*words, *[0] * (size - len(words)))
    return Event(kind, flags, warp, rank, line, lanes, padded, tuple(cells))


def made(*events, ctas: int = 1, threads: int = 64) -> Log:
    """A log of events, or lists of them; one without a line gets its place in the log as its."""
    flat: list[Event] = []
    for part in events:
        flat += part if isinstance(part, list) else [part]
    numbered = [replace(row, line=row.line or at) for at, row in enumerate(flat, 1)]
    return Log(tuple(numbered), SMEM, threads, ctas, 0, 0)


def encode(events, smem: int = SMEM, threads: int = 64, ctas: int = 1, cta: int = 0) -> bytes:
    """What the engine writes for events; each cell of one in shared memory is a lane's."""
    units = [unit for row in events for unit in _units(row)]
    header = [[len(units), smem, threads, ctas], [cta, 0, 0, 0], [0] * 4, [0] * 4]
    data = np.array([*header, *units], dtype="<u4").tobytes()
    assert len(data) == (len(units) + 4) * LOG_UNIT
    return data


def _units(row: Event) -> list[list[int]]:
    what = row.kind | row.flags << 8 | row.warp << 16 | row.rank << 24
    words = [what, row.line, row.lanes, *row.words]
    if row.kind in SHARED:
        lanes = [*row.cells, *[NO_WORD] * (THREADS_PER_WARP - len(row.cells))]
        words += np.array(lanes, dtype="<u2").view("<u4").tolist()
    return [words[at : at + 4] for at in range(0, len(words), 4)]
