"""Nothing is decided by the wall clock, which can be set an hour to and fro at any time.

The syntax trees of all rooms that serve are read; what may look at dates is listed here, each with
its reason. The bench room dates its reports and decides nothing for anybody.
"""

from __future__ import annotations

import ast
import os
import re
from collections import deque
from datetime import UTC, datetime, timedelta
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from blockflow.control import crashes, logfiles, store
from blockflow.control.crashes import CrashBook
from blockflow.control.store import StateStore

PACKAGE = Path(__file__).resolve().parents[2] / "blockflow"
OUTSIDE = "bench"

JUSTIFIED = {
    "control/auth.py": dict.fromkeys(
        ("st_mtime_ns", "st_ctime_ns"), "whether a file has changed: compared for equality alone"
    ),
    "control/crashes.py": {"time.time": "how long ago a crash was, for people"},
    "control/manager.py": {"time.time": "stored beside a sample of figures, for people"},
    "control/stewardship.py": {"datetime.now": "since when the present Manager serves, shown"},
    "control/store.py": {"datetime.now": "stored with an epoch and shown; the order is the file's"},
    "monitor/doctor/gather.py": {"datetime.now": "says that the clock is years off"},
    "repository/convert.py": {"datetime.now": "a manifest's date of making, shown"},
    "repository/manifest.py": {"datetime.now": "a manifest's date of making, shown"},
    "repository/profiles.py": {
        "st_mtime_ns": "which of more than eight profiles of former artifacts goes: none is in use"
    },
}

CLOCKS = {
    "time": frozenset({"time", "time_ns", "localtime", "gmtime", "ctime", "asctime", "strftime"}),
    "datetime": frozenset({"now", "utcnow", "today"}),
    "date": frozenset({"today"}),
    "psutil": frozenset({"boot_time"}),
}
NAMES = frozenset(
    "CLOCK_REALTIME CLOCK_TAI st_mtime st_mtime_ns st_ctime st_ctime_ns st_atime st_atime_ns "
    "getmtime getctime getatime create_time boot_time utcnow".split()
)
MAYBE = re.compile(
    "|".join(
        [rf"\b{m}\W+(?:{'|'.join(sorted(names))})\b" for m, names in CLOCKS.items()]
        + [rf"\bfrom\s+{m}\s+import\b" for m in CLOCKS]
        + [rf"\b(?:{'|'.join(sorted(NAMES))})\b"]
    )
)
"""What a text has in it if its tree has a reading; few have, and only theirs are made."""


def readings(tree: ast.AST) -> list[tuple[int, str]]:
    """(line, what) of everything that looks at the wall clock, or at dates of files by it."""
    out = []
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module in CLOCKS:
            # Under another name nobody would find it.
            names = {a.name for a in node.names if a.name in CLOCKS[node.module]}
            out += [(node.lineno, f"{node.module}.{name}") for name in sorted(names)]
        if not isinstance(node, ast.Attribute):
            continue
        owner = node.value
        last = owner.attr if isinstance(owner, ast.Attribute) else getattr(owner, "id", "")
        if node.attr in CLOCKS.get(last, ()):
            out.append((node.lineno, f"{last}.{node.attr}"))
        elif node.attr in NAMES:
            out.append((node.lineno, node.attr))
    return out


@cache
def found() -> dict[str, dict[str, int]]:
    """File -> what -> line, of all rooms that serve."""
    out: dict[str, dict[str, int]] = {}
    for path in sorted(PACKAGE.rglob("*.py")):
        name = path.relative_to(PACKAGE).as_posix()
        if name.split("/")[0] == OUTSIDE:
            continue
        text = path.read_text(encoding="utf-8")
        if not MAYBE.search(text):
            continue
        for line, what in readings(ast.parse(text)):
            out.setdefault(name, {})[what] = line
    return out


def test_the_wall_clock_is_read_only_where_it_is_justified() -> None:
    surplus = [
        f"blockflow/{name}:{line}: {what}"
        for name, uses in found().items()
        for what, line in uses.items()
        if what not in JUSTIFIED.get(name, {})
    ]
    assert not surplus, "\n" + "\n".join(surplus)


def test_the_list_names_nothing_that_is_gone() -> None:
    here = found()
    gone = [
        f"{name}: {what}"
        for name, uses in JUSTIFIED.items()
        for what in uses
        if what not in here.get(name, {})
    ]
    assert not gone


@pytest.mark.parametrize(
    "source",
    [
        "time.time()",
        "x = (time\n    .time)()",
        "now = clock or time.time_ns",
        "from time import time",
        "datetime.now(UTC)",
        "datetime.datetime.utcnow()",
        "from datetime import datetime\nx = datetime.today()",
        "time.clock_gettime(time.CLOCK_REALTIME)",
        "old = path.stat().st_mtime < 3",
        "os.path.getmtime(path)",
        "process.create_time()",
        "time.strftime('%H')",
    ],
)
def test_a_planted_reading_is_found(source: str) -> None:
    assert MAYBE.search(source) and readings(ast.parse(source))


@pytest.mark.parametrize(
    "source",
    [
        "time.monotonic_ns()",
        "time.perf_counter()",
        "from time import monotonic",
        "time.sleep(1)",
        "datetime.fromisoformat(text)",
        "self.time_ns",
        "time.clock_gettime(time.CLOCK_MONOTONIC)",
    ],
)
def test_other_clocks_pass(source: str) -> None:
    assert not readings(ast.parse(source))


# --- what reads stored dates ----------------------------------------------------------------------


def test_epochs_keep_their_order_when_the_clock_is_set_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hours = iter([0, 1, -1, -2])

    class Jumping:
        @staticmethod
        def now(zone: Any) -> datetime:
            return datetime(2026, 1, 1, 12, tzinfo=UTC) + timedelta(hours=next(hours))

    monkeypatch.setattr(store, "datetime", Jumping)
    with StateStore(tmp_path) as first:
        for epoch in (1, 2, 3):
            first.commit(epoch, {"posted": epoch}, {})
    with StateStore(tmp_path) as again:
        again.commit(4, {"posted": 4}, {})
        past = again.state.history
        assert [p.epoch for p in past] == [1, 2, 3, 4]
        assert [p.when[11:13] for p in past] == ["12", "13", "11", "10"]
        assert (again.state.epoch, again.warning) == (4, "")


def test_a_crash_of_the_future_is_shown_without_its_age(tmp_path: Path) -> None:
    record = {"incarnation": 7, "cause": "killed", "error": None, "work": [], "log": []}
    book = CrashBook(tmp_path, lambda: 10_000.0)
    book._found["a#0"] = deque([crashes._entry(1, {"at": 9_999.0, **record})])
    book._save(crashes._bounded(book._found))
    for now, age in ((10_009.0, 10.0), (6_400.0, None)):
        assert CrashBook(tmp_path, lambda now=now: now).latest("a#0", 0) == [
            {"age_s": age, **record}
        ]


def test_the_newest_logs_are_kept_whatever_their_dates_say(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(logfiles, "_MOST_FILES", 2)
    for n in range(8, 13):
        path = tmp_path / f"w#0.{n}.log"
        path.touch()
        os.utime(path, (1e9 - n, 1e9 - n))  # each was written before its predecessor
    (tmp_path / "other.log").touch()
    logfiles.LogFiles(tmp_path, pytest.fail).prune(())
    assert sorted(p.name for p in tmp_path.iterdir()) == ["w#0.11.log", "w#0.12.log"]
