"""Every message survives its round trip; any other bytes are a WireError, never anything else."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Callable
from dataclasses import fields
from itertools import chain
from typing import Any

import msgpack
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from blockflow.core import limits
from blockflow.core.errors import CODES, BlockFlowError, WireError, make_error
from blockflow.core.routing import PathNode, PathTree
from blockflow.wire import client, control, data, grants
from blockflow.wire.codec import decode, encode
from blockflow.wire.tensor import DTYPES, Handle, TensorDesc, desc_from_wire

V = limits.PROTOCOL_VERSION
U64 = 2**64 - 1
QUICK = settings(max_examples=80, deadline=None)

Decoder = Callable[[bytes], object]
DECODERS: dict[str, Decoder] = {
    "data": data.decode_data_plane,
    "to dispatcher": client.decode_to_dispatcher,
    "to client": client.decode_to_client,
    "control": control.decode_control,
    "side to dispatcher": grants.decode_from_client,
    "side to client": grants.decode_from_dispatcher,
}

# --- strategies -----------------------------------------------------------------------------------

u64 = st.integers(0, U64)
u32 = st.integers(1, 2**32 - 1)
slots = st.integers(0, limits.MAX_GRANT_SLOTS - 1)
request_ids = st.binary(min_size=16, max_size=16)
names = st.text(min_size=1, max_size=limits.MAX_NAME_CHARS)
texts = st.text(max_size=30)
plain = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**63), U64) | st.floats() | texts | st.binary(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(texts, inner, max_size=4),
    max_leaves=12,
)


@st.composite
def descs(draw: st.DrawFn, rows: int | None = None, frames_only: bool = False) -> TensorDesc:
    dims = draw(st.lists(st.integers(0, 5), min_size=0 if rows is not None else 1, max_size=7))
    dims = ([] if rows is None else [rows]) + dims
    handle = strides = None
    if not frames_only:
        handle = draw(
            st.none()
            | st.builds(
                Handle,
                st.integers(1, U64),
                st.integers(0, 2**32 - 1),
                st.integers(0, 255),
                st.integers(1, 2**32 - 1),
                u64,
            )
        )
        strides = draw(
            st.none()
            | st.lists(st.integers(0, 1000), min_size=len(dims), max_size=len(dims)).map(tuple)
        )
    return TensorDesc(draw(st.sampled_from(DTYPES)), tuple(dims), handle, strides)


@st.composite
def trees(draw: st.DrawFn) -> PathTree:
    count = draw(st.integers(1, 6))
    return PathTree(
        tuple(
            PathNode(
                draw(st.integers(1, 2**40)),
                -1 if i == 0 else draw(st.integers(0, i - 1)),
                draw(st.booleans()),
            )
            for i in range(count)
        )
    )


hop_timings = st.builds(data.HopTiming, st.integers(0, 255), u64, u64, u64, u64)
timings = st.lists(hop_timings, max_size=4).map(tuple)


@st.composite
def items(draw: st.DrawFn) -> data.Item:
    tree = draw(trees())
    return data.Item(
        draw(request_ids),
        draw(st.integers(1, 255)),
        draw(u64),
        tree,
        draw(st.integers(0, len(tree.nodes) - 1)),
        draw(st.integers(1, 100)),
        draw(st.integers(0, limits.MAX_DEADLINE_MS)),
        data.pack_timings(draw(timings)),
        draw(st.integers(0, limits.MAX_SHARES)),
        draw(st.booleans()),
    )


@st.composite
def errors(draw: st.DrawFn) -> BlockFlowError:
    return make_error(
        draw(st.sampled_from(sorted(CODES))),
        draw(texts),
        where=draw(texts),
        hint=draw(texts),
        retry_after_ms=draw(st.none() | st.integers(0, 10**6)),
    )


@st.composite
def data_messages(draw: st.DrawFn) -> data.Data | data.Failure:
    some = tuple(draw(st.lists(items(), min_size=1, max_size=3)))
    sender, sent_ns = draw(st.integers(1, U64)), draw(u64)
    if draw(st.booleans()):
        desc = draw(descs(rows=sum(i.rows for i in some)))
        return data.Data(sender, sent_ns, desc, some)
    return data.Failure(sender, sent_ns, draw(errors()), some)


to_dispatcher: st.SearchStrategy[client.ToDispatcher] = (
    st.builds(
        client.Request,
        request_ids,
        st.lists(names, min_size=1, max_size=limits.MAX_TASKS_PER_REQUEST).map(tuple),
        st.integers(1, limits.MAX_DEADLINE_MS),
        descs(frames_only=True),
        st.none() | st.tuples(u32, slots),
        st.integers(0, client.MAX_TRIES),
    )
    | st.builds(client.Cancel, request_ids)
    | st.builds(client.Describe, request_ids)
    | st.builds(client.Invite, request_ids)
)


@st.composite
def results(draw: st.DrawFn) -> client.TaskResult:
    tensor, error = draw(st.tuples(descs(), st.none()) | st.tuples(st.none(), errors()))
    hops = draw(timings)
    named = tuple(client.Timing(draw(names), hop) for hop in hops)
    places = st.none() | st.builds(client.Place, u32, slots, u32)
    place = draw(places) if tensor is not None else None
    times = draw(u64), draw(u64), draw(u64)
    return client.TaskResult(draw(texts), tensor, error, named, *times, place, draw(st.booleans()))


to_client: st.SearchStrategy[client.ToClient] = (
    st.builds(client.Reply, request_ids, u64, st.lists(results(), max_size=3).map(tuple), u64)
    | st.builds(
        client.Description,
        request_ids,
        u64,
        st.lists(st.dictionaries(texts, plain, max_size=3), max_size=3).map(tuple),
        st.dictionaries(texts, st.integers(0, 2**40), max_size=3),
    )
    | st.builds(client.Invitation, request_ids, texts, request_ids, texts.filter(bool))
    | st.builds(client.Invitation, request_ids, texts.filter(bool), request_ids, st.just(""))
)

side_to_dispatcher: st.SearchStrategy[grants.FromClient] = st.builds(
    grants.Attach, request_ids
) | st.builds(
    grants.Ask, st.sampled_from(grants.Direction), st.integers(1, limits.MAX_MESSAGE_BYTES)
)
side_to_client: st.SearchStrategy[grants.FromDispatcher] = st.builds(
    grants.Granted,
    u32,
    st.sampled_from(grants.Direction),
    st.integers(1, limits.MAX_MESSAGE_BYTES),
    st.integers(1, limits.MAX_GRANT_SLOTS),
) | st.builds(
    grants.Refused,
    st.sampled_from(grants.Direction),
    st.integers(1, limits.MAX_MESSAGE_BYTES),
    texts,
)


def control_messages() -> st.SearchStrategy[control.ControlMessage]:
    by_type: dict[type, st.SearchStrategy[Any]] = {
        int: u64,
        float: st.floats(allow_nan=False),
        str: texts,
        list: st.lists(texts, max_size=3),
        dict: st.dictionaries(texts, plain, max_size=3),
    }
    return st.one_of(
        *(
            st.builds(cls, **{name: by_type[t] for name, t in control._FIELDS[kind].items()})
            for kind, cls in control._KINDS.items()
        )
    )


# --- round trips ----------------------------------------------------------------------------------


def same_error(a: BlockFlowError | None, b: BlockFlowError | None) -> bool:
    return (a is None) == (b is None) and (a is None or b is None or a.to_dict() == b.to_dict())


def has_nan(value: object) -> bool:
    if isinstance(value, dict):
        return any(has_nan(v) for v in value.values())
    if isinstance(value, list | tuple):
        return any(has_nan(v) for v in value)
    return value != value


@QUICK
@given(descs())
def test_descriptors_round_trip(desc: TensorDesc) -> None:
    assert desc_from_wire(decode(encode(desc.to_wire()), max_bytes=4096, what="t"), "t") == desc


withdrawn = st.lists(
    st.tuples(request_ids, st.integers(1, 255)),
    min_size=1,
    max_size=limits.MAX_WITHDRAWN_PER_MESSAGE,
).map(tuple)
withdrawals = st.builds(data.Withdraw, st.integers(1, U64), withdrawn)


@QUICK
@given(withdrawals)
def test_withdrawals_round_trip(msg: data.Withdraw) -> None:
    frame = data.encode_withdraw(msg)
    assert len(frame) <= limits.MAX_HEADER_BYTES
    assert data.decode_data_plane(frame) == msg


@pytest.mark.parametrize(
    "fields_",
    [
        [0, bytes(16) + b"\1"],
        [1, b""],
        [1, bytes(16)],
        [1, bytes(17)],
        [1, (bytes(16) + b"\1") * (limits.MAX_WITHDRAWN_PER_MESSAGE + 1)],
        [1, [bytes(16)]],
        [1, bytes(16) + b"\1", None],
    ],
)
def test_withdrawals_outside_their_limits(fields_: list[Any]) -> None:
    with pytest.raises(WireError):
        data.decode_data_plane(encode([V, data.KIND_WITHDRAW, *fields_]))


@QUICK
@given(data_messages())
def test_data_messages_round_trip(msg: data.Data | data.Failure) -> None:
    if isinstance(msg, data.Data):
        frame = data.encode_data(msg)
    else:
        frame = data.encode_failure(msg)
    assert len(frame) <= limits.MAX_HEADER_BYTES
    got = data.decode_data_plane(frame)
    if isinstance(msg, data.Data):
        assert got == msg
    else:
        assert isinstance(got, data.Failure)
        assert (got.sender, got.sent_ns, got.items) == (msg.sender, msg.sent_ns, msg.items)
        assert same_error(got.error, msg.error)


@QUICK
@given(to_dispatcher)
def test_clients_messages_round_trip(msg: client.ToDispatcher) -> None:
    frame = client.encode_to_dispatcher(msg)
    if len(frame) <= limits.MAX_HEADER_BYTES:
        assert client.decode_to_dispatcher(frame) == msg
        assert client.request_id_of(frame) == msg.request_id
    else:  # sixteen long names in a wide script
        with pytest.raises(WireError):
            client.decode_to_dispatcher(frame)


@QUICK
@given(to_client)
def test_replies_round_trip(msg: client.ToClient) -> None:
    got = client.decode_to_client(client.encode_to_client(msg))
    if isinstance(msg, client.Reply):
        assert isinstance(got, client.Reply)
        assert (got.request_id, got.epoch, len(got.results)) == (
            msg.request_id,
            msg.epoch,
            len(msg.results),
        )
        for a, b in zip(got.results, msg.results, strict=True):
            assert same_error(a.error, b.error)
            for f in fields(client.TaskResult):
                assert f.name == "error" or getattr(a, f.name) == getattr(b, f.name)
    elif isinstance(msg, client.Invitation) or not has_nan(msg.tasks):
        assert got == msg


@QUICK
@given(side_to_dispatcher, side_to_client)
def test_side_messages_round_trip(there: grants.FromClient, back: grants.FromDispatcher) -> None:
    assert grants.decode_from_client(grants.encode_side(there)) == there
    assert grants.decode_from_dispatcher(grants.encode_side(back)) == back


@QUICK
@given(control_messages())
def test_control_messages_round_trip(msg: control.ControlMessage) -> None:
    got = control.decode_control(control.encode_control(msg))
    assert type(got) is type(msg)
    if not has_nan([getattr(msg, f.name) for f in fields(msg)]):
        assert got == msg


# --- anything else --------------------------------------------------------------------------------


def must_not_crash(decoder: Decoder, frame: bytes) -> None:
    try:
        decoder(frame)
    except WireError as exc:
        assert exc.code in ("MALFORMED_MESSAGE", "UNSUPPORTED_VERSION")  # noqa: PT017


@pytest.mark.parametrize("family", list(DECODERS))
@settings(max_examples=120, deadline=None)
@given(frame=st.binary(max_size=200))
def test_any_bytes(family: str, frame: bytes) -> None:
    must_not_crash(DECODERS[family], frame)
    client.request_id_of(frame)


@pytest.mark.parametrize("family", list(DECODERS))
@settings(max_examples=120, deadline=None)
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
@settings(max_examples=120, deadline=None)
@given(st.data())
def test_a_valid_message_with_one_part_replaced(family: str, drawn: st.DataObject) -> None:
    frame = drawn.draw(FRAMES[family])
    value = msgpack.unpackb(frame)
    rnd = drawn.draw(st.randoms(use_true_random=False))
    odd = drawn.draw(
        plain
        | st.sampled_from([-1, 2**63, U64, 1.5, True, [], {}, [[]], b"", "", {b"k": 1, "k": 2}])
    )
    must_not_crash(DECODERS[family], msgpack.packb(replaced(value, rnd, odd)))


@pytest.mark.parametrize("family", list(DECODERS))
@settings(max_examples=80, deadline=None)
@given(st.data())
def test_a_valid_message_with_bytes_changed(family: str, drawn: st.DataObject) -> None:
    frame = bytearray(drawn.draw(FRAMES[family]))
    for _ in range(drawn.draw(st.integers(1, 4))):
        frame[drawn.draw(st.integers(0, len(frame) - 1))] = drawn.draw(st.integers(0, 255))
    cut = drawn.draw(st.integers(0, len(frame)))
    must_not_crash(DECODERS[family], bytes(frame))
    must_not_crash(DECODERS[family], bytes(frame[:cut]))
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
    for decoder in (client.decode_to_client, control.decode_control):
        with pytest.raises(WireError, match="limit"):
            decoder(bytes(limits.MAX_CONTROL_BYTES + 1))


def test_memoryviews_decode_like_bytes() -> None:
    frame = control.encode_control(control.Ping(7))
    assert control.decode_control(memoryview(frame)) == control.Ping(7)


@pytest.mark.parametrize(
    ("dtype", "dims"), [(8, [2**26 + 1]), (0, [2**31 - 1] * 8), (9, [1, 2**25, 2])]
)
def test_a_tensor_over_the_message_limit(dtype: int, dims: list[int]) -> None:
    with pytest.raises(WireError) as info:
        desc_from_wire([dtype, dims, None, None], "t")
    assert info.value.details == {"too_large": True}


@pytest.mark.parametrize(
    "raw",
    [
        None,
        [],
        [8, [1], None],
        [10, [1], None, None],
        [-1, [1], None, None],
        [True, [1], None, None],
        [8, [], None, None],
        [8, [1] * 9, None, None],
        [8, [-1], None, None],
        [8, [2**31], None, None],
        [8, [1.0], None, None],
        [8, [True], None, None],
        [8, [1], [], None],
        [8, [1], [-1], None],
        [8, [1], [2**28 + 1], None],
        [8, [1], None, [1, 0, 0, 1]],
        [8, [1], None, [0, 0, 0, 1, 0]],
        [8, [1], None, [1, 0, 0, 0, 0]],
        [8, [1], None, [1, 0, 256, 1, 0]],
        [8, [1], None, [1, 2**32, 0, 1, 0]],
        [8, [1], None, [1, 0, 0, 2**32, 0]],
        [8, [1], None, [1, 0, 0, 1, -1]],
    ],
)
def test_descriptors_outside_their_limits(raw: object) -> None:
    with pytest.raises(WireError):
        desc_from_wire(raw, "t")


NODE = PathTree((PathNode(1, -1, True),)).wire


def node(stage: int, parent: int, terminal: int = 1) -> bytes:
    return stage.to_bytes(8, "little") + bytes([parent, terminal])


def item(**changes: Any) -> list[Any]:
    raw = {
        "rid": bytes(16),
        "attempt": 1,
        "epoch": 1,
        "path": NODE,
        "hop": 0,
        "rows": 1,
        "timings": b"",
        "task": 0,
        "alone": False,
    }
    return list({**raw, **changes}.values())


@pytest.mark.parametrize(
    "items_raw",
    [
        [],
        [item()] * (limits.MAX_ITEMS_PER_MESSAGE + 1),
        [item(rid=bytes(15))],
        [item(rid="x" * 16)],
        [item(attempt=0)],
        [item(attempt=256)],
        [item(epoch=-1)],
        [item(path=b"")],
        [item(path=[1, 0, 1])],
        [item(path="x" * 10)],
        [item(path=NODE[:-1])],
        [item(path=node(0, 0))],
        [item(path=node(1, 1))],
        [item(path=NODE + node(2, 3))],
        [item(path=NODE * 2)],
        [item(path=NODE + node(1, 1) * limits.MAX_PATH_NODES)],
        [item(hop=1)],
        [item(rows=0)],
        [item(rows=2)],
        [item(rows=limits.MAX_ROWS + 1)],
        [item(timings=[1, 2, 3, 4, 5])],
        [item(timings=bytes(data.HOP_BYTES - 1))],
        [item(timings=bytes(data.HOP_BYTES * (limits.MAX_PATH_NODES + 1)))],
        [item(task=-1)],
        [item(task=limits.MAX_SHARES + 1)],
        [item(alone=1)],
        [item(alone=None)],
        [item()[:-1]],
        ["item"],
    ],
)
def test_items_outside_their_limits(items_raw: list[Any]) -> None:
    good = [V, data.KIND_DATA, 1, [1, [1], None, None], [item()], stamps(1)]
    assert isinstance(data.decode_data_plane(encode(good)), data.Data)
    with pytest.raises(WireError):
        data.decode_data_plane(encode([*good[:-2], items_raw, stamps(len(items_raw))]))


def stamps(items: int, left: int = 1, hop: bytes = b"") -> bytes:
    return bytes(8) + left.to_bytes(4, "little") * items + hop * items


@pytest.mark.parametrize(
    "bad",
    [
        b"",
        stamps(0),
        stamps(2),
        stamps(1)[:-1],
        stamps(1) + b"x",
        stamps(1, limits.MAX_DEADLINE_MS + 1),
        stamps(1, hop=bytes(data.HOP_BYTES + 1)),
        [0, 1],
        None,
    ],
)
def test_stamps_that_do_not_fit(bad: object) -> None:
    good = [V, data.KIND_DATA, 1, [1, [1], None, None], [item()], stamps(1)]
    with pytest.raises(WireError):
        data.decode_data_plane(encode([*good[:-1], bad]))


@given(st.lists(items(), min_size=1, max_size=4), st.data())
def test_a_finished_draft_is_the_message(some: list[data.Item], more: st.DataObject) -> None:
    """What was made ahead and completed late reads like what was made in one go."""
    desc = more.draw(descs(rows=sum(i.rows for i in some)))
    hops = more.draw(st.lists(hop_timings, min_size=len(some), max_size=len(some)))
    left = [i.remaining_ms for i in some]
    done = [
        dataclasses.replace(i, hop=0, timings=i.timings + data.pack_timings([h]))
        for i, h in zip(some, hops, strict=True)
    ]
    draft = data.Draft(7, desc, [(i, 0) for i in some])
    header = bytes(draft.finish(99, left, chain.from_iterable(hops)))
    assert data.decode_data_plane(header) == data.Data(7, 99, desc, tuple(done))
    assert data.decode_data_plane(data.encode_data(data.Data(7, 99, desc, tuple(done)))) == (
        data.Data(7, 99, desc, tuple(done))
    )


def test_a_client_cannot_name_memory() -> None:
    def request(strides: object, handle: object) -> bytes:
        tensor = [1, [1], strides, handle]
        return encode([V, client.KIND_REQUEST, bytes(16), ["t"], 10, tensor, None, 0])

    assert isinstance(client.decode_to_dispatcher(request(None, None)), client.Request)
    for part in (None, [1, 0, 0, 1, 0]), ([1], None):
        with pytest.raises(WireError):
            client.decode_to_dispatcher(request(*part))


@pytest.mark.parametrize("tries", [-1, client.MAX_TRIES + 1, None, True, "1"])
def test_tries_outside_their_limits(tries: object) -> None:
    raw = [V, client.KIND_REQUEST, bytes(16), ["t"], 10, [1, [1], None, None], None, tries]
    with pytest.raises(WireError):
        client.decode_to_dispatcher(encode(raw))


def test_long_error_texts_are_cut() -> None:
    error = make_error("BLOCK_FAILED", "m" * 5000, where="w" * 5000, hint="h" * 5000)
    one = data.Item(bytes(16), 1, 1, PathTree((PathNode(1, -1, True),)), 0, 1, 1)
    frame = data.encode_failure(data.Failure(1, 1, error, (one,)))
    assert len(frame) <= limits.MAX_HEADER_BYTES
    got = data.decode_data_plane(frame)
    assert isinstance(got, data.Failure)
    assert got.error.code == "BLOCK_FAILED"
    assert got.error.message.startswith("mmm")
