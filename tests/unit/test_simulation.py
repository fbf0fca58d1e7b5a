"""The simulated world: queues, cores, slots, credits and deadlines behave as queueing theory and
the worker's own code say."""

from __future__ import annotations

import json
from dataclasses import replace
from itertools import pairwise
from math import erf, sqrt
from random import Random
from typing import Any

import pytest

from blockflow.batching.shares import TaskShare
from blockflow.bench.simulation.arrivals import Closed, Poisson, Recorded
from blockflow.bench.simulation.cores import Cores
from blockflow.bench.simulation.experiment import Cell, Experiment, Runner, capacity
from blockflow.bench.simulation.outcome import Outcome, outcome
from blockflow.bench.simulation.request import Exit
from blockflow.bench.simulation.service import Service, sigma_of
from blockflow.bench.simulation.sizes import parse_sizes
from blockflow.bench.simulation.system import (
    StageModel,
    SystemModel,
    TaskModel,
    WorkerModel,
    chain,
)
from blockflow.bench.statistics import jain
from tests.simulation_rig import MS, ONE, at, profile, run, steady, totals

# --- one worker ----------------------------------------------------------------------------------


@pytest.mark.parametrize("load", [0.3, 0.7])
def test_a_single_server_waits_as_theory_says(load: float) -> None:
    """M/D/1: mean wait = load x service / (2 (1 - load)) (Pollaczek and Khinchine)."""
    model = chain([steady("a", 10.0)])
    waits = []
    for seed in range(4):
        done = run(model, Poisson(), 100 * load, 30.0, seed=seed)
        waits.append(sum(r.wait_ns for r in done.requests) / len(done.requests) / MS)
    assert sum(waits) / 4 == pytest.approx(10.0 * load / (2 * (1 - load)), rel=0.12)


def test_a_lonely_query_takes_its_parts() -> None:
    model = chain(
        [steady("a", 10.0), steady("b", 5.0)], apart=[1], cores=2, hop_ms=0.3, turn_ms=0.1
    )
    assert totals(run(model, at(0.0))) == [pytest.approx(0.3 + 10.1 + 0.3 + 5.1 + 0.3)]
    together = chain([steady("a", 10.0), steady("b", 5.0)], hop_ms=0.3, turn_ms=0.1)
    assert totals(run(together, at(0.0))) == [pytest.approx(0.3 + 10.1 + 5.1 + 0.3)]


def test_lanes_run_different_stages_at_once() -> None:
    """Two queries at once through two blocks of 10 ms: one lane runs four forwards one by one; in
    two lanes the second query is in the first block while the first one is in the second."""
    model = chain([steady("a", 10.0), steady("b", 10.0)], cores=2)
    assert totals(run(model, at(0.0, 0.0))) == [pytest.approx(20.0), pytest.approx(40.0)]
    beside = chain([steady("a", 10.0), steady("b", 10.0)], cores=2, lanes=2)
    done = run(beside, at(0.0, 0.0))
    assert totals(done) == [pytest.approx(20.0), pytest.approx(30.0)]
    assert done.workers[0].busy_ns == pytest.approx(40 * MS)
    # Without a core for each lane they share one.
    shared = chain([steady("a", 10.0), steady("b", 10.0)], cores=1, lanes=2)
    assert totals(run(shared, at(0.0, 0.0))) == [pytest.approx(30.0), pytest.approx(40.0)]
    # One block runs one batch at a time, however many lanes there are,
    alone = chain([steady("a", 10.0)], cores=2, lanes=2)
    assert totals(run(alone, at(0.0, 0.0))) == [pytest.approx(10.0), pytest.approx(20.0)]
    # but for engines and policies that are made for more.
    able = replace(steady("a", 10.0), engine="exported")
    twins = chain([able], cores=2, lanes=2)
    assert totals(run(twins, at(0.0, 0.0))) == [pytest.approx(10.0), pytest.approx(10.0)]
    assert capacity(twins, ONE, None) == 2 * capacity(alone, ONE, None) == pytest.approx(200.0)


@pytest.mark.parametrize(("lanes", "cores", "able"), [(1, 2, 100 / 3), (2, 2, 50), (2, 1, 100 / 3)])
def test_capacity_is_that_of_the_lanes_the_busiest_block_or_the_cores(
    lanes: int, cores: int, able: float
) -> None:
    model = chain([steady("a", 20.0), steady("b", 10.0)], cores=cores, lanes=lanes)
    assert capacity(model, ONE, None) == pytest.approx(able)
    done = run(model, Closed(4), seconds=8.0)
    assert len(done.requests) / 8.0 == pytest.approx(able, rel=0.02)


@pytest.mark.parametrize(("path", "able"), [(("a", "b"), 80.0), (("a",), 100.0), (("c",), 100.0)])
def test_capacity_counts_a_block_of_one_task_in_one_lane_and_a_trunk_in_all(
    path: tuple[str, ...], able: float
) -> None:
    """Block b is of the trunk where all run it. It takes 20 ms."""
    blocks = [("a", 5.0), ("b", 20.0), ("c", 1.0)]
    stages = tuple(StageModel(n, replace(steady(n, ms), engine="exported")) for n, ms in blocks)
    tasks = (TaskModel("whole", ("a", "b")), TaskModel("other", path))
    model = SystemModel((WorkerModel("w", stages, lanes=2),), tasks, cores=2)
    assert capacity(model, ONE, None) == pytest.approx(able)
    done = run(model, Closed(16), seconds=4.0)
    assert len(done.requests) / 4.0 == pytest.approx(able, rel=0.05)


@pytest.mark.parametrize(("noisy", "able", "s"), [(True, 81.6, 30.0), (False, 100.0, 5.0)])
def test_capacity_counts_forwards_with_their_means(noisy: bool, able: float, s: float) -> None:
    """Of a lognormal whose deviation is half of its mean, the mean is 1.225 medians."""
    model = chain([profile("a", lambda b, n: 10.0 * b, spread=0.5)])
    assert capacity(model, ONE, None, noisy=noisy) == pytest.approx(able, rel=0.001)
    done = run(model, Closed(4), seconds=s, noisy=noisy)
    assert len(done.requests) / s == pytest.approx(able, rel=0.02)


def test_what_is_between_two_forwards_takes_no_core() -> None:
    """Six blocks of a millisecond in workers of their own: two cores serve 333 queries a second."""
    blocks = [steady(name, 1.0) for name in "abcdef"]
    apart = chain(blocks, apart=[1, 2, 3, 4, 5], cores=2, turn_ms=1.0)
    assert capacity(apart, ONE, None) == pytest.approx(1000 / 3)
    assert capacity(replace(apart, cores=64), ONE, None) == pytest.approx(500)


def test_wait_and_compute_add_up() -> None:
    done = run(chain([steady("a", 10.0), steady("b", 5.0)]), Poisson(), 40.0, 2.0)
    for r in done.requests:
        assert r.wait_ns + r.compute_ns == r.left_ns - r.came_ns


def test_what_comes_at_one_instant_shares_a_batch() -> None:
    policy = {"policy": "window", "max_rows": 8, "max_delay_ms": 0}
    model = chain([profile("a", lambda b, n: 10.0)], max_rows=8).with_policy(policy)
    done = run(model, at(1.0, 1.0, 1.0))
    assert done.workers[0].batches == {1: {3: 1}}
    assert totals(done) == [pytest.approx(10.0)] * 3


def test_a_window_ends_with_its_delay() -> None:
    policy = {"policy": "window", "max_rows": 8, "max_delay_ms": 5}
    model = chain([profile("a", lambda b, n: 10.0)], max_rows=8).with_policy(policy)
    assert totals(run(model, at(0.0, 3.0))) == [pytest.approx(15.0), pytest.approx(12.0)]


def test_throughput_of_a_pipeline_is_its_bottleneck() -> None:
    model = chain([steady("a", 10.0), steady("b", 20.0)], apart=[1], cores=2)
    assert capacity(model, ONE, None) == pytest.approx(50.0)
    done = run(model, Closed(4), seconds=2.0)
    assert outcome(done, 0.2, 2.0, 100.0).throughput == pytest.approx(50.0, rel=0.05)


# --- cores ---------------------------------------------------------------------------------------


def test_forwards_share_the_cores_evenly() -> None:
    cores = Cores(1)
    cores.start(0, 10 * MS, 1, "a")
    assert cores.next_end() == 10 * MS
    cores.start(5 * MS, 10 * MS, 1, "b")  # a has 5 ms left, which take 10
    assert cores.next_end() == 15 * MS
    assert cores.finish(15 * MS) == "a"
    assert cores.next_end() == 20 * MS  # b has done 5 of its 10 by then
    assert cores.finish(20 * MS) == "b"
    assert cores.next_end() is None


def test_a_crowded_machine_is_slower_and_a_roomy_one_is_not() -> None:
    profiles = [steady("a", 10.0), steady("b", 10.0)]
    crowded, roomy = (chain(profiles, apart=[1], cores=n) for n in (1, 2))
    assert totals(run(roomy, at(0.0, 10.0)))[1] == pytest.approx(20.0)
    # The second query's first block and the first one's second share the core: 20 ms for both.
    assert totals(run(crowded, at(0.0, 10.0)))[0] == pytest.approx(30.0)


def test_threads_count_as_cores() -> None:
    wide = Cores(2)
    wide.start(0, 10 * MS, 2, "a")
    wide.start(0, 10 * MS, 2, "b")
    assert wide.next_end() == 20 * MS


# --- slots, credits, deadlines -------------------------------------------------------------------


def test_without_a_slot_a_worker_stalls_and_looks_again_each_millisecond() -> None:
    model = chain([steady("a", 1.0), steady("b", 10.25)], apart=[1], cores=2, slots=1)
    done = run(model, at(0.0, 0.0, 0.0))
    assert done.workers[0].stalls == 2
    assert done.workers[0].most_slots == 1
    # b releases a's slot at 11.25 ms; a has stalled since 1 ms, so it looks at 12 ms.
    starts = totals(done)
    assert starts[1] == pytest.approx(12.0 + 1.0 + 10.25)


def test_credits_bound_what_is_inside() -> None:
    done = run(chain([steady("a", 10.0)], credits=3), at(0.0, 0.0, 0.0, 0.0, 15.0))
    exits = [r.exit for r in done.requests]
    assert exits == [Exit.RESULT] * 3 + [Exit.REJECTED, Exit.RESULT]
    assert totals(done)[3] == 0.0


def test_a_query_leaves_at_its_deadline() -> None:
    model = chain([steady("a", 10.0)])
    model = replace(model, tasks=(replace(model.tasks[0], deadline_ms=25.0),))
    done = run(model, at(0.0, 0.0, 0.0, 0.0))
    assert [r.exit for r in done.requests] == ["result", "result", "expired", "expired"]
    assert totals(done)[2:] == [25.0, 25.0]  # one was being computed, one still waited


def test_a_closed_loop_keeps_its_clients_busy_and_lets_the_rejected_pause() -> None:
    done = run(chain([steady("a", 10.0)]), Closed(3), seconds=0.5)
    inside = sum(r.left_ns == min(x.left_ns for x in done.requests) for r in done.requests)
    assert inside == 1
    assert len(done.requests) == pytest.approx(53, abs=2)
    turned_away = run(chain([steady("a", 10.0)], credits=1), Closed(3), seconds=0.5)
    count = sum(r.exit is Exit.REJECTED for r in turned_away.requests)
    assert 3 <= count < 200
    assert sum(r.exit is Exit.RESULT for r in turned_away.requests) > 40


def test_a_full_inbox_leaves_messages_in_the_socket() -> None:
    model = chain([steady("a", 0.01)], max_rows=64, credits=1000)
    done = run(model, at(*[0.0] * 200), rows=parse_sizes("64", ""))
    assert len(done.requests) * 64 > 4096
    assert all(r.exit is Exit.RESULT for r in done.requests)


# --- several tasks, replicas, lengths ------------------------------------------------------------


def shared_trunk(policy: dict[str, Any], **workers: Any) -> SystemModel:
    """Two tasks on one trunk: by default all in one worker."""
    stages = {
        b: StageModel(b, profile(b, lambda b, n: 4.0 + b), policy, max_rows=8)
        for b in ("trunk", "left", "right")
    }
    groups = workers.get("groups", [("w", ["trunk", "left", "right"])])
    tasks = (
        TaskModel("l", ("trunk", "left"), 1.0, workers.get("share", TaskShare())),
        TaskModel("r", ("trunk", "right"), 1.0),
    )
    return SystemModel(
        tuple(WorkerModel(n, tuple(stages[b] for b in bs)) for n, bs in groups), tasks, cores=4
    )


@pytest.mark.parametrize(
    "groups",
    [
        [("w", ["trunk", "left", "right"])],
        [("t", ["trunk"]), ("l", ["left"]), ("r", ["right"])],
        [("t", ["trunk", "left"]), ("r", ["right"])],
    ],
)
def test_tasks_share_batches_on_their_trunk_and_part_after_it(groups: Any) -> None:
    model = shared_trunk({"policy": "window", "max_rows": 8, "max_delay_ms": 1}, groups=groups)
    trace = Recorded(tuple((0, task, 1, None) for task in "lrlr"))
    done = run(model, trace)
    found = {w.stages[n].block: dict(sizes) for w in done.workers for n, sizes in w.batches.items()}
    assert found == {"trunk": {4: 1}, "left": {2: 1}, "right": {2: 1}}
    assert {r.exit for r in done.requests} == {Exit.RESULT}


def test_a_tasks_weight_is_its_share_of_a_crowded_trunk() -> None:
    policy = {"policy": "window", "max_rows": 4, "max_delay_ms": 0}
    model = shared_trunk(policy, share=TaskShare(weight=3.0))
    model = replace(model, credits=10_000)
    done = run(model, Poisson(), 800.0, 1.2)
    # While both queues are long; those that are still there at the end all get their turn.
    early = [r.task for r in done.requests if r.exit is Exit.RESULT and r.left_ns < 800 * MS]
    assert early.count("l") / early.count("r") == pytest.approx(3.0, rel=0.15)


def test_replicas_take_turns() -> None:
    model = chain([steady("a", 10.0)], cores=2)
    model = replace(model, workers=(replace(model.workers[0], replicas=2),))
    assert capacity(model, ONE, None) == pytest.approx(200.0)
    done = run(model, at(0.0, 0.0, 0.0, 0.0))
    assert sorted(totals(done)) == [10.0, 10.0, 20.0, 20.0]
    assert [w.batches for w in done.workers] == [{1: {1: 2}}, {2: {1: 2}}]


# --- randomness ----------------------------------------------------------------------------------


def test_policies_meet_the_same_queries() -> None:
    model = chain([steady("a", 5.0), steady("b", 5.0)], max_rows=8)
    other = model.with_policy({"policy": "dvabatch"})
    rows = parse_sizes("uniform:1-3", "")
    runs = [run(m, Poisson(), 50.0, 2.0, rows=rows, seed=4) for m in (model, other)]
    first, second = ([(r.came_ns, r.rows) for r in s.requests] for s in runs)
    assert first == second
    assert len(first) > 60


@pytest.mark.parametrize("spread", [0.02, 0.3])
def test_forwards_fluctuate_as_measured(spread: float) -> None:
    service = Service(profile("a", lambda b, n: 10.0, spread=spread), 1, Random(1))
    draws = sorted(service.draw(2, None) / MS for _ in range(4000))
    mean = sum(draws) / len(draws)
    assert draws[2000] == pytest.approx(10.0, rel=0.02)  # the profile's figure is the median
    assert sum(abs(d - mean) for d in draws) / len(draws) / mean == pytest.approx(spread, rel=0.06)
    assert 2 * erf(sigma_of(spread) / sqrt(8)) == pytest.approx(spread)
    assert Service(profile("a", lambda b, n: 10.0, spread=spread), 1, None).draw(2, None) == 10 * MS


# --- figures -------------------------------------------------------------------------------------


def test_an_outcome_counts_what_came_after_the_warm_up() -> None:
    model = chain([steady("a", 10.0)], credits=2)
    done = run(model, at(0.0, 100.0, 100.0, 100.0))
    found = outcome(done, 0.05, 0.2, bound_ms=15.0)
    assert (found.offered, found.results, found.expired, found.rejected) == (3, 2, 0, 1)
    assert (found.times.mean_ms, found.times.p50_ms, found.times.max_ms) == (15.0, 10.0, 20.0)
    assert found.over == pytest.approx(2 / 3)  # one took 20 ms, one was rejected
    assert found.throughput == pytest.approx(2 / 0.15)
    assert found.batches == {"a": {1: 3}}
    assert found.busy == {"worker1#0": pytest.approx(30 / 120)}
    assert (found.queries, found.rows_per_batch) == (4, 1.0)
    assert Outcome.from_dict(json.loads(json.dumps(found.to_dict()))) == found


def test_nothing_served_is_no_division_by_zero() -> None:
    done = run(chain([steady("a", 10.0)]), at(0.0))
    found = outcome(done, 0.5, 1.0, 10.0)
    assert (found.offered, found.times.mean_ms, found.over, found.throughput) == (0, 0.0, 0.0, 0.0)


def test_a_forward_that_outlasts_its_queries_keeps_its_worker_busy_no_longer_than_it_runs() -> None:
    model = chain([steady("a", 90.0)])
    hasty = replace(model, tasks=(replace(model.tasks[0], deadline_ms=10.0),))
    found = outcome(run(hasty, at(10.0)), 0.0, 0.1, 10.0)
    assert (found.expired, found.virtual_s) == (1, 0.02)
    assert found.busy == {"worker1#0": pytest.approx(0.9)}


def test_jains_index() -> None:
    assert jain([1.0, 1.0, 1.0]) == 1.0
    assert jain([1.0, 0.0, 0.0, 0.0]) == 0.25
    assert jain([]) == jain([0.0]) == 1.0


def test_an_experiment_travels_as_json() -> None:
    model = shared_trunk({"policy": "none"}, share=TaskShare(weight=2.0, priority=1))
    plan = Experiment(
        model, [{"policy": "none"}, {}], [20.0], rows="uniform:1-2", duration_s=1.0, warmup_s=0.1
    )
    again = Experiment.from_dict(json.loads(json.dumps(plan.to_dict())))
    assert again.system == model
    cell = Cell(1, 0, 7)
    assert Runner(again).run(cell) == Runner(plan).run(cell)
    assert len(plan.cells()) == 2 * 1 * 20 == len(set(plan.cells()))


def test_more_load_means_longer_queues() -> None:
    plan = Experiment(chain([steady("a", 10.0)]), [{"policy": "none"}], [30.0, 60.0, 90.0])
    runner = Runner(replace(plan, duration_s=8.0, warmup_s=1.0, check=True))
    means = [runner.run(Cell(0, r, 1)).times.mean_ms for r in range(3)]
    assert all(a < b for a, b in pairwise(means))


def test_who_waits_for_a_slow_block_holds_no_slots_that_others_need() -> None:
    """Twice what the left head can do comes for it; the right one idles."""
    stages = {
        "trunk": steady("trunk", 1.0),
        "left": steady("left", 100.0),
        "right": steady("right", 1.0),
    }
    tasks = (TaskModel("l", ("trunk", "left"), 20.0), TaskModel("r", ("trunk", "right"), 20.0))
    workers = tuple(
        WorkerModel(name, (StageModel(name, one),), slots=4) for name, one in stages.items()
    )
    done = run(SystemModel(workers, tasks, cores=4), Poisson(), 40.0, 10.0)
    times = {
        name: sorted(r.left_ns - r.came_ns for r in done.requests if r.task == name)
        for name in ("l", "r")
    }
    middle = {name: found[len(found) // 2] / MS for name, found in times.items()}
    assert middle["l"] > 1000
    assert middle["r"] < 10
