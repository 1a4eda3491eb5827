# SPDX-License-Identifier: Apache-2.0
"""The graph of a plan's roles: a lane for each role, a row for each barrier.

A dot is a role that arrives, an arrowhead one that waits, a dot in a ring one that does both. Drawn
as SVG from the barrier table alone, so a page needs no script for it. Runs: host.
"""

from __future__ import annotations

import html

from .plan import Barrier, Plan

LABEL, LANE, HEAD, ROW = 96, 98, 52, 24  # pixels: names, a lane, its heading, a barrier
LEGEND = 34
DOT, TIP = 4.5, 8  # pixels: radius of a dot, length of an arrowhead
ARRIVES, WAITS = "#0072b2", "#d55e00"


def _names(arrivals) -> list[str]:
    return list(dict.fromkeys(row.role for row in arrivals))


def _said(barrier: Barrier) -> str:
    producers, consumers = _names(barrier.producers), _names(barrier.consumers)
    return f"{barrier.name}: {', '.join(producers)} → {', '.join(consumers)}"


def describe(plan: Plan) -> str:
    """The graph in words: each barrier with who arrives → who waits."""
    return "Who signals whom. " + "; ".join(_said(barrier) for barrier in plan.barriers)


def _dot(x: float, y: float) -> str:
    return f'<circle cx="{x:g}" cy="{y:g}" r="{DOT}" fill="{ARRIVES}"/>'


def _ring(x: float, y: float) -> str:
    return f'<circle cx="{x:g}" cy="{y:g}" r="{DOT + 3}" fill="none" stroke="{WAITS}"/>'


def _tip(x: float, y: float, side: int) -> str:
    """An arrowhead that ends at x and comes from the left (side -1) or the right (1)."""
    back = x + side * TIP
    return f'<path d="M{x:g},{y:g}L{back:g},{y - 5:g}V{y + 5:g}Z" fill="{WAITS}"/>'


def _row(barrier: Barrier, lanes: dict[str, float], y: float) -> str:
    producers, consumers = _names(barrier.producers), _names(barrier.consumers)
    ends = [lanes[name] for name in {*producers, *consumers}]
    line = f'<path d="M{min(ends):g},{y:g}H{max(ends):g}" stroke="currentColor" opacity="0.6"/>'
    parts = [f"<title>{html.escape(f'{_said(barrier)}. Guards {barrier.guards}')}</title>", line]
    parts.append(f'<text x="0" y="{y + 4:g}">{html.escape(barrier.name)}</text>')
    for name in producers:
        parts.append(_dot(lanes[name], y))
    for name in consumers:
        x = lanes[name]
        if name in producers:
            parts.append(_ring(x, y))
        else:
            nearest = min((lanes[other] for other in producers), key=lambda at: abs(at - x))
            parts.append(_tip(x, y, 1 if nearest > x else -1))
    return f"<g>{''.join(parts)}</g>"


def _heading(name: str, warps: str, x: float, bottom: float) -> str:
    width = LANE - 8
    middle = f'x="{x:g}" text-anchor="middle"'
    return (
        f'<rect x="{x - width / 2:g}" y="2" width="{width}" height="{HEAD - 16}" rx="4" '
        'fill="currentColor" fill-opacity="0.08"/>'
        f'<text {middle} y="17" font-weight="bold">{html.escape(name)}</text>'
        f'<text {middle} y="31" font-size="11">{html.escape(warps)}</text>'
        f'<path d="M{x:g},{HEAD - 14}V{bottom:g}" stroke="currentColor" opacity="0.25"/>'
    )


def _legend(y: float) -> str:
    arrives, waits, both = LABEL, LABEL + 106, LABEL + 210
    shown = [
        (arrives + 10, "arrives", _dot(arrives, y)),
        (waits + 8, "waits", _tip(waits, y, -1)),
        (both + 12, "arrives and waits", _dot(both, y) + _ring(both, y)),
    ]
    return "".join(f'{sign}<text x="{x}" y="{y + 4:g}">{text}</text>' for x, text, sign in shown)


def svg(plan: Plan) -> str:
    """The graph of `plan` as SVG; its text has the colour of the page around it."""
    lanes = {role.name: LABEL + LANE * (i + 0.5) for i, role in enumerate(plan.roles)}
    bottom = HEAD + ROW * len(plan.barriers)
    width = max(LABEL + LANE * len(lanes), LABEL + 340)
    parts = []
    for role in plan.roles:
        first, last = role.warps[0], role.warps[-1]
        warps = f"warp {first}" if first == last else f"warps {first}-{last}"
        parts.append(_heading(role.name, warps, lanes[role.name], bottom))
    for i, barrier in enumerate(plan.barriers):
        parts.append(_row(barrier, lanes, HEAD + ROW * i + 8))
    parts.append(_legend(bottom + 16))
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {bottom + LEGEND}" '
        f'width="{width}" role="img" aria-label="{html.escape(describe(plan))}" '
        'font-family="sans-serif" font-size="12" fill="currentColor">'
    )
    return "\n".join([head, *parts, "</svg>"])
