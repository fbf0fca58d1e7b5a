"""The batching benchmark's traffic: what is sent when, and what is made of the answers."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from concurrent.futures import Future
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import numpy as np
import pytest
from batching_rig import SPEC, FakeClient, profile
from rich.progress import Progress

from blockflow.bench.batching import traffic
from blockflow.bench.batching.peaks import within
from blockflow.bench.batching.plan import ENCODER
from blockflow.bench.batching.predict import simulated, stretched
from blockflow.bench.batching.rig import TASK, Policy, Rig
from blockflow.bench.batching.steady import Steady
from blockflow.bench.batching.traffic import (
    Cell,
    Hopeless,
    Inputs,
    growth,
    inputs_for,
    pace,
    poisson,
    replay,
    saturate,
)
from blockflow.bench.simulation.arrivals import Arrival, Mix, parse_arrivals
from blockflow.bench.simulation.sizes import parse_sizes
from blockflow.bench.simulation.workload import Workload
from blockflow.client.collector import Record
from blockflow.core.errors import RequestError
from blockflow.core.profile import StageProfile

ONE = Mix([(TASK, 1.0)], parse_sizes("1", ""))


def test_queries_are_those_that_a_simulated_run_has() -> None:
    queries = poisson(ONE, 50.0, 2.0, seed=3, multiple=10)
    simulated = list(Workload(parse_arrivals("poisson"), ONE, 50.0, 2.0, 3).queries())
    assert len(queries) % 10 == 0
    assert queries == simulated[: len(queries)]
    assert len(simulated) - len(queries) < 10


def test_there_is_at_least_one_batch_of_queries() -> None:
    assert len(poisson(ONE, 0.5, 0.1, seed=1, multiple=10)) >= 10


def test_inputs_fit_the_contract() -> None:
    make = inputs_for(ENCODER.input, 4096)
    x = make(Arrival(0, TASK, 2, 17))
    assert (x.shape, x.dtype) == ((2, 17), np.int64)
    assert x.min() >= 1  # 0 is padding
    assert make(Arrival(5, TASK, 2, 17)) is x
    assert inputs_for(SPEC, 2)(Arrival(0, TASK, 3, None)).shape == (3, 4)


def queries_and_inputs(count: int) -> tuple[list[Arrival], Inputs]:
    return [Arrival(i * 1000, TASK, 1 + i % 2, None) for i in range(count)], inputs_for(SPEC, 2)


def test_every_query_is_sent_once_and_recorded() -> None:
    queries, inputs = queries_and_inputs(7)
    client: Any = FakeClient()
    records = replay(client, queries, inputs)
    assert [len(x) for _, x in client.sent] == [q.rows for q in queries]
    assert [(r.rows, r.outcome) for r in records] == [(q.rows, "OK") for q in queries]
    assert all(r.latency_ms >= 0 for r in records)


def test_failures_are_outcomes_of_a_visit_and_end_a_saturation() -> None:
    queries, inputs = queries_and_inputs(3)
    client: Any = FakeClient(RequestError("OVERLOADED", "full"))
    assert {r.outcome for r in replay(client, queries, inputs)} == {"OVERLOADED"}
    with pytest.raises(RequestError, match="full"):
        saturate(client, queries, inputs, 2, 0.01)


def test_saturation_goes_through_the_queries_again_and_again() -> None:
    queries, inputs = queries_and_inputs(2)
    client: Any = FakeClient()
    assert saturate(client, queries, inputs, 3, 0.01) > 0
    assert len(client.sent) >= 5


def test_a_saturation_s_rate_is_that_of_its_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[tuple[int, int]] = []

    def counted(at: Sequence[float], rows: Sequence[int]) -> float:
        told.append((len(at), sum(rows)))
        return 42.0

    monkeypatch.setattr(traffic, "pace", counted)
    queries, inputs = queries_and_inputs(1)
    client: Any = FakeClient()
    assert saturate(client, queries, inputs, 3, 0.01) == 42.0
    ((answers, rows),) = told
    assert (
        answers == rows == len(client.sent) - 6
    )  # but the first ones, and those without successors


def test_a_visit_in_figures() -> None:
    records = [
        Record(TASK, 1, 0.0, 0.0, 10.0, "OK"),
        Record(TASK, 2, 100.0, 103.0, 150.0, "OK"),
        Record(TASK, 1, 200.0, 200.0, 201.0, "DEADLINE_EXCEEDED"),
    ]
    found = Cell.of(records, bound_ms=20.0)
    assert found.times_ms == (10.0, 50.0)
    assert found.mean_ms == 30.0
    assert found.over == pytest.approx(2 / 3)
    assert found.rows_per_s == pytest.approx(3 / 0.201)
    assert found.lag_ms == 3.0
    assert found.failed == ("DEADLINE_EXCEEDED",)
    assert found.later_ms == (50.0,)  # due in the later half, and answered
    assert found.due_per_s == pytest.approx(4 / 0.2)


def backlog(rate: float, served: float, count: int = 200) -> list[Record]:
    """Queries that come at an even rate and are answered one by one."""
    free, found = 0.0, []
    for i in range(count):
        due = 1e3 * i / rate
        free = max(free, due) + 1e3 / served
        found.append(Record(TASK, 1, due, due, free, "OK"))
    return found


def test_a_backlog_that_grows_is_seen_though_every_answer_is_in_time() -> None:
    assert growth(backlog(100.0, 110.0)) == pytest.approx(0.0, abs=0.01)
    assert growth(backlog(100.0, 80.0)) == pytest.approx(0.2, abs=0.02)
    assert growth(backlog(100.0, 80.0, count=4)) == 0.0  # too few to say
    late = Cell.of(backlog(100.0, 80.0), bound_ms=1e6)
    assert late.over == 0.0
    assert late.growth > 0.15


def mean_ms(profiles: Sequence[StageProfile], policy: Policy, queries: Sequence[Arrival]) -> float:
    return simulated(profiles, policy, queries, 32, 1).times.mean_ms


def test_the_simulator_meets_the_same_queries() -> None:
    profiles = [profile("a"), profile("b", 20.0)]
    apart = [Arrival(i * 100_000_000, TASK, 1, None) for i in range(10)]
    assert mean_ms(profiles, {"policy": "none"}, apart) == pytest.approx(30.0)
    at_once = [Arrival(0, TASK, 1, None)] * 10
    static = {"policy": "window", "max_rows": 10, "max_delay_ms": 60_000}
    assert mean_ms(profiles, static, at_once) == pytest.approx(30 * 5.5)
    # What a queue gathers is waited for, not turned away.
    crowd = [Arrival(0, TASK, 1, None)] * 300
    assert mean_ms(profiles, {"policy": "none"}, crowd) == pytest.approx(30 * 150.5)
    # A static batch waits for its last query.
    assert mean_ms(profiles, static, apart) == pytest.approx(450 + 30 * 5.5)
    # Times as they are served: by a factor for each size.
    slower = stretched(profiles, lambda rows: 1.5 if rows == 1 else 1.0)
    assert mean_ms(slower, {"policy": "none"}, apart) == pytest.approx(45.0)
    assert simulated(slower, {"policy": "none"}, apart, 32, 1, 40.0).over == 1.0
    assert mean_ms(slower, static, at_once) == pytest.approx(30 * 5.5)


# --- rates ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("first", [0, 3, 8, 15])
def test_rows_that_are_answered_by_the_batch_are_not_counted_too_fast(first: int) -> None:
    """Sixteen rows each 0.4 s are 40 per second, wherever in a batch the counting begins. From the
    first answer to the last they would be up to 44."""
    at = [0.4 * n + 1e-5 * i for n in range(10) for i in range(16)][first:]
    assert pace(at, [1] * len(at)) == pytest.approx(40.0, rel=0.015)


def test_rows_that_are_answered_one_by_one_and_by_request() -> None:
    one_by_one = [0.1 * i for i in range(40)]
    assert pace(one_by_one, [1] * 40) == pytest.approx(10.0)
    assert pace(one_by_one, [3] * 40) == pytest.approx(30.0)


# --- probes that end early ------------------------------------------------------------------------


def answer(latency_ms: float, outcome: str = "OK") -> Record:
    return Record(TASK, 1, 0.0, 0.0, latency_ms, outcome)


def test_a_probe_is_hopeless_once_more_than_a_hundredth_of_all_is_late() -> None:
    hopeless = Hopeless(50.0, 250)
    assert [hopeless(answer(ms)) for ms in (10.0, 60.0, 50.0, 60.0, 10.0)] == [False] * 5
    assert hopeless(answer(51.0))  # three of 250: the 99th percentile is late
    assert hopeless(answer(1.0))  # and stays so
    assert Hopeless(50.0, 250)(answer(1.0, "OVERLOADED"))


@pytest.mark.parametrize(("late", "holds"), [(2, True), (3, False)])
def test_a_probe_that_ended_early_has_not_held_nor_would_it_have(late: int, holds: bool) -> None:
    """The same answers, all of them or as many as there were when the probe ended."""
    hopeless = Hopeless(50.0, 250)
    # In the first quarter, so that it is the whole probe's percentile that decides.
    times = [60.0 if i % 20 == 0 and i < 20 * late else 10.0 for i in range(250)]
    records = [Record(TASK, 1, 8.0 * i, 8.0 * i, 8.0 * i + ms, "OK") for i, ms in enumerate(times)]
    ended = next((i for i, r in enumerate(records) if hopeless(r)), None)
    assert (ended is None) is holds
    assert within(Cell.of(records, 50.0), 50.0) is holds
    if ended is not None:
        assert not within(Cell.of(records[: ended + 1], 50.0), 50.0)


def test_nothing_more_is_sent_once_it_is_enough_and_what_is_under_way_is_waited_for() -> None:
    queries, inputs = queries_and_inputs(7)
    client: Any = FakeClient()
    assert len(replay(client, queries, inputs, lambda _: len(client.sent) == 3)) == 3
    assert len(client.sent) == 3


class Holding(FakeClient):
    """Answers when it is told."""

    def __init__(self) -> None:
        super().__init__()
        self.held: SimpleQueue[Future[Any]] = SimpleQueue()

    def submit(self, task: str, x: Any, **_: Any) -> Future[Any]:
        self.sent.append((task, x))
        future: Future[Any] = Future()
        self.held.put(future)
        return future


def test_all_that_was_sent_is_waited_for() -> None:
    queries, inputs = queries_and_inputs(3)
    client = Holding()
    anybody: Any = client
    records: list[Record] = []
    sender = threading.Thread(target=lambda: records.extend(replay(anybody, queries, inputs)))
    sender.start()
    held = [client.held.get(timeout=30.0) for _ in queries]
    for future in held[1:]:
        future.set_result(None)
    sender.join(0.2)  # one is missing: it cannot end, however long this takes
    assert sender.is_alive()
    held[0].set_result(None)
    sender.join(30.0)
    assert len(records) == 3


def test_a_probe_ends_where_a_visit_goes_on() -> None:
    queries, inputs = queries_and_inputs(5)
    nobody: Any = None
    for sent, ends in ((5, False), (1, True)):
        client: Any = FakeClient(RequestError("OVERLOADED", "full"))
        rig = Rig(Path("blocks"), nobody, client, Progress(disable=True), Steady(0))
        found = (rig.probe if ends else rig.visit)(queries, inputs, 50.0)
        assert len(client.sent) == found.offered == sent
        assert not within(found, 50.0)
