"""The thread plan: asked numbers first, no two threads on one core, nothing left unused."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.sparse import csr_array
from scipy.sparse.csgraph import maximum_bipartite_matching

from blockflow.core.threads import Demand, ThreadPlan, plan_threads

CORES = (0, 1, 2, 3)


def ask(name: str = "w", **more: object) -> Demand:
    return replace(Demand(name, 1, CORES), **more)  # type: ignore[arg-type]


def threads(*demands: Demand) -> tuple[int, ...]:
    plan = plan_threads(demands)
    assert not plan.oversubscribed
    return plan.threads


def total(demands: list[Demand], plan: ThreadPlan) -> int:
    return sum(n * m * d.replicas for (n, m), d in zip(plan.shares, demands, strict=True))


# --- by example -----------------------------------------------------------------------------------


def test_alone_a_worker_gets_all_cores() -> None:
    assert threads(ask()) == (4,)
    assert threads(ask(cores=(2,))) == (1,)
    assert plan_threads([]) == ThreadPlan((), (), ())


def test_the_rest_is_shared_evenly() -> None:
    assert threads(ask("a"), ask("b")) == (2, 2)
    assert threads(ask("a"), ask("b"), ask("c")) == (2, 1, 1)
    assert threads(*[ask(n) for n in "abcde"]) == (1,) * 5


def test_asked_numbers_come_first() -> None:
    assert threads(ask("a"), ask("b", threads=3)) == (1, 3)
    assert threads(ask("a"), ask("b", threads=1)) == (3, 1)


def test_replicas_have_one_number() -> None:
    assert threads(ask("a", replicas=2), ask("b")) == (1, 2)
    assert threads(ask("a", replicas=2)) == (2,)
    assert threads(ask("a", replicas=3)) == (1,)


def test_the_largest_compute_gets_the_most() -> None:
    assert threads(ask("a", cost_ms=1.0), ask("b", cost_ms=10.0)) == (1, 3)
    assert threads(ask("a", cost_ms=5.0), ask("b", cost_ms=6.0)) == (2, 2)
    # Two processes share the work of their block.
    assert threads(ask("a", cost_ms=8.0, replicas=2), ask("b", cost_ms=7.0)) == (1, 2)
    six, seven = tuple(range(6)), tuple(range(7))
    shared = ask("a", cost_ms=8.0, replicas=2, cores=six)
    assert threads(shared, ask("b", cost_ms=9.0, cores=six)) == (1, 4)
    # What was never measured counts as usual.
    known = ask("b", cost_ms=8.0, replicas=2, cores=seven), ask("c", cost_ms=5.0, cores=seven)
    assert threads(ask("a", cores=seven), *known) == (2, 1, 3)
    assert threads(ask("a"), ask("b", cost_ms=100.0), ask("c", cost_ms=2.0)) == (1, 2, 1)


def test_a_gpu_worker_keeps_one_thread() -> None:
    assert threads(ask("gpu", grows=False), ask("cpu")) == (1, 3)


def test_only_spare_cores_are_given_out() -> None:
    # Three on core 0 share it; the free one has the other cores for itself.
    pinned = [ask(n, cores=(0,)) for n in "abc"]
    assert threads(*pinned, ask("free")) == (1, 1, 1, 3)
    # A core goes to the one that can use no other.
    assert threads(ask("a", cores=(0, 1)), ask("b", cores=(0,))) == (1, 1)
    assert threads(ask("a", cores=(0, 1), threads=2), ask("b", cores=(2, 3), threads=2)) == (2, 2)


def test_asking_for_cores_that_others_need() -> None:
    plan = plan_threads([ask("a", threads=4), ask("b"), ask("c")])
    assert plan == ThreadPlan((4, 1, 1), (2, 0, 0), (1, 1, 1))
    assert plan.oversubscribed
    # More workers than cores: asking for one thread is never wrong, for two always.
    many = [ask(n) for n in "abcd"]
    assert not plan_threads([*many, ask("e", threads=1)]).oversubscribed
    assert plan_threads([*many, ask("e", threads=2)]).unplaced[4] == 1


def shares(*demands: Demand) -> list[tuple[int, int]]:
    """Threads and lanes."""
    plan = plan_threads(demands)
    assert not plan.oversubscribed
    return plan.shares


def test_every_lane_has_threads_of_its_own() -> None:
    assert shares(ask(lanes=2)) == [(2, 2)]
    assert shares(ask(lanes=3)) == [(1, 3)]
    assert shares(ask(lanes=2, threads=2)) == [(2, 2)]
    assert shares(ask("a", lanes=2), ask("b")) == [(1, 2), (2, 1)]
    assert shares(ask(lanes=2, replicas=2)) == [(1, 2)]
    plan = plan_threads([ask("a", lanes=2, threads=2), ask("b")])
    assert (plan.shares, plan.unplaced) == ([(2, 2), (1, 1)], (1, 0))
    assert plan_threads([ask(cores=(0,), lanes=2)]).unplaced == (1,)


def test_planned_lanes_get_the_cores_that_no_thread_wants() -> None:
    assert shares(ask(overlap=2)) == [(4, 1)]  # a lone request is answered soonest
    assert shares(ask(overlap=2, threads=1)) == [(1, 2)]
    assert shares(ask(overlap=8, threads=1)) == [(1, 4)]
    assert shares(ask(overlap=2, threads=2)) == [(2, 2)]
    assert shares(ask(overlap=2, threads=3)) == [(3, 1)]
    assert shares(ask(overlap=2, threads=1, lanes=1)) == [(1, 1)]
    assert shares(ask(overlap=2, threads=1, replicas=3)) == [(1, 1)]
    assert shares(ask("a", overlap=2, threads=1), ask("b")) == [(1, 1), (3, 1)]
    two = [ask(n, overlap=2, threads=1) for n in "ab"]
    assert shares(*two) == [(1, 2), (1, 2)]
    assert shares(*two, ask("c", threads=1)) == [(1, 2), (1, 1), (1, 1)]


# --- in general -----------------------------------------------------------------------------------

_COSTS = st.none() | st.floats(0.0, 1e6)


@st.composite
def _demands(draw: st.DrawFn) -> list[Demand]:
    machine = draw(st.integers(1, 12))
    sets = st.sets(st.integers(0, machine - 1), min_size=1).map(lambda s: tuple(sorted(s)))
    everything = tuple(range(machine))
    return [
        Demand(
            f"w{i:02}",
            draw(st.integers(1, 4)),
            draw(st.just(everything) | sets),
            draw(st.none() | st.integers(1, 4)),
            draw(_COSTS),
            draw(st.booleans()),
            draw(st.none() | st.integers(1, 3)),
            draw(st.integers(1, 3)),
        )
        for i in range(draw(st.integers(0, 8)))
    ]


@settings(max_examples=60, deadline=None)
@given(_demands())
def test_asked_numbers_are_kept_and_the_rest_is_positive(demands: list[Demand]) -> None:
    plan = plan_threads(demands)
    for demand, (n, m), missing in zip(demands, plan.shares, plan.unplaced, strict=True):
        assert n == demand.threads if demand.threads else 1 <= n <= len(demand.cores)
        assert m == demand.lanes if demand.lanes else 1 <= m <= demand.overlap
        assert 0 <= missing <= ((demand.threads or 1) * (demand.lanes or 1) - 1) * demand.replicas
        assert n == 1 or demand.threads or demand.grows


def seated(threads: list[tuple[int, ...]]) -> int:
    """How many of these threads (the cores that each may use) can have a core each."""
    if not threads:
        return 0
    table = [
        [core in cores for core in range(1 + max(max(c) for c in threads))] for cores in threads
    ]
    return int((maximum_bipartite_matching(csr_array(table), perm_type="column") >= 0).sum())


@settings(max_examples=60, deadline=None)
@given(_demands())
def test_every_further_thread_has_a_core_that_no_other_needs(demands: list[Demand]) -> None:
    plan = plan_threads(demands)
    first = [d.cores for d in demands for _ in range(d.replicas)]
    further = [
        d.cores
        for d, (n, m), missing in zip(demands, plan.shares, plan.unplaced, strict=True)
        for _ in range((n * m - 1) * d.replicas - missing)
    ]
    assert seated(first + further) == seated(first) + len(further)


@settings(max_examples=60, deadline=None)
@given(_demands())
def test_nothing_usable_is_left(demands: list[Demand]) -> None:
    plan = plan_threads(demands)
    for i, demand in enumerate(demands):
        more = [
            replace(d, threads=n, lanes=m) for d, (n, m) in zip(demands, plan.shares, strict=True)
        ]
        if demand.threads is None and demand.grows:
            asked = [replace(d, lanes=e.lanes or 1) for d, e in zip(more, demands, strict=True)]
            asked[i] = replace(asked[i], threads=plan.threads[i] + 1)
            assert sum(plan_threads(asked).unplaced) > sum(plan.unplaced)
        if demand.lanes is None and plan.lanes[i] < demand.overlap:
            more[i] = replace(more[i], lanes=plan.lanes[i] + 1)
            assert sum(plan_threads(more).unplaced) > sum(plan.unplaced)


@settings(max_examples=60, deadline=None)
@given(_demands(), st.randoms(use_true_random=True))
def test_the_order_of_the_demands_is_nothing(demands: list[Demand], random: object) -> None:
    mixed = list(demands)
    random.shuffle(mixed)  # type: ignore[attr-defined]
    by_name = dict(zip([d.name for d in demands], plan_threads(demands).shares, strict=True))
    assert by_name == dict(zip([d.name for d in mixed], plan_threads(mixed).shares, strict=True))


@given(st.integers(1, 16), st.integers(1, 24))
def test_free_workers_fill_the_machine(cores: int, workers: int) -> None:
    demands = [Demand(f"w{i:02}", 1, tuple(range(cores))) for i in range(workers)]
    plan = plan_threads(demands)
    assert total(demands, plan) == max(cores, workers)
    assert max(plan.threads) - min(plan.threads) <= 1
    joined = plan_threads([*demands, Demand("x", 1, tuple(range(cores)))])
    assert all(now <= before for now, before in zip(joined.threads, plan.threads, strict=False))


def test_of_equals_the_first_by_name_grows_and_an_unknown_cost_is_the_usual_one() -> None:
    cores = (0, 1, 2)
    assert plan_threads([Demand("b", 1, cores), Demand("a", 1, cores)]).threads == (1, 2)
    known = Demand("a", 1, cores, cost_ms=0.5)
    assert plan_threads([known, Demand("b", 1, cores)]).threads == (2, 1)
