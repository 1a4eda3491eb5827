# SPDX-License-Identifier: Apache-2.0
"""The Hopper engine on an sm_90 GPU: MMAs against torch, loads, delays, and every fault."""

import concurrent.futures
import importlib.util
import pathlib
import subprocess
import sys

import pytest

FOLDER = pathlib.Path(__file__).parent / "hopper_gpu"


def _harness():
    spec = importlib.util.spec_from_file_location("hopper_harness", FOLDER / "harness.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


harness = _harness()
Case = harness.Case
_REASON = harness.skip_reason()
pytestmark = pytest.mark.skipif(_REASON is not None, reason=str(_REASON))

SPANS = (16, 32, 64, 128)
CASES = [
    *(Case(a_span=span, b_span=128) for span in SPANS),
    *(Case(a_span=span, b_span=span, a_mn_major=True) for span in SPANS),
    *(Case(a_span=span, b_span=span, b_mn_major=True) for span in SPANS),
    *(Case(m=64, n=n, a_span=64, steps=2) for n in (8, 24, 64, 200, 256)),
    *(Case(m=64, n=64, lane=16, column=32, accumulate=flag) for flag in (False, True)),
    *(Case(n=n, steps=1, b_mn_major=mn) for n in (16, 72, 256) for mn in (False, True)),
    Case(accumulate=True, column=96),
    Case(bf16=False),
    Case(bf16=False, negate_a=True),
    Case(negate_b=True, accumulate=True),
    *(Case(tmem_a=True, n=n, b_mn_major=True) for n in (64, 128, 256)),
    Case(tmem_a=True, m=64, n=128, accumulate=True),
    Case(tmem_a=True, m=64, n=64, lane=16, negate_a=True),
    *(Case(m=256, n=n, cta_group=2, steps=2) for n in (16, 64, 224, 256)),
    *(Case(m=256, n=128, cta_group=2, b_mn_major=True, b_span=span, steps=2) for span in SPANS),
    *(Case(m=128, n=n, cta_group=2, steps=2, accumulate=True) for n in (32, 96, 256)),
    Case(m=128, n=128, cta_group=2, a_mn_major=True, b_mn_major=True, steps=2),
    Case(m=256, n=128, cta_group=2, tmem_a=True, steps=2),
    Case(m=128, n=128, cta_group=2, tmem_a=True, steps=2),
]


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_mma(case):
    harness.session().settings()
    harness.run(case)


@pytest.mark.parametrize("eager", [False, True])
def test_delays_change_no_result(eager):
    for seed in (1, 2, 3):
        delays = {"mma": 20000, "tma": 20000, "tmem": 2000, "start": 50000}
        harness.session().settings(eager=eager, seed=seed, delays=delays)
        harness.run(Case(n=64, accumulate=True))
        harness.run(Case(m=256, n=64, cta_group=2, steps=2))


@pytest.mark.parametrize("pair", [False, True])
@pytest.mark.parametrize("bulk", [False, True])
def test_loads(pair, bulk):
    harness.session().settings()
    harness.run_load(pair, bulk)


def test_columns_allocated_again_are_poisoned():
    harness.session().settings()
    job = harness._mma_job(action=11)
    out = harness.torch.zeros(512 * 128, dtype=harness.torch.int32, device="cuda")
    job.out_tmem[0] = out.data_ptr()
    harness.launch("harness", job)
    assert (out == harness.engine.POISON).all()


def test_slots_are_reused():
    harness.session().settings()
    for _ in range(3):
        harness.launch("harness", harness._mma_job(), grid=1000)


@pytest.fixture(scope="module")
def provoked():
    """What each provocation printed. A trap costs the CUDA context, so each has a process."""

    def provoke(name):
        command = [sys.executable, str(FOLDER / "harness.py"), "fault", name]
        done = subprocess.run(command, capture_output=True, text=True, timeout=300)
        return done.stdout + done.stderr[-2000:]

    with concurrent.futures.ThreadPoolExecutor(6) as pool:
        return dict(zip(harness.FAULTS, pool.map(provoke, harness.FAULTS)))


@pytest.mark.parametrize("name", harness.FAULTS)
def test_fault(name, provoked):
    wanted, line, _, _ = harness.FAULTS[name]
    assert provoked[name].startswith(f"{wanted} {line}\n"), provoked[name]
