# SPDX-License-Identifier: Apache-2.0
"""What a launch accepts and refuses beyond `contract.refusals`."""

import dataclasses
import itertools
from fractions import Fraction

import numpy as np
import pytest
import torch
from flash_ladder import load
from flash_ladder.common import inputs
from flash_ladder.common import launch as launching
from flash_ladder.common.envelope import MAX_GRID, MAX_ROWS, Problem, check
from flash_ladder.common.launch import ARCH_OF, contiguous_like, loadable

SHAPE = (2, 128, 3, 64)


def _qkv(shape=SHAPE, **options):
    return [torch.zeros(shape, dtype=torch.bfloat16, **options) for _ in "qkv"]


def _problem(batch=1, heads=2, seqlen_k=256):
    return inputs.make(
        "gaussian",
        batch=batch,
        seqlen_q=128,
        seqlen_k=seqlen_k,
        heads=heads,
        head_dim=64,
        dtype=torch.bfloat16,
    )


def test_sizes_of_a_problem(stage):
    q, (k, v) = _qkv()[0], _qkv((2, 384, 3, 64))[:2]
    wanted = Problem(2, 128, 384, 3, 64, "bfloat16", 0.125)
    assert check(stage, q, k, v, need_cuda=False) == wanted


@pytest.mark.parametrize(
    ("scale", "value"),
    [
        (None, 64**-0.5),
        (0.25, 0.25),
        (1, 1.0),
        (np.float64(0.25), 0.25),
        (np.float32(0.25), 0.25),
        (np.float16(0.25), 0.25),
        (np.int64(2), 2.0),
        (Fraction(1, 4), 0.25),
        (2.0**-125, 2.0**-125),
        (2**127, 2.0**127),
    ],
)
def test_softmax_scale_may_be_any_real_number(stage, scale, value):
    found = check(stage, *_qkv(), scale, need_cuda=False)
    assert found.softmax_scale == value and type(found.softmax_scale) is float


@pytest.mark.parametrize("scale", [True, np.bool_(True), "0.5", 1j, torch.tensor(0.5), [0.5]])
def test_softmax_scale_of_another_type_is_refused(stage, scale):
    with pytest.raises(TypeError, match="softmax_scale must be a number or None; got"):
        check(stage, *_qkv(), scale, need_cuda=False)


@pytest.mark.parametrize(
    "scale",
    [
        0,
        0.0,
        -0.5,
        float("inf"),
        float("nan"),
        np.float32("nan"),
        1e-39,
        3e38,
        10**400,
        2.0**-126,
        2.0**127.1,
    ],
)
def test_softmax_scale_that_float32_cannot_use_is_refused(stage, scale):
    with pytest.raises(ValueError, match="softmax_scale must be finite and positive"):
        check(stage, *_qkv(), scale, need_cuda=False)


def test_stride_0_is_accepted(stage):
    made = _problem()
    k, v = (x.expand(2, -1, -1, -1) for x in (made.k, made.v))
    q = torch.cat([made.q, made.q])
    run = stage.simulate(q, k, v)
    assert torch.equal(run.out[0], run.out[1])
    assert torch.equal(run.out, stage.simulate(q, k.contiguous(), v.contiguous()).out)
    one_head = made.k[:, :, :1].expand(-1, -1, 2, -1)
    check(stage, made.q, one_head, one_head, need_cuda=False)


def test_strides_of_axes_of_size_1_do_not_matter(stage):
    made = _problem(batch=1, heads=1)
    odd = [x.as_strided(x.shape, (3, 64, 5, 1)) for x in (made.q, made.k, made.v)]
    run = stage.simulate(*odd)
    assert torch.equal(run.out, stage.simulate(made.q, made.k, made.v).out)


def test_turned_storage_is_accepted(stage):
    made = _problem()
    turned = [x.transpose(1, 2).contiguous().transpose(1, 2) for x in (made.q, made.k, made.v)]
    run = stage.simulate(*turned)
    assert run.out.is_contiguous()
    assert torch.equal(run.out, stage.simulate(made.q, made.k, made.v).out)


def test_tensors_that_want_gradients_pass_under_no_grad(stage):
    q, k, v = (x.requires_grad_() for x in _qkv())
    with torch.no_grad():
        check(stage, q, k, v, need_cuda=False)
    with torch.inference_mode(), torch.enable_grad():
        check(stage, q, k, v, need_cuda=False)
    check(stage, q.detach(), k.detach(), v.detach(), need_cuda=False)
    with pytest.raises(ValueError, match="but q, k, v requires grad"):
        check(stage, q, k, v, need_cuda=False)


@pytest.mark.parametrize(
    ("need_cuda", "words"),
    [(True, "runs on a CUDA GPU; q, k and v are on 'meta'"), (False, "takes CPU tensors; q, k")],
)
def test_meta_tensors_are_refused(stage, need_cuda, words):
    with pytest.raises(ValueError, match=words):
        check(stage, *_qkv(device="meta"), need_cuda=need_cuda)


def test_tensors_on_two_devices_are_refused(stage):
    q, k, _ = _qkv()
    (v,) = _qkv(device="meta")[:1]
    with pytest.raises(ValueError, match=r"one device; got \{'q': 'cpu', 'k': 'cpu', 'v': 'meta'"):
        check(stage, q, k, v)


@pytest.mark.parametrize("number", [2, 8])
def test_rows_have_a_limit(number):
    q, k, _ = _qkv((1, 1, 1, 64))
    rows = MAX_ROWS // 128 * 128
    for sizes in ((rows + 128, 128), (128, rows + 128)):
        wide, keys = (x.expand(-1, size, -1, -1) for x, size in zip((q, k), sizes))
        with pytest.raises(ValueError, match=f"at most {MAX_ROWS} rows each; got {rows + 128}"):
            check(load(number), wide, keys, keys, need_cuda=False)
    fits = q.expand(-1, rows, -1, -1)
    assert check(load(number), fits, fits, fits, need_cuda=False).seqlen_q == rows


def test_packed_rows_have_a_limit():
    """Of all sequences together, however short the longest."""
    q = _qkv((1, 1, 64))[0].expand(MAX_ROWS + 1, -1, -1)
    ends = torch.tensor([0, 1], dtype=torch.int32)
    options = {"cu_seqlens_q": ends, "cu_seqlens_k": ends, "max_seqlen_q": 1, "max_seqlen_k": 1}
    with pytest.raises(ValueError, match=f"at most {MAX_ROWS} rows each"):
        check(load(8), q, q, q, need_cuda=False, **options)


def test_a_grid_has_a_limit(stage):
    batch, heads = 2**16, 2**15  # one query tile each: 2**31 CTAs
    large = [x[:1, :, :1].expand(batch, -1, heads, -1) for x in _qkv()]
    with pytest.raises(ValueError, match=f"2147483648 query tiles exceed one grid's {MAX_GRID}"):
        check(stage, *large, need_cuda=False)
    fits = [x[:1, :, :1].expand(-1, -1, MAX_GRID, -1) for x in _qkv()]
    assert check(stage, *fits, need_cuda=False).heads == 2**31 - 1


@pytest.mark.parametrize(
    ("shape", "strides", "expected"),
    [
        ((2, 8, 2, 16), (256, 32, 16, 1), (256, 32, 16, 1)),
        ((1, 8, 2, 16), (7, 32, 16, 1), (0, 32, 16, 1)),
        ((1, 1, 1, 16), (1, 5, 3, 1), (0, 0, 0, 1)),
        ((1, 8, 1, 16), (8, 16, 24, 1), (8, 16, 24, 1)),  # aligned as they are
        ((2, 8, 2, 16), (0, 32, 16, 1), (0, 32, 16, 1)),
    ],
)
def test_aligned_changes_strides_that_address_nothing(shape, strides, expected):
    storage = torch.arange(1024, dtype=torch.bfloat16)
    tensor = storage.as_strided(shape, strides, storage_offset=8)
    found = loadable(tensor)
    assert found.stride() == expected and found.data_ptr() == tensor.data_ptr()
    assert torch.equal(found, tensor)
    assert (found is tensor) == (strides == expected)


@pytest.mark.parametrize(
    ("strides", "start"),
    [
        ((256, 32, 16, 2), 8),
        ((128, 32, 1, 2), 8),
        ((256, 36, 16, 1), 8),
        ((256, 32, 1, 1), 8),
        ((256, 32, 16, 1), 9),
    ],
)
def test_what_kernels_cannot_load_is_copied(strides, start):
    """By its innermost stride, without gaps too, another one, which may overlap it, its start."""
    storage = torch.arange(1024, dtype=torch.bfloat16, requires_grad=True)
    tensor = storage.as_strided((2, 4, 2, 16), strides, storage_offset=start)
    found = loadable(tensor)
    assert found.is_contiguous() and found.data_ptr() % 16 == 0 and not found.requires_grad
    assert torch.equal(found, tensor)


def test_outputs_are_contiguous_whatever_inputs_are():
    x = torch.zeros(2, 3, 4, 8, dtype=torch.bfloat16, requires_grad=True)
    last = x.contiguous(memory_format=torch.channels_last)
    for like in (x, x.transpose(1, 2), x[:1].expand(5, -1, -1, -1), last):
        for shape, dtype in ((None, None), (None, torch.float32), ((2, 3), torch.float32)):
            made = contiguous_like(like, shape, dtype)
            assert made.shape == (shape or like.shape) and made.dtype == (dtype or like.dtype)
            assert made.is_contiguous() and not made.requires_grad


@pytest.mark.parametrize(
    ("options", "filled"),
    [
        ({}, False),
        ({"causal": True}, False),
        ({"window_size": (None, -3)}, False),  # the first queries see no key
        ({"window_size": (-5, 3)}, True),  # nobody does
        ({"seqused_k": torch.ones(2, dtype=torch.int32)}, False),
    ],
)
def test_results_are_0_and_inf_where_no_kernel_is_started(options, filled):
    q, (k, v) = _qkv((2, 5, 3, 64))[0], _qkv((2, 7, 3, 64))[:2]
    problem = check(load(8), q, k, v, need_cuda=False, **options)
    out, lse = launching.empty_results(problem, q, lambda *x: contiguous_like(*x).fill_(torch.nan))
    assert (out.shape, out.dtype) == (q.shape, q.dtype)
    assert (lse.shape, lse.dtype) == ((2, 3, 5), torch.float32)
    assert (not out.any() and (lse == -torch.inf).all()) if filled else out.isnan().all()
    assert lse.isnan().any() != filled


def test_a_kernel_gets_tensors_without_autograd():
    leaf = torch.zeros(1, 2, 1, 64, requires_grad=True)
    for tensor in (leaf, leaf[..., 0]):
        found = loadable(tensor)
        assert not found.requires_grad and found.data_ptr() == tensor.data_ptr()


def test_a_kernel_gets_the_signs_in_memory():
    pairs = torch.arange(1024.0).view(2, 8, 32, 2)
    for tensor in (torch.view_as_complex(pairs).conj().imag, torch._neg_view(pairs.bfloat16())):
        found = loadable(tensor)
        assert tensor.is_neg() and not found.is_neg() and torch.equal(found, tensor)


def test_every_native_target_can_be_compiled_for(stage):
    assert set(stage.config.ARCHS) == set(ARCH_OF.values())


def test_the_second_call_looks_nothing_up(stage, monkeypatch):
    """Finding a kernel reads files; an op that did so at every call would be slow."""
    found = []
    monkeypatch.setattr(launching, "_KERNELS", {})
    monkeypatch.setattr(launching, "native_arch", lambda device: "sm_90a")
    monkeypatch.setattr(launching, "compile_stage", lambda *a, **k: found.append(k) or "kernel")
    device = torch.device("cuda", 0)
    problem = Problem(1, 128, 128, 1, 64, "float16", 1.0)
    assert launching.kernel_for(stage, problem, device) == "kernel"
    assert launching.kernel_for(stage, problem, device) == "kernel" and len(found) == 1
    other = dataclasses.replace(problem, dtype="bfloat16")
    launching.kernel_for(stage, other, device)
    assert [row["dtype"] for row in found] == ["float16", "bfloat16"]


def test_every_kernel_has_its_own_entry(monkeypatch):
    """By stage and part, mode, log, dtype, head dim and GPU."""
    monkeypatch.setattr(launching, "_KERNELS", {})
    made = lambda stage, problem, device: (
        stage.tag, *launching.current_execution(), problem.dtype, problem.head_dim, device.index
    )  # fmt: skip
    monkeypatch.setattr(launching, "_find_kernel", made)
    stages = load(7), load(7).part("preprocess"), load(8)
    runs = (None, False), ("native", False), ("rewritten", False), ("rewritten", True)
    for source, run, dtype, head_dim, index in itertools.product(
        stages, runs, ("float16", "bfloat16"), (64, 128), range(2)
    ):
        problem = Problem(1, 128, 128, 1, head_dim, dtype, 1.0)
        with launching.execution(*run):
            found = launching.kernel_for(source, problem, torch.device("cuda", index))
        assert found == (source.tag, *run, dtype, head_dim, index)
    assert len(launching._KERNELS) == 3 * 4 * 2 * 2 * 2


@pytest.mark.parametrize("log", [False, True])
def test_a_rewritten_kernel_is_looked_for_with_its_log(stage, monkeypatch, log):
    monkeypatch.setattr(launching, "_KERNELS", {})
    monkeypatch.setattr(launching, "modes", lambda *_: ["native", "rewritten"])
    monkeypatch.setattr("flash_ladder.common.hopper.run.hopper_kernel", lambda *given: given[-1])
    problem = Problem(1, 128, 128, 1, 64, "float16", 1.0)
    with launching.execution("rewritten", log=log):
        assert launching.kernel_for(stage, problem, torch.device("cuda", 0)) is log


def test_a_mode_that_the_gpu_does_not_have_is_refused(stage, monkeypatch):
    monkeypatch.setattr(launching, "_KERNELS", {})
    monkeypatch.setattr(launching, "native_arch", lambda device: "sm_80")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 0))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "Some GPU")
    problem = Problem(1, 128, 128, 1, 64, "float16", 1.0)
    assert launching.modes(stage, torch.device("cuda", 0)) == ["native"]
    with launching.execution("rewritten"), pytest.raises(ValueError, match="cannot run it rewr"):
        launching.kernel_for(stage, problem, torch.device("cuda", 0))


def test_hopper_runs_both_ways_and_native_first(stage, monkeypatch):
    monkeypatch.setattr(launching, "native_arch", lambda device: "sm_90a")
    assert launching.modes(stage, torch.device("cuda", 0)) == ["native", "rewritten"]
