# SPDX-License-Identifier: Apache-2.0
"""What ran where: `stages/NN/evidence.json`, of the schema in `schema.py`, and whether it is true.

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
from .schema import SCHEMA, EvidenceError, validate
from .stage import KernelSource, Stage


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
        found = run.get("sanitizer", {"errors": 0})
        if found["errors"]:
            reasons.append(f"{found['date']}: {found['tool']} found {found['errors']} errors")
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


def sanitized_run(
    runs: list[dict[str, Any]], hashes: dict[str, str], path: pathlib.Path
) -> dict[str, Any]:
    """The newest rewritten run of kernels with these PTX hashes, by key, among those of `path`.

    Raises EvidenceError when there is none, or when one of its kernels was other code.
    """
    run = rewritten_run(runs, next(iter(hashes.values())), path)
    ran = {kernel["key"]: kernel["ptx_sha256"] for kernel in run["kernels"]}
    other = [key for key, digest in hashes.items() if ran.get(key) != digest]
    if other:
        raise EvidenceError(f"{path}: {', '.join(other)} did not run so; run `verify` first")
    return run


def add_sanitizer(
    path: pathlib.Path, stage: Stage, row: dict[str, Any], hashes: dict[str, str]
) -> None:
    """Add what the sanitizer said of kernels to the rewritten run of them in an evidence file.

    row: `schema.SANITIZER_FIELDS`; it replaces an earlier one. hashes: see `sanitized_run`. Raises
    EvidenceError.
    """
    runs = read(path, stage)
    sanitized_run(runs, hashes, path)["sanitizer"] = row
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
