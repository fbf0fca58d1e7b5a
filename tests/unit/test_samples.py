"""Stored KPI samples: a file is the former one or whole, and what prevents that has its code."""

from __future__ import annotations

import errno
import os
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from blockflow.control.samples import Former, store_samples
from blockflow.core.errors import RequestError, SystemError_


def test_a_file_is_private_and_whole(tmp_path: Path) -> None:
    path = store_samples(tmp_path / "kpis", "run1.jsonl", ["{}", "[]"])
    assert path == tmp_path / "kpis" / "run1.jsonl"
    assert path.read_text() == "{}\n[]\n"
    assert path.stat().st_mode & 0o777 == 0o600
    assert store_samples(tmp_path / "kpis", "run2.jsonl", []).read_text() == ""


def test_an_earlier_file_is_replaced_only_where_that_is_asked_for(tmp_path: Path) -> None:
    path = store_samples(tmp_path, "run1.jsonl", ["old"])
    with pytest.raises(RequestError, match="FILE_EXISTS") as e:
        store_samples(tmp_path, "run1.jsonl", ["new"])
    assert path.read_text() == "old\n" and "force" in e.value.hint
    store_samples(tmp_path, "run1.jsonl", ["new"], Former.REPLACED)
    assert path.read_text() == "new\n"
    (tmp_path / "run2.jsonl").symlink_to(tmp_path / "nowhere")
    with pytest.raises(RequestError, match="FILE_EXISTS"):
        store_samples(tmp_path, "run2.jsonl", ["new"])
    assert sorted(p.name for p in tmp_path.iterdir()) == ["run1.jsonl", "run2.jsonl"]


def test_a_full_disk_leaves_the_former_file_and_nothing_else(tmp_path: Path) -> None:
    def lines() -> Iterator[str]:
        yield "new"
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    store_samples(tmp_path, "run1.jsonl", ["old"])
    with pytest.raises(SystemError_, match="NO_SPACE"):
        store_samples(tmp_path, "run1.jsonl", lines(), Former.REPLACED)
    assert [p.name for p in tmp_path.iterdir()] == ["run1.jsonl"]
    assert (tmp_path / "run1.jsonl").read_text() == "old\n"


def test_what_is_no_file_is_not_called_a_full_disk(tmp_path: Path) -> None:
    (tmp_path / "run1.jsonl").mkdir()
    with pytest.raises(SystemError_, match="STATE_UNUSABLE: the figures cannot be written: Is a"):
        store_samples(tmp_path, "run1.jsonl", ["new"], Former.REPLACED)
    assert [p.name for p in tmp_path.iterdir()] == ["run1.jsonl"]


def test_a_link_is_replaced_and_not_followed(tmp_path: Path) -> None:
    other = tmp_path / "other"
    other.write_text("kept")
    (tmp_path / "run1.jsonl").symlink_to(other)
    store_samples(tmp_path, "run1.jsonl", ["new"], Former.REPLACED)
    assert other.read_text() == "kept"
    assert not (tmp_path / "run1.jsonl").is_symlink()


def test_what_killed_writers_have_left_goes_and_no_other_file(tmp_path: Path) -> None:
    for name in (".abcd.new", ".efgh.new", "run.new"):
        (tmp_path / name).write_text("half")

    later = threading.Thread(target=store_samples, args=(tmp_path, "run2.jsonl", ["2"]))

    def lines() -> Iterator[str]:
        later.start()  # it waits until this file is whole
        yield "1"

    store_samples(tmp_path, "run1.jsonl", lines())
    later.join()
    assert sorted(p.name for p in tmp_path.iterdir()) == ["run.new", "run1.jsonl", "run2.jsonl"]


@pytest.mark.parametrize(
    "name", ["", "../x.jsonl", ".x.jsonl", "x", "x.jsonl\n", "a/x.jsonl", "\u00e4.jsonl"]
)
def test_names_that_are_none(tmp_path: Path, name: str) -> None:
    with pytest.raises(RequestError, match="INVALID_REQUEST"):
        store_samples(tmp_path / "kpis", name, [])
    assert not (tmp_path / "kpis").exists()
