# SPDX-License-Identifier: Apache-2.0
"""Degree and share of emulated exponentials against what the compiled kernel then costs.

`python -m flash_ladder.common.exp2_frontier` compiles stage 06 for each point, in a copy of the
checkout whose `config.py` has other values, writes docs/data/exp2-frontier.json and prints the
table of docs/exp2.md. Cycles come from published rates, errors from `exp2_output`: all derived.
Runs: host, needs the CuTe DSL and the disassembler; some minutes.
"""

from __future__ import annotations

import json
import pathlib
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence

from . import exp2_output, minimax, studies
from .model import MACHINES

ROOT = pathlib.Path(__file__).resolve().parent.parent
RESULTS = ROOT / "docs" / "data" / "exp2-frontier.json"
STAGE = 6
DEGREES = (2, 3, 4, 5)
PAIRS = (0, 2, 3, 4, 6, 8)  # on the FMA units, of the 16 pairs in each of a row's four chunks
HEAD_DIMS = (128, 64)
MACHINES_SHOWN = ("B200", "B300")
TOLERANCE = 1.005  # error of O, as a multiple of that without emulation, that counts as no worse
_REPORT = """
import json, runpy
runpy.run_path("conftest.py")  # makes the checkout importable as flash_ladder
from flash_ladder import load
from flash_ladder.common import contract
from flash_ladder.common.compile import compile_stage
kernel = compile_stage(load({stage}), arch="sm_100a", dtype="bfloat16", head_dim={head_dim})
ptx, report = contract.read_kernel(kernel)
print(json.dumps(report.as_dict() | {{"ptx_arithmetic": ptx.arithmetic}}))
"""


def config_with(text: str, degree: int, pairs: int, head_dim: int) -> str:
    """`config.py` with this polynomial, and this many pairs in each chunk of a row."""
    numbers = ", ".join(f'"{float(c).hex()}"' for c in minimax.coefficients(degree))
    changes = (
        (rf"(?<=[{{ ]){head_dim}: \([\d, ]+\)", f"{head_dim}: {(pairs,) * 4}"),
        (r"map\(float\.fromhex, \([^)]*\)\)", f"map(float.fromhex, ({numbers}))"),
    )
    for pattern, replacement in changes:
        text, count = re.subn(pattern, replacement, text, count=1)
        if not count:
            raise ValueError(f"config.py of stage {STAGE:02d} has nothing like {pattern}")
    return text


def report_of(changed: Mapping[str, str], head_dim: int) -> dict:
    """The static report of STAGE in bf16 with other texts for some of its files, as plain data.

    "ptx_arithmetic" counts the PTX's arithmetic instructions by opcode.
    changed: file name in the stage's folder -> text. Compiled for sm_100a by another process, in a
    copy of the checkout; RuntimeError, with the end of its words, if that fails.
    """
    with tempfile.TemporaryDirectory() as folder:
        copy = pathlib.Path(folder)
        for name in ("common", "stages"):
            shutil.copytree(ROOT / name, copy / name)
        shutil.copy(ROOT / "conftest.py", copy)
        for name, text in changed.items():
            (copy / "stages" / f"{STAGE:02d}" / name).write_text(text, encoding="utf-8")
        command = [sys.executable, "-c", _REPORT.format(stage=STAGE, head_dim=head_dim)]
        done = subprocess.run(command, cwd=copy, capture_output=True, text=True, timeout=600)
    if done.returncode:
        raise RuntimeError(f"stage {STAGE:02d} with another {list(changed)}: {done.stderr[-2000:]}")
    return json.loads(done.stdout.splitlines()[-1])


def stage_text(name: str) -> str:
    """A file of STAGE as it is."""
    return (ROOT / "stages" / f"{STAGE:02d}" / name).read_text(encoding="utf-8")


def compiled(degree: int, pairs: int, head_dim: int) -> dict:
    """One point: cycles of a query tile and key tile on a B200, registers, spills."""
    config = config_with(stage_text("config.py"), degree, pairs, head_dim)
    report = report_of({"config.py": config}, head_dim)
    model = report["model"]
    cycles = {name.removeprefix("softmax_"): value for name, value in model["cycles"].items()}
    names = ("tensor", "smem", "mufu", "fma", "alu", "issue_all_min", "issue_all_max")
    return {
        "head_dim": head_dim,
        "degree": degree,
        "emulated": 8 * pairs,
        "cycles": {name: cycles[name] for name in names},
        "live": model["live_registers"],
        "spills": report["spill_instructions"],
        "two_warps": model["replay_two_warps"],
        "ptxas": report["resources"]["ptxas"],
    }


def points() -> list[tuple[int, int, int]]:
    """(degree, pairs, head_dim) of all points; without emulation the degree does not matter."""
    return [
        (degree, pairs, head_dim)
        for head_dim in HEAD_DIMS
        for pairs in PAIRS
        for degree in (DEGREES if pairs else DEGREES[:1])
    ]


def results() -> list[dict]:
    """The committed points; FileNotFoundError outside a checkout."""
    return studies.read_rows(RESULTS)


def floor_cycles(point: dict, machine: str) -> float:
    """Cycles of the busiest resource, O rescaled each time, with the MUFU of `machine`."""
    cycles = dict(point["cycles"])
    cycles["mufu"] *= MACHINES["B200"]["mufu"] / MACHINES[machine]["mufu"]
    del cycles["issue_all_min"]
    return max(cycles.values())


def error(point: dict, dtype: str = "bf16") -> float:
    """Error of O, as a multiple of that without emulation (`exp2_output`), to 0.1 %, 1 at least."""
    if not point["emulated"]:
        return 1.0
    rows = exp2_output.results()
    return max(1.0, round(exp2_output.worst(rows, dtype, point["degree"], point["emulated"])[0], 3))


def frontier(points: Sequence[dict], machine: str, head_dim: int) -> list[dict]:
    """Points that no other beats in floor, live registers and error at once, floor first.

    Only those without spills whose error in bf16 is within TOLERANCE.
    """
    measured = [
        ((floor_cycles(p, machine), p["live"], error(p)), p)
        for p in points
        if p["head_dim"] == head_dim and not p["spills"] and error(p) <= TOLERANCE
    ]
    beaten = lambda mine: any(
        other != mine and all(y <= x for x, y in zip(mine, other)) for other, _ in measured
    )
    return [p for mine, p in sorted(measured, key=lambda row: row[0]) if not beaten(mine)]


def table(points: Sequence[dict]) -> str:
    """The table of docs/exp2.md, in Markdown; F marks the frontier of a machine."""
    best = {
        (machine, head_dim): frontier(points, machine, head_dim)
        for machine in MACHINES_SHOWN
        for head_dim in HEAD_DIMS
    }
    lines = [
        "| head dim | degree | emulated | MUFU | FMA | issue | live | error of O | two warps "
        "| floor, B200 | floor, B300 |",
        "|---|---|---|---|---|---|---|---|---|---|---|",
    ]
    for p in points:
        cycles, degree = p["cycles"], p["degree"] if p["emulated"] else "any"
        floors = [
            f"{floor_cycles(p, machine):.0f}{' F' if p in best[machine, p['head_dim']] else ''}"
            for machine in MACHINES_SHOWN
        ]
        cells = [p["head_dim"], degree, p["emulated"]]
        cells += [f"{cycles[name]:.0f}" for name in ("mufu", "fma", "issue_all_max")]
        live = f"{p['live']}, {p['spills']} spills" if p["spills"] else p["live"]
        cells += [live, f"{error(p):.3f}", f"{p['two_warps']:.0f}", *floors]
        lines.append("| " + " | ".join(map(str, cells)) + " |")
    return "\n".join(lines)


# --- figure -------------------------------------------------------------------------------------


def plot_rows() -> list[dict]:
    """Softmax cycles on a B200 and live registers of every point without spills, by degree."""
    found = results()
    best = [p for head_dim in HEAD_DIMS for p in frontier(found, "B200", head_dim)]
    return [
        {
            "head dim": f"head dim {p['head_dim']}",
            "degree": str(p["degree"]) if p["emulated"] else "none",
            "emulated": p["emulated"],
            "cycles": max(p["cycles"][name] for name in ("mufu", "fma", "alu", "issue_all_max")),
            "live": p["live"],
            "frontier": p in best,
        }
        for p in found
        if not p["spills"]
    ]


def chart():
    """An altair chart of `plot_rows`."""
    alt = studies.require_altair()
    names = ["none", *map(str, DEGREES)]
    hues = alt.Scale(domain=names, range=["#000000", "#d55e00", "#0072b2", "#009e73", "#cc79a7"])
    scale = alt.Scale(zero=False)
    base = alt.Chart(alt.Data(values=plot_rows())).encode(
        x=alt.X("cycles:Q", title="busiest of MUFU, FMA, ALU and issue, cycles", scale=scale),
        y=alt.Y("live:Q", title="live registers", scale=scale),
        color=alt.Color("degree:N", scale=hues),
    )
    beaten = base.mark_point(size=60).transform_filter("!datum.frontier")
    best = base.mark_point(size=60, filled=True, opacity=1).transform_filter("datum.frontier")
    shares = base.mark_text(dx=12, fontSize=9).encode(text="emulated:Q")
    heading = alt.Title(
        "Cost of degree and share on a B200; filled: the frontier",
        subtitle="Derived, not measured: compiled code. Numbers: emulated of 128.",
    )
    layers = (beaten + best + shares).properties(width=270, height=280)
    facets = layers.facet(alt.Facet("head dim:N", title=None))
    return facets.properties(title=heading).configure(font=studies.FONT)


def main() -> None:
    """Compile, write, print."""
    studies.require_checkout(RESULTS.parent)
    found = [compiled(*point) for point in points()]
    studies.write_rows(RESULTS, found)
    print(table(found))


if __name__ == "__main__":
    main()
