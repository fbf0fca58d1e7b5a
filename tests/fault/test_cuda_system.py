"""Whole systems with blocks on devices of the double: workers killed under load, and device memory
that turns out not to be openable."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from blockflow.client.pending import PendingRequest
from blockflow.client.sync import Client
from blockflow.control.system import System
from blockflow.core.errors import BlockFlowError
from blockflow.core.lifecycle import State
from blockflow.tensormq.arena import DEVICE_BIT
from blockflow.tensormq.cuda_fake_world import World, running
from blockflow.tensormq.cuda_here import DOUBLE_ENV
from tests.dispatcher_rig import wait_until
from tests.gpu import test_paths_on_gpu as suite
from tests.gpu.test_paths_on_gpu import WIDTH, block, expected, settled
from tests.system_rig import wait_for
from tests.warm_rig import Warm

layer, system = suite.layer, suite.system
WAIT_S = 60.0
PATH = ["first", "second", "third"]
PLACED = {"first": "cuda:0", "second": "cuda:0", "third": "cuda:1"}
BODY = {"blocks": [block(name, device) for name, device in PLACED.items()], "tasks": {"t": PATH}}
OUTSTANDING = 20


@pytest.fixture(autouse=True)
def world(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, warm: Warm) -> Iterator[World]:
    folder = tmp_path / "double"
    folder.mkdir()
    monkeypatch.setenv(DOUBLE_ENV, str(folder))
    made = World(folder, os.getpid())
    with warm.spawning():
        yield made
    assert made.broken_rules() == []
    assert made.held_bytes() == 0, "neither the living nor the dead have left any"


def all_serve(system: System) -> bool:
    realm = system.manager.brain.realm
    states = {r.life.state for r in realm.crew.fleet}
    return states == {State.READY} and not realm.reasons_not_ready()


def crashes(system: System, block: str) -> int:
    """How often workers of a block have died."""
    return system.manager.call(
        lambda: sum(r.ledger.total for r in system.manager.brain.crew.fleet.hosting(block))
    )


def reruns(system: System) -> int:
    kpi = system.manager.views().dispatcher()["kpi"]
    return int(kpi.get("recovery", {}).get("rerun", 0))


def held_of(world: World, pid: int) -> list[str]:
    """Memory that a process has made and somebody keeps."""
    mine = [name for name in world.names("mem") if name.startswith(f"mem-{pid}-")]
    return [name for name in mine if running(pid) or world.importers(name)]


def reason(system: System, name: str, since_ns: int = 0) -> str | None:
    """Why a worker's tensors go over the host, by figures of after then; None without any."""

    def latest() -> str | None:
        life = next(r.life for r in system.manager.brain.crew.fleet if name in r.spec.blocks)
        sample = system.manager.kpis.latest(life.incarnation)
        if sample is None or sample.time_ns < since_ns:
            return None
        return str(sample.extra["device_fallback"])

    return system.manager.call(latest)


@pytest.mark.parametrize("victim", PATH)
def test_a_worker_killed_under_load_costs_nobody_a_reply(
    system: System, layer: torch.nn.Module, world: World, victim: str
) -> None:
    """An owner, a worker that is reader and owner, and one that reads from a peer."""
    system.apply(BODY)
    old = system.commands.worker(f"{victim}#0")
    sent: list[tuple[np.ndarray[Any, Any], PendingRequest[Any]]] = []
    rng = np.random.default_rng(7)

    def send() -> None:
        x = rng.standard_normal((1, WIDTH)).astype(np.float32)
        sent.append((x, client.submit("t", x, deadline_s=WAIT_S)))

    with Client(system.client_endpoint) as client:
        for _ in range(OUTSTANDING):
            send()
        sent[-1][1].result()
        assert held_of(world, old["pid"])
        # Stopped first, so that no machine is quick enough to have answered all before the kill.
        os.kill(old["pid"], signal.SIGSTOP)
        for _ in range(OUTSTANDING):
            send()
        client.tasks()  # messages of one client are served in order: all of these are admitted
        os.kill(old["pid"], signal.SIGKILL)
        for _ in range(OUTSTANDING):
            send()
        with torch.inference_mode():
            for x, request in sent:
                want = layer(layer(layer(torch.from_numpy(x)))).numpy()
                got = request.result().value
                assert np.allclose(got, want, atol=1e-4), "one reply each, and its own"
        assert client.counters().late_replies == 0, "and no second one"
        wait_for(system, lambda: all_serve(system))
        new = system.commands.worker(f"{victim}#0")
        assert new["incarnation"] > old["incarnation"] and new["pid"] != old["pid"]
        client.infer("t", suite.X, deadline_s=WAIT_S)
    assert crashes(system, victim) == 1
    wait_until(lambda: reruns(system) >= OUTSTANDING, WAIT_S)
    wait_until(lambda: held_of(world, old["pid"]) == [], WAIT_S)
    gone = old["incarnation"] | DEVICE_BIT
    assert not list(system.run_dir.glob(f"*-{gone}"))
    # Nobody was led over the host by the death: the successor was tried, and found good.
    since = time.monotonic_ns()
    for name in PATH:
        wait_until(lambda n=name: reason(system, n, since) is not None, WAIT_S)
        assert reason(system, name, since) == "", name


def test_memory_that_nobody_can_open_costs_no_request(
    system: System, layer: torch.nn.Module, world: World
) -> None:
    """It is known before the first request, which goes over the host as all do."""
    (world.folder / "lacks").write_text("opening")
    system.apply(BODY)
    with Client(system.client_endpoint) as client:
        for _ in range(5):
            got = client.infer("t", suite.X, deadline_s=WAIT_S).value
            assert np.allclose(got, expected(layer, 3), atol=1e-4)
    assert settled(system, "first", "d2h_copies", 5) and settled(system, "second", "h2d_copies", 5)
    wait_until(lambda: "cannot open memory of cuda:0" in (reason(system, "first") or ""), WAIT_S)


def test_memory_that_cannot_be_opened_after_all_costs_what_was_under_way(
    system: System, layer: torch.nn.Module, world: World
) -> None:
    """All could be opened when the routes came, and not any more when the first tensor does."""
    system.apply(BODY)
    (world.folder / "lacks").write_text("opening")
    with Client(system.client_endpoint) as client:
        with pytest.raises(BlockFlowError) as info:
            client.infer("t", suite.X, deadline_s=WAIT_S)
        assert info.value.code == "WORKER_LOST" and info.value.retryable
        assert "cannot be opened" in info.value.message
        with pytest.raises(BlockFlowError):  # the next edge of the path
            client.infer("t", suite.X, deadline_s=WAIT_S)
        for _ in range(3):
            got = client.infer("t", suite.X, deadline_s=WAIT_S).value
            assert np.allclose(got, expected(layer, 3), atol=1e-4)
    wait_until(lambda: "cannot open memory of cuda:0" in (reason(system, "first") or ""), WAIT_S)
