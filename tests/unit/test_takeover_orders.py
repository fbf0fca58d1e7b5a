"""Wherever a Manager dies while a system changes, between any two things that it does, its
successor comes to what was asked for last and stored, and to nothing else."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from control_rig import World

from blockflow.control.events import Instruction, Send
from blockflow.control.fleet import Role
from blockflow.control.update import Kind
from blockflow.core.lifecycle import State
from blockflow.wire.control import Drain, Undrain

CORES = 4
PATHS = {"t": ["a", "b"]}
WINDOW = {"policy": "window", "max_rows": 4, "max_delay_ms": 5}


class Died(Exception):
    """The Manager."""


class Mortal(World):
    """Its Manager does ``left`` things more, and what it did not do it has written down.

    ``drained`` are the incarnations that were told to drain, and not to go on, last.
    """

    def __init__(self) -> None:
        super().__init__(CORES)
        self.left: int | None = None
        self.drained: set[int] = set()

    def _carry_out(self, instruction: Instruction) -> None:
        if self.left is not None:
            if not self.left:
                raise Died
            self.left -= 1
        super()._carry_out(instruction)
        if isinstance(instruction, Send) and isinstance(instruction.message, Drain):
            self.drained.add(instruction.incarnation)
        elif isinstance(instruction, Send) and isinstance(instruction.message, Undrain):
            self.drained.discard(instruction.incarnation)


def update(w: Mortal) -> None:
    """One block gets a second replica, one is another artifact, one goes on with another policy."""
    w.apply(
        [{"name": "a", "batching": WINDOW}, {"name": "b", "replicas": 2}, "c"],
        {"t": ["a", "b"], "u": ["a", "c"]},
        digests={"c": "new"},
    )


def restart(w: Mortal) -> None:
    w.do(lambda now: w.brain.restart("a", now))


def close_and_open(w: Mortal) -> None:
    w.do(lambda now: w.brain.close("b", Kind.DRAIN, now))
    w.do(lambda now: w.brain.close("b", Kind.UNDRAIN, now))


def stop_and_restart(w: Mortal) -> None:
    w.do(lambda now: w.brain.close("b", Kind.STOP, now))
    w.do(lambda now: w.brain.restart("b", now))


def a_death(w: Mortal) -> None:
    w.die("b#0")
    w.pass_time(1)


@pytest.mark.parametrize("killed", [[], ["dispatcher"]])
@pytest.mark.parametrize("changes", [update, restart, close_and_open, stop_and_restart, a_death])
def test_a_successor_ends_what_was_begun(
    changes: Callable[[Mortal], None], killed: list[str]
) -> None:
    done = 0
    while True:
        w = Mortal()
        w.up()
        w.apply(["a", "b"], PATHS)
        w.left = done
        try:
            changes(w)
            break
        except Died:
            w.left = None
        w.succeed(killed=[n for n in killed if n in w.names()])
        w.pass_time(60)
        at_rest(w)
        done += 1
    assert done >= 5, "it did next to nothing"


def at_rest(w: Mortal) -> None:
    """In what is stored, with what an operator has closed."""
    brain, realm = w.brain, w.brain.realm
    epoch, topology = w.stored
    assert topology is not None
    assert (realm.epoch, realm.topology) == (epoch, topology)
    assert brain.runner.settled
    assert brain.crew.dispatcher_ready
    assert set(w.alive) == {life.incarnation for life in brain.crew.lives()}
    assert {r.role for r in brain.crew.fleet} == {Role.ACTIVE}
    serves: dict[str, int] = {}
    for name, spec in topology.blocks.items():
        replicas = brain.crew.fleet.hosting(name)
        assert len(replicas) == spec.replicas
        if realm.closed.get(name) == "stop":
            assert all(r.stopped and r.life.reaped for r in replicas)
            continue
        closed = name in realm.closed
        assert {r.life.state for r in replicas} == {State.DRAINING if closed else State.READY}
        assert {r.life.incarnation in w.drained for r in replicas} == {closed}
        assert [dict(r.policies) for r in replicas] == [r.spec.policies() for r in replicas]
        if not closed:
            serves[name] = spec.replicas
    assert w.admitted_blocks() == serves
