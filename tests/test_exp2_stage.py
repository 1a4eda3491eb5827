# SPDX-License-Identifier: Apache-2.0
"""What stage 05 says of its exponentials: the polynomial, how many, and what the model computes."""

import math

import numpy as np
import pytest
import torch
from flash_ladder import load
from flash_ladder.common import contract_gpu, exp2, minimax
from flash_ladder.common.compile import compile_stage
from flash_ladder.common.mutation import mutate, stage_subject
from flash_ladder.common.ptx import read

STAGE = load(5)
CONFIG, MODEL = STAGE.config, STAGE.model
ULP = 2.0**-23


def test_the_polynomial_is_that_of_the_study():
    assert CONFIG.POLYNOMIAL == minimax.coefficients(3, "one")
    assert exp2.CLAMP["one"] == CONFIG.SMALLEST


@pytest.mark.parametrize("head_dim", CONFIG.ENVELOPE.head_dims)
def test_every_chunk_has_a_share_that_it_can_have(head_dim):
    shares = CONFIG.EMULATED[head_dim]
    assert len(shares) * CONFIG.CHUNK == CONFIG.TILE_N[head_dim]
    assert all(0 <= pairs <= CONFIG.CHUNK // 2 for pairs in shares)
    assert 0 < CONFIG.P_FIRST < len(shares)
    half = CONFIG.CHUNK // 2
    for pairs in shares:  # the rule that kernel and model use picks just as many
        assert sum(pair * pairs % half < pairs for pair in range(half)) == pairs


def test_the_model_computes_what_the_bits_say():
    x = np.linspace(-130.0, 8.0, 200_001, dtype=np.float32)
    bits = exp2.exp2(x, CONFIG.POLYNOMIAL).astype(np.float64)
    ours = MODEL.exp2_emulated(torch.from_numpy(x)).double().numpy()
    normal = x > -126
    assert np.abs(ours[normal] / bits[normal] - 1).max() <= 2 * ULP
    assert np.abs(ours - bits)[~normal].max() <= 2.0**-126  # no exponent is left there


def test_what_must_be_exact_is():
    x = torch.tensor([0.0, -1.0, -126.0, 3.0])
    assert MODEL.exp2_emulated(x).tolist() == [1.0, 0.5, 2.0**-126, 8.0]
    assert exp2.exp2(x.numpy(), CONFIG.POLYNOMIAL).tolist() == [1.0, 0.5, 2.0**-126, 8.0]
    far = np.array([-127.0, -500.0, -np.inf], np.float32)
    assert exp2.exp2(far, CONFIG.POLYNOMIAL).tolist() == [0.0, 0.0, 0.0]


def _page() -> str:
    return " ".join((STAGE.folder / "README.md").read_text(encoding="utf-8").split())


def test_the_page_says_how_far_off_an_emulated_exponential_is():
    """Relative down to -126; below, where no exponent is left, absolute."""
    x = np.linspace(-127.0, 0.0, 1_270_001, dtype=np.float32)
    bits = exp2.exp2(x, CONFIG.POLYNOMIAL).astype(np.float64)
    exact = 2.0 ** x.astype(np.float64)
    normal = x >= -126
    relative = np.abs(bits / exact - 1)
    told = f"at most {relative[normal].max():.1e} relative to the exact value for x ≥ −126 (D:"
    assert told.replace("e-05", "e-5") in _page()
    below = np.abs(bits - exact)[~normal].max()
    assert f"For x < −126 an emulated 2^x is off by at most {below:.1e} absolute (D)" in _page()
    assert relative[~normal & (x > -127)].max() > 0.4  # so no relative bound holds there


def test_the_page_says_what_rounding_to_the_nearest_would_change():
    """These coefficients on [-1/2, 1/2], and what no others of degree 3 with p0 = 1 go below there.

    weights make a sum over four points that is 0 for f, f^2 and f^3 over 2^f, so the same for the
    relative error of all of them; a largest error times sum(abs(weights)) is at least that.
    """
    f = np.linspace(-0.5, 0.5, 20_001)
    ours = sum(c * f**k for k, c in enumerate(CONFIG.POLYNOMIAL)) / 2.0**f - 1
    at = np.array([-0.5, -0.342, 0.301, 0.5])
    weights = np.linalg.svd(np.stack([at**k / 2.0**at for k in (1, 2, 3)]))[2][-1]
    least = abs(weights @ (1 / 2.0**at - 1)) / np.abs(weights).sum()
    told = (
        "they are off by up to {:.1e} (D). Others would gain nothing: {:.1e} at least with p0 = 1"
    )
    assert told.format(np.abs(ours).max(), least).replace("e-0", "e-") in _page()
    assert least > 8.6e-5 and "where these have 8.6e-5." in _page()


def test_an_emulated_exponential_loses_a_nan():
    assert MODEL.exp2_emulated(torch.tensor([math.nan])).item() <= 2.0**-126  # 0 in the kernel


@pytest.mark.parametrize("number", [5, 6])
def test_the_row_maximum_carries_a_nan_that_an_emulated_column_loses(number):
    """One NaN key, in a column on the FMA units: every row of its head is NaN all the same."""
    stage = load(number)
    chunk = next(i for i, pairs in enumerate(stage.config.EMULATED[64]) if pairs)
    key = chunk * stage.config.CHUNK  # the first pair of a chunk that has any
    q, k, v = (torch.randn(1, rows, 1, 64).bfloat16() for rows in (256, 128, 128))
    k[0, key, 0, 3] = float("nan")
    run = stage.simulate(q, k, v, softmax_scale=0.125)
    assert run.out.isnan().all() and run.lse.isnan().all()


@pytest.mark.parametrize("head_dim", CONFIG.ENVELOPE.head_dims)
def test_the_first_part_of_p_is_published_before_the_second(dsl, head_dim):
    """In the PTX: three stores, the wait, the arrival, then the fourth."""
    kernel = compile_stage(STAGE, arch="sm_100a", dtype="bfloat16", head_dim=head_dim)
    (body,) = read(kernel.ptx).entries().values()
    kinds = {"tcgen05.st.sync.aligned.32x32b.x16": "store", "mbarrier.arrive.shared": "arrive"}
    seen = [name for s in body for prefix, name in kinds.items() if s.opcode.startswith(prefix)]
    text = " ".join(seen)
    assert text.count("store store store arrive store arrive") == CONFIG.Q_TILES


def test_emulating_more_relieves_the_mufu_in_the_model(monkeypatch):
    q, k, v = (torch.randn(1, 256, 1, 64).bfloat16() for _ in range(3))
    busy = []
    for shares in ((0, 0, 0, 0), CONFIG.EMULATED[64], (8, 8, 8, 8)):
        monkeypatch.setitem(CONFIG.EMULATED, 64, shares)
        run = STAGE.simulate(q, k, v, softmax_scale=0.125)
        spent = {engine: run.busy()[engine] * run.cta_cycles[0] for engine in ("mufu", "fma")}
        busy.append(spent)
    assert busy[0]["mufu"] > busy[1]["mufu"] > busy[2]["mufu"]
    assert busy[0]["fma"] < busy[1]["fma"] < busy[2]["fma"]


def test_the_page_says_how_many_sites_are_redundant():
    """In the model, where each role has fences of its own, and in the compiled code."""
    report = mutate(stage_subject(STAGE, 128))
    counts, sites = report.counts(), len(report.verdicts)
    (compiled,) = (row["counts"] for run in STAGE.evidence["runs"] for row in run["mutation"])
    redundant = [row.site for row in report.verdicts if row.label == "redundant"]
    start = [site for site in redundant if site.function == "begin"]
    roles = len(CONFIG.plan(128).roles)
    page = _page()
    assert (
        f"Of {sites} waits, arrivals and fences deleted from the *model* in turn, "
        f"{sites - counts['redundant']} are noticed; the other {counts['redundant']} are redundant"
    ) in page
    assert len(start) == 2 * roles == 14 and "14 of those are two fences that seven roles" in page
    assert f"code's {compiled['sites']} sites {compiled['redundant']} are (M" in page


def test_the_page_says_what_passed():
    (run,) = STAGE.evidence["runs"]
    cases, checks = sum(row["cases"] for row in run["kernels"]), len(contract_gpu.checks(STAGE))
    adversaries, logs = len(run["adversaries"]), sum("log" in row for row in run["kernels"])
    passed = run["tests"]["passed"]
    assert cases + checks + adversaries + logs == passed and not run["tests"]["failed"]
    told = (
        f"{passed} passed: {cases} cases, {checks} checks, {adversaries} [adversaries][adversary]"
    )
    assert f"{told}, {logs} [logs][log] (M)" in _page()
