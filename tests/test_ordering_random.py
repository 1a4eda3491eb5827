# SPDX-License-Identifier: Apache-2.0
"""The happens-before checker against brute force: random programs, all paths of an explicit graph.

The graph has two nodes for each event of a thread: what the thread has done by then ("did") and
what it knows ("knows"). Barriers pass on both, commits only what is known. Whether a rule orders
two accesses is then a question of paths, asked anew for every pair; no clocks are involved.
"""

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
        ends = self.fences(agent, kinds, at, len(self.events))[:1]
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
        agent, memory, ((cell, _),) = rest[:3]
        b = (i, agent, verb)
        names[b] = rest[3]
        past = history.setdefault((memory, cell), [])
        writes = [k for k, a in enumerate(past) if a[2] == "write"]
        recent = max(writes, default=0)
        for k, a in enumerate(past):
            if "write" not in (a[2], verb) or _chain(brute, a, past[k + 1 :], b):
                continue
            racing.add((names[a], names[b]))
            if k >= recent:
                must.setdefault((names[b], cell), set()).add(names[a])
        past.append(b)
    return racing, {second: firsts for (second, _), firsts in must.items()}


def _chain(brute: Brute, a, between, b) -> bool:
    """`a` before `b` directly, or over writes in between."""
    if brute.ordered(a, b):
        return True
    return any(
        c[2] == "write" and brute.ordered(a, c) and _chain(brute, c, between[k + 1 :], b)
        for k, c in enumerate(between)
    )


# ---- random programs -----------------------------------------------------------------------

AGENTS = ("A", "B", "C@1")
BARRIERS = ("x", "y")
CELLS = hs.integers(0, 2).map(lambda cell: ((cell, cell + 1),))
AGENT = hs.sampled_from(AGENTS)


@hs.composite
def step(draw):
    """A few events that belong together; hand-overs are mostly complete, or all would race."""
    agent, cells = draw(AGENT), draw(CELLS)
    kind = draw(hs.sampled_from("access load mma ld st store handoff handoff fence commit".split()))
    if kind == "access":
        return [(draw(hs.sampled_from(["read", "write"])), agent, draw(MEMORY), cells)]
    if kind in ("load", "mma", "ld", "st", "store"):
        return [("strand", agent, kind, cells, draw(CELLS), draw(hs.booleans()))]
    if kind == "fence":
        return [("fence", agent, draw(hs.sampled_from(FENCES)))]
    barrier, target = draw(hs.sampled_from(BARRIERS)), draw(AGENT)
    if kind == "commit":
        events = [("commit", agent, barrier), ("complete", barrier), ("wait", target, barrier)]
    else:
        fences = ("bulk.wait", "wait.ld", "wait.st", "tcgen05.before", "proxy.async")
        events = [("fence", agent, fence) for fence in fences]
        events += [("arrive", agent, barrier), ("copies", barrier), ("complete", barrier)]
        events += [("wait", target, barrier)]
    events += [("fence", target, "tcgen05.after"), ("fence", target, "proxy.async")]
    return [event for event in events if draw(hs.integers(0, 9))]  # one in ten is lost


MEMORY = hs.sampled_from(["smem", "global"])


def spelled(steps) -> list[tuple]:
    """The steps as events of the checker; each access has its own name."""
    events = [("thread", agent) for agent in AGENTS]
    copies = []
    for number, (verb, *rest) in enumerate(event for part in steps for event in part):
        name = (f"{verb}{number}", "")
        if verb == "strand":
            events += _spelled_strand(*rest, name)
            copies += [name[0]] if rest[1] == "load" else []
        elif verb == "copies":
            events += [("arrive", copy, rest[0], *name) for copy in copies]
            copies = []
        else:
            events.append((verb, *rest) if verb == "complete" else (verb, *rest, *name))
    return events


def _spelled_strand(agent, kind, cells, others, flag, name):
    """One strand; `flag` chooses the accumulator of an MMA."""
    touches = {
        "load": ("tma.load", [("write", "smem", cells)]),
        "mma": ("mma", [("read", "smem", cells), ("write", "tmem", others)]),
        "ld": ("tmem.ld", [("read", "tmem", cells)]),
        "st": ("tmem.st", [("write", "tmem", cells)]),
        "store": ("tma.store", [("read", "smem", cells), ("write", "global", others)]),
    }
    spelling, accesses = touches[kind]
    facts = {"name": name[0]}
    if kind == "mma":
        facts |= {"accumulator": others if flag else "pool", "shape": (128, 64, 16)}
        accesses = accesses + ([] if flag else [("read", "tmem", cells)])
    return [
        ("issue", agent, spelling, *name, facts),
        *((how, name[0], memory, at_cells, *name) for how, memory, at_cells in accesses),
    ]


@settings(max_examples=400, deadline=None)
@given(hs.lists(step(), min_size=2, max_size=14), hs.sampled_from(["practice", "ptx"]))
def test_random_programs_agree_with_brute_force(steps, mode):
    events = spelled(steps)
    order = replay(events, mode)
    found = {(race.first.op, race.second.op) for race in order.races()}
    pairs, must = unordered(events, mode)
    assert found <= pairs  # nothing ordered is reported,
    for second, firsts in must.items():  # and of what an access races with, something is
        assert any((first, second) in found for first in firsts), (second, firsts)
    a1 = {(edge.first.op, edge.second.op) for edge in order.a1_edges()}
    assert a1 <= unordered(events, "ptx")[0]
