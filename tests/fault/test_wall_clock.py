"""Somebody sets the clock an hour forward, and back, while a system serves.

All of its processes are started with a wall clock that the test moves; the monotonic one goes on.
Deadlines, heartbeats, back-off and time-outs must not notice, nor a control plane that finds a
state from its future.
"""

from __future__ import annotations

import os
import signal
import struct
import time
from collections.abc import Callable
from datetime import datetime
from pathlib import Path
from typing import Any

import numpy as np
import plain_http
import pytest
from control_rig import echo_repository
from dispatcher_rig import wait_until
from up_rig import family, gone, up
from warm_rig import Warm

from blockflow.client import Client

HOUR_S = 3600.0
QUIET_S = 1.5
"""Longer than a process may be silent before it is suspected."""

PACE_S = 0.01
"""Between requests, so that they are not all that the cores do."""

PATIENCE_S = 60.0
X = np.arange(4, dtype=np.float32).reshape(1, 4)

SITE = """
import datetime, mmap, os, struct, sys, time

with open(os.environ["SHIFT_FILE"], "rb") as f:
    page = mmap.mmap(f.fileno(), 8, access=mmap.ACCESS_READ)
wall, wall_ns, real = time.time, time.time_ns, datetime.datetime


def ahead():
    return struct.unpack("d", page[:8])[0]


class Shifted(datetime.datetime):
    @classmethod
    def now(cls, tz=None):
        return datetime.datetime.fromtimestamp(time.time(), tz)


def shift():
    time.time = lambda: wall() + ahead()
    time.time_ns = lambda: wall_ns() + int(ahead() * 1e9)
    Shifted.__name__, datetime.datetime = "datetime", Shifted
    # Who is forked, and not executed, has imported them already.
    instead = {"time": (wall, time.time), "time_ns": (wall_ns, time.time_ns)}
    instead["datetime"] = real, Shifted
    for module in list(sys.modules.values()):
        names = getattr(module, "__dict__", {})
        for name, (old, new) in instead.items():
            if names.get(name) is old:
                names[name] = new


if real.__module__ != "sitecustomize":  # else it is forked from who has done so
    Shifted.__module__ = "sitecustomize"
    shift()
with open(os.path.join(os.environ["SHIFT_SEEN"], str(os.getpid())), "w"):
    pass
"""


class Clock:
    """The wall clock of the processes that are started with :attr:`environment`."""

    def __init__(self, folder: Path) -> None:
        self._file = folder / "shift"
        self.seen = folder / "seen"
        site = folder / "site"
        site.mkdir()
        self.seen.mkdir()
        (site / "sitecustomize.py").write_text(SITE)
        self.set(0.0)
        self.environment = {
            "SHIFT_FILE": str(self._file),
            "SHIFT_SEEN": str(self.seen),
            "PYTHONPATH": os.pathsep.join(filter(None, [str(site), os.environ.get("PYTHONPATH")])),
        }

    def set(self, ahead_s: float) -> None:
        with self._file.open("r+b" if self._file.exists() else "wb") as f:
            f.write(struct.pack("d", ahead_s))


class Watch:
    """A running system, looked at from outside."""

    def __init__(self, ready: dict[str, Any], client: Client) -> None:
        self._rest = ready["rest"]
        self.client = client

    def get(self, path: str) -> Any:
        return plain_http.get(self._rest + path, timeout=PATIENCE_S).json()

    def workers(self) -> dict[str, dict[str, Any]]:
        found = self.get("/v1/workers")
        return {w["name"]: w for w in (*found["workers"], found["dispatcher"])}

    def post(self, path: str, body: Any = None) -> Any:
        answer = plain_http.post(self._rest + path, json=body, timeout=PATIENCE_S)
        assert answer.is_success, answer.text
        return answer.json()

    def serves(self) -> None:
        assert np.array_equal(self.client.infer("t", X, deadline_s=30).value, X)

    def dated(self, epoch: int) -> float:
        """How far the date of an epoch is ahead of the real clock, in seconds."""
        (when,) = (e["when"] for e in self.get("/v1/history")["epochs"] if e["epoch"] == epoch)
        return datetime.fromisoformat(when).timestamp() - time.time()

    def replaced(self, old: dict[str, Any]) -> Callable[[], bool]:
        def test() -> bool:
            new = self.workers()[old["name"]]
            return new["incarnation"] > old["incarnation"] and new["state"] == "ready"

        return test


@pytest.mark.timeout(400)  # on a machine that others share
def test_an_hour_forward_and_back(tmp_path: Path, warm: Warm) -> None:
    echo_repository(tmp_path / "blocks")
    clock = Clock(tmp_path)
    bodies = [{"blocks": ["a", b], "tasks": {"t": ["a", b]}} for b in "bc"]
    with up(tmp_path, env=clock.environment, start=warm.popen) as (process, ready):
        with Client(ready["clients"][0]) as client:
            watch = Watch(ready, client)
            watch.post("/v1/system-update", bodies[0])
            watch.serves()
            template = watch.get("/v1/status")["control"]["template"]["pid"]
            # The others are forked from the template.
            assert {str(process.pid), str(template)} <= set(os.listdir(clock.seen))
            for n, shift in enumerate((HOUR_S, -HOUR_S), 1):
                before = {name: w["incarnation"] for name, w in watch.workers().items()}
                future = client.submit("t", X, deadline_s=30)
                clock.set(shift)
                assert np.array_equal(future.result().value, X)
                end = time.monotonic() + QUIET_S
                while time.monotonic() < end:
                    watch.serves()
                    time.sleep(PACE_S)
                now = watch.workers()
                assert {name: w["incarnation"] for name, w in now.items()} == before
                # Back-off, time-outs of starting, readiness and an update after the jump.
                os.kill(now["a#0"]["pid"], signal.SIGKILL)
                wait_until(watch.replaced(now["a#0"]), PATIENCE_S)
                watch.serves()
                watch.post("/v1/system-update", bodies[n % 2])
                watch.serves()
                assert abs(watch.dated(n + 1) - shift) < HOUR_S / 2  # it has moved, for the rest
        children = family(process.pid)
        process.kill()
        process.wait(PATIENCE_S)
        assert gone(children, Path(ready["run_dir"]))
    clock.set(-2 * HOUR_S)  # what is stored is from the future now
    with up(tmp_path, env=clock.environment, start=warm.popen) as (process, ready):
        assert ready["epoch"] == 3
        with Client(ready["clients"][0]) as client:
            watch = Watch(ready, client)
            watch.serves()
            assert [e["epoch"] for e in watch.get("/v1/history")["epochs"]] == [3, 2, 1]
            watch.post("/v1/system-update", bodies[1])
            watch.serves()
        children = family(process.pid)
        process.terminate()
        assert process.wait(PATIENCE_S) == 0
        assert gone(children, Path(ready["run_dir"]))
