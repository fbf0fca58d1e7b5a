"""Verdicts in books, and the trial that they come from."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from blockflow.tensormq.arena import Arena
from blockflow.tensormq.cuda import CudaProducer
from blockflow.tensormq.cuda_api import CudaError
from blockflow.tensormq.cuda_book import VERDICTS, make_book
from blockflow.tensormq.cuda_device import CudaDevice
from blockflow.tensormq.cuda_fake import FakeCuda
from blockflow.tensormq.cuda_trial import TRIAL_BYTES, TrialPiece, try_owners
from blockflow.tensormq.cuda_verdict import VerdictBook, VerdictView
from tests import cuda_rig, mixed_rig

READER, OWNER, OTHER = 7, 11, 12


run_dir = mixed_rig.run_dir


@pytest.fixture
def book(run_dir: Path) -> Iterator[Arena]:
    made = make_book(run_dir, READER, 1)
    yield made
    made.close()


@pytest.fixture
def reader(run_dir: Path) -> CudaDevice:
    """The reader's device; the owner is this process."""
    made = cuda_rig.far_device(cuda_rig.double_folder(run_dir), eager=False)
    made.keep()  # what follows the device needs an event, which is kept for the next
    assert made.completions.wait_idle(10)
    return made


@pytest.fixture
def theirs(reader: CudaDevice) -> FakeCuda:
    assert isinstance(reader.api, FakeCuda)
    return reader.api


def tried(reader: CudaDevice, run_dir: Path, known: VerdictBook, *owners: int) -> None:
    try_owners(reader, run_dir, known, owners)
    assert reader.completions.wait_idle(10)


def seen(run_dir: Path, owner: int) -> tuple[bool, str | None]:
    view = VerdictView.of(run_dir, READER, owner)
    assert view is not None
    return view.opened, view.refusal()


def test_each_owner_reads_what_is_said_of_itself(run_dir: Path, book: Arena) -> None:
    known = VerdictBook(book)
    assert seen(run_dir, OWNER) == (False, None)
    known.opened(OWNER)
    known.refused(OTHER, "no such namespace")
    assert seen(run_dir, OWNER) == (True, None)
    assert seen(run_dir, OTHER) == (False, "no such namespace")
    assert known.known(OWNER) and not known.known(99)


def test_a_look_stays_true_while_rows_change_hands(run_dir: Path, book: Arena) -> None:
    known = VerdictBook(book)
    known.opened(OWNER)
    view = VerdictView.of(run_dir, READER, OWNER)
    assert view is not None and view.opened
    known.refused(OWNER, "x" * 500)
    assert not view.opened and view.refusal() == "x" * 120
    known.keep([])
    assert (view.opened, view.refusal()) == (False, None)
    known.opened(OTHER)  # takes the same row
    assert (view.opened, view.refusal()) == (False, None)
    known.opened(OWNER)
    assert view.opened and seen(run_dir, OTHER) == (True, None)


def test_neighbours_have_words_and_reasons_of_their_own(run_dir: Path, book: Arena) -> None:
    known = VerdictBook(book)
    for owner in range(1, 9):
        known.refused(owner, f"{owner}" * 500)
    known.refused(1, "1" * 500)
    assert [seen(run_dir, n)[1] for n in range(1, 9)] == [f"{n}" * 120 for n in range(1, 9)]
    known.refused(3, "short")
    assert seen(run_dir, 3) == (False, "short")
    for owner in range(1, 9, 2):
        known.opened(owner)
    assert [seen(run_dir, n)[0] for n in range(1, 9)] == [True, False] * 4


def test_a_verdict_is_found_again_in_another_row(run_dir: Path, book: Arena) -> None:
    known = VerdictBook(book)
    known.opened(OTHER)
    known.opened(OWNER)
    view = VerdictView.of(run_dir, READER, OWNER)
    assert view is not None and view.opened
    known.keep([OTHER])
    known.opened(13)
    assert not view.opened
    known.opened(OWNER)
    assert view.opened


def test_where_there_is_no_row_left_nothing_is_said(run_dir: Path, book: Arena) -> None:
    known = VerdictBook(book)
    for owner in range(100, 100 + VERDICTS + 1):
        known.opened(owner)
    last = 100 + VERDICTS
    assert seen(run_dir, last - 1) == (True, None)
    assert seen(run_dir, last) == (False, None) and not known.known(last)
    known.keep([last])
    known.opened(last)
    assert seen(run_dir, last) == (True, None)


def test_who_has_no_book_takes_no_device_memory(run_dir: Path) -> None:
    assert VerdictView.of(run_dir, READER, OWNER) is None


# --- the trial -----------------------------------------------------------------------------------


def owner_of(run_dir: Path, incarnation: int = OWNER) -> CudaProducer:
    device = cuda_rig.fake_device(cuda_rig.double_folder(run_dir))
    return CudaProducer(device, run_dir, incarnation, 4096, 2)


def test_a_trial_leaves_nothing_open(
    run_dir: Path, book: Arena, reader: CudaDevice, theirs: FakeCuda
) -> None:
    owner, known, before = owner_of(run_dir), VerdictBook(book), theirs.counts()
    tried(reader, run_dir, known, OWNER, OTHER)
    assert seen(run_dir, OWNER) == (True, None)
    assert not known.known(OTHER), "there is no such owner"
    assert theirs.counts() == before
    owner.close()
    assert theirs.world.names("mem") == []


@pytest.mark.parametrize("what", ["mem_import", "event_import"])
def test_a_trial_that_fails_is_noted_with_its_reason(
    run_dir: Path,
    book: Arena,
    reader: CudaDevice,
    theirs: FakeCuda,
    monkeypatch: pytest.MonkeyPatch,
    what: str,
) -> None:
    def refuse(handle: bytes) -> int:
        raise CudaError("cuIpcOpen", 217, "CUDA_ERROR_PEER_ACCESS_UNSUPPORTED")

    monkeypatch.setattr(theirs, what, refuse)
    owner, known, before = owner_of(run_dir), VerdictBook(book), theirs.counts()
    tried(reader, run_dir, known, OWNER)
    want = "cuIpcOpen failed: CUDA_ERROR_PEER_ACCESS_UNSUPPORTED (217)"
    assert seen(run_dir, OWNER) == (False, want)
    assert theirs.counts() == before
    monkeypatch.undo()
    tried(reader, run_dir, known, OWNER)
    assert seen(run_dir, OWNER) == (False, want), "it stands as long as both live"
    owner.close()


def test_a_trial_waits_for_nothing_that_the_device_is_at(
    run_dir: Path, book: Arena, reader: CudaDevice, theirs: FakeCuda
) -> None:
    """The driver closes memory when the device has nothing more to do, and it may wait for a dead
    owner's work for ever; the thread that hears of routes has others to hear of."""
    owner, known, gate = owner_of(run_dir), VerdictBook(book), threading.Event()
    theirs.launch(reader.stream, lambda: gate.wait(30) and None)
    trying = threading.Thread(target=try_owners, args=(reader, run_dir, known, [OWNER]))
    trying.start()
    trying.join(10)
    waits = trying.is_alive()
    gate.set()
    trying.join()
    assert not waits and seen(run_dir, OWNER) == (True, None)
    assert reader.completions.wait_idle(10)
    owner.close()
    assert theirs.world.names("mem") == []


def test_a_slab_that_is_there_is_what_is_tried(
    run_dir: Path,
    book: Arena,
    reader: CudaDevice,
    theirs: FakeCuda,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A successor must not believe of a small piece what its predecessor met with the slab."""
    owner = owner_of(run_dir)
    owner.open_slab()
    opened: list[bytes] = []
    real = theirs.mem_import
    monkeypatch.setattr(theirs, "mem_import", lambda h: opened.append(h) or real(h))  # type: ignore[func-returns-value]
    tried(reader, run_dir, VerdictBook(book), OWNER)
    assert opened == [owner.device.api.mem_export(owner.slab)]
    owner.close()


def test_without_memory_for_a_trial_there_is_none(
    run_dir: Path, book: Arena, theirs: FakeCuda, caplog: pytest.LogCaptureFixture
) -> None:
    device = cuda_rig.fake_device(theirs.world.folder, total_bytes=TRIAL_BYTES - 1)
    piece = TrialPiece(device.api, "GPU-1", book)
    piece.free()
    assert "nobody can try" in caplog.text
    assert theirs.world.names("mem") == []


def test_a_damaged_book_is_a_refusal(run_dir: Path, book: Arena, reader: CudaDevice) -> None:
    wrong = make_book(run_dir, OWNER, 1)
    wrong.data[:64].cast("Q")[2] = 5  # the length of a trial that was never written
    known = VerdictBook(book)
    tried(reader, run_dir, known, OWNER)
    opened, why = seen(run_dir, OWNER)
    assert not opened and why is not None and "device export" in why
    wrong.close()
