"""What a hop on a GPU costs at the least: the device goes from one process's work to another's.

Two processes take turns at a kernel. Each kernel comes, on the device, behind the one before it, by
an event that its process has shared; the hosts run ahead meanwhile, so that no waking of theirs
counts. Beside it the same kernels in the same order in one process. The difference is the device's
switch between two contexts, and is gone where NVIDIA's multi-process service makes one of the two.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import partial
from typing import Any

from blockflow.bench.grid import Grid, ms, with_bounds
from blockflow.bench.other_process import OtherProcess, Say
from blockflow.bench.results import Figure, interval_figure, latency_figure
from blockflow.bench.statistics import difference_interval
from blockflow.bench.turns import in_turn, took_ms
from blockflow.tensormq.cuda_api import CudaApi, CudaError, EventKind
from blockflow.tensormq.memory import open_device

FLOOR, SWITCH = "kernel after kernel", "switch between processes"
ALONE, IN_TURNS = "one process", "two processes"

KERNEL_BYTES = 256 << 20
"""Read and written by a kernel: about a quarter of a millisecond at 2 TB/s, longer than the hosts
take to order the next one."""
_WARM_UP = 2


class Kernels:
    """One process's side: a kernel, and the event behind it that the other process waits for."""

    def __init__(self, api: CudaApi, nbytes: int) -> None:
        import torch

        self._api = api
        self._stream = api.stream_create()
        self._mine = api.event_create(EventKind.READY)
        self._theirs = 0
        with api.engine_scope(self._stream):
            self._x = api.scratch(nbytes).view(torch.float32).zero_()
        self.event = api.event_export(self._mine)

    def meet(self, event: bytes) -> None:
        """The other process's event."""
        self._theirs = self._api.event_import(event)

    def order(self, behind_the_other: bool) -> None:
        """One kernel, and the record of the event."""
        if behind_the_other:
            self._api.stream_wait(self._stream, self._theirs)
        with self._api.engine_scope(self._stream):
            self._x.mul_(1.0)
        self._api.event_record(self._mine, self._stream)

    def wait(self, for_the_other: bool = False) -> None:
        """Until the device has done what was ordered."""
        if for_the_other:
            self._api.stream_wait(self._stream, self._theirs)
        self._api.stream_synchronize(self._stream)

    def leave(self) -> None:
        """Let go of the other's event: before it is destroyed there."""
        theirs, self._theirs = self._theirs, 0
        if theirs:
            with suppress(CudaError):
                self._api.event_destroy(theirs)

    def close(self) -> None:
        self.leave()
        with suppress(CudaError):
            self._api.event_destroy(self._mine)
            self._api.stream_destroy(self._stream)


class Floor:
    """Both processes.

    Args:
        api: of this process; the other one opens ``device``.
        nbytes: of the tensor that a kernel reads and writes.

    Raises:
        BlockFlowError: why the other process cannot.
    """

    def __init__(self, api: CudaApi, device: str, nbytes: int = KERNEL_BYTES) -> None:
        self._mine = Kernels(api, nbytes)
        order = {"device": device, "nbytes": nbytes, "event": self._mine.event.hex()}
        try:
            self._other = OtherProcess("blockflow.bench.gpu_floor", order)
        except BaseException:
            self._mine.close()
            raise
        self._mine.meet(bytes.fromhex(self._other.ready["event"]))

    def measure(self, rounds: int, repeats: int) -> dict[str, list[float]]:
        """Milliseconds per kernel: by way, a sample for each repeat; of ``rounds`` kernels of each
        process."""

        def timed(run: Callable[[int], None]) -> float:
            return took_ms(partial(run, rounds)) / (2 * rounds)

        ways = {ALONE: partial(timed, self._alone), IN_TURNS: partial(timed, self._in_turns)}
        return in_turn(ways, repeats, lambda: None, warm_up=_WARM_UP)

    def _alone(self, rounds: int) -> None:
        for _ in range(2 * rounds):
            self._mine.order(behind_the_other=False)
        self._mine.wait()

    def _in_turns(self, rounds: int) -> None:
        for _ in range(rounds):
            self._mine.order(behind_the_other=True)
            self._other.ask(op="order")
            self._other.answer()
        self._mine.wait(for_the_other=True)

    def close(self) -> None:
        self._mine.leave()
        self._other.close()
        self._mine.close()


def floor_figures(found: Mapping[str, Sequence[float]]) -> list[Figure]:
    """Milliseconds per kernel of both ways, and what lies between them."""
    switch = difference_interval(found[ALONE], found[IN_TURNS])
    return [
        *(latency_figure(FLOOR, way, None, samples) for way, samples in found.items()),
        interval_figure(SWITCH, IN_TURNS, None, switch, "ms"),
    ]


def floor_grid(found: Iterable[Figure]) -> Grid:
    """One row per way."""
    figures = [f for f in found if f.name in (FLOOR, SWITCH)]
    switch = next((with_bounds(f.value, f.low, f.high) for f in figures if f.name == SWITCH), "")
    rows = [
        (f.mode, ms(f.p50_ms), ms(f.p90_ms), switch if f.mode == IN_TURNS else "")
        for f in figures
        if f.name == FLOOR
    ]
    heads = ("kernels of", "p50 ms", "p90 ms", "switch ms")
    return Grid("The device from kernel to kernel", heads, rows, frozenset({"kernels of"}))


def obey(orders: Iterator[dict[str, Any]], say: Say) -> None:
    first = next(orders)
    kernels = Kernels(open_device(first["device"]), first["nbytes"])
    kernels.meet(bytes.fromhex(first["event"]))
    say({"event": kernels.event.hex()})
    for _ in orders:
        kernels.order(behind_the_other=True)
        say({})
    kernels.wait()
    kernels.close()
