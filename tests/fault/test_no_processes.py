"""A machine that takes no further process or thread: nobody is given up for that."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from cgroup_rig import cgroup, move_out
from control_rig import echo_repository
from dispatcher_rig import wait_until
from system_rig import served
from up_rig import command
from warm_rig import Warm

from blockflow.cli.exits import ExitCode
from blockflow.client import Client
from blockflow.control.rest.server import RestServer
from blockflow.control.supervision import WORKER_POLICY
from blockflow.control.system import System
from blockflow.core.errors import TopologyError
from blockflow.launch.base import Launcher

X = np.ones((1, 4), np.float32)
LONG_S = 60.0


def worker(system: System) -> dict[str, Any]:
    (found,) = [w for w in system.commands.workers() if w["name"] == "a#0"]
    return found


def test_a_worker_that_dies_meanwhile_comes_back(tmp_path: Path, launcher: Launcher) -> None:
    """The template may not fork for longer than a worker that crashes would be given."""
    echo_repository(tmp_path / "blocks")
    with (
        served(tmp_path, {"blocks": ["a"], "tasks": {"t": ["a"]}}, launcher) as system,
        Client(system.client_endpoint, connect_timeout_s=LONG_S) as client,
        cgroup("pids", "pids.max", 1) as full,
    ):
        (full / "cgroup.procs").write_text(str(launcher.template_pid))
        os.kill(worker(system)["pid"], signal.SIGKILL)
        waiting = client.submit("t", X, deadline_s=LONG_S)
        wait_until(lambda: worker(system)["restarts"] > WORKER_POLICY.crashes)
        shown = worker(system)
        assert shown["given_up"] is None
        assert [c["cause"].partition(":")[0] for c in shown["crashes"]] == [
            "NO_SPACE",
            "killed by SIGKILL",
        ]
        assert "pids.max" in shown["crash"]["error"]["hint"]
        move_out(full)
        assert np.array_equal(waiting.result(LONG_S).value, X)
        assert worker(system)["state"] == "ready"


@pytest.mark.parametrize("threads", [0, 1, 2, 4])
def test_an_update_whose_worker_gets_too_few_threads_blames_no_block(
    tmp_path: Path, threads: int, warm: Warm
) -> None:
    """Not even the control thread, or none of ZeroMQ's, which aborts: nothing can be said then."""
    echo_repository(tmp_path / "blocks")
    with (
        warm.own_template() as own,
        served(tmp_path, {"blocks": ["a"], "tasks": {"t": ["a"]}}, own) as system,
        cgroup("pids", "pids.max", 2 + threads) as full,
    ):
        (full / "cgroup.procs").write_text(str(own.template_pid))
        with pytest.raises(TopologyError) as caught:
            system.deploy({"blocks": ["a", "b"], "tasks": {"t": ["a"], "u": ["b"]}})
        error = caught.value
        assert error.details["cause"]["code"] == "NO_SPACE", error
        assert "pids.max" in error.hint and "mend the block" not in error.hint
        if threads == 4:  # it could say so itself, and blames nobody's code
            assert not [line for line in error.details["log"] if "Traceback" in line]
        move_out(full)
        system.deploy({"blocks": ["a", "b"], "tasks": {"t": ["a"], "u": ["b"]}})


def test_rest_without_its_last_thread_does_not_seem_to_serve(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def refused(**_: Any) -> Any:
        raise RuntimeError("can't start new thread")

    commands: Any = None  # nobody gets that far
    server = RestServer(commands, "", lambda: None, host="127.0.0.1", port=0)
    monkeypatch.setattr("cheroot.server.threading", SimpleNamespace(Thread=refused))
    with pytest.raises(RuntimeError, match="new thread"):
        server.start()
    server.stop()


def test_the_doctor_gets_none_either_and_says_so(tmp_path: Path) -> None:
    """OpenBLAS would interrupt it: a numpy that is imported has a thread for each core."""
    with cgroup("pids", "pids.max", 1) as full:
        inside = ["sh", "-c", f'echo $$ > {full}/cgroup.procs && exec "$0" "$@"']
        doctor = [sys.executable, "-m", "blockflow", "doctor", "--json"]
        done = subprocess.run(
            [*inside, *doctor], capture_output=True, text=True, timeout=LONG_S, cwd=tmp_path
        )
    assert done.returncode == ExitCode.NOT_READY, done.stderr
    found = {f["check"]: f for f in json.loads(done.stdout)["findings"]}["libzmq"]
    assert found["level"] == "error" and "new thread" in found["text"]
    assert "pids.max" in found["remedy"]


def test_a_system_that_gets_too_few_threads_ends_and_says_so(tmp_path: Path) -> None:
    """It would otherwise stay, with some of the threads that REST needs."""
    echo_repository(tmp_path / "blocks")
    with cgroup("pids", "pids.max", 20) as full:
        inside = ["sh", "-c", f'echo $$ > {full}/cgroup.procs && exec "$0" "$@"']
        done = subprocess.run(
            [*inside, *command(tmp_path)], capture_output=True, text=True, timeout=LONG_S
        )
    error = json.loads(done.stdout)["error"]
    assert (done.returncode, error["code"]) == (ExitCode.FAILED, "NO_SPACE"), done.stderr
    assert "thread" in error["message"]
