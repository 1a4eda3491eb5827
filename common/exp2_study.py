# SPDX-License-Identifier: Apache-2.0
"""The study behind docs/exp2.md: its numbers as data, its tables and its figures.

`python -m flash_ladder.common.minimax` is the command; `exhaustive --write` makes
docs/data/exp2.json, `table` prints the page's tables from it. Every number is derived, by counting
on a CPU, but for those of the paper's Table 2, which are quoted. Runs: host.
"""

from __future__ import annotations

import argparse
import datetime
import functools
import json
import pathlib
import sys
from collections.abc import Mapping, Sequence

import mpmath
import numpy as np
from mpmath import mp

from . import exp2, exp2_search, minimax, studies

RESULTS = pathlib.Path(__file__).resolve().parent.parent / "docs" / "data" / "exp2.json"
GPU_RESULTS = RESULTS.with_name("exp2-gpu.json")  # written by `exp2_gpu`
COMMAND = "python -m flash_ladder.common.minimax exhaustive --write"
# Q: arXiv 2603.05451v1, Table 2: 4M random inputs in [0, 1) against float64.
TABLE_2 = {  # row: float32 max and mean, bf16 max and mean, relative
    "ideal": (None, None, 3.89e-3, 1.41e-3),
    "MUFU.EX2": (1.41e-7, 3.04e-8, 3.89e-3, 1.41e-3),
    "degree 3": (8.77e-5, 5.43e-5, 3.90e-3, 1.41e-3),
    "degree 4": (3.05e-6, 1.84e-6, 3.89e-3, 1.41e-3),
    "degree 5": (1.44e-7, 5.48e-8, 3.89e-3, 1.41e-3),
}
SHOWN = (3, 4, 5)  # degrees in that table
POINTS = 240  # of a curve in the figure
FIGURE_DEGREE = 3
STRIDE = 512  # one float32 in so many counts in the histogram
HUES = "#999999", "#d55e00", "#0072b2", "#009e73", "#cc79a7"  # by degree
LOWEST, BINS = -10, 5  # log10 of the smallest error shown; bins a decade
CURVES = {"published": "published", "one": "ours, p0 = 1", "free": "ours, p0 free"}


# --- numbers ------------------------------------------------------------------------------------


def polynomials(degrees: Sequence[int] = minimax.DEGREES) -> dict[str, tuple[float, ...]]:
    """All float32 polynomials of these degrees: "published 3", "one 3", "free 3", "nearest 3"."""
    found = {f"published {n}": minimax.PUBLISHED[n] for n in degrees}
    for variant in minimax.VARIANTS:
        found |= {f"{variant} {n}": minimax.coefficients(n, variant) for n in degrees}
    return found


def count(degrees: Sequence[int] = minimax.DEGREES, **options) -> dict[str, dict]:
    """Errors of all polynomials of these degrees; options are those of `exp2.exhaustive`.

    Two passes: [0, 1], which the first three kinds share, and [-1/2, 1/2].
    """
    everything = polynomials(degrees)
    centred = {name: c for name, c in everything.items() if name.startswith("nearest")}
    unit = {name: c for name, c in everything.items() if name not in centred}
    found = exp2.exhaustive(unit, **options)
    around = exp2.exhaustive(centred, "nearest", **options)
    return found | {"ideal nearest": around.pop("ideal")} | around


def truncation(name: str) -> dict[str, float]:
    """Of a float32 polynomial: its certified error in exact arithmetic, and the minimax error."""
    kind, degree = name.split()
    variant = "one" if kind == "published" else kind
    domain, fixed = minimax.variant(variant)
    own = minimax.certify(polynomials([int(degree)])[name], domain, fixed=int(fixed))
    best = minimax.minimax(int(degree), variant)
    return {"truncation": _rounded_up(own.above), "minimax": _rounded_up(best.error)}


def _rounded_up(x) -> float:
    """A bound to 8 digits, not below x."""
    return float(mp.nstr(x * (1 + mp.mpf(10) ** -7), 8))


def study(**options) -> dict:
    """Everything that docs/data/exp2.json holds."""
    return {
        "what": "error of float32 polynomials for 2^x over every float32 fraction; derived",
        "provenance": {
            "command": COMMAND,
            "date": datetime.date.today().isoformat(),
            "numpy": np.__version__,
            "mpmath": mpmath.__version__,
        },
        "coefficients": {name: [c.hex() for c in p] for name, p in polynomials().items()},
        "truncation": {name: truncation(name) for name in polynomials()},
        "errors": count(**options),
    }


def results() -> dict:
    """The committed numbers; FileNotFoundError outside a checkout."""
    return json.loads(RESULTS.read_text(encoding="utf-8"))


def gpu_results() -> dict:
    """What `exp2_gpu` measured and was committed; FileNotFoundError outside a checkout."""
    return json.loads(GPU_RESULTS.read_text(encoding="utf-8"))


# --- tables -------------------------------------------------------------------------------------


def tables(data: Mapping) -> str:
    """The tables of docs/exp2.md, in Markdown."""
    return "\n\n".join("\n".join(rows) for rows in (_coefficient_rows(data), _table_2_rows(data)))


def _coefficient_rows(data: Mapping) -> list[str]:
    """By degree: the minimax errors, and the largest errors in float32."""
    rows = [
        "| degree | minimax, p0 = 1 | minimax, p0 free | published | ours, p0 = 1 | ours, p0 free "
        "| ours, nearest |",
        "|---|---|---|---|---|---|---|",
    ]
    for n in minimax.DEGREES:
        cells = [data["truncation"][f"{kind} {n}"]["minimax"] for kind in ("one", "free")]
        kinds = ("published", "one", "free", "nearest")
        cells += [data["errors"][f"{kind} {n}"]["fp32"]["max"] for kind in kinds]
        rows.append(f"| {n} | " + " | ".join(f"{cell:.4g}" for cell in cells) + " |")
    return rows


def _table_2_rows(data: Mapping) -> list[str]:
    """Table 2 of the paper, the published coefficients counted here, and ours."""
    rows = [
        "| | float32 max | float32 mean | bias | bf16 max | bf16 mean | same bf16 | fp16 max "
        "| same fp16 |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for name, (most, mean, short_most, short_mean) in TABLE_2.items():
        cells = [_cell(most), _cell(mean), "", _cell(short_most), _cell(short_mean), "", "", ""]
        rows.append(f"| {name} (Q) | " + " | ".join(cells) + " |")
    rows.append(_counted_row("MUFU.EX2", gpu_results()["mufu"], "M"))
    for name in ("ideal", *(f"{kind} {n}" for n in SHOWN for kind in ("published", "one"))):
        rows.append(_counted_row(name, data["errors"][name]))
    return rows


def _counted_row(name: str, found: Mapping, mark: str = "D") -> str:
    long, bf16, fp16 = (found[key] for key in ("fp32", "bf16", "fp16"))
    numbers = (long["max"], long["mean"], long["bias"], bf16["max"], bf16["mean"])
    cells = [_cell(x) for x in numbers]
    cells += [_share(bf16["same"]), _cell(fp16["max"]), _share(fp16["same"])]
    label = name.replace("one", "ours, degree").replace("published", "published, degree")
    return f"| {label} ({mark}) | " + " | ".join(cells) + " |"


def _cell(x: float | None) -> str:
    return "" if x is None else f"{x:.2e}"


def _share(x: float) -> str:
    return f"{100 * x:.3f} %"


# --- figure -------------------------------------------------------------------------------------


def plot_rows() -> list[dict]:
    """p(x) / 2^x - 1 of three polynomials of degree 3 on [0, 1], exact arithmetic, in 1e-5."""
    found = polynomials([FIGURE_DEGREE])
    return [
        {
            "fraction": i / POINTS,
            "polynomial": label,
            "error": round(float(minimax.error(found[f"{kind} {FIGURE_DEGREE}"], i / POINTS)), 9),
        }
        for kind, label in CURVES.items()
        for i in range(POINTS + 1)
    ]


def chart():
    """An altair chart of `plot_rows`."""
    alt = studies.require_altair()
    return studies.line_plot(
        plot_rows(),
        "Relative error of p(f) for 2^f, degree 3",
        "Derived, not measured: float32 coefficients, exact arithmetic.",
        alt.X("fraction:Q", title="fraction f"),
        alt.Y("error:Q", title="p(f) / 2^f - 1", axis=alt.Axis(format=".0e")),
        ("polynomial", dict(zip(CURVES.values(), ("#999999", "#0072b2", "#d55e00")))),
        (studies.DOTTED, studies.SOLID, studies.DASHED),
    )


@functools.cache
def histogram_rows() -> list[dict]:
    """Share of uniform fractions by decade of the relative error in float32, for each degree.

    Every STRIDE-th float32 of [0, 1]; `decades` is the lower end of a bin of log10 of the error.
    An error of zero, possible since 2^x is compared in float64, goes to the lowest bin.
    """
    edges = np.linspace(LOWEST, 0, -LOWEST * BINS + 1)
    counted = {n: np.zeros(len(edges) - 1) for n in minimax.DEGREES}
    for fraction, weight in exp2.pieces("one", STRIDE, False):
        truth = np.exp2(fraction.astype(np.float64))
        for n, total in counted.items():
            value = exp2.horner(fraction, minimax.coefficients(n)).astype(np.float64)
            error = np.abs(value / truth - 1)
            bins = np.log10(np.maximum(error, 10.0**LOWEST))
            total += np.histogram(bins, edges)[0] * weight * STRIDE
    return [
        {"degree": str(n), "decades": float(edge), "share": round(float(share), 5)}
        for n, total in counted.items()
        for edge, share in zip(edges, total)
    ]


def histogram_chart():
    """An altair chart of `histogram_rows`."""
    alt = studies.require_altair()
    return studies.line_plot(
        histogram_rows(),
        "How large the error of 2^f is, over uniform f, p0 = 1",
        f"Derived, not measured: float32 modelled bit for bit, one fraction in {STRIDE}.",
        alt.X("decades:Q", title="log10 of the relative error", scale=alt.Scale(nice=False)),
        alt.Y("share:Q", title="share of fractions", axis=alt.Axis(format="%")),
        ("degree", dict(zip(map(str, minimax.DEGREES), HUES))),
        interpolate="step-after",
    )


# --- command ------------------------------------------------------------------------------------


def main(arguments: Sequence[str] | None = None) -> None:
    """The command line; `--help` says what it can do."""
    asked = _parser().parse_args(arguments)
    degrees = minimax.DEGREES if asked.degree is None else (asked.degree,)
    if asked.what == "remez":
        _print_remez(degrees)
    elif asked.what == "search":
        for variant in minimax.VARIANTS:
            for n in degrees:
                print(variant, n, *(c.hex() for c in exp2_search.search(n, variant)), flush=True)
    elif asked.what == "table":
        print(tables(results()))
    else:
        _exhaustive(degrees, asked)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m flash_ladder.common.minimax", description="Polynomials for 2^x."
    )
    parser.add_argument(
        "what",
        choices=("remez", "search", "exhaustive", "table"),
        help="minimax polynomials; float32 coefficients; error over every float32; page's tables",
    )
    parser.add_argument("--degree", type=int, choices=minimax.DEGREES, help="one only")
    parser.add_argument("--stride", type=int, default=1, help="every so many float32 (exhaustive)")
    parser.add_argument(
        "--literal", action="store_true", help="fractions below 2^-26 one by one as well"
    )
    parser.add_argument("--write", action="store_true", help=f"to docs/data/{RESULTS.name}")
    return parser


def _print_remez(degrees: Sequence[int]) -> None:
    for variant in minimax.VARIANTS:
        for n in degrees:
            found = minimax.minimax(n, variant)
            digits = " ".join(mp.nstr(c, 20) for c in found.coefficients)
            print(f"{variant} {n}: error {mp.nstr(found.error, 8)}: {digits}")


def _exhaustive(degrees: Sequence[int], asked: argparse.Namespace) -> None:
    options = {"stride": asked.stride, "literal": asked.literal, "progress": _progress}
    if not asked.write:
        print(json.dumps(count(degrees, **options), indent=1))
        return
    if degrees != minimax.DEGREES or asked.stride != 1:
        sys.exit("--write is for all degrees and every float32: leave --degree and --stride out")
    studies.require_checkout(RESULTS.parent.parent)
    RESULTS.parent.mkdir(exist_ok=True)
    RESULTS.write_text(json.dumps(study(**options), indent=1) + "\n", encoding="utf-8")
    print(RESULTS)


def _progress(text: str) -> None:
    print(text, file=sys.stderr, flush=True)
