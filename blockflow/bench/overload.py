"""``make bench-overload``: goodput at one to four times what the system can do.

The capacity is measured first, by callers that wait for their answers. Then requests come at random
at multiples of it, whether the system keeps up or not, and nobody tries again: what a good system
does then is to answer as many as before, in time, and to refuse the others at once.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from rich.console import Console

from blockflow.bench.canvas import save_page
from blockflow.bench.chaos.watch import Watch
from blockflow.bench.interrupts import orderly
from blockflow.bench.options import PART, SOUND, make_parser, positive
from blockflow.bench.overload_clients import SPEC, TASK, Clients
from blockflow.bench.overload_figures import Depth, Load, draw, figures, remarks
from blockflow.bench.own_system import own_settings
from blockflow.bench.reliability.promise import missed
from blockflow.bench.reliability.promises import OVERLOAD, PROMISES
from blockflow.bench.results import ResultFile, figure_table, make_command
from blockflow.bench.sampler import Sampler
from blockflow.control.system import System
from blockflow.repository.echo import save_echo
from blockflow.repository.repository import BlockRepository

_SOUND_S = 0.25
"""As often as the processes tell it."""


@dataclass(frozen=True, slots=True)
class Plan:
    """What to do.

    Attributes:
        times: offered loads, as multiples of the capacity.
        seconds: of each load: in ten, one moment in which the machine stands still is a percentile.
        delay_ms: that the slower of the two blocks takes per request.
        adaptive: whether the limit follows the queues; without, credits are fixed.
    """

    times: tuple[float, ...] = (0.5, 1.0, 1.5, 2.0, 3.0, 4.0)
    seconds: float = 30.0
    delay_ms: float = 8.0
    deadline_s: float = 1.0
    adaptive: bool = True


QUICK = Plan((1.0, 3.0), seconds=1.5, delay_ms=10.0)


class Bench:
    """One run against a running system."""

    def __init__(self, plan: Plan, system: System, clients: Clients) -> None:
        self._plan = plan
        self._system = system
        self._clients = clients

    def run(self, say: Any) -> list[Load]:
        """All loads."""
        begin = time.monotonic()
        capacity = self._clients.capacity()
        say(f"capacity: {capacity:.1f} requests per second")
        loads = []
        for times in self._plan.times:
            started = time.monotonic() - begin
            load = Load(times, times * capacity, self._plan.seconds, started)
            with Sampler(self._depth, _SOUND_S) as sounder:
                load.ended = self._clients.offer(times, load.offered)
            load.depths = [Depth(at, *depth) for at, depth in sounder.samples]
            load.limit = self._limit()
            loads.append(load)
            say(f"{load.label}: {load.per_s('ok'):.1f} answered per second")
        return loads

    def _depth(self) -> tuple[int, int]:
        """In flight and in workers' queues: the processes tell it."""
        commands = self._system.commands
        in_flight = commands.worker("dispatcher").get("kpi", {}).get("inflight", 0)
        stages = [s for w in commands.workers() for s in w.get("stages", ())]
        return int(in_flight), sum(int(s.get("kpi", {}).get("queue", 0)) for s in stages)

    def _limit(self) -> int:
        extra = self._system.status()["dispatcher"].get("kpi", {})
        return int(extra.get("tasks", {}).get(TASK, {}).get("limit", 0))


def measure(plan: Plan, say: Any) -> tuple[list[Load], list[tuple[float, float]]]:
    """All loads, and the memory of the system's processes meanwhile."""
    with tempfile.TemporaryDirectory(prefix="bf-bench-") as folder:
        root = Path(folder)
        repository = BlockRepository(root / "blocks")
        save_echo(repository, "trunk", SPEC)
        save_echo(repository, "head", SPEC, settings={"delay_ms": plan.delay_ms})
        with System(own_settings(root, adaptive_limit=plan.adaptive)) as system:
            system.apply({"blocks": ["trunk", "head"], "tasks": {TASK: ["trunk", "head"]}})
            watch = Watch(system.run_dir, interval_s=0.2)
            watch.start()
            try:
                with Clients(system.client_endpoint, plan.seconds, plan.deadline_s) as clients:
                    loads = Bench(plan, system, clients).run(say)
            finally:
                watch.stop()
    return loads, [(s.at_s, s.rss / 2**20) for s in watch.samples]


def parse_args(argv: Sequence[str]) -> tuple[Plan, argparse.Namespace]:
    parser = make_parser("overload", __doc__, quick=SOUND)
    parser.add_argument("--seconds", type=positive, help="of each load")
    parser.add_argument("--fixed", action="store_true", help="without the adaptive limit")
    parser.add_argument("--plot", help="file for the picture")
    args = parser.parse_args(argv)
    plan = QUICK if args.quick else Plan()
    if args.seconds is not None:
        plan = replace(plan, seconds=args.seconds)
    if args.fixed:
        plan = replace(plan, adaptive=False)
    return plan, args


@orderly
def main(arguments: list[str]) -> int:
    """Run the benchmark, print its table, write its figures and its picture; status 1 if one of the
    promises is missed. (A quick run is too short to tell, and one without the adaptive limit is
    there to be compared with.)"""
    plan, args = parse_args(arguments)
    console = Console()
    loads, memory = measure(plan, lambda line: console.print(line, highlight=False))
    found = figures(loads, memory)
    console.print(figure_table("overload", [f for f in found if f.unit != "MiB"]))
    for line in remarks(loads, memory):
        console.print(line, highlight=False)
    # Neither a quick run nor a shorter one must take the place of a real one.
    mark = "-quick" * args.quick or PART * (plan.seconds < Plan().seconds)
    stem = f"results/overload{'-fixed' * args.fixed}{mark}"
    path = Path(args.json or f"{stem}.jsonl")
    ResultFile(path, "overload", make_command("bench-overload", arguments)).write(found)
    save_page(draw(found), Path(args.plot or f"{stem}.png"))
    lines, broken = missed(PROMISES, OVERLOAD, found)
    for line in lines:
        console.print(line, highlight=False, markup=False)
    return int(broken and plan.adaptive and not args.quick)


if __name__ == "__main__":
    raise SystemExit(main())
