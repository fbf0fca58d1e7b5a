"""Farm: an experiment's cells, spread over processes where that pays."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from contextlib import suppress
from dataclasses import astuple
from threading import Lock
from typing import Any

from blockflow.bench.simulation.experiment import Cell, Experiment, Runner
from blockflow.bench.simulation.outcome import Outcome
from blockflow.bench.simulation.watch import InvariantBroken
from blockflow.core.errors import from_dict, make_error

PAYS_S = 2.0
"""A process takes about half a second to start: less work than this is done here."""

Done = Callable[[Cell, Outcome], None]


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
    _spread(experiment, rest, min(processes, len(rest)), keep)
    return outcomes


def _spread(experiment: Experiment, cells: list[Cell], count: int, keep: Done) -> None:
    """Feed ``count`` children, each one cell at a time."""
    command = [sys.executable, "-m", "blockflow.bench.simulation.child"]
    pipes: Any = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    todo = iter(cells)
    lock = Lock()
    children = [subprocess.Popen(command, **pipes) for _ in range(count)]
    with ThreadPoolExecutor(count) as threads:
        try:
            work = [
                threads.submit(_feed, child, experiment, _shared(todo, lock), keep)
                for child in children
            ]
            finished, _ = wait(work, return_when=FIRST_EXCEPTION)
            for future in finished:
                future.result()
        finally:  # before the threads are waited for: they end when their child does
            for child in children:
                child.kill()
                child.wait()
    for child in children:
        for pipe in (child.stdin, child.stdout):
            if pipe is not None:
                with suppress(BrokenPipeError):
                    pipe.close()


def _shared(todo: Iterator[Cell], lock: Lock) -> Iterator[Cell]:
    while True:
        with lock:
            cell = next(todo, None)
        if cell is None:
            return
        yield cell


def _feed(
    child: subprocess.Popen[str], experiment: Experiment, cells: Iterator[Cell], keep: Done
) -> None:
    if child.stdin is None or child.stdout is None:
        raise make_error("INTERNAL", "a simulating process has no pipes")
    try:
        child.stdin.write(json.dumps(experiment.to_dict()) + "\n")
        for cell in cells:
            child.stdin.write(json.dumps(astuple(cell)) + "\n")
            child.stdin.flush()
            line = child.stdout.readline()
            if not line:
                break
            keep(cell, _outcome(json.loads(line)))
        else:
            return
    except BrokenPipeError:
        pass
    raise make_error("INTERNAL", f"a simulating process ended (status {child.wait()})")


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
