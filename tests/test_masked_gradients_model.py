# SPDX-License-Identifier: Apache-2.0
"""Masks and lengths in the models of stage 08's backward parts, against the float64 oracle."""

import math
import random
from types import SimpleNamespace

import pytest
import torch
from flash_ladder import load
from flash_ladder.common import gradients, reference
from flash_ladder.common.masks import Mask, mask_of
from flash_ladder.common.model import B200, OPEN, observe
from flash_ladder.common.model.sequences import Sequence, Sequences
from flash_ladder.common.ordering import Ordering

STAGE = load(8)
TILE = 128
CLOSE = 0.002  # of the largest gradient: what 16-bit P and dS may do; a lost pair does far more
SMALL = 0.01  # a largest gradient below this is one of roundings
PARTS = (("backward_1cta", 64), ("backward_1cta", 128), ("backward_2cta", 128))
WINDOWS = ((None, None), (100, 0), (0, 0), (-5, 8), (None, 60), (40, None), (-300, None), (-5, 3))
LENGTHS = ((256, 256), (300, 200), (128, 500), (1, 130), (130, 1))
PACKED = {
    "empty": dict(cu_seqlens_q=[0, 0, 130, 300], cu_seqlens_k=[0, 200, 200, 333]),
    "used": dict(
        cu_seqlens_q=[0, 140, 280, 300],
        cu_seqlens_k=[0, 133, 200, 300],
        seqused_q=[129, 100, 20],
        seqused_k=[133, 60, 0],
    ),
}


def _tensors(batch: int, rows: int, keys: int, head_dim: int) -> list[torch.Tensor]:
    """q, k, v, dout (b, s, 1, d)."""
    generator = torch.Generator().manual_seed(rows + keys)
    shapes = [(batch, length, 1, head_dim) for length in (rows, keys, keys, rows)]
    return [torch.randn(shape, generator=generator).half() for shape in shapes]


def _statistics(out, lse, dout, given: Sequences) -> torch.Tensor:
    """What preprocess leaves, with NaN in the tiles that are no sequence's."""
    batch, _, rows = lse.shape
    tiles = rows // TILE + len(given.rows) if given.packed else math.ceil(rows / TILE)
    stats = torch.full((batch, 1, tiles, 2, TILE), math.nan)
    d = (out.float() * dout.float()).sum(-1).transpose(1, 2)
    both = torch.stack([lse * gradients.LOG2_E, d])  # (2, b, h, rows)
    both[:, lse == -math.inf] = torch.tensor([[math.inf], [0.0]])
    for number, row in enumerate(given.rows):
        entry = given.entry(number)
        first, count = row.begin_q // TILE + number - entry, math.ceil(row.len_q / TILE)
        filled = torch.tensor([math.inf, 0.0])[:, None].repeat(1, count * TILE)
        filled[:, : row.len_q] = both[:, entry, 0, row.queries()]
        stats[entry, 0, first : first + count] = filled.unflatten(1, (count, TILE)).transpose(0, 1)
    return stats


def _run(name: str, tensors, out, lse, mask: Mask, max_ctas=None):
    given = mask.sequences()
    stats, scale = _statistics(out, lse, tensors[3], given), tensors[0].shape[3] ** -0.5
    of_mask = {"window": (mask.left, mask.right), "sequences": given}
    model = STAGE.part(name).model
    return model.run(*tensors, stats, scale, B200, max_ctas, **of_mask)


def _check(run, wanted, seen_q, seen_k, close=CLOSE):
    """Close to the oracle; exactly 0 where no one sees, or is seen."""
    assert run.findings == ()
    for name, seen in (("dq", seen_q), ("dk", seen_k), ("dv", seen_k)):
        found, right = getattr(run, name).double(), getattr(wanted, name)
        bound = close * max(right.abs().max().item(), SMALL)
        assert (found - right).abs().max() <= bound, name
        assert not found[~seen].count_nonzero(), name


def _dense(name: str, tensors, close=CLOSE, **options):
    truth = reference.attention(*tensors[:3], **options)
    mask = mask_of(*tensors[:2], **options)
    run = _run(name, tensors, truth.out.half(), truth.lse.float(), mask)
    batch, rows, keys = *tensors[0].shape[:2], tensors[1].shape[1]
    seen = reference.visibility(batch, rows, keys, **options)
    wanted = reference.attention_backward(*tensors, **options)
    _check(run, wanted, seen.any(2), seen.any(1), close)
    return run


@pytest.mark.parametrize("lengths", LENGTHS, ids=str)
@pytest.mark.parametrize("part", PARTS, ids=str)
def test_causal(part, lengths):
    name, head_dim = part
    _dense(name, _tensors(1, *lengths, head_dim), causal=True)


@pytest.mark.parametrize("window", WINDOWS, ids=str)
@pytest.mark.parametrize("part", PARTS, ids=str)
def test_window(part, window):
    name, head_dim = part
    _dense(name, _tensors(1, 300, 200, head_dim), window_size=window)


@pytest.mark.parametrize("part", PARTS, ids=str)
def test_used_rows_of_a_batch(part):
    """What lies behind them is NaN and changes nothing."""
    name, head_dim = part
    tensors, used_q, used_k = _tensors(3, 260, 300, head_dim), [260, 130, 0], [140, 300, 50]
    used = {"seqused_q": used_q, "seqused_k": used_k}
    for x, lengths in zip(tensors, (used_q, used_k, used_k, used_q)):
        for entry, length in enumerate(lengths):
            x[entry, length:] = math.nan
    mask = mask_of(*tensors[:2], causal=True, **{key: _int32(row) for key, row in used.items()})
    clean = [x.nan_to_num() for x in tensors]
    truth = reference.attention(*clean[:3], causal=True, **used)
    out, lse = truth.out.half(), truth.lse.float()
    for entry, length in enumerate(used_q):
        out[entry, length:], lse[entry, :, length:] = math.nan, math.nan
    run = _run(name, tensors, out, lse, mask)
    wanted = reference.attention_backward(*clean, causal=True, **used)
    seen = reference.visibility(3, 260, 300, causal=True, **used)
    _check(run, wanted, seen.any(2), seen.any(1))


@pytest.mark.parametrize("case", PACKED)
@pytest.mark.parametrize("part", PARTS, ids=str)
def test_packed(part, case):
    """Rows of no sequence are NaN; so is, one after the other, every sequence but one."""
    (name, head_dim), lengths = part, PACKED[case]
    packed = [x[0] for x in _tensors(1, *(lengths[f"cu_seqlens_{x}"][-1] for x in "qk"), head_dim)]
    mask = mask_of(*packed[:2], causal=True, **{key: _int32(row) for key, row in lengths.items()})
    truth = reference.attention_varlen(*packed[:3], **lengths, causal=True)
    tensors = [x[None] for x in packed]
    given = (truth.out.half()[None], truth.lse.float()[None])
    orders = []
    with observe(lambda: orders.append(Ordering("practice")) or orders[-1]):
        run = _run(name, tensors, *given, mask)
    assert orders
    wanted = reference.attention_varlen_backward(*packed, **lengths, causal=True)
    _check(run, _in_batch(wanted), *_seen(mask, *(len(x) for x in packed[:2])))
    for row in mask.sequences().rows:
        others = _only(tensors, given, row)
        again = _run(name, *others, mask)
        assert torch.equal(again.dq[0, row.queries()], run.dq[0, row.queries()])
        for grad in ("dk", "dv"):
            found, wanted = (getattr(x, grad)[0, row.keys()] for x in (again, run))
            assert torch.equal(found, wanted)


def _seen(mask: Mask, rows: int, keys: int) -> list[torch.Tensor]:
    """Which rows of packed, causal sequences see a key, and which keys a query sees: (1, total)."""
    seen = [torch.zeros(1, length, dtype=torch.bool) for length in (rows, keys)]
    for row in mask.sequences().rows:
        if row.len_q and row.len_k:
            visible = reference.visibility(1, row.len_q, row.len_k, causal=True)[0]
            seen[0][0, row.queries()], seen[1][0, row.keys()] = visible.any(1), visible.any(0)
    return seen


def _int32(values) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


def _in_batch(wanted):
    return SimpleNamespace(**{name: getattr(wanted, name)[None] for name in ("dq", "dk", "dv")})


def _only(tensors, given, row: Sequence):
    """The same with NaN in the rows of all other sequences."""
    q, k, v, dout = (torch.full_like(x, math.nan) for x in tensors)
    out, lse = (torch.full_like(x, math.nan) for x in given)
    queries, keys = row.queries(), row.keys()
    for x, y in ((q, tensors[0]), (dout, tensors[3]), (out, given[0])):
        x[:, queries] = y[:, queries]
    lse[..., queries] = given[1][..., queries]
    for x, y in ((k, tensors[1]), (v, tensors[2])):
        x[:, keys] = y[:, keys]
    return (q, k, v, dout), out, lse


@pytest.mark.parametrize("part", PARTS, ids=str)
def test_keys_that_are_not_there_do_not_overflow(part):
    """Logits near -120: exp(0 - LSE) of a key filled in with zeros would be infinite."""
    name, head_dim = part
    q, k, v, dout = _tensors(1, 128, 130, head_dim)
    size = math.sqrt(120 / head_dim**0.5)
    _dense(name, [size + 0.02 * q, 0.02 * k - size, v, dout], close=0.1)  # dS times one large K


# ---- which tiles ---------------------------------------------------------------------------


def _masked(name: str, head_dim: int, rows: int, keys: int, **options) -> tuple[set, int]:
    """(steps of the first CTA with a mask, steps in all)."""
    run = _dense(name, _tensors(1, rows, keys, head_dim), **options)
    steps = {op: {span.tile for span in run.trace if span.op == op} for op in ("mask", "P")}
    return steps["mask"], len(steps["P"])


def test_only_tiles_on_an_edge_are_masked():
    one = ("backward_1cta", 128)
    assert _masked(*one, 512, 128) == (set(), 4)
    assert _masked(*one, 512, 512, causal=True) == ({0}, 4)
    assert _masked(*one, 512, 512, window_size=(256, 0)) == ({0, 2}, 3)
    assert _masked(*one, 500, 100) == ({0, 1, 2, 3}, 4)  # keys beyond the sequence
    assert _masked(*one, 500, 128) == (set(), 4)  # queries beyond it: LSE is +inf
    assert _masked("backward_1cta", 64, 512, 512, causal=True) == ({0, 1, 2, 3}, 8)
    assert _masked("backward_2cta", 128, 512, 512, causal=True) == ({0, 1}, 4)  # of either CTA


@pytest.mark.parametrize("seed", range(8))
def test_query_tiles_against_every_pair(seed):
    """Visited: a range with all that see a key. Unmasked: of its tiles, all that may be."""
    rng, model = random.Random(seed), STAGE.model
    for _ in range(40):
        sequence = Sequence(0, rng.randint(1, 700), 0, rng.randint(1, 700))
        window = tuple(rng.choice((OPEN, 0, rng.randint(-400, 400))) for _ in range(2))
        for keys in (TILE, 2 * TILE):
            for first in range(0, sequence.len_k, keys):
                _check_tiles(model, sequence, window, first, keys)


def _check_tiles(model, sequence: Sequence, window, first: int, keys: int):
    i, j = torch.arange(sequence.len_q)[:, None], torch.arange(first, first + keys)
    position = i + sequence.len_k - sequence.len_q
    seen = (j >= position - window[0]) & (j <= position + window[1]) & (j < sequence.len_k)
    m_min, m_max = model.visited_queries(first, keys, sequence, window)
    m_low, m_high = model.unmasked_queries(first, keys, sequence, window, m_min, m_max)
    assert m_min <= m_low <= m_high <= m_max
    for tile in range(math.ceil(sequence.len_q / TILE)):
        part = seen[tile * TILE : (tile + 1) * TILE]
        visited = m_min <= tile < m_max
        assert visited or not part.any()
        assert not visited or part.any()
        if visited:
            assert (m_low <= tile < m_high) == bool(part.all())
    hidden = model.unseen(first, 0, (keys, sequence.len_q), sequence, window)
    assert torch.equal(hidden, ~seen.T)
