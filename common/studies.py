# SPDX-License-Identifier: Apache-2.0
"""What the studies behind the pages share: rows kept as data, and line plots of one look.

Runs: host; plots need altair.
"""

from __future__ import annotations

import json
import pathlib
import sys
from collections.abc import Sequence

from .timeline import require_altair

FONT = "Liberation Sans"  # comes with vl-convert
SOLID, DASHED, DOTTED = [1, 0], [6, 3], [2, 2]


def read_rows(path: pathlib.Path) -> list[dict]:
    """The committed rows of a study; FileNotFoundError outside a checkout."""
    return json.loads(path.read_text(encoding="utf-8"))


def write_rows(path: pathlib.Path, rows: Sequence[dict]) -> None:
    """A JSON list, a row on each line."""
    text = ",\n".join(json.dumps(row) for row in rows)
    path.write_text(f"[\n{text}\n]\n", encoding="utf-8")


def require_checkout(folder: pathlib.Path) -> None:
    """Ends the process unless `folder`, where results belong, is there."""
    if not folder.is_dir():
        sys.exit(f"no folder {folder}: run this in a checkout of the repository")


def line_plot(rows: Sequence[dict], title: str, subtitle: str, x, y, curves, dashes=None, **mark):
    """An altair chart of rows.

    x, y: encodings, such as alt.X("share:Q"). curves: (field, {value: hue}), what has a line of
    its own. dashes: of these lines, in order. mark: options of altair's `mark_line`.
    """
    alt = require_altair()
    field, hues = curves
    names = list(hues)
    encodings = {
        "color": alt.Color(f"{field}:N", scale=alt.Scale(domain=names, range=list(hues.values())))
    }
    if dashes:
        scale = alt.Scale(domain=names, range=list(dashes))
        encodings["strokeDash"] = alt.StrokeDash(f"{field}:N", scale=scale)
    lines = alt.Chart(alt.Data(values=list(rows))).mark_line(strokeWidth=2, **mark)
    heading = alt.Title(title, subtitle=subtitle)
    encoded = lines.encode(x=x, y=y, **encodings)
    return encoded.properties(width=560, height=280, title=heading).configure(font=FONT)
