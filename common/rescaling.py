# SPDX-License-Identifier: Apache-2.0
"""How often the correction rescales, by input and threshold; all derived, on a CPU.

The rule (paper, section 3.1.4): the maximum that a row uses stays while the true one exceeds it by
at most a threshold; a warp leaves O alone when no row of it moves. `python -m
flash_ladder.common.rescaling` prints the table of stage 06's page. Runs: host.
"""

from __future__ import annotations

import functools
import math

import torch
from torch import Tensor

from . import inputs, studies

GENERATORS = ("gaussian", "llm_like", "dominant_key", "descending_max", "ascending_max")
SIZE = {"batch": 1, "heads": 2, "seqlen_q": 256, "seqlen_k": 4096, "head_dim": 128}
TILE_N = 128  # keys of a tile
WARP = 32  # rows of a warp
LOG2_E = math.log2(math.e)
THRESHOLDS = tuple(range(0, 17))  # log2


def moves(problem: inputs.Problem, threshold: float) -> Tensor:
    """Bool (key tiles, h, sq): whether a row's reference moves there, keys from the last on.

    threshold: log2 units. problem: one batch, as many query as kv heads. The first tile always
    moves, and has no O to rescale.
    """
    scale = (problem.softmax_scale or problem.q.shape[-1] ** -0.5) * LOG2_E
    q, k = (x[0].transpose(0, 1).float() for x in (problem.q, problem.k))  # (h, s, d)
    scores = q @ k.mT
    row_max = torch.full(scores.shape[:2], -math.inf)
    found = []
    for tile in reversed(scores.split(TILE_N, dim=-1)):
        new_max = torch.maximum(row_max, tile.amax(dim=-1))
        keep = (row_max - new_max) * scale >= -threshold  # false for NaN, as in the kernel
        row_max = torch.where(keep, row_max, new_max)
        found.append(~keep)
    return torch.stack(found)


def left_alone(problem: inputs.Problem, threshold: float) -> tuple[float, float]:
    """Shares of (key tile, warp) and of (key tile, row) without rescaling; first tiles apart."""
    found = moves(problem, threshold)[1:]
    warps = found.view(*found.shape[:2], -1, WARP).any(dim=-1)
    return 1 - float(warps.float().mean()), 1 - float(found.float().mean())


@functools.cache
def _problem(name: str) -> inputs.Problem:
    return inputs.make(name, **SIZE)


def table() -> str:
    """The table of stages/06/README.md, in Markdown."""
    lines = [
        "| share left alone | warps, threshold 0 | warps, threshold 8 | rows, threshold 8 |",
        "|---|---|---|---|",
    ]
    for name in GENERATORS:
        shares = (left_alone(_problem(name), 0)[0], *left_alone(_problem(name), 8))
        lines.append(f"| `{name}` | " + " | ".join(f"{100 * x:.3g} %" for x in shares) + " |")
    return "\n".join(lines)


# --- figure -------------------------------------------------------------------------------------


@functools.cache
def plot_rows() -> list[dict]:
    """Share of warps that leave O alone, over the threshold, by input."""
    return [
        {"inputs": name, "threshold": t, "share": round(left_alone(_problem(name), t)[0], 4)}
        for name in GENERATORS
        for t in THRESHOLDS
    ]


def chart():
    """An altair chart of `plot_rows`."""
    alt = studies.require_altair()
    return studies.line_plot(
        plot_rows(),
        "Warps that leave O alone, over the threshold",
        "Derived, not measured: the rule applied to scores computed on a CPU.",
        alt.X("threshold:Q", title="threshold, log2"),
        alt.Y("share:Q", title="share of warps and key tiles", axis=alt.Axis(format="%")),
        ("inputs", dict(zip(GENERATORS, ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#999999")))),
        (studies.SOLID, studies.DASHED, studies.DOTTED, [4, 2, 1, 2], [8, 2]),
        point=True,
    )


if __name__ == "__main__":
    print(table())
