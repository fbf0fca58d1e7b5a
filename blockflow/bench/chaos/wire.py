"""Wire: tells the ledger what one client's socket sent and received."""

from __future__ import annotations

import threading
from collections.abc import Callable
from itertools import count

from blockflow.bench.chaos.ledger import Ledger
from blockflow.core.errors import WireError
from blockflow.wire.client import (
    Reply,
    Request,
    decode_to_client,
    decode_to_dispatcher,
)

_NUMBERS = count(1)
"""Of connections, of all clients."""


class WireTap:
    """Counts by itself, from the headers: what the SDK makes of them is no judge's business."""

    def __init__(self, ledger: Ledger, lock: threading.Lock, clock: Callable[[], float]) -> None:
        self._ledger = ledger
        self._lock = lock
        self._clock = clock
        self._connection = next(_NUMBERS)

    def connected(self) -> None:
        self._connection = next(_NUMBERS)

    def disconnected(self) -> None:
        with self._lock:
            self._ledger.broke(self._connection)

    def sent(self, header: bytes) -> None:
        message = decode_to_dispatcher(header)
        if isinstance(message, Request):
            with self._lock:
                self._ledger.carried(message.request_id, self._connection)

    def received(self, header: memoryview) -> None:
        try:
            message = decode_to_client(header)
        except WireError:
            with self._lock:
                self._ledger.garbled += 1
            return
        if isinstance(message, Reply):
            with self._lock:
                self._ledger.replied(message.request_id, self._connection, self._clock())
