# SPDX-License-Identifier: Apache-2.0
"""Mutation of a stage's model: delete each synchronisation in turn; does anything notice?

    report = mutate(stage_subject(load(4)))
    assert not report.unexplained

A site is a call of a verb that only orders (wait, sync, arrive, expect_tx, commit, bulk_wait,
wait_ld, wait_st, fences), by role, verb, barrier and source line; deleting it leaves out all its
executions, in every slot and in both CTAs of a pair. A deletion is caught by a deadlock, a fault, a
race, a read of what was never written, a leak or numbers that differ in any bit. What survives is
redundant, and the stage has to say why: `REDUNDANT` in its model.py. Runs: host.
"""

from __future__ import annotations

import hashlib
import math
import os
import re
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from pathlib import Path
from textwrap import shorten

import torch

from . import inputs
from .grid import cta_tiles
from .model import B200, BarrierFault, Budget, Deadlock, Machine, ModelFault, TooManyEvents, observe
from .ordering import Ordering, OrderingError
from .stage import KernelSource

# What may catch a deletion, in the order in which one of them is named.
CATCHES = (
    "deadlock",
    "barrier fault",
    "model fault",
    "endless",
    "race",
    "unwritten",
    "leak",
    "numbers",
)
FAULTS = {
    Deadlock: "deadlock",
    BarrierFault: "barrier fault",
    ModelFault: "model fault",
    OrderingError: "model fault",
    TooManyEvents: "endless",
}
FAST_SHARE = 3  # fast mode tries one site of so many
WRAPS = 2  # times that every ring of slots begins anew
SLOW_PORT = {"smem": 16.0}  # bytes a cycle of shared memory, an eighth: statistics come late
EVENTS = 10_000_000  # of a model as it should be
SLACK = 4  # a mutant may take so many times the events of the model as it should be
SHORT = 90  # characters of a short detail
_STUCK = re.compile(r"(\S+) waits for (.+?) (?:\(|at )")
_MODEL = f"{Path(__file__).with_name('model')}{os.sep}"

Problem = Callable[[], tuple[Sequence[torch.Tensor], Sequence[str]]]


class Unsound(RuntimeError):
    """The model fails, or races, before anything is deleted."""


@dataclass(frozen=True)
class Subject:
    """What is mutated.

    problems: by name, functions that build and run the model from scratch and give its outputs and
    findings; redundant: why a site may be deleted, by its name: "role verb barrier" (or "role
    verb"), that and " in function", or where a function has several also " #2". `*` and `?` match
    as in file names. A name must mean survivors only.
    """

    name: str
    problems: Mapping[str, Problem]
    redundant: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Site:
    """A call of a verb that only orders; `barrier` without its slot, "" where there is none.

    number: which of its like (role, verb, barrier) it is in its function, from 1 on.
    """

    role: str
    verb: str
    barrier: str
    line: str
    function: str
    number: int = 1

    def __str__(self) -> str:
        return f"{self.role} {self.verb} {self.barrier}".rstrip()

    @property
    def names(self) -> tuple[str, str, str]:
        """What `Subject.redundant` may call it, the last without ambiguity."""
        place = f"{self} in {self.function}"
        return str(self), place, f"{place} #{self.number}"

    @property
    def identity(self) -> tuple[str, str, str, str]:
        """What makes it the one that it is."""
        return self.role, self.verb, self.barrier, self.line


@dataclass(frozen=True)
class Verdict:
    """What came of deleting `site`.

    kinds: all of `CATCHES` that apply, empty when it survived; short: the first of them in a few
    words, detail: in full; problem: in which it showed; reason: why the deletion is no fault.
    """

    site: Site
    kinds: tuple[str, ...] = ()
    short: str = ""
    detail: str = ""
    problem: str = ""
    reason: str = ""

    @property
    def caught(self) -> bool:
        """Whether anything noticed."""
        return bool(self.kinds)

    @property
    def label(self) -> str:
        """The verdict in a word or two."""
        return self.kinds[0] if self.caught else "redundant" if self.reason else "SURVIVED"


@dataclass(frozen=True)
class Report:
    """All verdicts on a subject; total: its sites, of which fast mode tries some.

    wrong: what is wrong with `Subject.redundant` (empty in fast mode, which cannot tell).
    """

    name: str
    verdicts: tuple[Verdict, ...]
    total: int
    wrong: tuple[str, ...]
    seconds: float

    @property
    def unexplained(self) -> list[Verdict]:
        """Deletions that nothing noticed and no reason explains."""
        return [row for row in self.verdicts if not row.caught and not row.reason]

    @property
    def complaints(self) -> list[str]:
        """What is wrong with the subject; empty when nothing is."""
        survived = [f"{row.site.names[2]} ({row.site.line}) survived" for row in self.unexplained]
        return [*survived, *self.wrong]

    def counts(self) -> dict[str, int]:
        """Verdicts by label, in the order of `CATCHES`."""
        found = Counter(row.label for row in self.verdicts)
        return {name: found[name] for name in (*CATCHES, "redundant", "SURVIVED") if found[name]}

    def summary(self) -> str:
        """One line."""
        caught = sum(row.caught for row in self.verdicts)
        parts = ", ".join(f"{count} {name}" for name, count in self.counts().items())
        each = self.seconds / max(len(self.verdicts), 1)
        return (
            f"{self.name}: {len(self.verdicts)} of {self.total} sites deleted, {caught} caught "
            f"({parts}); {each:.2f} s each"
        )

    def as_dict(self) -> dict:
        """For JSON."""
        rows = [
            {
                "site": str(row.site),
                "line": row.site.line,
                "function": row.site.function,
                "verdict": row.label,
                "caught_by": list(row.kinds),
                "problem": row.problem,
                "detail": row.detail,
                "reason": row.reason,
            }
            for row in self.verdicts
        ]
        return {
            "subject": self.name,
            "sites": self.total,
            "deleted": len(rows),
            "counts": self.counts(),
            "complaints": self.complaints,
            "seconds": round(self.seconds, 3),
            "verdicts": rows,
        }


def mutate(
    subject: Subject,
    fast: bool = False,
    progress: Callable[[Sequence[Site]], Iterable[Site]] = iter,
) -> Report:
    """Delete every site of `subject` in turn (fast: a third of them, always the same).

    `progress` is given the sites and yields them. Raises Unsound when the subject fails unmutated.
    """
    start = time.perf_counter()
    sound = {name: _Sound(subject.name, name, run) for name, run in subject.problems.items()}
    sites = _sites(sound.values())
    chosen = _third(sites) if fast else sites
    verdicts = tuple(_verdict(subject, sound, site) for site in progress(chosen))
    wrong = () if fast else tuple(_wrong(subject.redundant, verdicts))
    return Report(subject.name, verdicts, len(sites), wrong, time.perf_counter() - start)


def sites_of(subject: Subject) -> list[Site]:
    """Every site of `subject`. Raises Unsound when it fails as it is."""
    return _sites(_Sound(subject.name, name, run) for name, run in subject.problems.items())


def stage_subject(stage: KernelSource, head_dim: int | None = None) -> Subject:
    """The model of a stage or part on one CTA; head_dim: the envelope's last when None.

    Every ring of slots begins anew `WRAPS` times in the first two problems. The others take what
    the code may treat by itself: a CTA that lacks its last tile, and the least rows to visit. The
    last has other timing: a wait may be met by luck, as that for the first statistics of a tile.
    """
    if stage.model is None:
        raise ValueError(f"part {stage.tag} has no model: nothing to delete")
    given = stage_problems(stage, head_dim)
    head_dim = next(iter(given.values())).q.shape[-1]
    problems = {name: _runner(stage, problem) for name, problem in given.items()}
    problems["slow port"] = _runner(stage, given["gaussian"], B200.with_changes(SLOW_PORT))
    return Subject(f"stage {stage.tag}, head dim {head_dim}", problems, reasons(stage, head_dim))


def reasons(stage: KernelSource, head_dim: int) -> dict[str, str]:
    """`Subject.redundant` of a stage: `REDUNDANT` of its model.py, and what `REDUNDANT_AT` there
    adds for a head dim."""
    more = getattr(stage.model, "REDUNDANT_AT", {}).get(head_dim, {})
    return getattr(stage.model, "REDUNDANT", {}) | more


def check_head_dim(stage: KernelSource, head_dim: int | None) -> int:
    """`head_dim`, or the envelope's last when None; ValueError for one that it does not have."""
    allowed = stage.config.ENVELOPE.head_dims
    if head_dim is not None and head_dim not in allowed:
        known = ", ".join(map(str, allowed))
        raise ValueError(f"stage {stage.tag} has head dims {known}; got {head_dim}")
    return allowed[-1] if head_dim is None else head_dim


def stage_problems(
    stage: KernelSource,
    head_dim: int | None = None,
    device: str = "cpu",
    dtype: str | None = None,
) -> dict[str, inputs.Problem]:
    """The inputs that mutants are tried on, of one CTA each; see `stage_subject`.

    A CTA of a forward owns queries and visits keys, one of a backward the other way round. With
    masks, "masked" has tiles with a mask first and last, and tiles without between. dtype: the
    envelope's first when None.
    """
    envelope, head_dim = stage.config.ENVELOPE, check_head_dim(stage, head_dim)
    turns = 1 + WRAPS * max((row.stages for row in stage.config.plan(head_dim).barriers), default=1)
    owned_tiles, owned_tile = cta_tiles(stage, head_dim)
    backward, unit = stage.kind == "backward", visited_unit(stage, head_dim)
    visited_tile = _visited_tile(stage, head_dim)
    visited, owned = math.ceil(turns * visited_tile / unit) * unit, owned_tiles * owned_tile
    least, odd = ("queries", "key") if backward else ("keys", "query")
    sizes = {"gaussian": (owned, visited), "ascending_max": (owned, visited)}
    if owned_tiles > 1:  # with a visit less: a loop unrolled by two has something left over
        sizes[f"odd {odd} tile"] = (owned - owned_tile, visited - unit)
    sizes[f"least {least}"] = (owned, unit)
    options = {}
    if envelope.masks:
        inner = owned + visited - unit // 2
        sizes["masked"] = (owned, 2 * owned + visited)
        options["masked"] = {"window_size": (0, inner) if backward else (inner, 0)}
    made = {
        name: inputs.make(
            name if name in inputs.GENERATORS else "gaussian",
            batch=1,
            seqlen_q=visited if backward else owned,
            seqlen_k=owned if backward else visited,
            heads=1,
            head_dim=head_dim,
            dtype=getattr(torch, dtype or envelope.dtypes[0]),
            device=device,
        )
        for name, (owned, visited) in sizes.items()
    }
    return {name: replace(row, options=options.get(name, {})) for name, row in made.items()}


def visited_unit(stage: KernelSource, head_dim: int) -> int:
    """The fewest rows of whole tiles that a CTA can visit."""
    return max(stage.config.ENVELOPE.seqlen_multiple, _visited_tile(stage, head_dim))


def _visited_tile(stage: KernelSource, head_dim: int) -> int:
    return stage.config.TILE if stage.kind == "backward" else stage.config.TILE_N[head_dim]


def _runner(stage: KernelSource, problem: inputs.Problem, machine: Machine = B200) -> Problem:
    def run():
        found = stage.simulate_problem(problem, max_ctas=1, machine=machine)
        return [getattr(found, name) for name in stage.RESULTS], found.findings

    return run


# ---- runs ----------------------------------------------------------------------------------


class _Sound:
    """A problem as it should be: its sites, its outputs, the events it took."""

    def __init__(self, subject: str, name: str, run: Problem):
        self.run, found, budget = run, {}, Budget(EVENTS)

        def note(agent: str, verb: str, barrier: str, line: str) -> bool:
            found[_identity(agent, verb, barrier, line)] = _function()
            return False

        try:
            with observe(lambda: Ordering("practice"), note, budget):
                outputs, findings = run()
        except tuple(FAULTS) as fault:
            raise Unsound(f"{subject}, {name}: fails unmutated: {fault}") from fault
        if findings:
            raise Unsound(f"{subject}, {name}: unsound unmutated: {'; '.join(findings)}")
        self.outputs = [x.clone() for x in outputs]
        self.limit = SLACK * budget.used
        self.functions: dict[tuple[str, str, str, str], str] = found

    def without(self, site: Site) -> Verdict:
        """Run with the site deleted; a verdict without kinds when nothing noticed."""
        orderings: list[Ordering] = []

        def ordering():
            orderings.append(Ordering("practice"))
            return orderings[-1]

        caught: dict[str, tuple[str, str]] = {}
        findings: Sequence[str] = ()
        try:
            with observe(
                ordering, lambda *call: _identity(*call) == site.identity, Budget(self.limit)
            ):
                outputs, findings = self.run()
            if not all(map(_same, outputs, self.outputs)):
                caught["numbers"] = ("the outputs differ", "the outputs differ from the model's")
        except tuple(FAULTS) as fault:
            kind = next(name for error, name in FAULTS.items() if isinstance(fault, error))
            caught[kind] = (_in_short(kind, str(fault)), str(fault))
        races = [race for order in orderings for race in order.races()]
        if races:
            first, second = races[0].first, races[0].second
            pair = f"{first.op} ({first.agent}), {second.op} ({second.agent}): {races[0].missing}"
            caught["race"] = (pair, str(races[0]))
        for text in findings:
            if not any(text.endswith(str(race)) for race in races):
                kind = "unwritten" if "never written" in text else "leak"
                caught.setdefault(kind, (shorten(text, SHORT), text))
        kinds = tuple(kind for kind in CATCHES if kind in caught)
        return Verdict(site, kinds, *caught[kinds[0]]) if kinds else Verdict(site)


def _verdict(subject: Subject, sound: Mapping[str, _Sound], site: Site) -> Verdict:
    """The first problem in which the deletion shows decides."""
    for name, row in sound.items():
        if site.identity in row.functions:
            found = row.without(site)
            if found.caught:
                return Verdict(site, found.kinds, found.short, found.detail, name)
    return Verdict(site, reason=reason(subject.redundant, site.names))


def _same(a: torch.Tensor, b: torch.Tensor) -> bool:
    return torch.allclose(a, b, rtol=0.0, atol=0.0, equal_nan=True)


def _in_short(kind: str, text: str) -> str:
    """A fault in a few words: of a deadlock the first who waits, and where."""
    if kind != "deadlock":
        return shorten(text, SHORT)
    (who, where), *others = _STUCK.findall(text)
    return f"{who} at {where}" + (f", {len(others)} more" if others else "")


# ---- sites ---------------------------------------------------------------------------------


def _identity(agent: str, verb: str, barrier: str, line: str) -> tuple[str, str, str, str]:
    return agent.partition("@")[0], verb, barrier.partition("[")[0], line


def _function() -> str:
    """Name of the function of the stage's model that is calling a verb right now."""
    frame = sys._getframe(1)
    while frame.f_code.co_filename.startswith((_MODEL, __file__)):
        frame = frame.f_back
    return frame.f_code.co_name


def _sites(sound: Iterable[_Sound]) -> list[Site]:
    """Every site of any problem, in the order in which they first ran, numbered by line."""
    functions = {key: name for row in sound for key, name in row.functions.items()}
    like: dict[tuple[str, ...], list[str]] = {}
    for (*name, line), function in functions.items():
        like.setdefault((*name, function), []).append(line)
    for lines in like.values():
        lines.sort(key=lambda line: (line.rpartition(":")[0], int(line.rpartition(":")[2])))
    return [
        Site(*key, function, 1 + like[(*key[:3], function)].index(key[3]))
        for key, function in functions.items()
    ]


def _wrong(redundant: Mapping[str, str], verdicts: Sequence[Verdict]) -> Iterator[str]:
    """Names that mean no survivor, or something else besides."""
    for key in redundant:
        meant = [row for row in verdicts if _means(key, row.site)]
        if all(row.caught for row in meant):
            yield f"REDUNDANT {key!r} explains no survivor"
            continue
        for row in meant:
            if row.caught:
                name = f"{row.site.names[2]} ({row.site.line})"
                yield f"REDUNDANT {key!r} also means {name}, which is caught"


def _means(key: str, site: Site) -> bool:
    return any(fnmatchcase(name, key) for name in site.names)


def reason(redundant: Mapping[str, str], names: Iterable[str]) -> str:
    """Why a site that has these names may be deleted, as `Subject.redundant` says, or ""."""
    return next(
        (why for key, why in redundant.items() if any(fnmatchcase(n, key) for n in names)), ""
    )


def _third(sites: Sequence[Site]) -> list[Site]:
    """One site of `FAST_SHARE`, chosen by name: new sites hardly change which old ones are."""
    digest = lambda site: hashlib.sha256(site.names[2].encode()).digest()
    chosen = set(sorted(sites, key=digest)[: math.ceil(len(sites) / FAST_SHARE)])
    return [site for site in sites if site in chosen]
