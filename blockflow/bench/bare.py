"""The yardstick of a hop: a bare ZeroMQ message between two processes on this machine, right now.

``python -m blockflow.bench.bare ENDPOINT ENDPOINT`` is the other process: it answers each message
with the time that it took to arrive. Nothing of BlockFlow is in between.
"""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import zmq

from blockflow.bench.closing import Closing
from blockflow.launch.environment import child_command, child_environment

MESSAGE_BYTES = 200
"""About the size of a header with a handle."""

_WAIT_MS = 30_000
_BLOCK, _SPIN = 0, 1


class BareLink(Closing):
    """This process and another one, with a ZeroMQ connection each way.

    A message begins with the sender's clock (8 bytes; the monotonic clock is one for all processes)
    and one byte that tells the receiver how to wait for the next message: asleep in the kernel, or
    asking without a pause.

    Args:
        folder: for the sockets' files; short enough for a socket's path.
        transport: ``ipc`` or ``tcp``.

    Raises:
        TimeoutError: (from :meth:`send`) the other process does not answer.
    """

    def __init__(self, folder: Path, transport: str = "ipc") -> None:
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._there, self._back = self._context.socket(zmq.PUSH), self._context.socket(zmq.PULL)
        endpoints = []
        for name, socket in (("there", self._there), ("back", self._back)):
            if transport == "tcp":
                endpoints.append(f"tcp://127.0.0.1:{socket.bind_to_random_port('tcp://127.0.0.1')}")
            else:
                endpoints.append(f"ipc://{folder}/bare-{name}.sock")
                socket.bind(endpoints[-1])
        command = child_command("blockflow.bench.bare", *endpoints)
        self._there.sndtimeo = self._back.rcvtimeo = _WAIT_MS
        self._other = subprocess.Popen(command, stdin=subprocess.PIPE, env=child_environment())
        self._small = memoryview(bytearray(MESSAGE_BYTES))
        self._large = memoryview(b"")

    def send(self, size: int = MESSAGE_BYTES, *, spin_next: bool = False) -> float:
        """One message of ``size`` bytes; the milliseconds from before its sending to its receipt.

        Larger messages are sent as raw frames without a copy on this side.
        """
        if size > MESSAGE_BYTES and len(self._large) != size:
            self._large = memoryview(bytearray(b"\1") * size)
        message = self._small if size <= MESSAGE_BYTES else self._large
        message[8] = _SPIN if spin_next else _BLOCK
        message[:8] = time.monotonic_ns().to_bytes(8, "big")
        try:
            self._there.send(message, 0, copy=size <= MESSAGE_BYTES)
            return int.from_bytes(self._back.recv(), "big") / 1e6
        except zmq.Again:
            raise TimeoutError("the other process does not answer") from None

    def burst(
        self,
        count: int,
        *,
        size: int = MESSAGE_BYTES,
        spin: bool = False,
        before: Callable[[], None] | None = None,
    ) -> list[float]:
        """Milliseconds of ``count`` messages, one at a time, after one that does not count.

        Args:
            count: how many.
            size: of each, in bytes.
            spin: the receiver asks without a pause; otherwise it sleeps until a message comes.
            before: done before each message.
        """
        self.send(size, spin_next=spin)
        times = []
        for i in range(count):
            if before is not None:
                before()
            times.append(self.send(size, spin_next=spin and i + 1 < count))
        return times

    def close(self) -> None:
        """End the other process."""
        self._other.kill()
        self._other.wait()
        if self._other.stdin is not None:
            self._other.stdin.close()
        self._context.destroy(linger=0)


def main(argv: Sequence[str] | None = None) -> int:
    """Answer until killed, or until the parent's end of stdin closes."""
    there_endpoint, back_endpoint = (argv or sys.argv[1:])[:2]
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    there, back = context.socket(zmq.PULL), context.socket(zmq.PUSH)
    there.connect(there_endpoint)
    back.connect(back_endpoint)
    poller = zmq.Poller()
    poller.register(there, zmq.POLLIN)
    poller.register(sys.stdin.fileno(), zmq.POLLIN)
    spin = False
    while spin or there in dict(poller.poll()):
        try:
            message = there.recv(zmq.NOBLOCK, copy=False).buffer
        except zmq.Again:
            continue
        took = time.monotonic_ns() - int.from_bytes(message[:8], "big")
        spin = message[8] == _SPIN
        del message
        back.send(max(0, took).to_bytes(8, "big"))
    context.destroy(linger=0)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
