# SPDX-License-Identifier: Apache-2.0
"""mbarriers and named barriers as the PTX manual describes them (sections 9.7.13.15 and .1)."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import simpy


class ModelFault(RuntimeError):
    """Something that a GPU would trap at, hang at or leave undefined; names role and resource."""


class BarrierFault(ModelFault):
    """A use of a barrier that the hardware would not forgive; the message names the barrier."""


class MBarrier:
    """An mbarrier: a phase ends when all expected arrivals and all expected bytes have come.

    Args: env; name for messages; count, arrivals a phase (at least 1); latency, cycles until a
    waiter notices that a phase has ended; shares, for each role its arrivals a phase in one CTA and
    the number of CTAs that arrive (empty: unknown); on_complete, called when a phase ends. `phase`
    counts completed phases; its lowest bit is the parity that the current phase will complete.
    """

    def __init__(
        self,
        env: simpy.Environment,
        name: str,
        count: int,
        latency: float = 0.0,
        shares: Mapping[str, tuple[int, int]] | None = None,
        on_complete: Callable[[str], None] = lambda name: None,
    ):
        if count < 1:
            raise BarrierFault(f"{name}: initialised with count {count}")
        self.env, self.name, self.count, self.latency = env, name, count, latency
        self.shares, self.on_complete = dict(shares or {}), on_complete
        self.phase, self.pending, self.tx_bytes = 0, count, 0
        self.came: dict[str, int] = {}  # arrivals of each agent in the current phase
        self._next = env.event()
        self._visible = 0.0

    def __repr__(self) -> str:
        return f"{self.name}: phase {self.phase}, {self.to_come()} to come"

    @property
    def idle(self) -> bool:
        """True between phases: nothing of the current one has come or is expected yet."""
        return self.pending == self.count and self.tx_bytes == 0

    def to_come(self) -> str:
        """Who has not yet arrived in the current phase, and the bytes not yet delivered."""
        came: dict[str, int] = {}
        for agent, count in self.came.items():
            role = agent.partition("@")[0]
            came[role] = came.get(role, 0) + count
        left = {role: n * ctas - came.get(role, 0) for role, (n, ctas) in self.shares.items()}
        parts = [f"{role} {count}" for role, count in left.items() if count]
        if not self.shares or (not parts and not self.tx_bytes):
            parts = [f"{self.pending} arrivals"]
        bytes_left = [f"{self.tx_bytes} B"] if self.tx_bytes else []
        return " and ".join([", ".join(parts)] * bool(parts) + bytes_left)

    def arrive(self, count: int = 1, agent: str = "") -> None:
        """`count` arrivals on the current phase; BarrierFault when more come than were expected.

        An agent that exceeds its role's share is a fault even if the sum still fits: it would
        end the phase in another role's place.
        """
        by = f" by {agent}" if agent else ""
        if count > self.pending:
            raise BarrierFault(f"{count} arrivals too many at {self!r}{by}")
        share = self.shares.get(agent.partition("@")[0], (None, 1))[0]
        came = self.came.get(agent, 0) + count
        if share is not None and came > share:
            raise BarrierFault(
                f"{agent} arrives again in phase {self.phase} of {self.name}: {came} of its {share}"
                f" arrivals, still to come: {self.to_come()}"
            )
        self.came[agent] = came
        self.pending -= count
        self._maybe_complete()

    def expect_tx(self, size: int) -> None:
        """The current phase also waits for `size` more bytes."""
        self.tx_bytes += size
        self._maybe_complete()

    def complete_tx(self, size: int) -> None:
        """`size` bytes have been delivered (they may come before they are expected)."""
        self.tx_bytes -= size
        self._maybe_complete()

    def passes(self, parity: int) -> bool:
        """What a try_wait on `parity` finds: True when the phase of that parity has completed."""
        return (self.phase & 1) != parity

    def wait(self, parity: int):
        """Wait until the phase with `parity` has completed; a fresh barrier passes parity 1."""
        while True:
            if not self.passes(parity):
                yield self._next
            elif self._visible > self.env.now:
                yield self.env.timeout(self._visible - self.env.now)
            else:
                return

    def _maybe_complete(self) -> None:
        if self.pending == 0 and self.tx_bytes == 0:
            self.phase += 1
            self.pending, self.came = self.count, {}
            self._visible = self.env.now + self.latency
            self.on_complete(self.name)
            done, self._next = self._next, self.env.event()
            done.succeed()


class NamedBarrier:
    """bar.sync / bar.arrive on one number: opens when `threads` threads came, then restarts.

    A barrier of the whole cluster works the same way, with the threads of both CTAs.
    """

    def __init__(
        self,
        env: simpy.Environment,
        name: str,
        threads: int,
        on_complete: Callable[[str], None] = lambda name: None,
    ):
        self.env, self.name, self.threads, self.on_complete = env, name, threads, on_complete
        self.phase, self.came = 0, 0
        self._next = env.event()

    def __repr__(self) -> str:
        return f"{self.name}: phase {self.phase}, {self.came} of {self.threads} threads came"

    @property
    def idle(self) -> bool:
        """True when nobody has come to the current phase."""
        return self.came == 0

    def arrive(self, threads: int) -> simpy.Event:
        """`threads` threads come; returns the event that the barrier opens."""
        if self.came + threads > self.threads:
            raise BarrierFault(f"{threads} threads too many at {self!r}")
        self.came += threads
        opened = self._next
        if self.came == self.threads:
            self.phase, self.came = self.phase + 1, 0
            self._next = self.env.event()
            self.on_complete(self.name)
            opened.succeed()
        return opened


class PipelineState:
    """Where one role stands in a ring of `stages` barriers: `slot`, and the `parity` to wait for.

    Consumers start with parity 0. Producers, who wait for an empty slot, start with parity 1,
    which a fresh barrier lets pass.
    """

    def __init__(self, stages: int, parity: int = 0):
        self.stages, self.slot, self.parity = stages, 0, parity

    def advance(self) -> None:
        """Go on to the next slot; the parity flips where the ring begins anew."""
        self.slot += 1
        if self.slot == self.stages:
            self.slot, self.parity = 0, 1 - self.parity
