"""What the machine refuses to a call, or to a running ``blockflow up``, for as long as a test
wants."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NoReturn

TEMPLATES = "templates"
"""No template's process can be started."""
REST_THREAD = "CP Server"
CONTROLLER_THREAD = "bf-controller"
"""A thread whose name begins so, to the first who asks."""

SITE = """
import errno, subprocess, threading
from pathlib import Path

folder, spawn, start = Path({folder!r}), subprocess.Popen.__init__, threading.Thread.start

def scarce_spawn(self, args, *more, **named):
    if "blockflow.launch.template" in args and (folder / {templates!r}).exists():
        raise BlockingIOError(errno.EAGAIN, "Resource temporarily unavailable")
    spawn(self, args, *more, **named)

def scarce_start(self):
    for name in {threads!r}:
        mark = folder / name
        if self.name.startswith(name) and mark.exists():
            mark.unlink()
            raise RuntimeError("can't start new thread")
    start(self)

subprocess.Popen.__init__, threading.Thread.start = scarce_spawn, scarce_start
"""


def no_room(*_: object, **__: object) -> NoReturn:
    """In place of a call: the disk is full."""
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def no_descriptor(*_: object, **__: object) -> NoReturn:
    """In place of a call: the process has none left."""
    raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))


class Refusals:
    """Refuses only to systems that were started with :attr:`env`.

    Args:
        folder: for the module that every interpreter imports when it starts; made here.
    """

    def __init__(self, folder: Path) -> None:
        folder.mkdir()
        self._folder = folder
        threads = (REST_THREAD, CONTROLLER_THREAD)
        text = SITE.format(folder=str(folder), templates=TEMPLATES, threads=threads)
        (folder / "sitecustomize.py").write_text(text)

    @property
    def env(self) -> dict[str, str]:
        path = [str(self._folder), os.environ.get("PYTHONPATH")]
        return {"PYTHONPATH": os.pathsep.join(filter(None, path))}

    @contextmanager
    def of(self, what: str) -> Iterator[Path]:
        """Refuse it from now on; what it yields is there until that is over."""
        mark = self._folder / what
        mark.touch()
        try:
            yield mark
        finally:
            mark.unlink(missing_ok=True)
