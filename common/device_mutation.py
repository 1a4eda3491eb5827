# SPDX-License-Identifier: Apache-2.0
"""Mutation of the compiled kernel: leave out each wait, arrival and fence of its PTX in turn, on a
Hopper GPU, and see what notices.

The kernel is rewritten once, with the log; a run leaves out the statement of one line. Judged by
results (bit for bit, without delays and under every adversary), by errors (faults, hangs), by the
log, and by `common.lint` on the text without the statement, which sees what execution cannot: a
register that is used before its load has been waited for. Runs: host.
"""

from __future__ import annotations

import functools
import multiprocessing
import queue
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

import torch

from . import contract_gpu, mutation
from .conformance import conform
from .device_worker import Bench, Outcome, serve
from .executed import check_log
from .grid import grid
from .hopper.record import optional
from .hopper.run import hopper_kernel
from .hopper.steps import Step, steps
from .lint import lint
from .mutation import Unsound
from .ptx import read
from .stage import KernelSource

KINDS = ("result", "error", "log", "lint")
FAMILY_COUNTS = ("sites", "timing", "log", "lint", "redundant")
WORKERS = 10  # processes that share the GPU


@dataclass(frozen=True)
class Site:
    """A wait, arrival or fence of the PTX. name: role, verb and barrier as the log shows them;
    twins: the sites of the model that it stands for."""

    line: int
    opcode: str
    name: str = ""
    twins: tuple[mutation.Site, ...] = ()

    @property
    def is_wait(self) -> bool:
        """Whether it waits at an mbarrier."""
        return self.opcode.startswith(("mbarrier.try_wait", "mbarrier.test_wait"))

    @property
    def family(self) -> str:
        """wait (at an mbarrier), arrival (or commit), barrier (of threads), fence (or own wait)."""
        if self.is_wait:
            return "wait"
        if self.opcode.startswith(("mbarrier.", "tcgen05.commit")):
            return "arrival"
        return "barrier" if self.opcode.startswith("bar") else "fence"

    def __str__(self) -> str:
        return self.name or self.opcode


@dataclass(frozen=True)
class Verdict:
    """What came of leaving `site` out.

    by: those of KINDS that noticed; detail: the first in words; reason: why nothing did.
    """

    site: Site
    by: tuple[str, ...]
    detail: str
    reason: str = ""

    @property
    def timing(self) -> bool:
        """Whether it showed without the log."""
        return "result" in self.by or "error" in self.by

    @property
    def label(self) -> str:
        """The verdict in a word or two."""
        return " + ".join(self.by) or ("redundant" if self.reason else "SURVIVED")


@dataclass(frozen=True)
class Report:
    """All verdicts on one kernel; wrong: reasons of `REDUNDANT_COMPILED` that explain nothing."""

    name: str
    verdicts: tuple[Verdict, ...]
    seconds: float
    wrong: tuple[str, ...] = ()

    @property
    def complaints(self) -> list[str]:
        """Sites that nothing noticed and no reason explains, and reasons without a site."""
        missed = [row for row in self.verdicts if not row.by and not row.reason]
        survived = [f"{row.site} (PTX line {row.site.line}) survived" for row in missed]
        return [*survived, *self.wrong]

    def counts(self) -> dict[str, int]:
        """How many sites there are, and how many each kind noticed.

        timing: by result or error; log_only: by nothing else. The same of the mbarrier waits.
        """
        rows = self.verdicts
        waits = [row for row in rows if row.site.is_wait]
        return {
            "sites": len(rows),
            **{kind: sum(kind in row.by for row in rows) for kind in KINDS},
            "timing": sum(row.timing for row in rows),
            "log_only": sum(row.by == ("log",) for row in rows),
            "redundant": sum(not row.by and bool(row.reason) for row in rows),
            "unexplained": sum(not row.by and not row.reason for row in rows),
            "waits": len(waits),
            "waits_timing": sum(row.timing for row in waits),
            "waits_log": sum("log" in row.by for row in waits),
        }

    def by_family(self) -> dict[str, dict[str, int]]:
        """The same by what a site is: a wait at an mbarrier, an arrival, a barrier, a fence."""
        found: dict[str, dict[str, int]] = {}
        for row in self.verdicts:
            counts = found.setdefault(row.site.family, dict.fromkeys(FAMILY_COUNTS, 0))
            noticed = {"sites": True, "timing": row.timing, "redundant": not row.by}
            for name in FAMILY_COUNTS:
                counts[name] += noticed.get(name, name in row.by)
        return found

    def summary(self) -> str:
        """Two lines."""
        n = self.counts()
        return (
            f"{self.name}: {n['sites']} sites left out; noticed by results {n['result']}, by "
            f"errors {n['error']}, by the log {n['log']}, by lint {n['lint']}; by the log alone "
            f"{n['log_only']}; redundant {n['redundant']}, unexplained {n['unexplained']}; "
            f"{self.seconds:.0f} s\n"
            f"of {n['waits']} mbarrier waits timing shows {n['waits_timing']}, the log "
            f"{n['waits_log']} (a run that hangs has no log)"
        )

    def as_dict(self) -> dict:
        """For JSON."""
        rows = [
            {
                "site": str(row.site),
                "line": row.site.line,
                "opcode": row.site.opcode,
                "verdict": row.label,
                "detail": row.detail,
                "reason": row.reason,
            }
            for row in self.verdicts
        ]
        return {
            "subject": self.name,
            "counts": self.counts(),
            "by_family": self.by_family(),
            "complaints": self.complaints,
            "seconds": round(self.seconds, 1),
            "verdicts": rows,
        }


def sites(ptx: str) -> list[Site]:
    """Every wait, arrival and fence of a kernel's PTX, in the order of the text."""
    (body,) = read(ptx).entries().values()
    return [Site(s.line, s.opcode) for s in body if s.is_instruction and optional(s)]


def mutate(
    stage: KernelSource,
    head_dim: int | None = None,
    progress: Callable[[Sequence[Site]], Iterable[Site]] = iter,
    workers: int = WORKERS,
) -> Report:
    """Leave out every site of the kernel of a stage or part in turn.

    `progress` is given the sites, and yields. Raises RuntimeError on a machine that cannot execute
    it rewritten, and Unsound when something is wrong with everything in place.
    """
    head_dim = mutation.check_head_dim(stage, head_dim)
    missing = contract_gpu.adversary_skip_reason(stage)
    if missing:
        raise RuntimeError(f"cannot mutate the kernel of stage {stage.tag}: {missing}")
    start = time.perf_counter()
    named = named_sites(stage, head_dim)
    outcomes = _outcomes(stage, head_dim, [site.line for site in named], workers)
    found = {}
    for _ in progress(named):
        outcome = next(outcomes)
        found[outcome.line] = outcome
    ptx = logged_ptx(stage, head_dim)
    verdicts = tuple(_verdict(stage, head_dim, site, found[site.line], ptx) for site in named)
    used = {row.reason for row in verdicts}
    wrong = [
        f"REDUNDANT_COMPILED {key!r} explains no survivor"
        for key, why in _compiled_reasons(stage).items()
        if why not in used
    ]
    name = f"stage {stage.tag}, head dim {head_dim}, rewritten"
    return Report(name, verdicts, time.perf_counter() - start, tuple(wrong))


def _verdict(stage: KernelSource, head_dim: int, site: Site, outcome: Outcome, ptx: str) -> Verdict:
    by, detail = outcome.by, outcome.detail
    findings = lint(without(ptx, site.line))
    if findings:
        by, detail = (*by, "lint"), detail or str(findings[0])
    return Verdict(site, by, detail, "" if by else explanation(stage, head_dim, site))


def without(ptx: str, line: int) -> str:
    """A PTX module without the statement of one line."""
    lines = ptx.splitlines()
    lines[line - 1] = ""
    return "\n".join(lines) + "\n"


def explanation(stage: KernelSource, head_dim: int, site: Site) -> str:
    """Why leaving a site out is no fault: the reasons of its twins in the model, or its own.

    Its own, for what only compiled code has, is in `REDUNDANT_COMPILED` of the stage's model.py.
    """
    listed = mutation.reasons(stage, head_dim)
    reasons = [mutation.reason(listed, twin.names) for twin in site.twins]
    if reasons and all(reasons):
        return "; ".join(dict.fromkeys(reasons))
    return mutation.reason(_compiled_reasons(stage), (site.name,))


def _compiled_reasons(stage: KernelSource) -> dict[str, str]:
    return getattr(stage.model, "REDUNDANT_COMPILED", {})


# ---- which is which ------------------------------------------------------------------------


def named_sites(stage: KernelSource, head_dim: int) -> list[Site]:
    """The sites, named and paired with those of the model by running both. Needs the GPU."""
    bench, subject = Bench(stage, head_dim), mutation.stage_subject(stage, head_dim)
    model = mutation.sites_of(subject)
    reached: dict[int, dict[str, None]] = {}
    twins: dict[int, set[tuple[str, str, str]]] = {}
    for name, problem in bench.problems.items():
        run, place = stage.simulate_problem(problem), grid(stage, problem).place(0)
        for log in bench.run(problem, log=True)[1]:
            errors = check_log(log, bench.plan).errors
            compared = conform(log, run.notes[0], bench.plan, place)
            if errors or not compared.exact:
                raise Unsound(f"{name}: {(*errors, *compared.differences)[0]}")
            for step in steps(log, bench.plan):
                if step.verb in ("bar.wait", "cluster.wait"):
                    continue
                reached.setdefault(step.line, {})[site_name(step)] = None
            for line, places in compared.lines.items():
                twins.setdefault(line, set()).update(places)
    return [
        replace(
            site,
            name=", ".join(reached.get(site.line, ())),
            twins=tuple(row for row in model if _is_twin(row, twins.get(site.line, ()))),
        )
        for site in sites(logged_ptx(stage, head_dim))
    ]


def logged_ptx(stage: KernelSource, head_dim: int) -> str:
    """The sm_100a PTX of the kernel that is mutated. Needs the GPU."""
    device = torch.device("cuda", torch.cuda.current_device())
    dtype = stage.config.ENVELOPE.dtypes[0]
    return hopper_kernel(stage, dtype, head_dim, device, log=True).ptx


def _is_twin(site: mutation.Site, twins: Iterable[tuple[str, str, str]]) -> bool:
    return any(
        (site.role, site.line) == (role, line) and site.barrier in ("", what)
        for role, line, what in twins
    )


def site_name(step: Step) -> str:
    """Role, verb and barrier (without slot and CTA) of a step."""
    role = step.agent.partition("@")[0].partition(".")[0]
    what = step.what.partition("@")[0].partition("[")[0]
    verbs = {"bar.arrive": "sync", "bulk.wait": "bulk_wait", "cluster.arrive": "sync"}
    verb = verbs.get(step.verb, step.verb)
    return f"{role} {verb} {what}".rstrip()


# ---- workers -------------------------------------------------------------------------------


def _outcomes(
    stage: KernelSource, head_dim: int, lines: Sequence[int], workers: int
) -> Iterator[Outcome]:
    """Outcomes as they come, from worker processes that are replaced when a fault ended one."""
    waiting: queue.SimpleQueue[int] = queue.SimpleQueue()
    done: queue.SimpleQueue[Outcome | Exception] = queue.SimpleQueue()
    for line in lines:
        waiting.put(line)
    work = functools.partial(_work, (stage.number, stage.name, head_dim), waiting, done)
    threads = [threading.Thread(target=work, daemon=True) for _ in range(min(workers, len(lines)))]
    for thread in threads:
        thread.start()
    for _ in lines:
        outcome = done.get()
        if isinstance(outcome, Exception):
            raise outcome
        yield outcome


def _work(what: tuple[int, str, int], waiting: queue.SimpleQueue, done: queue.SimpleQueue) -> None:
    """Keep one process, which `serve` starts with `what`, busy until no line is left."""
    context = multiprocessing.get_context("spawn")
    process = pipe = None
    try:
        while True:
            line = waiting.get_nowait()
            if process is None:
                pipe, theirs = context.Pipe()
                process = context.Process(target=serve, args=(*what, theirs), daemon=True)
                process.start()
                theirs.close()
            pipe.send(line)
            outcome = pipe.recv()
            done.put(outcome)
            if not outcome.alive:
                process.join()
                process = None
    except queue.Empty:
        if process is not None:
            pipe.send(None)
            process.join()
    except Exception as wrong:
        done.put(RuntimeError(f"a worker ended without an answer ({type(wrong).__name__})"))
