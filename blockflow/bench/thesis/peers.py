"""The other end of a round trip: by ZeroMQ's REQ and REP (section 4.1.2), with frames or handles.

Both sides are synchronous, one message at a time. A message is a kind and what it carries; the
answer carries the same back.
"""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import msgpack
import numpy as np
import zmq

from blockflow.bench.closing import Closing
from blockflow.bench.other_process import OtherProcess, Say
from blockflow.core.errors import make_error
from blockflow.tensormq.arena import Arena
from blockflow.tensormq.janitor import RunDir
from blockflow.tensormq.shm import ShmConsumer, ShmProducer
from blockflow.tensormq.views import as_torch
from blockflow.wire.tensor import TensorDesc, desc_from_wire

STRING, JSON, TENSOR, HANDLE, COPIED = b"s", b"j", b"t", b"h", b"c"

TEXT = "a message of a pipeline"
DOCUMENT = {"task": "measured", "epoch": 1, "path": ["block1", "block2"], "sent_ms": 0.5}
"""What goes there and comes back."""

_OURS, _THEIRS = 1, 2
"""Incarnations of the two arenas."""

_SLOTS = 4
_WAIT_MS = 30_000


class Ends:
    """One process's arena, and what it sees of the other's.

    Args:
        run_dir: where both arenas lie.
        mine: incarnation of this process's.
        other: of the other process's.
    """

    def __init__(self, run_dir: Path, mine: int, other: int, nbytes: int) -> None:
        capacity = _SLOTS * max(nbytes, 1)
        arena = Arena.create(run_dir, mine, capacity, _SLOTS, warm_bytes=capacity)
        self._producer = ShmProducer(arena)
        self._consumer = ShmConsumer(run_dir)
        self._other = other

    def pack(self, x: np.ndarray[Any, Any], *, copied: bool) -> bytes:
        """A tensor's handle; its elements are copied into the slot first, or lie there already, as
        a block's output does."""
        # The other side has released what it got before: it answered.
        buffer = self._producer.reserve(str(x.dtype), x.shape, (self._other,))
        if buffer is None:
            raise make_error("NO_SPACE", "no slot is free", where="round trip by handle")
        if copied:
            np.frombuffer(buffer.memory, np.uint8)[:] = np.frombuffer(x.data.cast("B"), np.uint8)
        [payload] = self._producer.publish(buffer, (self._other,))
        return bytes(msgpack.packb(payload.desc.to_wire()))

    def read(self, raw: bytes) -> TensorDesc:
        """Map the tensor that a handle names, and let go of it."""
        desc = desc_from_wire(msgpack.unpackb(raw), "round trip")
        buffer = self._consumer.open(desc, None)
        buffer.tensor()
        buffer.release()
        return desc

    def close(self) -> None:
        self._consumer.close()
        self._producer.close()


class Peer(Closing):
    """This side: a REQ socket, an arena, and the other process.

    Args:
        x: the tensor that goes there and comes back.
    """

    def __init__(self, x: np.ndarray[Any, Any]) -> None:
        self._x = x
        self._frame = x.data.cast("B")
        with ExitStack() as stack:
            run_dir = stack.enter_context(RunDir.create()).path
            self._ends = Ends(run_dir, _OURS, _THEIRS, x.nbytes)
            stack.callback(self._ends.close)
            endpoint = f"ipc://{run_dir}/rtt.sock"  # a short path, whatever TMPDIR is
            order = {"endpoint": endpoint, "run_dir": str(run_dir), "nbytes": x.nbytes}
            order |= {"dtype": str(x.dtype), "dims": list(x.shape)}
            stack.enter_context(OtherProcess("blockflow.bench.thesis.peers", order))
            context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
            stack.callback(lambda: context.destroy(linger=0))
            self._socket = context.socket(zmq.REQ)
            self._socket.rcvtimeo = self._socket.sndtimeo = _WAIT_MS
            self._socket.connect(endpoint)
            self._stack = stack.pop_all()

    def string(self) -> None:
        self._ask(STRING, TEXT.encode())[0].bytes.decode()

    def json(self) -> None:
        json.loads(self._ask(JSON, json.dumps(DOCUMENT).encode())[0].bytes)

    def tensor(self) -> None:
        head = msgpack.packb(TensorDesc(str(self._x.dtype), self._x.shape).to_wire())
        raw, frame = self._ask(TENSOR, head, self._frame)
        _read(raw.bytes, frame)

    def handle(self, kind: bytes) -> None:
        packed = self._ends.pack(self._x, copied=kind == COPIED)
        self._ends.read(self._ask(kind, packed)[0].bytes)

    def _ask(self, kind: bytes, *frames: bytes | memoryview) -> Sequence[zmq.Frame]:
        try:
            self._socket.send_multipart([kind, *frames], copy=False)
            return self._socket.recv_multipart(copy=False)
        except zmq.Again:
            raise make_error("TIMEOUT", "the other process does not answer") from None

    def close(self) -> None:
        """End the other process."""
        self._stack.close()


def _read(head: bytes, frame: zmq.Frame) -> TensorDesc:
    """A received frame as a tensor, not copied."""
    desc = desc_from_wire(msgpack.unpackb(head), "round trip")
    as_torch(frame.buffer, desc.dtype, desc.dims)
    return desc


def obey(orders: Iterator[dict[str, Any]], say: Say) -> None:
    """In the other process: answer until the orders end."""
    order: Mapping[str, Any] = next(orders)
    ends = Ends(Path(order["run_dir"]), _THEIRS, _OURS, order["nbytes"])
    y = np.ones(order["dims"], order["dtype"])
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    socket = context.socket(zmq.REP)
    socket.bind(order["endpoint"])

    def wait_for_the_end() -> None:
        for _ in orders:
            pass
        os._exit(0)  # this side waits in recv; there is nothing to be lost or to be removed

    say({})
    threading.Thread(target=wait_for_the_end, daemon=True).start()
    while True:
        kind, *frames = socket.recv_multipart(copy=False)
        raw = frames[0].bytes
        match kind.bytes:
            case b"s":
                socket.send(raw.decode().encode())
            case b"j":
                socket.send(json.dumps(json.loads(raw)).encode())
            case b"t":
                head = msgpack.packb(_read(raw, frames[1]).to_wire())
                socket.send_multipart([head, y.data.cast("B")], copy=False)
            case other:
                ends.read(raw)
                socket.send(ends.pack(y, copied=other == COPIED))
