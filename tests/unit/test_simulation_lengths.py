"""Lengths under virtual time: who shares a batch, what it costs, and who needs one at all."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest

from blockflow.bench.simulation.arrivals import Recorded
from blockflow.bench.simulation.experiment import Experiment, capacity
from blockflow.bench.simulation.plan import Order, check_policies, plan_experiment
from blockflow.bench.simulation.simulator import Simulator
from blockflow.bench.simulation.sizes import parse_sizes
from blockflow.bench.simulation.sources import Costs, Traits, plain_system
from blockflow.bench.simulation.system import (
    StageModel,
    SystemModel,
    TaskModel,
    WorkerModel,
    chain,
)
from blockflow.core.errors import RequestError, TopologyError
from blockflow.core.model import Contract, Padding, TensorSpec
from tests.simulation_rig import profile, run, totals
from tests.unit.test_topology import lookup

LONG = (8, 64)


def test_a_padded_batch_costs_its_longest() -> None:
    policy = {"policy": "window", "max_rows": 8, "max_delay_ms": 1, "classes": [16, 64]}
    long = profile("a", lambda b, n: float(n), lengths=(8, 64))
    model = chain([long], max_rows=8).with_policy(policy)
    trace = Recorded(tuple((0, None, 1, n) for n in (10, 16, 40)))
    done = run(model, trace, lengths=parse_sizes("8", ""))
    assert done.workers[0].batches == {1: {2: 1, 1: 1}}
    assert sum(totals(done)) == pytest.approx((1 + 16) * 2 + 1 + 16 + 40, rel=0.01)


def encoder(groups: Any, policy: dict[str, Any]) -> SystemModel:
    """Tokens of any length to one vector, which a head takes; and a task that has no lengths."""
    times = {"tokens": LONG, "pool": LONG, "head": (None,), "image": (None,)}
    stages = {
        b: StageModel(b, profile(b, lambda rows, n: 4.0 + rows, n), policy, max_rows=8)
        for b, n in times.items()
    }
    workers = tuple(WorkerModel(n, tuple(stages[b] for b in bs)) for n, bs in groups)
    tasks = (TaskModel("text", ("tokens", "pool", "head")), TaskModel("image", ("image",)))
    return SystemModel(workers, tasks, cores=4)


def sent(system: SystemModel) -> SystemModel:
    """As a process gets it that simulates a part."""
    text = json.dumps(Experiment(system, [], []).to_dict())
    return Experiment.from_dict(json.loads(text)).system


def batches(done: Simulator) -> dict[str, dict[int, int]]:
    return {w.stages[n].block: dict(b) for w in done.workers for n, b in w.batches.items()}


@pytest.mark.parametrize(
    "groups",
    [
        [("w", ["tokens", "pool", "head", "image"])],
        [("t", ["tokens"]), ("p", ["pool"]), ("h", ["head"]), ("i", ["image"])],
        [("t", ["tokens", "pool"]), ("h", ["head", "image"])],
    ],
)
def test_behind_the_pooling_all_lengths_share_a_batch(groups: Any) -> None:
    policy = {"policy": "window", "max_rows": 8, "max_delay_ms": 1}
    model = encoder(groups, {**policy, "classes": [64]})
    trace = Recorded(tuple((0, "text", 1, n) for n in (10, 16, 40, 64)))
    assert batches(run(model, trace)) == {
        "tokens": {4: 1},
        "pool": {4: 1},
        "head": {4: 1},
        "image": {},
    }
    # Without classes each length runs alone as long as it has one, and the last block's window
    # brings them together.
    apart = encoder(groups, {**policy, "max_delay_ms": 60})
    if len(groups) > 1:
        found = batches(run(apart, trace))
        assert found["pool"] == {1: 4} and found["head"] == {4: 1}


def test_behind_a_stride_a_block_takes_what_is_left() -> None:
    """16 frames of 64 samples: the head's times are those of 16, wherever it runs."""
    policy = {"policy": "none"}
    trunk = StageModel("trunk", profile("trunk", lambda b, n: b * n, LONG), policy, 8, "length//4")
    head = StageModel("head", profile("head", lambda b, n: b * n, (2, 16)), policy, 8)
    task = TaskModel("task", ("trunk", "head"))
    together = SystemModel((WorkerModel("w", (trunk, head)),), (task,))
    apart = SystemModel((WorkerModel("t", (trunk,)), WorkerModel("h", (head,))), (task,))
    for model in (together, apart, sent(apart)):
        assert model.taken(task.path) == ["length", "length // 4"]
        assert model.lengths(task) == (64, 67)
        for n, ms in ((64, 64 + 16), (24, 24 + 6), (8, 8 + 2)):
            assert totals(run(model, Recorded(((0, None, 1, n),)))) == pytest.approx([ms])
        sizes = parse_sizes("24", "")
        able = capacity(model, parse_sizes("1", ""), sizes, noisy=False)
        assert able == pytest.approx(1000 / 30)
    order = Order(arrivals="poisson", lengths="65", policies=["none"])
    with pytest.raises(RequestError, match="longest measured one is 64"):
        plan_experiment(together, order)


def test_images_share_batches_whatever_the_lengths_of_texts() -> None:
    groups = [("t", ["tokens", "pool", "head"]), ("i", ["image"])]
    model = encoder(groups, {"policy": "window", "max_rows": 8, "max_delay_ms": 1})
    trace = Recorded(tuple((0, "image", 1, None) for _ in range(4)))
    done = run(model, trace, lengths=parse_sizes("uniform:1-64", ""))
    assert batches(done)["image"] == {4: 1}
    assert len(totals(done)) == 4


def test_a_length_is_needed_where_a_task_has_one(tmp_path: Any) -> None:
    model = encoder([("w", ["tokens", "pool", "head", "image"])], {"policy": "none"})
    trace = tmp_path / "trace.csv"

    def planned(text: str, **more: Any) -> float:
        trace.write_text("time,task,length\n" + text)
        order = Order(arrivals=str(trace), warmup_s=0.0, seeds=1, **more)
        return plan_experiment(model, order)[1]

    assert planned("0.1,text,10\n0.2,image,\n") > 0
    assert planned("0.1,image,\n") > 0
    with pytest.raises(RequestError, match="variable length"):
        planned("0.1,text,\n0.2,image,\n")
    with pytest.raises(RequestError, match="variable length"):
        planned("0.1,text,10\n0.2,,\n")  # whose task is drawn
    assert planned("0.1,text,\n0.2,image,\n", lengths="8") > 0
    with pytest.raises(RequestError, match="longest measured one is 64"):
        planned("0.1,text,65\n0.2,image,\n")


CLASSES = {"policy": "window", "max_rows": 8, "classes": [16, 64]}


def test_classes_need_blocks_that_promise_padding() -> None:
    """An update with them would be refused."""
    made = {"a": profile("a", lambda rows, n: 1.0 * rows, lengths=LONG)}
    fixed = {"a": profile("a", lambda rows, n: 1.0 * rows, lengths=(None,))}
    costs = Costs(2, 0.0, 0.0, 64, 16, 1, 1, 32, 1000.0)
    for known in (None, {"a": Traits("length", True)}):
        check_policies(plain_system(made, [], {}, costs, apart=False, known=known), [CLASSES])
    for profiles, traits in ((made, Traits("length", False)), (fixed, Traits("length", True))):
        system = plain_system(profiles, [], {}, costs, apart=False, known={"a": traits})
        assert sent(system) == system
        with pytest.raises(TopologyError) as refused:
            check_policies(system, [CLASSES])
        assert any("classes" in p.path for p in refused.value.problems)


def test_what_is_known_of_a_stored_block() -> None:
    given = TensorSpec("float32", ("rows", "n"), {"n": (1, 64)})
    info = replace(lookup("block1"), contract=Contract(given, given))
    assert Traits.of(info) == ("length", False)
    assert Traits.of(replace(info, padding=Padding("n", 0))) == ("length", True)
