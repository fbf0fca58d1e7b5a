"""What a process is told at its start, field by field where a mistake would not be seen."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from control_rig import World

from blockflow.control.events import Launch
from blockflow.control.fleet import dispatcher_launch, log_path


def told(world: World) -> dict[str, Mapping[str, Any]]:
    return {i.name: i.spec for i in world.log if isinstance(i, Launch)}


def test_only_replicas_share_their_weights_and_only_handles_need_an_arena() -> None:
    world = World().up()
    blocks = [{"name": "a", "replicas": 2}, {"name": "b", "mode": "zeromq"}]
    world.apply(blocks, {"t": ["a", "b"]})
    found = told(world)
    assert {n: found[n]["shared_weights"] for n in ("a#0", "a#1", "b#0")} == {
        "a#0": True,
        "a#1": True,
        "b#0": False,
    }
    assert found["b#0"]["arena_bytes"] == 0 < found["a#0"]["arena_bytes"]


def test_each_life_has_a_log_of_its_own_where_there_are_logs() -> None:
    crew = World().up().brain.crew
    (life,) = crew.lives()
    assert log_path(crew.place, life) == ""
    logs = replace(crew.place, log_dir="/logs")
    assert log_path(logs, life) == f"/logs/dispatcher.{life.incarnation}.log"


def test_only_where_there_are_keys_is_the_dispatcher_told_of_them() -> None:
    world = World().up()
    crew, settings = world.brain.crew, world.brain.realm.settings
    (life,) = crew.lives()
    for keys, where in ((None, ""), (Path("/keys"), "/keys")):
        given = replace(settings, keys=keys)
        assert dispatcher_launch(life, crew.place, given, (), 1.0).keys == where
