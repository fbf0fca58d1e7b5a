"""Contiguous groups of even time."""

from __future__ import annotations

from itertools import combinations, pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from blockflow.tuning.slicing import Slicing, best_slicing, even_cuts, slice_evenly


@settings(max_examples=150, deadline=None)
@given(data=st.data())
def test_even_cuts_are_the_best_there_are(data: st.DataObject) -> None:
    times = data.draw(st.lists(st.integers(0, 20), min_size=2, max_size=9))
    places = data.draw(st.sets(st.integers(1, len(times) - 1), min_size=1))
    legal = sorted(places)
    parts = data.draw(st.integers(1, len(legal) + 1))

    def slowest(cuts: tuple[int, ...] | list[int]) -> int:
        bounds = [0, *cuts, len(times)]
        return max(sum(times[a:b]) for a, b in pairwise(bounds))

    found = even_cuts(times, legal, parts)
    assert len(found) == parts - 1 and set(found) <= set(legal) and found == sorted(set(found))
    assert slowest(found) == min(slowest(c) for c in combinations(legal, parts - 1))


def test_of_places_that_are_as_good_the_first_is_cut() -> None:
    assert even_cuts([2, 0, 0, 2, 1], [1, 2, 3, 4], 2) == [1]
    assert even_cuts([0, 0, 0], [1, 2], 3) == [1, 2]
    assert even_cuts([1, 1, 5, 0, 0, 5], [1, 2, 3, 4, 5], 3) == [2, 3]


def test_a_chain_in_three_stages() -> None:
    sliced = slice_evenly([4, 1, 1, 2, 3, 1], 3)
    assert sliced.slowest == 4 and sliced.times == (4, 4, 4)
    assert sliced.grouped("abcdef") == [["a"], ["b", "c", "d"], ["e", "f"]]
    assert slice_evenly([5], 1) == Slicing((0, 1), (5,))
    assert slice_evenly([0, 0], 2) == Slicing((0, 1, 2), (0, 0))  # too short to be measured


def test_the_best_number_of_stages() -> None:
    # Each stage more costs 3; a long stage costs its time.
    found = best_slicing([2] * 12, (1, 2, 4, 8, 99), lambda s: s.slowest + 3 * s.stages)
    assert found.stages == 2
    assert best_slicing([1, 1], (2, 1), lambda _: 0).stages == 1


@pytest.mark.parametrize(("times", "stages"), [([1, 2], 3), ([1], 0), ([], 1), ([1, -1], 1)])
def test_nonsense(times: list[float], stages: int) -> None:
    with pytest.raises(ValueError):
        slice_evenly(times, stages)


def test_no_choice_fits() -> None:
    with pytest.raises(ValueError, match="none of the choices"):
        best_slicing([1.0], (2, 3), lambda _: 0)
