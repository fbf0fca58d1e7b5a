"""The Dispatcher between real sockets: what clients get for what they send."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import dispatcher_rig
import numpy as np
import pytest
import zmq
from dispatcher_rig import CONTRACT, Rig, X, swallow, task, wait_until

from blockflow.core import limits
from blockflow.core.errors import BlockError
from blockflow.core.model import Contract, TensorSpec
from blockflow.tensormq.push import PushCache
from blockflow.wire import client as wire
from blockflow.wire.data import Data, HopTiming, encode_data, pack_timings
from blockflow.wire.tensor import TensorDesc

make = dispatcher_rig.make
up = dispatcher_rig.up


def sent_to(r: Rig, block: str) -> int:
    """How often a block was visited."""
    return sum(w.stages[s] == block for w in r.workers for s, _ in w.seen)


# --- answers


@pytest.mark.parametrize("endpoint", [0, 1], ids=["ipc", "tcp"])
@pytest.mark.parametrize("mode", ["tensormq", "zeromq"])
@pytest.mark.parametrize("transport", ["ipc", "tcp"])
def test_a_request_is_answered(
    make: Callable[..., Rig], endpoint: int, mode: str, transport: str
) -> None:
    r = make(transport=transport)
    r.worker(11, {1: "trunk"}, mode=mode, transport=transport)
    r.worker(12, {2: "a"}, mode=mode, transport=transport)
    r.publish(task("ta", ["trunk", "a"]), mode=mode)
    client = r.client(endpoint)
    for rows in (1, 5):
        x = np.random.default_rng(rows).normal(size=(rows, 4)).astype(np.float32)
        (out,) = client.infer("ta", x)
        np.testing.assert_array_equal(out, x + 1 + 1)
    wait_until(r.idle)


def test_a_large_tensor_comes_back_whole(make: Callable[..., Rig]) -> None:
    r = make(arena_bytes=32 << 20)
    r.worker(11, {1: "e"})
    wide = TensorSpec("float32", ("rows", 100_000))
    r.publish(task("t", ["e"], contract=Contract(wide, wide)))
    x = np.random.default_rng(0).normal(size=(8, 100_000)).astype(np.float32)
    (out,) = r.client().infer("t", x)
    np.testing.assert_array_equal(out, x + 1)


def test_the_common_prefix_runs_once(up: Rig) -> None:
    up.workers[1].behave["a"] = lambda v: v * 10
    up.workers[1].behave["b"] = lambda v: v * 100
    a, b = up.client().infer(["ta", "tb"], X)
    np.testing.assert_array_equal(a, (X + 1) * 10)
    np.testing.assert_array_equal(b, (X + 1) * 100)
    assert sent_to(up, "trunk") == 1
    wait_until(up.idle)


def test_results_that_are_kept_are_no_clients_unread_bytes(
    up: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What the watch over them is told of memory that is in use for something else."""
    held: list[int] = []
    monkeypatch.setattr(up.server._clients, "look", lambda now_ns, kept: held.append(kept()))
    up.workers[1].behave["b"] = swallow
    c = up.client(which=1)
    c.ask(["ta", "tb"], X)
    wait_until(lambda: held and held[-1] == X.nbytes)  # it waits for the other one
    assert isinstance(c.infer("ta", X, tries=1)[0], np.ndarray)  # it may be asked for again
    wait_until(lambda: held[-1] == X.nbytes + up.exchange.memory.nbytes > X.nbytes)


def test_results_stand_in_the_order_asked(up: Rig) -> None:
    client = up.client()
    client.ask(["tb", "ta"], X)
    reply, frames = client.answer()
    assert [r.task for r in reply.results] == ["tb", "ta"]
    assert len(frames) == 2
    assert reply.epoch == 1


def test_many_requests_in_flight_find_their_owner(up: Rig) -> None:
    clients = [up.client(n % 2) for n in range(3)]
    asked: dict[bytes, tuple[int, float]] = {}
    for n in range(60):
        rid = clients[n % 3].ask("ta", np.full((1, 4), n, np.float32))
        asked[rid] = (n % 3, n + 2.0)
    for n, client in enumerate(clients):
        for _ in range(20):
            reply, (frame,) = client.answer()
            owner, value = asked.pop(reply.request_id)
            assert owner == n
            assert np.frombuffer(frame, np.float32)[0] == value
    assert not asked
    wait_until(up.idle)


def test_two_clients_may_use_the_same_id(up: Rig) -> None:
    one, two = up.client(), up.client(1)
    rid = b"the same id 1234"
    one.ask("ta", X, rid=rid)
    two.ask("ta", X * 2, rid=rid)
    for client, want in ((one, X + 2), (two, X * 2 + 2)):
        reply, (frame,) = client.answer()
        assert reply.request_id == rid
        np.testing.assert_array_equal(np.frombuffer(frame, np.float32).reshape(2, 4), want)


def test_one_failing_task_does_not_hide_the_other(up: Rig) -> None:
    up.workers[1].behave["a"] = lambda _: BlockError("BLOCK_FAILED", "no", where="a")
    a, b = up.client().infer(["ta", "tb"], X)
    assert a.code == "BLOCK_FAILED"
    assert a.where == "a"
    np.testing.assert_array_equal(b, X + 2)
    wait_until(up.idle)


def test_the_parts_of_the_time_add_up(up: Rig) -> None:
    client = up.client()
    for _ in range(5):
        client.ask("ta", X)
        reply, _ = client.answer()
        (result,) = reply.results
        assert [t.block for t in result.timings] == ["trunk", "a"]
        hops = sum(
            t.hop.transit + t.hop.wait + t.hop.overhead + t.hop.compute for t in result.timings
        )
        parts = result.ingress_ns + hops + result.egress_ns
        assert parts == pytest.approx(result.total_ns, rel=0.01)


def test_rows_of_one_batch_go_to_their_requests(make: Callable[..., Rig]) -> None:
    """Two requests in one message from the last block."""
    r = make()
    worker = r.worker(11, {1: "e"})
    worker.behave["e"] = swallow
    r.publish(task("t", ["e"]))
    one, two = r.client(), r.client()
    first = one.ask("t", X)
    wait_until(lambda: len(worker.seen) == 1)
    two.ask("t", X[:1])
    wait_until(lambda: len(worker.seen) == 2)
    items = tuple(
        replace(i, timings=pack_timings([HopTiming(0, 1, 1, 1, 1)])) for _, i in worker.seen
    )
    batch = np.arange(12, dtype=np.float32).reshape(3, 4)
    header = encode_data(Data(11, time.monotonic_ns(), TensorDesc("float32", (3, 4)), items))
    push = PushCache(r.context, zmq.Poller())
    push.send(r.server.endpoint, [header, batch.tobytes()])
    wait_until(lambda: push.flush() or not push.pending())
    reply, (frame,) = one.answer()
    assert reply.request_id == first
    np.testing.assert_array_equal(np.frombuffer(frame, np.float32).reshape(2, 4), batch[:2])
    _, (frame,) = two.answer()
    np.testing.assert_array_equal(np.frombuffer(frame, np.float32).reshape(1, 4), batch[2:])
    push.close()


def test_replicas_share_the_load(make: Callable[..., Rig]) -> None:
    r = make()
    workers = [r.worker(11, {1: "e"}), r.worker(12, {2: "e"})]
    r.publish(task("t", ["e"]))
    client = r.client()
    for _ in range(20):
        client.infer("t", X)
    assert [len(w.seen) for w in workers] == [10, 10]


def test_clients_are_told_when_the_tasks_have_changed(up: Rig) -> None:
    client = up.client()
    client.send(wire.encode_to_dispatcher(wire.Describe(b"d" * 16)))
    before, _ = client.answer()
    up.publish(*(task(str(t["name"]), t["path"], deadline_ms=500) for t in before.tasks))
    told, _ = client.answer()
    assert told.request_id == wire.UNASKED
    assert {t["deadline_ms"] for t in told.tasks} == {500}
    up.publish(*(task(str(t["name"]), t["path"], deadline_ms=500) for t in before.tasks))
    client.send(wire.encode_to_dispatcher(wire.Describe(b"e" * 16)))
    assert client.answer()[0].request_id == b"e" * 16, "nothing has changed"


def test_describe_lists_tasks_and_limits(up: Rig) -> None:
    client = up.client()
    client.send(wire.encode_to_dispatcher(wire.Describe(b"d" * 16)))
    description, _ = client.answer()
    assert description.request_id == b"d" * 16
    assert [t["name"] for t in description.tasks] == ["ta", "tb", "other"]
    assert description.tasks[0]["contract"] == CONTRACT.to_dict()
    assert description.limits["max_message_bytes"] == limits.MAX_MESSAGE_BYTES
    assert description.limits["max_inflight"] == 256


# --- typed rejections


def infer_error(r: Rig, tasks: Any, array: np.ndarray = X, **kw: Any) -> Any:
    errors = r.client().infer(tasks, array, **kw)
    assert len({e.code for e in errors}) == 1
    return errors[0]


def test_not_ready_before_the_first_topology(make: Callable[..., Rig]) -> None:
    assert infer_error(make(), "t").code == "NOT_READY"


NAN = np.array([[1, 2, np.nan, 4]], np.float32)


@pytest.mark.parametrize(
    ("tasks", "array", "code"),
    [
        ("tc", X, "UNKNOWN_TASK"),
        (["ta", "tc"], X, "UNKNOWN_TASK"),
        (["ta", "other"], X, "INVALID_REQUEST"),
        ("ta", X.astype(np.float64), "CONTRACT_MISMATCH"),
        ("ta", X[:, :3], "CONTRACT_MISMATCH"),
        ("ta", X[0], "CONTRACT_MISMATCH"),
        ("ta", X[:0], "EMPTY_INPUT"),
        ("ta", NAN, "NON_FINITE_INPUT"),
        ("ta", np.zeros((33, 4), np.float32), "TOO_LARGE"),
    ],
)
def test_bad_input_gets_its_code_for_every_task(
    up: Rig, tasks: Any, array: np.ndarray, code: str
) -> None:
    client = up.client()
    client.ask(tasks, array)
    reply, frames = client.answer()
    names = [tasks] if isinstance(tasks, str) else tasks
    assert [r.task for r in reply.results] == names
    assert {r.error.code for r in reply.results} == {code}
    assert frames == []
    assert sent_to(up, "trunk") == 0
    assert np.array_equal(client.infer("ta", X)[0], X + 2)
    assert up.exchange.stats.rejected[code] == 1


def test_a_repeated_task_name_is_refused(up: Rig) -> None:
    client = up.client()
    client.ask(["ta", "ta"], X)
    reply, _ = client.answer()
    assert [(r.task, r.error.code) for r in reply.results] == [("ta", "INVALID_REQUEST")]


def test_near_names_are_offered(up: Rig) -> None:
    assert "'ta'" in infer_error(up, "taa").hint


@pytest.mark.parametrize("frames", [[], [b"123"], [b"", b""], [bytes(32), b"x"]])
def test_a_frame_of_another_size_is_malformed(up: Rig, frames: list[bytes]) -> None:
    client = up.client()
    header = wire.encode_to_dispatcher(
        wire.Request(b"r" * 16, ("ta",), 1000, TensorDesc("float32", (2, 4)))
    )
    client.send(header, *frames)
    reply, _ = client.answer()
    assert reply.request_id == b"r" * 16
    assert reply.results[0].error.code == "MALFORMED_MESSAGE"


def test_an_announced_tensor_over_the_limit_is_too_large(up: Rig) -> None:
    client = up.client()
    desc = TensorDesc("float64", (2**20, 2**10))
    client.send(wire.encode_to_dispatcher(wire.Request(b"r" * 16, ("ta",), 1000, desc)), b"x")
    reply, _ = client.answer()
    assert reply.results[0].task == "*"
    assert reply.results[0].error.code == "TOO_LARGE"


def test_a_block_that_will_not_come_back_is_named(make: Callable[..., Rig]) -> None:
    r = make()
    r.publish(task("t", ["e"]), down={"e": "it was given up"})
    (error,) = r.client().infer("t", X)
    assert error.code == "BLOCK_UNAVAILABLE"
    assert error.where == "e"
    assert "given up" in error.message


def test_overload_is_rejected_with_a_time_to_come_back(make: Callable[..., Rig]) -> None:
    r = make(max_inflight=3, max_inflight_per_client=2)
    r.worker(11, {1: "e"}).behave["e"] = swallow
    r.publish(task("t", ["e"]))
    one, two = r.client(), r.client()
    first = one.ask("t", X)
    one.ask("t", X)
    (error,) = one.infer("t", X)
    assert error.code == "OVERLOADED"
    assert "share" in error.message
    assert error.retry_after_ms > 0
    two.ask("t", X)
    (error,) = two.infer("t", X)
    assert "credits" in error.message
    one.send(wire.encode_to_dispatcher(wire.Cancel(first)))
    reply, _ = one.answer()
    assert reply.results[0].error.code == "CANCELLED"
    two.ask("t", X)
    assert two.quiet()  # admitted
    assert r.exchange.stats.tasks["t"].rejected["OVERLOADED"] == 2


def test_inputs_without_a_free_slot_are_rejected(make: Callable[..., Rig]) -> None:
    r = make(slots=2)
    r.worker(11, {1: "e"}).behave["e"] = swallow
    r.publish(task("t", ["e"]))
    client = r.client()
    for _ in range(2):
        client.ask("t", X)
    (error,) = client.infer("t", X)
    assert error.code == "OVERLOADED"
    assert "32 bytes" in error.message


def test_a_deadline_ends_a_request_in_time(make: Callable[..., Rig]) -> None:
    r = make()
    r.worker(11, {1: "e"}).behave["e"] = swallow
    r.publish(task("t", ["e"]))
    client = r.client()
    begun = time.monotonic()
    (error,) = client.infer("t", X, deadline_ms=150)
    taken = time.monotonic() - begun
    assert error.code == "DEADLINE_EXCEEDED"
    assert taken >= 0.15
    wait_until(r.idle)


def test_the_deadline_travels_as_time_left(up: Rig) -> None:
    up.client().infer("ta", X, deadline_ms=500)
    (_, item), *_ = up.workers[0].seen
    assert 0 < item.remaining_ms <= 500
    assert item.attempt == 1
    assert item.epoch == 1


def test_no_run_directory_is_named_to_clients(up: Rig) -> None:
    """A result that cannot be read is the block's fault; handles and paths stay inside."""
    worker = up.workers[1]
    up.workers[0].behave["trunk"] = lambda v: v
    client = up.client()
    worker.behave["a"] = swallow
    client.ask("ta", X)
    wait_until(lambda: worker.seen)
    item = replace(worker.seen[0][1])
    forged = Data(
        12,
        time.monotonic_ns(),
        TensorDesc("float32", (2, 4), handle=_handle(incarnation=12, generation=77)),
        (item,),
    )
    push = PushCache(up.context, zmq.Poller())
    push.send(up.server.endpoint, [encode_data(forged)])
    wait_until(lambda: push.flush() or not push.pending())
    reply, _ = client.answer()
    error = reply.results[0].error
    assert error.code == "OUTPUT_MISMATCH"
    assert str(Path(up.run_dir)) not in str(error.to_dict())
    push.close()


def _handle(incarnation: int, generation: int) -> Any:
    from blockflow.wire.tensor import Handle

    return Handle(incarnation, 0, 0, generation, 0)
