"""A log file that keeps nobody waiting for its disk. A full pipe stands for the disk here: who
writes to it waits in the kernel."""

from __future__ import annotations

import fcntl
import io
import logging
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from blockflow.launch import logs, scribe
from blockflow.launch.scribe import MOST, PATIENCE_S, Scribe

LONG_S = 60.0
SOON_S = 20 * PATIENCE_S
"""Far more than the patience on a machine that others share, far less than for ever."""


class Disk:
    """What is written to, and does not answer until it is read."""

    def __init__(self) -> None:
        self.fd, self.number = os.pipe()
        self.size = fcntl.fcntl(self.number, fcntl.F_SETPIPE_SZ, 4096)
        os.write(self.number, bytes(self.size))

    def answers(self, nbytes: int) -> str:
        """Take what is in the way, and then so much."""
        found = b""
        while len(found) < self.size + nbytes:
            found += os.read(self.fd, 65536)
        return found[self.size :].decode()

    def close(self) -> None:
        os.close(self.fd)  # whoever still writes gets EPIPE
        os.close(self.number)


@pytest.fixture
def disk() -> Iterator[Disk]:
    made = Disk()
    yield made
    made.close()


def until_idle(one: Scribe) -> None:
    """Until it has written all that it was told."""
    end = time.monotonic() + LONG_S
    while one._texts:
        assert time.monotonic() < end
        one.flush()


def test_what_is_said_is_there_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scribe, "PATIENCE_S", LONG_S)
    with (tmp_path / "log").open("w") as file:
        one = Scribe(file.fileno())
        for n in range(5):
            one.write(f"line {n}\n")
            assert (tmp_path / "log").read_text().endswith(f"line {n}\n")
        assert (one.fileno(), one.writable()) == (file.fileno(), True)
    assert one._thread is not None and one._thread.daemon


def test_while_a_line_is_late_nobody_waits(disk: Disk) -> None:
    one = Scribe(disk.number)
    said = [f"line {n}\n" for n in range(200)]
    begin = time.monotonic()
    for line in said:
        one.write(line)
    one.flush()
    took = time.monotonic() - begin
    assert PATIENCE_S <= took < SOON_S  # once, not for each
    assert disk.answers(len("".join(said))) == "".join(said)
    until_idle(one)
    assert not one._late  # the next one is waited for again


def test_what_is_too_much_is_lost_and_told(disk: Disk) -> None:
    one = Scribe(disk.number)
    for _ in range(MOST + 2):
        one.write("x\n")
    told = "blockflow: 2 lines are lost here: the disk did not answer\n"
    assert disk.answers(2 * MOST + len(told)) == "x\n" * MOST + told
    until_idle(one)
    one.write("y\n")
    assert os.read(disk.fd, 100) == b"y\n"


def test_without_a_further_thread_it_writes_by_itself(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(self: object) -> None:
        raise RuntimeError("can't start new thread")

    with (tmp_path / "log").open("w") as file:
        one = Scribe(file.fileno())
        with monkeypatch.context() as patch:
            patch.setattr(scribe.threading.Thread, "start", refused)
            one.write("alone\n")
        assert (tmp_path / "log").read_text() == "alone\n"


def test_what_the_disk_refuses_is_lost_and_nobody_is_told() -> None:
    with open("/dev/full", "wb", buffering=0) as full:
        one = Scribe(full.fileno())
        one.write("no room\n")
        until_idle(one)


def test_what_is_no_text_is_its_writers_error_and_the_log_goes_on(tmp_path: Path) -> None:
    """So click finds out, at each line, whether a stream is one of bytes."""
    nothing: Any = b""
    with (tmp_path / "log").open("w") as file:
        one = Scribe(file.fileno())
        with pytest.raises(TypeError):
            one.write(nothing)
        one.write("next\n")
        until_idle(one)
    assert (tmp_path / "log").read_text() == "next\n"


def test_a_process_with_a_log_file_has_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(logging.getLogger(), "handlers", [])
    with (tmp_path / "log").open("w") as file:
        monkeypatch.setattr(sys, "stderr", file)
        logs.log_to_stderr("a#0")
        logging.getLogger("blockflow.worker").warning("a line")
        assert isinstance(sys.stderr, Scribe)
        until_idle(sys.stderr)
    assert (tmp_path / "log").read_text().endswith(" WARNING a#0 blockflow.worker: a line\n")


def test_a_log_that_was_begun_goes_by_it_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A Manager's, whose guardian has begun it; its last words are waited for at its end."""
    ended: list[Callable[[], None]] = []
    monkeypatch.setattr(logs.atexit, "register", ended.append)
    with (tmp_path / "log").open("w") as file:
        monkeypatch.setattr(sys, "stderr", file)
        handler, other = logging.StreamHandler(), logging.StreamHandler(io.StringIO())
        monkeypatch.setattr(logging.getLogger(), "handlers", [handler, other])
        logs.wait_for_no_disk(LONG_S)
        one = sys.stderr
        assert isinstance(one, Scribe) and handler.stream is one and other.stream is not one
        assert ended == [one.finish]
        logging.getLogger("blockflow.control").warning("a line")
    assert (tmp_path / "log").read_text() == "a line\n"


LAST = """
import subprocess
import sys
from blockflow.launch import child, scribe

scribe.LAST_S = 60.0
sys.stderr = scribe.Scribe(int(sys.argv[1]))
print("last", file=sys.stderr)
print("said", flush=True)
child.end(3)
"""


def test_last_words_are_waited_for(disk: Disk) -> None:
    words = [sys.executable, "-c", LAST, str(disk.number)]
    with subprocess.Popen(words, stdout=subprocess.PIPE, pass_fds=[disk.number]) as process:
        assert process.stdout is not None and process.stdout.readline() == b"said\n"
        with pytest.raises(subprocess.TimeoutExpired):
            process.wait(0.2)
        assert disk.answers(5) == "last\n"
        assert process.wait(LONG_S) == 3
