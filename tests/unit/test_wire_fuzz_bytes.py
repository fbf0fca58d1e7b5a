"""Any other bytes are a WireError, never anything else: random, altered, cut, bombs, oversized."""

from __future__ import annotations

import random
from typing import Any

import msgpack
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from wire_messages import (
    DECODERS,
    U64,
    Decoder,
    control_messages,
    data_messages,
    plain,
    side_to_client,
    side_to_dispatcher,
    to_client,
    to_dispatcher,
    withdrawals,
)

from blockflow.core import limits
from blockflow.core.errors import WireError
from blockflow.wire import client, control, data, grants


def must_not_crash(decoder: Decoder, frame: bytes) -> None:
    try:
        decoder(frame)
    except WireError as exc:
        assert exc.code in ("MALFORMED_MESSAGE", "UNSUPPORTED_VERSION")  # noqa: PT017


@pytest.mark.parametrize("family", list(DECODERS))
@settings(max_examples=60, deadline=None)
@given(frame=st.binary(max_size=200))
def test_any_bytes(family: str, frame: bytes) -> None:
    must_not_crash(DECODERS[family], frame)
    client.request_id_of(frame)


@pytest.mark.parametrize("family", list(DECODERS))
@settings(max_examples=60, deadline=None)
@given(value=plain)
def test_any_value(family: str, value: object) -> None:
    must_not_crash(DECODERS[family], msgpack.packb(value))


FRAMES: dict[str, st.SearchStrategy[bytes]] = {
    "data": data_messages().map(
        lambda m: data.encode_data(m) if isinstance(m, data.Data) else data.encode_failure(m)
    )
    | withdrawals.map(data.encode_withdraw),
    "to dispatcher": to_dispatcher.map(client.encode_to_dispatcher),
    "to client": to_client.map(client.encode_to_client),
    "control": control_messages().map(control.encode_control),
    "side to dispatcher": side_to_dispatcher.map(grants.encode_side),
    "side to client": side_to_client.map(grants.encode_side),
}


@pytest.mark.parametrize("family", list(DECODERS))
@settings(max_examples=60, deadline=None)
@given(st.data())
def test_a_valid_message_with_one_part_replaced(family: str, drawn: st.DataObject) -> None:
    frame = drawn.draw(FRAMES[family])
    value = msgpack.unpackb(frame)
    rnd = drawn.draw(st.randoms(use_true_random=True))
    # To draw a message takes a hundred times as long as to read it: each is changed in many ways.
    odd: list[object] = [
        drawn.draw(plain),
        -1,
        2**63,
        U64,
        1.5,
        True,
        [],
        {},
        [[]],
        b"",
        "",
        {b"k": 1, "k": 2},
    ]
    for part in odd:
        must_not_crash(DECODERS[family], msgpack.packb(replaced(value, rnd, part)))


@pytest.mark.parametrize("family", list(DECODERS))
@settings(max_examples=50, deadline=None)
@given(st.data())
def test_a_valid_message_with_bytes_changed(family: str, drawn: st.DataObject) -> None:
    valid = drawn.draw(FRAMES[family])
    rnd = drawn.draw(st.randoms(use_true_random=True))
    for _ in range(5):
        frame = bytearray(valid)
        for _ in range(rnd.randint(1, 4)):
            frame[rnd.randrange(len(frame))] = rnd.randrange(256)
        must_not_crash(DECODERS[family], bytes(frame))
        must_not_crash(DECODERS[family], bytes(frame[: rnd.randint(0, len(frame))]))
        must_not_crash(DECODERS[family], bytes(frame) + b"\0")


def replaced(value: Any, rnd: random.Random, odd: object) -> Any:
    """``value`` with one random part of it replaced by ``odd``, or a key added."""
    if isinstance(value, list) and value and rnd.random() < 0.85:
        at = rnd.randrange(len(value))
        return [*value[:at], replaced(value[at], rnd, odd), *value[at + 1 :]]
    if isinstance(value, dict) and value and rnd.random() < 0.85:
        key = rnd.choice(sorted(value, key=repr))
        if rnd.random() < 0.3:
            return {**value, b"odd": 1, "odd": odd}
        return {**value, key: replaced(value[key], rnd, odd)}
    return odd


# --- what no peer may make this process do --------------------------------------------------------


@pytest.mark.parametrize(
    "frame",
    [
        b"\xdd\xff\xff\xff\xff",  # an array of 2^32-1 elements
        b"\xdf\xff\xff\xff\xff",  # a map
        b"\xc6\xff\xff\xff\xff",  # 4 GiB of bytes
        b"\xdb\xff\xff\xff\xff",  # of text
        b"\xc9\xff\xff\xff\xff\x01",  # of an extension
        b"\xd4\x01\x00",  # the smallest extension
        b"\xd6\xff\x00\x00\x00\x00",  # a time stamp
        b"\x91" * 2000,  # nesting
        b"\x91" * 1020 + b"\xc0",  # as deep as msgpack goes, deeper than Python can show
        b"\x81\x01" * 1000,
        b"\xc1",
        b"",
        b"\xa2\xff\xfe",  # not UTF-8
    ],
)
@pytest.mark.parametrize("family", list(DECODERS))
def test_bombs_are_defused(family: str, frame: bytes) -> None:
    with pytest.raises(WireError):
        DECODERS[family](frame)


def test_oversized_frames_are_refused_before_decoding() -> None:
    with pytest.raises(WireError, match="limit"):
        data.decode_data_plane(bytes(limits.MAX_HEADER_BYTES + 1))
    with pytest.raises(WireError, match="limit"):
        client.decode_to_dispatcher(bytes(limits.MAX_HEADER_BYTES + 1))
    with pytest.raises(WireError, match="limit"):
        client.decode_to_client(bytes(limits.MAX_DESCRIPTION_BYTES + 1))
    with pytest.raises(WireError, match="limit"):
        control.decode_control(bytes(limits.MAX_CONTROL_BYTES + 1))


def test_memoryviews_decode_like_bytes() -> None:
    frame = control.encode_control(control.Ping(7))
    assert control.decode_control(memoryview(frame)) == control.Ping(7)
