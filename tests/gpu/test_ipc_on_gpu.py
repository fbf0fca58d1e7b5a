"""CUDA IPC between real processes: growth over many hops, and deaths at named points."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from blockflow.core.errors import BlockFlowError
from blockflow.launch.base import Launcher
from blockflow.tensormq.cuda_device import CudaDevice
from blockflow.tensormq.cuda_preflight import preflight
from blockflow.tensormq.janitor import RunDir, remove_leavings
from tests.cuda_rig import OtherEnd, grown, hops, make_api, other_end, warm_launcher
from tests.gpu.rig import REAL

OWNER, CONSUMER, NEXT = 11, 21, 12
HOPS = 100_000 if REAL else 1000


@pytest.fixture(scope="module")
def launcher() -> Iterator[Launcher]:
    made = warm_launcher()
    yield made
    made.close()


class Scene:
    def __init__(self, run_dir: Path, owner: OtherEnd, reader: OtherEnd) -> None:
        self.run_dir, self.owner, self.reader = run_dir, owner, reader
        owner.ask("producer", "driver", str(run_dir), OWNER)
        reader.ask("consumer", "driver", str(run_dir), 0)

    def opened(self, line: str) -> int:
        return int(self.reader.ask("open", 0, line, False))


@pytest.fixture
def scene(launcher: Launcher, tmp_path: Path) -> Iterator[Scene]:
    with (
        RunDir.create() as run_dir,
        other_end(launcher, tmp_path) as owner,
        other_end(launcher, tmp_path) as reader,
    ):
        yield Scene(run_dir.path, owner, reader)


def test_this_device_can_share_its_memory() -> None:
    device = CudaDevice(make_api("driver"))
    assert preflight(device.api, {}).able
    assert device.close()


@pytest.mark.timeout(900)
def test_many_hops_grow_nothing(scene: Scene) -> None:
    ends = (scene.owner, scene.reader)
    line = scene.owner.ask("send", 0, 1, 1 << 20)
    number = scene.opened(line)
    assert scene.reader.ask("compute", number) == float(1 << 20)
    scene.reader.ask("release", number)
    hops(*ends, max(200, HOPS // 100))
    before = [end.ask("counts") for end in ends]
    hops(*ends, HOPS)
    after = [end.ask("counts") for end in ends]
    if int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1")) > 1:
        for held in before:  # other tests use the device meanwhile
            held.pop("device")
    assert [grown(*pair) for pair in zip(before, after, strict=True)] == [{}, {}]


@pytest.mark.parametrize("point", ["opened", "ordered", "released"])
def test_a_killed_consumer_gives_back_what_it_held(scene: Scene, point: str) -> None:
    for value in range(8):
        number = scene.opened(scene.owner.ask("send", 0, value, 1 << 16))
        if point == "ordered":
            scene.reader.ask("order", number)
        elif point == "released":
            scene.reader.ask("release", number)
    assert scene.owner.ask("sweep", 0) == (0 if point == "released" else 8)
    scene.reader.kill()
    assert scene.owner.ask("consumer_gone", 0, CONSUMER) == (0 if point == "released" else 8)
    assert scene.owner.ask("sweep", 0) == 0
    assert scene.owner.ask("send", 0, 1, 1 << 16) != ""
    assert scene.owner.ask("broken") == ""


@pytest.mark.parametrize("point", ["before opening", "opened", "ordered"])
def test_a_killed_producer_is_survived(
    scene: Scene, launcher: Launcher, tmp_path: Path, point: str
) -> None:
    first = scene.opened(scene.owner.ask("send", 0, 3, 1 << 16))
    assert scene.reader.ask("compute", first) == 3.0 * (1 << 16)
    scene.reader.ask("release", first)
    line = scene.owner.ask("send", 0, 4, 1 << 16)
    number = None if point == "before opening" else scene.opened(line)
    if point == "ordered":
        scene.reader.ask("order", number)
    scene.owner.kill()
    scene.reader.ask("peer_gone", 0, OWNER)
    remove_leavings(scene.run_dir, OWNER)
    with pytest.raises(BlockFlowError, match="WORKER_LOST"):
        scene.opened(line) if number is None else scene.reader.ask("compute", number)
    if number is not None:
        scene.reader.ask("release", number)
    assert scene.reader.ask("broken") == ""
    with other_end(launcher, tmp_path) as successor:
        successor.ask("producer", "driver", str(scene.run_dir), NEXT)
        number = scene.opened(successor.ask("send", 0, 5, 1 << 16))
        assert scene.reader.ask("compute", number) == 5.0 * (1 << 16)
        scene.reader.ask("release", number)
        successor.ask("close_producer", 0)
