"""``make bench-tasks``: what thousands of tasks on the same blocks cost.

A task is a name for a path: it has no process and no memory of a model. So a system of thousands of
tasks should answer as one of a few does, and rest as quietly. One system gets the same two blocks
with another number of tasks again and again, in turn, so that each round has all of them on the
same machine a moment apart. What clients see is measured some seconds after an update, when all
figures of the new tasks have been told.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import count as count_from
from pathlib import Path

import psutil
from rich.console import Console

from blockflow.bench.grid import Grid, digits, ms
from blockflow.bench.interrupts import orderly
from blockflow.bench.options import parse_rounds, result_path
from blockflow.bench.own_system import own_settings, workplace
from blockflow.bench.results import (
    Figure,
    ResultFile,
    bursts_figure,
    interval_figure,
    make_command,
)
from blockflow.bench.statistics import percentile, ratio_interval
from blockflow.bench.tasks_client import TaskClient
from blockflow.bench.turns import took_ms
from blockflow.control.system import System
from blockflow.core import limits
from blockflow.core.model import TensorSpec
from blockflow.repository.echo import save_echo
from blockflow.repository.repository import BlockRepository

SPEC = TensorSpec("float32", ("rows", 4))
BLOCKS = ("trunk", "head")
TIMES = {
    "update": "until the tasks are served",
    "first": "round trip of a task's first request",
    "request": "round trip of the others, one at a time, the tasks in turn",
    "refusal": "of a request for a task that is not there, among similar names",
    "status": "all that `blockflow status` shows, made and written as JSON",
}
RESTS = ("dispatcher", "control plane")
_REQUEST, _RATIO = "request", "request, to the fewest tasks"
_REST = "cpu at rest"
_ASKED = 64
"""Tasks that are asked for: spread over all, and few enough to be asked for again and again."""


@dataclass(frozen=True, slots=True)
class Plan:
    """What to do.

    Attributes:
        sizes: numbers of tasks, rising.
        rounds: each has every size once.
        requests: of one size in one round.
        refusals: likewise.
        settle_s: after an update, until all figures of all tasks have been told.
        rest_s: how long nothing is asked while the processes' cpu time is read.
    """

    sizes: tuple[int, ...] = (8, 512, limits.MAX_TASKS)
    rounds: int = 6
    requests: int = 1000
    refusals: int = 20
    settle_s: float = 10.0
    rest_s: float = 6.0


QUICK = Plan((2, 40), rounds=2, requests=20, refusals=3, settle_s=0.1, rest_s=0.5)


@dataclass(slots=True)
class Found:
    """Of one number of tasks: milliseconds by what was timed, a list per round, and what the
    processes used at rest, in milliseconds of cpu time per second, a number per round."""

    times: dict[str, list[list[float]]] = field(default_factory=lambda: {n: [] for n in TIMES})
    rests: dict[str, list[float]] = field(default_factory=lambda: {n: [] for n in RESTS})


def task(number: int) -> str:
    return f"tenant-{number:04}-quality"


class Bench:
    """One run against a running system, which serves the blocks."""

    def __init__(self, plan: Plan, system: System, client: TaskClient) -> None:
        self._plan = plan
        self._system = system
        self._client = client
        self._unknown = count_from(0)

    def run(self, advance: Callable[[], None] = lambda: None) -> dict[int, Found]:
        """All rounds. In every other one the sizes come in reverse, so that none is always the one
        after another."""
        found = {size: Found() for size in self._plan.sizes}
        for n in range(self._plan.rounds):
            for size in self._plan.sizes[:: -1 if n % 2 else 1]:
                self._one(size, found[size])
                advance()
        return found

    def _one(self, size: int, found: Found) -> None:
        tasks = {task(n): list(BLOCKS) for n in range(size)}
        body = {"blocks": list(BLOCKS), "tasks": tasks}
        update = took_ms(lambda: self._system.apply(body))
        time.sleep(self._plan.settle_s)
        rests = self._at_rest()
        asked = list(tasks)[:: -(-size // _ASKED)]
        # Each time other names, as of somebody who cannot spell: of one that comes again the answer
        # might be known.
        unknown = [f"tenant-{next(self._unknown):05}-quality" for _ in range(self._plan.refusals)]
        times = {
            "update": [update],
            **self._client.times(asked, self._plan.requests, unknown),
            "status": [took_ms(lambda: json.dumps(self._system.status()))],
        }
        for name, samples in times.items():
            found.times[name].append(samples)
        for name, used in zip(RESTS, rests, strict=True):
            found.rests[name].append(used)

    def _at_rest(self) -> tuple[float, float]:
        """Of the Dispatcher, and of this process, which is the control plane's."""
        pid = self._system.commands.worker("dispatcher")["pid"]
        processes = [psutil.Process(pid), psutil.Process()]
        before, began = [_cpu_ms(p) for p in processes], time.monotonic()
        time.sleep(self._plan.rest_s)
        took = time.monotonic() - began
        first, second = ((_cpu_ms(p) - b) / took for p, b in zip(processes, before, strict=True))
        return first, second


def _cpu_ms(process: psutil.Process) -> float:
    used = process.cpu_times()
    return float(used.user + used.system) * 1e3


def measure(
    plan: Plan,
    folder: Path,
    advance: Callable[[], None] = lambda: None,
    system: System | None = None,
) -> dict[int, Found]:
    """All rounds.

    Args:
        folder: where blocks and state go.
        advance: called after each number of tasks in each round.
        system: not started yet, over ``folder / "blocks"``; by default one of its own.
    """
    repository = BlockRepository(folder / "blocks")
    for block in BLOCKS:
        save_echo(repository, block, SPEC)
    running = system or System(own_settings(folder))
    with running, TaskClient(running.client_endpoint) as client:
        return Bench(plan, running, client).run(advance)


def figures(found: dict[int, Found]) -> list[Figure]:
    """Times and cpu by number of tasks (``mode``), and how much longer a request takes."""
    out = []
    for size, one in found.items():
        mode = str(size)
        out += [bursts_figure(name, mode, bursts, {}) for name, bursts in one.times.items()]
        out += [
            interval_figure(_REST, mode, None, used, "ms/s", {"process": name})
            for name, used in one.rests.items()
        ]
    fewest, *others = found
    base = [percentile(b, 50) for b in found[fewest].times[_REQUEST]]
    for size in others:
        other = [percentile(b, 50) for b in found[size].times[_REQUEST]]
        out.append(interval_figure(_RATIO, str(size), None, ratio_interval(base, other), "x"))
    return out


def grid(found: Sequence[Figure]) -> Grid:
    """A row per number of tasks."""
    at = {(f.mode, f.name, f.labels.get("process")): f for f in found}
    heads = ["tasks"]
    for name in TIMES:
        heads.append(f"{name} ms")
        if name == _REQUEST:
            heads += ["p99 ms", "to the fewest"]
    heads += [f"{name} at rest ms/s" for name in RESTS]
    rows = []
    for mode in dict.fromkeys(f.mode for f in found):
        row = [mode]
        for name in TIMES:
            figure = at[mode, name, None]
            row.append(ms(figure.value))
            if name == _REQUEST:
                ratio = at.get((mode, _RATIO, None))
                spread = "1" if ratio is None else _with_interval(ratio)
                row += [ms(figure.p99_ms), spread]
        row += [digits(at[mode, _REST, name].value) for name in RESTS]
        rows.append(tuple(row))
    return Grid("tasks", tuple(heads), rows, frozenset({"tasks"}))


def _with_interval(figure: Figure) -> str:
    bounds = figure.interval
    return f"{bounds.value:.3f} ({bounds.low:.3f}-{bounds.high:.3f})"


@orderly
def main(arguments: list[str]) -> int:
    """Run, print, write the figures."""
    plan, args = parse_rounds(arguments, "tasks", __doc__, Plan(), QUICK)
    console = Console()
    with workplace(console) as (folder, bar):
        step = bar.add_task("tasks", total=plan.rounds * len(plan.sizes))
        made = figures(measure(plan, folder, lambda: bar.advance(step)))
    console.print(grid(made).rich())
    path = result_path(args, "tasks", whole=plan.rounds >= Plan().rounds)
    ResultFile(path, "tasks", make_command("bench-tasks", arguments)).write(made)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
