"""Side messages: SDK <-> Dispatcher on a unix socket. Layout: wire/PROTOCOL.md, "Grants".

One packet (SOCK_SEQPACKET) is one message. The client says what it would like to have; numbers,
sizes and memory come from the Dispatcher.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum
from typing import Any

from blockflow.core import limits
from blockflow.wire.client import TOKEN_BYTES
from blockflow.wire.codec import decode, encode, is_int, malformed, wrong_version

KIND_ATTACH = 30
KIND_ASK = 31
KIND_GRANTED = 40
KIND_REFUSED = 41

_WHAT = "side message"
_U32 = 2**32 - 1
_REASON_LIMIT = 500


class Direction(IntEnum):
    """Which way tensors go through a segment."""

    UPLOAD = 0
    RESULT = 1


@dataclass(frozen=True, slots=True)
class Attach:
    """The first packet: shows the invitation's token. There is no answer but to what follows."""

    token: bytes


@dataclass(frozen=True, slots=True)
class Ask:
    """Tensors of about ``nbytes`` bytes shall travel in ``direction``."""

    direction: Direction
    nbytes: int


@dataclass(frozen=True, slots=True)
class Granted:
    """A segment of ``slots`` slots, ``slot_bytes`` each; its descriptor comes with the packet."""

    grant: int
    direction: Direction
    slot_bytes: int
    slots: int


@dataclass(frozen=True, slots=True)
class Refused:
    """There is no segment for an Ask of ``nbytes``; ``reason`` is for people."""

    direction: Direction
    nbytes: int
    reason: str


FromClient = Attach | Ask
FromDispatcher = Granted | Refused


def encode_side(msg: FromClient | FromDispatcher) -> bytes:
    """One packet."""
    v = limits.PROTOCOL_VERSION
    if isinstance(msg, Attach):
        return encode([v, KIND_ATTACH, msg.token])
    if isinstance(msg, Ask):
        return encode([v, KIND_ASK, int(msg.direction), msg.nbytes])
    if isinstance(msg, Granted):
        return encode([v, KIND_GRANTED, msg.grant, int(msg.direction), msg.slot_bytes, msg.slots])
    return encode([v, KIND_REFUSED, int(msg.direction), msg.nbytes, msg.reason[:_REASON_LIMIT]])


def decode_from_client(packet: bytes) -> FromClient:
    """Decode what a client sent. Raises WireError whatever the bytes are."""
    kind, *rest = _unpack(packet)
    if kind == KIND_ATTACH and len(rest) == 1:
        (token,) = rest
        if type(token) is bytes and len(token) == TOKEN_BYTES:
            return Attach(token)
    elif kind == KIND_ASK and len(rest) == 2:
        direction, nbytes = rest
        if is_int(direction, 0, 1) and is_int(nbytes, 1, limits.MAX_MESSAGE_BYTES):
            return Ask(Direction(direction), nbytes)
    raise malformed(_WHAT, f"kind {kind!r} with {len(rest)} fields")


def decode_from_dispatcher(packet: bytes) -> FromDispatcher:
    """Decode what the Dispatcher sent. Raises WireError."""
    kind, *rest = _unpack(packet)
    if kind == KIND_GRANTED and len(rest) == 4:
        grant, direction, slot_bytes, slots = rest
        if (
            is_int(grant, 1, _U32)
            and is_int(direction, 0, 1)
            and is_int(slot_bytes, 1, limits.MAX_MESSAGE_BYTES)
            and is_int(slots, 1, limits.MAX_GRANT_SLOTS)
        ):
            return Granted(grant, Direction(direction), slot_bytes, slots)
    elif kind == KIND_REFUSED and len(rest) == 3:
        direction, nbytes, reason = rest
        if (
            is_int(direction, 0, 1)
            and is_int(nbytes, 1, limits.MAX_MESSAGE_BYTES)
            and type(reason) is str
        ):
            return Refused(Direction(direction), nbytes, reason)
    raise malformed(_WHAT, f"kind {kind!r} with {len(rest)} fields")


def _unpack(packet: bytes) -> list[Any]:
    """Kind and fields."""
    raw = decode(packet, max_bytes=limits.MAX_HEADER_BYTES, what=_WHAT)
    if type(raw) is not list or len(raw) < 3:
        raise malformed(_WHAT, "not an array of at least 3 fields")
    if raw[0] != limits.PROTOCOL_VERSION:
        raise wrong_version(_WHAT, raw[0])
    return raw[1:]
