# SPDX-License-Identifier: Apache-2.0
"""The search for float32 coefficients of the emulated exponential, judged as the GPU evaluates.

Rounding the minimax coefficients to float32 one by one is not best: p1 can move only in steps of
2^-24, as large as the error of degree 5, while p4 and p5 could make up for such a step. And what
counts is the error with the roundings of every fma. So:

1. Seeds. The leading coefficients take every combination of values within REACH steps of the
   rounded minimax ones; the others are moved so that the change of p / 2^x is smallest in the
   least-squares sense, then rounded.
2. Descent. The best SEEDS of them, on a fixed sample of fractions, are improved until none of the
   moves (one coefficient by 1, 2 or 4 steps, or two by 1 step in opposite directions) lowers the
   largest error on the sample.
3. Choice. Of the results, the FINALISTS best on the sample are compared on every STRIDE-th
   float32, and the smallest largest error wins.

All of it is deterministic: SEED fixes the sample. The result is a local optimum of step 2, and not
proven to be the global one; but the certified truncation error of the minimax polynomial is a
lower bound that degrees 1 to 4 come close to. Runs: host; some minutes for all variants.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence

import numpy as np

from . import exp2, minimax

SEED = 20261129
SAMPLE = 1 << 16  # fractions
REACH = {"one": {1: 3, 2: 3}, "free": {0: 2, 1: 3, 2: 3}, "nearest": {0: 2, 1: 3, 2: 3}}
SEEDS = 16
FINALISTS = 8
STRIDE = 8
STEPS = (1, -1, 2, -2, 4, -4)


def search(degree: int, variant: str = "one") -> tuple[float, ...]:
    """The float32 coefficients (p0 first) that steps 1 to 3 find.

    Raises TypeError or ValueError as `minimax.minimax` does.
    """
    exact = minimax.minimax(degree, variant)
    judge = Judge(variant)
    seeds = set(_seeds([float(c) for c in exact.coefficients], variant))
    if variant == "free":  # p0 = 1 is one of its choices
        fixed = minimax.minimax(degree, "one").coefficients
        seeds |= set(_seeds([float(c) for c in fixed], "one"))
    seeds = sorted(seeds, key=lambda c: (judge(c), c))
    found = {descend(seed, judge) for seed in seeds[:SEEDS]}
    found = sorted(found, key=lambda c: (judge(c), c))[:FINALISTS]
    results = exp2.exhaustive({str(i): c for i, c in enumerate(found)}, variant, stride=STRIDE)
    return min(enumerate(found), key=lambda pair: results[str(pair[0])]["fp32"]["max"])[1]


class Judge:
    """The largest relative error of float32 coefficients on the fixed sample of a variant."""

    def __init__(self, variant: str):
        self.variant = variant
        self.fractions = sample(variant)
        self.truth = np.exp2(self.fractions.astype(np.float64))
        self.known: dict[tuple[float, ...], float] = {}

    def __call__(self, coefficients: tuple[float, ...]) -> float:
        if coefficients not in self.known:
            value = exp2.horner(self.fractions, coefficients)
            self.known[coefficients] = float(np.abs(value / self.truth - 1).max())
        return self.known[coefficients]


def sample(variant: str) -> np.ndarray:
    """SAMPLE float32 fractions: half uniform, half uniform in the logarithm, and the ends."""
    rng = np.random.default_rng(SEED)
    uniform = rng.random(SAMPLE // 2)
    small = 2.0 ** -(10 * rng.random(SAMPLE // 2 - 2))
    fractions = np.concatenate((uniform, small, (0.0, 1.0))).astype(np.float32)
    if variant != "nearest":
        return fractions
    signs = np.where(np.arange(fractions.size) % 2, np.float32(-0.5), np.float32(0.5))
    return fractions * signs


def descend(coefficients: tuple[float, ...], judge: Judge) -> tuple[float, ...]:
    """Takes the best move until none lowers the judge's error (step 2)."""
    while True:
        best = min(neighbours(coefficients, judge.variant), key=judge)
        if judge(best) >= judge(coefficients):
            return coefficients
        coefficients = best


def neighbours(coefficients: tuple[float, ...], variant: str) -> Iterator[tuple[float, ...]]:
    """Coefficients one move away; p0 = 1 stays where it is."""
    free = range(1 if variant == "one" else 0, len(coefficients))
    for k, step in itertools.product(free, STEPS):
        yield _moved(coefficients, {k: step})
    for j, k in itertools.combinations(free, 2):
        for sign in (1, -1):
            yield _moved(coefficients, {j: sign, k: -sign})


def _moved(coefficients: Sequence[float], steps: dict[int, int]) -> tuple[float, ...]:
    """Coefficients with some of them moved by so many float32."""
    moved = np.array(coefficients, np.float32)
    pattern = moved.view(np.int32)  # all are positive
    for k, step in steps.items():
        pattern[k] += step
    return tuple(float(c) for c in moved)


def _seeds(exact: Sequence[float], variant: str) -> Iterator[tuple[float, ...]]:
    """Step 1: leading coefficients near the exact ones, the others fitted and rounded."""
    reach = {k: r for k, r in REACH[variant].items() if k < len(exact)}
    rest = [k for k in range(len(exact)) if k not in reach and (k or variant != "one")]
    low, high = (float(end) for end in minimax.variant(variant)[0])
    x = (low + high) / 2 + (high - low) / 2 * np.cos(np.linspace(0, np.pi, 101))
    basis = x[:, None] ** np.arange(len(exact)) / np.exp2(x)[:, None]
    for offsets in itertools.product(*(range(-r, r + 1) for r in reach.values())):
        rounded = _moved(exact, dict(zip(reach, offsets)))
        found = list(rounded)
        if rest:
            change = basis[:, list(reach)] @ [rounded[k] - exact[k] for k in reach]
            fitted = np.linalg.lstsq(basis[:, rest], -change, rcond=None)[0]
            for k, correction in zip(rest, fitted):
                found[k] = float(np.float32(exact[k] + correction))
        yield tuple(found)
