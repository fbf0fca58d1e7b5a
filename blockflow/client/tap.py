"""Tap: sees what passes a client's socket, for those who judge the system by it."""

from __future__ import annotations

from typing import Protocol


class Tap(Protocol):
    """Is told of every header in the order of the wire, before the client has made anything of it.

    The client gives each request one end, whatever comes: a second reply is dropped and an absent
    one is made up for. Only here both can be seen. All methods are called in the connection's
    thread: keep them short.
    """

    def connected(self) -> None:
        """A connection begins; what was sent on the one before will not be answered on it."""

    def disconnected(self) -> None:
        """It ended, and with it what had not left; the next one begins later."""

    def sent(self, header: bytes) -> None:
        """The socket took this message."""

    def received(self, header: memoryview) -> None:
        """This message came; whether it is well-formed is not known yet."""
