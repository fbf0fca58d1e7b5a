"""The arena's two files: what is in them, who may touch what, and when memory is really taken."""

from __future__ import annotations

import errno
import mmap
import os
import stat
from collections.abc import Iterator
from pathlib import Path

import pytest

from blockflow.core.errors import RequestError, SystemError_, WireError
from blockflow.tensormq.arena import Arena, ArenaReader, arena_path, data_offset, marks_path
from blockflow.tensormq.leases import opened_mark
from tests import sockets_rig

KIB, MIB = 1024, 1024 * 1024
OWNER = 41


run_dir = sockets_rig.run_dir


@pytest.fixture
def arena(run_dir: Path) -> Iterator[Arena]:
    made = Arena.create(run_dir, OWNER, 8 * MIB, slots=4, lanes=2, warm_bytes=64 * KIB)
    yield made
    made.close()


def allocated(path: Path) -> int:
    return path.stat().st_blocks * 512


def test_files_are_private_regular_and_gone_after_close(run_dir: Path, arena: Arena) -> None:
    for path in (arena_path(run_dir, OWNER), marks_path(run_dir, OWNER)):
        st = path.lstat()
        assert stat.S_ISREG(st.st_mode)
        assert stat.S_IMODE(st.st_mode) == 0o600
    arena.close()
    arena.close()
    assert sorted(os.listdir(run_dir)) == ["lock"]


def test_an_idle_arena_takes_its_minimum_and_a_used_one_its_high_water(
    run_dir: Path, arena: Arena
) -> None:
    path = arena_path(run_dir, OWNER)
    assert path.stat().st_size == data_offset(4) + 8 * MIB
    assert arena.committed == 256 * KIB, "growth is in steps"
    assert allocated(path) == data_offset(4) + 256 * KIB
    arena.commit(3 * MIB + 1)
    assert arena.committed == 3 * MIB + mmap.PAGESIZE
    assert allocated(path) == data_offset(4) + arena.committed
    arena.commit(MIB)
    assert arena.committed == 3 * MIB + mmap.PAGESIZE
    arena.commit(8 * MIB)
    assert arena.committed == arena.capacity == 8 * MIB
    with pytest.raises(ValueError):
        arena.commit(8 * MIB + 1)


def test_where_a_whole_step_finds_no_room_what_is_needed_may(
    run_dir: Path, arena: Arena, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, most = os.posix_fallocate, arena.committed + 2 * mmap.PAGESIZE

    def full(fd: int, offset: int, length: int) -> None:
        if offset + length > data_offset(4) + most:
            raise OSError(errno.ENOSPC, "full")
        real(fd, offset, length)

    monkeypatch.setattr(os, "posix_fallocate", full)
    arena.commit(most - KIB)
    assert arena.committed == most
    assert allocated(arena_path(run_dir, OWNER)) == data_offset(4) + most
    with pytest.raises(SystemError_, match="NO_SPACE"):
        arena.commit(most + 1)
    assert arena.committed == most


def test_a_reader_sees_what_the_owner_wrote_and_cannot_write(run_dir: Path, arena: Arena) -> None:
    reader = ArenaReader.open(run_dir, OWNER)
    assert (reader.capacity, reader.slots, reader.lanes) == (8 * MIB, 4, 2)
    arena.data[100:105] = b"hello"
    view = reader.view(100, 5)
    assert view is not None
    assert bytes(view) == b"hello"
    assert view.readonly
    with pytest.raises(TypeError):
        view[0] = 1
    reader.release(3, 1, 77)
    assert arena.marks[3 * 2 + 1] == 77


def test_a_reader_stays_within_what_is_committed(run_dir: Path, arena: Arena) -> None:
    reader = ArenaReader.open(run_dir, OWNER)
    end = arena.committed
    assert reader.view(end - 1, 1) is not None
    assert reader.view(end, 1) is None
    assert reader.view(end - 1, 2) is None
    assert reader.view(2**64 - 1, 8) is None
    assert reader.view(0, 2**40) is None
    arena.commit(end + 1)
    assert reader.view(end, 1) is not None
    zero = reader.view(0, 0)
    assert zero is not None
    assert zero.nbytes == 0


def test_only_the_current_generation_of_an_existing_lane_may_be_read(
    run_dir: Path, arena: Arena
) -> None:
    reader = ArenaReader.open(run_dir, OWNER)
    assert not reader.current(0, 0, 1)
    arena.generations[0] = 1
    assert reader.current(0, 0, 1)
    assert not reader.current(0, 0, 2)
    assert not reader.current(4, 0, 1)
    assert not reader.current(0, 2, 1)
    reader.release(0, 0, 1)
    assert not reader.current(0, 0, 1), "released already"
    assert reader.current(0, 1, 1)


def test_what_is_opened_is_marked_and_what_is_revoked_is_not_opened(
    run_dir: Path, arena: Arena
) -> None:
    reader = ArenaReader.open(run_dir, OWNER)
    arena.generations[0] = 1
    assert reader.take(0, 1, 1)
    assert list(arena.marks[:2]) == [0, opened_mark(1)]
    reader.release(0, 1, 1)
    assert arena.marks[1] == 1
    arena.generations[0] = 0
    assert not reader.take(0, 0, 1)
    assert arena.marks[0] == 0


def test_what_is_revoked_while_it_is_opened_counts_as_released(
    run_dir: Path, arena: Arena, monkeypatch: pytest.MonkeyPatch
) -> None:
    reader = ArenaReader.open(run_dir, OWNER)
    monkeypatch.setattr(reader, "current", lambda *_: True)  # a moment ago
    assert not reader.take(0, 0, 1)
    assert arena.marks[0] == 1


def test_views_outlive_both_sides(run_dir: Path, arena: Arena) -> None:
    reader = ArenaReader.open(run_dir, OWNER)
    arena.data[0:4] = b"kept"
    mine, theirs = arena.data[0:4], reader.view(0, 4)
    arena.close()
    del reader
    assert theirs is not None
    assert (bytes(mine), bytes(theirs)) == (b"kept", b"kept")


def test_no_arena_is_worker_lost(run_dir: Path) -> None:
    with pytest.raises(RequestError) as info:
        ArenaReader.open(run_dir, 999)
    assert info.value.code == "WORKER_LOST"


def test_an_incarnation_has_one_arena(run_dir: Path, arena: Arena) -> None:
    with pytest.raises(SystemError_) as info:
        Arena.create(run_dir, OWNER, MIB, slots=1)
    assert info.value.code == "ALREADY_RUNNING"
    assert arena_path(run_dir, OWNER).exists(), "the owner's files are not the loser's to remove"
    ArenaReader.open(run_dir, OWNER)


def test_only_its_own_file_is_removed_when_the_second_one_is_taken(run_dir: Path) -> None:
    marks_path(run_dir, 7).write_bytes(b"another's")
    with pytest.raises(SystemError_):
        Arena.create(run_dir, 7, MIB, slots=1)
    assert not arena_path(run_dir, 7).exists()
    assert marks_path(run_dir, 7).read_bytes() == b"another's"


@pytest.mark.parametrize(
    ("number", "hint"),
    [
        (errno.ENOSPC, "free /dev/shm"),
        (errno.EMFILE, "ulimit -n"),
        (errno.ENFILE, "fs.file-max"),
        (errno.EFBIG, "ulimit -f"),
    ],
)
def test_what_is_lacking_is_named(
    run_dir: Path, monkeypatch: pytest.MonkeyPatch, number: int, hint: str
) -> None:
    def lacks(*_: object) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(os, "posix_fallocate", lacks)
    with pytest.raises(SystemError_) as info:
        Arena.create(run_dir, 7, MIB, slots=1)
    assert info.value.code == "NO_SPACE" and hint in info.value.hint
    assert not arena_path(run_dir, 7).exists()


@pytest.mark.parametrize("number", [errno.EMFILE, errno.ENFILE, errno.ENOMEM])
def test_a_reader_without_a_descriptor_is_short_of_one(
    run_dir: Path, arena: Arena, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    def lacks(*_: object) -> None:
        raise OSError(number, os.strerror(number))

    with monkeypatch.context() as patch:
        patch.setattr(os, "open", lacks)
        with pytest.raises(SystemError_) as info:
            ArenaReader.open(run_dir, OWNER)
    assert info.value.code == "NO_SPACE" and info.value.retryable and info.value.hint
    assert ArenaReader.open(run_dir, OWNER).capacity == arena.capacity


def test_a_missing_directory_is_a_typed_error(run_dir: Path) -> None:
    with pytest.raises(SystemError_) as info:
        Arena.create(run_dir / "nowhere", 7, MIB, slots=1)
    assert info.value.code == "INTERNAL" and "cannot create the arena" in info.value.message


@pytest.mark.parametrize("word", range(7))
def test_a_foreign_layout_is_refused(run_dir: Path, arena: Arena, word: int) -> None:
    with open(arena_path(run_dir, OWNER), "r+b") as f:
        f.seek(8 * word)
        f.write((2**40 + 3).to_bytes(8, "little"))
    with pytest.raises(WireError):
        ArenaReader.open(run_dir, OWNER)


@pytest.mark.parametrize("size", [0, 1, 80, 5000])
@pytest.mark.parametrize("which", [arena_path, marks_path])
def test_a_cut_file_is_refused(run_dir: Path, arena: Arena, which: object, size: int) -> None:
    os.truncate(which(run_dir, OWNER), size)  # type: ignore[operator]
    if which is marks_path and size >= 80:
        ArenaReader.open(run_dir, OWNER)  # 4 slots x 2 lanes x 4 bytes are still there
        return
    with pytest.raises(WireError):
        ArenaReader.open(run_dir, OWNER)


@pytest.mark.parametrize("which", [arena_path, marks_path])
def test_symbolic_links_and_open_files_are_refused(
    run_dir: Path, arena: Arena, which: object
) -> None:
    path: Path = which(run_dir, OWNER)  # type: ignore[operator]
    path.chmod(0o644)
    with pytest.raises(WireError, match="private"):
        ArenaReader.open(run_dir, OWNER)
    path.chmod(0o600)
    real = path.rename(path.with_suffix(".real"))
    path.symlink_to(real)
    with pytest.raises(WireError):
        ArenaReader.open(run_dir, OWNER)
    path.unlink()
    path.mkdir()
    with pytest.raises(WireError):
        ArenaReader.open(run_dir, OWNER)
    path.rmdir()
    real.rename(path)


def test_creation_never_writes_through_a_symbolic_link(run_dir: Path, tmp_path: Path) -> None:
    victim = tmp_path / "victim"
    victim.write_text("precious")
    arena_path(run_dir, 5).symlink_to(victim)
    with pytest.raises(SystemError_):
        Arena.create(run_dir, 5, MIB, slots=1)
    assert victim.read_text() == "precious"


def test_mappings_cost_no_descriptors_that_stay(run_dir: Path, arena: Arena) -> None:
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(50):
        ArenaReader.open(run_dir, OWNER)
    assert len(os.listdir("/proc/self/fd")) == before
    Arena.create(run_dir, OWNER + 1, MIB, slots=1).close()
    assert len(os.listdir("/proc/self/fd")) == before


@pytest.mark.parametrize(
    ("incarnation", "capacity", "slots", "lanes"),
    [(1, 0, 1, 1), (1, 1, 0, 1), (1, 1, 1, 0), (0, 1, 1, 1)],
)
def test_nonsense_sizes_are_refused(
    run_dir: Path, incarnation: int, capacity: int, slots: int, lanes: int
) -> None:
    with pytest.raises(ValueError):
        Arena.create(run_dir, incarnation, capacity, slots, lanes)
