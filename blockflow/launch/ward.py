"""Ward: what a guardian keeps for the Manager's process, and the line between the two.

The Manager may die; what must outlive it lies with its guardian: the write end of the lifeline, the
run directory, and descriptors that the Manager hands up (the template's socket, REST's listening
socket, one that holds the clients' port, the secrets of REST). The guardian in turn reaps whom a
dead template has orphaned, and says how they ended.

Messages (msgpack arrays over a SEQPACKET socket). Up: ``["keep", name, pid, started]`` with a
descriptor, ``["serving", client port]``, ``["alive", when]``, ``["stopping"]``,
``["anew", reason]``, ``["failing", code, message, where, hint]``, ``["claimed"]``. Down:
``["reaped", pid, status]``.
"""

from __future__ import annotations

import os
import socket
import time
from array import array
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

from blockflow.core.errors import BlockFlowError
from blockflow.core.scarcity import is_away
from blockflow.launch.process import readable, start_time
from blockflow.launch.sending import sent
from blockflow.wire.codec import decode, encode

TEMPLATE = "template"
"""Name of the kept socket to the template; its pid is the template's."""

REST = "rest"
"""Name of the kept listening socket of REST."""

CLIENTS = "clients"
"""Name of the kept socket that holds the clients' port; nobody listens on it."""

TOKEN, CERTIFICATE, KEY = SECRETS = ("token", "certificate", "key")
"""Names of the kept memory files with the secrets of REST that are in force."""

LASTING = frozenset({REST, CLIENTS, *SECRETS})
"""What is kept also when all that runs is ended and begun anew."""

_AWAITED = frozenset({"NO_SPACE", "STATE_UNUSABLE"})

_MESSAGE_BYTES = 64 * 1024
_STATUSES_KEPT = 256
_ALIVE_NS = 1_000_000_000


def awaited(error: BlockFlowError) -> bool:
    """Whether in the place of a successor with this error another one is tried until there is room,
    the state's disk or the repository is back, or the installation is mended. The guardian says so,
    once."""
    return error.code in _AWAITED or is_away(error)


@dataclass(frozen=True, slots=True)
class Kept:
    """A descriptor that the guardian keeps, and the process (0 = none) that it belongs to, with the
    time of its start: its number may be another one's by now."""

    fd: int
    pid: int
    started: int


class Reaped(dict[int, int]):
    """How the last of those ended that the guardian has collected: process id -> status."""

    def note(self, pid: int, status: int) -> None:
        self.pop(pid, None)
        if len(self) >= _STATUSES_KEPT:
            del self[next(iter(self))]
        self[pid] = status


class Line:
    """One end of the socket between guardian and Manager."""

    def __init__(self, end: socket.socket) -> None:
        self._end = end
        self._reaped = Reaped()
        self._alive_ns = 0

    @staticmethod
    def pair(reaped: Mapping[int, int] = MappingProxyType({})) -> tuple[Line, Line]:
        """The guardian's end, and the Manager's, which knows of all that were ``reaped``: a former
        Manager that was told of them may have died as well."""
        one, other = map(Line, socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET))
        other._reaped.update(reaped)
        return one, other

    def fileno(self) -> int:
        return self._end.fileno()

    def close(self) -> None:
        self._end.close()

    # --- the Manager's end ----------------------------------------------------------------------

    def keep(self, name: str, fd: int, pid: int = 0) -> None:
        """Hand a descriptor up, in place of the one that was kept under this name; ``pid`` is of a
        child that nobody has collected yet."""
        self._tell(["keep", name, pid, start_time(pid) if pid else 0], [fd])

    def serving(self, client_port: int) -> None:
        """The system is up; a successor must serve clients on this port."""
        self._tell(["serving", client_port])

    def alive(self, now_ns: int) -> None:
        """The Manager's thread turns. Told once a second, however often it is said."""
        if now_ns >= self._alive_ns:
            self._alive_ns = now_ns + _ALIVE_NS
            self._tell(["alive", now_ns])

    def stopping(self) -> None:
        """The system ends because it was told to: nobody shall start it again."""
        self._tell(["stopping"])

    def anew(self, reason: str) -> None:
        """What runs cannot be taken over: end it, and start from the stored state."""
        self._tell(["anew", reason])

    def failing(self, error: BlockFlowError) -> None:
        """This Manager ends with ``error``, which is :func:`awaited`, before it has served."""
        self._tell(["failing", error.code, error.message, error.where, error.hint])

    def claimed(self) -> None:
        """The kernel has killed one of this Manager's processes for want of memory."""
        self._tell(["claimed"])

    def pump(self) -> None:
        """Take what has come, without waiting."""
        while readable(self._end.fileno(), 0):
            match self._receive()[0]:
                case ["reaped", int(pid), int(status)]:
                    self._reaped.note(pid, status)
                case []:
                    return

    def reaped(self, pid: int, timeout_s: float) -> int | None:
        """How an orphan ended, once the guardian says so; None if it does not in time."""
        end = time.monotonic() + timeout_s
        while True:
            self.pump()
            if pid in self._reaped:
                return self._reaped.pop(pid)
            left = end - time.monotonic()
            if left <= 0 or not readable(self._end.fileno(), left):
                return None
            if self._closed():
                return None

    # --- the guardian's end ---------------------------------------------------------------------

    def tell_reaped(self, pid: int, status: int) -> None:
        """Best effort: a Manager that does not read knows less about the dead, that is all."""
        self._tell(["reaped", pid, status])

    def take(self) -> tuple[list[Any], list[int]]:
        """The next message and its descriptors, which are the caller's; [] at the other's end."""
        return self._receive()

    # --- both -----------------------------------------------------------------------------------

    def _closed(self) -> bool:
        try:
            return not self._end.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT)
        except OSError:
            return False

    def _receive(self) -> tuple[list[Any], list[int]]:
        try:
            data, fds, _, _ = socket.recv_fds(self._end, _MESSAGE_BYTES, 1)
        except OSError:
            return [], []
        for fd in fds:
            os.set_inheritable(fd, False)
        message = decode(data, max_bytes=_MESSAGE_BYTES, what="guardian's line") if data else []
        return (message if type(message) is list else []), fds

    def _tell(self, message: list[Any], fds: Sequence[int] = ()) -> None:
        # Not socket.send_fds, which takes flags and forgets them: nobody shall ever wait here.
        rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array("i", fds))] if fds else []
        sent(lambda: self._end.sendmsg([encode(message)], rights, socket.MSG_DONTWAIT))


@dataclass(frozen=True, slots=True)
class Ward:
    """What a Manager's process gets from its guardian.

    Attributes:
        guardian: process id: the one to signal, and the one that ends last.
        run_dir: of the instance; locked and removed by the guardian.
        lifeline_fd: the read end, for children.
        line: to the guardian.
        kept: what former Managers handed up, by name.
        deaths: Managers that died before this one.
        adopt: a Manager has died, and what it had started may be taken over.
        died_ns: since when nobody was there (monotonic clock); 0 = this is the first one.
        began_ns: when all that runs was begun (monotonic clock).
        client_port: where clients were served; 0 = not yet.
        cause: how the last one ended, or why nothing could be taken over from it; '' = the first.
        stop_asked: a signal came before this process could hear it.
    """

    guardian: int
    run_dir: Path
    lifeline_fd: int
    line: Line
    kept: Mapping[str, Kept]
    deaths: int
    adopt: bool
    died_ns: int
    began_ns: int
    client_port: int
    cause: str
    stop_asked: Callable[[], bool]

    def own(self, name: str) -> Kept | None:
        """A descriptor that was handed up, now the caller's to close; None = there is none. Take it
        once: this process, a fork of the guardian, has one copy of it."""
        return self.kept.get(name)
