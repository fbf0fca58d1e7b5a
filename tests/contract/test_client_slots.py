"""Both clients with a Dispatcher that grants memory: large tensors through slots, and back."""

from __future__ import annotations

import gc
import os
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import client_suite
import numpy as np
import pytest
import torch
from client_faces import AsyncFace, SyncFace
from client_suite import Make, maker
from dispatcher_rig import wait_until
from fake_dispatcher import FakeDispatcher

from blockflow.client import Client
from blockflow.client.sharing import RETRY_NS, SharingState

LARGE = np.arange(64 * 1024, dtype=np.float32).reshape(-1, 4)
SLOTS = 16
"""Of one segment for tensors of this size."""

dispatcher = client_suite.dispatcher


@pytest.fixture(params=[SyncFace, AsyncFace], ids=["sync", "async"])
def make(request: pytest.FixtureRequest) -> Iterator[Make]:
    with maker(request.param) as build:
        yield build


def attach(client: Any, x: Any = LARGE, **options: Any) -> None:
    """Ask with a first tensor and wait until slots for both directions are there."""
    client.infer("echo", x, **options)
    wait_until(
        lambda: (
            client.shared_memory.upload_slots >= SLOTS
            and client.shared_memory.result_slots >= SLOTS
        )
    )


def test_slots_of_a_further_size_are_asked_for_when_the_first_tensor_of_it_leaves(
    make: Make, dispatcher: FakeDispatcher
) -> None:
    """And not with the next event, which may be its answer."""
    # A time-out that passes, even that of a request which has long been answered, is an event.
    client = make(dispatcher.endpoint, connect_timeout_s=60)
    attach(client, deadline_s=60)
    slots = client.shared_memory.upload_slots
    client.submit("silent", np.tile(LARGE, (4, 1)), deadline_s=60)
    wait_until(lambda: client.shared_memory.upload_slots > slots)


def test_large_tensors_take_slots_and_small_ones_messages(
    make: Make, dispatcher: FakeDispatcher
) -> None:
    client = make(dispatcher.endpoint)
    small = client.infer("echo", LARGE[:2])
    assert client.shared_memory.state is SharingState.UNUSED
    assert (small.upload.way, small.download.way) == ("message", "message")
    first = client.infer("echo", LARGE)
    assert (first.upload.way, first.upload.copies) == ("message", 3)
    attach(client)
    before = client.counters()
    for i in range(3 * SLOTS):  # more often than there are slots
        x = LARGE + i
        result = client.infer("echo", x)
        assert np.array_equal(result.value, x)
        assert result.value.flags.writeable
        for leg in (result.upload, result.download):
            assert (leg.way, leg.nbytes, leg.copies) == ("slot", LARGE.nbytes, 2)
    assert client.infer("echo", LARGE[:2]).upload.way == "message"
    after = client.counters()
    nbytes = 3 * SLOTS * LARGE.nbytes
    assert after.slot_uploads - before.slot_uploads == 3 * SLOTS
    assert after.slot_results - before.slot_results == 3 * SLOTS
    assert after.slot_upload_bytes - before.slot_upload_bytes == nbytes
    assert after.slot_result_bytes - before.slot_result_bytes == nbytes
    assert client.shared_memory.state is SharingState.ATTACHED
    assert client.shared_memory.reason == ""
    assert dispatcher.grants.gauges()["clients"] == 1


def test_many_in_flight_fall_back_to_messages(make: Make, dispatcher: FakeDispatcher) -> None:
    client = make(dispatcher.endpoint)
    attach(client)
    inputs = [LARGE + i for i in range(SLOTS + 8)]
    before = client.counters()
    pending = [client.submit("held", x) for x in inputs]
    dispatcher.wait_for(lambda: sum("held" in r.tasks for r in dispatcher.requests) == len(inputs))
    # The last one is counted after it has left: it may be there already.
    wait_until(lambda: client.counters().message_uploads - before.message_uploads >= 8)
    after = client.counters()
    assert after.slot_uploads - before.slot_uploads == SLOTS
    assert after.message_uploads - before.message_uploads == 8
    dispatcher.release()
    for x, p in zip(inputs, pending, strict=True):
        assert np.array_equal(p.result(10).value, x)
    assert client.infer("echo", LARGE).upload.way == "slot"


def test_a_slot_is_not_used_again_before_it_was_read(
    make: Make, dispatcher: FakeDispatcher
) -> None:
    client = make(dispatcher.endpoint)
    attach(client)
    waiting = [client.submit("held", LARGE + i) for i in range(SLOTS)]
    dispatcher.wait_for(lambda: sum("held" in r.tasks for r in dispatcher.requests) == SLOTS)
    for p in waiting:
        p.cancel()
        assert p.exception(5).code == "CANCELLED"
    # Nobody waits for them any more, but nothing says that the slots have been read...
    assert client.infer("echo", LARGE).upload.way == "message"
    # ... but for this reply to what was sent after them.
    assert client.infer("echo", LARGE).upload.way == "slot"


def test_views_hold_their_slots(make: Make, dispatcher: FakeDispatcher) -> None:
    client = make(dispatcher.endpoint)
    attach(client)
    kept = [client.infer("echo", LARGE + i, results="view") for i in range(SLOTS)]
    assert {r.download.way for r in kept} == {"view"}
    assert {r.download.copies for r in kept} == {1}
    full = client.infer("echo", LARGE, results="view")
    assert full.download.way == "message"
    part = kept[3].value[5:7]
    for i, r in enumerate(kept):
        assert np.array_equal(r.value, LARGE + i)
    del kept, r
    gc.collect()
    # All slots but one are free; the array that is left still holds its own.
    for i in range(2 * SLOTS):
        assert client.infer("echo", LARGE - i, results="view").download.way == "view"
    assert np.array_equal(part, (LARGE + 3)[5:7])
    client.close()
    assert np.array_equal(part, (LARGE + 3)[5:7])


def test_late_results_give_their_slots_back(make: Make, dispatcher: FakeDispatcher) -> None:
    client = make(dispatcher.endpoint)
    attach(client)
    pending = [client.submit("held", LARGE + i) for i in range(SLOTS)]
    dispatcher.wait_for(lambda: sum("held" in r.tasks for r in dispatcher.requests) == SLOTS)
    for p in pending:
        p.cancel()
        assert p.exception(5).code == "CANCELLED"
    dispatcher.release()
    wait_until(lambda: client.counters().late_replies == SLOTS)
    kept = [client.infer("echo", LARGE, results="view") for _ in range(SLOTS)]
    assert {r.download.way for r in kept} == {"view"}


@pytest.mark.parametrize("results", ["copy", "view"])
def test_torch_goes_in_and_comes_out(make: Make, dispatcher: FakeDispatcher, results: str) -> None:
    client = make(dispatcher.endpoint)
    attach(client)
    for dtype in (torch.float32, torch.bfloat16, torch.int8):
        x = torch.from_numpy(LARGE).to(dtype)
        for _ in range(2):
            y = client.infer("echo", x, results=results).value
            assert y.dtype == dtype
            assert torch.equal(y, x)
            y += 1  # the caller's own, wherever it lies
    double = client.infer(["echo", "double"], LARGE, results=results)
    assert np.array_equal(double["double"].value, np.concatenate([LARGE, LARGE]))


def test_other_layouts_arrive_whole(make: Make, dispatcher: FakeDispatcher) -> None:
    client = make(dispatcher.endpoint)
    attach(client)
    for x in (LARGE.T, LARGE[::2], LARGE[:, ::-1]):
        assert np.array_equal(client.infer("echo", x).value, x)


def test_threads_share_the_slots(make: Make, dispatcher: FakeDispatcher) -> None:
    client = make(dispatcher.endpoint)
    attach(client)
    wrong: list[int] = []

    def work(n: int) -> None:
        for i in range(10):
            x = LARGE + (100 * n + i)
            how = "view" if i % 2 else "copy"
            if not np.array_equal(client.infer("echo", x, results=how).value, x):
                wrong.append(n)

    threads = [threading.Thread(target=work, args=(n,)) for n in range(6)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert wrong == []


def test_the_reasons_for_messages_are_told(make: Make, dispatcher: FakeDispatcher) -> None:
    off = make(dispatcher.endpoint, shared_memory="off")
    off.infer("echo", LARGE)
    assert off.shared_memory.state is SharingState.OFF
    assert off.shared_memory.reason == "switched off by the caller"
    with FakeDispatcher(share=False) as fake:
        refused = make(fake.endpoint)
        refused.infer("echo", LARGE)
        wait_until(lambda: refused.shared_memory.state is SharingState.UNAVAILABLE)
        assert refused.shared_memory.reason == "this fake does not share"
        assert np.array_equal(refused.infer("echo", LARGE).value, LARGE)


def test_a_side_connection_that_breaks_loses_nothing(
    make: Make, dispatcher: FakeDispatcher, monkeypatch: pytest.MonkeyPatch
) -> None:
    client = make(dispatcher.endpoint)
    attach(client)
    view = client.infer("echo", LARGE, results="view").value
    held = client.submit("held", LARGE + 1)
    dispatcher.wait_for(lambda: "held" in dispatcher.requests[-1].tasks)
    dispatcher.break_side()
    dispatcher.release()
    assert np.array_equal(held.result(5).value, LARGE + 1)
    assert np.array_equal(client.infer("echo", LARGE + 2).value, LARGE + 2)
    wait_until(lambda: client.shared_memory.state is SharingState.UNAVAILABLE)
    assert "closed" in client.shared_memory.reason
    assert np.array_equal(view, LARGE)
    assert dispatcher.grants.gauges() == {"clients": 0, "segments": 0, "bytes": 0, "events": {}}
    monkeypatch.setattr("blockflow.client.sharing.RETRY_NS", 0)
    client._client._connection._core.sharing._retry_ns -= RETRY_NS
    attach(client)
    assert client.infer("echo", LARGE).upload.way == "slot"
    assert np.array_equal(view, LARGE)


def test_a_request_whose_slot_is_gone_goes_again_in_a_message(
    make: Make, dispatcher: FakeDispatcher, monkeypatch: pytest.MonkeyPatch
) -> None:
    client = make(dispatcher.endpoint)
    attach(client)
    # The Dispatcher drops the memory, and the client does not know it yet when it sends.
    monkeypatch.setattr(dispatcher.grants, "watches", lambda source: False)
    monkeypatch.setattr(client._client._connection._io.side, "receive", lambda: None)
    dispatcher.break_side()
    assert np.array_equal(client.infer("echo", LARGE + 5).value, LARGE + 5)
    assert dispatcher.requests[-2].upload is not None
    assert dispatcher.requests[-1].upload is None
    assert dispatcher.requests[-2].request_id == dispatcher.requests[-1].request_id


def test_another_dispatcher_is_asked_anew(make: Make, tmp_path: Path) -> None:
    address = f"ipc://{tmp_path}/d.sock"
    with FakeDispatcher(address) as first:
        client = make(address)
        attach(client)
        first.wait_for(lambda: True)
    with FakeDispatcher(address):
        attach(client)
        assert client.infer("echo", LARGE).upload.way == "slot"
        assert client.counters().disconnects == 1


def test_a_client_that_leaves_a_connection_watches_nothing_of_it(
    make: Make, dispatcher: FakeDispatcher
) -> None:
    """The descriptor is closed: it would be told of it for ever, or of whoever has the number."""
    client = make(dispatcher.endpoint)
    attach(client)
    io = client._client._connection._io
    assert io.side.fileno() in dict(io._poller.sockets)

    def leave() -> list[Any]:
        io._leave(time.monotonic_ns())
        return []

    io.post(leave, None, None)
    wait_until(lambda: client.counters().hang_ups == 1)
    # Its bell, the socket of messages, and that one's monitor.
    wait_until(lambda: len(io._poller.sockets) == 3)


def test_a_client_that_closes_gives_everything_back(make: Make, dispatcher: FakeDispatcher) -> None:
    before = len(os.listdir("/proc/self/fd"))
    client = make(dispatcher.endpoint)
    attach(client)
    client.close()
    wait_until(lambda: dispatcher.grants.gauges()["bytes"] == 0)
    gc.collect()
    wait_until(lambda: len(os.listdir("/proc/self/fd")) <= before)
    assert "blockflow-grant" not in Path("/proc/self/maps").read_text()


def test_a_forked_child_releases_nothing_of_its_parent(dispatcher: FakeDispatcher) -> None:
    with Client(dispatcher.endpoint) as client:
        attach(client)
        result = client.infer("echo", LARGE, results="view")
        pid = os.fork()
        if pid == 0:
            del result  # its finalizer runs here, too
            gc.collect()
            os._exit(0)
        assert os.waitpid(pid, 0)[1] == 0
        for i in range(2 * SLOTS):
            client.infer("echo", LARGE + 1 + i, results="view")
        assert np.array_equal(result.value, LARGE)
