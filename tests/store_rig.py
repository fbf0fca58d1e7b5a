"""Stores with some epochs, for the tests of the durable state."""

from __future__ import annotations

from pathlib import Path

import pytest

from blockflow.control.store import StateStore
from blockflow.core.errors import SystemError_

TOPOLOGY = {"blocks": [{"name": "a"}], "tasks": {"t": ["a"]}}
PAST = {"epoch": 1, "how": "system-update", "when": "", "posted": {}, "digests": {}}


def commit(store: StateStore, epoch: int) -> None:
    store.commit(epoch, {"posted": epoch}, TOPOLOGY | {"epoch": epoch})


def filled(root: Path, epochs: int = 2) -> None:
    with StateStore(root) as store:
        for epoch in range(1, epochs + 1):
            commit(store, epoch)


def code_of(root: Path) -> str:
    with pytest.raises(SystemError_) as e:
        StateStore(root)
    return e.value.code
