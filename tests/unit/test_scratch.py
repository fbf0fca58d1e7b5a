"""Scratch folders: gone when they are not needed any more, also when their owner was killed."""

from __future__ import annotations

import errno
import importlib
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from control_rig import save_echoes

from blockflow.core.errors import RepositoryError, SystemError_
from blockflow.repository.repository import BlockRepository
from blockflow.repository.scratch import scratch, sweep

OWNER = """
import sys
from blockflow.repository.scratch import scratch
with scratch() as folder:
    (folder / "large").write_bytes(bytes(1000))
    print(folder, flush=True)
    sys.stdin.read()
"""


@pytest.fixture
def base(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where they lie."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    return tmp_path


@contextmanager
def owner(base: Path) -> Iterator[tuple[subprocess.Popen[str], Path]]:
    """Another process with a scratch folder."""
    with subprocess.Popen(
        [sys.executable, "-c", OWNER],
        env={**os.environ, "TMPDIR": str(base)},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        try:
            assert process.stdout is not None
            yield process, Path(process.stdout.readline().strip())
        finally:
            process.kill()


@pytest.mark.parametrize("end", [None, ValueError, KeyboardInterrupt])
def test_a_folder_is_gone_at_the_end(base: Path, end: type[BaseException] | None) -> None:
    try:
        with scratch() as folder:
            assert folder.parent == base and folder.stat().st_mode & 0o077 == 0
            (folder / "deep").mkdir()
            (folder / "deep" / "file").touch()
            if end is not None:
                raise end
    except (ValueError, KeyboardInterrupt):
        pass
    assert list(base.iterdir()) == []


def test_what_a_killed_one_leaves_the_next_one_removes(base: Path) -> None:
    with owner(base) as (living, kept), owner(base) as (process, left):
        process.kill()
        process.wait()
        assert (left / "large").exists()
        with scratch() as folder:
            assert set(base.iterdir()) == {kept, folder}
        assert (kept / "large").exists()
        living.communicate("")
    assert list(base.iterdir()) == []


def test_what_is_not_ours_is_left_alone(base: Path) -> None:
    target = base / "target"
    (base / "blockflow-scratch-").mkdir()
    (base / "blockflow-scratch-abcdefgh-2").mkdir()
    (base / "blockflow-scratch-file1234").touch()
    target.mkdir()
    (base / "blockflow-scratch-link1234").symlink_to(target)
    before = set(base.iterdir())
    assert sweep(base) == []
    assert set(base.iterdir()) == before
    (base / "blockflow-scratch-abcdefgh").mkdir()
    assert sweep(base) == [base / "blockflow-scratch-abcdefgh"]


@pytest.mark.parametrize("moment", ["tempfile.mkdtemp", "fcntl.flock"])
def test_a_folder_that_was_swept_before_it_was_held_is_not_used(
    base: Path, monkeypatch: pytest.MonkeyPatch, moment: str
) -> None:
    module = importlib.import_module(moment.partition(".")[0])
    name = moment.partition(".")[2]
    real = getattr(module, name)
    times = []

    def swept(*args: Any, **more: Any) -> Any:
        found = real(*args, **more)
        times.append(found)
        if len(times) == 1:
            for folder in base.iterdir():
                folder.rmdir()
        return found

    monkeypatch.setattr(module, name, swept)
    with scratch() as folder:
        assert folder.exists()
        assert len(times) == 2


def test_a_folder_that_cannot_be_held_is_not_tried_for_ever(
    base: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    left = iter([OSError(errno.EMFILE, os.strerror(errno.EMFILE))])

    def refused(*_: Any) -> int:
        raise next(left)

    monkeypatch.setattr(os, "open", refused)
    with pytest.raises(SystemError_, match="NO_SPACE"), scratch():
        pass
    assert list(base.iterdir()) == []


def test_a_full_disk_for_temporary_files_is_not_told_of_the_block(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """tempfile writes a few bytes into each folder that it knows, and tells only that it cannot."""
    monkeypatch.setattr(tempfile, "tempdir", None)
    monkeypatch.setattr(tempfile, "_candidate_tempdir_list", lambda: ["/dev/full"])
    with pytest.raises(RepositoryError, match=r"temporary files.*/dev/full") as e, scratch():
        pass
    assert "TMPDIR" in e.value.hint and "block" not in e.value.message


# --- in the repository ----------------------------------------------------------------------------


def test_what_killed_writers_left_goes_and_nothing_else(tmp_path: Path) -> None:
    repository = BlockRepository(tmp_path)
    repository.sweep()
    save_echoes(tmp_path, "one", "two")
    (tmp_path / "first").mkdir()  # nothing of it was ever stored
    before = set(tmp_path.rglob("*"))
    left = [".artifact.123", ".manifest.4"]
    for folder in ("one", "two", "first"):
        for name in (*left, ".artifact.x", "profile.json"):
            (tmp_path / folder / name).touch()
    with repository._locked("two"):  # by who is writing there now
        repository.sweep()
    found = {p.relative_to(tmp_path) for p in tmp_path.rglob("*") if p not in before}
    kept = {Path(f, n) for f in ("one", "two", "first") for n in (".artifact.x", "profile.json")}
    assert found == kept | {Path("two", n) for n in left}
    assert repository.verify("one").name == "one"
