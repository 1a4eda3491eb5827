# SPDX-License-Identifier: Apache-2.0
"""How the CTAs of a launch share the work: blocks of rows fastest, then heads, then batch.

A forward gives each CTA rows of Q, a backward rows of K and V. Runs: host.
"""

from __future__ import annotations

import math
from typing import NamedTuple

from .inputs import Problem
from .stage import KernelSource


class Place(NamedTuple):
    """Where a CTA, or a pair, works: its block of `rows` rows, head, batch entry.

    divided: tensors, by their names in the model, of which it has the rows of its block.
    """

    block: int
    head: int
    batch: int
    rows: int
    divided: tuple[str, ...] = ("q", "out")


class Grid(NamedTuple):
    """The 1-D grid of a problem: blocks of `rows` rows, heads, batch entries.

    cluster: CTAs that work on a block together.
    """

    rows: int
    blocks: int
    heads: int
    batch: int
    divided: tuple[str, ...]
    cluster: int = 1

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
        return Place(cta % self.blocks, head, batch, self.rows, self.divided)


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
    tiles, tile = cta_tiles(source, problem.q.shape[3])
    batch, seqlen, heads, _ = (problem.k if source.kind == "backward" else problem.q).shape
    divided = ("k", "v", "dk", "dv") if source.kind == "backward" else ("q", "out")
    blocks = math.ceil(seqlen / (tiles * tile))
    return Grid(tiles * tile, blocks, heads, batch, divided, cluster_size(source))
