# SPDX-License-Identifier: Apache-2.0
"""What compiling a kernel costs, and what its machine code shows: the data of two pages.

`python -m flash_ladder.common.build_study [STAGE ...]` compiles each kernel in bf16 for sm_100a,
one after the other, each with an empty cache in a process of its own, and writes
docs/data/compile.json (medians of RUNS) and docs/data/static.json (counted, derived). With stages
named, rows of the others stay. Runs: host, needs the CuTe DSL and CUDA's tools; ten minutes.
"""

from __future__ import annotations

import datetime
import gc
import json
import os
import pathlib
import platform
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence

import flash_ladder

from . import compile as compiling
from . import contract, facts, sass, studies

ROOT = pathlib.Path(__file__).resolve().parent.parent
DATA = ROOT / "docs" / "data"
COMPILE, STATIC = DATA / "compile.json", DATA / "static.json"
COMMAND = "python -m flash_ladder.common.build_study"
ARCH, DTYPE = "sm_100a", "bfloat16"
RUNS = 3
KEPT = ("ptx", "cubin", "o")  # suffixes of what a cache entry holds
FACTS = (  # of the machine code, names of `facts.FACT_NAMES`
    *("ptxas", "registers", "stack_bytes", "instructions", "spill_instructions"),
    *("spill_instructions_in_loops", "uniform_spill_moves"),
    *("loop_instructions", "loop_live_registers", "exp2_hardware", "exp2_emulated"),
    *("slots_per_element", "tile_cycles_issue", "tile_cycles_mufu", "tile_cycles_fma"),
    *("tile_cycles_alu", "tile_cycles_tensor", "tile_cycles_smem", "correction_issue"),
    *("mma_warp_issue", "tensor_ceiling", "bound_by"),
)
_ONE = """
import runpy
runpy.run_path("conftest.py")  # makes the checkout importable as flash_ladder
from flash_ladder.common import build_study
build_study.one({stage}, {part!r}, {head_dim})
"""


def kernels(stages: Sequence[int]) -> list[tuple[int, str, int]]:
    """(stage, part or "", head dim) of every kernel of these stages."""
    found = []
    for number in stages:
        stage = flash_ladder.load(number)
        for part in ("", *stage.parts):
            sizes = stage.part(part).config.ENVELOPE.head_dims
            found += [(number, part, head_dim) for head_dim in sizes]
    return found


def static_facts(kernel: compiling.CompiledKernel) -> dict:
    """FACTS that a kernel has, "ptx_sha256", and what it takes of "smem_bytes" at its launch."""
    ptx, report = contract.read_kernel(kernel)
    found = facts.flat(ptx, report)
    row = {name: found[name] for name in FACTS if name in found}
    return {"ptx_sha256": facts.ptx_hash(kernel.ptx), "smem_bytes": kernel.smem_bytes, **row}


def one(stage: int, part: str, head_dim: int) -> None:
    """Compile one kernel in this process and print, as a line of JSON, both of its rows."""
    compiling.require_dsl()
    from cutlass import cute  # noqa: F401  its import is part of the start

    start = time.process_time()
    source = flash_ladder.load(stage).part(part)
    kernel = compiling.compile_stage(source, arch=ARCH, dtype=DTYPE, head_dim=head_dim)
    megabytes = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    compiling._MEMORY.clear()  # the disk answers from here on
    gc.collect()  # of what the compiler left, so that it does not count
    again = time.perf_counter()
    stored = compiling.compile_stage(source, arch=ARCH, dtype=DTYPE, head_dim=head_dim)
    again = time.perf_counter() - again
    assert stored.from_cache and not kernel.from_cache
    assembled = resource.getrusage(resource.RUSAGE_CHILDREN).ru_utime
    sass.assemble(kernel.ptx, ARCH)
    assembled = resource.getrusage(resource.RUSAGE_CHILDREN).ru_utime - assembled
    measured = {
        "start_cpu_s": round(start, 2),
        "wall_s": round(kernel.wall_seconds, 2),
        "cpu_s": round(kernel.cpu_seconds, 2),
        "ptxas_cpu_s": round(assembled, 2),
        "cached_s": round(again, 3),
        "rss_mb": round(megabytes),
        **{f"{name}_bytes": (kernel.folder / f"kernel.{name}").stat().st_size for name in KEPT},
    }
    print(json.dumps([measured, static_facts(kernel)]))


def measure(stage: int, part: str, head_dim: int) -> tuple[dict, dict]:
    """Rows of COMPILE and STATIC; each run has a process and a cache of its own.

    RuntimeError, with the end of its words, if one fails, or if two runs made different code.
    """
    code, runs = _ONE.format(stage=stage, part=part, head_dim=head_dim), []
    name = {"stage": stage, "part": part, "head_dim": head_dim}
    for _ in range(RUNS):
        with tempfile.TemporaryDirectory() as folder:
            environment = {**os.environ, "FLASH_LADDER_CACHE": folder, "OMP_NUM_THREADS": "1"}
            command = [sys.executable, "-c", code]
            done = subprocess.run(
                command, cwd=ROOT, env=environment, capture_output=True, text=True
            )
        if done.returncode:
            raise RuntimeError(f"{name}: {done.stderr[-2000:]}")
        runs.append(json.loads(done.stdout.splitlines()[-1]))
    measured, counted = zip(*runs)
    if any(row != counted[0] for row in counted):
        raise RuntimeError(f"{name}: the code was not the same in each run")
    medians = {key: statistics.median(row[key] for row in measured) for key in measured[0]}
    return name | medians, name | counted[0]


def rows(path: pathlib.Path) -> list[dict]:
    """The committed rows of COMPILE or STATIC; FileNotFoundError outside a checkout."""
    return studies.read_rows(path)


def main(stages: Sequence[int]) -> None:
    """Measure these stages, all if there are none, and write both files."""
    studies.require_checkout(DATA)
    chosen = list(stages) or flash_ladder.built()
    kept = [rows(path) if path.is_file() else [] for path in (COMPILE, STATIC)]
    kept = [[row for row in part if row["stage"] not in chosen] for part in kept]
    where = {
        "date": datetime.date.today().isoformat(),
        "machine": f"{os.cpu_count()} cores, {platform.machine()}",
        "dsl": compiling.versions()["nvidia-cutlass-dsl"],
    }
    for name in kernels(chosen):
        busy = round(os.getloadavg()[0], 1)
        measured, counted = measure(*name)
        kept[0].append(measured | where | {"load": busy})
        kept[1].append(counted)
        print(*name, measured["wall_s"], flush=True)
    for path, found in zip((COMPILE, STATIC), kept):
        studies.write_rows(path, sorted(found, key=lambda row: row["stage"]))


if __name__ == "__main__":
    main([int(text) for text in sys.argv[1:]])
