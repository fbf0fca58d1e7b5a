"""The double enforces what a real driver leaves to luck: each rule has a planted offence here."""

from __future__ import annotations

import mmap
import os
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from blockflow.tensormq import cuda_api, cuda_fake_world
from blockflow.tensormq.cuda_api import CudaError, EventKind
from blockflow.tensormq.cuda_fake import FakeCuda
from blockflow.tensormq.cuda_fake_world import RuleBroken
from blockflow.tensormq.cuda_host import address_of

KIB = 1024


@pytest.fixture
def mine(tmp_path: Path) -> Iterator[FakeCuda]:
    made = FakeCuda(tmp_path, eager=False)
    yield made
    made.close()


@pytest.fixture
def theirs(tmp_path: Path) -> Iterator[FakeCuda]:
    """The same device in another process."""
    made = FakeCuda(tmp_path, eager=False, process=os.getppid())
    yield made
    made.close()


def status_of(call: Callable[[], object]) -> int:
    with pytest.raises(CudaError) as info:
        call()
    return info.value.status


def test_memory_is_shared_between_processes(mine: FakeCuda, theirs: FakeCuda) -> None:
    pointer = mine.mem_alloc(4 * KIB)
    mine.tensor(pointer, 4 * KIB).fill_(7)
    mapped = theirs.mem_import(mine.mem_export(pointer))
    assert mapped != pointer
    assert theirs.tensor(mapped, 4 * KIB)[4 * KIB - 1] == 7
    theirs.mem_close(mapped)
    mine.mem_free(pointer)
    assert mine.world.names("mem") == []


def test_a_handle_is_not_opened_where_it_was_made(mine: FakeCuda) -> None:
    memory = mine.mem_export(mine.mem_alloc(64))
    event = mine.event_export(mine.event_create(EventKind.READY))
    assert status_of(lambda: mine.mem_import(memory)) == cuda_api.INVALID_CONTEXT
    assert status_of(lambda: mine.event_import(event)) == cuda_api.INVALID_CONTEXT


def test_a_handle_of_freed_memory_is_invalid(mine: FakeCuda, theirs: FakeCuda) -> None:
    pointer = mine.mem_alloc(64)
    handle = mine.mem_export(pointer)
    mine.mem_free(pointer)
    assert status_of(lambda: theirs.mem_import(handle)) == cuda_api.INVALID_HANDLE
    assert status_of(lambda: theirs.mem_import(b"x" * 64)) == cuda_api.INVALID_HANDLE
    assert status_of(lambda: mine.mem_free(pointer)) == cuda_api.INVALID_VALUE


def test_close_comes_before_free(mine: FakeCuda, theirs: FakeCuda) -> None:
    pointer = mine.mem_alloc(64)
    mapped = theirs.mem_import(mine.mem_export(pointer))
    assert theirs.mem_import(mine.mem_export(pointer)) == mapped, "opened twice, mapped once"
    theirs.mem_close(mapped)
    with pytest.raises(RuleBroken, match="freed while"):
        mine.mem_free(pointer)
    theirs.mem_close(mapped)
    mine.mem_free(pointer)
    assert status_of(lambda: theirs.mem_close(mapped)) == cuda_api.INVALID_VALUE
    assert len(mine.world.broken_rules()) == 1


def test_closed_and_freed_memory_is_not_used(mine: FakeCuda, theirs: FakeCuda) -> None:
    pointer = mine.mem_alloc(64)
    mapped = theirs.mem_import(mine.mem_export(pointer))
    stream = theirs.stream_create()
    theirs.mem_close(mapped)
    for offence in (
        lambda: theirs.launch(stream, lambda: None, reads=[(mapped, 64)]),
        lambda: theirs.copy_d2d(mapped, mapped, 64, stream),
    ):
        with pytest.raises(RuleBroken, match="after it was freed or closed"):
            offence()
    assert (
        status_of(lambda: mine.launch(mine.stream_create(), lambda: None, reads=[(64, 1)]))
        == cuda_api.ILLEGAL_ADDRESS
    )


def test_memory_is_not_closed_while_queued_work_reads_it(mine: FakeCuda, theirs: FakeCuda) -> None:
    mapped = theirs.mem_import(mine.mem_export(mine.mem_alloc(64)))
    stream, gate = theirs.stream_create(), threading.Event()
    theirs.launch(stream, lambda: gate.wait(10) and None, reads=[(mapped, 64)])
    with pytest.raises(RuleBroken, match="closed while it is in use"):
        theirs.mem_close(mapped)
    gate.set()
    theirs.stream_synchronize(stream)


def test_reading_without_waiting_for_the_writer_is_seen(mine: FakeCuda, theirs: FakeCuda) -> None:
    pointer, gate = mine.mem_alloc(64), threading.Event()
    mapped = theirs.mem_import(mine.mem_export(pointer))
    writing, reading = mine.stream_create(), theirs.stream_create()
    mine.launch(writing, lambda: gate.wait(10) and None, writes=[(pointer, 64)])
    theirs.launch(reading, lambda: None, reads=[(mapped + 60, 4)])
    with pytest.raises(RuleBroken, match="has it written"):
        theirs.stream_synchronize(reading)
    gate.set()
    mine.stream_synchronize(writing)
    with pytest.raises(RuleBroken):  # the failure sticks to the stream
        theirs.launch(reading, lambda: None)


def test_waiting_for_the_event_orders_reader_behind_writer(
    mine: FakeCuda, theirs: FakeCuda
) -> None:
    pointer, gate = mine.mem_alloc(64), threading.Event()
    ready = mine.event_create(EventKind.READY)
    mapped = theirs.mem_import(mine.mem_export(pointer))
    seen = theirs.event_import(mine.event_export(ready))
    assert theirs.event_query(seen), "an event that was never recorded has come"
    writing, reading = mine.stream_create(), theirs.stream_create()

    def write() -> None:
        assert gate.wait(10)
        mine.tensor(pointer, 64).fill_(5)

    found: list[int] = []
    mine.launch(writing, write, writes=[(pointer, 64)])
    mine.event_record(ready, writing)
    assert not theirs.event_query(seen)
    theirs.stream_wait(reading, seen)
    theirs.launch(
        reading, lambda: found.append(int(theirs.tensor(mapped, 64)[9])), reads=[(mapped, 64)]
    )
    gate.set()
    theirs.stream_synchronize(reading)
    assert found == [5]
    assert mine.world.broken_rules() == []


def test_writing_before_the_reader_is_done_is_seen(mine: FakeCuda, theirs: FakeCuda) -> None:
    pointer, gate = mine.mem_alloc(64), threading.Event()
    mapped = theirs.mem_import(mine.mem_export(pointer))
    writing, reading = mine.stream_create(), theirs.stream_create()
    theirs.launch(reading, lambda: gate.wait(10) and None, reads=[(mapped, 64)])
    mine.launch(writing, lambda: None, writes=[(pointer, 1)])
    with pytest.raises(RuleBroken, match="has it read"):
        mine.stream_synchronize(writing)
    gate.set()
    theirs.stream_synchronize(reading)


def test_events_keep_their_rules(mine: FakeCuda, theirs: FakeCuda) -> None:
    ready, done = mine.event_create(EventKind.READY), mine.event_create(EventKind.DONE)
    assert status_of(lambda: mine.event_export(done)) == cuda_api.INVALID_HANDLE
    assert status_of(lambda: mine.event_elapsed_ns(ready, ready)) == cuda_api.INVALID_HANDLE
    seen = theirs.event_import(mine.event_export(ready))
    with pytest.raises(RuleBroken, match="imported event is recorded"):
        theirs.event_record(seen, theirs.stream_create())
    with pytest.raises(RuleBroken, match="destroyed while"):
        mine.event_destroy(ready)
    theirs.event_destroy(seen)


def test_an_imported_event_is_not_used_after_its_maker_destroyed_it(
    mine: FakeCuda, theirs: FakeCuda
) -> None:
    ready = mine.event_create(EventKind.READY)
    seen = theirs.event_import(mine.event_export(ready))
    with pytest.raises(RuleBroken):
        mine.event_destroy(ready)
    mine.world.remove(mine.world.names("event")[0])
    with pytest.raises(RuleBroken, match="its maker has destroyed"):
        theirs.event_query(seen)


def test_clocks_measure_and_only_what_has_come(mine: FakeCuda) -> None:
    start, stop = mine.event_create(EventKind.CLOCK), mine.event_create(EventKind.CLOCK)
    stream, gate = mine.stream_create(), threading.Event()
    mine.event_record(start, stream)
    mine.launch(stream, lambda: gate.wait(10) and None)
    mine.event_record(stop, stream)
    assert status_of(lambda: mine.event_elapsed_ns(start, stop)) == cuda_api.NOT_READY
    gate.set()
    mine.event_synchronize(stop)
    assert mine.event_elapsed_ns(start, stop) >= 0
    never = mine.event_create(EventKind.CLOCK)
    assert status_of(lambda: mine.event_elapsed_ns(start, never)) == cuda_api.INVALID_HANDLE


def test_host_regions_are_page_locked_wholly_or_not_at_all(mine: FakeCuda) -> None:
    host = memoryview(mmap.mmap(-1, 4 * mmap.PAGESIZE))
    address = address_of(host)
    pointer, stream = mine.mem_alloc(64 * KIB), mine.stream_create()
    mine.host_register(address, mmap.PAGESIZE, False)
    for again in (address, address + 8):
        with pytest.raises(CudaError):
            mine.host_register(again, mmap.PAGESIZE, False)
    mine.copy_h2d(pointer, address, 64, stream)
    partly = lambda: mine.copy_h2d(pointer, address + mmap.PAGESIZE - 8, 64, stream)  # noqa: E731
    assert status_of(partly) == cuda_api.INVALID_VALUE
    mine.stream_synchronize(stream)
    mine.host_unregister(address)
    partly()
    with pytest.raises(CudaError):
        mine.host_unregister(address)


def test_page_locked_for_reading_is_for_reading_and_for_few(tmp_path: Path) -> None:
    host = memoryview(mmap.mmap(-1, mmap.PAGESIZE))
    address = address_of(host)
    common, rare = FakeCuda(tmp_path), FakeCuda(tmp_path, read_only_pins=True)
    assert not common.facts().read_only_pins and rare.facts().read_only_pins
    refused = status_of(lambda: common.host_register(address, mmap.PAGESIZE, True))
    assert refused == cuda_api.NOT_SUPPORTED
    rare.host_register(address, mmap.PAGESIZE, True)
    with pytest.raises(RuleBroken, match="page-locked for reading"):
        rare.copy_d2h(address, rare.mem_alloc(64), 8, rare.stream_create())


def test_pageable_memory_is_read_before_the_call_returns(mine: FakeCuda) -> None:
    host = bytearray(b"before")
    pointer, stream, gate = mine.mem_alloc(64), mine.stream_create(), threading.Event()
    mine.launch(stream, lambda: gate.wait(10) and None)
    mine.copy_h2d(pointer, address_of(host), 6, stream)
    host[:] = b"after!"
    gate.set()
    mine.stream_synchronize(stream)
    assert bytes(mine.tensor(pointer, 6).numpy()) == b"before"


def test_page_locked_memory_keeps_what_a_queued_copy_is_to_read(mine: FakeCuda) -> None:
    host = memoryview(mmap.mmap(-1, mmap.PAGESIZE))
    address = address_of(host)
    pointer, stream, gate = mine.mem_alloc(64), mine.stream_create(), threading.Event()
    mine.host_register(address, mmap.PAGESIZE, False)
    mine.launch(stream, lambda: gate.wait(10) and None)
    mine.copy_h2d(pointer, address, 6, stream)
    host[:6] = b"after!"
    gate.set()
    with pytest.raises(RuleBroken, match="changed before it was on the device"):
        mine.stream_synchronize(stream)


@pytest.mark.parametrize("way", ["up", "down"])
def test_memory_is_not_unregistered_under_a_queued_copy(mine: FakeCuda, way: str) -> None:
    host = memoryview(mmap.mmap(-1, mmap.PAGESIZE))
    address = address_of(host)
    pointer, stream, gate = mine.mem_alloc(64), mine.stream_create(), threading.Event()
    mine.host_register(address, mmap.PAGESIZE, False)
    mine.launch(stream, lambda: gate.wait(10) and None)
    if way == "up":
        mine.copy_h2d(pointer, address, 6, stream)
    else:
        mine.copy_d2h(address, pointer, 6, stream)
    mine.host_unregister(address)
    gate.set()
    with pytest.raises(RuleBroken, match="page-locked no more"):
        mine.stream_synchronize(stream)


def test_a_copy_to_pageable_memory_is_waited_for(mine: FakeCuda) -> None:
    host = bytearray(6)
    pointer, stream, begun = mine.mem_alloc(64), mine.stream_create(), threading.Event()
    mine.launch(stream, lambda: begun.wait(10) and None)
    mine.tensor(pointer, 6).fill_(7)
    copied = threading.Thread(target=mine.copy_d2h, args=(address_of(host), pointer, 6, stream))
    copied.start()
    copied.join(0.05)
    assert copied.is_alive()
    begun.set()
    copied.join(10)
    assert not copied.is_alive() and bytes(host) == bytes([7] * 6)


def test_torchs_memory_is_for_a_stream_of_ours(mine: FakeCuda) -> None:
    with pytest.raises(RuleBroken, match="no stream of ours"):
        mine.scratch(8)
    with mine.engine_scope(mine.stream_create()):
        with mine.engine_scope(mine.stream_create()):
            mine.scratch(8)
        mine.scratch(8)
    with pytest.raises(RuleBroken):
        mine.scratch(8)


def test_memory_of_a_device_that_is_no_peer_cannot_be_opened(tmp_path: Path) -> None:
    owner = FakeCuda(tmp_path, 1)
    handle = owner.mem_export(owner.mem_alloc(64))
    for islands, status in (((), 0), ((0,), cuda_api.NO_PEER_ACCESS)):
        reader = FakeCuda(tmp_path, 0, process=os.getppid(), islands=islands)
        if status:
            assert status_of(lambda reader=reader: reader.mem_import(handle)) == status  # type: ignore[misc]
        else:
            reader.mem_close(reader.mem_import(handle))


def test_a_failed_device_answers_everything_with_its_error(mine: FakeCuda) -> None:
    """As sticky as on a GPU: also what would only give back."""
    pointer, stream = mine.mem_alloc(64), mine.stream_create()
    event = mine.event_create(EventKind.DONE)

    def fails() -> None:
        raise CudaError("cuLaunchKernel", cuda_api.ILLEGAL_ADDRESS, "CUDA_ERROR_ILLEGAL_ADDRESS")

    mine.launch(stream, fails)
    with pytest.raises(CudaError):
        mine.stream_synchronize(stream)
    for call in (
        lambda: mine.mem_alloc(64),
        lambda: mine.mem_free(pointer),
        lambda: mine.event_create(EventKind.DONE),
        lambda: mine.event_query(event),
        lambda: mine.event_destroy(event),
        lambda: mine.host_unregister(0),
        mine.stream_create,
    ):
        assert status_of(call) == cuda_api.ILLEGAL_ADDRESS


def test_the_device_has_an_end(tmp_path: Path) -> None:
    small = FakeCuda(tmp_path, total_bytes=64 * KIB)
    first = small.mem_alloc(60 * KIB)
    assert status_of(lambda: small.mem_alloc(8 * KIB)) == cuda_api.OUT_OF_MEMORY
    assert status_of(lambda: small.mem_alloc(0)) == cuda_api.INVALID_VALUE
    small.mem_free(first)
    small.mem_free(small.mem_alloc(8 * KIB))
    with pytest.raises(CudaError):
        FakeCuda(tmp_path, 2)


def test_what_is_used_and_held_is_counted(
    mine: FakeCuda, theirs: FakeCuda, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Memory lives on while anybody has it open, also after its maker's death."""
    nothing = {"memories": 0, "events": 0, "streams": 0, "locked": 0}
    assert (mine.counts(), mine.memory_used()) == (nothing, 0)
    pointer = mine.mem_alloc(64 * KIB)
    mapped = theirs.mem_import(mine.mem_export(pointer))
    ready = mine.event_create(EventKind.READY)
    theirs.event_import(mine.event_export(ready))
    mine.stream_create()
    assert mine.counts() == theirs.counts() | {"streams": 1}
    assert theirs.counts() == nothing | {"memories": 1, "events": 1}
    assert mine.memory_used() == theirs.memory_used() == 64 * KIB
    alive = cuda_fake_world.running
    monkeypatch.setattr(cuda_fake_world, "running", lambda pid: pid != os.getpid() and alive(pid))
    assert theirs.memory_used() == 64 * KIB
    theirs.mem_close(mapped)
    assert theirs.memory_used() == 0


def test_a_file_says_what_all_processes_lack(mine: FakeCuda, theirs: FakeCuda) -> None:
    handle = mine.mem_export(mine.mem_alloc(64))
    (mine.world.folder / "lacks").write_text("opening ipc_events\n")
    assert status_of(lambda: theirs.mem_import(handle)) == cuda_api.NOT_SUPPORTED
    assert not theirs.facts().ipc_events


def test_a_forked_child_has_no_device(mine: FakeCuda) -> None:
    pid = os.fork()
    if pid == 0:
        try:
            mine.mem_alloc(64)
        except CudaError as exc:
            os._exit(exc.status)
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == cuda_api.NOT_INITIALIZED
