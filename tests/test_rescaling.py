# SPDX-License-Identifier: Apache-2.0
"""Stage 06's rule: when a row's maximum moves, what is skipped, and that nothing overflows."""

import math
from dataclasses import replace

import pytest
import torch
from flash_ladder import load
from flash_ladder.common import inputs, numerics, reference, rescaling
from flash_ladder.common.hopper.log import Kind

from tests.recorded_logs import INDEX, log_of, plan_of

OLD, STAGE = load(5), load(6)
CONFIG = STAGE.config
LOG2_E = math.log2(math.e)


def _problem(name: str, dtype=torch.bfloat16, seqlen_k: int = 1024):
    sizes = {"batch": 1, "seqlen_q": 256, "seqlen_k": seqlen_k, "heads": 1, "head_dim": 64}
    return inputs.make(name, dtype=dtype, **sizes)


def _run(stage, problem):
    return stage.simulate(problem.q, problem.k, problem.v, softmax_scale=problem.softmax_scale)


@pytest.mark.parametrize("name", ["gaussian", "llm_like", "ascending_max", "dominant_key"])
def test_a_threshold_of_zero_is_stage_05_bit_for_bit(name, monkeypatch):
    problem = _problem(name)
    monkeypatch.setattr(CONFIG, "THRESHOLD", 0.0)
    old, new = _run(OLD, problem), _run(STAGE, problem)
    assert torch.equal(old.out, new.out) and torch.equal(old.lse, new.lse)


@pytest.mark.parametrize("name", ["gaussian", "llm_like", "ascending_max", "descending_max"])
def test_a_warp_touches_o_when_one_of_its_rows_moved(name):
    problem = _problem(name)
    moves = rescaling.moves(problem, CONFIG.THRESHOLD)[1:]  # at the first tile there is no O yet
    wanted = int(moves.view(len(moves), -1, 32).any(dim=2).sum())
    (notes,) = _run(STAGE, problem).notes
    fences = [n for n in notes if (n.agent, n.verb) == ("CORRECTION", "fence")]
    before = [n for n in fences if n.what == "wait.st"]  # one at the end of each rescaling
    touched = sum(4 if n.quarter is None else 1 for n in before)
    assert touched == wanted


def _skipped(name: str, threshold: float) -> float:
    """Share of (warp, key tile) pairs in which no row moves."""
    return rescaling.left_alone(_problem(name, seqlen_k=2048), threshold)[0]


def test_how_much_is_skipped():
    assert _skipped("gaussian", 8.0) == _skipped("descending_max", 8.0) == 1
    assert _skipped("ascending_max", 8.0) == 0
    assert _skipped("llm_like", 8.0) > 0.8  # the authors say about 90 % (paper 3.1.4)
    assert _skipped("llm_like", 0.0) < _skipped("llm_like", 8.0)  # the vote alone does less
    assert _skipped("gaussian", 0.0) < 0.5


def _climbing(dtype, step: float) -> inputs.Problem:
    """Scores of a key tile all alike, `step` in log2 units above those of the tile before."""
    problem = _problem("gaussian", dtype)
    q, k = torch.zeros_like(problem.q), torch.zeros_like(problem.k)
    q[..., 0] = 8.0
    tiles = k.shape[1] // 128
    scale = problem.softmax_scale or 64**-0.5
    heights = torch.arange(tiles, dtype=torch.float32).flip(0).repeat_interleave(128)
    k[0, :, 0, 0] = (heights * step / (8.0 * scale * LOG2_E)).to(dtype)
    return inputs.Problem(q, k, problem.v, problem.dout, softmax_scale=scale)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("step", [7.9, 8.1])
def test_maxima_that_climb_by_just_less_or_more_than_the_threshold(dtype, step):
    """Less: P reaches 2**7.9 and never moves again until it must; fp16 holds 65504."""
    problem = _climbing(dtype, step)
    q, k, scale = problem.q, problem.k, problem.softmax_scale
    run = _run(STAGE, problem)
    truth = reference.attention(q, k, problem.v, softmax_scale=scale)
    yardstick = reference.same_precision(q, k, problem.v, softmax_scale=scale)
    assert run.out.isfinite().all()
    numerics.compare(run.out, truth.out, yardstick[0], name="out").check()
    assert torch.allclose(run.lse.double(), truth.lse, rtol=1e-5)


def test_no_probability_exceeds_the_bound(monkeypatch):
    """Maxima that climb by 7.9 a tile never move again: P comes close to 2**8, in fp16 too."""
    assert 2.0**CONFIG.THRESHOLD < torch.finfo(torch.float16).max
    seen, made = [], STAGE.model.exponentials

    def watched(*arguments):
        p = yield from made(*arguments)
        seen.append(float(p.max()))
        return p

    monkeypatch.setattr(STAGE.model, "exponentials", watched)
    _run(STAGE, _climbing(torch.float16, 7.9))
    assert 200 < max(seen) <= 2.0**CONFIG.THRESHOLD * (1 + 2.0**-10)


def test_the_page_shows_what_is_skipped():
    page = (STAGE.folder / "README.md").read_text(encoding="utf-8")
    executed = rescaling.results()["executed"]
    assert rescaling.table(executed) in page, "python -m flash_ladder.common.rescaling"


@pytest.mark.parametrize("name", rescaling.GENERATORS)
def test_the_kernel_skipped_what_the_rule_says(name):
    """Up to a pair or two, whose step lies within rounding of the threshold."""
    ran = rescaling.results()["executed"][name]
    share, _ = rescaling.left_alone(rescaling._problem(name), CONFIG.THRESHOLD)
    assert ran["warps"] == 2 * 2 * 4 * 31  # heads, query tiles, warps, key tiles
    assert abs(ran["left_alone"] - share * ran["warps"]) <= 2


def test_the_curves_rise_with_the_threshold():
    for name in rescaling.GENERATORS:
        shares = [row["share"] for row in rescaling.plot_rows() if row["inputs"] == name]
        assert len(shares) == len(rescaling.THRESHOLDS) and shares == sorted(shares)


def test_a_row_of_nan_always_moves():
    problem = _problem("gaussian")
    problem.q[0, 0] = math.nan
    assert rescaling.moves(problem, 8.0)[:, 0, 0].all()
    assert not rescaling.moves(problem, 8.0)[1:, 0, 1:].any()


def test_a_log_shows_what_was_left_alone():
    """In stage 04 every warp stores O at every key tile; then one of them does not."""
    log, plan = log_of("04-grid"), plan_of("04-grid")
    (role,) = (role for role in plan.roles if role.name == "CORRECTION")
    pairs = INDEX["04-grid"]["seqlen_k"] // 128 - 1
    assert rescaling.left_alone_in(log, plan) == [False] * (4 * CONFIG.Q_TILES * pairs)
    warp = role.warps[2]
    stores = [at for at, e in enumerate(log.events) if (e.kind, e.warp) == (Kind.STORE_TMEM, warp)]
    for gone, tiles in ((stores, CONFIG.Q_TILES * pairs), (stores[-4:], 1)):  # 4: a row of O
        kept = tuple(e for at, e in enumerate(log.events) if at not in gone)
        assert rescaling.left_alone_in(replace(log, events=kept), plan).count(True) == tiles
