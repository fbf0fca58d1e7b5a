"""What more than one file of this folder uses and is too slow to start for each of them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager

import pytest

from blockflow.launch.base import Launcher
from tests.apart_rig import forked
from tests.bench_rig import Here
from tests.worker_rig import Rig, rigs_of


@pytest.fixture(scope="package")
def worker_rigs(launcher: Launcher) -> Iterator[Callable[[], AbstractContextManager[Rig]]]:
    """Rigs of workers with one repository; see ``worker_rig.rig``."""
    with rigs_of(launcher) as make:
        yield make


@pytest.fixture
def forking(
    launcher: Launcher, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Here:
    """Runs benchmarks in this process; others that they start are forks of the template."""
    forked(launcher, monkeypatch)
    return Here(launcher, monkeypatch, capsys)
