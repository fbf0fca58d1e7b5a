"""EchoChain: real worker processes that only pass tensors on, to measure the hop and nothing else.

A path is *source*, some *middle* blocks, *sink*. Client and Dispatcher see 16 bytes; the source
makes a tensor of the wanted size of it, the middles pass such tensors on, the sink makes 16 bytes
again. Nobody computes (``still`` of :mod:`blockflow.engine.echo`): the output slot is sent as it
is.

What a block does before it sends decides how warm the hop is, so every middle block is there in
three conditions, side by side in one process.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from blockflow.bench.kpi_reader import Counted, KpiReader, per_hop
from blockflow.client import Client, Result
from blockflow.control.system import System
from blockflow.core.model import Contract, TensorSpec
from blockflow.repository.echo import save_echo
from blockflow.repository.repository import BlockRepository

MIDDLES = 3
SHORT = 1
"""Middle blocks of the long and of the short path; the difference of both is hops alone."""

EDGE_BYTES = 16
IDLE_MS = 10.0
TOUCHED_MIB = 32
CONDITIONS: Mapping[str, Mapping[str, Any]] = {
    "warm": {},
    "idle": {"delay_ms": IDLE_MS},
    "worked": {"touch_mib": TOUCHED_MIB},
}
WARM = next(iter(CONDITIONS))
"""What a middle block does before it sends: nothing (back to back), sleep, or fill the caches."""


_STILL = {"still": True}


@dataclass(frozen=True, slots=True)
class Way:
    """One way for tensors to pass: payload mode, transport, and whether in one process."""

    name: str
    mode: str
    transport: str
    together: bool = False

    @property
    def whole(self) -> bool:
        """Whole tensors are copied into messages and out of them."""
        return self.mode == "zeromq" and not self.together


HANDLES = Way("handle, ipc", "tensormq", "ipc")
WAYS = (
    HANDLES,
    Way("handle, tcp", "tensormq", "tcp"),
    Way("co-located", "tensormq", "ipc", together=True),
    Way("whole tensor, ipc", "zeromq", "ipc"),
    Way("whole tensor, tcp", "zeromq", "tcp"),
)


@dataclass(frozen=True, slots=True)
class HopSample:
    """One request's figures in milliseconds.

    Attributes:
        hop: mean over the middle blocks of transit + overhead, as the result accounts them.
        rest: end to end by the client's clock, less everything that was computed.
    """

    hop: float
    rest: float


def save_blocks(repository: BlockRepository, sizes: Sequence[int]) -> None:
    """Store the echo blocks for tensors of these sizes in bytes."""
    edge = TensorSpec("uint8", ("rows", EDGE_BYTES))
    inner = TensorSpec("uint8", ("rows", "bytes"), {"bytes": (1, max(sizes))})
    for size in sizes:
        sized = TensorSpec("uint8", ("rows", size))
        save_echo(repository, f"source-{size}", Contract(edge, sized), settings=_STILL)
    for condition, settings in CONDITIONS.items():
        save_echo(repository, f"middle-{condition}", inner, settings={**_STILL, **settings})
    save_echo(repository, "sink", Contract(inner, edge), settings=_STILL)


def topology(ways: Sequence[Way], sizes: Sequence[int]) -> dict[str, Any]:
    """All ways side by side; they must have one transport.

    Raises:
        ValueError: the ways differ in their transport.
    """
    transports = {w.transport for w in ways}
    if len(transports) != 1:
        raise ValueError(f"one system has one transport, not {sorted(transports)}")
    blocks: list[dict[str, Any]] = []
    tasks: dict[str, Any] = {}
    for way in ways:
        prefix = _prefix(way)

        def add(
            name: str,
            block: str,
            worker: str,
            *,
            prefix: str = prefix,
            way: Way = way,
        ) -> None:
            blocks.append(
                {
                    "name": f"{prefix}.{name}",
                    "block": block,
                    "worker": prefix if way.together else f"{prefix}.{worker}",
                    "mode": way.mode,
                    "threads": 1,
                    "max_rows": 1,
                    "slots": 4,
                }
            )

        for size in sizes:
            add(f"source-{size}", f"source-{size}", "source")
        for i in range(MIDDLES):
            for condition in CONDITIONS:
                add(f"{condition}{i}", f"middle-{condition}", f"middle{i}")
        add("sink", "sink", "sink")
        for size in sizes:
            for condition in CONDITIONS:
                for count in (SHORT, MIDDLES):
                    middles = [f"{prefix}.{condition}{i}" for i in range(count)]
                    path = [f"{prefix}.source-{size}", *middles, f"{prefix}.sink"]
                    tasks[task_name(way, size, condition, count)] = {
                        "path": path,
                        "deadline_ms": 60_000,
                    }
    return {"blocks": blocks, "tasks": tasks, "transport": transports.pop()}


def _prefix(way: Way) -> str:
    return way.name.replace(", ", "-").replace(" ", "-")


def task_name(way: Way, size: int, condition: str, middles: int) -> str:
    return f"{_prefix(way)}.{size}.{condition}.{middles}"


def sample(result: Result, total_ms: float) -> HopSample:
    """Reduce one answer: its first block is the source, its last the sink."""
    middles = result.timings[1:-1]
    hop = sum(t.transit_ms + t.overhead_ms for t in middles) / len(middles)
    # A queue that nobody else uses: waiting is the policy's and the scheduler's share of the hop.
    waiting = sum(t.wait_ms for t in middles) / len(middles)
    return HopSample(hop + waiting, total_ms - result.compute_ms)


class EchoChain:
    """A client's view of one system that hosts some ways.

    Args:
        system: running, with :func:`topology` of these ways applied.
    """

    def __init__(self, system: System, client: Client, ways: Sequence[Way]) -> None:
        self._kpis = KpiReader(system)
        self._client = client
        self.ways = tuple(ways)
        self._x = np.zeros((1, EDGE_BYTES), dtype=np.uint8)

    def turn(
        self,
        way: Way,
        size: int,
        condition: str,
        middles: int,
        count: int,
        limit_s: float,
        skip: int = 1,
    ) -> list[HopSample]:
        """``count`` requests one after the other, fewer when ``limit_s`` is over, at least one.

        ``skip`` more before them do not count: they bring the way back from its rest.
        """
        task = task_name(way, size, condition, middles)
        out: list[HopSample] = []
        end = time.monotonic() + limit_s
        for i in range(-skip, count):
            if out and time.monotonic() > end:
                break
            start = time.monotonic_ns()
            result = self._client.infer(task, self._x)
            total = (time.monotonic_ns() - start) / 1e6
            if i >= 0:
                out.append(sample(result, total))
        return out

    def count(self, size: int, requests: int = 4) -> dict[str, Counted]:
        """Copies and bytes per hop by way, as the workers count them."""
        before = self._kpis.now()
        for way in self.ways:
            self.turn(way, size, WARM, MIDDLES, requests, 60.0, skip=0)
        blocks = {
            way.name: [f"{_prefix(way)}.{WARM}{i}" for i in range(MIDDLES)] for way in self.ways
        }
        grown = self._kpis.since(before, {b: requests for names in blocks.values() for b in names})
        return {way: per_hop(grown, names) for way, names in blocks.items()}
