"""The judge of updates under load flags what it is there for; the Brain says what to store."""

from __future__ import annotations

import pytest
from control_rig import AB, World, topology

from blockflow.bench.updates import SECOND, Ledger, Run, figures
from blockflow.control.events import Begun, Commit, Finished
from blockflow.control.update import Kind, Phase, Update
from blockflow.core.errors import SystemError_

S_NS = 1_000_000_000


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
    assert commit.posted == {"posted": 1}


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


def test_what_is_shown_of_an_update_while_it_goes_on_and_afterwards() -> None:
    update = Update(7, Kind.DRAIN, 3, 2 * S_NS, plan={"keep": ["a"]})
    shown = {
        "id": 7,
        "kind": "drain",
        "state": "preparing",
        "epoch": 3,
        "plan": {"keep": ["a"]},
        "duration_ms": 1500.0,
        "phases_ms": {},
    }
    assert update.to_dict(3 * S_NS + S_NS // 2) == shown
    update.move(Phase.COMMITTING, 4 * S_NS)
    update.move(Phase.PUBLISHING, 5 * S_NS)
    with pytest.raises(RuntimeError, match="update 7: publishing -> failed"):
        update.move(Phase.FAILED, 6 * S_NS)
    update.move(Phase.DONE, 8 * S_NS)
    update.block, update.notes, update.error = "a", ["odd"], SystemError_("INTERNAL", "odd")
    phases = {"preparing": 2000.0, "committing": 1000.0, "publishing": 3000.0}
    shown |= {"state": "done", "duration_ms": 6000.0, "phases_ms": phases}
    more = {"block": "a", "notes": ["odd"], "error": update.error.to_dict()}
    assert update.to_dict(99 * S_NS) == {**shown, **more}


def test_what_cannot_start_fails_only_what_does_not_restore() -> None:
    restoring = {k for k in Kind if Update(1, k, 1, 0).restores}
    assert restoring == {Kind.RESTORE, Kind.READOPTION}
    assert {k for k in Kind if Update(1, k, 1, 0).stores} == {Kind.SYSTEM, Kind.ROLLBACK}
