"""Past: clients that nobody waits for any more. Pure.

ZeroMQ delivers what a connection had sent also after its end. Such a message names the descriptor
that the connection had, which may belong to another one by then.
"""

from __future__ import annotations

REMEMBERED = 4096
_NAME_BYTES = 5


def is_given(client: bytes) -> bool:
    """ZeroMQ has named it, by a counter: no connection after it gets this name. (One that gives
    itself a name of this form has to guess the counter: docs/security.md.)"""
    return len(client) == _NAME_BYTES and client[0] == 0


def came_after(client: bytes, other: bytes) -> bool:
    """Both are said to have the same connection: does it belong to ``client``?

    To the one that ZeroMQ named last; who names itself may have had another connection before.
    """
    if not (is_given(client) and is_given(other)):
        return is_given(client)
    ahead = int.from_bytes(client[1:]) - int.from_bytes(other[1:])
    return ahead % (1 << 32) < 1 << 31  # the counter begins anywhere, and wraps


class Past:
    """The last clients that have gone or were cut off, of those that ZeroMQ has named: no answer
    can reach them, so what they had sent is thrown away. Who has named itself may be back, so that
    nothing follows from its end; and its name may be as long as a frame."""

    def __init__(self) -> None:
        self._clients: dict[bytes, None] = {}

    def add(self, client: bytes) -> None:
        if not is_given(client):
            return
        self._clients.pop(client, None)
        self._clients[client] = None  # the latest come last
        if len(self._clients) > REMEMBERED:
            del self._clients[next(iter(self._clients))]

    def __contains__(self, client: bytes) -> bool:
        return client in self._clients
