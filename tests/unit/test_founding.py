"""A block that several store for the first time at once, of whom one fails."""

from __future__ import annotations

import fcntl
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

from blockflow.core.errors import RepositoryError
from blockflow.repository.founding import founded


@contextmanager
def opened(path: Path, found: threading.Event) -> Iterator[int]:
    folder = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        found.set()
        fcntl.flock(folder, fcntl.LOCK_EX)
        yield folder
    finally:
        os.close(folder)


def test_who_fails_takes_nobodys_folder_away(tmp_path: Path) -> None:
    path, waits = tmp_path / "blocks" / "b", threading.Event()

    def store() -> None:
        with founded(path, lambda _: opened(path, waits)) as folder:
            os.close(os.open("manifest.json", os.O_CREAT | os.O_WRONLY, dir_fd=folder))

    second = threading.Thread(target=store)
    with suppress(ValueError), founded(path, lambda _: opened(path, threading.Event())):
        second.start()
        assert waits.wait(10)
        raise ValueError
    second.join(10)
    assert (path / "manifest.json").exists()


def test_a_folder_that_goes_before_it_is_opened_is_made_again(tmp_path: Path) -> None:
    path, tries = tmp_path / "b", iter((True, False))

    @contextmanager
    def locked(name: str) -> Iterator[int]:
        if next(tries):
            (tmp_path / name).rmdir()  # another one, which had made it, has failed
            raise RepositoryError("UNKNOWN_BLOCK", f"no block {name!r}")
        with opened(path, threading.Event()) as folder:
            yield folder

    with founded(path, locked):
        assert path.is_dir()


def test_what_is_no_folder_is_told(tmp_path: Path) -> None:
    (tmp_path / "b").write_text("a file")
    with (
        pytest.raises(RepositoryError, match="REPOSITORY_UNUSABLE"),
        founded(tmp_path / "b", lambda _: opened(tmp_path, threading.Event())),
    ):
        raise AssertionError
