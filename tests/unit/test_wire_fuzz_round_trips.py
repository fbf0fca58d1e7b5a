"""Every message of every protocol survives its round trip."""

from __future__ import annotations

import dataclasses
from dataclasses import fields
from itertools import chain

import pytest
from hypothesis import given
from hypothesis import strategies as st
from wire_messages import (
    QUICK,
    control_messages,
    data_messages,
    descs,
    hop_timings,
    items,
    side_to_client,
    side_to_dispatcher,
    to_client,
    to_dispatcher,
    withdrawals,
)

from blockflow.core import limits
from blockflow.core.errors import BlockFlowError, WireError
from blockflow.wire import client, control, data, grants
from blockflow.wire.codec import decode, encode
from blockflow.wire.tensor import TensorDesc, desc_from_wire


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


@QUICK
@given(withdrawals)
def test_withdrawals_round_trip(msg: data.Withdraw) -> None:
    frame = data.encode_withdraw(msg)
    assert len(frame) <= limits.MAX_HEADER_BYTES
    assert data.decode_data_plane(frame) == msg


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
