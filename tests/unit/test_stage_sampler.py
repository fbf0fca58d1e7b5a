"""Which stages' figures a worker's sample has, and whether they are news."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any, cast

import pytest

from blockflow.core import limits
from blockflow.core.launchspec import StageSpec
from blockflow.core.model import BlockInfo, Contract, TensorSpec
from blockflow.core.roster import REMINDED, SAMPLED
from blockflow.wire.control import Stats, encode_control
from blockflow.worker.accounts import Accounts
from blockflow.worker.sampling import StageSampler
from blockflow.worker.stage import StageMeter

SECOND = 1_000_000_000


class Many:
    """A sampler of ``n`` stages; what there was to tell has been told."""

    def __init__(self, n: int) -> None:
        self.meters = {number: StageMeter() for number in range(1, n + 1)}
        self.queued = dict.fromkeys(self.meters, 0)
        stages = {number: SimpleNamespace(meter=meter) for number, meter in self.meters.items()}
        queue = SimpleNamespace(
            queued=self.queued.get,
            queued_rows=lambda n: 2 * self.queued[n],
            width=lambda _: 1,
        )
        self.accounts = Accounts()
        self.sampler = StageSampler(cast(Any, stages), cast(Any, queue), self.accounts)
        while self.sampler.sample(0).news:
            pass


def test_a_worker_of_a_few_stages_tells_of_all() -> None:
    many = Many(REMINDED)
    many.meters[3].rows = 7
    many.queued[3] = 2
    sample = many.sampler.sample(0)
    assert sample.news and sample.rows == 7 and sorted(sample.stages) == sorted(many.meters)
    found = sample.stages[3]
    assert (found.queued, found.queued_rows, found.counts) == (2, 4, (0, 7, 0, 0, 0))
    sample = many.sampler.sample(0)
    assert not sample.news and sample.rows == 7 and sorted(sample.stages) == sorted(many.meters)


@pytest.mark.parametrize("what", ["requests", "rows", "batches", "failures", "expired"])
def test_whatever_is_counted_is_news(what: str) -> None:
    many = Many(500)
    before = many.sampler.mark()
    setattr(many.meters[499], what, 1)
    assert many.sampler.mark() != before
    sample = many.sampler.sample(0)
    assert sample.news and next(iter(sample.stages)) == 499
    assert not many.sampler.sample(0).news


def test_so_is_a_queue() -> None:
    many = Many(500)
    for queued in (1, 2, 0):
        before = many.sampler.mark()
        many.queued[499] = queued
        assert many.sampler.mark() != before
        sample = many.sampler.sample(0)
        assert sample.news and sample.stages[499].queued == queued
    assert not many.sampler.sample(0).news


def test_of_many_stages_a_bounded_number_is_told() -> None:
    many = Many(500)
    for meter in many.meters.values():
        meter.rows += 1
    seen: set[int] = set()
    for _ in range(-(-500 // SAMPLED)):
        sample = many.sampler.sample(0)
        assert sample.news and len(sample.stages) <= SAMPLED and sample.rows == 500
        seen |= set(sample.stages)
    assert seen == set(many.meters) and not many.sampler.sample(0).news


@pytest.mark.parametrize("meter", ["arrived", "served"])
def test_a_rate_is_told_until_it_has_fallen_to_nothing(meter: str) -> None:
    many = Many(500)
    many.meters[499].requests = 1
    getattr(many.meters[499], meter).add(4, 0)
    told = []
    for second in range(9):
        sample = many.sampler.sample(second * SECOND)
        told.append(any(sample.stages[499].rates) if sample.news else None)
    assert told[:5] == [True] * 5 and told[5:8] == [False, None, None]


def test_the_largest_sample_fits_a_message() -> None:
    name = "n" * limits.MAX_NAME_CHARS
    spec = TensorSpec("float32", ("rows", 2))
    block = BlockInfo(name, "1", "0" * 64, "pt2", Contract(spec, spec), 0, 0)
    many = Many(limits.MAX_BLOCKS)
    for meter in many.meters.values():
        for times in (meter.wait, meter.overhead, meter.compute):
            times.record(123_456_789_123)
        meter.requests = meter.rows = meter.bytes_out = meter.elements_in = 2**62
    sample = many.sampler.sample(0)
    assert len(sample.stages) == SAMPLED
    stages = [
        replace(
            found.kpi(StageSpec(number, block, engine=name, precision=name)),
            device=found.times[0].summary(),
        ).to_dict()
        for number, found in sample.stages.items()
    ]
    message = encode_control(Stats(2**63, 2**63, stages, {}, {}))
    assert len(message) < limits.MAX_CONTROL_BYTES
