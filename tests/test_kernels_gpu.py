# SPDX-License-Identifier: Apache-2.0
"""The test kernels executed on a Hopper GPU: exact results under every adversary; planted bugs."""

import concurrent.futures
import functools
import json
import subprocess
import sys

import pytest
import torch

pytest.importorskip("cutlass", reason="needs the CuTe DSL")
from tests.kernels import KERNELS, label
from tests.kernels.objects import ADVERSARIES, ROOT, run, session


def skip_reason() -> str | None:
    if not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0):
        return "needs a Hopper GPU (sm_90)"
    return None


pytestmark = pytest.mark.skipif(skip_reason() is not None, reason=str(skip_reason()))
SWEEP = [
    pytest.param(name, row, id=f"{name}-{label(row)}")
    for name, kernel in KERNELS.items()
    for row in kernel.sweep
]
EXPECTED = {
    "values": {"values", "POISON_READ"},
    "hang": {"TIMEOUT"},
    "tmem": {"EARLY_DEALLOC", "TMEM_LEAK", "TMEM_NOT_ALLOCATED"},
    "form": {"BAD_SMEM_DESCRIPTOR", "BAD_INSTRUCTION_DESCRIPTOR"},
}  # how a bug that should show like this may be reported
BUGS = [
    (name, bug)
    for name, kernel in KERNELS.items()
    for bug, row in kernel.bugs.items()
    if set(row.seen_as.split()) & set(EXPECTED)
]


@pytest.mark.parametrize("name, parameters", SWEEP)
def test_exact(name, parameters):
    session(torch.cuda.current_device()).settings()
    actual, expected = run(name, parameters)
    assert torch.equal(actual, expected)


@pytest.mark.parametrize("adversary", ADVERSARIES)
@pytest.mark.parametrize("name", KERNELS)
def test_exact_under_adversary(name, adversary):
    session(torch.cuda.current_device()).settings(**ADVERSARIES[adversary])
    for seed, parameters in enumerate(KERNELS[name].sweep[::7]):
        actual, expected = run(name, parameters, seed)
        assert torch.equal(actual, expected), label(parameters)


@functools.cache
def seen() -> dict:
    """What each planted bug looked like; a fault ends its process, so each has one."""

    def one(pair):
        command = [sys.executable, "-m", "tests.kernels.objects", "bug", *pair]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120)
        lines = done.stdout.strip().splitlines()
        if not lines:
            return {"seen": None, "adversary": None, "message": done.stderr[-2000:]}
        return json.loads(lines[-1])

    with concurrent.futures.ThreadPoolExecutor(6) as pool:
        return dict(zip(BUGS, pool.map(one, BUGS)))


@pytest.mark.parametrize("name, bug", BUGS)
def test_planted_bug_is_reported(name, bug):
    result = seen()[name, bug]
    row = KERNELS[name].bugs[bug]
    allowed = set().union(*(EXPECTED.get(word, set()) for word in row.seen_as.split()))
    print(f"{name} {bug}: {result['seen']} under {result['adversary']}: {result['message']}")
    assert result["seen"] in allowed, f"{row.fault}: {result}"
