"""The side connection: receives granted segments, writes inputs into them, reads results."""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import socket
import weakref
from collections import deque
from typing import Any

from blockflow.client.asks import Asks
from blockflow.core import limits
from blockflow.core.errors import BlockFlowError, WireError
from blockflow.tensormq.forks import in_child
from blockflow.tensormq.grants_memory import Segment
from blockflow.wire.client import Place
from blockflow.wire.grants import (
    Ask,
    FromClient,
    FromDispatcher,
    Granted,
    decode_from_dispatcher,
    encode_side,
)

log = logging.getLogger("blockflow.client")


class SideConnection:
    """Used from the connection's thread alone; nothing here waits.

    Attributes:
        inbox: what has come, its segments mapped.
        trouble: why the connection ended; '' while it stands.
    """

    def __init__(self) -> None:
        self._socket: socket.socket | None = None
        self._segments: dict[int, Segment] = {}
        self._old: dict[int, Segment] = {}
        self._asks = Asks()
        self.inbox: deque[FromDispatcher] = deque()
        self.trouble = ""

    def fileno(self) -> int:
        """-1 when there is no connection."""
        return -1 if self._socket is None else self._socket.fileno()

    def connect(self, path: str) -> None:
        """Connect to the Dispatcher's side socket. See :attr:`trouble` for the outcome.

        Segments of the connection before stay: replies that name them may be on their way.
        """
        self.trouble = ""
        self._old, self._segments = self._segments, {}
        self._asks = Asks()
        kind = getattr(socket, "SOCK_SEQPACKET", None)
        if kind is None or not hasattr(socket, "recv_fds"):
            self.trouble = "this platform cannot pass memory between processes"
            return
        try:
            self._socket = socket.socket(socket.AF_UNIX, kind)
            in_child(self._socket, socket.socket.close)  # its end ends what is granted
            self._socket.setblocking(False)
            self._socket.connect(path)
        except (OSError, ValueError) as exc:  # the latter: what no path can be
            why = getattr(exc, "strerror", None) or exc
            self._end(f"the Dispatcher's side socket cannot be reached: {why}")

    def send(self, msg: FromClient) -> None:
        """Say something, or end the connection."""
        if self._socket is not None:
            if isinstance(msg, Ask):
                self._asks.asked(msg)
            try:
                self._socket.send(encode_side(msg))
            except OSError as exc:
                self._end(f"the side connection broke: {exc.strerror}")

    def receive(self) -> None:
        """Take what has come into :attr:`inbox`: answers to what was asked. Whoever sends anything
        else is left, and its memory with it; where only this process has no room for a segment, the
        others stay for replies that are on their way."""
        flags = socket.MSG_CMSG_CLOEXEC
        while self._socket is not None:
            try:
                packet, fds, told, _ = socket.recv_fds(
                    self._socket, limits.MAX_HEADER_BYTES, 1, flags
                )
            except BlockingIOError:
                return
            except OSError:
                packet, fds = b"", []
            if not packet:
                self._end("the Dispatcher has closed the side connection")
                return
            try:
                if told & socket.MSG_CTRUNC and not fds:  # the kernel found none to pass it by
                    raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
                self.inbox.append(self._take(packet, fds))
            except OSError as exc:  # this process's own want: results lie in the segments before
                self._end(f"a segment cannot be used: {exc.strerror}")
            except Exception as exc:  # nothing that comes here ends the client's thread
                if not isinstance(exc, BlockFlowError):
                    log.exception("a packet cannot be handled: the side connection ends")
                self._segments.clear()
                self._old.clear()
                self._end(f"a segment cannot be used: {exc}")

    def _take(self, packet: bytes, fds: list[int]) -> FromDispatcher:
        try:
            msg = decode_from_dispatcher(packet)
            self._asks.answered(msg)
            if isinstance(msg, Granted):
                if not fds:
                    raise WireError("MALFORMED_MESSAGE", "a grant without memory")
                self._segments[msg.grant] = Segment.adopt(fds.pop(), msg.slot_bytes, msg.slots)
            return msg
        finally:
            for fd in fds:
                os.close(fd)

    # --- tensors

    def write(self, grant: int, index: int, body: memoryview) -> None:
        """Copy an input into its slot; other threads may run meanwhile."""
        import numpy as np

        slot = self._segments[grant].slot(index, body.nbytes)
        np.copyto(np.frombuffer(slot, np.uint8), np.frombuffer(body, np.uint8))

    def read(self, place: Place, nbytes: int) -> memoryview:
        """A copy of a result; its slot is free then, also when it could not be copied.

        Raises:
            WireError: MALFORMED_MESSAGE: there is no such place.
            MemoryError: there is no room for a copy.
        """
        import numpy as np

        segment = self._segment(place)
        try:
            out = np.empty(nbytes, np.uint8)
            np.copyto(out, np.frombuffer(segment.slot(place.slot, nbytes), np.uint8))
        finally:
            segment.marks[place.slot] = place.generation
        return out.data

    def view(self, place: Place, nbytes: int) -> memoryview:
        """A result where it lies: its slot is free when nothing refers to this memory any more.

        Raises:
            WireError: MALFORMED_MESSAGE: there is no such place.
        """
        import numpy as np

        segment = self._segment(place)
        root: Any = np.frombuffer(segment.slot(place.slot, nbytes), np.uint8)
        end = weakref.finalize(root, _release, segment, place, os.getpid())
        end.atexit = False
        memory: memoryview = root.data  # which refers to root
        return memory

    def release(self, place: Place) -> None:
        """A result that nobody wants."""
        with contextlib.suppress(WireError):
            self._segment(place).marks[place.slot] = place.generation

    def _segment(self, place: Place) -> Segment:
        if place.grant not in self._segments:
            self.receive()  # it was sent before this reply was, on another connection
        segment = self._segments.get(place.grant) or self._old.get(place.grant)
        if segment is None or place.slot >= len(segment.marks):
            raise WireError(
                "MALFORMED_MESSAGE", f"a result in grant {place.grant}, which is not known here"
            )
        return segment

    # --- the end

    def close(self) -> None:
        """Drop the connection and all segments; views stay readable."""
        self._end("")
        self._segments.clear()
        self._old.clear()
        self.inbox.clear()

    def _end(self, trouble: str) -> None:
        """The segments stay for replies that are on their way, until :meth:`close`."""
        self.trouble = trouble
        if self._socket is not None:
            self._socket.close()
            self._socket = None


def _release(segment: Segment, place: Place, pid: int) -> None:
    # A forked child drops its copies of the parent's views, too; the slots are not its own.
    if os.getpid() == pid:
        segment.marks[place.slot] = place.generation
