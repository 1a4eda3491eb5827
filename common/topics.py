# SPDX-License-Identifier: Apache-2.0
"""Tables of the pages on numerics, verification, static performance and compile time.

`TABLES` names what the fence `study` can show. Each table is made of evidence.json of the stages or
of a committed file of docs/data, and has one mark for all of its numbers. Runs: host, while the
site is built.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

import flash_ladder

from . import build_study, error_study
from .contract_gpu import ADVERSARIES
from .stage import KernelSource

AROUND = ("preprocess", "postprocess")  # judged with the backward between them
NONE = "–"
NOTICED = ("timing", "log", "lint", "redundant", "unexplained")  # of evidence's mutation counts


@dataclass(frozen=True)
class Study:
    """`rows` are cells of plain text; `mark` (M, D or Q) and `source` hold for every number."""

    headings: tuple[str, ...]
    rows: Callable[[], list[list[str]]]
    caption: str
    mark: str
    source: Callable[[], str]


def runs() -> Iterator[tuple[KernelSource, dict]]:
    """Every stage with each of its runs of sm_100a code, in order."""
    for number in flash_ladder.built():
        stage = flash_ladder.load(number)
        text = (stage.folder / "evidence.json").read_text(encoding="utf-8")
        for run in json.loads(text)["runs"]:
            if run["target"] == "sm_100a":
                yield stage, run


def of_runs() -> str:
    """What the mark of numbers from `runs` says."""
    found = [run for _, run in runs()]
    each = lambda name: " and ".join(sorted({run[name] for run in found}))
    commands = "flash-ladder verify N --rewritten, mutate N --device and sanitize N"
    return f"{each('gpu')}, driver {each('driver')}, {each('date')}; {commands}; evidence.json"


def kernel_name(stage: int, part: str = "") -> str:
    """As the tables have it: 06, 07/backward_1cta."""
    return f"{stage:02d}/{part}" if part else f"{stage:02d}"


def short(value: float) -> str:
    """Two digits, as 1.2e-4."""
    return f"{value:.1e}".replace("e-0", "e-")


# --- numerics -----------------------------------------------------------------------------------


def tightest(kernels: Iterable[dict]) -> dict[str, dict]:
    """The comparison with the largest used share of its limit, by part."""
    found: dict[str, dict] = {}
    for kernel in kernels:
        part = kernel.get("part", "")
        if part not in AROUND and kernel["worst"]["used"] > found.get(part, {"used": -1})["used"]:
            found[part] = kernel["worst"]
    return found


def _used_rows() -> list[list[str]]:
    rows = []
    for stage, run in runs():
        for part, worst in tightest(run["kernels"]).items():
            numbers = [short(worst[name]) for name in ("value", "baseline", "limit")]
            case = worst["case"].removeprefix(f"{part}-")
            what = f"{worst['tensor']}, {worst['metric']}"
            used = f"{100 * worst['used']:.0f} %"
            rows.append([kernel_name(stage.number, part), used, what, *numbers, case])
    return rows


def _error_rows() -> list[list[str]]:
    names = (*error_study.SOURCES, "half")
    return [
        [f"{row['inputs']}, {row['dtype']}", *(short(row[name]) for name in names)]
        for row in error_study.results()
    ]


# --- verification -------------------------------------------------------------------------------


def totals() -> dict[str, int]:
    """What was looked at, all stages together: counts of evidence.json and of config.py."""
    count = dict.fromkeys(
        (
            *("facts", "kernels", "cases", "failed", "adversary_cases", "ctas", "records"),
            *("steps", "mutated", "sites", *NOTICED, "only", "sanitized", "errors"),
        ),
        0,
    )
    for stage, run in runs():
        for source in (stage, *map(stage.part, stage.parts)):
            count["facts"] += sum(map(len, source.config.DECLARED.values()))
        count["kernels"] += len(run["kernels"])
        tested = [row for row in run["kernels"] if row.get("part", "") not in AROUND]
        cases = sum(row["cases"] for row in tested)
        count["cases"] += cases
        count["failed"] += run["tests"]["failed"]
        count["adversary_cases"] += cases * len(run["adversaries"])
        for log in (row["log"] for row in run["kernels"] if "log" in row):
            count["ctas"] += log["ctas"]
            count["records"] += log["events"]
            count["steps"] += log["acts"]
        for row in run.get("mutation", []):
            _add_mutation(count, row["counts"])
        count["sanitized"] += len(run.get("sanitizer", {}).get("kernels", []))
        count["errors"] += run.get("sanitizer", {}).get("errors", 0)
    return count


def _add_mutation(count: dict[str, int], found: dict[str, int]) -> None:
    for name in ("sites", *NOTICED):
        count[name] += found[name]
    rest = found["timing"] + found["redundant"] + found["unexplained"]
    count["mutated"] += 1
    count["only"] += found["sites"] - rest


def number(value: int) -> str:
    """With a narrow space between thousands."""
    return f"{value:,}".replace(",", " ")


def _chain_rows() -> list[list[str]]:
    n = {name: number(value) for name, value in totals().items()}
    return [
        ["facts of compiled code", f"{n['kernels']} kernels against {n['facts']} declarations (D)"],
        ["execution", f"{n['cases']} problems, {n['failed']} failed"],
        ["adversaries", f"{n['adversary_cases']} of them again, {len(ADVERSARIES)} timings each"],
        ["log", f"{n['records']} records of {n['ctas']} CTAs, no race"],
        ["conformance", f"{n['steps']} steps of model and kernel, all equal"],
        ["mutation", f"{n['sites']} statements left out, {n['unexplained']} unexplained"],
        ["sanitizer", f"{n['sanitized']} kernels, {n['errors']} errors"],
    ]


def _noticed_rows() -> list[list[str]]:
    n = totals()
    share = lambda name: [number(n[name]), f"{100 * n[name] / n['sites']:.0f} %"]
    return [
        ["results or errors, six timings", *share("timing")],
        ["the log", *share("log")],
        ["the lint of the PTX", *share("lint")],
        ["log or lint, where results and errors did not", *share("only")],
        ["nobody, with a reason", *share("redundant")],
        ["nobody, without one", *share("unexplained")],
    ]


# --- static performance -------------------------------------------------------------------------

BOUNDS = {"tensor": "tensor", "mufu": "MUFU", "smem": "SMEM"}
_STATIC_HEADINGS = (
    *("kernel", "head dim", "slots an element", "ceiling", "bound by", "tensor"),
    *("MUFU", "issue", "FMA", "ALU", "SMEM", "MMA warp", "exp2, MUFU + FMA", "live"),
)


def _static_row(row: dict) -> list[str]:
    """Dashes where the report has no loop, or counts dQ of two key tiles twice (7, head dim 64)."""
    cycles = lambda name: f"{row[name]:.0f}" if name in row else NONE
    hidden = row["part"] == "backward_1cta" and row["head_dim"] == 64
    smem, ceiling, bound = (
        cycles("tile_cycles_smem"),
        row.get("tensor_ceiling"),
        row.get("bound_by"),
    )
    if hidden:
        smem, ceiling, bound = NONE, None, None
    exp2 = f"{row['exp2_hardware']} + {row['exp2_emulated']}" if "exp2_hardware" in row else NONE
    slots = f"{row['slots_per_element']:.2f}" if "slots_per_element" in row else NONE
    return [
        kernel_name(row["stage"], row["part"]),
        str(row["head_dim"]),
        slots,
        NONE if ceiling is None else f"{ceiling:.2f}",
        BOUNDS.get(bound, NONE),
        *(cycles(f"tile_cycles_{name}") for name in ("tensor", "mufu", "issue", "fma", "alu")),
        smem,
        cycles("mma_warp_issue"),
        exp2,
        str(row.get("loop_live_registers", NONE)),
    ]


def _static_rows(backward: bool) -> list[list[str]]:
    found = [row for row in build_study.rows(build_study.STATIC) if row["part"] not in AROUND]
    return [_static_row(row) for row in found if bool(row["part"]) == backward]


def of_static() -> str:
    """What the mark of the static tables says."""
    versions = sorted({row["ptxas"] for row in build_study.rows(build_study.STATIC)})
    return (
        f"sm_100a, bf16, ptxas {' '.join(versions)}; {build_study.COMMAND}; docs/data/static.json"
    )


# --- compile time -------------------------------------------------------------------------------


def _compile_rows() -> list[list[str]]:
    rows = []
    for row in build_study.rows(build_study.COMPILE):
        sizes = [f"{row[f'{name}_bytes'] / 1000:.0f}" for name in build_study.KEPT]
        seconds = [f"{row[f'{name}_s']:.1f}" for name in ("wall", "cpu", "ptxas_cpu")]
        name = kernel_name(row["stage"], row["part"])
        found = f"{1000 * row['cached_s']:.0f}"
        rows.append([name, str(row["head_dim"]), *seconds, found, *sizes])
    return rows


def of_compile() -> str:
    """What the mark of measured compile times says."""
    rows = build_study.rows(build_study.COMPILE)
    each = lambda name: " and ".join(sorted({row[name] for row in rows}))
    busy = f"load {min(r['load'] for r in rows)} to {max(r['load'] for r in rows)} with others"
    where = f"{each('machine')}, {busy}, {each('date')}, nvidia-cutlass-dsl {each('dsl')}"
    return f"{where}; {build_study.COMMAND}; docs/data/compile.json"


TABLES = {
    "errors": Study(
        ("inputs", *error_study.SOURCES.values(), "half an ulp of O, a bound"),
        _error_rows,
        "RMS error of O, 256 queries, 1024 keys, 2 heads, head dim 128",
        "D",
        lambda: f"{error_study.COMMAND}; docs/data/errors.json",
    ),
    "used": Study(
        ("kernel", "used", "tensor, metric", "error", "torch's error", "limit", "case"),
        _used_rows,
        "the comparison that came nearest to its limit",
        "M",
        of_runs,
    ),
    "chain": Study(
        ("step", "looked at"),
        _chain_rows,
        "all stages and parts together, measured unless marked",
        "M",
        of_runs,
    ),
    "noticed": Study(
        ("noticed by", "statements", "share"),
        _noticed_rows,
        "waits, arrivals and fences left out of the compiled code",
        "M",
        of_runs,
    ),
    "static-forward": Study(
        _STATIC_HEADINGS,
        lambda: _static_rows(False),
        "forward kernels, cycles of a query tile and a key tile",
        "D",
        of_static,
    ),
    "static-backward": Study(
        _STATIC_HEADINGS,
        lambda: _static_rows(True),
        "backward kernels, cycles of a query tile and a key tile",
        "D",
        of_static,
    ),
    "compile": Study(
        (
            *("kernel", "head dim", "seconds", "CPU seconds", "ptxas, CPU seconds"),
            *("from disk, ms", "PTX, KB", "cubin, KB", "object, KB"),
        ),
        _compile_rows,
        f"medians of {build_study.RUNS} processes, bf16, sm_100a",
        "M",
        of_compile,
    ),
}
