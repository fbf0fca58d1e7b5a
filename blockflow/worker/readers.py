"""Readers: who gets what lies in this worker's slots."""

from __future__ import annotations

from collections.abc import Collection, Iterable

from blockflow.tensormq.channel import Producer
from blockflow.worker.parting import Part


class Readers:
    """Tells the slots' producer how many stages it has been of use to.

    Stages, and not processes: a process that hosts two of them may be behind with one only.

    Args:
        producer: of the slots, None where there are none.
    """

    def __init__(self, producer: Producer | None) -> None:
        self._producer = producer
        self._stages: set[int] = set()

    def meet(self, sends: Iterable[tuple[Part, object]]) -> None:
        """These parts are about to be sent by handle."""
        for part, _ in sends:
            if part.stage not in self._stages:
                self._stages.add(part.stage)
                self._tell()

    def keep(self, stages: Collection[int]) -> None:
        """No other stages are in the routes any more."""
        self._stages.intersection_update(stages)
        self._tell()

    def _tell(self) -> None:
        if self._producer is not None:
            self._producer.tell_readers(len(self._stages))
