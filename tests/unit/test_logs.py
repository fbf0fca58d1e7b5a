"""Levels of loggers are set once, by the template."""

from __future__ import annotations

import logging
from collections.abc import Iterator

import pytest

from blockflow.launch import logs


@pytest.fixture
def root() -> Iterator[logging.Logger]:
    found = logging.getLogger()
    level = found.level
    yield found
    found.setLevel(level)


def test_a_level_that_is_set_is_left_alone(
    root: logging.Logger, monkeypatch: pytest.MonkeyPatch
) -> None:
    logs.set_level()
    assert root.level == logging.INFO
    monkeypatch.setattr(root, "setLevel", lambda _: pytest.fail("visits every logger"))
    logs.set_level()


def test_lines_bear_time_level_and_name(
    root: logging.Logger, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(root, "handlers", [])
    logs.log_to_stderr("trunk#3")
    logging.getLogger("blockflow.worker").info("ready in %d ms", 12)
    line = capsys.readouterr().err
    assert line.endswith(" INFO trunk#3 blockflow.worker: ready in 12 ms\n") and line[:2] == "20"


def test_lines_of_the_control_plane_bear_the_time_as_well(
    root: logging.Logger, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(root, "handlers", [])
    logging.basicConfig(format="%(levelname)s %(name)s: %(message)s")
    logs.tell_the_time()
    logging.getLogger("blockflow.control").warning("taken over: %s", "nothing")
    line = capsys.readouterr().err
    assert line.endswith(" WARNING blockflow.control: taken over: nothing\n") and line[:2] == "20"
