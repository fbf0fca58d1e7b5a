"""CrashBook: the latest crashes of every process, kept beyond the end of the control plane.

They are for people who look for a cause, and nothing is decided by them. So they have a file of
their own beside the state: what cannot be read is left out with a word in the log, what cannot be
written is written next time, and neither a start nor a replacement ever waits for the disk.
"""

from __future__ import annotations

import json
import logging
import os
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from blockflow.control.crew import Crew
from blockflow.control.disk import Glance
from blockflow.control.documents import canonical_json, read_sealed, seal_canonical, write_file
from blockflow.control.fleet import CRASHES_KEPT, DISPATCHER_NAME, NO_ROOM, Crash
from blockflow.core.scarcity import AWAY

log = logging.getLogger("blockflow.control")

FILE = "crashes.json"
FORMAT = 1
MAX_BYTES = 1024 * 1024
MAX_NAMES = 256
"""Processes whose crashes are remembered; those with the latest ones."""

_TYPES: Mapping[str, type | tuple[type, ...]] = {
    "at": (int, float),
    "incarnation": int,
    "cause": str,
    "error": (dict, type(None)),
    "work": list,
    "log": list,
}

Record = dict[str, Any]

_AROUND = 200
"""Bytes of the file beside its body."""


@dataclass(frozen=True, slots=True)
class Entry:
    """A crash.

    Attributes:
        at_ns: when it was by the monotonic clock. None: under an earlier control plane.
        record: what is stored.
        text: this as canonical JSON. All others are stored again with each crash, and the
            Manager's thread would take a tenth of a second to write down those of 256 processes.
    """

    at_ns: int | None
    record: Record
    text: str


def _entry(at_ns: int | None, record: Record) -> Entry:
    return Entry(at_ns, record, canonical_json(record))


def crash_record(crash: Crash) -> Record:
    """What is shown of a crash, and stored, but for when it was."""
    return {
        "incarnation": crash.incarnation,
        "cause": crash.cause,
        "error": crash.error.to_dict() if crash.error is not None else None,
        "work": [
            {
                "block": w.block,
                "took_ms": w.took_ms,
                "requests": w.requests,
                "tickets": list(w.tickets),
            }
            for w in crash.work
        ],
        "log": list(crash.log_tail),
    }


def _no_room(record: Record) -> bool:
    """As :attr:`~blockflow.control.fleet.Crash.no_room`, of what is stored."""
    error = record["error"] or {}
    details = error.get("details")
    away = isinstance(details, dict) and details.get(AWAY) is True
    return away or error.get("code") == NO_ROOM


class CrashBook:
    """The latest crashes by name, of this control plane and of those before it. Replicas come and
    go under one name, and so do control planes: what is told is the same.

    Args:
        folder: the state directory, which must be locked.
        clock: seconds of the wall clock: the monotonic one does not outlive the machine's start.
    """

    def __init__(self, folder: Path, clock: Callable[[], float] = time.time) -> None:
        self._path = folder / FILE
        self._clock = clock
        self._disk = Glance()
        self._found: dict[str, deque[Entry]] = self._load()

    def take(self, crew: Crew, incarnation: int, now_ns: int) -> None:
        """The death of ``incarnation`` was judged: if ``crew`` calls it a crash, keep it.

        Args:
            crew: it knows what it was.
            incarnation: of the dead process.
            now_ns: monotonic clock.
        """
        known = {DISPATCHER_NAME: crew.dispatcher_crash}
        known |= {r.name: r.crash for r in crew.fleet}
        given_up = {r.name: r.given_up for r in crew.fleet}
        for name, crash in known.items():
            if crash is not None and crash.incarnation == incarnation:
                log.warning("%s (incarnation %d): %s", name, incarnation, crash.cause)
                if why := given_up.get(name):
                    log.warning("%s is not restarted: %s", name, why)
                at = self._clock() - (now_ns - crash.at_ns) / 1e9
                found = self._found.setdefault(name, deque(maxlen=CRASHES_KEPT))
                if crash.no_room and found and _no_room(found[0].record):
                    found.popleft()  # as :func:`~blockflow.control.fleet.remember`
                found.appendleft(_entry(crash.at_ns, {"at": at, **crash_record(crash)}))
                if len(self._found) > MAX_NAMES:  # in the file there are no more either
                    del self._found[min(self._found, key=lambda n: _latest(self._found[n]))]
                self._disk.at(partial(self._save, _bounded(self._found)), None)

    def latest(self, name: str, now_ns: int) -> list[Record]:
        """The latest crashes of all that had this name, under whichever control plane, newest
        first, as they are shown. Of one before this control plane ``age_s`` is None where the
        clock has been set back behind it since: nobody knows how long ago it was.

        Args:
            name: of a replica, or of the Dispatcher.
            now_ns: monotonic clock.
        """
        now, shown = self._clock(), []
        for e in self._found.get(name, ()):
            age = now - e.record["at"] if e.at_ns is None else (now_ns - e.at_ns) / 1e9
            told = {k: value for k, value in e.record.items() if k != "at"}
            shown.append({"age_s": round(age, 3) if age >= 0 else None} | told)
        return shown

    def _save(self, content: bytes) -> None:
        """Best effort, and without waiting for the disk: a file that a power failure tears is
        known by its checksum."""
        temp = self._path.with_name(f".{FILE}.new")
        try:
            write_file(temp, content, sync=False)
            os.replace(temp, self._path)
        except OSError as e:
            with suppress(OSError):
                temp.unlink()
            log.warning("%s cannot be written: %s", self._path, e.strerror or e)

    def _load(self) -> dict[str, deque[Entry]]:
        try:
            _, body = read_sealed(self._path, MAX_BYTES, (FORMAT,))
            return {
                name: deque((_entry(None, r) for r in _records(found)), maxlen=CRASHES_KEPT)
                for name, found in body.items()
            }
        except FileNotFoundError:
            return {}
        except (OSError, ValueError) as e:
            log.warning("%s is left out, earlier crashes are forgotten: %s", self._path, e)
            return {}


def _records(found: Any) -> list[Record]:
    """Raises ValueError when these are no crashes."""
    if type(found) is not list or len(found) > CRASHES_KEPT:
        raise ValueError("not a list of crashes")
    for record in found:
        if type(record) is not dict or record.keys() != _TYPES.keys():
            raise ValueError("a crash has other fields")
        for field, kind in _TYPES.items():
            if not isinstance(record[field], kind):
                raise ValueError(f"{field} of a crash is {record[field]!r:.80}")
    return found


def _bounded(found: Mapping[str, Sequence[Entry]]) -> bytes:
    """The file's content: of too many the processes that have crashed long ago are left out."""
    left = MAX_BYTES - _AROUND
    kept: dict[str, str] = {}
    for name in sorted(found, key=lambda n: _latest(found[n]), reverse=True)[:MAX_NAMES]:
        kept[name] = f"{json.dumps(name)}:[{','.join(e.text for e in found[name])}]"
        left -= len(kept[name]) + 1
        if left < 0:
            del kept[name]
            break
    return seal_canonical("{" + ",".join(kept[n] for n in sorted(kept)) + "}", FORMAT)


def _latest(entries: Iterable[Entry]) -> float:
    return max((float(e.record["at"]) for e in entries), default=0.0)
