"""A client's side connection where the client has no room for what it is granted."""

from __future__ import annotations

import errno
import mmap
import os
import resource
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from grants_rig import grant, side_pair

from blockflow.core.errors import BlockFlowError
from blockflow.tensormq.grants import MIN_TENSOR_BYTES
from blockflow.wire.client import Place
from blockflow.wire.grants import Ask, Direction

LARGER = 16 * MIN_TENSOR_BYTES


@contextmanager
def no_descriptor() -> Iterator[None]:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    lowest = os.dup(0)
    os.close(lowest)
    resource.setrlimit(resource.RLIMIT_NOFILE, (lowest, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


@contextmanager
def no_memory() -> Iterator[None]:
    def full(*_: Any) -> Any:
        raise OSError(errno.ENOMEM, os.strerror(errno.ENOMEM))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(mmap, "mmap", full)
        yield


@pytest.mark.parametrize(
    ("short", "code"), [(no_descriptor, errno.EMFILE), (no_memory, errno.ENOMEM)]
)
def test_without_room_for_a_segment_results_in_the_others_are_read(
    tmp_path: Path, short: Any, code: int
) -> None:
    """They were on their way when the larger tensor was asked for, and were lost."""
    with side_pair(tmp_path) as (side, theirs):
        side.send(Ask(Direction.RESULT, MIN_TENSOR_BYTES))
        first = grant(theirs, 1)
        side.receive()
        side.send(Ask(Direction.RESULT, LARGER))
        grant(theirs, 2, LARGER)
        with short():
            side.receive()
        assert os.strerror(code) in side.trouble and side.fileno() == -1
        first.slot(0, 5)[:] = b"right"
        assert side.read(Place(1, 0, 7), 5) == b"right"
        assert first.marks[0] == 7
        with pytest.raises(BlockFlowError, match="grant 2"):
            side.read(Place(2, 0, 1), 5)
