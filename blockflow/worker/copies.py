"""InputCopies: what lies between a slot that was received and the engine, counted."""

from __future__ import annotations

from dataclasses import dataclass, field
from threading import Lock


@dataclass(slots=True)
class InputCopies:
    """Copies of one stage's inputs since the start.

    Counted by the lanes that compute the stage and read by the monitor.

    Attributes:
        copies: whole tensors, one for each batch that had to be put together or straightened.
        nbytes: of those tensors.
    """

    copies: int = 0
    nbytes: int = 0
    _lock: Lock = field(default_factory=Lock, compare=False, repr=False)

    def add(self, copies: int, nbytes: int) -> None:
        """``copies`` of a tensor of ``nbytes`` each."""
        with self._lock:
            self.copies += copies
            self.nbytes += copies * nbytes
