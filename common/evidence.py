# SPDX-License-Identifier: Apache-2.0
"""What ran where: the schema of `stages/NN/evidence.json`, and whether it is still true.

A run names the hash of the PTX that ran. CI has no GPU, so a test compiles that target again and
compares hashes: a kernel whose code changed since has no evidence until it is run again.
Runs: host.
"""

from __future__ import annotations

import json
import pathlib
from typing import Any

from .compile import compile_stage, versions
from .ptx import ptx_hash
from .stage import KernelSource, Stage

SCHEMA = 1
RUN_FIELDS = {
    "date": str,  # ISO date
    "gpu": str,  # as the driver names it
    "driver": str,
    "torch": str,
    "dsl": str,  # version of nvidia-cutlass-dsl
    "target": str,  # architecture the PTX that ran was compiled for
    "mode": str,  # "native", or "rewritten" for sm_100a PTX executed on sm_90
    "command": str,
    "kernels": list,
    "tests": dict,  # TEST_FIELDS
    "notes": str,
}
KERNEL_FIELDS = {
    "key": str,  # CompileKey.name; of a part its name is in the field "part" as well
    "dtype": str,
    "head_dim": int,
    "ptx_sha256": str,  # common.ptx.ptx_hash of the PTX that ran
    "registers": int,
    "cases": int,
    "failed": int,
    "worst": dict,  # generator, case, metric, value, baseline, limit of the tightest comparison
}
LOG_FIELDS = {  # of a kernel executed with the log (`contract_gpu.check_executed`)
    "clean": bool,  # no race and no misuse of a barrier
    "conforms": bool,  # every warp did what its role does in the model
    "ctas": int,
    "events": int,
    "bytes": int,
    "acts": int,  # compared with the model
    "a1_edges": list,  # pairs of MMAs that only rule A1 orders
}
MUTATION_FIELDS = {  # `device_mutation.Report.counts`
    "sites": int,
    "result": int,
    "error": int,
    "log": int,
    "lint": int,
    "timing": int,
    "log_only": int,
    "redundant": int,
    "unexplained": int,
}
TEST_FIELDS = {"passed": int, "failed": int, "skipped": int}
MODES = ("native", "rewritten")
HOPPER = "H100", "H200", "H20", "H800"  # in the name of an sm_90 GPU


class EvidenceError(ValueError):
    """Evidence that does not follow the schema; the message says where."""


def validate(evidence: dict[str, Any], stage: Stage) -> None:
    """Raise EvidenceError unless `evidence` follows the schema and is about `stage`."""
    _object(evidence, "evidence")
    if evidence.get("schema") != SCHEMA or evidence.get("stage") != stage.number:
        raise EvidenceError(f"expected schema {SCHEMA} and stage {stage.number}")
    _fields(evidence, {"runs": list}, "evidence")
    for number, run in enumerate(evidence["runs"]):
        _fields(run, RUN_FIELDS, f"run {number}")
        if run["mode"] not in MODES:
            raise EvidenceError(f"run {number}: mode {run['mode']!r} is not one of {MODES}")
        _fields(run["tests"], TEST_FIELDS, f"run {number}, tests")
        if not run["kernels"]:
            raise EvidenceError(f"run {number} names no kernel")
        for index, kernel in enumerate(run["kernels"]):
            _object(kernel, f"run {number}, kernel {index}")
            _fields(kernel, KERNEL_FIELDS, f"run {number}, kernel {kernel.get('key')}")
            if kernel.get("part", "") not in ("", *stage.parts):
                raise EvidenceError(f"run {number}: {kernel['key']} is of no part of the stage")
            _validate_kernel(kernel, run, stage, f"run {number}, {kernel['key']}")
            _validate_log(kernel, f"run {number}, log of {kernel['key']}")
        if "mutation" in run:
            _fields(run, {"mutation": list}, f"run {number}")
        for row in run.get("mutation", []):
            _validate_mutation(row, run, f"run {number}, mutation")


def _validate_kernel(kernel: dict[str, Any], run: dict[str, Any], stage: Stage, where: str) -> None:
    """Rewritten code runs on Hopper alone; registers are those that the stage declares (-1: no
    disassembler was there)."""
    if run["mode"] == "rewritten" and not any(name in run["gpu"] for name in HOPPER):
        raise EvidenceError(f"{where}: rewritten code does not run on {run['gpu']}")
    source = stage.part(kernel.get("part", ""))
    declared = source.config.DECLARED.get(kernel["head_dim"], {}).get("registers")
    if isinstance(declared, int) and kernel["registers"] not in (-1, declared):
        raise EvidenceError(f"{where}: {kernel['registers']} registers, declared are {declared}")


def _validate_log(kernel: dict[str, Any], where: str) -> None:
    """What is said of executed logs, if anything: of clean ones how much was looked at."""
    if "log" not in kernel:
        return
    _fields(kernel, {"log": dict}, where)
    if not kernel["log"].get("clean"):
        return
    _fields(kernel["log"], LOG_FIELDS, where)
    for name in ("ctas", "events", "bytes", "acts"):
        if kernel["log"][name] < 1:
            raise EvidenceError(f"{where}: {name} must be positive; got {kernel['log'][name]}")


def _validate_mutation(row: Any, run: dict[str, Any], where: str) -> None:
    """Counts that can be, of a kernel that the run has."""
    _fields(row, {"kernel": str, "ptx_sha256": str, "date": str, "counts": dict}, where)
    hashes = {kernel["key"]: kernel["ptx_sha256"] for kernel in run["kernels"]}
    if hashes.get(row["kernel"]) != row["ptx_sha256"]:
        raise EvidenceError(f"{where}: {row['kernel']} is no kernel of the run, or of other code")
    counts = row["counts"]
    _fields(counts, MUTATION_FIELDS, where)
    seen = max(counts[name] for name in ("timing", "log", "lint"))
    least = min(counts[name] for name in MUTATION_FIELDS)
    rest = counts["redundant"] + counts["unexplained"]
    if least < 0 or not counts["sites"] or seen + rest > counts["sites"]:
        raise EvidenceError(f"{where} of {row['kernel']}: these counts do not add up: {counts}")


def _object(row: Any, where: str) -> None:
    if not isinstance(row, dict):
        raise EvidenceError(f"{where} must be an object; got a {type(row).__name__}")


def _fields(row: Any, fields: dict[str, type], where: str) -> None:
    _object(row, where)
    for name, kind in fields.items():
        value = row.get(name)
        if not isinstance(value, kind) or (kind is int and isinstance(value, bool)):
            raise EvidenceError(f"{where}: {name} must be a {kind.__name__}; got {row.get(name)!r}")


def stale(stage: Stage, evidence: dict[str, Any] | None = None) -> list[str]:
    """Why each recorded run is not about today's code; empty when all of it still holds.

    Compiles each recorded kernel for the recorded target and compares PTX hashes.
    """
    evidence = stage.evidence if evidence is None else evidence
    reasons = []
    for run in evidence["runs"]:
        installed = versions()["nvidia-cutlass-dsl"]
        if run["dsl"] != installed:
            reasons.append(f"{run['date']}: ran with DSL {run['dsl']}, installed is {installed}")
            continue
        for kernel in run["kernels"]:
            source = stage.part(kernel.get("part", ""))
            now = compile_stage(
                source, arch=run["target"], dtype=kernel["dtype"], head_dim=kernel["head_dim"]
            )
            if ptx_hash(now.ptx) != kernel["ptx_sha256"]:
                reasons.append(
                    f"{kernel['key']}: the code that ran on {run['gpu']} on {run['date']} is not "
                    f"today's; run `flash-ladder verify {stage.number}` on such a GPU"
                )
            if kernel["failed"]:
                reasons.append(f"{kernel['key']}: {kernel['failed']} cases failed on {run['gpu']}")
        ran = {kernel.get("part", "") for kernel in run["kernels"]}
        missing = [f"no kernel of {part} ran" for part in stage.parts if part not in ran]
        reasons += [f"{run['date']}: {text}" for text in missing + unlogged(stage, run)]
        failed = run["tests"]["failed"] - sum(kernel["failed"] for kernel in run["kernels"])
        if failed > 0:
            reasons.append(f"{run['date']}: {failed} checks failed on {run['gpu']}")
    return reasons


def unlogged(stage: Stage, run: dict[str, Any]) -> list[str]:
    """What a rewritten run of kernels with tensor memory lacks: clean logs, explained mutants."""
    if run["mode"] != "rewritten":
        return []
    found: list[str] = []
    for source in stage.kernels:
        kernels = [row for row in run["kernels"] if row.get("part", "") == source.name]
        head_dims = source.config.ENVELOPE.head_dims
        if kernels and any(source.config.plan(head_dim).tmem for head_dim in head_dims):
            found += _unlogged(source, kernels, run.get("mutation", []))
    return found + [
        f"{row['counts']['unexplained']} mutants of {row['kernel']} survived unexplained"
        for row in run.get("mutation", [])
        if row["counts"]["unexplained"]
    ]


def _unlogged(source: KernelSource, kernels: list[dict], mutations: list[dict]) -> list[str]:
    """The same of one stage or part with tensor memory, whose kernels ran."""
    from .contract import logged_a1_edges

    found = []
    for kernel in kernels:
        log, listed = kernel.get("log", {}), logged_a1_edges(source, kernel["head_dim"])
        if not (log.get("clean") and log.get("conforms")):
            found.append(f"{kernel['key']} has no clean log that conforms to the model")
        elif sorted(log["a1_edges"]) != sorted(map(list, listed)):
            found.append(f"{kernel['key']}: its A1 edges are not those that the page lists")
    if not {row["kernel"] for row in mutations} & {kernel["key"] for kernel in kernels}:
        option = f" --part {source.name}" if source.name else ""
        found.append(f"its kernel was not mutated (`flash-ladder mutate N{option} --device`)")
    return found


def rewritten_run(
    runs: list[dict[str, Any]], ptx_sha256: str, path: pathlib.Path
) -> dict[str, Any]:
    """The newest rewritten run of a kernel among the runs of the file at `path`.

    Raises EvidenceError when there is none.
    """
    for run in reversed(runs):
        hashes = [kernel["ptx_sha256"] for kernel in run["kernels"]]
        if run["mode"] == "rewritten" and ptx_sha256 in hashes:
            return run
    raise EvidenceError(f"{path}: no rewritten run of this kernel; run `verify` first")


def add_mutation(path: pathlib.Path, stage: Stage, row: dict[str, Any]) -> None:
    """Add the counts of a mutation to the rewritten run of its kernel in an evidence file.

    row: kernel (its key), ptx_sha256, date, command, counts, seconds. Raises EvidenceError.
    """
    runs = read(path, stage)
    run = rewritten_run(runs, row["ptx_sha256"], path)
    kept = [old for old in run.get("mutation", []) if old["kernel"] != row["kernel"]]
    run["mutation"] = [*kept, row]
    evidence = {"schema": SCHEMA, "stage": stage.number, "runs": runs}
    validate(evidence, stage)
    path.write_text(json.dumps(evidence, indent=1) + "\n")


def add(path: pathlib.Path, stage: Stage, run: dict[str, Any]) -> dict[str, Any]:
    """Write `run` to the evidence file at `path`; it replaces one of the same GPU and target.

    Returns the evidence written. Raises EvidenceError, and leaves the file as it is, when the run
    or what the file holds breaks the schema.
    """
    old = read(path, stage)
    validate({"schema": SCHEMA, "stage": stage.number, "runs": [run]}, stage)
    mark = ("gpu", "target", "mode")
    kept = [row for row in old if any(row[name] != run[name] for name in mark)]
    evidence = {"schema": SCHEMA, "stage": stage.number, "runs": [*kept, run]}
    path.write_text(json.dumps(evidence, indent=1) + "\n")
    return evidence


def read(path: pathlib.Path, stage: Stage) -> list[dict[str, Any]]:
    """The runs of an evidence file, none when there is no file. Raises EvidenceError."""
    if not path.is_file():
        return []
    try:
        evidence = json.loads(path.read_text())
        validate(evidence, stage)
    except ValueError as wrong:
        raise EvidenceError(f"{path}: {wrong}") from wrong
    return evidence["runs"]
