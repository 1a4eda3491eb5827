# SPDX-License-Identifier: Apache-2.0
"""The pictures that are committed under docs/img: `python -m flash_ladder.common.figures`.

Each carries a hash of the data it shows and the versions that drew it, so that a test can tell
whether it is up to date. `make figures` does the same. Runs: host, needs altair and vl-convert.
"""

from __future__ import annotations

import hashlib
import json
import pathlib
import re
from importlib.metadata import version

from . import exp2_frontier, exp2_share, exp2_study, rescaling, roofline
from .studies import require_checkout
from .timeline import require_altair

DRAWN_BY = ("altair", "vl-convert-python")
FOLDER = pathlib.Path(__file__).resolve().parent.parent / "docs" / "img"
FIGURES = {  # file: what it shows as data, and how it is drawn
    "roofline.svg": (roofline.plot_rows, roofline.chart),
    "exp2-error.svg": (exp2_study.plot_rows, exp2_study.chart),
    "exp2-histogram.svg": (exp2_study.histogram_rows, exp2_study.histogram_chart),
    "exp2-frontier.svg": (exp2_frontier.plot_rows, exp2_frontier.chart),
    "exp2-share.svg": (exp2_share.plot_rows, exp2_share.chart),
    "rescaling.svg": (rescaling.plot_rows, rescaling.chart),
}


def to_svg(chart) -> str:
    """An altair chart as SVG; the same text each time, though Vega counts clip paths onwards."""
    require_altair()
    import vl_convert

    svg = vl_convert.vegalite_to_svg(chart.to_json())
    numbers: dict[str, int] = {}
    number = lambda found: f"clip{numbers.setdefault(found[1], len(numbers))}"
    return re.sub(r"\bclip(\d+)\b", number, svg)


def data_hash(name: str) -> str:
    """Hash of the data that figure `name` shows now."""
    rows = FIGURES[name][0]()
    return hashlib.sha256(json.dumps(rows, sort_keys=True).encode()).hexdigest()


def drawn_by() -> str:
    """The versions that decide about the bytes of a figure."""
    return ", ".join(f"{package} {version(package)}" for package in DRAWN_BY)


def figure(name: str) -> str:
    """Figure `name` as SVG, with its note; the same bytes each time with the same versions."""
    svg = to_svg(FIGURES[name][1]())
    note = f"<metadata>data sha256 {data_hash(name)}; drawn by {drawn_by()}</metadata>"
    head, bracket, rest = svg.partition(">")
    return f"{head}{bracket}{note}{rest}\n"


def main(folder: pathlib.Path = FOLDER) -> None:
    """Write all figures; they belong to a checkout."""
    require_checkout(folder)
    for name in FIGURES:
        (folder / name).write_text(figure(name), encoding="utf-8")
        print(folder / name)


if __name__ == "__main__":
    main()
