"""How a server behaves towards its client, and when it is to be left. Pure."""

from __future__ import annotations

from blockflow.core import limits

MOST_UNASKED = 1024
"""So much that nobody asked for is borne at once. Of an honest server it is a few: what crossed
with the end of a question, and a description whenever the tasks change."""

FORGIVEN_PER_S = 64

UNIT_BYTES = 64 * 1024
"""A message counts once more for each of these: what lies unread is memory."""

MOST_FRAMES = 1 + limits.MAX_TASKS_PER_REQUEST
"""A header, and a tensor for each task."""


class Conduct:
    """Counts what a server says that answers nothing; time forgives.

    Attributes:
        trouble: why its connection is to be given up; '' = it is not.
    """

    def __init__(self) -> None:
        self.trouble = ""
        self._level = 0.0
        self._at_ns = 0

    def unasked(self, nbytes: int, now_ns: int) -> None:
        """A message of ``nbytes`` came that answers nothing."""
        forgiven = (now_ns - self._at_ns) * FORGIVEN_PER_S / 1e9
        self._level = max(0.0, self._level - forgiven) + 1 + nbytes // UNIT_BYTES
        self._at_ns = now_ns
        if self._level > MOST_UNASKED:
            self.trouble = "given up: what listens there sends much that nobody asked for"

    def intolerable(self, why: str) -> None:
        """A message came that no server sends."""
        self.trouble = f"given up: what listens there has sent {why}"

    def begin(self) -> None:
        """Another connection."""
        self.trouble, self._level = "", 0.0
