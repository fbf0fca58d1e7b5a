"""Silence is counted only as far as the Controller has proven that it sends and delivers."""

from __future__ import annotations

import pytest

from blockflow.control.heartbeat import Hang, Heartbeat
from blockflow.launch.vitals import Vitals

MS = 1_000_000
PERIOD, SILENCE, PATIENCE = 100 * MS, 500 * MS, 2000 * MS
STEP = PERIOD // 4
ONE, OTHER = 7, 8
ASLEEP = Vitals("S", 0, 0, False)


@pytest.fixture
def beat() -> Heartbeat:
    return Heartbeat(PERIOD, SILENCE, PATIENCE)


def looks(beat: Heartbeat, begin: int, end: int) -> list[Hang]:
    """In time, one after the other."""
    return [hang for now in range(begin, end, STEP) for hang in beat.look({ONE: ASLEEP}, now)]


def test_a_ping_has_left_when_it_is_echoed_itself(beat: Heartbeat) -> None:
    beat.asked(1, [ONE])
    beat.asked(2, [OTHER])
    beat.echoed(1, 0)
    assert beat.suspects() == {ONE}
    beat.echoed(2, 0)
    assert beat.suspects() == {ONE, OTHER}


def test_an_answer_to_an_earlier_ping_is_none_to_this_one(beat: Heartbeat) -> None:
    for seq in (1, 2):
        beat.asked(seq, [ONE])
        beat.echoed(seq, 0)
    beat.pong(ONE, 1, 1, 0)
    beat.asked(3, [ONE])
    beat.echoed(3, 0)
    beat.pong(ONE, 2, 2, 0)
    assert beat.suspects() == {ONE}
    beat.pong(ONE, 3, 3, 0)
    assert beat.suspects() == set()


def test_nobody_is_silent_while_the_controller_proves_nothing(beat: Heartbeat) -> None:
    beat.asked(1, [ONE])
    beat.echoed(1, 0)
    beat.asked(2, [ONE])
    assert looks(beat, 0, 3 * SILENCE) == []
    beat.echoed(2, 3 * SILENCE)  # and that what had come was delivered: there was no answer
    (hang,) = looks(beat, 3 * SILENCE, 3 * SILENCE + STEP)
    assert hang.incarnation == ONE and "silent" in hang.cause


def test_what_was_seen_while_the_controller_was_late_is_no_evidence(beat: Heartbeat) -> None:
    beat.asked(1, [ONE])
    beat.echoed(1, 0)
    beat.asked(2, [ONE])
    beat.asked(3, [ONE])
    assert looks(beat, 0, 3 * SILENCE) == []
    for seq in (2, 3):
        beat.echoed(seq, 3 * SILENCE)
    assert looks(beat, 3 * SILENCE, 3 * SILENCE + STEP) == []
    assert beat.lapses
