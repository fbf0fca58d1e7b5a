"""LogFiles: what launched processes write, in files that are bounded in size and number.

A process writes to its own (stdout and stderr, appended to); the control plane makes it before the
launch, cuts it, removes it, and reads its last lines when the process has died. It does all of
that without waiting for a disk that does not answer: it has the living to look after.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterable
from contextlib import suppress
from functools import partial
from pathlib import Path

from blockflow.control.disk import Glance
from blockflow.control.endings import ABORTED, FATAL

log = logging.getLogger("blockflow.control")

TAIL_LINES = 10
_TAIL_BYTES = 16 * 1024
_LINE_CHARS = 300
_MOST_FILES = 100
_PRUNED_EVERY = 20
"""Launches: where hundreds are ordered at once, not each one reads a folder of hundreds."""

MOST_BYTES = 8 * 1024 * 1024
"""Of a log; one that has more is cut."""

_KEPT_BYTES = 1024 * 1024
"""The end of it that is left then."""

_LOOK_NS = 2_000_000_000


class LogFiles:
    """Owned by the Manager's thread.

    Args:
        folder: where they are; made if need be, also later where the one that it is in exists.
        warn: told, once, that a process has to do without.
    """

    def __init__(self, folder: Path, warn: Callable[[str], None]) -> None:
        self._folder = folder
        self._warn: Callable[[str], None] | None = warn
        self._looked_ns: int | None = None
        self._launches = 0
        self._disk = Glance()
        with suppress(OSError):  # making a file in it will say what is wrong
            folder.mkdir(parents=True, exist_ok=True, mode=0o700)

    def make(self, path: str, name: str) -> bool:
        """Make a log file for the process ``name`` whose launch order says ``path``.

        Returns:
            False when there cannot be one: a disk without room, or without a word, is no reason
            not to replace a process that has died.
        """
        why = self._disk.at(partial(_made, self._folder, path), "its disk does not answer")
        if not why:
            return True
        text = f"{name} has no log file: {why} ({path})"
        if self._warn is not None:
            self._warn(f"{text}; what it says goes where the control plane's own log goes")
            self._warn = None
        else:
            log.warning("%s", text)
        return False

    def prune(self, in_use: Iterable[str]) -> None:
        """Call it before each launch; at every 20th it removes the oldest of those that nobody
        writes to, beyond a number."""
        self._launches += 1
        if self._launches % _PRUNED_EVERY != 1:
            return
        self._disk.at(partial(_prune, self._folder, set(in_use)), None)

    def look(self, paths: Iterable[str], now_ns: int) -> None:
        """Cut those of ``paths`` that have grown too long; called often, looks every 2 s."""
        if self._looked_ns is None or now_ns - self._looked_ns >= _LOOK_NS:
            self._looked_ns = now_ns
            self._disk.at(partial(_cut_all, list(paths)), None)

    def tail(self, path: str) -> tuple[str, ...]:
        """As :func:`tail`."""
        return self._disk.at(partial(tail, path), ())

    def closed(self, path: str, status: int) -> None:
        """Nobody writes to it any more: an empty one without a reason to be is removed."""
        self._disk.at(partial(_close, path, status), None)


def _made(folder: Path, path: str) -> str:
    """Make a log file; why not, '' = it is there."""
    with suppress(OSError):  # somebody may have removed it, to be rid of logs
        folder.mkdir(exist_ok=True, mode=0o700)
    flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW | os.O_CLOEXEC
    try:
        os.close(os.open(path, flags, 0o600))
    except OSError as e:
        return os.strerror(e.errno or 0)
    return ""


def _prune(folder: Path, kept: set[str]) -> None:
    with suppress(OSError):
        # By incarnation and not by date: a clock that was set back makes the newest the oldest.
        logs = sorted(folder.glob("*.log"), key=_incarnation)
        for path in [p for p in logs if str(p) not in kept][:-_MOST_FILES]:
            path.unlink(missing_ok=True)


def _cut_all(paths: Iterable[str]) -> None:
    for path in paths:
        cut(path, MOST_BYTES)


def _close(path: str, status: int) -> None:
    if status == 0:
        with suppress(OSError):
            if os.path.getsize(path) == 0:
                os.unlink(path)
    cut(path, _KEPT_BYTES)


def cut(path: str, most: int) -> None:
    """Leave the end of a log that has more than ``most`` bytes.

    In place, for the process that writes to it appends: its next line comes after what is left. A
    line that it writes meanwhile may be lost.
    """
    with suppress(OSError):
        if os.path.getsize(path) <= most:
            return
        flags = os.O_RDWR | os.O_APPEND | os.O_NOFOLLOW | os.O_CLOEXEC
        with open(os.open(path, flags), "rb+") as f:
            size = os.fstat(f.fileno()).st_size
            f.seek(size - _KEPT_BYTES)
            end = f.read(_KEPT_BYTES).partition(b"\n")[2]
            f.truncate(0)
            f.write(b"[%d earlier bytes were cut off]\n" % (size - len(end)) + end)


def tail(path: str) -> tuple[str, ...]:
    """The lines of a log file that say how its process ended: the last ones, or those of the fatal
    error that the interpreter reported, after what was said just before an abort; bounded in
    number and length; () when it cannot be read."""
    if not path:
        return ()
    try:
        with open(path, "rb") as f:
            f.seek(max(0, os.fstat(f.fileno()).st_size - _TAIL_BYTES))
            text = f.read(_TAIL_BYTES).decode("utf-8", "replace")
    except OSError:
        return ()
    lines = text.splitlines()
    fatal = [i for i, line in enumerate(lines) if line.startswith(FATAL)]
    # The innermost calls come first, and a list of all loaded modules last.
    said = [line for line in lines[fatal[-1] :] if line] if fatal else []
    if said[:1] == [ABORTED] and fatal[-1]:
        said.insert(0, lines[fatal[-1] - 1])  # by whoever has aborted
    return tuple(line[:_LINE_CHARS] for line in said[:TAIL_LINES] or lines[-TAIL_LINES:])


def _incarnation(log: Path) -> int:
    """Of the life whose log it is (``name.incarnation.log``); 0 = it is none of ours."""
    number = log.stem.rpartition(".")[2]
    return int(number) if number.isdecimal() else 0
