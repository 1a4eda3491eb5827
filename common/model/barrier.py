# SPDX-License-Identifier: Apache-2.0
"""mbarriers and named barriers as the PTX manual describes them (sections 9.7.13.15 and .1)."""

from __future__ import annotations

import simpy


class BarrierFault(RuntimeError):
    """A use of a barrier that the hardware would not forgive; the message names the barrier."""


class MBarrier:
    """An mbarrier: a phase ends when all expected arrivals and all expected bytes have come.

    Args: env; name for messages; count, arrivals a phase (at least 1). `phase` counts completed
    phases; its lowest bit is the parity that the current phase will complete.
    """

    def __init__(self, env: simpy.Environment, name: str, count: int):
        if count < 1:
            raise BarrierFault(f"{name}: initialised with count {count}")
        self.env, self.name, self.count = env, name, count
        self.phase, self.pending, self.tx_bytes = 0, count, 0
        self._next = env.event()

    def __repr__(self) -> str:
        missing = f"{self.pending} arrivals and {self.tx_bytes} B to come"
        return f"{self.name}: phase {self.phase}, {missing}"

    def arrive(self, count: int = 1) -> None:
        """`count` arrivals on the current phase; BarrierFault when more come than were expected."""
        if count > self.pending:
            raise BarrierFault(f"{count} arrivals too many at {self!r}")
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
        while not self.passes(parity):
            yield self._next

    def _maybe_complete(self) -> None:
        if self.pending == 0 and self.tx_bytes == 0:
            self.phase += 1
            self.pending = self.count
            done, self._next = self._next, self.env.event()
            done.succeed()


class NamedBarrier:
    """bar.sync / bar.arrive on one number: opens when `threads` threads came, then restarts."""

    def __init__(self, env: simpy.Environment, name: str, threads: int):
        self.env, self.name, self.threads = env, name, threads
        self.phase, self.came = 0, 0
        self._next = env.event()

    def __repr__(self) -> str:
        return f"{self.name}: phase {self.phase}, {self.came} of {self.threads} threads came"

    def arrive(self, threads: int) -> simpy.Event:
        """`threads` threads come; returns the event that the barrier opens."""
        if self.came + threads > self.threads:
            raise BarrierFault(f"{threads} threads too many at {self!r}")
        self.came += threads
        opened = self._next
        if self.came == self.threads:
            self.phase, self.came = self.phase + 1, 0
            self._next = self.env.event()
            opened.succeed()
        return opened
