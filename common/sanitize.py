# SPDX-License-Identifier: Apache-2.0
"""The sanitizer's word on a stage's kernels: compute-sanitizer over a process that executes each of
them, rewritten, on one small problem. Needs a Hopper GPU.

The sanitizer watches a whole process and slows it down many times, so the kernels run in a child,
with a watchdog that waits longer. Runs: host.
"""

from __future__ import annotations

import datetime
import os
import pathlib
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Iterator
from typing import Any

import torch

from . import contract_gpu, contract_gradients
from .compile import CompileKey, compile_stage
from .contract import Case
from .judging import judge, judge_gradients
from .launch import execution, modes
from .ptx import ptx_hash
from .sass import find_tool
from .schema import errors_of
from .stage import PACKAGE, STAGES_FOLDER, KernelSource, Stage
from .verification import AROUND, driver

TOOL = "memcheck"
TIMEOUT_MS = 60_000  # of a wait of a kernel
SECONDS = 1800  # for all kernels of a stage
SHOWN = 20  # lines of a child that failed


def require(stage: Stage) -> str:
    """The path of compute-sanitizer. RuntimeError where no kernel of the stage can be executed
    rewritten, MissingTool without the tool."""
    reason = contract_gpu.gpu_skip_reason(stage)
    if reason is None and "rewritten" not in modes(stage, torch.device("cuda")):
        reason = f"rewritten code runs on Hopper GPUs, not on {torch.cuda.get_device_name()}"
    if reason:
        raise RuntimeError(f"cannot sanitize stage {stage.tag}: {reason}")
    return find_tool("compute-sanitizer")


def sanitize(stage: Stage, wanted: Iterable[str]) -> dict[str, Any]:
    """Execute every kernel of a stage, in its first dtype, under the sanitizer.

    wanted: their keys, as `hashes` has them. Returns a record as `schema.SANITIZER_FIELDS`, also
    when there are errors. Raises RuntimeError where that cannot be done, and when the kernels did
    not come to their end, with the last lines of what was printed.
    """
    tool, wanted = require(stage), sorted(wanted)
    with tempfile.TemporaryDirectory() as folder:
        path = pathlib.Path(folder) / "executed"
        command = [tool, "--tool", TOOL, *child_command(stage, path)]
        done = _run(command, stage)
        executed = path.read_text().split() if path.is_file() else []
    printed = done.stdout + done.stderr
    errors = errors_of(printed)
    if errors is None or sorted(executed) != wanted or (done.returncode and not errors):
        last = "\n".join(printed.splitlines()[-SHOWN:])
        raise RuntimeError(
            f"{len(executed)} of {len(wanted)} kernels of stage {stage.tag} were executed under "
            f"{TOOL} (exit code {done.returncode}):\n{last}"
        )
    return {
        "tool": TOOL,
        "command": f"flash-ladder sanitize {stage.number}",
        "date": datetime.date.today().isoformat(),
        "gpu": torch.cuda.get_device_name(),
        "driver": driver(),
        "kernels": wanted,
        "errors": errors,
        "summary": "; ".join(_summaries(printed)),
    }


def _run(command: list[str], stage: Stage) -> subprocess.CompletedProcess:
    """Run it, with memory that torch allocates one tensor at a time, or overruns stay unseen."""
    environment = {**os.environ, "PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}
    options = {"capture_output": True, "text": True, "env": environment}
    try:
        return subprocess.run(command, **options, timeout=SECONDS)
    except subprocess.TimeoutExpired as late:
        raise RuntimeError(
            f"the kernels of stage {stage.tag} took more than {SECONDS} s under {TOOL}"
        ) from late


def _summaries(text: str) -> list[str]:
    """The sanitizer's own lines on the number of errors, without what it puts in front."""
    return [line.lstrip("= ") for line in text.splitlines() if errors_of(line) is not None]


def hashes(stage: Stage) -> dict[str, str]:
    """By key, the hash of the PTX of every kernel that `execute` runs."""
    found = {}
    for source, dtype, head_dim in _kernels(stage):
        key = CompileKey.of(source, "sm_100a", dtype, head_dim).name
        found[key] = ptx_hash(
            compile_stage(source, arch="sm_100a", dtype=dtype, head_dim=head_dim).ptx
        )
    return found


def _kernels(stage: Stage) -> Iterator[tuple[KernelSource, str, int]]:
    """(stage or part, dtype, head dim) of every kernel, of the first dtype."""
    for source in stage.kernels:
        for head_dim in source.config.ENVELOPE.head_dims:
            yield source, stage.config.ENVELOPE.dtypes[0], head_dim


# ---- the child -----------------------------------------------------------------------------


def child_command(stage: Stage, path: pathlib.Path) -> list[str]:
    """A Python that calls `execute`, of this package whether it is installed or a checkout."""
    lines = [f"from {PACKAGE}.common.sanitize import execute"]
    lines += [f"execute({stage.number}, {str(path)!r})"]
    if STAGES_FOLDER.name != PACKAGE:
        root = str(STAGES_FOLDER.parent)
        lines = ["import sys", f"sys.path.insert(0, {root!r})", "import conftest", *lines]
    return [sys.executable, "-c", "\n".join(lines)]


def execute(number: int, path: str) -> None:
    """Execute every kernel of a stage on a small problem; writes the keys of those that ran.

    Raises AssertionError for a result out of tolerance.
    """
    from .. import load
    from .hopper.run import session

    stage, executed = load(number), {}
    session(torch.cuda.current_device()).settings(timeout_ms=TIMEOUT_MS)
    with execution("rewritten"):
        for source, dtype, head_dim in _kernels(stage):
            if source.kind in AROUND:  # run with each backward part
                continue
            _execute(stage, source, small_case(source, dtype, head_dim).problem("cuda"))
            around = [part for part in stage.kernels if part.kind in AROUND]
            ran = [source, *(around if source.kind == "backward" else [])]
            executed |= {CompileKey.of(x, "sm_100a", dtype, head_dim).name: None for x in ran}
            pathlib.Path(path).write_text("\n".join(executed))


def _execute(stage: Stage, source: KernelSource, problem) -> None:
    if source is stage:
        verdicts = judge(problem, *contract_gpu.run_problem(stage, problem), stage)
    else:
        made = contract_gradients.run_gradients(stage, source, problem)
        verdicts = judge_gradients(problem, made.dq, made.dk, made.dv)
    for verdict in verdicts:
        verdict.check()


def small_case(source: KernelSource, dtype: str, head_dim: int) -> Case:
    """256 queries, 384 keys, 2 heads; with masks, two causal sequences of up to 300 rows."""
    case = Case("gaussian", dtype, head_dim, 256, 384, 1, 2, part=source.name)
    if not source.config.ENVELOPE.masks:
        return case
    ragged = {"seqlen_q": 300, "seqlen_k": 300, "batch": 2, "mask": "causal", "lengths": "packed"}
    return Case(**{**vars(case), **ragged})
