# SPDX-License-Identifier: Apache-2.0
"""A row maximum that is an integer in log2 units: the exponential it makes possible, its error.

`python -m flash_ladder.common.exp2_integer` computes docs/data/exp2-integer.json and prints the
tables of docs/exp2.md; a minute or two. All derived. Runs: host; the costs need the CuTe DSL.

Note [Integer maximum]
M = ceil(largest * c) with c = softmax_scale * log2(e). Everything about M is exact while
|M| < 2^22: MAGIC - M is a float32, and so are differences of two M, alpha = 2^(M_old - M) down to
2^-126 (0 below), and products with it (unless they leave the normal numbers). Beyond 2^22 it fails,
where the ordinary scheme still finds the largest score.
  t = fma.rm(s, c, MAGIC - M) = MAGIC - M + floor(s * c): the product is not rounded before.
  -n = (MAGIC - M) - t, exact; f = fma(s, c, -n) is the fraction, rounded once: at most 2^-25 off,
    whatever |s * c| is. Then the polynomial and the addition of t's low bits, as in `exp2`.
The clamp must act on s. On t it comes too late: f would be that of the unclamped score, so that
scores far below give up to 2^-126 and not 0, and -inf gives the bits of NaN with 127 off the
exponent, a number just below 4. The bound on s is (M - 127) / c, and up by 2^-22 of itself, more
than its three roundings. So s * c is not below M - 127, and what it gives is no exact 0, but at
most 2^-126 (|M| + 127) 2^-21: a bf16 of 0 for |M| up to 11 000, a fp16 of 0 always.
P <= 1 where M has just moved, P <= 2^threshold else, as integers are compared. A NaN score counts
as masked here; but it makes M NaN, and with that 3.4e38 comes out, as in `exp2`: what is left on
the MUFU carries it.
"""

from __future__ import annotations

import datetime
import json
import math
import pathlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from . import exp2, exp2_integer_kernel, exp2_output, float32, inputs, minimax, reference, studies

RESULTS = pathlib.Path(__file__).resolve().parent.parent / "docs" / "data" / "exp2-integer.json"
COMMAND = "python -m flash_ladder.common.exp2_integer"
BIAS = np.float32(127)  # of a float32's exponent
ROUNDED_UP = np.float32(2.0**-22)  # see Note [Integer maximum]
TABLES = ("errors", "outputs", "compiled")  # of the data, in the page's order


# --- the arithmetic -----------------------------------------------------------------------------


def maximum(largest: np.ndarray, scale: np.float32) -> np.ndarray:
    """M = ceil(largest * scale), the product not rounded: fma.rp.f32. float32 in and out."""
    raised = -float32.fma_down(-largest, scale, -exp2.MAGIC)
    return float32.add(raised, -exp2.MAGIC)


def factor(step: np.ndarray) -> np.ndarray:
    """alpha = 2^step by integer arithmetic: step is a whole number <= 0 or -inf; 0 from -127 on."""
    biased = float32.add(float32.maximum(step, -BIAS), exp2.MAGIC + BIAS)
    return float32.from_bits(float32.bits(biased) << np.uint32(exp2.MANTISSA))


def power(
    s: np.ndarray, scale: np.float32, m: np.ndarray, coefficients: Sequence[float]
) -> np.ndarray:
    """2^(s * scale - m) without the MUFU, bit for bit; see Note [Integer maximum].

    s: float32, unscaled scores; m: float32, whole numbers, broadcast against s; scale > 0, float32.
    coefficients: p0 = 1 first. Returns float32. TypeError when s is not float32.
    """
    if np.asarray(s).dtype != np.float32:
        raise TypeError(f"s must be float32; got {np.asarray(s).dtype}")
    bound = float32.add(m, -BIAS) * (np.float32(1) / scale)
    s = float32.maximum(s, float32.fma(np.abs(bound), ROUNDED_UP, bound))
    floor = float32.add(exp2.MAGIC, -m)
    shifted = float32.fma_down(s, scale, floor)
    fraction = float32.fma(s, scale, float32.add(floor, -shifted))
    p = float32.bits(exp2.horner(fraction, coefficients))
    return float32.from_bits(p + (float32.bits(shifted) << np.uint32(exp2.MANTISSA)))  # wraps


# --- its error ----------------------------------------------------------------------------------

SIZES = (1, 16, 256, 4096, 65536)  # largest |s * scale| of a row, at most
DEGREES = (3, 5)
ROWS, KEYS = 64, 4096  # for each size, head dim and sign
BELOW = 20  # how far scores lie below the row's largest, log2 units, evenly spread


def scale_log2(head_dim: int) -> np.float32:
    """softmax_scale * log2(e) for the default softmax_scale."""
    return np.float32(inputs.LOG2_E / math.sqrt(head_dim))


def sample(size: int, head_dim: int, sign: int) -> np.ndarray:
    """float32 (ROWS, KEYS): scores; the first of a row is its largest, of size/2 to size scaled."""
    rng = np.random.default_rng([size, head_dim, sign + 1])
    largest = sign * size * rng.uniform(0.5, 1, (ROWS, 1))
    below = BELOW * rng.random((ROWS, KEYS))
    below[:, 0] = 0
    return ((largest - below) / float(scale_log2(head_dim))).astype(np.float32)


def largest_errors(size: int, degree: int) -> dict:
    """Largest relative error of both schemes, every exponential emulated.

    ordinary: against 2^(s c - largest c). in_row: the same with the rounded product largest * c,
    which a row's P and sum share, so that it cancels. integer: against 2^(s c - M).
    """
    found = dict.fromkeys(("ordinary", "in_row", "integer"), 0.0)
    coefficients = minimax.coefficients(degree)
    for head_dim in exp2_integer_kernel.HEAD_DIMS:
        scale = scale_log2(head_dim)
        for sign in (-1, 1):
            s = sample(size, head_dim, sign)
            exact = s.astype(np.float64) * scale
            product, m = s[:, :1] * scale, maximum(s[:, :1], scale)
            ordinary = exp2.exp2(float32.fma(s, scale, -product), coefficients)
            for name, value, zero in (
                ("ordinary", ordinary, exact[:, :1]),
                ("in_row", ordinary, product),
                ("integer", power(s, scale, m, coefficients), m),
            ):
                error = float(np.abs(value / np.exp2(exact - zero) - 1).max())
                found[name] = max(found[name], error)
    rounded = {name: float(f"{error:.3e}") for name, error in found.items()}
    return {"size": size, "degree": degree} | rounded


# --- in outputs ---------------------------------------------------------------------------------

SIZE = {"batch": 1, "heads": 1, "seqlen_q": 64, "seqlen_k": 2048, "head_dim": 128}
SEEDS = range(32)  # a few rows with large errors decide an RMS
CASES = {"gaussian": 8, "llm_like": 8, "ascending_max": 8, "climbing": 0}  # thresholds, log2
FORMATS = {  # of P and O, and how many of 128 exponentials are emulated
    "bf16": (torch.bfloat16, 32),
    "fp16": (torch.float16, 32),
    "float32": (torch.float32, 0),
}
DEGREE = 3
STEP = 1 / 16  # by which each tile of `climbing` lies above the one before, log2 units


@dataclass(frozen=True)
class Scheme:
    """What a kind of row maximum decides; all float32, c = scale_log2.

    candidate(largest, c): the maximum that a tile asks for. step(old - new, c): in log2 units.
    factor(step): alpha. zero(maximum, c): what is subtracted from s * c. emulated(s, c, maximum).
    """

    candidate: Callable
    step: Callable
    factor: Callable
    zero: Callable
    emulated: Callable


def _correctly_rounded(x: np.ndarray) -> np.ndarray:
    return np.exp2(x.astype(np.float64)).astype(np.float32)


_POLYNOMIAL = minimax.coefficients(DEGREE)
SCHEMES = {
    "ordinary": Scheme(
        candidate=lambda largest, c: largest,
        step=lambda difference, c: difference * c,
        factor=_correctly_rounded,
        zero=lambda m, c: m * c,
        emulated=lambda s, c, m: exp2.exp2(float32.fma(s, c, -(m * c)), _POLYNOMIAL),
    ),
    "integer": Scheme(
        candidate=maximum,
        step=lambda difference, c: difference,
        factor=factor,
        zero=lambda m, c: m,
        emulated=lambda s, c, m: power(s, c, m, _POLYNOMIAL),
    ),
}


def problem(name: str, dtype: torch.dtype, seed: int) -> inputs.Problem:
    """An input of CASES at SIZE, one head. climbing: hardly any noise, every tile STEP higher."""
    if name != "climbing":
        return inputs.make(name, **SIZE, dtype=dtype, seed=seed)
    found = inputs.make("gaussian", **SIZE, dtype=dtype, seed=seed)
    found.q.mul_(0.05)
    found.q[..., 0] = 1 / float(scale_log2(SIZE["head_dim"]))
    tiles = torch.arange(SIZE["seqlen_k"]).flip(0) // exp2_output.ROW  # the last is visited first
    found.k[..., 0] = (STEP * tiles)[None, :, None].to(dtype)
    return found


def online(
    of: inputs.Problem, scheme: Scheme, emulated: int, threshold: float
) -> tuple[torch.Tensor, float]:
    """(O (sq, d) in the format of `of`, rescalings of a row): the kernels' loop over key tiles.

    P is rounded to that format; a tile's product is exact, O and the row sum float32 after it.
    """
    q, k, v = (x[0, :, 0].double() for x in (of.q, of.k, of.v))
    c = scale_log2(q.shape[1])
    columns = exp2_output.emulated_columns(emulated, exp2_output.ROW)
    row_max = np.full((len(q), 1), -np.inf, np.float32)
    row_sum, out, moves = np.zeros((len(q), 1), np.float32), np.zeros(q.shape, np.float32), 0
    for keys, values in reversed(list(zip(k.split(exp2_output.ROW), v.split(exp2_output.ROW)))):
        s = (q @ keys.T).float().numpy()
        new = np.maximum(row_max, scheme.candidate(s.max(axis=1, keepdims=True), c))
        step = scheme.step(row_max - new, c)
        move = ~(step >= -threshold)
        alpha = np.where(move, scheme.factor(step), np.float32(1))
        row_max = np.where(move, new, row_max)
        p = _correctly_rounded(float32.fma(s, c, -scheme.zero(row_max, c)))
        if emulated:
            p[:, columns] = scheme.emulated(s[:, columns], c, row_max)
        row_sum = (row_sum * alpha + p.sum(axis=1, keepdims=True, dtype=np.float64)).astype("f4")
        product = torch.from_numpy(p).to(of.q.dtype).double() @ values
        out = ((out * alpha) + product.numpy()).astype(np.float32)
        moves += move.mean()
    return torch.from_numpy(out / row_sum).to(of.q.dtype), float(moves) - 1


def output_error(name: str, label: str) -> dict:
    """Of one of CASES and FORMATS: RMS error of O, integer over ordinary, all SEEDS together."""
    dtype, emulated = FORMATS[label]
    squares, moves = dict.fromkeys(SCHEMES, 0.0), dict.fromkeys(SCHEMES, 0.0)
    for seed in SEEDS:
        of = problem(name, dtype, seed)
        truth = reference.attention(of.q, of.k, of.v).out[0, :, 0]
        for scheme in SCHEMES:
            out, moved = online(of, SCHEMES[scheme], emulated, CASES[name])
            squares[scheme] += float((out.double() - truth).square().mean())
            moves[scheme] += moved / len(SEEDS)
    ratio = math.sqrt(squares["integer"] / squares["ordinary"])
    moves = {scheme: round(count, 2) for scheme, count in moves.items()}
    return {"inputs": name, "format": label, "moves": moves, "ratio": round(ratio, 3)}


# --- data and page ------------------------------------------------------------------------------


def study() -> dict:
    """What docs/data/exp2-integer.json holds."""
    return {
        "what": "an integer row maximum beside the ordinary one; derived",
        "provenance": {"command": COMMAND, "date": datetime.date.today().isoformat()},
        "errors": [largest_errors(size, degree) for degree in DEGREES for size in SIZES],
        "outputs": [output_error(name, label) for name in CASES for label in FORMATS],
        "compiled": exp2_integer_kernel.costs(),
    }


def results() -> Mapping:
    """The committed numbers; FileNotFoundError outside a checkout."""
    return json.loads(RESULTS.read_text(encoding="utf-8"))


def errors_table(rows: Sequence[Mapping]) -> str:
    """Of `largest_errors`, in Markdown."""
    lines = [
        "| scaled scores up to | degree | ordinary | ordinary, within a row | integer |",
        "|---|---|---|---|---|",
    ]
    for row in rows:
        cells = " | ".join(f"{row[name]:.2e}" for name in ("ordinary", "in_row", "integer"))
        lines.append(f"| {row['size']} | {row['degree']} | {cells} |")
    return "\n".join(lines)


def outputs_table(rows: Sequence[Mapping]) -> str:
    """Of `output_error`, in Markdown; rescalings are those in the first of FORMATS."""
    lines = [
        "| inputs | threshold | rescalings, ordinary | rescalings, integer | "
        + " | ".join(FORMATS)
        + " |",
        "|---|---|---|---" + len(FORMATS) * "|---" + "|",
    ]
    for name, threshold in CASES.items():
        mine = [row for row in rows if row["inputs"] == name]
        cells = [f"`{name}`", threshold, *mine[0]["moves"].values()]
        cells += [f"{row['ratio']:.3f}" for row in mine]
        lines.append("| " + " | ".join(map(str, cells)) + " |")
    return "\n".join(lines)


def tables(data: Mapping) -> list[str]:
    """The three tables of docs/exp2.md, in Markdown, of `results`."""
    makers = (errors_table, outputs_table, exp2_integer_kernel.table)
    return [make(data[name]) for make, name in zip(makers, TABLES)]


def main() -> None:
    """Compute, write, print."""
    studies.require_checkout(RESULTS.parent)
    data = study()
    RESULTS.write_text(json.dumps(data, indent=1) + "\n", encoding="utf-8")
    print("\n\n".join(tables(data)))


if __name__ == "__main__":
    main()
