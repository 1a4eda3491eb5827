# SPDX-License-Identifier: Apache-2.0
"""`flash-ladder sanitize`: its child, what it reads from the sanitizer, and what it records.

A script stands in for compute-sanitizer, and the models for the kernels: no GPU is here.
"""

import json
import os
import pathlib
import subprocess
import sys
from operator import attrgetter

import pytest
import torch
from flash_ladder import load
from flash_ladder.common import (
    contract_gpu,
    contract_gradients,
    evidence,
    fences,
    sanitize,
    schema,
)
from flash_ladder.common.contract import Case
from flash_ladder.common.hopper import run as hopper_run
from flash_ladder.common.numerics import ToleranceError
from flash_ladder.common.sass import MissingTool

TAGS = ("", "backward_1cta-", "preprocess-", "postprocess-")
KEYS = sorted(
    [f"07-{tag}sm_100a-bfloat16-d{d}" for tag in TAGS for d in (64, 128)]
    + ["07-backward_2cta-sm_100a-bfloat16-d128"]
)
RECORD = {
    "tool": "memcheck",
    "command": "flash-ladder sanitize 7",
    "date": "2026-01-31",
    "gpu": "NVIDIA H200",
    "driver": "580.1",
    "kernels": KEYS,
    "errors": 0,
    "summary": "ERROR SUMMARY: 0 errors",
}


@pytest.fixture
def hopper(monkeypatch):
    """As on a machine with a Hopper GPU."""
    monkeypatch.setattr(contract_gpu, "gpu_skip_reason", lambda stage: None)
    monkeypatch.setattr(sanitize, "modes", lambda *_: ["rewritten"])
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda *_: "NVIDIA H200")
    monkeypatch.setattr(sanitize, "driver", lambda: "580.1")


@pytest.fixture
def tool(monkeypatch, tmp_path):
    """Puts a compute-sanitizer on PATH that runs its target and then says what it is told to."""
    path = tmp_path / "bin" / "compute-sanitizer"
    path.parent.mkdir()
    monkeypatch.setenv("PATH", f"{path.parent}{os.pathsep}{os.environ['PATH']}")

    def make(*said: str) -> None:
        lines = [f"echo '========= {line}'" for line in said]
        script = ["#!/bin/sh", 'test "$1 $2" = "--tool memcheck" || exit 9', "shift 2"]
        script += ['"$@"', "code=$?", *lines, "exit $code"]
        path.write_text("\n".join(script))
        path.chmod(0o755)

    return make


@pytest.fixture
def child(monkeypatch):
    """Lets the child say that it executed these keys, and end with a code."""

    def make(keys=KEYS, code: int = 0, seen: str = "") -> None:
        def command(stage, path):
            lines = "import os, sys", f"open({str(path)!r}, 'w').write({chr(10).join(keys)!r})"
            wanted = f"assert os.environ['PYTORCH_NO_CUDA_MEMORY_CACHING'] == '1'; print({seen!r})"
            return [sys.executable, "-c", "\n".join((*lines, wanted, f"sys.exit({code})"))]

        monkeypatch.setattr(sanitize, "child_command", command)

    return make


# ---- where it cannot run -------------------------------------------------------------------


def test_a_machine_that_cannot_run_it_says_why(monkeypatch, tool):
    tool()
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(RuntimeError, match="cannot sanitize stage 07: no CUDA GPU here"):
        sanitize.require(load(7))
    monkeypatch.setattr(contract_gpu, "gpu_skip_reason", lambda stage: None)
    monkeypatch.setattr(sanitize, "modes", lambda *_: ["native"])
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda *_: "NVIDIA B200")
    with pytest.raises(RuntimeError, match="runs on Hopper GPUs, not on NVIDIA B200"):
        sanitize.require(load(7))


def test_a_missing_tool_is_named(hopper, monkeypatch, tmp_path, ladder):
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setenv("CUDA_HOME", str(tmp_path))
    with pytest.raises(MissingTool, match="compute-sanitizer not found"):
        sanitize.require(load(7))
    code, out, complaint = ladder("sanitize", "7")
    assert code == 1 and not out and "compute-sanitizer not found" in complaint


# ---- the child -----------------------------------------------------------------------------


def test_the_child_finds_this_package(tmp_path):
    """It comes as far as the session, which needs a GPU."""
    command = sanitize.child_command(load(7), tmp_path / "a 'name'")
    done = subprocess.run(
        command, capture_output=True, text=True, cwd=tmp_path, env={"CUDA_VISIBLE_DEVICES": ""}
    )
    assert done.returncode == 1 and "common/sanitize.py" in done.stderr and "session" in done.stderr


@pytest.mark.parametrize("number", [1, 7, 8])
def test_every_kernel_is_executed_and_judged(number, monkeypatch, tmp_path):
    stage, timeouts = load(number), []

    class Session:
        def settings(self, timeout_ms):
            timeouts.append(timeout_ms)

    right = Case.problem
    monkeypatch.setattr(Case, "problem", lambda case, device: right(case))
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(hopper_run, "session", lambda index: Session())
    forward = lambda stage, given: attrgetter("out", "lse")(stage.simulate_problem(given))
    monkeypatch.setattr(contract_gpu, "run_problem", forward)
    gradients = lambda stage, part, given: part.simulate_problem(given)
    monkeypatch.setattr(contract_gradients, "run_gradients", gradients)
    sanitize.execute(number, str(tmp_path / "executed"))
    executed = (tmp_path / "executed").read_text().split()
    assert timeouts == [60_000] and len(executed) == len(set(executed))
    assert set(executed) == set(sanitize.hashes(stage))
    assert sorted(executed) == KEYS or number != 7
    wrong = lambda *given: [2 * x for x in forward(*given)]
    monkeypatch.setattr(contract_gpu, "run_problem", wrong)
    with pytest.raises(ToleranceError, match="out: FAILED"):
        sanitize.execute(number, str(tmp_path / "again"))
    assert not (tmp_path / "again").exists()


# ---- what the sanitizer says ---------------------------------------------------------------


def test_a_clean_run_is_a_record(hopper, tool, child):
    tool("COMPUTE-SANITIZER", "ERROR SUMMARY: 0 errors")
    child()
    row = sanitize.sanitize(load(7), KEYS)
    assert {**row, "date": ""} == {**RECORD, "date": ""}


def test_errors_are_counted(hopper, tool, child):
    tool("Invalid __global__ write", "ERROR SUMMARY: 12 errors")
    child(code=1)
    row = sanitize.sanitize(load(7), KEYS)
    assert row["errors"] == 12 and row["summary"] == "ERROR SUMMARY: 12 errors"


@pytest.mark.parametrize(
    ("said", "keys", "code", "words"),
    [
        (["nothing"], KEYS, 0, r"9 of 9 kernels .* \(exit code 0\):(.|\n)*nothing"),
        (["ERROR SUMMARY: 0 errors"], KEYS, 3, r"9 of 9 .* \(exit code 3\):(.|\n)*seen here"),
        (["ERROR SUMMARY: 0 errors"], KEYS[:8], 0, "8 of 9 kernels of stage 07 were executed"),
        (["ERROR SUMMARY: 2 errors"], KEYS[:1], 1, r"1 of 9 (.|\n)*ERROR SUMMARY: 2 errors"),
    ],
)
def test_a_run_that_did_not_come_to_its_end_is_no_record(
    hopper, tool, child, said, keys, code, words
):
    tool(*said)
    child(keys, code, seen="seen here")
    with pytest.raises(RuntimeError, match=words):
        sanitize.sanitize(load(7), KEYS)


def test_a_run_without_end_is_stopped(hopper, tool, monkeypatch):
    tool()
    monkeypatch.setattr(sanitize, "SECONDS", 0.2)
    monkeypatch.setattr(sanitize, "child_command", lambda *_: ["sleep", "5"])
    with pytest.raises(RuntimeError, match=r"of stage 07 took more than 0\.2 s under memcheck"):
        sanitize.sanitize(load(7), KEYS)


# ---- evidence ------------------------------------------------------------------------------


@pytest.fixture
def recorded(monkeypatch, tmp_path) -> pathlib.Path:
    """A copy of stage 07's evidence, whose kernels count as today's."""
    (run,) = load(7).evidence["runs"]
    run.pop("sanitizer", None)
    path = tmp_path / "evidence.json"
    path.write_text(json.dumps({"schema": 1, "stage": 7, "runs": [run]}))
    digests = {row["key"]: row["ptx_sha256"] for row in run["kernels"]}
    monkeypatch.setattr(sanitize, "hashes", lambda stage: {key: digests[key] for key in KEYS})
    return path


@pytest.mark.parametrize("errors", [0, 2])
def test_the_command_adds_the_record_and_fails_on_errors(
    errors, hopper, tool, child, recorded, ladder
):
    tool(f"ERROR SUMMARY: {errors} errors")
    child()
    code, out, _ = ladder("sanitize", "7", "--out", str(recorded))
    assert code == (1 if errors else 0) and f"9 kernels: ERROR SUMMARY: {errors} errors" in out
    told = json.loads(recorded.read_text())
    (run,) = told["runs"]
    assert {**run["sanitizer"], "date": ""} == {
        **RECORD,
        "date": "",
        "errors": errors,
        "summary": f"ERROR SUMMARY: {errors} errors",
    }
    schema.validate(told, load(7))
    text = [line for line in evidence.stale(load(7), told) if "memcheck" in line]
    assert text == ([f"{run['sanitizer']['date']}: memcheck found 2 errors"] if errors else [])
    del run["sanitizer"]
    assert [run] == load(7).evidence["runs"] or "sanitizer" in load(7).evidence["runs"][0]


def test_other_code_than_that_of_the_run_is_refused_before_it_starts(
    hopper, tool, recorded, ladder, monkeypatch
):
    tool()
    monkeypatch.setattr(sanitize, "child_command", lambda *_: pytest.fail("started"))
    before, right = recorded.read_bytes(), sanitize.hashes(None)
    monkeypatch.setattr(sanitize, "hashes", lambda stage: {**right, KEYS[3]: "0" * 64})
    code, _, complaint = ladder("sanitize", "7", "--out", str(recorded))
    assert code == 2 and f"{KEYS[3]} did not run so; run `verify` first" in complaint
    code, _, complaint = ladder("sanitize", "7", "--out", str(recorded.with_name("none.json")))
    assert code == 2 and "no rewritten run of this kernel" in complaint
    assert recorded.read_bytes() == before


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"tool": "valgrind"}, r"tool 'valgrind' is not one of"),
        ({"kernels": []}, "kernels must be some of the run's"),
        ({"kernels": ["other"]}, r"kernels must be some of the run's; got \['other'\]"),
        ({"errors": 1}, "1 errors, but it says 'ERROR SUMMARY: 0 errors'"),
        ({"summary": "fine"}, "0 errors, but it says 'fine'"),
        ({"date": "9999-01-01"}, "date 9999-01-01 has not come yet"),
        ({"errors": None}, "errors must be a int; got None"),
    ],
)
def test_a_record_that_cannot_be_is_refused(recorded, changes, words):
    told = json.loads(recorded.read_text())
    told["runs"][0]["sanitizer"] = RECORD
    schema.validate(told, load(7))
    told["runs"][0]["sanitizer"] = RECORD | changes
    with pytest.raises(schema.EvidenceError, match=f"run 0, sanitizer: {words}"):
        schema.validate(told, load(7))
    told["runs"][0]["sanitizer"] = [RECORD]
    with pytest.raises(schema.EvidenceError, match="run 0, sanitizer must be an object"):
        schema.validate(told, load(7))


def test_the_page_shows_the_record(recorded, monkeypatch):
    runs = json.loads(recorded.read_text())["runs"]
    monkeypatch.setattr(fences, "evidence_runs", lambda number: runs)
    show = lambda: fences.results("", "results", "", {"stage": "7"}, None)
    assert "compute-sanitizer" not in show()
    runs[0]["sanitizer"] = RECORD | {"kernels": KEYS[:2]}
    (line,) = [line for line in show().splitlines() if "compute-sanitizer" in line]
    assert f"memcheck, of {KEYS[0]}, {KEYS[1]}: 0 errors <abbr" in line
    assert "flash-ladder sanitize 7, 2026-01-31, NVIDIA H200, driver 580.1" in line
