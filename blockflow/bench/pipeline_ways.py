"""The ways that a chain of blocks is run, and one inference on each of them."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import numpy as np

from blockflow.bench.batching.traffic import saturate
from blockflow.bench.in_process import Chain
from blockflow.bench.pipeline_figures import (
    AWAKE,
    IN_LANES,
    ONE_WORKER,
    ONE_WORKER_AWAKE,
    REPLICATED,
    TENSORMQ,
    TENSORMQ_AWAKE,
    ZEROMQ,
    Sample,
)
from blockflow.bench.simulation.arrivals import Arrival
from blockflow.client import Client, Result
from blockflow.dispatcher.wakefulness import LINGER_NS

WAYS = (TENSORMQ, ZEROMQ, ONE_WORKER, TENSORMQ_AWAKE, ONE_WORKER_AWAKE)
"""In workers: one process per block with handles, the same with whole tensors, all in one; and two
of them with idle cores kept awake."""

OUTSTANDING = 8
_DEADLINE_S = 60.0
_ASLEEP_S = 2 * LINGER_NS / 1e9
"""After a way that keeps cores awake: the next one is not to find them so."""


def block_names(way: str, chain: Chain) -> list[str]:
    """The chain's blocks as the topology calls them on this way."""
    return [f"{task_name(way.removesuffix(AWAKE))}.{b}" for b in chain.blocks]


def task_name(way: str) -> str:
    return way.replace(", ", "-").replace(" ", "-")


def topology(chain: Chain, ways: Sequence[str], seats: int = 1) -> dict[str, Any]:
    """All ways side by side in one system: the same artifacts under a set of names for each.

    ``REPLICATED`` has its worker ``seats`` times, ``IN_LANES`` one with so many lanes. Those that
    keep cores awake take the blocks of the way without that, which must be there.
    """
    blocks: list[dict[str, Any]] = []
    tasks: dict[str, Any] = {}
    for way in ways:
        names = block_names(way, chain)
        task: dict[str, Any] = {"path": names, "deadline_ms": int(_DEADLINE_S * 1e3)}
        tasks[task_name(way)] = task
        if way.endswith(AWAKE):
            task["cpu_latency_us"] = 0
            continue
        for name, block in zip(names, chain.blocks, strict=True):
            spec: dict[str, Any] = {
                "name": name,
                "block": block,
                "threads": chain.threads,
                "engine": chain.engine,
                "precision": chain.precision,
                "options": dict(chain.options),
                "device": chain.device,
            }
            if way == ZEROMQ:
                spec["mode"] = "zeromq"
            if way in (ONE_WORKER, IN_LANES, REPLICATED):
                spec["worker"] = task_name(way)
            if way == REPLICATED:
                spec["replicas"] = seats
            if way == IN_LANES:
                spec["lanes"] = seats
            blocks.append(spec)
    # By ways that rest while another one is measured.
    return {"blocks": blocks, "tasks": tasks, "oversubscribe": True}


def in_process_sample(ms: Sequence[float]) -> Sample:
    """Blocks called in turn: computing is all there is."""
    return Sample(sum(ms), tuple((0.0, 0.0, 0.0, m) for m in ms))


def run_once(client: Client, way: str, x: np.ndarray) -> Sample:
    """One request, alone in the system."""
    start = time.monotonic_ns()
    result: Result = client.infer(task_name(way), x)
    total = (time.monotonic_ns() - start) / 1e6
    if way.endswith(AWAKE):
        time.sleep(_ASLEEP_S)
    hops = tuple((t.transit_ms, t.wait_ms, t.overhead_ms, t.compute_ms) for t in result.timings)
    return Sample(total, hops, result.ingress_ms + result.egress_ms)


def run_many(
    client: Client, way: str, x: np.ndarray, seconds: float, outstanding: int = OUTSTANDING
) -> float:
    """Rows per second with so many requests under way all the time."""
    query = Arrival(0, task_name(way), len(x), None)
    return saturate(client, [query], lambda _: x, outstanding, seconds)
