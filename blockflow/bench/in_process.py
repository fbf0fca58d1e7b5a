"""InProcess: the same blocks by the same engines in one process, with nothing between them.

This is what a pipeline of workers is compared to. It is a process of its own, so that it has the
workers' allocator settings and shares its interpreter with nobody; several of them side by side are
the bound for throughput. ``python -m blockflow.bench.in_process FD`` is that process; it obeys one
JSON line at a time on the socket ``FD`` and ends with it.
"""

from __future__ import annotations

import json
import socket
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import numpy as np

from blockflow.core.errors import BlockFlowError, from_dict, make_error
from blockflow.core.model import TensorSpec
from blockflow.engine.base import Engine, EngineOptions
from blockflow.engine.registry import create_engine
from blockflow.launch.environment import child_command, child_environment
from blockflow.launch.process_kpi import private_and_shared
from blockflow.repository.repository import BlockRepository

_WAIT_S = 300.0


@dataclass(frozen=True, slots=True)
class Chain:
    """What to run: blocks in their order, and by which engine.

    ``engine`` and ``precision`` are those of a topology's block.
    """

    repository: Path
    blocks: tuple[str, ...]
    engine: str = "auto"
    precision: str = "fp32"
    threads: int = 1


class InProcess:
    """The other process.

    Args:
        chain: what it loads; the constructor returns when it is warm.

    Raises:
        BlockFlowError: why it could not load.
    """

    def __init__(self, chain: Chain) -> None:
        ours, theirs = socket.socketpair()
        command = child_command("blockflow.bench.in_process", str(theirs.fileno()))
        with theirs:
            self._other = subprocess.Popen(
                command, env=child_environment(), pass_fds=[theirs.fileno()]
            )
        ours.settimeout(_WAIT_S)
        self._socket = ours
        self._lines = ours.makefile("rw", encoding="utf-8")
        self.ask(
            repository=str(chain.repository),
            blocks=chain.blocks,
            engine=chain.engine,
            precision=chain.precision,
            threads=chain.threads,
        )
        try:
            self.answer()
        except BaseException:
            self.close()
            raise

    def run(self, rows: int) -> tuple[float, ...]:
        """One inference; milliseconds of each block."""
        self.ask(op="run", rows=rows)
        return tuple(self.answer()["ms"])

    def start_running(self, rows: int, seconds: float) -> None:
        """Begin to infer without a pause; :meth:`rate` waits for the end of it."""
        self.ask(op="rate", rows=rows, seconds=seconds)

    def rate(self) -> float:
        """Rows per second of what :meth:`start_running` began."""
        return float(self.answer()["rows_per_s"])

    def pss_mib(self) -> float:
        """Proportional memory of the process, in MiB."""
        return private_and_shared(self._other.pid)[1] / 2**20

    def ask(self, **question: Any) -> None:
        self._lines.write(json.dumps(question) + "\n")
        self._lines.flush()

    def answer(self) -> dict[str, Any]:
        """Raises BlockFlowError with the child's reason, or INTERNAL when it has ended."""
        line = self._lines.readline()
        if not line:
            raise make_error("INTERNAL", f"the in-process run ended: status {self._other.wait()}")
        answer: dict[str, Any] = json.loads(line)
        if "error" in answer:
            raise from_dict(answer["error"])
        return answer

    def close(self) -> None:
        self._lines.close()
        self._socket.close()
        try:
            self._other.wait(10.0)
        except subprocess.TimeoutExpired:
            self._other.kill()
            self._other.wait()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()


class Pipeline:
    """In the other process: the loaded engines, called in turn.

    Outputs have their places beforehand where an engine can write there, as they do in a worker.
    """

    def __init__(self, engines: Sequence[Engine]) -> None:
        self._engines = engines
        self._prepared: dict[int, tuple[Any, list[Any]]] = {}

    def run(self, rows: int) -> list[float]:
        """Milliseconds of each block."""
        y, outs = self._prepare(rows)
        times = []
        for engine, out in zip(self._engines, outs, strict=True):
            start = time.monotonic_ns()
            y = engine.run(y, out)
            times.append((time.monotonic_ns() - start) / 1e6)
        return times

    def rate(self, rows: int, seconds: float) -> float:
        """Rows per second over at least ``seconds``."""
        start = time.monotonic()
        count = 0
        while (took := time.monotonic() - start) < seconds or not count:
            self.run(rows)
            count += 1
        return count * rows / took

    def _prepare(self, rows: int) -> tuple[Any, list[Any]]:
        import torch

        if rows not in self._prepared:
            x = torch.from_numpy(example(self._engines[0].block.contract.input, rows))
            dims, outs = tuple(x.shape), []
            for engine in self._engines:
                contract = engine.block.contract
                dims = contract.output_dims(contract.input.bind(contract.input.dtype, dims))
                dtype = getattr(torch, contract.output.dtype)
                outs.append(torch.empty(dims, dtype=dtype) if engine.copies_out == 0 else None)
            self._prepared = {rows: (x, outs)}
        return self._prepared[rows]


def example(spec: TensorSpec, rows: int) -> np.ndarray[Any, np.dtype[np.float32]]:
    """The seeded input that all ways get: normal numbers of the contract's dims."""
    dims = spec.resolve({"rows": rows})
    return np.random.default_rng(rows).standard_normal(dims, dtype=np.float32)


def load(order: Mapping[str, Any]) -> Pipeline:
    """The engines of an order (the fields of :class:`Chain`), loaded and warm."""
    repository = BlockRepository(order["repository"])
    engines = []
    for name in order["blocks"]:
        options = EngineOptions(threads=order["threads"], precision=order["precision"])
        engine = create_engine(repository.info(name), options, order["engine"])
        with repository.artifact(name, variant=engine.variant) as path:
            engine.load(path)
        engine.warm_up()
        engines.append(engine)
    return Pipeline(engines)


def main(argv: Sequence[str] | None = None) -> int:
    """Obey until the socket closes."""
    import torch

    fd = int((argv or sys.argv[1:])[0])
    with socket.socket(fileno=fd) as ours, ours.makefile("rw", encoding="utf-8") as lines:

        def say(answer: Mapping[str, Any]) -> None:
            lines.write(json.dumps(answer) + "\n")
            lines.flush()

        try:
            with torch.inference_mode():
                pipeline = load(json.loads(lines.readline()))
                say({})
                for line in lines:
                    question = json.loads(line)
                    rows = question["rows"]
                    if question["op"] == "run":
                        say({"ms": pipeline.run(rows)})
                    else:
                        say({"rows_per_s": pipeline.rate(rows, question["seconds"])})
        except BlockFlowError as e:
            say({"error": e.to_dict()})
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
