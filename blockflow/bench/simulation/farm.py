"""Farm: an experiment's cells, spread over processes where that pays."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from contextlib import suppress
from dataclasses import astuple
from threading import Lock
from typing import Any, TypeVar

from blockflow.bench.simulation.experiment import Cell, Experiment, Runner
from blockflow.bench.simulation.outcome import Outcome
from blockflow.bench.simulation.watch import InvariantBroken
from blockflow.core.errors import from_dict, make_error

PAYS_S = 2.0
"""A process takes about half a second to start: less work than this is done here."""

_LOOK_S = 0.25

Done = Callable[[Cell, Outcome], None]
Job = TypeVar("Job")


def run_all(experiment: Experiment, processes: int, done: Done) -> dict[Cell, Outcome]:
    """Run every cell.

    The first runs in this process and shows how long the others will take.

    Args:
        experiment: what to run.
        processes: at most so many at once.
        done: is called after every cell, in whatever order they end, never by two at once.

    Raises:
        TopologyError: a policy does not fit the system.
        InvariantBroken: a defect was found.
    """
    cells = experiment.cells()
    outcomes: dict[Cell, Outcome] = {}
    lock = Lock()

    def keep(cell: Cell, outcome: Outcome) -> None:
        with lock:
            outcomes[cell] = outcome
            done(cell, outcome)

    runner = Runner(experiment)
    rates = experiment.rates
    begin = time.perf_counter()
    keep(cells[0], runner.run(cells[0]))
    took = time.perf_counter() - begin
    rest = cells[1:]
    # A run's cost goes with its queries; arrivals that have their own rate have one only.
    weights = [rates[c.rate] / rates[0] if rates[0] else 1.0 for c in rest]
    if processes < 2 or took * sum(weights) < PAYS_S:
        for cell in rest:
            keep(cell, runner.run(cell))
        return outcomes
    spread(
        *("blockflow.bench.simulation.child", experiment.to_dict(), rest, astuple),
        min(processes, len(rest)),
        lambda cell, answer: keep(cell, _outcome(answer)),
    )
    return outcomes


def spread(
    module: str,
    head: Mapping[str, Any],
    jobs: Sequence[Job],
    to_line: Callable[[Job], Any],
    count: int,
    take: Callable[[Job, dict[str, Any]], None],
) -> None:
    """Feed ``count`` children, each one job at a time.

    Args:
        module: a child's program: it reads ``head``, then jobs, and answers each with a line.
        head: the first line, as JSON.
        to_line: a job's line, as JSON.
        count: of processes.
        take: is given every answer, in whatever order they come, perhaps by several threads.

    Raises:
        BlockFlowError: INTERNAL: a child has ended; or what ``take`` raises.
    """
    command = [sys.executable, "-m", module]
    pipes: Any = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    # Ctrl-C would go to the whole terminal's group, also to a child that still imports.
    pipes["start_new_session"] = True
    todo = iter(jobs)
    lock = Lock()

    def feed(child: subprocess.Popen[str]) -> None:
        if child.stdin is None or child.stdout is None:
            raise make_error("INTERNAL", "a simulating process has no pipes")
        try:
            child.stdin.write(json.dumps(head) + "\n")
            for job in _shared(todo, lock):
                child.stdin.write(json.dumps(to_line(job)) + "\n")
                child.stdin.flush()
                line = child.stdout.readline()
                if not line:
                    break
                take(job, json.loads(line))
            else:
                return
        except BrokenPipeError:
            pass
        raise make_error("INTERNAL", f"a simulating process ended (status {child.wait()})")

    children: list[subprocess.Popen[str]] = []
    with ThreadPoolExecutor(count) as threads:
        try:
            for _ in range(count):
                children.append(subprocess.Popen(command, **pipes))
            feeding = [threads.submit(feed, child) for child in children]
            while feeding:
                # A signal may wake one of the threads; its handler waits for this one to turn.
                ended, left = wait(feeding, _LOOK_S, FIRST_EXCEPTION)
                for future in ended:
                    future.result()
                feeding = list(left)
        finally:  # before the threads are waited for: they end when their child does
            for child in children:
                child.kill()
                child.wait()
    for child in children:
        for pipe in (child.stdin, child.stdout):
            if pipe is not None:
                with suppress(BrokenPipeError):
                    pipe.close()


def _shared(todo: Iterator[Job], lock: Lock) -> Iterator[Job]:
    while True:
        with lock:
            job = next(todo, None)
        if job is None:
            return
        yield job


def _outcome(answer: dict[str, Any]) -> Outcome:
    if "error" in answer:
        raise from_dict(answer["error"])
    if "broken" in answer:
        rule, now, what, *notes = answer["broken"]
        exc = InvariantBroken(rule, now, what)
        for note in notes:
            exc.add_note(note)
        raise exc
    return Outcome.from_dict(answer["outcome"])
