"""What the Manager keeps of the figures that processes send."""

from __future__ import annotations

import json
from typing import Any

import pytest

from blockflow.control import kpis
from blockflow.control.kpis import HISTORY, KpiBook
from blockflow.wire.control import Stats


class Book(KpiBook):
    def told(self, *published: str, incarnation: int = 1, stages: int = 0, **tasks: Any) -> None:
        made = [{"stage": n} for n in range(stages)]
        stats = Stats(incarnation, 1, made, {}, {"tasks": tasks})
        self.add(incarnation, "dispatcher", stats, 0.0, published)


def test_samples_of_some_tasks_make_up_all() -> None:
    book = Book()
    book.told("t", "u", t={"ok": 1})
    book.told("t", "u", u={"ok": 2})
    book.told("t", "u", t={"ok": 3})
    assert book.tasks(1) == {"t": {"ok": 3}, "u": {"ok": 2}}
    assert book.tasks(2) == {}


def test_tasks_that_are_gone_are_forgotten() -> None:
    book = Book()
    book.told("t", "u", t={"ok": 1}, u={"ok": 2})
    book.told("u", "v", v={"ok": 3}, t={"ok": 4})
    assert book.tasks(1) == {"u": {"ok": 2}, "v": {"ok": 3}}
    book.told(v={"ok": 5})
    assert book.tasks(1) == {}


def test_each_dispatcher_has_its_own() -> None:
    book = Book()
    book.told("t", t={"ok": 1})
    book.told("t", t={"ok": 2}, incarnation=2)
    book.forget(1)
    assert (book.tasks(1), book.tasks(2)) == ({}, {"t": {"ok": 2}})


def test_nonsense_for_tasks_is_none() -> None:
    book = Book()
    for odd in (None, 3, "t", [1], {}):
        book.add(1, "dispatcher", Stats(1, 1, [], {}, {"tasks": odd}), 0.0, ["t"])
    assert book.tasks(1) == {} and len(book.lines()) == 5


def test_the_history_is_bounded_in_samples() -> None:
    book = Book()
    for n in range(HISTORY + 5):
        book.told("t", t={"ok": n})
    kept = [json.loads(line)["extra"]["tasks"]["t"]["ok"] for line in book.lines()]
    assert kept == list(range(5, HISTORY + 5))


def test_the_history_is_bounded_in_figures(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kpis, "HISTORY_FIGURES", 10)
    book = Book()
    book.told("t", "u", t={}, u={}, stages=2)
    book.told("t", "u", t={}, u={}, stages=4)
    assert len(book.lines()) == 2
    book.told("t", t={})
    assert [len(json.loads(line)["stages"]) for line in book.lines()] == [4, 0]
    for _ in range(3):
        book.told("t", t={})
    assert len(book.lines()) == 5
    book.told("t", t={}, stages=11)  # more than there is room for: the latest is known all the same
    assert book.lines() == []
    latest = book.latest(1)
    assert latest is not None and len(latest.stages) == 11
    book.told("t", t={})
    assert len(book.lines()) == 1


def test_samples_of_some_stages_make_up_all() -> None:
    book = Book()
    for stages in ([{"stage": 1, "rows": 1}], [{"stage": 2, "rows": 2}], [{"stage": 1, "rows": 3}]):
        book.add(1, "w#0", Stats(1, 1, stages, {}), 0.0)
    assert [book.stage(1, n) for n in (1, 2, 3)] == [
        {"stage": 1, "rows": 3},
        {"stage": 2, "rows": 2},
        None,
    ]
    book.add(
        1,
        "w#0",
        Stats(1, 1, [{"rows": 9}, {"stage": "2"}, {"stage": [1]}, {"stage": None}], {}),
        0.0,
    )
    assert book.stage(1, 2) == {"stage": 2, "rows": 2} and book.stage(2, 1) is None
    book.forget(1)
    assert book.stage(1, 1) is None


def test_no_more_stages_are_kept_than_a_worker_can_have(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kpis.limits, "MAX_BLOCKS", 3)
    book = Book()
    for first in (1, 3, 5):
        made = [{"stage": first}, {"stage": first + 1}]
        book.add(1, "w#0", Stats(1, 1, made, {}), 0.0)
    # With those before it each is one too many, and stands for itself.
    assert [n for n in range(9) if book.stage(1, n)] == [5, 6]
