# SPDX-License-Identifier: Apache-2.0
"""Where the sequences of a batch lie in the tensors of a model run."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch

OPEN = 2**30  # a side of a window that ends nowhere; no sequence is longer


class Sequence(NamedTuple):
    """One sequence: its first row in Q and how many it has, the same in K."""

    begin_q: int
    len_q: int
    begin_k: int
    len_k: int

    def queries(self, start: int = 0, stop: int = OPEN) -> slice:
        """Rows of its tensors that are its queries `start` to `stop`, as far as it has them."""
        return _within(self.begin_q, self.len_q, start, stop)

    def keys(self, start: int = 0, stop: int = OPEN) -> slice:
        """The same of its keys."""
        return _within(self.begin_k, self.len_k, start, stop)


def _within(begin: int, length: int, start: int, stop: int) -> slice:
    return slice(begin + min(start, length), begin + min(stop, length))


@dataclass(frozen=True)
class Sequences:
    """All sequences of a problem.

    rows: of each; packed: whether they lie one after the other in a single batch entry; pairs: how
    many (query, key) are visible, over all of them; longest: (queries, keys) that no sequence
    exceeds, for which a launch has CTAs.
    """

    rows: tuple[Sequence, ...]
    packed: bool
    pairs: int
    longest: tuple[int, int]

    @classmethod
    def whole(cls, q: torch.Tensor, k: torch.Tensor) -> Sequences:
        """Every batch entry of q (b, sq, h, d) and k (b, sk, h, d) in full, without a mask."""
        row = Sequence(0, q.shape[1], 0, k.shape[1])
        pairs = q.shape[0] * row.len_q * row.len_k
        return cls((row,) * q.shape[0], False, pairs, (row.len_q, row.len_k))

    def entry(self, number: int) -> int:
        """The batch entry of the tensors that holds a sequence."""
        return 0 if self.packed else number

    def first_tile(self, number: int, rows: int) -> int:
        """Where a sequence's tiles of `rows` query rows begin, where no two sequences share one."""
        return self.rows[number].begin_q // rows + number - self.entry(number)
