# SPDX-License-Identifier: Apache-2.0
"""The oracle against torch, autograd, finite differences and cases worked out by hand."""

import math

import hypothesis
import hypothesis.strategies as st
import pytest
import torch
from flash_ladder.common import reference

INF, NAN = math.inf, math.nan
OPTIONS = {
    "full": {},
    "scale": {"softmax_scale": 0.3},
    "causal": {"causal": True},
    "window": {"window_size": (3, 2)},
    "left": {"window_size": (4, None)},
    "right": {"window_size": (-1, 1)},
    "causal_left": {"causal": True, "window_size": (2, 5)},
    "shifted": {"window_size": (-2, 6)},
    "behind": {"window_size": (6, -2)},
    "empty": {"window_size": (-5, 3)},
    "used": {"seqused_q": [5, 0, 9], "seqused_k": [3, 7, 0]},
    "used_causal": {"causal": True, "seqused_q": [5, 9, 2], "seqused_k": [3, 11, 7]},
    "softcap": {"softcap": 1.5},
    "sink": {"sink": True},
    "all": {
        "causal": True,
        "window_size": (4, -1),
        "seqused_q": [9, 4, 7],
        "seqused_k": [5, 11, 9],
        "softcap": 2.0,
        "sink": True,
        "softmax_scale": 0.5,
    },
}


def inputs(batch=3, sq=9, sk=11, heads=4, heads_kv=2, dim=8, dim_v=6, dtype=torch.float64, seed=0):
    """Random q, k, v, dout, dlse, sink."""
    rng = torch.Generator().manual_seed(seed)
    shapes = {
        "q": (batch, sq, heads, dim),
        "k": (batch, sk, heads_kv, dim),
        "v": (batch, sk, heads_kv, dim_v),
        "dout": (batch, sq, heads, dim_v),
        "dlse": (batch, heads, sq),
        "sink": (heads,),
    }
    return [torch.randn(s, generator=rng, dtype=torch.float64).to(dtype) for s in shapes.values()]


def with_sink(options, sink):
    """Replaces the marker True by the tensor."""
    return {**options, "sink": sink} if "sink" in options else dict(options)


def mask_by_loops(batch, sq, sk, options):
    """The definition of the mask, one pair at a time."""
    left, right = options.get("window_size", (None, None))
    used_q, used_k = options.get("seqused_q", [sq] * batch), options.get("seqused_k", [sk] * batch)
    mask = torch.zeros(batch, sq, sk, dtype=torch.bool)
    for b in range(batch):
        for i in range(used_q[b]):
            for j in range(used_k[b]):
                ahead = j - (i + used_k[b] - used_q[b])
                seen = True
                if left not in (None, -1):
                    seen = seen and -ahead <= left
                if right not in (None, -1):
                    seen = seen and ahead <= right
                if options.get("causal"):
                    seen = seen and ahead <= 0
                mask[b, i, j] = seen
    return mask


def naive(q, k, v, options):
    """Differentiable attention by other means: one head at a time, softmax over a real column."""
    batch, sq, heads, dim = q.shape
    group = heads // k.shape[2]
    mask = mask_by_loops(batch, sq, k.shape[1], options)
    scale = options.get("softmax_scale", dim**-0.5)
    cap, sink = options.get("softcap", 0.0), options.get("sink")
    used_q = options.get("seqused_q", [sq] * batch)
    out = torch.zeros(batch, sq, heads, v.shape[3], dtype=q.dtype)
    lse = torch.full((batch, heads, sq), -INF, dtype=q.dtype)
    for b in range(batch):
        for i in range(used_q[b]):
            for h in range(heads):
                seen = mask[b, i]
                s = (k[b, seen, h // group] @ q[b, i, h]) * scale
                if cap:
                    s = cap * torch.tanh(s / cap)
                logits = s if sink is None else torch.cat([s, sink[h : h + 1]])
                if len(logits):
                    weight = torch.softmax(logits, 0)[: len(s)]
                    out[b, i, h] = weight @ v[b, seen, h // group]
                    lse[b, h, i] = torch.logsumexp(logits, 0)
    return out, lse


def close(a, b, tol=1e-12):
    torch.testing.assert_close(a, b, rtol=tol, atol=tol)


@pytest.mark.parametrize("name", OPTIONS)
def test_forward_and_mask_follow_the_definition(name):
    q, k, v, _, _, sink = inputs()
    options = with_sink(OPTIONS[name], sink)
    result = reference.attention(q, k, v, **options)
    out, lse = naive(q, k, v, options)
    close(result.out, out)
    close(result.lse, lse)
    assert not result.unspecified.any()
    keys = ("causal", "window_size", "seqused_q", "seqused_k")
    masks = reference.visibility(3, 9, 11, **{x: options[x] for x in keys if x in options})
    assert torch.equal(masks, mask_by_loops(3, 9, 11, options))


@pytest.mark.parametrize("use_dlse", [False, True])
@pytest.mark.parametrize("name", OPTIONS)
def test_backward_agrees_with_autograd(name, use_dlse):
    q, k, v, dout, dlse, sink = inputs()
    leaves = [x.clone().requires_grad_() for x in (q, k, v, sink)]
    out, lse = naive(*leaves[:3], with_sink(OPTIONS[name], leaves[3]))
    loss = (out * dout).sum()
    if use_dlse:
        loss = loss + (torch.where(lse.isinf(), 0.0, lse) * dlse).sum()
    grads = [torch.zeros_like(x) for x in leaves]
    if loss.requires_grad:
        found = torch.autograd.grad(loss, leaves, allow_unused=True)
        grads = [zero if g is None else g for zero, g in zip(grads, found)]
    options = with_sink(OPTIONS[name], sink)
    mine = reference.attention_backward(q, k, v, dout, dlse=dlse if use_dlse else None, **options)
    close(mine.dq, grads[0])
    close(mine.dk, grads[1])
    close(mine.dv, grads[2])
    assert (mine.dsink is None) == ("sink" not in options)
    if mine.dsink is not None:
        close(mine.dsink, grads[3])
    assert not mine.unspecified_q.any() and not mine.unspecified_k.any()


@pytest.mark.parametrize("name", ["full", "causal_left", "all"])
def test_backward_agrees_with_finite_differences(name):
    q, k, v, dout, dlse, sink = inputs()
    options = with_sink(OPTIONS[name], sink)
    grads = reference.attention_backward(q, k, v, dout, dlse=dlse, **options)

    def loss(q, k, v, sink):
        result = reference.attention(q, k, v, **with_sink(options, sink))
        return (result.out * dout).sum() + (result.lse.nan_to_num(0, 0, 0) * dlse).sum()

    tensors, pairs = (q, k, v, sink), [grads.dq, grads.dk, grads.dv, grads.dsink]
    for n, grad in enumerate(pairs):
        if grad is None:
            continue
        step = torch.randn_like(tensors[n]) * 1e-5
        above, below = list(tensors), list(tensors)
        above[n], below[n] = tensors[n] + step, tensors[n] - step
        difference = (loss(*above) - loss(*below)) / 2
        close(difference, (grad * step).sum(), 1e-9)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("heads_kv", [1, 2, 4])
def test_forward_agrees_with_sdpa(causal, heads_kv):
    q, k, v, *_ = inputs(batch=2, sq=33, sk=33, heads=4, heads_kv=heads_kv, dim=16, dim_v=16)
    with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
        out = torch.nn.functional.scaled_dot_product_attention(
            *(x.transpose(1, 2) for x in (q, k, v)), is_causal=causal, enable_gqa=True
        )
    close(reference.attention(q, k, v, causal=causal).out, out.transpose(1, 2))


def test_lse_is_the_natural_logarithm():
    q, k, v = torch.zeros(1, 2, 1, 4), torch.zeros(1, 5, 1, 4), torch.ones(1, 5, 1, 4)
    result = reference.attention(q, k, v, causal=True)
    assert result.lse.flatten().tolist() == pytest.approx([math.log(4), math.log(5)])
    assert result.lse.dtype == torch.float64 and result.out.dtype == torch.float64


@pytest.mark.parametrize(
    ("window", "expected"),
    [
        ((0, 0), ["..1..", "...1.", "....1"]),
        ((-1, -1), ["11111", "11111", "11111"]),
        ((1, 0), [".11..", "..11.", "...11"]),
        ((None, 0), ["111..", "1111.", "11111"]),
        ((-5, 3), [".....", ".....", "....."]),
        ((-2, 3), ["....1", ".....", "....."]),
        ((3, -2), ["1....", "11...", ".11.."]),
    ],
)
def test_windows_by_hand(window, expected):
    mask = reference.visibility(1, 3, 5, window_size=window)[0]
    assert ["".join("1" if x else "." for x in row) for row in mask.tolist()] == expected


def test_causal_caps_the_right_side_only():
    seen = [
        reference.visibility(1, 3, 5, causal=True, window_size=(1, right)) for right in (None, 0, 9)
    ]
    assert torch.equal(seen[0], seen[1]) and torch.equal(seen[0], seen[2])
    behind = reference.visibility(1, 3, 5, causal=True, window_size=(None, -2))
    assert torch.equal(behind, reference.visibility(1, 3, 5, window_size=(None, -2)))


def test_rows_that_see_nothing():
    q, k, v, dout, dlse, sink = inputs(batch=1, sq=6, sk=2)  # causal: rows 0 to 3 see nothing
    plain = reference.attention(q, k, v, causal=True)
    assert (plain.out[:, :4] == 0).all() and (plain.lse[..., :4] == -INF).all()
    assert plain.lse[..., 4:].isfinite().all()
    grads = reference.attention_backward(q, k, v, dout, dlse=dlse, causal=True)
    assert (grads.dq[:, :4] == 0).all() and grads.dk.isfinite().all()

    sunk = reference.attention(q, k, v, causal=True, sink=sink)
    assert (sunk.out[:, :4] == 0).all()
    close(sunk.lse[0, :, 0], sink)
    only = dlse.clone()
    only[..., 4:] = 0
    grads = reference.attention_backward(q, k, v, dout * 0, dlse=only, causal=True, sink=sink)
    close(grads.dsink, only.sum((0, 2)))


def test_sink_does_not_reach_unused_rows():
    q, k, v, dout, dlse, sink = inputs(batch=1)
    used = {"seqused_q": [5], "sink": sink}
    result = reference.attention(q, k, v, **used)
    assert (result.lse[..., 5:] == -INF).all() and (result.out[:, 5:] == 0).all()
    grads = reference.attention_backward(q, k, v, dout, dlse=dlse, **used)
    moved = (dout.clone(), dlse.clone())
    moved[0][:, 5:], moved[1][..., 5:] = 7.0, 7.0
    again = reference.attention_backward(q, k, v, moved[0], dlse=moved[1], **used)
    assert torch.equal(grads.dsink, again.dsink) and torch.equal(grads.dk, again.dk)


def test_a_sink_of_minus_infinity_is_no_sink():
    q, k, v, dout, *_ = inputs(batch=1, sq=4, sk=2)
    sink = torch.full((4,), -INF, dtype=torch.float64)
    plain = reference.attention(q, k, v, causal=True)
    sunk = reference.attention(q, k, v, causal=True, sink=sink)
    assert torch.equal(plain.out, sunk.out) and torch.equal(plain.lse, sunk.lse)
    grads = reference.attention_backward(q, k, v, dout, causal=True, sink=sink)
    assert (grads.dsink == 0).all() and grads.dq.isfinite().all()


@pytest.mark.parametrize("bad", [NAN, INF, -INF])
@pytest.mark.parametrize("sink", [False, True])
def test_excluded_rows_cannot_reach_any_result(bad, sink):
    q, k, v, dout, dlse, logits = inputs(batch=2)
    options = {"seqused_q": [5, 9], "seqused_k": [11, 4], "window_size": (2, 2), "softcap": 3.0}
    options["sink"] = logits if sink else None
    clean = reference.attention(q, k, v, **options)
    clean_grads = reference.attention_backward(q, k, v, dout, dlse=dlse, **options)
    k[1, 4:], v[1, 4:] = bad, bad
    q[0, 5:], dout[0, 5:], dlse[0, :, 5:] = bad, bad, bad
    dirty = reference.attention(q, k, v, **options)
    dirty_grads = reference.attention_backward(q, k, v, dout, dlse=dlse, **options)
    assert torch.equal(clean.out, dirty.out) and torch.equal(clean.lse, dirty.lse)
    assert not dirty.unspecified.any()
    for name in ("dq", "dk", "dv", "dsink"):
        a, b = getattr(clean_grads, name), getattr(dirty_grads, name)
        assert (a is None and b is None) or torch.equal(a, b), name
    assert not dirty_grads.unspecified_q.any() and not dirty_grads.unspecified_k.any()


def test_a_bad_live_value_row_leaves_other_rows_unspecified():
    q, k, v, dout, *_ = inputs(batch=1, sq=6, sk=6)
    clean = reference.attention(q, k, v, causal=True)
    clean_grads = reference.attention_backward(q, k, v, dout, causal=True)
    v[0, 4, 1, 2] = NAN  # kv head 1 serves query heads 2 and 3
    result = reference.attention(q, k, v, causal=True)
    expected = torch.zeros(1, 4, 6, dtype=torch.bool)
    expected[0, 2:, :4] = True
    assert torch.equal(result.unspecified, expected)
    assert torch.equal(result.ignore[..., 0].transpose(1, 2), expected)
    assert result.out[0, 4:, 2:, 2].isnan().all()  # NaN by right, in its own column
    close(result.out[0, 4:, 2:, 3], clean.out[0, 4:, 2:, 3])
    close(result.out[:, :4], clean.out[:, :4])  # computed as if the key were absent
    close(result.lse, clean.lse)
    grads = reference.attention_backward(q, k, v, dout, causal=True)
    assert torch.equal(grads.unspecified_q, expected)
    assert grads.unspecified_k[0, 1].all() and not grads.unspecified_k[0, 0].any()
    close(grads.dq[:, :, :2], clean_grads.dq[:, :, :2])
    close(grads.dq[:, :4], clean_grads.dq[:, :4])
    assert grads.dq[0, 4:, 2:].isnan().all()
    assert grads.ignore_q.shape == (1, 6, 4, 1) and grads.ignore_k.shape == (1, 6, 2, 1)


def test_a_bad_live_key_is_selected_in_the_forward_but_not_in_the_backward():
    q, k, v, dout, *_ = inputs(batch=1, sq=6, sk=6, heads=1, heads_kv=1)
    clean = reference.attention(q, k, v, causal=True)
    k[0, 4] = NAN
    result = reference.attention(q, k, v, causal=True)
    assert not result.unspecified.any()
    assert torch.equal(result.out[:, :4], clean.out[:, :4])
    assert result.out[0, 4:].isnan().all() and result.lse[..., 4:].isnan().all()
    grads = reference.attention_backward(q, k, v, dout, causal=True)
    assert grads.unspecified_q[0, 0].tolist() == [True] * 4 + [False] * 2


def test_a_bad_key_that_no_query_sees_leaves_all_rows_unspecified():
    """Its tile may be visited for its neighbours."""
    q, k, v, *_ = inputs(batch=1, sq=3, sk=8, heads=1, heads_kv=1)
    clean = reference.attention(q, k, v, window_size=(1, None))
    v[0, 2] = NAN  # the first query stands at key 5 and sees key 4
    result = reference.attention(q, k, v, window_size=(1, None))
    assert result.unspecified.all() and torch.equal(result.out, clean.out)
    assert not reference.attention(q, k, v, window_size=(1, None), seqused_k=[2]).unspecified.any()


@pytest.mark.parametrize("which", ["q", "dout", "dlse"])
def test_a_bad_live_query_row_leaves_the_keys_it_misses_unspecified(which):
    tensors = dict(zip(("q", "k", "v", "dout", "dlse"), inputs(batch=1, sq=6, sk=8)))
    clean = reference.attention_backward(**tensors, causal=True, seqused_k=[7])
    tensors[which][(0, 2, 1) if which != "dlse" else (0, 1, 2)] = NAN
    grads = reference.attention_backward(**tensors, causal=True, seqused_k=[7])
    # query 2 stands at key 3; keys 4 to 6 are live for others, key 7 for none
    assert grads.unspecified_k[0, 0].tolist() == [False] * 4 + [True] * 3 + [False]
    assert not grads.unspecified_k[0, 1].any() and not grads.unspecified_q.any()
    assert grads.dk[0, :4, 0].isnan().all()
    close(grads.dk[0, 4:], clean.dk[0, 4:])
    close(grads.dv[0, 4:], clean.dv[0, 4:])
    assert grads.dq[0, 2, 1].isnan().all() and grads.dq[0, 3:].isfinite().all()


def test_a_bad_query_row_that_sees_nothing_has_an_unspecified_gradient():
    q, k, v, dout, *_ = inputs(batch=1, sq=6, sk=2)
    q[0, 1, 0] = NAN
    assert not reference.attention(q, k, v, causal=True).unspecified.any()
    grads = reference.attention_backward(q, k, v, dout, causal=True)
    assert grads.unspecified_q.nonzero().tolist() == [[0, 0, 1]]
    assert grads.unspecified_k[0, 0].all() and (grads.dq[0, 1, 0] == 0).all()


def test_unused_rows_are_never_unspecified():
    q, k, v, dout, *_ = inputs(batch=1, sq=6, sk=6)
    v[0, 4] = NAN
    options = {"causal": True, "seqused_q": [5], "seqused_k": [5]}
    flags = reference.attention(q, k, v, **options).unspecified
    assert flags[0, :, :4].all() and not flags[0, :, 4:].any()
    grads = reference.attention_backward(q, k, v, dout, **options)
    assert torch.equal(grads.unspecified_q, flags)
    assert grads.unspecified_k[0, :, :5].all() and not grads.unspecified_k[0, :, 5].any()


def test_a_key_that_spoils_every_row_leaves_the_others_keys_unspecified():
    q, k, v, dout, *_ = inputs(batch=1, sq=6, sk=6)
    k[0, 0] = NAN  # causal: every query sees it, query 0 sees nothing else
    grads = reference.attention_backward(q, k, v, dout, causal=True)
    assert not grads.unspecified_q.any() and grads.dq.isnan().all()
    assert grads.unspecified_k[0, 0].tolist() == [False] + [True] * 5


@pytest.mark.parametrize("level", [1000.0, -1000.0])
def test_extreme_sinks(level):
    q, k, v, *_ = inputs(batch=1, sq=4, sk=2)
    sink = torch.full((4,), level, dtype=torch.float64)
    plain = reference.attention(q, k, v, causal=True)
    sunk = reference.attention(q, k, v, causal=True, sink=sink)
    assert (sunk.lse[..., :2] == level).all()
    if level > 0:
        assert (sunk.lse == level).all() and (sunk.out == 0).all()
    else:
        close(sunk.lse[..., 2:], plain.lse[..., 2:])
        close(sunk.out, plain.out)


@pytest.mark.parametrize("place", ["q", "k"])
def test_live_nan_never_becomes_zero(place):
    q, k, v, dout, *_ = inputs(batch=1, heads=1, heads_kv=1)
    {"q": q, "k": k}[place][0, 3] = NAN
    result = reference.attention(q, k, v)
    rows = slice(3, 4) if place == "q" else slice(None)
    assert result.out[0, rows].isnan().all() and result.lse[0, 0, rows].isnan().all()
    assert result.out.isnan().any(-1).sum() == (1 if place == "q" else 9)
    grads = reference.attention_backward(q, k, v, dout)
    assert grads.dv.isnan().all()


def test_an_infinite_score_gives_a_nan_row():
    q, k, v, *_ = inputs(batch=1, heads=1, heads_kv=1)
    q[0, 2] = 1.0
    k[0, 3] = INF
    result = reference.attention(q, k, v)
    assert result.out[0, 2].isnan().all() and result.lse[0, 0, 2].isnan()


@pytest.mark.parametrize(("batch", "sq", "sk"), [(0, 4, 4), (2, 0, 4), (2, 4, 0), (1, 0, 0)])
@pytest.mark.parametrize("sink", [False, True])
def test_empty_sizes(batch, sq, sk, sink):
    q, k, v, dout, dlse, logits = inputs(batch=batch, sq=sq, sk=sk)
    options = {"sink": logits} if sink else {}
    result = reference.attention(q, k, v, **options)
    assert result.out.shape == (batch, sq, 4, 6) and (result.out == 0).all()
    expected = logits[None, :, None].expand(batch, 4, sq) if sink and not sk else None
    if not sk:
        close(result.lse, torch.full_like(result.lse, -INF) if expected is None else expected)
    grads = reference.attention_backward(q, k, v, dout, dlse=dlse, **options)
    assert grads.dq.shape == q.shape and grads.dk.shape == k.shape and (grads.dk == 0).all()
    same = [x.float() for x in (q, k, v, dout)]
    out, lse = reference.same_precision(*same[:3], **options)
    assert out.shape == result.out.shape and torch.allclose(lse.double(), result.lse)
    assert (reference.same_precision_backward(*same, **options).dq == 0).all() or sk


def test_chunks_of_heads_change_nothing(monkeypatch):
    q, k, v, dout, dlse, sink = inputs()
    options = with_sink(OPTIONS["all"], sink)
    whole = reference.attention(q, k, v, **options)
    grads = reference.attention_backward(q, k, v, dout, dlse=dlse, **options)
    for scores in (1, 3 * 9 * 11):  # one head at a time; three, which cuts a group of kv heads
        monkeypatch.setattr(reference, "CHUNK_SCORES", scores)
        parts = reference.attention(q, k, v, **options)
        close(parts.out, whole.out)
        close(parts.lse, whole.lse)
        again = reference.attention_backward(q, k, v, dout, dlse=dlse, **options)
        for name in ("dq", "dk", "dv", "dsink"):
            close(getattr(again, name), getattr(grads, name))


def test_float32_on_request():
    q, k, v, dout, *_ = inputs(dtype=torch.bfloat16)
    fine, coarse = (reference.attention(q, k, v, dtype=t) for t in (torch.float64, torch.float32))
    assert coarse.out.dtype == coarse.lse.dtype == torch.float32
    assert 0 < (coarse.out - fine.out).abs().max() < 1e-6
    grads = reference.attention_backward(q, k, v, dout, dtype=torch.float32)
    assert grads.dq.dtype == torch.float32


def test_inputs_are_never_written():
    tensors = inputs(dtype=torch.float32)
    copies = [x.clone() for x in tensors]
    q, k, v, dout, dlse, sink = tensors
    reference.attention(q, k, v, sink=sink)
    reference.attention_backward(q, k, v, dout, dlse=dlse, sink=sink)
    reference.same_precision_backward(q, k, v, dout, dlse=dlse, sink=sink)
    assert all(torch.equal(a, b) for a, b in zip(tensors, copies))


@hypothesis.settings(max_examples=40, deadline=None)
@hypothesis.given(st.data())
def test_random_masks(data):
    sq, sk = data.draw(st.integers(0, 7)), data.draw(st.integers(0, 7))
    side = st.none() | st.integers(-4, 8)
    options = {
        "causal": data.draw(st.booleans()),
        "window_size": (data.draw(side), data.draw(side)),
        "seqused_q": [data.draw(st.integers(0, sq))],
        "seqused_k": [data.draw(st.integers(0, sk))],
        "softcap": data.draw(st.sampled_from([0.0, 2.0])),
    }
    q, k, v, *_ = inputs(batch=1, sq=sq, sk=sk, heads=2, heads_kv=1)
    result = reference.attention(q, k, v, **options)
    out, lse = naive(q, k, v, options)
    close(result.out, out)
    close(result.lse, lse)


# varlen -------------------------------------------------------------------------------------------

CU_Q, CU_K = [0, 4, 4, 7], [0, 2, 5, 9]  # the second sequence has no queries; 2 rows of padding


@pytest.mark.parametrize("used", [{}, {"seqused_q": [3, 0, 2], "seqused_k": [2, 1, 0]}])
def test_varlen_is_dense_per_sequence(used):
    q, k, v, dout, dlse, sink = inputs(batch=1, sq=9, sk=11)
    q, k, v, dout, dlse = q[0], k[0], v[0], dout[0], dlse[0]
    options = {"causal": True, "softcap": 2.0, "sink": sink}
    q[7:], k[9:], v[9:], dout[7:], dlse[:, 7:] = NAN, NAN, NAN, NAN, NAN
    cu = (torch.tensor(CU_Q, dtype=torch.int32), torch.tensor(CU_K, dtype=torch.int32))
    packed = reference.attention_varlen(q, k, v, *cu, **used, **options)
    grads = reference.attention_varlen_backward(q, k, v, dout, *cu, dlse=dlse, **used, **options)
    assert packed.lse.shape == (4, 9) and packed.ignore.shape == (9, 4, 1)
    dsink = torch.zeros(4, dtype=torch.float64)
    for b in range(3):
        rows, keys = slice(CU_Q[b], CU_Q[b + 1]), slice(CU_K[b], CU_K[b + 1])
        end_q = None if not used else rows.start + used["seqused_q"][b]
        end_k = None if not used else keys.start + used["seqused_k"][b]
        live, seen = slice(rows.start, end_q or rows.stop), slice(keys.start, keys.stop)
        if used:
            live, seen = slice(rows.start, end_q), slice(keys.start, end_k)
        one = [x[None] for x in (q[live], k[seen], v[seen], dout[live])]
        dense = reference.attention(*one[:3], **options)
        close(packed.out[live], dense.out[0])
        close(packed.lse[:, live], dense.lse[0])
        back = reference.attention_backward(*one, dlse=dlse[None, :, live], **options)
        close(grads.dq[live], back.dq[0])
        close(grads.dk[seen], back.dk[0])
        close(grads.dv[seen], back.dv[0])
        dsink += back.dsink
        packed.out[live], packed.lse[:, live] = 0, -INF
        grads.dq[live], grads.dk[seen], grads.dv[seen] = 0, 0, 0
    close(grads.dsink, dsink)
    assert (packed.out == 0).all() and (packed.lse == -INF).all()  # nothing else was written
    assert all((x == 0).all() for x in (grads.dq, grads.dk, grads.dv))
    assert not grads.unspecified_q.any() and not grads.unspecified_k.any()


@pytest.mark.parametrize(
    ("cu_q", "cu_k", "more", "error", "match"),
    [
        ([0, 4], [0, 2, 5], {}, ValueError, "1 sequences"),
        ([1, 4], [0, 5], {}, ValueError, "start at 0"),
        ([0, 5, 4], [0, 5, 6], {}, ValueError, "never fall"),
        ([0, 10], [0, 5], {}, ValueError, "end at 9"),
        ([], [], {}, ValueError, "start at 0"),
        ([0.0, 4.0], [0, 5], {}, TypeError, "int32 or int64"),
        ([0, 4], [0, 5], {"seqused_q": [5]}, ValueError, "0 … 4"),
        ([0, 4], [0, 5], {"seqused_k": [5, 5]}, ValueError, "2 entries"),
    ],
)
def test_varlen_errors(cu_q, cu_k, more, error, match):
    q, k, v, *_ = inputs(batch=1)
    with pytest.raises(error, match=match):
        reference.attention_varlen(q[0], k[0], v[0], cu_q, cu_k, **more)


def test_varlen_wants_three_axes():
    q, k, v, dout, *_ = inputs()
    with pytest.raises(ValueError, match="total"):
        reference.attention_varlen(q, k, v, [0, 4], [0, 4])
    with pytest.raises(ValueError, match="dout"):
        reference.attention_varlen_backward(q[0], k[0], v[0], dout[0, :3], [0, 4], [0, 4])


# the yardstick ------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", OPTIONS)
def test_same_precision_in_float32_is_nearly_the_oracle(name):
    q, k, v, dout, dlse, sink = inputs(dtype=torch.float32)
    options = with_sink(OPTIONS[name], sink)
    exact = reference.attention(q, k, v, **options)
    out, lse = reference.same_precision(q, k, v, **options)
    close(out.double(), exact.out, 2e-6)
    close(lse.double(), exact.lse, 2e-6)
    grads = reference.attention_backward(q, k, v, dout, dlse=dlse, **options)
    mine = reference.same_precision_backward(q, k, v, dout, dlse=dlse, **options)
    for key in ("dq", "dk", "dv", "dsink"):
        a, b = getattr(mine, key), getattr(grads, key)
        assert (a is None) == (b is None)
        if a is not None:
            close(a.double(), b, 2e-5)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_same_precision_rounds_at_every_step(dtype):
    q, k, v, *_ = inputs(batch=1, sq=40, sk=50, heads=1, heads_kv=1, dim=16, dim_v=16, dtype=dtype)
    out, lse = reference.same_precision(q, k, v, softmax_scale=0.3)
    scores = (q[0, :, 0] @ k[0, :, 0].T) * 0.3
    assert scores.dtype == dtype
    assert torch.equal(out[0, :, 0], torch.softmax(scores, -1) @ v[0, :, 0])
    close(lse[0, 0], torch.logsumexp(scores.float(), -1), 1e-6)
    assert out.dtype == dtype and lse.dtype == torch.float32
    error = (out.double() - reference.attention(q, k, v, softmax_scale=0.3).out).abs().max()
    assert torch.finfo(dtype).eps / 50 < error < 4 * torch.finfo(dtype).eps
    grads = reference.same_precision_backward(q, k, v, out)
    assert grads.dq.dtype == grads.dk.dtype == grads.dv.dtype == dtype


def test_same_precision_clears_excluded_rows():
    q, k, v, dout, dlse, _ = inputs(batch=1, dtype=torch.float32)
    options = {"seqused_q": [5], "seqused_k": [7]}
    clean = reference.same_precision(q, k, v, **options)
    clean_grads = reference.same_precision_backward(q, k, v, dout, dlse=dlse, **options)
    q[:, 5:], k[:, 7:], v[:, 7:], dout[:, 5:], dlse[..., 5:] = NAN, INF, NAN, NAN, NAN
    dirty = reference.same_precision(q, k, v, **options)
    grads = reference.same_precision_backward(q, k, v, dout, dlse=dlse, **options)
    assert torch.equal(clean[0], dirty[0]) and torch.equal(clean[1], dirty[1])
    for key in ("dq", "dk", "dv"):
        assert torch.equal(getattr(clean_grads, key), getattr(grads, key))


def test_stored_output_error_is_what_rounding_the_output_does():
    q, k, v, dout, *_ = inputs(batch=1, heads=1, heads_kv=1)
    error = reference.stored_output_error(q, k, v, dout, out_dtype=torch.bfloat16, causal=True)
    exact = reference.attention_backward(q, k, v, dout, causal=True)
    forward = reference.attention(q, k, v, causal=True)
    mask = reference.visibility(1, 9, 11, causal=True)[0]
    s = torch.where(mask, q[0, :, 0] @ k[0, :, 0].T * 8**-0.5 - forward.lse[0, 0][:, None], -INF)
    d = (forward.out[0, :, 0].bfloat16().double() * dout[0, :, 0]).sum(-1, keepdim=True)
    ds = s.exp() * (dout[0, :, 0] @ v[0, :, 0].T - d)
    close((ds @ k[0, :, 0] * 8**-0.5 - exact.dq[0, :, 0]), error.dq[0, :, 0])
    close((ds.T @ q[0, :, 0] * 8**-0.5 - exact.dk[0, :, 0]), error.dk[0, :, 0])
    assert error.dq.abs().max() > 0 and (error.dv == 0).all()


# errors -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("change", "error", "match"),
    [
        ({"q": torch.zeros(3, 9, 4, 8, dtype=torch.long)}, TypeError, "q is torch.int64"),
        ({"k": [1.0]}, TypeError, "k is list"),
        ({"q": torch.zeros(9, 4, 8)}, ValueError, "q has shape"),
        ({"k": torch.zeros(3, 11, 3, 8), "v": torch.zeros(3, 11, 3, 6)}, ValueError, "4 heads"),
        ({"v": torch.zeros(3, 10, 2, 6)}, ValueError, "head_dim only"),
        ({"q": torch.zeros(3, 9, 4, 7)}, ValueError, r"\(7, 8, 6\)"),
        ({"q": torch.zeros(2, 9, 4, 8)}, ValueError, "batch 2"),
        ({"q": torch.zeros(3, 9, 4, 8, device="meta")}, ValueError, "use one device"),
        ({"softmax_scale": NAN}, ValueError, "softmax_scale"),
        ({"softcap": -1.0}, ValueError, "softcap is -1"),
        ({"sink": torch.zeros(2)}, ValueError, r"expected \(4,\)"),
        ({"sink": 0.0}, TypeError, "sink"),
        ({"window_size": 3}, TypeError, "window_size is 3"),
        ({"window_size": (1.5, 0)}, TypeError, "integers"),
        ({"seqused_q": [1, 2]}, ValueError, "2 entries"),
        ({"seqused_k": [1, 2, 12]}, ValueError, "0 … 11"),
        ({"seqused_k": [1.0, 2.0, 3.0]}, TypeError, "int32 or int64"),
        ({"dtype": torch.bfloat16}, TypeError, "dtype is torch.bfloat16"),
        ({"dropout": 0.1}, TypeError, "dropout"),
    ],
)
def test_argument_errors(change, error, match):
    q, k, v, *_ = inputs(dtype=torch.float32)
    arguments = {"q": q, "k": k, "v": v, **change}
    with pytest.raises(error, match=match):
        reference.attention(**arguments)


def test_backward_and_yardstick_argument_errors():
    q, k, v, dout, dlse, _ = inputs(dtype=torch.float32)
    with pytest.raises(ValueError, match="dout has shape"):
        reference.attention_backward(q, k, v, dout[:2])
    with pytest.raises(ValueError, match="dlse has shape"):
        reference.attention_backward(q, k, v, dout, dlse=dlse.transpose(1, 2))
    with pytest.raises(TypeError, match="dout must be"):
        reference.attention_backward(q, k, v, None)
    with pytest.raises(TypeError, match="no dtype"):
        reference.same_precision(q, k, v, dtype=torch.float32)
    with pytest.raises(TypeError, match="they must be equal"):
        reference.same_precision(q, k.bfloat16(), v)


def test_statistics_error_is_what_two_orders_of_a_float32_sum_do():
    """One key has all of P: dS is dP - D, two sums of the same products, 0 but for roundings."""
    generator = torch.Generator().manual_seed(5)
    shape = (1, 64, 1, 128)
    q, dout = (torch.randn(shape, generator=generator).bfloat16() for _ in range(2))
    k, v = torch.zeros(1, 128, 1, 128).bfloat16(), torch.ones(1, 128, 1, 128).bfloat16()
    v[0, 7] = torch.randn(1, 128, generator=generator).bfloat16()
    q[..., 0], k[0, 7, 0, 0] = 16.0, 64.0  # a score of 1024 / sqrt(128) above all others
    truth = reference.attention_backward(q, k, v, dout).dq
    value, given = v[0, 7, 0].float(), dout[0, :, 0].float()
    forwards = torch.zeros(64)
    for i in range(128):
        forwards += value[i] * given[:, i]
    backwards = torch.zeros(64)
    for i in reversed(range(128)):
        backwards += value[i] * given[:, i]
    off = (forwards - backwards)[:, None] * k[0, 7, 0].float() * 128**-0.5
    found = reference.statistics_error(q, k, v, dout).dq[0, :, 0].abs()
    rms = lambda x: x.double().pow(2).mean().sqrt()
    assert rms(off) > rms(truth) and 0.05 * rms(found) < rms(off) < 2 * rms(found)
    assert not reference.statistics_error(q, k, v, torch.zeros_like(dout)).dk.any()
