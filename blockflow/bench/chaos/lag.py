"""Lag: how late this machine wakes a thread that waits, and when: the error of times measured then.

One hiccup excuses what came around it, and nothing that came an hour later.
"""

from __future__ import annotations

import threading
import time
from bisect import bisect_left
from collections.abc import Callable
from dataclasses import dataclass, field

LEAST_S = 0.002
"""What is woken later than this is worth a note; earlier is what any machine does."""
LEAD_S = 1.0
"""Who was held up so long before a deadline may still be late at it, behind all else that was."""
_STEP_S = 0.01


@dataclass(slots=True)
class LagBook:
    """Late wake-ups of one thread, in order. Pure: times are arguments, in seconds of one clock."""

    worst_s: float = 0.0
    _due: list[float] = field(default_factory=list)
    _woken: list[float] = field(default_factory=list)

    def note(self, due_s: float, woken_s: float) -> None:
        """It should have been woken at ``due_s``."""
        late_s = woken_s - due_s
        self.worst_s = max(self.worst_s, late_s)
        if late_s >= LEAST_S:
            self._due.append(due_s)
            self._woken.append(woken_s)

    def between(self, begin_s: float, end_s: float) -> float:
        """The worst lag of which a part lies in this time; 0.0: there was none."""
        worst = 0.0
        for i in range(bisect_left(self._woken, begin_s), len(self._due)):
            if self._due[i] > end_s:
                break
            worst = max(worst, self._woken[i] - self._due[i])
        return worst

    def allowance(self, due_s: float, done_s: float) -> float:
        """What a reply that was due then and came then may be late for the machine's sake."""
        return self.between(due_s - LEAD_S, done_s)


class Lag:
    """Measures it in a thread of its own from the beginning.

    Args:
        clock: seconds that never go back.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._book = LagBook()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="lag", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        woken = self._clock()
        while not self._stop.is_set():
            due = woken + _STEP_S
            self._stop.wait(_STEP_S)
            woken = self._clock()
            self._book.note(due, woken)

    def stop(self) -> LagBook:
        """What was found."""
        self._stop.set()
        self._thread.join()
        return self._book
