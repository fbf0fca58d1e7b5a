"""What more than one file of this folder uses and is too slow to start for each of them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager

import pytest

from blockflow.launch.base import Launcher
from tests.worker_rig import Rig, rigs_of


@pytest.fixture(scope="package")
def worker_rigs(launcher: Launcher) -> Iterator[Callable[[], AbstractContextManager[Rig]]]:
    """Rigs of workers with one repository; see ``worker_rig.rig``."""
    with rigs_of(launcher) as make:
        yield make
