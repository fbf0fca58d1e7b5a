"""Server: a BlockFlow system started as a user would start it, by ``blockflow up``."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Protocol, Self

import psutil

from blockflow.core.errors import make_error
from blockflow.launch.process import die_with

KEYS_VARIABLE = "BLOCKFLOW_KEYS"
START_S = 60.0
STOP_S = 20.0
_POLL_S = 0.02
_LOG_LINES = 15


class Rest(Protocol):
    """What the demo asks of a REST client: JSON in and out, typed errors."""

    def get(self, path: str) -> Any: ...

    def post(self, path: str, body: Any = None, *, timeout_s: float | None = None) -> Any: ...


Connect = Callable[[str], Rest]
"""Makes a REST client for a base address."""


@dataclass(frozen=True, slots=True)
class Leftovers:
    """What was still there after the end; nothing, if all is well."""

    processes: tuple[str, ...]
    files: tuple[str, ...]

    def __bool__(self) -> bool:
        return bool(self.processes or self.files)


class Server:
    """One ``blockflow up`` in a process of its own, with its state in a folder of the caller's.

    Args:
        state_dir: for the state and the log.
        connect: makes the REST client.
        rest_port: 0 lets the system choose.
        client_port: likewise, for the SDK.
        outlive: whether the system shall go on when this process ends.
    """

    def __init__(
        self,
        repository: Path,
        state_dir: Path,
        connect: Connect,
        *,
        rest_port: int = 0,
        client_port: int = 0,
        outlive: bool = False,
    ) -> None:
        self._command = [
            *(sys.executable, "-m", "blockflow", "up", "--json"),
            *("--repository", str(repository), "--state-dir", str(state_dir / "state")),
            *("--port", str(rest_port), "--client-port", str(client_port)),
        ]
        self._connect = connect
        self._outlive = outlive
        self._output = state_dir / "up.out"
        self.log = state_dir / "up.log"
        self._process: subprocess.Popen[bytes] | None = None
        self._seen: dict[int, psutil.Process] = {}
        self.rest_url = ""
        self.client_address = ""
        self.run_dir = Path()
        self.pid = 0

    def start(self) -> None:
        """Start and wait for the announcement.

        Raises:
            SystemError_: NOT_RUNNING with the log's last lines when it ends or stays silent.
        """
        tie = None if self._outlive else partial(die_with, os.getpid(), signal.SIGTERM)
        # Files, not pipes: a system that outlives this process must not lose its outputs.
        with self._output.open("wb") as out, self.log.open("wb") as err:
            self._process = subprocess.Popen(
                self._command,
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=err,
                # The demo's own system is plain, whatever keys the user's systems have.
                env={k: v for k, v in os.environ.items() if k != KEYS_VARIABLE},
                # A session of its own: Ctrl-C reaches the demo alone, which then stops it in order.
                start_new_session=True,
                preexec_fn=tie,
            )
        self.pid = self._process.pid
        ready = self._announcement(self._process)
        self.rest_url = str(ready["rest"])
        tcp = [a for a in ready["clients"] if str(a).startswith("tcp://")]
        self.client_address = str((tcp or ready["clients"])[0])
        self.run_dir = Path(ready["run_dir"])
        self.note_processes()

    @property
    def rest(self) -> Rest:
        """A REST client of the running system."""
        return self._connect(self.rest_url)

    def stop(self) -> None:
        """Ask it to end, by REST, then by signals; nothing when it is not running or released."""
        process = self._process
        if process is None:
            return
        self._process = None
        self.note_processes()
        if self.rest_url and process.poll() is None:
            # Whatever is wrong with REST: the signals below end it as well.
            with suppress(Exception):
                self.rest.post("/v1/shutdown")
                process.wait(STOP_S)
        for stop in (process.terminate, process.kill):
            if process.poll() is None:
                stop()
                with suppress(subprocess.TimeoutExpired):
                    process.wait(STOP_S)

    def release(self) -> None:
        """Let go of it: it runs on and is this process's business no more."""
        self._process = None

    def note_processes(self) -> None:
        """Remember the system's processes, so that :meth:`leftovers` can look for them later."""
        with suppress(psutil.Error):
            root = psutil.Process(self.pid)
            for process in (root, *root.children(recursive=True)):
                self._seen[process.pid] = process

    def leftovers(self, patience_s: float = 5.0) -> Leftovers:
        """What of the system is still there, after some patience."""
        until = time.monotonic() + patience_s
        while (left := self._left()) and time.monotonic() < until:
            time.sleep(_POLL_S)
        return left

    def _left(self) -> Leftovers:
        # psutil compares creation times: a pid used again by somebody else is not ours.
        alive = [p for p in self._seen.values() if p.is_running() and not is_zombie(p)]
        names = tuple(f"{p.pid} {_name(p)}" for p in alive)
        there = bool(self.run_dir.name) and self.run_dir.exists()
        return Leftovers(names, (str(self.run_dir),) if there else ())

    def _announcement(self, process: subprocess.Popen[bytes]) -> dict[str, Any]:
        until = time.monotonic() + START_S
        while True:
            ended = process.poll() is not None
            for line in self._output.read_text(encoding="utf-8").splitlines(keepends=True):
                found = _ready(line)
                if found is not None:
                    return found
            if ended or time.monotonic() > until:
                raise make_error(
                    "NOT_RUNNING",
                    f"`blockflow up` {'ended' if ended else 'did not get ready'}:\n{self.tail()}",
                    where=str(self.log),
                )
            time.sleep(_POLL_S)

    def tail(self) -> str:
        """The last lines of the log."""
        lines = self.log.read_text(encoding="utf-8", errors="replace").splitlines()
        return "\n".join(lines[-_LOG_LINES:])

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()


def _ready(line: str) -> dict[str, Any] | None:
    if not line.endswith("\n"):
        return None  # still being written
    try:
        data = json.loads(line)
    except ValueError:
        return None
    return data if isinstance(data, dict) and data.get("event") == "ready" else None


def is_zombie(process: psutil.Process) -> bool:
    """Whether it has ended, be it that nobody has reaped it yet."""
    try:
        return bool(process.status() == psutil.STATUS_ZOMBIE)
    except psutil.Error:
        return True


def _name(process: psutil.Process) -> str:
    try:
        return str(process.name())
    except psutil.Error:
        return "?"
