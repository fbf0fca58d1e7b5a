"""Which tasks' figures a sample of the Dispatcher holds: a bounded number, and in the end all."""

from __future__ import annotations

import queue
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from blockflow.core import limits
from blockflow.core.errors import CODES
from blockflow.core.roster import REMINDED, SAMPLED
from blockflow.dispatcher import monitor
from blockflow.dispatcher.monitor import Snapshot, StatsThread
from blockflow.dispatcher.stats import DispatcherStats
from blockflow.tensormq.channel import Usage
from blockflow.wire.control import Stats, encode_control

SECOND = 1_000_000_000


def published(n: int) -> DispatcherStats:
    """``n`` tasks, of which all that there was to tell has been told."""
    stats = DispatcherStats()
    stats.publish([f"t{i}" for i in range(n)])
    while stats.sample(0, {}).news:
        pass
    return stats


def test_few_tasks_are_all_in_every_sample() -> None:
    stats = published(REMINDED)
    for _ in range(3):
        sample = stats.sample(0, {})
        assert sorted(sample.tasks) == sorted(stats.tasks) and not sample.news


def test_a_sample_is_bounded_and_the_longest_untold_comes_first() -> None:
    stats = published(1000)
    for i in range(900):
        stats.admitted([f"t{i}"], 1)
        stats.admitted(["t0"], 1)  # again and again: it has its turn, no more
    seen: list[str] = []
    while (sample := stats.sample(0, {})).news:
        assert len(sample.tasks) <= SAMPLED
        seen += list(sample.tasks)
    assert seen[:900] == [f"t{i}" for i in range(900)]


def test_who_has_nothing_new_is_told_of_in_turn() -> None:
    stats = published(1000)
    seen: set[str] = set()
    for _ in range(-(-1000 // REMINDED)):
        told = stats.sample(0, {}).tasks
        assert len(told) == REMINDED
        seen |= set(told)
    assert seen == set(stats.tasks)


def test_reminders_leave_room_for_what_is_new() -> None:
    stats = published(1000)
    for i in range(SAMPLED - 3):
        stats.refused([f"t{i}"], "OVERLOADED")
    told = list(stats.sample(0, {}).tasks)
    assert told[: SAMPLED - 3] == [f"t{i}" for i in range(SAMPLED - 3)] and len(told) <= SAMPLED


@pytest.mark.parametrize(
    "happens",
    [
        lambda stats: stats.admitted(["t7"], 2),
        lambda stats: stats.refused(["t7"], "OVERLOADED"),
        lambda stats: stats.failed("t7", "BLOCK_FAILED"),
        lambda stats: stats.succeeded("t7", 10, 1, 1, 0),
    ],
)
def test_whatever_happens_is_news(happens: Callable[[DispatcherStats], None]) -> None:
    stats = published(1000)
    happens(stats)
    sample = stats.sample(0, {})
    assert sample.news and next(iter(sample.tasks)) == "t7"


def test_each_figure_of_a_task_has_its_place() -> None:
    stats, ms = DispatcherStats(), 1_000_000
    stats.publish(["t", "u"], {"t": ("a",)})
    stats.admitted(["t"], 3)
    stats.admitted(["t", "u"], 2)
    stats.refused(["t", "unknown"], "OVERLOADED")
    for canary in (False, True, True):
        stats.failed("t", "BLOCK_FAILED", canary=canary)
    stats.succeeded("t", 9 * ms, 2 * ms, 3 * ms, SECOND, canary=True)
    for _ in range(2):
        stats.succeeded("t", 5 * ms, ms, ms, SECOND)
    told = stats.sample(SECOND, {"inflight": 1}, {"t": 8, "u": 9}.__getitem__).to_dict()
    assert (told["rejected"], told["events"], told["inflight"]) == ({"OVERLOADED": 1}, {}, 1)
    task, other = told["tasks"]["t"], told["tasks"]["u"]
    figures = ("requests", "rows", "ok", "failed", "rejected", "limit")
    assert [task[f] for f in figures] == [2, 5, 3, {"BLOCK_FAILED": 3}, {"OVERLOADED": 1}, 8]
    assert [other[f] for f in figures] == [1, 2, 0, {}, {}, 9] and other["variants"] == {}
    assert [round(task[t]["sum_ms"]) for t in ("latency", "ingress", "egress")] == [19, 4, 5]
    variants = {n: (v["ok"], v["failed"]) for n, v in task["variants"].items()}
    assert variants == {
        "stable": (2, {"BLOCK_FAILED": 1}),
        "canary": (1, {"BLOCK_FAILED": 2}),
    }


def test_a_rate_is_told_until_it_has_fallen_to_nothing() -> None:
    stats = published(1000)
    stats.succeeded("t7", 10, 1, 1, 0)
    rates = []
    for second in range(8):
        sample = stats.sample(second * SECOND, {})
        rates.append(sample.tasks["t7"].per_s if sample.news else None)
    assert all(rate for rate in rates[:5])
    assert rates[5:] == [0.0, None, None]


def test_what_nobody_knows_is_no_news() -> None:
    stats = published(3)
    stats.refused(["other"], "UNKNOWN_TASK")
    stats.failed("other", "BLOCK_FAILED")
    sample = stats.sample(0, {})
    assert not sample.news and sample.rejected == {"UNKNOWN_TASK": 1}
    assert "other" not in sample.to_dict()["tasks"]


def test_new_routes_are_told_of_whole() -> None:
    """Whoever has published them may know nothing yet."""
    stats = published(300)
    stats.admitted(["t299", "t298"], 1)
    stats.publish([f"t{i}" for i in range(1, 300)] + ["new"])
    seen: list[str] = []
    while (sample := stats.sample(0, {})).news:
        seen += list(sample.tasks)
    assert seen[:2] == ["t299", "t298"] and sorted(set(seen)) == sorted(stats.tasks)
    assert "t0" not in seen


def test_a_sample_stays_as_it_was() -> None:
    stats = DispatcherStats()
    stats.publish(["t0"], {"t0": ("a",)})
    stats.succeeded("t0", 2_000_000, 1, 1, 0, canary=True)
    sample = stats.sample(0, {"state": "running"})
    before = sample.to_dict()["tasks"]["t0"]
    assert (before["ok"], before["latency"]["max_ms"]) == (1, 2.0)
    stats.succeeded("t0", 8_000_000, 9_000_000, 9_000_000, 0, canary=True)
    stats.failed("t0", "BLOCK_FAILED", canary=True)
    stats.refused(["t0"], "OVERLOADED")
    stats.events["defects"] += 1
    told = sample.to_dict()
    assert told["tasks"]["t0"] == before
    assert (told["rejected"], told["events"], told["state"]) == ({}, {}, "running")


def test_the_credits_in_force_are_among_a_tasks_figures() -> None:
    told = published(2).sample(0, {}, {"t0": 7, "t1": 8}.__getitem__).to_dict()["tasks"]
    assert {name: task["limit"] for name, task in told.items()} == {"t0": 7, "t1": 8}


# --- when it is told ----------------------------------------------------------------------------


class Sampled:
    """A StatsThread whose samples are asked for by the test, under a clock of its own."""

    def __init__(self, patch: pytest.MonkeyPatch, stats: DispatcherStats) -> None:
        self.now = 0
        self.sent: list[Stats] = []
        self.gauges: dict[str, Any] = {"inflight": 0}
        self.usage = Usage(0, 0, 0, 0, 0, 0, 0, 0)
        self._stats = stats
        patch.setattr(monitor.time, "monotonic_ns", lambda: self.now)
        self.thread = StatsThread(5, 4.0, self._answer, self.sent.append, lambda: self.usage)  # type: ignore[arg-type]
        self.sampler = monitor.ProcessSampler()

    def _answer(self, asked: Snapshot) -> None:
        assert isinstance(asked.answer, queue.SimpleQueue)
        asked.answer.put(self._stats.sample(self.now, dict(self.gauges)))

    def after(self, seconds: float) -> int:
        """Samples that were sent once so much time has passed and one more was taken."""
        self.now += int(seconds * SECOND)
        self.thread._sample(self.sampler)
        return len(self.sent)


@pytest.fixture
def told(monkeypatch: pytest.MonkeyPatch) -> Sampled:
    made = Sampled(monkeypatch, published(3))
    assert made.after(0) == 1
    return made


def test_while_nothing_happens_it_is_told_once_a_second(told: Sampled) -> None:
    assert [told.after(0.25) for _ in range(9)] == [1, 1, 1, 2, 2, 2, 2, 3, 3]


def test_what_happens_is_told_at_the_next_sample(told: Sampled) -> None:
    told._stats.admitted(["t1"], 1)
    assert told.after(0.25) == 2
    assert told.sent[-1].extra["tasks"]["t1"]["requests"] == 1
    told.gauges["inflight"] = 1
    assert told.after(0.25) == 3
    told._stats.events["defects"] += 1
    assert told.after(0.25) == 4
    told._stats.refused((), "MALFORMED")
    assert told.after(0.25) == 5
    told.usage = Usage(0, 0, 0, 0, 0, 0, 1, 0)
    assert told.after(0.25) == 6
    assert told.after(0.25) == 6


def test_samples_are_taken_at_the_pace_that_was_asked_for_last(
    told: Sampled, monkeypatch: pytest.MonkeyPatch
) -> None:
    waited: list[float | None] = []
    later = iter([0.0, 1e9, 1e-9, None])

    def wait(timeout_s: float | None) -> bool:
        """The first pause goes by; amid each further one something else is asked for."""
        waited.append(timeout_s)
        if len(waited) == 1:
            return False
        hz = next(later)
        told.thread.close() if hz is None else told.thread.set_rate(hz)
        return bool(changed)

    changed: list[bool] = []
    event = SimpleNamespace(wait=wait, set=lambda: changed.append(True), clear=changed.clear)
    monkeypatch.setattr(told.thread, "_changed", event)
    samples: list[object] = []
    monkeypatch.setattr(told.thread, "_sample", samples.append)
    told.thread._run()
    assert waited == [1 / 4, 1 / 4, None, 1 / 50, 1 / 0.001]
    assert len(samples) == 1 and changed == []


def test_the_largest_sample_fits_a_message() -> None:
    """One that does not is never heard of: 4,096 tasks once had no figures at all."""
    names = [f"{i:04}" + "n" * (limits.MAX_NAME_CHARS - 4) for i in range(limits.MAX_TASKS)]
    stats = DispatcherStats()
    stats.publish(names, dict.fromkeys(names, ("a", "b")))
    for name in names[: 2 * SAMPLED]:
        for canary in (False, True):
            stats.succeeded(name, 123_456_789, 12_345_678, 1_234_567, 0, canary=canary)
            for code in CODES:
                stats.failed(name, code, canary=canary)
        for code in CODES:
            stats.refused([name], code)
    sample = stats.sample(0, {})
    assert len(sample.tasks) == SAMPLED
    message = encode_control(Stats(2**63, 2**63, [], {}, sample.to_dict()))
    assert len(message) < limits.MAX_CONTROL_BYTES
