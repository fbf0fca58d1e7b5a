"""The contract of every way that a tensor travels: what was sent arrives, whole or in parts."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from blockflow.core.model import DTYPE_BYTES
from blockflow.tensormq.channel import span_bytes
from blockflow.tensormq.views import as_numpy, as_torch
from blockflow.wire.tensor import TensorDesc
from tests import channel_rig
from tests.channel_rig import MIB, Way, carry, fill, reserved, send

way = channel_rig.way


@pytest.mark.parametrize("dtype", sorted(DTYPE_BYTES))
def test_every_dtype_arrives_bit_by_bit(way: Way, dtype: str) -> None:
    producer, consumer = way.producer(), way.consumer()
    buffer = reserved(producer, (3, 5), dtype)
    assert (buffer.dtype, buffer.dims) == (dtype, (3, 5))
    assert buffer.nbytes == len(buffer.memory) == 15 * DTYPE_BYTES[dtype]
    sent = fill(buffer, 1)
    got = consumer.open(*carry(producer.publish(buffer, [21])[0]))
    assert bytes(got.memory) == sent
    tensor = as_torch(got.memory, got.desc.dtype, got.desc.dims)
    assert (tensor.dtype, tensor.shape) == (getattr(torch, dtype), (3, 5))
    assert as_numpy(got.memory, got.desc.dtype, got.desc.dims).tobytes() == sent
    got.release()


@pytest.mark.parametrize("rank", range(1, 9))
def test_every_rank(way: Way, rank: int) -> None:
    dims = (*range(2, rank + 1), 1)
    producer, consumer = way.producer(), way.consumer()
    buffer = reserved(producer, dims, "int16")
    sent = fill(buffer, rank)
    got = consumer.open(*carry(producer.publish(buffer, [21])[0]))
    assert got.desc.dims == dims
    assert bytes(got.memory) == sent


@pytest.mark.parametrize("nbytes", [0, 1, 63, 64, 65, 4095, 4096, 4097, 300_001, 8 * MIB])
def test_every_size(way: Way, nbytes: int) -> None:
    producer, consumer = way.producer(), way.consumer()
    for seed in range(2):
        buffer = reserved(producer, (nbytes,))
        sent = fill(buffer, seed)
        got = consumer.open(*carry(producer.publish(buffer, [21])[0]))
        del buffer
        assert bytes(got.memory) == sent
        got.release()
    producer.sweep()
    assert producer.outstanding() == 0


def test_memory_is_aligned_for_vector_kernels(way: Way) -> None:
    producer = way.producer()
    for nbytes in (1, 100, 5000, 70, 4096):
        buffer = reserved(producer, (nbytes,))
        assert np.frombuffer(buffer.memory, np.uint8).ctypes.data % 64 == 0


def test_received_memory_is_read_only(way: Way) -> None:
    producer, consumer = way.producer(), way.consumer()
    got = consumer.open(*send(producer, b"abcd", [21])[0])
    assert got.memory.readonly
    with pytest.raises(TypeError):
        got.memory[0] = 0


def test_rows_of_a_batch_part_without_a_copy(way: Way) -> None:
    producer, consumer = way.producer(), way.consumer()
    before = reserved(producer, (64,), "uint8")  # an arena's first byte is none of the batch
    buffer = reserved(producer, (5, 2), "int32")
    view = as_numpy(buffer.memory, "int32", (5, 2))
    view[:] = np.arange(10).reshape(5, 2)
    first, second = producer.publish(buffer, [21, 22])
    parts = [first.rows(0, 2), second.rows(2, 5)]
    got = [consumer.open(*carry(p)) for p in parts]
    assert [g.desc.dims for g in got] == [(2, 2), (3, 2)]
    back = np.concatenate([as_numpy(g.memory, "int32", g.desc.dims) for g in got])
    assert (back == view).all()
    for g in got:
        g.release()
    for start, stop in [(0, 0), (-1, 2), (2, 6), (3, 2)]:
        with pytest.raises(ValueError):
            first.rows(start, stop)
    producer.discard(before)
    del before, buffer, first, second, parts, view
    producer.sweep()
    assert producer.outstanding() == 0


@pytest.mark.parametrize("shape", [(3, 2), (2, 4), (1, 1), (3, 1), (4,), (3, 5), (0, 2)])
def test_rows_of_a_padded_batch_are_cut_without_a_copy(way: Way, shape: tuple[int, ...]) -> None:
    """A part of each row, contiguous or not, is read as what it is."""
    producer, consumer = way.producer(), way.consumer()
    buffer = reserved(producer, (5, 3, 4), "int32")
    view = as_numpy(buffer.memory, "int32", (5, 3, 4))
    view[:] = np.arange(60).reshape(5, 3, 4)
    whole = producer.publish(buffer, [21])[0]
    try:
        part = whole.rows(1, 3, shape)
    except ValueError:
        assert shape in ((4,), (3, 5), (0, 2)), "it is a part of none"
        producer.revoke(whole)
        return
    got = consumer.open(*carry(part))
    assert got.desc.dims == (2, *shape)
    back = as_numpy(got.memory, "int32", got.desc.dims, got.desc.strides)
    assert (back == view[1:3, : shape[0], : shape[1]]).all()
    torch_back = got.tensor()
    assert tuple(torch_back.shape) == (2, *shape) and torch_back.tolist() == back.tolist()
    got.release()


def test_one_row_cut_at_its_first_dim_is_contiguous(way: Way) -> None:
    producer = way.producer()
    whole = producer.publish(reserved(producer, (5, 3, 4), "int32"), [21])[0]
    assert whole.rows(2, 3, (2, 4)).desc.strides is None
    assert whole.rows(2, 4, (3, 4)).desc.strides is None
    assert whole.rows(2, 4, (2, 4)).desc.strides == (12, 4, 1)
    assert whole.rows(2, 3, (2, 3)).desc.strides == (12, 4, 1)


def test_strides_describe_what_is_there(way: Way) -> None:
    producer, consumer = way.producer(), way.consumer()
    desc, frame = send(producer, bytes(range(12)), [21])[0]
    columns = replace(desc, dims=(4, 3), strides=(1, 4))
    assert span_bytes(columns) == 12
    got = consumer.open(columns, frame)
    expected = np.arange(12, dtype=np.uint8).reshape(3, 4).T
    assert (as_numpy(got.memory, "uint8", (4, 3), columns.strides) == expected).all()
    assert span_bytes(TensorDesc("int32", (0, 3), strides=(3, 1))) == 0
