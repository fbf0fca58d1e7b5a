"""Whoever stores blocks is killed at any step: all of them are stored, or none is."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import shutil
import threading
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from blockflow.core.errors import RepositoryError
from blockflow.core.model import TensorSpec
from blockflow.repository.echo import save_echo
from blockflow.repository.folder import Pending
from blockflow.repository.journal import JOURNAL
from blockflow.repository.repository import BlockRepository

SPEC = TensorSpec("float32", ("rows", 4))
STEPS = ("mkdir", "write", "fsync", "replace", "unlink", "ftruncate")
NAMES = ("echo1", "echo2", "fresh")


class Killed(BaseException):
    """From here on nothing that the process would do reaches the disk, whoever catches this."""


def repository(root: Path) -> BlockRepository:
    repo = BlockRepository(root)
    for name in ("echo1", "echo2"):
        save_echo(repo, name, SPEC, settings={"delay_ms": 1})
    return repo


def store(repo: BlockRepository, version: str) -> None:
    form = repo.manifest("echo1").model_copy(update={"version": version})
    repo.save_all([(form.model_copy(update={"name": n}), b"new " + n.encode()) for n in NAMES])


def killed_after(steps: int, work: Callable[[], object]) -> bool:
    """Do it until the step after these, and nothing later; whether it came to its end.

    Descriptors are closed, as those of a killed process are, and with them go its locks.
    """
    left, thread = steps, threading.get_ident()

    def step(*args: Any, _real: Any, **kw: Any) -> Any:
        nonlocal left
        if threading.get_ident() == thread:
            left -= 1
            if left < 0:
                raise Killed
        return _real(*args, **kw)

    with pytest.MonkeyPatch.context() as patch:
        for name in STEPS:
            patch.setattr(os, name, partial(step, _real=getattr(os, name)))
        try:
            work()
        except Killed:
            return False
    return left >= 0


def content(repo: BlockRepository) -> dict[str, bytes]:
    files = (p for p in repo.root.rglob("*") if p.is_file())
    return {str(p.relative_to(repo.root)): p.read_bytes() for p in files}


@pytest.mark.parametrize("version", ["1", "2"])
def test_killed_at_any_step(tmp_path: Path, version: str) -> None:
    seen, first = set(), repository(tmp_path / "first")
    for steps in range(400):
        repo = BlockRepository(shutil.copytree(first.root, tmp_path / str(steps)))
        before = content(repo)
        done = killed_after(steps, partial(store, repo, version))
        killed_after(steps % 11, repo.names)  # and so is the first who finds it, perhaps
        stored = [n for n in NAMES if n in repo.names() and is_new(repo, n)]
        assert stored in ([], list(NAMES)), steps
        assert stored or not done
        seen.add(bool(stored))
        repo.sweep()
        if not stored:
            assert content(repo) == before
        for name in repo.names():
            for label in repo.versions(name):
                repo.verify(f"{name}@{label}")
        assert not [f for f in content(repo) if f.startswith(".") or "/." in f]
        if done:
            break
    assert done and seen == {True, False}, steps


def is_new(repo: BlockRepository, name: str) -> bool:
    with repo.artifact(name) as path:
        return path.read_bytes().startswith(b"new ")


def half_stored(repo: BlockRepository) -> None:
    """A writer that is killed when the first of three is in force."""

    def version(name: str) -> str:
        found: str = json.loads((repo.root / name / "manifest.json").read_bytes())["version"]
        return found

    for steps in range(100):
        repo.sweep()
        killed_after(steps, partial(store, repo, "2"))
        if version("echo1") == "2":
            break
    assert (repo.root / JOURNAL).exists() and version("echo2") == "1"


def test_who_waited_for_the_journal_of_one_that_was_killed_undoes_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of other blocks, whose folders it has no lock on."""
    repo = repository(tmp_path)
    form = repo.manifest("echo1")
    lock, deaths = fcntl.flock, iter([partial(half_stored, repo)])

    def flock(fd: int, how: int) -> None:
        is_journal = os.readlink(f"/proc/self/fd/{fd}").endswith(JOURNAL)
        if is_journal and (death := next(deaths, None)):
            death()
        lock(fd, how)

    monkeypatch.setattr(fcntl, "flock", flock)
    repo.save_all([(form.model_copy(update={"name": n}), b"new") for n in ("other1", "other2")])
    monkeypatch.undo()
    assert repo.names() == ["echo1", "echo2", "other1", "other2"]
    assert repo.versions("echo1") == ["1"]


def test_what_its_writer_cannot_undo_is_undone_by_who_comes_next(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    repo = repository(tmp_path)
    before = content(repo)
    replace, well = os.replace, iter([True])

    def fails(source: str, target: str, **kw: Any) -> None:
        if target == "manifest.json" and not next(well, False):
            raise OSError(errno.EIO, "the disk is ill")
        replace(source, target, **kw)

    monkeypatch.setattr(os, "replace", fails)
    with pytest.raises(RepositoryError):
        store(repo, "2")
    assert (repo.root / JOURNAL).exists()
    monkeypatch.undo()
    assert repo.versions("echo1") == ["1"]
    repo.sweep()
    assert content(repo) == before


def test_who_waited_for_a_writer_that_was_killed_is_not_undone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It looked for a killed one's journal before that one died."""
    repo = repository(tmp_path)
    lock, deaths = fcntl.flock, iter([partial(half_stored, repo)])

    def flock(fd: int, how: int) -> None:
        if death := next(deaths, None):
            death()
        lock(fd, how)

    monkeypatch.setattr(fcntl, "flock", flock)
    save_echo(repo, "echo1", SPEC, settings={"delay_ms": 1}, version="3")
    assert repo.names() == ["echo1", "echo2"]
    assert repo.versions("echo1") == ["3", "1"]


@pytest.mark.parametrize("finder", ["names", "manifest", "sweep", "save", "save_all"])
def test_whoever_comes_next_puts_it_right(
    tmp_path: Path, finder: str, caplog: pytest.LogCaptureFixture
) -> None:
    repo = repository(tmp_path)
    before = content(repo)
    half_stored(repo)
    caplog.clear()
    match finder:
        case "names":
            assert repo.names() == ["echo1", "echo2"]
        case "manifest":
            assert repo.manifest("echo1").version == "1"
        case "sweep":
            repo.sweep()
        case "save":
            save_echo(repo, "echo1", SPEC, settings={"delay_ms": 1}, version="3")
            assert repo.versions("echo1") == ["3", "1"] and not is_new(repo, "echo1@1")
            assert not (repo.root / "echo1" / "manifest@2.json").exists()
        case "save_all":
            store(repo, "2")
            assert all(is_new(repo, n) for n in NAMES) and repo.versions("echo2") == ["2", "1"]
    assert [r.message for r in caplog.records] == [
        "whoever stored echo1, echo2, fresh was killed: they are what they were"
    ]
    if not finder.startswith("save"):
        repo.sweep()
        assert content(repo) == before


def test_a_writer_that_lives_is_left_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    repo = repository(tmp_path)
    put, entered, go_on = Pending.put, threading.Event(), threading.Event()

    def slow(pending: Pending) -> None:
        put(pending)
        entered.set()
        assert go_on.wait(30)

    monkeypatch.setattr(Pending, "put", slow)
    writer = threading.Thread(target=store, args=(repo, "2"))
    writer.start()
    try:
        assert entered.wait(30)
        assert repo.manifest("echo1").version == "2"  # read in its middle, and not undone
        repo.sweep()
    finally:
        go_on.set()
        writer.join()
    assert all(is_new(repo, n) for n in NAMES) and not (tmp_path / JOURNAL).exists()


@pytest.mark.parametrize(
    "said",
    [
        b"",
        b"{",
        b"[]",
        b'{"echo1": 1}',
        b'{"../x": [".manifest.1", true]}',
        b'{"echo1": ["manifest.json", true]}',
        b'{"gone": [".manifest.1", false]}',
        b"\xff" * 100,
        b'{"echo1": [7, true]}',
        b"[" * 100_000,
    ],
)
def test_a_journal_that_says_nothing_of_use(tmp_path: Path, said: bytes) -> None:
    repo = repository(tmp_path)
    before = content(repo)
    (tmp_path / JOURNAL).write_bytes(said)
    assert repo.names() == ["echo1", "echo2"]
    assert content(repo) == before


def test_no_way_out_by_the_journal(tmp_path: Path) -> None:
    repo = repository(tmp_path / "blocks")
    outside = tmp_path / "outside"
    outside.write_bytes(b'{"echo1": [".manifest.1", false]}')
    (repo.root / JOURNAL).symlink_to(outside)
    assert repo.manifest("echo1").version == "1" and outside.exists()
    with pytest.raises(RepositoryError) as e:
        store(repo, "2")
    assert e.value.code == "REPOSITORY_UNUSABLE"
    assert repo.versions("echo1") == ["1"] and repo.names() == ["echo1", "echo2"]


@pytest.mark.parametrize("names", [["fresh"], NAMES])
def test_what_is_stored_outlives_a_power_cut(tmp_path: Path, names: Sequence[str]) -> None:
    """The root is synced at last: a journal that came back would have the blocks undone."""
    made = repository(tmp_path / "others").manifest("echo1")
    done: list[str] = []

    def noted(what: Any, *_real: Any, _what: str, _do: Callable[..., Any], **at: Any) -> Any:
        where = os.readlink(f"/proc/self/fd/{what}") if _what == "fsync" else what
        done.append(f"{_what} {os.path.basename(where)}")
        return _do(what, *_real, **at)

    with pytest.MonkeyPatch.context() as patch:
        for name in ("fsync", "replace", "unlink"):
            patch.setattr(os, name, partial(noted, _what=name, _do=getattr(os, name)))
        blocks = [(made.model_copy(update={"name": n}), b"new") for n in names]
        BlockRepository(tmp_path / "blocks").save_all(blocks)
    put = [
        i for i, d in enumerate(done) if d.startswith(("replace .manifest", f"unlink {JOURNAL}"))
    ]
    assert len(put) == len(names) + (len(names) > 1)
    assert "fsync blocks" in done[put[-1] :]
