# SPDX-License-Identifier: Apache-2.0
"""A small set of cases in which every two values of different factors meet. Runs: host."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Hashable, Mapping, Sequence


def pairwise(factors: Mapping[str, Sequence[Hashable]]) -> list[dict[str, Hashable]]:
    """Cases such that any pair of values of two factors occurs in at least one of them.

    Greedy: each case starts from an uncovered pair and takes, factor by factor, the value that
    covers most uncovered pairs, among equals the one used least so far. The order is
    deterministic. ValueError for an empty factor.
    """
    empty = [name for name, values in factors.items() if not values]
    if empty:
        raise ValueError(f"factors without values: {empty}")
    names = list(factors)
    pairs = [
        frozenset({(a, x), (b, y)})
        for a, b in itertools.combinations(names, 2)
        for x, y in itertools.product(factors[a], factors[b])
    ]
    if not pairs:
        return [{name: value} for name in names for value in factors[name]]
    missing = dict.fromkeys(pairs)  # a set that keeps its order
    used = Counter()
    cases = []
    while missing:
        case = dict(sorted(next(iter(missing)), key=lambda item: names.index(item[0])))
        for name in names:
            if name not in case:
                case[name] = max(
                    factors[name],
                    key=lambda value: (
                        sum(frozenset({item, (name, value)}) in missing for item in case.items()),
                        -used[name, value],
                    ),
                )
        used.update(case.items())
        for pair in itertools.combinations(case.items(), 2):
            missing.pop(frozenset(pair), None)
        cases.append({name: case[name] for name in names})
    return cases
