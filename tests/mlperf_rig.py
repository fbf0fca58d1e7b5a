"""LoadGen's process: jobs against a fake Dispatcher and for nobody, and how tests run it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Self

import pytest
from fake_dispatcher import FakeDispatcher
from system_rig import idle_system
from warm_rig import Warm

from blockflow.bench.demo.server import Connect, Rest
from blockflow.bench.mlperf import report, run
from blockflow.bench.mlperf.data import load_inputs
from blockflow.bench.mlperf.job import Job, save_inputs
from blockflow.bench.mlperf.settings import Mode, Scenario, Target, make_settings
from blockflow.client import Client
from blockflow.launch.base import Launcher


@pytest.fixture
def forks(warm: Warm) -> Iterator[None]:
    """LoadGen's processes are; that one starts from nothing is shown in test_mlperf_disk.py."""
    with warm.spawning(run):
        yield


@pytest.fixture
def no_pictures(monkeypatch: pytest.MonkeyPatch) -> None:
    """For reports whose pictures nobody looks at."""
    monkeypatch.setattr(report, "draw", lambda results, out: [])


def job_of(fake: FakeDispatcher, task: str, folder: Path, duration_s: float = 0.2) -> Job:
    with Client(fake.endpoint) as client:
        routes = {task: client.tasks()[task]}
    data = folder / "data"
    data.mkdir()
    save_inputs(load_inputs("synthetic:1", routes, seed=1), data)
    settings = make_settings(
        Scenario.SINGLE_STREAM,
        Mode.PERFORMANCE,
        {task: Target(0.5)},
        short=True,
        duration_s=duration_s,
    )
    return Job(fake.endpoint, "", str(data), {task: 1}, {task: 1}, settings)


def server_job(short: bool) -> Job:
    """Of nothing that runs: for searches among planted results."""
    targets = {"a": Target(0.99, 10.0)}
    settings = make_settings(Scenario.SERVER, Mode.PERFORMANCE, targets, short=short)
    return Job("tcp://127.0.0.1:1", "", "", {"a": 1}, {"a": 1}, settings)


class SystemHere:
    """Stands for the process of the system that the command starts: it runs in this one."""

    def __init__(
        self, launcher: Launcher, repository: Path, folder: Path, connect: Connect
    ) -> None:
        self._system = idle_system(repository, folder / "state", launcher)
        self._connect = connect

    def __enter__(self) -> Self:
        return self

    def start(self) -> None:
        self._system.start()

    def __exit__(self, *_: object) -> None:
        self._system.stop()

    @property
    def client_address(self) -> str:
        return self._system.client_endpoint

    @property
    def rest(self) -> Rest:
        return self._connect(self._system.rest_url)
