# SPDX-License-Identifier: Apache-2.0
"""What the tests of executed logs share: the recorded ones of `data/logs`, and small made-up ones.

A recorded log is named as in `index.json`, which says of which problem and of which PTX it is.
Where today's PTX is another, with the same protocol, the executed one lies beside the logs.
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
from flash_ladder.common.grid import Place, cluster_size, grid
from flash_ladder.common.hopper.engine import LOG_UNIT
from flash_ladder.common.hopper.log import NO_WORD, OTHERS, SHARED, UNITS, Event, Kind, Log, decode
from flash_ladder.common.hopper.steps import steps
from flash_ladder.common.inputs import Problem
from flash_ladder.common.plan import THREADS_PER_WARP, Plan
from flash_ladder.common.ptx import ptx_hash
from flash_ladder.common.stage import KernelSource

FOLDER = pathlib.Path(__file__).with_name("data") / "logs"
INDEX = json.loads((FOLDER / "index.json").read_text(encoding="utf-8"))["logs"]
NAMES = sorted(INDEX)
HEAD_DIM = 128  # of the logs that reach every statement of a kernel
SMEM = 1024  # first byte of dynamic shared memory in made-up logs, as in real ones
ALL = 0xFFFFFFFF  # lanes


# ---- recorded ------------------------------------------------------------------------------


def source_of(name: str) -> KernelSource:
    """The stage or part whose kernel wrote a log."""
    return load(INDEX[name]["stage"]).part(INDEX[name]["part"])


KERNELS = {source_of(name).tag: source_of(name) for name in NAMES}  # "06", "07/backward_1cta"
CODES = [tag for tag in KERNELS if tag != "07"]  # without twice the same: its forward is that of 06


def names_of(tag: str) -> list[str]:
    """The recorded logs of a kernel at HEAD_DIM, the small one first."""
    mine = [name for name in NAMES if source_of(name).tag == tag]
    mine = [name for name in mine if INDEX[name]["head_dim"] == HEAD_DIM]
    return sorted(mine, key=lambda name: len(log_of(name).events))


@functools.lru_cache
def data_of(name: str) -> bytes:
    """A recorded log as the GPU wrote it."""
    return lzma.decompress((FOLDER / f"{name}.log.xz").read_bytes())


@functools.lru_cache
def log_of(name: str) -> Log:
    """A recorded log."""
    return decode(data_of(name))


def plan_of(name: str) -> Plan:
    """The plan of the kernel that wrote it."""
    return source_of(name).config.plan(INDEX[name]["head_dim"])


@functools.lru_cache
def problem_of(name: str) -> Problem:
    """The problem that was executed."""
    row = INDEX[name]
    sizes = (row[key] for key in ("head_dim", "seqlen_q", "seqlen_k", "batch", "heads"))
    recipes = {key: row[key] for key in ("mask", "lengths") if key in row}
    return contract.Case(row["generator"], row["dtype"], *sizes, **recipes).problem("cpu")


def place_of(name: str) -> Place:
    """The place of the CTA, or pair, that wrote it."""
    return grid(source_of(name), problem_of(name)).place(cta_of(name))


def cta_of(name: str) -> int:
    """Index of that CTA, or of the first of the pair, in its grid."""
    block, head, batch = INDEX[name]["place"]
    shape = grid(source_of(name), problem_of(name))
    return shape.cluster * (block + shape.blocks * (head + shape.heads * batch))


@functools.lru_cache
def notes_of(name: str):
    """What the model's roles did as that CTA, or pair."""
    source = source_of(name)
    cluster = cta_of(name) // cluster_size(source)
    return source.simulate_problem(problem_of(name), max_ctas=cluster + 1).notes[cluster]


def ptx_of(tag: str, head_dim: int = HEAD_DIM) -> str:
    """The PTX that the logs of a kernel were recorded from; skips where nothing can be compiled."""
    todays = todays_ptx_of(tag, head_dim)
    rows = (INDEX[name] for name in NAMES if source_of(name).tag == tag)
    digest = next(row["ptx_sha256"] for row in rows if row["head_dim"] == head_dim)
    if ptx_hash(todays) == digest:
        return todays
    executed = FOLDER / f"{digest[:16]}.ptx.xz"
    assert executed.is_file(), f"neither today's code nor {executed.name} is what {tag} ran as"
    return lzma.decompress(executed.read_bytes()).decode()


def todays_ptx_of(tag: str, head_dim: int = HEAD_DIM) -> str:
    """Today's PTX of the kernel that the logs are of; skips where nothing can be compiled."""
    reason = contract.compile_skip_reason()
    if reason:
        pytest.skip(reason)
    kernel = {"dtype": INDEX[names_of(tag)[0]]["dtype"], "head_dim": head_dim}
    return compile_stage(KERNELS[tag], arch="sm_100a", **kernel).ptx


def without_line(log: Log, line: int) -> Log:
    """The log of a run that left a statement out and went on in the same order."""
    return replace(log, events=tuple(event for event in log.events if event.line != line))


@functools.lru_cache
def named_sites(tag: str) -> list[device_mutation.Site]:
    """What `device_mutation.named_sites` finds, from the recorded logs instead of a GPU's."""
    model = mutation.sites_of(mutation.stage_subject(KERNELS[tag], HEAD_DIM))
    reached: dict[int, dict[str, None]] = {}
    twins: dict[int, set] = {}
    for name in names_of(tag):
        log, plan = log_of(name), plan_of(name)
        for step in steps(log, plan):
            if step.verb not in ("bar.wait", "cluster.wait"):
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
        for site in device_mutation.sites(ptx_of(tag))
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
