# SPDX-License-Identifier: Apache-2.0
"""How the CTAs of a launch share the work: blocks of rows fastest, then heads, then batch.

A forward gives each CTA rows of Q, a backward rows of K and V. Runs: host.
"""

from __future__ import annotations

import math
from typing import NamedTuple

from .envelope import TILE_ROWS
from .inputs import Problem
from .masks import mask_of
from .model.sequences import Sequence
from .stage import KernelSource

OF_KEYS = ("k", "v", "dk", "dv")  # tensors by their names in the model; the others are of queries


class Ragged(NamedTuple):
    """Where a sequence lies in tensors that copies see as `ragged` views.

    Such a view counts rows twice: (x, y) is row x + y - s of a tensor of s rows, and a copy has the
    end of its sequence as y, so that what lies behind it is beyond the view. entry: the batch
    entry; rows: s of (Q, K); first_tile: of the sequence's statistics.
    """

    sequence: Sequence
    entry: int
    rows: tuple[int, int]
    first_tile: int

    def coordinates(self, source: str, row: int) -> tuple[int, int]:
        """(x, y) of a row of the sequence."""
        begin, length = self.sequence[2:] if source in OF_KEYS else self.sequence[:2]
        return self.rows[source in OF_KEYS] - length + row, begin + length


class Place(NamedTuple):
    """Where a CTA, or a pair, works: its block of `rows` rows, head, batch entry.

    divided: tensors, by their names in the model, of which it has the rows of its block. ragged:
    where its sequence lies, in a stage with lengths; `batch` is then the number of the sequence.
    """

    block: int
    head: int
    batch: int
    rows: int
    divided: tuple[str, ...] = ("q", "out")
    ragged: Ragged | None = None


class Grid(NamedTuple):
    """The 1-D grid of a problem: blocks of `rows` rows, heads, batch entries or sequences.

    cluster: CTAs that work on a block together; ragged: where each sequence lies, in a stage with
    lengths.
    """

    rows: int
    blocks: int
    heads: int
    batch: int
    divided: tuple[str, ...]
    cluster: int = 1
    ragged: tuple[Ragged, ...] = ()

    @property
    def clusters(self) -> int:
        """Clusters of the launch: its CTAs, where each works alone."""
        return self.blocks * self.heads * self.batch

    @property
    def ctas(self) -> int:
        """CTAs of the launch."""
        return self.clusters * self.cluster

    def place(self, cta: int) -> Place:
        """Where the cluster of CTA number `cta` works."""
        cta //= self.cluster
        of_head = cta // self.blocks
        head, batch = of_head % self.heads, of_head // self.heads
        ragged = self.ragged[batch] if self.ragged else None
        return Place(cta % self.blocks, head, batch, self.rows, self.divided, ragged)


def cta_tiles(source: KernelSource, head_dim: int) -> tuple[int, int]:
    """(tiles, rows of one) that a CTA, or a pair, owns: query tiles of a forward, key tiles of a
    backward."""
    config = source.config
    if source.kind == "backward":
        return config.KEY_TILES[head_dim] * cluster_size(source), config.TILE
    return getattr(config, "Q_TILES", 1), config.TILE_M


def cluster_size(source: KernelSource) -> int:
    """CTAs of a cluster: `config.CTAS`, 1 where there is none."""
    return getattr(source.config, "CTAS", 1)


def grid(source: KernelSource, problem: Problem) -> Grid:
    """The grid of a stage or a backward part for a problem."""
    *_, heads, head_dim = problem.q.shape
    tiles, tile = cta_tiles(source, head_dim)
    mask = mask_of(problem.q, problem.k, **problem.options)
    backward, ragged = source.kind == "backward", ()
    if source.config.ENVELOPE.masks:
        given, rows = mask.sequences(), (problem.q.shape[-3], problem.k.shape[-3])
        ragged = tuple(
            Ragged(row, given.entry(number), rows, given.first_tile(number, TILE_ROWS))
            for number, row in enumerate(given.rows)
        )
    blocks = math.ceil((mask.max_seqlen_k if backward else mask.max_seqlen_q) / (tiles * tile))
    divided = OF_KEYS if backward else ("q", "out")
    cluster = cluster_size(source)
    return Grid(tiles * tile, blocks, heads, mask.batch, divided, cluster, ragged)
