"""When the crew has something to do: the Manager asks twice for each message of each process."""

from __future__ import annotations

import sys
from types import FrameType
from typing import Any

import pytest
from control_rig import World

from blockflow.control.crew import Crew
from blockflow.control.fleet import Life, Replica, Role

FAR = 1 << 62


def manned(workers: int) -> Crew:
    """All of them ready."""
    world = World().up()
    world.apply(["a"], {"t": ["a"]})
    crew = world.brain.crew
    spec = crew.fleet.replicas[0].spec
    for i in range(workers - 1):
        name = f"w#{i}"
        crew.fleet.replicas.append(Replica(name, spec, Role.ACTIVE, Life(name, 10_000 + i, 0), 1))
    return crew


def calls(crew: Crew) -> int:
    """How often something of Python's own is entered, or a generator goes on."""
    entered = 0

    def count(_frame: FrameType, event: str, _arg: Any) -> None:
        nonlocal entered
        entered += event == "call"

    sys.setprofile(count)
    try:
        assert crew.deadline() is None
    finally:
        sys.setprofile(None)
    return entered


def test_asking_takes_as_many_calls_with_many_workers() -> None:
    few, many = calls(manned(60)), calls(manned(200))
    assert few == many < 10


@pytest.mark.parametrize("reaped", [False, True])
def test_it_is_the_first_of_all(reaped: bool) -> None:
    crew = manned(3)
    one, other = crew.fleet.replicas[1:]
    assert crew.dispatcher is not None and crew.deadline() is None
    one.life.deadline_ns, crew.dispatcher.deadline_ns = FAR, FAR + 1
    other.restart_at_ns, crew.dispatcher_restart_ns = FAR + 2, FAR + 3
    one.life.reaped = reaped
    assert crew.deadline() == FAR + reaped  # nobody waits for the dead
    crew.dispatcher.reaped = one.life.reaped = True
    assert crew.deadline() == FAR + 2
    other.restart_at_ns = None
    assert crew.deadline() == FAR + 3
