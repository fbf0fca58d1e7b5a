"""How many bytes of tensors may be under way in messages of a connection. Pure.

More might be more than the Dispatcher lets wait to be read (dispatcher/unread.py), which cuts the
connection off. What a request has brought there is read when it, *or one sent later*, is replied to
(PROTOCOL.md, "Client"); that its caller has given up says nothing of it.
"""

from __future__ import annotations

from collections import deque

from blockflow.core import limits


class Window:
    """Of one connection, whose requests are numbered as they are sent.

    Attributes:
        nbytes: that were sent, and of which nothing says that they were read.
    """

    def __init__(self) -> None:
        self.nbytes = 0
        self._under_way: deque[tuple[int, bytes, int]] = deque()

    def takes(self, nbytes: int) -> bool:
        """Whether so many more may be sent now; one tensor alone may be larger than all."""
        return not self.nbytes or self.nbytes + nbytes <= limits.MAX_UNANSWERED_BYTES

    def sent(self, number: int, request_id: bytes, nbytes: int) -> None:
        """A tensor has left in a message."""
        self._under_way.append((number, request_id, nbytes))
        self.nbytes += nbytes

    def on_reply(self, request_id: bytes, number: int) -> None:
        """The Dispatcher has handled this request, and with it all that were sent before.

        ``number`` is 0 when the request has ended here already.
        """
        under_way = self._under_way
        if not number:
            number = next((n for n, rid, _ in under_way if rid == request_id), 0)
        while under_way and under_way[0][0] <= number:
            self.nbytes -= under_way.popleft()[2]

    def reset(self) -> None:
        """The connection has ended, and with it what was under way."""
        self._under_way.clear()
        self.nbytes = 0
