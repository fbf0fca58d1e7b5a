"""The usual way for torch tensors between processes: a torch.multiprocessing queue.

torch moves the tensor's storage into shared memory (a copy, for a tensor that was just computed)
and sends a pickled description of it; all of that is torch's own and none of it is BlockFlow's.
"""

from __future__ import annotations

import time
from typing import Any

import torch
import torch.multiprocessing

from blockflow.bench.closing import Closing

_WAIT_S = 30.0


def _answer(there: Any, back: Any) -> None:
    """The other process: says how long each tensor took, until None comes."""
    while (message := there.get()) is not None:
        stamp, tensor = message
        took = time.monotonic_ns() - stamp
        del tensor, message
        back.put(took)


class QueueLink(Closing):
    """This process and another one, with a torch.multiprocessing queue each way."""

    def __init__(self) -> None:
        context = torch.multiprocessing.get_context("spawn")
        self._there, self._back = context.Queue(), context.Queue()
        self._other = context.Process(target=_answer, args=(self._there, self._back), daemon=True)
        self._other.start()

    def send(self, size: int) -> float:
        """A new tensor of ``size`` bytes; the milliseconds from before its sending to its receipt.

        Raises:
            queue.Empty: the other process does not answer.
        """
        tensor = torch.ones(size, dtype=torch.uint8)
        self._there.put((time.monotonic_ns(), tensor))
        took: int = self._back.get(timeout=_WAIT_S)
        return took / 1e6

    def burst(self, count: int, size: int) -> list[float]:
        """``count`` tensors one at a time, after one that does not count."""
        self.send(size)
        return [self.send(size) for _ in range(count)]

    def close(self) -> None:
        """End the other process and both queues."""
        self._there.put(None)
        self._other.join(5.0)
        if self._other.is_alive():
            self._other.kill()
            self._other.join()
        for queue in (self._there, self._back):
            queue.close()
            queue.join_thread()
