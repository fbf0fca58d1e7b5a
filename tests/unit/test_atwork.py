"""The at-work file: what a worker executes, as others read it while it lives and after it."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from refusals_rig import no_room

from blockflow.core.errors import SystemError_
from blockflow.core.routing import merge_paths
from blockflow.tensormq.atwork import (
    HEADER_WORDS,
    MAX_RECORDS,
    NO_LANE,
    RECORD_BYTES,
    AtWork,
    AtWorkReader,
    Work,
    record,
    work_path,
)
from blockflow.tensormq.janitor import remove_leavings
from blockflow.wire.data import Item


def item(n: int, attempt: int = 1, hop: int = 0) -> Item:
    return Item(n.to_bytes(16, "big"), attempt, 1, merge_paths([[5, 6]])[0], hop, 1, 1000)


def reader(folder: Path) -> AtWorkReader:
    found = AtWorkReader.open(folder, 7)
    assert found is not None
    return found


def test_a_record_is_id_attempt_and_hop(tmp_path: Path) -> None:
    work = AtWork.create(tmp_path, 7, 4)
    look = reader(tmp_path)
    assert look.read() == []
    lane = work.begin(5, [item(1), item(2, attempt=3, hop=1)])
    (found,) = look.read()
    assert (found.stage, found.count) == (5, 2)
    assert found.started_ns > 0
    assert found.records == (bytes(15) + b"\1" + b"\1\0", bytes(15) + b"\2" + b"\3\1")
    assert {len(r) for r in found.records} == {RECORD_BYTES}
    work.end(lane)
    assert look.read() == []


def test_forwards_side_by_side_have_lanes_of_their_own(tmp_path: Path) -> None:
    work = AtWork.create(tmp_path, 7, 2, lanes=2)
    look = reader(tmp_path)
    one, two = work.begin(5, [item(1)]), work.begin(6, [item(2)])
    assert work.begin(5, [item(3)]) == NO_LANE
    before = work_path(tmp_path, 7).read_bytes()
    work.restart(NO_LANE, 5, [item(3)])
    work.renew(NO_LANE)
    work.end(NO_LANE)
    assert work_path(tmp_path, 7).read_bytes() == before
    assert [(w.stage, w.records) for w in look.read()] == [
        (5, (record(item(1)),)),
        (6, (record(item(2)),)),
    ]
    work.end(one)
    assert [w.stage for w in look.read()] == [6]
    assert work.begin(7, [item(5)]) == one  # it is free again
    work.end(one)
    work.restart(two, 6, [item(4)])
    assert [w.records for w in look.read()] == [(record(item(4)),)]


def test_a_renewed_forward_is_the_younger_one(tmp_path: Path) -> None:
    work = AtWork.create(tmp_path, 7, 2, lanes=2)
    one, two = work.begin(5, [item(1)]), work.begin(6, [item(2)])
    began = {w.stage: w.started_ns for w in reader(tmp_path).read()}
    work.renew(two)
    found = {w.stage: w.started_ns for w in reader(tmp_path).read()}
    assert found[5] == began[5] and found[6] > began[6]
    work.renew(one)
    assert [w.stage for w in reader(tmp_path).read()] == [6, 5]


def test_who_goes_on_with_others_is_at_nothing_until_these_are_named(tmp_path: Path) -> None:
    work = AtWork.create(tmp_path, 7, 2)
    lane, look = work.begin(5, [item(1)]), reader(tmp_path)
    seen: list[list[Work]] = []

    class Named(list[Item]):
        def __iter__(self) -> Iterator[Item]:
            seen.append(look.read())
            return super().__iter__()

    work.restart(lane, 6, Named([item(2)]))
    assert seen == [[]]
    assert [(w.stage, w.records) for w in look.read()] == [(6, (record(item(2)),))]


def test_of_a_large_batch_the_first_are_named_and_all_counted(tmp_path: Path) -> None:
    work = AtWork.create(tmp_path, 7, 2, lanes=2)
    one = work.begin(5, [item(8)])
    two = work.begin(6, [item(9)])
    work.restart(one, 5, [item(n) for n in range(5)])
    second, first = reader(tmp_path).read()
    assert (first.count, first.records) == (5, (record(item(0)), record(item(1))))
    assert second.records == (record(item(9)),)
    assert {one, two} == {0, 1}
    big = AtWork.create(tmp_path, 8, 100_000)
    big.begin(5, [item(0)] * 2000)
    found = AtWorkReader.open(tmp_path, 8)
    assert found is not None
    assert len(found.read()[0].records) == MAX_RECORDS


def test_it_can_be_read_when_the_file_is_gone(tmp_path: Path) -> None:
    work = AtWork.create(tmp_path, 7, 2)
    look = reader(tmp_path)
    work.begin(5, [item(1)])
    remove_leavings(tmp_path, 7)
    assert not work_path(tmp_path, 7).exists()
    assert [w.stage for w in look.read()] == [5]
    assert AtWorkReader.open(tmp_path, 7) is None


@pytest.mark.parametrize(
    "content",
    [b"", b"x" * 8, b"x" * 4096, bytes(HEADER_WORDS * 8)],
    ids=["empty", "short", "other", "zeros"],
)
def test_what_is_no_such_file_is_nothing(tmp_path: Path, content: bytes) -> None:
    work_path(tmp_path, 7).write_bytes(content)
    assert AtWorkReader.open(tmp_path, 7) is None


def test_a_file_of_another_incarnation_or_a_link_is_nothing(tmp_path: Path) -> None:
    AtWork.create(tmp_path, 7, 2)
    os.rename(work_path(tmp_path, 7), work_path(tmp_path, 8))
    assert AtWorkReader.open(tmp_path, 8) is None
    AtWork.create(tmp_path, 9, 2)
    os.symlink(work_path(tmp_path, 9), work_path(tmp_path, 10))
    assert AtWorkReader.open(tmp_path, 10) is None


@pytest.mark.parametrize("word", range(5), ids=["magic", "version", "owner", "lanes", "records"])
def test_a_header_with_another_word_is_nothing(tmp_path: Path, word: int) -> None:
    AtWork.create(tmp_path, 7, 2)
    content = bytearray(work_path(tmp_path, 7).read_bytes())
    content[8 * word] += 1
    work_path(tmp_path, 7).write_bytes(content)
    assert AtWorkReader.open(tmp_path, 7) is None


def test_without_room_nothing_is_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "posix_fallocate", no_room)
    with pytest.raises(SystemError_) as e:
        AtWork.create(tmp_path, 7, 2)
    assert e.value.code == "NO_SPACE" and not work_path(tmp_path, 7).exists()


def test_it_is_made_once(tmp_path: Path) -> None:
    AtWork.create(tmp_path, 7, 2)
    with pytest.raises(SystemError_) as e:
        AtWork.create(tmp_path, 7, 2)
    assert e.value.where == str(work_path(tmp_path, 7))
