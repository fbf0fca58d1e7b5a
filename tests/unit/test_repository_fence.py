"""The bytes that were checked are the bytes that are read, whatever happens to the folder."""

from __future__ import annotations

import errno
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from blockflow.core.errors import RepositoryError
from blockflow.core.model import TensorSpec
from blockflow.core.scarcity import is_away
from blockflow.repository.echo import save_echo
from blockflow.repository.repository import BlockRepository

SPEC = TensorSpec("float32", ("rows", 4))
GOOD = {"delay_ms": 1}
EVIL = b"{}          "


@pytest.fixture
def repo(tmp_path: Path) -> BlockRepository:
    repository = BlockRepository(tmp_path / "blocks")
    save_echo(repository, "echo1", SPEC, settings=GOOD)
    return repository


def replaced(file: Path) -> None:
    other = file.with_suffix(".other")
    other.write_bytes(EVIL)
    other.replace(file)


def linked(file: Path) -> None:
    outside = file.parents[2] / "outside"
    outside.write_bytes(EVIL)
    file.unlink()
    file.symlink_to(outside)


def removed(file: Path) -> None:
    file.unlink()


def moved_away(file: Path) -> None:
    folder = file.parent
    folder.rename(folder.with_name("moved"))
    folder.mkdir()
    file.write_bytes(EVIL)


@pytest.mark.parametrize("swap", [replaced, linked, removed, moved_away])
def test_a_swap_after_the_check_changes_nothing(
    repo: BlockRepository, swap: Callable[[Path], None]
) -> None:
    file = repo.root / "echo1" / repo.manifest("echo1").artifact
    with repo.artifact("echo1") as path:
        swap(file)
        assert json.loads(path.read_bytes()) == GOOD
        assert json.loads(path.read_bytes()) == GOOD  # opened a second time
    with pytest.raises(RepositoryError), repo.artifact("echo1"):
        pass  # and the next one is refused


@pytest.mark.parametrize(
    "name", ["/etc/passwd", "../echo1/x", "..", "a/b", ".hidden", "manifest.json", "", "x\0y"]
)
def test_a_manifest_that_points_elsewhere_is_refused(repo: BlockRepository, name: str) -> None:
    file = repo.root / "echo1" / "manifest.json"
    file.write_text(json.dumps({**json.loads(file.read_bytes()), "artifact": name}))
    with pytest.raises(RepositoryError) as e, repo.artifact("echo1"):
        pass
    assert e.value.code == "CORRUPT_MANIFEST"


def test_no_descriptor_of_a_refused_file_stays_open(repo: BlockRepository) -> None:
    linked(repo.root / "echo1" / repo.manifest("echo1").artifact)
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(5):
        with pytest.raises(RepositoryError), repo.artifact("echo1"):
            pass
    assert len(os.listdir("/proc/self/fd")) == before


@pytest.mark.parametrize("number", [errno.ESTALE, errno.EIO])
@pytest.mark.parametrize("what", ["blocks", "echo1", "manifest.json", "artifact"])
def test_what_does_not_answer_is_away_and_not_missing_or_broken(
    repo: BlockRepository, monkeypatch: pytest.MonkeyPatch, what: str, number: int
) -> None:
    """A folder of the network whose server is started again, say: it may come back."""
    opened = os.open
    name = repo.manifest("echo1").artifact if what == "artifact" else what

    def stale(path: Any, *args: Any, **more: Any) -> int:
        if Path(path).name == name:
            raise OSError(number, os.strerror(number))
        return opened(path, *args, **more)

    monkeypatch.setattr(os, "open", stale)
    with pytest.raises(RepositoryError) as e:
        repo.verify("echo1")
    assert e.value.code == "UNKNOWN_BLOCK" and is_away(e.value)
    assert os.strerror(number) in e.value.message and e.value.where.endswith(name)


@pytest.mark.parametrize("what", ["manifest@1.json", "the folder's list"])
def test_a_version_before_that_does_not_answer_is_away_and_not_replaced(
    repo: BlockRepository, monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    """A worker of it, whose successor is to be launched just then, would be given up for good."""
    opened, pinned = os.open, repo.manifest("echo1").sha256
    save_echo(repo, "echo1", TensorSpec("float32", ("rows", 7)), version="2")
    assert repo.manifest("echo1", digest=pinned).version == "1"

    def fails(path: Any, *args: Any, **more: Any) -> Any:
        if path == what or not args:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return opened(path, *args, **more)

    monkeypatch.setattr(os, "open" if what.startswith("manifest") else "listdir", fails)
    with pytest.raises(RepositoryError) as e:
        repo.manifest("echo1", digest=pinned)
    assert is_away(e.value) and "echo1" in e.value.where


def test_an_artifact_that_cannot_be_read_to_its_end_is_away(
    repo: BlockRepository, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(*_: object) -> str:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr("hashlib.file_digest", fails)
    with pytest.raises(RepositoryError) as e:
        repo.verify("echo1")
    assert is_away(e.value) and "echo1" in e.value.where
