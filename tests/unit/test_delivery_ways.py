"""Where a batch's output must lie, who gets it by handle, and who is counted as lost."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from blockflow.core.errors import BlockError
from blockflow.core.routing import RouteTable, StageRoute
from blockflow.tensormq.channel import Payload
from blockflow.wire.tensor import Handle, TensorDesc
from blockflow.worker.parting import Part, next_item
from tests.unit.test_delivery_books import DISPATCHER, ME, MS, SECOND, Rig, Slots, table


@pytest.fixture
def rig() -> Rig:
    return Rig()


def test_all_rows_of_a_padded_output_are_cut_where_all_are_shorter() -> None:
    """The longest was too late, and left."""
    whole = Payload(TensorDesc("float32", (2, 3)), memoryview(bytes(24)))
    assert Part(2, 0, 2, [], 0, (2,)).of(whole).desc.dims == (2, 2)
    assert Part(2, 0, 2, [], 0).of(whole) is whole


def test_rows_of_a_payload_are_where_they_lie_in_it() -> None:
    frame = memoryview(bytes(range(48)))
    whole = Payload(TensorDesc("float32", (4, 3), Handle(1, 2, 3, 4, 64)), frame)
    part = whole.rows(1, 3)
    assert part.desc == TensorDesc("float32", (2, 3), Handle(1, 2, 3, 4, 64 + 12))
    assert part.frame == frame[12:36]
    cut = whole.rows(1, 3, (2,))
    assert cut.desc == TensorDesc("float32", (2, 2), Handle(1, 2, 3, 4, 64 + 12), (3, 1))
    assert cut.frame == frame[12:32]  # from its first element to its last
    assert Payload(TensorDesc("float32", (4, 3)), None).rows(0, 4).desc.handle is None
    for start, stop in ((0, 0), (2, 1), (-1, 1), (0, 5)):
        with pytest.raises(ValueError, match="rows"):
            whole.rows(start, stop)
    for shape in ((4,), (0,), (2, 1), ()):
        with pytest.raises(ValueError, match="cut to"):
            whole.rows(0, 1, shape)


def test_an_output_lies_where_somebody_takes_it_by_handle(rig: Rig) -> None:
    rig.delivery.set_routes(table(2, b2="zeromq"))
    inline = rig.delivery._inline
    for paths, where in (
        ([[[1, 2]], [[1, 3]]], rig.slots),  # the first one takes no handles, the second does
        ([[[1, 2]]], inline),
        ([[[1, 4]]], None),
    ):
        assert rig.delivery.producer_for(rig.batch(*paths)) is where


def test_consumers_are_those_elsewhere_who_take_handles(rig: Rig) -> None:
    routes = table(2, b3="zeromq")
    here = StageRoute(4, "b4", "b4#0", ME, "ipc://7", "tensormq")
    rig.delivery.set_routes(replace(routes, stages={**routes.stages, 4: here}))
    batch = rig.batch([[1, 2]], [[1, 3]], [[1, 4, 2]])
    assert rig.delivery.consumers_of(batch) == {SECOND}
    assert rig.delivery.stays(batch) and not rig.delivery.stays(rig.batch([[1, 2]]))


def test_every_producer_hears_which_device_each_process_is_on(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    told: list[Any] = []
    for producer in (rig.slots, rig.delivery._inline):
        monkeypatch.setattr(producer, "set_devices", told.append)
    routes = table(2)
    stages = {s: replace(r, device="cuda:1") if s == 2 else r for s, r in routes.stages.items()}
    rig.delivery.set_routes(RouteTable(1, 2, stages))
    assert len(told) == 2
    assert all(devices[SECOND] == "cuda:1" and len(devices) == 3 for devices in told)


def test_what_the_dead_had_comes_back_and_nobody_has_to_publish_that(rig: Rig) -> None:
    rig.send(rig.batch([[1, 2]]))
    assert rig.slots.outstanding() == 1
    rig.delivery.peer_gone(SECOND)
    assert rig.slots.outstanding() == 0
    after = rig.batch([[1, 2]])
    rig.send(after)
    assert rig.failures() == {after.tickets[0].item.request_id: "WORKER_LOST"}


@pytest.mark.parametrize("prepared", [True, False])
def test_more_than_a_slot_has_lanes_for_get_the_elements(
    rig: Rig, prepared: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Slots, "max_consumers", 1)
    rig.slots.overwrite = True
    batch = rig.batch([[1, 2]], [[1, 3]])
    rig.send(batch, prepared)
    frames = {m.items[0].request_id: frame for _, m, frame in rig.push.sent}
    first, second = (t.item.request_id for t in batch.tickets)
    assert frames == {first: b"", second: torch.full((2,), 2.0).numpy().tobytes()}
    rig.read_all()
    alone = rig.batch([[1, 2]])
    rig.delivery.prepare(alone, rig.slots)
    assert alone.shipment is not None


def test_those_who_get_the_same_elements_get_one_copy(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A trunk with more heads than its slots have lanes, on one input."""
    monkeypatch.setattr(Slots, "max_consumers", 1)
    batch = rig.batch([[1], [1, 2], [1, 3]])
    rig.send(batch, prepared=False)
    frames = [frame for _, _, frame in rig.push.sent]
    assert frames.count(b"") == 1 and len(frames) == 3
    assert frames[1] == frames[2] == torch.full((2,), 1.0).numpy().tobytes()
    assert batch.copies == 1


def test_frames_have_a_bound_of_consumers_as_well(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    inline = rig.delivery._inline
    monkeypatch.setattr(type(inline), "max_consumers", 1)
    rig.delivery.set_routes(table(2, b2="zeromq", b3="zeromq"))
    batch = rig.batch([[1, 2]], [[1, 3]])
    batch.out = out = inline.reserve("float32", (2, 2))
    assert out is not None
    out.memory[:] = bytes(8) + torch.full((2,), 2.0).numpy().tobytes()
    rig.delivery.deliver(batch, inline)
    frames = [frame for _, _, frame in rig.push.sent]
    assert frames == [bytes(8), torch.full((2,), 2.0).numpy().tobytes()] and batch.copies == 1


def test_what_goes_on_is_the_same_attempt_and_says_which_hop_is_done(rig: Rig) -> None:
    batch = rig.batch([[1, 2, 3]])
    ticket = batch.tickets[0]
    ticket.item = replace(ticket.item, attempt=3, hop=1)
    ticket.ready_ns = batch.started_ns + 1  # an item that came when its batch had begun
    item = next_item(ticket, batch, 2, batch.started_ns + 5 * MS)
    assert (item.request_id, item.attempt, item.hop) == (ticket.item.request_id, 3, 2)
    (done,) = item.hops
    assert (done.node, done.wait) == (1, 0)


@pytest.mark.parametrize("prepared", [True, False])
def test_the_time_until_it_is_sent_is_told(rig: Rig, prepared: bool) -> None:
    batch = rig.batch([[1, 2]])
    batch.tickets[0].received_ns -= 5 * MS
    rig.send(batch, prepared)
    ((_, message),) = rig.data()
    assert message.items[0].hops[-1].overhead >= 5 * MS


def test_what_nobody_can_be_told_of_is_counted(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    items = [t.item for t in rig.batch([[1, 2]], [[1, 2]]).tickets]
    error = BlockError("BLOCK_FAILED", "no")
    rig.push.full = {f"ipc://{DISPATCHER}"}
    rig.delivery.fail(items, error)
    assert rig.delivery.undeliverable == 2
    rig.delivery.set_routes(RouteTable(1, 2, {}))
    rig.delivery.fail(items[:1], error)
    assert rig.delivery.undeliverable == 3
    monkeypatch.setattr(rig.push, "close", lambda: items, raising=False)
    rig.delivery.close()
    assert rig.delivery.undeliverable == 5
