# SPDX-License-Identifier: Apache-2.0
"""Masks and lengths as callers give them: what is refused, what they mean, where sequences lie."""

import itertools
import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from flash_ladder import load
from flash_ladder.common import reference
from flash_ladder.common.envelope import check
from flash_ladder.common.masks import Mask, mask_of, window
from flash_ladder.common.model.sequences import OPEN, Sequence, Sequences

SMALL = (0, 1, 2, 3, 5)
WINDOWS = [(None, None), (-1, -1), (-1, 0), (0, 0), (-5, 3), (-5, 8), (3, -5), (1, 2), (-2, 4)]


def _int(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


def _pair(rows_q: int = 4, rows_k: int = 6, batch: int | None = 2) -> tuple:
    """q and k of 1 head, packed without a batch."""
    first = () if batch is None else (batch,)
    return torch.zeros(*first, rows_q, 1, 8), torch.zeros(*first, rows_k, 1, 8)


def _dense(**options):
    return mask_of(*_pair(), **options)


def _packed(cu_q=(0, 1, 4), cu_k=(0, 4, 6), **options):
    return mask_of(
        *_pair(batch=None), cu_seqlens_q=_int(*cu_q), cu_seqlens_k=_int(*cu_k), **options
    )


def _rows(mask) -> list[tuple[int, ...]]:
    return [tuple(row) for row in mask.sequences().rows]


def test_with_lengths_the_rest_stays():
    mask, lengths = _dense(causal=True), (None, None, _int(1, 2), None)
    made = mask.with_lengths(*lengths)
    assert made == replace(mask, lengths=lengths) != mask and made.rows == (4, 6)
    assert mask.lengths is None


# ---- windows -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("causal", "given", "wanted"),
    [
        (False, (None, None), (OPEN, OPEN)),
        (False, (-1, 3), (OPEN, 3)),
        (False, (2, None), (2, OPEN)),
        (False, (-5, 8), (-5, 8)),
        (True, (None, None), (OPEN, 0)),
        (True, (7, 3), (7, 0)),
        (True, (7, -3), (7, -3)),
        (False, (2**40, -(2**40)), (OPEN, -OPEN)),
        (False, [1, 2], (1, 2)),
    ],
)
def test_a_window(causal, given, wanted):
    assert window(causal, given) == wanted


@pytest.mark.parametrize(
    ("causal", "given", "words"),
    [
        (1, (None, None), "causal must be True or False; got 1"),
        (False, 3, "window_size must be (left, right); got 3"),
        (False, (1, 2, 3), "window_size must be (left, right); got (1, 2, 3)"),
        (
            False,
            (1.0, 2),
            "window_size has integers, and None or -1 for an open side; got (1.0, 2)",
        ),
        (False, (True, 2), "for an open side; got (True, 2)"),
    ],
)
def test_no_window(causal, given, words):
    with pytest.raises(TypeError) as raised:
        window(causal, given)
    assert words in str(raised.value)


# ---- refusals ------------------------------------------------------------------------------

LONG = torch.zeros(3, dtype=torch.int64)
CU = {"cu_seqlens_q": _int(0, 1, 4), "cu_seqlens_k": _int(0, 4, 6)}
REFUSED = {
    "one cu_seqlens": (None, {"cu_seqlens_q": CU["cu_seqlens_q"]}, ValueError, "give both, or nei"),
    "cu_seqlens of k alone": (2, {"cu_seqlens_k": CU["cu_seqlens_k"]}, ValueError, "give both, or"),
    "packed of rank 4": (
        2,
        CU,
        ValueError,
        "q must be (total, heads, head_dim) with cu_seqlens; got (2, 4, 1, 8)",
    ),
    "dense of rank 3": (
        None,
        {},
        ValueError,
        "q must be (batch, seqlen, heads, head_dim); got (4, 1, 8)",
    ),
    "a list": (
        None,
        CU | {"cu_seqlens_q": [0, 4]},
        TypeError,
        "cu_seqlens_q must be a tensor with one axis, not empty; got list [0, 4]",
    ),
    "an empty tensor": (
        None,
        CU | {"cu_seqlens_k": _int()},
        TypeError,
        "cu_seqlens_k must be a tensor with one axis, not empty; got a torch.int32 tensor of shape",
    ),
    "other counts": (
        None,
        CU | {"cu_seqlens_k": _int(0, 6)},
        ValueError,
        "cu_seqlens_q describes 2 sequences, cu_seqlens_k 1",
    ),
    "64-bit lengths": (
        None,
        CU | {"cu_seqlens_q": LONG},
        TypeError,
        "cu_seqlens_q must be an int32 tensor; got a torch.int64 tensor of shape (3,) on cpu",
    ),
    "sparse lengths": (
        None,
        CU | {"cu_seqlens_q": _int(0, 1, 4).to_sparse()},
        TypeError,
        "cu_seqlens_q must be a dense (strided) tensor; got a torch.sparse_coo one",
    ),
    "nested lengths": (
        None,
        CU | {"cu_seqlens_q": torch.nested.as_nested_tensor([_int(0, 1)], layout=torch.jagged)},
        TypeError,
        "cu_seqlens_q must be a dense (strided) tensor; got a nested one",
    ),
    "lengths that fall by more than an int32": (
        None,
        CU | {"cu_seqlens_k": _int(0, 2**31 - 1, -(2**31))},
        ValueError,
        "cu_seqlens_k must never fall; got [0, 2147483647, -2147483648]",
    ),
    "a list of used lengths": (
        2,
        {"seqused_k": [1, 2]},
        TypeError,
        "seqused_k must be an int32 tensor; got list [1, 2]",
    ),
    "too few used lengths": (
        2,
        {"seqused_q": _int(1)},
        ValueError,
        "seqused_q must have shape (2,); got (1,)",
    ),
    "another device": (
        2,
        {"seqused_q": torch.zeros(2, dtype=torch.int32, device="meta")},
        ValueError,
        "seqused_q must be on cpu, as q is; it is on meta",
    ),
    "a maximum without cu_seqlens": (
        2,
        {"max_seqlen_q": 4},
        ValueError,
        "max_seqlen_q goes with cu_seqlens; without, the length is that of the tensor",
    ),
    "a negative maximum": (
        None,
        CU | {"max_seqlen_k": -1},
        ValueError,
        "max_seqlen_k must be 0 or more; got -1",
    ),
    "sequences that overlap": (
        None,
        CU | {"cu_seqlens_k": _int(0, 5, 3)},
        ValueError,
        "cu_seqlens_k must never fall; got [0, 5, 3]",
    ),
    "a maximum that is no number": (
        None,
        CU | {"max_seqlen_k": 4.0},
        TypeError,
        "max_seqlen_k must be an int, or a CPU tensor that holds one; got float 4.0",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_no_mask_is_refused(name):
    batch, options, error, words = REFUSED[name]
    with pytest.raises(error) as raised:
        mask_of(*_pair(batch=batch), **options)
    assert words in str(raised.value)


def test_integers_of_numpy_are_integers():
    size = np.int64(3)
    mask = mask_of(*_pair(batch=None), **CU, window_size=(size, np.int32(-1)), max_seqlen_q=size)
    assert (mask.left, mask.right, mask.max_seqlen_q) == (3, OPEN, 3)
    assert {type(x) for x in (mask.left, mask.right, mask.max_seqlen_q)} == {int}


def test_an_option_that_does_not_exist_is_named():
    q = torch.zeros(1, 128, 2, 64, dtype=torch.bfloat16)
    for number in (7, 8):
        with pytest.raises(TypeError, match="no option dropout_p; masks have causal, window_size,"):
            load(number).simulate(q, q, q, dropout_p=0.1)


def test_too_many_query_tiles_of_packed_sequences_name_the_maximum():
    q = torch.empty(2**20, 64, 64, dtype=torch.bfloat16, device="meta")
    cu = torch.empty(4097, dtype=torch.int32, device="meta")
    given = {"cu_seqlens_q": cu, "cu_seqlens_k": cu}
    with pytest.raises(ValueError, match="give max_seqlen_q and max_seqlen_k, or split the batch"):
        check(load(8), q, q, q, need_cuda=None, **given)
    sizes = {"max_seqlen_q": 256, "max_seqlen_k": 256}
    assert check(load(8), q, q, q, need_cuda=None, **given, **sizes).mask.batch == 4096


@pytest.mark.parametrize(
    "options",
    [
        {"causal": True},
        {"window_size": (3, None)},
        {"seqused_q": _int(1)},
        CU,
    ],
)
def test_a_stage_without_masks_names_the_one_that_has_them(options):
    q = torch.zeros(1, 128, 2, 64, dtype=torch.bfloat16)
    for call in (load(7).attention, load(7).simulate):
        with pytest.raises(ValueError, match=r"neither masks nor lengths.*stage 08 lifts this"):
            call(q, q, q, **options)


def test_what_says_nothing_is_no_mask():
    q = torch.zeros(1, 128, 1, 64, dtype=torch.bfloat16)
    load(7).simulate(q, q, q, causal=False, window_size=(None, None), seqused_q=None)


def test_packed_tensors_all_are():
    q = torch.zeros(4, 2, 64, dtype=torch.bfloat16)
    options = {"cu_seqlens_q": _int(0, 4), "cu_seqlens_k": _int(0, 4)}
    with pytest.raises(ValueError, match=r"v must be \(total, heads, head_dim\) with cu_seqlens"):
        load(8).simulate(q, q, q[None], **options)


# ---- lengths -------------------------------------------------------------------------------


def test_dense_sequences_need_no_lengths():
    mask = _dense(causal=True)
    assert mask.lengths is None and not mask.packed
    assert mask.arguments == (0, 0, 0, 0, 2, 4, 6, OPEN, 0)
    assert mask.arguments_of_q == (0, 0, 2, 4)
    assert _rows(mask) == [(0, 4, 0, 6)] * 2
    assert [mask.sequences().entry(number) for number in range(2)] == [0, 1]


def test_used_lengths():
    used = _int(3, 9), _int(0, -2)
    mask = _dense(seqused_q=used[0], seqused_k=used[1])
    assert _rows(mask) == [(0, 3, 0, 0), (0, 4, 0, 0)]
    addresses = [x.data_ptr() for x in used]
    assert mask.arguments[:4] == (0, 0, *addresses)
    assert mask.arguments_of_q == (0, addresses[0], 2, 4)


def test_kernels_get_the_addresses_of_lengths_as_they_were_given():
    cu, used = (_int(0, 1, 4), _int(0, 4, 6)), (_int(1, 2), _int(4, 1))
    names = "cu_seqlens_q", "cu_seqlens_k", "seqused_q", "seqused_k"
    mask = mask_of(*_pair(batch=None), **dict(zip(names, (*cu, *used))))
    addresses = [x.data_ptr() for x in (*cu, *used)]
    assert mask.arguments == (*addresses, 2, 4, 6, OPEN, OPEN)
    assert mask.arguments_of_q == (addresses[0], addresses[2], 2, 4)


def test_lengths_that_lie_apart_are_copied():
    apart, expanded = _int(0, 7, 1, 7, 4)[::2], _int(3).expand(2)
    mask = mask_of(
        *_pair(batch=None), cu_seqlens_q=apart, cu_seqlens_k=_int(0, 4, 6), seqused_k=expanded
    )
    assert all(x is None or x.is_contiguous() for x in mask.lengths)
    assert mask.arguments[0] == mask.lengths[0].data_ptr() != apart.data_ptr()
    assert _rows(mask) == [(0, 1, 0, 3), (1, 3, 4, 2)]


def test_packed_sequences():
    mask = _packed()
    assert mask.packed and (mask.batch, mask.max_seqlen_q, mask.max_seqlen_k) == (2, 4, 6)
    assert _rows(mask) == [(0, 1, 0, 4), (1, 3, 4, 2)]
    assert [mask.sequences().entry(number) for number in range(2)] == [0, 0]
    assert mask.sequences().longest == (4, 6)


@pytest.mark.parametrize(
    ("cu_q", "options", "rows_q"),
    [
        ((0, 1, 4), {"max_seqlen_q": 2}, [(0, 1), (1, 2)]),
        ((0, 1, 4), {"max_seqlen_q": torch.tensor(2)}, [(0, 1), (1, 2)]),
        ((0, 1, 4), {"seqused_q": _int(5, 1)}, [(0, 1), (1, 1)]),
        ((0, 3, 99), {}, [(0, 3), (3, 1)]),
        ((0, 77, 99), {}, [(0, 4), (4, 0)]),
        ((-3, 2, 2), {}, [(0, 2), (2, 0)]),
        ((-(2**31), 2, 2**31 - 1), {}, [(0, 2), (2, 2)]),
    ],
)
def test_lengths_stay_within_the_tensor(cu_q, options, rows_q):
    assert [row[:2] for row in _rows(_packed(cu_q, **options))] == rows_q


def test_lengths_that_fall_are_0_where_nobody_may_look():
    mask = replace(_packed(), lengths=None)
    given = _int(-3, 2, 1), _int(0, 4, 6), None, None
    assert [row[:2] for row in _rows(mask.with_lengths(*given))] == [(0, 2), (2, 0)]


@pytest.mark.parametrize(
    ("rows", "most", "used_k", "wanted"),
    [
        ((8, 6), (9, 9), None, [[0, 3, 0, 3], [3, 5, 3, 3]]),
        ((9, 9), (9, 2), None, [[0, 3, 0, 2], [3, 6, 3, 2]]),
        ((9, 9), (9, 9), (1, 2), [[0, 3, 0, 1], [3, 6, 3, 2]]),
    ],
)
def test_one_cu_seqlens_for_both_sides_has_the_lengths_of_each(rows, most, used_k, wanted):
    cu, used_k = _int(0, 3, 9), used_k and _int(*used_k)
    mask = Mask(OPEN, OPEN, True, 2, *most, rows).with_lengths(cu, cu, None, used_k)
    assert _rows(mask) == [tuple(row) for row in wanted]


def test_a_maximum_is_at_most_the_tensor():
    assert _packed(max_seqlen_q=99).max_seqlen_q == 4


def test_rows_of_a_sequence():
    row = Sequence(10, 5, 20, 3)
    assert row.queries() == slice(10, 15) and row.keys() == slice(20, 23)
    assert row.queries(2, 4) == slice(12, 14) and row.queries(4, 9) == slice(14, 15)
    assert row.keys(3, 6) == slice(23, 23)


def test_tiles_of_packed_sequences_are_apart():
    for bounds in itertools.product((0, 1, 127, 128, 129, 300), repeat=3):
        cu = [*itertools.accumulate(bounds, initial=0)]
        rows = tuple(Sequence(start, size, 0, 0) for start, size in zip(cu, bounds))
        given = Sequences(rows, True, 0, (max(bounds), 0))
        firsts = [given.first_tile(number, 128) for number in range(3)]
        ends = [first + math.ceil(size / 128) for first, size in zip(firsts, bounds)]
        assert all(end <= first for end, first in zip(ends, firsts[1:]))


# ---- what is visible -----------------------------------------------------------------------


def _every_mask():
    for sq, sk, (left, right), causal in itertools.product(SMALL, SMALL, WINDOWS, (False, True)):
        options = {"causal": causal, "window_size": (left, right)}
        yield mask_of(*_pair(sq, sk, 1), **options), reference.visibility(1, sq, sk, **options)[0]


def test_pairs_are_those_that_the_oracle_sees():
    for mask, seen in _every_mask():
        assert mask.sequences().pairs == seen.sum()


def test_pairs_of_lengths():
    used = {"seqused_q": _int(3, 0), "seqused_k": _int(2, 6)}
    seen = reference.visibility(2, 4, 6, causal=True, **used)
    assert _dense(causal=True, **used).sequences().pairs == seen.sum()
    single = [reference.visibility(1, *sizes, causal=True).sum() for sizes in ((1, 4), (3, 2))]
    assert _packed(causal=True).sequences().pairs == sum(single)


def test_nothing_is_launched_only_where_nothing_is_seen():
    for mask, seen in _every_mask():
        assert not (mask.sees_nothing and seen.any())


def test_a_batch_or_a_maximum_of_zero_sees_nothing():
    assert mask_of(*_pair(batch=0)).sees_nothing
    assert _packed((0,), (0,)).sees_nothing
    assert _packed(max_seqlen_k=0).sees_nothing
    assert not _dense().sees_nothing
