"""Workers as processes: what becomes of the requests that they get, seen from the outside."""

from __future__ import annotations

import os
import signal
import time
from dataclasses import replace

import numpy as np
import pytest

from blockflow.core.model import TensorSpec
from blockflow.core.routing import PathNode, PathTree
from blockflow.launch.process_kpi import private_and_shared
from blockflow.tensormq.janitor import data_socket_path
from blockflow.wire.control import Monitor, Stats
from blockflow.wire.data import Data, Item, Withdraw, encode_withdraw
from tests import worker_rig
from tests.worker_rig import DISPATCHER, WAIT_S, Rig, at_work, echo, some

rig = worker_rig.rig


def data_endpoint(rig: Rig, incarnation: int) -> str:
    return f"ipc://{data_socket_path(rig.folder, incarnation)}"


# --- running -------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", ["tensormq", "zeromq"])
@pytest.mark.parametrize("transport", ["ipc", "tcp"])
def test_a_chain_of_processes(rig: Rig, mode: str, transport: str) -> None:
    for n in (1, 2, 3):
        rig.start(10 + n, {n: echo(rig, f"e{n}")}, mode=mode, transport=transport)
    rig.publish()
    for rows in (1, 3, 8):
        x = some(rows)
        sent = time.monotonic_ns()
        (rid,) = rig.send(x, [1, 2, 3])
        message, frame, now = rig.receive_full()
        assert isinstance(message, Data)
        assert (frame is None) == (mode == "tensormq")
        np.testing.assert_array_equal(rig.read(message.tensor, frame), x)
        (item,) = message.items
        assert (item.request_id, item.hop, item.rows) == (rid, 2, rows)
        assert 0 < item.remaining_ms <= 10_000
        assert [t.node for t in item.hops] == [0, 1, 2]
        # What the hops account for, with the last leg, is the whole time but for our own send.
        parts = sum(t.transit + t.wait + t.overhead + t.compute for t in item.hops)
        assert 0 < parts <= message.sent_ns - sent <= now - sent


def test_slots_are_given_back(rig: Rig) -> None:
    rig.start(11, {1: echo(rig, "e1")}, slots=2, arena_bytes=1 << 16)
    rig.publish()
    for k in range(20):
        rig.send(some(1, 4, first=k), [1])
    for k in range(20):
        _, y = rig.result()
        assert y[0, 0] == k
    rig.shm.sweep()  # an input is given back before its result is sent
    assert rig.shm.outstanding() == 0


def test_several_blocks_in_one_worker(rig: Rig) -> None:
    """A tree 1 -> (2, 3 -> 4), with 1 and 3 answers as well; no socket lies between the stages."""
    rig.start(11, {n: echo(rig, f"e{n}") for n in (1, 2, 3, 4)})
    rig.publish()
    x = some(3)
    rig.send(x, [1], [1, 2], [1, 3], [1, 3, 4])
    ends = {}
    for _ in range(4):
        message, y = rig.result()
        np.testing.assert_array_equal(y, x)
        (item,) = message.items
        ends[item.path.nodes[item.hop].stage] = [item.path.nodes[t.node].stage for t in item.hops]
        assert all(t.transit == 0 for t in item.hops[1:])
    assert ends == {1: [1], 2: [1, 2], 3: [1, 3], 4: [1, 3, 4]}


def test_fan_out_to_two_processes(rig: Rig) -> None:
    rig.start(11, {1: echo(rig, "e1")})
    rig.start(12, {2: echo(rig, "e2")})
    rig.start(13, {3: echo(rig, "e3"), 4: echo(rig, "e4")}, mode="zeromq")  # a mixed batch
    rig.publish()
    x = some(5)
    rig.send(x, [1, 2], [1, 3], [1, 4], [1, 2, 4])
    seen = []
    for _ in range(4):
        message, y = rig.result()
        np.testing.assert_array_equal(y, x)
        (item,) = message.items
        seen.append([item.path.nodes[t.node].stage for t in item.hops])
    assert sorted(seen) == [[1, 2], [1, 2, 4], [1, 3], [1, 4]]


def test_items_of_one_message_part_ways(rig: Rig) -> None:
    rig.start(11, {1: echo(rig, "e1")})
    rig.publish()
    x = some(6)
    ids = rig.send(x, [1], rows=[1, 3, 2])
    got = {}
    for _ in ids:
        message, y = rig.result()
        (item,) = message.items
        got[item.request_id] = y
    for rid, part in zip(ids, (x[:1], x[1:4], x[4:]), strict=True):
        np.testing.assert_array_equal(got[rid], part)


def test_dynamic_dims(rig: Rig) -> None:
    rig.start(11, {1: echo(rig, "e1", dims=("length", 2))})
    rig.publish()
    for length in (1, 7, 30):
        x = some(2, length, 2)
        rig.send(x, [1])
        np.testing.assert_array_equal(rig.result()[1], x)


# --- what goes wrong -----------------------------------------------------------------------------


def test_contract_is_checked_before_compute(rig: Rig) -> None:
    rig.start(11, {1: echo(rig, "e1")})
    rig.publish()
    for x in (some(2, 5), some(2, 4, 1), some(2).astype(np.float64)):
        (rid,) = rig.send(x, [1])
        failure = rig.failure()
        assert failure.error.code == "CONTRACT_MISMATCH" and failure.error.where == "e1"
        assert [(i.request_id, i.hop) for i in failure.items] == [(rid, 0)]
    rig.shm.sweep()
    assert rig.shm.outstanding() == 0


def test_a_failing_block_fails_its_request_only(rig: Rig) -> None:
    rig.start(11, {1: echo(rig, "e1", fail_on_value=13)})
    rig.publish()
    (bad,) = rig.send(some(1, first=13.0), [1])
    (good,) = rig.send(some(1, first=1.0), [1])
    failure = rig.failure()
    assert failure.error.code == "BLOCK_FAILED" and failure.items[0].request_id == bad
    assert rig.result()[0].items[0].request_id == good


def test_an_expired_request_is_not_started(rig: Rig) -> None:
    rig.start(11, {1: echo(rig, "slow", delay_ms=300)})
    rig.publish()
    (first,) = rig.send(some(), [1])
    at_work(rig, 1)
    (late,) = rig.send(some(), [1], remaining_ms=20)
    failure = rig.failure()  # told at its deadline, while the first one still computes
    assert failure.error.code == "DEADLINE_EXCEEDED" and failure.items[0].request_id == late
    assert rig.result()[0].items[0].request_id == first
    (none_left,) = rig.send(some(), [1], remaining_ms=0)
    assert rig.failure().items[0].request_id == none_left


def test_a_forward_has_a_time_out(rig: Rig) -> None:
    rig.start(11, {1: echo(rig, "slow", row_ms=100)}, stage={"timeout_ms": 150})
    rig.publish()
    (quick,) = rig.send(some(1), [1])
    assert rig.result()[0].items[0].request_id == quick
    (stuck,) = rig.send(some(50), [1])
    (queued,) = rig.send(some(1), [1])
    codes = {}
    for _ in range(2):
        failure = rig.failure()
        codes[failure.items[0].request_id] = failure.error.code
    assert codes == {stuck: "BLOCK_FAILED", queued: "WORKER_LOST"}
    assert rig.children[11].wait(WAIT_S) == 3
    assert rig.leavings(11) == []


def test_a_stage_that_is_not_there(rig: Rig) -> None:
    rig.start(11, {1: echo(rig, "e1")})
    rig.publish()
    rig.routes[9] = rig.routes[1]  # the sender is wrong about who hosts stage 9
    rig.send(some(), [9])
    assert rig.failure().error.code == "BLOCK_UNAVAILABLE"
    rig.send(some(), [1, 7])  # nobody knows a route to stage 7
    failure = rig.failure()
    assert failure.error.code == "WORKER_LOST" and failure.items[0].hop == 1
    rig.send(some(), [1])
    rig.result()


def test_tensor_too_large_for_the_arena(rig: Rig) -> None:
    rig.start(11, {1: echo(rig, "e1")}, arena_bytes=1 << 16)
    rig.publish()
    rig.send(some(5000), [1])
    assert rig.failure().error.code == "TOO_LARGE"
    rig.send(some(2), [1])
    rig.result()


def test_backpressure_without_a_slot(rig: Rig) -> None:
    """The next hop's consumer holds every slot: the stage waits, nothing is lost, nothing grows."""
    rig.start(11, {1: echo(rig, "e1")}, slots=2, arena_bytes=1 << 16)
    rig.publish()
    held = []
    for k in range(4):
        rig.send(some(1, first=k), [1])
    for _ in range(2):
        message, frame, _ = rig.receive_full()
        assert isinstance(message, Data)
        held.append(rig.consumer.open(message.tensor, frame))
    with pytest.raises(AssertionError):
        rig.receive(timeout_s=0.1)
    for buffer in held:
        buffer.release()
    assert [rig.result()[1][0, 0] for _ in range(2)] == [2.0, 3.0]


def test_what_comes_during_a_computation_is_read_then(rig: Rig) -> None:
    """It waits in the stage's queue, where policies and deadlines see it, not in the socket."""
    rig.start(11, {1: echo(rig, "slow", delay_ms=150)})
    rig.publish()
    rig.send(some(), [1])
    rig.result()
    for _ in range(3):
        rig.send(some(), [1])
    at_work(rig, 1)
    (late,) = rig.send(some(), [1], remaining_ms=50)
    failure = rig.failure()  # not after the computations before it
    assert failure.items[0].request_id == late and failure.error.code == "DEADLINE_EXCEEDED"
    hops = [rig.result()[0].items[0].hops[0] for _ in range(3)]
    assert hops[2].wait > 2 * hops[2].transit and hops[2].wait > hops[1].wait


def test_a_prepared_message_gives_way_to_new_routes(rig: Rig) -> None:
    """The routes change while a batch is computed whose messages were made for the old ones."""
    rig.start(11, {1: echo(rig, "slow", delay_ms=200)}, slots=2, arena_bytes=1 << 16)
    rig.start(12, {2: echo(rig, "e2")})
    rig.start(13, {3: echo(rig, "e2")})
    rig.publish()
    before = rig.version
    for _ in range(3):
        rig.send(some(), [1, 2])
        rig.routes[2] = replace(rig.routes[3], stage=2)  # stage 2 is said to be in worker 13 ...
        rig.publish()
        failure = rig.failure()  # ... which does not know it
        assert failure.error.code == "BLOCK_UNAVAILABLE" and failure.sender == 13
        rig.routes[2] = replace(rig.routes[2], incarnation=12, endpoint=data_endpoint(rig, 12))
        rig.publish()
        rig.send(some(), [1, 2])
        assert rig.result()[0].sender == 12
    assert rig.version > before


def test_one_of_a_prepared_batch_fails(rig: Rig) -> None:
    """Its mates' rows are sent all the same, and the slots come back."""
    rig.start(11, {1: echo(rig, "e1", fail_on_value=13)}, slots=2, arena_bytes=1 << 16)
    rig.start(12, {2: echo(rig, "e2")})
    rig.publish()
    for _ in range(4):
        rig.send(some(first=13), [1, 2])
        assert rig.failure().error.code == "BLOCK_FAILED"
        rig.send(some(first=1), [1, 2])
        assert rig.result()[1][0, 0] == 1


# --- a real model --------------------------------------------------------------------------------


def test_blocks_of_a_model_compute_what_the_model_does(rig: Rig) -> None:
    torch = pytest.importorskip("torch")
    nn = torch.nn
    from blockflow.repository.export import export_model
    from blockflow.repository.repository import BlockRepository
    from blockflow.repository.sources import LoadedModel

    torch.manual_seed(1)
    model = nn.Sequential(
        nn.Sequential(nn.Conv2d(1, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(inplace=True)),
        nn.Sequential(nn.MaxPool2d(2), nn.ReLU(inplace=True)),
        nn.Sequential(nn.Flatten(), nn.Linear(128, 10)),
    ).eval()
    repository = BlockRepository(rig.repository)
    source = LoadedModel(model, "test", TensorSpec("float32", ("rows", 1, 8, 8)))
    report = export_model(source, repository, prefix="m", cuts=["1", "2"])
    infos = [repository.info(name) for name in report.paths[0]]
    rig.start(11, {1: infos[0]})
    rig.start(12, {2: infos[1], 3: infos[2]}, threads=2)
    rig.publish()
    private, _ = private_and_shared(rig.children[12].pid)
    assert private - sum(i.state_bytes for i in infos[1:]) < 40 << 20
    for rows in (1, 3, 8):
        x = some(rows, 1, 8, 8)
        rig.send(x, [1, 2, 3])
        with torch.inference_mode():
            expected = model(torch.from_numpy(x.copy())).numpy()
        np.testing.assert_allclose(rig.result()[1], expected, rtol=1e-4, atol=1e-5)


def test_what_is_withdrawn_is_dropped_in_the_queue_and_on_arrival(rig: Rig) -> None:
    # While the first one runs, which is long, everything else is read.
    rig.start(11, {1: echo(rig, "slow", delay_ms=700)})
    rig.publish()
    tree = PathTree((PathNode(1, -1, True),))
    ids = [os.urandom(16) for _ in range(4)]
    running, queued, overtaken, stays = ids
    endpoint = rig.routes[1].endpoint

    def send(rid: bytes, attempt: int = 1) -> None:
        item = Item(rid, attempt, 1, tree, 0, 1, 30_000)
        rig.post(some(1), (item,), tree, "float32", inline=False)

    (warm,) = rig.send(some(1), [1])
    assert rig.result()[0].items[0].request_id == warm
    os.kill(rig.children[11].pid, signal.SIGSTOP)
    send(running)
    send(queued)
    gone = ((queued, 1), (overtaken, 1))
    rig.send_raw(endpoint, [encode_withdraw(Withdraw(DISPATCHER, gone))])
    send(overtaken)
    send(stays)
    os.kill(rig.children[11].pid, signal.SIGCONT)
    assert [rig.result()[0].items[0].request_id for _ in range(2)] == [running, stays]
    send(overtaken, attempt=2)  # a later attempt is another thing
    assert rig.result()[0].items[0].attempt == 2
    rig.tell(11, Monitor(50.0))
    assert rig.expect(Stats, 11).extra["withdrawn"] == 2
    assert not rig.pull.poll(0)  # nobody was told of those two
    rig.shm.sweep()
    assert rig.shm.outstanding() == 0
