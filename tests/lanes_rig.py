"""An executor with several lanes, echo blocks and a fake clock, for tests of what it starts."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any, cast

import pytest
import torch

from blockflow.core.errors import BlockFlowError, make_error
from blockflow.core.launchspec import StageSpec
from blockflow.core.model import BlockInfo, Contract, TensorSpec
from blockflow.core.routing import merge_paths
from blockflow.engine.base import EngineOptions
from blockflow.engine.echo import EchoEngine
from blockflow.wire.data import Item
from blockflow.worker import executor as module
from blockflow.worker.delivery import Delivery
from blockflow.worker.executor import Executor
from blockflow.worker.failpoints import FailPoints
from blockflow.worker.intake import Intake
from blockflow.worker.parting import plan_parts
from blockflow.worker.scheduler import Scheduler
from blockflow.worker.stage import Stage
from blockflow.worker.ticket import Batch, Source, Ticket

MS = 1_000_000
SPEC = TensorSpec("float32", ("rows", 2))
LATE = 10**15


class Clock:
    now = 0

    def monotonic_ns(self) -> int:
        return self.now


class Slots:
    """A producer with so many buffers."""

    by_consumer = False

    def __init__(self, free: int, max_rows: int = 100) -> None:
        self.free = free
        self.max_rows = max_rows
        self.beyond = "TOO_LARGE"

    def reserve(self, dtype: str, dims: Sequence[int]) -> Any:
        if dims[0] > self.max_rows:
            raise make_error(self.beyond, f"{dims[0]} rows", where="/run/arena-7")
        if not self.free:
            return None
        self.free -= 1
        return Buffer()

    def unhold(self, buffer: Any) -> None:
        self.free += 1


class Buffer:
    nbytes = 8


class Sink:
    """The sending side: everything has left as soon as it is delivered, but for what stays here."""

    def __init__(self, local: set[int], slots: Slots | None) -> None:
        self.local = local
        self.slots = slots
        self.sent: list[list[int]] = []
        self.failed: dict[int, str] = {}
        self.errors: list[BlockFlowError] = []
        self.keys: dict[bytes, int] = {}

    def producer_for(self, batch: Batch) -> Slots | None:
        return self.slots

    def replayable(self, stage: int) -> bool:
        return True

    def stays(self, batch: Batch) -> bool:
        return bool(plan_parts(batch, self.local)[1])

    def prepare(self, batch: Batch, producer: Any) -> None:
        pass

    def deliver(self, batch: Batch, producer: Any) -> list[tuple[Ticket, int, int]]:
        parts, stays = plan_parts(batch, self.local)
        for part in parts:
            self.sent.append([t.key for t, _ in part.members])
        if producer is not None and not stays:
            producer.unhold(batch.out)
        return stays

    def own_copy(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.clone()

    def fail(self, items: Sequence[Item], error: BlockFlowError) -> None:
        self.failed |= {self.keys[i.request_id]: error.code for i in items}
        self.errors.append(error)


class Bench:
    def __init__(
        self,
        monkeypatch: pytest.MonkeyPatch,
        *,
        stages: int = 3,
        lanes: int = 2,
        slots: int | None = None,
        timeout_ms: Sequence[int] = (),
        policy: str = "none",
        twins: bool = False,
    ) -> None:
        self.clock = Clock()
        monkeypatch.setattr(module, "time", self.clock)
        self.stages = {}
        for n in range(1, stages + 1):
            info = BlockInfo(f"b{n}", "1", "0" * 64, "echo", Contract(SPEC, SPEC), 0, 0)
            limit = timeout_ms[n - 1] if timeout_ms else 0
            spec = StageSpec(n, info, timeout_ms=limit)
            self.stages[n] = Stage(spec, EchoEngine(info, EngineOptions()))
            if twins:
                self.stages[n].widen(lanes)
        self.scheduler = Scheduler(
            {n: {"policy": policy} for n in self.stages},
            widths=lambda n: self.stages[n].width,
        )
        self.slots = None if slots is None else Slots(slots)
        self.sink = Sink(set(self.stages), self.slots)
        self.executor = Executor(
            self.stages,
            self.scheduler,
            Intake(self.stages, cast(Any, None)),
            cast(Delivery, self.sink),
            FailPoints("", Path()),
            lanes,
        )

    def arrive(self, key: int, *path: int, deadline: int = LATE) -> None:
        """A query waits at the first stage of ``path``."""
        tree, _ = merge_paths([path])
        item = Item(os.urandom(16), 1, 1, tree, 0, 1, 1000)
        self.sink.keys[item.request_id] = key
        source = Source("float32", (2,), 1, tensor=torch.full((1, 2), float(key)))
        now = self.clock.now
        self.executor._queue(Ticket(key, item, path[0], source, 0, now, now, now, deadline, 0))

    def start(self) -> tuple[int, Batch] | None:
        """What the executor starts now: its stage, and the batch."""
        batch = self.executor.step(self.clock.now)
        return None if batch is None else (batch.stage, batch)

    def expect(self, stage: int) -> Batch:
        started = self.start()
        assert started is not None and started[0] == stage
        return started[1]

    def compute(self, batch: Batch) -> None:
        batch.compute_from_ns, batch.compute_to_ns = self.clock.now, self.clock.now + 1
        batch.result = torch.cat([t.source.tensor() for t in batch.tickets])
        self.executor.computed(batch)
