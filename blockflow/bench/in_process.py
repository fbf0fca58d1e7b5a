"""InProcess: the same blocks by the same engines in one process, with nothing between them.

This is what a pipeline of workers is compared to. It is a process of its own, so that it has the
workers' allocator settings and shares its interpreter with nobody; several of them side by side are
the bound for throughput.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from blockflow.bench.flight import Flight, rate_of
from blockflow.bench.other_process import OtherProcess, Say
from blockflow.core.model import TensorSpec
from blockflow.engine.base import Engine, EngineOptions
from blockflow.engine.registry import create_engine
from blockflow.launch.process_kpi import private_and_shared
from blockflow.repository.repository import BlockRepository

_UNDER_WAY = 4
"""Inferences on a device at once: one is computed, one goes there, one comes back, one waits."""


@dataclass(frozen=True, slots=True)
class Chain:
    """What to run: blocks in their order, then the heads, and by which engine.

    ``engine``, ``precision``, ``options`` and ``device`` are those of a topology's block. Each of
    ``heads`` computes what the last of ``blocks`` has given, with weights of its own though
    another one has the same name.
    """

    repository: Path
    blocks: tuple[str, ...]
    engine: str = "auto"
    precision: str = "fp32"
    threads: int = 1
    device: str = "cpu"
    options: Mapping[str, Any] = field(default_factory=dict)
    heads: tuple[str, ...] = ()

    def order(self) -> dict[str, Any]:
        """What :func:`load` reads, as JSON."""
        return {**asdict(self), "repository": str(self.repository)}


class InProcess(OtherProcess):
    """The other process.

    Args:
        chain: what it loads; the constructor returns when it is warm.

    Raises:
        BlockFlowError: why it could not load.
    """

    def __init__(self, chain: Chain) -> None:
        super().__init__("blockflow.bench.in_process", chain.order())

    def run(self, rows: int) -> tuple[float, ...]:
        """One inference; milliseconds of each block and each head."""
        self.ask(op="run", rows=rows)
        return tuple(self.answer()["ms"])

    def whole(self, rows: int) -> float:
        """Milliseconds from the host's tensor to the host's result, with one wait at the end."""
        self.ask(op="whole", rows=rows)
        return float(self.answer()["ms"])

    def apart(self, rows: int) -> float:
        """The same with a wait after every block."""
        self.ask(op="apart", rows=rows)
        return float(self.answer()["ms"])

    def start_running(self, rows: int, seconds: float) -> None:
        """Begin to infer without a pause; :meth:`rate` waits for the end of it."""
        self.ask(op="rate", rows=rows, seconds=seconds)

    def rate(self) -> float:
        """Rows per second of what :meth:`start_running` began."""
        return float(self.answer()["rows_per_s"])

    def pss_mib(self) -> float:
        """Proportional memory of the process, in MiB."""
        return private_and_shared(self.pid)[1] / 2**20


def side_by_side(others: Sequence[InProcess], rows: int, seconds: float) -> float:
    """Rows per second of all of them together, each with its own blocks and input."""
    for other in others:
        other.start_running(rows, seconds)
    return sum(other.rate() for other in others)


@dataclass(slots=True)
class _Prepared:
    """For inferences of so many rows: their input on the host and where the engines compute, and
    flights of it."""

    rows: int
    host: Any
    x: Any
    flights: list[Flight]


class Pipeline:
    """In the other process: the loaded engines, called in turn.

    Outputs have their places beforehand where an engine can write there, as they do in a worker.
    """

    def __init__(self, engines: Sequence[Engine], heads: Sequence[Engine] = ()) -> None:
        self._engines = engines
        self._heads = heads
        self._device = engines[0].options.device
        self._now: _Prepared | None = None

    @property
    def input(self) -> TensorSpec:
        """Of the first block."""
        return self._engines[0].block.contract.input

    def run(self, rows: int) -> list[float]:
        """Milliseconds of each block and each head, its input being where it computes."""
        prepared = self._prepare(rows)
        times = []
        start = time.monotonic_ns()

        def lap() -> None:
            nonlocal start
            self._wait()
            times.append((time.monotonic_ns() - start) / 1e6)
            start = time.monotonic_ns()

        prepared.flights[0].compute(prepared.x, lap)
        return times

    def whole(self, rows: int) -> float:
        """Milliseconds from the host's tensor to the host's result, with one wait at the end."""
        return self._flown(rows, lambda: None)

    def apart(self, rows: int) -> float:
        """The same with a wait after every block."""
        return self._flown(rows, self._wait)

    def infer(self, x: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
        """The whole model's result for a tensor of the host's."""
        import torch

        y: Any = torch.from_numpy(x).to(self._device)
        for engine in self._engines:
            y = engine.run(y)
        found: np.ndarray[Any, Any] = y.cpu().numpy()
        return found

    def rate(self, rows: int, seconds: float) -> float:
        """Rows per second over at least ``seconds``, after a first run with so many rows: on the
        CPU one inference after the other, on a device with several under way."""
        fresh = self._now is None or self._now.rows != rows
        prepared = self._prepare(rows)
        if fresh:
            self.run(rows)
        wanted = 1 if self._device == "cpu" else _UNDER_WAY
        while len(prepared.flights) < wanted:
            flight = Flight(self._engines, prepared.host, self._device, self._heads)
            flight.order()  # once alone: a stream's first kernels bring their work space
            flight.wait()
            prepared.flights.append(flight)
        return rate_of(prepared.flights, seconds) * rows

    def _flown(self, rows: int, between: Callable[[], None]) -> float:
        flight = self._prepare(rows).flights[0]
        start = time.monotonic_ns()
        flight.order(between)
        flight.wait()
        return (time.monotonic_ns() - start) / 1e6

    def _prepare(self, rows: int) -> _Prepared:
        import torch

        if self._now is None or self._now.rows != rows:
            self._now = None  # before the next one's memory is taken
            host = torch.from_numpy(example(self.input, rows))
            flight = Flight(self._engines, host, self._device, self._heads)
            self._now = _Prepared(rows, host, host.to(self._device), [flight])
        return self._now

    def _wait(self) -> None:
        """Until the device has computed what it was told to."""
        if self._device != "cpu":
            import torch

            torch.cuda.synchronize(self._device)


def example(spec: TensorSpec, rows: int) -> np.ndarray[Any, np.dtype[np.float32]]:
    """The seeded input that all ways get: normal numbers of the contract's dims."""
    dims = spec.resolve({"rows": rows})
    return np.random.default_rng(rows).standard_normal(dims, dtype=np.float32)


def load(order: Mapping[str, Any]) -> Pipeline:
    """The engines of an order (the fields of :class:`Chain`), loaded and warm."""
    repository = BlockRepository(order["repository"])
    engines = []
    for name in (*order["blocks"], *order["heads"]):
        own = order["device"], order["threads"], order["precision"], order["options"]
        options = EngineOptions(*own)
        engine = create_engine(repository.info(name), options, order["engine"])
        with repository.artifact(name, variant=engine.variant) as path:
            engine.load(path)
        engine.warm_up()
        engines.append(engine)
    count = len(order["blocks"])
    return Pipeline(engines[:count], engines[count:])


def obey(orders: Iterator[dict[str, Any]], say: Say) -> None:
    import torch

    with torch.inference_mode():
        pipeline = load(next(orders))
        say({})
        for question in orders:
            rows = question["rows"]
            match question["op"]:
                case "run":
                    say({"ms": pipeline.run(rows)})
                case "whole":
                    say({"ms": pipeline.whole(rows)})
                case "apart":
                    say({"ms": pipeline.apart(rows)})
                case _:
                    say({"rows_per_s": pipeline.rate(rows, question["seconds"])})
