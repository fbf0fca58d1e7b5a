"""More than the system can do: fair shares, slow readers, withdrawn work, opposed paths."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import numpy as np
import pytest
import zmq
from dispatcher_rig import RawClient, Rig, rig, swallow, task, wait_until
from system_rig import served

from blockflow.client import Client
from blockflow.core.errors import BlockFlowError
from blockflow.core.model import TensorSpec
from blockflow.dispatcher import clients
from blockflow.launch.base import Launcher
from blockflow.repository.echo import save_echo
from blockflow.repository.repository import BlockRepository
from blockflow.tensormq.janitor import run_root
from blockflow.wire import client as wire

X = np.ones((1, 4), np.float32)
BIG = np.ones((1, 65_536), np.float32)
WIDE = np.ones((4, 65_536), np.float32)
"""1 MiB"""


@pytest.fixture
def up() -> Iterator[Rig]:
    with rig(run_root(), max_inflight=16, max_inflight_per_client=16) as r:
        r.worker(11, {1: "e"})
        r.publish(task("t", ["e"]))
        yield r


# --- clients --------------------------------------------------------------------------------------


def test_a_greedy_client_does_not_starve_a_modest_one(up: Rig) -> None:
    def work(v: np.ndarray) -> np.ndarray:
        time.sleep(0.001)
        return v + 1

    up.workers[0].behave["e"] = work
    greedy, modest = up.client(), up.client(1)
    enough = threading.Event()

    def grab() -> None:
        for _ in range(64):
            greedy.ask("t", X)
        while not enough.is_set():
            if greedy.socket.poll(20):
                greedy.answer()
                greedy.ask("t", X)  # at once, whatever it was told

    thread = threading.Thread(target=grab)
    thread.start()
    try:
        wait_until(lambda: up.exchange.stats.rejected["OVERLOADED"] > 50)
        tries = served = 0
        while served < 20:
            tries += 1
            assert tries < 400, f"{served} of 20 served"
            (result,) = modest.infer("t", X)
            if isinstance(result, BlockFlowError):
                assert result.code == "OVERLOADED"
                time.sleep((result.retry_after_ms or 1) / 1e3)
            else:
                served += 1
    finally:
        enough.set()
        thread.join()
    refused = up.exchange.admission.refused
    assert refused["share"] + refused["credits"] + refused["limit"] > 0


@pytest.mark.parametrize("which", [0, 1], ids=["ipc", "tcp"])
def test_one_that_asks_for_much_at_once_and_reads_gets_it(which: int) -> None:
    """Forty megabytes are on the way to it at times: no reason to cut it off."""
    large = np.ones((1, 1 << 20), np.float32)
    many, often = 10, 5
    with rig(run_root(), slots=256) as r:
        worker = r.worker(11, {1: "e"})
        worker.behave["e"] = lambda v: large
        r.publish(task("t", ["e"]), mode="zeromq")
        client = r.client(which)
        for _ in range(often):
            for _ in range(many):
                client.ask("t", X)
            sizes = [len(client.answer()[1][0]) for _ in range(many)]
            assert sizes == [large.nbytes] * many
        assert r.exchange.stats.events["slow_client"] == 0


@pytest.mark.parametrize("which", [0, 1], ids=["ipc", "tcp"])
def test_together_readers_may_owe_more_than_all_others(
    which: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What all may owe is for those who take nothing; who reads gets what it has asked for."""
    large = np.ones((1, 1 << 20), np.float32)
    monkeypatch.setattr(clients, "OWED_BYTES", large.nbytes)
    with rig(run_root(), slots=256) as r:
        worker = r.worker(11, {1: "e"})
        worker.behave["e"] = lambda v: large
        r.publish(task("t", ["e"]), mode="zeromq")
        readers = [r.client(which) for _ in range(3)]
        for _ in range(3):
            for client in readers * 3:
                client.ask("t", X)
            sizes = [len(client.answer()[1][0]) for client in readers * 3]
            assert sizes == [large.nbytes] * 9
        assert r.exchange.stats.events["slow_client"] == 0


def test_a_hundred_readers_that_never_read(monkeypatch: pytest.MonkeyPatch) -> None:
    bound = 16 << 20
    monkeypatch.setattr(clients, "OWED_BYTES", bound)
    monkeypatch.setattr(clients, "MOST_OWED_BYTES", bound)
    with rig(run_root(), slots=256) as r:
        worker = r.worker(11, {1: "e", 2: "small"})
        worker.behave["e"] = lambda v: BIG
        # Whole tensors: there are no slots of the worker to run out of.
        r.publish(task("t", ["e"]), task("small", ["small"]), mode="zeromq")
        witness = r.client(1)
        # A unix socket holds 200 KB or so, a tcp one may grow to many MB.
        lazy = [r.client(0, hwm=1) for _ in range(100)]
        port = r.server._clients
        for _ in range(4):
            for one in lazy:
                with suppress(zmq.Again):
                    one.ask("t", X)
            np.testing.assert_array_equal(witness.infer("small", X)[0], X + 1)
            wait_until(lambda: len(r.exchange.table) == 0)
            # What one round of the loop adds comes on top until its end.
            assert port.backlog_bytes() <= bound + 64 * BIG.nbytes
        wait_until(lambda: port.evicted and not port.backlog_bytes())
        assert port.waiting() == 0
        assert r.exchange.stats.events["slow_client"] == port.evicted
        np.testing.assert_array_equal(witness.infer("small", X)[0], X + 1)
        wait_until(r.idle)


def test_a_cancelled_request_is_withdrawn_from_its_workers(up: Rig) -> None:
    worker = up.workers[0]
    worker.behave["e"] = swallow
    client = up.client()
    rid = client.ask("t", X)
    wait_until(lambda: worker.seen)
    client.send(wire.encode_to_dispatcher(wire.Cancel(rid)))
    assert client.answer()[0].results[0].error.code == "CANCELLED"
    item = worker.seen[0][1]
    wait_until(lambda: worker.withdrawn == [(item.request_id, 1)])
    wait_until(lambda: up.exchange.withdrawals.sent == 1)  # counted once it is sent


@pytest.mark.parametrize("which", [0, 1], ids=["ipc", "tcp"])
def test_a_client_that_leaves_is_noticed_and_its_work_withdrawn(up: Rig, which: int) -> None:
    worker = up.workers[0]
    worker.behave["e"] = swallow
    client, stays = up.client(which), up.client(which)
    for _ in range(3):
        client.ask("t", X)
    wait_until(lambda: len(worker.seen) == 3)
    stays.ask("t", X)
    wait_until(lambda: len(worker.seen) == 4)
    client.close()
    wait_until(lambda: len(up.exchange.table) == 1)  # long before the deadline
    gone = {item.request_id for _, item in worker.seen[:3]}
    wait_until(lambda: {t for t, _ in worker.withdrawn} == gone)
    assert up.exchange.stats.events["client_gone"] == 1
    wait_until(lambda: not up.server._clients.waiting())


def test_connections_that_come_and_go_leave_nothing(up: Rig) -> None:
    for _ in range(30):
        client = RawClient(up.context, up.server.client_endpoints[1])
        np.testing.assert_array_equal(client.infer("t", X)[0], X + 1)
        client.close()
    port = up.server._clients
    wait_until(lambda: not port.peers.links and not port.peers.book._present)
    assert up.exchange.stats.events["client_gone"] == 0  # they were owed nothing


# --- workers --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "x"),
    [({"slots": 2}, X), ({"slots": 1}, X), ({"arena_mib": 3, "max_rows": 4}, WIDE)],
    ids=["two slots", "one slot", "memory for two"],
)
def test_opposed_paths_under_load_never_block_each_other(
    tmp_path: Path, launcher: Launcher, options: dict[str, int], x: np.ndarray
) -> None:
    repository = BlockRepository(tmp_path / "blocks")
    spec = TensorSpec("float32", ("rows", x.shape[1]))
    for name in ("a", "b"):
        save_echo(repository, name, spec)
    topology = {
        "blocks": [{"name": "a", **options}, {"name": "b", **options}],
        "tasks": {"there": ["a", "b"], "back": ["b", "a"]},
    }
    with (
        served(tmp_path, topology, launcher) as system,
        Client(system.client_endpoint) as client,
    ):
        client.wait_ready(["there", "back"])
        done: list[str] = []

        def ask(way: str) -> None:
            for _ in range(10):
                while True:
                    try:
                        client.infer(way, x, deadline_s=10.0)
                    except BlockFlowError as exc:
                        if exc.code != "OVERLOADED":
                            done.append(str(exc))
                            break
                        time.sleep((exc.retry_after_ms or 1) / 1e3)
                    else:
                        done.append("")
                        break

        threads = [threading.Thread(target=ask, args=(w,)) for w in ("there", "back") * 4]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert done == [""] * 10 * len(threads)
