"""Tasks on one trunk: what is laid beside the bound and the full models, and what is weighed."""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from batching_rig import SPEC

from blockflow.bench.batching import figures as f
from blockflow.bench.batching import grids, homes, shared
from blockflow.bench.batching.plan import HEADS, SHARED
from blockflow.core.model import BlockInfo, Contract
from tests.unit.test_bench_batching_visits import BRIEF, FakeSystem, rig_of


class FakeBound:
    """Computes at a fixed rate."""

    width = 2

    def __init__(self, *_: Any) -> None:
        pass

    def rate(self, tasks: int | None = None) -> float:
        return 1000.0

    def alone_ms(self) -> float:
        return 20.0


class FakeRepository:
    """Weights: a head has 60 MiB, a whole model 100, the rest 20."""

    def __init__(self, _root: Path) -> None:
        pass

    def info(self, name: str) -> BlockInfo:
        size = {BRIEF.trunk.blocks[-1]: 60, BRIEF.whole.blocks[0]: 100}.get(name, 20)
        return BlockInfo(name, "1", "0" * 64, "pt2", Contract(SPEC, SPEC), 0, size * 2**20)


def test_the_shared_trunk_is_weighed_against_full_models(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shared, "Bound", FakeBound)
    monkeypatch.setattr(homes, "BlockRepository", FakeRepository)
    found = shared.measure(BRIEF, rig_of(FakeSystem()), SHARED)
    rates = {g.mode: g for g in found if g.name == f.SATURATED}
    assert set(rates) == {*shared.HOMES, shared.IN_PROCESS, shared.IN_PROCESS_WITHIN}
    assert {g.mode for g in found if g.name == f.PEAK} == (
        {*shared.HOMES} - {shared.REPLICAS, shared.PER_CORE}
    )
    share = {g.mode: g for g in found if g.name == f.OF_BOUND}
    assert share[shared.BATCHED].value == pytest.approx(rates[shared.BATCHED].value / 1000)
    assert share[shared.BATCHED].labels["goal"] == 0.9
    assert "verdict" not in share[shared.UNBATCHED].labels
    # At the same bound: beside the full models, and beside batches within the tasks alone.
    peaks = {
        g.labels["base"]: g.labels
        for g in found
        if g.name == f.PEAK_RATIO and g.mode == shared.BATCHED
    }
    assert set(peaks) == {shared.FULL_MODELS, shared.WITHIN}
    assert all(labels["goal"] == 1.0 and labels["at_least"] for labels in peaks.values())
    (of_bound,) = [g for g in found if g.name == f.PEAK_OF_BOUND]
    assert of_bound.labels["goal"] == 0.9
    gains = [g.labels["base"] for g in found if g.name == f.SATURATED_RATIO]
    assert gains == [shared.WITHIN, shared.FULL_MODELS]
    sizes = {(g.mode, g.labels["kind"]): g.value for g in found if g.name == f.MEMORY}
    trunk = 20 * (len(BRIEF.trunk.blocks) - 1)
    for home in (homes.SHARED_HOME, homes.REPLICAS_HOME, homes.PARTS_HOME):
        assert sizes[home, "weights"] == trunk + 60 * BRIEF.tasks
    assert sizes[homes.OWN_HOME, "weights"] == (trunk + 60) * BRIEF.tasks
    assert sizes[homes.FULL_HOME, "weights"] == 100 * BRIEF.tasks
    (ratio,) = [g for g in found if g.name == f.MEMORY_RATIO]
    assert ratio.labels["goal"] == 0.25
    assert grids.shared_grid(found).rows


def test_tasks_that_part_at_the_classifier_are_weighed_too(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(shared, "Bound", FakeBound)
    monkeypatch.setattr(homes, "BlockRepository", FakeRepository)
    plan = replace(BRIEF, late=replace(BRIEF.trunk, name="late"))
    system = FakeSystem()
    found = shared.measure(plan, rig_of(system), HEADS)
    assert {g.labels["experiment"] for g in found} == {HEADS}
    arms = {shared.BATCHED, shared.FULL_MODELS}
    assert {g.mode for g in found if g.name == f.PEAK} == arms
    sizes = {(g.mode, g.labels["kind"]): g.value for g in found if g.name == f.MEMORY}
    assert {home for home, _ in sizes} == {shared.HOMES[arm] for arm in arms}
    assert sizes[homes.SHARED_HOME, "weights"] == 20 * (len(plan.late.blocks) - 1 + plan.tasks)
    assert {row[0] for row in grids.heads_grid(found).rows} >= arms
    assert not grids.shared_grid(found).rows
    (ratio,) = [g for g in found if g.name == f.SATURATED_RATIO]
    assert (ratio.mode, ratio.labels["base"]) == (shared.BATCHED, shared.FULL_MODELS)


@pytest.mark.parametrize(
    ("rate", "verdict"), [(95.0, "met"), (60.0, "missed"), (104.0, "met"), (180.0, "within noise")]
)
def test_who_is_faster_than_the_bound_has_not_met_it(rate: float, verdict: str) -> None:
    """Then the bound was none: something else held its processes up."""
    rates = {shared.IN_PROCESS: [100.0] * 9, shared.BATCHED: [rate] * 9, shared.WITHIN: [50.0] * 9}
    found = {g.mode: g.labels for g in shared.shares(SHARED, rates) if g.name == f.OF_BOUND}
    assert found[shared.BATCHED]["verdict"] == verdict
    assert "verdict" not in found[shared.WITHIN]


def test_where_smaller_batches_are_faster_the_bound_is_exceeded() -> None:
    rates = {
        shared.IN_PROCESS: [100.0] * 9,
        shared.IN_PROCESS_WITHIN: [120.0] * 9,
        shared.BATCHED: [115.0] * 9,
        shared.WITHIN: [115.0] * 9,
    }
    found = {g.mode: g.labels for g in shared.shares(SHARED, rates) if g.name == f.OF_BOUND}
    assert found[shared.BATCHED]["verdict"] == "met"
    assert "verdict" not in found[shared.IN_PROCESS_WITHIN]


class FakeProcess:
    """Needs long for its first run, as one that lays out its tensors."""

    def __init__(self, *_: Any) -> None:
        self.times = iter([500.0, 31.0, *[30.0] * 6, 90.0, 31.0])

    def run(self, _rows: int) -> tuple[float, ...]:
        return (next(self.times),)

    def __enter__(self) -> FakeProcess:
        return self

    def __exit__(self, *_: object) -> None:
        pass


def test_the_bound_of_the_shared_peaks_comes_from_no_single_inference(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(shared, "InProcess", FakeProcess)
    with ExitStack() as stack:
        bound = shared.Bound(BRIEF, rig_of(FakeSystem()), stack)
        assert bound.alone_ms() == 60.0
