# SPDX-License-Identifier: Apache-2.0
"""The tolerance rule: it passes good kernels and catches planted faults."""

import json
import math

import pytest
import torch
from flash_ladder.common import inputs, numerics, reference

INF, NAN = math.inf, math.nan
DTYPES = [torch.bfloat16, torch.float16, torch.float32]


def flash(problem, mask):
    """What a good kernel computes: float32 scores and sums, P and O rounded to the input dtype."""
    q, k, v = (x.float().transpose(1, 2) for x in (problem.q, problem.k, problem.v))
    s = torch.where(mask[:, None], q @ k.mT * q.shape[-1] ** -0.5, -INF)
    top = s.amax(-1, keepdim=True)
    p = torch.exp(s - torch.where(top == -INF, 0.0, top))
    total = p.sum(-1, keepdim=True)
    out = (p.to(problem.q.dtype).float() @ v) / torch.where(total == 0, 1.0, total)
    lse = (torch.where(top == -INF, 0.0, top) + total.log())[..., 0]
    return out.transpose(1, 2).to(problem.q.dtype), lse


def flash_backward(problem, mask):
    """The gradients of a good kernel, D from the stored O, dS and P rounded before the matmuls."""
    dtype = problem.q.dtype
    q, k, v, dout = (
        x.float().transpose(1, 2) for x in (problem.q, problem.k, problem.v, problem.dout)
    )
    out, lse = flash(problem, mask)
    scale = q.shape[-1] ** -0.5
    p = torch.where(mask[:, None], torch.exp(q @ k.mT * scale - lse[..., None]), 0.0)
    d = (out.float().transpose(1, 2) * dout).sum(-1, keepdim=True)
    ds = (p * (dout @ v.mT - d)).to(dtype).float()
    grads = (ds @ k * scale, ds.mT @ q * scale, p.to(dtype).float().mT @ dout)
    return [x.transpose(1, 2).to(dtype) for x in grads]


class Case:
    """A good result, its oracle and its baseline."""

    def __init__(self, name="gaussian", dtype=torch.bfloat16, causal=True, sq=128, sk=256):
        self.problem = inputs.make(
            name, batch=2, seqlen_q=sq, seqlen_k=sk, heads=2, head_dim=64, dtype=dtype
        )
        qkv = (self.problem.q, self.problem.k, self.problem.v)
        self.mask = reference.visibility(2, sq, sk, causal=causal)
        oracle = reference.attention(*qkv, causal=causal)
        self.oracle, self.oracle_lse = oracle.out, oracle.lse
        self.baseline, self.baseline_lse = reference.same_precision(*qkv, causal=causal)
        self.out, self.lse = flash(self.problem, self.mask)

    def compare(self, out=None, **more):
        out = self.out if out is None else out
        return numerics.compare(out, self.oracle, self.baseline, **more)

    def compare_lse(self, lse):
        return numerics.compare(lse, self.oracle_lse, self.baseline_lse, name="lse")


@pytest.fixture(scope="module")
def case():
    return Case()


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", [n for n, g in inputs.GENERATORS.items() if g.needs is None])
def test_a_good_kernel_passes_on_every_input(name, dtype, causal):
    good = Case(name, dtype, causal)
    good.compare().check()
    good.compare_lse(good.lse).check()
    p = good.problem
    tensors = (p.q, p.k, p.v, p.dout)
    oracle = reference.attention_backward(*tensors, causal=causal)
    baseline = reference.same_precision_backward(*tensors, causal=causal)
    stored = reference.stored_output_error(*tensors, out_dtype=dtype, causal=causal)
    for key, actual in zip(("dq", "dk", "dv"), flash_backward(p, good.mask)):
        truth = getattr(oracle, key)
        floor = numerics.half_ulp(truth, dtype) + getattr(stored, key).abs()
        yardstick = getattr(baseline, key)
        numerics.compare(actual, truth, yardstick, floor=floor, rows=False, name=key).check()


def test_rounding_is_allowed_when_the_baseline_is_exact():
    truth = torch.linspace(0.5, 300, 640, dtype=torch.float64).reshape(10, 64)
    for dtype in DTYPES:
        rounded = truth.to(dtype)
        assert numerics.compare(rounded, truth, truth).check()
        worse = rounded.clone()
        worse[9, 63] = numeric_neighbour(rounded[9, 63], 2)
        assert not numerics.compare(worse, truth, truth).ok


def numeric_neighbour(x, steps):
    """Moves a positive number up by some representable steps."""
    width = {2: torch.int16, 4: torch.int32}[x.element_size()]
    return (x.view(width) + steps).view(x.dtype)


# planted faults -----------------------------------------------------------------------------------


def test_one_row_never_written(case):
    out = case.out.clone()
    numerics.poison_(out[1, 77, 1])
    verdict = case.compare(out)
    with pytest.raises(numerics.ToleranceError, match=r"64 elements never written") as caught:
        verdict.check()
    assert "rows (1, 77, 1)" in str(caught.value) and str(caught.value).startswith("out: FAILED")


def test_many_rows_never_written_are_summarised(case):
    out = case.out.clone()
    numerics.poison_(out[0])
    assert (
        "(0, 0, 0), (0, 0, 1), (0, 1, 0), (0, 1, 1) and 252 more" in case.compare(out).problems[0]
    )


@pytest.mark.parametrize(("bad", "what"), [(NAN, "1 elements NaN"), (INF, "1 elements infinite")])
def test_one_element_not_finite(case, bad, what):
    out = case.out.clone()
    out[0, 3, 1, 5] = bad
    verdict = case.compare(out)
    assert not verdict.ok and what in verdict.problems[0] and "(0, 3, 1)" in verdict.problems[0]
    assert all(metric.ok for metric in verdict.metrics)


def test_a_factor_of_two(case):
    verdict = case.compare(case.out * 2)
    assert not any(verdict[name].ok for name in ("max_abs", "rms_abs", "row_rel"))


@pytest.mark.parametrize("row", [0, 60, 127])
def test_one_row_wrong_by_a_few_percent(case, row):
    out = case.out.clone()
    out[1, row, 0] *= 1.05
    assert not case.compare(out).ok


def test_two_rows_swapped(case):
    out = case.out.clone()
    out[:, [99, 100]] = out[:, [100, 99]]
    assert not case.compare(out).ok


def test_two_heads_swapped(case):
    assert not case.compare(case.out.flip(2)).ok


def test_a_small_wrong_row_is_seen_only_by_the_row_metric():
    truth = torch.randn(4, 64, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    truth[2] *= 1e-3
    baseline, actual = truth.bfloat16(), truth.bfloat16()
    actual[2] = 0
    verdict = numerics.compare(actual, truth, baseline)
    assert verdict["max_abs"].ok and not verdict["row_rel"].ok
    assert verdict["row_rel"].index == (2,) and verdict["row_rel"].value > 0.99
    assert numerics.compare(actual, truth, baseline, rows=False).ok


def test_lse_infinities_are_exact():
    rows = Case(sq=256, sk=128)  # causal: the first half of the rows sees nothing
    assert (rows.oracle_lse == -INF).any()
    assert rows.compare_lse(rows.lse).ok
    for value in (-1e30, NAN, INF):
        lse = rows.lse.clone()
        lse[1, 0, 3] = value
        verdict = rows.compare_lse(lse)
        assert not verdict.ok and "(1, 0)" in verdict.problems[0]
    lse = rows.lse.clone()
    lse[0, 0, 200] = -INF
    assert "infinite, the oracle is finite" in rows.compare_lse(lse).problems[0]


def test_rows_that_must_be_zero_are_exact():
    rows = Case(sq=256, sk=128)
    out = rows.out.clone()
    assert rows.compare(out).ok
    out[0, 5, 0, 0] = 1e-5
    assert not rows.compare(out).ok


def test_nan_is_expected_where_the_oracle_is_nan(case):
    oracle, out = case.oracle.clone(), case.out.clone()
    oracle[0, 3, 0] = NAN
    assert "64 elements not NaN" in numerics.compare(out, oracle, case.baseline).problems[0]
    out[0, 3, 0] = NAN
    assert numerics.compare(out, oracle, case.baseline).ok
    numerics.poison_(out[0, 3, 0])
    assert "never written" in numerics.compare(out, oracle, case.baseline).problems[0]


def test_overflow_of_the_output_dtype_is_infinity():
    truth = torch.tensor([[1.0, 1e6]], dtype=torch.float64)
    assert numerics.compare(truth.half(), truth, truth.half()).ok
    assert not numerics.compare(truth.clamp(max=65504).half(), truth, truth.half()).ok


def test_ignored_elements_do_not_count(case):
    ignore = torch.zeros(2, 128, 2, 1, dtype=torch.bool)
    ignore[0, 9, 1] = True
    out = case.out.clone()
    out[0, 9, 1] = NAN
    verdict = case.compare(out, ignore=ignore)
    assert verdict.ok and verdict.ignored == 64 and verdict.compared == out.numel() - 64
    out[0, 9, 0] = NAN
    assert not case.compare(out, ignore=ignore).ok
    assert "every element is ignored" in case.compare(ignore=torch.tensor(True)).problems[0]


def test_a_baseline_that_is_not_finite_earns_nothing(case):
    baseline = case.baseline.clone()
    baseline[0, 5] = NAN
    verdict = numerics.compare(case.out, case.oracle, baseline)
    assert verdict.ok and verdict.baseline_skipped == 128
    assert "baseline not finite in 128" in verdict.lines()[0]
    wrong = case.out.clone()
    wrong[0, 5] = 3
    assert not numerics.compare(wrong, case.oracle, baseline).ok


def test_floor_of_the_caller():
    truth = torch.ones(2, 8, dtype=torch.float64)
    actual = (truth + 0.25).float()
    assert not numerics.compare(actual, truth, truth).ok
    assert numerics.compare(actual, truth, truth, floor=0.25).ok
    assert not numerics.compare(actual, truth, truth, floor=0.24).ok
    floor = torch.full((2, 8), 0.25)
    assert numerics.compare(actual, truth, truth, floor=floor).ok
    floor[1] = 0.1
    verdict = numerics.compare(actual, truth, truth, floor=floor)
    assert not verdict["row_rel"].ok and verdict["max_abs"].ok


def test_the_limit_is_twice_the_baseline_plus_the_floor():
    truth = torch.full((1, 4), 1.0, dtype=torch.float64)
    baseline = truth + 0.125
    for error, ok in ((0.25, True), (0.375, True), (0.40625, False)):
        verdict = numerics.compare((truth + error).float(), truth, baseline, floor=0.125)
        assert verdict.ok == ok
    assert verdict["max_abs"].limit == 0.375 and verdict["max_abs"].baseline == 0.125


# reporting ----------------------------------------------------------------------------------------


def test_metrics_by_hand():
    truth = torch.tensor([[1.0, 2.0], [4.0, 0.0]], dtype=torch.float64)
    actual = torch.tensor([[1.0, 2.5], [4.0, 1.0]])
    verdict = numerics.compare(actual, truth, truth, name="x")
    assert verdict["max_abs"].value == 1.0 and verdict["max_abs"].index == (1, 1)
    assert verdict["max_abs"].actual == 1.0 and verdict["max_abs"].expected == 0.0
    assert verdict["rms_abs"].value == pytest.approx(math.sqrt(1.25 / 4))
    assert verdict["max_rel"].value == 0.25 and verdict["max_rel"].index == (0, 1)
    assert verdict["mean_rel"].value == pytest.approx(0.25 / 3)  # a true 0 has no relative error
    assert verdict["max_ulp"].value == 127 << 23 and verdict["max_ulp"].index == (1, 1)
    assert verdict["row_rel"].value == pytest.approx(0.25, rel=1e-6)
    with pytest.raises(KeyError):
        verdict["median"]


def test_a_metric_that_is_nan_fails():
    assert not numerics.Metric("max_abs", NAN, 1.0, 2.0, None, None, None).ok
    assert not numerics.Metric("max_abs", 1.0, NAN, NAN, None, None, None).ok
    assert numerics.Metric("max_rel", NAN, 1.0, None, None, None, None).ok


def test_as_dict_is_json(case):
    out = case.out.clone()
    out[0, 0, 0, 0] = NAN
    for verdict in (case.compare(), case.compare(out, name="broken")):
        again = json.loads(json.dumps(verdict.as_dict(), allow_nan=False))
        assert again["ok"] == verdict.ok and again["name"] == verdict.name
        assert again["metrics"]["max_abs"]["limit"] == verdict["max_abs"].limit
        assert again["metrics"]["max_abs"]["index"] == list(verdict["max_abs"].index)
    rows = numerics.compare(torch.ones(1, 2), torch.zeros(1, 2).double(), torch.zeros(1, 2))
    assert rows.as_dict()["metrics"]["row_rel"]["value"] == "inf"


def test_lines_name_the_place(case):
    out = case.out.clone()
    out[1, 2, 0, 7] = 50
    line = next(x for x in case.compare(out).lines() if x.startswith("max_abs"))
    assert "at (1, 2, 0, 7): 50, expected" in line and line.endswith("too large")
    assert "ok" in case.compare().lines()[0]


@pytest.mark.parametrize("shape", [(0, 4), (3, 0), (0,), ()])
def test_odd_shapes(shape):
    x = torch.ones(shape)
    assert numerics.compare(x, x.double(), x).ok
    if not shape:
        assert not numerics.compare(x + 1, x.double(), x).ok


# ulp and poison -----------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES)
def test_ulp_distance(dtype):
    info = torch.finfo(dtype)
    smallest = info.smallest_normal * info.eps
    one = torch.tensor([1.0, 1.0, 1.0, 0.0, smallest, info.max, -1.0, 1.0], dtype=dtype)
    two = torch.tensor(
        [1.0, 1 + info.eps, 1 - info.eps / 2, -0.0, -smallest, INF, -1 - info.eps, NAN], dtype=dtype
    )
    expected = [0, 1, 1, 0, 2, 1, 1, torch.iinfo(torch.int64).max]
    assert numerics.ulp_distance(one, two).tolist() == expected
    assert numerics.ulp_distance(two, one).tolist() == expected


def test_ulp_distance_errors():
    with pytest.raises(ValueError, match="shapes differ"):
        numerics.ulp_distance(torch.zeros(2), torch.zeros(3))
    with pytest.raises(TypeError, match="dtypes are"):
        numerics.ulp_distance(torch.zeros(2), torch.zeros(2).half())
    with pytest.raises(TypeError, match="allowed"):
        numerics.ulp_distance(torch.zeros(2).double(), torch.zeros(2).double())


@pytest.mark.parametrize("dtype", DTYPES)
def test_half_ulp(dtype):
    eps, tiny = torch.finfo(dtype).eps, torch.finfo(dtype).tiny
    x = torch.tensor([1.0, -1.99, 2.0, 0.99, 0.0, tiny, tiny / 4], dtype=torch.float64)
    expected = [eps / 2, eps / 2, eps, eps / 4] + [tiny * eps / 2] * 3
    assert numerics.half_ulp(x, dtype).tolist() == expected


@pytest.mark.parametrize("dtype", DTYPES)
def test_poison(dtype):
    x = torch.zeros(4, 6, 8, dtype=dtype)
    view = x[1:3, ::2, 1:5]
    assert numerics.poison_(view) is view
    assert view.isnan().all() and x.isnan().sum() == view.numel() == 24
    assert numerics.unwritten(view) == numerics.unwritten(x) == 24
    view[0, 0, 0] = NAN  # an ordinary NaN is written
    view[0, 0, 1] = 1.0
    assert numerics.unwritten(view) == 22
    assert numerics.unwritten(view.clone()) == 22
    made = torch.full((3,), INF, dtype=dtype) - INF
    assert made.isnan().all() and numerics.unwritten(made) == 0


def test_argument_errors():
    x = torch.zeros(2, 3)
    with pytest.raises(TypeError, match=r"actual is torch\.float64"):
        numerics.compare(x.double(), x.double(), x)
    with pytest.raises(TypeError, match=r"oracle is torch\.int64"):
        numerics.compare(x, x.long(), x)
    with pytest.raises(ValueError, match="baseline has shape"):
        numerics.compare(x, x, x[:1])
    with pytest.raises(ValueError, match="floor is nan"):
        numerics.compare(x, x, x, floor=NAN)
    with pytest.raises(ValueError, match="floor has shape"):
        numerics.compare(x, x, x, floor=torch.zeros(3))
    with pytest.raises(ValueError, match="at least 0"):
        numerics.compare(x, x, x, floor=torch.full((2, 3), -0.5))
    with pytest.raises(TypeError, match="float64"):
        numerics.poison_(torch.zeros(2).double())
