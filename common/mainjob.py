# SPDX-License-Identifier: Apache-2.0
"""The main job: one attention problem by every means this machine has, against the oracle.

Means: the stage's model (any machine), its compiled code (Linux: resources only, not executed),
its kernel on this machine's GPU. A stage with a backward pass computes gradients as well, of a
large problem those of its first rows and heads. Runs: host.
"""

from __future__ import annotations

import pathlib
import time
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from . import contract, contract_gpu, contract_gradients, facts, inputs, numerics
from .compile import CompiledKernel, DslMissing, compile_stage
from .envelope import check, dtype_name
from .grid import cluster_size
from .model import Run
from .sass import MissingTool
from .stage import KernelSource, Stage

SHOWN_FACTS = (
    "registers",
    "stack_bytes",
    "spill_instructions",
    "ffma_sass",
    "ffma2_sass",
    "mufu_ex2_sass",
)
GRADIENT_ROWS, GRADIENT_HEADS = 512, 4  # of one batch entry: a few seconds for model and oracle


@dataclass
class Result:
    """What the main job found; `ok` when every means agreed with the oracle."""

    stage: int
    inputs: str
    shape: str
    means: dict[str, dict[str, Any]] = field(default_factory=dict)
    resources: dict[str, Any] = field(default_factory=dict)
    not_done: dict[str, str] = field(default_factory=dict)
    next_steps: list[str] = field(default_factory=list)

    @property
    def ok(self) -> bool:
        """True when at least one means ran and all were within tolerance."""
        verdicts = [row["ok"] for means in self.means.values() for row in means["comparisons"]]
        return bool(verdicts) and all(verdicts)

    def as_dict(self) -> dict[str, Any]:
        """JSON-able."""
        return {**self.__dict__, "ok": self.ok}


def problem(
    qkv: pathlib.Path | None, generator: str, sizes: dict[str, int], dtype: str | None, seed: int
) -> inputs.Problem:
    """The user's own tensors, or generated ones of the sizes given.

    Without a dtype, a file of 16-bit tensors keeps its own; everything else becomes bfloat16.
    """
    wanted = getattr(torch, dtype or "bfloat16")
    if qkv is not None:
        loaded = inputs.load_qkv(qkv, dtype=wanted if dtype else None)
        if loaded.q.dtype in (torch.float16, torch.bfloat16):
            return loaded
        return inputs.load_qkv(qkv, dtype=wanted)
    return inputs.make(
        generator,
        batch=sizes["batch"],
        seqlen_q=sizes["seqlen"],
        seqlen_k=sizes["seqlen"],
        heads=sizes["heads"],
        head_dim=sizes["head_dim"],
        dtype=wanted,
        seed=seed,
    )


def run(stage: Stage, given: inputs.Problem, console: Console) -> Result:
    """Do the job and print it as it goes. Raises ValueError or TypeError for a bad problem."""
    if given.options and not stage.config.ENVELOPE.masks:
        raise ValueError(
            f"{given.name} has sequence lengths, which stage {stage.tag} does not take (stage 08 "
            f"brings them); allowed: {', '.join(contract.generators())}"
        )
    tensors = given.q, given.k, given.v
    if not all(x.numel() for x in tensors):
        check(stage, *tensors, need_cuda=False)
        raise ValueError(f"{given.name} is empty ({given.shape_text}): nothing is to be computed")
    check(stage, *tensors, given.softmax_scale, need_cuda=False, **given.options)
    result = Result(stage.number, given.name, given.shape_text)
    console.print(f"[bold]Stage {stage.tag}, {stage.config.NAME}[/]: {stage.config.IDEA}")
    console.print(f"Problem: {given.name}, {given.shape_text}\n")
    small = _small(given) if stage.config.ENVELOPE.differentiable else None
    _model(stage, given, console, result)
    if small:
        _model_gradients(stage, small, console, result)
    _compile(stage, given, console, result)
    _gpu(stage, given, small, console, result)
    console.print(_errors_table(result))
    if result.resources:
        console.print(_resources_table(result))
    _next_steps(stage, result)
    for name, reason in result.not_done.items():
        console.print(f"not done: {name}: {reason}", highlight=False)
    verdict = "[green]within tolerance[/]" if result.ok else "[red]NOT within tolerance[/]"
    console.print(f"\nVerdict: {verdict}: at most twice the error of same-precision torch")
    console.print("Next:\n" + "\n".join(f"  {step}" for step in result.next_steps))
    return result


def _record(result: Result, name: str, verdicts: list[numerics.Comparison], **more: Any) -> None:
    result.means[name] = {"comparisons": [row.as_dict() for row in verdicts], **more}


def _small(given: inputs.Problem) -> inputs.Problem:
    """The problem whose gradients are computed: its first rows and heads, of the first batch entry.

    With lengths all of it.
    """
    if given.options:
        return given
    first = slice(1), slice(GRADIENT_ROWS), slice(GRADIENT_HEADS)
    return replace(given, **{name: getattr(given, name)[first] for name in ("q", "k", "v", "dout")})


def _model(stage: Stage, given: inputs.Problem, console: Console, result: Result) -> None:
    run, seconds = _timed_model(stage, given, console)
    verdicts = contract.judge(given, run.out, run.lse, stage)
    _record(result, "SM model", verdicts, seconds=seconds, derived=_derived(run))
    console.print(f"SM model: {_model_text(run, stage, seconds)}")


def _model_gradients(stage: Stage, small: inputs.Problem, console: Console, result: Result) -> None:
    """dQ, dK, dV by the model of the usual backward part, after an exact forward."""
    part = stage.backward(small.q.shape[-1])
    run, seconds = _timed_model(part, small, console)
    verdicts = contract.judge_gradients(small, run.dq, run.dk, run.dv)
    result.means["SM model"]["comparisons"] += [row.as_dict() for row in verdicts]
    about = {"part": part.name, "shape": small.shape_text, "seconds": seconds}
    result.means["SM model"]["gradients"] = about | {"derived": _derived(run)}
    console.print(f"SM model of {part.name}, {small.shape_text}: {_model_text(run, part, seconds)}")


def _timed_model(
    source: KernelSource, given: inputs.Problem, console: Console
) -> tuple[Run, float]:
    with console.status(f"running the SM model of {source.tag} ..."):
        start = time.perf_counter()
        run = source.simulate_problem(given)
        return run, time.perf_counter() - start


def _derived(run: Run) -> dict[str, Any]:
    return {
        "machine": run.machine.name,
        "cycles_per_cta": run.cta_cycles[0],
        "tflops": run.tflops,
        "engine_busy": run.busy(),
    }


def _model_text(run: Run, source: KernelSource, seconds: float) -> str:
    unit = "pair" if cluster_size(source) == 2 else "CTA"
    busiest = max(run.busy().items(), key=lambda item: item[1])
    return (
        f"{run.ctas} {unit}s in {seconds:.1f} s. Derived for {run.machine.name}: "
        f"{run.cta_cycles[0]:.0f} cycles a {unit}, busiest engine {busiest[0]} ({busiest[1]:.0%})"
    )


def _compile(stage: Stage, given: inputs.Problem, console: Console, result: Result) -> None:
    dtype, head_dim = dtype_name(given.q.dtype), given.q.shape[3]
    try:
        with console.status("compiling for sm_100a ..."):
            kernel = compile_stage(stage, arch="sm_100a", dtype=dtype, head_dim=head_dim)
    except DslMissing as missing:
        result.not_done["compiled code"] = str(missing)
        return
    result.resources = _resources(kernel, result)
    origin = "from the cache" if kernel.from_cache else f"in {kernel.wall_seconds:.1f} s"
    console.print(f"Compiled {kernel.key.name} {origin}")


def _resources(kernel: CompiledKernel, result: Result) -> dict[str, Any]:
    found: dict[str, Any] = {"kernel": kernel.key.name, "smem_bytes": kernel.smem_bytes}
    found["compile_seconds"] = kernel.wall_seconds
    try:
        all_facts = facts.flat(*contract.read_kernel(kernel))
    except MissingTool as missing:
        result.not_done["machine code"] = str(missing)
        return found
    return found | {name: all_facts[name] for name in SHOWN_FACTS}


def _gpu(
    stage: Stage,
    given: inputs.Problem,
    small: inputs.Problem | None,
    console: Console,
    result: Result,
) -> None:
    reason = contract_gpu.gpu_skip_reason(stage)
    if reason:
        result.not_done["kernel on a GPU"] = reason
        return
    moved = given.to("cuda")
    with console.status("running the kernel on the GPU ..."):
        out, lse = contract_gpu.run_problem(stage, moved)
        verdicts = contract.judge(moved, out, lse, stage)
        if small:
            verdicts += _gpu_gradients(stage, small.to("cuda"))
    name = torch.cuda.get_device_name()
    _record(result, f"kernel on {name}", verdicts)
    console.print(f"Kernel: ran on {name}")


def _gpu_gradients(stage: Stage, small: inputs.Problem) -> list[numerics.Comparison]:
    part = stage.backward(small.q.shape[-1])
    made = contract_gradients.run_gradients(stage, part, small)
    return contract.judge_gradients(small, made.dq, made.dk, made.dv)


def _errors_table(result: Result) -> Table:
    table = Table("means", "tensor", "metric", "error", "same-precision torch", "limit", "")
    table.title = "Errors against the float64 oracle"
    for name, means in result.means.items():
        for row in means["comparisons"]:
            for problem in row["problems"]:
                table.add_row(name, row["name"], problem, "", "", "", "[red]FAIL[/]")
            for metric, values in row["metrics"].items():
                if values["limit"] is None:
                    continue
                figures = [f"{float(values[key]):.2e}" for key in ("value", "baseline", "limit")]
                good = float(values["value"]) <= float(values["limit"])
                mark = "[green]ok[/]" if good else "[red]FAIL[/]"
                table.add_row(name, row["name"], metric, *figures, mark)
    return table


def _resources_table(result: Result) -> Table:
    table = Table("fact", "value", title=f"Compiled code ({result.resources['kernel']})")
    for name, value in result.resources.items():
        if name != "kernel":
            shown = f"{value:.2f}" if isinstance(value, float) else str(value)
            table.add_row(name, shown)
    return table


def _next_steps(stage: Stage, result: Result) -> None:
    steps = {
        f"less stages/{stage.tag}/README.md": "the walkthrough of this stage",
        f"pytest stages/{stage.tag}": "its whole contract",
        f"flash-ladder facts {stage.number}": "what the compiled code shows",
        "flash-ladder run --qkv FILE": "your own tensors",
    }
    if result.not_done:
        steps["flash-ladder doctor"] = "what would unlock the rest"
    result.next_steps = [f"{command:<30}{why}" for command, why in steps.items()]
