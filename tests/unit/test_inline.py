"""Whole tensors as frames: what only this way of passing tensors has."""

from __future__ import annotations

import weakref

import numpy as np
import pytest

from blockflow.core.errors import SystemError_
from blockflow.tensormq.channel import span_bytes
from blockflow.tensormq.inline import InlineProducer, open_frame
from blockflow.tensormq.leases import LeaseError
from blockflow.wire.tensor import TensorDesc


def test_discarded_memory_is_free_though_somebody_keeps_the_buffer() -> None:
    producer = InlineProducer(max_buffers=1)
    buffer = producer.reserve("uint8", (64,))
    assert buffer is not None and producer.usage().used == 64
    producer.discard(buffer)
    assert producer.usage().used == 0 and producer.reserve("uint8", (64,)) is not None


def test_a_buffer_that_is_held_twice_is_published_anew_until_both_have_let_go() -> None:
    producer = InlineProducer()
    buffer = producer.reserve("uint8", (64,))
    assert buffer is not None
    for _ in range(2):
        producer.hold(buffer)
    producer.publish(buffer, [7])
    producer.unhold(buffer)
    producer.publish(buffer, [7])
    producer.unhold(buffer)
    for end in (lambda: producer.publish(buffer, [7]), lambda: producer.unhold(buffer)):
        with pytest.raises(LeaseError):
            end()


def test_what_was_published_cannot_be_written_by_way_of_its_frame() -> None:
    producer = InlineProducer()
    buffer = producer.reserve("uint8", (64,))
    assert buffer is not None
    (payload,) = producer.publish(buffer, [7])
    assert payload.frame is not None and payload.frame.readonly


def test_a_released_frame_is_let_go_though_somebody_keeps_the_buffer() -> None:
    frame = np.zeros(4, np.uint8)
    kept = weakref.ref(frame)
    buffer = open_frame(TensorDesc("uint8", (4,)), frame)
    del frame
    assert kept() is not None
    buffer.release()
    assert kept() is None


def test_a_cut_of_no_rows_spans_nothing() -> None:
    assert span_bytes(TensorDesc("int32", (0, 2), None, (4, 1))) == 0
    assert span_bytes(TensorDesc("int32", (2, 2), None, (4, 1))) == 4 * 6


def test_without_memory_for_a_frame_it_is_the_machine_that_is_short_of_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def full(*_: object) -> None:
        raise MemoryError

    producer = InlineProducer()
    with monkeypatch.context() as patch:
        patch.setattr(np, "empty", full)
        with pytest.raises(SystemError_, match="no memory for a tensor of 64 bytes") as caught:
            producer.reserve("uint8", (64,))
    assert caught.value.code == "NO_SPACE" and caught.value.hint
    assert producer.outstanding() == 0 and producer.reserve("uint8", (64,)) is not None
