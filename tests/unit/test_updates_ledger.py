"""The judge of updates under load flags what it is there for; the Brain says what to store."""

from __future__ import annotations

import pytest
from control_rig import AB, World, topology

from blockflow.bench.updates import SECOND, Ledger, Run, figures
from blockflow.control.events import Begun, Commit, Finished
from blockflow.control.update import Kind, Phase


def ledger() -> Ledger:
    return Ledger(versions={1: 1, 2: 2})


def test_answers_of_one_version_are_clean() -> None:
    judged = ledger()
    judged.result(1, 1 + SECOND, 0.5)
    judged.result(2, 2 + 2 * SECOND, 0.5)
    assert judged.clean and judged.served == {1, 2} and judged.answered == 2


@pytest.mark.parametrize(
    ("epoch", "added"),
    [
        (2, 1 + 2 * SECOND),  # the first block of one version, the second of another
        (2, 2 + SECOND),
        (2, 1 + SECOND),  # whole, but of another epoch than it says
        (3, 3 + 3 * SECOND),  # of no epoch
        (1, float("nan")),  # rows that differ
    ],
)
def test_a_planted_mix_is_flagged(epoch: int, added: float) -> None:
    judged = ledger()
    judged.result(epoch, added, 0.5)
    assert not judged.clean and len(judged.mixed) == 1 and not judged.served
    assert figures(Run(judged, []))[3].value == 1


def test_a_failed_request_is_flagged() -> None:
    judged = ledger()
    judged.error("WORKER_LOST")
    assert not judged.clean and judged.failed == {"WORKER_LOST": 1}
    assert figures(Run(judged, []))[2].value == 1


# --- the Brain ----------------------------------------------------------------------------------


def test_what_is_stored_pins_the_artifacts() -> None:
    world = World().up()
    world.apply(*AB, digests={"a": "one", "b": "two"})
    (commit,) = (i for i in world.log if isinstance(i, Commit))
    assert (commit.epoch, commit.how) == (1, "system-update")
    assert commit.digests == {"a": "one", "b": "two"}


def test_a_rollback_is_an_update_of_its_own_kind() -> None:
    world = World().up()
    world.apply(*AB, digests={"b": "new"})
    before = topology(*AB, digests={"b": "old"})
    update = world.do(lambda now: world.brain.apply(before, {"p": 1}, now, Kind.ROLLBACK))
    assert update.phase is Phase.DONE
    assert (update.epoch, world.brain.realm.epoch) == (2, 2)
    assert update.to_dict(world.now)["kind"] == "rollback"
    assert [i.how for i in world.log if isinstance(i, Commit)] == ["system-update", "rollback"]
    assert [r["blocks"] for r in update.plan["start"]] == [["b"]]
    same = world.do(lambda now: world.brain.apply(before, {"p": 1}, now, Kind.ROLLBACK))
    assert same.phase is Phase.UNCHANGED and world.brain.realm.epoch == 2


def test_a_note_is_left_while_an_update_may_be_cut_short() -> None:
    world = World().up()
    world.hold_ready.add("b#0")
    world.apply(*AB)
    notes = [i for i in world.log if isinstance(i, Begun | Finished)]
    assert world.brain.runner.current is not None
    number = world.brain.runner.current.update_id
    assert notes == [Begun(number, 1)]
    world.make_ready("b#0")
    notes = [i for i in world.log if isinstance(i, Begun | Finished)]
    assert notes == [Begun(number, 1), Finished(number)]
    # neither an update that changes nothing nor a restart needs one
    world.apply(*AB)
    world.do(lambda now: world.brain.restart("a", now))
    assert [i for i in world.log if isinstance(i, Begun)] == [Begun(number, 1)]


def test_the_phases_add_up() -> None:
    world = World().up()
    world.hold_ready.add("b#0")
    update = world.apply(*AB)
    world.pass_time(2)
    world.make_ready("b#0")
    told = update.to_dict(world.now)
    assert told["phases_ms"]["preparing"] == 2000.0
    assert sum(told["phases_ms"].values()) == pytest.approx(told["duration_ms"])
