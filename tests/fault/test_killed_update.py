"""The control plane is killed in the middle of an update, and started again.

It must come back with the old epoch or the new one, whole, and say which.
"""

from __future__ import annotations

import subprocess
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import plain_http
import pytest
from dispatcher_rig import wait_until
from takeover_rig import furnish
from up_rig import family, gone, up
from warm_rig import Warm

from blockflow.client.sync import Client
from blockflow.control.pending import PENDING
from blockflow.core.errors import BlockFlowError

X = np.arange(4, dtype=np.float32).reshape(1, 4)
LONG = np.repeat(X, 32, axis=0)
"""Takes the slow block longer than the test; the one row of a warm-up does not."""

OLD = {"blocks": ["a", "b"], "tasks": {"t": ["a", "b"]}}
NEW = {"blocks": ["a", "c"], "tasks": {"t": ["a", "c"]}}
PATIENCE_S = 60.0


@pytest.fixture
def root(tmp_path: Path) -> Path:
    furnish(tmp_path, slow_ms=1200)
    return tmp_path


def post(rest: str, body: dict[str, Any]) -> None:
    answer = plain_http.post(f"{rest}/v1/system-update?wait=false", json=body, timeout=30)
    assert answer.status_code == 202, answer.text


def until(rest: str, state: str) -> None:
    """Until the latest update is in this state."""
    end = time.monotonic() + PATIENCE_S
    while time.monotonic() < end:
        update = plain_http.get(f"{rest}/v1/updates", timeout=30).json()["updates"][0]
        if update["state"] == state:
            return
        time.sleep(0.01)
    raise AssertionError(update)


def noted(root: Path) -> None:
    """Until it is on the disk that an update is under way; the update does not wait for that."""
    wait_until(lambda: any(root.rglob(PENDING)), PATIENCE_S)


def answer(ready: dict[str, Any]) -> tuple[int, float, list[str]]:
    """Epoch, what is added to the input, and the warnings, of a system that has come up."""
    with Client(ready["clients"][0]) as client:
        result = client.infer("t", X, deadline_s=30)
    status = plain_http.get(f"{ready['rest']}/v1/status", timeout=30).json()
    assert status["ready"] and ready["epoch"] == status["epoch"] == result.epoch
    return result.epoch, float((result.value - X)[0, 0]), status["warnings"]


def kill(process: subprocess.Popen[str], ready: dict[str, Any]) -> None:
    children = family(process.pid)
    process.kill()
    process.wait(30)
    assert gone(children, Path(ready["run_dir"]))


def test_it_comes_back_with_the_old_epoch_or_the_new_one(root: Path, warm: Warm) -> None:
    armed = {"BLOCKFLOW_FAILPOINTS": "before_load=stall:c"}
    topology = str(root / "topology.json")
    with up(root, "--topology", topology, env=armed, start=warm.popen) as (process, ready):
        post(ready["rest"], NEW)
        until(ready["rest"], "preparing")
        noted(root)
        kill(process, ready)

    with up(root, start=warm.popen) as (process, ready):
        epoch, added, (warning,) = answer(ready)
        assert (epoch, added) == (1, 11.0)
        assert "update to epoch 2" in warning and "not been stored" in warning

        post(ready["rest"], {"blocks": ["a", "slow"], "tasks": {"t": ["a", "slow"]}})
        until(ready["rest"], "done")
        asking = threading.Thread(target=abandoned, args=(ready["clients"][0],))
        asking.start()
        in_flight(ready["rest"])
        # a request on the old routes keeps the update from its end
        post(ready["rest"], NEW)
        until(ready["rest"], "draining")
        noted(root)
        kill(process, ready)
        asking.join(PATIENCE_S)
        assert not asking.is_alive()

    with up(root, start=warm.popen) as (process, ready):
        epoch, added, (warning,) = answer(ready)
        assert (epoch, added) == (3, 101.0)
        assert "update to epoch 3" in warning and "had been stored" in warning
        kill(process, ready)


def abandoned(address: str) -> None:
    """Ask for what will never be answered."""
    with Client(address) as client, pytest.raises(BlockFlowError):
        client.infer("t", LONG, deadline_s=50)


def in_flight(rest: str) -> None:
    """Until the Dispatcher has a request in flight."""
    end = time.monotonic() + PATIENCE_S
    while time.monotonic() < end:
        kpi = plain_http.get(f"{rest}/v1/workers/dispatcher", timeout=30).json()["kpi"]
        if kpi.get("inflight"):
            return
        time.sleep(0.02)
    raise AssertionError(kpi)
