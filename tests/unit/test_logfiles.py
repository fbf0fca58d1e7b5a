"""Log files of launched processes: made, bounded in number and size, read at the end."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from blockflow.control import logfiles
from blockflow.control.logfiles import MOST_BYTES, LogFiles, cut, tail

KEPT = 1024 * 1024
SECOND = 1_000_000_000


@pytest.fixture
def files(tmp_path: Path) -> LogFiles:
    return LogFiles(tmp_path / "logs", pytest.fail)


def test_a_file_is_made_for_this_user_alone(files: LogFiles, tmp_path: Path) -> None:
    path = tmp_path / "logs" / "a#0.1.log"
    assert files.make(str(path), "a#0")
    assert path.stat().st_mode & 0o777 == 0o600 and path.stat().st_size == 0
    path.write_text("kept")
    assert files.make(str(path), "a#0")
    assert path.read_text() == "kept"


def test_one_that_cannot_be_made_is_told_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "logs").write_text("in the way")
    told: list[str] = []
    files = LogFiles(tmp_path / "logs", told.append)
    for n in range(3):
        assert not files.make(str(tmp_path / "logs" / f"a#0.{n}.log"), "a#0")
    assert len(told) == 1 and "a#0 has no log file: Not a directory" in told[0]
    assert caplog.text.count("has no log file") == 2


def test_a_folder_that_was_removed_is_made_again(files: LogFiles, tmp_path: Path) -> None:
    (tmp_path / "logs").rmdir()
    assert files.make(str(tmp_path / "logs" / "a#0.1.log"), "a#0")
    assert (tmp_path / "logs").stat().st_mode & 0o777 == 0o700


def test_a_link_is_not_followed(tmp_path: Path) -> None:
    files = LogFiles(tmp_path / "logs", lambda _: None)
    (tmp_path / "logs" / "a#0.1.log").symlink_to(tmp_path / "elsewhere")
    assert not files.make(str(tmp_path / "logs" / "a#0.1.log"), "a#0")
    assert not (tmp_path / "elsewhere").exists()


def test_the_oldest_that_nobody_writes_to_go(
    files: LogFiles, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(logfiles, "_MOST_FILES", 3)
    logs = [tmp_path / "logs" / f"w#0.{n}.log" for n in range(8, 14)]
    for path in logs:
        path.touch()
    odd = tmp_path / "logs" / "w#0.\N{SUPERSCRIPT TWO}.log"  # is a digit, and yet no number
    odd.touch()
    files.prune({str(logs[0])})
    assert [p for p in logs if p.exists()] == [logs[0], *logs[3:]] and not odd.exists()


def test_many_launches_read_the_folder_a_few_times(
    files: LogFiles, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    looks: list[Path] = []

    def incarnation(log: Path) -> int:
        looks.append(log)
        return 0

    monkeypatch.setattr(logfiles, "_incarnation", incarnation)
    for n in range(101):
        files.prune(())
        assert files.make(str(tmp_path / "logs" / f"w#0.{n}.log"), "w#0")
    assert len(looks) == 20 + 40 + 60 + 80 + 100


def test_a_log_is_cut_while_its_process_writes_on(files: LogFiles, tmp_path: Path) -> None:
    path = tmp_path / "logs" / "a#0.1.log"
    with path.open("ab", buffering=0) as writer:
        line = b"x" * 99 + b"\n"
        writer.write(line * (MOST_BYTES // 100 + 1))
        files.look([str(path)], 10 * SECOND)
        writer.write(b"after\n")
        text = path.read_bytes()
        assert KEPT - 200 < len(text) < KEPT + 200
        first, second, *_, last = text.splitlines()
        assert first.endswith(b" earlier bytes were cut off]") and second + b"\n" == line
        assert last == b"after"
        assert MOST_BYTES - KEPT < int(first.split()[0][1:]) < MOST_BYTES
        # Looked at again only after a while, however often it is asked for.
        writer.write(line * (MOST_BYTES // 100 + 1))
        files.look([str(path)], 11 * SECOND)
        assert path.stat().st_size > MOST_BYTES
        files.look([str(path)], 12 * SECOND)
        assert path.stat().st_size < KEPT + 200


def test_one_that_is_short_enough_is_left_alone(tmp_path: Path) -> None:
    path = tmp_path / "x.log"
    path.write_bytes(b"y" * 1000)
    before = path.stat().st_mtime_ns
    cut(str(path), 1000)
    assert (path.stat().st_mtime_ns, path.stat().st_size) == (before, 1000)
    cut(str(tmp_path / "none"), 1000)


def test_what_the_dead_leave(files: LogFiles, tmp_path: Path) -> None:
    path = tmp_path / "logs" / "a#0.1.log"
    for size, status, left in ((0, 0, False), (0, -9, True), (5, 0, True)):
        path.write_bytes(b"x" * size)
        files.closed(str(path), status)
        assert path.exists() is left
    path.write_bytes(b"x" * 2 * KEPT)
    files.closed(str(path), -9)
    assert path.stat().st_size <= KEPT + 100


class TestTail:
    def test_is_bounded(self, tmp_path: Path) -> None:
        path = tmp_path / "x.log"
        path.write_text("\n".join(f"{i} " + "x" * 1000 for i in range(100)))
        lines = tail(str(path))
        assert len(lines) <= 10 and lines[-1].startswith("99")
        assert all(len(line) <= 300 for line in lines)
        path.write_text("\n".join(map(str, range(25))))
        assert tail(str(path)) == tuple(map(str, range(15, 25)))
        assert tail("") == () and tail(str(tmp_path / "none")) == ()

    def test_of_a_signal_says_where_it_was(self, tmp_path: Path) -> None:
        """As faulthandler writes it, with a list of modules after it that would fill the tail."""
        path = tmp_path / "x.log"
        code = "import faulthandler, os, signal\nfaulthandler.enable(all_threads=False)\n"
        code += "def inner():\n    os.kill(os.getpid(), signal.SIGSEGV)\n"
        code += "def outer(n):\n    outer(n - 1) if n else inner()\nouter(40)"
        with path.open("wb") as f:
            f.write(b"ready\n")
            f.flush()
            subprocess.run([sys.executable, "-c", code], stderr=f, check=False)
            f.write(b"\nExtension modules: " + b"numpy.core, " * 400 + b"(total: 400)\n")
        assert os.path.getsize(path) > 4096
        lines = tail(str(path))
        assert lines[0] == "Fatal Python error: Segmentation fault"
        assert "inner" in lines[2] and "outer" in lines[3] and len(lines) == 10

    def test_of_an_abort_begins_with_what_was_said_before_it(self, tmp_path: Path) -> None:
        path = tmp_path / "x.log"
        code = "import faulthandler, os\nfaulthandler.enable()\n"
        code += "os.write(2, b'no room (thread.cpp:1)\\n')\nos.abort()"
        with path.open("wb") as f:
            f.write(b"ready\n")
            f.flush()
            subprocess.run([sys.executable, "-c", code], stderr=f, check=False)
        lines = tail(str(path))
        assert lines[:2] == ("no room (thread.cpp:1)", "Fatal Python error: Aborted")
        assert len(lines) <= 10

    def test_of_several_fatal_errors_the_last_one_counts(self, tmp_path: Path) -> None:
        path = tmp_path / "x.log"
        path.write_text("old\n" + "Fatal Python error: Aborted\nframe\nnew\n" * 2)
        assert tail(str(path)) == ("new", "Fatal Python error: Aborted", "frame", "new")

    def test_of_an_abort_of_which_nothing_was_said(self, tmp_path: Path) -> None:
        path = tmp_path / "x.log"
        path.write_text("Fatal Python error: Aborted\nframe\n")
        assert tail(str(path)) == ("Fatal Python error: Aborted", "frame")
