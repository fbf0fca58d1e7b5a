"""The pipeline at work: its topology on the call's device, and what clients see of it.

What the experiments under load have in common. Clients are the thesis's ``TaskGenerator``; ways
are whole tensors and handles side by side in one system, over the same artifacts.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from blockflow.bench.in_process import Chain, InProcess, example
from blockflow.bench.pipeline_figures import TENSORMQ, ZEROMQ
from blockflow.bench.pipeline_ways import block_names, task_name, topology
from blockflow.bench.results import Figure
from blockflow.bench.statistics import percentile
from blockflow.bench.thesis.beside import AGAIN
from blockflow.bench.thesis.rates_model import refused_of
from blockflow.client import Client, TaskGenerator
from blockflow.client.collector import OK, Record
from blockflow.control.system import System
from blockflow.core import limits
from blockflow.core.errors import make_error
from blockflow.repository.repository import BlockRepository

WAYS = (TENSORMQ, ZEROMQ)
TWICE = TENSORMQ + AGAIN
ARMS = (*WAYS, TWICE)
"""The ways, and one of them once more, in processes of its own: what equal things differ by."""

DEADLINE_S = limits.MAX_DEADLINE_MS / 1e3
"""Nothing is to fail because it is late: the thesis's requests had no deadline."""

MIN_ARRIVALS = 30
"""In a visit of an open loop, on average."""

_REFUSED, _LATE = "OVERLOADED", "DEADLINE_EXCEEDED"
_MIN_ANSWERS = 2


def served(chain: Chain, device: str, ways: Sequence[str] = WAYS, tasks: int = 1) -> dict[str, Any]:
    """Both ways side by side, one worker per block.

    Args:
        device: of all of them, as a topology says it.
        tasks: that share each way's path; their names are :func:`task_of`.
    """
    made = topology(chain, ways)
    blocks = [{**spec, "device": device} for spec in made["blocks"]]
    named = {
        task_of(way, n): {"path": block_names(way, chain), "deadline_ms": limits.MAX_DEADLINE_MS}
        for way in ways
        for n in range(tasks)
    }
    return {"blocks": blocks, "tasks": named}


def task_of(way: str, number: int = 0) -> str:
    """The task of a way's n-th client."""
    return f"{task_name(way)}-{number}"


def short(block: str) -> str:
    """A block's own name: the topology's says its way and its artifact's form as well."""
    return block.rpartition(".")[2]


def input_of(chain: Chain, rows: int = 1) -> np.ndarray[Any, Any]:
    """The seeded input of the chain's first block."""
    return example(BlockRepository(chain.repository).info(chain.blocks[0]).contract.input, rows)


def replicas(system: System, way: str) -> list[dict[str, Any]]:
    """The status of a way's workers, in the order of the path."""
    prefix = f"{task_name(way)}."
    return [w for w in system.status()["workers"] if w["worker"].startswith(prefix) and w["pid"]]


def processes(system: System, way: str) -> dict[str, int]:
    """Short name of a block -> process id of its worker, in the order of the path."""
    return {short(w["worker"]): w["pid"] for w in replicas(system, way)}


def service_ms(chain: Chain, runs: int) -> dict[str, float]:
    """The thesis's offline times: milliseconds of each block, called in turn on an idle machine;
    on a device until it has computed."""
    with InProcess(chain) as alone:
        alone.run(1)
        found = [alone.run(1) for _ in range(runs)]
    return {
        short(block): percentile(times, 50)
        for block, times in zip(chain.blocks, zip(*found, strict=True), strict=True)
    }


# --- clients -------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Asked:
    """A visit's requests.

    Attributes:
        records: of all clients; times from the visit's begin.
        seconds: that requests were sent for.
        earlier: answers of the visits before it that were too short.
    """

    records: Sequence[Record]
    seconds: float
    earlier: int = 0

    @property
    def latency_ms(self) -> list[float]:
        """Of those answered."""
        return [r.latency_ms for r in self.records if r.outcome == OK]

    @property
    def answers(self) -> int:
        """All that a meter has seen which ran from the begin of the first of these visits."""
        return self.earlier + len(self.latency_ms)

    @property
    def refused(self) -> float:
        """Share of the requests that were not answered: they have no time."""
        return refused_of(self.records)

    @property
    def steady_ms(self) -> list[float]:
        """Of those answered, but for each task's first: clients begin together, and whose request
        comes first finds everything idle, as none does later."""
        begun: set[str] = set()
        found = []
        for r in (r for r in self.records if r.outcome == OK):
            if r.task in begun:
                found.append(r.latency_ms)
            begun.add(r.task)
        return found

    @property
    def rate(self) -> float:
        """Answers per second of clients that ask in turn.

        Between the first answer and the last one within the time of sending: neither the filling
        nor the emptying of the pipeline counts.

        Raises:
            ValueError: fewer than two answers.
        """
        done = sorted(r.done_ms for r in self.records if r.outcome == OK)
        inside = [at for at in done if at <= self.seconds * 1e3]
        counted = inside if len(inside) >= _MIN_ANSWERS else done
        if len(counted) < _MIN_ANSWERS:
            raise ValueError(f"{len(counted)} answers make no rate")
        return (len(counted) - 1) * 1e3 / (counted[-1] - counted[0])


def ask_in_turn(clients: Sequence[Client], tasks: Sequence[str], x: Any, seconds: float) -> Asked:
    """Each client asks its task again as soon as it is answered, for ``seconds``.

    Longer, all over again, where that was too short for two answers of each.

    Raises:
        BlockFlowError: a request ended with an error, but for a refusal; TIMEOUT, there were no
            answers.
    """
    earlier = 0
    while seconds <= DEADLINE_S:
        found = Asked(_in_turn(clients, tasks, x, seconds), seconds, earlier)
        if len(found.latency_ms) >= _MIN_ANSWERS * len(clients):
            return found
        earlier = found.answers
        seconds *= 2
    raise make_error("TIMEOUT", f"no two answers in {seconds / 2:.0f} s", where=", ".join(tasks))


def _in_turn(
    clients: Sequence[Client], tasks: Sequence[str], x: Any, seconds: float
) -> list[Record]:
    generators = [
        TaskGenerator(client, task, [x], duration_s=seconds, deadline_s=DEADLINE_S)
        for client, task in zip(clients, tasks, strict=True)
    ]
    threads = [threading.Thread(target=g.run, daemon=True) for g in generators]
    try:
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        for generator in generators:  # after Ctrl-C nobody asks on
            generator.stop()
    return _ended(r for g in generators for r in g.collector.records())


def _ended(records: Iterable[Record], *expected: str) -> list[Record]:
    """All of them, if each ended with an answer, a refusal, or as ``expected``.

    Raises:
        BlockFlowError: of the outcome of one that did not: what a dying system leaves is no
            measurement.
    """
    found = list(records)
    for record in found:
        if record.outcome not in (OK, _REFUSED, *expected):
            raise make_error(
                record.outcome, "a request of the measurement failed", where=f"task {record.task}"
            )
    return found


@dataclass(frozen=True, slots=True)
class Flood:
    """An open loop: a Poisson process of requests that waits for no answer.

    Attributes:
        rate: requests per second.
        seconds: that they are sent for; longer at a rate so low that hardly any would come.
        seed: of their times.
    """

    rate: float
    seconds: float
    seed: int
    deadline_s: float = DEADLINE_S

    def ask(self, client: Client, task: str, x: Any) -> Asked:
        """Send, and wait for every outcome.

        Raises:
            BlockFlowError: a request was neither answered nor refused nor late.
        """
        lasts = max(self.seconds, MIN_ARRIVALS / self.rate)
        generator = TaskGenerator(
            client,
            task,
            [x],
            mode="poisson",
            rate=self.rate,
            duration_s=lasts,
            seed=self.seed,
            deadline_s=self.deadline_s,
        )
        return Asked(_ended(generator.run().records(), _LATE), lasts)


def callers_of(chain: Chain) -> int:
    """Two per block: enough to keep all of them busy, and what the Dispatcher admits whatever a
    request waits (docs/dispatcher.md, Overload)."""
    return 2 * len(chain.blocks)


def callers_rate(client: Client, task: str, x: Any, seconds: float, callers: int) -> float:
    """Answers per second to so many callers that each wait for theirs."""
    return ask_in_turn([client] * callers, [task] * callers, x, seconds).rate


def patience_s(callers: int, rate: float) -> float:
    """The deadline of an open loop that may ask for more than can be done.

    Three times what ``callers`` wait for an answer at ``rate`` answers per second, a second at
    least: the Dispatcher bounds its queues by the time to the deadlines.
    """
    return max(1.0, 3 * callers / rate)


def warm(client: Client, tasks: Iterable[str], x: Any, requests: int = 3) -> None:
    """The first requests on every path, which map arenas and fill caches."""
    for task in tasks:
        for _ in range(requests):
            client.infer(task, x, deadline_s=DEADLINE_S)


def once(figures: Iterable[Figure]) -> list[Figure]:
    """For tables: without the way that is there for the noise only."""
    return [f for f in figures if not f.mode.endswith(AGAIN)]


def state_mib(folder: Path, block: str) -> float:
    """Parameters and buffers of a stored block."""
    return BlockRepository(folder).info(block).state_bytes / 2**20
