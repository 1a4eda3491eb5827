# SPDX-License-Identifier: Apache-2.0
"""The contract itself: it passes stage 01 and fails on planted faults."""

from dataclasses import replace

import pytest
import torch
from flash_ladder import load
from flash_ladder.common import (
    contract,
    contract_gpu,
    facts,
    inputs,
    judging,
    numerics,
    poisoned,
    reference,
)
from flash_ladder.common.compile import compile_stage
from flash_ladder.common.model import Sm
from flash_ladder.common.plan import Arrival, Barrier, Plan, Role, TmemRegion
from flash_ladder.common.sass import MissingTool

CASE = contract.Case("gaussian", "bfloat16", 64, 128, 256, 1, 2)
PTX = """.version 8.8
.target sm_100a
.address_size 64
.extern .shared .align 1024 .b8 smem[];
.visible .entry kernel()
.reqntid 256, 1, 1
{
    .reg .b32 %r<4>;
    mov.b32 %r1, smem;
    mbarrier.init.shared.b64 [%r1], 1;
    mbarrier.init.shared.b64 [%r1+8], 1;
    mbarrier.init.shared.b64 [%r1+16], 4;
    setmaxnreg.inc.sync.aligned.u32 192;
    setmaxnreg.dec.sync.aligned.u32 64;
    barrier.sync 1, 256;
    barrier.sync 1, 256;
    tcgen05.alloc.cta_group::1.sync.aligned.shared::cta.b32 [%r1+24], 512;
    ret;
}
"""
PLAN = Plan(
    roles=(Role("SOFTMAX", range(0, 4), registers=192), Role("LOAD", range(4, 8), registers=64)),
    launch_registers=128,
    tmem=(TmemRegion("S", 0, 128), TmemRegion("O", 384, 128)),
    barriers=(
        Barrier(
            "kv_full",
            producers=(Arrival("LOAD", "tma"),),
            consumers=(Arrival("SOFTMAX"),),
            guards="a tile",
            stages=2,
            tx_bytes=8192,
        ),
        Barrier(
            "kv_empty",
            producers=(Arrival("SOFTMAX", "warp"),),
            consumers=(Arrival("LOAD", "one"),),
            guards="an empty slot",
        ),
        Barrier(
            "start",
            kind="named",
            number=1,
            producers=(Arrival("LOAD"),),
            consumers=(Arrival("SOFTMAX"),),
            guards="tensor memory",
        ),
    ),
)


@pytest.fixture(scope="module")
def kernel(dsl, stage):
    """The compiled kernel of stage 01 that the contract looks at; skips without nvdisasm."""
    built = compile_stage(stage)
    try:
        contract.read_kernel(built)
    except MissingTool as missing:
        pytest.skip(str(missing))
    return built


# ---- cases ---------------------------------------------------------------------------------


@pytest.mark.parametrize("sizes", [contract.GPU_SIZES, contract.HOST_SIZES])
def test_cases_are_few_and_cover_every_generator(stage, sizes):
    cases = contract.cases(stage, sizes)
    assert len(cases) <= contract.MAX_CASES
    envelope = stage.config.ENVELOPE
    wanted = {
        (g, t, d)
        for g in contract.generators()
        for t in envelope.dtypes
        for d in envelope.head_dims
    }
    met = {(case.generator, case.dtype, case.head_dim) for case in cases}
    for drop in range(3):  # every pair of the three
        pair = lambda row, drop=drop: row[:drop] + row[drop + 1 :]
        assert set(map(pair, met)) == set(map(pair, wanted))
    assert len({str(case) for case in cases}) == len(cases)


def test_generators_without_lengths_only():
    assert "excluded_nan" not in contract.generators()
    assert {"gaussian", "llm_like", "surrounded_by_nan"} <= set(contract.generators())


def test_too_many_cases_are_refused(stage):
    with pytest.raises(AssertionError, match="the contract allows 60"):
        contract.cases(stage, {**contract.GPU_SIZES, "seqlen_q": range(9), "seqlen_k": range(9)})


def test_a_case_makes_its_problem():
    problem = CASE.problem()
    assert problem.q.shape == (1, 128, 2, 64) and problem.k.shape == (1, 256, 2, 64)
    assert problem.q.dtype == torch.bfloat16
    assert str(CASE) == "gaussian-bfloat16-b1-h2-q128-k256-d64"


def test_compile_keys_have_every_target_and_every_kernel_for_blackwell(stage):
    keys = contract.compile_keys(stage)
    assert {key.arch for key in keys} == set(stage.config.ARCHS)
    native = {(key.dtype, key.head_dim) for key in keys if key.arch == "sm_100a"}
    assert native == {(t, d) for t in ("bfloat16", "float16") for d in (64, 128)}


# ---- refusals ------------------------------------------------------------------------------


@pytest.mark.parametrize("fault", ["accepts", "other words", "no stage named"])
def test_a_wrong_refusal_fails(stage, monkeypatch, fault):
    right = stage.attention

    def attention(**arguments):
        try:
            return right(**arguments)
        except ValueError as error:
            if fault == "accepts":
                return None
            text = "no" if fault == "other words" else str(error).partition(" (stage")[0]
            raise ValueError(text) from None

    contract.check_refusal(stage, "head dim 72")
    monkeypatch.setattr(stage, "attention", attention)
    with pytest.raises(AssertionError, match=r"head dim 72: (nothing was raised|.* not in)"):
        contract.check_refusal(stage, "head dim 72")


def test_bad_calls_are_called_bad_only_where_the_stage_refuses(stage):
    names = contract.refusals(stage)
    assert {"length 100", "head dim 72", "grouped heads", "requires grad"} <= set(names)
    envelope = replace(
        stage.config.ENVELOPE, seqlen_multiple=1, grouped_heads=True, differentiable=True
    )
    later = type("Later", (), {"config": type("Config", (), {"ENVELOPE": envelope})})
    assert not {"length 100", "grouped heads", "requires grad"} & set(contract.refusals(later))


# ---- judging a result ----------------------------------------------------------------------


def _verdicts(change=lambda out, lse: None, scale=None):
    problem = CASE.problem()
    made = reference.same_precision(problem.q, problem.k, problem.v, softmax_scale=scale)
    out, lse = (x.clone() for x in made)
    change(out, lse)
    return contract.judge(problem, out, lse)


def test_a_right_result_passes():
    assert [verdict.ok for verdict in _verdicts()] == [True, True]


def test_an_unwritten_row_fails():
    out, lse = _verdicts(lambda out, lse: numerics.poison_(out[0, 5, 1]))
    assert lse.ok and not out.ok
    assert out.problems == ("64 elements never written (still poison), rows (0, 5, 1)",)
    out, lse = _verdicts(lambda out, lse: numerics.poison_(lse[0, 1, 5:6]))
    assert out.ok and not lse.ok and "1 elements never written" in lse.problems[0]


def test_a_wrong_scale_fails():
    assert not any(verdict.ok for verdict in _verdicts(scale=0.12))  # 0.125 is right


def test_a_wrong_element_fails():
    def change(out, lse):
        out[0, 7, 0, 3] += 0.05
        lse[0, 1, 9] += 0.01

    assert not any(verdict.ok for verdict in _verdicts(change))


def test_the_scale_of_the_problem_counts():
    problem = replace(CASE.problem(), softmax_scale=0.3)
    arguments = (problem.q, problem.k, problem.v)
    right = reference.same_precision(*arguments, softmax_scale=0.3)
    assert all(verdict.ok for verdict in contract.judge(problem, *right))
    assert not any(v.ok for v in contract.judge(problem, *reference.same_precision(*arguments)))


# ---- the model -----------------------------------------------------------------------------


def test_the_model_passes(stage):
    assert [verdict.name for verdict in contract.check_model(stage, CASE)] == ["out", "lse"]


def _without_rescale(step):
    def wrong(*arguments):
        p, row_max, row_sum, acc_scale = step(*arguments)
        return p, row_max, row_sum, torch.ones_like(acc_scale)

    return wrong


def _without_max(step):
    def wrong(s, row_max, row_sum, scale_log2):
        return step(s, torch.zeros_like(row_max), row_sum, scale_log2)

    return wrong


def _wrong_scale(step):
    return lambda s, row_max, row_sum, scale_log2: step(s, row_max, row_sum, scale_log2 * 1.02)


@pytest.mark.parametrize("fault", [_without_rescale, _without_max, _wrong_scale])
def test_a_broken_model_fails(stage, monkeypatch, fault):
    right = stage.model.online_softmax_step
    monkeypatch.setattr(stage.model, "online_softmax_step", fault(right))
    with pytest.raises(numerics.ToleranceError, match="out: FAILED"):
        contract.check_model(stage, CASE)


def test_a_key_tile_left_out_fails(stage, monkeypatch):
    right = stage.model.mma_qk

    def skip_first_tile(role, sQ, sK, tile):
        s = yield from right(role, sQ, sK, tile)
        return torch.full_like(s, -torch.inf) if tile == 0 else s

    monkeypatch.setattr(stage.model, "mma_qk", skip_first_tile)
    with pytest.raises(numerics.ToleranceError, match="out: FAILED"):
        contract.check_model(stage, CASE)


def _leave_out(monkeypatch, verb: str, barrier: str = "") -> None:
    """A fault in every model: all of one verb, of barriers whose names begin so."""
    monkeypatch.setattr(Sm, "skips", lambda sm, agent, v, b, line: v == verb and b[:7] == barrier)


@pytest.mark.parametrize("part", ["", "backward_1cta", "backward_2cta"])
def test_a_finding_in_a_model_fails_where_its_result_is_right(monkeypatch, part):
    source = load(7).part(part)
    case = replace(CASE, part=part, head_dim=128, seqlen_k=256, heads=1)
    assert contract.check_model(load(7), case)
    for verb, words in (("fence_before", "nothing makes sure that"), ("bulk_wait", "never waited")):
        _leave_out(monkeypatch, verb)
        right = source.simulate_problem(case.problem())
        assert all(torch.isfinite(getattr(right, name)).all() for name in source.RESULTS)
        with pytest.raises(AssertionError, match=f"findings in {case}:\n(.|\n)*{words}"):
            contract.check_model(load(7), case)


@pytest.mark.parametrize("number", [7, 8])
def test_rings_of_every_backward_wrap_around(number):
    cases = contract.host_cases(load(number))
    for part in load(number).backwards:
        long = {c.head_dim for c in cases if c.part == part.name and c.seqlen_q >= 4 * 128}
        assert long == set(part.config.ENVELOPE.head_dims)


def test_a_ring_that_does_not_wait_shows_only_once_it_wraps_around(monkeypatch):
    stage = load(7)
    (*_, long) = contract.long_cases(stage.part("backward_1cta"))
    contract.check_model(stage, long)
    _leave_out(monkeypatch, "wait", "q_empty")
    contract.check_model(stage, replace(long, seqlen_q=256))
    with pytest.raises(AssertionError, match=r"writes smem bytes .* nothing makes sure"):
        contract.check_model(stage, long)


# ---- compiled code -------------------------------------------------------------------------


def test_a_plan_that_the_code_shows_has_no_mismatch():
    assert contract.plan_mismatches(PLAN.check(), facts.ptx_facts(PTX)) == []


@pytest.mark.parametrize(
    ("old", "new", "words"),
    [
        (
            "[%r1+8], 1;",
            "[%r1+8], 2;",
            "arrival counts: the plan has [1, 1, 4], the compiled code [1, 2, 4]",
        ),
        ("    mbarrier.init.shared.b64 [%r1+8], 1;\n", "", "compiled code [1, 4]"),
        ("[%r1+16], 4;", "[%r1+16], 128;", "compiled code [1, 1, 128]"),
        ("[%r1+16], 4;", "[%r1+16], %r3;", "compiled code [1, 1, None]"),
        ("u32 192", "u32 184", "the plan has [64, 192], the compiled code [64, 184]"),
        ("u32 192", "u32 %r3", "the compiled code [64, None]"),
        ("    setmaxnreg.dec.sync.aligned.u32 64;\n", "", "the compiled code [192]"),
        ("barrier.sync 1, 256", "barrier.sync 2, 256", "named barriers (number, threads)"),
        ("barrier.sync 1, 256", "barrier.sync 1, 128", "['1, 256'], the compiled code ['1, 128']"),
        ("[%r1+24], 512", "[%r1+24], 256", "tensor memory is allocated: the plan has True"),
    ],
)
def test_code_that_does_not_show_the_plan(old, new, words):
    assert old in PTX
    (mismatch,) = contract.plan_mismatches(PLAN, facts.ptx_facts(PTX.replace(old, new)))
    assert words in mismatch


def test_tensor_memory_without_a_plan_for_it():
    (mismatch,) = contract.plan_mismatches(PLAN.with_changes(tmem=()), facts.ptx_facts(PTX))
    assert "the plan has False, the compiled code True" in mismatch


def test_facts_of_the_kernel_pass(stage, kernel):
    contract.check_facts(stage, kernel)


@pytest.mark.parametrize(
    ("name", "wrong"), [("ex2", 32), ("registers", ("<=", 100)), ("ld_shared", (">=", 10**6))]
)
def test_a_wrong_declaration_fails(stage, kernel, monkeypatch, name, wrong):
    monkeypatch.setitem(stage.config.DECLARED[128], name, wrong)
    with pytest.raises(AssertionError, match=f"01-sm_100a-bfloat16-d128:\n{name}: declared"):
        contract.check_facts(stage, kernel)


def test_shared_memory_of_the_launch_counts(stage, kernel):
    larger = replace(kernel, smem_bytes=kernel.smem_bytes + 4)
    with pytest.raises(AssertionError, match=r"the launch has \d+ B of shared memory, the plan"):
        contract.check_facts(stage, larger)


def test_threads_of_the_plan_count(stage, kernel, monkeypatch):
    wider = lambda head_dim, right=stage.config.plan: right(head_dim).with_changes(
        roles=(Role("COMPUTE", range(0, 8)),)
    )
    monkeypatch.setattr(stage.config, "plan", wider)
    with pytest.raises(AssertionError, match="threads: declared == 256, compiled code has 128"):
        contract.check_facts(stage, kernel)


def test_spills_are_never_declared_away(stage):
    for key in contract.compile_keys(stage):
        declared = contract.declared_facts(stage, key)
        assert {name: declared[name] for name in contract.NO_SPILLS} == contract.NO_SPILLS
        assert ("registers" in declared) == (key.arch == "sm_100a")


# ---- guards around outputs -----------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_guards_find_what_is_written_outside(dtype):
    out, check_guards = poisoned.guarded((2, 3, 5), dtype, "cpu")
    assert out.shape == (2, 3, 5) and out.is_contiguous()
    assert numerics.unwritten(out) == 30
    out.zero_()
    check_guards()
    storage = torch.as_strided(out, (30 + 2 * poisoned.GUARD,), (1,), 0)
    for at in (0, poisoned.GUARD - 1, -poisoned.GUARD, -1):
        kept = storage[at].clone()
        storage[at] = 0.0
        with pytest.raises(AssertionError, match="1 elements outside the output were written"):
            check_guards()
        storage[at] = kept


def test_guarded_outputs_start_where_vector_stores_need_it():
    for dtype in (torch.bfloat16, torch.float32):
        out, _ = poisoned.guarded((1, 128, 1, 64), dtype, "cpu")
        assert out.data_ptr() % 16 == 0


def test_without_a_gpu_the_tier_says_so(stage, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert contract_gpu.gpu_skip_reason(stage) == "no CUDA GPU here"
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (7, 5))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda *_: "an old GPU")
    assert contract_gpu.gpu_skip_reason(stage) == "stage 01 does not run on an old GPU"


def test_ptx_is_checked_where_machine_code_cannot_be_read(kernel, stage, monkeypatch):
    """Without nvdisasm a PTX fact that differs still fails; only then is the tool missed."""

    def without_tool(kernel):
        raise MissingTool("no nvdisasm here")

    monkeypatch.setattr(contract, "read_kernel", without_tool)
    with pytest.raises(MissingTool):
        contract.check_facts(stage, kernel)
    declared = contract.declared_facts(stage, kernel.key)
    monkeypatch.setattr(contract, "declared_facts", lambda *_: {**declared, "ex2": 1})
    with pytest.raises(AssertionError, match="ex2: declared == 1"):
        contract.check_facts(stage, kernel)


def test_lse_may_be_off_by_as_much_as_the_emulated_exponential():
    """A row with one key: LSE is its score, and P = 1 comes out as 1 + the polynomial's error."""
    assert judging.exp2_error(None) == judging.exp2_error(load(4)) == 0
    error = judging.exp2_error(load(6))
    assert error == pytest.approx(8.56e-5, rel=0.01)  # docs/exp2.md
    problem = contract.Case("gaussian", "float16", 64, 128, 128, 1, 1).problem()
    k, v = (x[:, :1] for x in (problem.k, problem.v))
    one = inputs.Problem(problem.q, k, v, problem.dout)
    truth = reference.attention(one.q, k, v)
    out, lse = truth.out.half(), truth.lse.float()
    near = (truth.lse + error).float()
    assert all(verdict.ok for verdict in contract.judge(one, out, near, load(6)))
    assert all(verdict.ok for verdict in contract.judge(one, out, lse, load(4)))
    assert not contract.judge(one, out, (truth.lse + 40 * error).float(), load(6))[1].ok
