"""A running system whose managers a test kills, and a client that goes on asking it."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import plain_http
import pytest
from control_rig import save_echoes
from up_rig import up

from blockflow.client.sync import Client
from blockflow.core.errors import BlockFlowError

X = np.arange(4, dtype=np.float32).reshape(1, 4)
AB = {"blocks": ["a", "b"], "tasks": {"t": ["a", "b"]}}
AC = {"blocks": ["a", "c"], "tasks": {"t": ["a", "c"]}}
Start = Callable[..., subprocess.Popen[Any]]
PATIENCE_S = 120.0
LOOK_S = 0.02
PACE_S = 0.005
"""Between two requests of a :class:`Load`: a hundred meet what happens in a second, and the cores
are free for it."""


def furnish(root: Path, slow_ms: int = 150) -> None:
    """Blocks in ``root`` that add 1, 10 and 100, a slow one, and the first topology."""
    adding = {name: {"add": add} for name, add in {"a": 1, "b": 10, "c": 100}.items()}
    save_echoes(root / "blocks", **adding, slow={"row_ms": slow_ms})
    (root / "topology.json").write_text(json.dumps(AB))


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A folder that is furnished."""
    furnish(tmp_path)
    return tmp_path


@dataclass
class Up:
    """A running system, seen from outside."""

    process: subprocess.Popen[str]
    ready: dict[str, Any]
    errors: Path

    @property
    def address(self) -> str:
        return str(self.ready["clients"][0])

    def status(self) -> dict[str, Any]:
        """Asks until it is answered: a connection may be cut by the death of its server."""
        end = time.monotonic() + PATIENCE_S
        while True:
            try:
                return dict(plain_http.get(self.ready["rest"] + "/v1/status", timeout=60).json())
            except httpx.TransportError:
                assert time.monotonic() < end and self.process.poll() is None, self.log()
                time.sleep(0.01)

    def until(self, test: Callable[[dict[str, Any]], Any]) -> dict[str, Any]:
        end = time.monotonic() + PATIENCE_S
        while True:
            status = self.status()
            if test(status):
                return status
            assert time.monotonic() < end, (status, self.log())
            time.sleep(LOOK_S)

    def kill_manager(self) -> None:
        status = self.status()
        os.kill(status["manager"]["pid"], signal.SIGKILL)

    def taken_over(self, restarts: int) -> dict[str, Any]:
        """Status once so many managers have died and all is well again."""
        return self.until(lambda s: s["manager"]["restarts"] == restarts and s["ready"])

    def post(self, body: dict[str, Any], *, wait: bool = True) -> None:
        url = f"{self.ready['rest']}/v1/system-update?wait={str(wait).lower()}"
        answer = plain_http.post(url, json=body, timeout=60)
        assert answer.status_code in (200, 202), answer.text

    def log(self) -> str:
        return self.errors.read_text()


@contextmanager
def started(
    root: Path,
    env: Mapping[str, str] | None = None,
    before: Sequence[str] = (),
    start: Start = subprocess.Popen,
) -> Iterator[Up]:
    """``before`` and ``start``: of :func:`up_rig.up`."""
    topology = str(root / "topology.json")
    with up(root, "--topology", topology, env=env, before=before, start=start) as (process, ready):
        yield Up(process, ready, root / "err")


CRASHES = 4
"""Managers of one guardian that may die within a minute; with one more it gives up."""


class Relay:
    """A system for tests that follow each other: each takes it over from the one before, and
    another one only where that has ended it, or left it in a bad way, or has no crashes left."""

    def __init__(self, root: Path, env: Mapping[str, str], start: Start) -> None:
        self._root = root
        self._env = env
        self._start = start
        self._stack = ExitStack()
        self._it: Up | None = None

    def take(self, crashes: int = 0) -> Up:
        """It serves the first topology, and so many managers of it may die."""
        if self._it is None or not self._fit(self._it, crashes):
            self.close()
            shutil.rmtree(self._root / "state", ignore_errors=True)
            self._it = self._stack.enter_context(started(self._root, self._env, start=self._start))
            assert self._it.status()["manager"]["restarts"] == 0
        return self._it

    def _fit(self, it: Up, crashes: int) -> bool:
        if it.process.poll() is not None:
            return False
        status = it.status()
        if not status["ready"] or status["manager"]["restarts"] + crashes > CRASHES:
            return False
        it.post(AB)
        return True

    def close(self) -> None:
        self._it = None
        self._stack.close()


def members(status: dict[str, Any]) -> dict[str, tuple[int, int]]:
    """Name -> pid and incarnation, of workers and Dispatcher."""
    found = [*status["workers"], status["dispatcher"]]
    return {m["name"]: (m["pid"], m["incarnation"]) for m in found}


@dataclass
class Load:
    """A client that asks again as soon as it is answered, but for a breath, and keeps count."""

    address: str
    answered: int = 0
    failed: list[str] = field(default_factory=list)
    sums: set[float] = field(default_factory=set)

    def __enter__(self) -> Load:
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join(PATIENCE_S)
        assert not self._thread.is_alive()

    def _run(self) -> None:
        with Client(self.address) as client:
            while not self._stop.wait(PACE_S):
                try:
                    value = client.infer("t", X, deadline_s=30).value
                except BlockFlowError as e:
                    self.failed.append(str(e))
                else:
                    self.sums.add(float((value - X)[0, 0]))
                    self.answered += 1

    def more(self, count: int = 20) -> None:
        """Until it has got so many further answers."""
        goal, end = self.answered + count, time.monotonic() + PATIENCE_S
        while self.answered < goal:
            assert time.monotonic() < end, self.failed
            time.sleep(0.005)
