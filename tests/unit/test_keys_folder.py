"""The folder of authorised clients: nobody but its user says who is let in."""

from __future__ import annotations

import errno
import logging
import os
import stat
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import zmq

from blockflow.cli.main import main
from blockflow.core.errors import SystemError_
from blockflow.tensormq import curve
from blockflow.tensormq.curve import Gatekeeper
from blockflow.tensormq.keys import KeyPair, Keyring
from blockflow.tensormq.private_files import write_private


@pytest.fixture
def ring(tmp_path: Path) -> Keyring:
    made = Keyring(tmp_path / "keys")
    made.create()
    return made


@pytest.mark.parametrize("which", [".", "clients"])
def test_while_others_may_write_there_nobody_is_let_in(
    ring: Keyring, which: str, caplog: pytest.LogCaptureFixture
) -> None:
    key, folder = KeyPair.make().public, ring.folder / which
    ring.authorise("camera", key)
    assert ring.allows(key)
    folder.chmod(0o777)
    with caplog.at_level(logging.ERROR):
        for _ in range(10):
            assert not ring.allows(key)
    with pytest.raises(SystemError_, match="others"):
        ring.server()
    assert caplog.text.count("no client is let in") == 1
    folder.chmod(0o700)
    assert ring.allows(key)
    ring.server()


def test_a_link_in_the_place_of_the_clients_folder_is_refused(ring: Keyring) -> None:
    key, clients = KeyPair.make().public, ring.folder / "clients"
    ring.authorise("camera", key)
    clients.rename(ring.folder / "elsewhere")
    ring.server()  # a folder without one lets nobody in
    assert not ring.allows(key)
    clients.symlink_to(ring.folder / "elsewhere")
    assert not ring.allows(key)
    with pytest.raises(SystemError_):
        ring.server()


def test_a_file_that_was_renamed_authorises_nobody(ring: Keyring) -> None:
    key, other, clients = KeyPair.make().public, KeyPair.make().public, ring.folder / "clients"
    ring.authorise("camera", key)
    (clients / key.hex()).rename(clients / other.hex())
    assert not ring.allows(other) and not ring.allows(key)
    assert ring.clients() == {}


def test_a_file_of_an_earlier_release_holds_the_name_alone(ring: Keyring) -> None:
    key = KeyPair.make().public
    write_private(ring.folder / "clients" / key.hex(), b"camera\n")
    assert ring.allows(key)
    assert ring.clients() == {"camera": key}


@pytest.mark.parametrize("kind", ["empty", "link", "dangling"])
def test_the_hint_for_an_unfit_server_key_can_be_followed(ring: Keyring, kind: str) -> None:
    """`blockflow keys init` writes over nothing."""
    path = ring.folder / "server.key"
    moved = path.rename(ring.folder / "other")
    if kind == "empty":
        write_private(path, b"")
    else:
        path.symlink_to(moved if kind == "link" else ring.folder / "nothing")
    with pytest.raises(SystemError_) as e:
        ring.server()
    assert f"remove {path}" in e.value.hint
    path.unlink()
    with pytest.raises(SystemError_) as e:
        ring.server()
    assert e.value.hint.startswith("make one: blockflow keys init")
    ring.create()
    ring.server()


@pytest.mark.parametrize(("mask", "above"), [(0, 0o775), (0o022, 0o755), (0o077, 0o700)])
def test_nobody_may_write_to_the_folders_above_it(mask: int, above: int, tmp_path: Path) -> None:
    """Who may puts another folder in its place. A umask of 0 is that of many a container."""
    folder = tmp_path / "config" / "blockflow" / "keys"
    before = os.umask(mask)
    try:
        assert main(["keys", "init", "--keys", str(folder)]) == 0
    finally:
        os.umask(before)
    modes = [stat.S_IMODE(made.stat().st_mode) for made in (folder, *folder.parents[:2])]
    assert modes == [0o700, above, above]


# --- no room to look a key up ---------------------------------------------------------------------

FULL = errno.EMFILE


@pytest.fixture
def short(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """What the next openings of an authorised key fail with."""
    real, fails = os.open, list[int]()

    def opens(path: Path, *more: Any) -> int:
        if fails and Path(path).parent.name == "clients":
            raise OSError(fails[-1], os.strerror(fails.pop()), str(path))
        return real(path, *more)

    monkeypatch.setattr("os.open", opens)
    return fails


def test_want_of_room_is_not_taken_for_a_key_that_is_missing(
    ring: Keyring, short: list[int]
) -> None:
    key = KeyPair.make().public
    ring.authorise("camera", key)
    for ask in (lambda: ring.allows(key), ring.clients, lambda: ring.revoke("camera")):
        short.append(FULL)
        with pytest.raises(SystemError_, match="Too many open files"):
            ask()
    assert ring.allows(key) and ring.clients() == {"camera": key}


def test_who_comes_amid_a_shortage_is_let_in_after_it_or_may_come_again(
    ring: Keyring, short: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """And is not told that the key, which is authorised, is not."""
    now = [0.0]
    clock = SimpleNamespace(monotonic=lambda: now[0], sleep=lambda _: now.append(now.pop() + 0.125))
    monkeypatch.setattr(curve, "time", clock, raising=False)
    key, context = KeyPair.make().public, zmq.Context()
    ring.authorise("camera", key)
    keeper = Gatekeeper(context)
    keeper._domains[b"test"] = ring.allows
    asked = [b"peer", b"", b"1.0", b"7", b"test", b"::1", b"", b"CURVE", key]
    answers = []
    for lacks in (2, 9, 0):
        short[:] = [FULL] * lacks
        answers += keeper._answer(asked) or []
    context.term()
    assert [a for a in answers if a.isdigit() and len(a) == 3] == [b"200", b"300", b"200"]
    assert keeper.refused == 0
