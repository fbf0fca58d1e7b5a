"""Other processes of benchmarks as forks of the session's template: they have imported torch.

What ``blockflow.bench.other_process`` starts is a module of ours in a process of its own. Here it
is that as well, with the same arguments, sockets and streams, and ends like any other; but it does
not import for seconds what the template has. (That it also starts from nothing is for tests that do
without this.)
"""

from __future__ import annotations

import os
import secrets
import socket
import subprocess
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO, Any

import pytest

from blockflow.bench import other_process
from blockflow.launch.base import Launcher
from blockflow.launch.preload import LOADER_MODULES, modules_of

ENTRY = "tests.apart_child:run"
ANSWER_S = 60.0


class Forks:
    """Stands for the module ``subprocess``: its processes are forks of this launcher's template."""

    PIPE = subprocess.PIPE
    DEVNULL = subprocess.DEVNULL
    TimeoutExpired = subprocess.TimeoutExpired

    def __init__(self, launcher: Launcher) -> None:
        self._launcher = launcher

    def Popen(
        self,
        command: Sequence[str],
        *,
        env: Mapping[str, str],
        pass_fds: Sequence[int] = (),
        stdin: int | None = None,
        stdout: int | None = None,
        text: bool = False,
    ) -> Fork:
        """The template hands nothing on, so the fork fetches its descriptors: the one that it is
        told as an argument, or its standard output."""
        *_, module = command[: command.index("-m") + 2]
        address = secrets.token_hex(8)
        spec = {
            "address": address,
            "module": module,
            "arguments": list(command[command.index("-m") + 2 :]),
            "number": str(pass_fds[0]) if pass_fds else "",
            "environment": dict(env),
            "modules": modules_of(LOADER_MODULES),
        }
        out: IO[str] | None = None
        handed = pass_fds[0] if pass_fds else -1
        if stdout == self.PIPE:
            read, handed = os.pipe()
            out = os.fdopen(read, encoding="utf-8")
        with socket.socket(socket.AF_UNIX) as listener:
            listener.bind(f"\0{address}")
            listener.listen(1)
            listener.settimeout(ANSWER_S)
            child = self._launcher.launch(ENTRY, spec, "apart")
            with listener.accept()[0] as other:
                socket.send_fds(other, [b"."], [handed])
        if out is not None:
            os.close(handed)
        return Fork(child, out)


class Fork:
    """What a :class:`subprocess.Popen` is asked for."""

    def __init__(self, child: Any, out: IO[str] | None) -> None:
        self._child = child
        self._out = out
        self.pid: int = child.pid
        self.returncode: int | None = None

    def communicate(self) -> tuple[str, None]:
        assert self._out is not None
        with self._out:
            said = self._out.read()
        self.wait()
        return said, None

    def wait(self, timeout: float = 300.0) -> int:
        if self.returncode is None:
            self.returncode = self._child.wait(timeout)
            if self.returncode is None:
                raise subprocess.TimeoutExpired("a fork", timeout)
            self._child.close()
            # As with a Popen, it is reaped then; here the template does that, when it comes to it.
            end = time.monotonic() + ANSWER_S
            while Path(f"/proc/{self.pid}").exists() and time.monotonic() < end:
                time.sleep(0.002)
        return self.returncode

    def kill(self) -> None:
        if self.returncode is None:
            self._child.kill()


def forked(launcher: Launcher, patch: pytest.MonkeyPatch) -> None:
    """Until ``patch`` is undone, other processes are forks."""
    patch.setattr(other_process, "subprocess", Forks(launcher))
