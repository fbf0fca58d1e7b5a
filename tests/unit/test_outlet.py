"""A standard stream that waits for its reader for a moment only."""

from __future__ import annotations

import fcntl
import io
import logging
import os
import pty
import re
import select
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace

import pytest

from blockflow.launch import outlet
from blockflow.launch.outlet import Outlet, wait_for_nobody

SOON_S = 5.0
"""Far more than the patience, far less than for ever."""
CTRL_S, CTRL_Q = b"\x13", b"\x11"
LINE = "x" * 99 + "\n"


class Reader:
    """The other end of a stream, and the number that is written to."""

    def __init__(self, kind: str) -> None:
        if kind == "socket":
            one, other = socket.socketpair()
            self.fd, self.number = one.detach(), other.detach()
        elif kind == "terminal":
            self.fd, self.number = pty.openpty()
        else:
            self.fd, self.number = os.pipe()
            fcntl.fcntl(self.number, fcntl.F_SETPIPE_SZ, 4096)
        os.set_blocking(self.fd, False)

    def read(self, *, lines: int = 0) -> str:
        """What is there, once it is so many lines: a terminal's come a moment later."""
        found, end = b"", time.monotonic() + SOON_S
        while True:
            with suppress(BlockingIOError):
                while data := os.read(self.fd, 65536):
                    found += data
            if found.count(b"\n") >= lines:
                return found.decode().replace("\r\n", "\n")
            assert time.monotonic() < end, found
            select.select([self.fd], [], [], 0.05)

    def press(self, key: bytes) -> None:
        """Ctrl-S or Ctrl-Q at a terminal; returns once it counts."""
        os.write(self.fd, key)
        end = time.monotonic() + SOON_S
        while bool(select.select([], [self.number], [], 0)[1]) is (key == CTRL_S):
            assert time.monotonic() < end
            time.sleep(0.001)

    def close(self) -> None:
        os.close(self.fd)
        os.close(self.number)


@pytest.fixture(params=["pipe", "pipe of others", "socket", "terminal"])
def reader(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Reader]:
    if request.param == "pipe of others":  # which cannot be opened once more

        def refused(path: str, flags: int) -> int:
            raise PermissionError(13, "Permission denied", path)

        monkeypatch.setattr(outlet.os, "open", refused)
    made = Reader(request.param.partition(" ")[0])
    yield made
    made.close()


def fill(stream: Outlet) -> tuple[int, float]:
    """Write until something is lost; how many lines were taken, and how long it took."""
    begin, lines = time.monotonic(), 0
    while not stream._lost:
        stream.write(LINE)
        lines += 1
    return lines - 1, time.monotonic() - begin


def test_nobody_reads_and_nobody_waits(reader: Reader) -> None:
    stream = Outlet(reader.number)
    taken, took_s = fill(stream)
    assert taken > 0 and took_s < SOON_S
    begin = time.monotonic()
    for _ in range(2000):
        stream.write(LINE)
    assert time.monotonic() - begin < SOON_S, "it waits for each line"
    said = reader.read(lines=taken)
    assert set(said.splitlines()[:taken]) == {LINE.strip()}
    stream.write("after\n")
    text = reader.read(lines=2)
    assert re.search(r"^blockflow: 2001 lines are lost here: .*\nafter\n$", text, re.MULTILINE)
    stream.release()


def test_flags_of_the_descriptor_are_left_alone(reader: Reader) -> None:
    stream = Outlet(reader.number)
    fill(stream)
    assert os.get_blocking(reader.number)
    stream.release()


def test_all_that_is_read_comes_whole_and_in_order(reader: Reader) -> None:
    stream = Outlet(reader.number)
    sent = [f"{n} Ω\n" for n in range(300)]
    got = ""
    for line in sent:
        stream.write(line)
        got += reader.read()
    got += reader.read(lines=300 - got.count("\n"))
    assert got == "".join(sent)
    stream.release()


def test_a_terminal_that_is_stopped_goes_on_where_it_was() -> None:
    reader = Reader("terminal")
    stream = Outlet(reader.number)
    stream.write("before\n")
    assert reader.read(lines=1) == "before\n"
    reader.press(CTRL_S)
    begin = time.monotonic()
    stream.write("lost\n")
    assert time.monotonic() - begin < SOON_S
    reader.press(CTRL_Q)
    stream.write("after\n")
    told = "blockflow: a line is lost here: nobody has read this output\nafter\n"
    assert reader.read(lines=2) == told
    stream.release()
    reader.close()


def test_patience_is_spent_and_comes_back_slowly(monkeypatch: pytest.MonkeyPatch) -> None:
    now, asked = [100.0], list[int]()
    monkeypatch.setattr(outlet, "time", SimpleNamespace(monotonic=lambda: now[0]))
    reader = Reader("pipe")
    stream = Outlet(reader.number)

    def nobody(timeout_ms: int) -> bool:
        asked.append(timeout_ms)
        now[0] += timeout_ms / 1000
        return False

    monkeypatch.setattr(stream, "_takes", nobody)
    for pause_s, patience_ms in ((0.0, [500]), (2.5, [250]), (0.005, []), (99.0, [500])):
        now[0] += pause_s
        for _ in range(2):  # the first is torn amid its line, the other is not waited for
            stream.write("y" * 5000 + "\n")
        assert asked == patience_ms
        asked.clear()
        assert reader.read() == "y" * 4096
        stream.write("after\n")
        told = "\nblockflow: 2 lines are lost here: nobody has read this output\nafter\n"
        assert reader.read() == told
    stream.release()
    reader.close()


def test_a_slow_reader_loses_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Who waits is let go when something is read."""
    reader = Reader("pipe")
    stream = Outlet(reader.number)
    said: list[str] = []
    takes = stream._takes

    def slowly(timeout_ms: int) -> bool:
        said.append(reader.read())
        return takes(timeout_ms)

    monkeypatch.setattr(stream, "_takes", slowly)
    for n in range(1000):
        stream.write(f"{n:08}\n")
    stream.write("y" * 20_000 + "\n")  # more than the pipe holds
    text = "".join(said) + reader.read()
    assert text == "".join(f"{n:08}\n" for n in range(1000)) + "y" * 20_000 + "\n"
    assert len(said) > 2 and not stream._lost
    stream.release()
    reader.close()


def test_a_reader_that_is_gone_is_an_error_and_what_comes_in_its_place_is_written_to(
    tmp_path: Path,
) -> None:
    reader = Reader("pipe")
    stream = Outlet(reader.number)
    os.close(reader.fd)
    with pytest.raises(BrokenPipeError):
        stream.write("x\n")
    with (tmp_path / "instead").open("w") as f:
        os.dup2(f.fileno(), reader.number)
    stream.write("y\n")
    assert (tmp_path / "instead").read_text() == "y\n"
    os.close(reader.number)


CHILD = """
import logging, sys
from blockflow.launch.outlet import Outlet, wait_for_nobody
logging.basicConfig(format="%(message)s")
wait_for_nobody()
wait_for_nobody()
print(type(sys.stdout).__name__, type(sys.stderr).__name__, file=sys.__stdout__)
logging.warning("logged")
sys.stderr.write("said\\n")
raise SystemExit("ended")
"""


@pytest.mark.parametrize("kind", ["pipe", "file"])
def test_of_a_process_those_are_replaced_that_may_block(kind: str, tmp_path: Path) -> None:
    with (tmp_path / "err").open("w+") as f:
        done = subprocess.run(
            [sys.executable, "-c", CHILD],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE if kind == "pipe" else f,
            text=True,
            timeout=60,
            check=False,
        )
    assert done.stdout == f"Outlet {'Outlet' if kind == 'pipe' else 'TextIOWrapper'}\n"
    errors = done.stderr if kind == "pipe" else (tmp_path / "err").read_text()
    assert errors == "logged\nsaid\nended\n"


def test_what_is_no_file_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    mine = io.StringIO()
    monkeypatch.setattr(sys, "stderr", mine)
    handler = logging.StreamHandler(mine)
    monkeypatch.setattr(logging.getLogger(), "handlers", [handler])
    wait_for_nobody()
    assert sys.stderr is mine and handler.stream is mine
    other = io.StringIO()
    monkeypatch.setattr(sys, "stdout", other)
    handlers = [handler, logging.NullHandler(), logging.StreamHandler(other)]
    monkeypatch.setattr(logging.getLogger(), "handlers", handlers)
    monkeypatch.setattr(outlet, "_may_block", lambda stream, number: number == 2)
    wait_for_nobody()  # though the first of them stays
    assert isinstance(sys.stderr, Outlet) and handler.stream is sys.stderr
    assert sys.stdout is other and handlers[2].stream is other
    sys.stderr.release()
