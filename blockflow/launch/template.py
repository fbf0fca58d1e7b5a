"""The template: a process that has imported everything and done nothing, and forks workers from it.

``python -m blockflow.launch.template <json>`` with the numbers of two inherited descriptors
(``control``: a SEQPACKET socket to the launcher, ``lifeline``), the directories that it ``removes``
if the manager dies, the modules to ``preload`` and the calls to make after that (``rehearsals``).
A forked worker shares the imported pages and starts in milliseconds; that is sound only while the
template has one thread, no OpenMP pool and no CUDA context, so it computes nothing and checks
itself before each fork.

Messages (msgpack arrays). In: ``["import", serial, modules]``, ``["launch", serial]`` with a file
in memory that holds the order (with the kernel's usual ``net.core.wmem_max`` no message has more
than 416 KiB), ``["kill", serial]`` (of a child that the launcher cannot watch), ``["close"]``. Out:
``["ready"]``, ``["imported", serial]``, ``["launched", serial, pid]`` with the child's pidfd,
``["failed", serial, errno or 0, text]``,
``["exited", serial, status, pid]``. A launcher that takes the template over from one that has died
asks ``["roll"]`` and gets ``["roll", [[serial, pid], ...]]``: the children that live; what was
said before it was meant for the dead.
"""

from __future__ import annotations

import errno
import gc
import json
import logging
import os
import selectors
import shutil
import signal
import socket
import stat
import sys
import time
from contextlib import suppress
from typing import Any

from blockflow.core import limits
from blockflow.core.errors import BlockFlowError
from blockflow.launch.child import Order, end, enter, resolve
from blockflow.launch.environment import child_command
from blockflow.launch.logs import set_level
from blockflow.launch.outlet import follow_stderr, wait_for_nobody
from blockflow.launch.preload import few_collections, preload
from blockflow.launch.process import (
    collect_own_child,
    gpu_descriptors,
    has_exited,
    readable,
    set_process_name,
    thread_count,
)
from blockflow.launch.sending import sent
from blockflow.wire.codec import decode, encode

_LOG = logging.getLogger("blockflow.launch")

_ORPHAN_GRACE_S = 1.0
"""After the manager's death workers clean up by themselves for so long before they are killed."""

_DYING_S = 1.0
"""How far apart the ends of a killed manager's descriptors may be seen."""


class Template:
    """Single-threaded by design; ``run`` returns when the launcher or the control plane is gone.

    Args:
        control: socket to the launcher.
        lifeline: read end of the guardian's pipe.
        removes: directories to remove when the manager died: the first (the instance's run
            directory) with all that is in it, then the others if they are empty.
    """

    def __init__(self, control: socket.socket, lifeline: int, removes: list[str]) -> None:
        self._control = control
        self._lifeline = lifeline
        self._removes = removes
        self._children: dict[int, tuple[int, int]] = {}  # pidfd -> (serial, pid)
        self._closed = False
        self._selector = selectors.DefaultSelector()
        self._selector.register(control, selectors.EVENT_READ)
        self._selector.register(lifeline, selectors.EVENT_READ)

    def run(self) -> None:
        self._send(["ready"])
        while True:
            ready = {key.fd for key, _ in self._selector.select()}
            if self._lifeline in ready:
                self._end(_ORPHAN_GRACE_S)
                self._remove()
                return
            for fd in ready & self._children.keys():
                self._reap(fd)
            if self._control.fileno() in ready and not self._take_order():
                # A dying manager's descriptors close one after the other: the socket's end may be
                # seen first, and then its run directory is still ours to remove.
                died = self._lifeline_cut_within(_DYING_S) if not self._closed else False
                self._end(_ORPHAN_GRACE_S if died else 0.0)
                if died:
                    self._remove()
                return

    def _lifeline_cut_within(self, seconds: float) -> bool:
        """Nothing is ever written to the lifeline: readable means cut."""
        return readable(self._lifeline, seconds)

    def _take_order(self) -> bool:
        """Handle one message; False when there is nobody to serve any more."""
        try:
            data, fds, _, _ = socket.recv_fds(self._control, limits.MAX_CONTROL_BYTES, 1)
        except OSError:
            return False
        if not data:
            return False
        kind, *rest = decode(data, max_bytes=limits.MAX_CONTROL_BYTES, what="template order")
        if kind == "launch":
            (serial,) = rest
            try:
                if not fds:
                    raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
                self._launch(serial, Order.from_memory(fds[0]))
            except (BlockFlowError, OSError, RuntimeError) as exc:
                number = exc.errno if isinstance(exc, OSError) else None
                self._send(["failed", serial, number or 0, str(exc)])
        elif kind == "import":
            serial, modules = rest
            with few_collections():
                preload(modules)
                if _unsound():
                    # Ends as if it had crashed: the children live on, another one starts without.
                    _LOG.error("%s: no process could be forked after that", ", ".join(modules))
                    os._exit(1)
                leave_to_children()
            self._send(["imported", serial])
        elif kind == "kill":
            for pidfd, (serial, _) in self._children.items():
                if serial == rest[0]:
                    signal.pidfd_send_signal(pidfd, signal.SIGKILL)
        elif kind == "roll":
            self._send(["roll", [list(entry) for entry in self._children.values()]])
        self._closed = kind == "close"
        return not self._closed

    def _launch(self, serial: int, order: Order) -> None:
        threads = thread_count()
        if threads != 1:
            raise RuntimeError(f"the template has {threads} threads, a fork would be unsound")
        if opened := gpu_descriptors():
            raise RuntimeError(f"the template has opened {opened[0]}, a fork would be unsound")
        told, tell = os.pipe()
        try:
            pid = os.fork()
            if pid == 0:
                os.setsid()  # a signal to the terminal's group is the manager's to handle
                os.close(tell)
                # Nobody knows of it yet. If this process dies now another one is told to launch it.
                if not os.read(told, 1):
                    os._exit(0)
                enter(order, self._lifeline)
            # Opened before the child can be reaped: the number cannot have been reused.
            pidfd = -1
            try:
                pidfd = os.pidfd_open(pid)
                self._selector.register(pidfd, selectors.EVENT_READ)
            except OSError:
                os.kill(pid, signal.SIGKILL)
                os.waitpid(pid, 0)
                if pidfd >= 0:
                    os.close(pidfd)
                raise
            self._children[pidfd] = (serial, pid)
            if self._send(["launched", serial, pid], [pidfd]):
                with suppress(BrokenPipeError):  # it has been killed
                    os.write(tell, b".")
        finally:
            os.close(told)
            os.close(tell)

    def _reap(self, pidfd: int) -> None:
        status = collect_own_child(pidfd)
        if status is None:
            return
        serial, pid = self._children.pop(pidfd)
        self._selector.unregister(pidfd)
        os.close(pidfd)
        self._send(["exited", serial, status, pid])

    def _send(self, message: list[Any], fds: list[int] | None = None) -> bool:
        """Whether it has left; if not, the launcher is gone, and the next select says so. (One that
        waits for it in vain would take this process for one that hangs.)"""
        return sent(lambda: socket.send_fds(self._control, [encode(message)], fds or []))

    def _end(self, grace_s: float) -> None:
        """Let the children go by themselves for ``grace_s``, kill and reap the rest."""
        end = time.monotonic() + grace_s
        poll = selectors.DefaultSelector()
        for fd in self._children:
            poll.register(fd, selectors.EVENT_READ)
        left = dict(self._children)
        killed = False
        while left:
            if not killed and time.monotonic() >= end:
                killed = True
                for fd in left:
                    with suppress(ProcessLookupError):
                        signal.pidfd_send_signal(fd, signal.SIGKILL)
            for key, _ in poll.select(None if killed else max(0.0, end - time.monotonic())):
                if has_exited(key.fd):
                    poll.unregister(key.fd)
                    del left[key.fd]
                    self._reap(key.fd)

    def _remove(self) -> None:
        """The manager cannot any more. Only a real directory of this user is emptied."""
        for path in self._removes[:1]:
            with suppress(OSError):
                info = os.lstat(path)
                if stat.S_ISDIR(info.st_mode) and info.st_uid == os.getuid():
                    shutil.rmtree(path, ignore_errors=True)
        for path in self._removes[1:]:
            with suppress(OSError):  # others use it
                os.rmdir(path)


def rehearse(calls: list[list[Any]]) -> None:
    """Do what workers will do, so that the pages it touches are shared; see TemplateLauncher."""
    for entry, spec in calls:
        try:
            resolve(entry)(spec)
        except Exception:  # a worker that meets the same error reports it properly
            _LOG.warning("rehearsal %s failed", entry, exc_info=True)


def _unsound() -> bool:
    """Whether something has been left behind that no fork survives: threads, or an open GPU."""
    return thread_count() != 1 or bool(gpu_descriptors())


def leave_to_children() -> None:
    """Collect once and leave what is here alone: a collection in a child would write to every
    shared page. What was imported logs where a child does."""
    follow_stderr()
    gc.collect()
    gc.freeze()


def main() -> None:
    config = json.loads(sys.argv[1])
    for sig in (signal.SIGINT, signal.SIGHUP):
        signal.signal(sig, signal.SIG_IGN)  # the manager decides when this ends
    set_process_name("bf:template")
    wait_for_nobody()  # libraries warn as they are imported
    with few_collections():
        preload(config["preload"])
        rehearse(config["rehearsals"])
        if config["rehearsals"] and _unsound():
            _LOG.warning("a rehearsal has left threads or an open GPU behind: starting without")
            bare = json.dumps({**config, "rehearsals": []})
            os.execv(sys.executable, child_command("blockflow.launch.template", bare))
        set_level()
        leave_to_children()
    control = socket.socket(fileno=int(config["control"]))
    Template(control, int(config["lifeline"]), list(config["removes"])).run()
    end(0)


if __name__ == "__main__":
    main()
