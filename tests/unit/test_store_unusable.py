"""State files that are there and cannot be used: nothing takes the place of what may be whole."""

from __future__ import annotations

import errno
import os
from pathlib import Path
from typing import Any

import pytest
from store_rig import TOPOLOGY, filled

from blockflow.control import generations
from blockflow.control.pending import PENDING
from blockflow.control.store import CURRENT, StateStore
from blockflow.core.errors import SystemError_
from blockflow.launch.ward import awaited


def _fails(monkeypatch: pytest.MonkeyPatch, name: str, number: int) -> None:
    """Whoever opens ``name`` to read it gets this error."""
    real = os.open

    def opens(path: Any, flags: int, *more: Any, **named: Any) -> int:
        if Path(path).name == name and not flags & (os.O_WRONLY | os.O_RDWR):
            raise OSError(number, os.strerror(number), str(path))
        return real(path, flags, *more, **named)

    monkeypatch.setattr("os.open", opens)


def refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int, succeeds: bool = False
) -> SystemError_:
    """Why nobody begins with a state that cannot be read; it stays as it is, and is read later."""
    filled(tmp_path)
    before = {p.name: p.read_bytes() for p in tmp_path.iterdir()}
    with monkeypatch.context() as patch:
        _fails(patch, CURRENT, number)
        with pytest.raises(SystemError_) as e:
            StateStore(tmp_path, succeeds=succeeds)
    assert os.strerror(number) in e.value.message
    assert {p.name: p.read_bytes() for p in tmp_path.iterdir()} == before
    with StateStore(tmp_path, succeeds=succeeds) as store:
        assert (store.state.epoch, store.warning) == (2, "")
    return e.value


@pytest.mark.parametrize("number", [errno.EACCES, errno.EIO, errno.EMFILE])
def test_a_state_that_cannot_be_read_is_not_replaced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    error = refused(tmp_path, monkeypatch, number)
    assert error.code == "STATE_UNUSABLE" and error.where.endswith(CURRENT)


def test_a_successor_goes_on_without_it_and_keeps_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    filled(tmp_path)
    intact = (tmp_path / CURRENT).read_bytes()
    with monkeypatch.context() as patch:
        _fails(patch, CURRENT, errno.EIO)
        store = StateStore(tmp_path, succeeds=True)
    with store:
        assert store.state.epoch == 1 and "Input/output error" in store.warning
        store.commit(5, {}, TOPOLOGY)
    assert (tmp_path / f"discarded-1-{CURRENT}").read_bytes() == intact


@pytest.mark.parametrize("number", [errno.EMFILE, errno.ENFILE, errno.ENOMEM])
def test_for_want_of_room_a_successor_goes_back_to_no_former_epoch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    """The file is whole, and the next successor finds room: its guardian tries again."""
    assert awaited(refused(tmp_path, monkeypatch, number, succeeds=True))


def test_a_broken_state_is_kept_beside_what_takes_its_place(tmp_path: Path) -> None:
    filled(tmp_path)
    (tmp_path / CURRENT).write_bytes(b"torn")
    for _ in range(2):  # a start that stores nothing loses nothing
        with StateStore(tmp_path) as store:
            assert store.state.epoch == 1 and store.warning
    with StateStore(tmp_path) as store:
        store.commit(5, {}, TOPOLOGY)
    assert (tmp_path / f"discarded-1-{CURRENT}").read_bytes() == b"torn"
    with StateStore(tmp_path) as store:
        assert (store.state.epoch, store.warning) == (5, "")


def test_what_is_stored_can_be_read_however_large(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(generations, "MAX_STATE_BYTES", 20_000)
    body = {"names": ["x" * 10] * 200}
    with StateStore(tmp_path) as store:
        for epoch in range(1, 9):
            store.commit(epoch, body, TOPOLOGY)
            assert (tmp_path / CURRENT).stat().st_size <= 20_000
        with pytest.raises(SystemError_, match="too large to be stored") as e:
            store.commit(9, {"names": ["x" * 10] * 2000}, TOPOLOGY)
        assert e.value.code == "STATE_UNUSABLE"
    with StateStore(tmp_path) as store:
        assert store.state.epoch == 8 and store.state.history[-1].posted == body
        assert 1 <= len(store.state.history) < 8


@pytest.mark.parametrize(("step", "number"), [("open", errno.EMFILE), ("fsync", errno.EIO)])
def test_what_is_told_as_not_stored_is_not_there_at_the_next_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, step: str, number: int
) -> None:
    """The folder cannot be synced, when the new file has its name already."""
    filled(tmp_path)
    real = getattr(os, step)

    def fails(at: Path | int, *more: Any, **named: Any) -> Any:
        if at == tmp_path or (isinstance(at, int) and os.path.isdir(at)):
            raise OSError(number, os.strerror(number))
        return real(at, *more, **named)

    with StateStore(tmp_path) as store:
        monkeypatch.setattr(os, step, fails)
        with pytest.raises(SystemError_):
            store.commit(3, {}, TOPOLOGY)
        monkeypatch.undo()
        assert store.state.epoch == 2
    with StateStore(tmp_path) as store:
        assert (store.state.epoch, store.warning) == (2, "")
        store.commit(3, {}, TOPOLOGY)


@pytest.mark.parametrize("number", [errno.ENOLCK, errno.EOPNOTSUPP, errno.EIO])
def test_a_file_system_without_locks_is_told_as_such(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    def refuses(*_: Any) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr("fcntl.flock", refuses)
    with pytest.raises(SystemError_) as e:
        StateStore(tmp_path)
    assert e.value.code == "STATE_UNUSABLE" and os.strerror(number) in e.value.message


@pytest.mark.parametrize("name", [f".{CURRENT}.new", PENDING])
def test_a_pipe_in_the_folder_keeps_nobody_waiting(tmp_path: Path, name: str) -> None:
    filled(tmp_path)
    os.mkfifo(tmp_path / name)
    reader = os.open(tmp_path / name, os.O_RDONLY | os.O_NONBLOCK)
    try:
        with StateStore(tmp_path) as store:
            store.begin(7)
            if name == PENDING:
                return
            with pytest.raises(SystemError_) as e:
                store.commit(7, {}, TOPOLOGY)
            assert e.value.code == "STATE_UNUSABLE"
    finally:
        os.close(reader)


def test_an_update_under_way_that_a_pipe_tells_of_is_an_unknown_one(tmp_path: Path) -> None:
    filled(tmp_path)
    os.mkfifo(tmp_path / PENDING)
    writer = os.open(tmp_path / PENDING, os.O_RDWR)  # which is silent
    try:
        with StateStore(tmp_path) as store:
            assert "the update to epoch unknown" in store.warning and store.state.epoch == 2
    finally:
        os.close(writer)
