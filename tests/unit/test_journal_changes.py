"""A successor must know every fact: each one alone, when it has changed, is written down."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
from control_rig import World

from blockflow.control.fleet import Role
from blockflow.control.journal import Journal, JournalFile, Recorder
from blockflow.core.lifecycle import State

Owner = Callable[[World], Any]


def seat(world: World) -> Any:
    return world.brain.crew.fleet.replicas[0]


def life(world: World) -> Any:
    return seat(world).life


def dispatcher(world: World) -> Any:
    return world.brain.crew.dispatcher


def realm(world: World) -> Any:
    return world.brain.realm


def crew(world: World) -> Any:
    return world.brain.crew


LIFE = {
    "incarnation": 99,
    "state": State.DRAINING,
    "pid": 7,
    "hello": False,
    "endpoint": "ipc:///run/elsewhere.sock",
    "ready_ns": 5,
    "threads": 5,
    "lanes": 3,
}
FACTS: list[tuple[Owner, str, Any]] = [
    *((life, name, value) for name, value in LIFE.items()),
    *((dispatcher, name, value) for name, value in LIFE.items()),
    (life, "reaped", True),
    (dispatcher, "reaped", True),
    (seat, "role", Role.RETIRING),
    (seat, "stopped", True),
    (seat, "given_up", "5 crashes"),
    (seat, "policies", {"a": {"policy": "window"}}),
    (realm, "epoch", 7),
    (realm, "version", 70),
    (realm, "closed", {"a": "drain"}),
    (crew, "hz", 2.0),
    (crew, "client_endpoints", ("tcp://127.0.0.1:1",)),
]


@pytest.fixture
def world() -> World:
    made = World().up()
    made.apply(["a"], {"t": ["a"]})
    return made


def told(journal: Journal) -> Any:
    """But for the birth certificates: they say what was when they were written."""
    found = json.loads(json.dumps(asdict(journal)))
    for one in found["seats"]:
        del one["launch"]
    return found


@pytest.mark.parametrize(
    ("owner", "name", "value"), FACTS, ids=[f"{o.__name__}-{n}" for o, n, _ in FACTS]
)
def test_each_fact_alone_is_written(
    world: World, tmp_path: Path, owner: Owner, name: str, value: Any
) -> None:
    recorder, file = Recorder(tmp_path), JournalFile(tmp_path)
    recorder.record(world.brain.realm)
    before = told(file.read())
    setattr(owner(world), name, value)
    recorder.record(world.brain.realm)
    now = told(file.read())
    assert now != before
    assert now == told(Journal.of(world.brain.realm))


def test_what_a_worker_is_to_be_is_written(world: World, tmp_path: Path) -> None:
    recorder, file = Recorder(tmp_path), JournalFile(tmp_path)
    recorder.record(world.brain.realm)
    replica = seat(world)
    replica.spec = replace(replica.spec, slots=replica.spec.slots + 1)
    recorder.record(world.brain.realm)
    assert file.read().seats[0].identity == replica.spec.identity()


def test_the_dispatchers_number_is_in_use_too(world: World) -> None:
    world.die("dispatcher")
    world.pass_time(1.0)
    number = world.incarnation("dispatcher")
    assert world.journal().highest()["incarnation"] == number > world.incarnation("a#0")
