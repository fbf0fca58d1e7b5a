"""Questions: who has asked for the description, and gets it once the one before has been taken.

A question is two dozen bytes and a description of thousands of tasks a megabyte: without a bound
each question would be a megabyte more that waits for a client that does not read.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import Any

MOST_OPEN = 64
"""Questions of one client that wait; of more the latest are answered."""


class Questions:
    """One description at a time is under way to each client.

    Args:
        answer: the frame for a question, by the routes of now.
        send: sends a client a message. A large frame is alive until ZeroMQ has written it, a small
            one, of which ZeroMQ makes a copy, until this returns.

    Attributes:
        under_way: the latest answer to each client, and whether it has been taken: :meth:`go_on`.
    """

    def __init__(
        self, answer: Callable[[bytes], bytes], send: Callable[[bytes, Sequence[Any]], None]
    ) -> None:
        self._answer = answer
        self._send = send
        self.under_way: dict[bytes, weakref.ref[memoryview]] = {}
        self._open: dict[bytes, dict[bytes, None]] = {}  # in the order in which they came

    def ask(self, question: bytes, *clients: bytes) -> None:
        """Answer it now, or when the client has taken the answer before. A question that waits
        already is answered once."""
        for client in clients:
            waiting = self._open.get(client)
            if waiting is None and self._taken(client):
                self._tell(client, question)
                continue
            if waiting is None:
                waiting = self._open[client] = {}
            waiting[question] = None
            if len(waiting) > MOST_OPEN:
                del waiting[next(iter(waiting))]

    def go_on(self) -> None:
        """Answer who has taken the answer before."""
        for client in list(self.under_way):
            if not self._taken(client):
                continue
            self.under_way.pop(client, None)  # to tell another may have shown that it is gone
            waiting = self._open.get(client)
            if waiting is None:
                continue
            question = next(iter(waiting))
            del waiting[question]
            if not waiting:
                del self._open[client]
            self._tell(client, question)

    def forget(self, client: bytes) -> None:
        self._open.pop(client, None)
        self.under_way.pop(client, None)

    def _taken(self, client: bytes) -> bool:
        last = self.under_way.get(client)
        return last is None or last() is None

    def _tell(self, client: bytes, question: bytes) -> None:
        frame = memoryview(self._answer(question))
        # Before it is sent: that may show that the client has gone, who is forgotten then.
        self.under_way[client] = weakref.ref(frame)
        self._send(client, [frame])
