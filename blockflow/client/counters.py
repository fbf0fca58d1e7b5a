"""What a client has sent and received."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from blockflow.wire.client import TaskResult


@dataclass(slots=True)
class Counters:
    """What a connection's core has seen since it was made.

    ``unasked`` are messages that answer nothing, ``hang_ups`` connections that were given up for
    such and worse ones.
    """

    submitted: int = 0
    answered: int = 0
    failed: int = 0
    late_replies: int = 0
    malformed: int = 0
    unasked: int = 0
    hang_ups: int = 0
    connects: int = 0
    disconnects: int = 0
    retries: int = 0
    slot_uploads: int = 0
    slot_upload_bytes: int = 0
    message_uploads: int = 0
    message_upload_bytes: int = 0
    slot_results: int = 0
    slot_result_bytes: int = 0
    message_results: int = 0
    message_result_bytes: int = 0

    def count(self, results: Iterable[TaskResult]) -> list[int]:
        """The tensors of a reply, by the way that they came.

        Returns:
            The sizes of those that came in the message.
        """
        framed: list[int] = []
        for r in results:
            if r.tensor is None:
                continue
            nbytes = r.tensor.nbytes
            if r.place is not None:
                self.slot_results += 1
                self.slot_result_bytes += nbytes
            else:
                framed.append(nbytes)
        self.message_results += len(framed)
        self.message_result_bytes += sum(framed)
        return framed
