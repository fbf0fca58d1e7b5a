"""ImportedEvents: other workers' READY events as this process has them open, within a bound.

The driver has so many interprocess events and no more, and does not say how many. One owner alone
may have hundreds of slots, and a worker may read from many owners: what was not used for longest is
closed, and opened again when its slot comes round. An event that the stream was told to wait for
stays open until that wait is over.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from itertools import islice

from blockflow.tensormq.cuda_api import CudaApi, CudaError, EventKind

MAX_IMPORTED = 384
"""With the events that a worker makes itself, one per slot (``cuda.MAX_SLOTS``) and a few more,
fewer than the 1000 that torch allows a process (CudaIPCTypes.h)."""

Key = tuple[int, int]
"""Owner and slot."""


class ImportedEvents:
    """Of one device and stream. Several threads may order work.

    Args:
        most: how many may be open, over all owners.
    """

    def __init__(self, api: CudaApi, stream: int, most: int = MAX_IMPORTED) -> None:
        self._api = api
        self._stream = stream
        self._most = most
        self._open: OrderedDict[Key, int] = OrderedDict()  # the longest unused first
        self._waits: dict[Key, dict[int, int]] = {}  # by number: an event of our own behind it
        self._spare: list[int] = []
        self._last_wait = 0
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return len(self._open)

    def order_behind(self, key: Key, handle: bytes) -> int:
        """What is put into the stream from now on comes behind the slot's event.

        Returns:
            0 where the event had come already; else the wait's number, for :meth:`passed`.

        Raises:
            CudaError: the event cannot be opened.
        """
        with self._lock:
            event = self._open.get(key)
            if event is None:
                event = self._open[key] = self._import(handle)
            self._open.move_to_end(key)
            if self._api.event_query(event):
                return 0
            self._api.stream_wait(self._stream, event)
            behind = self._spare.pop() if self._spare else self._api.event_create(EventKind.DONE)
            self._api.event_record(behind, self._stream)
            self._last_wait += 1
            self._waits.setdefault(key, {})[self._last_wait] = behind
            return self._last_wait

    def is_past(self, key: Key, wait: int) -> bool:
        """Whether the device is past a wait. Raises CudaError.

        Without the lock: who makes room for an event holds it until the device comes along, which
        it may never do, and this is how that is found out.
        """
        behind = self._behind(key, wait)
        if behind is None or self._api.event_query(behind):
            return True
        # Passed meanwhile, the event may be behind another wait already.
        return self._behind(key, wait) != behind

    def _behind(self, key: Key, wait: int) -> int | None:
        return self._waits.get(key, {}).get(wait)

    def passed(self, key: Key, wait: int) -> None:
        """The device is past a wait, and nobody will ask for it again."""
        with self._lock:
            waits = self._waits.get(key)
            if waits is not None:
                behind = waits.pop(wait, None)
                if behind is not None:
                    self._spare.append(behind)
                if not waits:
                    del self._waits[key]

    def close_owner(self, owner: int) -> None:
        """Nothing waits for them any more. Raises CudaError."""
        with self._lock:
            for key in [key for key in self._open if key[0] == owner]:
                self._close(key)

    def close(self) -> None:
        """All owners are closed. Raises CudaError."""
        with self._lock:
            while self._spare:
                self._api.event_destroy(self._spare.pop())

    def _import(self, handle: bytes) -> int:
        if len(self._open) >= self._most and not self._close_idle(len(self._open) + 1 - self._most):
            # As many tensors as that are under way at once: let the device catch up.
            self._api.stream_synchronize(self._stream)
            for waited in list(self._waits):
                self._forget(waited)
            self._close_idle(1)
        try:
            return self._api.event_import(handle)
        except CudaError:
            # The driver has fewer than we think, or another library holds the rest.
            if not self._close_idle(len(self._open)):
                raise
            return self._api.event_import(handle)

    def _close_idle(self, most: int) -> int:
        """Close the longest unused that nothing waits for; returns how many."""
        idle = list(islice((key for key in self._open if key not in self._waits), most))
        for key in idle:
            self._close(key)
        return len(idle)

    def _forget(self, key: Key) -> None:
        self._spare.extend(self._waits.pop(key, {}).values())

    def _close(self, key: Key) -> None:
        self._forget(key)
        self._api.event_destroy(self._open.pop(key))
