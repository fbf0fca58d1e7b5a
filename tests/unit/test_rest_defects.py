"""Defects are logged with their tracebacks, the first of a minute."""

from __future__ import annotations

import logging
from types import SimpleNamespace

import pytest

from blockflow.control.rest import defects
from blockflow.control.rest.defects import SPELL_S, WHOLE, Defects, Spell

LOG = logging.getLogger("blockflow.rest")


def test_what_is_beyond_the_first_is_counted_and_told_with_the_next() -> None:
    spell = Spell()
    assert [spell.note(100.0) for _ in range(WHOLE + 3)] == [(n + 1, 0) for n in range(WHOLE + 3)]
    assert spell.note(100.0 + SPELL_S) == (1, 3)
    assert spell.note(100.0 + 2 * SPELL_S) == (1, 0)


def test_a_defect_has_its_traceback_and_a_flood_of_them_is_bounded(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = [100.0]
    monkeypatch.setattr(defects, "time", SimpleNamespace(monotonic=lambda: now[0]))
    told = Defects(LOG)
    for n in range(301):
        now[0] += SPELL_S * (n == 300)
        try:
            raise ZeroDivisionError("a real defect")
        except ZeroDivisionError:
            told.of_server("socket.error 8", logging.ERROR, True)
    assert caplog.text.count("Traceback") == WHOLE + 1
    assert "ZeroDivisionError: a real defect" in caplog.text
    no_more, unseen = (
        "further defects are not shown for up to 60 s",
        "295 more defects were not shown",
    )
    assert caplog.messages == [*["socket.error 8"] * WHOLE, no_more, unseen, "socket.error 8"]
    assert {r.levelno for r in caplog.records} == {logging.WARNING}


def test_who_came_and_went_is_not_told(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "blockflow")
    told = Defects(LOG)
    told.of_server("a client was lost")
    assert caplog.messages == []
    told.of_server("no more threads", logging.CRITICAL)
    assert caplog.messages == ["no more threads"]
    assert caplog.records[0].levelno == logging.WARNING
