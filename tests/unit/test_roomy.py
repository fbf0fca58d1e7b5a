"""A file that is replaced as a whole, in room that was set aside for it."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
from refusals_rig import no_room

from blockflow.control.roomy import GRANULE, RoomyFile

MOST = 16 * GRANULE


@pytest.fixture
def file(tmp_path: Path) -> RoomyFile:
    return RoomyFile(tmp_path / "book")


def full(monkeypatch: pytest.MonkeyPatch) -> None:
    """No further room is given from now on."""

    monkeypatch.setattr(os, "posix_fallocate", no_room)


def test_what_fits_its_room_asks_for_none(
    file: RoomyFile, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file.write(b"x")
    full(monkeypatch)
    for n in range(1, 50):
        data = b"%d" % n * (GRANULE // 3 - n)
        file.write(data)
        assert file.read(MOST) == data
    assert sorted(p.name for p in tmp_path.iterdir()) == [".book.new", "book"]


def test_both_have_the_room_that_one_has_got(
    file: RoomyFile, monkeypatch: pytest.MonkeyPatch
) -> None:
    file.write(b"x")
    file.write(b"y" * 3 * GRANULE)
    full(monkeypatch)
    for data in (b"z" * 4 * GRANULE, b"s", b"t" * 4 * GRANULE):
        file.write(data)
        assert file.read(MOST) == data


def test_what_does_not_fit_leaves_nothing_but_the_room(
    file: RoomyFile, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file.write(b"x")
    with monkeypatch.context() as patch:
        full(patch)
        for _ in range(3):
            with pytest.raises(OSError, match="No space"):
                file.write(b"y" * 2 * GRANULE)
            assert file.given_up
            with pytest.raises(FileNotFoundError):
                file.read(MOST)
        file.write(b"small again")
        assert file.read(MOST) == b"small again" and not file.given_up
        file.write(b"and in the other one")
    file.write(b"y" * 2 * GRANULE)
    assert file.read(MOST) == b"y" * 2 * GRANULE
    assert sorted(p.name for p in tmp_path.iterdir()) == [".book.new", "book"]


def test_who_dies_in_an_exchange_leaves_one_of_both(
    file: RoomyFile, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    replace = os.replace
    for steps in range(4):
        file.write(b"before")
        left = [None] * steps

        def step(*names: Any, left: list[None] = left) -> None:
            if not left:
                raise KeyboardInterrupt
            left.pop()
            replace(*names)

        with monkeypatch.context() as patch:
            patch.setattr(os, "replace", step)
            with pytest.raises(KeyboardInterrupt):
                file.write(b"after")
        assert file.read(MOST) == (b"before" if steps < 2 else b"after")
        successor = RoomyFile(tmp_path / "book")
        successor.write(b"next")
        assert successor.read(MOST) == b"next"


def test_what_is_too_large_is_not_read(file: RoomyFile) -> None:
    file.write(b"x" * 2 * GRANULE)
    with pytest.raises(ValueError, match="too large"):
        file.read(GRANULE)


@pytest.mark.parametrize("content", [b"", b" " * GRANULE, b"x" * (GRANULE - 1)])
def test_what_is_torn_is_not_read(content: bytes, file: RoomyFile, tmp_path: Path) -> None:
    (tmp_path / "book").write_bytes(content)
    with pytest.raises(ValueError, match="torn"):
        file.read(MOST)


def test_nor_is_what_is_no_file(file: RoomyFile, tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "book")
    with pytest.raises(ValueError, match="no regular file"):
        file.read(MOST)


def test_a_spare_file_of_any_length_is_made_whole(file: RoomyFile, tmp_path: Path) -> None:
    (tmp_path / ".book.new").write_bytes(b"y" * (GRANULE + 5))
    file.write(b"x")
    assert file.read(MOST) == b"x"
