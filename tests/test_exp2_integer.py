# SPDX-License-Identifier: Apache-2.0
"""An integer row maximum: its arithmetic, committed data, page. Runs: host, compile."""

from fractions import Fraction
from math import ceil, floor

import numpy as np
import pytest
import torch
from flash_ladder import load
from flash_ladder.common import contract, exp2, exp2_integer, float32, minimax, reference
from flash_ladder.common import exp2_integer_kernel as kernel

DATA = exp2_integer.results()
F32 = np.float32
SCALE = exp2_integer.scale_log2(128)
CUBIC = minimax.coefficients(3)


def find(table, **key):
    return next(row for row in DATA[table] if all(row[name] == x for name, x in key.items()))


def power(s, m):
    return exp2_integer.power(F32(s), SCALE, F32(m), CUBIC)


# ---- arithmetic ----------------------------------------------------------------------------


@pytest.mark.parametrize("size", [1.0, 100.0, 2.0**21])
def test_the_maximum_is_the_exact_product_rounded_up(size):
    largest = F32(np.random.default_rng(0).uniform(-size, size, 2000) / SCALE)
    exact = [ceil(Fraction(float(x)) * Fraction(float(SCALE))) for x in largest]
    assert exp2_integer.maximum(largest, SCALE).tolist() == exact


def test_the_factor_is_a_power_of_two_and_zero_far_below():
    steps = F32([0, -1, -9, -126, -127, -500, -np.inf])
    assert exp2_integer.factor(steps).tolist() == [1, 2**-1, 2**-9, 2**-126, 0, 0, 0]


@pytest.mark.parametrize("size", exp2_integer.SIZES)
def test_floor_and_fraction_come_from_the_exact_product(size):
    """With 2^f = 1 + f the result shows both; the fraction is rounded once."""
    s = exp2_integer.sample(size, 128, -1)[0, :500]
    m = exp2_integer.maximum(s[0], SCALE)
    for x, value in zip(s, exp2_integer.power(s, SCALE, m, (1.0, 1.0))):
        exact = Fraction(float(x)) * Fraction(float(SCALE))
        want = (1 + exact - floor(exact)) * Fraction(2) ** int(floor(exact) - m)
        assert abs(Fraction(float(value)) / want - 1) <= Fraction(1, 2**23)


def test_the_kinds_of_input():
    assert power(0, 0) == 1 and power(0, -8) == 256  # the largest P
    assert 0 <= power(np.nan, 0) < 1e-42 and power(0, np.nan) == pytest.approx(3.4e38, rel=1e-2)
    for m in (-11_000, 0, 11_000):
        for s in (-np.inf, F32(-1e30), F32((m - 127) / float(SCALE))):
            masked = power(s, m)
            assert 0 <= masked < 2.0**-126 and torch.tensor(float(masked)).bfloat16() == 0
    assert power(F32((3 - 124.5) / float(SCALE)), 3) == pytest.approx(2**-124.5, rel=1e-4)
    with pytest.raises(TypeError, match="s must be float32; got float64"):
        exp2_integer.power(np.zeros(2), SCALE, F32(0), CUBIC)


def test_beyond_its_range_the_scheme_is_wrong_and_the_ordinary_one_is_not():
    for size, right in ((4e6, True), (6e6, False)):
        s = F32(size / float(SCALE))
        value = exp2_integer.power(s, SCALE, exp2_integer.maximum(s, SCALE), CUBIC)
        assert (0.49 <= value <= 1) == right
        assert exp2.exp2(float32.fma(s, SCALE, -(s * SCALE)), CUBIC) == pytest.approx(1, abs=0.2)


def test_a_clamp_on_the_sum_would_come_too_late():
    """-inf: the fraction is NaN, and its bits less 127 in the exponent are a number near 4."""
    clamped = int(float32.bits(exp2.MAGIC - F32(127)))
    value = float32.from_bits(np.uint32((float32.NAN_BITS + (clamped << 23)) % 2**32))
    assert value == pytest.approx(4, rel=1e-6)


@pytest.mark.parametrize("scheme", exp2_integer.SCHEMES)
@pytest.mark.parametrize("name", exp2_integer.CASES)
def test_the_loop_over_tiles_is_attention(scheme, name):
    of = exp2_integer.problem(name, torch.float32, 0)
    truth = reference.attention(of.q, of.k, of.v).out[0, :, 0]
    found, moves = exp2_integer.online(
        of, exp2_integer.SCHEMES[scheme], 0, exp2_integer.CASES[name]
    )
    assert float((found - truth).square().mean().sqrt()) < 1e-5 * float(
        truth.square().mean().sqrt()
    )
    assert (moves > 10) == (name == "ascending_max" or (name, scheme) == ("climbing", "ordinary"))


# ---- data and page -------------------------------------------------------------------------


def test_the_page_shows_the_data():
    page = (exp2_integer.RESULTS.parent.parent / "exp2.md").read_text(encoding="utf-8")
    for table in exp2_integer.tables(DATA):
        assert table in page, exp2_integer.COMMAND


@pytest.mark.parametrize(("size", "degree"), [(256, 3), (65536, 5)])
def test_committed_errors_are_what_comes_out_now(size, degree):
    found, committed = (
        exp2_integer.largest_errors(size, degree),
        find("errors", size=size, degree=degree),
    )
    assert found == pytest.approx(committed, rel=0.01)


def test_a_committed_output_error_is_what_comes_out_now():
    found = exp2_integer.output_error("climbing", "fp16")
    committed = find("outputs", inputs="climbing", format="fp16")
    assert found["moves"] == pytest.approx(committed["moves"], abs=0.05)
    assert found["ratio"] == pytest.approx(committed["ratio"], abs=5e-3)


def test_what_the_page_says():
    ratio = lambda name, label: find("outputs", inputs=name, format=label)["ratio"]
    assert ratio("climbing", "float32") < 0.8 and ratio("llm_like", "float32") < 1
    for name in exp2_integer.CASES:
        assert 1.0 < ratio(name, "bf16") < 1.1 and 1.0 < ratio(name, "fp16") < 1.1
    for row in DATA["errors"]:
        assert row["in_row"] == pytest.approx(row["integer"], abs=7e-7)
        assert row["integer"] < (8.6e-5 if row["degree"] == 3 else 1.6e-7)
    for head_dim, slots, fma in ((128, 7, 22), (64, 16, 40)):
        stage, factor, both = (
            find("compiled", head_dim=head_dim, variant=variant) for variant in kernel.VARIANTS
        )
        cycles = lambda row, name: row["cycles"][name]
        assert cycles(factor, "issue_all_max") - cycles(stage, "issue_all_max") == 3
        assert cycles(stage, "issue_all_max") - cycles(both, "issue_all_max") == slots
        assert cycles(stage, "fma") - cycles(both, "fma") == fma
        assert cycles(stage, "mufu") - cycles(both, "mufu") == 8  # that of alpha
        assert {row["spills"] for row in (stage, factor, both)} == {0}


@pytest.mark.parametrize("head_dim", kernel.HEAD_DIMS)
def test_each_floor_is_in_one_fma_and_each_maximum_is_rounded_up(head_dim):
    pairs = 2 * sum(load(6).config.EMULATED[head_dim])  # two softmax warpgroups
    counts = ([pairs, 0, 0], [pairs, 0, 2], [0, pairs, 2])
    for variant, count in zip(kernel.VARIANTS, counts):
        row = find("compiled", head_dim=head_dim, variant=variant)
        assert list(row["directed"].values()) == count, variant


@pytest.mark.parametrize(("variant", "head_dim"), [("stage 06", 64), ("factor and floor", 128)])
def test_a_variant_compiled_now_is_like_the_committed_one(variant, head_dim):
    reason = contract.compile_skip_reason()
    if reason:
        pytest.skip(reason)
    try:
        found = kernel.compiled(variant, head_dim)
    except RuntimeError as error:
        if "MissingTool" not in str(error):
            raise
        pytest.skip("the disassembler is missing")
    committed = find("compiled", head_dim=head_dim, variant=variant)
    assert found["cycles"]["mufu"] == committed["cycles"]["mufu"]
    assert found["directed"] == committed["directed"]
    assert found["cycles"] == pytest.approx(committed["cycles"], rel=0.05)
    assert found["spills"] == 0 and found["live"] == pytest.approx(committed["live"], rel=0.1)


def test_only_what_a_variant_names_is_changed():
    assert kernel.changed("stage 06") == {}
    texts = kernel.changed("factor and floor")
    assert set(texts) == {"softmax.py", "correction.py"}
    assert kernel.UPDATE_MAX in texts["softmax.py"] and kernel.EXP2_EMULATED in texts["softmax.py"]
    assert texts["softmax.py"].count("@cute.jit") == kernel.exp2_frontier.stage_text(
        "softmax.py"
    ).count("@cute.jit")


def test_what_cannot_be_replaced_is_an_error(monkeypatch):
    with pytest.raises(ValueError, match="no function f to replace"):
        kernel.with_function("def g():\n    pass\n", "f", "")
    monkeypatch.setattr(
        kernel.exp2_frontier, "stage_text", lambda name: "def update_max():\n    0\n"
    )
    with pytest.raises(ValueError, match=r"softmax\.py of stage 06 has not one"):
        kernel.changed("integer factor")


def test_it_is_refused_outside_a_checkout(tmp_path, monkeypatch):
    monkeypatch.setattr(exp2_integer, "RESULTS", tmp_path / "absent" / "data.json")
    with pytest.raises(SystemExit, match="run this in a checkout"):
        exp2_integer.main()
