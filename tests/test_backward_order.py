# SPDX-License-Identifier: Apache-2.0
"""Waits of the models against config.py and the pages of stage 07. Derived, no GPU.

Every mbarrier's first wait passes or waits as its plan says, in every stage; the one order of
events that the pages give for a step has all that a role waited for before what it does next.
"""

import re
from collections import Counter, defaultdict

import flash_ladder
import pytest
from flash_ladder import load
from flash_ladder.common import mutation
from flash_ladder.common.model import Role

ONE, PAIR = "backward_1cta", "backward_2cta"
PARTS = [(number, name) for number in (7, 8) for name in (ONE, PAIR)]
SOURCES = [(number, "") for number in flash_ladder.built()] + PARTS


class Watch:
    """What every role of a model does at mbarriers, in an order that happened.

    events: (agent, "made" or "awaited", barrier, phase). A phase of -1: the wait passed on a fresh
    barrier. passed: by (role, barrier) whether its first wait did.
    """

    def __init__(self, monkeypatch):
        self.events, self.passed, self.came = [], {}, Counter()
        for verb in ("arrive", "commit", "tma_load", "dsmem_copy"):
            monkeypatch.setattr(Role, verb, self._made(verb, getattr(Role, verb)))
        monkeypatch.setattr(Role, "wait", self._wait(Role.wait))

    def _wait(self, wait):
        def watched(role, barrier, parity, tile=-1):
            it = role.sm.barriers.get(barrier) or role.sm.barriers[barrier.removesuffix("[0]")]
            phase = it.phase if it.phase % 2 == parity else it.phase - 1
            self.passed.setdefault((role.name, barrier.partition("[")[0]), phase < 0)
            yield from wait(role, barrier, parity, tile)
            self.events.append((role.agent, "awaited", it.name, phase))

        return watched

    def _made(self, verb, act):
        """Copies count in the phase that runs, arrivals in the agent's next one."""

        def watched(role, *given, **options):
            barrier = given[0] if verb in ("arrive", "commit") else given[2]
            sms = [role.sm]
            if options.get("multicast"):
                sms = role.sm.pair.sms
            elif verb == "dsmem_copy":
                sms = [role.sm.peer]
            rank = options.get("to", options.get("to_barrier_rank"))
            if rank is not None:
                sms = [role.sm.at_rank(rank)]
            for sm in sms:
                it = sm.barriers.get(barrier) or sm.barriers[barrier.removesuffix("[0]")]
                phase = it.phase
                if verb in ("arrive", "commit"):
                    phase = self.came[role.agent, it.name]
                    self.came[role.agent, it.name] += 1
                self.events.append((role.agent, "made", it.name, phase))
            return act(role, *given, **options)

        return watched


@pytest.mark.parametrize(("number", "name"), SOURCES)
def test_first_waits_pass_where_the_plan_says_so(monkeypatch, number, name):
    source = load(number).part(name)
    for head_dim in source.config.ENVELOPE.head_dims:
        with monkeypatch.context() as patch:
            watch = Watch(patch)
            source.simulate_problem(mutation.stage_problems(source, head_dim)["gaussian"])
        told = {}
        for row in source.config.plan(head_dim).barriers:
            passes = row.first_wait_passes
            for role in {arrival.role for arrival in row.consumers if row.kind == "mbarrier"}:
                told[role, row.name] = role in passes if isinstance(passes, tuple) else passes
        assert watch.passed == told


AT = {  # barrier: the event of the pages' order that ends its phase; of those of LOAD, none
    ONE: {
        "s_full": "S",
        "p_full": "P",
        "dp_full": "dP",
        "ds_full": "dS",
        "q_empty": "dK",
        "dq_full": "dQ",
        "dq_read": "dQ read",
        "do_empty": "dV",
    },
    PAIR: {
        "s_full": "S",
        "q_empty": "S",
        "s_read": "S read",
        "p_full": "P",
        "dp_full": "dP",
        "do_empty": "dP",
        "ds_full": "dS staged",
        "dx_staged": "dS staged",
        "dx_both": "dS swapped",
        "qt_empty": "dK",
        "dq_full": "dQ",
        "dq_read": "dQ read",
        "dot_empty": "dV",
    },
}


def _order(name: str) -> list[tuple[str, int]]:
    """(event, 0 for step s or 1 for s+1) in the order that the page of a part gives."""
    folder = load(7).folder if name == ONE else load(7).part(PAIR).folder
    text = " ".join((folder / "README.md").read_text(encoding="utf-8").split())
    (told,) = re.findall(r"in one order: ([^.]*)\.", text)
    names = re.findall(r"(d?[A-Z])\(s(\+1)?\)((?: [a-z]+)?)", told.partition(" (D:")[0])
    return [(event + more, int(bool(after))) for event, after, more in names]


FIRST = -9.0  # a place before that of every event


def _wrong(order: list, at: dict[str, str], watch: Watch, stages: dict[str, int]) -> list:
    """Events that the order has before something their role had waited for, or had done.

    What the order does not name comes right after all that its role had waited for.
    """
    place = {event: (i, after) for i, (event, after) in enumerate(order)}
    reached, unnamed, found = defaultdict(lambda: (FIRST, "")), defaultdict(lambda: FIRST), []
    for agent, verb, barrier, phase in watch.events:
        name, _, slot = barrier.partition("@")[0].partition("[")
        step = phase * stages[name] + int(slot.rstrip("]") or 0)
        if name not in at and verb == "made":
            unnamed[barrier, phase] = max(unnamed[barrier, phase], reached[agent][0])
            continue
        if name in at:
            i, after = place[at[name]]
            when = step - after + i / len(order)
        else:
            when = unnamed[barrier, phase]
        latest, last = reached[agent]
        if verb == "made" and when < latest:
            found.append((agent, f"{at[name]} of step {step}", last))
        if phase >= 0 and when >= latest:
            reached[agent] = when, f"{verb} {barrier} of step {step}"
    return found


def _watched(monkeypatch, name: str) -> tuple[Watch, dict[str, int]]:
    part, watch = load(7).part(name), Watch(monkeypatch)
    part.simulate_problem(mutation.stage_problems(part, 128)["gaussian"])
    return watch, {row.name: row.stages for row in part.config.plan(128).barriers}


@pytest.mark.parametrize("name", [ONE, PAIR])
def test_the_order_of_the_page_has_every_wait_behind_its_event(monkeypatch, name):
    watch, stages = _watched(monkeypatch, name)
    order = _order(name)
    assert {event for event, _ in order} == set(AT[name].values())
    made = {(barrier, phase) for _, verb, barrier, phase in watch.events if verb == "made"}
    waits = {row[2:] for row in watch.events if row[1] == "awaited" and row[3] >= 0}
    assert waits <= made and len(waits) > 40
    assert _wrong(order, AT[name], watch, stages) == []


def test_an_order_that_contradicts_a_role_is_noticed(monkeypatch):
    """COMPUTE reads the next S after it has staged dS, and not before."""
    watch, stages = _watched(monkeypatch, PAIR)
    order = _order(PAIR)
    order.insert(1, order.pop(order.index(("S read", 1))))
    assert any("COMPUTE" in agent for agent, *_ in _wrong(order, AT[PAIR], watch, stages))
    without_p = [("P", 0) if row == ("P", 1) else row for row in _order(PAIR)]
    assert _wrong(without_p, AT[PAIR], watch, stages) != []
