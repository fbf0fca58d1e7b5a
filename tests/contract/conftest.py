"""What more than one file of this folder uses and is too slow to make for each of them."""

from __future__ import annotations

import pytest

from blockflow.repository.repository import BlockRepository


@pytest.fixture(scope="session")
def shelf(tmp_path_factory: pytest.TempPathFactory) -> BlockRepository:
    """Blocks for tests of engines, see ``engine_rig.Case.stored``."""
    return BlockRepository(tmp_path_factory.mktemp("shelf"))
