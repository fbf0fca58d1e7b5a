"""Imported events: within a bound, and never closed under a wait."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from blockflow.tensormq.cuda import MAX_SLOTS
from blockflow.tensormq.cuda_api import CudaError, EventKind
from blockflow.tensormq.cuda_events import MAX_IMPORTED, ImportedEvents
from blockflow.tensormq.cuda_fake import FakeCuda
from tests.cuda_rig import far_process

MOST = 4


class Scene:
    """An owner with events, and a reader that may have four of them open."""

    def __init__(self, folder: Path) -> None:
        self.mine = FakeCuda(folder, eager=False)
        self.theirs = FakeCuda(folder, eager=False, process=far_process())
        self.writing, self.reading = self.mine.stream_create(), self.theirs.stream_create()
        self.events = ImportedEvents(self.theirs, self.reading, MOST)
        self.made: dict[tuple[int, int], int] = {}

    def record(self, owner: int, slot: int) -> None:
        if (owner, slot) not in self.made:
            self.made[owner, slot] = self.mine.event_create(EventKind.READY)
        self.mine.event_record(self.made[owner, slot], self.writing)

    def order(self, owner: int, slot: int) -> int:
        handle = self.mine.event_export(self.made[owner, slot])
        return self.events.order_behind((owner, slot), handle)

    @property
    def open(self) -> int:
        """What the driver has to keep for the reader, but for the reader's own events."""
        own = len(self.events._spare) + sum(map(len, self.events._waits.values()))
        return self.theirs.counts()["events"] - own

    def close(self) -> None:
        for owner in {owner for owner, _ in self.made}:
            self.events.close_owner(owner)
        assert self.open == len(self.events) == 0
        self.events.close()
        assert self.theirs.counts()["events"] == 0, "its own are gone as well"
        for event in self.made.values():
            self.mine.event_destroy(event)
        assert self.mine.world.broken_rules() == []
        self.mine.close()
        self.theirs.close()


@pytest.fixture
def scene(tmp_path: Path) -> Iterator[Scene]:
    made = Scene(tmp_path)
    yield made
    made.close()


def test_a_process_stays_below_what_the_driver_has() -> None:
    trial, of_torch = 1, 1000
    assert MAX_SLOTS + trial + MAX_IMPORTED < of_torch


def test_many_slots_of_many_owners_stay_within_the_bound(scene: Scene) -> None:
    for turn in range(3):
        for owner in (1, 2, 3):
            for slot in range(5):
                scene.record(owner, slot)
                scene.mine.stream_synchronize(scene.writing)
                assert scene.order(owner, slot) == 0
                assert scene.open <= MOST, (turn, owner, slot)
    assert len(scene.events) == MOST


def test_what_was_used_last_stays_open(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    for slot in range(MOST):
        scene.record(1, slot)
    scene.mine.stream_synchronize(scene.writing)
    imports: list[bytes] = []
    real = scene.theirs.event_import
    monkeypatch.setattr(scene.theirs, "event_import", lambda h: imports.append(h) or real(h))  # type: ignore[func-returns-value]
    for slot in (0, 1, 2, 3, 0):
        scene.order(1, slot)
    scene.record(2, 0)
    scene.mine.stream_synchronize(scene.writing)
    scene.order(2, 0)  # in the place of (1, 1)
    assert len(imports) == 5
    scene.order(1, 0)
    assert len(imports) == 5
    scene.order(1, 1)
    assert len(imports) == 6


def test_an_event_that_is_waited_for_is_not_closed(scene: Scene) -> None:
    gate = threading.Event()
    scene.mine.launch(scene.writing, lambda: gate.wait(10) and None)
    scene.record(1, 0)
    wait = scene.order(1, 0)
    assert wait and not scene.events.is_past((1, 0), wait)
    waited = scene.events._open[1, 0]
    done = scene.mine.stream_create()
    for slot in range(1, 8):
        event = scene.made[1, slot] = scene.mine.event_create(EventKind.READY)
        scene.mine.event_record(event, done)
        scene.mine.stream_synchronize(done)
        scene.order(1, slot)
        assert scene.events._open[1, 0] == waited, "the oldest of all, and still there"
    gate.set()
    scene.theirs.stream_synchronize(scene.reading)
    assert scene.events.is_past((1, 0), wait)
    scene.events.passed((1, 0), wait)
    assert scene.events.is_past((1, 0), wait), "it is known no more"
    scene.record(1, 8)
    scene.mine.stream_synchronize(scene.writing)
    scene.order(1, 8)
    assert (1, 0) not in scene.events._open
    scene.events.passed((1, 0), wait)  # again: of no interest
    scene.mine.stream_destroy(done)


def test_two_waits_for_one_slot_end_each_for_itself(scene: Scene) -> None:
    gate = threading.Event()
    scene.mine.launch(scene.writing, lambda: gate.wait(10) and None)
    scene.record(1, 0)
    first, second = scene.order(1, 0), scene.order(1, 0)
    assert 0 not in (first, second) and first != second
    scene.events.passed((1, 0), first)
    assert scene.events.is_past((1, 0), first) and not scene.events.is_past((1, 0), second)
    gate.set()
    scene.theirs.stream_synchronize(scene.reading)
    scene.events.passed((1, 0), second)
    assert len(scene.events._spare) == 2, "their events are used again"


def test_with_all_of_them_waited_for_the_device_catches_up_first(scene: Scene) -> None:
    gate = threading.Event()
    scene.mine.launch(scene.writing, lambda: gate.wait(10) and None)
    waits = {}
    for slot in range(MOST):
        scene.record(1, slot)
        waits[slot] = scene.order(1, slot)
    assert all(waits.values())
    scene.record(1, MOST)
    ordered = threading.Event()
    thread = threading.Thread(target=lambda: (scene.order(1, MOST), ordered.set()))
    thread.start()
    assert not ordered.wait(0.05) and scene.open == MOST
    gate.set()
    assert ordered.wait(10) and scene.open == MOST
    thread.join()
    for slot, wait in waits.items():
        scene.events.passed((1, slot), wait)


def test_where_the_driver_has_fewer_what_is_idle_makes_room(
    scene: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, limit = scene.theirs.event_import, 2

    def scarce(handle: bytes) -> int:
        if scene.open >= limit:
            raise CudaError("cuIpcOpenEventHandle", 2, "CUDA_ERROR_OUT_OF_MEMORY")
        return real(handle)

    monkeypatch.setattr(scene.theirs, "event_import", scarce)
    for slot in range(MOST):
        scene.record(1, slot)
        scene.mine.stream_synchronize(scene.writing)
        scene.order(1, slot)
        assert scene.open <= limit
    limit = 0
    scene.record(2, 0)
    with pytest.raises(CudaError):
        scene.order(2, 0)
