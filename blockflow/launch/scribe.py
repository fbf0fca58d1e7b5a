"""Scribe: a log file that keeps nobody waiting for its disk.

A disk that does not answer (a network's folder whose server is gone, a file system that is frozen
for a snapshot) keeps whoever writes to it, in the kernel, for as long as that lasts. A process that
serves requests has no need of its log for that, and one line of its data thread would end all of
its service. So a thread of its own writes, begun with the first line. Who has said something waits
until it is written, so that it is there if the process dies by what comes next; but for a moment
only, and once: while a line is late, nobody waits.
"""

from __future__ import annotations

import os
import threading
from collections import deque
from contextlib import suppress

from blockflow.launch.stream import LogStream, lost_lines

PATIENCE_S = 0.05
"""Half of what a reply may be late. A line takes microseconds, where the disk answers."""

LAST_S = 1.0
"""At the end of a process: its last words may be what somebody looks for."""

MOST = 1000
"""So many pieces of text wait for the disk; what comes then is lost, and how much is written."""


class Scribe(LogStream):
    """Text that is written at once, or as soon as that can be done.

    Args:
        number: of the descriptor, of a regular file.
        patience_s: how long who has said something waits for it to be written.
    """

    def __init__(self, number: int, patience_s: float = PATIENCE_S) -> None:
        super().__init__(number)
        self._patience_s = patience_s
        self._texts: deque[memoryview] = deque()
        self._lost = 0
        self._late = False
        self._changed = threading.Condition()
        self._thread: threading.Thread | None = None

    def write(self, text: str) -> int:
        """What the disk refuses is lost without a word: there is no other place for it."""
        data = self._bytes(text)  # here, so that what is no text is its writer's error
        with self._changed:
            if len(self._texts) >= MOST:
                self._lost += text.count("\n")
            elif self._begun():
                self._texts.append(data)
                self._changed.notify_all()
            else:
                self._put(data)
        self.flush()
        return len(text)

    def flush(self) -> None:
        """Wait for a moment until all is written."""
        with self._changed:
            if self._texts and not self._late:
                self._late = not self._changed.wait_for(lambda: not self._texts, self._patience_s)

    def finish(self) -> None:
        """Wait until all is written, for the last time: the process ends with its thread."""
        with self._changed:
            self._changed.wait_for(lambda: not self._texts, LAST_S)

    def _begun(self) -> bool:
        """Whether there is somebody else to write: a process may get no further thread."""
        if self._thread is None:
            thread = threading.Thread(target=self._run, name="bf-log", daemon=True)
            with suppress(RuntimeError):
                thread.start()
                self._thread = thread
        return self._thread is not None

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._texts)
                data = self._texts[0]
            self._put(data)
            with self._changed:
                self._texts.popleft()  # until now it counted: what waits is bounded
                if self._lost:
                    told = lost_lines(self._lost, "the disk did not answer")
                    self._texts.append(self._bytes(told))
                    self._lost = 0
                if not self._texts:
                    self._late = False
                    self._changed.notify_all()

    def _put(self, data: memoryview) -> None:
        with suppress(OSError):
            while data:
                data = data[os.write(self._number, data) :]
