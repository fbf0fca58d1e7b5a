"""Canaries: which requests take the path that is tried, and what an update may say about it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from blockflow.core.errors import RequestError, TopologyError
from blockflow.core.model import BlockInfo, Contract, TensorSpec
from blockflow.core.placement import desired_workers
from blockflow.core.routing import CanaryRoute, RouteTable, StageRoute, TaskRoute
from blockflow.core.topology import Topology, parse_topology
from blockflow.dispatcher.canary import CanaryTurns
from blockflow.dispatcher.entry import Entry
from blockflow.dispatcher.inflight import InFlightTable
from blockflow.dispatcher.plan import Plan, Planner
from blockflow.dispatcher.retry import RetryBudget
from blockflow.dispatcher.stats import DispatcherStats

SPEC = TensorSpec("float32", ("rows", 4))
CONTRACT = Contract(SPEC, SPEC)


def task(path: str, canary: str = "", share: float = 0.5, name: str = "t") -> TaskRoute:
    tried = CanaryRoute(tuple(canary), share) if canary else None
    return TaskRoute(name, tuple(path), CONTRACT, canary=tried)


def turns(share: float, n: int, counter: CanaryTurns | None = None) -> list[bool]:
    made = counter or CanaryTurns()
    return [made.turn(task("a", "b", share)) for _ in range(n)]


# --- the sequence -------------------------------------------------------------------------------


@settings(max_examples=60, deadline=None)
@given(st.floats(0, 1), st.integers(0, 3000), st.integers(1, 400))
def test_every_run_of_requests_gets_its_share(share: float, skipped: int, n: int) -> None:
    taken = turns(share, skipped + n)[skipped:]
    # the golden ratio's discrepancy: under log(n) of n, with a constant near 1
    assert abs(sum(taken) - share * n) <= 1 + 1.5 * n.bit_length()


def test_a_tenth_of_a_thousand() -> None:
    assert abs(sum(turns(0.1, 1000)) - 100) <= 2


def test_none_and_all() -> None:
    assert not any(turns(0.0, 500))
    assert all(turns(1.0, 500))


def test_a_larger_share_takes_what_the_smaller_took() -> None:
    small, large = turns(0.1, 500), turns(0.3, 500)
    assert all(b for a, b in zip(small, large, strict=True) if a)


@pytest.mark.parametrize("period", [2, 3, 4, 7, 10])
def test_no_rhythm_of_a_client_falls_in_with_it(period: int) -> None:
    taken = turns(0.2, 2000)
    for offset in range(period):
        mine = taken[offset::period]
        assert 0.15 < sum(mine) / len(mine) < 0.25


def test_tasks_count_for_themselves_and_are_forgotten() -> None:
    counter = CanaryTurns()
    first = turns(0.3, 50, counter)
    counter.keep({"t"})
    assert turns(0.3, 50, counter) != first
    counter.keep({"other"})
    assert turns(0.3, 50, counter) == first
    assert not counter.turn(task("a"))


# --- the planner --------------------------------------------------------------------------------


def planner(tasks: list[TaskRoute], blocks: str = "abcxy") -> Planner:
    made = Planner()
    made.replace(routes(tasks, blocks))
    return made


def routes(tasks: list[TaskRoute], blocks: str, version: int = 1) -> RouteTable:
    stages = {
        i: StageRoute(i, b, f"{b}#0", 10 + i, f"ipc://{i}", "tensormq")
        for i, b in enumerate("abcxy", start=1)
        if b in blocks
    }
    return RouteTable(version, version, stages, {t.name: t for t in tasks})


def ways(made: Planner, *names: str, n: int = 40) -> list[Plan]:
    return [made.plan([made.task(t) for t in names]) for _ in range(n)]


def test_the_share_goes_the_other_way() -> None:
    plans = ways(planner([task("ab", "ac", 0.25)]), "t")
    tried = [p for p in plans if p.canaries]
    assert len(tried) == sum(turns(0.25, 40))
    assert {p.blocks for p in tried} == {("a", "c")}
    assert {p.blocks for p in plans if not p.canaries} == {("a", "b")}


def test_tasks_on_one_input_share_what_they_have_in_common() -> None:
    made = planner([task("ab", "ac", 0.5), task("ax", name="u")])
    for p in ways(made, "t", "u"):
        assert set(p.blocks) == {"a", "x", "c" if p.canaries else "b"}
        assert p.blocks[p.ends[1]] == "x"


def test_a_canary_of_the_first_block_gives_way_where_others_begin_elsewhere() -> None:
    made = planner([task("ab", "xb", 1.0), task("ac", name="u")])
    assert {p.blocks for p in ways(made, "t")} == {("x", "b")}
    assert {frozenset(p.blocks) for p in ways(made, "t", "u")} == {frozenset("abc")}


def test_two_canaries_of_the_first_block_go_together() -> None:
    made = planner([task("ab", "xb", 0.5), task("ac", "xc", 0.5, name="u")])
    plans = ways(made, "t", "u")
    assert {(frozenset(p.blocks), p.canaries) for p in plans} == {
        (frozenset("abc"), frozenset()),
        (frozenset("xbc"), frozenset("tu")),
    }
    assert plans[0].trials == {"t": ("x", "b"), "u": ("x", "c")}


def test_a_canary_without_a_worker_costs_no_answer() -> None:
    made = planner([task("ab", "ac", 1.0)], blocks="ab")
    assert {p.blocks for p in ways(made, "t")} == {("a", "b")}
    made = planner([task("ab", "ac", 1.0)], blocks="ac")
    assert {p.blocks for p in ways(made, "t")} == {("a", "c")}
    made = planner([task("ab", "ac", 0.0)], blocks="ac")
    with pytest.raises(RequestError) as e:
        ways(made, "t")
    assert e.value.code == "BLOCK_UNAVAILABLE" and e.value.where == "b"


def test_a_further_attempt_takes_the_tasks_own_path_and_no_turn() -> None:
    made = planner([task("ab", "ac", 0.5)])
    again = [made.plan_again([made.task("t")]) for _ in range(10)]
    assert {p.blocks for p in again} == {("a", "b")}
    assert [bool(p.canaries) for p in ways(made, "t", n=10)] == turns(0.5, 10)


def test_the_cache_tells_ways_over_the_same_stages_apart() -> None:
    # stable a>b and a>b>c, canaries the other way round: one request visits the same stages
    made = planner([task("ab", "abc", 0.5), task("abc", "ab", 0.5, name="u")])
    plans = ways(made, "t", "u")
    assert {bool(p.canaries) for p in plans} == {True, False}
    for p in plans:
        ends = [p.blocks[e] for e in p.ends]
        assert ends == (["c", "b"] if p.canaries else ["b", "c"])


def test_new_routes_go_on_where_the_sequence_was() -> None:
    made = planner([task("ab", "ac", 0.3)])
    ways(made, "t", n=7)
    made.replace(routes([task("ab", "ac", 0.3)], "abc", version=2))
    got = [bool(p.canaries) for p in ways(made, "t", n=20)]
    assert got == turns(0.3, 27)[7:]


# --- what waits for a worker --------------------------------------------------------------------


def parked(made: Planner, *names: str) -> tuple[InFlightTable, Entry]:
    """A request that came while block "a" had no worker, and whose canaries' turn it was."""
    table = InFlightTable(7, made, RetryBudget(10))
    plan = made.way([made.task(t) for t in names])
    given: dict[str, Any] = {"rows": 1, "deadline_ns": 9, "received_ns": 0}
    entry = table.admit(b"c", bytes(16), names, plan, retained=None, charged=1, **given)
    assert entry.waits_for == "a worker of block 'a'" and entry.plan.turns
    return table, entry


def test_what_has_waited_does_not_say_that_it_tries_what_is_no_longer_tried() -> None:
    made = planner([task("ab", "ac", 1.0)], blocks="bc")
    table, entry = parked(made, "t")
    made.replace(routes([task("ab")], "abc", version=2))
    table.published()
    assert (entry.plan.blocks, entry.plan.canaries) == (("a", "b"), frozenset())


@pytest.mark.parametrize(("tried", "there"), [("", "ax"), ("ac", "ax"), ("ac", "acx")])
def test_a_turn_saves_nobody_whose_own_path_is_given_up(tried: str, there: str) -> None:
    """... but where the canary runs; the other tasks of the request go on in any case."""
    made = planner([task("ab", "ac", 1.0), task("ax", name="u")], blocks="bcx")
    table, entry = parked(made, "t", "u")
    after = routes([task("ab", tried, 1.0), task("ax", name="u")], there, version=2)
    made.replace(replace(after, down={"b": "it was given up"}))
    table.published()
    runs = "c" in there
    assert entry.open == (("t", "u") if runs else ("u",))
    assert entry.plan.canaries == frozenset("t" if runs else "")
    assert not entry.waits_for


# --- figures ------------------------------------------------------------------------------------


def test_the_figures_tell_the_two_apart() -> None:
    stats = DispatcherStats()
    stats.publish(["t", "u"], {"t": ("a", "c")})
    for canary in (False, False, True):
        stats.succeeded("t", 1000, 1, 1, 0, canary=canary)
    stats.failed("t", "BLOCK_FAILED", canary=True)
    stats.succeeded("u", 1000, 1, 1, 0)
    frozen = stats.sample(0, {}).to_dict()["tasks"]
    assert frozen["u"]["variants"] == {}
    of_t = frozen["t"]["variants"]
    assert of_t["stable"]["answered"] == of_t["stable"]["ok"] == 2
    assert of_t["canary"]["answered"] == 2
    assert of_t["canary"]["failed"] == {"BLOCK_FAILED": 1}
    assert of_t["canary"]["latency"]["count"] == 1
    assert (frozen["t"]["ok"], frozen["t"]["failed"]) == (3, {"BLOCK_FAILED": 1})


def test_what_had_set_out_before_the_present_trial_counts_for_none() -> None:
    stats = DispatcherStats()
    stats.publish(["t"], {"t": ("a", "d")})
    for trial in ((), ("a", "c"), ("a", "d")):
        stats.succeeded("t", 1000, 1, 1, 0, canary=bool(trial), trial=trial)
        stats.failed("t", "BLOCK_FAILED", canary=bool(trial), trial=trial)
    counted = stats.tasks["t"].variants
    assert (stats.tasks["t"].ok, stats.tasks["t"].failed.total()) == (3, 3)
    assert [(v.ok, v.failed.total()) for v in counted.values()] == [(0, 0), (1, 1)]


def test_another_path_begins_new_figures_another_share_does_not() -> None:
    stats = DispatcherStats()
    stats.publish(["t"], {"t": ("a", "c")})
    stats.succeeded("t", 1000, 1, 1, 0, canary=True)
    stats.publish(["t"], {"t": ("a", "c")})
    assert stats.tasks["t"].variants["canary"].ok == 1
    stats.publish(["t"], {"t": ("a", "d")})
    assert stats.tasks["t"].variants["canary"].ok == 0
    stats.publish(["t"])
    assert stats.tasks["t"].variants == {} and stats.tasks["t"].ok == 1


# --- the update ---------------------------------------------------------------------------------

DIMS: Mapping[str, tuple[tuple[Any, ...], tuple[Any, ...]]] = {
    "trunk": (("rows", 4), ("rows", 8)),
    "head": (("rows", 8), ("rows", 2)),
    "wide": (("rows", 8), ("rows", 3)),
    "other": (("rows", 5), ("rows", 8)),
}


def lookup(reference: str) -> BlockInfo:
    name, _, version = reference.partition("@")
    given, out = DIMS[name]
    contract = Contract(TensorSpec("float32", given), TensorSpec("float32", out))
    return BlockInfo(name, version or "9", f"{name}-{version or 9}", "echo", contract, 0, 0)


def parsed(blocks: list[Any], canary: Any) -> Topology:
    entry = {"path": ["trunk", "head"], "canary": canary}
    return parse_topology({"blocks": blocks, "tasks": {"t": entry}}, lookup)


def problems(blocks: list[Any], canary: Any) -> dict[str, str]:
    with pytest.raises(TopologyError) as e:
        parsed(blocks, canary)
    return {p.path: p.message for p in e.value.problems}


def test_versions_side_by_side() -> None:
    topology = parsed(
        ["trunk", "head", "head@2", {"name": "new", "block": "head", "version": "3"}],
        {"path": ["trunk", "head@2"], "share": 0.1},
    )
    assert topology.digests() == {
        "trunk": "trunk-9",
        "head": "head-9",
        "head@2": "head-2",
        "head@3": "head-3",
    }
    assert [w.name for w in desired_workers(topology, [0, 1])] == ["trunk", "head", "head@2", "new"]
    again = parse_topology(topology.to_dict(), lookup)
    assert again.to_dict() == topology.to_dict()


def test_how_a_block_was_called_does_not_make_it_another_worker() -> None:
    named = parse_topology({"blocks": [{"name": "head", "version": "9"}], "tasks": {}}, lookup)
    bare = parse_topology({"blocks": ["head"], "tasks": {}}, lookup)
    other = parse_topology({"blocks": [{"name": "head", "version": "8"}], "tasks": {}}, lookup)
    identities = [desired_workers(t, [0])[0].identity() for t in (named, bare, other)]
    assert identities[0] == identities[1] != identities[2]


def test_a_canary_is_checked_as_a_path_is() -> None:
    blocks = ["trunk", "head", "wide", "other", "head@2"]
    path = "$.tasks.t.canary.path"
    found = problems(blocks, {"path": ["trunk", "heat"], "share": 0.1})
    assert found == {f"{path}[1]": "unknown block 'heat'"}
    assert "don't fit" in problems(blocks, {"path": ["head", "trunk"], "share": 0})[f"{path}[1]"]
    assert "own path" in problems(blocks, {"path": ["trunk", "head"], "share": 0})[path]
    for other in (["trunk", "wide"], ["other", "head"]):
        assert "not the task's" in problems(blocks, {"path": other, "share": 0.1})[path]


@pytest.mark.parametrize("share", [-0.1, 1.1, "much", None])
def test_a_share_is_between_none_and_all(share: Any) -> None:
    found = problems(["trunk", "head", "head@2"], {"path": ["trunk", "head@2"], "share": share})
    assert list(found) == ["$.tasks.t.canary.share"]


@pytest.mark.parametrize(
    "block",
    ["head@", "head@a b", "@2", "a@b@c", "x" * 60 + "@1.2.3", {"name": "head@2", "version": "2"}],
)
def test_what_is_no_reference(block: Any) -> None:
    found = problems(["trunk", "head", block], {"path": ["trunk", "head"], "share": 0})
    assert "$.blocks[2]" in " ".join(found)


def test_rows_are_bounded_by_the_canary_too() -> None:
    small = {"name": "head@2", "max_rows": 3}
    topology = parsed(["trunk", "head", small], {"path": ["trunk", "head@2"], "share": 0.1})
    assert topology.task_rows("t") == 3
