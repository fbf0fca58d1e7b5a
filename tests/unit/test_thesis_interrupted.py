"""``blockflow bench thesis``: Ctrl-C beside an experiment, not in it, costs nothing of it."""

from __future__ import annotations

import json
import signal
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, suppress
from pathlib import Path
from typing import Any

import pytest
from thesis_rig import silent

from blockflow.bench.interrupts import interruptible
from blockflow.bench.results import Figure, ResultFile
from blockflow.bench.thesis import run as module
from blockflow.bench.thesis.experiment import Advance, Context, Experiment, Findings, Settings
from blockflow.bench.thesis.outcome import Call, Outcome, State
from blockflow.bench.thesis.run import Session
from blockflow.core.errors import make_error

FIGURE = Figure("time", "handles", 1, 2.0, 3.0, 2.0, "ms", 5)


class Screen:
    """Nobody watches."""

    def begins(self, experiment: Experiment, number: int, count: int) -> None:
        pass

    def step(self, what: str, parts: int | None) -> AbstractContextManager[Advance]:
        return silent(what, parts)

    def ended(self, outcome: Outcome) -> None:
        pass


def ended(_context: Context) -> Findings:
    return Findings("it is whole", [FIGURE])


def failed(context: Context) -> Findings:
    context.keep([FIGURE])
    raise make_error("CONNECTION_LOST", "the system died")


def call(out: Path, run: Callable[[Context], Findings]) -> Session:
    """Of two experiments; the second one must not begin."""

    def never(_context: Context) -> Findings:
        raise AssertionError("it was begun after Ctrl-C")

    experiments = [
        Experiment(name, ("table 4.3",), "a title", r)
        for name, r in {"one": run, "two": never}.items()
    ]
    made = Session(experiments, Call(Settings(), "a command", {}), out, Screen())
    with suppress(KeyboardInterrupt):  # as the command does
        made.run()
    return made


def interrupt(monkeypatch: pytest.MonkeyPatch, name: str, at: int, then: Any) -> None:
    """Ctrl-C comes in the ``at``-th call; the others do ``then``."""
    calls: list[None] = []

    def double(*args: Any) -> Any:
        calls.append(None)
        if len(calls) == at:
            raise KeyboardInterrupt
        return then(*args)

    monkeypatch.setattr(module, name, double)


def steady(_seconds: float) -> Sequence[float]:
    return [1.0] * 5


def kept(out: Path) -> list[Any]:
    return [f["value"] for f in ResultFile(out / "one.jsonl", "").read() if f["name"] == "time"]


def test_in_the_fixed_work_after_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    interrupt(monkeypatch, "calibrate", 2, steady)
    made = call(tmp_path, ended)
    assert made.interrupted
    assert [o.state for o in made.outcomes] == [State.DONE]
    assert kept(tmp_path) == [2.0]
    assert json.loads((tmp_path / "one.json").read_text())["says"] == "it is whole"


def import_broken_off(*_: Any) -> Any:
    """As an extension module does whose import Ctrl-C comes into."""
    try:
        signal.raise_signal(signal.SIGINT)
    except KeyboardInterrupt:
        raise ImportError("initialization failed") from None


def test_in_an_import_within_it(tmp_path: Path) -> None:
    with interruptible():
        made = call(tmp_path, import_broken_off)
    assert made.interrupted
    assert [getattr(o.error, "code", "") for o in made.outcomes] == ["CANCELLED"]


def test_in_an_import_while_it_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    written = [import_broken_off, module.write_outcome]
    monkeypatch.setattr(module, "write_outcome", lambda *args: written.pop(0)(*args))
    with interruptible():
        made = call(tmp_path, ended)
    assert made.interrupted
    assert [o.state for o in made.outcomes] == [State.DONE]
    assert json.loads((tmp_path / "one.json").read_text())["says"] == "it is whole"


def test_in_the_fixed_work_after_a_failure(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    interrupt(monkeypatch, "calibrate", 2, steady)
    made = call(tmp_path, failed)
    assert made.interrupted
    document = json.loads((tmp_path / "one.json").read_text())
    assert (document["partial"], document["error"]["code"]) == (True, "CONNECTION_LOST")
    assert kept(tmp_path) == [2.0]


def test_while_its_files_are_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "calibrate", steady)
    interrupt(monkeypatch, "write_outcome", 1, module.write_outcome)
    made = call(tmp_path, ended)
    assert made.interrupted
    assert [o.state for o in made.outcomes] == [State.DONE]
    assert len(made.documents) == 1
    assert kept(tmp_path) == [2.0]
