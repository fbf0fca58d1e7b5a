"""Inputs while their requests live: where they are kept, how long, and in how many copies."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest

from blockflow.bench.faultsim.arena import Arena, SlotConsumer, SlotProducer
from blockflow.core.errors import BlockFlowError, RequestError
from blockflow.core.routing import StageRoute
from blockflow.dispatcher import tensors
from blockflow.dispatcher.tensors import RetainedInput, TensorDesk
from blockflow.dispatcher.validate import check_values
from blockflow.tensormq.channel import OutBuffer, Payload
from blockflow.tensormq.leases import NEVER_NS, LeaseError
from blockflow.wire.client import Request
from blockflow.wire.data import Data
from blockflow.wire.tensor import TensorDesc

OWN, DUE_NS = 7, 500
DESC = TensorDesc("float32", (1, 4))
X = np.arange(4, dtype=np.float32)
HANDLES, WHOLE = (StageRoute(1, "a", "a#0", 11, "to 11", mode) for mode in ("tensormq", "zeromq"))


class Slots(SlotProducer):
    """Notes until when readers were given a slot; ``full``: it can have no more of them."""

    full = False

    def __init__(self, arena: Arena) -> None:
        super().__init__(arena)
        self.until: list[int] = []

    def publish(
        self, buffer: OutBuffer, consumers: Sequence[int], until_ns: int = NEVER_NS
    ) -> list[Payload]:
        if self.full:
            raise LeaseError("no lane is left")
        self.until.append(until_ns)
        return super().publish(buffer, consumers, until_ns)


class Scene:
    def __init__(self) -> None:
        self.arena = Arena(OWN, 4)
        self.slots = Slots(self.arena)
        self.consumer = SlotConsumer({OWN: self.arena})
        self.desk = TensorDesk(self.slots, self.consumer, cast(Any, None))

    def retain(
        self, root: StageRoute | None, source: Any = X, upload: tuple[int, int] | None = None
    ) -> RetainedInput:
        request = Request(bytes(15) + b"\1", ("t",), 1, DESC, upload)
        kept = self.desk.retain(request, memoryview(source).cast("B"), root, True, DUE_NS)
        assert kept is not None
        return kept

    def again(self, kept: RetainedInput, root: StageRoute) -> None:
        entry = SimpleNamespace(
            retained=kept, plan=SimpleNamespace(root=root), deadline_ns=DUE_NS + 1
        )
        self.desk.prepare_again(cast(Any, entry))

    def read(self, kept: RetainedInput) -> list[float]:
        """What the first stage finds; it lets go of it."""
        payload = kept.payload
        buffer = self.consumer.open(payload.desc, payload.frame)
        found = np.frombuffer(bytes(buffer.memory), np.float32).tolist()
        buffer.release()
        return cast(list[float], found)

    def left(self) -> tuple[int, int]:
        return self.slots.outstanding(), self.desk.frames.nbytes


def test_a_slot_is_kept_until_the_request_ends_and_its_readers_have_let_go() -> None:
    s = Scene()
    kept = s.retain(HANDLES)
    assert s.read(kept) == X.tolist()
    assert s.left() == (1, 0)  # there may be another attempt
    s.again(kept, HANDLES)
    s.desk.release(kept)
    s.desk.release(kept)
    assert s.left() == (1, 0)  # it is being read
    assert s.read(kept) == X.tolist()
    assert s.left() == (0, 0)
    assert s.slots.until == [DUE_NS, DUE_NS + 1]


def test_what_waits_for_its_first_attempt_is_nobodys_to_read() -> None:
    s = Scene()
    kept = s.retain(None)
    assert (kept.payload.desc.handle, s.left()) == (None, (1, 0))
    s.desk.release(kept)
    assert s.left() == (0, 0)
    kept = s.retain(None)
    for _ in range(2):
        s.again(kept, HANDLES)
        assert s.read(kept) == X.tolist()
    assert s.left() == (1, 0)
    s.desk.release(kept)
    assert s.left() == (0, 0)


@pytest.mark.parametrize("why", ["takes no handles", "no more readers"])
def test_where_no_handle_goes_it_travels_whole(why: str) -> None:
    s = Scene()
    kept = s.retain(HANDLES)
    s.slots.full = why == "no more readers"
    for _ in range(2):
        s.again(kept, HANDLES if s.slots.full else WHOLE)
        assert (kept.payload.desc.handle, s.read(kept)) == (None, X.tolist())
        assert s.left() == (1, DESC.nbytes)
    s.desk.unsent(kept.payload)  # there is nothing to revoke
    s.desk.release(kept)
    assert s.desk.frames.nbytes == 0


@pytest.mark.parametrize("upload", [None, (1, 0)])
def test_a_frame_is_kept_as_it_is_and_an_upload_is_copied(upload: tuple[int, int] | None) -> None:
    s = Scene()
    source = X.copy()
    kept = s.retain(WHOLE, source, upload)
    source[0] = 9.0  # of a client's own slot; a frame is ours
    assert s.read(kept) == [0.0 if upload else 9.0, *X[1:].tolist()]
    assert s.left() == (0, DESC.nbytes)
    into = s.desk.legs.to_dict()["in"]
    assert (into["slot"], into["message"], into["copies"]) == ((1, 0, 1) if upload else (0, 1, 0))
    payload = kept.payload
    s.again(kept, HANDLES)
    assert kept.payload is payload
    del payload
    for _ in range(2):
        s.desk.release(kept)
        assert s.left() == (0, 0)


@pytest.mark.parametrize("root", [HANDLES, WHOLE])
def test_what_was_checked_is_what_is_kept(
    monkeypatch: pytest.MonkeyPatch, root: StageRoute
) -> None:
    """A client may write into its own slot at any moment."""
    s, source = Scene(), X.copy()

    def check(*args: Any) -> None:
        check_values(*args)
        source[0] = np.nan

    monkeypatch.setattr(tensors, "check_values", check)
    assert s.read(s.retain(root, source, (1, 0))) == X.tolist()


def test_what_is_refused_keeps_nothing() -> None:
    s = Scene()
    for root in (HANDLES, WHOLE, None):
        with pytest.raises(RequestError, match="NaN"):
            s.retain(root, np.array([1.0, np.nan, 1.0, 1.0], np.float32))
        assert s.left() == (0, 0)


def test_of_arenas_and_their_workers_clients_hear_nothing() -> None:
    s = Scene()
    kept = s.retain(HANDLES)
    result = Data(OWN, 0, kept.payload.desc, ())
    s.desk.open(result, None).release()
    with pytest.raises(BlockFlowError, match="cannot be read") as caught:
        s.desk.open(result, None)
    assert caught.value.code == "OUTPUT_MISMATCH"
    s.again(kept, HANDLES)
    s.desk.peer_gone(11)  # who was reading it
    s.desk.release(kept)
    assert s.left() == (0, 0)
    s.desk.peer_gone(OWN)
    with pytest.raises(BlockFlowError, match="the worker died with its result") as caught:
        s.desk.open(result, None)
    assert caught.value.code == "WORKER_LOST"
    too_large = Request(bytes(15) + b"\1", ("t",), 1, TensorDesc("float32", (1, 4096)))
    with pytest.raises(BlockFlowError, match="no memory for an input of 16384 bytes") as caught:
        s.desk.retain(too_large, memoryview(bytes(16384)), HANDLES, False, DUE_NS)
    assert caught.value.code == "TOO_LARGE"
    assert "send less at once" in caught.value.hint
