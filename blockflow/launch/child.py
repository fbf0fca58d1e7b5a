"""What a new process does before its entry runs, and how it ends; main module of fresh ones.

``python -m blockflow.launch.child <order fd> <lifeline fd>`` reads its order from an inherited
memory file; forked children are handed theirs by the template.
"""

from __future__ import annotations

import errno
import faulthandler
import importlib
import logging
import os
import random
import signal
import sys
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any, NoReturn

from blockflow.core import limits
from blockflow.core.errors import SystemError_
from blockflow.launch.base import LIFELINE_ENV
from blockflow.launch.outlet import leave_to_child
from blockflow.launch.process import (
    close_descriptors,
    drop_capabilities,
    give_up_privileges,
    set_process_name,
)
from blockflow.launch.scribe import Scribe
from blockflow.launch.whereabouts import leave_what_is_gone
from blockflow.wire.codec import decode, encode

_LOG = logging.getLogger("blockflow.launch")

CRASH_STATUS = 1
"""Exit status when the entry raised."""


@dataclass(frozen=True, slots=True)
class Order:
    """What to run: see :meth:`blockflow.launch.base.Launcher.launch`."""

    entry: str
    spec: dict[str, Any]
    name: str

    def to_bytes(self) -> bytes:
        return encode([self.entry, self.spec, self.name])

    @contextmanager
    def in_memory(self) -> Iterator[int]:
        """A descriptor of a file in memory that holds it: neither a pipe nor a message takes all
        that it may have at once.

        Raises:
            OSError: there is no room for one.
            SystemError_: INTERNAL: it is too large to be read.
        """
        data = self.to_bytes()
        if len(data) > limits.MAX_CONTROL_BYTES:
            what = f"the order for {self.name!r} has {len(data)} bytes"
            raise SystemError_("INTERNAL", what, where=self.name)
        memory = os.memfd_create("bf-order", os.MFD_CLOEXEC)
        try:
            os.write(memory, data)
            os.lseek(memory, 0, os.SEEK_SET)
            yield memory
        finally:
            os.close(memory)

    @classmethod
    def from_memory(cls, memory: int) -> Order:
        """Inverse of :meth:`in_memory`; closes the descriptor. Raises as :meth:`from_bytes`."""
        with open(memory, "rb") as f:
            return cls.from_bytes(f.read())

    @classmethod
    def from_bytes(cls, data: bytes | memoryview) -> Order:
        """Inverse of :meth:`to_bytes`. Raises WireError or SystemError_."""
        raw = decode(data, max_bytes=limits.MAX_CONTROL_BYTES, what="launch order")
        if type(raw) is not list or [type(x) for x in raw] != [str, dict, str] or ":" not in raw[0]:
            raise SystemError_("INTERNAL", "a launch order holds entry, spec and name")
        return cls(*raw)


def enter(order: Order, lifeline_fd: int) -> NoReturn:
    """Set this process up for ``order``, run its entry, and end the process. Never returns.

    Clean-up handlers of the parent (atexit) are not run: in a forked child they are not ours.
    """
    status = CRASH_STATUS
    try:
        _prepare(order, lifeline_fd)
        status = resolve(order.entry)(order.spec)
    except SystemExit as exc:
        status = exc.code if isinstance(exc.code, int) else CRASH_STATUS
    except BaseException:  # the process ends here; its log gets the reason
        traceback.print_exc()
    finally:
        end(status)


def end(status: int) -> NoReturn:
    """End this process without taking its modules apart, which takes longer than all the rest."""
    logging.shutdown()
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError):
            stream.flush()
    if isinstance(sys.stderr, Scribe):
        sys.stderr.finish()
    os._exit(status & 0xFF)


def _prepare(order: Order, lifeline_fd: int) -> None:
    os.environ[LIFELINE_ENV] = str(lifeline_fd)
    leave_what_is_gone()
    leave_to_child()
    close_descriptors(frozenset({lifeline_fd}))
    for sig in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGCHLD, signal.SIGPIPE):
        signal.signal(sig, signal.SIG_IGN if sig == signal.SIGPIPE else signal.SIG_DFL)
    give_up_privileges()
    _redirect(str(order.spec.get("log_path", "")))
    # A signal that ends this process (a native library's SIGSEGV) says where it was, in the log.
    faulthandler.enable(2, all_threads=False)
    drop_capabilities()
    set_process_name(f"bf:{order.name}")
    cores = order.spec.get("cores")
    if cores:
        _pin(cores)
    # A forked child would otherwise continue its parent's sequence, as all its siblings do. What is
    # not imported yet seeds itself, and numpy's generators only are when somebody asks for them.
    random.seed()
    generators = sys.modules.get("numpy.random")
    if generators is not None:
        generators.seed()


def _redirect(log_path: str) -> None:
    null = os.open(os.devnull, os.O_RDONLY)
    os.dup2(null, 0)
    os.close(null)
    if log_path:
        flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW | os.O_CLOEXEC
        log = os.open(log_path, flags, 0o600)
        os.dup2(log, 1)
        os.dup2(log, 2)
        os.close(log)


def _pin(cores: Any) -> None:
    wanted = {int(c) for c in cores}
    if wanted == os.sched_getaffinity(0):
        return  # a sandbox may forbid to change what need not be changed
    try:
        os.sched_setaffinity(0, wanted)
    except OSError as exc:
        allowed = sorted(os.sched_getaffinity(0))
        if exc.errno == errno.EINVAL:  # its control group has got others since the system began
            _LOG.warning("cores %s are gone: this runs on %s", sorted(wanted), allowed)
            return
        raise SystemError_(
            "INTERNAL",
            f"cores {sorted(wanted)} cannot be used: {exc.strerror}",
            hint=f"this process may run on {allowed}",
        ) from exc


def resolve(entry: str) -> Callable[[Mapping[str, Any]], Any]:
    """The function that ``package.module:function`` names."""
    module, _, function = entry.partition(":")
    target: Callable[[Mapping[str, Any]], Any] = getattr(importlib.import_module(module), function)
    return target


def main() -> NoReturn:
    order_fd, lifeline_fd = int(sys.argv[1]), int(sys.argv[2])
    enter(Order.from_memory(order_fd), lifeline_fd)


if __name__ == "__main__":
    main()
