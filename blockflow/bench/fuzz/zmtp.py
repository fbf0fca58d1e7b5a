"""ZMTP 3.1 (RFC 37) by hand, as far as a client that keeps to no rule needs it."""

from __future__ import annotations

import socket
import struct

GREETING = b"\xff" + bytes(8) + b"\x7f\x03\x01"
"""The mechanism, padded to 20 bytes, and 32 zero bytes follow."""

READY = b"\x05READY\x0bSocket-Type\0\0\0\x06DEALER"
_GREETING_BYTES = 64
_MORE, _LONG, _COMMAND = 1, 2, 4


def greeting(mechanism: bytes) -> bytes:
    """The whole of it."""
    return GREETING + mechanism.ljust(20, b"\0") + bytes(32)


def command(body: bytes) -> bytes:
    """A command, as it is sent."""
    if len(body) < 256:
        return bytes([_COMMAND, len(body)]) + body
    return struct.pack(">BQ", _COMMAND | _LONG, len(body)) + body


def frame(body: bytes, *, more: bool) -> bytes:
    """A frame as it is sent; ``more``: the message is not at its end."""
    if len(body) < 256:
        return bytes([_MORE * more, len(body)]) + body
    return struct.pack(">BQ", _MORE * more | _LONG, len(body)) + body


def place(address: str) -> tuple[str, int]:
    """Host and port of ``tcp://HOST:PORT``, an IPv6 host without its brackets."""
    host, _, port = address.removeprefix("tcp://").rpartition(":")
    return host.strip("[]"), int(port)


def connect(host: str, port: int, timeout_s: float, name: bytes = b"") -> socket.socket:
    """A connection to a socket without CURVE, the handshake done; ``name`` is the identity that it
    gives itself.

    Raises:
        OSError: it could not be made.
    """
    sock = socket.create_connection((host, port), timeout_s)
    try:
        identity = b"\x08Identity" + struct.pack(">I", len(name)) + name if name else b""
        sock.sendall(greeting(b"NULL") + command(READY + identity))
        left = _GREETING_BYTES + 2  # the other side's greeting, and how long its command is
        answer = b""
        while len(answer) < left:
            part = sock.recv(left - len(answer))
            if not part:
                raise ConnectionResetError("the handshake was refused")
            answer += part
            if len(answer) == _GREETING_BYTES + 2 == left:
                left += answer[-1]
    except BaseException:
        sock.close()
        raise
    return sock
