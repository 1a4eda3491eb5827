# SPDX-License-Identifier: Apache-2.0
"""Pairwise covers: every two values of different factors meet, in few cases, always the same."""

import itertools

import pytest
from flash_ladder.common.pairwise import pairwise
from hypothesis import given, settings
from hypothesis import strategies as st

VALUES = st.lists(st.integers(0, 9), min_size=1, max_size=5, unique=True)
FACTORS = st.dictionaries(st.sampled_from("abcdef"), VALUES, min_size=1, max_size=6)


@settings(deadline=None)  # the machine may be busy
@given(FACTORS)
def test_every_pair_meets_in_some_case(factors):
    cases = pairwise(factors)
    for a, b in itertools.combinations(factors, 2):
        met = {(case[a], case[b]) for case in cases}
        assert met == set(itertools.product(factors[a], factors[b]))
    for name, values in factors.items():
        assert {case[name] for case in cases} == set(values)


@settings(deadline=None)  # the machine may be busy
@given(FACTORS)
def test_cases_are_few_complete_and_always_the_same(factors):
    cases = pairwise(factors)
    assert cases == pairwise(factors)
    assert all(list(case) == list(factors) for case in cases)
    assert len(cases) == len({tuple(case.items()) for case in cases})
    sizes = sorted((len(values) for values in factors.values()), reverse=True)
    assert len(cases) >= (sizes[0] * sizes[1] if len(sizes) > 1 else sizes[0])
    assert len(cases) <= sum(a * b for a, b in itertools.combinations(sizes, 2)) or len(sizes) == 1


def test_far_fewer_than_all_combinations():
    factors = {name: range(4) for name in "abcdef"}
    assert len(pairwise(factors)) <= 32  # of 4096; no cover has less than 16


def test_nothing_to_cover():
    assert pairwise({}) == []
    assert pairwise({"a": [1, 2]}) == [{"a": 1}, {"a": 2}]
    with pytest.raises(ValueError, match=r"factors without values: \['b'\]"):
        pairwise({"a": [1], "b": []})
