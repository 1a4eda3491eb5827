# SPDX-License-Identifier: Apache-2.0
"""The happens-before checker: each rule with a program that keeps it and a twin that does not."""

import time

import pytest
from flash_ladder.common.ordering import Ordering, OrderingError, explain, replay
from flash_ladder.common.ordering_race import SHOWN, place

S = ((0, 512),)  # tensor memory columns 0-127, all lane quarters
O = ((1024, 1536),)  # columns 256-383
P_LOW = ((0, 128),)  # columns 0-31
TILE = ((0, 64),)  # 1 KiB of shared memory
START = [("thread", "SOFTMAX0"), ("thread", "MMA"), ("thread", "LOAD")]


def at(op: str) -> tuple[str, str]:
    """The name and source line that an event ends with; `op` tells the events of a test apart."""
    return op, f"model.py:{len(op)}"


def own(agent: str, how: str, memory: str, cells=TILE, op: str | None = None):
    """A generic access."""
    return [(how, agent, memory, cells, *at(op or f"{how} {agent}"))]


def strand(agent: str, kind: str, op: str, *accesses, **facts):
    """A strand named after its op, and its accesses: (how, memory, cells)."""
    issue = ("issue", agent, kind, *at(op), {"name": op, **facts})
    return [issue, *((how, op, memory, cells, *at(op)) for how, memory, cells in accesses)]


def fence(agent: str, kind: str):
    return [("fence", agent, kind, *at(f"{agent} {kind}"))]


def arrive(agent: str, barrier: str, **scope):
    return [("arrive", agent, barrier, *at(f"arrive {barrier}"), scope), ("complete", barrier)]


def commit(agent: str, barrier: str):
    return [("commit", agent, barrier, *at(f"commit {barrier}")), ("complete", barrier)]


def wait(agent: str, barrier: str, **scope):
    return [("wait", agent, barrier, *at(f"{agent} waits {barrier}"), scope)]


def handoff(source: str, target: str, barrier: str):
    """A complete hand-over of tensor memory, once the operations of `source` are done."""
    return [
        *fence(source, "tcgen05.before"),
        *arrive(source, barrier),
        *wait(target, barrier),
        *fence(target, "tcgen05.after"),
    ]


def mma_s(**facts):
    facts = {"accumulator": S, "shape": (128, 128, 16), **facts}
    return strand("MMA", "mma", "S", ("read", "smem", TILE), ("write", "tmem", S), **facts)


def mma_pv(**facts):
    facts = {"accumulator": O, "shape": (128, 128, 16), **facts}
    return strand("MMA", "mma", "PV", ("read", "tmem", P_LOW), ("write", "tmem", O), **facts)


ST_P = strand("SOFTMAX0", "tmem.st", "st P", ("write", "tmem", P_LOW))
LD_S = strand("SOFTMAX0", "tmem.ld", "ld S", ("read", "tmem", S))
TMA = strand("LOAD", "tma.load", "load K", ("write", "smem", TILE))
STORE = strand("SOFTMAX0", "tma.store", "store O", ("read", "smem", TILE), ("write", "global", S))
REDUCE = strand(
    "SOFTMAX0", "reduce", "add dQ", ("read", "smem", TILE), ("write", "global", S), ordered=True
)
REDUCE_1 = strand(
    "MMA",
    "reduce",
    "add dQ 1",
    ("read", "smem", ((64, 128),)),
    ("write", "global", S),
    ordered=True,
)
SYNC = [("sync", ("SOFTMAX0", "LOAD", "MMA"), "everyone", *at("sync"))]

# rule: the good program; the op that its twin lacks; what the twin's race says is missing
RULES = {
    "generic to generic: arrive and wait": (
        own("LOAD", "write", "smem") + arrive("LOAD", "full") + wait("MMA", "full")
        + own("MMA", "read", "smem"), "MMA waits full", "wait",
    ),
    "generic write to MMA: the writer's proxy fence": (
        own("SOFTMAX0", "write", "smem") + fence("SOFTMAX0", "proxy.async")
        + arrive("SOFTMAX0", "full") + wait("MMA", "full") + mma_s(),
        "SOFTMAX0 proxy.async", "fence.proxy.async",
    ),
    "generic write to the own bulk store: proxy fence": (
        own("SOFTMAX0", "write", "smem") + fence("SOFTMAX0", "proxy.async") + STORE,
        "SOFTMAX0 proxy.async", "fence.proxy.async",
    ),
    "generic write to a TMA refill: proxy fence": (
        own("SOFTMAX0", "write", "smem") + fence("SOFTMAX0", "proxy.async")
        + arrive("SOFTMAX0", "empty") + wait("LOAD", "empty") + TMA,
        "SOFTMAX0 proxy.async", "fence.proxy.async",
    ),
    "TMA to a generic read: the wait alone": (
        TMA + arrive("load K", "full") + wait("SOFTMAX0", "full")
        + own("SOFTMAX0", "read", "smem"), "SOFTMAX0 waits full", "wait",
    ),
    "TMA to MMA: the wait alone": (
        TMA + arrive("load K", "full") + wait("MMA", "full") + mma_s(), "MMA waits full", "wait",
    ),
    "TMA: the issuer's arrive is not the copy's": (
        TMA + arrive("LOAD", "full") + arrive("load K", "full") + wait("MMA", "full") + mma_s(),
        "arrive full of load K", "copy",
    ),
    "generic read to a TMA refill: arrive and wait alone": (
        own("SOFTMAX0", "read", "smem") + arrive("SOFTMAX0", "empty") + wait("LOAD", "empty")
        + TMA, "LOAD waits empty", "wait",
    ),
    "MMA to a TMA refill: commit and wait alone": (
        mma_s() + commit("MMA", "empty") + wait("LOAD", "empty") + TMA, "LOAD waits empty", "wait",
    ),
    "MMA to a TMA refill: commit, not arrive": (
        mma_s() + commit("MMA", "empty") + arrive("MMA", "empty") + wait("LOAD", "empty") + TMA,
        "commit empty", "commit",
    ),
    "MMA to ld: commit, wait, after-fence": (
        mma_s() + commit("MMA", "s_full") + wait("SOFTMAX0", "s_full")
        + fence("SOFTMAX0", "tcgen05.after") + LD_S, "SOFTMAX0 tcgen05.after", "tcgen05.after",
    ),
    "MMA to ld of the same thread: after-fence": (
        mma_s() + commit("MMA", "s_full") + wait("MMA", "s_full") + fence("MMA", "tcgen05.after")
        + strand("MMA", "tmem.ld", "ld", ("read", "tmem", S)),
        "MMA tcgen05.after", "tcgen05.after",
    ),
    "MMA to ld: the commit is waited for": (
        mma_s() + commit("MMA", "s_full") + wait("SOFTMAX0", "s_full")
        + fence("SOFTMAX0", "tcgen05.after") + LD_S, "SOFTMAX0 waits s_full", "wait",
    ),
    "ld to MMA: wait::ld": (
        LD_S + fence("SOFTMAX0", "wait.ld") + handoff("SOFTMAX0", "MMA", "s_empty") + mma_s(),
        "SOFTMAX0 wait.ld", "wait::ld",
    ),
    "ld to MMA: before-fence": (
        LD_S + fence("SOFTMAX0", "wait.ld") + handoff("SOFTMAX0", "MMA", "s_empty") + mma_s(),
        "SOFTMAX0 tcgen05.before", "tcgen05.before",
    ),
    "ld to MMA: after-fence": (
        LD_S + fence("SOFTMAX0", "wait.ld") + handoff("SOFTMAX0", "MMA", "s_empty") + mma_s(),
        "MMA tcgen05.after", "tcgen05.after",
    ),
    "ld ends where it feeds a st": (
        [*LD_S, ("feeds", "ld S", *at("feeds")), *ST_P], "feeds", "wait::ld",
    ),
    "st to MMA: wait::st": (
        ST_P + fence("SOFTMAX0", "wait.st") + handoff("SOFTMAX0", "MMA", "p_full") + mma_pv(),
        "SOFTMAX0 wait.st", "wait::st",
    ),
    "st to MMA: wait::ld is no wait::st": (
        ST_P + fence("SOFTMAX0", "wait.ld") + fence("SOFTMAX0", "wait.st")
        + handoff("SOFTMAX0", "MMA", "p_full") + mma_pv(), "SOFTMAX0 wait.st", "wait::st",
    ),
    "st to the own ld: wait::st": (
        ST_P + fence("SOFTMAX0", "wait.st") + LD_S, "SOFTMAX0 wait.st", "wait::st",
    ),
    "commit publishes the issuer's finished ld": (
        strand("MMA", "tmem.ld", "ld", ("read", "tmem", P_LOW)) + fence("MMA", "wait.ld")
        + commit("MMA", "full") + wait("SOFTMAX0", "full") + fence("SOFTMAX0", "tcgen05.after")
        + ST_P, "MMA wait.ld", "wait::ld",
    ),
    "commit does not release generic accesses": (
        own("MMA", "write", "smem") + arrive("MMA", "full") + commit("MMA", "full")
        + wait("SOFTMAX0", "full") + own("SOFTMAX0", "read", "smem"), "arrive full", "wait",
    ),
    "what a copy's issuer knew travels with it": (
        own("SOFTMAX0", "read", "smem", P_LOW) + arrive("SOFTMAX0", "empty")
        + wait("LOAD", "empty") + strand("LOAD", "tma.load", "load", ("write", "smem", O))
        + arrive("load", "full") + wait("MMA", "full") + own("MMA", "write", "smem", P_LOW),
        "LOAD waits empty", "wait",
    ),
    "MMAs of two threads: a pipeline needs no commit, but fences": (
        mma_s() + handoff("MMA", "LOAD", "go") + strand(
            "LOAD", "mma", "S more", ("write", "tmem", S), accumulator=S, shape=(128, 128, 16)
        ), "LOAD tcgen05.after", "commit",
    ),
    "bulk store: wait_group.read before the source is overwritten": (
        STORE + fence("SOFTMAX0", "bulk.wait.read") + arrive("SOFTMAX0", "empty")
        + wait("MMA", "empty") + own("MMA", "write", "smem"),
        "SOFTMAX0 bulk.wait.read", "bulk.wait.read",
    ),
    "bulk store: one group waited for": (
        [*STORE, ("finish", "store O", {"read": True}), *own("SOFTMAX0", "write", "smem")],
        "finish", "bulk.wait.read",
    ),
    "bulk store: wait_group before the result is read": (
        STORE + fence("SOFTMAX0", "bulk.wait.read") + fence("SOFTMAX0", "bulk.wait")
        + own("SOFTMAX0", "read", "global", S), "SOFTMAX0 bulk.wait", "bulk.wait",
    ),
    "ordered reductions: fence after wait_group": (
        REDUCE + fence("SOFTMAX0", "bulk.wait") + fence("SOFTMAX0", "proxy.async")
        + arrive("SOFTMAX0", "turn") + wait("MMA", "turn") + fence("MMA", "proxy.async")
        + REDUCE_1, "SOFTMAX0 proxy.async", "bulk fence",
    ),
    "ordered reductions: the acquirer's fence": (
        REDUCE + fence("SOFTMAX0", "bulk.wait") + fence("SOFTMAX0", "proxy.async")
        + arrive("SOFTMAX0", "turn") + wait("MMA", "turn") + fence("MMA", "proxy.async")
        + REDUCE_1, "MMA proxy.async", "bulk fence",
    ),
    "named barrier": (
        own("SOFTMAX0", "write", "smem") + SYNC + own("MMA", "read", "smem"), "sync", "wait",
    ),
    "relaxed arrive: fence.acq_rel before": (
        own("SOFTMAX0", "write", "smem") + fence("SOFTMAX0", "acq_rel")
        + arrive("SOFTMAX0", "flag", scope="relaxed") + wait("MMA", "flag")
        + own("MMA", "read", "smem"), "SOFTMAX0 acq_rel", "wait",
    ),
    "relaxed wait: fence.acq_rel after": (
        own("SOFTMAX0", "write", "smem") + arrive("SOFTMAX0", "flag")
        + wait("MMA", "flag", scope="relaxed") + fence("MMA", "acq_rel")
        + own("MMA", "read", "smem"), "MMA acq_rel", "wait",
    ),
    "tcgen05 fences work over relaxed arrives and waits": (
        LD_S + fence("SOFTMAX0", "wait.ld") + fence("SOFTMAX0", "tcgen05.before")
        + arrive("SOFTMAX0", "e", scope="relaxed") + wait("MMA", "e", scope="relaxed")
        + fence("MMA", "tcgen05.after") + mma_s(), "MMA tcgen05.after", "tcgen05.after",
    ),
}  # fmt: skip


def without(events, op: str):
    """The events less the one called `op` ("arrive full of load K": of that agent)."""
    name, _, agent = op.partition(" of ")
    kept = [e for e in events if not (named(e, name) and (not agent or e[1] == agent))]
    assert len(kept) == len(events) - 1, f"{op}: {len(events) - len(kept)} events have that name"
    return kept


def named(event, name: str) -> bool:
    return event[0] == name or any(part == name for part in event[3:])


@pytest.mark.parametrize("rule", RULES)
def test_a_program_that_keeps_the_rule_is_clean_and_its_twin_is_not(rule):
    events, lacks, missing = RULES[rule]
    assert replay(START + events).races() == []
    races = replay(START + without(events, lacks)).races()
    assert [race.missing for race in races] == [missing], [explain(race) for race in races]


# ---- what a race says ----------------------------------------------------------------------


def test_a_race_names_both_sides_the_place_and_the_missing_edge():
    events, _, _ = RULES["st to MMA: wait::st"]
    (race,) = replay(START + without(events, "SOFTMAX0 wait.st")).races()
    assert (race.first.agent, race.first.op, race.first.kind) == ("SOFTMAX0", "st P", "tmem.st")
    assert (race.second.agent, race.second.op, race.second.mode) == ("MMA", "PV", "read")
    assert race.intervals == P_LOW and race.second.intervals == P_LOW
    assert str(race) == (
        "PV (MMA, model.py:2) reads tmem columns 0-31, and nothing makes sure that st P "
        "(SOFTMAX0, model.py:4) has written them before: wait::st is missing between it and the "
        "release by SOFTMAX0"
    )
    told = explain(race)
    assert "missing: wait::st" in told and "PTX 9.7.16.6" in told and "strand: mma" in told


def test_places_are_told_in_columns_bytes_and_cells():
    order = Ordering()
    for agent in "AB":
        order.thread(agent)
    for memory, cells in (("smem@1", (0, 2)), ("global:dq", (3, 4)), ("tmem", (5, 6))):
        order.write("A", memory, (cells,), "w", memory)
        order.read("B", memory, ((0, 9),), "r", memory)
    texts = [str(race) for race in order.races()]
    assert "smem@1 bytes 0-7," in texts[0] and "global:dq cell 3," in texts[1]
    assert "tmem column 1 (lane quarter 1 to 1)" in texts[2]


def quarters(columns, *which: int):
    """Cells of some lane quarters of tensor memory columns."""
    return tuple((4 * column + q, 4 * column + q + 1) for column in columns for q in which)


@pytest.mark.parametrize(
    ("memory", "cells", "text"),
    [
        ("tmem", quarters(range(8, 40), 2), "tmem columns 8-39 (lane quarter 2)"),
        ("tmem@1", quarters((3, 4), 0), "tmem@1 columns 3-4 (lane quarter 0)"),
        ("tmem", quarters((3,), 1), "tmem column 3 (lane quarter 1 to 1)"),
        (  # not next to each other
            "tmem",
            quarters((3, 5), 1),
            "tmem column 3 (lane quarter 1 to 1), column 5 (lane quarter 1 to 1)",
        ),
        (  # two quarters
            "tmem",
            ((12, 14), (16, 18)),
            "tmem column 3 (lane quarter 0 to 1), column 4 (lane quarter 0 to 1)",
        ),
        (  # not the same quarter
            "tmem",
            ((12, 13), (17, 18)),
            "tmem column 3 (lane quarter 0 to 0), column 4 (lane quarter 1 to 1)",
        ),
        ("tmem", S, "tmem columns 0-127"),
        ("tmem", ((0, 4), (8, 12)), "tmem column 0, column 2"),
        ("smem", quarters(range(8, 40), 2)[:2], "smem bytes 136-139, bytes 152-155"),
    ],
)
def test_a_lane_quarter_of_many_columns_is_one_place(memory, cells, text):
    assert place(memory, cells) == text


@pytest.mark.parametrize("count", [SHOWN - 1, SHOWN, SHOWN + 1, SHOWN + 20])
def test_of_many_places_the_first_few_are_told(count):
    cells = tuple((4 * i, 4 * i + 2) for i in range(count))
    shown = [f"bytes {16 * i}-{16 * i + 7}" for i in range(min(count, SHOWN))]
    more = [f"and {count - SHOWN} more"] * (count > SHOWN)
    assert place("smem", cells) == f"smem {', '.join(shown + more)}"


def test_each_pair_of_lines_once_with_a_count():
    events = []
    for _ in range(5):
        events += own("LOAD", "write", "smem") + own("MMA", "read", "smem")
    races = replay(START + events).races()
    assert [(r.first.agent, r.second.agent, r.count) for r in races] == [
        ("LOAD", "MMA", 5), ("MMA", "LOAD", 4),
    ]  # fmt: skip
    assert "found 5 times" in explain(races[0])


# ---- the faults that the issue plants ------------------------------------------------------


def pipeline(tiles: int, behind: int = 0, release_early: bool = False):
    """LOAD fills a ring of two slots, MMA multiplies, SOFTMAX0 reads S; stage 03 in small.

    Each slot is full when its copy has arrived. `behind`: MMA waits for the copy of that many
    tiles ago; `release_early`: SOFTMAX0 hands S back before wait::ld.
    """
    events = list(START)
    for tile in range(tiles):
        slot = tile % 2
        cells = ((64 * slot, 64 * slot + 64),)
        full, empty = f"kv_full{slot}", f"kv_empty{slot}"
        copy, ld = f"copy{tile}", f"ld{tile}"
        events += wait("LOAD", empty)
        events += [("issue", "LOAD", "tma.load", "load K", "model.py:10", {"name": copy})]
        events += [("write", copy, "smem", cells, "load K", "model.py:10")]
        events += arrive(copy, full)
        events += wait("MMA", f"kv_full{(tile - behind) % 2}") if tile >= behind else []
        events += wait("MMA", "s_empty") + fence("MMA", "tcgen05.after")
        facts = {"accumulator": S, "shape": (128, 128, 16), "name": f"mma{tile}"}
        events += [
            ("issue", "MMA", "mma", "QK", "model.py:20", facts),
            ("read", f"mma{tile}", "smem", cells, "QK", "model.py:20"),
            ("write", f"mma{tile}", "tmem", S, "QK", "model.py:20"),
        ]
        events += commit("MMA", empty) + commit("MMA", "s_full") + wait("SOFTMAX0", "s_full")
        events += fence("SOFTMAX0", "tcgen05.after")
        events += [("issue", "SOFTMAX0", "tmem.ld", "ld S", "model.py:30", {"name": ld})]
        events += [("read", ld, "tmem", S, "ld S", "model.py:30")]
        release = fence("SOFTMAX0", "tcgen05.before") + arrive("SOFTMAX0", "s_empty")
        done = fence("SOFTMAX0", "wait.ld")
        events += release + done if release_early else done + release
    return events


def deleted(events, op: str):
    """Every event called `op` deleted, as a mutation of the source would."""
    return [event for event in events if not named(event, op)]


FAULTS = {  # planted fault: (events, first op, second op, missing)
    "missing wait for the copy": (
        deleted(deleted(pipeline(4), "MMA waits kv_full0"), "MMA waits kv_full1"),
        "load K", "QK", "wait",
    ),
    "missing wait before the refill": (
        deleted(deleted(pipeline(4), "LOAD waits kv_empty0"), "LOAD waits kv_empty1"),
        "QK", "load K", "wait",
    ),
    "release before wait::ld": (pipeline(4, release_early=True), "ld S", "QK", "wait::ld"),
    "consumer one stage behind": (pipeline(4, behind=1), "load K", "QK", "wait"),
    "missing tcgen05 before-fence": (
        deleted(pipeline(4), "SOFTMAX0 tcgen05.before"), "ld S", "QK", "tcgen05.before",
    ),
    "missing tcgen05 after-fence": (
        deleted(pipeline(4), "SOFTMAX0 tcgen05.after"), "QK", "ld S", "tcgen05.after",
    ),
    "missing commit": (deleted(pipeline(4), "commit s_full"), "QK", "ld S", "wait"),
}  # fmt: skip


@pytest.mark.parametrize("fault", FAULTS)
def test_a_planted_fault_has_its_name(fault):
    events, first, second, missing = FAULTS[fault]
    assert replay(pipeline(4)).races() == []
    races = replay(events).races()
    assert (first, second, missing) in [(r.first.op, r.second.op, r.missing) for r in races]


def test_an_unfinished_read_is_not_hidden_by_a_later_one():
    other = strand("SOFTMAX0", "tmem.ld", "ld again", ("read", "tmem", S))
    (race,) = replay([*START, *LD_S, *other, ("feeds", "ld again", *at("feeds")), *ST_P]).races()
    assert (race.first.op, race.missing) == ("ld S", "wait::ld")


def test_a_wide_read_meets_all_writes_under_it():
    events = list(START)
    for column in (0, 40, 80):
        cells = ((4 * column, 4 * column + 4),)
        name = f"st {column}"
        events += strand("SOFTMAX0", "tmem.st", name, ("write", "tmem", cells))
    races = replay(events + LD_S).races()
    assert [race.first.op for race in races] == ["st 0", "st 40", "st 80"]
    assert replay(events + LD_S + ST_P).races()[3:] != []  # the read is remembered in each piece


# ---- modes ---------------------------------------------------------------------------------


def test_rule_a1_orders_other_accumulators_in_practice_only():
    """S(i) overwrites P(i-1), which PV reads: upstream relies on one thread's MMAs in order."""
    events = START + mma_pv() + mma_s()
    assert replay(events).races() == []
    (edge,) = replay(events).a1_edges()
    assert edge.needs_a1 and edge.missing == "A1" and (edge.first.op, edge.second.op) == ("PV", "S")
    strict = replay(events, "ptx")
    assert strict.races() == [edge] and strict.a1_edges() == [edge]
    assert "only rule A1" in str(edge)


@pytest.mark.parametrize("mode", ["practice", "ptx"])
def test_the_same_accumulator_and_shape_need_no_rule(mode):
    events = START + mma_s() + [tuple(_again(e)) for e in mma_s()]
    assert replay(events, mode).races() == [] == replay(events, mode).a1_edges()


def _again(event):
    return [
        {**p, "name": "S 2"} if isinstance(p, dict) else p if p != "S" else "S 2" for p in event
    ]


def test_a1_edges_are_found_behind_reads_of_other_pipelines():
    """Two MMAs read P; the one that overwrites it is in a pipeline with the later reader only."""
    later = strand("MMA", "mma", "PV 2", ("read", "tmem", P_LOW), accumulator=P_LOW)
    over = strand("MMA", "mma", "over", ("write", "tmem", P_LOW), accumulator=P_LOW)
    (race,) = replay(START + mma_pv() + later + over, "ptx").races()
    assert (race.first.op, race.second.op) == ("PV", "over")


@pytest.mark.parametrize("mode", ["practice", "ptx"])
def test_other_groups_are_not_ordered(mode):
    (race,) = replay(START + mma_pv(cta_group=2) + mma_s(), mode).races()
    assert race.missing == "commit" and not race.needs_a1


def test_a_commit_between_makes_a1_unnecessary():
    events = mma_pv() + commit("MMA", "o") + wait("MMA", "o") + fence("MMA", "tcgen05.after")
    order = replay(START + events + mma_s(), "ptx")
    assert order.races() == [] == order.a1_edges()


def test_a_commit_covers_earlier_mmas_only():
    late = commit("MMA", "full") + mma_s() + wait("SOFTMAX0", "full")
    (race,) = replay(START + late + fence("SOFTMAX0", "tcgen05.after") + LD_S).races()
    assert (race.first.op, race.second.op) == ("S", "ld S")


# ---- pairs of CTAs -------------------------------------------------------------------------


@pytest.mark.parametrize("arrive_scope", ["cta", "cluster"])
@pytest.mark.parametrize("wait_scope", ["cta", "cluster"])
@pytest.mark.parametrize("peer", ["B", "B@1"])
def test_a_remote_arrive_needs_cluster_scope_on_both_sides(arrive_scope, wait_scope, peer):
    events = [("thread", "A"), ("thread", peer), *own("A", "write", "smem")]
    events += arrive("A", "b", scope=arrive_scope) + wait(peer, "b", scope=wait_scope)
    races = replay(events + own(peer, "read", "smem")).races()
    assert bool(races) == (peer == "B@1" and "cta" in (arrive_scope, wait_scope))


def test_a_copy_to_the_peer_is_seen_at_the_peers_barrier():
    copy = strand("A", "dsmem.copy", "copy", ("read", "smem", TILE), ("write", "smem@1", TILE))
    events = [("thread", "A"), ("thread", "B@1"), *copy]
    good = events + arrive("copy", "ds@1") + wait("B@1", "ds@1") + own("B@1", "read", "smem@1")
    assert replay(good).races() == []
    (race,) = replay(events + own("A", "write", "smem")).races()
    assert race.missing == "copy"  # the source is still being read
    (race,) = replay(events + arrive("copy", "ds@1") + own("B@1", "read", "smem@1")).races()
    assert race.missing == "wait" and "on ds@1" in str(race)


def test_reductions_commute_unless_their_order_matters():
    plain = [
        tuple({**p, "ordered": False} if isinstance(p, dict) else p for p in event)
        for event in REDUCE + REDUCE_1
    ]
    assert replay(START + plain).races() == []
    assert [race.missing for race in replay(START + REDUCE + REDUCE_1).races()] == ["wait"]
    assert len(replay(START + plain + own("LOAD", "read", "global", S)).races()) == 2


# ---- phases, replay, errors ----------------------------------------------------------------


def test_a_wait_sees_complete_phases_only():
    arrival = ("arrive", "LOAD", "b", *at("arrive"), {})
    events = START + own("LOAD", "write", "smem") + [arrival] + wait("MMA", "b")
    assert len(replay(events + own("MMA", "read", "smem")).races()) == 1
    events.insert(-1, ("complete", "b"))
    assert replay(events + own("MMA", "read", "smem")).races() == []


def test_arrivals_of_the_next_phase_are_not_seen():
    arrival = ("arrive", "LOAD", "b", *at("arrive"), {})
    events = START + arrive("LOAD", "b") + own("LOAD", "write", "smem") + [arrival]
    assert len(replay(events + wait("MMA", "b") + own("MMA", "read", "smem")).races()) == 1


def test_a_skipped_phase_is_acquired_with_the_next():
    events = START + own("LOAD", "write", "smem") + arrive("LOAD", "b") + arrive("LOAD", "b")
    assert replay(events + wait("MMA", "b") + own("MMA", "read", "smem")).races() == []


def late(agent: str, barrier: str):
    return wait(agent, barrier, late=True)


TWO_PHASES = [  # LOAD writes one tile, arrives, writes another, arrives again
    *START,
    *own("LOAD", "write", "smem", TILE),
    *arrive("LOAD", "b"),
    *own("LOAD", "write", "smem", ((64, 128),), "again"),
    *arrive("LOAD", "b"),
]


def test_a_late_wait_acquires_all_but_the_last_phase():
    first, second = (own("MMA", "read", "smem", cells) for cells in (TILE, ((64, 128),)))
    assert replay(TWO_PHASES + late("MMA", "b") + first).races() == []
    (race,) = replay(TWO_PHASES + late("MMA", "b") + second).races()
    assert (race.first.op, race.missing) == ("again", "wait")
    assert replay(TWO_PHASES + wait("MMA", "b") + first + second).races() == []
    both = late("MMA", "b") + first + wait("MMA", "b") + second
    assert replay(TWO_PHASES + both).races() == []


def test_a_late_wait_after_one_phase_acquires_nothing():
    events = START + own("LOAD", "write", "smem") + arrive("LOAD", "b")
    assert len(replay(events + late("MMA", "b") + own("MMA", "read", "smem")).races()) == 1
    assert replay(events + wait("MMA", "b") + own("MMA", "read", "smem")).races() == []


def test_a_late_wait_does_not_see_the_copies_of_the_last_phase():
    first = strand("LOAD", "tma.load", "load K", ("write", "smem", TILE))
    second = strand("LOAD", "tma.load", "load V", ("write", "smem", ((64, 128),)))
    events = [*START, *first, *arrive("load K", "b"), *second, *arrive("load V", "b")]
    reads = own("MMA", "read", "smem", TILE) + own("MMA", "read", "smem", ((64, 128),), "read V")
    (race,) = replay(events + late("MMA", "b") + reads).races()
    assert (race.first.op, race.missing) == ("load V", "wait")
    assert replay(events + wait("MMA", "b") + reads).races() == []


def test_a_late_wait_does_not_see_the_mmas_of_the_last_commit():
    ready = fence("SOFTMAX0", "tcgen05.after")
    lds = strand("SOFTMAX0", "tmem.ld", "ld S", ("read", "tmem", S))
    lds += strand("SOFTMAX0", "tmem.ld", "ld O", ("read", "tmem", O))
    events = [*START, *mma_s(), *commit("MMA", "b"), *mma_pv(), *commit("MMA", "b")]
    (race,) = replay(events + late("SOFTMAX0", "b") + ready + lds).races()
    assert (race.first.op, race.second.op) == ("PV", "ld O")
    assert replay(events + wait("SOFTMAX0", "b") + ready + lds).races() == []


def test_accesses_of_a_strand_may_be_recorded_late():
    """The MMA starts with what MMA knew at its issue, not when it ran."""
    issue, *accesses = mma_s()
    events = [*START, issue, *TMA, *arrive("load K", "full"), *wait("MMA", "full"), *accesses]
    (race,) = replay(events).races()
    assert (race.first.op, race.second.op, race.missing) == ("load K", "S", "wait")


def test_what_ends_after_the_issue_is_too_late():
    ld = strand("MMA", "tmem.ld", "ld", ("read", "tmem", S))
    issue, *accesses = mma_s()
    (race,) = replay([*START, *ld, issue, *fence("MMA", "wait.ld"), *accesses]).races()
    assert (race.first.op, race.second.op, race.missing) == ("ld", "S", "wait::ld")


def test_replay_equals_direct_calls():
    order = Ordering()
    events = pipeline(3, behind=1)
    for verb, *arguments in events:
        keywords = arguments.pop() if isinstance(arguments[-1], dict) else {}
        getattr(order, verb)(*arguments, **keywords)
    assert order.races() == replay(events).races() != []
    listed = [[list(p) if isinstance(p, tuple) else p for p in event] for event in events]
    assert replay(map(tuple, listed)).races() == order.races()


def test_strands_name_themselves():
    order = Ordering()
    order.thread("MMA")
    assert [order.issue("MMA", "mma", "S", "x") for _ in range(2)] == ["MMA/mma#1", "MMA/mma#2"]


@pytest.mark.parametrize(
    "event, says",
    [
        (("read", "NOBODY", "smem", TILE, "r", "x"), "NOBODY"),
        (("read", "MMA", "smem", ((3, 3),), "r", "x"), "empty"),
        (("read", "MMA", "smem", TILE, "r", "x", "async"), "generic"),
        (("read", "load K", "smem", TILE, "r", "x", "generic"), "async"),
        (("fence", "MMA", "wait.all", "f", "x"), "wait.all"),
        (("fence", "load K", "wait.ld", "f", "x"), "load K"),
        (("issue", "MMA", "cp", "i", "x"), "cp"),
        (("issue", "MMA", "mma", "i", "x", {"name": "LOAD"}), "LOAD"),
        (("arrive", "MMA", "b", "a", "x", "sys"), "sys"),
        (("thread", "MMA"), "twice"),
        (("finish", "load K"), "tma.load"),
        (("feeds", "load K", "f", "x"), "tma.load"),
        (("races",), "races"),
        (("arrive", "S", "b", "a", "x"), "arrive by themselves"),
    ],
)
def test_events_that_make_no_sense_say_so(event, says):
    with pytest.raises(OrderingError, match=says):
        replay([*START, *TMA, *mma_s(), event])


def test_an_ended_strand_has_no_more_accesses():
    events = START + LD_S + fence("SOFTMAX0", "wait.ld")
    with pytest.raises(OrderingError, match="ended"):
        replay([*events, ("read", "ld S", "tmem", S, "ld S", "x")])
    with pytest.raises(OrderingError, match="mode"):
        Ordering("strict")


# ---- cost ----------------------------------------------------------------------------------


@pytest.mark.parametrize("mutation", ["", "SOFTMAX0 wait.ld", "LOAD waits kv_empty0", "s_full"])
def test_cost_is_linear_in_events(mutation, record_property):
    """Twice the events, about twice the time, also where a mutation leaves strands unfinished."""
    seconds = {}
    for tiles in (800, 1600):  # some 20 000 and 40 000 events
        events = deleted(pipeline(tiles), mutation)
        best = []
        for _ in range(2):
            start = time.process_time()
            replay(events)
            best.append(time.process_time() - start)
        seconds[len(events)] = min(best)
    record_property("seconds by events", seconds)
    small, large = seconds.values()
    assert large < 3.2 * small, seconds


def test_reads_that_never_end_do_not_pile_up():
    events, seconds = list(START), []
    for i in range(4000):
        events += [("issue", "SOFTMAX0", "tmem.ld", "ld", "x", {"name": f"ld{i}"})]
        events += [("read", f"ld{i}", "tmem", S, "ld", "x")]
    for part in (events[:4003], events):
        taken = []
        for _ in range(3):  # the least: other processes may share the machine
            start = time.process_time()
            replay(part)
            taken.append(time.process_time() - start)
        seconds.append(min(taken))
    assert seconds[1] < 4 * seconds[0], seconds
