"""The client of a warm interpreter (warm_fork.py): processes that are forked, not executed."""

from __future__ import annotations

import json
import os
import resource
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
from system_rig import own_template

from blockflow.bench.demo import server
from blockflow.launch import environment
from blockflow.launch.base import Launcher
from blockflow.launch.fresh import SubprocessLauncher
from blockflow.launch.process import become_subreaper
from tests import warm_fork


class Warm:
    """A running warm interpreter.

    Args:
        address: for its socket.
        modules: that it imports beside all others.
    """

    def __init__(self, address: Path, *modules: str) -> None:
        become_subreaper()
        self._server: subprocess.Popen[bytes] | None = None
        self._own, warm_fork.own = warm_fork.own, None
        if self._own is not None:
            self._address = self._own[0]
            return
        self._address = str(address)
        room = {"WARM_ROOM": "." * warm_fork.ENVIRONMENT_BYTES}
        words = [self._address, "." * warm_fork.ARGUMENT_BYTES, *modules]
        self._server = subprocess.Popen(
            [sys.executable, warm_fork.__file__, *words],
            env={**environment.child_environment(), **room},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )
        assert self._server.stdout is not None
        assert self._server.stdout.readline() == b"ready\n"

    def popen(self, args: list[str], **options: Any) -> subprocess.Popen[Any]:
        """As :class:`subprocess.Popen`, for ``python -m MODULE`` and ``python -c CODE``.

        More options: ``descriptors`` are as many as it may open; ``disk`` is an empty folder, and
        how a tmpfs is mounted there for it alone (``small_disk.small_disk``); ``lasting``, whether
        it lives on when the warm interpreter ends.
        """
        return WarmPopen(self._address, args, **options)

    @contextmanager
    def spawning(self, *others: ModuleType) -> Iterator[None]:
        """What launchers of this process start meanwhile is forked, and so are the systems of the
        benchmarks, and what the ``others`` start by their ``subprocess``."""
        stand_in = SimpleNamespace(
            Popen=self.popen,
            DEVNULL=subprocess.DEVNULL,
            PIPE=subprocess.PIPE,
            TimeoutExpired=subprocess.TimeoutExpired,
        )
        with pytest.MonkeyPatch.context() as patch:
            for module in (environment, server, *others):
                patch.setattr(module, "subprocess", stand_in)
            yield

    @contextmanager
    def own_template(self, **variables: str) -> Iterator[Launcher]:
        """As :func:`system_rig.own_template`."""
        with self.spawning(), own_template(**variables) as launcher:
            yield launcher

    @contextmanager
    def fresh(self) -> Iterator[SubprocessLauncher]:
        """A launcher without a template."""
        with self.spawning():
            launcher = SubprocessLauncher()
            try:
                yield launcher
            finally:
                launcher.close()

    def close(self) -> None:
        """Its input ends, and so does it."""
        if self._server is not None:
            self._server.communicate()
            assert self._server.returncode == 0
        if self._own is not None:
            _, write, pid = self._own
            os.close(write)
            assert os.waitpid(pid, 0)[1] == 0


class WarmPopen(subprocess.Popen[Any]):
    """Whose process is forked by a warm interpreter, and left to this one as its child."""

    def __init__(
        self,
        address: str,
        args: list[str],
        *,
        descriptors: int | None = None,
        disk: tuple[Path, str] | None = None,
        lasting: bool = False,
        **options: Any,
    ) -> None:
        limits = resource.getrlimit(resource.RLIMIT_NOFILE)
        self._more = {
            "descriptors": limits if descriptors is None else (descriptors, descriptors),
            "disk": disk and (str(disk[0]), disk[1]),
            "lasting": lasting,
        }
        self._address = address
        super().__init__(args, **options)

    def _execute_child(self, args: Any, *more: Any) -> None:
        _, _, _, pass_fds, cwd, env, *rest = more
        streams = rest[3:9]  # reading and writing ends, of stdin, stdout and stderr
        fds = {fd: fd for fd in pass_fds}
        for number, fd in enumerate((streams[0], streams[3], streams[5])):
            fds[number] = number if fd == -1 else fd
        order = {
            "argv": [os.fspath(word) for word in args],
            "folder": os.fspath(cwd or os.getcwd()),
            "environment": dict(os.environ if env is None else env),
            "new_session": rest[14],
            "numbers": list(fds),
            "parent": os.getpid(),
            **self._more,
        }
        data = json.dumps(order).encode()
        with socket.socket(socket.AF_UNIX) as server:
            server.connect(self._address)
            socket.send_fds(server, [len(data).to_bytes(8, "big")], list(fds.values()))
            server.sendall(data)
            self.pid = int.from_bytes(server.recv(4), "big")
        assert self.pid, "the warm interpreter has ended"
        self._child_created = True
        self._close_pipe_fds(*streams)  # type: ignore[attr-defined]
