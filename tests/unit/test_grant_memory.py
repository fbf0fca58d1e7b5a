"""Segments: sealed, mapped on both sides, gone with the last view."""

from __future__ import annotations

import errno
import mmap
import os
import socket

import numpy as np
import pytest

from blockflow.core.errors import WireError
from blockflow.tensormq import grants_memory
from blockflow.tensormq.forks import in_child
from blockflow.tensormq.grants import HEADER_BYTES, MIN_SLOT_BYTES
from blockflow.tensormq.grants_memory import Segment, unsupported

SIZE = MIN_SLOT_BYTES


def pair(slots: int = 2) -> tuple[Segment, Segment]:
    mine, fd = Segment.create(SIZE, slots)
    return mine, Segment.adopt(fd, SIZE, slots)


def test_both_sides_see_slots_and_marks() -> None:
    ours, theirs = pair()
    theirs.slot(1, 5)[:] = b"hello"
    assert bytes(ours.slot(1, 5)) == b"hello"
    assert bytes(ours.slot(0, 5)) == bytes(5)
    theirs.marks[1] = 7
    assert list(ours.marks) == [0, 7]
    ours.slot(0, SIZE)[:] = b"\xff" * SIZE
    assert list(ours.marks) == [0, 7]
    assert bytes(ours.slot(1, 5)) == b"hello"


@pytest.mark.parametrize(("slot", "nbytes"), [(2, 1), (-1, 1), (0, SIZE + 1), (0, -1)])
def test_no_slot_reaches_beyond_itself(slot: int, nbytes: int) -> None:
    ours, _ = pair()
    with pytest.raises(WireError):
        ours.slot(slot, nbytes)


def test_without_address_space_no_descriptor_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    _, fd = Segment.create(SIZE, 1)
    before = os.listdir("/proc/self/fd")

    def full(*_: object) -> None:
        raise OSError(errno.ENOMEM, os.strerror(errno.ENOMEM))

    monkeypatch.setattr(mmap, "mmap", full)
    with pytest.raises(OSError, match="memory"):
        Segment.create(SIZE, 1)
    assert os.listdir("/proc/self/fd") == before
    with pytest.raises(OSError, match="memory"):
        Segment.adopt(fd, SIZE, 1)
    assert len(os.listdir("/proc/self/fd")) == len(before) - 1


def test_a_client_can_neither_shrink_nor_grow_nor_seal_it() -> None:
    import fcntl

    ours, fd = Segment.create(SIZE, 1)
    try:
        for size in (0, HEADER_BYTES, 2 * SIZE + HEADER_BYTES):
            with pytest.raises(PermissionError):
                os.ftruncate(fd, size)
        with pytest.raises(PermissionError):
            fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_WRITE)
        assert bytes(ours.slot(0, 4)) == bytes(4)
    finally:
        os.close(fd)


def test_a_file_that_could_shrink_is_not_taken() -> None:
    fd = os.memfd_create("loose", os.MFD_ALLOW_SEALING)
    os.ftruncate(fd, HEADER_BYTES + SIZE)
    with pytest.raises(WireError):
        Segment.adopt(fd, SIZE, 1)
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.close(fd)
    _, fd = Segment.create(SIZE, 2)
    with pytest.raises(WireError):
        Segment.adopt(fd, SIZE, 1)


def test_views_outlive_the_end() -> None:
    ours, theirs = pair()
    ours.slot(0, 8)[:] = b"12345678"
    array = np.frombuffer(theirs.slot(0, 8), np.uint8)
    theirs.close()
    ours.close()
    assert bytes(array) == b"12345678"
    assert len(ours.marks) == 0
    theirs.close()


def test_a_forked_child_does_not_see_the_clients_mapping() -> None:
    _, theirs = pair()
    memory = theirs.slot(0, 8)
    pid = os.fork()
    if pid == 0:
        import signal

        signal.signal(signal.SIGSEGV, signal.SIG_DFL)
        bytes(memory)
        os._exit(0)
    assert os.WIFSIGNALED(os.waitpid(pid, 0)[1])


def test_what_a_fork_does_reaches_the_child_alone_and_only_the_living() -> None:
    first, second = socket.socketpair()
    with first, second:
        in_child(first, socket.socket.close)
        gone = socket.socket()
        in_child(gone, lambda sock: os._exit(9))
        gone.close()
        del gone
        pid = os.fork()
        if pid == 0:
            os._exit(0 if first.fileno() == -1 and second.fileno() >= 0 else 1)
        assert os.waitpid(pid, 0)[1] == 0
        first.send(b"the parent's is open")
        assert second.recv(100) == b"the parent's is open"


def test_machines_without_it_say_why(monkeypatch: pytest.MonkeyPatch) -> None:
    assert unsupported() == ""
    monkeypatch.setattr(grants_memory, "_STRICT", str(_policy()))
    assert "overcommitted" in unsupported()
    monkeypatch.delattr(os, "memfd_create")
    assert "platform" in unsupported()


def _policy() -> str:
    with open("/proc/sys/vm/overcommit_memory", encoding="ascii") as file:
        return file.read().strip()


def test_the_marks_fit_before_the_first_slot() -> None:
    from blockflow.core.limits import MAX_GRANT_SLOTS

    assert 4 * MAX_GRANT_SLOTS <= HEADER_BYTES
