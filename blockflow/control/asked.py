"""Asked: an event that signal handlers may set."""

from __future__ import annotations

import queue
from contextlib import suppress


class Asked:
    """What ``threading.Event`` is for threads, for signal handlers as well.

    An Event takes a lock: a second signal that arrives while the first one's handler is setting it
    (a terminal's Ctrl-C reaches a whole group, and who passes it on is in that group too) waits for
    ever for the handler that it interrupts. Putting something into a SimpleQueue may be
    interrupted by another put.
    """

    def __init__(self) -> None:
        self._asked = False
        self._wakes: queue.SimpleQueue[None] = queue.SimpleQueue()

    def set(self) -> None:
        """From now on nobody waits. From anywhere, as often as one likes."""
        self._asked = True
        self._wakes.put(None)

    def is_set(self) -> bool:
        return self._asked

    def wait(self, timeout_s: float) -> bool:
        """Wait until it is set, or the time is over; tells which."""
        if not self._asked:
            with suppress(queue.Empty):
                self._wakes.get(timeout=max(0.0, timeout_s))
                self._wakes.put(None)  # for the next one who waits
        return self._asked
