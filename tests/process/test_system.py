"""End to end: update, infer, change while it runs, restart of the control plane."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import psutil
import pytest
from control_rig import echo_repository

from blockflow.client.sync import Client
from blockflow.control.settings import ControlSettings
from blockflow.control.system import System
from blockflow.control.update import Kind
from blockflow.core.errors import BlockFlowError
from blockflow.launch.base import Launcher
from blockflow.launch.process import OOM_SHARE

X = np.arange(4, dtype=np.float32).reshape(1, 4)
AB = {"blocks": ["a", "b"], "tasks": {"t": ["a", "b"]}}


Make = Callable[..., System]


@pytest.fixture
def make(root: Path, launcher: Launcher) -> Make:
    ports = {"rest_port": 0, "client_port": 0}
    folders = {"repository": root / "blocks", "state_dir": root / "state"}
    return lambda **kw: System(**(folders | ports | kw), launcher=launcher)


@pytest.fixture
def root(tmp_path: Path) -> Path:
    echo_repository(
        tmp_path / "blocks",
        broken={"fail_on_load": 1},
        dies={"crash_on_load": 1},
        slow={"delay_ms": 50},
    )
    return tmp_path


@pytest.fixture
def system(make: Make) -> Iterator[System]:
    with make() as running:
        yield running


@pytest.fixture
def client(system: System) -> Iterator[Client]:
    with Client(system.client_endpoint) as c:
        yield c


def pids(system: System) -> dict[str, int]:
    return {w["name"]: w["pid"] for w in system.commands.workers()}


def code_of(client: Client, task: str) -> str:
    with pytest.raises(BlockFlowError) as e:
        client.infer(task, X, deadline_s=10)
    return e.value.code


def test_no_worker_keeps_roots_rights(system: System) -> None:
    system.apply({"blocks": ["a"], "tasks": {"t": ["a"]}})
    for pid in pids(system).values():
        status = Path(f"/proc/{pid}/status").read_text()
        assert f"CapEff:\t{0:016x}\nCapBnd" in status
        assert "NoNewPrivs:\t1\n" in status


def test_the_kernel_takes_a_worker_before_the_others_where_memory_runs_out(system: System) -> None:
    system.apply({"blocks": ["a", "b"], "tasks": {"t": ["a", "b"]}})

    def score(pid: int) -> int:
        return int(Path(f"/proc/{pid}/oom_score_adj").read_text())

    workers = pids(system)
    dispatcher = workers.pop("dispatcher")
    template = system.status()["control"]["template"]["pid"]
    usual = score(os.getpid())
    assert score(dispatcher) == score(template) == usual
    assert [score(pid) for pid in workers.values()] == [min(usual + OOM_SHARE, 1000)] * 2


def test_an_update_changes_only_what_differs(system: System, client: Client) -> None:
    system.apply({"blocks": ["a", "b", "c"], "tasks": {"t": ["a", "b"], "u": ["a", "c"]}})
    assert np.array_equal(client.infer("t", X).value, X)
    assert np.array_equal(client.infer("u", X).value, X)
    before = pids(system)
    retired = psutil.Process(before["c#0"])
    system.apply({"blocks": ["a", "b", "d"], "tasks": {"t": ["a", "b"], "v": ["a", "d"]}})
    after = pids(system)
    assert {n: after[n] for n in ("a#0", "b#0", "dispatcher")} == {
        n: before[n] for n in ("a#0", "b#0", "dispatcher")
    }
    assert set(after) == {"a#0", "b#0", "d#0", "dispatcher"}
    # It has ended; the template, which has forked it, may reap it a moment later.
    assert psutil.wait_procs([retired], timeout=10)[1] == []
    assert np.array_equal(client.infer("v", X).value, X)
    assert code_of(client, "u") == "UNKNOWN_TASK"
    *workers, dispatcher = [w["incarnation"] for w in system.commands.workers()]
    prober = 1  # the first number that a control plane takes
    assert sorted(os.listdir(system.run_dir)) == sorted(
        [f"{kind}-{i}" for i in (*workers, dispatcher) for kind in ("arena", "marks")]
        + [f"work-{i}" for i in workers]
        + [f"d{i}.sock" for i in (*workers, dispatcher, prober)]
        + ["clients.sock", "control.sock", f"g{dispatcher}.sock", "link.key", "lock"]
    )


@pytest.mark.parametrize("block", ["broken", "dies"])
def test_a_failed_update_leaves_the_old_epoch_serving(
    system: System, client: Client, block: str
) -> None:
    system.apply(AB)
    before = pids(system)
    with pytest.raises(BlockFlowError) as e:
        system.apply({"blocks": ["a", block], "tasks": {"t": ["a", block]}})
    assert e.value.code == "UPDATE_FAILED"
    assert e.value.details["blocks"] == [block]
    assert client.infer("t", X).epoch == 1
    assert pids(system) == before


def test_drained_and_stopped_blocks_answer_unavailable(system: System, client: Client) -> None:
    system.apply({"blocks": ["a", "b"], "tasks": {"t": ["a", "b"], "u": ["a"]}})
    for close, reopen in ((Kind.DRAIN, Kind.UNDRAIN), (Kind.STOP, Kind.RESTART)):
        system.commands.operate(close, "b")
        assert code_of(client, "t") == "BLOCK_UNAVAILABLE"
        assert np.array_equal(client.infer("u", X).value, X)
        system.commands.operate(reopen, "b")
        assert np.array_equal(client.infer("t", X).value, X)


def test_updates_and_restarts_under_load_lose_nothing(system: System) -> None:
    first = {"blocks": ["a", "b", "slow"], "tasks": {"t": ["a", "b"], "s": ["a", "slow"]}}
    second = {"blocks": ["a", "c", "slow"], "tasks": {"t": ["a", "c"], "s": ["a", "slow"]}}
    system.apply(first)
    stop = threading.Event()
    outcomes: list[BlockFlowError | None] = []

    def load(task: str) -> None:
        with Client(system.client_endpoint) as c:
            while not stop.is_set():
                try:
                    c.infer(task, X, deadline_s=20)
                    outcomes.append(None)
                except BlockFlowError as e:
                    outcomes.append(e)

    threads = [threading.Thread(target=load, args=(t,)) for t in ("t", "s")]
    for t in threads:
        t.start()
    try:
        for body in (second, first, second):
            assert system.apply(body)["update"]["state"] == "done"
        for block in ("a", "slow"):
            assert system.commands.operate(Kind.RESTART, block)["update"]["state"] == "done"
    finally:
        stop.set()
        for t in threads:
            t.join()
    assert not [e for e in outcomes if e is not None]
    assert len(outcomes) > 10


def test_the_state_survives_a_restart_of_the_control_plane(make: Make) -> None:
    with make() as system:
        system.apply(AB)
        system.apply({"blocks": ["a", "c"], "tasks": {"t": ["a", "c"]}})
        posted = system.commands.topology()["posted"]
        last = system.commands.updates()[0]["id"]
    with make() as system:
        assert system.commands.updates()[0]["id"] > last
        with pytest.raises(BlockFlowError, match="has been restarted since") as e:
            system.commands.update(last)
        assert e.value.code == "NOT_FOUND"
        assert system.commands.epoch()["epoch"] == 2
        assert system.commands.topology()["posted"] == posted
        with Client(system.client_endpoint) as client:
            assert client.infer("t", X).epoch == 2
        assert (
            system.apply({"blocks": ["a", "c"], "tasks": {"t": ["a", "c"]}})["update"]["state"]
            == "unchanged"
        )
    with make(fresh=True) as system:
        assert system.commands.epoch()["epoch"] == 0
        assert system.commands.topology()["topology"] is None


def test_a_restored_topology_that_no_longer_fits_is_said_and_mended(root: Path, make: Make) -> None:
    with make() as system:
        system.apply(AB)
    for path in sorted((root / "blocks" / "b").iterdir()):
        path.unlink()
    (root / "blocks" / "b").rmdir()
    with make() as system:
        status = system.status()
        assert not status["ready"]
        assert status["last_update"]["error"]["code"] == "INVALID_TOPOLOGY"
        assert any(r.startswith("$.blocks[1]: UNKNOWN_BLOCK") for r in status["reasons"])
        assert system.apply({"blocks": ["a"], "tasks": {"t": ["a"]}})["epoch"] == 2
        assert system.status()["ready"]


def test_one_state_directory_one_system(system: System, make: Make) -> None:
    with pytest.raises(BlockFlowError) as e:
        make().start()
    assert e.value.code == "ALREADY_RUNNING"
    assert system.status()["pid"] == os.getpid()


def test_an_open_host_is_refused(root: Path) -> None:
    with pytest.raises(BlockFlowError) as e:
        System(ControlSettings(host="0.0.0.0"), state_dir=root / "state").start()
    assert e.value.code == "INVALID_REQUEST"


def test_colocated_blocks_and_other_modes(system: System, client: Client) -> None:
    blocks = [{"name": "a", "worker": "w"}, {"name": "b", "worker": "w"}, "c"]
    tasks = {"t": ["a", "b", "c"]}
    for extra in ({}, {"mode": "zeromq"}, {"transport": "tcp"}):
        system.apply({"blocks": blocks, "tasks": tasks, **extra})
        assert set(pids(system)) >= {"dispatcher"}
        assert len(pids(system)) == 3
        assert np.array_equal(client.infer("t", X).value, X)


def test_a_system_can_be_started_twice_in_one_process(
    make: Make, launcher: Launcher, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And no template is made anew for one that ends: where all processes get SIGTERM it may be the
    first that is gone."""
    before = set(threading.enumerate())
    tended: list[bool] = []
    for _ in range(2):
        with make() as system, monkeypatch.context() as patch:
            brain = system.manager.brain
            patch.setattr(launcher, "tend", lambda now=brain: tended.append(now.stopping))
            run_dir = system.run_dir
            system.status()
            system.stop()
        assert not run_dir.exists()
    assert {t for t in threading.enumerate() if t.is_alive()} <= before
    assert tended and not any(tended)
