"""Sending sockets by endpoint: opened when first needed, kept, pruned when the routes change.

A send never waits. What ZeroMQ does not take at once (the connection is not up yet, or the receiver
is behind) stays here in a bounded queue per endpoint, in order, until the socket turns writable;
when that queue is full, or the endpoint goes away, the caller gets the message back and answers for
it.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import zmq

from blockflow.core.errors import SystemError_
from blockflow.core.text import worth_a_line
from blockflow.tensormq.curve import Protect
from blockflow.tensormq.sockets import DATA_HWM, connect_push, end_message

_LOG = logging.getLogger("blockflow.tensormq")

_DONTWAIT = int(zmq.DONTWAIT)
MAX_PENDING = 1024
"""Messages per endpoint that wait for a connection or a slow receiver."""


@dataclass(frozen=True, slots=True)
class Unsent:
    """A message that never left: ``tag`` is what the caller gave with it."""

    endpoint: str
    frames: Sequence[Any]
    tag: Any


class Watcher(Protocol):
    """What watches sockets for the loop: ``zmq.Poller``, or an epoll of their descriptors."""

    def register(self, socket: Any, flags: int, /) -> Any: ...

    def unregister(self, socket: Any, /) -> Any: ...


class _Link:
    """One PUSH socket and what waits for it."""

    __slots__ = ("endpoint", "queue", "sock")

    def __init__(self, sock: zmq.Socket[bytes], endpoint: str) -> None:
        self.sock = sock
        self.endpoint = endpoint
        self.queue: deque[tuple[Sequence[Any], Any]] = deque()

    def try_send(self, frames: Sequence[Any]) -> bool:
        try:
            if len(frames) == 1:  # a handle: half the cost of the general case
                self.sock.send(frames[0], _DONTWAIT)
            else:
                self.sock.send_multipart(frames, _DONTWAIT, copy=False)
        except zmq.Again:
            return False
        except BaseException:
            if len(frames) > 1:
                end_message(self.sock)
            raise
        return True


class PushCache:
    """One PUSH socket per endpoint. Used from one thread, which never blocks here.

    Args:
        ctx: this process's context.
        poller: the loop's poller; sockets with waiting messages are registered in it for POLLOUT,
            and taken out again when their queue is empty. The loop calls :meth:`flush` when one
            fires.
        max_pending: messages that may wait per endpoint.
        hwm: messages that ZeroMQ may queue per endpoint.
        protect: sets CURVE up towards tcp endpoints.
    """

    def __init__(
        self,
        ctx: zmq.Context[zmq.Socket[bytes]],
        poller: Watcher,
        max_pending: int = MAX_PENDING,
        hwm: int = DATA_HWM,
        protect: Protect | None = None,
    ) -> None:
        self._ctx = ctx
        self._poller = poller
        self._max_pending = max_pending
        self._hwm = hwm
        self._protect = protect
        self._links: dict[str, _Link] = {}
        self._waiting: dict[str, _Link] = {}
        self._refused = 0

    def send(self, endpoint: str, frames: Sequence[Any], tag: Any = None) -> bool:
        """Send a message, or queue it behind those that wait for the same endpoint.

        Args:
            frames: the header, and a tensor's elements where they travel along. Frames of 64 KiB
                and more are sent from the caller's memory: it must not change any more.
            tag: comes back in :class:`Unsent` if the message never leaves.

        Returns:
            False when the queue is full, or no descriptor is left for a socket: the message was
            not taken.

        Raises:
            RequestError: INVALID_REQUEST: not an endpoint.
        """
        link = self._links.get(endpoint) or self._open(endpoint)
        if link is None:
            return False
        if not link.queue and link.try_send(frames):
            return True
        if len(link.queue) >= self._max_pending:
            return False
        link.queue.append((frames, tag))
        if endpoint not in self._waiting:
            self._waiting[endpoint] = link
            self._poller.register(link.sock, zmq.POLLOUT)
        return True

    def flush(self) -> int:
        """Send what waits, as far as the sockets take it now; returns how many messages left."""
        sent = 0
        for link in list(self._waiting.values()):
            while link.queue and link.try_send(link.queue[0][0]):
                link.queue.popleft()
                sent += 1
            if not link.queue:
                self._no_longer_waiting(link)
        return sent

    def pending(self) -> int:
        """Messages that wait."""
        return sum(len(link.queue) for link in self._waiting.values())

    def sockets_waiting(self) -> list[zmq.Socket[bytes]]:
        """The sockets that are watched for POLLOUT."""
        return [link.sock for link in self._waiting.values()]

    def endpoints(self) -> list[str]:
        """Endpoints with an open socket."""
        return list(self._links)

    def drop(self, endpoint: str) -> list[Unsent]:
        """Close the socket of a peer that is gone, at once; returns what still waited here.

        What ZeroMQ had taken but not delivered goes with the socket: those messages were the
        peer's, and whoever watches over requests ends them with that peer.
        """
        return self._close(endpoint, linger_ms=0)

    def retain(self, endpoints: Collection[str]) -> list[Unsent]:
        """Close all sockets but those of ``endpoints`` (new routes); returns what still waited.

        What ZeroMQ had taken is still delivered within the linger time.
        """
        unsent: list[Unsent] = []
        for endpoint in [e for e in self._links if e not in endpoints]:
            unsent += self._close(endpoint, linger_ms=None)
        return unsent

    def close(self) -> list[Unsent]:
        """Close all sockets; returns what still waited. Idempotent."""
        return self.retain(())

    def _open(self, endpoint: str) -> _Link | None:
        """A new socket; None when there is none to be had now. The next message asks again."""
        try:
            sock = connect_push(self._ctx, endpoint, self._hwm, self._protect)
        except SystemError_ as exc:
            if exc.code != "NO_SPACE":
                raise
            self._refused += 1
            if worth_a_line(self._refused):
                _LOG.warning("no socket for %s (%d times so far): %s", endpoint, self._refused, exc)
            return None
        link = self._links[endpoint] = _Link(sock, endpoint)
        return link

    def _close(self, endpoint: str, linger_ms: int | None) -> list[Unsent]:
        link = self._links.pop(endpoint, None)
        if link is None:
            return []
        if endpoint in self._waiting:
            self._no_longer_waiting(link)
        link.sock.close(linger_ms)
        return [Unsent(endpoint, frames, tag) for frames, tag in link.queue]

    def _no_longer_waiting(self, link: _Link) -> None:
        del self._waiting[link.endpoint]
        self._poller.unregister(link.sock)
