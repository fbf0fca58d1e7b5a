"""Workers are killed with requests in them: every request is answered once, and with its result."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
from control_rig import echo_repository
from warm_rig import Warm

from blockflow.client.pending import PendingRequest
from blockflow.client.sync import Client
from blockflow.control.system import System
from blockflow.core.errors import BlockFlowError
from blockflow.core.lifecycle import State
from tests.system_rig import served, wait_for

WAIT_S = 60.0
DEADLINE_S = 60.0
POINTS = {
    "executing": "before_forward",
    "computed": "after_forward",
    "sent": "after_output",
}
SPARE = [{"name": name, "replicas": 2} for name in POINTS]
BODY = {
    "blocks": [
        "front",
        *SPARE,
        "idle",
        {"name": "fragile", "batching": {"policy": "window", "max_rows": 8, "max_delay_ms": 200}},
        {"name": "once", "replayable": False},
    ],
    "tasks": {
        **{name: ["front", name] for name in POINTS},
        "idle": ["front", "idle"],
        "fragile": ["front", "fragile"],
        "once": ["once"],
    },
}


@pytest.fixture(scope="module")
def system(tmp_path_factory: pytest.TempPathFactory, warm: Warm) -> Iterator[System]:
    root = tmp_path_factory.mktemp("reexecution")
    busy = {"delay_ms": 5}
    echo_repository(
        root / "blocks",
        front={},
        **dict.fromkeys(POINTS, busy),
        idle=busy,
        fragile={"crash_on_value": 666},
        once={"crash_on_value": 666},
    )
    points = ",".join(f"{point}=kill-once:{block}" for block, point in POINTS.items())
    armed = warm.own_template(BLOCKFLOW_FAILPOINTS=points)
    with armed as launcher, served(root, BODY, launcher) as running:
        yield running


def value(number: float) -> np.ndarray[Any, Any]:
    return np.full((1, 4), number, np.float32)


def submit(client: Client, task: str, numbers: range) -> list[tuple[int, PendingRequest[Any]]]:
    pending = [(n, client.submit(task, value(n), deadline_s=DEADLINE_S)) for n in numbers]
    client.tasks()  # messages of one client are served in order: all of these are admitted
    return pending


def each_has_its_result(client: Client, pending: list[tuple[int, PendingRequest[Any]]]) -> None:
    for number, future in pending:
        assert np.array_equal(future.result().value, value(number))
    assert client.counters().late_replies == 0


def crashes(system: System, block: str) -> Callable[[], int]:
    """How often workers of a block have died."""

    def count() -> int:
        fleet = system.manager.brain.crew.fleet
        return sum(r.ledger.total for r in fleet.hosting(block))

    return count


def all_serve(system: System) -> Callable[[], bool]:
    """A test: every worker is ready, and the Dispatcher knows."""

    def test() -> bool:
        realm = system.manager.brain.realm
        states = {r.life.state for r in realm.crew.fleet}
        return states == {State.READY} and not realm.reasons_not_ready()

    return test


def blamed(system: System) -> dict[str, int] | None:
    """The Dispatcher's figures of re-runs, once a request was blamed."""
    figures: dict[str, int] = system.manager.views().dispatcher()["kpi"].get("recovery", {})
    return figures if figures.get("poisoned") else None


@pytest.mark.parametrize("block", list(POINTS))
def test_a_worker_killed_at_work_loses_nothing(system: System, block: str) -> None:
    with Client(system.client_endpoint) as client:
        pending = submit(client, block, range(40))
        each_has_its_result(client, pending)
    assert wait_for(system, lambda: crashes(system, block)() >= 1)


def test_a_block_that_is_killed_again_while_it_loads_loses_nothing(system: System) -> None:
    """The only worker dies, and so does its successor as soon as it has a process."""
    wait_for(system, all_serve(system))
    old = system.commands.worker("idle#0")
    with Client(system.client_endpoint) as client:
        pending = submit(client, "idle", range(40))
        os.kill(old["pid"], signal.SIGKILL)

        def successor() -> int:
            view = system.manager.views().worker("idle#0")
            assert view is not None
            return view["pid"] if view["incarnation"] > old["incarnation"] else 0

        os.kill(wait_for(system, successor), signal.SIGKILL)
        each_has_its_result(client, pending)
    wait_for(system, all_serve(system))
    assert crashes(system, "idle")() == 2


def test_a_worker_killed_idle_is_no_ones_loss(system: System) -> None:
    """Two workers: what is sent to the dead one before its death is known is run by the other."""
    wait_for(system, all_serve(system))
    before = crashes(system, "sent")()
    with Client(system.client_endpoint) as client:
        os.kill(system.commands.worker("sent#0")["pid"], signal.SIGKILL)
        pending = submit(client, "sent", range(20))
        each_has_its_result(client, pending)
    wait_for(system, lambda: crashes(system, "sent")() > before)


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_clients_that_send_again_outlive_the_dispatcher(system: System, number: int) -> None:
    wait_for(system, all_serve(system))
    with Client(system.client_endpoint, connect_timeout_s=WAIT_S) as client:
        numbers = range(20)
        pending = [
            (n, client.submit("idle", value(n), deadline_s=DEADLINE_S, retries=5)) for n in numbers
        ]
        client.tasks()
        os.kill(system.commands.worker("dispatcher")["pid"], number)
        each_has_its_result(client, pending)
    wait_for(system, all_serve(system))


def test_poison_is_blamed_and_its_batch_mates_are_not(system: System) -> None:
    wait_for(system, all_serve(system))
    with Client(system.client_endpoint) as client:
        mates = submit(client, "fragile", range(3))
        poison = client.submit("fragile", value(666), deadline_s=DEADLINE_S)
        mates += submit(client, "fragile", range(3, 7))
        with pytest.raises(BlockFlowError) as caught:
            poison.result()
        assert caught.value.code == "POISON"
        each_has_its_result(client, mates)
        figures = wait_for(system, lambda: blamed(system))
    assert crashes(system, "fragile")() == 2
    assert [figures[k] for k in ("poisoned", "attempts_spent", "budget_denied")] == [1, 0, 0]


def test_a_block_that_must_not_run_twice_does_not(system: System) -> None:
    wait_for(system, all_serve(system))
    with Client(system.client_endpoint) as client:
        with pytest.raises(BlockFlowError) as caught:
            client.infer("once", value(666), deadline_s=DEADLINE_S)
        assert caught.value.code == "WORKER_LOST"
        assert "'once' must not run twice" in caught.value.message
        assert not caught.value.retryable
        wait_for(system, all_serve(system))
        assert np.array_equal(client.infer("once", value(1)).value, value(1))
    assert crashes(system, "once")() == 1
