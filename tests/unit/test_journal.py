"""The journal: what it says, and that it is read whole or not at all."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path

import pytest
from control_rig import World

from blockflow.control.journal import NAME, Journal, JournalFile, Recorder, fingerprint


@pytest.fixture
def world() -> World:
    made = World().up()
    made.apply(["a"], {"t": ["a"]})
    return made


@pytest.fixture
def written(tmp_path: Path) -> bytes:
    JournalFile(tmp_path).write(Journal.of(World().up().brain.realm))
    return (tmp_path / NAME).read_bytes()


def test_what_is_written_is_read(world: World, tmp_path: Path) -> None:
    world.hold_ready.add("b#0")
    world.apply(["a", "b"], {"t": ["a", "b"]})
    journal = Journal.of(world.brain.realm)
    file = JournalFile(tmp_path)
    file.write(journal)
    read = file.read()
    assert asdict(read) == json.loads(json.dumps(asdict(read))) | asdict(read)
    assert read.dispatcher == journal.dispatcher
    assert [(s.name, s.role, s.life) for s in read.seats] == [
        (s.name, s.role, s.life) for s in journal.seats
    ]
    assert [x.name for x in read.lives()] == ["dispatcher", "a#0", "b#0"]
    assert (tmp_path / NAME).stat().st_mode & 0o077 == 0
    assert [p.name for p in tmp_path.iterdir()] == [NAME]


def test_a_life_is_the_same_in_other_hands(world: World) -> None:
    for replica in world.brain.crew.fleet:
        life, read = replica.life, world.journal().seats[0].life.life()
        for name in ("name", "incarnation", "stages", "state", "pid", "endpoint", "ready_ns"):
            assert getattr(read, name) == getattr(life, name)


def test_torn_anywhere_it_is_refused(written: bytes, tmp_path: Path) -> None:
    for length in range(len(written)):
        (tmp_path / NAME).write_bytes(written[:length])
        with pytest.raises(ValueError, match="journal"):
            JournalFile(tmp_path).read()


def test_altered_anywhere_it_is_refused_or_says_the_same(written: bytes, tmp_path: Path) -> None:
    file = JournalFile(tmp_path)
    (tmp_path / NAME).write_bytes(written)
    whole = file.read()
    for at in range(len(written)):
        damaged = bytearray(written)
        damaged[at] ^= 1 + at % 255
        (tmp_path / NAME).write_bytes(damaged)
        try:
            read = file.read()
        except ValueError:
            continue
        assert read == whole


def test_what_is_no_journal_is_refused(written: bytes, tmp_path: Path) -> None:
    file = JournalFile(tmp_path)
    (tmp_path / NAME).unlink()
    with pytest.raises(ValueError, match="there is no journal"):
        file.read()
    (tmp_path / NAME).mkdir()
    with pytest.raises(ValueError, match="journal"):
        file.read()
    (tmp_path / NAME).rmdir()
    (tmp_path / "elsewhere").write_bytes(written)
    (tmp_path / NAME).symlink_to(tmp_path / "elsewhere")
    with pytest.raises(ValueError, match="there is no journal"):
        file.read()


def test_a_journal_that_cannot_be_written_is_none(written: bytes, tmp_path: Path) -> None:
    """An old one would be worse: it says what is not true any more."""
    file, read = JournalFile(tmp_path), JournalFile(tmp_path).read()
    (tmp_path / f".{NAME}.new").mkdir()
    with pytest.raises(OSError):
        file.write(read)
    assert not (tmp_path / NAME).exists()


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


def test_what_changes_at_each_turn_is_not_a_change(world: World) -> None:
    before = fingerprint(world.brain.realm)
    world.pass_time(60.0)
    assert fingerprint(world.brain.realm) == before
