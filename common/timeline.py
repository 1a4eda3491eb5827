# SPDX-License-Identifier: Apache-2.0
"""What a run of the SM model looks like, and what it means for a whole problem; all derived.

A trace for Perfetto, a timeline as static SVG and as an interactive page, the use of each engine,
tensor memory over time, and the time of a grid from the cycles of one CTA. Everything is made from
the spans of a `Run`; nothing here is a measurement. Runs: host; only the page needs altair.
"""

from __future__ import annotations

import heapq
import html
import math
from collections.abc import Iterable
from dataclasses import dataclass, replace
from itertools import pairwise

from .model import Machine, Run, Span
from .plan import TMEM_COLUMNS

Touch = tuple[float, float, str, str, int, int]  # of tensor memory, see `tmem_occupancy`
WAITS = ("latency", "barrier")  # span kinds in which a role waits and no engine works
COLORS = (
    "#0072b2",
    "#e69f00",
    "#009e73",
    "#cc79a7",
    "#56b4e9",
    "#d55e00",
    "#f0e442",
    "#7570b3",
    "#a6761d",
    "#66a61e",
)
WAIT_COLOR = "#b8bcc2"
MAX_CTAS = 1 << 22  # more CTAs of unequal length are not scheduled one by one


def note(run: Run) -> str:
    """The sentence that goes with every picture and trace of a run."""
    return f"SM model, {run.machine.name} figures: derived cycles, not measured"


def require_altair():
    """The altair module; RuntimeError that says how to get it."""
    try:
        import altair
        import vl_convert  # noqa: F401  altair needs it for SVG and for pages without a network
    except ImportError as missing:
        raise RuntimeError(
            f"this picture needs {missing.name}: pip install altair vl-convert-python"
        ) from missing
    return altair


# --- tracks -------------------------------------------------------------------------------------


def _lanes(spans: Iterable[Span]) -> list[list[Span]]:
    """Spans by start, in as few lanes as keep those of one lane apart."""
    lanes: list[list[Span]] = []
    for span in sorted(spans, key=lambda row: (row.start, row.end)):
        for lane in lanes:
            if lane[-1].end <= span.start:
                lane.append(span)
                break
        else:
            lanes.append([span])
    return lanes


def _tracks(spans: Iterable[Span]) -> list[tuple[str, list[Span]]]:
    """(engine, spans of one lane), in the order of first appearance."""
    grouped: dict[str, list[Span]] = {}
    for span in spans:
        grouped.setdefault(span.engine, []).append(span)
    return [
        (name if number == 0 else f"{name} ({number + 1})", lane)
        for name, members in grouped.items()
        for number, lane in enumerate(_lanes(members))
    ]


def tracks(run: Run, engines: bool | None = None) -> list[tuple[str, list[tuple[str, list[Span]]]]]:
    """For each role its tracks, one an engine (more where spans overlap), waits last.

    Then the tracks of the engines, whoever uses them: with `engines`, or where roles share them.
    """
    groups: dict[str, list[Span]] = {}
    for span in sorted(run.trace, key=lambda row: row.engine in WAITS):
        groups.setdefault(_agent(span, span.role), []).append(span)
    if engines or (engines is None and len(groups) > 1):
        for span in run.trace:
            if span.engine not in WAITS:
                groups.setdefault(_agent(span, "engines"), []).append(span)
    return [(name, _tracks(spans)) for name, spans in groups.items()]


def _agent(span: Span, name: str) -> str:
    """`name`, with the rank of the second CTA of a pair."""
    rank = getattr(span, "rank", 0)
    return f"{name}@{rank}" if rank and "@" not in name else name


def describe(span: Span) -> str:
    """A span in words, as tooltips show it."""
    tile = f", key tile {span.tile}" if span.tile >= 0 else ""
    cycles = f"cycles {span.start:,.0f} to {span.end:,.0f} ({span.end - span.start:,.0f})"
    return f"{span.op}{tile}: {span.role} on {span.engine}, {cycles}"


# --- use of engines, tensor memory --------------------------------------------------------------


def utilisation(run: Run) -> dict[str, float]:
    """`run.busy()` of the engines that the first CTA uses: share of its cycles, 0 to 1."""
    used = {span.engine for span in run.trace}
    return {engine: share for engine, share in run.busy().items() if engine in used}


def port(run: Run) -> dict[str, tuple[float, float]]:
    """Cycles of the first CTA's port of shared memory by purpose: (of each tile, once beside).

    Of a tile is what names one, shared evenly among all; what does not comes before or after.
    """
    spans = [span for span in run.trace if span.engine == "smem" and span.rank == 0]
    tiles = len(ends(run)) or 1
    cycles: dict[str, list[float]] = {}
    for span in spans:
        found = cycles.setdefault(_purpose(span), [0.0, 0.0])
        found[span.tile < 0] += (span.end - span.start) / (1 if span.tile < 0 else tiles)
    return {name: (each, once) for name, (each, once) in cycles.items()}


def _purpose(span: Span) -> str:
    """What a span of the port is for, without numbers of tiles and slots."""
    role, op = span.role.partition("@")[0].rstrip("0123456789"), span.op.partition("[")[0]
    if role == "MMA":
        return "MMA operands"
    return "TMA loads" if op.startswith("load ") else f"{role} {op}"


def tmem_log(run: Run) -> tuple[Touch, ...]:
    """What touched tensor memory in the first CTA; empty for a run without it."""
    return tuple(getattr(run, "tmem_log", ()))


def tmem_occupancy(touches: Iterable[Touch]) -> list[tuple[float, int]]:
    """(cycle, columns of tensor memory in use from then on); empty without touches.

    A touch is (start, end, "read" or "write", what, column, columns). A column is in use while it
    is touched, and between two touches when the later one reads: an MMA that accumulates reads.
    """
    rows = sorted(touches)
    edges = sorted({edge for row in rows for edge in (row[4], row[4] + row[5])})
    changes: dict[float, int] = {}
    for low, high in pairwise(edges):
        until = -math.inf
        for start, end, kind, _, column, columns in rows:
            if not column <= low < column + columns:
                continue
            used_from = until if kind == "read" and until > -math.inf else max(start, until)
            changes[used_from] = changes.get(used_from, 0) + high - low
            until = max(until, end)
            changes[until] = changes.get(until, 0) - (high - low)
    steps: list[tuple[float, int]] = []
    held = 0
    for cycle, change in sorted(changes.items()):
        if change:
            held += change
            steps.append((cycle, held))
    return steps


# --- Perfetto -----------------------------------------------------------------------------------


def perfetto(run: Run) -> dict:
    """The trace as Chrome/Perfetto JSON: a process for each role and one for all engines.

    One cycle is shown as 1 ns. Tensor memory in use becomes a counter.
    """
    groups = tracks(run, engines=True)
    events: list[dict] = []
    for pid, (group, rows) in enumerate(groups, start=1):
        events.append(_meta("process_name", pid, 0, {"name": group}))
        events.append(_meta("process_sort_index", pid, 0, {"sort_index": pid}))
        for tid, (name, spans) in enumerate(rows, start=1):
            events.append(_meta("thread_name", pid, tid, {"name": name}))
            events.append(_meta("thread_sort_index", pid, tid, {"sort_index": tid}))
            events += [_event(span, pid, tid) for span in spans]
    pid = len(groups) + 1
    for cycle, columns in tmem_occupancy(tmem_log(run)):
        counter = {"ph": "C", "name": "TMEM columns", "pid": pid, "ts": cycle / 1000}
        events.append({**counter, "args": {"columns": columns}})
    about = {"note": note(run), "unit": "1 ns shown = 1 cycle", "machine": run.machine.name}
    return {"traceEvents": events, "displayTimeUnit": "ns", "otherData": about}


def _meta(name: str, pid: int, tid: int, args: dict) -> dict:
    return {"ph": "M", "name": name, "pid": pid, "tid": tid, "args": args}


def _event(span: Span, pid: int, tid: int) -> dict:
    return {
        "ph": "X",
        "name": span.op,
        "cat": span.engine,
        "pid": pid,
        "tid": tid,
        "ts": span.start / 1000,
        "dur": (span.end - span.start) / 1000,
        "args": {"role": span.role, "engine": span.engine, "tile": span.tile},
    }


# --- static SVG ---------------------------------------------------------------------------------

LABEL, WIDTH, ROW, GAP = 150, 800, 18, 8  # pixels: left margin, whole width, track, between roles
LEGEND_ITEM = 105  # pixels
MERGE = 0.5  # pixels: narrower bars of one op that touch are drawn as one
TICKS = 6


def svg(run: Run, *, background: bool = True) -> str:
    """The timeline as SVG: a row for each role and engine, tooltips, tensor memory below.

    With `background` the picture is white and can stand alone; without it, text has the colour of
    the page around it.
    """
    cycles = max([run.cta_cycles[0], *(span.end for span in run.trace)])
    scale = (WIDTH - LABEL - 10) / cycles
    colors = _colors(run)
    parts, y = _legend(colors)
    top = y
    for role, rows in tracks(run):
        parts.append(f'<text x="0" y="{y + 13}" font-weight="bold">{html.escape(role)}</text>')
        for name, spans in rows:
            label = f'x="{LABEL - 6}" y="{y + 13}" text-anchor="end"'
            parts.append(f"<text {label}>{html.escape(name)}</text>")
            parts += [_bar(span, colors, scale, y) for span in _merged(spans, MERGE / scale)]
            y += ROW
        y += GAP
    steps = tmem_occupancy(tmem_log(run))
    if steps:
        parts.append(_occupancy(steps, cycles, scale, y))
        y += 3 * ROW + GAP
    parts = [*axis(cycles, scale, top, y), *parts]
    height = y + 38
    parts.append(f'<text x="{LABEL}" y="{height - 4}">{html.escape(note(run))}</text>')
    if background:
        parts.insert(0, f'<rect width="{WIDTH}" height="{height}" fill="white"/>')
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" role="img" '
        f'aria-label="timeline" font-family="sans-serif" font-size="13" '
        f'fill="{"#222" if background else "currentColor"}">'
    )
    return "\n".join([head, *parts, "</svg>\n"])


def _colors(run: Run) -> dict[str, str]:
    """A colour for each op that keeps an engine busy; then one for all waits."""
    ops = dict.fromkeys(span.op for span in run.trace if span.engine not in WAITS)
    return {op: COLORS[index % len(COLORS)] for index, op in enumerate(ops)}


def _legend(colors: dict[str, str]) -> tuple[list[str], int]:
    """Legend entries and the height they take."""
    parts, columns = [], (WIDTH - LABEL) // LEGEND_ITEM
    entries = [*colors.items(), ("waiting", WAIT_COLOR)]
    for index, (op, color) in enumerate(entries):
        x, y = LABEL + index % columns * LEGEND_ITEM, index // columns * ROW + 4
        parts.append(f'<rect x="{x}" y="{y}" width="10" height="10" fill="{color}"/>')
        parts.append(f'<text x="{x + 14}" y="{y + 9}">{html.escape(op)}</text>')
    return parts, math.ceil(len(entries) / columns) * ROW + 12


def _merged(spans: list[Span], least: float) -> list[Span]:
    """Spans of a track; neighbours of the same op that are shorter than `least` become one."""
    found: list[Span] = []
    for span in spans:
        last = found[-1] if found else None
        short = span.end - span.start < least
        if last and short and last.op == span.op and span.start - last.end < least:
            found[-1] = replace(last, tile=-1, end=span.end)
        else:
            found.append(span)
    return found


def _bar(span: Span, colors: dict[str, str], scale: float, y: float) -> str:
    fill = WAIT_COLOR if span.engine in WAITS else colors[span.op]
    width = max((span.end - span.start) * scale, 0.2)
    place = f'x="{LABEL + span.start * scale:.2f}" y="{y + 1}" width="{width:.2f}"'
    title = f"<title>{html.escape(describe(span))}</title>"
    return f'<rect {place} height="{ROW - 2}" fill="{fill}">{title}</rect>'


def axis(cycles: float, scale: float, top: float, bottom: float) -> list[str]:
    """Grid lines with their cycles."""
    rough = cycles / TICKS
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(factor * power for factor in (1, 2, 5, 10) if factor * power >= rough)
    parts = []
    for index in range(math.floor(cycles / step) + 1):
        x = LABEL + index * step * scale
        line = f'x1="{x:.1f}" y1="{top - 4}" x2="{x:.1f}" y2="{bottom + 2}"'
        parts.append(f'<line {line} stroke="currentColor" stroke-opacity="0.2"/>')
        text = f'<text x="{x:.1f}" y="{bottom + 15}" text-anchor="middle">'
        parts.append(f"{text}{index * step:,.0f}</text>")
    return parts


def _occupancy(steps: list[tuple[float, int]], cycles: float, scale: float, y: float) -> str:
    """Columns of tensor memory in use, as a filled step curve three rows high."""
    low, height = y + 3 * ROW, 3 * ROW - 2
    path = [f"M{LABEL} {low}"]
    for cycle, columns in steps:
        path.append(f"H{LABEL + cycle * scale:.2f}V{low - columns / TMEM_COLUMNS * height:.2f}")
    path.append(f"H{LABEL + cycles * scale:.2f}V{low}Z")
    most = max(columns for _, columns in steps)
    title = f"<title>tensor memory in use, at most {most} of {TMEM_COLUMNS} columns</title>"
    label = f'<text x="0" y="{y + 13}" font-weight="bold">TMEM in use</text>'
    return f'{label}<path d="{"".join(path)}" fill="#7570b3" fill-opacity="0.6">{title}</path>'


# --- interactive page ---------------------------------------------------------------------------


def chart(run: Run):
    """The timeline as an altair chart: zoom along time, pick an op in the legend, tooltips."""
    alt = require_altair()
    rows = [
        {
            "track": f"{role} {name}",
            "op": "waiting" if span.engine in WAITS else span.op,
            "what": span.op,
            "tile": span.tile,
            "start": span.start,
            "end": span.end,
            "cycles": span.end - span.start,
        }
        for role, members in tracks(run)
        for name, spans in members
        for span in spans
    ]
    colors = {**_colors(run), "waiting": WAIT_COLOR}
    scale = alt.Scale(domain=list(colors), range=list(colors.values()))
    picked = alt.selection_point(fields=["op"], bind="legend")
    zoom = alt.selection_interval(bind="scales", encodings=["x"])
    bars = alt.Chart(alt.Data(values=rows)).mark_bar()
    bars = bars.encode(
        x=alt.X("start:Q", title="cycle (derived)"),
        x2="end",
        y=alt.Y("track:N", sort=list(dict.fromkeys(row["track"] for row in rows)), title=None),
        color=alt.Color("op:N", scale=scale, title="op (click to pick)"),
        opacity=alt.condition(picked, alt.value(1.0), alt.value(0.1)),
        tooltip=["what:N", "tile:Q", "track:N", "start:Q", "end:Q", "cycles:Q"],
    )
    bars = bars.properties(width=WIDTH - LABEL).add_params(picked, zoom)
    steps = tmem_occupancy(tmem_log(run))
    if not steps:
        return bars.properties(title=note(run))
    values = [{"cycle": cycle, "TMEM columns": columns} for cycle, columns in steps]
    held = alt.Chart(alt.Data(values=values)).mark_area(interpolate="step-after")
    held = held.encode(x="cycle:Q", y="TMEM columns:Q").properties(width=WIDTH - LABEL, height=80)
    return alt.vconcat(bars, held).resolve_scale(x="shared").properties(title=note(run))


def page(run: Run) -> str:
    """The interactive timeline as one HTML file that needs no network (about 1 MB)."""
    with require_altair().data_transformers.enable("default", max_rows=None):
        return chart(run).to_html(inline=True)


# --- a whole problem ----------------------------------------------------------------------------


@dataclass(frozen=True)
class Phases:
    """Cycles of a CTA: for each of `tiles` tiles in the steady state, and what comes once.

    epilogue: after the last tile. prologue: the rest, which fills the pipeline, less what the last
    tiles save as it empties.
    """

    prologue: float
    per_tile: float
    epilogue: float
    tiles: int


def ends(run: Run) -> dict[int, float]:
    """The cycle at which each tile ends, with the last span that names it."""
    found: dict[int, float] = {}
    for span in run.trace:
        if span.tile >= 0:
            found[span.tile] = max(found.get(span.tile, 0.0), span.end)
    return found


def steady(short: Run, long: Run) -> float:
    """Cycles of a tile in the steady state, from CTAs that differ in how many tiles they visit.

    What the first and last tiles take otherwise is in both and drops out. Raises ValueError unless
    `long` has more tiles.
    """
    more = len(ends(long)) - len(ends(short))
    if more < 1:
        raise ValueError("the steady state needs a second run with more tiles")
    return (long.cta_cycles[0] - short.cta_cycles[0]) / more


def phases(run: Run, per_tile: float) -> Phases:
    """The phases of a CTA; together they give its cycles exactly. per_tile: see `steady`.

    Raises ValueError when no span names a tile.
    """
    tiles = ends(run)
    if not tiles:
        raise ValueError("no span of the run names a key tile, so it has no steady state")
    last = min(max(tiles.values()), run.cta_cycles[0])
    per_tile = min(per_tile, last / len(tiles))
    prologue = last - per_tile * len(tiles)
    return Phases(prologue, per_tile, run.cta_cycles[0] - last, len(tiles))


@dataclass(frozen=True)
class ProblemTime:
    """Derived time of a grid. balance: mean share of the time in which an SM has a CTA, 0 to 1."""

    machine: Machine
    ctas: int
    cycles: float
    flop: float
    balance: float

    @property
    def seconds(self) -> float:
        """Derived time."""
        return self.cycles / self.machine["clock"]

    @property
    def tflops(self) -> float:
        """Derived 1e12 floating-point operations of the products a second."""
        return self.flop / self.seconds / 1e12


ASSUMPTIONS = (
    "every CTA takes the prologue, its key tiles and the epilogue as long as the simulated one",
    "an SM has one CTA at a time; CTAs, or pairs, start in order on the SMs that are free first",
    "SMs do not slow each other down; launch overhead is nil and the clock constant",
    "with a mask each kind of CTA is simulated; of more than 4 tiles that need none, each further "
    "one takes as long as in a full CTA",
)


def problem_time(
    cycles_prologue: float,
    cycles_per_tile: float,
    cycles_epilogue: float,
    *,
    machine: Machine,
    seqlen_q: int,
    seqlen_k: int,
    tile_m: int,
    tile_n: int,
    head_dim: int,
    heads: int = 1,
    batch: int = 1,
    causal: bool = False,
    longest_first: bool = False,
    products: int = 2,
) -> ProblemTime:
    """Derived time of an attention forward from the cycles of one CTA (see ASSUMPTIONS).

    A CTA has tile_m query rows and visits key tiles of tile_n; a causal one only those up to its
    last row, the last query facing the last key, all at the same cost. Query tiles start first to
    last (longest_first: last to first), then heads, then batch. FLOP are 2 b h sq sk d for each of
    the `products`, with a causal mask those of the visible area, half of it when sq = sk. A
    backward without a mask is the same with queries and keys exchanged. Raises TypeError or
    ValueError for other numbers.
    """
    _check_cycles(cycles_prologue, cycles_per_tile, cycles_epilogue)
    sizes = {"seqlen_q": seqlen_q, "seqlen_k": seqlen_k, "tile_m": tile_m, "tile_n": tile_n}
    sizes |= {"head_dim": head_dim, "heads": heads, "batch": batch}
    for name, size in sizes.items():
        if isinstance(size, bool) or not isinstance(size, int):
            raise TypeError(f"{name} must be an integer; got {size!r}")
        if size < 1:
            raise ValueError(f"{name} must be at least 1; got {size}")
    blocks, slices = math.ceil(seqlen_q / tile_m), heads * batch
    ctas = blocks * slices
    overhead = cycles_prologue + cycles_epilogue
    sms = int(machine["sms"])
    if causal:
        lasts = [min((block + 1) * tile_m, seqlen_q) for block in range(blocks)]
        seen = [max(0, min(seqlen_k, row + seqlen_k - seqlen_q)) for row in lasts]
        work = [overhead + math.ceil(keys / tile_n) * cycles_per_tile for keys in seen]
        work = sorted(work, reverse=True) if longest_first else work
    else:
        work = [overhead + math.ceil(seqlen_k / tile_n) * cycles_per_tile] * blocks
    flop = 2.0 * products * slices * head_dim * _pairs(seqlen_q, seqlen_k, causal)
    if causal:
        return scheduled(machine, work, slices, flop)
    total, cycles = ctas * work[0], math.ceil(ctas / sms) * work[0]
    return ProblemTime(machine, ctas, cycles, flop, total / (sms * cycles))


def scheduled(machine: Machine, work: list[float], slices: int, flop: float) -> ProblemTime:
    """Derived time of `slices` (heads, batch entries) of CTAs that take the cycles of `work`.

    The next CTA in the order of the grid goes to the SM that is free first. ValueError for more
    CTAs than are scheduled one by one.
    """
    ctas, sms = len(work) * slices, int(machine["sms"])
    if ctas > MAX_CTAS:
        raise ValueError(f"{ctas} CTAs of unequal length are more than {MAX_CTAS}; use fewer heads")
    cycles = _makespan(work, slices, sms)
    return ProblemTime(machine, ctas, cycles, flop, sum(work) * slices / (sms * cycles))


def _check_cycles(prologue: float, per_tile: float, epilogue: float) -> None:
    named = {"cycles_prologue": prologue, "cycles_per_tile": per_tile, "cycles_epilogue": epilogue}
    for name, value in named.items():
        if not (math.isfinite(value) and value >= 0):
            raise ValueError(f"{name} must be finite and not negative; got {value}")
    if per_tile == 0:
        raise ValueError("cycles_per_tile must be positive")


def _pairs(seqlen_q: int, seqlen_k: int, causal: bool) -> float:
    """Pairs of query and key that are computed for, counted as areas."""
    if not causal:
        return float(seqlen_q * seqlen_k)
    if seqlen_k < seqlen_q:
        return seqlen_k * seqlen_k / 2
    return seqlen_q * (2 * seqlen_k - seqlen_q) / 2


def _makespan(work: list[float], slices: int, sms: int) -> float:
    """Cycles until `slices` rounds of `work`, in order, are done by SMs that take the next one."""
    free = [0.0] * sms
    for _ in range(slices):
        for cycles in work:
            heapq.heapreplace(free, free[0] + cycles)
    return max(free)
