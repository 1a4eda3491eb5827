# SPDX-License-Identifier: Apache-2.0
"""The library op around its kernels: torch.library, autograd, torch.compile, what it refuses.

The kernels are replaced by the oracle, so that all of this runs on a CPU.
"""

import functools
import inspect
import json
import pathlib
import re
import sys
import threading
import warnings
from builtins import compile as compile_code

import flash_ladder
import numpy as np
import pytest
import torch
import torch._dynamo.testing
from flash_ladder import flash_attn_func, flash_attn_varlen_func
from flash_ladder.common import compile, gradients, launch, masks, op, reference
from flash_ladder.common.compile import CompileKey
from flash_ladder.common.gradients import oracle_forward
from flash_ladder.common.model.sequences import OPEN
from torch._dynamo import compiled_autograd
from torch._subclasses import FakeTensorMode
from torch.autograd import forward_ad
from torch.fx.experimental.proxy_tensor import make_fx
from torch.library import opcheck
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

DENSE = (None,) * 6  # cu_seqlens, seqused, max_seqlen


def _forward(problem, q, k, v):
    saved = oracle_forward(problem, q, k, v)
    return saved.out, saved.lse


def _backward(problem, saved, dout, dlse):
    """Of each head of q, as the kernels."""
    mask = problem.mask
    sides = tuple(None if side == OPEN else side for side in (mask.left, mask.right))
    group = saved.q.shape[2] // saved.k.shape[2]
    k, v = (x.repeat_interleave(group, dim=2) for x in (saved.k, saved.v))
    dq, dk, dv = (torch.zeros_like(x) for x in (saved.q, k, v))
    sequences = mask.sequences()
    for number, row in enumerate(sequences.rows):
        entry, queries, keys = sequences.entry(number), row.queries(), row.keys()
        made = reference.attention_backward(
            saved.q[entry, queries][None],
            k[entry, keys][None],
            v[entry, keys][None],
            dout[entry, queries][None],
            dlse=dlse[entry, :, queries][None],
            softmax_scale=problem.softmax_scale,
            window_size=sides,
        )
        dq[entry, queries] = made.dq[0].to(dq.dtype)
        dk[entry, keys], dv[entry, keys] = made.dk[0].to(dk.dtype), made.dv[0].to(dv.dtype)
    return dq, dk, dv


@pytest.fixture
def oracle(monkeypatch):
    """Kernels that are the oracle; the tensors that they were given."""
    given = []

    def forward(problem, q, k, v):
        given.append((problem, q, k, v))
        return _forward(problem, q, k, v)

    monkeypatch.setattr(op, "_traced", lambda: True)  # every call goes through torch's dispatcher
    monkeypatch.setattr(op, "run_forward", forward)
    monkeypatch.setattr(op, "run_backward", _backward)
    monkeypatch.setattr(op, "check_device", lambda device: None)
    return given


def _qkv(sq=5, sk=7, heads=4, heads_kv=2, batch=(2,), grad=False, d=64, dtype=torch.bfloat16):
    generator = torch.Generator().manual_seed(0)
    shapes = ((*batch, sq, heads, d), *[(*batch, sk, heads_kv, d)] * 2)
    made = [torch.randn(shape, generator=generator).to(dtype) for shape in shapes]
    return [x.requires_grad_(grad) for x in made]


def _packed(grad=False, **sizes):
    q, k, v = _qkv(8, 9, batch=(), grad=grad, **sizes)
    cu = [torch.tensor(row, dtype=torch.int32) for row in ([0, 0, 5, 8], [0, 2, 6, 9])]
    return q, k, v, cu


# ---- values --------------------------------------------------------------------------------


@pytest.mark.parametrize("mask", [{}, {"causal": True}, {"window_size": (2, 1)}])
@pytest.mark.parametrize("heads_kv", [4, 2, 1])
def test_grouped_heads_and_masks_are_those_of_the_oracle(oracle, mask, heads_kv):
    q, k, v = _qkv(heads_kv=heads_kv, grad=True)
    out, lse = flash_attn_func(q, k, v, return_lse=True, **mask)
    truth = reference.attention(q, k, v, **mask)
    torch.testing.assert_close(out.double(), truth.out, atol=0.01, rtol=0.01)
    torch.testing.assert_close(lse.double(), truth.lse)
    dout, dlse = torch.randn_like(out), torch.randn_like(lse)
    found = torch.autograd.grad((out, lse), (q, k, v), (dout, dlse))
    wanted = reference.attention_backward(q, k, v, dout, dlse=dlse, **mask)
    for x, y in zip(found, (wanted.dq, wanted.dk, wanted.dv)):
        torch.testing.assert_close(x.double(), y, atol=0.03, rtol=0.03)
    assert torch.equal(out, flash_attn_func(q, k, v, **mask))


@pytest.mark.parametrize("used", [{}, {"seqused_k": torch.tensor([1, 2, 3], dtype=torch.int32)}])
def test_packed_sequences_are_those_of_the_oracle(oracle, used):
    q, k, v, (cu_q, cu_k) = _packed(grad=True)
    lengths = {"cu_seqlens_q": cu_q, "cu_seqlens_k": cu_k, **used}
    out, lse = flash_attn_varlen_func(q, k, v, **lengths, causal=True, return_lse=True)
    truth = reference.attention_varlen(q, k, v, **lengths, causal=True)
    torch.testing.assert_close(out.double(), truth.out, atol=0.01, rtol=0.01)
    torch.testing.assert_close(lse.double(), truth.lse)
    dout = torch.randn_like(out)
    found = torch.autograd.grad(out, (q, k, v), dout)
    wanted = reference.attention_varlen_backward(q, k, v, dout, **lengths, causal=True)
    for x, y in zip(found, (wanted.dq, wanted.dk, wanted.dv)):
        torch.testing.assert_close(x.double(), y, atol=0.03, rtol=0.03)


def test_a_maximum_may_be_a_tensor_of_the_cpu(oracle):
    q, k, v, (cu_q, cu_k) = _packed()
    lengths = {"cu_seqlens_q": cu_q, "cu_seqlens_k": cu_k}
    wanted = flash_attn_varlen_func(q, k, v, **lengths)
    most = {"max_seqlen_q": torch.tensor(5), "max_seqlen_k": 4}
    assert torch.equal(wanted, flash_attn_varlen_func(q, k, v, **lengths, **most))
    problem = oracle[-1][0]
    assert (problem.mask.max_seqlen_q, problem.mask.max_seqlen_k) == (5, 4)


def test_what_lies_well_is_not_copied_and_the_rest_once(oracle):
    q, k, v = _qkv(heads_kv=4)
    turned = [x.transpose(1, 2).contiguous().transpose(1, 2) for x in (q, k, v)]
    wanted = flash_attn_func(q, k, v)
    assert torch.equal(flash_attn_func(*turned), wanted)
    assert [x.data_ptr() for x in oracle[-1][1:]] == [x.data_ptr() for x in turned]
    odd = torch.zeros(*q.shape[:3], 65, dtype=q.dtype)[..., :-1].copy_(q)
    late = torch.zeros(q.numel() + 1, dtype=q.dtype)[1:].view(q.shape).copy_(q)
    across = torch.stack([q, q], -1)[..., 0]
    for x in (odd, late, across):
        assert torch.equal(flash_attn_func(x, k, v), wanted)
        assert oracle[-1][1].is_contiguous() and oracle[-1][2].data_ptr() == k.data_ptr()


def test_inputs_are_not_written(oracle):
    q, k, v = _qkv(grad=True)
    before = [x.detach().clone() for x in (q, k, v)]
    flash_attn_func(q, k, v).sum().backward()
    assert all(map(torch.equal, before, (q, k, v)))


# ---- known problems -------------------------------------------------------------------------


@pytest.fixture
def short_cut(oracle, monkeypatch):
    """Problems that went to the kernels without torch's dispatcher."""
    monkeypatch.undo()
    monkeypatch.setattr(op, "check_device", lambda device: None)
    monkeypatch.setattr(op, "_KNOWN", {})
    found = []

    def forward(stage, problem, q, k, v, tell=None):
        tensors, caller = (q, k, v), sys._getframe(3).f_code.co_name  # of run_forward and _forward
        if caller != "attention":
            found.append((problem, *tensors))
        return _forward(problem, *tensors)

    def backward(stage, problem, saved, dout, dlse, workspace, tell=None):
        assert not any(x.requires_grad for x in vars(saved).values())
        dout, dlse = (
            torch.zeros_like(x) if y is None else y
            for x, y in ((saved.out, dout), (saved.lse, dlse))
        )
        made = _backward(problem, saved, dout, dlse)
        for x, y in zip((workspace.dq, workspace.dk, workspace.dv), made):
            x.copy_(y)

    monkeypatch.setattr(op, "forward", forward)
    monkeypatch.setattr(op, "backward", backward)
    return found


def test_what_was_met_before_takes_the_short_cut(short_cut):
    tensors = _qkv(heads_kv=4)
    first = flash_attn_func(*tensors, causal=True)
    assert not short_cut
    assert torch.equal(first, flash_attn_func(*tensors, causal=True)) and len(short_cut) == 1
    flash_attn_func(*tensors)  # another mask
    flash_attn_func(*tensors, causal=True, softmax_scale=0.5)
    flash_attn_func(*_qkv(6, heads_kv=4), causal=True)
    turned = [x.transpose(1, 2).contiguous().transpose(1, 2) for x in tensors]
    flash_attn_func(*turned, causal=True)
    assert len(short_cut) == 1
    flash_attn_func(*turned, causal=True)
    assert len(short_cut) == 2


def _late(x):
    """The same numbers, where no kernel can load them."""
    return torch.zeros(x.numel() + 1, dtype=x.dtype)[1:].view(x.shape).copy_(x)


def test_what_is_copied_is_copied_once_a_call(short_cut):
    q, k, v = _qkv(heads_kv=4)
    late = _late(q)
    wanted = flash_attn_func(late, k, v)
    for number in range(1, 3):
        assert torch.equal(flash_attn_func(late, k, v), wanted) and len(short_cut) == number
        _, q_given, k_given, _ = short_cut[-1]
        assert q_given.data_ptr() % 16 == 0 and torch.equal(q_given, q)
        assert k_given.data_ptr() == k.data_ptr()


USED = {"seqused_q": torch.tensor([0, 4, 3], dtype=torch.int32)}


@pytest.mark.parametrize("heads_kv", [4, 1])
@pytest.mark.parametrize("lengths", ["dense", "packed", "used"])
def test_the_short_cut_gives_what_the_operator_gives(short_cut, heads_kv, lengths):
    if lengths == "dense":
        made, call = _qkv(heads_kv=heads_kv, grad=True), flash_attn_func
    else:
        *made, (cu_q, cu_k) = _packed(grad=True, heads_kv=heads_kv)
        used = USED if lengths == "used" else {}
        given = {"cu_seqlens_q": cu_q, "cu_seqlens_k": cu_k, **used}
        call = functools.partial(flash_attn_varlen_func, **given)
    dout = torch.randn_like(made[0])
    rows = []
    for tensors in (made, made, [_late(x.detach()).requires_grad_() for x in made]):
        for _ in range(2):
            out, lse = call(*tensors, causal=True, return_lse=True)
            loss = (out.float() * dout.float()).sum() + torch.where(lse > -1e9, lse, 0).sum()
            rows.append((out, lse, *torch.autograd.grad(loss, tensors)))
    assert len(short_cut) == 4 and all(x is not None for row in rows for x in row)
    for row in rows[1:]:
        assert all(map(torch.equal, row, rows[0]))


@pytest.mark.parametrize("of", range(2))
def test_a_gradient_that_is_not_there_costs_no_zeros(short_cut, monkeypatch, of):
    q, k, v = _qkv(grad=True)
    flash_attn_func(q, k, v)
    given, real = [], op.backward
    monkeypatch.setattr(op, "backward", lambda *x, **y: given.append(x[3:5]) or real(*x))
    flash_attn_func(q, k, v, return_lse=True)[of].sum().backward()
    assert [x is None for x in given[0]] == [of == 1, of == 0]


@pytest.mark.parametrize("known", [False, True])
def test_packed_sequences_have_tiles_of_statistics_each(short_cut, monkeypatch, known):
    call, tensors = _call("packed")
    if known:
        call(*tensors)
    made = []
    monkeypatch.setattr(op, "backward", lambda *given, **_: made.append(given[-1]))
    call(*tensors).sum().backward()
    assert made[0].stats.shape == (1, 4, 3, 2, 128)


@pytest.mark.parametrize("heads_kv", [4, 1])
def test_batched_gradients_of_a_known_problem(short_cut, heads_kv):
    made = _qkv(heads_kv=heads_kv, grad=True)
    douts = torch.randn(3, *made[0].shape).to(made[0].dtype)
    for _ in range(2):
        out = flash_attn_func(*made)
        found = torch.autograd.grad(out, made, douts, is_grads_batched=True, retain_graph=True)
        for number, dout in enumerate(douts):
            wanted = torch.autograd.grad(out, made, dout, retain_graph=True)
            for x, y in zip(found, wanted):
                torch.testing.assert_close(x[number].float(), y.float(), atol=0.02, rtol=0.02)


@pytest.mark.parametrize(
    ("good", "bad"),
    [
        ({"causal": True}, {"causal": 1}),
        ({"window_size": (1, 0)}, {"window_size": (True, 0)}),
        ({"window_size": (1, 0)}, {"window_size": (1, False)}),
        ({"softmax_scale": 1.0}, {"softmax_scale": True}),
        ({"deterministic": False}, {"deterministic": True}),
        ({}, {"window_size": None}),
        ({}, {"window_size": (1, {})}),
    ],
)
def test_what_equals_a_known_option_is_still_refused(short_cut, good, bad):
    tensors = _qkv(heads_kv=4)
    for _ in range(2):
        flash_attn_func(*tensors, **good)
    assert len(short_cut) == 1
    with pytest.raises((TypeError, ValueError), match=next(iter(bad))):
        flash_attn_func(*tensors, **bad)


def test_options_of_other_types_are_known_too(short_cut):
    tensors = _qkv(heads_kv=4)
    kinds = {"window_size": [1, 0]}, {"window_size": (np.int64(1), 0)}, {"softmax_scale": 1}
    for options in kinds:
        short_cut.clear()
        wanted = flash_attn_func(*tensors, **options)
        assert torch.equal(flash_attn_func(*tensors, **options), wanted) and len(short_cut) == 1


def test_a_maximum_that_changes_in_place_is_noticed(short_cut):
    q, k, v, (cu_q, cu_k) = _packed()
    longest = torch.tensor(5)
    given = {"cu_seqlens_q": cu_q, "cu_seqlens_k": cu_k, "max_seqlen_k": 4}
    call = lambda most: flash_attn_varlen_func(q, k, v, **given, max_seqlen_q=most)
    for _ in range(2):
        wanted = call(longest)
    assert len(short_cut) == 1
    longest.fill_(2)
    assert torch.equal(call(longest), call(2)) and not torch.equal(call(longest), wanted)


def test_a_known_problem_with_a_tangent_is_refused(short_cut):
    q, k, v = _qkv(heads_kv=4)
    for _ in range(2):
        flash_attn_func(q, k, v)
    with forward_ad.dual_level():
        with pytest.raises(TypeError, match="forward-mode"):
            flash_attn_func(forward_ad.make_dual(q, torch.ones_like(q)), k, v)
        flash_attn_func(q, k, v)
    assert len(short_cut) == 1


def test_other_numbers_in_cu_seqlens_are_taken(short_cut):
    q, k, v, (cu_q, cu_k) = _packed()
    call = lambda cu: flash_attn_varlen_func(q, k, v, cu_seqlens_q=cu, cu_seqlens_k=cu_k)
    first = call(cu_q)
    other = torch.tensor([0, 3, 6, 8], dtype=torch.int32)
    found = call(other)
    assert len(short_cut) == 1 and not torch.equal(found, first)
    assert torch.equal(
        found,
        torch.ops.flash_ladder.attention(q, k, v, other, cu_k, *DENSE[2:], 0.125, OPEN, OPEN)[0],
    )
    assert torch.equal(call(cu_q), first)


def test_what_torch_wants_to_see_never_does(short_cut):
    q, k, v = _qkv(heads_kv=4)
    flash_attn_func(q, k, v)
    traced = make_fx(lambda *x: flash_attn_func(*x))(q, k, v)
    assert "flash_ladder.attention" in str(traced.graph)
    with pytest.raises(TypeError, match=r"cannot be mapped by torch\.vmap"):
        torch.vmap(flash_attn_func)(q[None], k[None], v[None])
    torch.compile(flash_attn_func, fullgraph=True, backend="aot_eager")(q, k, v)
    with FakeTensorMode():
        flash_attn_func(*[torch.empty(x.shape, dtype=x.dtype) for x in (q, k, v)])
    assert not short_cut
    flash_attn_func(q, k, v)
    assert len(short_cut) == 1


def test_few_problems_are_kept(short_cut, monkeypatch):
    monkeypatch.setattr(op, "MOST_KNOWN", 3)
    for seqlen in range(1, 9):
        flash_attn_func(*_qkv(seqlen, heads_kv=4))
    assert len(op._KNOWN) <= 3


# ---- both routes ---------------------------------------------------------------------------


def _call(kind):
    """(function of q, k and v, the tensors)."""
    if kind == "packed":
        *made, (cu_q, cu_k) = _packed(grad=True)
        given = {"cu_seqlens_q": cu_q, "cu_seqlens_k": cu_k, **USED}
        return functools.partial(flash_attn_varlen_func, **given, causal=True), made
    made = _qkv(heads_kv=2 if kind == "grouped" else 4, grad=True)
    if kind == "late":
        made = [_late(x.detach()).requires_grad_() for x in made]
    return functools.partial(flash_attn_func, causal=True), made


KINDS = ("dense", "grouped", "packed", "late")


@pytest.mark.parametrize("kind", KINDS)
def test_activation_checkpointing_from_the_first_call_on(short_cut, kind):
    call, tensors = _call(kind)
    layers = lambda q, k, v: call(call(q, k, v), k, v)
    kept = lambda *x: checkpoint(call, *x, use_reentrant=False)
    checkpointed = lambda q, k, v: kept(kept(q, k, v), k, v)
    found = torch.autograd.grad(checkpointed(*tensors).float().square().sum(), tensors)
    assert short_cut  # the second layer, and what is computed again
    op._KNOWN.clear()
    wanted = torch.autograd.grad(layers(*tensors).float().square().sum(), tensors)
    assert all(map(torch.equal, found, wanted))


@pytest.mark.parametrize("number", range(2))
def test_lengths_that_a_hook_kept_are_those_of_the_backward(short_cut, number):
    """By the operator, then by the short cut; torch sees no version of what hooks keep."""
    call, tensors = _call("packed")
    wanted = torch.autograd.grad(call(*tensors).float().square().sum(), tensors)
    if not number:
        op._KNOWN.clear()
    with torch.autograd.graph.saved_tensors_hooks(lambda x: x.clone(), lambda x: x):
        out = call(*tensors)
    assert len(short_cut) == number
    call.keywords["cu_seqlens_q"].copy_(torch.tensor([0, 1, 2, 8]))
    found = torch.autograd.grad(out.float().square().sum(), tensors)
    assert all(map(torch.equal, found, wanted))


@pytest.mark.parametrize("kind", KINDS)
def test_both_routes_save_the_same_and_no_copies(short_cut, kind):
    call, tensors = _call(kind)
    rows = []
    for _ in range(2):
        with torch.autograd.graph.saved_tensors_hooks(lambda x: rows[-1].append(x) or x, id):
            rows.append([])
            call(*tensors)
    assert len(short_cut) == 1
    first, second = ([(x.shape, x.stride(), x.dtype) for x in row] for row in rows)
    assert first == second and len(first) == (8 if kind == "packed" else 5)
    for row in rows:
        assert [x.data_ptr() for x in row[:3]] == [x.data_ptr() for x in tensors]


@pytest.mark.parametrize("number", range(2))
def test_inference_mode_records_nothing(short_cut, number):
    q, k, v = _qkv(grad=True)
    for _ in range(number):
        flash_attn_func(q, k, v)
    with torch.inference_mode(), torch.enable_grad():
        assert not flash_attn_func(q, k, v).requires_grad
    assert len(short_cut) == number


@pytest.mark.parametrize("number", range(2))
def test_lengths_that_change_before_the_backward_are_noticed(short_cut, number):
    call, tensors = _call("packed")
    for _ in range(number):
        call(*tensors)
    out = call(*tensors)
    call.keywords["cu_seqlens_q"].copy_(torch.tensor([0, 1, 2, 8]))
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.sum().backward()


@pytest.mark.parametrize("where", ["operator", "short cut", "stage"])
def test_what_a_hook_on_saved_tensors_returns_is_made_loadable(short_cut, monkeypatch, where):
    q, k, v = tensors = _qkv(heads_kv=4, grad=True)
    call = functools.partial(flash_attn_func, causal=True)
    if where == "stage":
        problem = op._problem(q, k, v, (*DENSE, 0.125, OPEN, 0))
        monkeypatch.setattr(gradients, "forward", op.forward)
        call = lambda *x: gradients.attend(op.last_stage(), problem, *x)[0]
    elif where == "short cut":
        call(*tensors)
    starts, real = [], op.backward

    def backward(stage, problem, saved, *rest, **_):
        starts.extend(x.data_ptr() % 16 for x in (saved.q, saved.k, saved.v, saved.out))
        real(stage, problem, saved, *rest)

    for module in (op, gradients):
        monkeypatch.setattr(module, "backward", backward)
    wanted = torch.autograd.grad(call(*tensors).sum(), tensors)
    if where == "operator":
        op._KNOWN.clear()
    with torch.autograd.graph.saved_tensors_hooks(lambda x: x, _late):
        out = call(*tensors)
    assert all(map(torch.equal, torch.autograd.grad(out.sum(), tensors), wanted))
    assert starts == [0] * 8


@pytest.mark.parametrize("kind", ["dense", "packed"])
def test_every_compilation_is_announced(monkeypatch, capsys, kind):
    def find(source, *_):
        compile.announce(CompileKey(8, "sm_100a", "bfloat16", 64, source.name))
        return source

    monkeypatch.setattr(launch, "_KERNELS", {})
    monkeypatch.setattr(launch, "_find_kernel", find)
    monkeypatch.setattr(op, "_KNOWN", {})
    monkeypatch.setattr(op, "check_device", lambda device: None)
    for module in (launch, gradients):
        monkeypatch.setattr(module, "start", lambda *_: None)
    call, tensors = _call(kind)
    parts = "preprocess", "backward_1cta", "postprocess"
    for wanted in ([["08-sm_100a"], [f"08-{part}-sm_100a" for part in parts]], [[], []]):
        out = call(*tensors)
        thread = threading.Thread(target=out.sum().backward)  # as autograd's of a GPU
        told = [capsys.readouterr().err]
        thread.start()
        thread.join()
        told.append(capsys.readouterr().err)
        assert [re.findall("compiling (.*)-bfloat16-d64, once", text) for text in told] == wanted


def test_who_is_told_of_compilations_comes_back_when_another_leaves():
    key, told = CompileKey(8, "sm_100a", "bfloat16", 64), []
    with compile.announced(lambda key: told.append("outer")):
        with compile.announced(lambda key: told.append("inner")):
            compile.announce(key)
        compile.announce(key)
    compile.announce(key)
    assert told == ["inner", "outer"]


def test_a_problem_is_known_once_its_first_call_has_returned(short_cut, monkeypatch):
    real = op.forward

    def broken(*given):
        raise RuntimeError("no compiler")

    monkeypatch.setattr(op, "forward", broken)
    q, k, v = _qkv(heads_kv=4)
    with pytest.raises(RuntimeError, match="no compiler"):
        flash_attn_func(q, k, v)
    assert not op._KNOWN
    monkeypatch.setattr(op, "forward", real)
    flash_attn_func(q, k, v)
    assert not short_cut and len(op._KNOWN) == 1


@pytest.mark.parametrize("number", range(2))
def test_torch_can_be_told_to_refuse_what_is_not_deterministic(short_cut, number):
    q, k, v = _qkv(grad=True)
    for _ in range(number):
        flash_attn_func(q, k, v)
    out, warned = flash_attn_func(q, k, v), flash_attn_func(q, k, v)
    before = torch.are_deterministic_algorithms_enabled()
    try:
        torch.use_deterministic_algorithms(True)
        with pytest.raises(RuntimeError, match="dQ is added up in no fixed order"):
            out.sum().backward()
        torch.use_deterministic_algorithms(True, warn_only=True)
        with pytest.warns(UserWarning, match="dQ is added up in no fixed order"):
            warned.sum().backward()
    finally:
        torch.use_deterministic_algorithms(before)
    assert q.grad is not None


def test_dtype_and_device_tell_problems_apart():
    x = torch.zeros(2, 5, 4, 64, dtype=torch.bfloat16)
    assert op._layout(x) != op._layout(x.half())
    assert op._layout(x)[3] == x.device and op._layout(x.to("meta"))[3] == torch.device("meta")


def test_what_is_no_plain_tensor_never_does(short_cut):
    seen = []

    class Own(torch.Tensor):
        @classmethod
        def __torch_function__(cls, function, types, args=(), kwargs=None):
            seen.append(str(function))
            return super().__torch_function__(function, types, args, kwargs or {})

    q, k, v = _qkv(heads_kv=4)
    flash_attn_func(q, k, v)
    flash_attn_func(q.as_subclass(Own), k, v)
    assert not short_cut and any("flash_ladder" in name for name in seen)


class _Functions(TorchFunctionMode):
    """Names of what it saw."""

    def __init__(self):
        super().__init__()
        self.seen = []

    def __torch_function__(self, function, types, args=(), kwargs=None):
        self.seen.append(str(function))
        return function(*args, **(kwargs or {}))


class _Launches(TorchDispatchMode):
    """Names of the operators that start a kernel on a GPU."""

    def __init__(self):
        super().__init__()
        self.seen = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        views = ("empty", "expand", "select", "slice", "unsqueeze", "view")
        if not any(word in str(function) for word in views):
            self.seen.append(str(function))
        return function(*args, **(kwargs or {}))


def test_modes_and_tracers_see_a_known_problem(short_cut):
    q, k, v = _qkv(heads_kv=4)
    flash_attn_func(q, k, v)
    with _Functions() as mode:
        flash_attn_func(q, k, v)
    assert any("flash_ladder" in name for name in mode.seen)
    with torch.device("cpu"):
        flash_attn_func(q, k, v)
    with _Launches() as mode:
        flash_attn_func(q, k, v)
    assert any("flash_ladder" in name for name in mode.seen)
    with torch._C._IncludeDispatchKeyGuard(torch._C.DispatchKey.PreDispatch):
        assert op._traced()
    graph = make_fx(lambda *x: flash_attn_func(*x), pre_dispatch=True)(q, k, v).graph
    assert "flash_ladder.attention" in str(graph)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch.jit.trace is deprecated
        scripted = torch.jit.trace(lambda *x: flash_attn_func(*x), (q, k, v), check_trace=False)
    assert "flash_ladder::attention" in str(scripted.graph)
    assert not short_cut


@pytest.mark.parametrize("of", range(2))
def test_a_mode_sees_a_backward_with_all_that_its_schema_names(short_cut, of):
    given = []

    class Arguments(TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            if "attention_backward" in str(function):
                given.extend(args[:7])
            return function(*args, **(kwargs or {}))

    tensors = _qkv(grad=True)
    flash_attn_func(*tensors)
    result = flash_attn_func(*tensors, return_lse=True)[of].sum()
    with Arguments():
        result.backward()
    assert len(given) == 7 and all(isinstance(x, torch.Tensor) for x in given)


@pytest.mark.parametrize("kind", ["dense", "packed"])
@pytest.mark.parametrize("loss", [lambda out, lse: out.sum(), lambda out, lse: lse[..., 1].sum()])
def test_compiled_autograd_of_a_known_problem(short_cut, kind, loss):
    call, tensors = _call(kind)
    call(*tensors)
    wanted = torch.autograd.grad(loss(*call(*tensors, return_lse=True)), tensors)
    made = loss(*call(*tensors, return_lse=True))
    assert len(short_cut) == 2
    torch._dynamo.reset()
    with compiled_autograd._enable(torch.compile(backend="aot_eager", fullgraph=True)):
        made.backward()
    for x, y in zip(tensors, wanted):
        torch.testing.assert_close(x.grad, y)


# ---- torch ---------------------------------------------------------------------------------


@pytest.mark.parametrize("grad", [False, True])
def test_opcheck(oracle, grad):
    attention = torch.ops.flash_ladder.attention.default
    opcheck(attention, (*_qkv(grad=grad), *DENSE, 0.125, OPEN, 0))
    q, k, v, cu = _packed(grad=grad)
    opcheck(attention, (q, k, v, *cu, None, None, 5, 4, 0.125, 2, 1))


def test_opcheck_of_the_backward(oracle):
    q, k, v = _qkv()
    out, lse = flash_attn_func(q, k, v, return_lse=True)
    given = (torch.randn_like(out), torch.randn_like(lse), q, k, v, out, lse)
    opcheck(
        torch.ops.flash_ladder.attention_backward.default,
        (*given, *DENSE, 0.125, OPEN, OPEN),
        test_utils=("test_schema", "test_faketensor"),
    )


def test_compiled_without_a_break_and_once_for_all_lengths(oracle):
    counter = torch._dynamo.testing.CompileCounterWithBackend("aot_eager")

    @torch.compile(fullgraph=True, dynamic=True, backend=counter)
    def function(q, k, v):
        return flash_attn_func(q * 2, k, v, causal=True).sum()

    for sq, sk in ((5, 7), (9, 3), (300, 130)):
        q, k, v = _qkv(sq, sk, grad=True)
        function(q, k, v).backward()
        found, (q.grad, k.grad, v.grad) = (q.grad, k.grad, v.grad), (None, None, None)
        flash_attn_func(q * 2, k, v, causal=True).sum().backward()
        for x, y in zip(found, (q.grad, k.grad, v.grad)):
            torch.testing.assert_close(x, y, atol=0.02, rtol=0.02)
    assert counter.frame_count == 1


@pytest.mark.parametrize("of", range(2))
@pytest.mark.parametrize("number", range(2))
def test_a_second_derivative_is_refused(short_cut, number, of):
    q, k, v = _qkv(grad=True)
    for _ in range(number):
        flash_attn_func(q, k, v)
    result = flash_attn_func(q, k, v, return_lse=True)[of]
    (dq,) = torch.autograd.grad(result.sum(), q, create_graph=True)
    with pytest.raises(
        RuntimeError, match=r"its backward has no backward\. Leave out create_graph"
    ):
        dq.sum().backward()


def test_vmap_is_refused(oracle):
    q, k, v = (x[None] for x in _qkv())
    words = r"cannot be mapped by torch\.vmap: give it the batch"
    with pytest.raises(TypeError, match=words):
        torch.vmap(flash_attn_func)(q, k, v)
    operator = lambda *x: torch.ops.flash_ladder.attention(*x, *DENSE, 0.125, OPEN, OPEN)
    with pytest.raises(RuntimeError, match=words):
        torch.vmap(operator)(q, k, v)


def test_derivatives_by_torch_func_are_refused(oracle):
    q, k, v = _qkv()
    reverse = "flash_ladder's attention cannot be differentiated by torch.func .* q is a tensor"
    forward = "flash_ladder's attention has no forward-mode derivative .* k has a tangent: use"
    with pytest.raises(TypeError, match=reverse):
        torch.func.grad(lambda q: flash_attn_func(q, k, v).sum())(q)
    with pytest.raises(TypeError, match=forward):
        torch.func.jvp(lambda k: flash_attn_func(q, k, v), (k,), (k,))
    q, k, v, cu = _packed()
    lengths = {"cu_seqlens_q": cu[0], "cu_seqlens_k": cu[1]}
    with pytest.raises(TypeError, match=forward), forward_ad.dual_level():
        flash_attn_varlen_func(q, forward_ad.make_dual(k, k), v, **lengths)


# ---- refusals ------------------------------------------------------------------------------


def _nested():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # a prototype
        return torch.nested.nested_tensor([torch.zeros(7, 2, 64)])


def _of_keys(heads):
    return {name: torch.zeros(2, 7, heads, 64).bfloat16() for name in "kv"}


BAD = {
    "deterministic": ({"deterministic": True}, ValueError, "deterministic=True does not exist yet"),
    "no tensor": ({"q": [1.0]}, TypeError, "q must be a torch.Tensor; got list"),
    "rank": ({"q": torch.zeros(5, 4, 64)}, ValueError, r"q must be \(batch, seqlen, heads"),
    "scale": ({"softmax_scale": "1"}, TypeError, "softmax_scale must be a number or None; got str"),
    "scale NaN": ({"softmax_scale": float("nan")}, ValueError, "softmax_scale must be finite"),
    "causal": ({"causal": 1}, TypeError, "causal must be True or False; got 1"),
    "window": ({"window_size": (1.5, 0)}, TypeError, "window_size has integers"),
    "window's length": ({"window_size": (1,)}, TypeError, r"must be \(left, right\)"),
    "heads": (_of_keys(3), ValueError, "q has 4 heads, k and v 3"),
    "heads of k": (
        {"k": _of_keys(4)["k"]},
        ValueError,
        r"k and v must have one shape; got .*\(2, 7, 4, 64\), v \(2, 7, 2, 64\)",
    ),
    "dtype": ({"q": torch.zeros(2, 5, 4, 64)}, TypeError, "q is float32"),
    "head dim": ({name: torch.zeros(2, 5, 4, 72).bfloat16() for name in "qkv"}, ValueError, "72"),
    "head dim 0": ({name: torch.zeros(2, 5, 4, 0).bfloat16() for name in "qkv"}, ValueError, "dim"),
    "no heads": ({"q": torch.zeros(2, 5, 0, 64).bfloat16()}, ValueError, "need at least one head"),
    "no heads of k": (_of_keys(0), ValueError, "q has 4 heads, k and v 0"),
    "huge scale": ({"softmax_scale": 10**400}, ValueError, "softmax_scale must be finite"),
    "sparse": ({"q": torch.zeros(2, 5, 4, 64).to_sparse()}, TypeError, r"q must be a dense"),
    "nested": ({"v": _nested()}, TypeError, "v must be a dense .* got a nested one"),
    "batch": ({"q": torch.zeros(3, 5, 4, 64).bfloat16()}, ValueError, "must agree in batch"),
    "lengths": ({"v": torch.zeros(2, 6, 2, 64).bfloat16()}, ValueError, "must have one shape"),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_arguments_are_refused(oracle, name):
    changes, error, words = BAD[name]
    with pytest.raises(error, match=words):
        flash_attn_func(**{**dict(zip("qkv", _qkv())), **changes})
    assert not oracle


BAD_LENGTHS = {
    "int64": ({"cu_seqlens_q": torch.tensor([0, 0, 5, 8])}, TypeError, "must be an int32 tensor"),
    "number": ({"cu_seqlens_k": torch.tensor([0, 9]).int()}, ValueError, "describes 3 sequences"),
    "used": ({"seqused_q": torch.tensor([1]).int()}, ValueError, r"must have shape \(3,\)"),
    "maximum": ({"max_seqlen_q": torch.zeros(2)}, TypeError, "an int, or a CPU tensor"),
    "sparse": (
        {"seqused_q": torch.zeros(3).int().to_sparse()},
        TypeError,
        "got a torch.sparse_coo",
    ),
    "nested": ({"cu_seqlens_k": _nested()}, TypeError, "cu_seqlens_k must be .* got a nested one"),
    "negative": ({"max_seqlen_k": -1}, ValueError, "max_seqlen_k must be 0 or more"),
    "list": ({"cu_seqlens_q": [0, 8]}, TypeError, r"must be an int32 tensor; got list \[0, 8\]"),
    "numpy": ({"seqused_k": np.zeros(3, np.int32)}, TypeError, "seqused_k must be .* got ndarray"),
    "none": ({"cu_seqlens_k": None}, TypeError, "cu_seqlens_k must be an int32 tensor; got None"),
    "list of a maximum": ({"max_seqlen_q": [5]}, TypeError, r"an int, .* got list \[5\]"),
    "float": ({"max_seqlen_q": 5.0}, TypeError, "max_seqlen_q must be an int, .* got float 5.0"),
    "bool": ({"max_seqlen_k": True}, TypeError, "max_seqlen_k must be an int, .* got bool True"),
    "tensor": ({"max_seqlen_q": torch.tensor(5.5)}, TypeError, "max_seqlen_q must be an int"),
    "scale": ({"softmax_scale": 0}, ValueError, "softmax_scale must be finite and positive"),
    "head dim": ({name: torch.zeros(9, 4, 72).bfloat16() for name in "qkv"}, ValueError, "72"),
}


@pytest.mark.parametrize("name", BAD_LENGTHS)
@pytest.mark.parametrize("known", [False, True])
def test_bad_lengths_are_refused_before_any_copy(short_cut, monkeypatch, name, known):
    changes, error, words = BAD_LENGTHS[name]
    q, k, v, (cu_q, cu_k) = _packed()
    given = {"q": q, "k": k, "v": v, "cu_seqlens_q": cu_q, "cu_seqlens_k": cu_k}
    for most in (None, 1, 5) if known else ():  # 1 and 5 equal True and 5.0
        flash_attn_varlen_func(**given, max_seqlen_q=most)
        flash_attn_varlen_func(**given, max_seqlen_k=most)
    monkeypatch.setattr(op, "_forward", None)
    monkeypatch.setattr(masks, "_rows", None)  # the first that `lengths` needs
    with pytest.raises(error, match=words):
        flash_attn_varlen_func(**{**given, **changes})


@pytest.mark.parametrize("size", [2**70, np.int64(5), OPEN])
def test_large_maxima_are_those_of_the_tensor(short_cut, size):
    q, k, v, (cu_q, cu_k) = _packed()
    call = functools.partial(flash_attn_varlen_func, cu_seqlens_q=cu_q, cu_seqlens_k=cu_k)
    wanted = call(q, k, v)
    for _ in range(2):
        assert torch.equal(call(q, k, v, max_seqlen_q=size), wanted)


REFUSED_WHEN_TRACED = {
    "dtype": (lambda x: x.float(), "q is float32"),
    "head dim": (lambda x: x[..., :32], "head dim 64 or 128; got 32"),
    "heads": (lambda x: x[:, :, :3], "q has 3 heads, k and v 2"),
    "batch": (lambda x: x[:1], "must agree in batch"),
}


@pytest.mark.parametrize("name", REFUSED_WHEN_TRACED)
def test_tracers_are_told_what_no_kernel_takes(name):
    change, words = REFUSED_WHEN_TRACED[name]
    of_q_alone = name in ("heads", "batch")
    with FakeTensorMode():
        q, k, v = (torch.empty(x.shape, dtype=x.dtype) for x in _qkv())
        with pytest.raises((TypeError, ValueError), match=words):
            flash_attn_func(change(q), *((k, v) if of_q_alone else map(change, (k, v))))
        cu = torch.empty(4, dtype=torch.int32)
        lengths = {"cu_seqlens_q": cu, "cu_seqlens_k": cu[1:]}
        with pytest.raises(ValueError, match="describes 3 sequences"):
            flash_attn_varlen_func(q[0], k[0], v[0], **lengths)


def test_a_positional_dropout_cannot_become_a_scale(oracle):
    with pytest.raises(TypeError, match="takes 3 positional arguments but 4 were given"):
        flash_attn_func(*_qkv(), 0.1)
    q, k, v, cu = _packed()
    with pytest.raises(TypeError, match="takes 3 positional arguments but 5 were given"):
        flash_attn_varlen_func(q, k, v, *cu)


def test_cpu_tensors_are_refused_with_an_alternative():
    with pytest.raises(ValueError, match=r"on 'cpu'.*scaled_dot_product_attention runs everywhere"):
        flash_attn_func(*_qkv())


# ---- its page ------------------------------------------------------------------------------


PAGE = (pathlib.Path(__file__).parent.parent / "docs" / "attention.md").read_text(encoding="utf-8")
TEXT = " ".join(PAGE.split())
EXAMPLES = re.findall(r"^```python\n(.+?)^```$", PAGE.partition("## Examples")[2], re.M | re.S)


@pytest.mark.parametrize("number", range(6))
def test_examples_of_the_page_run(oracle, number):
    code = EXAMPLES[number].replace('device="cuda"', 'device="cpu"')
    torch.manual_seed(0)
    torch._dynamo.reset()
    exec(compile_code(code, f"example {number + 1}", "exec"), {})
    assert oracle and len(EXAMPLES) == 6


@pytest.mark.parametrize("heads_kv", [4, 2])
def test_only_the_sums_of_groups_are_started_beside_our_kernels(short_cut, monkeypatch, heads_kv):
    q, k, v, (cu_q, cu_k) = _packed(heads_kv=heads_kv)
    lengths = cu_q, cu_k, None, None
    problem = op._problem(q, k, v, (*lengths, None, None, 0.125, OPEN, 0))
    made = op._with_lengths(problem, lengths)
    for module in (launch, gradients):
        monkeypatch.setattr(module, "kernel_for", lambda *_: None)
        monkeypatch.setattr(module, "start", lambda *_: None)
    monkeypatch.setattr(op, "forward", launch.forward)
    monkeypatch.setattr(op, "backward", gradients.backward)
    with _Launches() as of_forward:
        out, lse = op._forward(made, q, k, v)
    gradients._zero(q.device)  # made once
    with _Launches() as of_backward:
        op._backward(made, out, lse, q, k, v, out, lse)
    assert of_forward.seen == []
    assert of_backward.seen == ["aten.sum.dim_IntList"] * (2 if heads_kv < 4 else 0)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_gradients_of_a_group_are_added_up_in_float32(dtype):
    x = torch.full((1, 2, 4096, 8), 1.125, dtype=dtype)  # one by one 16 bits would stay below 512
    assert torch.equal(op._sum_of_groups(x, 2), torch.full((1, 2, 2, 8), 2304.0, dtype=dtype))


@pytest.mark.parametrize("function", [flash_attn_func, flash_attn_varlen_func])
def test_the_page_names_every_argument_that_has_a_rule(function):
    named = set(inspect.signature(function).parameters) - {*"qkv", "seqused_q", "seqused_k"}
    assert {name for name in named if name not in PAGE} == set()


def test_the_page_shows_the_measured_overhead():
    path = pathlib.Path(__file__).parent.parent / "docs" / "data" / "overhead.json"
    rows = json.loads(path.read_text())["microseconds"]
    for name, cells in rows.items():
        numbers = [f"{cells[column]} (M)" for column in ("flash_ladder", "flash-attn-4")]
        numbers.append(f"{cells['autograd alone']} (M)" if "backward" in name else "")
        assert f"| {name} | {' | '.join(numbers)} |".replace("|  |", "| |") in PAGE
    ratios = {True: [], False: []}  # with a backward or not
    for name, cells in rows.items():
        ratios["backward" in name].append(cells["flash_ladder"] / cells["flash-attn-4"])
    told = {
        trained: f"{min(found):.2f} to {max(found):.2f} of" for trained, found in ratios.items()
    }
    assert f"A forward costs {told[False]} flash-attn-4's" in TEXT and max(ratios[False]) <= 0.5
    assert f"With its backward, a call costs {told[True]} theirs." in TEXT
    alone = [row["autograd alone"] / row["flash-attn-4"] for row in rows.values() if len(row) > 2]
    assert "Autograd alone is a third of theirs" in TEXT
    assert sum(alone) / len(alone) == pytest.approx(1 / 3, abs=0.04)


# ---- the package ---------------------------------------------------------------------------


def test_the_package_has_the_op_and_nothing_else():
    assert flash_ladder.flash_attn_func is flash_attn_func
    assert {"flash_attn_func", "flash_attn_varlen_func"} < set(flash_ladder.__all__)
    with pytest.raises(AttributeError, match="no attribute 'flash_attn'"):
        flash_ladder.flash_attn  # noqa: B018


def test_a_compilation_is_announced_where_asked():
    key, told = CompileKey(8, "sm_100a", "bfloat16", 64), []
    compile.announce(key)
    with compile.announced(told.append):
        compile.announce(key)
    compile.announce(key)
    assert told == [key]
