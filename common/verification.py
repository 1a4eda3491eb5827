# SPDX-License-Identifier: Apache-2.0
"""Running a stage's gpu tier outside pytest, into a record for `evidence.json`. Runs: host."""

from __future__ import annotations

import datetime
import functools
import statistics
import subprocess
import traceback
from collections.abc import Callable
from dataclasses import asdict
from typing import Any

import torch
from rich.console import Console
from rich.progress import track

from . import contract, contract_gpu
from .compile import CompiledKernel, CompileKey, compile_stage, versions
from .contract import Case
from .facts import ptx_facts
from .hopper.rewrite import rewriter_hash
from .launch import execution, modes, native_arch
from .numerics import Comparison
from .ptx import ptx_hash
from .sass import MissingTool, report
from .stage import KernelSource, Stage

AROUND = ("preprocess", "postprocess")  # kernels that every backward part needs


def verify(
    stage: Stage, console: Console, notes: str = "", mode: str | None = None
) -> dict[str, Any]:
    """Run all cases and checks of the gpu tier; returns the run as `schema.RUN_FIELDS`.

    mode: "native" or "rewritten" (`launch.modes`); None for the usual one of this GPU. Raises
    RuntimeError, with the reason, on a machine that cannot run the stage so.
    """
    reason = contract_gpu.gpu_skip_reason(stage)
    if reason:
        raise RuntimeError(f"cannot verify stage {stage.tag}: {reason}")
    device = torch.device("cuda")
    possible = modes(stage, device)
    mode = mode or possible[0]
    if mode not in possible:
        raise RuntimeError(f"cannot verify stage {stage.tag} {mode}: here it runs {possible}")
    with execution(mode):
        verdicts, failures = _run_all(stage, console)
        timings = _timings(stage) if mode == "native" else []
    seeds = _run_adversaries(stage, failures, console) if mode == "rewritten" else []
    logs = _check_logs(stage, failures, console) if mode == "rewritten" else {}
    target = native_arch(device) if mode == "native" else "sm_100a"
    kernels = [
        _kernel_row(source, compile_stage(source, arch=target, dtype=dtype, head_dim=d), verdicts)
        for source in stage.kernels
        for dtype in source.config.ENVELOPE.dtypes
        for d in source.config.ENVELOPE.head_dims
    ]
    for row in kernels:
        row |= {"log": logs[row["key"]]} if row["key"] in logs else {}
    total = len(verdicts) + len(contract_gpu.checks(stage)) + len(seeds) + len(logs)
    for failure in failures:
        console.print(failure, style="red", markup=False)
    console.print(f"{total - len(failures)} passed, {len(failures)} failed")
    option = " --rewritten" if mode == "rewritten" else ""
    run = {
        "date": datetime.date.today().isoformat(),
        "gpu": torch.cuda.get_device_name(),
        "driver": driver(),
        "torch": torch.__version__,
        "dsl": versions()["nvidia-cutlass-dsl"],
        "target": target,
        "mode": mode,
        "command": f"flash-ladder verify {stage.number}{option}",
        "kernels": kernels,
        "tests": {"passed": total - len(failures), "failed": len(failures), "skipped": 0},
        "adversaries": seeds,
        "timings": timings,
        "notes": notes,
    }
    return run | ({"rewriter_sha256": rewriter_hash()} if mode == "rewritten" else {})


def _run_all(stage: Stage, console: Console) -> tuple[dict, list[str]]:
    """(verdicts by case, failures as text) of every case and check."""
    cases = contract.gpu_cases(stage)
    verdicts: dict[Case, list[Comparison] | None] = {}
    failures: list[str] = []
    for case in track(cases, f"stage {stage.tag}: cases", console=console):
        verdicts[case] = _attempt(failures, str(case), contract_gpu.check_gpu_case, stage, case)
    for name, check in contract_gpu.checks(stage).items():
        _attempt(failures, name, check, stage)
    return verdicts, failures


def _run_adversaries(stage: Stage, failures: list[str], console: Console) -> list[int]:
    """Seeds under which every case was executed once more."""
    if contract_gpu.adversary_skip_reason(stage):
        return []
    seeds = list(contract_gpu.ADVERSARIES)
    for seed in track(seeds, f"stage {stage.tag}: adversaries", console=console):
        _attempt(failures, f"adversary {seed}", contract_gpu.check_adversary, stage, seed)
    return seeds


def _check_logs(stage: Stage, failures: list[str], console: Console) -> dict[str, dict]:
    """By kernel, what its executed logs showed; see `schema.LOG_FIELDS`."""
    logged = [row for row in stage.kernels if not contract_gpu.adversary_skip_reason(row)]
    triples = [
        (source, dtype, head_dim)
        for source in logged
        for dtype in source.config.ENVELOPE.dtypes
        for head_dim in source.config.ENVELOPE.head_dims
    ]
    found: dict[str, dict] = {}
    for triple in track(triples, f"stage {stage.tag}: executed logs", console=console):
        source, dtype, head_dim = triple
        key = CompileKey.of(source, "sm_100a", dtype, head_dim).name
        shown = _attempt(failures, f"log {key}", contract_gpu.check_executed, *triple)
        found[key] = {"clean": shown is not None, "conforms": shown is not None}
        if shown:
            pairs_of_mmas = [list(pair) for pair in shown.a1_edges]
            found[key] |= asdict(shown) | {"a1_edges": pairs_of_mmas}
    return found


TIMED = ((4, 4096), (1, 16384))  # batch, length; the second is that of the pages' predictions
TIMED_HEADS = 16
TIMES = {"full attention": 4, "its backward": 10}  # FLOP by batch * heads * length**2 * head dim


def _timings(stage: Stage, device: str = "cuda") -> list[dict[str, Any]]:
    """Median times of some shapes, forward and backward, and TFLOP/s of their products."""
    head_dim, dtype = stage.config.ENVELOPE.head_dims[-1], stage.config.ENVELOPE.dtypes[0]
    found = []
    for batch, seqlen in TIMED:
        shape = (batch, seqlen, TIMED_HEADS, head_dim)
        tensors = [torch.randn(shape, device=device, dtype=getattr(torch, dtype)) for _ in range(4)]
        for name, call in _timed(stage, *tensors).items():
            work = TIMES[name] * batch * TIMED_HEADS * seqlen**2 * head_dim
            size = f"b{batch} s{seqlen} h{TIMED_HEADS} d{head_dim} {dtype}, {name}"
            found.append({"shape": size, **_times(call, work)})
    return found


def _timed(stage: Stage, q, k, v, dout) -> dict[str, Callable[[], Any]]:
    """What is timed, names of TIMES."""
    calls = {"full attention": lambda: stage.attention(q, k, v)}
    if stage.config.ENVELOPE.differentiable:
        leaves = [x.clone().requires_grad_() for x in (q, k, v)]
        out = stage.attention(*leaves)
        gradients = functools.partial(torch.autograd.grad, out, leaves, dout, retain_graph=True)
        calls["its backward"] = gradients
    return calls


def _times(call: Callable[[], Any], work: int, warm: int = 20, repeats: int = 20) -> dict[str, Any]:
    """Of calls by CUDA events; work: the FLOP of one."""
    for _ in range(warm):
        call()
    times = []
    for _ in range(repeats):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        call()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end))
    median = statistics.median(times)
    return {
        "ms": median,
        "ms_min": min(times),
        "ms_max": max(times),
        "tflops": work / median / 1e9,
        "how": f"median of {repeats} launches after {warm}, CUDA events",
    }


def _attempt(failures: list[str], name: str, check, *arguments):
    """The result of a check, or None with its failure recorded."""
    try:
        return check(*arguments)
    except Exception:
        failures.append(f"{name}: {traceback.format_exc(limit=-1)}")
        return None


def _concerns(case: Case, source: KernelSource) -> bool:
    """Whether a case launches the kernel of a stage or part, for gradients those around it too."""
    return case.part == source.name or (bool(case.part) and source.kind in AROUND)


def _kernel_row(source: KernelSource, kernel: CompiledKernel, verdicts: dict) -> dict[str, Any]:
    key = kernel.key
    mine = {
        case: rows
        for case, rows in verdicts.items()
        if (case.dtype, case.head_dim) == (key.dtype, key.head_dim) and _concerns(case, source)
    }
    return {
        "key": key.name,
        **({"part": key.part} if key.part else {}),
        "dtype": key.dtype,
        "head_dim": key.head_dim,
        "entry": ptx_facts(kernel.ptx).entry,
        "ptx_sha256": ptx_hash(kernel.ptx),
        "registers": _registers(kernel),
        "cases": len(mine),
        "failed": sum(rows is None for rows in mine.values()),
        "worst": _tightest(mine),
    }


def _registers(kernel: CompiledKernel) -> int:
    """Registers a thread, -1 on a machine that cannot disassemble."""
    try:
        return report(kernel.cubin, d_qk=kernel.key.head_dim).resources.registers
    except MissingTool:
        return -1


def _tightest(verdicts: dict) -> dict[str, Any]:
    """The comparison that came closest to its limit."""
    worst: dict[str, Any] = {"used": 0.0}
    for case, rows in verdicts.items():
        for row in rows or []:
            for metric in row.metrics:
                if metric.limit and metric.value / metric.limit >= worst["used"]:
                    worst = {
                        "used": metric.value / metric.limit,
                        "generator": case.generator,
                        "case": str(case),
                        "tensor": row.name,
                        "metric": metric.name,
                        "value": metric.value,
                        "baseline": metric.baseline,
                        "limit": metric.limit,
                    }
    return worst


def driver() -> str:
    """The driver's version as nvidia-smi prints it, or "unknown"."""
    command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        found = subprocess.run(command, capture_output=True, text=True, timeout=30, check=True)
    except (OSError, subprocess.SubprocessError):
        return "unknown"
    return found.stdout.split("\n")[0].strip()
