# SPDX-License-Identifier: Apache-2.0
"""The commands `model` and `roofline`: what they compute and how they print it. Runs: host."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from rich.console import Console

from . import inputs, roofline, timeline
from .envelope import check
from .grid import cta_tiles
from .masks import mask_of
from .model import MACHINES, OPEN, Machine, Run
from .stage import KernelSource

FIRST_MASKS = 8  # the stage that brings them
SIMULATED_ROWS = 512  # given to the model, query rows or a backward's keys: one CTA (or pair)
SMALL_KEYS = 128  # queries and keys of a page's picture
LENGTHS = range(128, 1025, 128)  # queries and keys that such a picture may have
SIMULATED_KEYS = 1024  # of the CTA that is shown; one with twice as many gives the steady state
STEADY_TILES = 4  # without a mask, of a CTA that is simulated with one
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


def parse_window(text: str) -> tuple[int, int]:
    """LEFT,RIGHT as `window_size` takes it; ValueError for another text."""
    try:
        left, right = (int(side) for side in text.split(","))
    except ValueError:
        raise ValueError(
            f"--window takes LEFT,RIGHT, such as 1024,0, with -1 for an open side; got {text!r}"
        ) from None
    return left, right


def refuse_masks(stage: KernelSource, causal: bool, window: tuple[int, int] | None = None) -> None:
    """ValueError when a mask is asked of a stage that has none."""
    if (causal or window) and stage.number < FIRST_MASKS:
        what = "causal mask" if causal else "window"
        raise ValueError(f"stage {stage.tag} has no {what} (stage {FIRST_MASKS:02d} brings it)")


@dataclass(frozen=True)
class Sizes:
    """The problem that a derived time is for; batch 1, as many keys as queries."""

    seqlen: int
    heads: int
    head_dim: int
    causal: bool = False
    window: tuple[int, int] | None = None

    @property
    def mask(self) -> dict:
        """The mask as options of the op; empty without one."""
        window = {"window_size": self.window} if self.window else {}
        return ({"causal": True} if self.causal else {}) | window


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

    The CTA has no mask and sees at most SIMULATED_KEYS keys (of a backward: queries); more tiles
    repeat its steady state. With a mask, see `_masked_time`. Raises ValueError for what the stage
    does not take.
    """
    refuse_masks(stage, sizes.causal, sizes.window)
    _check_sizes(stage, sizes)
    if sizes.mask and mask_of(*[torch.zeros(1, sizes.seqlen, 1, 1)] * 2, **sizes.mask).sees_nothing:
        raise ValueError(f"no query sees a key with window {sizes.window}: no kernel is started")
    rows, keys = min(sizes.seqlen, SIMULATED_ROWS), min(sizes.seqlen, SIMULATED_KEYS)
    turn = _turn(stage)
    start = time.perf_counter()
    run = _one_cta(stage, on, *(rows, keys)[::turn], sizes.head_dim)
    short = run if keys == SIMULATED_KEYS else None
    phases = timeline.phases(run, steady_cycles(stage, on, sizes.head_dim, rows, short))
    tile_m = math.prod(cta_tiles(stage, sizes.head_dim))
    cluster = getattr(stage.config, "CTAS", 1)  # that run as one
    places = on.with_changes({"sms": on["sms"] // cluster}) if cluster > 1 else on
    if sizes.mask:
        tiles = math.ceil(keys / _visited_tile(stage, sizes.head_dim))
        whole = _masked_time(stage, places, sizes, phases.per_tile * phases.tiles / tiles)
        seconds = time.perf_counter() - start
        return Report(
            stage, sizes, tuple(settings), (tile_m, keys)[::turn], run, phases, whole, seconds
        )
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
        products=PRODUCTS[stage.kind],
    )
    seconds, simulated = time.perf_counter() - start, (tile_m, keys)[::turn]
    return Report(stage, sizes, tuple(settings), simulated, run, phases, whole, seconds)


def steady_cycles(
    stage: KernelSource,
    on: Machine,
    head_dim: int,
    rows: int = SIMULATED_ROWS,
    short: Run | None = None,
) -> float:
    """Cycles of a CTA for each tile that its run names, in the steady state; what all pages show.

    From CTAs that see SIMULATED_KEYS keys (`short`, where that has run) and twice as many (of a
    backward: queries). rows: of the problem, of which the CTA has its share (of a backward: keys).
    """
    see = lambda keys: _one_cta(stage, on, *(rows, keys)[:: _turn(stage)], head_dim)
    return timeline.steady(short or see(SIMULATED_KEYS), see(2 * SIMULATED_KEYS))


def _masked_time(
    stage: KernelSource, on: Machine, sizes: Sizes, per_visited: float
) -> timeline.ProblemTime:
    """Derived time of a problem with a mask, whose CTAs have unequal work.

    Each CTA is simulated alone, with the tiles that it visits, but of those that need no mask only
    STEADY_TILES: the others are taken out of the middle and count `per_visited` cycles, as in a CTA
    without a mask. CTAs that are then the same are simulated once; a causal mask has a few kinds,
    whatever the length. SMs take the CTAs in the order of the grid, each when it is free. FLOP are
    those of the visible pairs.
    """
    tiles, tile = cta_tiles(stage, sizes.head_dim)
    rows, seqlen, visited = tiles * tile, sizes.seqlen, _visited_tile(stage, sizes.head_dim)
    row = torch.zeros(1, seqlen, 1, 1)
    mask = mask_of(row, row, **sizes.mask)
    sides = (mask.left, mask.right)[:: _turn(stage)]
    known: dict[tuple[int, ...], float] = {}
    work = []
    for start in range(0, seqlen, rows):
        kind, left_out = _masked_cta((start, min(start + rows, seqlen)), seqlen, sides, visited)
        if kind not in known:
            known[kind] = _masked_cycles(stage, on, sizes.head_dim, *kind)
        work.append(known[kind] + left_out * per_visited)
    flop = 2.0 * PRODUCTS[stage.kind] * sizes.heads * sizes.head_dim * mask.sequences().pairs
    return timeline.scheduled(on, work, sizes.heads, flop)


def _masked_cta(
    own: tuple[int, int], seqlen: int, sides: tuple[int, int], visited: int
) -> tuple[tuple[int, int, int, int], int]:
    """A problem of one CTA that has the work of the rows `own`, but for some tiles, and how many.

    Row i sees i - before ... i + after of seqlen, (before, after) = sides. Tiles of `visited` rows
    before the first that is seen are dropped, and so is what lies behind the last. The problem:
    (rows, seen, before, after), aligned at the end as all are.
    """
    (start, stop), (before, after) = own, sides
    base = max(start - before, 0) // visited * visited
    end = max(min(stop + after, seqlen), base)
    first = math.ceil(max(stop - 1 - before, 0) / visited)
    last = min(start + after + 1, seqlen) // visited
    left_out = max(0, last - first - STEADY_TILES)
    seen = end - base - left_out * visited
    shift = start - base - (seen - (stop - start))  # of the rows, against their places at the end
    before = before if before == OPEN else before - shift
    after = after if after == OPEN else after + shift - left_out * visited
    return (stop - start, seen, before, after), left_out


def _masked_cycles(
    stage: KernelSource, on: Machine, head_dim: int, rows: int, seen: int, before: int, after: int
) -> float:
    """Cycles of the only CTA of a problem; of a backward it has keys, and sees queries."""
    sizes, sides = (rows, seen)[:: _turn(stage)], (before, after)[:: _turn(stage)]
    window = tuple(None if side == OPEN else side for side in sides)
    return _one_cta(stage, on, *sizes, head_dim, {"window_size": window}).cta_cycles[0]


def _turn(stage: KernelSource) -> int:
    """Step of a slice that makes (owned, visited) of it (queries, keys): a backward owns keys."""
    return -1 if stage.kind == "backward" else 1


def _visited_tile(stage: KernelSource, head_dim: int) -> int:
    """Rows of a tile that a CTA visits."""
    return stage.config.TILE if stage.kind == "backward" else stage.config.TILE_N[head_dim]


def _one_cta(
    stage: KernelSource, on: Machine, rows: int, keys: int, head_dim: int, mask: dict | None = None
) -> Run:
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
    return stage.simulate_problem(replace(given, options=mask or {}), machine=on, max_ctas=1)


def small_run(
    stage: KernelSource,
    on: Machine,
    head_dim: int,
    length: int = SMALL_KEYS,
    causal: bool = False,
) -> Run:
    """The first CTA (or pair) of `length` queries and keys, for the pages.

    Raises ValueError for a length that is not in LENGTHS or a mask that the stage does not have.
    """
    refuse_masks(stage, causal)
    if length not in LENGTHS:
        raise ValueError(
            f"a picture's length is a multiple of {LENGTHS.step} up to {LENGTHS[-1]}; got {length}"
        )
    mask = {"causal": True} if causal else {}
    return _one_cta(stage, on, length, length, head_dim, mask)


def said_of(stage: KernelSource, run: Run, head_dim: int, causal: bool = False) -> str:
    """A run of `small_run` in a line: what its CTA owns and visits, and its cycles."""
    tiles, tile = cta_tiles(stage, head_dim)
    own, seen = ("queries", "key") if stage.kind == "attention" else ("keys", "query")
    visited = len(timeline.ends(run))
    pair = "a pair" if getattr(stage.config, "CTAS", 1) > 1 else "one CTA"
    return (
        f"stage {stage.tag}{', causal' if causal else ''}: {pair}, {tiles * tile} {own}, "
        f"{visited} {seen} tile{'s'[: visited > 1]}: {run.cta_cycles[0]:,.0f} cycles"
    )


def _check_sizes(stage: KernelSource, sizes: Sizes) -> None:
    """The stage's own checks of the whole problem, on tensors that take no memory."""
    row = torch.zeros(sizes.head_dim, dtype=torch.bfloat16)
    whole = row.expand(1, sizes.seqlen, sizes.heads, sizes.head_dim)
    check(stage, whole, whole, whole, need_cuda=False)


def print_report(report: Report, console: Console, table) -> None:
    """The report at 80 columns; `table` makes a rich table of the columns given."""
    name, (rows, keys) = report.run.machine.name, report.simulated
    size = getattr(report.stage.config, "CTAS", 1)
    unit, beside = ("pair", f" ({size} each)") if size > 1 else ("CTA", "")
    say = lambda text: console.print(text, highlight=False)
    say(f"[bold]Stage {report.stage.tag} on the SM model[/], {name} figures")
    say(f"One {unit}, {rows} queries x {keys} keys, ran in {report.wall_seconds:.1f} s here.\n")
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
        f"Cycles of the {unit} (derived): {phases.prologue:,.0f} before the steady state, "
        f"{phases.tiles} tiles of {phases.per_tile:,.0f}, {phases.epilogue:,.0f} after"
    )
    mask = ", causal" if sizes.causal else ""
    mask += ", window {},{}".format(*sizes.window) if sizes.window else ""
    problem = f"b1 s{sizes.seqlen} h{sizes.heads} d{sizes.head_dim}{mask}"
    say(
        f"Problem {problem}: {whole.ctas} {unit}s on {report.run.machine['sms']:.0f} SMs{beside} "
        f"(busy {whole.balance:.0%} of the time), {_digits(whole.seconds * 1e3)} ms, "
        f"{_digits(whole.tflops)} TFLOP/s (derived, not measured)"
    )
    say("Assumed:")
    for line in timeline.ASSUMPTIONS[: None if sizes.mask else -1]:
        say(f"- {line}")


def _digits(value: float) -> str:
    """Three digits, or all before the point, where three would need an exponent: 0.198, 1,307."""
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


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
