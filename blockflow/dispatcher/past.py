"""Past: clients that were lost or cut off. Pure.

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
    """The last clients that were lost, of those that ZeroMQ has named. Who has named itself may be
    back, so that nothing follows from its end; and its name may be as long as a frame."""

    def __init__(self) -> None:
        self._cut_off: dict[bytes, bool] = {}

    def add(self, client: bytes, *, cut_off: bool) -> None:
        if not is_given(client):
            return
        past = self._cut_off
        past[client] = past.pop(client, False) or cut_off  # the latest come last
        if len(past) > REMEMBERED:
            del past[next(iter(past))]

    def __contains__(self, client: bytes) -> bool:
        return client in self._cut_off

    def is_over(self, client: bytes) -> bool:
        """Its connection is not, and will never be, the one that a descriptor stands for."""
        return is_given(client) and client in self._cut_off

    def cut_off(self, client: bytes) -> bool:
        """Nobody waits for an answer to what it had sent."""
        return is_given(client) and self._cut_off.get(client, False)
