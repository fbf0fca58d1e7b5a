"""How worker and dispatcher processes log: to stderr, which is their log file."""

from __future__ import annotations

import logging
import sys

from blockflow.launch.outlet import wait_for_nobody

LEVEL = logging.INFO


def set_level() -> None:
    """For the root logger; the template has done it for the processes that it forks.

    ``setLevel`` visits every logger of every package, and with that writes to a megabyte of pages
    that a forked process shares until then, so it is called only where it changes something.
    """
    root = logging.getLogger()
    if root.level != LEVEL:
        root.setLevel(LEVEL)


def log_to_stderr(name: str) -> None:
    """Lines with the time, the level and the process's ``name``."""
    form = f"%(asctime)s %(levelname)s {name} %(name)s: %(message)s"
    wait_for_nobody()  # without a log file it is the control plane's, which may take nothing
    logging.basicConfig(stream=sys.stderr, format=form)
    set_level()
