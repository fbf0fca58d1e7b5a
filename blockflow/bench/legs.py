"""What the way between a client and the Dispatcher costs: messages, slots, views, by size.

One echo block per size whose forward does nothing, one system, one client per way. Every round
visits every way in balanced order; ratios are paired by round.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import numpy as np

from blockflow.bench.own_system import own_settings
from blockflow.bench.results import LESS_IS_BETTER, Figure, bursts_figure, interval_figure
from blockflow.bench.statistics import percentile, ratio_interval
from blockflow.bench.turns import balanced
from blockflow.client import Client, Result
from blockflow.control.system import System
from blockflow.core.model import TensorSpec
from blockflow.repository.echo import save_echo
from blockflow.repository.repository import BlockRepository
from blockflow.tensormq.grants import MIN_TENSOR_BYTES

THERE = "client to dispatcher"
BACK = "dispatcher to client"
WHOLE = "round trip without blocks"
RATIO = "round trip to that by message"

_PATIENCE_S = 10.0
_BUDGET_S = 0.25


@dataclass(frozen=True, slots=True)
class Way:
    """How a client is set up: ``ipc`` or ``tcp``, with granted memory or not, copies or views."""

    name: str
    transport: str
    shared_memory: Literal["auto", "off"]
    results: Literal["copy", "view"]


WAYS = tuple(
    way
    for transport in ("ipc", "tcp")
    for way in (
        Way(f"message, {transport}", transport, "off", "copy"),
        Way(f"slot, {transport}", transport, "auto", "copy"),
        Way(f"view, {transport}", transport, "auto", "view"),
    )
)


@dataclass(slots=True)
class LegTimes:
    """Milliseconds by round: the way there, the way back, and all but the blocks' share."""

    there: dict[int, list[float]] = field(default_factory=dict)
    back: dict[int, list[float]] = field(default_factory=dict)
    whole: dict[int, list[float]] = field(default_factory=dict)

    def add(self, number: int, result: Result) -> None:
        if result.upload.ms is not None and result.download.ms is not None:
            self.there.setdefault(number, []).append(result.upload.ms)
            self.back.setdefault(number, []).append(result.download.ms)
        blocks = sum(t.total_ms for t in result.timings)
        self.whole.setdefault(number, []).append(result.rtt_ms - blocks)


Times = dict[tuple[str, int], LegTimes]


def save_blocks(repository: BlockRepository, sizes: Iterable[int]) -> None:
    """Store the echo blocks for tensors of these sizes in bytes."""
    for size in sizes:
        spec = TensorSpec("uint8", ("rows", size))
        save_echo(repository, f"leg-{size}", spec, settings={"still": True})


def topology(sizes: Iterable[int]) -> dict[str, Any]:
    """A task ``leg-<size>`` per size, all blocks in one worker."""
    names = [f"leg-{size}" for size in sizes]
    blocks = [{"name": n, "worker": "legs", "threads": 1, "max_rows": 1, "slots": 4} for n in names]
    tasks = {n: {"path": [n], "deadline_ms": 60_000} for n in names}
    return {"blocks": blocks, "tasks": tasks}


def measure(
    clients: Mapping[Way, Client],
    sizes: Sequence[int],
    rounds: int,
    burst: int,
    advance: Callable[[], None],
) -> Times:
    """``rounds`` visits of every way at every size, ``burst`` requests (or less) each."""
    times: Times = {}
    ways = list(clients)
    for size in sizes:
        x = np.zeros((1, size), np.uint8)
        for way in ways:
            times[way.name, size] = LegTimes()
            _warm_up(clients[way], way, size, x)
        for number in range(rounds):
            for way in balanced(ways, number):
                track = times[way.name, size]
                end = time.monotonic() + _BUDGET_S
                for i in range(-1, burst):
                    result = clients[way].infer(f"leg-{size}", x, results=way.results)
                    if i >= 0:
                        track.add(number, result)
                    del result  # a view would keep its slot
                    if i >= 0 and time.monotonic() > end:
                        break
            advance()
    return times


def _warm_up(client: Client, way: Way, size: int, x: np.ndarray) -> None:
    """Until the way is what its name says; then once more, for warm pages.

    Raises:
        TimeoutError: no memory is granted, with the reason.
    """
    wanted = way.shared_memory == "auto" and size >= MIN_TENSOR_BYTES
    end = time.monotonic() + _PATIENCE_S
    while True:
        result = client.infer(f"leg-{size}", x, results=way.results)
        if not wanted or "message" not in (result.upload.way, result.download.way):
            break
        if time.monotonic() > end:
            raise TimeoutError(f"{way.name}: {client.shared_memory}")
    client.infer(f"leg-{size}", x, results=way.results)


def figures(times: Times) -> list[Figure]:
    """Per way and size the two legs and the whole, and the whole beside that by message."""
    out: list[Figure] = []
    for (name, size), t in times.items():
        labels = {"bytes": size}
        if t.there:
            out.append(bursts_figure(THERE, name, list(t.there.values()), labels))
            out.append(bursts_figure(BACK, name, list(t.back.values()), labels))
        out.append(bursts_figure(WHOLE, name, list(t.whole.values()), labels))
        kind, _, transport = name.partition(", ")
        base = times.get((f"message, {transport}", size))
        if kind != "message" and base is not None:
            pairs = [(base.whole[n], burst) for n, burst in t.whole.items() if n in base.whole]
            ratio = ratio_interval(
                [percentile(b, 50) for b, _ in pairs], [percentile(o, 50) for _, o in pairs]
            )
            out.append(interval_figure(RATIO, name, None, ratio, "x", labels | LESS_IS_BETTER))
    return out


def run(
    folder: Path,
    sizes: Sequence[int],
    ways: Sequence[Way],
    rounds: int,
    burst: int,
    advance: Callable[[], None],
) -> list[Figure]:
    """Start a system in ``folder``, measure, stop it.

    ``advance`` is called after each round at each size.
    """
    save_blocks(BlockRepository(folder / "blocks"), sizes)
    with ExitStack() as stack:
        system = stack.enter_context(System(own_settings(folder)))
        system.apply(topology(sizes))
        clients = {}
        for way in ways:
            address = next(a for a in system.client_endpoints if a.startswith(way.transport))
            client = Client(address, shared_memory=way.shared_memory)
            clients[way] = stack.enter_context(client)
        return figures(measure(clients, sizes, rounds, burst, advance))
