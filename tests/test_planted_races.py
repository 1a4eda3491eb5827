# SPDX-License-Identifier: Apache-2.0
"""Three kinds of race planted in stage 04: no timing profile shows them, the executed log does.

A wait is missing, a fence is missing, a fence comes too late. Results stay right, bit for bit or
within tolerance, without delays and under every adversary; the log names both sides.
"""

import json
import pathlib
from collections import Counter

import pytest
import torch
from flash_ladder import load
from flash_ladder.common import contract_gpu
from flash_ladder.common.device_worker import Bench
from flash_ladder.common.executed import check_log
from flash_ladder.common.hopper.steps import steps

ROOT = pathlib.Path(__file__).parent.parent
PROFILES = (0, *contract_gpu.ADVERSARIES)
FENCE = '        cute.arch.fence_proxy("async.shared", space="cta")'
ARRIVE = "        cute.arch.mbarrier_arrive(bars.o_staged.data_ptr() + tile)"
LATE = """
import json, conftest
from flash_ladder import load
from flash_ladder.common import contract
from flash_ladder.common.contract_gpu import ADVERSARIES
from flash_ladder.common.device_worker import Bench
from flash_ladder.common.executed import check_log
bench = Bench(load(4), 128)
wrong, errors = [], []
for name, problem in bench.problems.items():
    for seed in (0, *ADVERSARIES):
        outputs, logs = bench.run(problem, seed=seed, log=seed == 0)
        wrong += [v.name for v in contract.judge(problem, *outputs) if not v.ok]
        errors += [str(e) for log in logs for e in check_log(log, bench.plan).errors]
print(json.dumps({"wrong": wrong, "errors": errors}))
"""


SHORT = """
import conftest
from flash_ladder import load
from flash_ladder.common import contract_gpu, mutation
from flash_ladder.common.hopper.run import session
from flash_ladder.common.launch import execution
problem = mutation.stage_problems(load(4), 64, "cuda")["least keys"]
session(0).settings(log_clusters=1, log_units=64)
try:
    with execution("rewritten", log=True):
        contract_gpu.run_problem(load(4), problem)
except RuntimeError as fault:
    print(fault)
"""


@pytest.fixture(scope="module")
def bench():
    """Stage 04 with its log, on the GPU; skipped, with the reason, where there is none."""
    reason = contract_gpu.adversary_skip_reason(load(4))
    if reason:
        pytest.skip(reason)
    return Bench(load(4), 128)


def _line(bench: Bench, agent: str, verb: str, what: str) -> int:
    """PTX line of the most frequent such step of an unharmed run."""
    _, (log,) = bench.run(bench.problems["gaussian"], log=True)
    lines = Counter(
        step.line
        for step in steps(log, bench.plan)
        if (step.agent.partition(".")[0], step.verb, step.what) == (agent, verb, what)
    )
    return lines.most_common(1)[0][0]


@pytest.mark.parametrize(
    ("agent", "verb", "what", "says"),
    [
        ("MMA", "wait", "q_full1", "MMA does not wait where the bytes are counted, on q_full1"),
        ("SOFTMAX0", "fence", "wait.st", "wait::st is missing"),
        ("CORRECTION", "fence", "tcgen05.after", "fence::after_thread_sync is missing"),
    ],
)
def test_a_missing_wait_and_missing_fences(bench, agent, verb, what, says):
    line = _line(bench, agent, verb, what)
    for name, problem in bench.problems.items():
        for seed in PROFILES:
            outputs, logs = bench.run(problem, skip=line, seed=seed, log=seed == 0)
            same = all(map(torch.equal, outputs, bench.right[name]))
            assert same, f"{name}: visible under adversary {seed}"
            if seed == 0 and name != "least keys":
                errors = [str(error) for error in check_log(logs[0], bench.plan).errors]
                assert any(says in error for error in errors), errors


def test_a_fence_that_comes_too_late(bench, copy_sources, run_python):
    folder = copy_sources("late")
    path = folder / "stages/04/correction.py"
    lines = path.read_text().splitlines(keepends=True)
    (fence,) = [at for at, line in enumerate(lines) if line.startswith(FENCE)]
    (arrive,) = [at for at, line in enumerate(lines) if line.startswith(ARRIVE)]
    lines.insert(arrive, lines.pop(fence))  # now the line after the arrival
    path.write_text("".join(lines))
    found = json.loads(run_python(LATE, folder, FLASH_LADDER_ARTEFACTS=""))
    assert not found["wrong"]
    assert any("fence.proxy.async by CORRECTION" in error for error in found["errors"])


def test_a_log_that_is_too_short_is_a_fault(bench, run_python):
    assert "LOG_OVERFLOW: the log of a cluster is full (64 units" in run_python(SHORT, ROOT)
