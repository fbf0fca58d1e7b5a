"""Files of weights: the same pages for all, copied on a write, gone when nobody maps them."""

from __future__ import annotations

import errno
import logging
import os
import signal
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from refusals_rig import no_room

from blockflow.tensormq import weights
from blockflow.tensormq.weights import FOLDER, WeightFiles, remove_unused

SIZE = 3 * 4096
PIECES = [(0, memoryview(b"first")), (4096, memoryview(b"second"))]
CONTENT = b"first".ljust(4096, b"\0") + b"second".ljust(SIZE - 4096, b"\0")


@pytest.fixture
def files(tmp_path: Path) -> WeightFiles:
    return WeightFiles(tmp_path)


def there(run_dir: Path) -> list[str]:
    folder = run_dir / FOLDER
    return sorted(os.listdir(folder)) if folder.is_dir() else []


def test_the_first_makes_what_the_others_map(files: WeightFiles, tmp_path: Path) -> None:
    first = files.hold("key", SIZE, PIECES)
    assert first is not None and first[:] == CONTENT
    inode = (tmp_path / FOLDER / "key").stat().st_ino
    second = WeightFiles(tmp_path).hold("key", SIZE, [(0, memoryview(b"nobody asks"))])
    assert second is not None and second[:] == CONTENT
    assert (tmp_path / FOLDER / "key").stat().st_ino == inode
    assert (tmp_path / FOLDER).stat().st_mode & 0o077 == 0
    assert (tmp_path / FOLDER / "key").stat().st_mode & 0o777 == 0o400


def test_a_write_stays_with_who_wrote(files: WeightFiles) -> None:
    first, second = files.hold("key", SIZE, PIECES), files.hold("key", SIZE, PIECES)
    assert first is not None and second is not None
    first[:5] = b"other"
    third = files.hold("key", SIZE, PIECES)
    assert third is not None
    assert first[:5] == b"other" and second[:5] == third[:5] == b"first"


def test_other_keys_are_other_files(files: WeightFiles, tmp_path: Path) -> None:
    one = files.hold("one", SIZE, PIECES)
    two = files.hold("two", SIZE, [(1, memoryview(b"x"))])
    assert one is not None and two is not None and one[:5] == b"first" and two[:2] == b"\0x"
    assert there(tmp_path) == ["one", "two"]


def test_another_size_by_the_same_name_is_not_mapped(
    files: WeightFiles, caplog: pytest.LogCaptureFixture
) -> None:
    kept = files.hold("key", SIZE, PIECES)
    assert files.hold("key", SIZE + 4096, PIECES) is None
    assert "key" in caplog.text and kept is not None and kept[:] == CONTENT


def test_nobody_sees_half_of_one(files: WeightFiles, tmp_path: Path) -> None:
    seen: list[list[str]] = []

    class Watched(Sequence[tuple[int, memoryview]]):
        def __len__(self) -> int:
            return len(PIECES)

        def __getitem__(self, index: Any) -> Any:
            return PIECES[index]

        def __iter__(self) -> Iterator[tuple[int, memoryview]]:
            for piece in PIECES:
                seen.append(there(tmp_path))
                yield piece
            seen.append(there(tmp_path))

    made = files.hold("key", SIZE, Watched())
    assert made is not None and made[:] == CONTENT
    assert seen == [[], [], []]
    assert there(tmp_path) == ["key"]


def test_who_comes_second_while_making_takes_the_first_ones(
    files: WeightFiles, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two replicas start together: both find nothing, and one of them names its file first."""
    link = os.link
    others: list[Any] = []

    def overtaken(*args: Any, **how: Any) -> None:
        monkeypatch.setattr(weights.os, "link", link)
        others.append(WeightFiles(tmp_path).hold("key", SIZE, PIECES))
        link(*args, **how)

    monkeypatch.setattr(weights.os, "link", overtaken)
    mine = files.hold("key", SIZE, [(0, memoryview(b"late"))])
    assert others[0][:] == CONTENT
    assert mine is not None and mine[:] == CONTENT
    assert there(tmp_path) == ["key"]


def test_unused_ones_go_and_used_ones_stay(files: WeightFiles, tmp_path: Path) -> None:
    one, two = files.hold("one", SIZE, PIECES), files.hold("two", SIZE, PIECES)
    again = files.hold("one", SIZE, PIECES)
    remove_unused(tmp_path)
    assert there(tmp_path) == ["one", "two"]
    del two
    remove_unused(tmp_path)
    assert there(tmp_path) == ["one"]
    del one
    remove_unused(tmp_path)
    assert there(tmp_path) == ["one"]  # the second mapping of it
    assert again is not None and again[:] == CONTENT
    del again
    remove_unused(tmp_path)
    assert there(tmp_path) == []


@pytest.mark.parametrize("name", ["open", "scandir", "unlink"])
def test_what_cannot_be_removed_now_is_left_for_the_next_time(
    files: WeightFiles, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """A process has died, which has to be told to others, whatever becomes of its files."""
    held = files.hold("key", SIZE, PIECES)
    assert held is not None
    held.close()

    def refused(*_: Any, **__: Any) -> None:
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    with monkeypatch.context() as patch:
        patch.setattr(os, name, refused)
        remove_unused(tmp_path)
    assert there(tmp_path) == ["key"]
    remove_unused(tmp_path)
    assert there(tmp_path) == []


def test_what_refers_to_the_memory_keeps_the_file(files: WeightFiles, tmp_path: Path) -> None:
    """As a tensor does: nobody has the mapping itself any more."""
    view = memoryview(files.hold("key", SIZE, PIECES) or b"")[4096:]
    remove_unused(tmp_path)
    assert there(tmp_path) == ["key"] and bytes(view[:6]) == b"second"
    view.release()
    remove_unused(tmp_path)
    assert there(tmp_path) == []


def test_one_that_somebody_else_has_removed_is_nothing(
    files: WeightFiles, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two look at the same time: the next Manager, say, and one that was believed dead."""
    assert files.hold("one", SIZE, PIECES) is not None
    assert files.hold("two", SIZE, PIECES) is not None
    opened = weights._opened

    def late(path: Path) -> Any:
        monkeypatch.setattr(weights, "_opened", opened)
        path.unlink()
        return opened(path)

    monkeypatch.setattr(weights, "_opened", late)
    remove_unused(tmp_path)
    assert there(tmp_path) == []


def test_what_is_free_is_given_back_before_a_file_is_made(tmp_path: Path) -> None:
    told: list[list[str]] = []
    files = WeightFiles(tmp_path, lambda: told.append(there(tmp_path)))
    first, second = files.hold("key", SIZE, PIECES), files.hold("key", SIZE, PIECES)
    assert told == [[]] and first is not None and second is not None


def test_none_yet_is_nothing_to_remove(tmp_path: Path) -> None:
    remove_unused(tmp_path)
    assert not (tmp_path / FOLDER).exists()


def test_the_killed_use_nothing(files: WeightFiles, tmp_path: Path) -> None:
    ready, tell = os.pipe()
    pid = os.fork()
    if pid == 0:
        kept = files.hold("key", SIZE, PIECES)
        os.write(tell, b"x" if kept is not None else b"-")
        signal.pause()
        os._exit(1)
    try:
        assert os.read(ready, 1) == b"x"
        remove_unused(tmp_path)
        assert there(tmp_path) == ["key"]
    finally:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        os.close(ready)
        os.close(tell)
    remove_unused(tmp_path)
    assert there(tmp_path) == []


def test_one_that_is_being_removed_is_made_anew(
    files: WeightFiles, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Between its lock and its end: neither waited for nor mapped."""
    assert files.hold("key", SIZE, PIECES) is not None  # and let go
    unlink = Path.unlink
    made: list[Any] = []

    def meanwhile(path: Path) -> None:
        assert weights._found(path, SIZE) is None  # it is locked
        unlink(path)
        made.append(files.hold("key", SIZE, PIECES))

    monkeypatch.setattr(Path, "unlink", meanwhile)
    remove_unused(tmp_path)
    assert made[0][:] == CONTENT
    assert there(tmp_path) == ["key"]


def test_one_that_went_while_it_was_opened_is_not_mapped(
    files: WeightFiles, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert files.hold("key", SIZE, PIECES) is not None
    flock = weights.fcntl.flock

    def late(fd: int, how: int) -> None:
        monkeypatch.setattr(weights.fcntl, "flock", flock)
        os.unlink(tmp_path / FOLDER / "key")
        flock(fd, how)

    monkeypatch.setattr(weights.fcntl, "flock", late)
    found = files.hold("key", SIZE, [(0, memoryview(b"anew"))])
    assert found is not None and found[:4] == b"anew"
    assert there(tmp_path) == ["key"]


def unable(*args: Any, **more: Any) -> Any:
    raise OSError(errno.EOPNOTSUPP, "Operation not supported")


@pytest.mark.parametrize(
    ("name", "does", "why"),
    [
        ("posix_fallocate", no_room, "No space left"),
        ("pwrite", no_room, "No space left"),
        ("link", unable, "not supported"),
        ("mkdir", no_room, "No space left"),
    ],
)
def test_where_it_cannot_be_weights_stay_private(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    name: str,
    does: Any,
    why: str,
) -> None:
    before = sorted(os.listdir("/proc/self/fd"))
    monkeypatch.setattr(weights.os, name, does)
    with caplog.at_level(logging.WARNING):
        assert WeightFiles(tmp_path).hold("key", SIZE, PIECES) is None
    monkeypatch.undo()
    assert why in caplog.text and "private" in caplog.text
    assert there(tmp_path) == []
    assert sorted(os.listdir("/proc/self/fd")) == before


def test_half_of_the_free_room_is_left_to_others(
    files: WeightFiles,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    free = SimpleNamespace(f_bavail=6, f_frsize=4096)
    monkeypatch.setattr(weights.os, "statvfs", lambda path: free)
    assert files.hold("fits", SIZE, PIECES) is not None
    assert files.hold("large", SIZE + 1, PIECES) is None
    assert "half" in caplog.text and there(tmp_path) == ["fits"]


def test_half_of_the_free_memory_is_left_to_others(
    files: WeightFiles,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """A tmpfs may be as large as it likes."""
    monkeypatch.setattr(
        weights.os, "statvfs", lambda path: SimpleNamespace(f_bavail=1 << 50, f_frsize=4096)
    )
    assert files.hold("large", 1 << 50, PIECES) is None
    assert "half" in caplog.text and there(tmp_path) == []


def test_half_of_what_a_control_group_leaves_is_left_to_others(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    left: list[int | None] = [2 * SIZE - 1]
    files = WeightFiles(tmp_path, left=lambda: left[0])
    assert files.hold("key", SIZE, PIECES) is None
    assert "half" in caplog.text and there(tmp_path) == []
    left[0] = 2 * SIZE
    assert files.hold("key", SIZE, PIECES) is not None
    left[0] = None
    assert files.hold("other", SIZE, PIECES) is not None
    left[0] = -1
    assert files.hold("key", SIZE, PIECES) is not None  # it is there
    assert files.hold("third", SIZE, PIECES) is None


def test_short_writes_go_on(files: WeightFiles, monkeypatch: pytest.MonkeyPatch) -> None:
    pwrite = os.pwrite
    monkeypatch.setattr(weights.os, "pwrite", lambda fd, data, at: pwrite(fd, data[:2], at))
    made = files.hold("key", SIZE, PIECES)
    assert made is not None and made[:] == CONTENT
