"""Policies of running processes: told with the facts that count, and a refusal is seen."""

from __future__ import annotations

from typing import Any

import pytest
from control_rig import AB, World

from blockflow import __version__
from blockflow.control.events import Launch, Received
from blockflow.control.kpis import KpiBook
from blockflow.control.update import Phase, Update
from blockflow.control.views import Views
from blockflow.core.errors import Problem, SystemError_, TopologyError
from blockflow.wire.control import Hello, PolicyRefused, SetPolicy, SetThreads

WINDOW = {"policy": "window", "max_rows": 4}
NONE = {"policy": "none"}
REFUSED = TopologyError(
    "INVALID_TOPOLOGY",
    "the batching policy is invalid",
    problems=[Problem("$.batching", "policy 'window' needs a profile", "run: blockflow profile a")],
)


@pytest.fixture
def world() -> World:
    return World(cores=2).up()


def apply(world: World, **a: Any) -> Update:
    return world.apply([{"name": "a", **a}], {"t": ["a"]})


def told(world: World, since: int = 0) -> list[tuple[Any, int]]:
    return [(s.message.policy, s.message.threads) for s in world.sent(SetPolicy, since)]


def refuse(world: World, kept: dict[str, Any], which: int = -1) -> None:
    """``a#0`` says that it does not follow a SetPolicy: the latest, or another that it was sent."""
    i = world.incarnation("a#0")
    order = world.sent(SetPolicy)[which].message
    world.tell(Received(i, PolicyRefused(i, order.stage, order.epoch, kept, REFUSED.to_dict())))


def warnings(world: World) -> list[str]:
    return Views(world.brain, KpiBook(), {}, world.now).warnings()


def test_a_policy_comes_with_the_threads_of_its_own_update(world: World) -> None:
    """It is sent before the threads grow, and must not be judged by those of before."""
    apply(world, threads=1)
    at = len(world.log)
    apply(world, threads=2, batching=WINDOW)
    assert told(world, at) == [(WINDOW, 2)]
    assert [s.message.threads for s in world.sent(SetThreads, at)] == [2]
    at = len(world.log)
    apply(world, threads=1)
    assert told(world, at) == [({"policy": "none"}, 1)]


def test_other_threads_alone_bring_the_policy_its_new_facts(world: World) -> None:
    apply(world, threads=1, batching=WINDOW)
    at = len(world.log)
    apply(world, threads=2, batching=WINDOW)
    assert told(world, at) == [(WINDOW, 2)]


def test_threads_that_are_lent_for_the_time_of_an_update_concern_no_policy(world: World) -> None:
    """The old worker makes room for the new one, which starts with fewer threads than it will have:
    policies are for the threads of afterwards."""
    apply(world, batching=WINDOW)
    launches = [i for i in world.log if isinstance(i, Launch) and i.role == "worker"]
    assert [(o.spec["threads"], o.spec["stages"][0]["threads"]) for o in launches] == [(2, 2)]
    at = len(world.log)
    apply(world, batching=WINDOW, max_rows=8)  # another worker
    (new,) = [i for i in world.log[at:] if isinstance(i, Launch)]
    assert (new.spec["threads"], new.spec["stages"][0]["threads"]) == (1, 2)
    assert told(world, at) == []
    assert world.computing() == {"a#1": 2}


def test_a_successor_is_born_with_the_facts_of_the_latest_update(world: World) -> None:
    apply(world, threads=1)
    apply(world, threads=2, batching=WINDOW)
    at = len(world.log)
    world.die("a#0")
    world.pass_time(1)
    (new,) = [i for i in world.log[at:] if isinstance(i, Launch)]
    (stage,) = new.spec["stages"]
    assert (stage["policy"], stage["threads"]) == (WINDOW, 2)
    assert told(world, at) == []


def test_who_was_launched_before_the_update_is_told_when_it_can_hear(world: World) -> None:
    world.apply(*AB)
    world.die("a#0")
    world.mute.add("a#0")
    world.pass_time(1)
    new = world.incarnation("a#0")
    at = len(world.log)
    update = world.apply([{"name": "a", "batching": WINDOW}, "b"], AB[1])
    assert update.phase is Phase.DONE and told(world, at) == []
    world.mute.clear()
    world.tell(Received(new, Hello("worker", "a#0", new, 1, __version__)))
    assert told(world, at) == [(WINDOW, world.brain.realm.planned(update.target)["a"])]


def test_a_refusal_is_in_the_notes_and_warnings_and_told_again(world: World) -> None:
    apply(world)
    world.refuses["a#0"] = REFUSED
    update = apply(world, batching=WINDOW)
    line = (
        "a#0 keeps the batching policy 'none' for block 'a': policy 'window' needs a profile "
        "(run: blockflow profile a)"
    )
    assert update.phase is Phase.DONE and update.notes == [line]
    assert warnings(world) == [line]
    (worker,) = Views(world.brain, KpiBook(), {}, world.now).workers()
    assert [s["batching"] for s in worker["stages"]] == [{"policy": "none"}]
    assert apply(world, batching=WINDOW).notes == [line]  # it is not taken for unchanged
    world.refuses.clear()
    at = len(world.log)
    assert apply(world, batching=WINDOW).notes == [] == warnings(world)
    assert told(world, at) == [(WINDOW, 2)]
    assert apply(world, batching=WINDOW).phase is Phase.UNCHANGED


def test_a_late_refusal_is_in_the_notes_of_the_update_that_it_is_of(world: World) -> None:
    apply(world)
    update = apply(world, batching=WINDOW)
    same = apply(world, batching=WINDOW)
    world.start_fails["c#0"] = REFUSED
    failed = world.apply([{"name": "a", "batching": WINDOW}, "c"], {"t": ["a"], "u": ["c"]})
    world.hold_ready.add("b#0")
    next_one = world.apply([{"name": "a", "batching": WINDOW}, "b"], {"t": ["a"], "u": ["b"]})
    refuse(world, NONE)
    phases = [u.phase for u in (same, failed, next_one)]
    assert phases == [Phase.UNCHANGED, Phase.FAILED, Phase.PREPARING]
    assert len(update.notes) == 1 and not (same.notes or failed.notes or next_one.notes)


def test_a_refusal_towards_a_successor_of_the_manager_is_in_its_notes(world: World) -> None:
    apply(world, batching=WINDOW)
    world.refuses["a#0"] = REFUSED
    update = world.succeed()
    assert update.phase is Phase.DONE and update.notes == warnings(world)
    assert "a#0 keeps the batching policy 'none'" in update.notes[0]


def test_who_stays_is_told_whoever_leaves(world: World) -> None:
    world.apply(*AB)
    at = len(world.log)
    world.apply([{"name": "b", "batching": WINDOW}], {"t": ["b"]})
    assert [policy for policy, _ in told(world, at)] == [WINDOW]


def test_a_refusal_for_another_reason_is_told_in_its_words(world: World) -> None:
    world.refuses["a#0"] = SystemError_("INTERNAL", "odd")
    apply(world)
    (note,) = apply(world, batching=WINDOW).notes
    assert note == "a#0 keeps the batching policy 'none' for block 'a': odd"


AS_IT_WAS = (
    "a#0 keeps the batching policy 'window' for block 'a' as it was: policy 'window' needs a "
    "profile (run: blockflow profile a)"
)


@pytest.mark.parametrize("task", ["t", "another"])
def test_refused_facts_of_a_policy_that_stays_are_told_again(world: World, task: str) -> None:
    """By the same update and by another one alike."""
    apply(world, threads=1, batching=WINDOW)
    apply(world, threads=2, batching=WINDOW)
    refuse(world, kept=WINDOW)  # the profile for two threads has gone meanwhile
    assert warnings(world) == [AS_IT_WAS]
    for again in (True, False):
        at = len(world.log)
        update = world.apply([{"name": "a", "threads": 2, "batching": WINDOW}], {task: ["a"]})
        assert update.phase is Phase.DONE
        assert told(world, at) == [(WINDOW, 2)] and warnings(world) == []
        if again:
            refuse(world, kept=WINDOW)
            assert warnings(world) == [AS_IT_WAS]
    update = world.apply([{"name": "a", "threads": 2, "batching": WINDOW}], {task: ["a"]})
    assert update.phase is Phase.UNCHANGED


OTHER = {"policy": "window", "max_rows": 8}


@pytest.mark.parametrize(
    "asked",
    [
        [{"threads": 2, "batching": WINDOW}, {"threads": 2, "batching": OTHER}],
        [{"threads": 1, "batching": WINDOW}, {"threads": 2, "batching": WINDOW}],
        [{"threads": 2, "batching": b} for b in (WINDOW, OTHER, WINDOW)],
    ],
    ids=["another policy", "other threads", "there and back"],
)
def test_a_refusal_of_what_was_told_before_the_latest_is_out_of_date(
    world: World, asked: list[dict[str, Any]]
) -> None:
    """A process was stalled over some updates: it refuses the first one's policy and takes the
    last one's."""
    apply(world)
    at = len(world.sent(SetPolicy))
    world.mute.add("a#0")
    for batching in asked:
        update = apply(world, **batching)
        world.pass_time(3)  # no longer than that is it waited for
        assert update.phase is Phase.DONE
    before = world.brain.crew.strays
    refuse(world, kept=NONE, which=at)
    assert warnings(world) == [] and world.brain.crew.strays == before + 1
    assert apply(world, **asked[-1]).phase is Phase.UNCHANGED
    refuse(world, kept=NONE)
    assert len(warnings(world)) == 1


def test_a_refusal_is_known_before_the_update_is_done(world: World) -> None:
    """It comes before the same worker's RoutesApplied, for which the flip waits."""
    apply(world)
    world.mute.add("a#0")
    update = apply(world, batching=WINDOW)
    assert update.phase is Phase.PUBLISHING
    refuse(world, kept=NONE)
    assert len(update.notes) == 1 and not update.final
    world.pass_time(3)  # no longer than that is it waited for
    assert update.phase is Phase.DONE and len(warnings(world)) == 1


def test_a_late_refusal_is_noted_on_the_update_that_it_is_of(world: World) -> None:
    tasks = {"t": ["a"], "u": ["b"]}
    world.apply(["a", "b"], tasks)
    world.mute.add("a#0")
    update = world.apply([{"name": "a", "batching": WINDOW}, "b"], tasks)
    world.pass_time(3)
    assert update.phase is Phase.DONE
    world.hold_ready.add("b#1")
    other = world.do(lambda now: world.brain.restart("b", now))
    refuse(world, kept=NONE)
    assert other.notes == [] and len(update.notes) == 1


def test_each_refusal_of_a_worker_is_told_until_another_serves_in_its_place(world: World) -> None:
    tasks = {"t": ["a", "b"]}
    world.apply([{"name": n, "worker": "w"} for n in "ab"], tasks)
    world.refuses["w#0"] = REFUSED
    blocks = [{"name": n, "worker": "w", "batching": WINDOW} for n in "ab"]
    update = world.apply(blocks, tasks)
    assert [n.partition("block ")[2][:3] for n in update.notes] == ["'a'", "'b'"]
    assert warnings(world) == update.notes
    world.busy = True
    world.apply(blocks, tasks, digests={"a": "new"})
    assert "w#0" in world.names() and warnings(world) == []


def test_a_successor_has_refused_nothing(world: World) -> None:
    apply(world)
    world.refuses["a#0"] = REFUSED
    apply(world, batching=WINDOW)
    world.die("a#0")
    world.pass_time(1)
    assert warnings(world) == []


def test_what_a_dead_one_refused_concerns_no_later_update(world: World) -> None:
    apply(world)
    world.refuses["a#0"] = REFUSED
    apply(world, batching=WINDOW)
    world.die("a#0")
    assert len(warnings(world)) == 1
    apply(world, batching=OTHER)
    assert warnings(world) == []


def test_a_refusal_of_a_stage_that_is_not_there_is_a_stray(world: World) -> None:
    apply(world)
    i, before = world.incarnation("a#0"), world.brain.crew.strays
    for who, stage in ((i, 99), (world.incarnation("dispatcher"), 1)):
        world.tell(Received(who, PolicyRefused(who, stage, 1, {}, {})))
    assert world.brain.crew.strays == before + 2 and warnings(world) == []
