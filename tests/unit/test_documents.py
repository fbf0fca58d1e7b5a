"""Documents on disk: what is taken for one, how one is written, and who may."""

from __future__ import annotations

import errno
import json
import os
import stat
import threading
import tracemalloc
from pathlib import Path
from typing import Any

import pytest

from blockflow.control import documents
from blockflow.control.documents import read_sealed, seal, take_lock, write_file
from blockflow.core.errors import SystemError_

BODY = {"b": [1, None], "a": "x"}


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "state.json"
    path.write_bytes(seal(BODY, 2))
    return path


def wrong(path: Path, most: int = 10_000) -> str:
    with pytest.raises(ValueError) as e:
        read_sealed(path, most, (1, 2))
    return str(e.value)


def test_what_was_sealed_comes_back_if_it_is_no_larger_than_that(file: Path) -> None:
    size = file.stat().st_size
    assert read_sealed(file, size, (1, 2)) == (2, BODY)
    assert wrong(file, size - 1) == "too large"


def test_a_file_takes_no_more_memory_than_it_has(file: Path) -> None:
    """However large it may be: it is read at each save."""
    tracemalloc.start()
    try:
        read_sealed(file, 1 << 24, (1, 2))
        assert tracemalloc.get_traced_memory()[1] < 1 << 20
    finally:
        tracemalloc.stop()


def test_only_what_is_small_is_laid_out(file: Path) -> None:
    """Python's encoder takes many times as long for that, and the Manager's thread waits."""
    assert b'\n  "a": "x"' in file.read_bytes()
    large = {**BODY, "c": ["x"] * 20_000}
    file.write_bytes(seal(large, 2))
    assert file.read_bytes().count(b"\n") == 1
    assert read_sealed(file, 1_000_000, (2,)) == (2, large)


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"format": 3}, "format 3, this release reads 1 and 2"),
        ({"format": True}, "format True"),
        ({"format": 2.0}, "format 2.0"),
        ({"format": [2]}, "format [2]"),
        ({"sha256": "0" * 64}, "the checksum does not fit"),
        ({"body": {**BODY, "a": "y"}}, "the checksum does not fit"),
        ({"body": [BODY]}, "not a state document"),
        ({"more": 1}, "not a state document"),
    ],
)
def test_what_was_altered(file: Path, change: dict[str, Any], why: str) -> None:
    file.write_text(json.dumps(json.loads(file.read_bytes()) | change))
    assert why in wrong(file)


@pytest.mark.parametrize(
    ("raw", "why"),
    [
        (b"", "not valid JSON"),
        (b"\xff", "not valid JSON"),
        (b"[" * 9_999, "not valid JSON"),
        (b"[1]", "not a state document"),
        (b'{"format": 2, "body": {}}', "not a state document"),
    ],
)
def test_what_is_no_document(file: Path, raw: bytes, why: str) -> None:
    file.write_bytes(raw)
    assert why in wrong(file)


def test_what_is_no_file_of_its_own_is_not_waited_for(file: Path, tmp_path: Path) -> None:
    pipe, link = tmp_path / "pipe", tmp_path / "link"
    os.mkfifo(pipe)
    link.symlink_to(file)
    with pytest.raises(OSError) as e:
        read_sealed(link, 10_000, (2,))
    assert e.value.errno == errno.ELOOP
    found: list[str] = []
    thread = threading.Thread(target=lambda: found.append(wrong(pipe)), daemon=True)
    thread.start()
    thread.join(10)
    if not found:  # it waits for a writer
        os.close(os.open(pipe, os.O_RDWR | os.O_NONBLOCK))
    assert found == ["not a regular file"]


def test_a_file_is_written_whole_and_for_its_owner_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, write, synced = tmp_path / "f", os.write, list[int]()
    path.write_bytes(b"x" * 100)
    monkeypatch.setattr(documents.os, "write", lambda fd, data: write(fd, data[:3]))
    monkeypatch.setattr(documents.os, "fsync", synced.append)
    before = os.umask(0)
    try:
        for name, sync in (("f", False), ("g", True)):
            write_file(tmp_path / name, b"0123456789", sync=sync)
            assert (tmp_path / name).read_bytes() == b"0123456789"
            assert len(synced) == sync
    finally:
        os.umask(before)
    assert stat.S_IMODE((tmp_path / "g").stat().st_mode) == 0o600
    (tmp_path / "link").symlink_to(path)
    with pytest.raises(OSError):
        write_file(tmp_path / "link", b"", sync=False)


def test_one_at_a_time_has_the_lock(tmp_path: Path) -> None:
    path = tmp_path / "lock"
    held = take_lock(path)
    before = len(os.listdir("/proc/self/fd"))
    with pytest.raises(SystemError_) as e:
        take_lock(path)
    assert (e.value.code, e.value.where) == ("ALREADY_RUNNING", str(tmp_path))
    assert len(os.listdir("/proc/self/fd")) == before
    assert stat.S_IMODE(path.stat().st_mode) & 0o077 == 0
    os.close(held)
    os.close(take_lock(path))


def test_a_disk_that_takes_nothing_more_still_has_its_lock(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What runs can be taken over; any other refusal is one."""
    path, real = tmp_path / "lock", os.open
    path.touch()

    def opened(number: int) -> Any:
        def open_(path: Path, flags: int, mode: int = 0o777) -> int:
            if flags & os.O_RDWR:
                raise OSError(number, os.strerror(number))
            return real(path, flags, mode)

        return open_

    monkeypatch.setattr(documents.os, "open", opened(errno.EROFS))
    os.close(take_lock(path))
    monkeypatch.setattr(documents.os, "open", opened(errno.EACCES))
    with pytest.raises(PermissionError):
        take_lock(path)
