"""What more than one file of this folder uses and is too slow to start for each of them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager

import pytest

from tests.worker_rig import Rig, rig_with_template


@pytest.fixture(scope="package")
def worker_rigs() -> Iterator[Callable[[], AbstractContextManager[Rig]]]:
    """A template for many rigs of workers; see ``worker_rig.rig``."""
    with rig_with_template() as make:
        yield make
