"""Each rule of the simulator catches a defect that is planted for it."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, cast

import pytest

from blockflow.batching import registry
from blockflow.batching.dvabatch import DvabatchPolicy
from blockflow.batching.lbci import LbciPolicy
from blockflow.batching.policy import Decision, Policy, Query, Run, WaitUntil
from blockflow.batching.sliced import SlicedPolicy
from blockflow.bench.simulation import worker
from blockflow.bench.simulation.arrivals import Mix, Poisson
from blockflow.bench.simulation.experiment import capacity
from blockflow.bench.simulation.invariants import LanesBounded, invariants
from blockflow.bench.simulation.request import Exit, Request
from blockflow.bench.simulation.service import Service
from blockflow.bench.simulation.simulator import Simulator
from blockflow.bench.simulation.sizes import parse_sizes
from blockflow.bench.simulation.slots import Lease
from blockflow.bench.simulation.system import chain
from blockflow.bench.simulation.watch import InvariantBroken, Watches
from blockflow.bench.simulation.worker import SimWorker
from blockflow.bench.simulation.workload import Workload
from blockflow.core.errors import Problem
from blockflow.core.profile import Point, StageProfile
from blockflow.worker.scheduler import Scheduler
from blockflow.worker.ticket import Ticket

MS = 1_000_000


def profile(block: str, ms: Callable[[int], float]) -> StageProfile:
    def point(b: int) -> Point:
        return Point(1, b, None, 9, ms(b), ms(b), ms(b), ms(b), ms(b), ms(b), 0.0, 0)

    points = tuple(point(b) for b in (1, 2, 4, 8, 16))
    return StageProfile(block, "0" * 64, "example", "fp32", "test", points)


PROFILES = (profile("first", lambda b: 2.0 + b), profile("second", lambda b: 6.0 + 0.5 * b))


def simulate(
    policy: Mapping[str, Any],
    *,
    profiles: Sequence[StageProfile] = PROFILES,
    load: float = 1.3,
    rows: str = "1",
    deadline_ms: float = 10_000.0,
    **system: Any,
) -> Simulator:
    model = chain(profiles, max_rows=8, cores=2, **system).with_policy(policy)
    model = replace(model, tasks=(replace(model.tasks[0], deadline_ms=deadline_ms),))
    sizes = parse_sizes(rows, "")
    mix = Mix([("task", 1.0)], sizes)
    workload = Workload(Poisson(), mix, load * capacity(model, sizes, None), 2.0, 1)
    watch = Watches(invariants(model, noisy=False))
    simulator = Simulator(model, workload, watch=watch, noisy=False)
    simulator.run()
    return simulator


class Waiting(Policy):
    """What the broken ones have in common: a list of who waits."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.queries: dict[int, Query] = {}

    @classmethod
    def problems(cls, options: Mapping[str, Any], path: str) -> list[Problem]:
        return []

    def arrive(self, query: Query, now: int) -> None:
        self.queries[query.key] = query

    def drop(self, key: int, now: int) -> None:
        self.queries.pop(key, None)

    def done(self, stage: int, keys: Sequence[int], now: int) -> None:
        pass

    def waiting(self) -> Iterable[Query]:
        return list(self.queries.values())

    def run(self, stage: int, *keys: int) -> Run:
        for key in keys:
            self.queries.pop(key, None)
        return Run(stage, keys)


class LastComeFirst(Waiting):
    def decide(self, now: int, busy: Collection[int] = ()) -> Decision:
        query = next(reversed(self.queries.values()), None)
        return None if query is None else self.run(query.stage, query.key)


class Greedy(Waiting):
    """All that wait at a stage, whatever fits."""

    def decide(self, now: int, busy: Collection[int] = ()) -> Decision:
        query = next(iter(self.queries.values()), None)
        if query is None:
            return None
        keys = [q.key for q in self.queries.values() if q.stage == query.stage]
        return self.run(query.stage, *keys)


class Stuck(Waiting):
    """Runs nobody, and names no time either."""

    def decide(self, now: int, busy: Collection[int] = ()) -> Decision:
        return None


class Idle(Waiting):
    """Lets the engine idle for a while although somebody waits."""

    def decide(self, now: int, busy: Collection[int] = ()) -> Decision:
        query = next(iter(self.queries.values()), None)
        if query is None:
            return None
        if now < query.ready_ns + MS:
            return WaitUntil(query.ready_ns + MS)
        return self.run(query.stage, query.key)


class Hurried(Waiting):
    """Asks to be called again at once, for ever."""

    def decide(self, now: int, busy: Collection[int] = ()) -> Decision:
        return WaitUntil(now) if self.queries else None


class Twice(Waiting):
    """Runs a query that runs already, or has left."""

    ran = 0

    def decide(self, now: int, busy: Collection[int] = ()) -> Decision:
        query = next(iter(self.queries.values()), None)
        if query is None:
            return None
        again, self.ran = self.ran, query.key
        return self.run(query.stage, again or query.key)


class OtherStage(Waiting):
    """Runs queries at a stage at which they do not wait."""

    def decide(self, now: int, busy: Collection[int] = ()) -> Decision:
        query = next(iter(self.queries.values()), None)
        if query is None:
            return None
        return self.run(next(s for s in self.stages if s != query.stage), query.key)


class Pushy(Waiting):
    """Does not care which stages are busy."""

    def decide(self, now: int, busy: Collection[int] = ()) -> Decision:
        query = next(iter(self.queries.values()), None)
        return None if query is None else self.run(query.stage, query.key)


class Nobody(Waiting):
    def decide(self, now: int, busy: Collection[int] = ()) -> Decision:
        return Run(self.stages[0], ()) if self.queries else None


class LateJoins(LbciPolicy):
    """Keeps to three times the bound that it was given."""

    def __init__(self, stages: Any, options: Mapping[str, Any], *args: Any) -> None:
        super().__init__(stages, {**options, "t_opt_ms": 3 * options["t_opt_ms"]}, *args)


class LateStretch(DvabatchPolicy):
    """Does not know its bounds."""

    def __init__(self, stages: Any, options: Mapping[str, Any], *args: Any) -> None:
        super().__init__(stages, {"join": "always"}, *args)


@pytest.mark.parametrize(
    ("policy", "rule"),
    [
        (LastComeFirst, "in order"),
        (Greedy, "rows bounded"),
        (Stuck, "nobody forgotten"),
        (Hurried, "waits end later"),
        (Twice, "only what waits runs"),
        (OtherStage, "only what waits runs"),
        (Nobody, "only what waits runs"),
    ],
)
def test_a_broken_policy_is_caught(
    policy: type[Policy], rule: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(registry.POLICIES, "broken", policy)  # type: ignore[arg-type]
    with pytest.raises(InvariantBroken) as caught:
        simulate({"policy": "broken"}, load=4.0)
    assert caught.value.rule == rule
    assert rule in str(caught.value)


def test_a_second_batch_at_a_stage_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(registry.POLICIES, "broken", Pushy)  # type: ignore[arg-type]
    simulate({"policy": "broken"}, load=2.0)  # in one lane nothing is busy when it is asked
    with pytest.raises(
        InvariantBroken, match="lanes bounded: worker1#0: policy 'Pushy' runs another batch"
    ):
        simulate({"policy": "broken"}, load=2.0, lanes=2)


def test_a_lane_too_many_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(SimWorker, "lanes", 2, raising=False)
    monkeypatch.setattr(SimWorker, "__setattr__", _all_but_lanes)
    with pytest.raises(InvariantBroken, match="lanes bounded: worker1#0: 2 at once in 1"):
        simulate({"policy": "none"}, load=2.0)


def test_a_batch_that_waits_for_a_slot_may_find_its_stage_narrower() -> None:
    """Requests have shown meanwhile that not everybody passes it."""
    rule, batch = LanesBounded(), cast(Any, SimpleNamespace(stage=1))
    here = cast(Any, SimpleNamespace(name="w", running=[batch]))
    here.model, here.scheduler = SimpleNamespace(lanes=2), SimpleNamespace(width=lambda _: 2)
    rule.chosen(here, batch, 0)
    here.scheduler.width = lambda _: 1
    here.running.append(batch)
    rule.started(here, batch, 1)
    with pytest.raises(InvariantBroken, match="w: 3 batches at stage 1"):
        rule.chosen(here, batch, 2)


def _all_but_lanes(self: SimWorker, name: str, value: Any) -> None:
    if name != "lanes":
        object.__setattr__(self, name, value)


def test_a_lane_that_idles_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    """Work conserving means every lane: one batch at a time in two of them is too little."""
    real = Scheduler.decide

    def one_at_a_time(self: Scheduler, now: int) -> Any:
        return None if self.busy else real(self, now)

    monkeypatch.setattr(Scheduler, "decide", one_at_a_time)
    simulate({"policy": "none"}, load=2.0)
    with pytest.raises(InvariantBroken, match="work conserving"):
        simulate({"policy": "none"}, load=2.0, lanes=2)


def test_none_that_idles_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(registry.POLICIES, "none", Idle)  # type: ignore[arg-type]
    with pytest.raises(InvariantBroken, match="work conserving"):
        simulate({"policy": "none"})


def test_a_policy_that_may_idle_is_not(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(registry.POLICIES, "broken", Idle)  # type: ignore[arg-type]
    simulate({"policy": "broken"})


def test_a_join_past_the_bound_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    honest = {"policy": "lbci", "t_opt_ms": 13}
    simulate(honest)
    monkeypatch.setitem(registry.POLICIES, "lbci", LateJoins)  # type: ignore[arg-type]
    with pytest.raises(InvariantBroken, match="join in time"):
        simulate(honest)


def test_a_batch_past_the_bound_that_nobody_joins_is_caught(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Four heads run one after another, of which each task has one."""
    heads = [profile(f"head{i}", lambda b: 6.0) for i in range(4)]
    model = chain([PROFILES[0], *heads], max_rows=8).with_policy({"policy": "lbci", "t_opt_ms": 25})
    tasks = tuple(replace(model.tasks[0], name=h.block, path=("first", h.block)) for h in heads)
    model = replace(model, tasks=tasks)
    mix = Mix([(t.name, 1.0) for t in tasks], parse_sizes("1", ""))

    def run() -> None:
        watch = Watches(invariants(model, noisy=False))
        Simulator(model, Workload(Poisson(), mix, 200.0, 0.5, 1), watch=watch, noisy=False).run()

    run()
    monkeypatch.setattr(LbciPolicy, "_bounds", lambda self, times: (8, 0.0))
    with pytest.raises(InvariantBroken, match="join in time"):
        run()


@pytest.mark.parametrize("bound", [{"t_comp_wait_ms": 0.5}, {"last_join_stage": 1}])
def test_a_stretch_past_its_bounds_is_caught(
    bound: Mapping[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    policy = {"policy": "dvabatch", "join": "always", **bound}
    three = (*PROFILES, profile("third", lambda b: 3.0 + b))
    simulate(policy, profiles=three)
    monkeypatch.setitem(registry.POLICIES, "dvabatch", LateStretch)  # type: ignore[arg-type]
    with pytest.raises(InvariantBroken, match="stretch in time"):
        simulate(policy, profiles=three)


# --- defects of the machinery around the policies ------------------------------------------------


def test_a_query_that_leaves_twice_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    send = Simulator.send

    def twice(self: Simulator, stage: int, members: Any, lease: Any, now: int) -> None:
        send(self, stage, members, lease, now)
        if stage == 0:
            send(self, stage, members, None, now)

    monkeypatch.setattr(Simulator, "send", twice)
    with pytest.raises(InvariantBroken, match="leaves once"):
        simulate({"policy": "none"})


def test_a_query_that_never_leaves_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    def lose(self: Simulator, request: Request, how: Exit, now: int, pause_ms: int = 0) -> None:
        """Nobody hears of it."""

    monkeypatch.setattr(Simulator, "_leave", lose)
    with pytest.raises(InvariantBroken, match="never leave"):
        simulate({"policy": "none"})


def test_a_slot_that_is_given_back_twice_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    release = Lease.release

    def twice(self: Lease) -> None:
        release(self)
        self._freed()

    monkeypatch.setattr(Lease, "release", twice)
    with pytest.raises(InvariantBroken, match="slots bounded"):
        simulate({"policy": "none"})


def test_a_slot_that_never_comes_back_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(SimWorker, "slot_freed", lambda self: None)
    with pytest.raises(InvariantBroken, match="slots bounded: worker1#0: 1 never"):
        simulate({"policy": "none"}, load=0.01, slots=1)


def test_time_that_runs_backwards_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Service, "draw", lambda self, rows, length: -5 * MS)
    with pytest.raises(InvariantBroken, match="clock runs forward"):
        simulate({"policy": "none"}, load=0.5)


def test_a_start_after_the_deadline_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    simulate({"policy": "none"}, load=4.0, deadline_ms=50.0)
    real = worker._ticket

    def generous(*args: Any) -> Ticket:
        return real(*args[:-1], args[-1] + 10**12)

    monkeypatch.setattr(worker, "_ticket", generous)
    with pytest.raises(InvariantBroken, match="deadlines kept"):
        simulate({"policy": "none"}, load=4.0, deadline_ms=50.0)


def test_a_stage_that_is_torn_apart_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = SlicedPolicy._go_on

    def some_of_it(self: SlicedPolicy, trip: Any, stage: int) -> Run:
        if len(trip.held) > 1:
            key, query = trip.held.popitem()
            self._trip_of.pop(key)
            self._strays[key] = query
        return whole(self, trip, stage)

    sliced = {"policy": "dvabatch", "stages": [2]}
    simulate(sliced)
    monkeypatch.setattr(SlicedPolicy, "_go_on", some_of_it)
    with pytest.raises(InvariantBroken, match=r"stages whole: .*1 stay behind"):
        simulate(sliced)


@pytest.mark.parametrize("lanes", [1, 2])
def test_what_is_sound_passes(lanes: int) -> None:
    for spec in ("none", "window", "lbci", "dvabatch"):
        options = {
            "window": {"max_rows": 4, "max_delay_ms": 2},
            "lbci": {"t_opt_ms": 60},
            "dvabatch": {"policies": ["load", "operator"]},
        }
        policy = {"policy": spec, **options.get(spec, {})}
        done = simulate(policy, rows="uniform:1-3", lanes=lanes)
        assert all(r.exit is not None for r in done.requests)
