# SPDX-License-Identifier: Apache-2.0
"""Polynomials for 2^x with the smallest largest relative error, found by Remez at 60 digits.

The emulated exponential (`exp2.py`) needs p(f) ~ 2^f for a fraction f. This module has the exact
side of it: minimax polynomials, a certificate of their truncation error, and the float32
coefficients that the kernels use, as data. `python -m flash_ladder.common.minimax --help` has
the commands. Runs: host; needs mpmath and numpy.

Note [Certified]
e(x) = p(x) / 2^x - 1 has the derivative (p'(x) - ln 2 p(x)) / 2^x: its sign is that of a
polynomial of degree n, which has at most n roots. When n disjoint short intervals are found at
whose ends that polynomial has opposite signs, they hold all its roots, and the largest |e| is in
one of them or at an end of the domain. Signs, and e over each interval, are evaluated in interval
arithmetic, so that the two numbers returned enclose the largest error, up to the correctness of
mpmath. And when e has as many extrema of alternating sign as the theorem of Chebyshev asks for,
no polynomial of that kind has a largest error below the smallest of them (de la Vallee Poussin):
`Certificate.alternating` is that lower bound. Both hold for real arithmetic; what float32 adds
is counted by `exp2.exhaustive`.
"""

from __future__ import annotations

import contextlib
import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from mpmath import iv, mp, mpf

DIGITS = 60  # decimal, of every computation here
DEGREES = (1, 2, 3, 4, 5)
UNIT = (0, 1)  # fractions after rounding down
CENTRED = (mpf(-1) / 2, mpf(1) / 2)  # fractions after rounding to nearest
VARIANTS = {  # name: domain, p0 fixed at 1
    "one": (UNIT, True),
    "free": (UNIT, False),
    "nearest": (CENTRED, False),
}
ITERATIONS = 30
EQUAL = mpf(10) ** -25  # relative spread of the extrema at which Remez stops
WIDTH = mpf(10) ** -40  # of an interval that holds an extremum
SCAN = 400  # steps in which sign changes are looked for

# Q: flash-attention, flash_attn/cute/utils.py, POLY_EX2 at commit 0251105a; p0 = 1.
PUBLISHED = {
    1: (1.0, 0.922497093677520751953125),
    2: (1.0, 0.6657850742340087890625, 0.330107033252716064453125),
    3: (
        1.0,
        0.695146143436431884765625,
        0.227564394474029541015625,
        0.077119089663028717041015625,
    ),
    4: (
        1.0,
        0.693042695522308349609375,
        0.2412912547588348388671875,
        5.2225358784198760986328125e-2,
        1.3434938155114650726318359375e-2,
    ),
    5: (
        1.0,
        0.693151414394378662109375,
        0.24016360938549041748046875,
        5.5802188813686370849609375e-2,
        9.01452265679836273193359375e-3,
        1.86810153536498546600341796875e-3,
    ),
}
COEFFICIENTS = {  # variant: degree: float32 values, p0 first; derived, by exp2_search
    "one": {
        1: "0x1p+0 0x1.d8dc6ep-1",
        2: "0x1p+0 0x1.54f8d6p-1 0x1.51d9cap-2",
        3: "0x1p+0 0x1.63e658p-1 0x1.d2379p-3 0x1.3baaa6p-4",
        4: "0x1p+0 0x1.62d6c6p-1 0x1.ee2454p-3 0x1.abf852p-5 0x1.b7f76p-7",
        5: "0x1p+0 0x1.62e4bap-1 0x1.ebdb5ap-3 0x1.c91d56p-5 0x1.2774dap-7 0x1.e98376p-10",
    },
    "free": {
        1: "0x1.f0bb46p-1 0x1.f0bb46p-1",
        2: "0x1.007108p+0 0x1.50b5bap-1 0x1.594826p-2",
        3: "0x1.fff632p-1 0x1.64444ep-1 0x1.cefc4ap-3 0x1.3f9692p-4",
        4: "0x1.00002cp+0 0x1.62d16p-1 0x1.ee7984p-3 0x1.aa1598p-5 0x1.bb77c6p-7",
        5: "0x1.fffffep-1 0x1.62e4fp-1 0x1.ebd5aep-3 0x1.c957b6p-5 0x1.267694p-7 0x1.ec97fp-10",
    },
    "nearest": {
        1: "0x1.076e82p+0 0x1.5f3ep-1",
        2: "0x1.001d0ap+0 0x1.682a52p-1 0x1.e84d72p-3",
        3: "0x1.fff692p-1 0x1.62f31ap-1 0x1.f0de16p-3 0x1.c3f748p-5",
        4: "0x1.ffffe8p-1 0x1.62e0dep-1 0x1.ec06dp-3 0x1.ca13e2p-5 0x1.39957p-7",
        5: "0x1.000002p+0 0x1.62e42p-1 0x1.ebf912p-3 0x1.c6bdb8p-5 0x1.3d050ep-7 0x1.594cep-10",
    },
}


@dataclass(frozen=True)
class Minimax:
    """A polynomial p on a domain, and where p(x) / 2^x - 1 is extreme.

    coefficients: p0 first. extrema: (x, error) in order of x, equal in size and alternating in
    sign. error: their size.
    """

    degree: int
    domain: tuple[mpf, mpf]
    coefficients: tuple[mpf, ...]
    extrema: tuple[tuple[mpf, mpf], ...]
    error: mpf


@dataclass(frozen=True)
class Certificate:
    """Proven facts on the truncation error of a polynomial; see Note [Certified].

    below <= largest |p(x) / 2^x - 1| <= above. alternating: the smallest |error| among the
    alternating extrema; no polynomial of the kind has a largest error below it, 0 if the extrema
    are too few for such a claim.
    """

    below: mpf
    above: mpf
    alternating: mpf


def variant(name: str) -> tuple[tuple, bool]:
    """(domain, p0 fixed at 1) of a variant; ValueError for another name."""
    if name not in VARIANTS:
        raise ValueError(f"no variant {name!r}; allowed: {', '.join(VARIANTS)}")
    return VARIANTS[name]


def coefficients(degree: int, name: str = "one") -> tuple[float, ...]:
    """The float32 coefficients (p0 first) that kernels use; found by `exp2_search.search`.

    Raises TypeError or ValueError for other degrees and names, as `minimax` does.
    """
    _check(degree, variant(name)[0], {})
    return tuple(float.fromhex(text) for text in COEFFICIENTS[name][degree].split())


def minimax(degree: int, name: str = "one") -> Minimax:
    """The minimax polynomial of a degree, by the name of its variant.

    "one": on [0, 1] with p0 = 1; "free": on [0, 1]; "nearest": on [-1/2, 1/2]. Relative error,
    60 digits. Raises TypeError or ValueError for other degrees and names.
    """
    domain, fixed = variant(name)
    return remez(degree, domain, {0: 1} if fixed else {})


def remez(degree: int, domain: tuple = UNIT, fixed: Mapping[int, float] | None = None) -> Minimax:
    """Remez's exchange for 2^x in relative error, with some coefficients given.

    degree: 1 to 5. domain: (low, high). fixed: index -> value of coefficients that are not
    free, counted from p0. Each step solves for the free coefficients and the size E so that the
    error is +E, -E, ... at one point more than there are free coefficients, then moves the points
    to the extrema. Raises TypeError or ValueError for impossible arguments, ArithmeticError when
    the extrema do not become equal.
    """
    fixed = dict(fixed or {})
    _check(degree, domain, fixed)
    with _digits():
        low, high = (mpf(end) for end in domain)
        free = [k for k in range(degree + 1) if k not in fixed]
        points = _chebyshev(low, high, len(free) + 1)
        for _ in range(ITERATIONS):
            coefficients = _solve(degree, fixed, free, points)
            extrema = _alternating(coefficients, low, high, len(points))
            sizes = [abs(error) for _, error in extrema]
            points = [x for x, _ in extrema]
            if max(sizes) - min(sizes) <= EQUAL * max(sizes):
                return Minimax(degree, (low, high), coefficients, tuple(extrema), max(sizes))
    raise ArithmeticError(f"Remez did not converge: degree {degree}, {domain}, fixed {fixed}")


def certify(coefficients: Sequence, domain: tuple = UNIT, *, fixed: int = 0) -> Certificate:
    """Encloses the largest relative error of a polynomial over a domain; see Note [Certified].

    coefficients: p0 first, floats or mpf. fixed: how many of them are given rather than chosen,
    for the lower bound over all polynomials of that kind. Raises ValueError when the derivative
    of the error does not change sign as often as its degree: then nothing is proven.
    """
    degree = len(coefficients) - 1
    _check(degree, domain, {})
    with _digits():
        low, high = (mpf(end) for end in domain)
        brackets = [(low, low), *_brackets(coefficients, low, high), (high, high)]
        if len(brackets) != degree + 2:
            raise ValueError(
                f"the error of degree {degree} has {len(brackets) - 2} extrema inside {domain}; "
                "certified only with as many as the degree"
            )
        found = [_error_over(coefficients, *bracket) for bracket in brackets]
        above = max(max(abs(mpf(e.a)), abs(mpf(e.b))) for e in found)
        below = max(_magnitude_below(e) for e in found)
        kept = [e for e in found if _magnitude_below(e) > 0]  # p0 = 1: none at 0
        signs = [1 if e.a > 0 else -1 for e in kept]
        enough = len(kept) >= degree + 2 - fixed
        alternate = all(a == -b for a, b in itertools.pairwise(signs))
        proven = min(_magnitude_below(e) for e in kept) if enough and alternate else mpf(0)
    return Certificate(below, above, proven)


def error(coefficients: Sequence, x) -> mpf:
    """p(x) / 2^x - 1 at the working precision."""
    return mp.polyval(list(reversed(coefficients)), mpf(x)) / mpf(2) ** mpf(x) - 1


# --- one step of Remez --------------------------------------------------------------------------


def _chebyshev(low: mpf, high: mpf, count: int) -> list[mpf]:
    """Points between low and high, denser at the ends; not the ends, where an error may be 0."""
    angle = [mp.pi * (2 * i + 1) / (2 * count) for i in range(count)]
    return [(low + high) / 2 - (high - low) / 2 * mp.cos(a) for a in angle]


def _solve(degree: int, fixed: Mapping, free: list[int], points: list[mpf]) -> tuple[mpf, ...]:
    """Coefficients whose relative error at the points is +E, -E, ..., for an unknown E."""
    rows, right = mp.matrix(len(points)), mp.matrix(len(points), 1)
    for i, x in enumerate(points):
        for j, k in enumerate(free):
            rows[i, j] = x**k
        rows[i, len(free)] = (-1) ** i * mpf(2) ** x
        right[i] = mpf(2) ** x - sum(mpf(value) * x**k for k, value in fixed.items())
    solution = mp.lu_solve(rows, right)
    chosen = {k: solution[j] for j, k in enumerate(free)}
    return tuple(chosen[k] if k in chosen else mpf(fixed[k]) for k in range(degree + 1))


def _alternating(coefficients: Sequence, low: mpf, high: mpf, count: int) -> list[tuple]:
    """`count` extrema (x, error) of alternating sign: the run with the largest smallest size."""
    found = [(a + b) / 2 for a, b in _brackets(coefficients, low, high)]
    candidates = [(x, error(coefficients, x)) for x in (low, *found, high)]
    runs: list[tuple] = []
    for x, e in candidates:
        if abs(e) < WIDTH:
            continue  # the error is fixed at 0 here
        if runs and (runs[-1][1] > 0) == (e > 0):
            runs[-1] = max(runs[-1], (x, e), key=lambda pair: abs(pair[1]))
        else:
            runs.append((x, e))
    if len(runs) < count:
        raise ArithmeticError(f"{len(runs)} alternating extrema, {count} are needed")
    windows = [runs[i : i + count] for i in range(len(runs) - count + 1)]
    return max(windows, key=lambda window: min(abs(e) for _, e in window))


# --- extrema ------------------------------------------------------------------------------------


def _slope(coefficients: Sequence) -> list:
    """Coefficients of p' - ln 2 p, highest first: the sign of the error's derivative."""
    c = [mpf(value) for value in coefficients]
    derivative = [k * c[k] for k in range(1, len(c))] + [mpf(0)]
    return [d - mp.ln2 * value for d, value in zip(derivative, c)][::-1]


def _brackets(coefficients: Sequence, low: mpf, high: mpf) -> list[tuple[mpf, mpf]]:
    """Intervals of WIDTH inside (low, high) at whose ends the slope has proven opposite signs."""
    slope = _slope(coefficients)
    grid = [low + (high - low) * i / SCAN for i in range(SCAN + 1)]
    signs = [mp.sign(mp.polyval(slope, x)) for x in grid]
    brackets = []
    for a, b, sign_a, sign_b in zip(grid, grid[1:], signs, signs[1:]):
        if sign_a * sign_b >= 0:
            continue
        root = mp.findroot(lambda x: mp.polyval(slope, x), (a, b), solver="anderson", verify=False)
        ends = (root - WIDTH / 2, root + WIDTH / 2)
        if _sign_at(coefficients, ends[0]) * _sign_at(coefficients, ends[1]) == -1:
            brackets.append(ends)
    return brackets


def _sign_at(coefficients: Sequence, x: mpf) -> int:
    """The sign of the slope at x: 1 or -1 if interval arithmetic is sure of it, else 0."""
    point, ln2 = iv.mpf(x), iv.log(iv.mpf(2))
    value, derivative = iv.mpf(0), iv.mpf(0)
    for c in reversed(coefficients):
        derivative = derivative * point + value
        value = value * point + iv.mpf(mpf(c))
    slope = derivative - ln2 * value
    return 1 if slope.a > 0 else -1 if slope.b < 0 else 0


def _error_over(coefficients: Sequence, low: mpf, high: mpf):
    """An interval that holds p(x) / 2^x - 1 for every x in [low, high]."""
    x, value = iv.mpf([low, high]), iv.mpf(0)
    for c in reversed(coefficients):
        value = value * x + iv.mpf(mpf(c))
    return value / iv.exp(x * iv.log(iv.mpf(2))) - 1


def _magnitude_below(interval) -> mpf:
    """The smallest magnitude in an interval."""
    low, high = mpf(interval.a), mpf(interval.b)
    return mpf(0) if low <= 0 <= high else min(abs(low), abs(high))


@contextlib.contextmanager
def _digits():
    """Sets the precision of mpmath's numbers and intervals, and sets it back."""
    before = iv.dps
    iv.dps = DIGITS
    try:
        with mp.workdps(DIGITS):
            yield
    finally:
        iv.dps = before


def _check(degree: int, domain: tuple, fixed: Mapping) -> None:
    if isinstance(degree, bool) or not isinstance(degree, int):
        raise TypeError(f"degree must be an integer; got {degree!r}")
    if degree not in DEGREES:
        raise ValueError(f"degree must be {DEGREES[0]} to {DEGREES[-1]}; got {degree}")
    if len(domain) != 2 or not all(math.isfinite(end) for end in domain):
        raise ValueError(f"the domain must be two finite numbers; got {domain}")
    if not -1 <= domain[0] < domain[1] <= 1:
        raise ValueError(f"the domain must be increasing and within [-1, 1]; got {domain}")
    outside = [k for k in fixed if k not in range(degree + 1)]
    if outside or len(fixed) > degree:
        raise ValueError(
            f"fixed coefficients must be some, not all, of 0 to {degree}; got {sorted(fixed)}"
        )


if __name__ == "__main__":
    from .exp2_study import main

    main()
