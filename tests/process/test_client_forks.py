"""What a process has that was forked from one with a client: nothing of the client's."""

from __future__ import annotations

import gc
import mmap
import os
import select
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from grants_rig import side_pair

from blockflow.tensormq.grants import segment_bytes
from blockflow.tensormq.grants_memory import Segment, unsupported

pytestmark = pytest.mark.skipif(bool(unsupported()), reason=unsupported())

WAIT_S = 20.0
SLOT_BYTES, SLOTS = 4096, 4


def status_of(child: Callable[[], object]) -> int:
    """What ``child`` ends with in a forked process."""
    pid = os.fork()
    if not pid:
        try:
            child()
        except BaseException:
            os._exit(1)
        os._exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


@contextmanager
def granted() -> Iterator[list[Segment]]:
    """A segment as a client has it; the only reference to it."""
    mine, fd = Segment.create(SLOT_BYTES, SLOTS)
    mine.slot(0, 1)[0] = 7
    held = [Segment.adopt(fd, SLOT_BYTES, SLOTS)]
    try:
        assert held[0].slot(0, 1)[0] == 7
        yield held
    finally:
        for segment in (mine, *held):
            segment.close()


def test_what_a_child_maps_is_its_own_to_the_end() -> None:
    """Letting go of what was the parent's takes nothing of the child's along."""
    nbytes = segment_bytes(SLOT_BYTES, SLOTS)

    def child() -> None:
        own = [mmap.mmap(-1, nbytes) for _ in range(64)]
        for one in own:
            one[:8] = b"the own!"
        held[0].close()
        gc.collect()
        assert all(one[:8] == b"the own!" for one in own)

    with granted() as held:
        assert status_of(child) == 0


def test_a_child_does_not_keep_the_side_connection(tmp_path: Path) -> None:
    """Its end is what gives the slots back, also while a child of the dead client lives on."""
    with side_pair(tmp_path) as (side, theirs):
        stay, end = os.pipe()
        pid = os.fork()
        if not pid:
            os.close(end)
            os.read(stay, 1)  # until the test lets go
            os._exit(0)
        try:
            side.close()
            assert select.select([theirs], [], [], WAIT_S)[0], "held open by the child"
            assert theirs.recv(1) == b""
        finally:
            os.close(end)
            os.close(stay)
            os.waitpid(pid, 0)
