"""Hundreds of small random systems, under every policy, with all invariants looked after.

A bounded number runs by default; BLOCKFLOW_SEEDS=5000 runs more, and BLOCKFLOW_SEED=17 only that
one: what a failure prints.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from functools import cache
from itertools import pairwise
from random import Random
from typing import Any

import pytest

from blockflow.batching.registry import POLICIES
from blockflow.batching.shares import TaskShare
from blockflow.bench.simulation.arrivals import Arrivals, Bursts, Closed, Mix, Poisson, Step
from blockflow.bench.simulation.experiment import capacity
from blockflow.bench.simulation.invariants import (
    InOrder,
    RowsBounded,
    StagesWhole,
    WorkConserving,
    invariants,
)
from blockflow.bench.simulation.joins import Joins
from blockflow.bench.simulation.simulator import Simulator
from blockflow.bench.simulation.sizes import parse_sizes
from blockflow.bench.simulation.system import StageModel, SystemModel, TaskModel, WorkerModel
from blockflow.bench.simulation.watch import Watches
from blockflow.bench.simulation.workload import Workload
from blockflow.core.errors import TopologyError
from blockflow.core.profile import Point, StageProfile

SEEDS = int(os.environ.get("BLOCKFLOW_SEEDS", "80"))
ONLY = os.environ.get("BLOCKFLOW_SEED")
CHUNKS = 10
CHANGES = SEEDS // 20
OWN_RULES = (Joins, RowsBounded, WorkConserving, InOrder, StagesWhole)
"""What holds while one policy rules: its promises, and an order that ends where its books end."""

QUERIES = 40
"""About as many per run."""


def profile(rng: Random, block: str, lengths: tuple[int, ...]) -> StageProfile:
    """Time that grows with rows (and length): flat, linear, or a fixed part and a linear one."""
    fixed, per_row = rng.choice([(0.1, 3.0), (5.0, 0.3), (1.0, 1.0), (8.0, 0.01)])
    spread = rng.choice([0.0, 0.02, 0.3])
    points = []
    for n in lengths or (None,):
        for rows in (1, 2, 4, 8):
            ms = fixed + per_row * rows * (1.0 if n is None else n / 16)
            points.append(Point(1, rows, n, 10, ms, ms, ms, ms, ms, ms, spread, 0))
    return StageProfile(block, "0" * 64, "example", "fp32", "test", tuple(points))


def policy(rng: Random, name: str, stages: int, top: int, classes: bool) -> dict[str, Any]:
    """Any options that make sense."""
    options: dict[str, Any] = {"policy": name}

    def maybe(key: str, *values: Any) -> None:
        if rng.random() < 0.5:
            options[key] = rng.choice(values)

    if name == "window":
        options |= {"max_rows": rng.randint(1, top), "max_delay_ms": rng.choice([0, 0.5, 5, 40])}
    if name == "lbci":
        options["t_opt_ms"] = rng.choice([60, 100, 300, 1000])
        maybe("n_max", 1, 4)
        maybe("join", "always", "gain")
    if name == "dvabatch":
        maybe("bs_max", 1, 2, top)
        maybe("policies", ["load"], ["operator"], ["load", "operator"], ["load", "input"])
        maybe("last_join_stage", 1, stages)
        maybe("t_comp_wait_ms", 1, 10)
        maybe("buffer_pairs", 1, 2, 3)
        maybe("window_ms", 0, 3, "stage1")
        maybe("join", "always", "gain")
    if name != "none" and classes:
        maybe("classes", [16, 64], [64])
    return options


def way(rng: Random, path: tuple[str, ...]) -> tuple[str, ...]:
    """All of ``path``, or what is left when some of its blocks are left out."""
    if rng.random() < 0.7:
        return path
    return tuple(b for b in path if rng.random() < 0.6) or path


def system(rng: Random, name: str) -> SystemModel:
    """A trunk with one to three tasks, some of which leave blocks out, in one worker or several."""
    lengths = rng.choice([(), (), (8, 64)])
    trunk = [f"trunk{i}" for i in range(rng.randint(1, 3))]
    heads = [f"head{i}" for i in range(rng.choice([0, 0, 1, 2, 3]))]
    top = rng.choice([4, 8])
    chosen = policy(rng, name, len(trunk) + len(heads), top, bool(lengths))
    stages = [
        StageModel(b, profile(rng, b, lengths), chosen, max_rows=top) for b in (*trunk, *heads)
    ]
    cut = rng.choice([0, 0, rng.randint(0, len(stages) - 1)])
    groups = [g for g in (stages[:cut], stages[cut:]) if g]
    if rng.random() < 0.2:
        groups = [[s] for s in stages]
    workers = tuple(
        WorkerModel(
            f"w{i}",
            tuple(g),
            1,
            rng.choice([1, 2, 16]),
            rng.choice([1, 1, 2]),
            min(rng.choice([1, 1, 2, 3]), len(g)),
        )
        for i, g in enumerate(groups)
    )
    tasks = tuple(
        TaskModel(
            f"task{i}",
            way(rng, (*trunk, head) if head else tuple(trunk)),
            rng.choice([1.0, 1.0, 5.0]),
            TaskShare(rng.choice([1.0, 3.0]), rng.choice([0, 0, 1]), rng.choice([0, 0, 2])),
            rng.choice([30.0, 200.0, 2000.0]),
        )
        for i, head in enumerate(heads or [""])
    )
    return SystemModel(
        workers,
        tasks,
        cores=rng.choice([1, 2, 8]),
        hop_ms=rng.choice([0.0, 0.3]),
        turn_ms=rng.choice([0.0, 0.1]),
        credits=rng.choice([4, 32, 256]),
    )


def sliced_system(rng: Random, name: str) -> SystemModel:
    """A chain in one worker, sliced; all of it is one task's way, and another's ends earlier."""
    lengths = rng.choice([(), (), (8, 64)])
    top = rng.choice([4, 8])
    blocks = [f"b{i}" for i in range(rng.randint(2, 7))]
    chosen = policy(rng, name, len(blocks), top, bool(lengths))
    cuts = sorted(rng.sample(range(1, len(blocks)), rng.randint(0, len(blocks) - 1)))
    sizes = [b - a for a, b in pairwise([0, *cuts, len(blocks)])]
    chosen["stages"] = rng.choice(["auto", sizes, sizes])
    stages = tuple(StageModel(b, profile(rng, b, lengths), chosen, max_rows=top) for b in blocks)
    lanes = min(rng.choice([1, 1, 2]), len(blocks))
    worker = WorkerModel("w", stages, 1, rng.choice([1, 2, 16]), rng.choice([1, 1, 2]), lanes)
    tasks = [TaskModel("whole", tuple(blocks), deadline_ms=rng.choice([60.0, 300.0, 2000.0]))]
    if rng.random() < 0.5:
        tasks.append(TaskModel("early", tuple(blocks[: rng.randint(1, len(blocks))])))
    return SystemModel((worker.sliced(),), tuple(tasks), cores=rng.choice([1, 2, 8]))


def mixed_system(rng: Random, name: str) -> SystemModel:
    """Each block of a worker has one of two policies."""
    model = system(rng, name)
    stages = [stage for _, stage in model.stages().values()]
    long = any(s.profile.lengths_measured() for s in stages)
    other = policy(rng, rng.choice(list(POLICIES)), len(stages), stages[0].max_rows, long)
    workers = [
        replace(w, stages=tuple(replace(s, policy=rng.choice([s.policy, other])) for s in w.stages))
        for w in model.workers
    ]
    return replace(model, workers=tuple(workers))


def turned_system(rng: Random, name: str) -> SystemModel:
    """One worker, whose blocks its tasks visit in any order, or some of them."""
    top = rng.choice([4, 8])
    blocks = [f"b{i}" for i in range(rng.randint(3, 6))]
    chosen = policy(rng, name, len(blocks), top, False)
    stages = tuple(StageModel(b, profile(rng, b, ()), chosen, max_rows=top) for b in blocks)
    lanes = rng.choice([1, 1, 2, 3])
    worker = WorkerModel("w", stages, 1, rng.choice([1, 2, 16]), 1, lanes)
    paths = [rng.sample(blocks, rng.choice([len(blocks), rng.randint(1, len(blocks))]))
             for _ in range(rng.choice([1, 1, 2, 3]))]  # fmt: skip
    tasks = tuple(TaskModel(f"task{i}", tuple(path)) for i, path in enumerate(paths))
    return SystemModel((worker,), tasks, cores=rng.choice([1, 2, 8]))


def arrivals(rng: Random) -> Arrivals:
    return rng.choice(
        [Poisson(), Bursts(3.0, 0.05, 0.15), Step(3.0, 0.5), Closed(rng.randint(1, 9))]
    )


def scenario(
    seed: int, name: str, make: Callable[[Random, str], SystemModel] = system
) -> tuple[SystemModel, Workload, bool]:
    """All that ``seed`` decides: the system, what comes, and whether forwards fluctuate."""
    rng = Random(f"{name}/{seed}")
    model = make(rng, name)
    top = min(s.max_rows for _, s in model.stages().values())
    rows = parse_sizes(rng.choice(["1", f"uniform:1-{top}", "zipf:a=1.5,max=4"]), "")
    long = any(s.profile.lengths_measured() for _, s in model.stages().values())
    lengths = parse_sizes("lognormal:median=16,max=64", "") if long else None
    mix = Mix([(t.name, t.traffic) for t in model.tasks], rows, lengths)
    rate = rng.choice([0.2, 0.9, 2.0]) * capacity(model, rows, lengths)
    duration_s = QUERIES / rate
    return model, Workload(arrivals(rng), mix, rate, duration_s, seed), rng.random() < 0.5


@cache
def run(
    seed: int, name: str, make: Callable[[Random, str], SystemModel] = system
) -> Simulator | None:
    """None: the profile makes the policy's bound impossible, and it is refused."""
    model, workload, noisy = scenario(seed, name, make)
    watch = Watches(invariants(model, noisy=noisy))
    try:
        simulator = Simulator(model, workload, watch=watch, noisy=noisy)
    except TopologyError:
        return None
    simulator.run()
    return simulator


def replay(seed: int, name: str) -> str:
    test = "tests/unit/test_simulation_seeds.py"
    return f"BLOCKFLOW_SEED={seed} python -m pytest {test} -k 'holds and {name}'"


@pytest.mark.parametrize("chunk", range(1 if ONLY else CHUNKS))
@pytest.mark.parametrize("name", POLICIES)
def test_every_invariant_holds(name: str, chunk: int) -> None:
    count = SEEDS // len(POLICIES)
    seeds = [int(ONLY)] if ONLY else range(chunk * count // CHUNKS, (chunk + 1) * count // CHUNKS)
    for seed in seeds:
        try:
            run(seed, name)
        except Exception as exc:
            exc.add_note(f"again: {replay(seed, name)}")
            raise


@pytest.mark.parametrize("name", ["lbci", "dvabatch"])
def test_every_invariant_holds_for_sliced_chains(name: str) -> None:
    """Several blocks are one stage, by a list or as ``auto`` makes it."""
    kinds = set()
    for seed in [int(ONLY)] if ONLY else range(SEEDS // 8):
        try:
            done = run(seed, name, sliced_system)
        except Exception as exc:
            exc.add_note(f"BLOCKFLOW_SEED={seed} python -m pytest {__file__} -k sliced and {name}")
            raise
        for worker in done.workers if done else ():
            sizes = worker.model.stages[0].policy["stages"]
            kinds.add((len(sizes), max(sizes)))
    assert ONLY or len(kinds) > 5


def hold_but(name: str, build: Any, without: Any, chosen: str) -> None:
    """Every seed's system of ``build`` keeps all rules but those of the kinds ``without``."""
    for seed in [int(ONLY)] if ONLY else range(SEEDS // 8):
        model, workload, noisy = scenario(seed, name, build)
        rules = [r for r in invariants(model, noisy=noisy) if not isinstance(r, without)]
        try:
            with suppress(TopologyError):  # a bound that cannot be met
                Simulator(model, workload, watch=Watches(rules), noisy=noisy).run()
        except Exception as exc:
            exc.add_note(f"BLOCKFLOW_SEED={seed} python -m pytest {__file__} -k '{chosen}'")
            raise


@pytest.mark.parametrize("name", POLICIES)
def test_every_invariant_holds_for_workers_with_several_policies(name: str) -> None:
    """None of them sees all of a batch's way, so that no bound on it is kept."""
    hold_but(name, mixed_system, Joins, f"several and {name}")


@pytest.mark.parametrize("name", POLICIES)
def test_nobody_is_forgotten_on_paths_in_any_order(name: str) -> None:
    """Where paths contradict each other a worker has no order in which all visit its blocks:
    predictions along the worker's own do not come true then, all else holds."""
    hold_but(name, turned_system, OWN_RULES, f"order and {name}")


@pytest.mark.parametrize("name", POLICIES)
def test_a_policy_can_be_changed_in_flight(name: str) -> None:
    """Whatever waits is handed over, whatever runs ends: nobody is lost, run twice or forgotten."""
    for seed in range(CHANGES):
        model, workload, noisy = scenario(seed, name)
        rng = Random(f"change/{name}/{seed}")
        other = policy(rng, rng.choice(list(POLICIES)), 3, 4, False)
        if other["policy"] in ("lbci", "dvabatch"):  # of a tree as well: ways of before an update
            other["stages"] = rng.choice([[2], [2, 1], [1, 2, 1], [3, 1]])
        rules = [r for r in invariants(model, noisy=noisy) if not isinstance(r, OWN_RULES)]
        try:
            simulator = Simulator(model, workload, watch=Watches(rules), noisy=noisy)
        except TopologyError:
            continue

        def change(now: int, _: Any, workers: Any = simulator.workers, spec: Any = other) -> None:
            for worker in workers:
                for stage in worker.stages:
                    with suppress(TopologyError):
                        worker.scheduler.set_policy(stage, spec, now)

        for at in sorted(rng.random() * workload.end_ns for _ in range(3)):
            simulator.loop.plan(round(at), change)
        try:
            simulator.run()
        except Exception as exc:
            exc.add_note(f"{name}, seed {seed}, to {other}")
            raise


def test_the_scenarios_are_worth_running() -> None:
    """They batch, join, stall, reject and let expire; else the invariants would guard nothing."""
    runs = [s for name in POLICIES for seed in range(12) if (s := run(seed, name)) is not None]
    assert len(runs) > 30
    exits = [r.exit for s in runs for r in s.requests]
    assert min(exits.count(e) for e in ("result", "expired", "rejected")) > 20
    assert sum(w.stalls for s in runs for w in s.workers) > 20
    assert sum(w.lanes > 1 for s in runs for w in s.workers) > 10
    assert max(rows for s in runs for w in s.workers for b in w.batches.values() for rows in b) > 4


def test_a_seed_gives_the_same_run() -> None:
    def trace(s: Simulator | None) -> Any:
        return s and [(r.came_ns, r.left_ns, r.exit, r.wait_ns) for r in s.requests]

    for name in POLICIES:
        assert trace(run(3, name)) == trace(run.__wrapped__(3, name))
