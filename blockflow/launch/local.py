"""TemplateLauncher (default): workers are forked from a warm template process on this machine."""

from __future__ import annotations

import errno
import logging
import os
import socket
import subprocess
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from typing import Any

from blockflow.core import limits
from blockflow.core.errors import SystemError_
from blockflow.launch.base import Child, Launcher, Lifeline, stop_all
from blockflow.launch.begin import start_template
from blockflow.launch.child import Order
from blockflow.launch.ends import template_died, template_late, unreaped_status
from blockflow.launch.inherited import Inherited
from blockflow.launch.preload import BASE_MODULES, Imports
from blockflow.launch.process import EXIT_UNKNOWN, collect_own_child, readable
from blockflow.launch.refused import not_started
from blockflow.launch.vitals import Stopped
from blockflow.launch.ward import TEMPLATE, Kept, Ward
from blockflow.wire.codec import decode, encode

_LOG = logging.getLogger("blockflow.launch")

_START_S = 120.0
"""Longest time for the template's imports (cold disk, busy machine)."""
_IMPORTS_S = 60.0
"""One whose imports take longer hangs, and is replaced while whoever waits for it has time left:
half of what a worker has for its start."""
_AGAIN_S = 1.0
"""Between two tries to start a template that the machine has no room for."""
_LAUNCH_S = 5.0
"""A fork takes milliseconds: a template that takes so long hangs, and another takes its place."""
_LOOK_S = 0.1
_STOPPED_S = 0.2
"""A template that is stopped (SIGSTOP) for so long is replaced; whoever launches waits for it."""
_TRIES = 2
"""How many templates in a row may die on a launch before it is given up."""
_ROLL_S = 1.0
_REPORT_S = 5.0
"""Between reaping a child and reporting how it ended its parent may be starved of the CPU."""


class TemplateLauncher(Launcher):
    """Forks each process from a template that has imported the framework once.

    A forked worker shares the template's pages (a few MB are its own) and has no imports to do. If
    the template dies, running children live on: their lifeline is this process's. A new template
    is started by :meth:`tend`, or by the next launch; call
    :func:`~blockflow.launch.process.become_subreaper` early, so that the end of such children can
    still be collected.

    Args:
        removes: directories that the template removes when this process has died: the first with
            all that is in it, then the others if they are empty.
        preload: modules the template imports at its start; a launch may name more (``modules``).
        rehearsals: gives, at each start of a template, calls (entry, spec) that it makes after its
            imports, so that what they touch is shared by all children. They must neither compute
            nor start threads; one that does makes the template start anew without any, one that
            raises is ignored, and one that hangs keeps all launches.
        log_path: where the template's own errors go, '' = this process's stderr.
        ward: of a guardian, which then holds lifeline and template beyond this process's life.
    """

    def __init__(
        self,
        *,
        removes: Sequence[str] = (),
        preload: Sequence[str] = BASE_MODULES,
        rehearsals: Callable[[], Sequence[tuple[str, Mapping[str, Any]]]] = tuple,
        log_path: str = "",
        ward: Ward | None = None,
    ) -> None:
        self._imports = Imports(preload)
        self._removes, self._rehearsals = list(removes), rehearsals
        self._log_path = log_path
        self._lock = threading.RLock()
        self._lifeline = Lifeline() if ward is None else Lifeline.of_another(ward.lifeline_fd)
        self._line = None if ward is None else ward.line
        self._process: subprocess.Popen[bytes] | Inherited | None = None
        self._socket: socket.socket | None = None
        self._ready = False
        self._since = 0.0  # when its imports began, the present ones
        self._ended: int | None = None  # how the last one did
        self._again = 0.0  # no earlier is one tried again that could not be started; 0 = none
        self._tries = 0  # templates that launches have started since one was answered
        self._stopped = Stopped()
        self._serial = 0
        self._oldest = 1  # serial of the current template's first child
        self._alive: dict[int, Child] = {}
        self._statuses: dict[int, int] = {}
        self._answers: dict[int, tuple[int, int | str]] = {}
        self._roll: dict[int, int] | None = {}  # pid -> serial; None while it is asked for
        self._gone: dict[int, int] = {}
        kept = ward.own(TEMPLATE) if ward is not None and ward.adopt else None
        if kept is not None:
            self._take_over(kept)

    @property
    def template_pid(self) -> int:
        """Process id of the current template, 0 when there is none."""
        return self._process.pid if self._process is not None else 0

    def start(self) -> None:
        with self._lock:
            if self._process is not None:
                return
            if self._lifeline.read_fd < 0:
                raise SystemError_("INTERNAL", "the launcher is closed")
            calls = [[entry, dict(spec)] for entry, spec in self._rehearsals()]
            known = {"removes": self._removes, "rehearsals": calls}
            config = {**known, "preload": self._imports.done}
            self._again = time.monotonic() + _AGAIN_S  # unless it is started now
            process, self._socket = start_template(
                config, self._lifeline.read_fd, log_path=self._log_path
            )
            self._process, self._ready, self._again = process, False, 0.0
            self._since = time.monotonic()
            if self._line is not None:
                self._line.keep(TEMPLATE, self._socket.fileno(), process.pid)

    def wait_ready(self, timeout_s: float = _START_S) -> None:
        """Wait for the template's imports. Raises SystemError_ (TIMEOUT, INTERNAL)."""
        with self._lock:
            self.start()
            end = time.monotonic() + timeout_s
            while not self._ready:
                self._receive(end, "the template to import its modules")

    def tend(self) -> None:
        """Start a new template as soon as a good one has died: its imports take seconds.

        One that died before it was ready would do so again; it is left to the next launch. One that
        the machine has no room for is tried again now and then: what runs goes on without.
        """
        if self._line is not None:
            self._line.pump()
        with self._lock:
            self._pump()
            refused, missed = self._again > 0.0, self._process is None
            if missed and (self._ready or refused) and time.monotonic() >= self._again:
                try:
                    self.start()
                except SystemError_ as exc:
                    if not refused:
                        _LOG.error("%s; nothing can be launched until there is one", exc)

    def launch(self, entry: str, spec: Mapping[str, Any], name: str) -> Child:
        with self._lock:
            end = time.monotonic() + _START_S
            while (child := self.attempt(entry, spec, name)) is None:
                look = min(end, time.monotonic() + _LOOK_S)
                if not self._have_message(look) and look == end:
                    raise template_late("the template to import its modules")
            return child

    def attempt(self, entry: str, spec: Mapping[str, Any], name: str) -> Child | None:
        """None while the template imports. One that dies on it is replaced, but not for ever."""
        with self._lock:
            self._pump()  # notices a template that has died meanwhile
            self._have_template()
            if self._ready and not self._imports.under_way:
                self._import(spec.get("modules", ()))
            if not self._ready or self._imports.under_way:
                self._end_stopped()
                if self._process is not None and time.monotonic() - self._since >= _IMPORTS_S:
                    self._end_template("does not finish its imports")
                self._have_template()
                return None
            try:
                child = self._order(entry, spec, name)
            except SystemError_:
                if self._process is not None:
                    self._tries = 0
                    raise
                self._have_template()  # it died just now: by a new one
                return None
            self._tries = 0
            return child

    def _have_template(self) -> None:
        """Start one for a launch, if there is none. Raises SystemError_ after the last try."""
        if self._process is not None:
            return
        if self._tries == _TRIES:
            self._tries = 0
            self._connected()
        self.start()
        self._tries += 1

    def _import(self, modules: Iterable[str]) -> None:
        """Have the template import what it has not been told to yet: that may take seconds."""
        self._serial += 1
        if missing := self._imports.begin(self._serial, modules):
            self._since = time.monotonic()
            with suppress(OSError):  # it died just now, which is noticed soon
                self._connected().send(encode(["import", self._serial, missing]))

    def _order(self, entry: str, spec: Mapping[str, Any], name: str) -> Child:
        """Have the template, which is ready, fork a process: milliseconds.

        Raises:
            SystemError_: it did not; without a template afterwards, the next one may.
        """
        serial = self._serial = self._serial + 1
        try:
            with Order(entry, dict(spec), name).in_memory() as memory:
                socket.send_fds(self._connected(), [encode(["launch", serial])], [memory])
        except OSError as exc:
            raise not_started(f"launch of {name!r}", str(exc), exc.errno or 0, name) from exc
        end = time.monotonic() + _LAUNCH_S
        while serial not in self._answers:
            self._have_message(time.monotonic() + _LOOK_S)
            self._end_stopped()
            if time.monotonic() >= end:
                self._end_template("does not answer")
        pid, pidfd = self._answers.pop(serial)
        if isinstance(pidfd, str):  # an errno, and why not
            raise not_started(f"launch of {name!r}", pidfd, pid, name)
        self._alive[serial] = Child(name, pid, pidfd, lambda: self._collect(serial, pid, pidfd))
        return self._alive[serial]

    def close(self) -> None:
        with self._lock:
            stop_all(list(self._alive.values()), 5.0)
            self._alive.clear()
            if self._process is not None:
                if self._socket is not None:
                    with suppress(OSError):
                        self._socket.send(encode(["close"]))
                    self._socket.close()
                    self._socket = None
                try:  # one that still imports has no children to end, and hears nothing
                    self._process.wait(5.0 if self._ready else 0.0)
                except subprocess.TimeoutExpired:
                    self._process.kill()
                    self._process.wait()
                self._process = None
            self._ready, self._again = False, 0.0
            self._lifeline.cut()

    # --- messages -------------------------------------------------------------------------------

    def _connected(self) -> socket.socket:
        if self._socket is None:
            raise template_died(self._ended)
        return self._socket

    def _receive(self, end: float, what: str) -> None:
        """Wait for one message until ``end``. Raises SystemError_ when there will be none."""
        if not self._have_message(end):
            raise template_late(what)
        self._connected()

    def _have_message(self, end: float) -> bool:
        """Take a message, if one comes until ``end``; the template's death is as good as one."""
        sock = self._connected()
        left = end - time.monotonic()
        if left <= 0 or not readable(sock.fileno(), left):
            return False
        self._take(sock)
        return True

    def _end_stopped(self) -> None:
        """Kill a template that is stopped: it will not answer until someone lets it go on."""
        if self._stopped.seconds(self.template_pid, time.monotonic()) >= _STOPPED_S:
            self._end_template("is stopped")

    def _end_template(self, why: str) -> None:
        """Kill it. What it had still said is taken first: a child may be among it."""
        if self._process is None:
            return
        _LOG.error("the template %s, and is replaced", why)
        self._process.kill()
        self._process.wait()
        self._pump()
        if self._socket is not None:  # somebody else holds the other end
            self._template_died()

    def _pump(self) -> None:
        """Take what has arrived, without waiting."""
        while self._socket is not None and readable(self._socket.fileno(), 0):
            self._take(self._socket)

    def _take(self, sock: socket.socket) -> None:
        try:
            data, fds, _, _ = socket.recv_fds(sock, limits.MAX_CONTROL_BYTES, 1)
        except OSError:
            data, fds = b"", []
        if not data:
            self._template_died()
            return
        message = decode(data, max_bytes=limits.MAX_CONTROL_BYTES, what="template message")
        match message:
            case ["ready"]:
                self._ready = True
            case ["imported", int(serial)]:
                self._imports.end(serial)
            case ["roll", list(entries)]:
                self._ready, self._roll = True, {pid: serial for serial, pid in entries}
            case ["exited", int(), int(status), int(pid)] if self._roll is None:
                self._gone[pid] = status
            case [*_] if self._roll is None:  # an answer to the dead
                for fd in fds:
                    os.close(fd)
            case ["launched", int(serial), int(pid)] if fds:
                self._answers[serial] = (pid, fds[0])
            case ["launched", int(serial), int()]:  # no descriptor was left here for its pidfd
                self._answers[serial] = (errno.EMFILE, os.strerror(errno.EMFILE))
                with suppress(OSError):
                    sock.send(encode(["kill", serial]))
            case ["failed", int(serial), int(number), str(text)]:
                self._answers[serial] = (number, text)
            case ["exited", int(serial), int(status), int(pid)]:
                if serial in self._alive or (self._roll or {}).get(pid) == serial:
                    self._statuses[serial] = status  # else it was known before

    def _template_died(self) -> None:
        if self._socket is not None:
            self._socket.close()
            self._socket = None
        if names := self._imports.died():
            _LOG.error("the template ended as it imported %s", ", ".join(names))
        self._oldest, self._roll = self._serial + 1, self._roll or {}
        if self._process is not None:
            self._process.kill()  # its socket is closed: it serves nobody
            self._ended = self._process.wait()
            if self._ended is not None:  # else the guardian is its parent
                _LOG.warning("the template ended: status %d", self._ended)
            self._process = None

    # --- what a dead launcher has left ------------------------------------------------------------

    def _take_over(self, kept: Kept) -> None:
        """Go on with the template of a former Manager, and ask which children it has."""
        self._socket = socket.socket(fileno=kept.fd)
        self._process = Inherited(kept.pid, kept.started)
        self._since = time.monotonic()
        # Beyond every serial that its answers to the dead may bear.
        self._serial = time.monotonic_ns()
        self._oldest = 0
        self._roll = None
        end = time.monotonic() + _ROLL_S
        try:
            self._socket.send(encode(["roll"]))
            while self._roll is None:
                self._receive(end, "the roll of the template's children")
        except OSError:
            self._template_died()
        except SystemError_ as e:
            # Either it died, or it is busy with its imports: then the roll will come.
            _LOG.warning("the template: %s", e)

    def _collect_adopted(self, pid: int, pidfd: int) -> int:
        with self._lock:
            roll = self._roll or {}
            status = self._collect(roll.get(pid, -1), pid, pidfd)
            roll.pop(pid, None)
            return status

    def _how_ended(self, pid: int) -> int:
        with self._lock:
            status = self._gone.get(pid)
            if status is None and self._line is not None:  # its parent, the template, is dead, too
                status = self._line.reaped(pid, 0.0)
            return EXIT_UNKNOWN if status is None else status

    def _collect(self, serial: int, pid: int, pidfd: int) -> int:
        """How an ended child ended: as its parent will be told, or as it reports; that is the
        template, or for who outlived one the guardian. Without one we reap it."""
        with self._lock:
            self._pump()
            status = self._statuses.pop(serial, None)
            if status is None:
                status = collect_own_child(pidfd)
            if status in (None, EXIT_UNKNOWN):
                status = unreaped_status(pid, pidfd)
            if status is None:
                status = self._reported(serial)
            if status is None and self._line is not None:
                status = self._line.reaped(pid, _REPORT_S)
            self._alive.pop(serial, None)
            return EXIT_UNKNOWN if status is None else status

    def _reported(self, serial: int) -> int | None:
        """What the template, which has reaped it, says of it; None: nothing in time."""
        end = time.monotonic() + _REPORT_S
        while serial not in self._statuses and serial >= self._oldest and self._socket is not None:
            if time.monotonic() >= end:
                return None
            self._have_message(min(end, time.monotonic() + _LOOK_S))
            self._end_stopped()
        return self._statuses.pop(serial, None)
