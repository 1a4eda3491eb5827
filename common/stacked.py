# SPDX-License-Identifier: Apache-2.0
"""Timelines for the stage pages: a row for each role, one run above another on one time scale.

`timeline.svg` shows every engine of every role; here a role is one row, coloured by what it works
at, and the engines that can bound a kernel follow. Of a pair the leader is shown. Runs: host.
"""

from __future__ import annotations

import html
import re
from collections.abc import Iterable
from dataclasses import dataclass, replace

from .model import Run, Span
from .timeline import GAP, LABEL, MERGE, ROW, WAIT_COLOR, WAITS, WIDTH, axis, note

BOUNDS = {"tensor": "tensor core", "mufu": "MUFU", "smem": "shared memory"}
TITLE, RIGHT, LEGEND_ITEM = 26, 30, 130  # pixels: line above a panel, right margin, entry
LEGEND_COLUMNS = 5
PALER, FAINT = 0.5, 0.35  # opacity: of the second of two tiles or warpgroups, of waiting


@dataclass(frozen=True)
class Family:
    """Ops that a picture gives one colour; ops without the number of a tile or slot."""

    label: str
    color: str
    ops: tuple[str, ...]


FAMILIES = (
    Family("S", "#0072b2", ("S",)),
    Family("O", "#009e73", ("O",)),
    Family("dP", "#7570b3", ("dP",)),
    Family("dV", "#66a61e", ("dV",)),
    Family("dK", "#d55e00", ("dK",)),
    Family("dQ", "#cc79a7", ("dQ", "load dQ", "stage dQ", "reduce sdQ")),
    Family("exponentials", "#e69f00", ("exp", "P")),
    Family("rest of softmax", "#999933", ("load S", "mask", "max", "stats", "store P")),
    Family("dS", "#b5446e", ("load dP", "dS", "stage dS", "store dS", "copy sdX")),
    Family("rescaling of O", "#cc79a7", ("load O", "rescale", "store O")),
    Family("results", "#a6761d", ("normalise", "logsumexp", "output", "load dV", "load dK")),
)
COPIES = Family("copies by TMA", "#56b4e9", ())  # whatever else moves a buffer of shared memory
COPY = re.compile(r"(load|store) s[A-Zd]\w*")
NUMBER = re.compile(r"\[?\d+\]?$")  # of a tile or slot, at the end of an op
_FAMILY = {op: family for family in FAMILIES for op in family.ops}


def family(op: str) -> Family:
    """The family of an op; ValueError for an op that no family names."""
    name = NUMBER.sub("", op)
    if name in _FAMILY:
        return _FAMILY[name]
    if not COPY.fullmatch(name):
        raise ValueError(f"op {op!r} belongs to no family of common/stacked.py")
    return COPIES


@dataclass(frozen=True)
class Panel:
    """A run and the line above its picture."""

    title: str
    run: Run


def svg(panels: Iterable[Panel], description: str) -> str:
    """The panels as one SVG: same cycles a pixel, same colours, text in the colour of the page.

    description: what a screen reader says. Raises ValueError for an op without a family.
    """
    panels = tuple(panels)
    cycles = max(panel.run.cta_cycles[0] for panel in panels)
    scale = (WIDTH - LABEL - RIGHT) / cycles
    parts, y = _legend(panels)
    for panel in panels:
        parts.append(f'<text x="0" y="{y + 14}">{html.escape(panel.title)}</text>')
        top = y = y + TITLE
        bars = []
        for rows in (roles(panel.run, MERGE / scale), bounds(panel.run, MERGE / scale)):
            for name, spans in rows:
                bars.append(f'<text x="0" y="{y + 13}">{html.escape(name)}</text>')
                bars += [_bar(span, scale, y) for span in spans]
                y += ROW
            y += GAP
        parts += [*axis(cycles, scale, top, y - GAP), *bars]
        y += ROW + GAP
    about = note(panels[0].run)
    if any(_paler(span) for panel in panels for span in panel.run.trace):
        about += "; paler: the second of two tiles or warpgroups"
    parts.append(f'<text x="0" y="{y + 6}" fill-opacity="0.8">{html.escape(about)}</text>')
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {y + 14}" role="img" '
        f'aria-label="{html.escape(description)}" font-family="sans-serif" font-size="13" '
        'fill="currentColor">'
    )
    return "\n".join([head, *parts, "</svg>\n"])


def roles(run: Run, least: float = 0.0) -> list[tuple[str, list[Span]]]:
    """Each role of the leader that works, with its spans; waits lie below what it does.

    least: cycles; a span that goes on after a shorter gap is one.
    """
    found: dict[str, list[Span]] = {}
    for span in run.trace:
        name, _, rank = span.role.partition("@")
        if span.rank == 0 and rank in ("", "0"):
            found.setdefault(name, []).append(span)
    working = lambda spans: any(span.engine not in WAITS for span in spans)
    return [(name, _joined(spans, least)) for name, spans in found.items() if working(spans)]


def bounds(run: Run, least: float = 0.0) -> list[tuple[str, list[Span]]]:
    """The engines of BOUNDS on the leader's SM, with what keeps them busy."""
    rows = []
    for engine, name in BOUNDS.items():
        spans = [span for span in run.trace if span.engine == engine and span.rank == 0]
        rows += [(name, _joined(spans, least))] if spans else []
    return rows


def _joined(spans: list[Span], least: float) -> list[Span]:
    """Spans by start, waits first; what an op of a tile does on several engines is one span."""
    found: list[Span] = []
    latest: dict[tuple, int] = {}
    for span in sorted(spans, key=lambda row: (row.engine not in WAITS, row.start)):
        key = span.op, span.tile, span.role, span.engine in WAITS
        at = latest.get(key)
        if at is not None and span.start <= found[at].end + least:
            found[at] = replace(found[at], end=max(found[at].end, span.end))
        else:
            latest[key] = len(found)
            found.append(span)
    return found


def _paler(span: Span) -> bool:
    """Whether a span of work belongs to the second of two tiles or warpgroups."""
    if span.engine in WAITS:
        return False
    return span.op.endswith("1") or span.role.partition("@")[0].endswith("1")


def _said(span: Span) -> str:
    tile = f", tile {span.tile}" if span.tile >= 0 else ""
    return f"{span.op}{tile}: {span.start:,.0f} to {span.end:,.0f}"


def _bar(span: Span, scale: float, y: float) -> str:
    waits = span.engine in WAITS
    width = max((span.end - span.start) * scale, MERGE)
    place = f'x="{LABEL + span.start * scale:.1f}" y="{y + 1}" width="{width:.1f}"'
    fill = WAIT_COLOR if waits else family(span.op).color
    opacity = FAINT if waits else PALER if _paler(span) else 1
    title = f"<title>{html.escape(_said(span))}</title>"
    return f'<rect {place} height="{ROW - 3}" fill="{fill}" fill-opacity="{opacity}">{title}</rect>'


def _legend(panels: tuple[Panel, ...]) -> tuple[list[str], int]:
    """Entries for the families that occur, and the height they take."""
    work = [span for panel in panels for span in panel.run.trace if span.engine not in WAITS]
    found = {family(span.op) for span in work}
    entries = [(row.label, row.color, 1) for row in (*FAMILIES, COPIES) if row in found]
    entries.append(("waiting", WAIT_COLOR, FAINT))
    parts = []
    for index, (label, color, opacity) in enumerate(entries):
        x, y = index % LEGEND_COLUMNS * LEGEND_ITEM, index // LEGEND_COLUMNS * ROW + 4
        square = f'width="10" height="10" fill="{color}" fill-opacity="{opacity}"'
        parts.append(f'<rect x="{x}" y="{y}" {square}/>')
        parts.append(f'<text x="{x + 14}" y="{y + 9}">{html.escape(label)}</text>')
    return parts, -(-len(entries) // LEGEND_COLUMNS) * ROW + 8
