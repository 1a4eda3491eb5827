# SPDX-License-Identifier: Apache-2.0
"""float32 arithmetic of the GPU on numpy arrays, bit for bit: fma.rn, add.rn, add.rm, max.

Subnormals are kept (no .ftz) and every NaN result is 0x7fffffff, as PTX has it (PTX ISA 9.1,
section 9.7.3: fma, add, max). Checked against exact fractions and, all but max.NaN, as parts of
`exp2.exp2` against an H200 (docs/exp2.md). Runs: host; needs numpy only.

Note [Round to odd]
float64 holds a product of two float32 exactly (48 of 53 bits), but the sum with a third is
rounded to 53 bits, and then to 24. When the first rounding lands on the middle between two
float32, the second no longer knows on which side the exact sum was: rounded twice, wrongly. So
the first rounding is made to odd: of the two float64 around an inexact sum, the one whose last
bit is 1. It is never a float32 nor the middle between two (their last bits are 0), and it is on
the same side of every such value as the exact sum, so that the second rounding decides as if it
had seen the sum itself (Boldo and Melquiond, IEEE Trans. Computers 57 (4), 2008). What the first
rounding lost is known exactly by the error-free sum of two numbers (Knuth, TAOCP 2, 4.2.2).
"""

from __future__ import annotations

import numpy as np

NAN_BITS = 0x7FFFFFFF  # of every NaN that an instruction makes


def bits(x: np.ndarray) -> np.ndarray:
    """The bit patterns of x: float32 of any shape -> uint32 of the same shape."""
    return np.asarray(x, np.float32).view(np.uint32)


def from_bits(pattern: np.ndarray) -> np.ndarray:
    """The float32 of bit patterns: uint32 of any shape -> float32 of the same shape."""
    return np.asarray(pattern, np.uint32).view(np.float32)


def fma(a: np.ndarray, b: np.ndarray, c: np.ndarray) -> np.ndarray:
    """fma.rn.f32: a * b + c, rounded once to nearest even; float32 in and out, broadcast.

    See Note [Round to odd].
    """
    with np.errstate(invalid="ignore", over="ignore", under="ignore"):
        product = np.multiply(a, b, dtype=np.float64)  # exact
        total, lost = _two_sum(product, np.asarray(c, np.float64))
        rounded = _to_odd(total, lost).astype(np.float32)
        return _canonical(rounded.reshape(np.shape(total)))


def add(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """add.rn.f32: a + b rounded to nearest even; float32 in and out, broadcast."""
    with np.errstate(invalid="ignore", over="ignore"):
        return _canonical(np.add(a, b, dtype=np.float32))


def add_down(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """add.rm.f32: the largest float32 that is not above a + b; float32 in and out, broadcast.

    An exact sum of zero from opposite signs is -0, and a sum beyond the largest float32 is the
    largest float32 (IEEE 754, roundTowardNegative).
    """
    a, b = np.broadcast_arrays(np.asarray(a, np.float32), np.asarray(b, np.float32))
    with np.errstate(invalid="ignore", over="ignore", under="ignore"):
        total, lost = _two_sum(a.astype(np.float64), b.astype(np.float64))
        near = np.atleast_1d(total.astype(np.float32))
        above = (near > total) | ((near == total) & (lost < 0))
        near[above] = np.nextafter(near[above], np.float32(-np.inf))
        near = near.reshape(a.shape)
        both_positive = ~(np.signbit(a) | np.signbit(b))
        zero = (total == 0) & (lost == 0) & ~both_positive
    return _canonical(np.where(zero, np.float32(-0.0), near))


def maximum(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """max.f32: the larger one; a NaN counts as missing, two NaN give NaN. float32, broadcast."""
    return _canonical(np.fmax(np.asarray(a, np.float32), np.asarray(b, np.float32)))


def maximum_nan(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """max.NaN.f32: the larger one, NaN if either is. float32, broadcast."""
    return _canonical(np.maximum(np.asarray(a, np.float32), np.asarray(b, np.float32)))


def _two_sum(a: np.ndarray, b: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """(s, e): s = a + b rounded to float64, and s + e = a + b exactly (if finite)."""
    total = a + b
    of_b = total - a
    return total, (a - (total - of_b)) + (b - of_b)


def _to_odd(total: np.ndarray, lost: np.ndarray) -> np.ndarray:
    """Turns a sum rounded to nearest, with what was lost, into the sum rounded to odd."""
    total, lost = np.atleast_1d(total), np.atleast_1d(lost)
    side = lost * total  # > 0: the exact sum has the larger magnitude; NaN for infinite sums
    step = (side > 0).view(np.int8) - (side < 0).view(np.int8)
    pattern = total.view(np.int64)
    pattern += step * (1 - (pattern & 1))  # towards the exact sum, from even only
    return total


def _canonical(x: np.ndarray) -> np.ndarray:
    """x with every NaN replaced by the GPU's."""
    nan = np.isnan(x)
    return np.where(nan, from_bits(np.uint32(NAN_BITS)), x) if nan.any() else x
