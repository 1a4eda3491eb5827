# SPDX-License-Identifier: Apache-2.0
"""How often the correction rescales, by input and threshold: the rule on a CPU, and on a GPU.

The rule (paper, section 3.1.4): the maximum that a row uses stays while the true one exceeds it by
at most a threshold; a warp leaves O alone when no row of it moves. `python -m
flash_ladder.common.rescaling` prints the table of stage 06's page; with `gpu`, on a Hopper GPU, it
executes the kernel, counts in its logs and writes docs/data/rescaling.json. Runs: host.
"""

from __future__ import annotations

import argparse
import datetime
import functools
import json
import math
import pathlib
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from . import inputs, studies
from .hopper.log import Log
from .hopper.steps import steps
from .plan import Plan

RESULTS = pathlib.Path(__file__).resolve().parent.parent / "docs" / "data" / "rescaling.json"
COMMAND = "python -m flash_ladder.common.rescaling"
STAGE = 6
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


# --- executed -----------------------------------------------------------------------------------


def left_alone_in(log: Log, plan: Plan) -> list[bool]:
    """For each warp of CORRECTION, query tile and key tile but the first: no store to O there."""
    (role,) = (role for role in plan.roles if role.name == "CORRECTION")
    found = []
    for warp in role.warps:
        touched: dict[str, bool] = {}
        turns: dict[str, list[bool]] = {}
        for step in (step for step in steps(log, plan) if step.warp == warp):
            tile = step.what[-1:]
            if step.verb == "tmem.st":
                touched[tile] = True
            elif step.verb == "arrive" and step.what.startswith("o_rescaled"):
                turns.setdefault(tile, []).append(not touched.pop(tile, False))
        found += [alone for turn in turns.values() for alone in turn[1:]]
    return found


def measure(device: str = "cuda") -> dict:
    """What docs/data/rescaling.json holds: counts from the logs of STAGE's kernel; Hopper only."""
    from .. import load
    from .contract_gpu import executed_logs
    from .verification import driver

    stage = load(STAGE)
    plan = stage.config.plan(SIZE["head_dim"])
    rows = {}
    for name in GENERATORS:
        problem = inputs.make(name, **SIZE, device=device)
        alone = [x for log in executed_logs(stage, problem) for x in left_alone_in(log, plan)]
        rows[name] = {"warps": len(alone), "left_alone": sum(alone)}
    return {
        "what": f"warps and key tiles of stage {STAGE:02d} whose O was left alone, from logs",
        "provenance": {
            "command": f"{COMMAND} gpu",
            "date": datetime.date.today().isoformat(),
            "gpu": torch.cuda.get_device_name(),
            "driver": driver(),
        },
        "executed": rows,
    }


def results() -> Mapping:
    """The committed counts; FileNotFoundError outside a checkout."""
    return json.loads(RESULTS.read_text(encoding="utf-8"))


def table(executed: Mapping[str, Mapping]) -> str:
    """The table of stages/06/README.md, in Markdown. executed: of `results`, by generator."""
    lines = [
        "| share left alone | warps, threshold 0 | warps, threshold 8 | warps, executed (M) "
        "| rows, threshold 8 |",
        "|---|---|---|---|---|",
    ]
    for name in GENERATORS:
        warps, rows = left_alone(_problem(name), 8)
        ran = executed[name]["left_alone"] / executed[name]["warps"]
        shares = (left_alone(_problem(name), 0)[0], warps, ran, rows)
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


def main(arguments: Sequence[str] | None = None) -> None:
    """The command line; `--help` says what it can do."""
    parser = argparse.ArgumentParser(prog=COMMAND, description="How much rescaling is skipped.")
    parser.add_argument("what", nargs="?", choices=("table", "gpu"), default="table")
    parser.add_argument("--out", type=pathlib.Path, default=RESULTS, help="where `gpu` writes")
    asked = parser.parse_args(arguments)
    if asked.what == "gpu":
        studies.require_checkout(asked.out.parent)
        asked.out.write_text(json.dumps(measure(), indent=1) + "\n", encoding="utf-8")
        print(asked.out)
    else:
        print(table(results()["executed"]))


if __name__ == "__main__":
    main()
