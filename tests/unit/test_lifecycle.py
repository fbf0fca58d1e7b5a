"""The replica's life: legal moves, illegal moves, and what the docs draw."""

from __future__ import annotations

import itertools

import pytest

from blockflow.core.lifecycle import FINAL, TABLE, Event, IllegalTransition, State, advance, diagram


def walk(*events: Event) -> State:
    state = State.LAUNCHING
    for event in events:
        state = advance(state, event)
    return state


def test_a_whole_life() -> None:
    assert (
        walk(Event.HELLO, Event.LOADED, Event.PROVED, Event.DRAIN, Event.STOP, Event.EXITED)
        is State.STOPPED
    )


@pytest.mark.parametrize(
    "events",
    [
        (Event.EXITED,),
        (Event.HELLO, Event.EXITED),
        (Event.HELLO, Event.START_FAILED),
        (Event.HELLO, Event.LOADED, Event.PROVED, Event.EXITED),
        (Event.HELLO, Event.LOADED, Event.PROVED, Event.DRAIN, Event.EXITED),
    ],
)
def test_an_unasked_exit_is_a_failure(events: tuple[Event, ...]) -> None:
    assert walk(*events) is State.FAILED


def test_illegal_moves_raise() -> None:
    for state, event in itertools.product(State, Event):
        if (state, event) not in TABLE:
            with pytest.raises(IllegalTransition):
                advance(state, event)


def test_nothing_leaves_a_final_state() -> None:
    for (state, _), after in TABLE.items():
        if state in FINAL:
            assert after is state


def test_every_state_can_end() -> None:
    for state in State:
        reached = {state}
        while True:
            more = {b for (a, _), b in TABLE.items() if a in reached} - reached
            if not more:
                break
            reached |= more
        assert reached & FINAL


def test_diagram_shows_every_move() -> None:
    text = diagram()
    for (a, e), b in TABLE.items():
        if a != b:
            assert f"{a} --> {b}: {e}" in text
