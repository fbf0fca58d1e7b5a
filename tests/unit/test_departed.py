"""Who is known to be dead: the last ones, and no more of them the longer a process lives."""

from __future__ import annotations

import gc
from pathlib import Path
from typing import Any

import pytest
from cuda_rig import close_devices, double_folder, fake_device

from blockflow.core import departed
from blockflow.core.departed import Departed
from blockflow.dispatcher.plan import Planner
from blockflow.tensormq.channel import Consumer
from blockflow.tensormq.cuda_consumer import CudaConsumer
from blockflow.tensormq.inline import InlineProducer
from blockflow.tensormq.mixed import MixedConsumer
from blockflow.tensormq.shm import ShmConsumer
from blockflow.worker.delivery import Delivery

FIRST = 10**9
KEPT = 3


def remembered(owner: object) -> set[int]:
    """The incarnations in its own tables."""
    found: set[int] = set()
    todo = [owner]
    while todo:
        thing = todo.pop()
        if type(thing) is int and thing >= FIRST:
            found.add(thing)
        elif isinstance(thing, dict | list | set | Departed | Planner | Delivery | Consumer):
            todo += [held for held in gc.get_referents(thing) if held is not type(thing)]
    return found


def test_the_last_ones_are_known(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(departed, "DEPARTED_KEPT", KEPT)
    known = Departed()
    for incarnation in (5, 1, 1, 9, 7):
        known.add(incarnation)
    assert [n for n in range(10) if n in known] == [1, 7, 9]


@pytest.mark.parametrize("kind", ["planner", "delivery", "shm", "cuda", "mixed"])
def test_nobody_s_memory_of_the_dead_grows(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(departed, "DEPARTED_KEPT", KEPT)
    inline = InlineProducer()
    push: Any = None  # nobody is connected
    device = fake_device(double_folder(tmp_path)) if kind in ("cuda", "mixed") else None
    try:
        owner: Any
        if kind == "planner":
            owner = Planner()
        elif kind == "delivery":
            owner = Delivery(1, "zeromq", {1}, push, None, inline)
        elif device is None:
            owner = ShmConsumer(tmp_path)
        else:
            owner = CudaConsumer(device, tmp_path)
            if kind == "mixed":
                owner = MixedConsumer(device, ShmConsumer(tmp_path), owner)
        for incarnation in range(FIRST, FIRST + 10):
            owner.peer_gone(incarnation)
        assert remembered(owner) == set(range(FIRST + 10 - KEPT, FIRST + 10))
    finally:
        close_devices()
