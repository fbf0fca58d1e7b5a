"""Plans of ``make bench`` and ``make bench-pipeline``: what they measure, and how much of it."""

from __future__ import annotations

import argparse
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from blockflow.bench.contenders import CONTENDERS, USUAL, Model
from blockflow.bench.pipeline_figures import (
    IN_LANES,
    ONE_WORKER,
    ONE_WORKER_AWAKE,
    REPLICATED,
    TENSORMQ,
    TENSORMQ_AWAKE,
)
from blockflow.bench.pipeline_ways import WAYS
from blockflow.bench.statistics import MIN_PAIRS

_ABOUT = "What a modular pipeline costs beside its compute: several ways, interleaved in one run."


@dataclass(frozen=True, slots=True)
class Load:
    """Throughput at so many rows per request.

    Attributes:
        rounds: visits of each way.
        seconds: of a visit, from when every request has been answered once.
        engines: the only ones that it is measured of; empty: all.
        ways: the only ones that it is measured on, beside the bound.
    """

    rounds: int
    seconds: float
    engines: tuple[str, ...] = ()
    ways: tuple[str, ...] = (TENSORMQ, REPLICATED, IN_LANES)

    def of(self, engine: str) -> bool:
        """Whether it is measured of this one."""
        return not self.engines or engine in self.engines


@dataclass(frozen=True, slots=True)
class Plan:
    """What is measured, and how much of it.

    Attributes:
        model: of the zoo.
        engines: labels of contenders.
        batches: rows per request -> rounds.
        loads: rows per request -> throughput; empty: none is measured.
        starts: workers that are started one by one.
        messages: bare messages per gap.
    """

    model: Model
    engines: tuple[str, ...]
    ways: tuple[str, ...]
    batches: Mapping[int, int]
    loads: Mapping[int, Load]
    starts: int
    messages: int

    def covers(self, other: Plan) -> bool:
        """Whether it measures all that ``other`` does, as often at least."""
        return (
            self.model == other.model
            and {*other.engines} <= {*self.engines}
            and {*other.ways} <= {*self.ways}
            and all(self.batches.get(b, 0) >= rounds for b, rounds in other.batches.items())
            and {*other.loads} <= {*self.loads}
            and self.starts >= other.starts
        )

    @property
    def seats(self) -> int:
        """Cores that a chain of one-threaded workers can use: the width of the bound."""
        return min(len(os.sched_getaffinity(0)), len(self.model.blocks))


BENCH = Plan(Model("resnet50"), ("exported",), WAYS, {1: 60, 8: 16, 32: 6}, {}, 5, 100)
PIPELINE = Plan(
    Model("resnet50"),
    USUAL,
    (TENSORMQ, ONE_WORKER, TENSORMQ_AWAKE, ONE_WORKER_AWAKE),
    {1: 30, 8: 10, 32: 4},
    {
        1: Load(MIN_PAIRS, 5.0),
        8: Load(MIN_PAIRS, 8.0),
        # Eight requests of 32 rows take a small machine half a minute to come and go: by the
        # slowest and the fastest of the usual engines alone, or the run would take twice as long.
        32: Load(MIN_PAIRS, 15.0, ("torchscript", "openvino-bf16"), (TENSORMQ, IN_LANES)),
    },
    0,
    0,
)
QUICK = Plan(Model("digits"), ("exported",), WAYS, {1: 3, 8: 3}, {1: Load(2, 0.2)}, 1, 4)


def _counts(text: str) -> list[int]:
    """``1,8,32``."""
    try:
        found = [int(part) for part in text.split(",")]
    except ValueError:
        found = [0]
    if min(found) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is no list of numbers from 1 on, like 1,8,32")
    return found


def parse_args(argv: Sequence[str] | None) -> tuple[Plan, argparse.Namespace]:
    parser = argparse.ArgumentParser(prog="python -m blockflow.bench.pipeline", description=_ABOUT)
    parser.add_argument("--all", action="store_true", help="all engines, and throughput")
    parser.add_argument("--quick", action="store_true", help="a small model: is everything sound?")
    parser.add_argument("--model", help="of the zoo, with cuts (resnet18, resnet50, digits)")
    parser.add_argument("--engines", help=f"comma-separated: {', '.join(CONTENDERS)}")
    parser.add_argument("--batches", type=_counts, help="rows per request, comma-separated")
    parser.add_argument("--rounds", type=_counts, help="rounds per batch size, comma-separated")
    parser.add_argument("--starts", type=int, help="workers to start one by one")
    parser.add_argument("--json", help="file for the figures")
    args = parser.parse_args(argv)
    plan = QUICK if args.quick else PIPELINE if args.all else BENCH
    if args.model:
        plan = replace(plan, model=Model(args.model))
    if args.engines:
        labels = tuple(args.engines.split(","))
        unknown = [label for label in labels if label not in CONTENDERS]
        if unknown:
            parser.error(f"unknown engines: {', '.join(unknown)}")
        # Who names an engine wants all of it.
        whole = {rows: replace(load, engines=()) for rows, load in plan.loads.items()}
        plan = replace(plan, engines=labels, loads=whole)
    if args.batches:
        loads = {b: load for b, load in plan.loads.items() if b in args.batches}
        known = {b: plan.batches.get(b, min(plan.batches.values())) for b in args.batches}
        plan = replace(plan, batches=known, loads=loads)
    if args.rounds:
        if len(args.rounds) != len(plan.batches):
            parser.error(f"{len(args.rounds)} rounds for {len(plan.batches)} batch sizes")
        plan = replace(plan, batches=dict(zip(plan.batches, args.rounds, strict=True)))
    if args.starts is not None:
        plan = replace(plan, starts=args.starts)
    return plan, args
