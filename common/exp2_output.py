# SPDX-License-Identifier: Apache-2.0
"""What emulated exponentials do to an attention output and to gradients; all derived, on a CPU.

`python -m flash_ladder.common.exp2_output` computes docs/data/exp2-output.json and prints the
table of docs/exp2.md. Exponentials of the forward are exact or emulated bit for bit
(`exp2.exp2`), those of the backward exact, as a kernel would use the MUFU there. P and dS are
rounded to 16 bits, O and gradients too; products are float64, so that nothing else differs.
Runs: host.
"""

from __future__ import annotations

import math
import pathlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from . import exp2, float32, inputs, minimax, reference, studies

RESULTS = pathlib.Path(__file__).resolve().parent.parent / "docs" / "data" / "exp2-output.json"
GENERATORS = ("gaussian", "llm_like")
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}
EMULATED = (16, 24, 32, 48, 64, 128)  # of each 128 keys
SHOWN = (24, 64, 128)  # on the page
SIZE = {"batch": 1, "heads": 2, "seqlen_q": 256, "seqlen_k": 1024, "head_dim": 128}
ROW = 128  # keys of a tile
OUTPUTS = ("out", "dq", "dk", "dv")


@dataclass(frozen=True)
class Case:
    """An input and what is true of it; heads first, float64 but for `dtype`."""

    q: Tensor  # (h, sq, d)
    k: Tensor  # (h, sk, d)
    v: Tensor  # (h, sk, d)
    dout: Tensor  # (h, sq, d)
    dtype: torch.dtype  # of P, dS and everything stored
    truth: Mapping[str, Tensor]  # by OUTPUTS

    @property
    def scale(self) -> float:
        """Of the scores, natural units."""
        return self.q.shape[-1] ** -0.5


def case(generator: str, dtype: torch.dtype) -> Case:
    """The input of this name at SIZE, with oracle outputs."""
    problem = inputs.make(generator, **SIZE, dtype=dtype)
    tensors = (problem.q, problem.k, problem.v)
    found = reference.attention_backward(*tensors, problem.dout)
    out = reference.attention(*tensors).out
    truth = dict(zip(OUTPUTS, map(_heads, (out, found.dq, found.dk, found.dv))))
    return Case(*(_heads(x).double() for x in (*tensors, problem.dout)), dtype, truth)


def _heads(x: Tensor) -> Tensor:
    return x[0].transpose(0, 1)  # (1, s, h, d) to (h, s, d)


def emulated_columns(emulated: int, keys: int) -> np.ndarray:
    """Bool (keys,): `emulated` of each ROW keys, in pairs, spread evenly."""
    half, pairs = ROW // 2, emulated // 2
    row = [pair * pairs % half < pairs for pair in range(half) for _ in range(2)]
    return np.resize(np.array(row), keys)


def exponentials(x: np.ndarray, coefficients: Sequence[float], emulated: int) -> np.ndarray:
    """2^x: correctly rounded, but `emulated` of each ROW columns by this polynomial.

    x: float32 (..., keys), not positive.
    """
    exact = np.exp2(x.astype(np.float64)).astype(np.float32)
    columns = emulated_columns(emulated, x.shape[-1])
    exact[..., columns] = exp2.exp2(x[..., columns], coefficients)
    return exact


def outputs(of: Case, coefficients: Sequence[float], emulated: int) -> dict[str, Tensor]:
    """O and gradients, rounded to `of.dtype`, by OUTPUTS."""
    scores = of.q @ of.k.mT * (of.scale / math.log(2))  # (h, sq, sk), log2 units
    row_max = scores.amax(dim=-1, keepdim=True)
    x = float32.add(scores.float().numpy(), -row_max.float().numpy())
    p = torch.from_numpy(exponentials(x, coefficients, emulated)).double()
    row_sum = p.sum(dim=-1, keepdim=True)
    out = _rounded(_rounded(p, of) @ of.v / row_sum, of)
    lse = (row_max + row_sum.log2()).float()
    p = torch.exp2(scores.float() - lse).double()  # backward
    ds = p * (of.dout @ of.v.mT - (out * of.dout).sum(dim=-1, keepdim=True))
    p, ds = _rounded(p, of), _rounded(ds, of)
    gradients = (ds @ of.k * of.scale, ds.mT @ of.q * of.scale, p.mT @ of.dout)
    return dict(zip(OUTPUTS, (out, *(_rounded(x, of) for x in gradients))))


def _rounded(x: Tensor, of: Case) -> Tensor:
    return x.to(of.dtype).double()


def errors(of: Case, coefficients: Sequence[float], emulated: int) -> dict[str, float]:
    """RMS error of each of OUTPUTS, against the oracle."""
    found = outputs(of, coefficients, emulated)
    return {name: float((found[name] - of.truth[name]).square().mean().sqrt()) for name in OUTPUTS}


def study(degrees: Sequence[int] = minimax.DEGREES) -> list[dict]:
    """All cases: RMS errors, and how many times those without emulation they are."""
    rows = []
    for generator in GENERATORS:
        for name, dtype in DTYPES.items():
            of = case(generator, dtype)
            without = errors(of, minimax.coefficients(3), 0)
            for degree in degrees:
                for emulated in EMULATED:
                    found = errors(of, minimax.coefficients(degree), emulated)
                    ratio = {key: round(found[key] / without[key], 4) for key in OUTPUTS}
                    key = {"inputs": generator, "dtype": name, "degree": degree}
                    rows.append(key | {"emulated": emulated, "ratio": ratio, "rms": found})
    return rows


def results() -> list[dict]:
    """The committed rows; FileNotFoundError outside a checkout."""
    return studies.read_rows(RESULTS)


def worst(rows: Sequence[dict], dtype: str, degree: int, emulated: int) -> tuple[float, float]:
    """Largest ratio of O, and of any gradient, over GENERATORS."""
    key = (dtype, degree, emulated)
    found = [r["ratio"] for r in rows if (r["dtype"], r["degree"], r["emulated"]) == key]
    return max(r["out"] for r in found), max(r[name] for r in found for name in OUTPUTS[1:])


def table(rows: Sequence[dict]) -> str:
    """The table of docs/exp2.md, in Markdown."""
    lines = [
        "| degree | emulated | O, bf16 | gradients, bf16 | O, fp16 | gradients, fp16 |",
        "|---|---|---|---|---|---|",
    ]
    for degree in minimax.DEGREES:
        for emulated in SHOWN:
            cells = [x for dtype in DTYPES for x in worst(rows, dtype, degree, emulated)]
            text = " | ".join(f"{x:.3f}" for x in cells)
            lines.append(f"| {degree} | {emulated} of {ROW} | {text} |")
    return "\n".join(lines)


def main() -> None:
    """Compute, write, print."""
    studies.require_checkout(RESULTS.parent)
    rows = study()
    studies.write_rows(RESULTS, rows)
    print(table(rows))


if __name__ == "__main__":
    main()
