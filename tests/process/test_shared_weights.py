"""Replicas hold their weights once: in real workers, through deaths, updates and to the end."""

from __future__ import annotations

import os
import re
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from blockflow.client.sync import Client
from blockflow.control.system import System
from blockflow.core.model import TensorSpec
from blockflow.launch.base import Launcher
from blockflow.repository.export import export_model
from blockflow.repository.repository import BlockRepository
from blockflow.repository.sources import LoadedModel
from blockflow.tensormq.weights import FOLDER
from tests.dispatcher_rig import wait_until
from tests.system_rig import served

WIDTH = 1024
X = np.linspace(-1, 1, 2 * WIDTH, dtype=np.float32).reshape(2, WIDTH)
WEIGHTS = 4 * WIDTH * WIDTH
"""Bytes of the matrix."""


def model() -> nn.Module:
    torch.manual_seed(2)
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU()).eval()


def topology(**block: Any) -> dict[str, Any]:
    fixed = {"name": "m", "threads": 1, **block}
    return {"blocks": [fixed, "other"], "tasks": {"t": ["m"]}, "oversubscribe": True}


WITHOUT: dict[str, Any] = {"blocks": ["other"], "tasks": {}}


@pytest.fixture(scope="module")
def system(tmp_path_factory: pytest.TempPathFactory, launcher: Launcher) -> Iterator[System]:
    root = tmp_path_factory.mktemp("weights")
    repository = BlockRepository(root / "blocks")
    export_model(
        LoadedModel(model(), "test", TensorSpec("float32", ("rows", WIDTH))),
        repository,
        names=["m"],
    )
    small = LoadedModel(nn.ReLU(), "test", TensorSpec("float32", ("rows", 4)))
    export_model(small, repository, names=["other"])
    with served(root, WITHOUT, launcher) as running:
        yield running


@pytest.fixture(autouse=True)
def nothing_left(system: System) -> Iterator[None]:
    yield
    system.apply(WITHOUT)
    wait_until(lambda: files(system) == [])


def files(system: System) -> list[Path]:
    folder = system.run_dir / FOLDER
    return sorted(folder.iterdir()) if folder.is_dir() else []


def pids(system: System) -> dict[str, int]:
    return {w["name"]: w["pid"] for w in system.commands.workers() if w["name"].startswith("m#")}


def mapped(pid: int) -> dict[str, int]:
    """What a process has mapped of the weights, in bytes, by how."""
    found: dict[str, int] = {}
    inside = False
    for line in Path(f"/proc/{pid}/smaps").read_text().splitlines():
        if re.match(r"[0-9a-f]+-[0-9a-f]+ ", line):
            inside = f"/{FOLDER}/" in line
        elif inside:
            name, value, *unit = line.split()
            if unit == ["kB"]:
                found[name] = found.get(name, 0) + 1024 * int(value)
    return found


def right(system: System, count: int = 8) -> None:
    """Requests, often enough for each replica to have some."""
    wanted = model()(torch.from_numpy(X)).detach().numpy()
    with Client(system.client_endpoint) as client:
        pending = [client.submit("t", X, deadline_s=60) for _ in range(count)]
        for one in pending:
            np.testing.assert_allclose(one.result().value, wanted, rtol=1e-5, atol=1e-5)


def test_replicas_map_the_same_pages(system: System) -> None:
    system.apply(topology(replicas=3))
    right(system)
    (file,) = files(system)
    assert file.stat().st_size >= WEIGHTS
    for name, pid in pids(system).items():
        parts = mapped(pid)
        assert parts["Rss:"] >= WEIGHTS, name
        assert parts["Private_Dirty:"] == parts["Private_Clean:"] == parts["Anonymous:"] == 0, name
        assert parts["Pss:"] <= parts["Rss:"] / 3 + 4096, name


def test_the_next_one_takes_the_place_of_one_that_died(system: System) -> None:
    system.apply(topology(replicas=2))
    (file,) = files(system)
    inode, before = file.stat().st_ino, pids(system)
    os.kill(before["m#0"], signal.SIGKILL)
    wait_until(lambda: pids(system)["m#0"] not in (0, None, before["m#0"]))
    wait_until(lambda: all(w["state"] == "ready" for w in system.commands.workers()))
    right(system)
    assert [f.stat().st_ino for f in files(system)] == [inode]
    assert mapped(pids(system)["m#0"])["Anonymous:"] == 0


def test_all_at_once_may_die(system: System) -> None:
    system.apply(topology(replicas=2))
    before = pids(system)
    for pid in before.values():
        os.kill(pid, signal.SIGKILL)
    wait_until(lambda: not set(pids(system).values()) & {0, None, *before.values()})
    wait_until(lambda: all(w["state"] == "ready" for w in system.commands.workers()))
    right(system)
    assert len(files(system)) == 1
    for pid in pids(system).values():
        assert mapped(pid)["Rss:"] >= WEIGHTS


def test_it_stays_for_the_last_replica(system: System) -> None:
    system.apply(topology(replicas=2))
    (file,) = files(system)
    system.apply(topology(replicas=1))
    right(system)
    assert files(system) == [file]
    (pid,) = pids(system).values()
    assert mapped(pid)["Rss:"] >= WEIGHTS


@pytest.mark.parametrize(
    "block",
    [{"replicas": 1}, {"replicas": 2, "options": {"weights": "own"}, "engine": "exported"}],
    ids=["one process", "own weights"],
)
def test_otherwise_each_has_its_own(system: System, block: dict[str, Any]) -> None:
    system.apply(topology(**block))
    right(system)
    assert files(system) == []
    assert all(mapped(pid) == {} for pid in pids(system).values())
