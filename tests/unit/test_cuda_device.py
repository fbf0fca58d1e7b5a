"""One device in a process: completions, page-locked regions, the queue, copies; and preflight."""

from __future__ import annotations

import fcntl
import mmap
import os
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from refusals_rig import no_descriptor

from blockflow.tensormq import cuda_completions
from blockflow.tensormq.arena import DEVICE_BIT, arena_path
from blockflow.tensormq.cuda_api import ILLEGAL_ADDRESS, IPC_HANDLE_BYTES, CudaError
from blockflow.tensormq.cuda_book import BookReader, Export, make_book, write_export, write_trial
from blockflow.tensormq.cuda_device import CudaDevice
from blockflow.tensormq.cuda_fake import FakeCuda
from blockflow.tensormq.cuda_preflight import expandable_segments, preflight
from blockflow.tensormq.janitor import RunDir, remove_leavings
from tests.dispatcher_rig import wait_until


@pytest.fixture
def api(tmp_path: Path) -> FakeCuda:
    return FakeCuda(tmp_path, eager=False)


@pytest.fixture
def device(api: FakeCuda) -> Iterator[CudaDevice]:
    made = CudaDevice(api)
    yield made
    assert made.close()
    assert api.world.broken_rules() == []
    assert api.world.names("event") == []


def test_what_is_to_follow_device_work_follows_it(device: CudaDevice, api: FakeCuda) -> None:
    gate, done = threading.Event(), []
    api.launch(device.stream, lambda: gate.wait(10) and None)
    for n in range(3):
        device.completions.after(device.stream, lambda n=n: done.append(n))  # type: ignore[misc]
    assert not device.completions.wait_idle(0.05)
    assert (done, device.completions.pending) == ([], 3)
    gate.set()
    assert device.completions.wait_idle(10)
    assert done == [0, 1, 2]


def test_a_failing_completion_does_not_stop_the_next(
    device: CudaDevice, caplog: pytest.LogCaptureFixture
) -> None:
    done = threading.Event()
    device.completions.after(device.stream, lambda: [][1])
    device.completions.after(device.stream, done.set)
    assert done.wait(10)
    assert "IndexError" in caplog.text


def test_a_failed_device_says_so_once(
    device: CudaDevice, api: FakeCuda, monkeypatch: pytest.MonkeyPatch
) -> None:
    told: list[str] = []
    monkeypatch.setattr(device, "_on_broken", told.append)

    def fail(event: int) -> None:
        raise CudaError("cuEventSynchronize", 700, "CUDA_ERROR_ILLEGAL_ADDRESS")

    monkeypatch.setattr(api, "event_synchronize", fail)
    released = []
    for _ in range(2):
        device.completions.after(device.stream, lambda: released.append(1))
    assert device.completions.wait_idle(10)
    assert len(told) == 1 and "ILLEGAL_ADDRESS" in device.broken
    assert released == [1, 1], "a lost context holds no slots"


def test_of_a_batch_that_a_device_is_lost_with_only_the_slots_are_told(api: FakeCuda) -> None:
    device, gate, told = CudaDevice(api), threading.Event(), list[str]()

    def fails() -> None:
        gate.wait(10)
        raise CudaError("cuLaunchKernel", ILLEGAL_ADDRESS, "CUDA_ERROR_ILLEGAL_ADDRESS")

    with device.queue.batch(lambda ns: told.append("its time")):
        api.launch(device.stream, fails)
        device.queue.within(lambda: told.append("its slot"))
    gate.set()
    assert device.completions.wait_idle(10)
    assert (told, device.completions.lost) == (["its slot"], True)
    with pytest.raises(CudaError):
        device.queue.settle()
    device.close()


def test_what_is_settled_has_been_told(device: CudaDevice, api: FakeCuda) -> None:
    told, late = list[int](), threading.Event()

    def record(ns: int) -> None:
        late.wait(0.05)
        told.append(ns)

    for n in range(2):
        with device.queue.batch(record):
            api.launch(device.stream, lambda: None)
        device.queue.settle()
        assert len(told) == n + 1


def test_a_batchs_end_wakes_nobody_before_its_messages_have_left(
    api: FakeCuda, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cuda_completions, "TEND_S", 60.0)  # by then it is looked after anyway
    device, told, some = CudaDevice(api), list[str](), threading.Event()
    for name in ("first", "second"):
        with device.queue.batch(lambda ns, name=name: told.append(name)):  # type: ignore[misc]
            pass
    assert (device.completions.pending, told) == (2, [])
    device.completions.after(device.stream, some.set)
    assert some.wait(10)
    assert told == ["first", "second"]
    with device.queue.batch(lambda ns: told.append("third")):
        pass
    device.queue.settle()
    with device.queue.batch(lambda ns: told.append("fourth")):
        pass
    device.completions.go_on()
    assert device.close() and told[2:] == ["third", "fourth"]


def test_events_are_used_again(device: CudaDevice, api: FakeCuda) -> None:
    for _ in range(50):
        device.completions.after(device.stream, lambda: None)
        assert device.completions.wait_idle(10)
    assert len(api.world.names("event")) <= 2


@pytest.mark.parametrize("lone", [0, 1, 3])
def test_the_queue_bounds_what_is_ordered_ahead(
    device: CudaDevice, api: FakeCuda, lone: int
) -> None:
    """Two are under way, also after batches that were alone."""
    for _ in range(lone):
        with device.queue.batch(lambda ns: None):
            pass
        assert device.completions.wait_idle(10)
    gates = [threading.Event() for _ in range(4)]
    begun: list[int] = []
    times: list[int] = []

    def engine() -> None:
        for n, gate in enumerate(gates):
            with device.queue.batch(times.append):
                begun.append(n)
                api.launch(device.stream, lambda gate=gate: gate.wait(10) and None)

    thread = threading.Thread(target=engine)
    thread.start()
    for n, gate in enumerate(gates):
        wait_until(lambda n=n: len(begun) >= min(n + 2, len(gates)))
        assert len(begun) == min(n + 2, len(gates)), "never more than two are under way"
        gate.set()
    thread.join(10)
    assert device.completions.wait_idle(10)
    assert len(times) == 4 and all(t >= 0 for t in times)


def test_a_batch_that_fails_is_closed_too(device: CudaDevice) -> None:
    times: list[int] = []
    for _ in range(5):
        with pytest.raises(ZeroDivisionError), device.queue.batch(times.append):
            raise ZeroDivisionError
    assert device.completions.wait_idle(10)
    assert len(times) == 5


def test_what_follows_a_batch_shares_its_event(device: CudaDevice, api: FakeCuda) -> None:
    gate, done = threading.Event(), list[str]()
    with device.queue.batch(lambda ns: done.append("batch")):
        api.launch(device.stream, lambda: gate.wait(10) and None)
        device.queue.within(lambda: done.append("within"))
        device.queue.within(lambda: [][1])  # a defect, which costs the others nothing
    device.queue.behind(lambda: done.append("behind"))
    assert (done, device.completions.pending) == ([], 1)
    gate.set()
    assert device.completions.wait_idle(10)
    assert done == ["batch", "within", "behind"]
    device.queue.behind(lambda: done.append("late"))
    assert device.completions.wait_idle(10)
    assert done[-1] == "late"


def test_what_is_ordered_between_two_batches_has_an_event_of_its_own(
    device: CudaDevice, api: FakeCuda
) -> None:
    first, second, done = threading.Event(), threading.Event(), list[str]()
    with device.queue.batch(lambda ns: done.append("batch")):
        api.launch(device.stream, lambda: first.wait(10) and None)
    api.launch(device.stream, lambda: second.wait(10) and None)
    device.queue.within(lambda: done.append("within"))
    first.set()
    wait_until(lambda: done)
    assert done == ["batch"] and not device.completions.wait_idle(0.05)
    second.set()
    assert device.completions.wait_idle(10)
    assert done == ["batch", "within"]


def test_a_copy_to_the_host_lands_when_it_is_there(device: CudaDevice, api: FakeCuda) -> None:
    pointer, gate = api.mem_alloc(64), threading.Event()
    page = memoryview(mmap.mmap(-1, mmap.PAGESIZE))
    assert device.pins.cover(page, False)  # else the copy itself waits for the device
    back = page[:10]
    device.upload(pointer, memoryview(bytearray(b"0123456789")))
    for n in range(3):
        gate.clear()
        landed = list[tuple[int, bytes]]()
        api.launch(device.stream, lambda: gate.wait(10) and None)
        device.fetch(
            back,
            pointer,
            lambda ns, landed=landed: landed.append((ns, bytes(back))),  # type: ignore[misc]
        )
        assert landed == [], "the host goes on meanwhile"
        gate.set()
        assert device.completions.wait_idle(10)
        ((took_ns, seen),) = landed
        assert took_ns >= 0 and seen == b"0123456789"
        assert device.copies.d2h_copies == n + 1
    device.fetch(memoryview(b""), pointer, lambda ns: landed.append((ns, b"")))
    assert device.completions.wait_idle(10) and len(landed) == 2
    assert device.copies.d2h_copies == 3
    api.mem_free(pointer)


def test_copies_are_made_and_counted(device: CudaDevice, api: FakeCuda) -> None:
    pointer = api.mem_alloc(64)
    source, back = bytearray(b"0123456789"), bytearray(10)
    device.upload(pointer, memoryview(source))
    device.download(memoryview(back), pointer)
    assert back == source
    device.download(memoryview(b""), pointer)
    device.upload(pointer, memoryview(b""))
    copies = device.copies
    assert (copies.h2d_copies, copies.h2d_bytes) == (1, 10)
    assert (copies.d2h_copies, copies.d2h_bytes) == (1, 10)
    api.mem_free(pointer)


def test_a_stuck_device_is_called_broken(device: CudaDevice) -> None:
    device.watch(0.0, lambda: False, "never")
    device.watch(0.01, lambda: True, "it waits for the dead")
    wait_until(lambda: device.broken)
    assert device.broken == "it waits for the dead"


# --- preflight -----------------------------------------------------------------------------------


def test_an_able_device(api: FakeCuda) -> None:
    found = preflight(api, {})
    assert (found.able, found.reason, found.notes) == (True, "", ())
    assert (api.world.names("mem"), api.world.names("event")) == ([], [])


@pytest.mark.parametrize(
    ("lack", "reason"),
    [
        ("unified_addressing", "unified addressing"),
        ("ipc_events", "interprocess events"),
    ],
)
def test_what_a_device_lacks_is_named(tmp_path: Path, lack: str, reason: str) -> None:
    found = preflight(FakeCuda(tmp_path, lacks=[lack]), {})
    assert not found.able and reason in found.reason


def test_a_trial_that_fails_is_the_reason(api: FakeCuda, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(pointer: int) -> bytes:
        raise CudaError("cuIpcGetMemHandle", 801, "CUDA_ERROR_NOT_SUPPORTED")

    monkeypatch.setattr(api, "mem_export", refuse)
    found = preflight(api, {})
    assert not found.able and "cuIpcGetMemHandle failed: CUDA_ERROR_NOT_SUPPORTED" in found.reason
    assert api.world.names("mem") == []


@pytest.mark.parametrize(
    ("name", "value", "on"),
    [
        ("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True", True),
        ("PYTORCH_ALLOC_CONF", "max_split_size_mb:64, expandable_segments: true", True),
        ("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:False", False),
        ("PYTORCH_CUDA_ALLOC_CONF", "", False),
    ],
)
def test_expandable_segments_are_noted_and_do_no_harm(
    api: FakeCuda, name: str, value: str, on: bool
) -> None:
    assert expandable_segments({name: value}) is on
    found = preflight(api, {name: value})
    assert found.able and bool(found.notes) is on


# --- the book ------------------------------------------------------------------------------------


def test_an_export_goes_through_the_book_once() -> None:
    export = Export("GPU-1", 4 << 20, b"m" * IPC_HANDLE_BYTES, (b"e" * 64, b"f" * 64))
    trial = Export("GPU-1", 2 << 20, b"t" * IPC_HANDLE_BYTES, (b"g" * 64,))
    with RunDir.create() as run_dir:
        book = make_book(run_dir.path, 7, slots=2)
        reader = BookReader(run_dir.path, 7)
        assert (reader.export(), reader.trial()) == (None, None)
        write_trial(book, trial)
        assert (reader.export(), reader.trial()) == (None, trial)
        write_export(book, export)
        assert (reader.export(), reader.trial()) == (export, trial)
        assert reader.marks.slots == 2
        assert not reader.closing
        reader.unlock()
        reader.unlock()
        remove_leavings(run_dir.path, 7)
        with pytest.raises(Exception, match="WORKER_LOST"):
            BookReader(run_dir.path, 7)


def test_a_book_is_not_lost_for_want_of_a_descriptor(monkeypatch: pytest.MonkeyPatch) -> None:
    with RunDir.create() as run_dir:
        book = make_book(run_dir.path, 7, slots=2)
        with monkeypatch.context() as patch:
            patch.setattr(os, "open", no_descriptor)
            with pytest.raises(Exception, match="NO_SPACE"):
                BookReader(run_dir.path, 7)
        with open(arena_path(run_dir.path, 7 | DEVICE_BIT), "rb") as held:
            fcntl.flock(held, fcntl.LOCK_EX)  # the owner's, which is closing
            with pytest.raises(Exception, match="WORKER_LOST"):
                BookReader(run_dir.path, 7)
        book.close()


@pytest.mark.parametrize(
    "raw",
    [
        b"",
        b"\x90",
        b"\xc1",
        Export("u", 0, b"m" * 64, ()).to_bytes(),
        Export("u", 1, b"m" * 63, ()).to_bytes(),
        Export("u", 1, b"m" * 64, (b"e",)).to_bytes(),
    ],
)
def test_a_damaged_export_is_a_wire_error(raw: bytes) -> None:
    with pytest.raises(Exception, match="MALFORMED_MESSAGE"):
        Export.from_bytes(raw)
