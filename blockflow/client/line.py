"""Line: keeps a client's dealer connected, one attempt after the other, and says what is wrong."""

from __future__ import annotations

import zmq

from blockflow.client.dealer import Dealer, Redial
from blockflow.client.names import Whereabouts
from blockflow.client.outcome import Link

_CONNECT_NS = 4_000_000_000
_HANDSHAKE_NS = 6_000_000_000
"""How long an attempt waits to be connected, and then for the handshake: a second longer than
libzmq, which does not always end it. To a peer whose first byte is not ZMTP 3's it speaks ZMTP 1.0,
where neither a handshake's time-out nor its success exists."""

_OTHER_SERVICE = (
    "is it another service, such as REST? `blockflow status` shows the address for clients"
)
_SILENT = (
    "what listens there has not finished the handshake: it speaks another protocol, or is busy; "
    + _OTHER_SERVICE
)
_TROUBLES = {
    int(zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL): "what listens there closed during the handshake; "
    f"does it ask for keys, or for other ones? Or {_OTHER_SERVICE}",
    int(zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL): "what listens there speaks another protocol; "
    + _OTHER_SERVICE,
    int(zmq.EVENT_HANDSHAKE_FAILED_AUTH): "authentication failed",
}
"""What events say of an attempt."""

_FAILED_AUTH = int(zmq.EVENT_HANDSHAKE_FAILED_AUTH)
_REFUSALS = (_FAILED_AUTH, int(zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL))
_OTHER_MECHANISM = int(zmq.PROTOCOL_ERROR_ZMTP_MECHANISM_MISMATCH)


class Line:
    """Used from the connection's thread alone; nothing here waits.

    Args:
        dealer: which may be connecting already.
        link: whose trouble this says.
        where: where to connect to.

    Attributes:
        refused: the last attempt was refused, and the next call shall not wait for the next one.
    """

    def __init__(self, dealer: Dealer, link: Link, where: Whereabouts) -> None:
        self.refused = False
        self._dealer = dealer
        self._link = link
        self._where = where
        self._redial = Redial()
        self._trouble = ""

    def begin(self, now_ns: int) -> None:
        """Look after the first attempt, or make it."""
        if self._dealer.endpoint:
            self._redial.dialled(now_ns + _CONNECT_NS)
        else:
            self.dial()

    def next_wakeup(self) -> int | None:
        """When :meth:`on_tick` should run next; it should after a ring as well."""
        redial = self._redial
        return redial.due_ns if redial.until_ns is None else redial.until_ns

    def on_tick(self, now_ns: int) -> None:
        if self.next_wakeup() is None and not self._where.answers:
            return  # connected, as a rule
        if self._redial.is_overdue(now_ns):  # nothing came of it, and libzmq does not say so
            self._dealer.hang_up()
            self._tell(_SILENT)
            self._failed(now_ns)
        if self._redial.is_due(now_ns):
            self.dial()
        endpoint = self._where.found()
        if endpoint is None:
            return
        self._tell(self._trouble)
        if endpoint:
            self._redial.dialled(now_ns + _CONNECT_NS)
            self._dealer.dial(endpoint)
        else:
            self._failed(now_ns)

    def dial(self) -> None:
        """Begin an attempt: :meth:`on_tick` goes on with it as soon as it is known where to."""
        self.refused = self._link.denied = False
        self._dealer.hang_up()
        self._redial.dialled()
        self._where.ask()
        self._tell(self._trouble)

    def succeeded(self) -> None:
        """The handshake is done."""
        self._redial.succeeded()
        self._where.worked(self._dealer.endpoint)
        self._tell("")

    def ended(self, now_ns: int) -> None:
        """The connection has; what had come on it was read."""
        self._dealer.hang_up()
        self._failed(now_ns)

    def leave(self, trouble: str, now_ns: int) -> None:
        """Give the connection up, for what came on it."""
        self._dealer.hang_up()
        self._redial.offended(now_ns)
        self._tell(trouble)

    def on_event(self, kind: int, value: int, now_ns: int) -> bool:
        """Of an attempt; whether this client's key, or its lack of one, is refused."""
        if kind == zmq.EVENT_CONNECTED and not self._link.up:
            self._redial.dialled(now_ns + _HANDSHAKE_NS)
            self._tell(self._trouble or _SILENT)
        elif kind == zmq.EVENT_CONNECT_RETRIED and not self._link.up:
            self._failed(now_ns)
        elif kind in _TROUBLES:
            self._tell(_TROUBLES[kind])
            self.refused = kind in _REFUSALS
            if kind == _FAILED_AUTH or value == _OTHER_MECHANISM:
                self._redial.dialled()  # not before somebody asks, or libzmq says that it would
                return True
            self._failed(now_ns)
        return False

    def _failed(self, now_ns: int) -> None:
        if self._where.further:
            self._redial.moves_on(now_ns)
        else:
            self._redial.failed(now_ns)

    def _tell(self, trouble: str) -> None:
        """What is wrong with the last attempt; what is wrong with the name comes first."""
        self._trouble = trouble
        self._link.trouble = self._where.trouble or trouble
