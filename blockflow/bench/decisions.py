"""What a decision costs: microseconds of each policy with many queries in the queue.

``python -m blockflow.bench.decisions`` prints the table; with ``--policy name:option=value,...``,
which may be repeated, of these policies instead of the usual ones. Scheduling must not be felt
beside a block's compute: at most 50 us with 64 queries waiting is the aim. Two things are timed:
the *decision*, which is ``decide`` alone, and the whole *turn*: what the policy is told since the
last one as well, that a batch is done (``done``) and who waits now (``arrive`` of each query that
goes on in this worker, and of each new one). All of it in a chain; in a tree, where each task goes
on to a head of its own and has a deadline that is looked at; and in that tree with deadlines that
are tight, so that batches stay smaller.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import Console

from blockflow.batching.facts import StageFacts
from blockflow.batching.policy import Policy, Query, Run, WaitUntil
from blockflow.batching.registry import create_policy, policy_problems
from blockflow.batching.shares import TaskShare
from blockflow.batching.sliced import OPTION
from blockflow.bench.interrupts import orderly
from blockflow.bench.results import Figure, figure_table
from blockflow.bench.simulation.text import OWN_POLICIES, parse_policy
from blockflow.bench.statistics import percentile
from blockflow.core.errors import RequestError
from blockflow.core.profile import Point, StageProfile

SPECS: Sequence[Mapping[str, Any]] = (
    {"policy": "none"},
    {"policy": "window"},
    {"policy": "window", "max_delay_ms": 5},
    {"policy": "lbci", "t_opt_ms": 400},
    {"policy": "dvabatch"},
    {"policy": "dvabatch", "policies": ["load", "input", "operator"]},
)
TRUNK = (1, 2, 3)
_MS = 1_000_000
_FAR = 10**15
_NEAR = 1500 * _MS
"""Nearer than a batch of the most rows would take if all of them ran through every head, so that
policies ask who would be late; and nobody is."""
TIGHT = 600 * _MS
"""So near that somebody would be late in a batch of the most rows."""

DECISION, TURN = "decision", "turn"


def measure(
    spec: Mapping[str, Any],
    queued: int,
    tasks: int,
    decisions: int,
    lanes: int = 1,
    heads: int = 1,
    due_ns: int | None = None,
) -> list[Figure]:
    """CPU time of ``decide`` and of whole turns while ``queued`` queries wait, over whole lives of
    batches.

    Time goes on virtually; each query that leaves is followed by a new one. With several ``lanes``
    as many batches run, of one stage as well, where the policy takes that. The tasks take turns
    with the ``heads``: one is the end of a chain. Each query has ``due_ns`` till its deadline; by
    default so much that nobody is late.

    Returns:
        the decision and the turn, in microseconds each.
    """
    stages = tuple(range(1, len(TRUNK) + heads + 1))
    policy, now, key = _policy(spec, tasks, stages), 0, 0
    ways = [(*TRUNK, stages[len(TRUNK) + task % heads]) for task in range(tasks)]
    due = due_ns or (_FAR if heads == 1 else _NEAR)
    policy.lanes = lanes
    running: deque[Run] = deque()
    under_way: dict[int, Query] = {}
    clock = _Clock()
    deciding: list[float] = []
    turns: list[float] = []
    rows: list[int] = []
    waiting: dict[int, Query] = {}
    while len(deciding) < decisions:
        new = []
        while len(waiting) < queued:
            task = key % tasks
            ahead = ways[task][1:]
            waiting[key] = Query(key, 1, 1, now, now, now + due, (8,), True, task, ahead)
            new.append(waiting[key])
            key += 1
        with clock:
            for query in new:
                policy.arrive(query, now)
        told = clock.take()
        busy = () if policy.SIDE_BY_SIDE else {run.stage for run in running}
        with clock:
            decision = policy.decide(now, busy)
        deciding.append(clock.take())
        if isinstance(decision, Run):
            running.append(decision)
            rows.append(len(decision.keys))
            under_way |= {one: waiting.pop(one) for one in decision.keys}
        if len(running) == lanes or (running and not isinstance(decision, Run)):
            now += _MS
            oldest = running.popleft()
            stage, keys = oldest.stage, oldest.keys
            ran = [under_way.pop(one) for one in keys]
            on = [
                query._replace(stage=rest[0], ready_ns=now, first=False, ahead=rest[1:])
                for query in ran
                if (rest := query.ahead)
            ]
            waiting |= {query.key: query for query in on}
            with clock:
                policy.done(stage, keys, now)
                for query in on:
                    policy.arrive(query, now)
            told += clock.take()
        elif isinstance(decision, WaitUntil):
            now = decision.at_ns
        turns.append(deciding[-1] + told)
    labels = {"queued": queued, "tasks": tasks, "rows": round(statistics.fmean(rows or [0]), 1)}
    parts = [f", {n} {what}" for n, what in ((lanes, "lanes"), (heads, "heads")) if n > 1]
    if due_ns is not None:
        parts.append(f", due in {due_ns // _MS} ms")
    return [
        Figure.of(
            name,
            policy_name(spec) + "".join(parts),
            statistics.fmean(spent),
            "us",
            len(spent),
            {**labels, "p99_us": round(percentile(spent, 99), 2)},
        )
        for name, spent in ((DECISION, deciding), (TURN, turns))
    ]


def ways_for(spec: Mapping[str, Any], tasks: int) -> Sequence[tuple[int, int | None]]:
    """Heads and time till the deadline: a chain, a tree with a head for each task, and that with
    tight deadlines. (Stages of several blocks are a chain's.)"""
    chain = (1, None)
    return (chain,) if OPTION in spec or tasks == 1 else (chain, (tasks, None), (tasks, TIGHT))


class _Clock:
    """CPU time spent within ``with``, in microseconds."""

    def __init__(self) -> None:
        self._begin = 0
        self._spent = 0

    def __enter__(self) -> None:
        self._begin = time.thread_time_ns()

    def __exit__(self, *_: object) -> None:
        self._spent += time.thread_time_ns() - self._begin

    def take(self) -> float:
        """What has been spent since the last call."""
        spent, self._spent = self._spent, 0
        return spent / 1e3


def policy_name(spec: Mapping[str, Any]) -> str:
    """A policy and its options, for tables."""
    options = [
        f"{name}={'+'.join(map(str, value)) if isinstance(value, list) else value}"
        for name, value in spec.items()
        if name != "policy"
    ]
    return " ".join([spec["policy"], *options])


def _facts(stages: Sequence[int]) -> dict[int, StageFacts]:
    points = tuple(
        Point(1, b, None, 10, ms, ms, ms, ms, ms, ms, 0.01, 0)
        for b, ms in ((1, 10.0), (2, 15.0), (4, 25.0), (8, 45.0), (16, 85.0), (32, 160.0))
    )
    profile = StageProfile("block", "0" * 64, "echo", "fp32", "here", points)
    return {s: StageFacts(f"block{s}", 32, 1, profile) for s in stages}


def _policy(spec: Mapping[str, Any], tasks: int, stages: Sequence[int]) -> Policy:
    shares = [TaskShare(weight=1.0 + i % 3) for i in range(tasks)]
    return create_policy(spec, stages, _facts(stages), shares)


def _spec(text: str) -> Mapping[str, Any]:
    """A policy of the command line, that can be made."""
    try:
        spec = parse_policy(text)
    except RequestError as exc:
        raise argparse.ArgumentTypeError(exc.message) from exc
    if not spec:
        raise argparse.ArgumentTypeError(f"{OWN_POLICIES!r} is no policy here")
    problems = policy_problems(spec, "$", list(_facts((*TRUNK, 4)).values()))
    if problems:
        raise argparse.ArgumentTypeError("; ".join(map(str, problems)))
    return spec


@orderly
def main(arguments: list[str]) -> int:
    """Measure the policies and print the table; 0."""
    parser = argparse.ArgumentParser(prog="python -m blockflow.bench.decisions")
    parser.add_argument("--queued", type=int, default=64, help="queries in the queue")
    parser.add_argument("--tasks", type=int, default=8, help="tasks that share the block")
    parser.add_argument("--lanes", type=int, default=1, help="batches that run at once")
    parser.add_argument("--decisions", type=int, default=4000, help="decisions per policy")
    parser.add_argument(
        "--policy",
        type=_spec,
        action="append",
        metavar="NAME[:OPTION=VALUE,...]",
        help="measure this one, as simulate writes it; may be repeated (default: the usual ones)",
    )
    options = parser.parse_args(arguments)
    console = Console()
    figures = [
        figure
        for spec in options.policy or SPECS
        for heads, due in ways_for(spec, options.tasks)
        for figure in measure(
            spec, options.queued, options.tasks, options.decisions, options.lanes, heads, due
        )
    ]
    title = f"Cost of a decision, {options.queued} queued, {options.tasks} tasks"
    console.print(figure_table(title, figures))
    for f in figures:
        console.print(f"{f.mode}, {f.name}: p99 {f.labels['p99_us']} us")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
