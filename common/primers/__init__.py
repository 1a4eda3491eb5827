# SPDX-License-Identifier: Apache-2.0
"""The primers' figures and interactive parts, drawn from the code that the pages speak of.

`DRAWINGS` and `INTERACTIVE` name what the fences `drawing` and `interactive` can show. An
interactive part is a static table that stands for itself, with the data its script starts from; the
scripts are in docs/js. Runs: host, while the site is built.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from ..plan import Plan
from . import ceilings, chain, dsl, pair, ring, softmax, swizzle, tmem
from .svg import Board


@dataclass(frozen=True)
class Drawing:
    """`draw` makes the figure; `source` says what its numbers are derived from.

    of_plan: makes the same figure of a kernel's plan, where there can be one.
    """

    draw: Callable[[], Board]
    caption: str
    source: str
    of_plan: Callable[[Plan], Board] | None = None


@dataclass(frozen=True)
class Interactive:
    """`settings` is what the script is given; `headings` and `rows` make the static table.

    more: tables that only a reader without scripts sees, each (caption, headings, rows).
    """

    settings: Callable[[], dict]
    headings: tuple[str, ...]
    rows: Callable[[], list[list[str]]]
    more: Callable[[], list[tuple]]
    caption: str
    source: str


DRAWINGS = {
    "softmax-tiles": Drawing(
        softmax.draw, "one row of scores, tile by tile", "the recurrence of this page"
    ),
    "sm": Drawing(
        ceilings.draw_sm,
        "one SM: what it has four times, and what once",
        "B200's figures in common/model/machine.py, limits in common/plan.py",
    ),
    "growth": Drawing(
        ceilings.draw_growth,
        "bars are relative to the H200",
        "figures and their sources in common/model/machine.py",
    ),
    "tmem-lanes": Drawing(
        tmem.draw_lanes,
        "who reaches what in tensor memory",
        "common/model/tmem.py; PTX ISA, sections 9.7.16.1 and 9.7.16.8",
    ),
    "tmem-map": Drawing(
        lambda: tmem.draw_map(tmem.plan()),
        "tensor memory of a forward kernel at head dim 128; what lies below shares columns",
        "stages/06/config.py: plan(128).tmem",
        of_plan=tmem.draw_map,
    ),
    "mbarrier-phases": Drawing(
        ring.draw,
        "two tiles through a ring of one slot, a column a step; ½: half of the tile's bytes",
        "mbarriers of the SM model, common/model/barrier.py",
    ),
    "swizzle-pattern": Drawing(
        swizzle.draw_pattern,
        "numbers are chunks of 16 bytes, rows are 128 bytes",
        "common/hopper/layouts.py: swizzle_address; 32 banks of 4 bytes",
    ),
    "descriptors": Drawing(
        swizzle.draw_descriptors,
        "a tile of K, bf16, 128-byte swizzle; S = Q Kᵀ with M = N = 128",
        "common/hopper/layouts.py: encode_smem_descriptor, encode_instruction_descriptor",
    ),
    "pair-mma": Drawing(
        pair.draw_mma,
        "an MMA of a pair, 256 × 128",
        "common/hopper/layouts.py: d_position; PTX ISA, section 9.7.16.10.5",
    ),
    "pair-swap": Drawing(
        pair.draw_swap,
        "the swap of dS",
        "paper, section 3.2.3; stages/07/backward_2cta",
    ),
    "chain": Drawing(
        chain.draw,
        "what follows from what; counts of all stages together",
        "evidence.json of the stages; common/topics.py: totals",
    ),
    "dsl-times": Drawing(dsl.draw_times, "when what happens", "docstrings of nvidia-cutlass-dsl"),
    "dsl-name": Drawing(dsl.draw_name, "a name in four parts", "docs/how-to-read.md"),
}
INTERACTIVE = {
    "online-softmax": Interactive(
        softmax.settings,
        softmax.HEADINGS,
        softmax.rows,
        softmax.more,
        "one row of scores, state after each tile, threshold 8",
        "float64, the recurrence of this page",
    ),
    "ceilings": Interactive(
        ceilings.settings,
        ceilings.HEADINGS,
        ceilings.rows,
        ceilings.more,
        "forward, 128 queries, 128 keys, head dim 128, on a B200",
        "common/roofline.py: the paper's Eq. 1-3 and 7-10",
    ),
    "mbarrier": Interactive(
        ring.settings,
        ring.HEADINGS,
        ring.rows,
        ring.more,
        "a fresh ring of two slots",
        "mbarriers of the SM model, common/model/barrier.py",
    ),
}
