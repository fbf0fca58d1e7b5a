"""The journal: what it says, and that it is read whole or not at all."""

from __future__ import annotations

import json
from dataclasses import asdict, replace
from pathlib import Path

import pytest
from control_rig import World

from blockflow.control.journal import NAME, Journal, JournalFile, Recorder


@pytest.fixture
def world() -> World:
    made = World().up()
    made.apply(["a"], {"t": ["a"]})
    return made


@pytest.fixture
def written(tmp_path: Path) -> bytes:
    Recorder(tmp_path).record(World().up().brain.realm)
    return (tmp_path / NAME).read_bytes()


def places(written: bytes) -> list[int]:
    """Every place in what it says, and some in the blanks behind it."""
    return [*range(len(written.rstrip(b" ")) + 1), *range(0, len(written), 4096), len(written) - 1]


def test_it_says_which_numbers_are_in_use(world: World) -> None:
    journal = world.journal()
    (seat,) = journal.seats
    (stage,) = seat.life.stages.values()
    known = {"incarnation": seat.life.incarnation, "stage": stage, "epoch": 1}
    assert journal.highest() == known
    world.hold_ready.add("a#0")
    world.die("a#0")  # the dead one's, too: the next life has not begun yet
    assert world.journal().highest() == known
    assert World().journal().highest() == {"incarnation": 0, "stage": 0, "epoch": 0}


def test_a_policy_counts_where_its_replica_serves(world: World) -> None:
    journal = world.journal()
    policies = {"a": {"policy": "window"}, "b": {"policy": "none"}}
    active = replace(journal.seats[0], policies=policies)
    retiring = replace(active, role="retiring", policies={"c": {"policy": "window"}})
    assert replace(journal, seats=(active, retiring)).with_policies() == {"a"}


def test_what_is_written_is_read(world: World, tmp_path: Path) -> None:
    world.hold_ready.add("b#0")
    world.apply(["a", "b"], {"t": ["a", "b"]})
    journal = Journal.of(world.brain.realm)
    Recorder(tmp_path).record(world.brain.realm)
    read = JournalFile(tmp_path).read()
    assert json.dumps(asdict(read)) == json.dumps(asdict(journal))
    assert read.dispatcher == journal.dispatcher
    assert [(s.name, s.role, s.life) for s in read.seats] == [
        (s.name, s.role, s.life) for s in journal.seats
    ]
    assert [(s.life.name, s.life.served) for s in read.seats] == [("a#0", True), ("b#0", False)]
    assert (tmp_path / NAME).stat().st_mode & 0o077 == 0
    assert sorted(p.name for p in tmp_path.iterdir()) == [f".{NAME}.new", NAME]


def test_a_life_is_the_same_in_other_hands(world: World) -> None:
    for replica in world.brain.crew.fleet:
        life, read = replica.life, world.journal().seats[0].life.life()
        for name in ("name", "incarnation", "stages", "state", "pid", "endpoint", "ready_ns"):
            assert getattr(read, name) == getattr(life, name)


def test_torn_anywhere_it_is_refused(written: bytes, tmp_path: Path) -> None:
    for length in places(written):
        (tmp_path / NAME).write_bytes(written[:length])
        with pytest.raises(ValueError, match="journal"):
            JournalFile(tmp_path).read()


def test_altered_anywhere_it_is_refused(written: bytes, tmp_path: Path) -> None:
    for at in places(written):
        damaged = bytearray(written)
        damaged[at] ^= 1 + at % 255
        (tmp_path / NAME).write_bytes(damaged)
        with pytest.raises(ValueError, match="journal"):
            JournalFile(tmp_path).read()
    (tmp_path / NAME).write_bytes(written + b" ")
    with pytest.raises(ValueError, match="journal"):
        JournalFile(tmp_path).read()


def test_what_is_no_journal_is_refused(written: bytes, tmp_path: Path) -> None:
    file = JournalFile(tmp_path)
    (tmp_path / NAME).unlink()
    with pytest.raises(ValueError, match="there is no journal: No such file"):
        file.read()
    (tmp_path / NAME).mkdir()
    with pytest.raises(ValueError, match="journal"):
        file.read()
    (tmp_path / NAME).rmdir()
    (tmp_path / "elsewhere").write_bytes(written)
    (tmp_path / NAME).symlink_to(tmp_path / "elsewhere")
    with pytest.raises(ValueError, match="there is no journal"):
        file.read()


def test_a_journal_that_cannot_be_written_is_none(
    world: World, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """An old one would be worse: it says what is not true any more."""
    recorder = Recorder(tmp_path)
    recorder.record(world.brain.realm)
    assert recorder.warning == ""
    (tmp_path / f".{NAME}.new").unlink()
    (tmp_path / f".{NAME}.new").mkdir()
    for hz in (1.0, 2.0):
        world.brain.monitor(hz)
        recorder.record(world.brain.realm)
    assert not (tmp_path / NAME).exists() and JournalFile(tmp_path).given_up
    with pytest.raises(ValueError, match="there is no journal: it could not be written"):
        JournalFile(tmp_path).read()
    assert caplog.text.count("cannot be written") == 1, "it is said once"
    assert "the journal cannot be written" in recorder.warning
    (tmp_path / f".{NAME}.new").rmdir()
    recorder.record(world.brain.realm)  # as soon as it can be
    assert JournalFile(tmp_path).read().hz == 2.0
    assert recorder.warning == "" and not JournalFile(tmp_path).given_up
    assert caplog.text.count("can be written again") == 1


@pytest.mark.parametrize(
    ("field", "odd"),
    [
        *(("role", "chief"), ("state", "asleep"), ("pid", True), ("started", False), ("name", 7)),
        *(("launch", {}), ("held", [True]), ("dead", ["7"]), ("costs", {"a": True})),
    ],
)
def test_what_is_of_another_kind_than_it_says_is_refused(
    world: World, tmp_path: Path, field: str, odd: object
) -> None:
    body = asdict(world.journal())
    seat = body["seats"][0]
    places = (body, body["standing"], seat, seat["life"])
    next(d for d in places if field in d)[field] = odd
    JournalFile(tmp_path).write(json.dumps(body))
    with pytest.raises(ValueError, match="says what cannot be"):
        JournalFile(tmp_path).read()


def test_what_a_later_one_says_besides_is_refused(world: World) -> None:
    body = asdict(world.journal())
    for place in (body, body["standing"], body["seats"][0], body["seats"][0]["life"]):
        place["more"] = 1
        with pytest.raises(ValueError, match="other fields"):
            Journal.from_dict(body)
        del place["more"]


def test_what_is_signed_and_yet_no_journal_is_refused(tmp_path: Path) -> None:
    file = JournalFile(tmp_path)
    for body in ("{}", "[]", "7", '{"epoch": 1}', "not json"):
        file.write(body)
        with pytest.raises(ValueError, match="says what cannot be"):
            file.read()


def test_every_change_that_matters_is_written(world: World, tmp_path: Path) -> None:
    recorder = Recorder(tmp_path)
    path = tmp_path / NAME

    def changed() -> bool:
        before = path.read_bytes() if path.exists() else b""
        recorder.record(world.brain.realm)
        return path.read_bytes() != before

    assert changed() and not changed()
    world.hold_ready.add("b#0")
    world.apply(["a", "b"], {"t": ["a", "b"]})
    assert changed()
    world.make_ready("b#0")
    assert changed()
    world.die("b#0")
    assert changed()
    world.pass_time(1.0)
    assert changed()
    world.brain.monitor(2.0)
    assert changed() and not changed()


def test_time_alone_writes_nothing(world: World, tmp_path: Path) -> None:
    recorder = Recorder(tmp_path)
    recorder.record(world.brain.realm)
    (tmp_path / NAME).unlink()
    world.pass_time(60.0)
    recorder.record(world.brain.realm)
    assert not (tmp_path / NAME).exists()


def test_each_record_is_the_whole_truth(world: World, tmp_path: Path) -> None:
    """Also where parts of it are kept from the one before."""
    recorder, file = Recorder(tmp_path), JournalFile(tmp_path)
    world.apply([{"name": "a", "replicas": 2}, "b"], {"t": ["a", "b"]})
    for _ in range(3):
        recorder.record(world.brain.realm)
        assert json.dumps(asdict(file.read())) == json.dumps(asdict(world.journal()))
        world.die("b#0")
        recorder.record(world.brain.realm)
        assert json.dumps(asdict(file.read())) == json.dumps(asdict(world.journal()))
        world.pass_time(2.0)
