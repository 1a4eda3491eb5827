# SPDX-License-Identifier: Apache-2.0
"""The exponential that stages 05 and on compute without the MUFU: bitwise model, error, search.

2^x = 2^n p(x - n) with n = floor(x), or the nearest integer, and a polynomial p. The model
(`exp2`) does what the kernel's instructions do, bit for bit; `exhaustive` counts the error of
every fraction; `search` finds the float32 coefficients. Source of the method: paper, section
3.1.3. Runs: host; needs numpy, the search also mpmath.

Note [Floor by addition]
From 2^23 on, neighbouring float32 differ by 1. x + 1.5 * 2^23 lies there for every |x| < 2^22, so
rounding that sum down makes it MAGIC + floor(x), and subtracting MAGIC again is exact. The half
keeps the sum in one binade for x of both signs. The last bits of the sum are then floor(x) in two's
complement, and those of MAGIC are 0: shifted left by 23 they are what has to be added to the
exponent field of p. That addition is one of integers on the bits of p.

Note [Input classes]
x is the scaled score minus the row maximum, in log2 units; see `exp2`. For p0 = 1:
  -0, +0, integers n in [-126, 127]: exactly 2^n, since p(0) = 1.
  (-127, -126): the exponent field is 0, so the bits of p - 1 are those of a subnormal number,
    (p - 1) * 2^-126 in place of p * 2^-127: at most 2^-127 = 5.9e-39 off, never below zero, and
    zero at -127. (Each of the 131071 float32 there is tested, for every degree.)
  x <= -127, -inf: clamped to -127, exactly +0. So masked scores get P = +0.
  -2^-25 <= x < 0: floor is -1, and x + 1 rounds to 1.0: p(1) / 2, below 1 by at most E, the
    largest relative error of p. Negative
    x above -1/2 in general: x + 1 is rounded, which moves 2^x by at most a factor 1 + 2.1e-8.
  (0, 128): as in [0, 1), scaled by 2^n. Stage 06 lets x reach 8.
  x >= 128: undefined. 128 gives +inf, anything larger a pattern without meaning.
  +inf: NaN, since inf - inf is.
  NaN: +0, if the clamp is max.f32, for which NaN is a missing operand; 3.4e38, the largest
    float32, if it is max.NaN.f32, as the shifted bits of NaN subtract 1 from the exponent of p's.
    Neither is NaN. A kernel must not count on these elements to carry a NaN: it is the row
    maximum (max.NaN) and the exponentials left on the MUFU that do.
With p0 free, p(0) is not 1: 2^n is off by up to E, and where p(0) < 1 a clamp at -127 would give
a pattern with the sign bit set (NaN). These variants are clamped at -126, and so give about 2^-126
(1.2e-38) and not 0 for -inf: masked scores would leave a trace, and 0 would need a selection.

Note [Monotone]
For p0 = 1 with positive coefficients the result never falls when x rises, over all x < 128: each
product and sum of Horner's scheme has positive operands and rounding is monotone, so p is; x - n
is; and from one integer to the next p(1) <= 2 p(0), which the integer addition keeps, subnormal
results included. `monotone` checks the conditions on p. For the nearest variant, whose fractions
can be negative, nothing is claimed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence

import numpy as np

from . import float32, minimax

MAGIC = np.float32(1.5 * 2**23)  # see Note [Floor by addition]
MANTISSA = 23  # bits of a float32 below its exponent
CLAMP = {"one": -127.0, "free": -126.0, "nearest": -126.0}  # see Note [Input classes]
ONE = 0x3F800000  # bits of 1.0
CHUNK = 1 << 13  # values at a time: small enough for the cache, and for malloc without mmap
CONSTANT = 127 - 26  # exponent field below which p is p0: |f| < 2^-26, see `exhaustive`
DROPPED = {"bf16": 16, "fp16": 13}  # bits of a float32 mantissa that the format does not keep
Function = Sequence[float] | Callable[[np.ndarray], np.ndarray]
DIGITS = 7  # of a result; the last bits of a sum depend on the machine's vector length


# --- the function -------------------------------------------------------------------------------


def horner(fraction: np.ndarray, coefficients: Sequence[float]) -> np.ndarray:
    """p(fraction), one fma for each degree: float32 of any shape in and out; p0 comes first."""
    *lower, value = (np.float32(c) for c in coefficients)
    for c in reversed(lower):
        value = float32.fma(value, fraction, c)
    return value


def split(x: np.ndarray, variant: str = "one") -> tuple[np.ndarray, np.ndarray]:
    """(t, f): t = MAGIC + n as float32, f = x - n; n is floor(x), for "nearest" the nearest.

    x: float32, clamped. See Note [Floor by addition].
    """
    adder = float32.add if variant == "nearest" else float32.add_down
    shifted = adder(x, MAGIC)
    whole = float32.add(shifted, -MAGIC)
    return shifted, float32.add(x, -whole)


def exp2(
    x: np.ndarray,
    coefficients: Sequence[float],
    variant: str = "one",
    *,
    nan_clamp: bool = False,
) -> np.ndarray:
    """2^x as the GPU computes it without the MUFU, bit for bit.

    x: float32 of any shape, log2 units. coefficients: float32 values, p0 first. variant: of
    `minimax.VARIANTS`; it decides about rounding and clamp. nan_clamp: clamp by max.NaN.f32 in
    place of max.f32. Returns float32 of the same shape; what comes out for every kind of x is in
    Note [Input classes]. Raises ValueError for another variant or a wrong number of
    coefficients, TypeError when x is not float32.
    """
    minimax.variant(variant)
    x = np.asarray(x)
    if x.dtype != np.float32:
        raise TypeError(f"x must be float32; got {x.dtype}")
    if len(coefficients) - 1 not in minimax.DEGREES:
        raise ValueError(f"2 to 6 coefficients (degree 1 to 5); got {len(coefficients)}")
    clamp = float32.maximum_nan if nan_clamp else float32.maximum
    shifted, fraction = split(clamp(x, np.float32(CLAMP[variant])), variant)
    p = float32.bits(horner(fraction, coefficients))
    return float32.from_bits(p + (float32.bits(shifted) << np.uint32(MANTISSA)))  # wraps


def monotone(coefficients: Sequence[float]) -> bool:
    """True if the conditions of Note [Monotone] hold for these coefficients, rounding down."""
    first, last = (float(horner(np.float32(f), coefficients)) for f in (0.0, 1.0))
    return all(c > 0 for c in coefficients) and last <= 2 * first


# --- every fraction -----------------------------------------------------------------------------


def exhaustive(
    functions: Mapping[str, Function],
    variant: str = "one",
    *,
    stride: int = 1,
    literal: bool = False,
    reference: Callable[[np.ndarray], np.ndarray] | None = None,
    progress=lambda text: None,
) -> dict[str, dict]:
    """The error of functions for 2^x at every float32 fraction, in float32, bf16 and fp16.

    functions: the coefficients of a polynomial, or a function of float32 arrays that is constant
    below 2^-26.

    Fractions: the closed interval [0, 1], for "nearest" [-1/2, 1/2]. Reference: 2^x in float64,
    whose error (below 1 ulp of float64, 2.3e-16) is under 1e-8 of what is told here. stride: only
    every so many bit patterns (and the ends). Fractions below 2^-26 are counted as a whole: the
    last product is below 2^-26, less than half the spacing around p0, so that p is p0 exactly, and
    the error is largest at an end; literal=True evaluates each of them all the same.

    Maximum over all float32; mean and bias (the mean with its sign) weigh each of them with the
    distance to the next, which is a uniform distribution, as for the paper's Table 2. same:
    share that equals the correctly rounded result; within_one: share that is at most one unit of
    the 16-bit format off it; with a reference, another function for 2^x, its rounded result in
    place of the correctly rounded one. Returns name -> results, and "ideal" for correct rounding.
    Raises ValueError for another variant or a stride below 1.
    """
    minimax.variant(variant)
    if stride < 1:
        raise ValueError(f"stride must be at least 1; got {stride}")
    tallies = {name: Tally() for name in ("ideal", *functions)}
    for piece, weight in pieces(variant, stride, literal):
        _visit(tallies, functions, reference, piece, weight * stride)
        if float32.bits(piece[0]) % (1 << MANTISSA) == 0:
            progress(f"fractions from {piece[0]}")
    return {name: tally.result() for name, tally in tallies.items()}


def pieces(variant: str, stride: int, literal: bool) -> Iterator[tuple[np.ndarray, float]]:
    """(fractions, weight of each): runs of at most CHUNK float32 of one binade, and the ends.

    The weight is the distance between neighbours over the length of the domain; it adds up to 1.
    """
    top, signs = (ONE, (0,)) if variant != "nearest" else (ONE - (1 << MANTISSA), (0, 1 << 31))
    for sign in signs:
        lowest = 0 if literal else CONSTANT
        if not literal:
            edge = float32.from_bits(np.uint32([sign, sign | ((CONSTANT << MANTISSA) - 1)]))
            yield edge, 0.0
            yield edge[:1], 2.0**-26 / stride
        for exponent in range(lowest, top >> MANTISSA):
            spacing = 2.0 ** (max(exponent, 1) - 127 - MANTISSA)
            first, last = exponent << MANTISSA, (exponent + 1) << MANTISSA
            for start in range(first, last, CHUNK * stride):
                stop = min(start + CHUNK * stride, last)
                yield _run(sign | start, sign | stop, stride), spacing
        yield float32.from_bits(np.uint32([sign | top])), 0.0


def _run(start: int, stop: int, stride: int) -> np.ndarray:
    return float32.from_bits(np.arange(start, stop, stride, dtype=np.uint32))


def _visit(tallies: dict, functions: Mapping, reference, piece: np.ndarray, weight: float) -> None:
    """Adds one run of fractions to all tallies."""
    truth = np.exp2(piece.astype(np.float64))
    ideal = {name: round_mantissa(truth, MANTISSA + 6 + d) for name, d in DROPPED.items()}
    wanted = _short(reference(piece)) if reference else ideal
    tallies["ideal"].add(piece, truth, truth.astype(np.float32), ideal, wanted, weight)
    for name, function in functions.items():
        value = function(piece) if callable(function) else horner(piece, function)
        value = np.broadcast_to(value, piece.shape)
        tallies[name].add(piece, truth, value, _short(value), wanted, weight)


def _short(value: np.ndarray) -> dict[str, np.ndarray]:
    """float32 rounded to each 16-bit format."""
    return {name: round_mantissa(value, dropped) for name, dropped in DROPPED.items()}


def round_mantissa(x: np.ndarray, dropped: int) -> np.ndarray:
    """x without the last `dropped` bits of its mantissa, rounded to nearest even.

    float32 or float64 of any shape, normal numbers of the target format; returns the same dtype.
    """
    unsigned = np.uint32 if x.dtype == np.float32 else np.uint64
    pattern = np.ascontiguousarray(x).view(unsigned)
    shift = unsigned(dropped)
    half = unsigned((1 << (dropped - 1)) - 1)
    kept = (pattern + half + ((pattern >> shift) & unsigned(1))) >> shift
    return (kept << shift).view(x.dtype)


class Tally:
    """What `exhaustive` adds up for one polynomial."""

    def __init__(self):
        self.count, self.weight = 0, 0.0
        self.largest = dict.fromkeys(("fp32", *DROPPED), (0.0, 0.0))
        self.sums = {name: np.zeros(2) for name in ("fp32", *DROPPED)}
        self.shares = {name: np.zeros(2) for name in DROPPED}
        self.by_binade: dict[int, float] = {}

    def add(self, piece, truth, value, short, wanted, weight) -> None:
        """Adds a run of fractions: 2^x, p in float32, p and what it should be in short formats."""
        self.count += piece.size
        self.weight += weight * piece.size
        worst = self._errors("fp32", piece, truth, value, weight)
        exponent = int(np.frexp(piece[-1])[1])  # |x| in [2^(exponent - 1), 2^exponent)
        self.by_binade[exponent] = max(worst, self.by_binade.get(exponent, 0.0))
        for name, rounded in short.items():
            self._errors(name, piece, truth, rounded, weight)
            unit = np.spacing(wanted[name].astype(np.float32)) * np.float32(2 ** DROPPED[name])
            off = np.abs(rounded - wanted[name])
            counts = np.count_nonzero(off == 0), np.count_nonzero(off <= unit)
            self.shares[name] += weight * np.array(counts)

    def _errors(self, name, piece, truth, value, weight) -> float:
        relative = value / truth - 1.0
        size = np.abs(relative)
        worst = int(size.argmax())
        if size[worst] > self.largest[name][0]:
            self.largest[name] = (float(size[worst]), float(piece[worst]))
        self.sums[name] += weight * np.array((size.sum(), relative.sum()))
        return float(size[worst])

    def result(self) -> dict:
        """JSON-able; relative errors to DIGITS digits, where the largest is as a hex float."""
        rounded = lambda x: float(f"{x:.{DIGITS - 1}e}")
        found: dict = {"count": self.count}
        for name, (largest, at) in self.largest.items():
            mean, bias = self.sums[name] / self.weight
            found[name] = {"max": rounded(largest), "at": at.hex(), "mean": rounded(mean)}
            found[name]["bias"] = round(float(bias), 12)  # a small difference of large sums
            if name in self.shares:
                same, within = (rounded(x / self.weight) for x in self.shares[name])
                found[name] |= {"same": same, "within_one": within}
        top = sorted(self.by_binade, reverse=True)[:4]
        found["max_by_binade"] = {f"2^{e - 1}": rounded(self.by_binade[e]) for e in top}
        return found
