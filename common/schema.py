# SPDX-License-Identifier: Apache-2.0
"""The schema of `stages/NN/evidence.json`: fields, and values that can be. Runs: host."""

from __future__ import annotations

import datetime
import math
import re
from typing import Any

from .stage import Stage

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
SANITIZER_FIELDS = {  # of a run under compute-sanitizer (`sanitize.sanitize`)
    "tool": str,  # one of SANITIZERS
    "command": str,
    "date": str,
    "gpu": str,
    "driver": str,
    "kernels": list,  # keys; their code is that of the run
    "errors": int,
    "summary": str,  # the sanitizer's own line
}
SANITIZERS = ("memcheck", "racecheck", "initcheck", "synccheck")
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
        _validate_run(run, stage, f"run {number}")
        for index, kernel in enumerate(run["kernels"]):
            _object(kernel, f"run {number}, kernel {index}")
            _fields(kernel, KERNEL_FIELDS, f"run {number}, kernel {kernel.get('key')}")
            if kernel.get("part", "") not in ("", *stage.parts):
                raise EvidenceError(f"run {number}: {kernel['key']} is of no part of the stage")
            _validate_kernel(kernel, run, stage, f"run {number}, {kernel['key']}")
            _validate_counts(kernel, run, f"run {number}, {kernel['key']}")
            _validate_log(kernel, f"run {number}, log of {kernel['key']}")
        if "mutation" in run:
            _fields(run, {"mutation": list}, f"run {number}")
        for row in run.get("mutation", []):
            _validate_mutation(row, run, f"run {number}, mutation")
        if "sanitizer" in run:
            _validate_sanitizer(run["sanitizer"], run, f"run {number}, sanitizer")


def _validate_run(run: Any, stage: Stage, where: str) -> None:
    """What belongs to the run as a whole."""
    _fields(run, RUN_FIELDS, where)
    if run["mode"] not in MODES:
        raise EvidenceError(f"{where}: mode {run['mode']!r} is not one of {MODES}")
    _date(run["date"], where)
    _fields(run["tests"], TEST_FIELDS, f"{where}, tests")
    for name in TEST_FIELDS:
        if run["tests"][name] < 0:
            raise EvidenceError(f"{where}, tests: {name} is {run['tests'][name]}")
    if not run["kernels"]:
        raise EvidenceError(f"{where} names no kernel")
    _validate_execution(run, stage, where)


def _validate_execution(run: dict[str, Any], stage: Stage, where: str) -> None:
    """A rewritten run names its rewriter; with tensor memory, all adversaries: no fewer, no more.

    A native one has neither.
    """
    from .contract_gpu import ADVERSARIES

    rewritten = run["mode"] == "rewritten"
    if rewritten or "rewriter_sha256" in run:
        _sha256(run.get("rewriter_sha256"), f"{where}: rewriter_sha256")
    if not rewritten and "rewriter_sha256" in run:
        raise EvidenceError(f"{where}: a native run has no rewriter_sha256")
    delayed = any(stage.config.plan(d).tmem for d in stage.config.ENVELOPE.head_dims)
    wanted = list(ADVERSARIES) if rewritten and delayed else []
    if run.get("adversaries", []) != wanted:
        raise EvidenceError(
            f"{where}: adversaries must be {wanted}; got {run.get('adversaries', [])}"
        )


def _validate_kernel(kernel: dict[str, Any], run: dict[str, Any], stage: Stage, where: str) -> None:
    """Rewritten code runs on Hopper alone; registers are those that the stage declares (-1: no
    disassembler was there)."""
    _sha256(kernel["ptx_sha256"], f"{where}: ptx_sha256")
    if run["mode"] == "rewritten" and not any(name in run["gpu"] for name in HOPPER):
        raise EvidenceError(f"{where}: rewritten code does not run on {run['gpu']}")
    source = stage.part(kernel.get("part", ""))
    declared = source.config.DECLARED.get(kernel["head_dim"], {}).get("registers")
    if isinstance(declared, int) and kernel["registers"] not in (-1, declared):
        raise EvidenceError(f"{where}: {kernel['registers']} registers, declared are {declared}")


def _validate_counts(kernel: dict[str, Any], run: dict[str, Any], where: str) -> None:
    """At least one case; a failure counts among the tests; what passed kept to its limit."""
    cases, failed, used = kernel["cases"], kernel["failed"], kernel["worst"].get("used")
    if cases < 1 or not 0 <= failed <= cases:
        raise EvidenceError(f"{where}: {failed} failed of {cases} cases cannot be")
    if failed > run["tests"]["failed"]:
        raise EvidenceError(
            f"{where}: {failed} cases failed, of all tests {run['tests']['failed']}"
        )
    number = isinstance(used, (int, float)) and not isinstance(used, bool)
    if not number or not math.isfinite(used) or used < 0:
        raise EvidenceError(f"{where}: worst.used must be a share of the limit; got {used!r}")
    if used > 1 and not failed:
        raise EvidenceError(f"{where}: worst.used is {used:g} of the limit, yet no case failed")


def _date(text: str, where: str) -> None:
    """An ISO date that has come; a day more, for zones of time."""
    try:
        date = datetime.datetime.strptime(text, "%Y-%m-%d").date()
    except ValueError as wrong:
        raise EvidenceError(f"{where}: date must be YYYY-MM-DD; got {text!r}") from wrong
    if date > datetime.date.today() + datetime.timedelta(days=1):
        raise EvidenceError(f"{where}: date {text} has not come yet")


def _sha256(value: Any, what: str) -> None:
    if not isinstance(value, str) or not re.fullmatch("[0-9a-f]{64}", value):
        raise EvidenceError(f"{what} must be 64 hexadecimal digits; got {value!r:.80}")


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
    _date(row["date"], where)
    counts = row["counts"]
    _fields(counts, MUTATION_FIELDS, where)
    seen = max(counts[name] for name in ("timing", "log", "lint"))
    least = min(counts[name] for name in MUTATION_FIELDS)
    rest = counts["redundant"] + counts["unexplained"]
    if least < 0 or not counts["sites"] or seen + rest > counts["sites"]:
        raise EvidenceError(f"{where} of {row['kernel']}: these counts do not add up: {counts}")


def _validate_sanitizer(row: Any, run: dict[str, Any], where: str) -> None:
    """A known tool, kernels of the run, and the number of errors that its own line says."""
    _fields(row, SANITIZER_FIELDS, where)
    _date(row["date"], where)
    if row["tool"] not in SANITIZERS:
        raise EvidenceError(f"{where}: tool {row['tool']!r} is not one of {SANITIZERS}")
    keys = [kernel["key"] for kernel in run["kernels"]]
    strange = [key for key in row["kernels"] if key not in keys]
    if strange or not row["kernels"]:
        raise EvidenceError(f"{where}: kernels must be some of the run's; got {row['kernels']}")
    if row["errors"] != errors_of(row["summary"]):
        raise EvidenceError(f"{where}: {row['errors']} errors, but it says {row['summary']!r}")


def errors_of(text: str) -> int | None:
    """Errors that compute-sanitizer's summary lines in `text` count; None without one."""
    found = re.findall(r"ERROR SUMMARY: (\d+) error", text)
    return sum(map(int, found)) if found else None


def _object(row: Any, where: str) -> None:
    if not isinstance(row, dict):
        raise EvidenceError(f"{where} must be an object; got a {type(row).__name__}")


def _fields(row: Any, fields: dict[str, type], where: str) -> None:
    _object(row, where)
    for name, kind in fields.items():
        value = row.get(name)
        if not isinstance(value, kind) or (kind is int and isinstance(value, bool)):
            raise EvidenceError(f"{where}: {name} must be a {kind.__name__}; got {row.get(name)!r}")
