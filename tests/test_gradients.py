# SPDX-License-Identifier: Apache-2.0
"""The op with its gradients, and the contract's checks of them, on kernels written in torch."""

import contextlib
import dataclasses

import pytest
import torch
from flash_ladder import load
from flash_ladder.common import (
    contract,
    contract_gpu,
    contract_gradients,
    derived,
    gradients,
    launch,
    numerics,
)
from flash_ladder.common.envelope import check
from flash_ladder.common.launch import execution
from flash_ladder.common.model import B200

from tests.gradient_kernels import NAME, Kernels, backward, postprocess, preprocess, probabilities

ON_CPU = (
    "statistics",
    "softmax_scale",
    "zero_dout",
    "repeats",
    "live_nan",
    "autograd",
    "strided_dout",
    "strided_views",
)  # checks that need neither streams nor the memory of a GPU


@pytest.fixture
def kernels(monkeypatch):
    return Kernels(monkeypatch)


@pytest.fixture
def on_cpu(kernels, monkeypatch):
    """The kernels, with the contract's problems on the CPU."""
    problem, dlse = contract.Case.problem, contract.Case.dlse
    monkeypatch.setattr(contract.Case, "problem", lambda self, device="cpu": problem(self))
    monkeypatch.setattr(contract.Case, "dlse", lambda self, device="cpu": dlse(self))
    return kernels


def _case(**changes) -> contract.Case:
    sizes = {"seqlen_q": 128, "seqlen_k": 256, "batch": 2, "heads": 2}
    kernel = {"dtype": "bfloat16", "head_dim": 64, "part": NAME}
    return contract.Case(**{"generator": "gaussian", **kernel, **sizes, **changes})


def _leaves(problem, wanting="qkv"):
    return [getattr(problem, name).requires_grad_(name in wanting) for name in "qkv"]


# ---- autograd ------------------------------------------------------------------------------


@pytest.mark.parametrize("of", ["out", "lse", "both"])
def test_gradients_are_the_oracles(kernels, of):
    case = _case(of_lse=of != "out")
    problem, dlse = case.problem(), case.dlse()
    leaves = _leaves(problem)
    out, lse = kernels.stage.attention(*leaves, return_lse=True)
    assert out.requires_grad and lse.requires_grad
    if of == "lse":
        problem.dout.zero_()
        lse.backward(dlse)
    else:
        pairs = [(out, problem.dout)] + ([(lse, dlse)] if of == "both" else [])
        torch.autograd.backward(*zip(*pairs))
    made = [x.grad for x in leaves]
    assert [x.dtype for x in made] == [torch.bfloat16] * 3
    problem = dataclasses.replace(problem, **{n: x.detach() for n, x in zip("qkv", leaves)})
    for verdict in contract.judge_gradients(problem, *made, dlse):
        verdict.check()
    assert kernels.kinds == ["preprocess", "backward", "postprocess"]


def test_what_the_kernels_are_given(kernels):
    """Sizes, dtypes and units as in `compile.arguments`; a dLSE that is not there has stride 0."""
    problem = _case().problem()
    leaves = _leaves(problem)
    kernels.stage.attention(*leaves, softmax_scale=0.25).backward(problem.dout)
    (_, pre), (_, main), (_, post) = kernels.calls
    rows, keys = (2, 128, 2, 64), (2, 256, 2, 64)
    assert [tuple(x.shape) for x in pre] == [
        rows,
        rows,
        (2, 2, 128),
        (2, 2, 128),
        (2, 2, 1, 2, 128),
        rows,
    ]
    assert pre[3].stride() == (0, 0, 0) and not pre[3].any()
    assert [tuple(x.shape) for x in main[:8]] == [
        rows,
        keys,
        keys,
        rows,
        (2, 2, 1, 2, 128),
        rows,
        keys,
        keys,
    ]
    assert main[8:] == (0.25 * gradients.LOG2_E, 0.25) and post[2] == 0.25
    assert main[4] is pre[4] and main[5] is pre[5] is post[0]
    assert [x.dtype for x in (pre[4], pre[5])] == [torch.float32] * 2
    assert all(x.is_contiguous() for x in (pre[4], pre[5], main[6], main[7], post[1]))


def test_torchs_default_dtype_is_not_that_of_lse(monkeypatch):
    monkeypatch.setattr(gradients, "_ZEROS", {})
    q = torch.zeros(1, 4, 1, 64, dtype=torch.bfloat16)
    problem = check(load(8), q, q, q, need_cuda=False, causal=True)
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    try:
        zero, saved = gradients._zero(q.device), gradients.oracle_forward(problem, q, q, q)
    finally:
        torch.set_default_dtype(before)
    assert zero.dtype == saved.lse.dtype == torch.float32


def test_nothing_is_launched_where_nobody_sees_anything():
    q = torch.zeros(1, 4, 1, 64, dtype=torch.bfloat16, requires_grad=True)
    problem = check(load(8), q, q, q, need_cuda=False, window_size=(-5, 3))
    out, lse = gradients.attend(load(8), problem, q, q, q)
    assert not out.any() and (lse == -torch.inf).all()
    (out.sum() + torch.where(lse > 0, lse, 0).sum()).backward()
    assert not q.grad.any()


@pytest.mark.parametrize("wanting", ["q", "kv", "v"])
def test_only_inputs_that_want_gradients_get_them(kernels, wanting):
    problem = _case().problem()
    leaves = _leaves(problem, wanting)
    kernels.stage.attention(*leaves).sum().backward()
    assert [x.grad is not None for x in leaves] == [name in wanting for name in "qkv"]


def test_without_gradients_nothing_is_kept(kernels):
    problem = _case().problem()
    out = kernels.stage.attention(problem.q, problem.k, problem.v)
    assert out.grad_fn is None
    leaves = _leaves(problem)
    with torch.no_grad():
        assert kernels.stage.attention(*leaves).grad_fn is None
    with torch.inference_mode(), torch.enable_grad():
        assert not kernels.stage.attention(*leaves).requires_grad
    assert not kernels.calls


def test_dout_is_copied_only_where_it_must_be(kernels):
    problem = _case().problem()

    def given_for(dout):
        kernels.calls.clear()
        kernels.stage.attention(*_leaves(problem)).backward(dout)
        return kernels.calls[0][1][1]

    dout = problem.dout
    assert given_for(dout).data_ptr() == dout.data_ptr()
    turned = dout.transpose(1, 2).contiguous().transpose(1, 2)
    assert given_for(turned).stride() == turned.stride()
    shared = dout[:1].expand_as(dout)
    assert given_for(shared).stride() == shared.stride()
    one = dout[:1, :1, :1, :1].expand_as(dout)
    late = torch.zeros(dout.numel() + 1, dtype=dout.dtype)[1:].view(dout.shape)
    odd = torch.zeros(*dout.shape[:3], dout.shape[3] + 1, dtype=dout.dtype)[..., :-1]
    for x in (one, late, odd):
        found = given_for(x)
        assert found.is_contiguous() and found.data_ptr() % 16 == 0 and torch.equal(found, x)


def test_the_gradient_of_lse_has_its_signs_in_memory(kernels):
    leaves = _leaves(_case().problem())
    _, lse = kernels.stage.attention(*leaves, return_lse=True)
    given = []
    lse.register_hook(given.append)
    (torch.complex(torch.zeros_like(lse), lse).conj() * (1 + 2j)).real.sum().backward()
    found = kernels.calls[0][1][3]
    assert given[0].is_neg() and not found.is_neg() and torch.equal(found, given[0])


def test_a_second_derivative_is_refused(kernels):
    problem = _case().problem()
    leaves = _leaves(problem)
    out = kernels.stage.attention(*leaves)
    first = torch.autograd.grad(out.square().sum(), leaves, create_graph=True)
    assert all(x.requires_grad for x in first)
    with pytest.raises(RuntimeError, match="stage 07 cannot be differentiated again: its backward"):
        torch.autograd.grad(first[0].sum(), leaves[0])


def test_inputs_changed_between_the_passes_are_refused(kernels):
    problem = _case().problem()
    k = problem.k.requires_grad_()
    out = kernels.stage.attention(problem.q, k, problem.v)
    problem.v.mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.sum().backward()


def test_the_backward_runs_in_the_mode_of_its_forward(kernels):
    """Autograd may call it in another thread, or when the `with` is over."""
    problem = _case().problem()
    with execution("rewritten", log=True):
        out = kernels.stage.attention(*_leaves(problem))
    out.sum().backward()
    assert kernels.modes == [("rewritten", True)] * 3


def test_a_stage_without_a_backward_still_refuses(stage):
    q = torch.zeros(1, 128, 1, 64, dtype=torch.bfloat16)
    with pytest.raises(ValueError, match="stage 01 has no backward pass, but q requires grad"):
        stage.attention(q.clone().requires_grad_(), q, q)


def _masked(**options):
    """A packed q that requires grad, and the problem of stage 08 with it as q, k and v."""
    q = torch.zeros(4, 1, 64, dtype=torch.bfloat16, requires_grad=True)
    return q, check(load(8), q, q, q, need_cuda=False, **options)


@pytest.mark.parametrize("hooks", [False, True])
def test_lengths_that_change_before_the_backward(monkeypatch, hooks):
    """Found by their version; of hooks on saved tensors those count that they kept."""
    seen = []
    empty = lambda stage, problem, q, k, v: launch.empty_results(problem, q)
    monkeypatch.setattr(gradients, "forward", empty)
    monkeypatch.setattr(gradients, "_gradients", lambda *given: seen.append(given[-1]) or given[:3])
    cu_seqlens = torch.tensor([0, 1, 4], dtype=torch.int32)
    given = {"cu_seqlens_q": cu_seqlens, "cu_seqlens_k": torch.tensor([0, 2, 5]).int()}
    q = torch.zeros(4, 1, 64, dtype=torch.bfloat16, requires_grad=True)
    k = torch.zeros(5, 1, 64, dtype=torch.bfloat16)
    used = {"seqused_k": torch.tensor([1, 3]).int()}
    problem = check(load(8), q, k, k, need_cuda=False, **given, **used)
    keep = (lambda x: x.clone(), lambda x: x)
    with torch.autograd.graph.saved_tensors_hooks(*keep) if hooks else contextlib.nullcontext():
        out, _ = gradients.attend(load(8), problem, *problem.batched(q, k, k))
    cu_seqlens[1] = 3
    if not hooks:
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            out.sum().backward()
        return
    out.sum().backward()
    (mask,) = (given.mask for given in seen)
    assert [tuple(row) for row in mask.sequences().rows] == [(0, 1, 0, 1), (1, 3, 2, 3)]


def test_packed_sequences_have_tiles_of_statistics_each(monkeypatch):
    made = []
    empty = lambda stage, problem, q, k, v: launch.empty_results(problem, q)
    monkeypatch.setattr(gradients, "forward", empty)
    monkeypatch.setattr(gradients, "backward", lambda *given: made.append(given[-1]))
    cu_seqlens = torch.tensor([0, 1, 4], dtype=torch.int32)
    q, problem = _masked(cu_seqlens_q=cu_seqlens, cu_seqlens_k=cu_seqlens)
    gradients.attend(load(8), problem, *problem.batched(q, q, q))[0].sum().backward()
    assert made[0].stats.shape == (1, 1, 2, 2, 128)


def test_kernels_of_a_masked_backward_get_what_they_look_at(monkeypatch):
    """Preprocess and postprocess the queries' side, the middle all; see `compile.arguments`."""
    started = []
    monkeypatch.setattr(gradients, "kernel_for", lambda source, *where: source.kind)
    monkeypatch.setattr(gradients, "start", lambda kind, *given: started.append((kind, given)))
    names = "cu_seqlens_q", "cu_seqlens_k", "seqused_q", "seqused_k"
    rows = [0, 1, 4], [0, 2, 4], [1, 2], [2, 1]
    lengths = [torch.tensor(row, dtype=torch.int32) for row in rows]
    q, problem = _masked(**dict(zip(names, lengths)), max_seqlen_q=3, max_seqlen_k=2, causal=True)
    q4 = problem.batched(q.detach())[0]
    saved = gradients.Saved(q4, q4, q4, q4, torch.zeros(1, 1, 4))
    workspace = gradients.Workspace.empty(saved, mask=problem.mask)
    gradients.backward(load(8), problem, saved, q4, None, workspace)
    assert [kind for kind, _ in started] == ["preprocess", "backward", "postprocess"]
    cu_q, cu_k, used_q, used_k = (x.data_ptr() for x in lengths)
    of_q = (cu_q, used_q, 2, 3)
    assert started[0][1][-4:] == of_q == started[2][1][-4:]
    assert started[1][1][-9:] == (cu_q, cu_k, used_q, used_k, 2, 3, 2, problem.mask.left, 0)


@pytest.mark.parametrize(
    ("options", "zero"),
    [
        ({}, False),
        ({"causal": True}, False),
        ({"window_size": (None, -3)}, False),  # no query sees the last keys
        ({"window_size": (-5, 3)}, True),  # nobody sees anything
        ({"seqused_q": torch.tensor([3], dtype=torch.int32)}, False),
    ],
)
def test_gradients_are_0_where_no_kernel_is_started(options, zero):
    q, k = torch.zeros(1, 4, 1, 64).bfloat16(), torch.zeros(1, 6, 1, 64).bfloat16()
    problem = check(load(8), q, k, k, need_cuda=False, **options)
    nan = lambda *like: launch.contiguous_like(*like).fill_(torch.nan)
    saved = gradients.Saved(q, k, k, q, torch.zeros(1, 1, 4))
    made = gradients.Workspace.empty(saved, nan, problem.mask)
    for x in (made.dq, made.dk, made.dv):
        assert not x.any() if zero else x.isnan().all()


def test_gradients_of_keys_are_those_of_each_head_of_q():
    q, k = torch.zeros(1, 4, 6, 64).bfloat16(), torch.zeros(1, 5, 2, 64).bfloat16()
    made = gradients.Workspace.empty(gradients.Saved(q, k, k, q, torch.zeros(1, 6, 4)))
    assert made.dk.shape == made.dv.shape == (1, 5, 6, 64) and made.dk.dtype == k.dtype


# ---- statistics ----------------------------------------------------------------------------


def test_statistics_of_rows_lie_by_tiles():
    generator = torch.Generator().manual_seed(3)
    out, dout = (torch.randn(2, 256, 3, 64, generator=generator).bfloat16() for _ in "ab")
    lse, dlse = (torch.randn(2, 3, 256, generator=generator) for _ in "ab")
    found = gradients.statistics(out, lse, dout, dlse)
    assert found.shape == (2, 3, 2, 2, 128) and found.is_contiguous()
    row = (out[1, 130, 2].double() * dout[1, 130, 2].double()).sum() - dlse[1, 2, 130].double()
    assert found[1, 2, 1, 1, 2].item() == pytest.approx(row.item(), rel=1e-5)
    assert found[1, 2, 1, 0, 2] == lse[1, 2, 130] * gradients.LOG2_E
    without = gradients.statistics(out, lse, dout)
    assert torch.equal(without, gradients.statistics(out, lse, dout, torch.zeros_like(dlse)))


# ---- the model of a part -------------------------------------------------------------------


@pytest.fixture
def modelled(kernels):
    """The part with a model that keeps what it is given."""
    part = kernels.stage.part(NAME)

    class Model:
        given = None

        @classmethod
        def run(cls, *arguments):
            cls.given = arguments
            q, k, v, dout, stats, scale, *_ = arguments
            sums = torch.zeros(q.shape), torch.empty_like(k), torch.empty_like(v)
            backward(q, k, v, dout, stats, *sums, scale * gradients.LOG2_E, scale)
            run = {"dq": (sums[0] * scale).to(q.dtype), "dk": sums[1], "dv": sums[2]}
            return type("Run", (), {**run, "findings": ()})

    part.model = Model
    return part


def test_a_part_is_simulated_after_an_exact_forward(kernels, modelled):
    problem = _case().problem()
    modelled.simulate_problem(problem, max_ctas=3)
    *tensors, stats, scale, machine, max_ctas = modelled.model.given
    assert all(x is y for x, y in zip(tensors, (problem.q, problem.k, problem.v, problem.dout)))
    assert (scale, machine.name, max_ctas) == (0.125, "B200", 3)
    out, lse = kernels.forward(None, contract_gradients.check(modelled, *tensors[:3]), *tensors[:3])
    assert torch.equal(stats, gradients.statistics(out, lse, problem.dout))
    given = {"out": torch.zeros_like(out), "lse": lse + 1, "dlse": lse}
    modelled.simulate_problem(problem, **given)
    wanted = gradients.statistics(given["out"], lse + 1, problem.dout, lse)
    assert torch.equal(modelled.model.given[4], wanted)


@pytest.mark.parametrize(
    ("change", "error", "words"),
    [
        ({"dout": None}, TypeError, "dout must be a torch.bfloat16 tensor on cpu; got NoneType"),
        ({"dout": torch.zeros(2, 128, 2, 64)}, TypeError, "dout must be a torch.bfloat16 tensor"),
        ({"lse": torch.zeros(2, 128, 2)}, ValueError, r"lse must have shape \(2, 2, 128\); got"),
        ({"dlse": torch.zeros(2, 2, 128).half()}, TypeError, "dlse must be a torch.float32"),
        ({"out": torch.zeros(1).bfloat16()}, ValueError, r"out must have shape \(2, 128, 2, 64\)"),
        ({"q": torch.zeros(2, 100, 2, 64).bfloat16()}, ValueError, "multiple of 128; got 100"),
    ],
)
def test_bad_arguments_of_simulate_are_refused(modelled, change, error, words):
    problem = _case().problem()
    given = {name: getattr(problem, name) for name in ("q", "k", "v", "dout")}
    with pytest.raises(error, match=words):
        modelled.simulate(**{**given, **change})


def test_a_part_without_a_model_says_so(kernels):
    problem = _case().problem()
    with pytest.raises(ValueError, match="part 07/preprocess has no model"):
        kernels.stage.part("preprocess").simulate_problem(problem)


def test_the_model_tier_covers_gradients(kernels, modelled):
    cases = [case for case in contract.host_cases(kernels.stage) if case.part]
    assert {case.part for case in cases} == {NAME}
    assert {(c.dtype, c.head_dim, c.of_lse) for c in cases} == {
        (t, d, of_lse) for t in ("bfloat16", "float16") for d in (64, 128) for of_lse in (0, 1)
    }
    assert {case.generator for case in cases} == set(contract.generators())
    assert contract.models(kernels.stage) == [kernels.stage, modelled]
    names = [row.name for row in contract.check_model(kernels.stage, _case(of_lse=True))]
    assert names == ["dq", "dk", "dv"]
    modelled.model = None
    assert not [case for case in contract.host_cases(kernels.stage) if case.part]


# ---- the contract's checks -----------------------------------------------------------------


def test_gradients_are_checked_where_a_stage_has_them(kernels, stage):
    assert contract_gpu.checks(stage) == contract_gpu.GPU_CHECKS
    both = contract_gpu.GPU_CHECKS | contract_gradients.GRADIENT_CHECKS
    assert contract_gpu.checks(kernels.stage) == both
    assert not [case for case in contract.gpu_cases(stage) if case.part]
    cases = [case for case in contract.gpu_cases(kernels.stage) if case.part]
    assert len(cases) <= contract.MAX_CASES and len({str(case) for case in cases}) == len(cases)
    assert {case.seqlen_q for case in cases} == set(contract.GPU_GRADIENT_SIZES["seqlen_q"])


@pytest.mark.parametrize("name", ON_CPU)
def test_right_kernels_pass(on_cpu, name):
    contract_gradients.GRADIENT_CHECKS[f"gradients_{name}"](on_cpu.stage)


@pytest.mark.parametrize("generator", contract.generators())
def test_right_kernels_pass_a_case(on_cpu, generator):
    case = _case(generator=generator, of_lse=True)
    names = [row.name for row in contract_gpu.check_gpu_case(on_cpu.stage, case)]
    assert names == ["dq", "dk", "dv"]


def _without_dlse(mO, mdO, mLSE, mdLSE, *written):
    preprocess(mO, mdO, mLSE, torch.zeros_like(mdLSE), *written)


def _without_zeros(*arguments):
    stats = arguments[4]
    accumulator = arguments[5].clone()
    preprocess(*arguments)
    arguments[5].copy_(accumulator)
    assert stats.isfinite().all()


def _without_d(mQ, mK, mV, mdO, mStats, *rest):
    stats = mStats.clone()
    stats[..., 1, :] = 0
    backward(mQ, mK, mV, mdO, stats, *rest)


def _unscaled_dk(*arguments):
    backward(*arguments[:-1], 1.0)


def _one_row_of_dv_left_out(*arguments):
    kept = arguments[7][0, 3].clone()
    backward(*arguments)
    arguments[7][0, 3] = kept


def _writes_beside_dk(*arguments):
    backward(*arguments)
    dk = arguments[6]
    dk.as_strided((1,), (1,), dk.storage_offset() + dk.numel()).zero_()


def _writes_dout(*arguments):
    backward(*arguments)
    arguments[3].mul_(2)


def _half_of_p(mQ, mK, mV, mdO, mStats, mdQ_accum, mdK, mdV, scale_log2, softmax_scale):
    backward(mQ, mK, mV, mdO, mStats, mdQ_accum, mdK, mdV, scale_log2, softmax_scale)
    p = probabilities(mQ, mK, mStats, scale_log2)
    mdV.copy_((0.5 * p.mT @ mdO.float().transpose(1, 2)).transpose(1, 2))


def _unscaled_dq(mdQ_accum, mdQ, softmax_scale):
    postprocess(mdQ_accum, mdQ, 1.0)


@pytest.mark.parametrize(
    ("kind", "fault", "words"),
    [
        ("preprocess", _without_dlse, "d[qk]: FAILED"),
        ("preprocess", _without_zeros, "NaN, the oracle is not|never written"),
        ("backward", _without_d, "dq: FAILED"),
        ("backward", _unscaled_dk, "dk: FAILED"),
        ("backward", _one_row_of_dv_left_out, r"never written \(still poison\)"),
        ("backward", _writes_beside_dk, "1 elements outside the output were written"),
        ("backward", _writes_dout, "dout was written"),
        ("backward", _half_of_p, "dv: FAILED"),
        ("postprocess", _unscaled_dq, "dq: FAILED"),
    ],
)
def test_a_planted_fault_fails_a_case(on_cpu, kind, fault, words):
    on_cpu.by_kind[kind] = fault
    with pytest.raises(AssertionError, match=words):
        contract_gpu.check_gpu_case(on_cpu.stage, _case(of_lse=True))


def _noisy(name, size):
    """`backward` whose result differs a little from call to call."""
    generator = torch.Generator().manual_seed(0)

    def run(*arguments):
        backward(*arguments)
        x = arguments[{"dq": 5, "dk": 6}[name]]
        x.mul_(1 + size * torch.randn(x.shape, generator=generator))

    return run


@pytest.mark.parametrize(
    ("name", "size", "words"),
    [("dk", 0.01, "dk differs"), ("dq", 0.05, "more than the order of their sum")],
)
def test_results_that_change_from_run_to_run_fail(on_cpu, name, size, words):
    on_cpu.by_kind["backward"] = _noisy(name, size)
    with pytest.raises(AssertionError, match=words):
        contract_gradients.gradients_repeats(on_cpu.stage)


def test_dq_may_differ_by_the_order_of_its_sum(on_cpu):
    on_cpu.by_kind["backward"] = _noisy("dq", 2.0**-25)
    contract_gradients.gradients_repeats(on_cpu.stage)


def test_zeros_must_be_exact(on_cpu):
    def nearly(*arguments):
        backward(*arguments)
        arguments[7][0, 0, 0, 0] += 1e-30

    on_cpu.by_kind["backward"] = nearly
    with pytest.raises(AssertionError, match="1 elements of dv are not 0"):
        contract_gradients.gradients_zero_dout(on_cpu.stage)


def test_wrong_statistics_fail(on_cpu):
    def wrong(*arguments):
        preprocess(*arguments)
        arguments[4][0, 0, 0, 1, 5] += 0.01

    on_cpu.by_kind["preprocess"] = wrong
    with pytest.raises(AssertionError, match="statistics are wrong"):
        contract_gradients.gradients_statistics(on_cpu.stage)


def test_a_part_alone_gives_what_devices_compare(on_cpu):
    """The executed log and mutation run one launch: the part's, on the oracle's forward."""
    problem = _case().problem()
    part = on_cpu.stage.part(NAME)
    dq_accum, dk, dv = contract_gpu.run_problem(part, problem)
    assert on_cpu.kinds == ["backward"]
    made = (dq_accum * 0.125).to(torch.bfloat16), dk, dv
    for verdict in contract.judge_gradients(problem, *made):
        verdict.check()
    assert not numerics.unwritten(dq_accum)


def test_out_and_lse_of_a_simulation_belong_together():
    part = load(7).part("backward_1cta")
    x = torch.zeros(1, 128, 1, 64, dtype=torch.bfloat16, requires_grad=True)
    with pytest.raises(ValueError, match="give both, or neither"):
        part.simulate(x, x, x, x, lse=torch.zeros(1, 1, 128))
    assert not part.simulate(x, x, x, x).dq.any()  # inputs that require grad are welcome


def test_gradients_at_another_head_dim_are_refused():
    with pytest.raises(ValueError, match=r"stage 07 has gradients at head dims 64, 128; got 96"):
        load(7).backward(96)


@pytest.mark.parametrize(("name", "head_dim"), [("backward_1cta", 64), ("backward_2cta", 128)])
def test_no_part_is_faster_than_the_machine(name, head_dim):
    sizes = derived.Sizes(1024, 2, head_dim)
    report = derived.simulate(load(7).part(name), B200, sizes)
    assert max(report.run.busy().values()) <= 1
    assert report.time.tflops < B200["tensor"] * B200["sms"] * B200["clock"] / 1e12
    tiles = report.phases.tiles
    assert tiles == 8 * (2 if name == "backward_1cta" else 1)
