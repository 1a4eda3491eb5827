# SPDX-License-Identifier: Apache-2.0
"""The happens-before checker against brute force: random programs, all paths of an explicit graph.

The graph has two nodes for each event of a thread: what the thread has done by then ("did") and
what it knows ("knows"). Barriers pass on both, commits only what is known. Whether a rule orders
two accesses is then a question of paths, asked anew for every pair; no clocks are involved.
"""

import random

from flash_ladder.common.ordering import replay
from hypothesis import given, settings
from hypothesis import strategies as hs

FENCES = (
    "tcgen05.before",
    "tcgen05.after",
    "proxy.async",
    "wait.ld",
    "wait.st",
    "bulk.wait",
    "bulk.wait.read",
)
ENDS = {"tmem.ld": ("wait.ld",), "tmem.st": ("wait.st",), "tma.store": ("bulk.wait",)}
TENSOR = ("mma", "tmem.ld", "tmem.st")


class Graph:
    """Nodes and edges of one program; `commits_release`: commits also pass on what was done."""

    def __init__(self, events, commits_release: bool):
        self.edges: dict[tuple, set] = {}
        self.reached: dict[tuple, set] = {}
        last: dict[str, int] = {}
        self.issued: dict[str, tuple] = {}  # strand: (agent, position, kind, facts)
        complete: dict[str, tuple] = {}  # barrier: node of its last complete phase
        arrived: dict[str, list] = {}  # barrier: nodes since
        for i, (verb, *rest) in enumerate(events):
            agent = rest[0]
            if verb == "complete":
                node = ("phase", i)
                for source in [*arrived.pop(agent, ()), complete.get(agent)]:
                    self.edge(source, node)
                complete[agent] = node
                continue
            if verb == "arrive" and agent in self.issued:
                issuer, at, *_ = self.issued[agent]
                arrived.setdefault(rest[1], []).extend([("knows", issuer, at), ("end", agent)])
                continue
            if verb == "feeds":
                agent = self.issued[agent][0]
            if verb == "thread" or agent in self.issued:
                continue
            for what in ("did", "knows"):
                self.edge((what, agent, last.get(agent)), (what, agent, i))
            last[agent] = i
            if verb == "issue":
                self.issued[rest[-1]["name"]] = (agent, i, rest[1], rest[-1])
            elif verb == "wait":
                self.edge(complete.get(rest[1]), ("knows", agent, i))
            elif verb in ("arrive", "commit"):
                nodes = arrived.setdefault(rest[1], [])
                nodes.append(("knows", agent, i))
                if verb == "arrive" or commits_release:
                    nodes.append(("did", agent, i))
            if verb == "commit":
                for name, (issuer, _, kind, _) in self.issued.items():
                    if issuer == agent and kind == "mma":
                        nodes.append(("end", name))

    def edge(self, source: tuple | None, target: tuple) -> None:
        """An edge, unless there is nothing at its start."""
        if source is not None:
            self.edges.setdefault(source, set()).add(target)

    def path(self, source: tuple, target: tuple) -> bool:
        """Whether `target` can be reached."""
        if source not in self.reached:
            seen, stack = {source}, [source]
            while stack:
                for node in self.edges.get(stack.pop(), ()):
                    if node not in seen:
                        seen.add(node)
                        stack.append(node)
            self.reached[source] = seen
        return target in self.reached[source]


class Brute:
    """The rules, one question at a time."""

    def __init__(self, events, mode: str):
        self.events, self.mode = events, mode
        self.base, self.tensor = Graph(events, False), Graph(events, True)

    def fences(self, agent, kinds, after: int, before: int) -> list[int]:
        """Positions of an agent's fences (or commits) strictly between two positions."""
        found = []
        for i in range(after + 1, before):
            verb, *rest = self.events[i]
            kind = rest[1] if verb == "fence" else verb
            if verb in ("fence", "commit") and rest[0] == agent and kind in kinds:
                found.append(i)
        return found

    def start(self, access) -> tuple[str, int, str, dict]:
        """Who issued an access, where, the kind of its strand ("": generic) and its facts."""
        i, agent = access[:2]
        return self.base.issued.get(agent, (agent, i, "", {}))

    def ordered(self, a, b) -> bool:
        """Is access `a` (position, agent, how) before `b` by the rules?"""
        (agent, at, kind, facts), (to, start, other, more) = self.start(a), self.start(b)
        if kind and a[1] == b[1]:
            return True
        if kind == other == "mma" and self.in_order(agent, at, facts, to, start, more):
            return True
        if kind == "":
            return self.after_generic(agent, at, a[2], to, start, other)
        if kind in ("mma", "tma.load"):
            return self.after_end(("end", a[1]), kind, to, start, other)
        kinds = ENDS[kind]
        if kind == "tma.store" and a[2] == "read":
            kinds = ("bulk.wait", "bulk.wait.read")
        ends = self.fences(agent, kinds, at, len(self.events))
        ends += [i for i, event in enumerate(self.events) if event[:2] == ("feeds", a[1])]
        return any(self.after_own_wait(agent, end, kind, a[2], to, start, other) for end in ends)

    def in_order(self, agent, at, facts, to, start, more) -> bool:
        """Two MMAs: a pipeline, across threads with fences; in practice all of one thread."""
        alike = facts["accumulator"] == more["accumulator"] and facts["shape"] == more["shape"]
        if agent == to:
            return alike or self.mode == "practice"
        return alike and self.fenced(agent, at, to, start)

    def fenced(self, agent, done, to, start) -> bool:
        """Done at `done`, then before-fence, path, after-fence, start."""
        return any(
            self.tensor.path(("did", agent, f), ("knows", to, g))
            for f in self.fences(agent, ("tcgen05.before", "commit"), done, len(self.events))
            for g in self.fences(to, ("tcgen05.after",), -1, start)
        )

    def after_generic(self, agent, at, how, to, start, other) -> bool:
        known = at <= start if agent == to else self.known(agent, at, to, start)
        if how == "read" or other == "":
            return known
        fences = self.fences(agent, ("proxy.async",), at, len(self.events))
        if agent == to:
            return any(fence < start for fence in fences)
        return any(self.known(agent, fence, to, start) for fence in fences)

    def known(self, agent, at, to, start) -> bool:
        return self.base.path(("did", agent, at), ("knows", to, start))

    def after_end(self, end, kind, to, start, other) -> bool:
        """An MMA or a copy, whose end arrives on a barrier."""
        if kind in TENSOR and other in TENSOR:
            afters = self.fences(to, ("tcgen05.after",), -1, start)
            return any(self.tensor.path(end, ("knows", to, g)) for g in afters)
        return self.base.path(end, ("knows", to, start))

    def after_own_wait(self, agent, end, kind, how, to, start, other) -> bool:
        """A strand that its issuer waits for, at `end`."""
        if agent == to:
            return end <= start
        if kind in TENSOR:
            return self.fenced(agent, end, to, start)
        if how == "read":
            return self.known(agent, end, to, start)
        afters = self.fences(to, ("proxy.async",), -1, start) if other else [start]
        return any(
            self.base.path(("did", agent, f), ("knows", to, g))
            for f in self.fences(agent, ("proxy.async",), end, len(self.events))
            for g in afters
        )


def unordered(events, mode: str) -> tuple[set, dict]:
    """All pairs that race (names), and for each access those of the last write and reads since.

    A pair also counts as ordered through writes in between, each ordered with the next.
    """
    brute = Brute(events, mode)
    history: dict[tuple, list] = {}
    names, racing, must = {}, set(), {}
    for i, (verb, *rest) in enumerate(events):
        if verb not in ("read", "write"):
            continue
        agent, memory, ((first, stop),) = rest[:3]
        b = (i, agent, verb)
        names[b] = rest[3]
        for cell in range(first, stop):
            past = history.setdefault((memory, cell), [])
            writes = [k for k, a in enumerate(past) if a[2] == "write"]
            recent = max(writes, default=0)
            for k, a in enumerate(past):
                if "write" not in (a[2], verb) or _chain(brute, a, past[k + 1 :], b):
                    continue
                racing.add((names[a], names[b]))
                if k >= recent:
                    must.setdefault((names[b], memory, cell), set()).add(names[a])
            past.append(b)
    return racing, must


def _chain(brute: Brute, a, between, b) -> bool:
    """`a` before `b` directly, or over writes in between."""
    if brute.ordered(a, b):
        return True
    return any(
        c[2] == "write" and brute.ordered(a, c) and _chain(brute, c, between[k + 1 :], b)
        for k, c in enumerate(between)
    )


# ---- random programs -----------------------------------------------------------------------

ALL_AGENTS = ("A", "B", "C@1", "D@1")
OPENING = ("bulk.wait", "wait.ld", "wait.st", "tcgen05.before", "proxy.async")
CLOSING = ("tcgen05.after", "proxy.async")


class Program:
    """Agents that hand cells to each other, mostly as the rules ask; some events are lost."""

    def __init__(self, seed: int):
        self.random = random.Random(seed)
        self.agents = ALL_AGENTS[: self.random.randint(2, 4)]
        self.events: list[tuple] = [("thread", agent) for agent in self.agents]
        self.loss = self.random.choice((0, 0.03, 0.1))
        self.memories = self.random.choice((("tmem",), ("smem", "global"), ("tmem", "smem")))
        self.copies: list[str] = []
        self.loads: dict[str, list[str]] = {agent: [] for agent in self.agents}
        agent = self.agents[0]
        for _ in range(self.random.randint(2, 9)):
            self.access(agent)
            agent = self.hand_over(agent)

    def add(self, *event, named: bool = True) -> None:
        """Append an event, or lose it."""
        if self.random.random() >= self.loss:
            self.events.append((*event, *self.name(event[0])) if named else event)

    def name(self, verb: str) -> tuple[str, str]:
        """An op that no other event has, and no line."""
        return f"{verb}{len(self.events)}", ""

    def cells(self):
        """One or two of three cells."""
        first = self.random.randint(0, 2)
        return ((first, min(3, first + self.random.randint(1, 2))),)

    def access(self, agent: str) -> None:
        """Something that touches the memories of this program."""
        kinds = {"tmem": ("mma", "ld", "st"), "smem": ("mma", "load", "store", "read", "write")}
        kinds["global"] = ("store", "read", "write")
        memory = self.random.choice(self.memories)
        kind = self.random.choice(kinds[memory])
        if kind in ("read", "write"):
            self.add(kind, agent, memory, self.cells())
            return
        name = self.name(kind)
        touches = {
            "load": ("tma.load", ["write smem"]),
            "mma": ("mma", ["read smem", "write tmem"]),
            "ld": ("tmem.ld", ["read tmem"]),
            "st": ("tmem.st", ["write tmem"]),
            "store": ("tma.store", ["read smem", "write global"]),
        }
        spelling, accesses = touches[kind]
        accesses = [(*access.split(), self.cells()) for access in accesses]
        facts = {"name": name[0], "shape": (128, 64, 16)}
        if kind == "mma":
            accesses += [("read", "tmem", self.cells())] * self.random.randint(0, 1)
            facts["accumulator"] = self.random.choice([accesses[1][2], "all"])
        self.copies += [name[0]] if kind == "load" else []
        self.loads[agent] += [name[0]] if kind == "ld" else []
        self.events.append(("issue", agent, spelling, *name, facts))
        for how, memory, cells in accesses:
            self.events.append((how, name[0], memory, cells, *name))

    def hand_over(self, agent: str) -> str:
        """Release to another agent, or to the same, or carry on without; who goes on."""
        to = self.random.choice(self.agents)
        way = self.random.choice(["arrive"] * 3 + ["commit"] * 2 + ["nothing"])
        barrier = self.random.choice("xy")
        if self.loads[agent] and self.random.random() < 0.3:
            self.add("feeds", self.loads[agent].pop())
        if way == "nothing":
            self.add("fence", agent, self.random.choice(FENCES))
            return to
        for kind in OPENING if way == "arrive" else OPENING[:3]:
            if self.random.random() < 0.9:
                self.add("fence", agent, kind)
        self.add(way, agent, barrier)
        for copy in self.copies:
            self.add("arrive", copy, barrier)
        self.copies = []
        self.add("complete", barrier, named=False)
        self.add("wait", to, barrier)
        for kind in CLOSING:
            self.add("fence", to, kind)
        return to


@settings(max_examples=1500, deadline=None)
@given(hs.integers(0, 2**32), hs.sampled_from(["practice", "ptx"]))
def test_random_programs_agree_with_brute_force(seed, mode):
    events = Program(seed).events
    order = replay(events, mode)
    found = {(race.first.op, race.second.op) for race in order.races()}
    pairs, must = unordered(events, mode)
    assert found <= pairs  # nothing ordered is reported,
    for (second, *_), firsts in must.items():  # and of what an access races with, something is
        assert any((first, second) in found for first in firsts), (second, firsts)
    a1 = {(edge.first.op, edge.second.op) for edge in order.a1_edges()}
    assert a1 <= unordered(events, "ptx")[0]
