"""InputCopies: what lies between a slot that was received and the engine, counted."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True)
class InputCopies:
    """Copies of one stage's inputs since the start.

    Counted by the lane that computes the stage (one at a time does) and read by the monitor.

    Attributes:
        copies: whole tensors, one for each batch that had to be put together or straightened.
        nbytes: of those tensors.
    """

    copies: int = 0
    nbytes: int = 0

    def add(self, copies: int, nbytes: int) -> None:
        """``copies`` of a tensor of ``nbytes`` each."""
        self.copies += copies
        self.nbytes += copies * nbytes
