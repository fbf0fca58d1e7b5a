"""The latest crashes outlive the control plane; what is torn is left out and stops nothing."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from blockflow.control import crashes, documents
from blockflow.control.crashes import FILE, CrashBook
from blockflow.control.crew import Crew
from blockflow.control.fleet import CRASHES_KEPT, Crash, LastWork
from blockflow.control.store import StateStore
from blockflow.core.errors import BlockError, BlockFlowError, RepositoryError, SystemError_
from blockflow.core.scarcity import AWAY

SECOND = 1_000_000_000


class Replica:
    def __init__(self, name: str) -> None:
        self.name = name
        self.crash: Crash | None = None
        self.given_up = ""


class Staff(Crew):
    """The part of a Crew that is asked for crashes."""

    def __init__(self, *names: str) -> None:
        self.fleet: Any = [Replica(n) for n in names]
        self.at_dispatcher: Crash | None = None

    @property
    def dispatcher_crash(self) -> Crash | None:
        return self.at_dispatcher


class Times:
    """A control plane whose processes crash, one after the other; the clock is a number."""

    def __init__(self, folder: Path, *names: str, start: float = 1000.0) -> None:
        self.now = start
        self.crew = Staff(*(names or ("a#0",)))
        self.book = CrashBook(folder, lambda: self.now)

    def crash(self, incarnation: int, cause: str = "killed", which: int = 0) -> None:
        work = (LastWork("a", 1.5, 3, ("01", "02")),)
        error = BlockError("BLOCK_FAILED", "odd")
        crash = Crash(incarnation, 7 * SECOND, cause, error, ("first", "last"), True, work)
        if which < 0:
            self.crew.at_dispatcher = crash
        else:
            self.crew.fleet[which].crash = crash
        self.book.take(self.crew, incarnation, 9 * SECOND)  # it was two seconds ago


@pytest.mark.parametrize(
    "error",
    [SystemError_("NO_SPACE", "full"), RepositoryError("UNKNOWN_BLOCK", "", details={AWAY: True})],
    ids=["no room", "the repository is away"],
)
def test_starts_without_room_do_not_push_out_what_they_began_with(
    tmp_path: Path, error: BlockFlowError
) -> None:
    times = Times(tmp_path, "a#0", "b#0")
    times.crash(1)
    times.crew.fleet[1].crash = Crash(20, 0, "full", error, (), True)
    times.book.take(times.crew, 20, 0)
    for incarnation in range(2, 12):
        times.crew.fleet[0].crash = Crash(incarnation, 0, "full", error, (), True)
        times.book.take(times.crew, incarnation, 0)
    later = CrashBook(tmp_path, lambda: times.now)
    assert [c["incarnation"] for c in later.latest("b#0", 9 * SECOND)] == [20]
    assert [c["incarnation"] for c in later.latest("a#0", 9 * SECOND)] == [11, 1]
    times.crash(12)
    assert [c["incarnation"] for c in Times(tmp_path).book.latest("a#0", 9 * SECOND)] == [12, 11, 1]


def test_the_log_says_why(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """That of the control plane as well: a status of -9 does not tell who sent the signal."""
    times = Times(tmp_path)
    times.crash(3, "hung: silent and asleep for 0.5 s")
    assert "a#0 (incarnation 3): hung: silent and asleep for 0.5 s" in caplog.text
    assert "not restarted" not in caplog.text
    times.crew.fleet[0].given_up = "5 crashes within 60 s"
    times.crash(4)
    assert "a#0 is not restarted: 5 crashes within 60 s" in caplog.text


def test_what_is_told_is_what_is_known_of_it(tmp_path: Path) -> None:
    times = Times(tmp_path)
    times.crew.fleet[0].crash = Crash(5, 0, "killed", None, (), False)
    times.book.take(times.crew, 5, 0)
    for book in (times.book, Times(tmp_path).book):
        (told,) = book.latest("a#0", 0)
        fields = {"incarnation": 5, "cause": "killed", "error": None, "work": [], "log": []}
        assert told == {"age_s": 0.0, **fields}
    times.crew.fleet[0].crash = Crash(6, 0, "full", SystemError_("NO_SPACE", "full"), (), True)
    times.book.take(times.crew, 6, 0)
    odd = SystemError_("INTERNAL", "odd", details={"n": 1})  # no want of room, nor is it away
    times.crew.fleet[0].crash = Crash(7, 0, "odd", odd, (), False)
    times.book.take(times.crew, 7, 0)
    times.crew.fleet[0].crash = Crash(8, 0, "full", SystemError_("NO_SPACE", "full"), (), True)
    times.book.take(times.crew, 8, 0)
    assert [c["incarnation"] for c in times.book.latest("a#0", 0)] == [8, 7, 6, 5]


def test_the_next_control_plane_knows_them(tmp_path: Path) -> None:
    first = Times(tmp_path, "a#0", "b#0")
    first.crash(11)
    first.crash(12, "again")
    first.crash(13, which=1)
    first.crash(14, which=-1)
    own = first.book.latest("a#0", 12 * SECOND)
    assert [(c["incarnation"], c["age_s"]) for c in own] == [(12, 5.0), (11, 5.0)]
    second = Times(tmp_path, start=1060.0)
    newest, oldest = second.book.latest("a#0", 9 * SECOND)
    assert (newest["incarnation"], newest["cause"]) == (12, "again")
    assert oldest["incarnation"] == 11
    assert newest["age_s"] == 62.0
    assert newest["log"] == ["first", "last"]
    assert newest["error"]["code"] == "BLOCK_FAILED"
    assert newest["work"] == [
        {"block": "a", "took_ms": 1.5, "requests": 3, "tickets": ["01", "02"]}
    ]
    assert [r["incarnation"] for r in second.book.latest("b#0", 9 * SECOND)] == [13]
    assert [r["incarnation"] for r in second.book.latest("dispatcher", 9 * SECOND)] == [14]
    assert second.book.latest("c#0", 9 * SECOND) == []


def test_the_last_five_of_all_control_planes_are_kept(tmp_path: Path) -> None:
    for start in (0, 3, 6):
        times = Times(tmp_path)
        for n in range(start, start + 3):
            times.crash(n + 1)
    found = Times(tmp_path).book.latest("a#0", 9 * SECOND)
    assert [r["incarnation"] for r in found] == [9, 8, 7, 6, 5]
    assert len(found) == CRASHES_KEPT


def test_deaths_that_are_no_crashes_change_nothing(tmp_path: Path) -> None:
    times = Times(tmp_path)
    times.book.take(times.crew, 5, 0)
    times.crash(11)
    before = (tmp_path / FILE).stat().st_mtime_ns
    times.book.take(times.crew, 12, 0)  # told to stop
    assert (tmp_path / FILE).stat().st_mtime_ns == before
    assert (tmp_path / FILE).stat().st_mode & 0o777 == 0o600
    assert sorted(p.name for p in tmp_path.iterdir()) == [FILE]


def test_a_clock_that_was_set_back_tells_no_age_of_what_was_before_it(tmp_path: Path) -> None:
    """Those under the present control plane have the clock that nobody sets."""
    Times(tmp_path, start=5000.0).crash(1)
    later = Times(tmp_path, start=10.0)
    later.crash(2)
    later.now = 5.0
    assert [c["age_s"] for c in later.book.latest("a#0", 9 * SECOND)] == [2.0, None]


def test_all_that_had_a_name_are_told_of_before_a_take_over_and_after_it(tmp_path: Path) -> None:
    """A restart, or an update to and fro, puts another replica under the same name."""
    times = Times(tmp_path)
    times.crash(1, "killed")
    times.crew.fleet[0] = Replica("a#0")  # restarted
    told = times.book.latest("a#0", 9 * SECOND)
    assert [c["incarnation"] for c in told] == [1]
    times.crash(2, "again")
    told = times.book.latest("a#0", 9 * SECOND)
    assert [c["incarnation"] for c in told] == [2, 1]
    assert Times(tmp_path).book.latest("a#0", 9 * SECOND) == told


def broken_files() -> list[bytes]:
    good: dict[str, Any] = {"a#0": []}
    crash = {"at": 1.0, "incarnation": 1, "cause": "", "error": None, "work": [], "log": []}
    bodies: list[Any] = [
        {"a#0": {}},
        {"a#0": [1]},
        {"a#0": [{"at": 1}]},
        {"a#0": [crash] * 6},
        {"a#0": [{**crash, "at": "x"}]},
        {"a#0": [{**crash, "more": 1}]},
    ]
    return [
        b"",
        b"[]",
        b"\xff" * 40,
        b"[" * 100_000,
        documents.seal(good, 2),
        documents.seal(good, 1).replace(b"a#0", b"b#0"),
        b" " * (crashes.MAX_BYTES + 1),
        *(documents.seal(body, 1) for body in bodies),
    ]


@pytest.mark.parametrize("content", broken_files(), ids=lambda c: repr(c[:12]))
def test_what_cannot_be_read_is_left_out_with_a_word(
    content: bytes, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / FILE).write_bytes(content)
    times = Times(tmp_path)
    assert times.book.latest("a#0", 9 * SECOND) == []
    assert "earlier crashes are forgotten" in caplog.text
    times.crash(3)
    assert [r["incarnation"] for r in Times(tmp_path).book.latest("a#0", 9 * SECOND)] == [3]


def test_a_file_torn_anywhere_stops_no_start(tmp_path: Path) -> None:
    Times(tmp_path).crash(1)
    whole = (tmp_path / FILE).read_bytes()
    for length in range(0, len(whole) - 1, 7):
        (tmp_path / FILE).write_bytes(whole[:length])
        assert Times(tmp_path).book.latest("a#0", 9 * SECOND) == []
    (tmp_path / FILE).write_bytes(whole)
    assert len(Times(tmp_path).book.latest("a#0", 9 * SECOND)) == 1


@pytest.mark.parametrize("kind", ["link", "folder", "pipe"])
def test_only_a_file_is_read(kind: str, tmp_path: Path) -> None:
    other = tmp_path / "other"
    other.mkdir()
    Times(other).crash(1)
    if kind == "link":
        (tmp_path / FILE).symlink_to(other / FILE)
    elif kind == "folder":
        (tmp_path / FILE).mkdir()
    else:
        os.mkfifo(tmp_path / FILE)
    assert Times(tmp_path).book.latest("a#0", 9 * SECOND) == []


def test_a_full_disk_costs_the_history_and_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    times = Times(tmp_path)
    times.crash(1)

    def full(path: Path, data: bytes, *, sync: bool) -> None:
        path.write_bytes(data[:10])
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(crashes, "write_file", full)
    times.crash(2)
    assert "No space left" in caplog.text
    assert sorted(p.name for p in tmp_path.iterdir()) == [FILE]
    assert [r["incarnation"] for r in Times(tmp_path).book.latest("a#0", 9 * SECOND)] == [1]
    monkeypatch.undo()
    times.crash(3)
    found = Times(tmp_path).book.latest("a#0", 9 * SECOND)
    assert [r["incarnation"] for r in found] == [3, 2, 1]


def test_the_file_is_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By those that have crashed long ago, and only as many as have no room."""
    monkeypatch.setattr(crashes, "MAX_BYTES", 100_000)
    names = [f"w{i}#0" for i in range(100)]
    times = Times(tmp_path, *names)
    for i in range(100):
        times.now += 1.0
        times.crash(i + 1, "x" * 1500, which=i)
    assert 96_000 < (tmp_path / FILE).stat().st_size <= 100_000
    kept = json.loads((tmp_path / FILE).read_bytes())["body"]
    assert kept.keys() == set(names[-len(kept) :]) and 50 < len(kept) < 100
    assert [n for n in names if Times(tmp_path).book.latest(n, 0)] == names[-len(kept) :]


def test_what_is_stored_already_is_not_made_anew(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else each of hundreds of deaths at once costs the Manager's thread a tenth of a second."""
    monkeypatch.setattr(documents, "_BY_EYE", 0)
    written: list[object] = []

    def noted(body: Mapping[str, object]) -> str:
        written.append(body)
        return documents.canonical_json(body)

    monkeypatch.setattr(crashes, "canonical_json", noted)
    times = Times(tmp_path, "a#0", "b#0")
    for i in range(4):
        times.crash(i + 1, which=i % 2)
    assert len(written) == 4
    assert [r["incarnation"] for r in Times(tmp_path).book.latest("b#0", 0)] == [4, 2]


def test_of_too_many_processes_those_with_the_latest_crashes_are_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those of earlier control planes among them."""
    first = Times(tmp_path, "a#0", "b#0", "c#0")
    for which in (0, 1, 2, 0):
        first.now += 1.0
        first.crash(which + 1, which=which)
    monkeypatch.setattr(crashes, "MAX_NAMES", 3)
    second = Times(tmp_path, "d#0", start=2000.0)
    second.crash(9)
    assert json.loads((tmp_path / FILE).read_bytes())["body"].keys() == {"a#0", "c#0", "d#0"}
    # What is told is what the next control plane will tell; and it does not grow with each name.
    assert second.book.latest("b#0", 9 * SECOND) == []
    assert len(second.book.latest("a#0", 9 * SECOND)) == 2


def test_a_fresh_start_keeps_them_aside(tmp_path: Path) -> None:
    StateStore(tmp_path).close()
    Times(tmp_path).crash(1)
    StateStore.open_fresh(tmp_path).close()
    assert Times(tmp_path).book.latest("a#0", 9 * SECOND) == []
    assert (tmp_path / f"discarded-1-{FILE}").exists()
