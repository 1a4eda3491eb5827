# SPDX-License-Identifier: Apache-2.0
"""A drawing board for the primers' figures: boxes, lines, arrows and text as inline SVG.

Colours are classes that docs/css/extra.css sets for light and dark pages, and one unit is about a
pixel of a phone, so that text stays readable at 390 pixels. Runs: host.
"""

from __future__ import annotations

import html
import math

KINDS = ("plain", "mma", "smem", "exp", "tmem", "faint")  # classes of boxes and lines
WIDTH = 360  # of every drawing, in units
HEAD = 5.0  # length of an arrow's head


class Board:
    """Collects shapes; `render` makes the SVG. Coordinates: x to the right, y down."""

    def __init__(self, height: float, width: float = WIDTH):
        self.width, self.height = width, height
        self.shapes: list[str] = []

    def box(self, x, y, width, height, kind: str = "plain", label: str = "", small: bool = False):
        """A rectangle with its label in the middle; lines of the label are parted by newlines."""
        _check(kind)
        self.shapes.append(
            f'<rect class="{kind}" x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}"/>'
        )
        lines = label.split("\n") if label else []
        step = 11 if small else 13
        first = y + height / 2 + 4 - step * (len(lines) - 1) / 2
        for number, line in enumerate(lines):
            self.text(x + width / 2, first + step * number, line, "middle", small)

    def text(self, x, y, text: str, anchor: str = "start", small: bool = False, kind: str = ""):
        """A line of text whose baseline is at y. anchor: start, middle or end."""
        classes = " ".join(name for name in ("small" if small else "", kind) if name)
        chosen = f' class="{classes}"' if classes else ""
        self.shapes.append(
            f'<text{chosen} x="{x:g}" y="{y:g}" text-anchor="{anchor}">{html.escape(text)}</text>'
        )

    def line(self, x1, y1, x2, y2, kind: str = "plain"):
        """A straight line."""
        _check(kind)
        self.shapes.append(
            f'<line class="{kind}" x1="{x1:g}" y1="{y1:g}" x2="{x2:g}" y2="{y2:g}"/>'
        )

    def arrow(self, x1, y1, x2, y2, kind: str = "plain"):
        """A line with a head at its second end."""
        self.line(x1, y1, x2, y2, kind)
        angle = math.atan2(y2 - y1, x2 - x1)
        corners = [(x2, y2)]
        for turn in (math.pi - 0.45, math.pi + 0.45):
            corners.append((x2 + HEAD * math.cos(angle + turn), y2 + HEAD * math.sin(angle + turn)))
        points = " ".join(f"{x:.1f},{y:.1f}" for x, y in corners)
        self.shapes.append(f'<polygon class="{kind} head" points="{points}"/>')

    def render(self, description: str) -> str:
        """The SVG; `description` is what a screen reader says."""
        label = html.escape(description)
        return (
            f'<svg viewBox="0 0 {self.width:g} {self.height:g}" role="img" aria-label="{label}">'
            f"{''.join(self.shapes)}</svg>"
        )


def _check(kind: str) -> None:
    if kind not in KINDS:
        raise ValueError(f"kind {kind!r} is unknown; allowed: {', '.join(KINDS)}")
