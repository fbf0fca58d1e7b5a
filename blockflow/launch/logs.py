"""How the processes of a system log: to stderr, which is a log file but for the control plane's."""

from __future__ import annotations

import atexit
import logging
import os
import stat
import sys
from contextlib import suppress
from typing import TextIO, cast

from blockflow.launch.outlet import wait_for_nobody
from blockflow.launch.scribe import PATIENCE_S, Scribe

LEVEL = logging.INFO


def set_level() -> None:
    """For the root logger; the template has done it for the processes that it forks.

    ``setLevel`` visits every logger of every package, and with that writes to a megabyte of pages
    that a forked process shares until then, so it is called only where it changes something.
    """
    root = logging.getLogger()
    if root.level != LEVEL:
        root.setLevel(LEVEL)


def tell_the_time() -> None:
    """Let the lines of the control plane's log begin with the time, as those of its children do:
    who looks for what came first has both before him."""
    for handler in logging.getLogger().handlers:
        handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s"))


def wait_for_no_disk(patience_s: float) -> None:
    """Put a :class:`Scribe` in the place of the standard error where that is a file, also for the
    log. For a process that forks nobody: its thread stays behind.

    Args:
        patience_s: for each line.
    """
    stream = sys.stderr
    with suppress(AttributeError, OSError, ValueError):  # a test has put something else there
        if not stat.S_ISREG(os.fstat(stream.fileno()).st_mode):
            return
        scribe = Scribe(stream.fileno(), patience_s)
        sys.stderr = cast(TextIO, scribe)
        atexit.register(scribe.finish)
        for handler in logging.getLogger().handlers:
            if isinstance(handler, logging.StreamHandler) and handler.stream is stream:
                handler.setStream(sys.stderr)


def log_to_stderr(name: str) -> None:
    """Lines with the time, the level and the process's ``name``; none of them waits for long."""
    form = f"%(asctime)s %(levelname)s {name} %(name)s: %(message)s"
    wait_for_nobody()  # without a log file it is the control plane's, which may take nothing
    wait_for_no_disk(PATIENCE_S)
    logging.basicConfig(stream=sys.stderr, format=form)
    set_level()
