# SPDX-License-Identifier: Apache-2.0
"""Copies of sequences: the coordinates of a log against the rows of a model. Made-up logs."""

from dataclasses import replace

import pytest
import torch
from flash_ladder import load
from flash_ladder.common import mask_cases
from flash_ladder.common.conformance import conform
from flash_ladder.common.contract import Case
from flash_ladder.common.grid import Ragged, grid
from flash_ladder.common.hopper.log import Kind
from flash_ladder.common.model import B200, Global, Sequence, Sm
from flash_ladder.common.plan import Arrival, Barrier, Plan, Role, SmemBuffer

from tests.recorded_logs import SMEM, event, made

FULL, SLOT, SIZE, STATS = SMEM, SMEM + 1024, 128 * 64 * 2, 128 * 2 * 4
STORE = SLOT + 2 * SIZE
HEAD = 1
CU_Q, CU_K = (0, 100, 400), (0, 300, 500)  # sequence 1: 300 queries from 100, 200 keys from 300
SECOND = Sequence(100, 300, 300, 200)


def _plan() -> Plan:
    copies = (Arrival("LOAD", "tma"),)
    return Plan(
        roles=(Role("LOAD", range(1)),),
        smem=(
            SmemBuffer("barriers", 8, align=8),
            SmemBuffer("sA", SIZE, 2, 1024),
            SmemBuffer("sO", SIZE, 1, 1024),
            SmemBuffer("sStats", STATS, 1, 1024),
        ),
        barriers=(
            Barrier("full", copies, (Arrival("LOAD"),), "all is there", tx_bytes=2 * SIZE + STATS),
        ),
    )


def _notes() -> tuple:
    """A forward's CTA: its second query tile, key tile 1, statistics of query tile 2; O."""
    sm, tile = Sm(B200, _plan()), slice(128, 256)
    of_cta = lambda name: Global(name, torch.zeros(256, 64, dtype=torch.bfloat16))
    q, k, out = map(of_cta, ("q", "k", "out"))
    stats = Global("stats", torch.zeros(3 * 256))

    def copies(role):
        sA = role.sm.buffer("sA", (128, 64), torch.bfloat16)
        sO = role.sm.buffer("sO", (128, 64), torch.bfloat16)
        sStats = role.sm.buffer("sStats", (256,), torch.float32, swizzled=False)
        role.expect_tx("full", 2 * SIZE + STATS)
        role.arrive("full")
        role.tma_load(q.tile(tile), sA[0], "full")
        role.tma_load(k.tile(tile), sA[1], "full")
        role.tma_load(stats.tile(columns=slice(512, 768)), sStats[0], "full")
        yield from role.wait("full", 0)
        sO[0].put(torch.zeros(128, 64))
        role.tma_store(sO[0], out.tile(tile))
        yield from role.bulk_wait(read=True)

    sm.start("LOAD", copies)
    sm.run()
    return tuple(sm.notes)


def _copy(kind: Kind, place: int, barrier: int, size: int, tensor: int, *coordinates: int):
    """coordinates: column, then the others, at most five."""
    *front, fifth = (*coordinates, *[0] * (5 - len(coordinates)))
    return event(kind, place, barrier, size, tensor, fifth, *front, lanes=1)


def _events(q, k, stats, out) -> list:
    """What a kernel logs, with these coordinates."""
    rows = [
        event(Kind.INIT, FULL, 1, lanes=1),
        event(Kind.ARRIVE, FULL, 1, 2 * SIZE + STATS, lanes=1),
        _copy(Kind.LOAD, SLOT, FULL, SIZE, 11, *q),
        _copy(Kind.LOAD, SLOT + SIZE, FULL, SIZE, 12, *k),
        _copy(Kind.LOAD, STORE + SIZE, FULL, STATS, 13, *stats),
        event(Kind.WAIT, FULL, 0),
        _copy(Kind.STORE, STORE, 0, SIZE, 14, *out),
        event(Kind.BULK_WAIT, 0, flags=8),
        event(Kind.EXIT),
    ]
    return [replace(row, line=number) for number, row in enumerate(rows, 1)]


def _packed_problem():
    problem = Case("gaussian", "bfloat16", 64, 400, 500, 1, 2).problem()
    tensors = {name: getattr(problem, name)[0] for name in ("q", "k", "v", "dout")}
    cu = lambda values: torch.tensor(values, dtype=torch.int32)
    options = {"cu_seqlens_q": cu(CU_Q), "cu_seqlens_k": cu(CU_K)}
    return replace(problem, **tensors, options=options)


def _used_problem():
    """Sequence 1 is a batch entry: 300 queries of 400, 200 keys of 500."""
    problem = Case("gaussian", "bfloat16", 64, 400, 500, 2, 2).problem()
    lengths = {"seqused_q": (100, 300), "seqused_k": (300, 200)}
    options = {name: torch.tensor(x, dtype=torch.int32) for name, x in lengths.items()}
    return replace(problem, options=options)


def _place(problem, block: int = 1):
    """Of sequence 1 and HEAD."""
    shape = grid(load(8), problem)
    return shape.place(block + shape.blocks * (HEAD + 2 * 1))


# rows of Q 400, of K 500; the tile is at 256 (block 1) + 128 of Q, at 128 of K
PACKED = {
    "q": (0, 400 - 300 + 384, HEAD, 0, 400),
    "k": (0, 500 - 200 + 128, HEAD, 0, 500),
    "stats": ((100 // 128 + 1) * 256 + 512, HEAD, 0),
    "out": (0, 400 - 300 + 384, HEAD, 0, 400),
}
USED = {
    "q": (0, 400 - 300 + 384, HEAD, 1, 300),
    "k": (0, 500 - 200 + 128, HEAD, 1, 200),
    "stats": (512, HEAD, 1),
    "out": (0, 400 - 300 + 384, HEAD, 1, 300),
}
BOTH = {"packed": (_packed_problem, PACKED), "used": (_used_problem, USED)}


@pytest.mark.parametrize("name", BOTH)
def test_copies_of_a_sequence_conform(name):
    problem, right = BOTH[name]
    found = conform(made(*_events(**right), threads=32), _notes(), _plan(), _place(problem()))
    assert found.exact, found.differences[0]


@pytest.mark.parametrize("name", BOTH)
@pytest.mark.parametrize("source", PACKED)
def test_every_coordinate_counts(name, source):
    problem, right = BOTH[name]
    place, notes = _place(problem()), _notes()
    for axis in range(len(right[source])):
        moved = list(right[source])
        moved[axis] += 1
        events = _events(**{**right, source: tuple(moved)})
        (difference,) = conform(made(*events, threads=32), notes, _plan(), place).differences
        assert difference.agent == "LOAD" and f" {source} " in str(difference).replace(",", " ")


def test_where_sequences_lie():
    packed, used = grid(load(8), _packed_problem()), grid(load(8), _used_problem())
    assert packed.ragged[1] == Ragged(SECOND, 0, (400, 500), 1)
    assert used.ragged[1] == Ragged(Sequence(0, 300, 0, 200), 1, (400, 500), 0)
    assert (packed.blocks, packed.ctas) == (2, 8) and packed.batch == used.batch == 2
    assert packed.place(7) == (1, 1, 1, 256, ("q", "out"), packed.ragged[1])
    backward = grid(load(8).part("backward_1cta"), _packed_problem())
    assert (backward.blocks, backward.divided) == (2, ("k", "v", "dk", "dv"))
    assert backward.ragged == packed.ragged


def test_a_stage_without_lengths_has_plain_rows():
    problem = Case("gaussian", "bfloat16", 64, 256, 128, 2, 2).problem()
    assert grid(load(6), problem).ragged == () and grid(load(6), problem).place(3).ragged is None


# ---- nothing to do -------------------------------------------------------------------------


def test_a_cta_with_nothing_to_do_ends_at_once():
    place = _place(_packed_problem())
    assert conform(made(event(Kind.EXIT), threads=32), (), _plan(), place).exact


@pytest.mark.parametrize(
    ("events", "words"),
    [
        ([event(Kind.INIT, FULL, 1), event(Kind.EXIT)], "full: initialised with 1 arrivals"),
        ([event(Kind.FENCE, 0), event(Kind.EXIT)], "LOAD: the kernel and the model part here"),
        ([event(Kind.EXIT, lanes=1)], "warp 0: the log does not show its end"),
    ],
)
def test_a_cta_with_nothing_to_do_that_does_something(events, words):
    found = conform(made(*events, threads=32), (), _plan(), _place(_packed_problem()))
    assert words in str(found.differences[0])


@pytest.mark.parametrize("lengths", mask_cases.USUAL)
def test_a_model_has_as_many_ctas_as_the_launch(lengths):
    case = Case("gaussian", "bfloat16", 64, 300, 300, 3, 1, mask="causal", lengths=lengths)
    problem = case.problem()
    run, shape = load(8).simulate_problem(problem), grid(load(8), problem)
    assert run.ctas == len(run.notes) == shape.clusters
    idle = [number for number, notes in enumerate(run.notes) if not notes]
    empty = [n for n in range(shape.ctas) if not shape.place(n).ragged.sequence.len_q]
    assert set(empty) <= set(idle)
