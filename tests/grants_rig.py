"""A client's side connection, by which a Dispatcher grants it memory: it says what a test wants."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from typing import Any

import pytest
from dispatcher_rig import PATIENCE_S

from blockflow.tensormq.grants_memory import Segment
from blockflow.wire.grants import Direction, Granted, decode_from_dispatcher, encode_side

UP, DOWN = Direction.UPLOAD, Direction.RESULT


class Side:
    """A side connection that says what a test wants to say."""

    def __init__(self, path: str) -> None:
        self.socket = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.socket.settimeout(PATIENCE_S)
        self.socket.connect(path)
        self.segments: dict[int, Segment] = {}

    def say(self, msg: Any) -> None:
        self.socket.send(encode_side(msg))

    def answer(self) -> Any:
        packet, fds, _, _ = socket.recv_fds(self.socket, 4096, 4)
        msg = decode_from_dispatcher(packet)
        if isinstance(msg, Granted):
            (fd,) = fds
            self.segments[msg.grant] = Segment.adopt(fd, msg.slot_bytes, msg.slots)
        else:
            assert not fds
        return msg

    def closed(self) -> bool:
        """Whether the Dispatcher has closed it; waits for that."""
        try:
            return self.socket.recv(4096) == b""
        except ConnectionResetError:
            return True

    def close(self) -> None:
        self.socket.close()


@pytest.fixture
def sides() -> Iterator[list[Side]]:
    made: list[Side] = []
    yield made
    for side in made:
        side.close()
