# SPDX-License-Identifier: Apache-2.0
"""The commands `model` and `roofline`: what they compute and how they print it. Runs: host."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from rich.console import Console

from . import inputs, roofline, timeline
from .envelope import check
from .model import MACHINES, Machine, Run
from .stage import KernelSource

FIRST_CAUSAL = 8  # the stage that brings masks
SIMULATED_ROWS = 512  # given to the model, query rows or a backward's keys: one CTA (or pair)
SMALL_KEYS = 128  # queries and keys of a page's picture
SIMULATED_KEYS = 1024  # more key tiles of the steady state teach nothing new
PRODUCTS = {"attention": 2, "backward": 5}  # matrix products of a tile


def machine(name: str, settings: Sequence[str] = ()) -> Machine:
    """A machine by name, with figures replaced by `NAME=VALUE`; ValueError for unknown ones."""
    if name not in MACHINES:
        raise ValueError(f"no machine {name!r}; allowed: {', '.join(MACHINES)}")
    values = {}
    for setting in settings:
        key, equals, text = setting.partition("=")
        if not equals:
            raise ValueError(f"--set takes NAME=VALUE, such as mufu=32; got {setting!r}")
        try:
            values[key] = float(text)
        except ValueError as wrong:
            raise ValueError(f"--set {key}: {text!r} is not a number") from wrong
        if key == "sms" and values[key] % 1:
            raise ValueError(f"--set sms: must be a whole number; got {text}")
    return MACHINES[name].with_changes(values)


def refuse_causal(stage: KernelSource, causal: bool) -> None:
    """ValueError when a causal mask is asked of a stage that has none."""
    if causal and stage.number < FIRST_CAUSAL:
        raise ValueError(
            f"stage {stage.tag} has no causal mask (stage {FIRST_CAUSAL:02d} brings it)"
        )


@dataclass(frozen=True)
class Sizes:
    """The problem that a derived time is for; batch 1, as many keys as queries."""

    seqlen: int
    heads: int
    head_dim: int
    causal: bool = False


@dataclass(frozen=True)
class Report:
    """One CTA of a stage on the SM model, and what it means for a problem; all derived."""

    stage: KernelSource
    sizes: Sizes
    settings: tuple[str, ...]
    simulated: tuple[int, int]  # query rows and keys of the CTA
    run: Run
    phases: timeline.Phases
    time: timeline.ProblemTime
    wall_seconds: float

    def as_dict(self) -> dict:
        """JSON-able."""
        return {
            "stage": self.stage.number,
            **({"part": self.stage.name} if self.stage.name else {}),
            "machine": self.run.machine.name,
            "settings": list(self.settings),
            "problem": {"batch": 1, **self.sizes.__dict__},
            "simulated": {"rows": self.simulated[0], "keys": self.simulated[1]},
            "derived": {
                "cycles_of_the_cta": self.run.cta_cycles[0],
                "cycles_prologue": self.phases.prologue,
                "cycles_per_tile": self.phases.per_tile,
                "cycles_epilogue": self.phases.epilogue,
                "utilisation": timeline.utilisation(self.run),
                "smem_port": {
                    name: {"cycles_per_tile": each, "cycles_once": once}
                    for name, (each, once) in timeline.port(self.run).items()
                },
                "ctas": self.time.ctas,
                "cycles": self.time.cycles,
                "seconds": self.time.seconds,
                "tflops": self.time.tflops,
                "balance": self.time.balance,
            },
            "assumptions": list(timeline.ASSUMPTIONS),
            "wall_seconds": self.wall_seconds,
        }


def simulate(
    stage: KernelSource, on: Machine, sizes: Sizes, settings: Sequence[str] = ()
) -> Report:
    """Run one CTA of a stage or part on the SM model and derive the time of a problem of `sizes`.

    The CTA sees at most SIMULATED_KEYS keys (of a backward: queries); more tiles repeat its steady
    state. Raises ValueError for what the stage does not take.
    """
    refuse_causal(stage, sizes.causal)
    _check_sizes(stage, sizes)
    rows, keys = min(sizes.seqlen, SIMULATED_ROWS), min(sizes.seqlen, SIMULATED_KEYS)
    turn = -1 if stage.kind == "backward" else 1  # its CTAs own keys and visit queries
    start = time.perf_counter()
    run = _one_cta(stage, on, *(rows, keys)[::turn], sizes.head_dim)
    phases = timeline.phases(run)
    tile_m = math.ceil(rows / run.ctas)
    cluster = getattr(stage.config, "CTAS", 1)  # that run as one
    places = on.with_changes({"sms": on["sms"] // cluster}) if cluster > 1 else on
    whole = timeline.problem_time(
        phases.prologue,
        phases.per_tile,
        phases.epilogue,
        machine=places,
        seqlen_q=sizes.seqlen,
        seqlen_k=sizes.seqlen,
        tile_m=tile_m,
        tile_n=math.ceil(keys / phases.tiles),
        head_dim=sizes.head_dim,
        heads=sizes.heads,
        causal=sizes.causal,
        products=PRODUCTS[stage.kind],
    )
    seconds, simulated = time.perf_counter() - start, (tile_m, keys)[::turn]
    return Report(stage, sizes, tuple(settings), simulated, run, phases, whole, seconds)


def _one_cta(stage: KernelSource, on: Machine, rows: int, keys: int, head_dim: int) -> Run:
    given = inputs.make(
        "llm_like",
        batch=1,
        seqlen_q=rows,
        seqlen_k=keys,
        heads=1,
        head_dim=head_dim,
        dtype=torch.bfloat16,
        seed=0,
    )
    return stage.simulate_problem(given, machine=on, max_ctas=1)


def small_run(stage: KernelSource, on: Machine, head_dim: int) -> Run:
    """One CTA that sees SMALL_KEYS keys, for the pages."""
    return _one_cta(stage, on, SMALL_KEYS, SMALL_KEYS, head_dim)


def _check_sizes(stage: KernelSource, sizes: Sizes) -> None:
    """The stage's own checks of the whole problem, on tensors that take no memory."""
    row = torch.zeros(sizes.head_dim, dtype=torch.bfloat16)
    whole = row.expand(1, sizes.seqlen, sizes.heads, sizes.head_dim)
    check(stage, whole, whole, whole, need_cuda=False)


def print_report(report: Report, console: Console, table) -> None:
    """The report at 80 columns; `table` makes a rich table of the columns given."""
    name, (rows, keys) = report.run.machine.name, report.simulated
    say = lambda text: console.print(text, highlight=False)
    say(f"[bold]Stage {report.stage.tag} on the SM model[/], {name} figures")
    say(f"One CTA, {rows} queries x {keys} keys, ran in {report.wall_seconds:.1f} s here.\n")
    used = table("engine", "busy (derived)", whole=2)
    for engine, share in sorted(timeline.utilisation(report.run).items(), key=lambda row: -row[1]):
        used.add_row(engine, f"{share:6.1%}")
    console.print(used)
    served = table("port of shared memory (derived)", "cycles a tile", "once", whole=3)
    for name, (each, once) in sorted(timeline.port(report.run).items(), key=lambda row: -row[1][0]):
        served.add_row(name, f"{each:10,.0f}", f"{once:10,.0f}")
    console.print(served)
    phases, sizes, whole = report.phases, report.sizes, report.time
    say(
        f"Cycles of the CTA (derived): {phases.prologue:,.0f} before the steady state, "
        f"{phases.tiles} tiles of {phases.per_tile:,.0f}, {phases.epilogue:,.0f} after"
    )
    mask = ", causal" if sizes.causal else ""
    problem = f"b1 s{sizes.seqlen} h{sizes.heads} d{sizes.head_dim}{mask}"
    say(
        f"Problem {problem}: {whole.ctas} CTAs on {report.run.machine['sms']:.0f} SMs "
        f"(busy {whole.balance:.0%} of the time), {whole.seconds * 1e3:.3g} ms, "
        f"{whole.tflops:.3g} TFLOP/s (derived, not measured)"
    )
    say("Assumed:")
    for line in timeline.ASSUMPTIONS[: None if sizes.causal else -1]:
        say(f"- {line}")


def print_roofline(found: roofline.Roofline, console: Console, table) -> None:
    """A roofline at 80 columns."""
    say = lambda text: console.print(text, highlight=False)
    say(
        f"[bold]Roofline, {found.name}[/]: {found.tile_m} queries x {found.tile_n} keys, "
        f"head dim {found.head_dim}, {found.machine.name} figures"
    )
    say("All derived from the paper's formulas; nothing was measured.\n")
    rows = table("resource", "cycles a CTA", "TFLOP/s if alone", "", whole=4)
    for name, cycles in found.cycles.items():
        bound = "bound" if name in found.bound else ""
        ceiling = f"{found.ceilings[name]:16,.0f}"
        rows.add_row(roofline.RESOURCES[name], f"{cycles:12,.0f}", ceiling, bound)
        if name == "smem" and len(found.smem_parts) > 1:
            for part, size in found.smem_parts.items():
                rows.add_row(f"  {part}", f"{size:12,.0f}", "", "")
    console.print(rows)
    say(
        f"At most {found.tflops:,.0f} TFLOP/s (derived): the tensor core is busy at most "
        f"{found.tensor_ceiling:.0%} of the time."
    )
    say("Not counted:")
    for line in roofline.LEFT_OUT:
        say(f"- {line}")
