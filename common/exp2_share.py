# SPDX-License-Identifier: Apache-2.0
"""How many exponentials of a row should be polynomials: the SM model's answer, all derived.

`python -m flash_ladder.common.exp2_share` runs a stage's model for each share, writes
docs/data/exp2-share.json and prints the tables of docs/exp2.md. Runs: host.
"""

from __future__ import annotations

import pathlib
from collections.abc import Iterable, Iterator, Sequence
from unittest.mock import patch

from . import derived, studies
from .stage import Stage

RESULTS = pathlib.Path(__file__).resolve().parent.parent / "docs" / "data" / "exp2-share.json"
STAGE = 6  # the last stage whose softmax is like that of the published kernel
MACHINES = ("B200", "B300")
HEAD_DIMS = (128, 64)
TMA_LATENCY = (1400, 700)  # cycles: the machine's figure, and half of it as a what-if
SEQLEN, HEADS = 8192, 64  # heads of all batches: 32768 tokens of 16 heads, as in the paper
PUBLISHED = {("B200", 128): 1579}  # Q: TFLOP/s at this size, FlashAttention-4's authors' chart
CLOSE = 0.01  # shares whose time is within this of the best are as good, as far as a model can say


def shares(row: int = 128, chunk: int = 32) -> Iterator[tuple[int, ...]]:
    """Emulated pairs of each chunk of a row, the same in all chunks: none, 8 of 128, ... all."""
    for pairs in range(chunk // 2 + 1):
        yield (pairs,) * (row // chunk)


def cycles(machine: str, head_dim: int, tma_latency: int, pairs: tuple[int, ...]) -> dict:
    """One point: cycles of a key tile (both query tiles) and derived TFLOP/s."""
    stage = Stage(STAGE)
    sizes = derived.Sizes(SEQLEN, HEADS, head_dim)
    settings = (f"tma_latency={tma_latency}",)
    with patch.dict(stage.config.EMULATED, {head_dim: pairs}):
        report = derived.simulate(stage, derived.machine(machine, settings), sizes, settings)
    return {
        "machine": machine,
        "head_dim": head_dim,
        "tma_latency": tma_latency,
        "emulated": 2 * sum(pairs),
        "cycles": round(report.phases.per_tile, 1),
        "tflops": round(report.time.tflops, 1),
    }


def sweep(machines: Sequence[str] = MACHINES) -> list[dict]:
    """All points of these machines."""
    return [
        cycles(machine, head_dim, latency, pairs)
        for machine in machines
        for head_dim in HEAD_DIMS
        for latency in TMA_LATENCY
        for pairs in shares()
    ]


def results() -> list[dict]:
    """The committed points; FileNotFoundError outside a checkout."""
    return studies.read_rows(RESULTS)


def best(points: Iterable[dict]) -> dict:
    """The fastest point, the fewest emulated and the most that are as good within CLOSE."""
    points = list(points)
    fastest = min(points, key=lambda point: (point["cycles"], point["emulated"]))
    good = [p["emulated"] for p in points if p["cycles"] <= fastest["cycles"] * (1 + CLOSE)]
    return fastest | {"fewest": min(good), "most": max(good)}


def table(points: Sequence[dict]) -> str:
    """The table of docs/exp2.md, in Markdown."""
    rows = [
        "| machine | head dim | TMA latency | none | fastest | emulated | as good | all "
        "| TFLOP/s at the fastest |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for machine in MACHINES:
        for head_dim in HEAD_DIMS:
            for latency in TMA_LATENCY:
                key = (machine, head_dim, latency)
                rows.append(_row(key, [p for p in points if _key(p) == key]))
    return "\n".join(rows)


def _key(point: dict) -> tuple:
    return point["machine"], point["head_dim"], point["tma_latency"]


def _row(key: tuple, points: Sequence[dict]) -> str:
    by_share = {point["emulated"]: point for point in points}
    found = best(points)
    cells = (
        *key,
        f"{by_share[0]['cycles']:.0f}",
        f"{found['cycles']:.0f}",
        f"{found['emulated']} of 128",
        f"{found['fewest']} to {found['most']}",
        f"{by_share[128]['cycles']:.0f}",
        f"{found['tflops']:.0f}",
    )
    return "| " + " | ".join(map(str, cells)) + " |"


# --- figure -------------------------------------------------------------------------------------


def plot_rows() -> list[dict]:
    """Cycles of a key tile over the share, at the machines' own latency."""
    return [
        {
            "emulated": point["emulated"],
            "cycles": point["cycles"],
            "case": f"{point['machine']}, head dim {point['head_dim']}",
        }
        for point in results()
        if point["tma_latency"] == TMA_LATENCY[0]
    ]


def chart():
    """An altair chart of `plot_rows`."""
    alt = studies.require_altair()
    cases = [f"{machine}, head dim {d}" for d in HEAD_DIMS for machine in MACHINES]
    return studies.line_plot(
        plot_rows(),
        f"Cycles of a key tile over the emulated share, stage {STAGE:02d}",
        "Derived by the SM model, not measured; both query tiles of a CTA.",
        alt.X("emulated:Q", title="emulated exponentials of 128"),
        alt.Y("cycles:Q", title="cycles", scale=alt.Scale(zero=False)),
        ("case", dict(zip(cases, ("#0072b2", "#56b4e9", "#d55e00", "#e69f00")))),
        2 * (studies.SOLID, studies.DASHED),
        point=True,
    )


def main() -> None:
    """Compute, write, print."""
    studies.require_checkout(RESULTS.parent)
    points = sweep()
    studies.write_rows(RESULTS, points)
    print(table(points))


if __name__ == "__main__":
    main()
