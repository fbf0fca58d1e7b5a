"""``make bench-replicas``: what several processes of one model cost, in memory, time and rows.

A worker with replicas holds its weights once (docs/workers.md, "Weights of replicas"). Here the
same model runs in as many replicas as there are cores in two ways, side by side in one system: with
weights that all have in common, and with weights of their own: their memory when all are ready,
their throughput in turns, with twice as many requests under way as replicas, and what it takes to
load one replica more.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from rich.console import Console

from blockflow.bench.contenders import CONTENDERS, Model, prepare_apart
from blockflow.bench.grid import Grid, Rows, bounds, digits, with_bounds
from blockflow.bench.in_process import Chain, example
from blockflow.bench.interrupts import orderly
from blockflow.bench.kpi_reader import KpiReader
from blockflow.bench.options import parse_rounds, result_path
from blockflow.bench.own_system import own_settings, workplace
from blockflow.bench.pipeline_ways import block_names, run_many, task_name
from blockflow.bench.results import (
    MORE_IS_BETTER,
    Figure,
    ResultFile,
    interval_figure,
    latency_figure,
    make_command,
)
from blockflow.bench.statistics import ratio_interval
from blockflow.bench.turns import in_turn
from blockflow.client import Client
from blockflow.control.system import System
from blockflow.core.engines import OWN_WEIGHTS, WEIGHTS
from blockflow.launch.base import Launcher
from blockflow.repository.repository import BlockRepository

ONCE, OWN = "held once", "of their own"
RATE, RATIO, PSS, STATE, LOAD = "throughput", "throughput ratio", "memory", "weights", "load"
_CONTENDER = CONTENDERS["exported"]


@dataclass(frozen=True, slots=True)
class Plan:
    """What to do.

    Attributes:
        models: of the zoo, each in one worker.
        rounds: each has both ways once.
        seconds: of load, of one way in one round.
        loads: how often one replica more is started, of each way.
        seats: replicas.
    """

    models: tuple[str, ...] = ("resnet50", "alexnet")
    rows: tuple[int, ...] = (1, 8)
    rounds: int = 10
    seconds: float = 4.0
    loads: int = 5
    seats: int = field(default_factory=lambda: max(2, len(os.sched_getaffinity(0))))


QUICK = Plan(("resnet18",), (1,), rounds=2, seconds=0.5, loads=2, seats=2)


@dataclass(slots=True)
class Found:
    """Of one model: rows per second by rows of a request and way, a number per round; MiB of all
    replicas, and of one's weights; milliseconds that one replica more has loaded for."""

    state: float
    rates: dict[int, dict[str, list[float]]] = field(default_factory=dict)
    memory: dict[str, float] = field(default_factory=dict)
    loads: dict[str, list[float]] = field(default_factory=dict)


def topology(chain: Chain, seats: dict[str, int]) -> dict[str, Any]:
    """Both ways side by side: one worker with the whole chain, so many times."""
    blocks: list[dict[str, Any]] = []
    tasks: dict[str, Any] = {}
    for way, replicas in seats.items():
        names = block_names(way, chain)
        tasks[task_name(way)] = {"path": names, "deadline_ms": 60_000}
        for name, block in zip(names, chain.blocks, strict=True):
            options = {WEIGHTS: OWN_WEIGHTS} if way == OWN else {}
            fixed = {"engine": chain.engine, "precision": chain.precision, "threads": 1}
            where = {"worker": task_name(way), "replicas": replicas, "options": options}
            blocks.append({"name": name, "block": block, **fixed, **where})
    # By the way that rests while the other one is measured.
    return {"blocks": blocks, "tasks": tasks, "oversubscribe": True}


def measure(
    plan: Plan,
    folder: Path,
    advance: Callable[[], None] = lambda: None,
    launcher: Launcher | None = None,
) -> dict[str, Found]:
    """All models, each in a system of its own.

    Args:
        folder: where blocks and state go.
        advance: called after each round of each number of rows, and each load.
        launcher: of the systems; by default each has one of its own.

    Raises:
        BlockFlowError: a model cannot be exported, or a request failed.
    """
    found = {}
    for name in plan.models:
        blocks = folder / name / "blocks"
        blocks.mkdir(parents=True)
        problem = prepare_apart(Model(name), _CONTENDER, blocks)
        if problem is not None:
            raise problem
        with (
            System(own_settings(folder / name), launcher=launcher) as system,
            Client(system.client_endpoint) as client,
        ):
            found[name] = _one(plan, Model(name), system, client, advance)
    return found


def _one(
    plan: Plan, model: Model, system: System, client: Client, advance: Callable[[], None]
) -> Found:
    repository = BlockRepository(system.settings.repository)
    chain = model.chain(_CONTENDER, repository.root)
    infos = [repository.info(block) for block in chain.blocks]
    found = Found(sum(info.state_bytes for info in infos) / 2**20)
    seats = {ONCE: plan.seats, OWN: plan.seats}
    system.apply(topology(chain, seats))
    kpis = KpiReader(system)
    for way in seats:
        # Before any load: what a forward has used stays, and is not the same in any two processes.
        found.memory[way] = kpis.pss_mib(block_names(way, chain))
    for rows in plan.rows:
        x = example(infos[0].contract.input, rows)
        ways = {}
        for way in seats:
            ways[way] = partial(run_many, client, way, x, plan.seconds, 2 * plan.seats)
        found.rates[rows] = in_turn(ways, plan.rounds, advance, warm_up=1)
    loads = {way: partial(_load, system, chain, seats, way) for way in seats}
    found.loads = in_turn(loads, plan.loads, advance)
    return found


def _load(system: System, chain: Chain, seats: dict[str, int], way: str) -> float:
    """One replica more, which goes again."""
    system.apply(topology(chain, {**seats, way: seats[way] + 1}))
    name = f"{task_name(way)}#{seats[way]}"
    (one,) = (w for w in system.status()["workers"] if w["name"] == name)
    system.apply(topology(chain, seats))
    return float(one["load_ms"])


def figures(found: dict[str, Found], seats: int) -> list[Figure]:
    out = []
    for model, one in found.items():
        tags = {"model": model, "replicas": seats}
        out.append(Figure.of(STATE, model, one.state, "MiB", 1, tags))
        for way, mib in one.memory.items():
            out.append(Figure.of(PSS, way, mib, "MiB", seats, tags))
        out += [latency_figure(LOAD, w, None, times, tags) for w, times in one.loads.items()]
        for rows, ways in one.rates.items():
            out += [
                interval_figure(RATE, way, rows, rates, "1/s", tags) for way, rates in ways.items()
            ]
            ratio = ratio_interval(ways[OWN], ways[ONCE])
            out.append(interval_figure(RATIO, ONCE, rows, ratio, "x", {**tags, **MORE_IS_BETTER}))
    return out


def grid(found: Sequence[Figure]) -> Grid:
    """A row per model, way and rows of a request."""
    at = {(f.labels["model"], f.name, f.mode, f.batch): f for f in found}
    rows = Rows()
    for model, name, way, batch in at:
        if name != RATE:
            continue
        rate, ratio = at[model, RATE, way, batch], at.get((model, RATIO, way, batch))
        load = at[model, LOAD, way, None]
        rows.row(
            str(model),
            str(rate.labels["replicas"]),
            digits(at[model, STATE, str(model), None].value),
            way,
            digits(at[model, PSS, way, None].value),
            digits(load.value),
            str(batch),
            f"{digits(rate.value)} ({bounds(rate.low, rate.high)})",
            "1" if ratio is None else with_bounds(ratio.value, ratio.low, ratio.high),
        )
    memory = ("model", "replicas", "weights MiB", "weights", "all replicas MiB", "load ms")
    heads = (*memory, "rows", "rows/s (95%)", "to their own")
    return Grid("replicas", heads, rows, frozenset({"model", "weights"}))


@orderly
def main(arguments: list[str]) -> int:
    """Run, print, write the figures."""
    plan, args = parse_rounds(arguments, "replicas", __doc__, Plan(), QUICK)
    console = Console()
    with workplace(console) as (folder, bar):
        steps = len(plan.models) * (len(plan.rows) * (plan.rounds + 1) + plan.loads)
        step = bar.add_task("replicas", total=steps)
        made = figures(measure(plan, folder, lambda: bar.advance(step)), plan.seats)
    console.print(grid(made).rich())
    path = result_path(args, "replicas", whole=plan.rounds >= Plan().rounds)
    ResultFile(path, "replicas", make_command("bench-replicas", arguments)).write(made)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
