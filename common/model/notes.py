# SPDX-License-Identifier: Apache-2.0
"""What the roles of a model did, in the words that an executed log has as well."""

from __future__ import annotations

from dataclasses import dataclass

Intervals = tuple[tuple[int, int], ...]


@dataclass(frozen=True)
class Note:
    """One verb of a role. `common.conformance` compares these with the steps of a kernel.

    what: a barrier, a fence, a slot or a region; numbers and places: as the verb has them, see
    `Role`; line: where in the stage's model.
    """

    agent: str
    verb: str
    what: str
    line: str
    numbers: tuple = ()
    places: tuple[tuple[str, Intervals], ...] = ()  # (memory, cells) of an MMA's A and B
    source: str = ""  # of a copy: the tensor
    quarter: int | None = None  # of the lanes, where only its warps did this
