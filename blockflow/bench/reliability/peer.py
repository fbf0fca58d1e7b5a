"""Peer: a client that speaks the protocol itself, and what a neighbour that reads may have."""

from __future__ import annotations

import secrets
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import zmq

from blockflow.wire.client import Cancel, Reply, Request, decode_to_client, encode_to_dispatcher
from blockflow.wire.tensor import TensorDesc

Array = npt.NDArray[np.float32]

LARGE = "large"
LARGE_COLUMNS = 65_536
LARGE_ROWS = 16
"""4 MiB a reply: three of them are more than a client may owe."""
BURST = 5
"""Two of them ZeroMQ takes in on the side of a client that reads none."""


class Peer:
    """A client that speaks the protocol itself: it never gives up, and reads only when told to."""

    def __init__(
        self, context: zmq.Context[zmq.Socket[bytes]], endpoint: str, holds: int = 1000
    ) -> None:
        """``holds``: messages that ZeroMQ takes in on this side although nobody reads them."""
        self.socket = context.socket(zmq.DEALER)
        self.socket.set(zmq.LINGER, 0)
        self.socket.set(zmq.RCVHWM, holds)
        self.socket.connect(endpoint)

    def ask(self, task: str, x: Array, deadline_ms: int = 10_000) -> bytes:
        """Send a request; returns its id."""
        request_id = secrets.token_bytes(16)
        request = Request(request_id, (task,), deadline_ms, TensorDesc("float32", x.shape))
        self.socket.send_multipart([encode_to_dispatcher(request), x.tobytes()])
        return request_id

    def cancel(self, request_id: bytes) -> None:
        self.socket.send(encode_to_dispatcher(Cancel(request_id)))

    def burst(self, requests: int, rows: int = LARGE_ROWS) -> None:
        """Ask for so many large replies at once."""
        x = np.zeros((rows, LARGE_COLUMNS), np.float32)
        for _ in range(requests):
            self.ask(LARGE, x)

    def heed(self, requests: int, want: int, patience_s: float) -> tuple[int, bool]:
        """Ask for so many large replies at once and read ``want`` of them; the others are cancelled
        in the same breath, so that it is never owed too much. Returns how many there were, and
        whether every request was replied to: not if it was cut off."""
        x = np.zeros((LARGE_ROWS, LARGE_COLUMNS), np.float32)
        for number in range(requests):
            request_id = self.ask(LARGE, x)
            if number >= want:
                self.cancel(request_id)
        outcomes: list[str] = []
        while len(outcomes) < requests and (more := [o for _, o in self.replies(patience_s)]):
            outcomes += more
        return outcomes.count("ok"), len(outcomes) >= requests

    def count(self) -> int:
        """How many results have come and were not read."""
        return sum(outcome == "ok" for _, outcome in self.replies())

    def replies(self, timeout_s: float = 0.0) -> Iterator[tuple[bytes, str]]:
        """What has come: id and outcome; waits for the first one for so long."""
        wait_ms = int(1000 * timeout_s)
        while self.socket.poll(wait_ms):
            wait_ms = 0
            message = decode_to_client(self.socket.recv_multipart()[0])
            if isinstance(message, Reply):
                error = message.results[0].error
                yield message.request_id, "ok" if error is None else error.code

    def close(self) -> None:
        self.socket.close(0)


@dataclass(slots=True)
class Account:
    """Of one kind of neighbour: its rounds, the large results that it got in them, and how often it
    was cut off."""

    rounds: int = 0
    got: int = 0
    cut: int = 0

    def note(self, got: int) -> None:
        self.rounds += 1
        self.got += got

    def quota(self, other: Account, most: int) -> int:
        """What it may read in its next round to have no more per round than the other one."""
        allowed = other.got * (self.rounds + 1) // max(1, other.rounds)
        return min(most, max(0, allowed - self.got))

    def mib(self) -> float:
        """MiB a round."""
        return self.got * LARGE_ROWS * LARGE_COLUMNS * 4 / 2**20 / max(1, self.rounds)
