"""A warm interpreter that becomes ``python -m MODULE`` or ``-c CODE``: it has imported what a
system needs, and forks a process for each.

A system's imports take five seconds of a core, most of them torch's, and tests of faults start some
forty systems. A process that is forked here is to all that look at it like one that was executed:
its parent, its arguments and environment (also those in /proc, by which a guardian knows its own),
its streams, folder, limits, signals and descriptors. What it starts in turn it forks as well, so
that families are as they should be: the template is the Manager's child. (That systems also start
from nothing is for tests/process.)

The client is warm_rig.py.
"""

from __future__ import annotations

import atexit
import ctypes
import fcntl
import gc
import importlib
import json
import logging
import os
import random
import resource
import runpy
import selectors
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import traceback
import weakref
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any, NoReturn

from blockflow.core.engines import TORCH_EXPORT
from blockflow.launch.preload import BASE_MODULES, few_collections, modules_of, preload
from blockflow.launch.process import thread_count

MODULES = (
    "blockflow.bench.demo.server",
    "blockflow.cli.main",
    "blockflow.cli.up",
    "blockflow.control.guardian",
    "blockflow.control.rest.server",
    "blockflow.control.system",
    "blockflow.launch.template",
    "blockflow.launch.child",
)
"""Beside what templates preload."""
own: tuple[str, int, int] | None = None
"""Address of the warm interpreter that a process of a parallel run has forked for itself (see
warm_workers.py), the pipe by whose end it ends, and its number."""

ARGUMENT_BYTES = 1 << 14
ENVIRONMENT_BYTES = 1 << 16
"""What a process's arguments and environment may take in /proc."""
MOST_FDS = 16
NEW_MOUNTS = 0x20000
HUGE_PAGE = 2 << 20
COLLAPSE = 25  # of madvise, from Linux 6.1 on


def listening(address: str) -> socket.socket:
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(address)
    listener.listen()
    return listener


def serve(listener: socket.socket) -> None:
    """Forks until the standard input ends; then whoever is left is ended."""
    with listener, selectors.DefaultSelector() as selector:
        selector.register(listener, selectors.EVENT_READ)
        selector.register(sys.stdin, selectors.EVENT_READ)
        alive: set[int] = set()
        print("ready", flush=True)
        while True:
            for key, _ in selector.select():
                if key.fileobj is sys.stdin:
                    for pidfd in alive:
                        with suppress(ProcessLookupError):
                            signal.pidfd_send_signal(pidfd, signal.SIGKILL)
                    return
                if key.fileobj is listener:
                    client, _ = listener.accept()
                    with client:
                        pid, lasting = attend(client, listener)
                        pidfd = os.pidfd_open(pid)
                        client.sendall(pid.to_bytes(4, "big"))
                    if lasting:
                        os.close(pidfd)
                        continue
                    alive.add(pidfd)
                    selector.register(pidfd, selectors.EVENT_READ)
                    continue
                selector.unregister(key.fd)
                alive.remove(key.fd)
                os.close(key.fd)


def attend(client: socket.socket, listener: socket.socket) -> tuple[int, bool]:
    """Fork what a client asks for; never returns in the new process. Whether that lives on when
    this ends is said as well.

    That is forked twice: an orphan is its nearest subreaper's child, which is the client, who can
    then wait for it as for any that it has started.
    """
    head, passed, _, _ = socket.recv_fds(client, 8, MOST_FDS)
    data = b""
    while len(data) < int.from_bytes(head, "big"):
        data += client.recv(1 << 20)
    order = json.loads(data)
    told, tell = os.pipe()
    if (between := os.fork()) != 0:
        for fd in (tell, *passed):
            os.close(fd)
        with open(told, "rb") as f:
            pid = int.from_bytes(f.read(4), "big")
        os.waitpid(between, 0)
        return pid, order["lasting"]
    if (pid := os.fork()) != 0:
        os.write(tell, pid.to_bytes(4, "big"))
        os._exit(0)
    try:
        for sock in (client, listener):
            sock.detach()
        prepare(order)
        fds = dict(zip(order["numbers"], passed, strict=True))
        become(order["argv"], order["environment"], fds)
    finally:  # whatever happens, this is no second server
        traceback.print_exc()
        os._exit(1)


def prepare(order: Mapping[str, Any]) -> None:
    """What is done between fork and exec elsewhere."""
    while os.getppid() != order["parent"]:
        time.sleep(0.0005)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    os.chdir(order["folder"])
    if order["new_session"]:
        os.setsid()
    if order["disk"]:
        mount_small(*order["disk"])
    resource.setrlimit(resource.RLIMIT_NOFILE, order["descriptors"])


def mount_small(folder: str, options: str) -> None:
    """As the words of ``small_disk.on_small_disk`` do it."""
    if ctypes.CDLL(None, use_errno=True).unshare(NEW_MOUNTS) != 0:
        raise OSError(ctypes.get_errno(), "no mount namespace")
    for words in (["--make-rprivate", "/"], ["-t", "tmpfs", "-o", options, "none", folder]):
        subprocess.run(["mount", *words], check=True)


class Forked(subprocess.Popen[bytes]):
    """What a forked process starts in turn: a fork of it, its child, instead of an interpreter."""

    def _execute_child(self, args: Any, *more: Any) -> None:
        _, before, _, pass_fds, cwd, env, *rest = more
        streams = rest[3:9]  # reading and writing ends, of stdin, stdout and stderr
        new_session = rest[14]
        assert cwd is None and env is not None
        if (pid := os.fork()) != 0:
            self.pid = pid
            self._child_created = True
            self._close_pipe_fds(*streams)  # type: ignore[attr-defined]
            return
        if new_session:
            os.setsid()
        if before is not None:
            before()
        fds = {fd: fd for fd in pass_fds}
        for number, fd in enumerate((streams[0], streams[3], streams[5])):
            fds[number] = number if fd == -1 else fd
        become(list(args), env, fds)


def become(argv: list[str], environment: Mapping[str, str], fds: Mapping[int, int]) -> NoReturn:
    """Be ``python -m MODULE``, or ``python -c CODE``.

    Args:
        argv: as of an interpreter's process: the interpreter, its options, ``-m``, the module, ...
        fds: number here -> descriptor that it shall be; all others are closed.
    """
    status = 1
    try:
        place(fds)
        os.environ.clear()
        os.environ.update(environment)
        show(argv, environment)
        forget()
        at = next(n for n, word in enumerate(argv) if word in ("-m", "-c"))
        given = environment.get("PYTHONPATH", "").split(os.pathsep)
        sys.path[:] = dict.fromkeys([*filter(None, given), *sys.path])
        sys.argv = [argv[at], *argv[at + 2 :]]
        for site in (Path(folder, "sitecustomize.py") for folder in given if folder):
            if site.exists():
                runpy.run_path(str(site))
        start_by(
            SimpleNamespace(
                Popen=Forked,
                DEVNULL=subprocess.DEVNULL,
                TimeoutExpired=subprocess.TimeoutExpired,
            )
        )
        run(argv[at], argv[at + 1])
        status = 0
    except SystemExit as e:
        status = e.code if isinstance(e.code, int) else int(e.code is not None)
        if isinstance(e.code, str):
            print(e.code, file=sys.stderr)
    except BaseException:
        traceback.print_exc()
    finally:
        # As an interpreter ends, but without taking apart what is shared with its parent.
        threading._shutdown()  # type: ignore[attr-defined]
        atexit._run_exitfuncs()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status & 0xFF)


def start_by(means: Any) -> None:
    """What our modules have in place of the module ``subprocess``."""
    for name in ("blockflow.launch.environment", "blockflow.bench.demo.server"):
        sys.modules[name].subprocess = means  # type: ignore[attr-defined]


def run(kind: str, what: str) -> None:
    if kind == "-c":
        sys.modules["__main__"] = main = ModuleType("__main__")
        exec(compile(what, "<string>", "exec", dont_inherit=True), main.__dict__)  # noqa: S102
        return
    if not hasattr(sys.modules.get(what), "__path__"):
        sys.modules.pop(what, None)  # it is begun anew, under another name
    runpy.run_module(what, run_name="__main__", alter_sys=True)


def place(fds: Mapping[int, int]) -> None:
    """Give descriptors their numbers. The others become /dev/null: objects of the parent that still
    have their numbers may close them, but nobody else's."""
    opened = [int(fd) for fd in os.listdir("/proc/self/fd")]
    above = 1 + max(*opened, *fds)
    kept = {number: fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, above) for number, fd in fds.items()}
    with open(os.devnull, "r+b", buffering=0) as null:
        for fd in opened:
            with suppress(OSError):  # that of the listing
                os.fstat(fd)
                os.dup2(null.fileno(), fd, inheritable=False)
    for number, fd in kept.items():
        os.dup2(fd, number)
        os.close(fd)


def show(argv: Sequence[str], environment: Mapping[str, str]) -> None:
    """Have /proc tell these arguments and this environment. They lie where those of the warm
    interpreter were, which has seen to it that there is room; nobody reads them there any more."""
    stat = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
    arguments = "".join(f"{word}\0" for word in argv)
    variables = "".join(f"{name}={value}\0" for name, value in environment.items())
    for text, first in ((arguments, 48), (variables, 50)):
        begin, end = int(stat[first - 3]), int(stat[first - 2])
        data = os.fsencode(text)
        assert len(data) <= end - begin, "more than there is room for"
        ctypes.memmove(begin, data.ljust(end - begin, b"\0"), end - begin)


def forget() -> None:
    """What no program inherits: handlers of signals, of logs, the state of random numbers, which
    folder is for temporary files."""
    signal.set_wakeup_fd(-1)
    for number in signal.valid_signals():
        if callable(signal.getsignal(number)):
            signal.signal(number, signal.SIG_DFL)
    if signal.getsignal(signal.SIGINT) is signal.SIG_DFL:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    logging.root.handlers.clear()
    logging.root.setLevel(logging.WARNING)
    logging.getLogger("blockflow").setLevel(logging.NOTSET)
    random.seed()
    tempfile.tempdir = None


def lie_in_huge_pages() -> None:
    """What has been imported, as far as the kernel has such pages: a fork copies an entry of its
    tables for each page, and its end removes it, which takes longer than most forks live."""
    libc = ctypes.CDLL(None)
    for line in Path("/proc/self/maps").read_text().splitlines():
        where, kind, _, _, file, *_ = line.split()
        if kind == "rw-p" and file == "0":
            begin, end = (int(address, 16) for address in where.split("-"))
            for at in range(-(-begin // HUGE_PAGE) * HUGE_PAGE, end - HUGE_PAGE + 1, HUGE_PAGE):
                libc.madvise(ctypes.c_void_p(at), ctypes.c_size_t(HUGE_PAGE), COLLAPSE)


def keep_registered() -> None:
    """At the end of a process torch takes its operators back one by one, those of all its modules:
    that is longer than most forks live."""
    for finalizer in list(weakref.finalize._registry):  # type: ignore[attr-defined]
        finalizer.atexit = False


def main() -> None:
    sys.path.pop(0)  # this folder's, which no command has
    with few_collections():
        for name in (*BASE_MODULES, *MODULES):
            importlib.import_module(name)
        preload(modules_of([TORCH_EXPORT]))
        for name in sys.argv[3:]:
            importlib.import_module(name)
    assert thread_count() == 1, "what forks has one thread"
    keep_registered()
    gc.collect()
    gc.freeze()
    lie_in_huge_pages()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the client, who ends this
    serve(listening(sys.argv[1]))


if __name__ == "__main__":
    main()
