"""Processes that hang, and some that only seem to: noticed, killed and replaced, or left alone."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import numpy as np
import plain_http
import psutil
import pytest
from control_rig import SPEC, echo_repository
from up_rig import family, outcome, up
from warm_rig import Warm

from blockflow.client.sync import Client
from blockflow.control.system import System
from blockflow.core.errors import BlockFlowError, TopologyError
from blockflow.core.model import Contract, TensorSpec
from blockflow.repository.echo import save_echo
from blockflow.tensormq.janitor import sweep_stale
from tests.system_rig import replaced, served, worker

X = np.arange(4, dtype=np.float32).reshape(1, 4)
WAIT_S = 60.0
SUSPENDED_S = 11.0
"""Ten seconds are the longest that anybody waits for somebody who is stopped."""
PACE_S = 0.01
"""Between requests, so that they are not all that the cores do."""
NAMES = ("plain", "spinning", "frozen", "stalling")
BODY = {
    "blocks": ["plain", {"name": "spinning", "timeout_ms": 500}, "frozen", "stalling"],
    "tasks": {name: [name] for name in NAMES},
}
POINTS = (
    "before_forward=spin-once:spinning,"
    "after_forward=freeze-once:frozen,"
    "after_output=stall-once:stalling"
)


@pytest.fixture(scope="module")
def system(tmp_path_factory: pytest.TempPathFactory, warm: Warm) -> Iterator[System]:
    root = tmp_path_factory.mktemp("hangs")
    repository = echo_repository(root / "blocks", **{name: {} for name in NAMES})
    # It gives back what it is given, and its contract says otherwise.
    save_echo(repository, "liar", Contract(SPEC, TensorSpec("float32", ("rows", 5))))
    armed = warm.own_template(BLOCKFLOW_FAILPOINTS=POINTS)
    with armed as launcher, served(root, BODY, launcher) as running:
        yield running


def serves(system: System, task: str) -> bool:
    with Client(system.client_endpoint) as client:
        return np.array_equal(client.infer(task, X, deadline_s=30).value, X)


def serves_for(seconds: float, client: Client) -> None:
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        assert np.array_equal(client.infer("t", X, deadline_s=30).value, X)
        time.sleep(PACE_S)


@pytest.mark.parametrize("name", ["plain#0", "dispatcher"])
def test_who_is_stopped_is_replaced(system: System, name: str) -> None:
    old = worker(system, name)
    os.kill(old["pid"], signal.SIGSTOP)
    new = replaced(system, old)
    assert "stopped" in new["crash"]["cause"]
    assert serves(system, "plain")


def test_a_worker_whose_socket_file_is_removed_is_replaced(system: System) -> None:
    """Those that are connected reach it until then; what it was executing is not to blame."""
    old = worker(system, "plain#0")
    file = Path(old["endpoint"].removeprefix("ipc://"))
    assert serves(system, "plain")
    file.unlink()
    assert serves(system, "plain")
    new = replaced(system, old)
    assert "socket file" in new["crash"]["cause"]
    assert new["endpoint"] != old["endpoint"] and serves(system, "plain")


@pytest.mark.parametrize(
    ("name", "cause"),
    [
        ("spinning", "a forward of spinning has not ended"),
        ("frozen", "silent and asleep"),
        ("stalling", "main loop"),
    ],
)
def test_a_worker_that_hangs_is_replaced(system: System, name: str, cause: str) -> None:
    """While it computes, with the interpreter; asleep, with the interpreter; with a lock."""
    old = worker(system, f"{name}#0")
    with Client(system.client_endpoint) as client, suppress(BlockFlowError):
        client.infer(name, X, deadline_s=5)  # what becomes of the request is another test's matter
    new = replaced(system, old)
    assert cause in new["crash"]["cause"]
    assert new["crashes"][0] == new["crash"]
    if name == "spinning":
        (work,) = new["crash"]["work"]
        assert (work["block"], work["requests"], len(work["tickets"])) == ("spinning", 1, 1)
        assert work["took_ms"] >= 500
    assert serves(system, name)


def test_a_worker_that_fails_its_readiness_probe_is_not_published(system: System) -> None:
    epoch = system.status()["epoch"]
    with pytest.raises(TopologyError) as e:
        system.apply({**BODY, "blocks": [*BODY["blocks"], "liar"]})
    assert e.value.code == "UPDATE_FAILED"
    assert "readiness probe" in e.value.message
    assert e.value.details["cause"]["code"] == "OUTPUT_MISMATCH"
    assert system.status()["epoch"] == epoch
    assert serves(system, "plain")


def test_a_starved_machine_costs_nobody_his_life(system: System) -> None:
    before = {w["name"]: w["incarnation"] for w in system.commands.workers()}
    burners = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(8)]
    try:
        end = time.monotonic() + 2.5  # more than the patience with a process that is silent
        while time.monotonic() < end:
            assert serves(system, "plain")
    finally:
        for burner in burners:
            burner.kill()
        for burner in burners:
            burner.wait()
    assert {w["name"]: w["incarnation"] for w in system.commands.workers()} == before


@pytest.mark.timeout(400)  # it starts a system of its own
def test_a_stopped_manager_stops_nobody_and_a_dead_one_leaves_nobody(
    tmp_path: Path, warm: Warm
) -> None:
    """Serving goes on, and when he is back he blames nobody for the time that he was away. When the
    template dies and then the guardian, nobody is orphaned."""
    echo_repository(tmp_path / "blocks")
    (tmp_path / "topology.json").write_text('{"blocks": ["a"], "tasks": {"t": ["a"]}}')
    topology = str(tmp_path / "topology.json")
    with up(tmp_path, "--topology", topology, start=warm.popen) as (process, ready):
        url = ready["rest"] + "/v1/workers"

        def incarnations() -> list[int]:
            found = plain_http.get(url, timeout=WAIT_S).json()
            return [w["incarnation"] for w in (*found["workers"], found["dispatcher"])]

        before = incarnations()
        with Client(ready["clients"][0]) as client:
            status = plain_http.get(ready["rest"] + "/v1/status", timeout=WAIT_S).json()
            manager = status["manager"]["pid"]
            os.kill(manager, signal.SIGSTOP)
            serves_for(2.0, client)
            os.kill(manager, signal.SIGCONT)
            assert incarnations() == before
            serves_for(1.0, client)
            assert incarnations() == before
            # Nor do all of them together, for longer than anybody's patience: a suspended machine.
            everybody = [process.pid, *(p.pid for p in family(process.pid))]
            under_way = [client.submit("t", X, deadline_s=60) for _ in range(8)]
            for pid in everybody:
                os.kill(pid, signal.SIGSTOP)
            time.sleep(SUSPENDED_S)
            for pid in everybody:
                os.kill(pid, signal.SIGCONT)
            assert {outcome(one, X) for one in under_way} <= {"OK", "CONNECTION_LOST"}
            client.wait_ready("t", timeout_s=WAIT_S)
            serves_for(2.0, client)
            assert incarnations() == before
            after = plain_http.get(ready["rest"] + "/v1/status", timeout=WAIT_S).json()["manager"]
            assert (after["pid"], after["restarts"]) == (manager, 0)
        children = family(process.pid)
        (template,) = [c for c in children if c.name() == "bf:template"]
        template.kill()
        assert incarnations() == before
        process.kill()
        process.wait(WAIT_S)
        _, alive = psutil.wait_procs(children, WAIT_S)
        assert not alive
    # Nobody is left to remove the directory: the next start does.
    run_dir = Path(ready["run_dir"])
    sweep_stale(run_dir.parent)
    assert not run_dir.exists()
