"""Flight: one inference from the host's memory and back into it, ordered now and waited for later.

Several of them are what one process can do at most: while the device computes one, the next is
ordered already, and nobody waits for anything but the oldest's result.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from blockflow.engine.base import Engine


class Flight:
    """The engines called in turn, outputs in places prepared beforehand where an engine can write
    there, as in a worker.

    On the CPU the work is done when it is ordered. On a device it has a stream of its own, so that
    its copies pass beside another one's kernels; its host memory is pinned, for else the host would
    wait for the copy of the input; and it is waited for by its own last event, for torch's plain
    copy to the host waits for whatever the stream was given since.

    Args:
        engines: loaded and warm.
        x: the input, a tensor of the host's.
        device: of the engines, ``cpu`` or ``cuda:N``.
        heads: that each compute the last engine's output; the result is the last one's then.

    Attributes:
        outs: the place for the output of each engine and each head, None where it has none.
    """

    def __init__(
        self, engines: Sequence[Engine], x: Any, device: str, heads: Sequence[Engine] = ()
    ) -> None:
        import torch

        self._engines = engines
        self._heads = heads
        self._device = device
        self._stream = None if device == "cpu" else torch.cuda.Stream(device)
        with self._scope():
            self.outs, last = places(engines, tuple(x.shape), device)
            given = tuple(last.shape)
            for head in heads:
                own, last = places([head], given, device)
                self.outs += own
        self._x = x
        self._result: Any = None
        self._done: Any = None
        if self._stream is not None:
            self._x = x.pin_memory()
            self._result = last.pin_memory()
            self._done = torch.cuda.Event()

    def order(self, between: Callable[[], None] = lambda: None) -> None:
        """All of it, in the order of the blocks; ``between`` is called after each."""
        with self._scope():
            y = self.compute(self._x.to(self._device, non_blocking=True), between)
            if self._done is None:
                self._result = y
            else:
                self._result.copy_(y, non_blocking=True)
                self._done.record()

    def compute(self, x: Any, between: Callable[[], None]) -> Any:
        """The output for an input that is where the engines compute, ordered and not waited for."""
        outs = iter(self.outs)
        y = x
        for engine in self._engines:
            y = engine.run(y, next(outs))
            between()
        given = y
        for head in self._heads:
            y = head.run(given, next(outs))
            between()
        return y

    def wait(self) -> Any:
        """The result, a tensor of the host's that the next order overwrites, when it is there."""
        if self._done is not None:
            self._done.synchronize()
        return self._result

    def _scope(self) -> AbstractContextManager[Any]:
        if self._stream is None:
            return nullcontext()
        import torch

        found: AbstractContextManager[Any] = torch.cuda.stream(self._stream)
        return found


def places(
    engines: Sequence[Engine], dims: tuple[int, ...], device: str
) -> tuple[list[Any | None], Any]:
    """Where the outputs go for an input of ``dims``: one per engine, None where it cannot write
    into a given place; and an empty tensor of the host's like the last output."""
    import torch

    outs: list[Any | None] = []
    for engine in engines:
        contract = engine.block.contract
        bound = contract.input.bind(contract.input.dtype, dims, where=engine.block.name)
        dims = contract.output_dims(bound)
        dtype = getattr(torch, contract.output.dtype)
        own = engine.copies_out == 0
        outs.append(torch.empty(dims, dtype=dtype, device=device) if own else None)
    return outs, torch.empty(dims, dtype=dtype)


def rate_of(
    flights: Sequence[Flight], seconds: float, clock: Callable[[], float] = time.monotonic
) -> float:
    """Flights per second over at least ``seconds``, all of these under way all the time.

    Counted from result to result: the first one's way through a device with nothing to do does not
    count, nor do those that are under way at the end, which are waited for.
    """
    under_way = deque(flights)  # the last one waits on the ground
    for flight in flights[:-1]:
        flight.order()

    def next_result() -> None:
        under_way[-1].order()
        under_way[0].wait()
        under_way.rotate(-1)

    if len(flights) > 1:
        next_result()
    start, took, count = clock(), 0.0, 0
    while not count or took < seconds:
        next_result()
        count += 1
        took = clock() - start
    for flight in list(under_way)[:-1]:
        flight.wait()
    return count / took
