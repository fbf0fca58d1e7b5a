"""A device that is at something for long, or waits for the dead for ever: who needs nothing of it
goes on meanwhile, and the wait for the dead is found out whatever else waits."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from blockflow.tensormq import cuda, cuda_consumer
from blockflow.tensormq.channel import InBuffer
from blockflow.tensormq.cuda import CudaProducer
from blockflow.tensormq.cuda_consumer import CudaConsumer
from blockflow.tensormq.cuda_device import CudaDevice
from blockflow.tensormq.cuda_fake import FakeCuda
from blockflow.tensormq.janitor import RunDir
from tests.cuda_rig import close_devices, double_folder, fake_device, far_device
from tests.dispatcher_rig import wait_until

FIRST, SECOND = 11, 12
WAIT_S = 10.0


class Scene:
    """A reader, and owners in another process, with streams that work by themselves."""

    def __init__(self, run_dir: Path) -> None:
        self.run_dir = run_dir
        folder = double_folder(run_dir)
        self.device = fake_device(folder, eager=False)
        self.far = far_device(folder, eager=False)
        self.consumer = CudaConsumer(self.device, run_dir, most_events=1)
        self.owners = {n: CudaProducer(self.far, run_dir, n, 1 << 20, 4) for n in (FIRST, SECOND)}
        self.gate = threading.Event()

    def stall(self, device: CudaDevice) -> None:
        assert isinstance(device.api, FakeCuda)
        device.api.launch(device.stream, lambda: self.gate.wait(30) and None)

    def sent(self, owner: int) -> InBuffer:
        made = self.owners[owner].reserve("uint8", (64,))
        assert made is not None
        made.finish(lambda ns: None)
        return self.consumer.open(self.owners[owner].publish(made, [7])[0].desc, None)

    def close(self) -> None:
        self.gate.set()
        self.consumer.close()
        for owner in self.owners.values():
            owner.close()


@pytest.fixture
def scene() -> Iterator[Scene]:
    with RunDir.create() as run_dir:
        made = Scene(run_dir.path)
        yield made
        made.close()
        close_devices()
        folder = double_folder(run_dir.path)
        assert {path.name for path in folder.iterdir()} <= {"accesses"}
        (folder / "accesses").unlink(missing_ok=True)
        folder.rmdir()


def ends(call: Callable[[], object]) -> bool:
    """Whether it does not wait."""
    thread = threading.Thread(target=call, daemon=True)
    thread.start()
    thread.join(WAIT_S)
    return not thread.is_alive()


def test_who_hears_of_a_death_does_not_wait_for_the_device(scene: Scene) -> None:
    """The driver closes a dead owner's memory when the device has nothing more to do."""
    scene.sent(FIRST).release()
    scene.stall(scene.device)
    assert ends(lambda: scene.consumer.peer_gone(FIRST))


def test_an_owner_whose_device_is_stuck_leaves_its_memory_to_its_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The driver frees when the device has nothing more to do, too."""
    monkeypatch.setattr(cuda, "_CLOSE_S", 0.01)
    api, gate = FakeCuda(tmp_path, eager=False), threading.Event()
    device = CudaDevice(api)
    with RunDir.create() as run_dir:
        owner = CudaProducer(device, run_dir.path, FIRST, 1 << 20, 4)
        owner.open_slab()
        api.launch(device.stream, lambda: gate.wait(30) and None)
        assert ends(owner.close)
        assert api.counts()["memories"] == 2
    gate.set()
    assert device.close()


def test_others_tensors_are_opened_while_memory_is_being_closed(scene: Scene) -> None:
    scene.sent(FIRST).release()
    scene.stall(scene.device)
    scene.consumer.peer_gone(FIRST)
    closing = threading.Thread(target=scene.consumer.tend)  # as the completions' thread does
    closing.start()
    opened: list[InBuffer] = []
    assert ends(lambda: opened.append(scene.sent(SECOND)))
    opened[0].release()
    scene.gate.set()
    closing.join(WAIT_S)
    assert not closing.is_alive()


def test_a_wait_for_the_dead_is_found_out_while_room_for_an_event_is_waited_for(
    scene: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As many events are open as may be, all of them waited for: the next one waits for the device,
    which waits for the dead."""
    monkeypatch.setattr(cuda_consumer, "DEATH_GRACE_S", 0.05)
    broken = threading.Event()
    monkeypatch.setattr(scene.device, "_on_broken", lambda why: broken.set())
    scene.stall(scene.far)
    first, second = scene.sent(FIRST), scene.sent(FIRST)
    with scene.device.queue.batch(lambda ns: None):
        first.tensor()
        engine = threading.Thread(target=second.tensor, daemon=True)
        engine.start()
        wait_until(scene.consumer._events._lock.locked, WAIT_S)  # it makes room
        scene.consumer.peer_gone(FIRST)
        assert broken.wait(WAIT_S)
        scene.gate.set()
        engine.join(WAIT_S)
    assert f"incarnation {FIRST}, which is dead" in scene.device.broken
    first.release()
    second.release()
    assert scene.device.completions.wait_idle(WAIT_S)


def test_who_is_past_all_waits_for_the_dead_goes_on(
    scene: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    scene.consumer.close()
    scene.consumer = CudaConsumer(scene.device, scene.run_dir)
    watched: list[Callable[[], bool]] = []
    monkeypatch.setattr(scene.device, "watch", lambda after_s, stuck, why: watched.append(stuck))
    assert isinstance(scene.device.api, FakeCuda) and isinstance(scene.far.api, FakeCuda)
    owners, begun, end = threading.Event(), threading.Event(), threading.Event()

    def own_work() -> None:
        begun.set()
        end.wait(30)

    scene.far.api.launch(scene.far.stream, lambda: owners.wait(30) and None)
    first = scene.sent(FIRST)
    scene.stall(scene.far)
    second = scene.sent(FIRST)
    with scene.device.queue.batch(lambda ns: None):
        first.tensor()
        scene.device.api.launch(scene.device.stream, begun.set)
        second.tensor()
        scene.device.api.launch(scene.device.stream, own_work)
    scene.consumer.peer_gone(FIRST)
    (stuck,) = watched
    assert stuck()
    owners.set()
    assert begun.wait(WAIT_S)
    assert stuck(), "past one of two"
    begun.clear()
    scene.gate.set()
    assert begun.wait(WAIT_S)
    assert not stuck(), "what it computes with them goes on"
    end.set()
    first.release()
    second.release()
    assert scene.device.completions.wait_idle(WAIT_S)


def test_nothing_is_kept_of_a_wait_that_is_over(scene: Scene) -> None:
    scene.stall(scene.far)
    got = scene.sent(FIRST)
    with scene.device.queue.batch(lambda ns: None):
        got.tensor()
    waits = scene.consumer._mappings[FIRST].waits
    assert len(waits) == len(scene.consumer._events._waits) == 1
    scene.gate.set()
    got.release()
    assert scene.device.completions.wait_idle(WAIT_S)
    assert not waits and not scene.consumer._events._waits
