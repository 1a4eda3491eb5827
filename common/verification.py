# SPDX-License-Identifier: Apache-2.0
"""Running a stage's gpu tier outside pytest, into a record for `evidence.json`. Runs: host."""

from __future__ import annotations

import datetime
import subprocess
import traceback
from typing import Any

import torch
from rich.console import Console
from rich.progress import track

from . import contract, contract_gpu
from .compile import CompiledKernel, compile_stage, versions
from .contract import Case
from .facts import ptx_facts
from .launch import native_arch
from .numerics import Comparison
from .ptx import ptx_hash
from .sass import MissingTool, report
from .stage import Stage


def verify(stage: Stage, console: Console, notes: str = "") -> dict[str, Any]:
    """Run all cases and checks of the gpu tier; returns the run as `evidence.RUN_FIELDS`.

    Raises RuntimeError, with the reason, on a machine that cannot run the stage.
    """
    reason = contract_gpu.gpu_skip_reason(stage)
    if reason:
        raise RuntimeError(f"cannot verify stage {stage.tag}: {reason}")
    arch = native_arch(torch.device("cuda"))
    cases = contract.cases(stage, contract.GPU_SIZES)
    verdicts: dict[Case, list[Comparison] | None] = {}
    failures = []
    for case in track(cases, f"stage {stage.tag}: cases", console=console):
        verdicts[case] = _attempt(failures, str(case), contract_gpu.check_gpu_case, stage, case)
    for name, check in contract_gpu.GPU_CHECKS.items():
        _attempt(failures, name, check, stage)
    kernels = [
        _kernel_row(compile_stage(stage, arch=arch, dtype=dtype, head_dim=head_dim), verdicts)
        for dtype in stage.config.ENVELOPE.dtypes
        for head_dim in stage.config.ENVELOPE.head_dims
    ]
    total = len(cases) + len(contract_gpu.GPU_CHECKS)
    for failure in failures:
        console.print(failure, style="red", markup=False)
    console.print(f"{total - len(failures)} passed, {len(failures)} failed")
    return {
        "date": datetime.date.today().isoformat(),
        "gpu": torch.cuda.get_device_name(),
        "driver": _driver(),
        "torch": torch.__version__,
        "dsl": versions()["nvidia-cutlass-dsl"],
        "target": arch,
        "mode": "native",
        "command": f"flash-ladder verify {stage.number}",
        "kernels": kernels,
        "tests": {"passed": total - len(failures), "failed": len(failures), "skipped": 0},
        "notes": notes,
    }


def _attempt(failures: list[str], name: str, check, *arguments):
    """The result of a check, or None with its failure recorded."""
    try:
        return check(*arguments)
    except Exception:
        failures.append(f"{name}: {traceback.format_exc(limit=-1)}")
        return None


def _kernel_row(kernel: CompiledKernel, verdicts: dict) -> dict[str, Any]:
    key = kernel.key
    mine = {
        case: rows
        for case, rows in verdicts.items()
        if (case.dtype, case.head_dim) == (key.dtype, key.head_dim)
    }
    return {
        "key": key.name,
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


def _driver() -> str:
    """The driver's version as nvidia-smi prints it, or "unknown"."""
    command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        found = subprocess.run(command, capture_output=True, text=True, timeout=30, check=True)
    except (OSError, subprocess.SubprocessError):
        return "unknown"
    return found.stdout.split("\n")[0].strip()
