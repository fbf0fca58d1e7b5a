"""What the demo measures of a deployment: accuracy, latency, throughput, time per block, memory."""

from __future__ import annotations

import os
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from blockflow.bench.demo.data import TASKS, Images, Labels, labels
from blockflow.bench.statistics import percentile
from blockflow.client import Client
from blockflow.client.collector import BlockMeans
from blockflow.client.generator import TaskGenerator
from blockflow.client.pending import PendingRequest
from blockflow.client.result import Result
from blockflow.core.errors import make_error
from blockflow.launch.process_kpi import private_and_shared

IN_FLIGHT = 16
"""Requests kept under way for throughput: enough to keep every block of the path busy."""

WARM_UP = 8
DEADLINE_S = 30.0
"""A machine that is busy with other things is slow, and no reason to fail: with the tasks' own
deadlines the Dispatcher would refuse some of what only waits for a core."""

Step = Callable[[float], None]


@dataclass(frozen=True, slots=True)
class TaskFigures:
    """One task on all images. ``latencies_ms``: one request at a time, as the client sees it; the
    others are of as many ``images``."""

    task: str
    images: int
    accuracy: float
    latencies_ms: tuple[float, ...]
    per_second: float
    blocks: tuple[BlockMeans, ...]

    @property
    def p50_ms(self) -> float:
        return percentile(self.latencies_ms, 50)

    @property
    def p99_ms(self) -> float:
        return percentile(self.latencies_ms, 99)


@dataclass(frozen=True, slots=True)
class JointFigures:
    """All tasks asked in one request per image: a shared trunk runs once."""

    images: int
    accuracy: Mapping[str, float]
    latencies_ms: tuple[float, ...]
    per_second: float


@dataclass(frozen=True, slots=True)
class Memory:
    """Bytes of a deployment's worker processes, all together.

    Attributes:
        workers: number of processes.
        state: parameters and buffers.
        uss: private to the processes.
        pss: private, and the share of what is mapped together.
    """

    workers: int
    state: int
    uss: int
    pss: int


@dataclass(frozen=True, slots=True)
class Deployment:
    """Everything measured of one deployment."""

    name: str
    blocks: tuple[str, ...]
    tasks: Mapping[str, TaskFigures]
    joint: JointFigures | None
    memory: Memory


def measure_task(
    client: Client, task: str, images: Images, digits: Labels, requests: int, step: Step
) -> TaskFigures:
    """Accuracy and throughput with many requests in flight, then latency one at a time.

    Raises:
        BlockFlowError: the first error of any request; the demo expects none.
    """
    outputs, per_second = send_all(client, (task,), images, lambda f: step(f / 2))
    right = accuracy(outputs[task], labels(task, digits))
    latencies, blocks = one_by_one(client, (task,), images, requests, lambda f: step((1 + f) / 2))
    return TaskFigures(task, len(images), right, latencies, per_second, blocks)


def measure_joint(
    client: Client, images: Images, digits: Labels, requests: int, step: Step
) -> JointFigures:
    """The same with one request that names all tasks."""
    outputs, per_second = send_all(client, TASKS, images, lambda f: step(f / 2))
    right = {task: accuracy(outputs[task], labels(task, digits)) for task in TASKS}
    latencies, _ = one_by_one(client, TASKS, images, requests, lambda f: step((1 + f) / 2))
    return JointFigures(len(images), right, latencies, per_second)


def measure_memory(pids: Sequence[int], state: int) -> Memory:
    """Read the kernel's own account of these processes, now.

    ``pss`` depends on how many processes share the template's pages; ``uss`` does not.
    """
    sizes = [private_and_shared(pid) for pid in pids]
    return Memory(len(sizes), state, sum(uss for uss, _ in sizes), sum(pss for _, pss in sizes))


def accuracy(logits: NDArray[np.float32], right: Labels) -> float:
    """Share of rows whose largest logit is at the right class."""
    return float((logits.argmax(axis=1) == right).mean())


def send_all(
    client: Client, tasks: Sequence[str], images: Images, step: Step
) -> tuple[dict[str, NDArray[np.float32]], float]:
    """Send each image as a request of its own, IN_FLIGHT at a time.

    Returns:
        the logits per task, rows in the order of the images; and requests answered per second.
    """
    for _ in range(WARM_UP):
        client.infer(list(tasks), images[:1], deadline_s=DEADLINE_S)
    outputs: dict[str, list[NDArray[np.float32]]] = {task: [] for task in tasks}
    waiting: deque[PendingRequest[dict[str, Result]]] = deque()

    def take() -> None:
        for task, result in waiting.popleft().result().items():
            outputs[task].append(result.value)

    start = time.monotonic()
    for i in range(len(images)):
        if len(waiting) == IN_FLIGHT:
            take()
        row = images[i : i + 1]
        waiting.append(client.submit(list(tasks), row, deadline_s=DEADLINE_S))
        step((i + 1 - len(waiting)) / len(images))
    while waiting:
        take()
    duration_s = time.monotonic() - start
    step(1.0)
    return {task: np.concatenate(rows) for task, rows in outputs.items()}, len(images) / duration_s


def one_by_one(
    client: Client, tasks: Sequence[str], images: Images, requests: int, step: Step
) -> tuple[tuple[float, ...], tuple[BlockMeans, ...]]:
    """Latencies in ms, and mean times per block, of requests sent one after the other."""
    generator = TaskGenerator(
        client,
        tasks,
        lambda i: images[i % len(images)][None],
        count=requests,
        deadline_s=DEADLINE_S,
        on_progress=lambda done: step(done / requests),
    )
    collector = generator.run()
    summary = collector.summary()
    if summary.errors:
        code = next(iter(summary.errors))
        raise make_error(code, f"requests failed: {summary.errors}", where=", ".join(tasks))
    return tuple(r.latency_ms for r in collector.records()), summary.blocks


def age_s() -> float:
    """Seconds since this process began: what a person has waited, the imports included.

    Linux alone tells that, by a clock that nobody sets.
    """
    text = Path("/proc/self/stat").read_text(encoding="utf-8")
    # Field 22; the name in the second one may hold spaces and brackets, the others do not.
    ticks = int(text.rpartition(")")[2].split()[19])
    return time.clock_gettime(time.CLOCK_BOOTTIME) - ticks / os.sysconf("SC_CLK_TCK")
