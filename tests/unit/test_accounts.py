"""When a worker's figures are reckoned: not between two blocks, and before anybody looks."""

from __future__ import annotations

import weakref
from typing import Any

import pytest
from lanes_rig import Bench

from blockflow.worker.accounts import MOST, Accounts
from blockflow.worker.sampling import StageSampler
from tests.turns_rig import Rig, serving


def served(rig: Rig) -> list[int]:
    """Requests that have run, by stage, as the meters have them."""
    return [stage.meter.requests for stage in rig.stages.values()]


def came(rig: Rig) -> list[int]:
    return [sum(stage.meter.arrived._buckets.values()) for stage in rig.stages.values()]


def test_from_block_to_block_nothing_is_reckoned_and_all_of_it_before_the_thread_sleeps() -> None:
    with serving(lanes=1) as rig:
        rig.send(1, 2, 3)
        for _ in range(3):
            rig.go(rig.engine)
            assert rig.engine.at == "computes" and served(rig) == came(rig) == [0, 0, 0]
        rig.go(rig.engine)
        assert rig.engine.at == "asleep" and served(rig) == came(rig) == [1, 1, 1]


def test_a_lane_that_rests_leaves_nothing_to_reckon() -> None:
    with serving(lanes=2) as rig:
        rig.send(1)
        rig.send(2)
        rig.settle()
        (lane,) = rig.lanes
        rig.go(lane)
        assert (lane.at, rig.engine.at) == ("rests", "computes") and sum(served(rig)) == 1


def test_whoever_looks_at_the_figures_sees_all_of_them() -> None:
    with serving(lanes=1) as rig:
        sampler = StageSampler(rig.stages, rig.scheduler, rig.executor.accounts)
        while sampler.sample(0).news:
            pass
        mark = sampler.mark()
        rig.send(1, 2)
        for _ in range(2):
            rig.go(rig.engine)
        assert rig.engine.at == "computes" and sampler.mark() != mark
        sample = sampler.sample(0)
        assert sample.news and sample.rows == 1 and sample.stages[1].counts == (1, 1, 1, 0, 0)


def test_what_is_put_off_is_bounded_and_done_in_order() -> None:
    accounts, done = Accounts(), list[int]()
    for n in range(MOST):
        accounts.owe(done.append, n)
    assert done == [] and len(accounts) == MOST
    accounts.owe(done.append, MOST)
    assert done == list(range(MOST + 1)) and len(accounts) == 0


def test_figures_keep_no_tensor(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a batch whose figures are not reckoned yet, slot and result are others' already."""
    bench = Bench(monkeypatch, slots=1)
    bench.arrive(1, 1)
    batch = bench.expect(1)
    gone: list[Any] = []
    weakref.finalize(batch.tickets[0].source.tensor(), gone.append, "input")
    bench.compute(batch)
    assert len(bench.executor.accounts) and gone == ["input"]
    assert batch.out is None and batch.result is None
