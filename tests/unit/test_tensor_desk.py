"""Results on their way to a client: what is copied where, and how often that is counted."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest

from blockflow.core.errors import BlockFlowError, make_error
from blockflow.dispatcher.entry import Answer, Entry
from blockflow.dispatcher.grants import GrantDesk
from blockflow.dispatcher.tensors import TensorDesk, waiting_bytes
from blockflow.tensormq.channel import InBuffer
from blockflow.tensormq.grants import MIN_TENSOR_BYTES, Grant, GrantBook
from blockflow.tensormq.shm import ShmConsumer
from blockflow.wire.client import Request
from blockflow.wire.grants import Direction
from blockflow.wire.tensor import Handle, TensorDesc

PADDED, OWN = (4, 96, 128), (4, 64, 128)
NUMBERS = np.arange(4 * 96 * 128, dtype=np.float32).reshape(PADDED)


class Memory:
    """A granted segment."""

    marks = (0,) * 16

    def __init__(self) -> None:
        self.bytes = bytearray(1 << 20)

    def slot(self, number: int, nbytes: int) -> memoryview:
        assert number == 0
        return memoryview(self.bytes)[:nbytes]


class Scene:
    def __init__(self) -> None:
        book = GrantBook()
        book.attach(b"slots")
        grant = book.ask(b"slots", Direction.RESULT, 1 << 20)
        assert isinstance(grant, Grant)
        self.memory = Memory()
        grants: Any = object.__new__(GrantDesk)
        grants._book, grants._segments = book, {grant.number: self.memory}
        nobody = cast(Any, None)
        self.desk = TensorDesk(nobody, nobody, grants)

    def cut(
        self, padded: bool, client: bytes, *, slot: bool = True, keep: bool = False, rows: int = 2
    ) -> Any:
        """Rows from 1 on of what a worker has sent."""
        handle = Handle(1, 0, 0, 0, 0) if slot else None
        if padded:
            desc = TensorDesc("float32", OWN, handle, (96 * 128, 128, 1))
        else:
            desc = TensorDesc("float32", PADDED, handle)
        buffer = SimpleNamespace(desc=desc, memory=memoryview(NUMBERS).cast("B"))
        return self.desk.cut(cast(InBuffer, buffer), 1, rows, client, keep)

    def copies(self) -> int:
        return int(self.desk.legs.left.copies)


def right(padded: bool) -> bytes:
    return (NUMBERS[1:3, :64] if padded else NUMBERS[1:3]).tobytes()


@pytest.mark.parametrize("padded", [False, True])
def test_into_a_clients_slot_it_is_one_copy(padded: bool) -> None:
    """Also of what lies in the worker's memory with gaps: it is not made contiguous first."""
    scene = Scene()
    assert len(right(padded)) >= MIN_TENSOR_BYTES
    result = scene.cut(padded, b"slots")
    assert result.place is not None and result.frame is None
    assert result.tensor.dims == (2, *(OWN if padded else PADDED)[1:])
    assert result.tensor.strides is None
    assert bytes(scene.memory.bytes[: len(right(padded))]) == right(padded)
    out = {"slot": 1, "slot_bytes": len(right(padded)), "message": 0, "message_bytes": 0}
    assert scene.desk.legs.to_dict()["out"] == {**out, "copies": 1}


def test_what_is_small_rides_in_the_message() -> None:
    grants = Scene().desk._grants
    small, large = (memoryview(bytes(n)) for n in (MIN_TENSOR_BYTES - 1, MIN_TENSOR_BYTES))
    assert grants.place(b"slots", small) is None
    assert grants.place(b"slots", large) is not None


@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("slot", [False, True])
@pytest.mark.parametrize("keep", [False, True])
def test_into_a_message(padded: bool, slot: bool, keep: bool) -> None:
    """A frame that came whole is passed on as it is."""
    scene = Scene()
    result = scene.cut(padded, b"slots" if keep else b"plain", slot=slot, keep=keep)
    assert result.place is None and bytes(result.frame) == right(padded)
    assert scene.copies() == (1 if padded or slot or keep else 0)


def test_what_has_gaps_is_made_whole_even_where_it_is_most_of_its_frame() -> None:
    whole = np.arange(8, dtype=np.float32).reshape(2, 4)
    desc = TensorDesc("float32", (2, 3), None, (4, 1))
    buffer = SimpleNamespace(desc=desc, memory=memoryview(whole).cast("B"))
    scene = Scene()
    result = scene.desk.cut(cast(InBuffer, buffer), 0, 2, b"plain")
    assert result.frame == whole[:, :3].tobytes()
    out = {"slot": 0, "slot_bytes": 0, "message": 1, "message_bytes": 24}
    assert scene.desk.legs.to_dict()["out"] == {**out, "copies": 1}


@pytest.mark.parametrize(("rows", "copies"), [(1, 1), (2, 0), (3, 0)])
def test_a_little_of_a_batch_does_not_keep_its_frame(rows: int, copies: int) -> None:
    scene = Scene()
    result = scene.cut(False, b"plain", slot=False, rows=rows)
    assert bytes(result.frame) == NUMBERS[1 : 1 + rows].tobytes()
    assert scene.copies() == copies
    assert isinstance(result.frame, bytes) == (copies > 0)


@pytest.mark.parametrize(
    ("code", "told"),
    [
        ("NO_SPACE", "NO_SPACE"),
        ("WORKER_LOST", "WORKER_LOST"),
        ("MALFORMED_MESSAGE", "OUTPUT_MISMATCH"),
    ],
)
def test_a_result_that_cannot_be_opened_is_told_without_arenas_and_paths(
    code: str, told: str
) -> None:
    class Refuses(ShmConsumer):
        def open(self, desc: TensorDesc, frame: Any | None) -> InBuffer:
            raise make_error(code, "cannot map the arena", where="/run/arena-7")

    nobody = cast(Any, None)
    desk = TensorDesk(nobody, Refuses(Path()), nobody)
    with pytest.raises(BlockFlowError) as caught:
        desk.open(cast(Any, SimpleNamespace(tensor=None)), None)
    assert caught.value.code == told
    assert "arena" not in str(caught.value)


def test_an_input_is_where_its_header_says_and_nowhere_else() -> None:
    scene = Scene()
    grants, frame = scene.desk._grants, memoryview(bytes(16))
    grant = grants._book.ask(b"slots", Direction.UPLOAD, 1 << 20)
    assert isinstance(grant, Grant)
    grants._segments[grant.number] = cast(Any, scene.memory)
    scene.memory.bytes[:16] = b"x" * 16
    desc = TensorDesc("float32", (1, 4))
    plain, slot = (Request(bytes(16), ("t",), 1, desc, up) for up in (None, (grant.number, 0)))
    assert scene.desk.elements(b"slots", plain, frame) == bytes(16)
    assert scene.desk.elements(b"slots", slot, None) == b"x" * 16
    with pytest.raises(BlockFlowError, match="an upload and a frame"):
        scene.desk.elements(b"slots", slot, frame)
    with pytest.raises(BlockFlowError):
        scene.desk.elements(b"slots", plain, None)


def test_frames_that_wait_for_other_tasks_count_once_each() -> None:
    def entry(*outcomes: Any, kept: tuple[Any, ...] = ()) -> Entry:
        ends = {str(n): SimpleNamespace(outcome=o) for n, o in enumerate(kept)}
        return cast(Entry, SimpleNamespace(outcomes=dict(enumerate(outcomes)), kept=ends))

    one, two, placed = (Answer(SimpleNamespace(frame=f), (), 0) for f in (b"1", b"22", None))
    error = make_error("BLOCK_FAILED", "broken")
    entries = [entry(one, one, error), entry(placed, kept=(two, error)), entry()]
    assert waiting_bytes(entries) == 3
