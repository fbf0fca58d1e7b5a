"""FrameReader: the messages of a socket, of which no more frames are kept than one may have."""

from __future__ import annotations

import zmq

_SKIPPED_AT_ONCE = 1024
_NOBLOCK = int(zmq.NOBLOCK)


class FrameReader:
    """Reads a bound socket's messages, never waits.

    A message that has arrived may have millions of frames, and must be read to its end before the
    next one. They are thrown away, some at a time: other sockets are to be served as well.

    Args:
        most: frames that a message may have.

    Attributes:
        skipping: the last message is so long that its rest is still there.
    """

    def __init__(self, socket: zmq.Socket[bytes], most: int) -> None:
        self.skipping = False
        self._socket = socket
        self._polled = [(socket, int(zmq.POLLIN))]
        self._most = most

    @property
    def waits(self) -> bool:
        """A message, or what follows of one, is there. To ask costs a third of a read that finds
        nothing, of which pyzmq makes an exception."""
        return bool(zmq.zmq_poll(self._polled, 0))

    def read(self) -> list[zmq.Frame]:
        """The frames of the next message, not copied, one more than allowed at most; empty when
        there is none now, or the end of the last one has not been reached yet.

        ``recv_multipart`` asks the socket whether more follows (20 us a message); the frame knows.
        """
        if self.skipping:
            self._skip()
            if self.skipping:
                return []
        socket = self._socket
        try:
            frame = socket.recv(_NOBLOCK, copy=False)
        except zmq.Again:
            return []
        frames = [frame]
        while frame.more:
            if len(frames) > self._most:
                self._skip()
                break
            frame = socket.recv(_NOBLOCK, copy=False)
            frames.append(frame)
        return frames

    def _skip(self) -> None:
        """Throw away what follows of the present message."""
        for _ in range(_SKIPPED_AT_ONCE):
            if not self._socket.recv(_NOBLOCK, copy=False).more:
                self.skipping = False
                return
        self.skipping = True
