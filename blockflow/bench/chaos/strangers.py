"""Strangers: clients that vanish, do not read, make no sense, or come in floods."""

from __future__ import annotations

import random
import secrets
import struct
import threading
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from socket import SO_LINGER, SO_RCVBUF, SOL_SOCKET
from socket import socket as Socket

import numpy as np
import zmq

from blockflow.bench.fuzz import zmtp
from blockflow.bench.fuzz.decoders import request_frames
from blockflow.bench.fuzz.mutate import Mutator
from blockflow.wire.client import Request, encode_to_dispatcher
from blockflow.wire.tensor import TensorDesc

_MALFORMED = 2000
_UNREAD = 300
_ARRIVED_MS = 10_000
_FLOOD, _FLOODS, _EACH = 100, 4, 50
_PING = b"\x04PING\x00\x64"
_PATIENCE_S = 2.0


class Strangers:
    """Does to the Dispatcher at ``address`` what no client of ours does.

    Each method gives the tasks that it may have interrupted, and what it has done, in words.
    """

    def __init__(self, address: str, tasks: Sequence[str], seed: int) -> None:
        self._address = address
        self._tasks = tasks
        self._seed = seed
        self._sockets: list[Socket] = []
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()

    def close(self) -> None:
        """End what stays."""
        for sock in self._sockets:
            sock.close()
        self._context.term()

    def client_vanishes(self, draw: float) -> tuple[Sequence[str], str]:
        """Requests in flight whose connection is closed, without a word to anybody."""
        socket = self._context.socket(zmq.DEALER)
        try:
            socket.connect(self._address)
            sent = 0
            for message in self._requests(draw, 32, rows=1):
                with suppress(zmq.Again):
                    socket.send_multipart(message, zmq.NOBLOCK)
                    sent += 1
            socket.poll(_ARRIVED_MS)  # an answer to the first: they are there
        finally:
            socket.close(0)
        return (), f"{sent} requests in flight"

    def malformed(self, draw: float) -> tuple[Sequence[str], str]:
        mutator = Mutator(request_frames(self._task(draw)), self._seed)
        frames = (zmtp.frame(f, more=False) for f in mutator.frames(_MALFORMED))
        return (), f"{self._send_and_keep(frames)} frames"

    def slow_reader(self, draw: float) -> tuple[Sequence[str], str]:
        """Good requests whose answers are never read."""
        asked = self._requests(draw, _UNREAD, rows=64)
        messages = (zmtp.frame(h, more=True) + zmtp.frame(b, more=False) for h, b in asked)
        return (), f"{self._send_and_keep(messages)} requests"

    def _requests(self, draw: float, count: int, *, rows: int) -> Iterator[tuple[bytes, bytes]]:
        """So many requests of a task."""
        x = np.zeros((rows, 1, 8, 8), np.float32)
        tensor, task = TensorDesc("float32", x.shape), self._task(draw)
        for _ in range(count):
            request = Request(secrets.token_bytes(16), (task,), 2000, tensor)
            yield encode_to_dispatcher(request), x.tobytes()

    def _send_and_keep(self, messages: Iterable[bytes]) -> int:
        """Send them on a connection that is never read and stays, by hand: ZeroMQ, told not to read
        on, might end this process (tensormq/sockets.py). Returns how many went out."""
        sent = 0
        with suppress(OSError):  # the Dispatcher is gone, or does not read
            sock = zmtp.connect(*zmtp.place(self._address), _PATIENCE_S)
            self._sockets.append(sock)
            sock.setsockopt(SOL_SOCKET, SO_RCVBUF, 4096)
            for message in messages:
                sock.sendall(message)
                sent += 1
        return sent

    def flood(self) -> tuple[Sequence[str], str]:
        """More messages than anybody reads meanwhile, heartbeats among them, and a reset."""
        flood = zmtp.frame(b"x", more=False) * _FLOOD + zmtp.command(_PING)

        def work() -> None:
            for _ in range(_EACH):
                with (
                    suppress(OSError),
                    zmtp.connect(*zmtp.place(self._address), _PATIENCE_S) as sock,
                ):
                    sock.sendall(3 * flood)
                    sock.setsockopt(SOL_SOCKET, SO_LINGER, struct.pack("ii", 1, 0))

        threads = [threading.Thread(target=work) for _ in range(_FLOODS)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return (), f"{_FLOODS * _EACH} connections"

    def _task(self, draw: float) -> str:
        return random.Random(draw).choice(sorted(self._tasks))
