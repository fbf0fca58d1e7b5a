"""Policies of workers that run: a change reaches them with what they need, or it is refused or seen
that it did not."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest

from blockflow.client import Client
from blockflow.control.lookups import Lookups
from blockflow.control.profiles import ProfileShelf
from blockflow.control.system import System
from blockflow.control.update import Kind
from blockflow.core.errors import TopologyError
from blockflow.launch.base import Launcher
from blockflow.repository.repository import BlockRepository
from tests.control_rig import echo_repository
from tests.system_rig import served
from tests.unit.test_stages import profile

X = np.ones((1, 4), np.float32)
LBCI = {"policy": "lbci", "t_opt_ms": 2000}
COSTS = (10.0, 0.1)
"""Milliseconds of a batch, and of each of its rows: as if measured."""
BURST = 16

two_cores = pytest.mark.skipif(
    len(os.sched_getaffinity(0)) < 2, reason="one core has one thread only"
)


def body(batching: Any, **more: Any) -> dict[str, Any]:
    block = {"name": "slow", "lanes": 1, "threads": 1, "batching": batching, **more}
    return {"blocks": [block], "tasks": {"t": ["slow"]}}


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("policies")
    echo_repository(root / "blocks", slow={"delay_ms": 10})
    return root


@pytest.fixture(scope="module")
def running(root: Path, launcher: Launcher) -> Iterator[System]:
    with served(root, body("none"), launcher) as system:
        system.commands.monitor(50.0)
        yield system


@pytest.fixture
def system(running: System, root: Path) -> System:
    """Under ``none``, without a profile; the worker is mostly the same, and may have known one."""
    running.apply(body("none"))
    for file in (root / "blocks" / "slow").glob("profiles/*"):
        file.unlink()
    return running


def store(root: Path, *threads: int) -> None:
    profile(BlockRepository(root / "blocks"), {"slow": COSTS}, threads)


BAD: list[tuple[Any, dict[str, Any], str, str]] = [
    (LBCI, {}, "$.blocks[0].batching", "needs a profile of slow (1 thread)"),
    ({**LBCI, "t_opt_ms": 0}, {}, "$.blocks[0].batching.t_opt_ms", "above 0"),
    ("windows", {}, "$.blocks[0].batching.policy", "unknown policy 'windows'"),
    ({"policy": "window", "max_row": 3}, {}, "$.blocks[0].batching.max_row", "no option 'max_row'"),
    ({"policy": "window", "max_rows": 0}, {}, "$.blocks[0].batching.max_rows", "1"),
    ("none", {"weight": 0}, "$.tasks.t.weight", "greater than or equal to 0.001"),
    ("none", {"weight": 1e-16}, "$.tasks.t.weight", "greater than or equal to 0.001"),
    ("none", {"priority": 10}, "$.tasks.t.priority", "less than or equal to 9"),
]
"""A policy, fields of its task, and what is wrong with them."""


def refused(system: System, posted: Any) -> dict[str, Any]:
    """The one problem of an update that is posted by REST."""
    answer = httpx.post(f"{system.rest_url}/v1/system-update", json=posted, timeout=30)
    error = answer.json()["error"]
    assert (answer.status_code, error["code"]) == (422, "INVALID_TOPOLOGY")
    (problem,) = error["problems"]
    return dict(problem)


@pytest.mark.parametrize(("policy", "task", "path", "words"), BAD, ids=lambda v: str(v)[:50])
def test_batching_that_cannot_work_is_refused(
    system: System, policy: Any, task: dict[str, Any], path: str, words: str
) -> None:
    epoch = system.commands.epoch()["epoch"]
    problem = refused(system, {**body(policy), "tasks": {"t": {"path": ["slow"], **task}}})
    assert problem["path"] == path and words in problem["message"]
    if "profile" in words:
        assert problem["hint"] == "run: blockflow profile slow"
    assert system.commands.epoch()["epoch"] == epoch


def test_a_bound_below_one_sample_is_refused_with_the_number(system: System, root: Path) -> None:
    store(root, 1)
    problem = refused(system, body({**LBCI, "t_opt_ms": 5}))
    assert problem["path"] == "$.blocks[0].batching.t_opt_ms"
    assert "t_opt of 5 ms cannot be met: one sample takes 10.1 ms" in problem["message"]


def stage(system: System) -> dict[str, Any]:
    worker = system.commands.worker("slow#0")
    return {"pid": worker["pid"], **worker["stages"][0]}


def batches(system: System) -> int:
    """How many the worker makes of a burst of requests, by its own figures."""
    before = figures(system)
    with Client(system.client_endpoint) as client:
        for answer in [client.submit("t", X, deadline_s=30) for _ in range(BURST)]:
            assert answer.result(30).value.shape == X.shape
    end = time.monotonic() + 20
    while (now := figures(system))["requests"] < before["requests"] + BURST:
        assert time.monotonic() < end, now
        time.sleep(0.01)
    return int(now["batches"] - before["batches"])


def figures(system: System) -> Mapping[str, Any]:
    """Of the stage so far, once it has reported any."""
    return stage(system)["kpi"] or {"requests": 0, "batches": 0}


def test_a_profile_made_meanwhile_reaches_the_running_worker(system: System, root: Path) -> None:
    """As a user does it: refused for want of a profile, profiled, posted again."""
    pid = stage(system)["pid"]
    assert batches(system) == BURST
    with pytest.raises(TopologyError) as refused:
        system.apply(body(LBCI))
    (problem,) = refused.value.problems
    assert problem.path == "$.blocks[0].batching"
    assert problem.hint.startswith("run: blockflow profile slow")
    store(root, 1)
    update = system.apply(body(LBCI))["update"]
    assert update["state"] == "done" and "notes" not in update
    assert (stage(system)["pid"], stage(system)["batching"]) == (pid, LBCI)
    assert batches(system) < BURST


@two_cores
def test_a_policy_and_the_threads_that_it_was_measured_with_come_together(
    system: System, root: Path
) -> None:
    store(root, 2)
    with pytest.raises(TopologyError, match="needs a profile of slow"):
        system.apply(body(LBCI))
    update = system.apply(body(LBCI, threads=2))["update"]
    assert update["plan"]["keep"] == ["slow#0"] and "notes" not in update
    assert batches(system) < BURST
    store(root, 1)
    update = system.apply(body({**LBCI, "n_max": 4}))["update"]
    assert update["plan"]["keep"] == ["slow#0"] and "notes" not in update
    assert batches(system) < BURST


def test_a_worker_that_keeps_its_policy_is_seen(
    system: System, root: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The profile goes between the acceptance and the change of a worker that has known none."""
    system.commands.operate(Kind.STOP, "slow")
    system.apply(body("none"))
    store(root, 1)
    with monkeypatch.context() as patch:
        patch.setattr(system.manager, "_lookups", Lookups(ProfileShelf(tmp_path)))
        update = system.apply(body(LBCI))["update"]
    (note,) = update["notes"]
    assert note.startswith(
        "slow#0 keeps the batching policy 'none' for block 'slow': policy 'lbci'"
    )
    assert system.status()["warnings"] == [note]
    assert stage(system)["batching"] == {"policy": "none"}
    assert batches(system) == BURST
    update = system.apply(body(LBCI))["update"]
    assert update["state"] == "done" and "notes" not in update
    assert system.status()["warnings"] == []
    assert batches(system) < BURST


@two_cores
def test_a_worker_that_keeps_its_facts_is_seen_and_told_by_the_same_update(
    system: System, root: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The profile for its new threads goes between the acceptance and the change."""
    store(root, 1, 2)
    system.apply(body(LBCI))
    with monkeypatch.context() as patch:
        patch.setattr(system.manager, "_lookups", Lookups(ProfileShelf(tmp_path)))
        (note,) = system.apply(body(LBCI, threads=2))["update"]["notes"]
    assert note.startswith("slow#0 keeps the batching policy 'lbci' for block 'slow' as it was:")
    assert system.status()["warnings"] == [note]
    update = system.apply(body(LBCI, threads=2))["update"]
    assert update["state"] == "done" and "notes" not in update
    assert system.status()["warnings"] == []
    assert system.apply(body(LBCI, threads=2))["update"]["state"] == "unchanged"
