"""The credits in force follow the queues: under virtual time, alone and in the simulator."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from blockflow.bench.simulation.arrivals import Mix, parse_arrivals
from blockflow.bench.simulation.request import Exit
from blockflow.bench.simulation.simulator import Simulator
from blockflow.bench.simulation.sizes import parse_sizes
from blockflow.bench.simulation.system import SystemModel, chain
from blockflow.bench.simulation.workload import Workload
from blockflow.core.profile import Point, StageProfile
from blockflow.dispatcher import adaptive
from blockflow.dispatcher.adaptive import MIN_QUEUE_NS, PATIENCE, QUEUE_FACTOR, AdaptiveLimit

MS = 1_000_000
SECOND = 1_000_000_000
BUDGET = 10 * SECOND


class Server:
    """One server, first come first served, that offers more than it can do to a limit."""

    def __init__(self, limit: AdaptiveLimit, work_ns: int, gap_ns: int, budget_ns: int) -> None:
        self.limit, self.work, self.gap, self.budget = limit, work_ns, gap_ns, budget_ns
        self.inflight: deque[tuple[int, int, int]] = deque()
        self.now = self.free_ns = self.served = self.refused = 0

    def run(self, seconds: float) -> None:
        end = self.now + round(seconds * SECOND)
        while self.now < end:
            self.now += self.gap
            while self.inflight and self.inflight[0][0] <= self.now:
                done, came, ahead = self.inflight.popleft()
                self.served += 1
                queued = done - came - self.work
                self.limit.sample(ahead, queued, self.work, self.budget, done)
            if len(self.inflight) < self.limit.limit:
                self.free_ns = max(self.free_ns, self.now) + self.work
                self.inflight.append((self.free_ns, self.now, len(self.inflight) + 1))
            else:
                self.refused += 1

    def stand_still(self, seconds: float) -> None:
        self.free_ns = max(self.free_ns, self.now) + round(seconds * SECOND)


def test_an_overload_ends_with_a_short_queue_and_a_busy_server() -> None:
    limit = AdaptiveLimit(256)
    server = Server(limit, 20 * MS, 5 * MS, BUDGET)
    server.run(10)  # the first queue, of 256, drains
    server.served = 0
    server.run(10)
    assert server.served == pytest.approx(500, rel=0.02)  # never idle
    queue_ns = (len(server.inflight) - 1) * server.work
    assert queue_ns <= 3 * QUEUE_FACTOR * server.work
    assert limit.floor <= limit.limit <= 12


def test_a_light_load_never_meets_a_limit_and_an_old_overload_is_forgotten() -> None:
    limit = AdaptiveLimit(256)
    Server(limit, 20 * MS, 25 * MS, BUDGET).run(10)
    assert limit.limit == 256
    crowded = Server(limit, 20 * MS, 5 * MS, BUDGET)
    crowded.now = 10 * SECOND
    crowded.run(10)
    assert limit.limit < 20
    quiet = Server(limit, 20 * MS, 40 * MS, BUDGET)
    quiet.now = 20 * SECOND
    quiet.run(10)
    assert limit.limit == 256


def test_a_burst_that_drains_within_its_window_moves_nothing() -> None:
    limit = AdaptiveLimit(64)
    for burst in range(20):
        for i in range(40):  # 40 at once, 1 ms each, with an idle server before
            limit.sample(i + 1, i * MS, MS, BUDGET, burst * SECOND + i * MS)
    assert limit.limit == 64


@pytest.mark.parametrize("patience", [PATIENCE, 0.0])
def test_what_an_outage_has_left_may_drain_while_there_is_time(
    monkeypatch: pytest.MonkeyPatch, patience: float
) -> None:
    """At 70% of the capacity, with half a minute for each request."""
    monkeypatch.setattr(adaptive, "PATIENCE", patience)
    server = Server(AdaptiveLimit(256), 10 * MS, round(10 * MS / 0.7), 30 * SECOND)
    for _ in range(5):
        server.run(15)
        server.stand_still(2)
    server.run(15)
    assert (server.refused == 0) is (patience > 0)
    assert server.limit.limit == 256


def test_patience_ends_with_its_share_of_the_time() -> None:
    limit = AdaptiveLimit(256)
    server = Server(limit, 20 * MS, 5 * MS, 30 * SECOND)
    server.run(3.7)
    assert limit.limit == 256 and len(server.inflight) > 200
    server.run(6)  # half of the way at a time, as what waits already goes
    for _ in range(100):
        assert limit.limit <= 24
        server.run(0.1)


def test_patience_is_counted_from_the_first_that_met_a_queue() -> None:
    limit, budget = AdaptiveLimit(256), round(3770 * MS / PATIENCE)
    for n in range(189):  # half as long again as one may wait
        limit.sample(256, 90 * MS, 20 * MS, budget, n * 20 * MS)
    assert limit.limit == 256
    limit.sample(256, 90 * MS, 20 * MS, budget, 189 * 20 * MS)
    assert limit.limit < 256


def test_once_the_limit_is_below_the_credits_every_window_counts() -> None:
    limit = AdaptiveLimit(256)
    Server(limit, 20 * MS, 5 * MS, 30 * SECOND).run(10)
    now, before = 11 * SECOND, limit.limit
    while limit.limit < 100:  # pressed against, and nobody waits for longer than one may
        limit.sample(limit.limit, 40 * MS, 20 * MS, 30 * SECOND, now := now + 20 * MS)
    for _ in range(12):
        limit.sample(limit.limit, SECOND, 20 * MS, 30 * SECOND, now := now + 20 * MS)
    assert before < limit.limit < 70


def test_waiting_below_the_threshold_is_no_queue() -> None:
    limit = AdaptiveLimit(8)
    for n in range(300):  # longer than one is patient
        limit.sample(8, MIN_QUEUE_NS, 1000, BUDGET, n * 10 * MS)
    assert limit.limit == 8


def test_a_queue_that_eats_up_the_deadlines_is_cut_although_the_limit_is_far() -> None:
    limit = AdaptiveLimit(256)
    for n in range(50):  # forty in flight: less than half of the limit
        limit.sample(40, 700 * MS, 20 * MS, SECOND, n * 20 * MS)
    assert limit.limit < 40
    other = AdaptiveLimit(256)
    for n in range(50):  # the same with time to spare: the clients' own choice
        other.sample(40, 700 * MS, 20 * MS, BUDGET, n * 20 * MS)
    assert other.limit == 256


def test_what_eats_up_the_deadlines_is_cut_at_once() -> None:
    """Half of the way at a time, whole windows of answers came too late."""
    limit = AdaptiveLimit(256)
    for n in range(11):
        limit.sample(40, 580 * MS, 120 * MS, SECOND, n * 20 * MS)
    # Little's law: 40 in flight for 700 ms; 360 ms of waiting and 120 of work are allowed.
    assert limit.limit == round(40 * 480 / 700)


def test_a_window_lasts_its_time_and_is_judged_by_its_least_lateness() -> None:
    limit = AdaptiveLimit(256)
    for n in range(20):
        limit.sample(40, 580 * MS, 120 * MS, SECOND, n * 5 * MS)
    assert limit.limit == 256
    limit.sample(40, 580 * MS, 120 * MS, SECOND, 100 * MS)
    assert limit.limit == round(40 * 480 / 700)
    other = AdaptiveLimit(256)
    for n in range(20):  # one has queued, but was in time
        other.sample(40, (580 if n % 10 else 400) * MS, 120 * MS, SECOND, n * 20 * MS)
    assert other.limit == 256


def test_what_takes_longer_than_its_deadline_is_cut_too() -> None:
    limit = AdaptiveLimit(256)
    limit.sample(1, 0, 3 * SECOND, BUDGET, 0)
    for n in range(20):  # half of a second of work and a quarter of waiting are allowed
        limit.expired(100, SECOND, (1 + n) * 100 * MS)
    assert limit.limit == 75


def test_passed_deadlines_count_as_queueing() -> None:
    limit = AdaptiveLimit(256, stages=3)
    for n in range(200):
        limit.expired(100, SECOND, n * 10 * MS)
    assert limit.limit == limit.floor == 6


def test_two_full_batches_may_always_be_in_flight() -> None:
    limit = AdaptiveLimit(256, stages=3, batch_rows=10)
    for n in range(200):
        limit.expired(100, SECOND, n * 10 * MS)
    assert limit.limit == limit.floor == 20
    assert AdaptiveLimit(16, batch_rows=10).floor == 16


def test_a_wait_is_foretold_only_from_what_was_met() -> None:
    limit, now = AdaptiveLimit(256), 100 * SECOND
    assert limit.wait_ns(200, now) == 0  # nothing is known
    for _ in range(12):
        limit.sample(10, 180 * MS, 20 * MS, BUDGET, now := now + 10 * MS)
    assert limit.wait_ns(10, now) == pytest.approx(200 * MS, rel=0.01)
    assert limit.wait_ns(20, now) == pytest.approx(400 * MS, rel=0.01)
    assert limit.wait_ns(21, now) == 0  # twice as many as were ever met: batches may be quicker
    assert limit.wait_ns(10, now + 6 * SECOND) == 0  # long ago


def test_nonsense_is_refused() -> None:
    with pytest.raises(ValueError, match="positive"):
        AdaptiveLimit(0)


@settings(max_examples=60, deadline=None)
@given(
    st.integers(1, 300),
    st.integers(1, 64),
    st.lists(
        st.tuples(
            st.integers(1, 300),
            st.integers(0, 60 * SECOND),
            st.integers(0, 60 * SECOND),
            st.integers(1, 60 * SECOND),
            st.integers(0, SECOND),
            st.booleans(),
        ),
        max_size=200,
    ),
)
def test_the_limit_stays_between_floor_and_credits(
    most: int, stages: int, steps: list[tuple[int, int, int, int, int, bool]]
) -> None:
    limit, now = AdaptiveLimit(most, stages), 0
    for ahead, queued, worked, budget, gap, expired in steps:
        now += gap
        if expired:
            limit.expired(ahead, budget, now)
        else:
            limit.sample(ahead, queued, worked, budget, now)
        assert 1 <= limit.floor <= limit.limit <= most
        assert limit.wait_ns(ahead, now) >= 0


# --- in the simulator: the Dispatcher's admission before real schedulers and policies -------------


def profile(block: str, ms: Callable[[int], float]) -> StageProfile:
    points = tuple(
        Point(1, b, None, 9, *[ms(b)] * 6, spread=0.02, outliers=0) for b in (1, 2, 4, 8, 16, 32)
    )
    return StageProfile(block, "0" * 64, "example", "fp32", "test", points)


def goodput(system: SystemModel, rate: float, begin: int = 3, end: int = 6) -> tuple[float, float]:
    """(answers per second, their 99th percentile in ms) between these seconds."""
    mix = Mix([("task", 1.0)], parse_sizes("1", ""))
    sim = Simulator(system, Workload(parse_arrivals("poisson"), mix, rate, float(end), seed=3))
    sim.run()
    good = [
        r
        for r in sim.requests
        if r.exit is Exit.RESULT and r.left_ns > begin * SECOND and r.came_ns < end * SECOND
    ]
    inside = [r for r in good if r.left_ns < end * SECOND]
    late = sorted((r.left_ns - r.came_ns) / MS for r in inside)
    return len(inside) / (end - begin), late[len(late) * 99 // 100]


WINDOW: Mapping[str, Any] = {"policy": "window", "max_rows": 32, "max_delay_ms": 5}
SYSTEMS = {
    "a pipeline of three": (
        chain(
            [profile("a", lambda b: 5 * b), profile("b", lambda b: 10 * b), profile("c", float)],
            apart=(1, 2),
            cores=3,
        ),
        100.0,
    ),
    "batches that pay": (
        chain([profile("a", lambda b: 12 + 0.9 * b)], cores=1).with_policy(WINDOW),
        32 / (12 + 0.9 * 32) * 1000,
    ),
}


@pytest.mark.parametrize("name", SYSTEMS)
def test_goodput_at_three_times_the_capacity(name: str) -> None:
    system, capacity = SYSTEMS[name]
    peak = max(goodput(system, capacity * x)[0] for x in (0.9, 1.0))
    over, p99 = goodput(system, capacity * 3)
    assert over >= 0.9 * peak
    assert p99 < 3000


def test_short_deadlines_are_met_or_refused() -> None:
    """Without a look at the queue everything would be computed just too late."""

    system = chain([profile("a", lambda b: 50.0 * b)], cores=1)
    system = replace(system, tasks=(replace(system.tasks[0], deadline_ms=1000.0),))
    assert goodput(system, 60.0)[0] >= 0.9 * 20


def test_an_overload_is_learnt_within_three_seconds() -> None:
    """A pipeline at four times its capacity, with deadlines of ten times a request's work: what
    waits when the limit has learnt is late, what comes after it is not."""
    stages = [profile(name, lambda b: 26.0 * b) for name in "abcd"]
    system = chain(stages, apart=(1, 2, 3), cores=2)
    system = replace(system, tasks=(replace(system.tasks[0], deadline_ms=1000.0),))
    assert goodput(system, 76.0)[0] >= 0.85 * 19.2
