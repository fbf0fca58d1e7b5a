"""What the Dispatcher is told with the routes: which blocks are down, and which run only once."""

from __future__ import annotations

from typing import Any

import pytest
from control_rig import World

from blockflow.control.update import Kind, Phase
from blockflow.core.errors import BlockError
from blockflow.core.routing import CanaryRoute, RouteTable
from blockflow.wire.control import Routes

TASKS = {"t": ["a", "b"], "u": ["b"]}


@pytest.fixture
def world() -> World:
    world = World().up()
    world.apply(["a", "b"], TASKS)
    return world


def latest(world: World) -> RouteTable:
    """The table that the Dispatcher got last."""
    dispatcher = world.incarnation("dispatcher")
    sent = [i.message for i in world.sent(Routes) if i.incarnation == dispatcher]
    return RouteTable.from_dict(sent[-1].table)


def test_a_block_that_will_come_back_is_not_down(world: World) -> None:
    world.die("a#0")
    assert "a" not in world.admitted_blocks()
    assert latest(world).down == {}


def test_a_block_that_was_given_up_is_down(world: World) -> None:
    for _ in range(5):
        world.die("a#0")
        world.pass_time(10)
    (reason,) = latest(world).down.values()
    assert list(latest(world).down) == ["a"]
    assert "5 crashes" in reason


def test_one_that_is_given_up_before_it_is_ready_again_is_down_as_well(world: World) -> None:
    world.start_fails["a#0"] = BlockError("LOAD_FAILED", "torn")
    world.die("a#0")
    assert latest(world).down == {}
    world.pass_time(10)
    assert list(latest(world).down) == ["a"]


def test_a_block_that_an_operator_closed_is_down(world: World) -> None:
    world.do(lambda now: world.brain.close("a", Kind.DRAIN, now))
    closed = "an operator closed it (drain); `blockflow undrain a` opens it"
    assert latest(world).down == {"a": closed}
    world.do(lambda now: world.brain.close("a", Kind.UNDRAIN, now))
    assert latest(world).down == {}
    world.do(lambda now: world.brain.close("a", Kind.STOP, now))
    assert "(stop); `blockflow restart a` opens it" in latest(world).down["a"]


def test_what_must_not_run_twice_is_known_to_the_dispatcher(world: World) -> None:
    def replayable() -> dict[str, Any]:
        stages = latest(world).stages.values()
        return {r.block: r.replayable for r in stages if r.block}

    assert replayable() == {"a": True, "b": True}
    before = world.launched()
    update = world.apply(["a", {"name": "b", "replayable": False}], TASKS)
    assert update.phase is Phase.DONE
    assert world.launched() == before  # a running worker need not know
    assert replayable() == {"a": True, "b": False}


def test_a_task_is_published_as_the_topology_has_it(world: World) -> None:
    task = {
        "path": ["a", "b"],
        "canary": {"path": ["a", "c"], "share": 0.25},
        "deadline_ms": 700,
        "max_rows": 5,
        "check_finite": False,
        "max_inflight_rows": 9,
        "cpu_latency_us": 2,
    }
    world.apply(["a", "b", "c"], {"t": task}, mode="zeromq")
    table = latest(world)
    route = table.tasks["t"]
    assert (route.path, route.canary) == (("a", "b"), CanaryRoute(("a", "c"), 0.25))
    assert (route.deadline_ms, route.max_rows) == (700, 5)
    assert (route.check_finite, route.max_inflight_rows) == (False, 9)
    assert route.cpu_latency_us == 2
    assert {r.mode for r in table.stages.values()} == {"zeromq"}
