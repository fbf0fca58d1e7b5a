"""Messages that are well-formed but have fields outside their limits are a WireError."""

from __future__ import annotations

from typing import Any

import pytest
from wire_messages import V

from blockflow.core import limits
from blockflow.core.errors import WireError, make_error
from blockflow.core.routing import PathNode, PathTree
from blockflow.wire import client, control, data
from blockflow.wire.codec import encode
from blockflow.wire.tensor import desc_from_wire


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


@pytest.mark.parametrize("m", ["m", "\u00e9", "\u6a21", "\U0001f4a5"])
def test_long_error_texts_are_cut(m: str) -> None:
    error = make_error("BLOCK_FAILED", m * 5000, where=m * 5000, hint=m * 5000)
    one = data.Item(bytes(16), 1, 1, PathTree((PathNode(1, -1, True),)), 0, 1, 1)
    frame = data.encode_failure(data.Failure(1, 1, error, (one,)))
    assert len(frame) <= limits.MAX_HEADER_BYTES // 2  # the items want room as well
    got = data.decode_data_plane(frame)
    assert isinstance(got, data.Failure)
    assert got.error.code == "BLOCK_FAILED"
    assert got.error.message.startswith(m * 3) and set(got.error.hint) == {m}


def test_an_error_whose_text_is_not_unicode_can_be_told() -> None:
    error = make_error("BLOCK_FAILED", "no file /models/caf\udce9")
    one = data.Item(bytes(16), 1, 1, PathTree((PathNode(1, -1, True),)), 0, 1, 1)
    failure = data.decode_data_plane(data.encode_failure(data.Failure(1, 1, error, (one,))))
    started = control.decode_control(
        control.encode_control(control.StartFailed(1, error.to_dict()))
    )
    result = client.TaskResult("t", None, error)
    reply = client.decode_to_client(client.encode_to_client(client.Reply(bytes(16), 1, (result,))))
    assert isinstance(failure, data.Failure) and isinstance(reply, client.Reply)
    assert isinstance(started, control.StartFailed)
    (told,) = [r.error for r in reply.results]
    assert told is not None
    for message in (failure.error.message, started.error["message"], told.message):
        assert message == "no file /models/caf\\udce9"


@pytest.mark.parametrize("m", ["m", "\u6a21", "\udcff"])
def test_a_start_that_failed_with_a_huge_text_is_told_all_the_same(m: str) -> None:
    """A frame over the limit would close the connection, and nobody would learn of it."""
    error = make_error("LOAD_FAILED", m * 2_000_000, where="block1", details={"field": "engine"})
    frame = control.encode_control(control.StartFailed(1, error.to_dict()))
    told = control.decode_control(frame)
    assert isinstance(told, control.StartFailed)
    assert len(frame) < 20_000 and len(told.error["message"]) > 5_000
    assert (told.error["where"], told.error["details"]) == ("block1", {"field": "engine"})
