# SPDX-License-Identifier: Apache-2.0
"""2^x without the MUFU: Remez and its certificate, float32 bit for bit, input classes, the data."""

import itertools
import json
from fractions import Fraction

import numpy as np
import pytest
import torch
from flash_ladder.common import exp2, exp2_search, exp2_study, float32, minimax
from flash_ladder.common.minimax import DEGREES, PUBLISHED, VARIANTS
from mpmath import mp, mpf

F32 = np.float32
OURS = {n: minimax.coefficients(n, "one") for n in DEGREES}
EVERYTHING = exp2_study.polynomials()
DATA = exp2_study.results()
both = pytest.mark.parametrize(("degree", "name"), list(itertools.product(DEGREES, VARIANTS)))


# ---- Remez ---------------------------------------------------------------------------------


@both
def test_extrema_are_equal_alternate_and_are_enough(degree, name):
    found = minimax.minimax(degree, name)
    fixed = name == "one"
    assert len(found.extrema) == degree + 2 - fixed
    with mp.workdps(minimax.DIGITS):
        for x, error in found.extrema:
            assert abs(abs(error) / found.error - 1) < mpf(10) ** -25
            assert abs(minimax.error(found.coefficients, x) - error) < mpf(10) ** -55
        assert found.domain[0] <= found.extrema[0][0] and found.extrema[-1][0] == found.domain[1]
        if fixed:
            assert found.coefficients[0] == 1
    signs = [error > 0 for _, error in found.extrema]
    assert all(a != b for a, b in itertools.pairwise(signs))


@pytest.mark.parametrize(
    ("degree", "name", "error"),
    [(3, "one", "8.559e-5"), (3, "free", "7.478e-5"), (4, "one", "2.896e-6")],
)
def test_known_errors(degree, name, error):
    assert mp.nstr(minimax.minimax(degree, name).error, 4) == error


def test_degree_1_by_hand():
    """Free: p = c (1 + x), equal errors at 0, 1 and the minimum at 1 / ln 2 - 1."""
    found = minimax.minimax(1, "free")
    with mp.workdps(minimax.DIGITS):
        inner = 1 / mp.ln2 - 1
        top = (1 + inner) / mpf(2) ** inner
        assert abs(found.error - (top - 1) / (top + 1)) < mpf(10) ** -50
        assert abs(found.extrema[1][0] - inner) < mpf(10) ** -25


@pytest.mark.parametrize("degree", DEGREES)
def test_rounding_to_nearest_gains_nothing_in_exact_arithmetic(degree):
    """2^(x + 1/2) is 2^x times a constant, so the domains are equally hard."""
    with mp.workdps(minimax.DIGITS):
        free, nearest = (minimax.minimax(degree, name).error for name in ("free", "nearest"))
        assert abs(free - nearest) < mpf(10) ** -30
        assert free < minimax.minimax(degree, "one").error


# ---- the certificate -----------------------------------------------------------------------


@both
def test_truncation_is_certified(degree, name):
    found = minimax.minimax(degree, name)
    proof = minimax.certify(found.coefficients, found.domain, fixed=int(name == "one"))
    with mp.workdps(minimax.DIGITS):
        tiny = found.error * mpf(10) ** -24
        assert 0 <= proof.above - proof.below < tiny and abs(proof.above - found.error) < tiny
        assert 0 < proof.alternating <= proof.below and found.error - proof.alternating < tiny


@pytest.mark.parametrize("name", EVERYTHING)
def test_certificate_encloses_what_is_sampled(name):
    coefficients, domain = EVERYTHING[name], minimax.UNIT
    if name.startswith("nearest"):
        domain = minimax.CENTRED
    proof = minimax.certify(coefficients, domain)
    x = np.linspace(float(domain[0]), float(domain[1]), 20001)
    sampled = np.abs(np.polyval(coefficients[::-1], x) / np.exp2(x) - 1).max()
    assert float(proof.below) * (1 - 1e-6) - 1e-15 <= sampled <= float(proof.above) + 1e-15
    assert proof.above <= DATA["truncation"][name]["truncation"] < proof.above * (1 + 1e-6)


def test_no_polynomial_is_better_than_the_lower_bound():
    best = minimax.minimax(3, "one").error
    assert minimax.certify(PUBLISHED[3], fixed=1).alternating < best
    assert minimax.certify(PUBLISHED[3], fixed=0).alternating == 0  # four extrema are not enough


def test_an_error_with_fewer_extrema_is_refused():
    with pytest.raises(ValueError, match=r"has 0 extrema inside .*; certified only with as many"):
        minimax.certify((1.0, 0.1, 0.1, 0.1))


# ---- float32 against exact fractions -------------------------------------------------------


def neighbours_of(exact: Fraction) -> tuple[float, float]:
    """The float32 on both sides of a number within their range (the number twice if it is one)."""
    magnitude = abs(exact)
    exponent = -126
    while Fraction(2) ** (exponent + 1) <= magnitude:
        exponent += 1
    spacing = Fraction(2) ** (exponent - 23)
    steps = exact / spacing
    low = steps.numerator // steps.denominator
    high = low if low == steps else low + 1
    return float(low * spacing), float(high * spacing)


def rounded(exact: Fraction) -> float:
    """To nearest, ties to even, by fractions alone."""
    low, high = neighbours_of(exact)
    off = (exact - Fraction(low), Fraction(high) - exact)
    if off[0] == off[1]:
        return low if int(F32(low).view(np.uint32)) % 2 == 0 else high
    return low if off[0] < off[1] else high


def random_floats(count: int, seed: int, exponents=(-30, 30)) -> np.ndarray:
    rng = np.random.default_rng(seed)
    exponent = rng.integers(*exponents, count)
    return (rng.uniform(-2, 2, count) * 2.0**exponent).astype(F32)


def close_sums(count: int) -> tuple[np.ndarray, ...]:
    """a * b + c just beside a middle between two float32: where float64 rounds twice."""
    rng = np.random.default_rng(5)
    c = (1 + rng.integers(0, 2**23, count) * 2.0**-23).astype(F32)
    k = rng.integers(1, 4, count)
    a = F32(2.0**-24) * (1 + k * 2.0**-23).astype(F32)
    b = (1 - k * 2.0**-23 + rng.integers(-1, 2, count) * 2.0**-23).astype(F32)
    return a, b, c


TRIPLES = {
    "random": tuple(random_floats(1500, seed) for seed in (1, 2, 3)),
    "cancelling": (
        (x := random_floats(500, 4, (-2, 2))),
        (y := random_floats(500, 5, (-2, 2))),
        -(x * y),
    ),
    "subnormal": (
        random_floats(800, 6, (-80, -60)),
        random_floats(800, 7, (-75, -60)),
        random_floats(800, 8, (-150, -126)),
    ),
    "beside the middle": close_sums(2000),
    "ties": (F32([1, 1, -1, 3]), F32([2**-24, 3 * 2**-24, 2**-24, 2**-25]), F32([1, 1, -1, 1])),
}


@pytest.mark.parametrize("kind", TRIPLES)
def test_fma_is_exact_arithmetic_rounded_once(kind):
    a, b, c = TRIPLES[kind]
    found = float32.fma(a, b, c)
    assert found.dtype == F32
    for value, *operands in zip(found, a, b, c):
        x, y, z = (Fraction(float(operand)) for operand in operands)
        assert float(value) == rounded(x * y + z), operands


def test_float64_alone_rounds_twice():
    a, b, c = (F32(1 + 2**-23) * F32(2**-24), F32(1 - 2**-23), F32(1 + 2**-23))
    exact = Fraction(float(a)) * Fraction(float(b)) + Fraction(float(c))
    twice = F32(np.float64(a) * np.float64(b) + np.float64(c))
    assert float(twice) != rounded(exact) == float(float32.fma(a, b, c)) == 1 + 2**-23
    a, b, c = TRIPLES["beside the middle"]
    twice = (a.astype(np.float64) * b + c).astype(F32)
    assert (twice != float32.fma(a, b, c)).mean() > 0.1


@pytest.mark.parametrize("kind", TRIPLES)
def test_add_down_is_the_float_below(kind):
    a, _, c = TRIPLES[kind]
    for x, y, value in zip(a, c, float32.add_down(a, c)):
        assert float(value) == neighbours_of(Fraction(float(x)) + Fraction(float(y)))[0]


@pytest.mark.parametrize("kind", TRIPLES)
def test_fma_down_is_the_float_below(kind):
    a, b, c = TRIPLES[kind]
    for value, *operands in zip(float32.fma_down(a, b, c), a, b, c):
        x, y, z = (Fraction(float(operand)) for operand in operands)
        assert float(value) == neighbours_of(x * y + z)[0], operands


def test_add_down_at_the_edges():
    inf, most = F32(np.inf), np.finfo(F32).max
    a = F32([most, -most, 1, 0, -0.0, inf, -inf, 2**-149, 1, 2**24])
    b = F32([most, -most, -1, 0, -0.0, 1, 1, -1, 2**-149, -(2**-60)])
    want = F32([most, -inf, -0.0, 0, -0.0, inf, -inf, -1, 1, 2**24 - 1])
    found = float32.add_down(a, b)
    assert found.tobytes() == want.tobytes(), (found, want)
    assert int(float32.bits(float32.add_down(inf, -inf))) == float32.NAN_BITS


def test_special_values_of_fma_and_max():
    inf, nan = F32(np.inf), F32(np.nan)
    for a, b, c in ((inf, 0, 1), (inf, 1, -inf), (nan, 1, 1), (1, 1, nan)):
        assert int(float32.bits(float32.fma(F32(a), F32(b), F32(c)))) == float32.NAN_BITS
    assert float32.fma(inf, F32(-1), F32(1)) == -inf
    assert float32.fma(F32(2.0**100), F32(2.0**100), F32(1)) == inf
    assert float32.maximum(nan, F32(-3)) == -3 and float32.maximum(F32(-3), nan) == -3
    assert int(float32.bits(float32.maximum(nan, -nan))) == float32.NAN_BITS
    assert int(float32.bits(float32.maximum_nan(F32(-3), nan))) == float32.NAN_BITS
    assert float32.fma(F32(2), F32(3), F32(1)).shape == ()


# ---- every kind of input -------------------------------------------------------------------


def ours(x, **options):
    return exp2.exp2(F32(x), OURS[3], **options)


def test_integers_are_exact():
    whole = np.arange(-126, 128, dtype=F32)
    assert (ours(whole) == np.exp2(whole.astype(np.float64))).all()
    assert ours(0.0) == ours(-0.0) == 1


@pytest.mark.parametrize("x", [-127.0, -127.5, -1e4, -(2.0**23), -3e38, -np.inf])
def test_far_below_is_plus_zero(x):
    assert int(float32.bits(ours(x))) == 0


@pytest.mark.parametrize("degree", DEGREES)
def test_the_last_binade_is_bounded_absolutely(degree):
    """Every float32 of (-127, -126): subnormal, never negative, at most 2^-127 off."""
    x = float32.from_bits(np.arange(0xC2FC0001, 0xC2FE0000, dtype=np.uint32))
    assert x[0] < -126 and x[-1] > -127 and x.size == 2**17 - 1
    for coefficients in (OURS[degree], PUBLISHED[degree]):
        found = exp2.exp2(x, coefficients).astype(np.float64)
        off = np.abs(found - np.exp2(x.astype(np.float64)))
        assert 0 <= found.min() and found.max() <= 2.0**-126
        assert 0.99 * 2.0**-127 < off.max() <= 2.0**-127


def test_just_below_an_integer():
    _, fraction = exp2.split(F32([-1e-8, -(2.0**-149), -(2.0**-25), -(2.0**-24)]))
    assert fraction.tolist() == [1, 1, 1, 1 - 2.0**-24]
    p1 = exp2.horner(F32(1), OURS[3])
    assert ours(-1e-8) == p1 / 2 and 1 - 9e-5 < p1 / 2 < 1
    below = np.nextafter(np.arange(-125, 128, dtype=F32), F32(-np.inf))
    off = ours(below) / np.exp2(below.astype(np.float64)) - 1
    assert np.abs(off).max() < DATA["errors"]["one 3"]["fp32"]["max"] + 2.1e-8


@pytest.mark.parametrize("degree", DEGREES)
def test_relative_error_over_the_whole_range(degree):
    """The error of the fractions, and what rounding x + 1 adds for -1/2 < x < 0."""
    rng = np.random.default_rng(degree)
    x = np.concatenate((rng.uniform(-126, 8, 200_000), -(2.0 ** -rng.uniform(0, 30, 50_000))))
    x = np.concatenate((x, rng.uniform(8, 127.99, 50_000))).astype(F32)
    off = np.abs(exp2.exp2(x, OURS[degree]) / np.exp2(x.astype(np.float64)) - 1)
    bound = DATA["errors"][f"one {degree}"]["fp32"]["max"]
    assert off.max() <= bound + 2.1e-8 and off[x >= 0].max() <= bound * (1 + 1e-6)


def test_infinity_and_nan():
    assert np.isnan(ours(np.inf))
    assert int(float32.bits(ours(np.nan))) == 0
    assert ours(np.nan, nan_clamp=True) == np.finfo(F32).max
    assert ours(128.0) == np.inf and not np.isfinite(ours(128.5))  # undefined from here on


@pytest.mark.parametrize("name", ["free", "nearest"])
@pytest.mark.parametrize("degree", DEGREES)
def test_without_p0_the_clamp_is_higher(degree, name):
    coefficients = minimax.coefficients(degree, name)
    bound = DATA["errors"][f"{name} {degree}"]["fp32"]["max"]
    low = exp2.exp2(F32([-126, -127, -1e9, -np.inf, np.nan]), coefficients, name)
    assert (np.abs(low * 2.0**126 - 1) <= 2 * bound).all() and (low > 0).all()
    rng = np.random.default_rng(3)
    x = rng.uniform(-125, 127.4, 100_000).astype(F32)
    off = np.abs(exp2.exp2(x, coefficients, name) / np.exp2(x.astype(np.float64)) - 1)
    assert off.max() <= bound + 2.1e-8


def test_a_clamp_at_minus_127_needs_p0_of_at_least_1(monkeypatch):
    monkeypatch.setitem(exp2.CLAMP, "free", -127.0)
    assert np.isnan(exp2.exp2(F32(-np.inf), minimax.coefficients(3, "free"), "free"))


def test_nearest_rounds_ties_to_even():
    shifted, fraction = exp2.split(F32([0.5, 1.5, -0.5, -1.25, -1e-8]), "nearest")
    assert (shifted - exp2.MAGIC).tolist() == [0, 2, 0, -1, 0]
    assert fraction.tolist() == [0.5, -0.5, -0.5, -0.25, float(F32(-1e-8))]


# ---- monotone ------------------------------------------------------------------------------


@pytest.mark.parametrize("name", [f"{kind} {n}" for kind in ("published", "one") for n in DEGREES])
def test_the_result_never_falls(name):
    coefficients = EVERYTHING[name]
    assert exp2.monotone(coefficients)
    near = float32.bits(F32([-126.0, -3.0, -1.0, -0.5, -(2.0**-24), 0.25, 1.0, 8.0]))
    around = float32.from_bits((near[:, None] + np.arange(-5000, 5000)).astype(np.uint32))
    spread = np.random.default_rng(1).uniform(-128, 127.9, 100_000).astype(F32)
    x = np.unique(np.concatenate((around.ravel(), spread)))
    assert (np.diff(exp2.exp2(x, coefficients)) >= 0).all()


def test_monotone_can_say_no():
    assert not exp2.monotone((1.0, 0.7, 0.25, 0.08))  # p(1) > 2
    assert not exp2.monotone((1.0, 1.5, -0.5))


# ---- coefficients --------------------------------------------------------------------------


def test_coefficients_are_float32_and_those_that_were_counted():
    for name, coefficients in EVERYTHING.items():
        assert all(float(F32(c)) == c > 0 for c in coefficients), name
        assert [c.hex() for c in coefficients] == DATA["coefficients"][name], name
        assert name.startswith(("free", "nearest")) or coefficients[0] == 1


@pytest.mark.parametrize("degree", DEGREES)
def test_ours_are_at_least_as_good_as_the_published_ones(degree):
    most = [DATA["errors"][f"{kind} {degree}"]["fp32"]["max"] for kind in ("one", "published")]
    assert most[0] <= most[1]
    pair = {kind: EVERYTHING[f"{kind} {degree}"] for kind in ("one", "published")}
    found = exp2.exhaustive(pair, stride=1024)
    assert found["one"]["fp32"]["max"] < found["published"]["fp32"]["max"]


@both
def test_the_search_would_not_move_them(degree, name):
    coefficients = minimax.coefficients(degree, name)
    assert exp2_search.descend(coefficients, exp2_search.Judge(name)) == coefficients


def test_descent_finds_its_way_back():
    judge = exp2_search.Judge("one")
    moved = exp2_search._moved(OURS[2], {1: 3, 2: -2})
    assert judge(moved) > judge(OURS[2]) + 3e-8
    assert judge(exp2_search.descend(moved, judge)) < judge(OURS[2]) + 1e-8


def test_moves_of_the_search():
    """One coefficient up or down, or two against each other; p0 = 1 is not touched."""
    start = np.array(OURS[2], F32).view(np.int32)
    moves = {
        tuple((np.array(c, F32).view(np.int32) - start).tolist())
        for c in exp2_search.neighbours(OURS[2], "one")
    }
    singles = {(0, step, 0) for step in exp2_search.STEPS}
    singles |= {(0, 0, step) for step in exp2_search.STEPS}
    assert moves == singles | {(0, 1, -1), (0, -1, 1)}
    assert len(set(exp2_search.neighbours(OURS[2], "free"))) == 3 * 6 + 3 * 2


def test_the_search_is_repeatable():
    assert exp2_search.search(1) == OURS[1]


# ---- the counted numbers -------------------------------------------------------------------


@pytest.fixture(scope="module")
def every_4096th():
    return exp2_study.count(stride=4096)


@pytest.mark.parametrize("name", EVERYTHING)
def test_the_data_agrees_with_a_subset(name, every_4096th):
    whole, part = DATA["errors"][name], every_4096th[name]
    for key in ("fp32", "bf16", "fp16"):
        assert 0.95 * whole[key]["max"] < part[key]["max"] <= whole[key]["max"] * (1 + 1e-6)
        assert part[key]["mean"] == pytest.approx(whole[key]["mean"], rel=0.01)
        assert part[key]["bias"] == pytest.approx(whole[key]["bias"], abs=0.02 * whole[key]["mean"])
    for key in ("bf16", "fp16"):
        assert part[key]["same"] == pytest.approx(whole[key]["same"], abs=0.005)
        assert part[key]["within_one"] == pytest.approx(whole[key]["within_one"], abs=0.005)


@pytest.mark.parametrize("name", EVERYTHING)
def test_the_worst_fractions_are_where_the_data_says(name):
    for key, dropped in (("fp32", None), *exp2.DROPPED.items()):
        found = DATA["errors"][name][key]
        x = F32([float.fromhex(found["at"])])
        value = np.broadcast_to(exp2.horner(x, EVERYTHING[name]), x.shape)
        value = value if dropped is None else exp2.round_mantissa(value, dropped)
        error = abs(float(value[0]) / 2.0 ** float(x[0]) - 1)
        assert error == pytest.approx(found["max"], rel=6e-7)


@pytest.mark.parametrize("exponent", [-1, -2])
def test_whole_binades_agree(exponent):
    """Every float32 of [1/2, 1) and [1/4, 1/2), at degree 3."""
    first = (127 + exponent) << exp2.MANTISSA
    largest = dict.fromkeys(("one 3", "published 3"), 0.0)
    for start in range(first, first + (1 << exp2.MANTISSA), exp2.CHUNK):
        x = exp2._run(start, start + exp2.CHUNK, 1)
        truth = np.exp2(x.astype(np.float64))
        for name in largest:
            off = np.abs(exp2.horner(x, EVERYTHING[name]) / truth - 1).max()
            largest[name] = max(largest[name], float(off))
    for name, most in largest.items():
        counted = DATA["errors"][name]["max_by_binade"][f"2^{exponent}"]
        assert most == pytest.approx(counted, rel=1e-6)


@pytest.mark.parametrize("name", EVERYTHING)
def test_every_fraction_next_to_the_end(name):
    """[1 - 2^-12, 1], and the same distance from 1/2 for fractions to nearest."""
    end = 0.5 if name.startswith("nearest") else 1.0
    last = int(float32.bits(F32(end)))
    x = exp2._run(last - (1 << 12), last + 1, 1)
    off = np.abs(exp2.horner(x, EVERYTHING[name]) / np.exp2(x.astype(np.float64)) - 1)
    assert off.max() <= DATA["errors"][name]["fp32"]["max"] * (1 + 1e-6)


def test_small_fractions_give_p0():
    """What lets `exhaustive` count them as a whole."""
    rng = np.random.default_rng(2)
    pattern = rng.integers(0, exp2.CONSTANT << exp2.MANTISSA, 200_000, dtype=np.uint32)
    edge = np.uint32((exp2.CONSTANT << exp2.MANTISSA) - 1)
    x = float32.from_bits(np.append(pattern, edge))
    for name, coefficients in EVERYTHING.items():
        assert (exp2.horner(x, coefficients) == F32(coefficients[0])).all(), name
        if name.startswith("nearest"):
            assert (exp2.horner(-x, coefficients) == F32(coefficients[0])).all(), name


@pytest.mark.parametrize("variant", ["one", "nearest"])
@pytest.mark.parametrize("stride", [1 << 14, 1 << 20])
def test_weights_are_a_uniform_distribution(variant, stride):
    for literal in (False, True):
        found = list(exp2.pieces(variant, stride, literal))
        assert sum(x.size * w for x, w in found) * stride == pytest.approx(1, rel=1e-12)
        everything = np.concatenate([x for x, _ in found])
        assert everything.max() == (1 if variant == "one" else 0.5)
        assert everything.min() == (0 if variant == "one" else -0.5)


def test_literal_changes_nothing():
    plain, literal = (exp2.exhaustive({"p": OURS[3]}, stride=8192, literal=x) for x in (0, 1))
    for found in (plain, literal):
        del found["p"]["count"]
    assert plain["p"] == literal["p"]


def test_the_reference_is_good_to_an_ulp_of_float64():
    x = np.random.default_rng(4).uniform(-0.5, 1, 2000).astype(F32).astype(np.float64)
    with mp.workdps(40):
        off = [abs(mpf(float(y)) - mpf(2) ** mpf(float(f))) for f, y in zip(x, np.exp2(x))]
        assert all(e < mpf(float(np.spacing(y))) for e, y in zip(off, np.exp2(x)))


def test_rounding_to_short_formats():
    x = np.random.default_rng(6).uniform(0.5, 2, 50_000).astype(F32)
    x = np.append(x, F32([1 + 2.0**-8, 1 + 3 * 2.0**-8, 1 + 2.0**-11, 1 + 3 * 2.0**-11]))
    as_bf16 = torch.from_numpy(x).bfloat16().float().numpy()
    assert (exp2.round_mantissa(x, 16) == as_bf16).all()
    assert (exp2.round_mantissa(x, 13) == x.astype(np.float16)).all()
    double = x.astype(np.float64)
    assert (exp2.round_mantissa(double, 29 + 16) == as_bf16).all()


def test_the_papers_table_comes_out():
    """Its sample is random, so the last digit of a maximum may differ."""
    for n in (3, 4, 5):
        found, quoted = DATA["errors"][f"published {n}"], exp2_study.TABLE_2[f"degree {n}"]
        keys = (("fp32", "max"), ("fp32", "mean"), ("bf16", "max"), ("bf16", "mean"))
        for (form, what), figure in zip(keys, quoted):
            assert found[form][what] == pytest.approx(figure, rel=0.005)


# ---- page, command, refusals ---------------------------------------------------------------


def test_the_page_shows_the_data():
    page = (exp2_study.RESULTS.parent.parent / "exp2.md").read_text(encoding="utf-8")
    for table in exp2_study.tables(DATA).split("\n\n"):
        assert table in page, "python -m flash_ladder.common.minimax table"


def test_the_data_says_where_it_comes_from():
    assert DATA["provenance"]["command"] == exp2_study.COMMAND
    assert set(DATA["provenance"]) == {"command", "date", "numpy", "mpmath"}


def test_the_figure_shows_three_curves():
    rows = exp2_study.plot_rows()
    assert {row["polynomial"] for row in rows} == set(exp2_study.CURVES.values())
    largest = max(abs(row["error"]) for row in rows if row["polynomial"] == "ours, p0 free")
    assert largest == pytest.approx(7.48e-5, rel=0.01)


@pytest.mark.parametrize("degree", DEGREES)
def test_the_histogram_agrees_with_the_exhaustive_count(degree):
    """All fractions are there, none is in a bin beyond the largest error, and the mean fits."""
    rows = [row for row in exp2_study.histogram_rows() if row["degree"] == str(degree)]
    found = DATA["errors"][f"one {degree}"]["fp32"]
    assert sum(row["share"] for row in rows) == pytest.approx(1, abs=1e-4)
    filled = [row["decades"] for row in rows if row["share"]]
    assert 10 ** filled[-1] <= found["max"] < 10 ** (filled[-1] + 2 / exp2_study.BINS)
    width = 1 / exp2_study.BINS
    low, high = (sum(r["share"] * 10 ** (r["decades"] + x) for r in rows) for x in (0, width))
    assert low <= found["mean"] <= high


def test_the_command(capsys):
    exp2_study.main(["exhaustive", "--degree", "2", "--stride", "65536"])
    found = json.loads(capsys.readouterr().out)
    assert set(found) >= {"ideal", "one 2", "published 2", "free 2", "nearest 2"}
    exp2_study.main(["remez", "--degree", "3"])
    assert "one 3: error 8.5590194e-5: 1.0 0.695116" in capsys.readouterr().out
    exp2_study.main(["table"])
    assert capsys.readouterr().out.strip() == exp2_study.tables(DATA)


def test_partial_counts_are_not_written(tmp_path, monkeypatch):
    for option in (["--degree", "3"], ["--stride", "2"]):
        with pytest.raises(SystemExit, match="--write is for all degrees"):
            exp2_study.main(["exhaustive", "--write", *option])
    monkeypatch.setattr(exp2_study, "RESULTS", tmp_path / "absent" / "data" / "exp2.json")
    with pytest.raises(SystemExit, match="run this in a checkout"):
        exp2_study.main(["exhaustive", "--write"])


@pytest.mark.parametrize(
    ("call", "error", "words"),
    [
        (lambda: minimax.minimax(6), ValueError, "degree must be 1 to 5; got 6"),
        (lambda: minimax.minimax(0), ValueError, "degree must be 1 to 5; got 0"),
        (lambda: minimax.minimax(3.0), TypeError, "degree must be an integer; got 3.0"),
        (lambda: minimax.minimax(True), TypeError, "degree must be an integer; got True"),
        (lambda: minimax.minimax(3, "two"), ValueError, "no variant 'two'; allowed: one, free"),
        (lambda: minimax.coefficients(7), ValueError, "degree must be 1 to 5; got 7"),
        (lambda: minimax.remez(3, (1, 0)), ValueError, "the domain must be increasing"),
        (lambda: minimax.remez(3, (0, 2)), ValueError, r"within \[-1, 1\]; got \(0, 2\)"),
        (lambda: minimax.remez(3, (0, float("nan"))), ValueError, "two finite numbers"),
        (lambda: minimax.remez(1, (0, 1), {0: 1, 1: 1}), ValueError, "some, not all, of 0 to 1"),
        (lambda: minimax.remez(2, (0, 1), {3: 1}), ValueError, "fixed coefficients .* got \\[3\\]"),
        (lambda: minimax.certify((1.0,)), ValueError, "degree must be 1 to 5; got 0"),
        (lambda: exp2.exp2(np.zeros(2), PUBLISHED[3]), TypeError, "x must be float32; got float64"),
        (lambda: ours(0, variant="x"), ValueError, "no variant 'x'"),
        (lambda: exp2.exp2(F32(0), (1.0,)), ValueError, "2 to 6 coefficients .* got 1"),
        (lambda: exp2.exhaustive({}, stride=0), ValueError, "stride must be at least 1; got 0"),
    ],
)
def test_refusals(call, error, words):
    with pytest.raises(error, match=words):
        call()
