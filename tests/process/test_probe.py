"""The readiness probe over real sockets, against workers that answer as they please."""

from __future__ import annotations

import errno
import os
import queue
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import zmq
from refusals_rig import no_descriptor

from blockflow.control.events import Prove, Proved
from blockflow.control.probe import Prober
from blockflow.core.errors import BlockError, SystemError_
from blockflow.core.model import BlockInfo, Contract, TensorSpec
from blockflow.tensormq.curve import LINK_FILE, make_link_key
from blockflow.tensormq.janitor import RunDir, run_root
from blockflow.tensormq.push import PushCache
from blockflow.tensormq.sockets import bind_pull, new_context
from blockflow.wire.data import (
    PROBE_EPOCH,
    Data,
    Failure,
    Item,
    decode_data_plane,
    encode_data,
    encode_failure,
)
from blockflow.wire.tensor import Handle, TensorDesc

WAIT_S = 30.0
PROBER, WORKER = 2, 7
SPEC = TensorSpec("float32", ("rows", "long", 4), {"long": (3, 9)})
BLOCK = BlockInfo("a", "1", "digest", "echo", Contract(SPEC, SPEC), 0, 0)


class Rig:
    """A prober, and the sockets of a worker in the hands of the test."""

    def __init__(self, run_dir: RunDir) -> None:
        self.context = new_context()
        self.pull, self.endpoint = bind_pull(self.context, "ipc", run_dir.path, WORKER)
        self.push = PushCache(self.context, zmq.Poller())
        self.outcomes: queue.Queue[Proved] = queue.Queue()
        self.prober = Prober(run_dir.path, PROBER, self.outcomes.put)
        self.prober.start()
        (end,) = self.prober.routes("tensormq").table["stages"]
        self.back = end["endpoint"]

    def prove(self, *stages: int) -> list[Item]:
        """Order a probe; the items that came to the worker."""
        blocks = tuple((stage, BLOCK) for stage in stages)
        self.prober.prove(Prove(WORKER, self.endpoint, "tensormq", blocks))
        items = []
        for _ in stages:
            assert self.pull.poll(int(WAIT_S * 1000))
            header, frame = self.pull.recv_multipart()
            message = decode_data_plane(header)
            assert isinstance(message, Data)
            assert message.tensor == TensorDesc("float32", (1, 3, 4))
            assert frame == bytes(48)
            (item,) = message.items
            assert item.epoch == PROBE_EPOCH and item.path.nodes[0].stage in stages
            items.append(item)
        return items

    def say(self, *frames: Any) -> None:
        assert self.push.send(self.back, frames)
        end = time.monotonic() + WAIT_S
        while self.push.pending():
            assert time.monotonic() < end
            zmq.select([], self.push.sockets_waiting(), [], 0.01)
            self.push.flush()

    def answer(self, item: Item, dims: tuple[int, ...] = (1, 3, 4), dtype: str = "float32") -> None:
        header = encode_data(Data(WORKER, 1, TensorDesc(dtype, dims), (item,)))
        self.say(header, np.zeros(dims, dtype).tobytes())

    def outcome(self) -> Proved:
        return self.outcomes.get(timeout=WAIT_S)

    def close(self) -> None:
        self.prober.close()
        self.prober.close()
        self.push.close()
        self.pull.close(0)
        self.context.destroy(linger=0)


@pytest.fixture
def rig() -> Iterator[Rig]:
    with RunDir.create(run_root()) as run:
        made = Rig(run)
        yield made
        made.close()
        assert not list(run.path.glob(f"*{PROBER}*"))


def test_it_is_proved_when_every_block_has_answered(rig: Rig) -> None:
    first, second = rig.prove(11, 12)
    rig.answer(first)
    assert rig.outcomes.empty()
    rig.answer(second)
    outcome = rig.outcome()
    assert (outcome.incarnation, outcome.error) == (WORKER, None)
    assert outcome.took_ms > 0


@pytest.mark.parametrize(
    ("dims", "dtype"), [((1, 3, 5), "float32"), ((2, 3, 4), "float32"), ((1, 3, 4), "float64")]
)
def test_a_result_that_breaks_the_contract(rig: Rig, dims: tuple[int, ...], dtype: str) -> None:
    (item,) = rig.prove(11)
    if dims[0] != 1:  # rows that the item does not have make no message at all
        item = Item(item.request_id, 1, 0, item.path, 0, dims[0], 1000)
    rig.answer(item, dims, dtype)
    error = rig.outcome().error
    assert error is not None
    assert (error.code, error.where) == ("OUTPUT_MISMATCH", "a")
    assert "float32[1, 3, 4]" in error.message


def test_a_failure_is_handed_on(rig: Rig) -> None:
    (item,) = rig.prove(11)
    failure = Failure(WORKER, 1, BlockError("BLOCK_FAILED", "no", where="a"), (item,))
    rig.say(encode_failure(failure))
    error = rig.outcome().error
    assert error is not None and (error.code, error.message) == ("BLOCK_FAILED", "no")


@pytest.mark.parametrize(
    "why",
    [
        "block 'a' failed: OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB.",
        "block 'a' failed: MemoryError: ",
        "RuntimeError: DefaultCPUAllocator: can't allocate memory",
    ],
)
def test_a_probe_that_runs_out_of_memory_is_tried_again(rig: Rig, why: str) -> None:
    """As a start that does: another one may find some."""
    (item,) = rig.prove(11)
    rig.say(encode_failure(Failure(WORKER, 1, BlockError("BLOCK_FAILED", why, where="a"), (item,))))
    error = rig.outcome().error
    assert error is not None
    assert (error.code, error.message, error.where) == ("NO_SPACE", why, "a")


def test_so_is_one_for_whose_result_no_descriptor_is_left(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    (item,) = rig.prove(11)
    monkeypatch.setattr(rig.prober._consumer, "open", no_descriptor)
    rig.answer(item)
    error = rig.outcome().error
    assert error is not None and error.code == "NO_SPACE"
    assert os.strerror(errno.EMFILE) in error.message


def test_a_result_that_cannot_be_read(rig: Rig) -> None:
    (item,) = rig.prove(11)
    desc = TensorDesc("float32", (1, 3, 4), Handle(WORKER, 0, 0, 1, 0))
    rig.say(encode_data(Data(WORKER, 1, desc, (item,))))
    error = rig.outcome().error
    assert error is not None and error.code == "WORKER_LOST"


def test_nonsense_and_strangers_change_nothing(rig: Rig) -> None:
    (item,) = rig.prove(11)
    rig.say(b"nonsense")
    rig.say(encode_data(Data(99, 1, TensorDesc("float32", (1, 4)), (item,))), bytes(16))
    rig.answer(item)
    assert rig.outcome().error is None
    rig.answer(item)  # once more, when nobody waits for it
    (again,) = rig.prove(11)
    assert again.request_id != item.request_id
    rig.answer(again)
    assert rig.outcome().error is None
    assert rig.outcomes.empty()


def test_nonsense_without_end_is_told_more_and_more_seldom(
    rig: Rig, caplog: pytest.LogCaptureFixture
) -> None:
    (item,) = rig.prove(11)
    for _ in range(100):
        rig.say(b"nonsense")
    rig.answer(item)
    rig.outcome()
    assert caplog.text.count("cannot be read") == 7  # at 1, 2, 4, ... 64


def test_of_the_dead_nothing_is_reported(rig: Rig) -> None:
    (item,) = rig.prove(11)
    rig.prober.forget(WORKER)
    (other,) = rig.prove(11)  # which is sent when the other order has been obeyed
    rig.answer(item)  # an answer to nothing
    rig.answer(other)
    rig.outcome()
    assert rig.outcomes.empty()


@pytest.mark.parametrize("gone", ["then", "before"])
def test_who_has_no_key_because_it_is_gone_is_told_so(gone: str, tmp_path: Path) -> None:
    """Nobody would ever answer, and after a minute the worker would not have been ready in time.
    Or only a Manager would be answered that has none itself, since it was gone before he came."""
    make_link_key(tmp_path)
    outcomes: queue.Queue[Proved] = queue.Queue()
    if gone == "before":
        (tmp_path / LINK_FILE).unlink()
    prober = Prober(tmp_path, PROBER, outcomes.put)
    prober.start()
    (tmp_path / LINK_FILE).unlink(missing_ok=True)
    try:
        for incarnation, endpoint in ((8, f"ipc://{tmp_path}/8"), (9, "tcp://127.0.0.1:9")):
            prober.prove(Prove(incarnation, endpoint, "tensormq", ((11, BLOCK),)))
        outcome = outcomes.get(timeout=WAIT_S)
    finally:
        prober.close()
    assert outcomes.empty() and outcome.incarnation == 9, "a socket file needs no key"
    assert outcome.error is not None and outcome.error.code == "UNAUTHORIZED"
    assert outcome.error.where == str(tmp_path / LINK_FILE)


def test_a_key_that_cannot_be_read_ends_the_start_and_not_the_thread(tmp_path: Path) -> None:
    """Nothing would ever be proved, and nobody told why."""
    (tmp_path / LINK_FILE).touch(mode=0o666)
    prober = Prober(tmp_path, PROBER, lambda _: None)
    with pytest.raises(SystemError_):
        prober.start()
    prober.close()
