# SPDX-License-Identifier: Apache-2.0
"""The log of a pair against a model of a pair: both CTAs' warps, copies and arrivals between."""

from dataclasses import replace

import pytest
import torch
from flash_ladder import load
from flash_ladder.common import inputs
from flash_ladder.common.conformance import conform
from flash_ladder.common.grid import Place, grid
from flash_ladder.common.hopper.log import CLUSTER, Kind
from flash_ladder.common.model import B200, Global, Pair
from flash_ladder.common.plan import Arrival, Barrier, Plan, Role, SmemBuffer

from tests.recorded_logs import ALL, SMEM, event, made

FULL, BOTH, SOURCE, TARGET, SIZE = SMEM, SMEM + 8, SMEM + 1024, SMEM + 2048, 512
CTAS = (0, 1)


def _plan() -> Plan:
    """A warp that copies to the peer, waits for the peer's copy and tells the leader."""
    one, copy = Arrival("GIVE", "one", ctas=2), Arrival("GIVE", "tma")
    give = (Arrival("GIVE"),)
    return Plan(
        roles=(Role("GIVE", range(1)),),
        smem=(
            SmemBuffer("barriers", 16, align=8),
            SmemBuffer("sA", SIZE, 1, 1024),
            SmemBuffer("sB", SIZE, 1, 1024),
        ),
        barriers=(
            Barrier("start", give, give, "both are there", "cluster"),
            Barrier("full", (copy,), give, "sB holds the peer's", tx_bytes=SIZE),
            Barrier("both", (one,), give, "both have it"),
        ),
    )


def _notes() -> tuple:
    """What the model does: swap sA, tell the leader, add sA to global memory in two boxes."""
    pair, outside = Pair(B200, _plan()), Global("out", torch.zeros(8, 64))

    def give(role):
        sA, sB = (role.sm.buffer(name, (8, 32), torch.bfloat16)[0] for name in ("sA", "sB"))
        yield from role.sync("start")
        role.expect_tx("full", SIZE)
        role.arrive("full")
        role.dsmem_copy(sA, sB, "full")
        yield from role.wait("full", 0)
        role.arrive("both", to=0)
        for half in range(2):  # two boxes side by side
            columns = slice(32 * half, 32 * half + 32)
            role.reduce_add(
                sA.part(slice(4 * half, 4 * half + 4)), outside.tile(slice(0, 4), columns)
            )
        yield from role.bulk_wait(read=True)

    pair.start("GIVE", give)
    for sm in pair.sms:
        sm.buffer("sA", (8, 32), torch.bfloat16)[0].put(torch.ones(8, 32))
    pair.run()
    return tuple(pair.notes)


def _events(rank: int) -> list:
    """The same as the kernel of a CTA logs it."""
    at = lambda address, of: address | of << 24
    peer, mine = 1 - rank, {"warp": 0, "rank": rank}
    lane = {**mine, "lanes": 1}
    half = SIZE // 2
    rows = [
        event(Kind.INIT, at(FULL, rank), 1, **lane),
        event(Kind.INIT, at(BOTH, rank), 2, **lane),
        event(Kind.CLUSTER_ARRIVE, **mine),
        event(Kind.CLUSTER_WAIT, **mine),
        event(Kind.ARRIVE, at(FULL, rank), 1, SIZE, **lane),
        event(Kind.COPY, at(SOURCE, rank), at(TARGET, peer), SIZE, 0, 0, at(FULL, peer), **lane),
        event(Kind.WAIT, at(FULL, rank), 0, **mine),
        event(Kind.ARRIVE, at(BOTH, 0), 1, flags=CLUSTER, **lane),
        event(Kind.REDUCE, at(SOURCE, rank), 0, half, 7, 0, 0, 0, 0, 0, **lane),
        event(Kind.REDUCE, at(SOURCE, rank) + half, 0, half, 7, 0, 32, 0, 0, 0, **lane),
        event(Kind.BULK_WAIT, 0, flags=8, **mine),
        event(Kind.EXIT, **mine),
    ]
    return [replace(row, line=number) for number, row in enumerate(rows, 1)]


def _conform(events):
    return conform(made(*events, ctas=2, threads=32), _notes(), _plan(), Place(0, 0, 0, 8))


def _with(rank: int, at: int, **words) -> list:
    """The log of both with words of one record replaced."""
    logs = [_events(0), _events(1)]
    row = logs[rank][at]
    new = [words.get(f"w{number}", word) for number, word in enumerate(row.words)]
    logs[rank][at] = replace(row, words=tuple(new))
    return logs


def test_both_ctas_do_what_the_model_does():
    found = _conform([_events(0), _events(1)])
    assert found.exact, found.differences[0]
    names = {(role, barrier) for places in found.lines.values() for role, _, barrier in places}
    assert ("GIVE", "both") in names and ("GIVE", "start") in names


@pytest.mark.parametrize(
    "at, words",
    [
        (5, {"w5": FULL}),  # the copy's bytes count at home
        (5, {"w1": TARGET + 16 | 1 << 24}),  # it goes elsewhere
        (7, {"w0": FULL}),  # the wrong barrier of the leader
        (9, {"w5": 16}),  # the second box has other columns
    ],
)
def test_what_one_cta_does_otherwise_is_noticed(at, words):
    (difference,) = _conform(_with(0, at, **words)).differences
    assert difference.agent == "GIVE@0"


def test_an_arrival_at_the_own_barrier_instead_of_the_leaders():
    (difference,) = _conform(_with(1, 7, w0=BOTH | 1 << 24)).differences
    assert difference.agent == "GIVE@1" and "arrive both@1" in str(difference)


def test_initialised_otherwise_in_one_cta():
    (difference,) = _conform(_with(1, 1, w1=1)).differences
    assert str(difference) == "both@1: initialised with 1 arrivals, the plan has 2"


def test_a_warp_that_does_not_end_in_one_cta():
    logs = [_events(0), [row for row in _events(1) if row.kind != Kind.EXIT]]
    (difference,) = _conform(logs).differences
    assert str(difference) == "warp 0 of CTA 1: the log does not show its end"
    assert ALL == 0xFFFFFFFF


def test_a_pair_works_on_one_block():
    part = load(7).part("backward_2cta")
    sizes = {"batch": 2, "heads": 2, "seqlen_q": 128, "seqlen_k": 384, "head_dim": 128}
    shape = grid(part, inputs.make("gaussian", **sizes))
    assert (shape.rows, shape.blocks, shape.clusters, shape.ctas) == (256, 2, 8, 16)
    assert shape.place(6) == shape.place(7) == Place(1, 1, 0, 256, shape.divided)
    assert shape.place(8) == Place(0, 0, 1, 256, shape.divided)
