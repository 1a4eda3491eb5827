# SPDX-License-Identifier: Apache-2.0
"""The main job of a stage with a backward pass: gradients by every means; empty problems."""

import json
import re
from dataclasses import replace
from operator import attrgetter
from pathlib import Path

import numpy as np
import pytest
import torch
from flash_ladder import load
from flash_ladder.common import contract, contract_gpu, contract_gradients, inputs, mainjob
from rich.console import Console

SMALL = ("--heads", "1", "--seqlen", "128", "--head-dim", "64")


@pytest.fixture(autouse=True)
def no_gpu(monkeypatch):
    """As on a machine without a GPU."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)


def _rows(found: dict, means: str) -> dict[str, dict]:
    return {row["name"]: row for row in found["means"][means]["comparisons"]}


def test_run_of_a_stage_with_a_backward_computes_gradients(ladder):
    code, out, _ = ladder("run", "7", *SMALL)
    assert code == 0 and max(map(len, out.splitlines())) <= 80
    assert "SM model of backward_1cta, b1 sq128 sk128 h1 d64 bf16: 1 CTA" in out
    assert re.findall(r"SM model │ (d\w) +│ (\w+)", out) == [
        (name, metric) for name in ("dq", "dk", "dv") for metric in ("max_abs", "rms_abs")
    ]
    found = json.loads(ladder("run", "7", *SMALL, "--json")[1])
    assert list(_rows(found, "SM model")) == ["out", "lse", "dq", "dk", "dv"]
    gradients = found["means"]["SM model"]["gradients"]
    assert (gradients["part"], gradients["shape"]) == ("backward_1cta", found["shape"])
    assert gradients["derived"]["cycles_per_cta"] > 0
    assert "gradients" not in json.loads(ladder("run", "6", *SMALL, "--json")[1])["means"]


def test_gradients_of_a_large_problem_are_those_of_a_part_of_it(monkeypatch):
    monkeypatch.setattr(mainjob, "GRADIENT_ROWS", 128)
    sizes = {"batch": 2, "heads": 5, "seqlen": 256, "head_dim": 128}
    given = mainjob.problem(None, "gaussian", sizes, None, 0)
    result = mainjob.run(load(7), given, Console(quiet=True))
    assert result.ok
    about = result.means["SM model"]["gradients"]
    assert about["shape"] == "b1 sq128 sk128 h4 d128 bf16" and about["part"] == "backward_2cta"
    lengths = {"seqused_k": torch.tensor([100, 0], dtype=torch.int32)}
    assert mainjob._small(replace(given, options=lengths)).q.shape == given.q.shape


def test_a_wrong_gradient_is_exit_code_1(ladder, monkeypatch):
    right = contract.judge_gradients
    twice = lambda given, dq, dk, dv, **more: right(given, dq, 2 * dk, dv, **more)
    monkeypatch.setattr(contract, "judge_gradients", twice)
    code, out, _ = ladder("run", "7", *SMALL)
    assert code == 1 and "NOT within tolerance" in out and re.search(r"│ dk +│.*FAIL", out)


def test_the_kernels_gradients_are_shown_as_well(ladder, monkeypatch):
    """The kernels are the model here, and the GPU is this machine."""
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda *_: "a GPU")
    monkeypatch.setattr(inputs.Problem, "to", lambda problem, device: problem)
    monkeypatch.setattr(contract_gpu, "gpu_skip_reason", lambda stage: None)
    forward = lambda stage, given: attrgetter("out", "lse")(stage.simulate_problem(given))
    monkeypatch.setattr(contract_gpu, "run_problem", forward)
    backward = lambda stage, part, given: part.simulate_problem(given)
    monkeypatch.setattr(contract_gradients, "run_gradients", backward)
    found = json.loads(ladder("run", "7", *SMALL, "--json")[1])
    assert found["ok"] and _rows(found, "kernel on a GPU") == _rows(found, "SM model")


@pytest.mark.parametrize("shape", [(0, 128, 2, 64), (1, 0, 2, 64)])
def test_an_empty_file_has_nothing_to_compute(ladder, tmp_path, shape):
    path = tmp_path / "none.npz"
    np.savez(path, **{name: np.zeros(shape, np.float32) for name in "qkv"})
    code, _, complaint = ladder("run", "8", "--qkv", str(path))
    assert code == 2 and "none is empty (b" in complaint
    for number in "17":
        code, _, complaint = ladder("run", number, "--qkv", str(path))
        assert code == 2 and "(stage 08 lifts this)" in complaint


def test_the_readme_shows_what_run_prints(ladder):
    """But for seconds: derived cycles, every error, facts of the code where it compiles."""
    readme = (Path(__file__).parent.parent / "README.md").read_text(encoding="utf-8")
    shown = readme.split("## What the demo prints")[1].split("```text")[1].split("```")[0]
    code, out, _ = ladder("run")
    assert code == 0
    flat = lambda text: " ".join(re.sub(r"[\d.]+ s\b", "s", text).split())
    for kind in ("cycles a CTA", "cycles a pair"):
        (number,) = re.findall(rf"([\d,]+) {kind}", flat(shown))
        assert f"{number} {kind}" in flat(out)
    rows = [line.strip() for line in shown.splitlines() if line.startswith("│ SM model")]
    assert len(rows) == 12 and all(row in out for row in rows)
    if "Compiled 08" in out:
        facts = re.findall(r"^│ (\w+) +│ (\d+) +│$", shown, re.M)
        found = dict(re.findall(r"^│ (\w+) +│ (\d+) +│$", out, re.M))
        assert facts and all(found[name] == value for name, value in facts)
