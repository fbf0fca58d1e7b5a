"""What is read of a process: of one that the kernel describes in files of ours."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

from blockflow.launch import vitals
from blockflow.launch.vitals import Stopped, Vitals, read_vitals

TICK_NS = vitals._TICK_NS


@pytest.fixture
def proc(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(vitals, "_PROC", str(tmp_path))
    return tmp_path


def write(folder: Path, state: str, user: int = 7, system: int = 5) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    fields = [state, *["0"] * 10, str(user), str(system), "90", "91"]
    (folder / "stat").write_text(f"1 (a) Z (b) {' '.join(fields)}")


def test_what_the_kernel_says(proc: Path) -> None:
    write(proc / "12", "S")
    assert read_vitals(12) == Vitals("S", 12 * TICK_NS, 12 * TICK_NS, eager=False)
    (proc / "12" / "schedstat").write_text("345 6 7")
    assert read_vitals(12) == Vitals("S", 12 * TICK_NS, 345, eager=False)
    assert read_vitals(13) is None


@pytest.mark.parametrize(
    ("state", "eager", "stopped", "traced"),
    [
        ("R", True, False, False),
        ("D", True, False, False),
        ("S", False, False, False),
        ("T", False, True, False),
        ("t", False, False, True),
    ],
)
def test_a_state(proc: Path, state: str, eager: bool, stopped: bool, traced: bool) -> None:
    write(proc / "12", state)
    seen = read_vitals(12)
    assert seen is not None
    assert (seen.eager, seen.main_eager) == (eager, eager)
    assert (seen.stopped, seen.traced) == (stopped, traced)


def test_one_of_its_threads_is_eager(proc: Path) -> None:
    write(proc / "12", "S")
    (proc / "12" / "task" / "14").mkdir(parents=True)  # this one has just ended
    for thread, state in (("12", "S"), ("13", "S")):
        write(proc / "12" / "task" / thread, state)
    seen = read_vitals(12, every_thread=True)
    assert seen is not None and not seen.eager
    write(proc / "12" / "task" / "13", "D")
    seen = read_vitals(12, every_thread=True)
    assert seen is not None and seen.eager and not seen.main_eager
    seen = read_vitals(12)
    assert seen is not None and not seen.eager, "only the main thread was looked at"


def test_a_look_takes_few_steps(proc: Path) -> None:
    """With a hundred workers there are four hundred a second. By way of pathlib it took 36."""
    write(proc / "12", "S")
    (proc / "12" / "schedstat").write_text("345 6 7")
    called: list[str] = []

    def note(frame: Any, event: str, _: object) -> None:
        if event == "call":
            called.append(frame.f_code.co_name)

    sys.setprofile(note)
    try:
        seen = read_vitals(12)
    finally:
        sys.setprofile(None)
    assert seen is not None and seen.main_cpu_ns == 345
    assert len(called) < 10, called


def test_how_long_it_has_been_stopped(proc: Path) -> None:
    stopped = Stopped()
    assert stopped.seconds(0, 1.0) == stopped.seconds(12, 1.0) == 0.0
    write(proc / "12", "T")
    assert [stopped.seconds(12, now) for now in (2.0, 3.0, 4.5)] == [0.0, 1.0, 2.5]
    write(proc / "13", "T")
    assert [stopped.seconds(13, now) for now in (5.0, 6.0)] == [0.0, 1.0], "it is another one"
    write(proc / "13", "S")
    assert stopped.seconds(13, 7.0) == 0.0
    write(proc / "13", "T")
    assert stopped.seconds(13, 8.0) == 0.0, "it went on in between"
    write(proc / "0", "T")
    assert [stopped.seconds(0, now) for now in (8.0, 9.0)] == [0.0, 0.0], "there is none"
