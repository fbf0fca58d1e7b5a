"""ResultMemory: replies that their clients may ask for again. Pure.

A client that lost its connection does not know whether its request was answered. It sends it again
under the same id and says so (``tries``); what is remembered here is then sent once more, and
nothing runs twice. Only requests that announced this are remembered, so the others cost nothing.
Of what is not remembered nothing can be known: it runs (again), unless a block must not.
"""

from __future__ import annotations

import hashlib
from collections import Counter, OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from blockflow.core.errors import BlockFlowError
from blockflow.dispatcher.entry import Entry
from blockflow.dispatcher.register import Register
from blockflow.wire.client import Request

MAX_RESULTS = 4096
MAX_AGE_NS = 60_000_000_000
"""No request lives longer, so no client asks later (limits.MAX_DEADLINE_MS)."""

_MAX_SHARE = 4
"""One reply may fill this part of the memory."""

_DIGEST_BYTES = 16


def request_digest(request: Request, elements: memoryview) -> bytes:
    """What makes two requests the same one: tasks, dtype, dims and the input's elements.

    An id alone does not: whoever guesses or repeats another's id must not get its result.
    """
    content = hashlib.blake2b(elements, digest_size=_DIGEST_BYTES)
    return _shape(request) + content.digest()


def _shape(request: Request) -> bytes:
    """What a digest begins with: of all but the elements, it costs the same for all inputs."""
    digest = hashlib.blake2b(digest_size=_DIGEST_BYTES)
    for name in request.tasks:
        digest.update(name.encode() + b"\0")
    digest.update(f"\0{request.tensor.dtype}{request.tensor.dims}".encode())
    return digest.digest()


@dataclass(frozen=True, slots=True)
class _Kept:
    digest: bytes
    frames: Sequence[Any]
    nbytes: int
    until_ns: int


class ResultMemory:
    """The latest replies, by request id; the oldest goes first.

    Args:
        max_bytes: of all frames together; 0 = nothing is remembered, and requests that come again
            are new ones.

    Attributes:
        events: ``remembered``, ``answered`` (from memory), ``attached`` (to a request in flight),
            ``forgotten`` (before their time), ``too_large``.
        nbytes: of all frames.
    """

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._kept: OrderedDict[bytes, _Kept] = OrderedDict()
        self.nbytes = 0
        self.events: Counter[str] = Counter()

    @property
    def on(self) -> bool:
        return self._max_bytes > 0

    def __len__(self) -> int:
        return len(self._kept)

    def remember(self, entry: Entry, frames: Sequence[Any], now_ns: int) -> None:
        """``frames`` are the reply of ``entry``; they must not change any more.

        A reply without any result is not worth it: the request may as well run again, unless a
        block must not.
        """
        ends = entry.results()
        if all(isinstance(e.outcome, BlockFlowError) for e in ends) and not entry.plan.once:
            return
        nbytes = sum(memoryview(f).nbytes for f in frames)
        if nbytes > self._max_bytes // _MAX_SHARE:
            self.events["too_large"] += 1
            return
        self._forget(self._kept.pop(entry.request_id, None))
        self._expire(now_ns)
        while len(self._kept) >= MAX_RESULTS or self.nbytes + nbytes > self._max_bytes:
            self._forget(self._kept.popitem(last=False)[1])
            self.events["forgotten"] += 1
        kept = _Kept(entry.digest, tuple(frames), nbytes, now_ns + MAX_AGE_NS)
        self._kept[entry.request_id] = kept
        self.nbytes += nbytes
        self.events["remembered"] += 1

    def recall(self, request_id: bytes, digest: bytes, now_ns: int) -> Sequence[Any] | None:
        """The frames of the reply to that very request; None when it is not remembered."""
        self._expire(now_ns)
        kept = self._kept.get(request_id)
        if kept is None or kept.digest != digest:
            return None
        self.events["answered"] += 1
        return kept.frames

    def alike(self, request_id: bytes, shape: bytes) -> bool:
        """Whether there is a reply that :meth:`recall` may find; ``shape`` is what the digest of
        its request begins with."""
        kept = self._kept.get(request_id)
        return kept is not None and kept.digest.startswith(shape)

    def gauges(self) -> dict[str, int]:
        return {"results": len(self._kept), "bytes": self.nbytes, **self.events}

    def _expire(self, now_ns: int) -> None:
        while self._kept:
            oldest = next(iter(self._kept.values()))
            if oldest.until_ns > now_ns:
                return
            self._forget(self._kept.popitem(last=False)[1])

    def _forget(self, kept: _Kept | None) -> None:
        if kept is not None:
            self.nbytes -= kept.nbytes


def find_known(
    memory: ResultMemory,
    register: Register,
    client: bytes,
    request: Request,
    elements: memoryview,
    now_ns: int,
) -> Sequence[Any] | None:
    """What is known of a request that says that it was sent before.

    Its ``elements`` are read only where one that is like it is known: that takes long, and it has
    not been let in.

    Returns:
        The frames of its reply; empty when it is in flight, and its reply will now go to
        ``client``; None when nothing is known of it: it may never have arrived.

    Raises:
        RequestError: DUPLICATE_REQUEST: another one is in flight for ``client`` under its name.
    """
    if request.tries <= 1:
        return None
    name, shape = request.request_id, _shape(request)
    if not (memory.alike(name, shape) or register.alike(name, shape)):
        return None
    digest = request_digest(request, elements)
    frames = memory.recall(name, digest, now_ns)
    if frames is not None:
        return frames
    entry = register.find(name, digest)
    if entry is None:
        return None
    # Its client may hear late of a break, and has sent it by the new connection already.
    if register.named(client, name) is not entry:
        register.attach(client, entry)
    memory.events["attached"] += 1
    return ()
