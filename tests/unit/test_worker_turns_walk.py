"""A worker's threads in any order: nothing is left lying while a thread sleeps that could take it.

Each walk draws a worker, and then one step after another: a thread goes on, something comes, time
passes. BLOCKFLOW_SEEDS=5000 makes more of them, and BLOCKFLOW_SEED=17 only that one: what a failure
prints.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from random import Random

import pytest
from lanes_rig import LATE, MS

from blockflow.batching.facts import StageFacts
from blockflow.wire import control
from blockflow.worker.ticket import Batch
from blockflow.worker.turns import NEVER_NS
from tests.turns_rig import SlowRig, serving_by

SEEDS = int(os.environ.get("BLOCKFLOW_SEEDS", "150"))
ONLY = os.environ.get("BLOCKFLOW_SEED")
CHUNKS = 5
STEPS = 60
POLICIES: tuple[dict[str, object], ...] = (
    {"policy": "none"},
    {"policy": "window"},
    {"policy": "window", "max_delay_ms": 3},
    {"policy": "dvabatch"},
)


class Walk:
    """One worker, and what happens to it."""

    def __init__(self, rig: SlowRig, rng: Random) -> None:
        self.rig, self.rng = rig, rng
        self.sent: list[int] = []
        self.stops_at = rng.choice([rng.randrange(STEPS), STEPS, STEPS])

    def step(self) -> None:
        rig, rng = self.rig, self.rng
        ways: list[Callable[[], object]] = [self.go_on] * 10 + [self.request] * 4
        ways += [self.finish] * 3 + [self.pass_time, self.settle, rig.ring] * 2
        ways += [self.withdraw, self.drain, self.lanes, self.policy, rig.job, self.amid_a_job]
        rng.choice(ways)()

    def go_on(self) -> None:
        if awake := [t for t in self.rig.all if self.rig.awake(t)]:
            self.rig.go(self.rng.choice(awake))

    def request(self) -> None:
        rng, rig = self.rng, self.rig
        path = rng.choice([(1,), (2,), (3,), (1, 2), (1, 2, 3)])
        late = rng.choice([LATE, LATE, rig.clock.now + rng.randrange(1, 6) * MS])
        self.sent.append(rig.send(*path, deadline=late))

    def withdraw(self) -> None:
        if self.sent:
            self.rig.withdraw(self.rng.choice(self.sent))

    def finish(self) -> bool:
        rig = self.rig
        computing = [t for t in rig.all if t.at == "computes"]
        if rig.landing and (not computing or self.rng.random() < 0.5):
            rig.land(self.rng.choice(rig.landing))
            return True
        if computing:
            rig.go(self.rng.choice(computing))
        return bool(computing)

    def pass_time(self) -> None:
        until = min((t.until_ns for t in self.rig.all if t.at == "asleep"), default=NEVER_NS)
        jump = self.rig.clock.now + self.rng.randrange(4 * MS)
        far = until >= LATE or self.rig.worker._stopping  # that has its own patience
        self.rig.clock.now = jump if far else self.rng.choice([until, jump])

    def drain(self) -> None:
        self.rig.tell(self.rng.choice([control.Drain(), control.Undrain()]))

    def lanes(self) -> None:
        if not self.rig.lands:
            self.rig.tell(control.SetThreads(1, self.rng.choice([1, 2, 3])))

    def policy(self) -> None:
        spec = dict(self.rng.choice(POLICIES))
        self.rig.tell(control.SetPolicy(self.rng.choice([*self.rig.stages]), spec, 1, epoch=1))

    def under_way(self) -> set[Batch]:
        return set(self.rig.executor._under_way())

    def settle(self) -> None:
        while self.rig.unrung:
            self.rig.ring()
        self.rig.settle(self.rng.choice)
        self.look()

    def amid_a_job(self) -> None:
        """Who is at one may be for long: all others go on, and come to rest meanwhile."""
        self.rig.job()
        self.rig.long_jobs = True
        self.settle()
        self.pass_time()
        self.settle()
        self.rig.long_jobs = False

    def look(self) -> None:
        """What holds whenever nobody goes on by himself."""
        rig = self.rig
        executor, worker = rig.executor, rig.worker
        stopping = worker._stopping
        assert not rig.mail or rig.data.at == "ended", "nobody reads the mail"
        assert not rig.line.frames or executor.full or stopping, "nobody reads what has come"
        computing = [t for t in rig.all if t.at == "computes"]
        assert rig.lands or len(executor._running) == len(computing), (
            "nobody computes what is begun"
        )
        at_work = rig.engine.at in ("computes", "job")
        assert at_work or not rig.turns._jobs, "nobody does what is to be done"
        asleep = [t for t in (rig.engine, rig.data) if t.at == "asleep"]
        rests = [t for t in rig.all if t.at == "rests"]
        free = len(executor._running) < executor.lanes and (rests or rig.engine.at == "asleep")
        at_once = all(rig.scheduler.policy(s) == POLICIES[0] for s in rig.stages)
        if free and not stopping and executor._stalled is None and at_once:
            waits = {t.stage for t in rig.scheduler._tickets.values()}
            assert waits <= rig.scheduler.busy, "nobody starts what could run"
        orders = rig.lands and rig.engine.at == "computes"  # a moment, and then it looks itself
        starts = rests or rig.engine.at != "job"  # or nobody could, what is due
        late = executor.next_wake_ns() if starts else executor.next_late_ns()
        due = executor.next_overdue_ns() if stopping else late
        if due is not None and rig.data.at != "ended" and not orders:
            assert min(t.until_ns for t in asleep) <= due, "everyone sleeps longer than it may"
        if worker._drain_asked and not stopping:
            assert not executor.idle, "nobody has heard that all is done"
        if stopping:
            assert executor.busy or rig.data.at == "ended", "nobody has heard that it may end"

    def all(self) -> None:
        """At the end everything has its answer, once."""
        rig = self.rig
        for n in range(STEPS):
            if n == self.stops_at:
                rig.tell(control.Stop())
            paused, run, unread = rig.turns._paused, self.under_way(), len(rig.line.frames)
            self.step()
            if paused:
                assert self.under_way() <= run, "it starts something in a pause"
                assert len(rig.line.frames) >= unread, "it reads something in a pause"
        for _ in range(10 * STEPS):
            self.settle()
            if not self.finish():
                if rig.executor.idle or rig.worker._stopping:
                    break
                self.pass_time()
        if rig.worker._stopping:
            assert rig.data.at == "ended" and rig.data.result == 0
            return
        assert rig.executor.idle and not rig.line.frames
        answered = rig.answered()
        assert len(set(answered)) == len(answered)
        assert len(answered) + rig.executor.withdrawn == len(self.sent)


def walk(seed: int) -> None:
    rng = Random(seed)
    lands = rng.random() < 0.25
    how = {
        "lands": lands,
        "lanes": 1 if lands else rng.choice([1, 2, 3]),
        "slots": rng.choice([None, None, 2, 3]),
        "inbox": rng.choice([2, 3, 4096]),
        "burst": rng.choice([1, 2, 64]),
    }
    with serving_by(SlowRig, **how) as rig:
        spec = rng.choice(POLICIES)
        for stage in rig.stages:
            rig.scheduler.set_policy(stage, spec, 0, StageFacts())
        try:
            Walk(rig, rng).all()
        except AssertionError as exc:
            raise AssertionError(f"BLOCKFLOW_SEED={seed}, {how}: {exc}") from exc


@pytest.mark.parametrize("chunk", range(CHUNKS))
def test_threads_go_on_in_any_order(chunk: int) -> None:
    if ONLY is not None:
        return walk(int(ONLY)) if chunk == 0 else None
    for seed in range(chunk * SEEDS // CHUNKS, (chunk + 1) * SEEDS // CHUNKS):
        walk(seed)
    return None
