# SPDX-License-Identifier: Apache-2.0
"""The masks and lengths of the contract, and that it notices what is wrong with them. No GPU."""

import itertools
from dataclasses import replace

import pytest
import torch
from flash_ladder import load
from flash_ladder.common import contract, judging, mask_cases, mutation, reference
from flash_ladder.common.compile import CompileKey
from flash_ladder.common.contract import Case

CASE = Case("gaussian", "bfloat16", 64, 200, 150, 3, 2)


def _problem(**changes):
    return replace(CASE, **changes).problem()


# ---- recipes -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "options"),
    [
        ("", {}),
        ("causal", {"causal": True}),
        ("(-5,8)", {"window_size": (-5, 8)}),
        ("causal(128,-1)", {"causal": True, "window_size": (128, -1)}),
    ],
)
def test_a_mask_as_text(text, options):
    assert mask_cases.mask_options(text) == options


@pytest.mark.parametrize("text", ["(1)", "causal ", "(1,2)causal", "(1,None)", "left"])
def test_other_texts_are_refused(text):
    with pytest.raises(ValueError, match="is no mask; examples: ''"):
        mask_cases.mask_options(text)


def test_used_lengths_have_nothing_finite_beyond():
    problem = _problem(lengths="used")
    for side, names in (("q", ("q", "dout")), ("k", ("k", "v"))):
        used = problem.options[f"seqused_{side}"].tolist()
        assert {0, 1, getattr(problem, side).shape[1]} == set(used)
        for name, (b, length) in itertools.product(names, enumerate(used)):
            rows = getattr(problem, name)[b]
            assert rows[:length].isfinite().all() and not rows[length:].isfinite().any()


@pytest.mark.parametrize("lengths", ["packed", "packed_used"])
def test_rows_between_packed_sequences_are_not_finite(lengths):
    problem = _problem(lengths=lengths)
    for side in "qk":
        rows = getattr(problem, side)
        bounds = problem.options[f"cu_seqlens_{side}"].tolist()
        used = problem.options.get(f"seqused_{side}", torch.tensor(bounds).diff()).tolist()
        live = torch.zeros(len(rows), dtype=torch.bool)
        for start, length in zip(bounds, used):
            live[start : start + length] = True
        assert torch.equal(rows.isfinite().flatten(1).all(1), live)
        assert bounds[0] == mask_cases.STRAY and not live[-1]


def test_the_middle_sequence_is_nan():
    problem = _problem(lengths="nan_sequence")
    start, stop = problem.options["cu_seqlens_k"].tolist()[1:3]
    bad = ~problem.k.isfinite().flatten(1).any(1)
    assert bad[start:stop].all() and bad.sum() == stop - start + 2 * mask_cases.STRAY


@pytest.mark.parametrize("seqlen", [704, 192])
def test_logits_near_minus_120(seqlen):
    problem = replace(CASE, generator=mask_cases.LOW, seqlen_q=seqlen, seqlen_k=seqlen).problem()
    q, k = (x.double().transpose(1, 2) for x in (problem.q, problem.k))
    scores = q @ k.mT / 64**0.5
    assert -126 < scores.min() and scores.max() < -114


def test_a_problem_is_the_same_every_time():
    for lengths in mask_cases.USUAL:
        one, again = (_problem(lengths=lengths) for _ in range(2))
        assert str(one.options) == str(again.options)


# ---- cases ---------------------------------------------------------------------------------


def test_stages_without_masks_have_no_cases_of_them():
    for case in contract.host_cases(load(7)) + contract.gpu_cases(load(7)):
        assert not case.mask and not case.lengths


@pytest.mark.parametrize("tier", [contract.host_cases, contract.gpu_cases])
def test_masks_meet_lengths_and_kernels(tier):
    stage = load(8)
    cases = tier(stage)
    assert len(cases) == len({str(case) for case in cases}) >= 40
    kernels = {
        (source.name, *pair)
        for source in (stage, *stage.backwards)
        for pair in itertools.product(*contract._configurations(source))
    }
    met = {(case.mask, case.lengths) for case in cases}
    assert set(itertools.product(mask_cases.MASKS, mask_cases.USUAL)) <= met
    for factor, values in (("mask", mask_cases.MASKS), ("lengths", mask_cases.USUAL)):
        met = {(getattr(c, factor), (c.part, c.dtype, c.head_dim)) for c in cases}
        assert set(itertools.product(values, kernels)) <= met


def test_random_cases_need_few_kernels():
    stage = load(8)
    sources = stage, *stage.backwards
    cases = [case for source in sources for case in contract.random_cases(source)]
    assert len(cases) >= 150 and cases[:5] == contract.random_cases(stage)[:5]
    assert max(max(case.seqlen_q, case.seqlen_k) for case in cases) <= 1500
    around = {
        source.name: (stage.part("preprocess"), stage.part("postprocess")) for source in sources[1:]
    }
    keys = {
        CompileKey.of(source, "sm_100a", case.dtype, case.head_dim)
        for case in cases
        for source in (stage, stage.part(case.part), *around.get(case.part, ()))
    }
    assert len(keys) <= 40
    assert {case.lengths for case in cases} == set(mask_cases.USUAL)
    assert len({case.mask for case in cases}) > 50


def test_named_cases_have_every_source():
    cases = contract.named_cases(load(8))
    assert len(cases) == 3 * len(mask_cases.NAMED)
    (issue, *_) = cases
    problem = issue.problem()
    assert problem.options["cu_seqlens_q"].tolist() == [0, 0, 1208, 2048, 2048]
    assert problem.options["cu_seqlens_k"].tolist() == [0, 2538, 4280, 5120, 8192]
    assert len(problem.q) == 2048 and len(problem.k) == 8192


@pytest.mark.parametrize(
    "source", [load(8), *load(8).backwards], ids=lambda source: source.name or "forward"
)
def test_mutants_meet_masks_on_both_sides_and_none_between(source):
    for head_dim in source.config.ENVELOPE.head_dims:
        problems = mutation.stage_problems(source, head_dim)
        problem = problems["masked"]
        sizes = problem.q.shape[1], problem.k.shape[1]
        seen = reference.visibility(1, *sizes, **problem.options)[0]
        if source.kind == "backward":
            seen = seen.T
        assert len(seen) % 128 == 0
        tiles = seen.unflatten(1, (-1, 128)).all((0, 2)), seen.unflatten(1, (-1, 128)).any(2).any(0)
        whole, visited = (row.nonzero().flatten().tolist() for row in tiles)
        assert whole and visited[0] < whole[0] and whole[-1] < visited[-1]
    assert "masked" not in mutation.stage_problems(load(7))


# ---- judging -------------------------------------------------------------------------------


def _right(problem):
    """Results as the yardstick has them, in the layout of the problem."""
    dense = judging._Dense.of(problem)
    given = dense.problem
    tensors, options = (given.q, given.k, given.v), judging._options(given)
    out, lse = reference.same_precision(*tensors, **options)
    made = reference.same_precision_backward(*tensors, given.dout, **options)
    if dense.rows_q is None:
        return out, lse, made.dq, made.dk, made.dv
    back = lambda x, rows, like: torch.zeros_like(like).index_put(
        (rows[rows < len(like)],), x[rows < len(like)]
    )
    q, k = problem.q, problem.k
    lse_rows = back(lse.transpose(1, 2), dense.rows_q, q[..., 0].float()).T.contiguous()
    unused = judging._unused(dense.rows_q, len(q))
    lse_rows[:, unused] = -torch.inf
    gradients = (
        back(x, rows, like)
        for x, rows, like in (
            (made.dq, dense.rows_q, q),
            (made.dk, dense.rows_k, k),
            (made.dv, dense.rows_k, k),
        )
    )
    return back(out, dense.rows_q, q), lse_rows, *gradients


def _verdicts(problem, out, lse, *gradients):
    return judging.judge(problem, out, lse) + judging.judge_gradients(problem, *gradients)


@pytest.mark.parametrize("lengths", mask_cases.USUAL)
@pytest.mark.parametrize("mask", ["", "causal", "(100,20)", "(-5,3)"])
def test_a_right_result_passes(mask, lengths):
    problem = _problem(mask=mask, lengths=lengths)
    assert [row.ok for row in _verdicts(problem, *_right(problem))] == [True] * 5


@pytest.mark.parametrize("lengths", mask_cases.USUAL[:4])
def test_another_mask_fails(lengths):
    right = _right(_problem(mask="causal", lengths=lengths))
    verdicts = _verdicts(_problem(mask="(-1,1)", lengths=lengths), *right)
    assert not all(row.ok for row in verdicts)


@pytest.mark.parametrize("tensor", range(5))
@pytest.mark.parametrize("lengths", ["used", "packed", "packed_used"])
def test_a_trace_in_rows_of_nobody_fails(lengths, tensor):
    problem = _problem(lengths=lengths)
    results = [x.clone() for x in _right(problem)]
    there = results[tensor]
    nobody = problem.q if tensor < 3 else problem.k
    bad = ~nobody.isfinite().flatten(1 if nobody.dim() == 3 else 2).any(-1)
    where = tuple(bad.nonzero()[0].tolist())
    if tensor == 1:
        where = (*where[:-1], slice(None), where[-1])
    there[where] = 1e-30
    verdicts = _verdicts(problem, *results)
    assert [row.ok for row in verdicts] == [number != tensor for number in range(5)]
