"""RunCopies: what an engine copies beside computing, counted by itself.

What a worker copies around the engine it counts itself (:mod:`blockflow.worker.copies`). A copy
moves a whole tensor as it is. A conversion to another dtype is an operator of the computation.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True)
class RunCopies:
    """Copies that the last run made.

    Attributes:
        inputs: of the input, before it was computed with.
        outputs: of the result, after it was computed.
    """

    inputs: int = 0
    outputs: int = 0

    def reset(self) -> None:
        """A run begins."""
        self.inputs = self.outputs = 0
