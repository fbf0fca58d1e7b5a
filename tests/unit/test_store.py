"""The durable state: two generations, a checksum, a lock; never silently empty."""

from __future__ import annotations

import errno
import hashlib
import json
import os
import shutil
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from blockflow.control.store import CURRENT, LOCK, PENDING, PREVIOUS, StateStore
from blockflow.control.stored import HISTORY, HISTORY_BYTES, PastEpoch, StoredState
from blockflow.core.errors import SystemError_

TOPOLOGY = {"blocks": [{"name": "a"}], "tasks": {"t": ["a"]}}
PAST = {"epoch": 1, "how": "system-update", "when": "", "posted": {}, "digests": {}}


def commit(store: StateStore, epoch: int) -> None:
    store.commit(epoch, {"posted": epoch}, TOPOLOGY | {"epoch": epoch})


def filled(root: Path, epochs: int = 2) -> None:
    with StateStore(root) as store:
        for epoch in range(1, epochs + 1):
            commit(store, epoch)


def code_of(root: Path) -> str:
    with pytest.raises(SystemError_) as e:
        StateStore(root)
    return e.value.code


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


def test_a_broken_current_does_not_push_out_the_good_previous(tmp_path: Path) -> None:
    filled(tmp_path)
    (tmp_path / CURRENT).write_bytes(b"torn")
    with StateStore(tmp_path) as store:
        store.commit(5, {}, TOPOLOGY)
    assert json.loads((tmp_path / PREVIOUS).read_bytes())["body"]["epoch"] == 1
    with StateStore(tmp_path) as store:
        assert store.state.epoch == 5


def test_fresh_keeps_a_copy_and_the_numbers(tmp_path: Path) -> None:
    filled(tmp_path)
    with StateStore(tmp_path) as store:
        last = store.take_incarnation()
    with StateStore.open_fresh(tmp_path) as store:
        assert store.state.epoch == 0
        assert store.take_incarnation() > last
    assert (tmp_path / f"discarded-{CURRENT}").exists()
    with StateStore(tmp_path) as store:
        assert store.state.epoch == 0


def test_fresh_takes_an_unreadable_state(tmp_path: Path) -> None:
    filled(tmp_path)
    for name in (CURRENT, PREVIOUS):
        (tmp_path / name).write_bytes(b"x")
    with StateStore.open_fresh(tmp_path) as store:
        assert store.state.epoch == 0
    assert (tmp_path / f"discarded-{CURRENT}").read_bytes() == b"x"


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


def test_a_full_disk_is_typed_and_changes_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    filled(tmp_path)

    def full(fd: int, data: object) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    with StateStore(tmp_path) as store:
        monkeypatch.setattr(os, "write", full)
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


# --- the history --------------------------------------------------------------------------------


def test_the_history_is_kept_and_bounded(tmp_path: Path) -> None:
    with StateStore(tmp_path) as store:
        for epoch in range(1, HISTORY + 6):
            store.commit(epoch, {"n": epoch}, TOPOLOGY, {"a": f"d{epoch}"}, "rollback")
    with StateStore(tmp_path) as store:
        history = store.state.history
        assert [p.epoch for p in history] == list(range(6, HISTORY + 6))
        assert history[-1].posted == {"n": HISTORY + 5}
        assert history[-1].how == "rollback" and history[-1].when.endswith("+00:00")
        assert store.state.digests == {"a": f"d{HISTORY + 5}"}


def test_a_history_of_large_updates_stays_small() -> None:
    state = StoredState()
    for epoch in range(1, 6):
        posted = {"text": "x" * (HISTORY_BYTES // 2)}
        state = state.committed(PastEpoch(epoch, "system-update", "", posted, {}), TOPOLOGY)
        assert state.history[-1].epoch == epoch
    assert len(state.history) == 1
    assert StoredState.from_dict(json.loads(json.dumps(state.to_dict()))) == state


@pytest.mark.parametrize(("fmt", "lacks"), [(1, ["history", "next_epoch"]), (2, ["next_epoch"])])
def test_the_state_of_an_earlier_release_is_read(
    tmp_path: Path, fmt: int, lacks: list[str]
) -> None:
    filled(tmp_path)
    for name in (CURRENT, PREVIOUS):
        document = json.loads((tmp_path / name).read_bytes())
        for field in lacks:
            del document["body"][field]
        packed = json.dumps(document["body"], sort_keys=True, separators=(",", ":")).encode()
        document |= {"format": fmt, "sha256": hashlib.sha256(packed).hexdigest()}
        (tmp_path / name).write_text(json.dumps(document))
    with StateStore(tmp_path) as store:
        assert (store.state.epoch, store.warning) == (2, "")
        past = [(2, {"posted": 2})] if fmt == 1 else [(1, {"posted": 1}), (2, {"posted": 2})]
        assert [(p.epoch, p.posted) for p in store.state.history] == past
        assert store.epoch_after(2) == 3
        store.commit(3, {}, TOPOLOGY)
    with StateStore(tmp_path) as store:
        assert [p.epoch for p in store.state.history] == [e for e, _ in past] + [3]


def test_a_new_folder_of_an_earlier_release() -> None:
    old = StoredState().to_dict()
    del old["next_epoch"]
    assert StoredState.from_format_2(old) == StoredState()
    del old["history"]
    assert StoredState.from_format_1(old) == StoredState()


# --- an update that was cut short ---------------------------------------------------------------


@pytest.mark.parametrize("stored", [False, True])
def test_an_update_that_was_cut_short_is_told_once(tmp_path: Path, stored: bool) -> None:
    filled(tmp_path)
    with StateStore(tmp_path) as store:
        store.begin(3)
        if stored:
            store.commit(3, {}, TOPOLOGY)
    with StateStore(tmp_path) as store:
        epoch = 3 if stored else 2
        assert store.state.epoch == epoch
        assert "during the update to epoch 3" in store.warning
        assert f"it had {'' if stored else 'not '}been stored" in store.warning
        assert f"epoch {epoch} is in force" in store.warning
    with StateStore(tmp_path) as store:
        assert store.warning == ""
    assert sorted(os.listdir(tmp_path)) == sorted([CURRENT, PREVIOUS, LOCK])


def test_an_update_that_ended_is_not_told(tmp_path: Path) -> None:
    filled(tmp_path)
    with StateStore(tmp_path) as store:
        store.begin(3)
        store.ended()
        store.ended()
    with StateStore(tmp_path) as store:
        assert store.warning == ""


@pytest.mark.parametrize("wreck", [b"", b"x", b"\xff", b"9" * 100])
def test_a_torn_note_of_an_update_hinders_nothing(tmp_path: Path, wreck: bytes) -> None:
    filled(tmp_path)
    (tmp_path / PENDING).write_bytes(wreck)
    with StateStore(tmp_path) as store:
        assert store.state.epoch == 2
        assert "during the update" in store.warning


def test_a_full_disk_does_not_refuse_an_update_for_its_note(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(fd: int, data: object) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    with StateStore(tmp_path) as store:
        monkeypatch.setattr(os, "write", full)
        store.begin(1)


# --- torn anywhere ------------------------------------------------------------------------------


def test_torn_at_every_byte_without_a_previous_generation_is_refused(tmp_path: Path) -> None:
    filled(tmp_path, epochs=1)
    whole = (tmp_path / CURRENT).read_bytes()
    assert not (tmp_path / PREVIOUS).exists()
    for length in range(0, len(whole) - 1, 3):
        (tmp_path / CURRENT).write_bytes(whole[:length])
        assert code_of(tmp_path) == "STATE_CORRUPT", length
    assert (tmp_path / CURRENT).read_bytes() == whole[:length]  # nothing was overwritten


def test_killed_at_any_step_of_a_save(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    steps = ("open", "write", "fsync", "link", "unlink", "replace")
    real = {name: getattr(os, name) for name in steps}
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
