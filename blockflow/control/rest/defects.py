"""Defects: what nobody expected is logged with its traceback, but does not fill the disk.

Whoever finds a way to bring one about can do so a hundred times a second, perhaps without a token.
"""

from __future__ import annotations

import logging
import threading
import time

WHOLE = 5
"""Tracebacks that are logged in one :data:`SPELL_S`; the others are counted."""
SPELL_S = 60.0


class Spell:
    """Counts events by spells of time. Pure."""

    def __init__(self) -> None:
        self._since: float | None = None
        self._seen = 0

    def note(self, now: float) -> tuple[int, int]:
        """An event: which one of its spell it is, from 1, and how many of the one before it were
        beyond :data:`WHOLE`."""
        unseen = 0
        if self._since is None or now - self._since >= SPELL_S:
            unseen = max(0, self._seen - WHOLE)
            self._since, self._seen = now, 0
        self._seen += 1
        return self._seen, unseen


class Defects:
    """A log of defects."""

    def __init__(self, log: logging.Logger) -> None:
        self._log = log
        self._lock = threading.Lock()
        self._spell = Spell()

    def report(self, what: str, level: int = logging.ERROR) -> None:
        """Called where the exception is handled."""
        with self._lock:
            nth, unseen = self._spell.note(time.monotonic())
        if unseen:
            self._log.log(level, "%d more defects were not shown", unseen)
        if nth <= WHOLE:
            self._log.log(level, "%s", what, exc_info=True)
        if nth == WHOLE:
            self._log.log(level, "further defects are not shown for up to %g s", SPELL_S)

    def of_server(self, msg: str = "", level: int = 20, traceback: bool = False) -> None:
        """What the HTTP server has to say (cheroot's ``error_log``)."""
        if traceback:
            self.report(msg, min(level, logging.WARNING))
        else:
            # Up to INFO it is of peers that came and went, one line for each.
            shown = min(level, logging.WARNING) if level > logging.INFO else logging.DEBUG
            self._log.log(shown, "%s", msg)
