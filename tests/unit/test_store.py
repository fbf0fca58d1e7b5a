"""The durable state: two generations, a checksum, a lock; never silently empty."""

from __future__ import annotations

import errno
import json
import os
import shutil
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from refusals_rig import no_room
from store_rig import PAST, TOPOLOGY, code_of, commit, filled

from blockflow.control.discarded import KEPT
from blockflow.control.documents import seal
from blockflow.control.pending import PENDING
from blockflow.control.store import CURRENT, LOCK, PREVIOUS, StateStore
from blockflow.control.stored import FORMAT, StoredState
from blockflow.core.errors import SystemError_


def test_a_new_folder_is_empty_and_private(tmp_path: Path) -> None:
    root = tmp_path / "deep" / "state"
    with StateStore(root) as store:
        assert store.state == StoredState()
    assert root.stat().st_mode & 0o077 == 0


def test_what_is_committed_comes_back(tmp_path: Path) -> None:
    filled(tmp_path)
    with StateStore(tmp_path) as store:
        assert store.state.epoch == 2
        assert store.state.posted == {"posted": 2}
        assert store.state.topology == TOPOLOGY | {"epoch": 2}
        assert store.warning == ""
    assert sorted(os.listdir(tmp_path)) == sorted([CURRENT, PREVIOUS, LOCK])


def test_one_at_a_time(tmp_path: Path) -> None:
    with StateStore(tmp_path):
        assert code_of(tmp_path) == "ALREADY_RUNNING"
    StateStore(tmp_path).close()


def test_on_a_read_only_disk_what_is_stored_can_be_read_and_is_locked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    filled(tmp_path)
    real = os.open

    def read_only(path: Any, flags: int, *more: Any, **named: Any) -> int:
        if flags & (os.O_WRONLY | os.O_RDWR | os.O_CREAT):
            raise OSError(errno.EROFS, "Read-only file system")
        return real(path, flags, *more, **named)

    monkeypatch.setattr("os.open", read_only)
    with StateStore(tmp_path) as store:
        assert (store.state.epoch, store.warning) == (2, "")
        assert code_of(tmp_path) == "ALREADY_RUNNING"
        with pytest.raises(SystemError_) as refused:
            store.take_incarnation()
        assert refused.value.code == "STATE_UNUSABLE"
    assert code_of(tmp_path / "new") == "STATE_UNUSABLE"
    monkeypatch.undo()
    with StateStore(tmp_path) as store:
        commit(store, 3)


def test_whose_lock_was_removed_gives_way_to_who_has_it_now(tmp_path: Path) -> None:
    with StateStore(tmp_path) as first:
        commit(first, 1)
        (tmp_path / LOCK).unlink()
        with StateStore(tmp_path) as second:
            commit(second, 2)
            for _ in range(2):
                with pytest.raises(SystemError_) as refused:
                    commit(first, 3)
                assert refused.value.code == "ALREADY_RUNNING"
            commit(second, 4)
        commit(first, 5)
        assert code_of(tmp_path) == "ALREADY_RUNNING"
    with StateStore(tmp_path) as last:
        assert last.state.epoch == 5


def test_a_folder_that_was_removed_is_made_again_with_the_next_epoch(tmp_path: Path) -> None:
    folder = tmp_path / "state"
    with StateStore(folder) as store:
        commit(store, 1)
        shutil.rmtree(folder)
        commit(store, 2)
        assert code_of(folder) == "ALREADY_RUNNING"
    assert sorted(os.listdir(folder)) == sorted([CURRENT, PREVIOUS, LOCK])
    (folder / CURRENT).unlink()
    with StateStore(folder) as store:
        assert store.state.epoch == 1 and CURRENT in store.warning


def test_the_lock_outlives_no_process(tmp_path: Path) -> None:
    store = StateStore(tmp_path)
    store.close()
    store.close()
    StateStore(tmp_path).close()


def test_torn_at_every_byte_falls_back_to_the_previous(tmp_path: Path) -> None:
    filled(tmp_path)
    whole = (tmp_path / CURRENT).read_bytes()
    for length in range(len(whole) - 1):  # without the final newline it is whole
        (tmp_path / CURRENT).write_bytes(whole[:length])
        with StateStore(tmp_path) as store:
            assert store.state.epoch == 1, length
            assert "previous generation" in store.warning


def test_every_flipped_byte_is_noticed(tmp_path: Path) -> None:
    filled(tmp_path)
    whole = (tmp_path / CURRENT).read_bytes()
    document = json.loads(whole)
    for i in range(len(whole)):
        broken = bytearray(whole)
        broken[i] ^= 1
        (tmp_path / CURRENT).write_bytes(broken)
        with StateStore(tmp_path) as store:
            # white space is the only thing that may differ
            assert store.state.epoch == 1 or json.loads(broken) == document, i


@pytest.mark.parametrize("wreck", ["missing", "empty", "other", "folder", "link"])
def test_both_generations_bad(tmp_path: Path, wreck: str) -> None:
    filled(tmp_path)
    for name in (CURRENT, PREVIOUS):
        path = tmp_path / name
        path.unlink()
        if wreck == "empty":
            path.write_bytes(b"")
        elif wreck == "other":
            path.write_text('{"format": 1, "sha256": "0", "body": {}}')
        elif wreck == "folder":
            path.mkdir()
        elif wreck == "link":
            path.symlink_to("/etc/passwd")
    with pytest.raises(SystemError_) as e:
        StateStore(tmp_path)
    assert e.value.code == "STATE_CORRUPT"
    assert "--fresh" in e.value.hint


def test_the_state_of_a_later_release_is_not_taken_for_broken(tmp_path: Path) -> None:
    """It has served since, and its first save left the former generation as it was."""
    filled(tmp_path)
    (tmp_path / CURRENT).write_bytes(seal({"epoch": 2, "more": 1}, FORMAT + 1))
    files = {p.name: p.read_bytes() for p in tmp_path.iterdir()}
    with pytest.raises(SystemError_) as e:
        StateStore(tmp_path)
    assert e.value.code == "STATE_CORRUPT"
    assert f"format {FORMAT + 1}, this release reads 1 and {FORMAT}" in e.value.message
    assert "start the release that wrote it" in e.value.hint
    assert {p.name: p.read_bytes() for p in tmp_path.iterdir()} == files


def test_a_broken_current_does_not_push_out_the_good_previous(tmp_path: Path) -> None:
    filled(tmp_path)
    (tmp_path / CURRENT).write_bytes(b"torn")
    with StateStore(tmp_path) as store:
        assert "cannot be used (not valid JSON (torn or altered));" in store.warning
        store.commit(5, {}, TOPOLOGY)
    assert json.loads((tmp_path / PREVIOUS).read_bytes())["body"]["epoch"] == 1
    with StateStore(tmp_path) as store:
        assert store.state.epoch == 5
        store.commit(6, {}, TOPOLOGY)
        (tmp_path / PREVIOUS).rename(tmp_path / CURRENT)  # a good one, and not this one's
        store.commit(7, {}, TOPOLOGY)
    assert json.loads((tmp_path / PREVIOUS).read_bytes())["body"]["epoch"] == 6


def test_fresh_keeps_a_copy_and_the_numbers(tmp_path: Path) -> None:
    filled(tmp_path)
    with StateStore(tmp_path) as store:
        last = store.take_incarnation()
    with StateStore.open_fresh(tmp_path) as store:
        assert store.state.epoch == 0
        assert store.take_incarnation() > last
    assert (tmp_path / f"discarded-1-{CURRENT}").exists()
    with StateStore(tmp_path) as store:
        assert store.state.epoch == 0


def test_fresh_twice_keeps_both_and_nothing_of_an_empty_state(tmp_path: Path) -> None:
    def kept() -> list[int]:
        return sorted(int(p.name.split("-")[1]) for p in tmp_path.glob(f"discarded-*-{CURRENT}"))

    filled(tmp_path)
    stored = (tmp_path / CURRENT).read_bytes()
    for _ in range(3):
        StateStore.open_fresh(tmp_path).close()
    assert kept() == [1] and (tmp_path / f"discarded-1-{CURRENT}").read_bytes() == stored
    for _ in range(KEPT + 3):
        with StateStore(tmp_path) as store:
            store.commit(1, {}, TOPOLOGY)
        StateStore.open_fresh(tmp_path).close()
    assert kept() == list(range(5, KEPT + 5)), "the oldest go"
    for _ in range(3):
        StateStore.open_fresh(tmp_path).close()
    assert kept() == list(range(5, KEPT + 5)), "none goes where none is added"


def test_fresh_takes_an_unreadable_state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    filled(tmp_path)
    for name in (CURRENT, PREVIOUS):
        (tmp_path / name).write_bytes(b"x")
    monkeypatch.setattr("blockflow.control.store.write_file", no_room)
    with pytest.raises(SystemError_, match="NO_SPACE"):
        StateStore.open_fresh(tmp_path)  # and gives the folder free
    monkeypatch.undo()
    for file in tmp_path.glob("discarded-1-*"):
        file.rename(tmp_path / file.name.removeprefix("discarded-1-"))
    (tmp_path / PENDING).write_text("3")
    with StateStore.open_fresh(tmp_path) as store:
        assert store.state.epoch == 0 and not (tmp_path / PENDING).exists()
    assert (tmp_path / f"discarded-1-{CURRENT}").read_bytes() == b"x"


def test_numbers_never_repeat(tmp_path: Path) -> None:
    seen: list[int] = []
    for _ in range(3):
        with StateStore(tmp_path) as store:
            seen += [store.take_incarnation() for _ in range(3)]
            assert store.take_stage() > 0
    assert len(set(seen)) == len(seen)
    assert seen == sorted(seen)


def test_a_crash_between_the_two_renames_loses_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    filled(tmp_path)
    real = os.replace
    for allowed in range(2):
        calls = 0

        def replace(a: str, b: str, allowed: int = allowed) -> None:
            nonlocal calls
            calls += 1
            if calls > allowed:
                raise OSError(errno.EIO, "crash here")
            real(a, b)

        with StateStore(tmp_path) as store:
            before = store.state.epoch
            monkeypatch.setattr(os, "replace", replace)
            with pytest.raises(SystemError_):
                store.commit(99, {}, TOPOLOGY)
            monkeypatch.setattr(os, "replace", real)
            assert store.state.epoch == before
        with StateStore(tmp_path) as store:
            assert store.state.epoch == before


def unlinked(*_: object, **__: object) -> None:
    raise PermissionError(errno.EPERM, "Operation not permitted")


def test_a_file_system_without_links_keeps_the_former_generation_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """FAT, and folders that a virtual machine's host shares with it."""
    synced: list[int] = []
    monkeypatch.setattr(os, "link", unlinked)
    monkeypatch.setattr(os, "fsync", synced.append)
    filled(tmp_path)
    assert len(synced) == 6, "both files of the second, the folder each time, and the lock"
    (tmp_path / CURRENT).write_bytes(b"torn")
    with StateStore(tmp_path) as store:
        assert store.state.epoch == 1 and "previous generation" in store.warning


def test_a_full_disk_is_typed_and_changes_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    filled(tmp_path)

    with StateStore(tmp_path) as store:
        monkeypatch.setattr(os, "write", no_room)
        with pytest.raises(SystemError_) as e:
            store.commit(3, {}, TOPOLOGY)
        monkeypatch.undo()
        assert e.value.code == "NO_SPACE" and e.value.info.http == 507
        assert store.state.epoch == 2
    assert sorted(os.listdir(tmp_path)) == sorted([CURRENT, PREVIOUS, LOCK])


def test_a_folder_that_cannot_be_made(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    assert code_of(tmp_path / "file" / "state") == "STATE_UNUSABLE"


def test_a_lock_that_is_a_link(tmp_path: Path) -> None:
    (tmp_path / LOCK).symlink_to("/etc/passwd")
    assert code_of(tmp_path) == "STATE_UNUSABLE"


@pytest.mark.parametrize(
    "change",
    [
        {"epoch": -1},
        {"epoch": True},
        {"epoch": 0},
        {"next_stage": 0},
        {"next_epoch": 1},
        {"topology": []},
        {"topology": None},
        {"more": 1},
        {"history": {}},
        {"history": None},
        {"history": []},
        {"history": [1]},
        {"history": [PAST | {"epoch": 2}]},
        {"history": [PAST, PAST]},
        {"history": [PAST | {"posted": None}]},
        {"history": [PAST | {"more": 1}]},
    ],
)
def test_fields_are_checked(change: dict[str, object]) -> None:
    good = {
        "epoch": 1,
        "posted": {},
        "topology": TOPOLOGY,
        "next_incarnation": 1,
        "next_stage": 1,
        "next_epoch": 2,
        "history": [PAST],
    }
    StoredState.from_dict(good)
    with pytest.raises(ValueError):
        StoredState.from_dict(good | change)


def test_torn_at_every_byte_without_a_previous_generation_is_refused(tmp_path: Path) -> None:
    filled(tmp_path, epochs=1)
    whole = (tmp_path / CURRENT).read_bytes()
    assert not (tmp_path / PREVIOUS).exists()
    for length in range(0, len(whole) - 1, 3):
        (tmp_path / CURRENT).write_bytes(whole[:length])
        assert code_of(tmp_path) == "STATE_CORRUPT", length
    assert (tmp_path / CURRENT).read_bytes() == whole[:length]  # nothing was overwritten


@pytest.mark.parametrize("links", [True, False])
def test_killed_at_any_step_of_a_save(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, links: bool
) -> None:
    steps = ("open", "write", "fsync", "link", "unlink", "replace")
    real = {name: getattr(os, name) for name in steps} | ({} if links else {"link": unlinked})
    seen = set()
    for allowed in range(40):
        root = tmp_path / str(allowed)
        filled(root)
        calls = 0

        def step(*args: Any, _name: str, _allowed: int = allowed, **kw: Any) -> Any:
            nonlocal calls
            calls += 1
            if calls > _allowed:
                raise KeyboardInterrupt  # nobody cleans up, as after SIGKILL
            return real[_name](*args, **kw)

        with StateStore(root) as store:
            for name in steps:
                monkeypatch.setattr(os, name, partial(step, _name=name))
            try:
                store.commit(3, {}, TOPOLOGY)
                done = True
            except KeyboardInterrupt:
                done = False
            monkeypatch.undo()
        with StateStore(root) as store:
            assert store.state.epoch in (2, 3)
            assert store.state.epoch == 3 or not done
            assert store.warning == ""
            seen.add(store.state.epoch)
            store.commit(4, {}, TOPOLOGY)
        if done:
            break
    assert done and seen == {2, 3}


def test_tasks_keep_their_order(tmp_path: Path) -> None:
    """People find them where they were, whichever control plane tells of them."""
    names = ["parity", "digit", "high"]
    body = {"blocks": [{"name": "a"}], "tasks": {name: ["a"] for name in names}}
    with StateStore(tmp_path) as store:
        store.commit(1, body, body)
    with StateStore(tmp_path) as again:
        assert again.state.topology is not None and again.state.posted is not None
        assert [*again.state.topology["tasks"]] == [*again.state.posted["tasks"]] == names
