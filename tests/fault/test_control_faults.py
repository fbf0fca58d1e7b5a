"""Processes of a running system die or talk nonsense; the control plane mends it."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import numpy as np
import plain_http
import pytest
from control_rig import echo_repository
from system_rig import replaced, served, wait_for, worker
from template_gate import Gate
from warm_rig import Warm

from blockflow.client.sync import Client
from blockflow.control.system import System
from blockflow.control.update import Kind
from blockflow.core.errors import BlockFlowError
from blockflow.launch.base import Launcher
from blockflow.launch.local import TemplateLauncher

X = np.arange(4, dtype=np.float32).reshape(1, 4)
BODY = {"blocks": ["a", "fragile"], "tasks": {"t": ["a"], "f": ["a", "fragile"]}}


@pytest.fixture
def system(tmp_path: Path, launcher: Launcher) -> Iterator[System]:
    echo_repository(tmp_path / "blocks", fragile={"crash_on_value": 666})
    with served(tmp_path, BODY, launcher) as running:
        yield running


def test_a_killed_worker_is_replaced_with_its_cause_kept(system: System) -> None:
    old = worker(system, "a#0")
    os.kill(old["pid"], signal.SIGKILL)
    new = replaced(system, old)
    assert new["restarts"] == 1
    assert new["crash"]["cause"] == "killed by SIGKILL"
    assert new["crash"]["incarnation"] == old["incarnation"]
    with Client(system.client_endpoint) as client:
        assert np.array_equal(client.infer("t", X).value, X)
    files = os.listdir(system.run_dir)
    assert not [f for f in files if f.endswith(f"-{old['incarnation']}")]
    assert f"d{old['incarnation']}.sock" not in files


def test_a_crash_loop_fails_its_block_and_leaves_the_other_task_alone(system: System) -> None:
    poison = np.full((1, 4), 666, dtype=np.float32)

    def settled_after(crashes: int) -> bool:
        realm = system.manager.brain.realm
        (replica,) = realm.crew.fleet.hosting("fragile")
        known = replica.ledger.total >= crashes and replica.state in ("ready", "failed")
        return known and realm.publication.flipped == realm.version

    with Client(system.client_endpoint) as client:
        # Two workers die of one such request; of the third one a fifth dies, and that is the end.
        for crashes, code in ((2, "POISON"), (4, "POISON"), (5, "BLOCK_UNAVAILABLE")):
            with pytest.raises(BlockFlowError) as e:
                client.infer("f", poison, deadline_s=60)
            assert e.value.code == code
            wait_for(system, partial(settled_after, crashes))
        assert system.commands.block("fragile")["state"] == "failed"
        with pytest.raises(BlockFlowError) as e:
            client.infer("f", X, deadline_s=10)
        assert e.value.code == "BLOCK_UNAVAILABLE"
        assert np.array_equal(client.infer("t", X).value, X)
        assert "5 crashes" in worker(system, "fragile#0")["given_up"]
        assert not system.status()["ready"]
        # a new update brings it back
        assert system.apply(BODY)["update"]["state"] == "done"
        assert np.array_equal(client.infer("f", X).value, X)


def test_a_killed_dispatcher_comes_back_on_its_port(system: System) -> None:
    endpoints = system.client_endpoints
    old = worker(system, "dispatcher")
    workers = {w["name"]: w["pid"] for w in system.commands.workers()}
    os.kill(old["pid"], signal.SIGKILL)
    replaced(system, old)
    assert system.client_endpoints == endpoints
    for endpoint in endpoints:
        with Client(endpoint) as client:
            assert np.array_equal(client.infer("t", X).value, X)
    after = {w["name"]: w["pid"] for w in system.commands.workers()}
    assert after["a#0"] == workers["a#0"]


@pytest.fixture(scope="module")
def gate(tmp_path_factory: pytest.TempPathFactory) -> Gate:
    return Gate(tmp_path_factory.mktemp("gate") / "site")


@pytest.fixture(scope="module")
def own_launcher(gate: Gate, warm: Warm) -> Iterator[TemplateLauncher]:
    launcher = TemplateLauncher()
    with pytest.MonkeyPatch.context() as patch, warm.spawning():
        patch.syspath_prepend(str(gate.folder))
        yield launcher
    launcher.close()


@pytest.fixture(scope="module")
def gated(
    tmp_path_factory: pytest.TempPathFactory, own_launcher: TemplateLauncher
) -> Iterator[System]:
    """A system whose template a test may kill, and keep its successor from getting ready."""
    root = tmp_path_factory.mktemp("gated")
    echo_repository(root / "blocks")
    with served(root, {"blocks": ["a"], "tasks": {"t": ["a"]}}, own_launcher) as running:
        yield running


def test_a_dead_template_is_replaced_and_the_workers_live_on(gated: System) -> None:
    gated.apply({"blocks": ["a"], "tasks": {"t": ["a"]}})
    pid = worker(gated, "a#0")["pid"]
    os.kill(gated.status()["control"]["template"]["pid"], signal.SIGKILL)
    gated.apply({"blocks": ["a", "b"], "tasks": {"t": ["a", "b"]}})
    assert worker(gated, "a#0")["pid"] == pid
    with Client(gated.client_endpoint) as client:
        assert np.array_equal(client.infer("t", X).value, X)


def test_nobody_waits_for_a_template(
    gated: System, gate: Gate, own_launcher: TemplateLauncher
) -> None:
    """It is killed, and its successor takes as long as the test wants: meanwhile workers die, one
    is stopped, and whoever asks is answered. That ends the system."""
    gated.apply({"blocks": ["a", "b", "c"], "tasks": {n: [n] for n in "abc"}})
    old = {w["name"]: w for w in gated.commands.workers()}

    def waits(name: str) -> bool:
        view = gated.manager.views().worker(name)
        assert view is not None
        later = view["incarnation"] > old[name]["incarnation"]
        return later and view["state"] == "launching" and view["pid"] is None

    with gate.shut():
        os.kill(own_launcher.template_pid, signal.SIGKILL)
        for name in ("b#0", "a#0"):
            os.kill(old[name]["pid"], signal.SIGKILL)
            wait_for(gated, partial(waits, name))
        assert [p["worker"] for p in gated.commands.ping("c")] == ["c#0"]
        assert plain_http.get(f"{gated.rest.url}/v1/status", timeout=30).status_code == 200
        with Client(gated.client_endpoint) as client:
            assert np.array_equal(client.infer("c", X).value, X)
        # A process that is not there yet can be stopped.
        gated.commands.operate(Kind.STOP, "b")
        assert worker(gated, "b#0")["state"] == "stopped"
        assert gated.manager.call(partial(waits, "a#0"))
    with Client(gated.client_endpoint) as client:
        client.wait_ready(["a"], timeout_s=60)
        assert np.array_equal(client.infer("a", X).value, X)
    assert worker(gated, "a#0")["restarts"] == old["a#0"]["restarts"] + 1
    assert worker(gated, "b#0")["state"] == "stopped"
    assert worker(gated, "c#0")["pid"] == old["c#0"]["pid"]
    with gate.shut():  # and a system ends although somebody waits
        old = {w["name"]: w for w in gated.commands.workers()}
        os.kill(own_launcher.template_pid, signal.SIGKILL)
        os.kill(old["a#0"]["pid"], signal.SIGKILL)
        wait_for(gated, partial(waits, "a#0"))
        gated.stop()
        os.kill(own_launcher.template_pid, signal.SIGKILL)  # nobody needs its imports any more
