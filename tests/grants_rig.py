"""A client's side connection, by which a Dispatcher grants it memory: it says what a test wants."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from dispatcher_rig import PATIENCE_S, RawClient

from blockflow.client.side import SideConnection
from blockflow.tensormq.grants import MIN_TENSOR_BYTES, geometry
from blockflow.tensormq.grants_memory import Segment
from blockflow.wire import client as wire
from blockflow.wire.grants import (
    Ask,
    Attach,
    Direction,
    Granted,
    decode_from_dispatcher,
    encode_side,
)

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


def invited(client: RawClient) -> wire.Invitation:
    client.send(wire.encode_to_dispatcher(wire.Invite(client.new_id())))
    answer, _ = client.answer()
    assert isinstance(answer, wire.Invitation)
    return answer


def attached(sides: list[Side], client: RawClient) -> Side:
    way = invited(client)
    assert way.reason == ""
    side = Side(way.path)
    sides.append(side)
    side.say(Attach(way.token))
    return side


def granted(side: Side, direction: Direction, nbytes: int = MIN_TENSOR_BYTES) -> Granted:
    side.say(Ask(direction, nbytes))
    answer = side.answer()
    assert isinstance(answer, Granted), answer
    assert (answer.direction, answer.slot_bytes >= nbytes) == (direction, True)
    return answer


@contextmanager
def side_pair(tmp_path: Path) -> Iterator[tuple[SideConnection, socket.socket]]:
    """A client's end, and the Dispatcher's."""
    path = str(tmp_path / "side")
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
        listener.bind(path)
        listener.listen()
        side = SideConnection()
        side.connect(path)
        theirs, _ = listener.accept()
        with theirs:
            yield side, theirs
        side.close()


def grant(theirs: socket.socket, number: int, nbytes: int = MIN_TENSOR_BYTES) -> Segment:
    slot_bytes, slots = geometry(nbytes)
    segment, fd = Segment.create(slot_bytes, slots)
    packet = encode_side(Granted(number, Direction.RESULT, slot_bytes, slots))
    socket.send_fds(theirs, [packet], [fd])
    os.close(fd)
    return segment
