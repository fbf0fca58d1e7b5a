"""Processes that die with device memory in their hands, on the double; tests/gpu has the same on a
real device."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from blockflow.core.errors import BlockFlowError
from blockflow.launch.base import Launcher
from blockflow.tensormq.arena import DEVICE_BIT
from blockflow.tensormq.cuda_fake_world import World
from blockflow.tensormq.janitor import RunDir, remove_leavings
from tests.cuda_rig import OtherEnd, double_folder, grown, hops, other_end, warm_launcher
from tests.dispatcher_rig import wait_until
from tests.warm_rig import Warm

OWNER, CONSUMER, NEXT = 11, 21, 12
SLOTS = 8
"""Of the producer (``cuda_rig.Server.producer``)."""
HOPS = int(os.environ.get("BLOCKFLOW_HOPS", "2000"))
"""100,000 by hand take a minute."""


class Scene:
    """A run directory, a double, and two processes that die when told to."""

    def __init__(self, run_dir: Path, owner: OtherEnd, reader: OtherEnd) -> None:
        self.run_dir = run_dir
        self.double = double_folder(run_dir)
        self.world = World(self.double, os.getpid())
        self.owner, self.reader = owner, reader

    def begin(self, lazy: bool = False) -> None:
        where = f"lazy:{self.double}" if lazy else str(self.double)
        self.owner.ask("producer", where, str(self.run_dir), OWNER)
        self.reader.ask("consumer", where, str(self.run_dir), 0)

    def opened(self, line: str) -> int:
        return int(self.reader.ask("open", 0, line, False))


@pytest.fixture(scope="module")
def launcher(warm: Warm) -> Iterator[Launcher]:
    with warm.spawning():
        made = warm_launcher()
        yield made
        made.close()


@pytest.fixture
def scene(launcher: Launcher, tmp_path: Path) -> Iterator[Scene]:
    with (
        RunDir.create() as run_dir,
        other_end(launcher, tmp_path) as owner,
        other_end(launcher, tmp_path) as reader,
    ):
        made = Scene(run_dir.path, owner, reader)
        yield made
        assert made.world.broken_rules() == []
        for path in made.double.iterdir():
            path.unlink()
        made.double.rmdir()


def importers(world: World) -> list[int]:
    """Processes that have any memory of another one open."""
    return [pid for name in world.names("mem") for pid in world.importers(name)]


def test_two_processes_pass_a_tensor_and_close_in_order(scene: Scene) -> None:
    scene.begin()
    for value in range(20):  # more than there are slots
        number = scene.opened(scene.owner.ask("send", 0, value, 1000))
        assert scene.reader.ask("compute", number) == value * 1000
        scene.reader.ask("release", number)
    assert scene.owner.ask("sweep", 0) == 0
    scene.owner.ask("close_producer", 0)  # waits for the reader, which looks by itself
    assert scene.world.names("mem") == []
    assert not (scene.run_dir / f"arena-{OWNER | DEVICE_BIT}").exists()


@pytest.mark.parametrize("point", ["opened", "ordered", "released"])
def test_a_killed_consumer_gives_back_what_it_held(scene: Scene, point: str) -> None:
    scene.begin()
    for value in range(8):
        number = scene.opened(scene.owner.ask("send", 0, value, 64))
        if point == "ordered":
            scene.reader.ask("order", number)
        elif point == "released":
            scene.reader.ask("release", number)
    assert scene.owner.ask("sweep", 0) == (0 if point == "released" else 8)
    scene.reader.kill()
    if point != "released":
        assert scene.owner.ask("send", 0, 1, 64) == "", "no time-out gives its slots away"
    assert scene.owner.ask("consumer_gone", 0, CONSUMER) == (0 if point == "released" else 8)
    assert scene.owner.ask("sweep", 0) == 0
    assert scene.owner.ask("send", 0, 1, 64) != ""
    scene.owner.ask("close_producer", 0)  # the dead hold no lock
    assert scene.world.names("mem") == []


def test_a_killed_owners_tensors_are_lost_and_the_reader_lives_on(
    scene: Scene, launcher: Launcher, tmp_path: Path
) -> None:
    scene.begin()
    line = scene.owner.ask("send", 0, 3, 64)
    held, unopened = scene.opened(line), scene.owner.ask("send", 0, 4, 64)
    scene.owner.kill()
    scene.reader.ask("peer_gone", 0, OWNER)
    remove_leavings(scene.run_dir, OWNER)
    for ask in (lambda: scene.reader.ask("compute", held), lambda: scene.opened(unopened)):
        with pytest.raises(BlockFlowError) as info:
            ask()
        assert info.value.code == "WORKER_LOST"
    scene.reader.ask("release", held)
    wait_until(lambda: importers(scene.world) == [], 20)  # it was let go
    assert scene.reader.ask("broken") == ""
    assert sorted(os.listdir(scene.run_dir)) == ["lock"]
    with other_end(launcher, tmp_path) as successor:
        successor.ask("producer", str(scene.double), str(scene.run_dir), NEXT)
        number = scene.opened(successor.ask("send", 0, 5, 10))
        assert scene.reader.ask("compute", number) == 50.0
        scene.reader.ask("release", number)
        successor.ask("close_producer", 0)


def test_a_wait_for_a_dead_owners_kernel_ends_the_reader(scene: Scene) -> None:
    """The hazard of events between processes: nothing calls such a wait back, so it is found."""
    scene.begin(lazy=True)
    scene.reader.ask("grace", 0.1)
    number = scene.opened(scene.owner.ask("send", 0, 0, 64, True))
    scene.reader.ask("order", number)
    scene.reader.ask("release", number, False)
    scene.owner.kill()
    assert scene.reader.ask("broken") == ""
    scene.reader.ask("peer_gone", 0, OWNER)
    wait_until(lambda: scene.reader.ask("broken"), 20)
    assert "incarnation 11, which is dead" in scene.reader.ask("broken")


def test_an_owners_death_that_nobody_waits_for_is_no_reason_to_end(scene: Scene) -> None:
    scene.begin(lazy=True)
    scene.reader.ask("grace", 0.0)
    number = scene.opened(scene.owner.ask("send", 0, 0, 64, True))
    scene.owner.kill()
    scene.reader.ask("peer_gone", 0, OWNER)
    scene.reader.ask("release", number)
    assert scene.reader.ask("broken") == ""


def test_a_reader_that_has_what_it_waited_for_does_not_wait_any_more(scene: Scene) -> None:
    """However long its own work on it takes: an owner that dies meanwhile is no reason to end."""
    scene.begin(lazy=True)
    number = scene.opened(scene.owner.ask("send", 0, 0, 64, True))
    scene.reader.ask("order", number)
    scene.reader.ask("stall")
    scene.reader.ask("release", number, False)
    assert scene.reader.ask("waits", 0) == 1
    scene.owner.ask("go_on")
    wait_until(lambda: not scene.reader.ask("waits", 0), 20)
    assert scene.owner.ask("sweep", 0) == 1, "it is being read still"
    scene.reader.ask("go_on")


def test_nothing_is_left_when_both_are_killed(scene: Scene) -> None:
    scene.begin()
    scene.opened(scene.owner.ask("send", 0, 1, 64))
    for end in (scene.owner, scene.reader):
        end.kill()
    number = OWNER | DEVICE_BIT
    assert sorted(os.listdir(scene.run_dir)) == [f"arena-{number}", "lock", f"marks-{number}"]
    remove_leavings(scene.run_dir, OWNER)
    assert os.listdir(scene.run_dir) == ["lock"]


def test_many_hops_grow_nothing(scene: Scene) -> None:
    """Memory, objects, events and descriptors of both ends stay what they were after the first
    hops, and so does the device's memory."""
    scene.begin()
    ends = (scene.owner, scene.reader)
    hops(*ends, 200)
    events, memories = len(scene.world.names("event")), scene.world.names("mem")
    before = [end.ask("counts") for end in ends]
    hops(*ends, HOPS)
    after = [end.ask("counts") for end in ends]
    of_owner, of_reader = (grown(*pair) for pair in zip(before, after, strict=True))
    # A release that the device has not come to yet has an event: how many wait at once is a matter
    # of chance, but never more than there are slots.
    late = max(of_reader.pop("events", 0), of_reader.pop("fds", 0))
    assert (of_owner, of_reader) == ({}, {})
    assert late <= SLOTS
    assert len(scene.world.names("event")) <= events + SLOTS
    assert scene.world.names("mem") == memories
    assert scene.owner.ask("sweep", 0) == 0


def test_the_look_for_growth_sees_a_leak(scene: Scene) -> None:
    """Buffers that somebody keeps, and an event and a piece of memory that nobody closes."""
    scene.begin()
    ends = (scene.owner, scene.reader)
    hops(*ends, 200)
    before = [end.ask("counts") for end in ends]
    scene.reader.ask("forget_releases")
    scene.owner.ask("producer", str(scene.double), str(scene.run_dir), NEXT)
    hops(*ends, HOPS // 4)
    of_owner, of_reader = (
        grown(first, end.ask("counts")) for first, end in zip(before, ends, strict=True)
    )
    assert of_owner["memories"] == 1 and of_owner["events"] == 1
    assert of_reader["objects"] >= HOPS // 4
