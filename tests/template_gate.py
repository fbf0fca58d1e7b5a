"""Templates whose imports take as long as a test wants."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

SITE = """
import time
from pathlib import Path

if b"blockflow.launch.template" in Path("/proc/self/cmdline").read_bytes():
    while Path({shut!r}).exists():
        time.sleep(0.01)
"""


class Gate:
    """Put :attr:`folder` on the import path; then no template gets ready while the gate is shut.

    Args:
        folder: for the module that every interpreter imports when it starts; made here.
    """

    def __init__(self, folder: Path) -> None:
        folder.mkdir()
        self.folder = folder
        self._shut = folder / "shut"
        (folder / "sitecustomize.py").write_text(SITE.format(shut=str(self._shut)))

    @contextmanager
    def shut(self) -> Iterator[None]:
        """Open again at the end, whatever happens: who waits there sees nothing else."""
        self._shut.touch()
        try:
            yield
        finally:
            self.open()

    def open(self) -> None:
        self._shut.unlink(missing_ok=True)
