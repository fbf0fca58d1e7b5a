"""What the durable state remembers: earlier epochs, and an update that was cut short."""

from __future__ import annotations

import hashlib
import json
import os
from pathlib import Path

import pytest
from refusals_rig import no_room
from store_rig import TOPOLOGY, filled

from blockflow.control.pending import PENDING
from blockflow.control.store import CURRENT, LOCK, PREVIOUS, StateStore
from blockflow.control.stored import HISTORY, HISTORY_BYTES, PastEpoch, StoredState


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
    for epoch, kept in enumerate((1, 2, 1, 1), 1):
        posted = {"text": "x" * (HISTORY_BYTES // 2 if epoch > 1 else 1)}
        state = state.committed(PastEpoch(epoch, "system-update", "", posted, {}), TOPOLOGY)
        assert (state.history[-1].epoch, len(state.history)) == (epoch, kept)
    told = state.to_dict()
    assert StoredState.from_dict(json.loads(json.dumps(told))) == state
    assert told["history"][0]["posted"] is state.posted  # a copy would take seconds


def test_the_state_of_an_earlier_release_is_read(tmp_path: Path) -> None:
    filled(tmp_path)
    for name in (CURRENT, PREVIOUS):
        document = json.loads((tmp_path / name).read_bytes())
        for field in ("history", "next_epoch"):
            del document["body"][field]
        packed = json.dumps(document["body"], sort_keys=True, separators=(",", ":")).encode()
        document |= {"format": 1, "sha256": hashlib.sha256(packed).hexdigest()}
        (tmp_path / name).write_text(json.dumps(document))
    with StateStore(tmp_path) as store:
        assert (store.state.epoch, store.warning) == (2, "")
        assert [(p.epoch, p.posted) for p in store.state.history] == [(2, {"posted": 2})]
        assert store.epoch_after(2) == 3
        store.commit(3, {}, TOPOLOGY)
    with StateStore(tmp_path) as store:
        assert [p.epoch for p in store.state.history] == [2, 3]


def test_a_new_folder_of_an_earlier_release() -> None:
    old = StoredState().to_dict()
    del old["next_epoch"], old["history"]
    assert StoredState.from_format_1(old) == StoredState()
    first = old | {"epoch": 1, "topology": {}, "posted": {}}
    assert [p.epoch for p in StoredState.from_format_1(first).history] == [1]
    for odd in ({"epoch": "1"}, {"next_epoch": 2}, {"history": []}):
        with pytest.raises(ValueError, match="later format" if "epoch" not in odd else "epoch is"):
            StoredState.from_format_1(first | odd)


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
        store.ended(3)
        store.ended(3)
    with StateStore(tmp_path) as store:
        assert store.warning == ""


def test_one_that_ends_while_the_next_is_under_way_takes_nothing_of_it_along(
    tmp_path: Path,
) -> None:
    filled(tmp_path)
    with StateStore(tmp_path) as store:
        store.begin(3)
        store.begin(4)
        store.ended(3)
    with StateStore(tmp_path) as store:
        assert "during the update to epoch 4" in store.warning


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
    with StateStore(tmp_path) as store:
        monkeypatch.setattr(os, "write", no_room)
        store.begin(1)


def test_how_an_epoch_came_about_is_told_until_the_next_one(tmp_path: Path) -> None:
    filled(tmp_path)
    (tmp_path / PENDING).write_bytes(b"3\n")
    with StateStore(tmp_path) as store:
        store.warn("something that lasts")
        assert "epoch 2 is in force again" in store.warning
        store.take_incarnation()  # which saves, and puts no epoch in force
        assert "epoch 2 is in force again" in store.warning
        store.commit(3, {}, {"x": 3})
        assert store.warning == "something that lasts"
