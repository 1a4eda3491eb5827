# SPDX-License-Identifier: Apache-2.0
"""Generators: the same bits for the same seed, and the statistics their descriptions claim."""

import hashlib
import itertools
import math
import sys

import numpy as np
import pytest
import safetensors.torch
import torch
from flash_ladder.common import inputs, numerics, reference

SMALL = {"batch": 2, "seqlen_q": 64, "seqlen_k": 384, "heads": 4, "heads_kv": 2, "head_dim": 64}
NAMES = list(inputs.GENERATORS)
DTYPES = [torch.bfloat16, torch.float16, torch.float32]


def bits(problem):
    """A digest of everything in a problem."""
    digest = hashlib.sha256()
    for x in (problem.q, problem.k, problem.v, problem.dout):
        digest.update(x.contiguous().view(torch.uint8).numpy().tobytes())
    for x in problem.options.values():
        digest.update(b"" if x is None else x.numpy().tobytes())
    return digest.hexdigest()


def scores(problem):
    """Scaled scores (b, h, sq, sk) in float64."""
    q, k = problem.q.double().transpose(1, 2), problem.k.double().transpose(1, 2)
    k = k.repeat_interleave(q.shape[1] // k.shape[1], 1)
    return q @ k.mT / math.sqrt(q.shape[3])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", NAMES)
def test_shapes_and_seeds(name, dtype):
    one = inputs.make(name, **SMALL, dtype=dtype, seed=3)
    assert one.q.shape == one.dout.shape == (2, 64, 4, 64)
    assert one.k.shape == one.v.shape == (2, 384, 2, 64)
    assert {x.dtype for x in (one.q, one.k, one.v, one.dout)} == {dtype}
    assert one.name == name and one.seed == 3 and one.softmax_scale is None
    assert bits(one) == bits(inputs.make(name, **SMALL, dtype=dtype, seed=3))
    assert bits(one) != bits(inputs.make(name, **SMALL, dtype=dtype, seed=4))
    assert (not one.options) == (inputs.GENERATORS[name].needs is None)
    if inputs.GENERATORS[name].needs is None:
        assert all(x.isfinite().all() for x in (one.q, one.k, one.v, one.dout))


def test_bits_are_pinned():
    found = bits(inputs.make("gaussian", **SMALL, seed=0))
    assert found[:16] == "416bdfc92284e831"


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(("batch", "sq", "sk"), [(0, 8, 8), (1, 0, 8), (1, 8, 0), (1, 1, 1)])
def test_small_sizes(name, batch, sq, sk):
    problem = inputs.make(name, batch=batch, seqlen_q=sq, seqlen_k=sk, heads=2, head_dim=8)
    assert problem.q.shape == (batch, sq, 2, 8) and problem.k.shape == (batch, sk, 2, 8)
    used = problem.options
    assert reference.attention(problem.q, problem.k, problem.v, **used).out.isfinite().all()


def test_registry():
    assert {"gaussian", "llm_like"} == {
        n for n, g in inputs.GENERATORS.items() if not g.adversarial
    }
    assert all(g.name == name and g.description for name, g in inputs.GENERATORS.items())
    assert [n for n, g in inputs.GENERATORS.items() if g.needs == "lengths"] == ["excluded_nan"]


def test_gaussian():
    stats = inputs.logit_statistics(inputs.make("gaussian", **SMALL))
    assert stats.std == pytest.approx(1, abs=0.05) and 4 < stats.max_abs < 7
    assert stats.rising_far == 0 and 0.2 < stats.rising < 0.6


def test_logit_statistics_by_hand():
    k = torch.tensor([0.0, 8.0, 2.0, 0.0, 1.0]).reshape(1, 5, 1, 1)
    q = torch.tensor([1.0, -1.0]).reshape(1, 2, 1, 1)
    problem = inputs.Problem(q, k, k, q, softmax_scale=1.0)
    stats = inputs.logit_statistics(problem, block=2)
    # blocks last to first: (1), (2, 0), (0, 8): query 1 rises by 1 and 6, query 2 by 1 and 0
    assert stats.max_abs == 8 and stats.rising == 3 / 4 and stats.rising_far == 1 / 4
    assert stats.std == pytest.approx(math.sqrt(2 * (64 + 4 + 1) / 10))
    assert inputs.logit_statistics(problem, block=2, threshold=9).rising_far == 0
    with pytest.raises(ValueError, match="no scores"):
        inputs.logit_statistics(inputs.make("gaussian", **{**SMALL, "seqlen_k": 0}))


@pytest.mark.parametrize(("heads", "heads_kv"), [(1, 1), (4, 4), (8, 2)])
def test_llm_like_rescales_rarely_but_does(heads, heads_kv):
    problem = inputs.make(
        "llm_like",
        batch=1,
        seqlen_q=512,
        seqlen_k=1024,
        heads=heads,
        heads_kv=heads_kv,
        head_dim=128,
    )
    stats = inputs.logit_statistics(problem)
    assert 0.0005 < stats.rising_far < 0.03, stats
    assert 0.2 < stats.rising < 0.5 and 1.5 < stats.std < 3 and 10 < stats.max_abs < 80
    first = scores(problem)[..., 0].mean()
    assert first > scores(problem)[..., 1:].mean() + 4  # the first token attracts


def test_llm_like_aligns_the_last_query_with_the_last_key(monkeypatch):
    firsts = []
    monkeypatch.setattr(inputs, "_rope", lambda x, first: firsts.append(first) or x)
    inputs.make("llm_like", **SMALL)
    assert firsts == [384 - 64, 0]


def test_llm_like_outliers_turn_with_position():
    problem = inputs.make("llm_like", **SMALL, dtype=torch.float32)
    power = problem.q.square().mean((0, 1, 2))
    assert power[28:32].min() > 3 * power[:28].max()  # 4 slow channels of the first half
    v = problem.v.square().mean((0, 2, 3))
    assert v[0] < 0.05 and v[1:].mean() > 0.9
    x = np.ones((1, 3, 1, 4), dtype=np.float32)
    turned = inputs._rope(x, 5)
    close = np.testing.assert_allclose
    close(turned[0, 1, 0, 0], math.cos(6) - math.sin(6), rtol=1e-6)
    close(turned[0, 1, 0, 2], math.cos(6) + math.sin(6), rtol=1e-6)
    slow = 6 * inputs.ROPE_BASE**-0.5
    close(turned[0, 1, 0, 1], math.cos(slow) - math.sin(slow), rtol=1e-6)
    dots = [(inputs._rope(x, a)[0, 0] * inputs._rope(x, a + 3)[0, 0]).sum() for a in (0, 11)]
    close(dots[0], dots[1], rtol=1e-5)  # only the distance matters


def test_logits_near_120():
    s = scores(inputs.make("logits_near_120", **SMALL))
    assert 117 < s.abs().min() and s.abs().max() < 123
    assert (s > 0).any() and (s < 0).any()
    one_sign = (s > 0).all(-1) | (s < 0).all(-1)
    assert one_sign[:, :2].all() and not one_sign[:, 2:].any()  # kv head 0 serves heads 0 and 1
    assert (s[:, :2] < 0).all(-1).any() and (s[:, :2] > 0).all(-1).any()


def test_dominant_key():
    p = torch.softmax(scores(inputs.make("dominant_key", **SMALL)), -1)
    assert p.amax(-1).min() > 0.99
    assert p.argmax(-1).unique().numel() > 180  # of 384 keys, found by 512 rows


def test_equal_rows():
    problem = inputs.make("equal_rows", **SMALL)
    assert (scores(problem).std(-1) < 1e-12).all()
    out = reference.attention(problem.q, problem.k, problem.v).out
    mean = problem.v.double().mean(1, keepdim=True).repeat_interleave(2, 2)
    assert torch.allclose(out, mean.expand_as(out))


@pytest.mark.parametrize("dtype", DTYPES)
def test_ascending_and_descending_max(dtype):
    size = {**SMALL, "seqlen_k": 2048 + 40}
    up, down = (inputs.make(n, **size, dtype=dtype) for n in ("ascending_max", "descending_max"))
    assert inputs.logit_statistics(up).rising_far == 1  # every block, beyond the threshold of 8
    assert inputs.logit_statistics(down).rising == 0
    tops = [x.amax(-1) for x in scores(down).split(128, -1)]
    assert all((a < b).all() for a, b in itertools.pairwise(tops))  # later blocks are larger
    assert scores(up).argmax(-1).max() < 128 and scores(down).argmax(-1).min() >= 2048


@pytest.mark.parametrize("dtype", DTYPES)
def test_surrounded_by_nan(dtype):
    problem = inputs.make("surrounded_by_nan", **SMALL, dtype=dtype)
    for x in (problem.q, problem.k, problem.v, problem.dout):
        assert x.isfinite().all() and not x.is_contiguous() and x.stride(3) == 1
        assert x.data_ptr() % 16 == 0
        assert all(step * x.element_size() % 16 == 0 for step in x.stride()[:3])
        storage = torch.empty(0, dtype=dtype).set_(x.untyped_storage())
        bad = ~storage.isfinite()
        assert bad.sum() == storage.numel() - x.numel() and bad[0] and bad[-1]
        assert storage.isnan().any() and storage.isinf().any()
        below = x.as_strided(x.shape, x.stride(), x.storage_offset() - 1)[..., 0]
        assert not below.isfinite().any()


def test_excluded_nan_always_leaves_a_row_out():
    tiny = {**SMALL, "batch": 64, "seqlen_q": 2, "seqlen_k": 3}
    problem = inputs.make("excluded_nan", **tiny)
    assert (problem.options["seqused_q"] == 1).all()
    assert set(problem.options["seqused_k"].tolist()) == {1, 2}


def test_excluded_nan():
    problem = inputs.make("excluded_nan", **{**SMALL, "batch": 8})
    used_q, used_k = problem.options["seqused_q"], problem.options["seqused_k"]
    assert used_q.dtype == used_k.dtype == torch.int32
    assert ((used_q >= 32) & (used_q < 64)).all() and ((used_k >= 192) & (used_k < 384)).all()
    assert used_q.unique().numel() > 1 and used_k.unique().numel() > 1
    for b in range(8):
        for x, used in (
            (problem.q, used_q),
            (problem.dout, used_q),
            (problem.k, used_k),
            (problem.v, used_k),
        ):
            assert x[b, : used[b]].isfinite().all()
            assert not x[b, used[b] :].isfinite().any()
            assert x[b, used[b] :].isnan().any() and x[b, used[b] :].isinf().any()
    result = reference.attention(problem.q, problem.k, problem.v, **problem.options)
    out, _ = reference.same_precision(problem.q, problem.k, problem.v, **problem.options)
    assert result.out.isfinite().all() and not result.unspecified.any()
    numerics.compare(out, result.out, out).check()


def test_shape_text():
    assert inputs.make("gaussian", **SMALL).shape_text == "b2 sq64 sk384 h4/2 d64 bf16"
    q, v = torch.zeros(1, 2, 3, 8), torch.zeros(1, 4, 3, 16)
    assert inputs.Problem(q, v[..., :8], v, q).shape_text == "b1 sq2 sk4 h3 d8/16 fp32"


@pytest.mark.parametrize(
    ("change", "error", "match"),
    [
        ({"name": "gausian"}, ValueError, "Did you mean 'gaussian'"),
        ({"name": "zzz"}, ValueError, "allowed: gaussian"),
        ({"dtype": torch.float64}, TypeError, "torch.float64"),
        ({"seqlen_q": -1}, ValueError, "seqlen_q -1"),
        ({"heads_kv": 3}, ValueError, "heads_kv 3"),
        ({"heads": 0}, ValueError, "heads is 0"),
        ({"head_dim": 12}, ValueError, "multiples of 8"),
    ],
)
def test_make_errors(change, error, match):
    with pytest.raises(error, match=match):
        inputs.make(**{"name": "gaussian", **SMALL, **change})


# loading ------------------------------------------------------------------------------------------


def tensors(dtype=torch.float32, **change):
    """A dictionary that load_qkv accepts, with some entries replaced or, by None, removed."""
    found = {
        "q": torch.randn(1, 4, 4, 8).to(dtype),
        "k": torch.randn(1, 6, 2, 8).to(dtype),
        "v": torch.randn(1, 6, 2, 16).to(dtype),
        **change,
    }
    return {key: x for key, x in found.items() if x is not None}


def save(path, found):
    """Writes in the format that the suffix names."""
    if path.suffix == ".npz":
        np.savez(path, **{key: x.numpy() for key, x in found.items()})
    elif path.suffix == ".safetensors":
        safetensors.torch.save_file(found, path)
    else:
        torch.save(found, path)
    return path


@pytest.mark.parametrize("suffix", [".npz", ".safetensors", ".pt"])
def test_load(tmp_path, suffix):
    found = tensors(dout=torch.randn(1, 4, 4, 16))
    problem = inputs.load_qkv(save(tmp_path / f"mine{suffix}", found))
    for key, x in found.items():
        assert torch.equal(getattr(problem, key), x)
    assert problem.name == "mine" and problem.shape_text == "b1 sq4 sk6 h4/2 d8/16 fp32"
    converted = inputs.load_qkv(str(tmp_path / f"mine{suffix}"), dtype=torch.bfloat16)
    assert torch.equal(converted.v, found["v"].bfloat16())
    assert converted.dout.dtype == torch.bfloat16


@pytest.mark.parametrize("suffix", [".safetensors", ".pt"])
def test_load_bfloat16_and_default_dout(tmp_path, suffix):
    path = save(tmp_path / f"x{suffix}", tensors(torch.bfloat16))
    one, two = inputs.load_qkv(path), inputs.load_qkv(path)
    assert one.q.dtype == one.dout.dtype == torch.bfloat16
    assert one.dout.shape == (1, 4, 4, 16) and torch.equal(one.dout, two.dout)


@pytest.mark.parametrize(
    ("change", "error", "match"),
    [
        ({"k": None, "v": None}, ValueError, r"lacks k, v; it holds \['q'\]"),
        ({"q": torch.zeros(4, 4, 8)}, ValueError, "expected \\(batch"),
        ({"q": torch.zeros(1, 4, 4, 8, dtype=torch.int32)}, TypeError, "q is "),
        ({"q": torch.zeros(1, 4, 3, 8)}, ValueError, "do not fit together"),
        ({"v": torch.zeros(1, 5, 2, 8)}, ValueError, "do not fit together"),
        ({"q": torch.zeros(1, 4, 4, 8).half()}, TypeError, "mixes dtypes"),
        ({"dout": torch.zeros(1, 4, 4, 8)}, ValueError, "dout"),
    ],
)
@pytest.mark.parametrize("suffix", [".npz", ".safetensors", ".pt"])
def test_load_errors(tmp_path, suffix, change, error, match):
    path = save(tmp_path / f"bad{suffix}", tensors(**change))
    with pytest.raises(error, match=match):
        inputs.load_qkv(path)


def test_a_negative_seed_is_refused():
    with pytest.raises(ValueError, match="seed is -1; allowed: 0 or more"):
        inputs.make("gaussian", **SMALL, seed=-1)


def test_load_refuses_other_files(tmp_path, monkeypatch):
    with pytest.raises(ValueError, match=r"ends in '.bin'; allowed: .npz, .safetensors, .pt"):
        inputs.load_qkv(tmp_path / "x.bin")
    with pytest.raises(FileNotFoundError, match="no file"):
        inputs.load_qkv(tmp_path / "x.npz")
    (tmp_path / "empty.pt").touch()
    with pytest.raises(ValueError, match=r"empty.pt cannot be read as .pt: EOFError"):
        inputs.load_qkv(tmp_path / "empty.pt")
    torch.save([torch.zeros(1)], tmp_path / "list.pt")
    with pytest.raises(TypeError, match="holds a list"):
        inputs.load_qkv(tmp_path / "list.pt")
    torch.save(tensors(q="text"), tmp_path / "text.pt")
    with pytest.raises(TypeError, match="q is str"):
        inputs.load_qkv(tmp_path / "text.pt")
    torch.save({**tensors(), "note": tmp_path}, tmp_path / "object.pt")
    with pytest.raises(TypeError, match="could run code"):
        inputs.load_qkv(tmp_path / "object.pt")
    path = save(tmp_path / "x.safetensors", tensors())
    monkeypatch.setitem(sys.modules, "safetensors.torch", None)
    with pytest.raises(ImportError, match="pip install safetensors"):
        inputs.load_qkv(path)
