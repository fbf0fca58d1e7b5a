"""Doubles of everything that the thesis's experiments compute with or talk to.

An experiment runs over them from begin to end, with as many rounds as in a full run, in a moment.
"""

from __future__ import annotations

import itertools
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from thesis_rig import CHAIN, silent

from blockflow.bench.closing import Closing
from blockflow.bench.in_process import Chain
from blockflow.bench.sampler import Memory
from blockflow.bench.thesis import (
    energy,
    memory_measure,
    offline_memory,
    one_client,
    peers,
    served,
)
from blockflow.bench.thesis.devices_model import CORES, Places
from blockflow.bench.thesis.experiment import Context, Experiment, Settings, Workshop
from blockflow.client.collector import OK, Record
from blockflow.client.result import BlockTiming
from blockflow.core.errors import BlockFlowError, make_error
from blockflow.core.model import TensorSpec
from blockflow.repository.echo import save_echo
from blockflow.repository.repository import BlockRepository

SETTINGS = Settings()
LOST = "CONNECTION_LOST"
TIMINGS = tuple(BlockTiming(f"way.pt2.block{n}", 0.1, 0.1, 0.1, 1.0) for n in range(1, 5))


class Life:
    """Counts what the system is asked for, and ends it there."""

    def __init__(self, asks: float = float("inf")) -> None:
        self.asks = asks
        self.spent = 0

    def spend(self) -> None:
        self.spent += 1
        if self.spent > self.asks:
            raise make_error(LOST, "the system died")


class Double(Closing):
    """Of a client, a process or a server, whatever its arguments: each question is one of its life.

    Attributes:
        life: of the test's system.
    """

    life = Life()
    client_endpoint, port = "ipc://nowhere", 0

    def __init__(self, *_args: Any, **_options: Any) -> None:
        pass

    def infer(self, *_args: Any, **_options: Any) -> Any:
        self.life.spend()
        return SimpleNamespace(timings=TIMINGS, ingress_ms=0.1, egress_ms=0.1)

    def run(self, _rows: int) -> tuple[float, ...]:
        self.life.spend()
        return (1.0,) * len(TIMINGS)

    def post(self, _path: str, body: Any, _kind: str = "") -> bytes:
        self.life.spend()
        return bytes(body)

    def string(self) -> None:
        self.life.spend()

    json = tensor = string

    def handle(self, _kind: bytes) -> None:
        self.life.spend()

    def close(self) -> None:
        pass


class Generator:
    """A client's requests, evenly; all of them lost once the system is dead."""

    life = Life()

    def __init__(
        self, _client: object, task: str, _inputs: object, *, duration_s: float, **options: Any
    ) -> None:
        self._task = task
        self._count = int(duration_s * options.get("rate", 10))
        self._gap_ms = duration_s * 1e3 / max(1, self._count)
        self.collector = self
        self._records: list[Record] = []

    def run(self) -> Generator:
        try:
            self.life.spend()
            outcome = OK
        except BlockFlowError as exc:  # in a thread of its own nobody would hear it
            outcome = exc.code
        times = [n * self._gap_ms for n in range(max(3, self._count))]
        self._records = [Record(self._task, 1, t, t, t + 5, outcome, TIMINGS) for t in times]
        return self

    def records(self) -> Sequence[Record]:
        return self._records

    def stop(self) -> None:
        pass


class Deployed:
    """A system that says of itself what its topology says; all of it is this process."""

    client_endpoint = "ipc://nowhere"
    client_endpoints = (client_endpoint,)

    def __init__(self, topology: Mapping[str, Any]) -> None:
        self._names = [b["name"] for b in topology["blocks"]]

    def status(self) -> dict[str, Any]:
        pid = os.getpid()
        workers = [
            {"worker": n, "blocks": [n], "pid": pid, "process": {}, "stages": []}
            for n in self._names
        ]
        return {"workers": workers, "dispatcher": {"pid": pid}}


class Counters:
    """What blocks counted: as many requests as are asked for."""

    def __init__(self, _system: object) -> None:
        pass

    def now(self) -> dict[str, Any]:
        return {}

    def since(self, _before: object, asked: Mapping[str, int]) -> dict[str, Any]:
        return {b: {"requests": n, "bytes_out": 8 * n, "copies_out": 0} for b, n in asked.items()}


class Doubled(Context):
    """As in a full run, over doubles."""

    def __init__(self, folder: Path, settings: Settings = SETTINGS) -> None:
        super().__init__(settings, Workshop(folder), folder, silent)
        self._chain = Chain(folder, CHAIN.blocks)

    def chain(self, label: str | None = None, model: str | None = None) -> Chain:
        return self._chain

    @contextmanager
    def system(self, topology: Mapping[str, Any]) -> Iterator[Any]:
        yield Deployed(topology)


def save_blocks(folder: Path) -> Path:
    """The chain's blocks, as echoes."""
    for name in CHAIN.blocks:
        save_echo(BlockRepository(folder), name, TensorSpec("float32", ("rows", 8)))
    return folder


def run_until(
    experiment: Experiment, context: Context, life: Life, patch: pytest.MonkeyPatch
) -> Any:
    """Its findings; the names that its modules call the world by stand for doubles."""
    counter = itertools.count()
    meter = SimpleNamespace(part="a meter", joules=lambda: next(counter), close=lambda: None)
    doubles: dict[str, Any] = {
        **dict.fromkeys(("Client", "InProcess", "HttpServer", "HttpClient", "System"), Double),
        "TaskGenerator": Generator,
        "KpiReader": Counters,
        "memory_of": lambda pids: dict.fromkeys(pids, Memory(3 << 20, 2 << 20, 1 << 20)),
        "find_source": lambda _device: meter,
        "find_places": lambda _settings: Places(CORES, ["0", "1"]),
        "_sent": lambda: next(counter),  # bytes of the loopback device
        "_one": lambda *_: life.spend() or float(20 + next(counter)),
    }
    patch.setattr(Double, "life", life)
    patch.setattr(Generator, "life", life)
    patch.setattr(peers, "Peer", Double)
    patch.setattr(energy, "time", SimpleNamespace(sleep=lambda _s: None))
    helpers = (served, one_client, memory_measure, offline_memory)
    for module in (sys.modules[experiment.run.__module__], *helpers):
        for name, double in doubles.items():
            if hasattr(module, name):
                patch.setattr(module, name, double)
    return experiment.run(context)
