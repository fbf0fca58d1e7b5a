"""Reception: takes what comes on a client's socket, for a while at a time, whatever it is."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from typing import Any

from blockflow.client.conduct import MOST_FRAMES, Conduct
from blockflow.client.core import ClientCore
from blockflow.client.dealer import Dealer
from blockflow.client.outcome import Failed, Outcome
from blockflow.client.tap import Tap
from blockflow.core.errors import WireError
from blockflow.wire.client import request_id_of

log = logging.getLogger("blockflow.client")

ROUND_NS = 5_000_000
"""Then calls, deadlines and the client's end have their turn, however much there is to be read."""


class Reception:
    """Used from the connection's thread alone; nothing here waits.

    Nothing that a server sends ends that thread: what cannot be handled, for whatever reason, ends
    the request that it is for, and the connection.

    Args:
        deliver: hands outcomes to their owners.
        tap: is told what came.

    Attributes:
        conduct: whether the connection is to be given up. Nothing more is read from it then.
    """

    def __init__(
        self,
        core: ClientCore,
        dealer: Dealer,
        deliver: Callable[[list[Outcome]], None],
        tap: Tap | None = None,
    ) -> None:
        self.conduct = Conduct()
        self._core = core
        self._dealer = dealer
        self._deliver = deliver
        self._tap = tap
        self._unasked = 0

    def receive(self) -> bool:
        """Take what has come, for no longer than a round; False: there may be more."""
        dealer, conduct = self._dealer, self.conduct
        end_ns = time.monotonic_ns() + ROUND_NS
        while not conduct.trouble:
            frames = dealer.receive()
            if frames is None:
                return True
            now = time.monotonic_ns()
            if frames:
                self._take(frames, now)
            if not dealer.waits:
                return True
            if now > end_ns:
                return False
        return True

    def _take(self, frames: list[Any], now_ns: int) -> None:
        core = self._core
        if self._tap is not None:
            self._tap.received(frames[0].buffer)
        messages = [f.buffer for f in frames]
        try:
            self._deliver(core.on_message(messages, now_ns))
        except Exception as exc:  # a defect, which whoever sends this must not make use of
            log.exception("a message cannot be handled: its connection ends")
            core.counters.malformed += 1
            self.conduct.intolerable("what this client cannot handle")
            self._fail(messages[0], exc)
        if len(frames) > MOST_FRAMES:
            self.conduct.intolerable("a message of more frames than any has")
        if core.counters.unasked != self._unasked:
            self._unasked = core.counters.unasked
            self.conduct.unasked(sum(m.nbytes for m in messages), now_ns)

    def _fail(self, header: Any, exc: Exception) -> None:
        """End what this message was for, if that still waits."""
        rid = request_id_of(header)
        if rid is not None:
            text = f"the answer cannot be handled: {type(exc).__name__}"
            error = WireError("MALFORMED_MESSAGE", text, where=self._core.link.address)
            self._deliver([Failed(o.request_id, error) for o in self._core.cancel(rid)])
