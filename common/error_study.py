# SPDX-License-Identifier: Apache-2.0
"""How much of an output's error each rounding of a forward makes by itself; derived, on a CPU.

`python -m flash_ladder.common.error_study` computes docs/data/errors.json, for docs/numerics.md.
All else is float64 on the inputs of `exp2_output`. Runs: host, seconds.
"""

from __future__ import annotations

import math
import pathlib

import torch
from torch import Tensor

from . import exp2_output, float32, minimax, numerics, reference, studies
from . import inputs as generators

RESULTS = pathlib.Path(__file__).resolve().parent.parent / "docs" / "data" / "errors.json"
COMMAND = "python -m flash_ladder.common.error_study"
EMULATED = 28  # of 128 exponentials, as the stages from 05 on have it at head dim 128
DEGREE = 3
SOURCES = {  # column of the study: what alone is rounded
    "scores": "scores, their maximum and exponentials in float32",
    "emulated": f"the same, {EMULATED} of 128 exponentials emulated",
    "p": "P in 16 bits",
    "out": "O in 16 bits",
    "all": "all of these",
    "torch": "same-precision torch",
}


def outputs(of: exp2_output.Case, problem: generators.Problem) -> dict[str, Tensor]:
    """O by SOURCES, float64, (h, sq, d)."""
    scores = of.q @ of.k.mT * (of.scale / math.log(2))  # log2 units
    row_max = scores.amax(-1, keepdim=True)
    x = float32.add(scores.float().numpy(), -row_max.float().numpy())
    coefficients = minimax.coefficients(DEGREE)
    narrow = lambda y: y.to(of.dtype).double()

    def attention(p: Tensor, product: Tensor) -> Tensor:
        return product @ of.v / p.sum(-1, keepdim=True)

    exact = torch.exp2(scores - row_max)
    single, emulated = (
        torch.from_numpy(exp2_output.exponentials(x, coefficients, count)).double()
        for count in (0, EMULATED)
    )
    by_torch, _ = reference.same_precision(problem.q, problem.k, problem.v)
    return {
        "scores": attention(single, single),
        "emulated": attention(emulated, emulated),
        "p": attention(exact, narrow(exact)),
        "out": narrow(of.truth["out"]),
        "all": narrow(attention(emulated, narrow(emulated))),
        "torch": by_torch[0].transpose(0, 1).double(),
    }


def study() -> list[dict]:
    """RMS errors by SOURCES, and the rms of half an ulp, for each input and dtype; two digits."""
    rows = []
    for generator in exp2_output.GENERATORS:
        for name, dtype in exp2_output.DTYPES.items():
            of = exp2_output.case(generator, dtype)
            problem = generators.make(generator, **exp2_output.SIZE, dtype=dtype)
            found = {
                source: (out - of.truth["out"]).square().mean().sqrt().item()
                for source, out in outputs(of, problem).items()
            }
            half = numerics.half_ulp(of.truth["out"], dtype).square().mean().sqrt().item()
            found = {source: float(f"{x:.1e}") for source, x in (found | {"half": half}).items()}
            rows.append({"inputs": generator, "dtype": name} | found)
    return rows


def results() -> list[dict]:
    """The committed rows; FileNotFoundError outside a checkout."""
    return studies.read_rows(RESULTS)


def main() -> None:
    """Compute and write."""
    studies.require_checkout(RESULTS.parent)
    studies.write_rows(RESULTS, study())
    print(RESULTS)


if __name__ == "__main__":
    main()
