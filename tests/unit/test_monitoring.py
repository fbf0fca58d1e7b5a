"""What a socket's monitor says, read without pyzmq's enumeration."""

from __future__ import annotations

import struct

import pytest
import zmq

from blockflow.tensormq.monitoring import read_event


def test_an_event_has_its_value() -> None:
    message = [struct.pack("=Hi", zmq.EVENT_CONNECT_RETRIED, 5_715_434), b"tcp://127.0.0.1:1"]
    assert read_event(message) == (zmq.EVENT_CONNECT_RETRIED, 5_715_434)
    assert read_event([struct.pack("=Hi", 0x8000, -1), b""]) == (0x8000, -1)


@pytest.mark.parametrize("frames", [[], [bytes(6)], [bytes(5), b""], [bytes(6), b"", b""]])
def test_what_is_none_is_refused(frames: list[bytes]) -> None:
    with pytest.raises(ValueError, match="header and an endpoint"):
        read_event(frames)
