"""The yardstick of a hop: a bare ZeroMQ message between two processes on this machine, right now.

``python -m blockflow.bench.bare FOLDER`` is the other process: it answers each message with the
time that it took to arrive. Nothing of BlockFlow but the sockets' names is in between.
"""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import zmq

MESSAGE_BYTES = 200
"""About the size of a header with a handle."""

_WAIT_MS = 30_000


def one_way_ms(folder: Path, count: int, gap_s: float) -> list[float]:
    """Milliseconds of ``count`` messages over ipc, one at a time, ``gap_s`` apart.

    With a gap the receiver has slept before each message, as a block's worker has.

    Raises:
        TimeoutError: the other process does not answer.
    """
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    there, back = context.socket(zmq.PUSH), context.socket(zmq.PULL)
    back.bind(_address(folder, "back"))
    command = [sys.executable, "-m", "blockflow.bench.bare", str(folder)]
    with subprocess.Popen(command, stdin=subprocess.PIPE) as other:
        try:
            there.connect(_address(folder, "there"))
            times = [_once(there, back) for _ in range(count // 4 + 1)]  # warm-up
            times.clear()
            for _ in range(count):
                times.append(_once(there, back))
                time.sleep(gap_s)
            return times
        finally:
            other.kill()
            context.destroy(linger=0)


def _once(there: zmq.Socket[bytes], back: zmq.Socket[bytes]) -> float:
    there.send(time.monotonic_ns().to_bytes(8, "big").ljust(MESSAGE_BYTES, b"\0"))
    if not back.poll(_WAIT_MS):
        raise TimeoutError("the other process does not answer")
    return int.from_bytes(back.recv(), "big") / 1e6


def _address(folder: Path, name: str) -> str:
    return f"ipc://{folder}/bare-{name}.sock"


def main(argv: Sequence[str] | None = None) -> int:
    """Answer until killed, or until the parent's end of stdin closes."""
    folder = Path((argv or sys.argv[1:])[0])
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    there, back = context.socket(zmq.PULL), context.socket(zmq.PUSH)
    there.bind(_address(folder, "there"))
    back.connect(_address(folder, "back"))
    poller = zmq.Poller()
    poller.register(there, zmq.POLLIN)
    poller.register(sys.stdin.fileno(), zmq.POLLIN)
    while there in dict(poller.poll()):
        message = there.recv()
        took = time.monotonic_ns() - int.from_bytes(message[:8], "big")
        back.send(max(0, took).to_bytes(8, "big"))
    context.destroy(linger=0)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
