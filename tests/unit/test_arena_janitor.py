"""Run directories: private, locked while their maker lives, swept afterwards and never before."""

from __future__ import annotations

import errno
import fcntl
import os
import shutil
import stat
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from blockflow.core.errors import RequestError, SystemError_
from blockflow.tensormq import janitor
from blockflow.tensormq.arena import DEVICE_BIT, Arena
from blockflow.tensormq.janitor import (
    MAX_PATH_CHARS,
    ROOT_ENV,
    RunDir,
    data_socket_path,
    remove_leavings,
    remove_strangers,
    run_root,
    sweep_stale,
)


@pytest.fixture
def tmp_path() -> Iterator[Path]:
    """Shorter than pytest's own: socket paths are limited."""
    with tempfile.TemporaryDirectory(prefix="bf-") as made:
        yield Path(made)


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return tmp_path / "r"


def die_leaving(root: Path) -> Path:
    """A run directory whose maker was killed."""
    script = (
        "import os, signal, sys\n"
        "from pathlib import Path\n"
        "from blockflow.tensormq.arena import Arena\n"
        "from blockflow.tensormq.janitor import RunDir\n"
        "made = RunDir.create(Path(sys.argv[1]))\n"
        "Arena.create(made.path, 3, 1 << 20, slots=2)\n"
        "print(made.path, flush=True)\n"
        "os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", script, str(root)], capture_output=True, text=True, timeout=30
    )
    assert done.returncode == -9, done.stderr
    return Path(done.stdout.strip())


def test_a_run_directory_is_private_and_locked_until_removed(root: Path) -> None:
    with RunDir.create(root) as made:
        assert stat.S_IMODE(made.path.stat().st_mode) == 0o700
        assert made.path.parent == root
        with open(made.path / "lock", "rb") as f, pytest.raises(BlockingIOError):
            fcntl.flock(f, fcntl.LOCK_EX | fcntl.LOCK_NB)
        (made.path / "x.sock").touch()
        (made.path / "sub").mkdir()
        (made.path / "sub" / "file").touch()
    assert list(root.iterdir()) == []
    made.remove()


def test_a_relative_root_is_the_same_for_who_works_elsewhere(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with RunDir.create(Path("root")) as made:
        assert made.path.parent == tmp_path / "root"


def test_the_default_root_goes_with_its_last_system(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(janitor, "_default_root", lambda: root)
    with RunDir.create(root):
        RunDir.create(root).remove()
        assert root.is_dir(), "another system is in it"
    assert not root.exists()


def test_only_the_default_root_goes_with_a_system(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with RunDir.create(root) as made:
        assert RunDir.of_another(made.path).goes_with() == [made.path]
        monkeypatch.setattr(janitor, "_default_root", lambda: root)
        assert RunDir.of_another(made.path).goes_with() == [made.path, root]


def test_a_root_that_vanishes_at_the_start_is_made_again(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, made = janitor._make_root, []

    def make(path: Path) -> None:
        real(path)
        made.append(path)
        if len(made) == 1:
            path.rmdir()  # the system that was the last one ends right now

    monkeypatch.setattr(janitor, "_make_root", make)
    with RunDir.create(root) as run_dir:
        assert run_dir.path.is_dir()
    assert len(made) == 2


def test_two_systems_of_one_user_live_side_by_side(root: Path) -> None:
    with RunDir.create(root) as one, RunDir.create(root) as two:
        assert one.path != two.path
        assert sweep_stale(root) == []
        assert one.path.is_dir()
        assert two.path.is_dir()


def test_a_root_that_cannot_even_be_looked_at_is_refused(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def closed(*_: object, **__: object) -> None:
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))

    for call in ("lstat", "mkdir"):
        monkeypatch.setattr(Path, call, closed)
    assert sweep_stale(root) == []
    with pytest.raises(RequestError, match="INVALID_REQUEST: cannot make a run directory"):
        RunDir.create(root)


@pytest.mark.parametrize("mode", [0o777, 0o770, 0o1777])
def test_a_root_that_others_may_change_is_not_swept(root: Path, mode: int) -> None:
    """They could put a link in its place meanwhile, to a folder whose lock file is another one."""
    dead = die_leaving(root)
    root.chmod(mode)
    assert sweep_stale(root) == [] and dead.exists()
    root.chmod(0o755)
    assert sweep_stale(root) == [dead]


def test_another_users_root_is_not_swept(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    dead = die_leaving(root)
    monkeypatch.setattr(janitor.os, "geteuid", lambda: os.getuid() + 1)
    assert sweep_stale(root) == [] and dead.exists()


def test_the_sweep_removes_what_a_killed_system_left_and_nothing_else(root: Path) -> None:
    dead = die_leaving(root)
    assert (dead / "arena-3").exists()
    with RunDir.create(root) as alive:
        assert sweep_stale(root) == [dead]
        assert not dead.exists()
        assert alive.path.is_dir()
        assert sweep_stale(root) == []


def test_a_half_made_and_a_half_removed_directory_are_finished_off(root: Path) -> None:
    root.mkdir(mode=0o700)
    (root / "halfmade").mkdir(mode=0o700)
    (root / "halfgone").mkdir(mode=0o700)
    (root / "halfgone" / "lock").touch(0o600)
    assert sorted(p.name for p in sweep_stale(root)) == ["halfgone", "halfmade"]


def test_sweeps_at_the_same_time_do_not_mind_each_other(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two systems that start together: each finds gone what the other one was faster with."""
    root.mkdir(mode=0o700)
    for name in ("one", "two", "three"):
        (root / name).mkdir(mode=0o700)
        (root / name / "lock").touch(0o600)
    sweep_one = janitor._sweep_one

    def slower(path: Path) -> bool:
        for other in set(root.iterdir()) - {path}:
            assert sweep_one(other)
        return sweep_one(path)

    monkeypatch.setattr(janitor, "_sweep_one", slower)
    assert len(sweep_stale(root)) == 1
    assert list(root.iterdir()) == []


def test_a_root_that_goes_before_it_is_swept_holds_nothing(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It goes with its last system."""
    root.mkdir(mode=0o700)
    is_dir = Path.is_dir

    def goes(path: Path) -> bool:
        found = is_dir(path)
        path.rmdir()
        return found

    monkeypatch.setattr(Path, "is_dir", goes)
    assert sweep_stale(root) == []


def test_strangers_and_links_are_left_alone(root: Path, tmp_path: Path) -> None:
    root.mkdir(mode=0o700)
    precious = tmp_path / "precious"
    precious.mkdir()
    (precious / "lock").touch()
    (precious / "data").touch()
    (root / "link").symlink_to(precious)
    (root / "file").touch()
    (root / "notours").mkdir()
    (root / "notours" / "data").touch()
    (root / "linkedlock").mkdir()
    (root / "linkedlock" / "lock").symlink_to(precious / "lock")
    assert sweep_stale(root) == []
    assert (precious / "data").exists()
    assert (root / "notours" / "data").exists()
    assert (root / "linkedlock").exists()

    # A link inside a dead run directory goes; what it points to stays.
    (root / "dead").mkdir()
    (root / "dead" / "lock").touch()
    (root / "dead" / "link").symlink_to(precious)
    assert sweep_stale(root) == [root / "dead"]
    assert (precious / "data").exists()

    root_link = tmp_path / "rootlink"
    root_link.symlink_to(root)
    assert sweep_stale(root_link) == []
    assert sweep_stale(tmp_path / "nowhere") == []


def test_a_maker_that_loses_the_race_with_a_sweep_takes_another_name(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    root.mkdir(mode=0o700)
    (root / "aaaaaaaa").mkdir()
    names = iter(["aaaaaaaa", "bbbbbbbb", "cccccccc"])
    monkeypatch.setattr("secrets.token_hex", lambda _: next(names))
    real_open = os.open

    def open_after_sweep(path: object, *args: int) -> int:
        if "bbbbbbbb" in str(path):
            os.rmdir(root / "bbbbbbbb")
        return real_open(path, *args)  # type: ignore[arg-type]

    monkeypatch.setattr("os.open", open_after_sweep)
    with RunDir.create(root) as made:
        assert made.path.name == "cccccccc"


def test_a_root_of_others_is_refused(tmp_path: Path) -> None:
    shared = tmp_path / "shared"
    shared.mkdir()
    for mode in (0o777, 0o770, 0o707):
        shared.chmod(mode)
        with pytest.raises(RequestError, match="other users"):
            RunDir.create(shared)
    target = tmp_path / "target"
    target.mkdir()
    link = tmp_path / "link"
    link.symlink_to(target)
    with pytest.raises(RequestError, match="INVALID_REQUEST"):
        RunDir.create(link)
    assert list(target.iterdir()) == []
    file = tmp_path / "file"
    file.touch()
    with pytest.raises(RequestError, match="INVALID_REQUEST"):
        RunDir.create(file)


def test_a_root_too_long_for_sockets_is_refused_with_a_hint(tmp_path: Path) -> None:
    with pytest.raises(RequestError) as info:
        RunDir.create(tmp_path / ("x" * 90))
    assert info.value.code == "INVALID_REQUEST"
    assert ROOT_ENV in info.value.hint


def test_a_root_that_is_not_utf8_is_refused_with_a_hint(root: Path) -> None:
    root = root / os.fsdecode(bytes([0xE9]))
    with pytest.raises(RequestError, match="UTF-8") as info:
        RunDir.create(root)
    assert info.value.code == "INVALID_REQUEST" and ROOT_ENV in info.value.hint
    assert not root.exists()


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EMFILE, errno.ENOMEM])
def test_a_machine_without_room_is_told_of_as_that(
    root: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    def lacks(*_: object) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(os, "open", lacks)
    with pytest.raises(SystemError_, match="NO_SPACE"):
        RunDir.create(root)


def test_the_environment_chooses_the_root(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(ROOT_ENV, "/somewhere/else")
    assert run_root() == Path("/somewhere/else")
    monkeypatch.delenv(ROOT_ENV)
    assert run_root().name == f"blockflow-{os.geteuid()}"


def test_the_leavings_of_one_process_are_removed_alone(root: Path) -> None:
    with RunDir.create(root) as made:
        mine, dead = (Arena.create(made.path, n, 1 << 20, slots=1) for n in (1, 2))
        data_socket_path(made.path, 2).touch()
        remove_leavings(made.path, 2)
        remove_leavings(made.path, 2)
        assert sorted(os.listdir(made.path)) == ["arena-1", "lock", "marks-1"]
        dead.close()
        mine.close()


def test_what_cannot_be_removed_keeps_nothing_else_there(root: Path) -> None:
    """The process has died, which has to be told to others."""
    with RunDir.create(root) as made:
        (made.path / "arena-2").mkdir()
        for name in ("marks-2", "work-2", "work-3"):
            (made.path / name).touch()
        remove_leavings(made.path, 2)
        assert sorted(os.listdir(made.path)) == ["arena-2", "lock", "work-3"]
        remove_strangers(made.path, ())
        assert sorted(os.listdir(made.path)) == ["arena-2", "lock"]


def test_all_that_a_process_may_have_left_is_known(root: Path) -> None:
    numbers = (2, 2 | DEVICE_BIT)
    left = [f"{kind}-{n}" for kind in ("arena", "marks") for n in numbers]
    left += ["d2.sock", "g2.sock", "work-2"]
    with RunDir.create(root) as made:
        for name in left:
            (made.path / name).touch()
        remove_leavings(made.path, 2)
        assert os.listdir(made.path) == ["lock"]


def test_the_lock_goes_last_and_what_appears_meanwhile_goes_too(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = RunDir.create(root)
    for name in "ab":
        (made.path / name).touch()
    gone: list[str] = []
    real = Path.unlink

    def unlink(path: Path, missing_ok: bool = False) -> None:
        real(path, missing_ok)
        gone.append(path.name)
        if gone.count(janitor.LOCK_NAME) == 1 and path.name == janitor.LOCK_NAME:
            (made.path / "late").touch()  # by a process that is about to die

    monkeypatch.setattr(Path, "unlink", unlink)
    made.remove()
    assert not made.path.exists()
    assert sorted(gone[:2]) == ["a", "b"] and gone[2:4] == [janitor.LOCK_NAME, "late"]


def test_a_directory_that_was_swept_before_it_was_locked_is_not_ours(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    names = iter(["aaaaaaaa", "bbbbbbbb"])
    monkeypatch.setattr("secrets.token_hex", lambda _: next(names))
    real = janitor._lock

    def lock(fd: int) -> bool:
        if (swept := root / "aaaaaaaa").exists():
            shutil.rmtree(swept)
        return real(fd)

    monkeypatch.setattr(janitor, "_lock", lock)
    before = len(os.listdir("/proc/self/fd"))
    with RunDir.create(root) as made:
        assert made.path.name == "bbbbbbbb" and made.path.exists()
        assert len(os.listdir("/proc/self/fd")) == before + 1


def test_longest_socket_path_fits(root: Path) -> None:
    with RunDir.create() as made:
        assert len(str(data_socket_path(made.path, 10**14 - 1))) <= MAX_PATH_CHARS
