"""Of whom a sample tells: a bounded number, what is new first, and in the end everyone."""

from __future__ import annotations

from itertools import chain

from hypothesis import given
from hypothesis import strategies as st

from blockflow.core.roster import REMINDED, SAMPLED, Roster


def quiet(n: int) -> Roster[int]:
    """A roster whose news have all been told."""
    roster = Roster(range(n))
    while roster.take()[0]:
        pass
    return roster


def test_at_first_there_is_something_to_tell_of_everyone() -> None:
    roster = Roster(range(2 * SAMPLED + 3))
    told = [roster.take()[0] for _ in range(4)]
    assert [len(t) for t in told] == [SAMPLED, SAMPLED, 3, 0]
    assert list(chain(*told)) == list(range(2 * SAMPLED + 3))


def test_nobody_is_nobody() -> None:
    roster = Roster[int]()
    assert roster.take() == ([], []) == roster.take()
    roster = Roster([1])
    roster.keep([])
    assert roster.take() == ([], [])


def test_few_are_all_in_every_sample() -> None:
    roster = quiet(REMINDED)
    roster.note(3)
    news, others = roster.take()
    assert news == [3] and sorted(others) == [n for n in range(REMINDED) if n != 3]
    news, others = roster.take()
    assert news == [] and sorted(others) == list(range(REMINDED))


def test_many_have_their_turns() -> None:
    roster = quiet(1000)
    first = [roster.take()[1] for _ in range(-(-1000 // REMINDED))]
    assert {len(f) for f in first} == {REMINDED} and set(chain(*first)) == set(range(1000))


def test_what_is_new_goes_before_whose_turn_it_is() -> None:
    roster = quiet(400)
    for key in range(SAMPLED + SAMPLED - 8):
        roster.note(key)
    told = [roster.take() for _ in range(2)]
    assert [(len(news), len(others)) for news, others in told] == [(SAMPLED, 0), (SAMPLED - 8, 8)]


def test_whose_figures_fade_is_told_of_again_where_not_everyone_is() -> None:
    roster = quiet(REMINDED)
    roster.fades(2)
    assert roster.take()[0] == []
    roster = quiet(REMINDED + 1)
    roster.fades(2)
    assert roster.take()[0] == [2]


def test_others_come_and_go() -> None:
    roster = quiet(5)
    roster.note(4)
    roster.note(1)
    roster.keep([0, 1, 2, 9])
    assert roster.take() == ([1, 0, 2, 9], [])
    assert roster.take() == ([], [0, 1, 2, 9])


@given(
    st.integers(1, 400),
    st.lists(st.lists(st.integers(0, 399), max_size=300), min_size=1, max_size=8),
)
def test_nothing_is_left_untold_and_nobody_is_told_of_twice(
    n: int, happened: list[list[int]]
) -> None:
    roster = quiet(n)
    due: list[int] = []  # in the order in which it happened
    for notes in happened:
        for key in notes:
            if key < n:
                roster.note(key)
                if key not in due:
                    due.append(key)
        news, others = roster.take()
        assert news == due[:SAMPLED]
        del due[:SAMPLED]
        both = [*news, *others]
        assert len(both) <= SAMPLED and len(set(both)) == len(both)
        assert len(others) <= REMINDED and set(both) <= set(range(n))
        if n <= REMINDED:
            assert len(both) == n
