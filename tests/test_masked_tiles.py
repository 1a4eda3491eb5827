# SPDX-License-Identifier: Apache-2.0
"""Which tiles stage 08 visits and which of them it masks: its model, and the compiled kernels."""

import itertools
import math
import random

import pytest
import torch
from flash_ladder import load
from flash_ladder.common.hopper.steps import steps
from flash_ladder.common.inputs import make
from flash_ladder.common.masks import mask_of
from flash_ladder.common.model import OPEN
from flash_ladder.common.model.sequences import Sequence

from tests.recorded_logs import log_of, names_of, place_of, plan_of, problem_of

MODEL = load(8).model
TILE = 128


def _visible(sequence: Sequence, window, rows: range) -> torch.Tensor:
    """(rows, len_k) bool by the rule; rows beyond the sequence have positions as well."""
    position = torch.tensor(rows)[:, None] + sequence.len_k - sequence.len_q
    key = torch.arange(sequence.len_k)
    return (key >= position - window[0]) & (key <= position + window[1])


@pytest.mark.parametrize("seed", range(8))
def test_key_tiles_against_every_pair(seed):
    """Visited: from the first to the last that some query sees. Unmasked: all that may be."""
    rng = random.Random(seed)
    for _ in range(60):
        sequence = Sequence(0, rng.randint(1, 700), 0, rng.randint(1, 700))
        window = tuple(rng.choice((OPEN, 0, rng.randint(-400, 400))) for _ in range(2))
        for first_row in range(0, sequence.len_q, 2 * TILE):
            _check_tiles(sequence, window, first_row)


def _check_tiles(sequence: Sequence, window, first_row: int):
    own = range(first_row, min(first_row + 2 * TILE, sequence.len_q))
    seen = _visible(sequence, window, own).any(0).nonzero().flatten().tolist()
    tiles = MODEL.visited_tiles(first_row, 2 * TILE, sequence, window)
    assert tiles == ((seen[0] // TILE, seen[-1] // TILE + 1) if seen else (0, 0))
    for row in (first_row, first_row + TILE):
        n_low, n_high = MODEL.unmasked_tiles(row, TILE, sequence, window, *tiles)
        assert tiles[0] <= n_low <= n_high <= tiles[1]
        visible = _visible(sequence, window, range(row, row + TILE))
        for tile in range(*tiles):
            keys = visible[:, tile * TILE : (tile + 1) * TILE]
            assert (n_low <= tile < n_high) == (keys.shape[1] == TILE and bool(keys.all()))


def _masked(rows: int, keys: int, **options) -> list[set]:
    """Key tiles that each query tile of the first CTA masks, and how many the CTA visits."""
    made = make(
        "gaussian", batch=1, seqlen_q=rows, seqlen_k=keys, heads=1, head_dim=64,
        dtype=torch.bfloat16,
    )  # fmt: skip
    run = load(8).simulate(made.q, made.k, made.v, max_ctas=1, **options)
    tiles = [
        {span.tile for span in run.trace if span.op == "mask" and span.role == f"SOFTMAX{tile}"}
        for tile in range(2)
    ]
    visited = {span.tile for span in run.trace if span.role == "SOFTMAX0" and span.tile >= 0}
    return [*tiles, len(visited)]


def test_only_tiles_on_an_edge_are_masked():
    assert _masked(256, 1024) == [set(), set(), 8]
    assert _masked(256, 1000) == [{7}, {7}, 8]
    assert _masked(256, 1024, causal=True) == [{6, 7}, {7}, 8]
    assert _masked(256, 1024, window_size=(512, 0)) == [{2, 6, 7}, {2, 3, 7}, 6]
    assert _masked(256, 1024, window_size=(None, -128)) == [{5, 6}, {6}, 7]


def test_a_window_without_keys_does_no_work():
    q = torch.randn(1, 256, 1, 128).bfloat16()
    bad = torch.full_like(q, math.nan)
    run = load(8).simulate(q, bad, bad, window_size=(-60, 40))
    assert not any(run.cta_cycles) and not run.out.any() and (run.lse == -math.inf).all()
    for part in load(8).backwards:
        given = {"out": torch.zeros_like(q), "lse": torch.full((1, 1, 256), -math.inf)}
        run = part.simulate(q, bad, bad, q, **given, window_size=(-60, 40))
        assert not any(run.cta_cycles) and not any(x.any() for x in (run.dq, run.dk, run.dv))


LOGS = [name for tag in ("08", *(x.tag for x in load(8).backwards)) for name in names_of(tag)]


@pytest.mark.parametrize("name", LOGS)
def test_the_compiled_kernel_masks_the_same_tiles(name):
    """The loop without a mask is another place of the PTX than those with one before and after.

    A log says how often each was gone through; a dense problem of whole tiles takes the first.
    """
    tag = name.rpartition("-")[0].replace("-", "/")
    dense = _turns(f"{name.rpartition('-')[0]}-least")
    plain = {line for turns in dense for line, _ in turns}  # each role has its own
    for turns, wanted in zip(_turns(name), _wanted(name, tag), strict=True):
        assert [(line in plain, count) for line, count in turns] == [
            (not masked, count) for masked, count in wanted if count
        ]


def _turns(name: str) -> list[list[tuple[int, int]]]:
    """Of the first warp of each role that masks: (line of its wait for S, how often in a row)."""
    waits: dict[str, list[int]] = {}
    for step in steps(log_of(name), plan_of(name)):
        role, _, warp = step.agent.partition(".")
        if warp in ("0", "0@0", "0@1") and step.op.startswith("wait s_full"):
            if role.startswith(("SOFTMAX", "COMPUTE")):
                waits.setdefault(step.agent, []).append(step.line)
    return [
        [(line, len(list(same))) for line, same in itertools.groupby(waits[agent])]
        for agent in sorted(waits)
    ]


def _wanted(name: str, tag: str) -> list[list[tuple[bool, int]]]:
    """The same by the model: (whether masked, tiles), in the order of `_turns`."""
    problem, place = problem_of(name), place_of(name)
    mask = mask_of(problem.q, problem.k, **problem.options)
    sequence, window = mask.sequences().rows[place.batch], (mask.left, mask.right)
    first = place.block * place.rows
    if tag == "08":
        tiles = MODEL.visited_tiles(first, place.rows, sequence, window)
        unmasked = [
            MODEL.unmasked_tiles(first + own, TILE, sequence, window, *tiles) for own in (0, TILE)
        ]
        parts = lambda low, high: (tiles[1] - high, high - low, low - tiles[0])
    else:
        tiles = MODEL.visited_queries(first, place.rows, sequence, window)
        ranks = range(0, place.rows, TILE)
        unmasked = [
            MODEL.unmasked_queries(first + own, TILE, sequence, window, *tiles) for own in ranks
        ] * 2  # COMPUTE0 and COMPUTE1
        parts = lambda low, high: (low - tiles[0], high - low, tiles[1] - high)
    return [list(zip((True, False, True), parts(*row))) for row in unmasked]
