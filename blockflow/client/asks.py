"""Asks: what a client has asked to be granted, and what it takes for an answer to that. Pure."""

from __future__ import annotations

from blockflow.core import limits
from blockflow.core.errors import WireError
from blockflow.tensormq.grants import geometry, segment_bytes
from blockflow.wire.grants import Ask, Direction, FromDispatcher, Granted


class Asks:
    """Of one side connection: each Ask has one answer, and nothing else has any."""

    def __init__(self) -> None:
        self._open: set[tuple[Direction, int]] = set()
        self._granted: set[int] = set()
        self._nbytes = 0

    def asked(self, ask: Ask) -> None:
        """It was sent."""
        self._open.add((ask.direction, geometry(ask.nbytes)[0]))

    def answered(self, msg: FromDispatcher) -> None:
        """An answer came. To be called before its memory is touched.

        Raises:
            WireError: MALFORMED_MESSAGE: it answers no open Ask, or gives what none has asked for.
        """
        slot_bytes, most = geometry(msg.slot_bytes if isinstance(msg, Granted) else msg.nbytes)
        if (msg.direction, slot_bytes) not in self._open:
            raise _unasked(f"slots of {slot_bytes} bytes are {type(msg).__name__.lower()}")
        self._open.remove((msg.direction, slot_bytes))
        if not isinstance(msg, Granted):
            return
        nbytes = segment_bytes(msg.slot_bytes, msg.slots)
        if msg.slot_bytes != slot_bytes or msg.slots > most or msg.grant in self._granted:
            raise _unasked(f"a grant of {msg.slots} slots of {msg.slot_bytes} bytes")
        if self._nbytes + nbytes > limits.MAX_CLIENT_GRANT_BYTES:
            raise _unasked(f"grants of more than {limits.MAX_CLIENT_GRANT_BYTES} bytes")
        self._granted.add(msg.grant)
        self._nbytes += nbytes


def _unasked(what: str) -> WireError:
    return WireError("MALFORMED_MESSAGE", f"{what}, which was not asked for")
