# SPDX-License-Identifier: Apache-2.0
"""A process that tries mutants of one kernel on the GPU until one of them ends its CUDA context.

Started by `device_mutation`, one for each worker. Runs: host.
"""

from __future__ import annotations

import multiprocessing.connection
import warnings
from dataclasses import dataclass

import torch

from . import contract_gpu, mutation
from .executed import check_log
from .grid import cluster_size
from .hopper.log import decode
from .hopper.run import FunctionalOnly, session
from .inputs import Problem
from .launch import execution
from .stage import KernelSource

TIMEOUT_MS = 3000  # of a wait: kernels of several processes take turns


@dataclass(frozen=True)
class Outcome:
    """What noticed that the statement of `line` was left out: kinds, and the first in words.

    alive: whether the process can go on.
    """

    line: int
    by: tuple[str, ...]
    detail: str
    alive: bool = True


class Bench:
    """A logged kernel, its problems on the GPU and what it gives when nothing is amiss."""

    def __init__(self, stage: KernelSource, head_dim: int):
        self.stage, self.plan = stage, stage.config.plan(head_dim)
        self.problems = mutation.stage_problems(stage, head_dim, "cuda")
        self.right = {name: self.run(problem)[0] for name, problem in self.problems.items()}

    def run(self, problem: Problem, skip: int = 0, seed: int = 0, log: bool = False):
        """(outputs, logs) of one launch; `seed` of an adversary, 0 for none."""
        engine = session(torch.cuda.current_device())
        engine.settings(
            timeout_ms=TIMEOUT_MS,
            skip=skip,
            log_clusters=int(log),
            log_units=contract_gpu.LOG_UNITS * cluster_size(self.stage),
            seed=seed,
            **contract_gpu.ADVERSARIES.get(seed, {}),
        )
        with execution("rewritten", log=True):
            outputs = contract_gpu.run_problem(self.stage, problem)
        return outputs, [decode(data) for data in engine.logs()]

    def attempt(self, line: int) -> Outcome:
        """Leave one statement out, with the log and then under every adversary."""
        by: dict[str, str] = {}
        try:
            for name in self.problems:
                self._logged(name, line, by)
            for seed in contract_gpu.ADVERSARIES:
                for name in self.problems:
                    self._compare(name, self.run(self.problems[name], line, seed)[0], by, seed)
        except AssertionError as wrong:  # memory beside the outputs, or an input, was written
            by.setdefault("result", str(wrong))
        except RuntimeError as fault:  # of the engine, or of CUDA itself
            by["error"] = str(fault).splitlines()[0]
            return Outcome(line, tuple(by), next(iter(by.values())), alive=False)
        return Outcome(line, tuple(by), next(iter(by.values()), ""))

    def _logged(self, name: str, line: int, by: dict[str, str]) -> None:
        outputs, logs = self.run(self.problems[name], line, log=True)
        self._compare(name, outputs, by, 0)
        for log in logs:
            try:
                errors = [str(error) for error in check_log(log, self.plan).errors]
            except ValueError as wrong:  # a log that nothing sound can have written
                errors = [str(wrong)]
            if errors:
                by.setdefault("log", errors[0])

    def _compare(self, name: str, outputs, by: dict[str, str], seed: int) -> None:
        same = all(
            torch.equal(a.view(torch.uint8), b.view(torch.uint8))
            for a, b in zip(outputs, self.right[name])
        )
        if not same:
            under = f"adversary {seed}" if seed else "no delays"
            by.setdefault("result", f"{name}: the outputs differ ({under})")


def serve(
    stage: int, part: str, head_dim: int, pipe: multiprocessing.connection.Connection
) -> None:
    """Answer each line that comes through `pipe` with an Outcome; end after a fault, or at None.

    part: of the stage, "" for the stage itself.
    """
    from .. import load

    warnings.simplefilter("ignore", FunctionalOnly)  # who asked for mutants knows
    bench = Bench(load(stage).part(part), head_dim)
    while (line := pipe.recv()) is not None:
        outcome = bench.attempt(line)
        pipe.send(outcome)
        if not outcome.alive:
            return
