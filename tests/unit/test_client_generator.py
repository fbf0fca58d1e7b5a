"""TaskGenerator and Collector: modes, figures, files."""

from __future__ import annotations

import csv
import json
import threading
import time
from concurrent.futures import Future
from decimal import Decimal
from itertools import count, islice, pairwise
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
from fake_dispatcher import FakeDispatcher

from blockflow.client import BlockTiming, Client, Collector, Record, TaskGenerator
from blockflow.client.collector import percentile, summarize
from blockflow.client.generator import poisson_times
from blockflow.core.errors import RequestError

X = np.ones((2, 4), np.float32)


def record(done: float, intended: float = 0.0, outcome: str = "OK", **kw: Any) -> Record:
    return Record("t", kw.get("rows", 1), intended, kw.get("sent", intended), done, outcome)


def test_poisson_times_have_the_rate_and_repeat_with_the_seed() -> None:
    times = list(islice(poisson_times(50.0, seed=1), 20_000))
    gaps = np.diff(times)
    assert np.mean(gaps) == pytest.approx(1 / 50, rel=0.03)
    # Exponential: the deviation equals the mean, and 63% of the gaps are below it.
    assert np.std(gaps) == pytest.approx(1 / 50, rel=0.05)
    assert np.mean(gaps < 1 / 50) == pytest.approx(0.632, abs=0.02)
    assert times[:100] == list(islice(poisson_times(50.0, seed=1), 100))
    assert times[:100] != list(islice(poisson_times(50.0, seed=2), 100))


def test_summary_figures() -> None:
    records = [record(done=10.0 * i, intended=5.0 * i, rows=2) for i in range(1, 101)]
    records += [record(done=1005.0, outcome="OVERLOADED"), record(done=9.0, sent=4.0)]
    s = summarize(records)
    assert (s.count, s.ok, s.errors) == (102, 101, {"OVERLOADED": 1})
    assert s.duration_s == pytest.approx(1.005)
    assert s.throughput == pytest.approx(101 / 1.005)
    assert s.rows_per_s == pytest.approx(201 / 1.005)
    latencies = sorted([5.0 * i for i in range(1, 101)] + [9.0])
    assert s.p50_ms == latencies[50]
    assert s.p99_ms == latencies[99]
    assert s.max_ms == 500.0
    assert s.mean_ms == pytest.approx(sum(latencies) / 101)


def test_percentiles_are_nearest_rank() -> None:
    values = [1.0, 2.0, 3.0, 4.0]
    assert [percentile(values, p) for p in (1, 25, 26, 50, 75, 99, 100)] == [1, 1, 2, 2, 3, 4, 4]
    assert percentile([], 50) == 0.0


def test_an_empty_collector_has_a_summary() -> None:
    s = Collector().summary()
    assert (s.count, s.throughput, s.p99_ms, s.blocks) == (0, 0.0, 0.0, ())


def test_block_means_and_files(tmp_path: Path) -> None:
    collector = Collector()
    for i in (1.0, 3.0):
        timings = (BlockTiming("a", 0.1, i, 0.2, 4.0), BlockTiming("b", 0.1, 0.0, 0.2, i))
        collector.add(Record("t", 1, 0.0, 0.0, 9.0, "OK", timings, 8.0))
    blocks = {b.block: b for b in collector.summary().blocks}
    assert (blocks["a"].count, blocks["a"].wait_ms, blocks["b"].compute_ms) == (2, 2.0, 2.0)
    document = json.loads(collector.to_json())
    assert document["summary"]["ok"] == 2
    assert document["records"][0]["timings"][1]["block"] == "b"
    collector.write_jsonl(tmp_path / "r.jsonl")
    lines = (tmp_path / "r.jsonl").read_text().splitlines()
    assert [json.loads(line)["latency_ms"] for line in lines] == [9.0, 9.0]
    collector.write_csv(tmp_path / "r.csv")
    with open(tmp_path / "r.csv", newline="") as file:
        rows = list(csv.DictReader(file))
    assert rows[1]["task"] == "t"
    assert float(rows[1]["wait_ms"]) == 3.0
    assert float(rows[1]["compute_ms"]) == 7.0


def test_sync_mode_sends_the_next_after_the_reply() -> None:
    with FakeDispatcher() as fake, Client(fake.endpoint) as client:
        seen: list[int] = []
        generator = TaskGenerator(client, "echo", [X, X[:1]], count=10, on_progress=seen.append)
        collector = generator.run()
        assert seen == list(range(1, 11))
        assert len(generator.run().records()) == 20
    records = collector.records()
    assert seen == 2 * list(range(1, 11)), "of each run by itself"
    assert [r.rows for r in records] == [2, 1] * 10
    for before, after in pairwise(records):
        assert after.sent_ms >= before.done_ms
    s = collector.summary()
    assert (s.count, s.ok) == (20, 20)
    assert [b.block for b in s.blocks] == ["b1", "b2"]
    assert s.blocks[0].wait_ms == 2.0


@pytest.mark.parametrize("mode", ["sync", "poisson"])
@pytest.mark.parametrize("error", [ZeroDivisionError, SystemExit])
def test_progress_that_fails_ends_the_run(mode: Any, error: type[BaseException]) -> None:
    def progress(n: int) -> None:
        raise error("planted")

    with FakeDispatcher() as fake, Client(fake.endpoint) as client:
        rate = None if mode == "sync" else 500.0
        generator = TaskGenerator(
            client, "echo", [X], mode=mode, rate=rate, duration_s=60, on_progress=progress
        )
        with pytest.raises(error):
            generator.run()
        assert np.array_equal(client.infer("echo", X).value, X)


def test_runs_after_one_another_share_the_collectors_time_line() -> None:
    """As the second run begins where the first has ended, the figures are over both."""
    with FakeDispatcher() as fake, Client(fake.endpoint) as client:
        collector = Collector()
        generators = [
            TaskGenerator(client, "echo", [X], count=3, collector=collector),
            TaskGenerator(
                client, "double", [X], mode="poisson", rate=500.0, count=3, collector=collector
            ),
        ]
        began = time.monotonic()
        for generator in (*generators, *generators):
            generator.run()
        took_s = time.monotonic() - began
    records, s = collector.records(), collector.summary()
    assert 0 <= records[0].intended_ms < 1, "the clock starts with the first run"
    runs = [records[i : i + 3] for i in range(0, 12, 3)]
    for before, after in pairwise(runs):
        assert min(r.intended_ms for r in after) >= max(r.done_ms for r in before)
    assert s.duration_s <= took_s
    assert s.duration_s >= sum((r[-1].done_ms - r[0].intended_ms) / 1e3 for r in runs)
    assert s.throughput == pytest.approx(12 / s.duration_s)


def test_each_run_ends_with_its_own_duration() -> None:
    class Seconds(Collector):
        """Each look at the clock takes one."""

        def now_ms(self) -> float:
            return next(self.seconds) * 1e3

        seconds = count()

    class Full:
        def submit(self, *_: Any, **__: Any) -> Future[Any]:
            raise RequestError("OVERLOADED", "full")

    clock = Seconds()
    generator = TaskGenerator(cast(Any, Full()), "t", [X], duration_s=10.0, collector=clock)
    # A request takes three looks, and the run's begin one.
    assert [len(generator.run().records()) for _ in range(2)] == [3, 6]


def test_progress_cannot_wait_for_the_client() -> None:
    with FakeDispatcher() as fake, Client(fake.endpoint) as client:
        generator = TaskGenerator(
            client,
            "slow",
            [X],
            mode="poisson",
            rate=500.0,
            count=2,
            on_progress=lambda n: client.infer("echo", X),
        )
        with pytest.raises(RequestError, match="use submit"):
            generator.run()


class StuckClient:
    """Takes requests; they end when told."""

    def __init__(self) -> None:
        self.futures: list[Future[Any]] = []
        self.arrived = threading.Condition()

    def submit(self, *a: Any, **kw: Any) -> Future[Any]:
        future: Future[Any] = Future()
        with self.arrived:
            self.futures.append(future)
            self.arrived.notify_all()
        return future


def test_poisson_mode_is_an_open_loop() -> None:
    """All requests leave although none is answered, and latency counts from the intended time."""
    stuck: Any = StuckClient()
    generator = TaskGenerator(stuck, "echo", [X], mode="poisson", rate=500.0, count=20, seed=3)
    thread = threading.Thread(target=generator.run)
    thread.start()
    with stuck.arrived:
        assert stuck.arrived.wait_for(lambda: len(stuck.futures) == 20, 10)
    for future in stuck.futures:
        future.set_exception(RequestError("DEADLINE_EXCEEDED", "late"))
    thread.join(10)
    records = generator.collector.records()
    wanted = [1e3 * t for t in islice(poisson_times(500.0, 3), 20)]
    assert sorted(r.intended_ms for r in records) == pytest.approx(wanted)
    assert all(r.sent_ms >= r.intended_ms for r in records)
    assert generator.collector.summary().errors == {"DEADLINE_EXCEEDED": 20}


def test_a_lagging_open_loop_ends_with_its_duration() -> None:
    """Ten thousand requests are due in every millisecond: what is late is not sent."""
    answered: Any = StuckClient()
    instead: Future[Any] = Future()
    instead.set_exception(RequestError("OVERLOADED", "at once"))
    answered.submit = lambda *a, **kw: instead
    generator = TaskGenerator(answered, "t", [X], mode="poisson", rate=1e7, duration_s=0.1)
    records = generator.run().records()
    assert records
    assert max(r.sent_ms for r in records) < 2000.0  # to send all of them takes ten times that
    assert len(records) < 1e7 * 0.1 / 2, "it does lag, or this shows nothing"


@pytest.mark.parametrize("mode", ["sync", "poisson"])
def test_an_input_without_dims_is_an_outcome(mode: Any) -> None:
    rate = None if mode == "sync" else 500.0
    with FakeDispatcher() as fake, Client(fake.endpoint) as client:
        generator = TaskGenerator(
            client, "echo", [np.array(1.0, np.float32), 3.0], mode=mode, rate=rate, count=2
        )
        collector = generator.run()
    assert collector.summary().errors == {"CONTRACT_MISMATCH": 2}
    assert [r.rows for r in collector.records()] == [0, 0]


def test_poisson_mode_against_a_dispatcher_with_several_tasks() -> None:
    with FakeDispatcher() as fake, Client(fake.endpoint) as client:
        generator = TaskGenerator(
            client, ["echo", "double"], lambda i: X, mode="poisson", rate=300.0, duration_s=0.3
        )
        s = generator.run().summary("echo+double")
    assert s.ok == s.count == len(fake.requests)
    assert s.count > 30
    # The fake reports the same two blocks for both tasks: what is shared counts once.
    assert [b.count for b in s.blocks] == [s.count] * 2


def test_errors_are_outcomes() -> None:
    with FakeDispatcher() as fake, Client(fake.endpoint) as client:
        collector = Collector()
        TaskGenerator(client, "fail", [X], count=2, collector=collector).run()
        TaskGenerator(client, "echo", [np.zeros((0, 4))], count=1, collector=collector).run()
    assert collector.summary().errors == {"BLOCK_FAILED": 2, "EMPTY_INPUT": 1}
    assert collector.summary("fail").count == 2


def test_what_the_client_refuses_is_not_sent_as_often_as_a_processor_can() -> None:
    with Client("ipc:///nobody") as client:
        bad = np.zeros((0, 4), np.float32)
        count = TaskGenerator(client, "echo", [bad], duration_s=0.2).run().summary().count
        assert 0 < count <= 21
        assert TaskGenerator(client, "echo", [bad], count=100).run().summary().count == 100


@pytest.mark.parametrize("mode", ["sync", "poisson"])
def test_stop_ends_a_run(mode: Any) -> None:
    with FakeDispatcher() as fake, Client(fake.endpoint) as client:
        generator = TaskGenerator(
            client,
            "echo",
            [X],
            mode=mode,
            rate=None if mode == "sync" else 200.0,
            duration_s=60,
            on_progress=lambda n: generator.stop() if n >= 3 else None,
        )
        assert 3 <= generator.run().summary().count < 60


@pytest.mark.parametrize("mode", ["sync", "poisson"])
def test_the_end_of_its_client_ends_a_run(mode: Any) -> None:
    """It would be refused again and again, as often as a processor can."""
    client = Client("ipc:///nobody")
    client.close()
    rate = None if mode == "sync" else 200.0
    generator = TaskGenerator(client, "echo", [X], mode=mode, rate=rate, duration_s=60)
    assert generator.run().summary().errors == {"CANCELLED": 1}


@pytest.mark.parametrize("mode", ["sync", "poisson"])
def test_a_stop_before_the_run_is_not_lost(mode: Any) -> None:
    with FakeDispatcher() as fake, Client(fake.endpoint) as client:
        rate = None if mode == "sync" else 500.0
        generator = TaskGenerator(client, "echo", [X], mode=mode, rate=rate, count=3)
        generator.stop()
        assert generator.run().records() == ()
        assert len(generator.run().records()) == 3, "it ends one run, not all"


@pytest.mark.parametrize(
    "kw",
    [
        {},
        {"count": 0},
        {"duration_s": -1.0},
        {"count": 1, "mode": "poisson"},
        {"count": 1, "mode": "poisson", "rate": 0.0},
        {"count": 1, "mode": "poisson", "rate": float("nan")},
        {"count": 1, "mode": "poisson", "rate": float("inf")},
        {"count": 1, "mode": "poisson", "rate": "3"},
        {"count": 2.5},
        {"count": "3"},
        {"duration_s": "3"},
        {"count": 1, "rate": 3.0},
        {"count": 1, "mode": "closed"},
        *({"count": 1, "deadline_s": s} for s in (0, -1, 61.0, float("nan"), Decimal("sNaN"), "1")),
    ],
)
def test_arguments_that_do_not_fit_are_refused(kw: dict[str, Any]) -> None:
    nobody: Any = None
    with pytest.raises(RequestError, match="INVALID_REQUEST"):
        TaskGenerator(nobody, "t", [X], **kw)


@pytest.mark.parametrize("inputs", [[], None, np.array(1.0), 5, (X for _ in range(3))])
def test_without_inputs_there_is_no_generator(inputs: Any) -> None:
    nobody: Any = None
    with pytest.raises(RequestError, match="a sequence with something in it"):
        TaskGenerator(nobody, "t", inputs, count=1)


@pytest.mark.parametrize("tasks", [[], None, [1], ["t", "t"]])
def test_without_tasks_neither(tasks: Any) -> None:
    nobody: Any = None
    with pytest.raises(RequestError, match="INVALID_REQUEST"):
        TaskGenerator(nobody, tasks, [X], count=1)
