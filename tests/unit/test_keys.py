"""Keys and secrets in files: what is made is private, and what is unfit is refused."""

from __future__ import annotations

import errno
import json
import os
import stat
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest

from blockflow.cli.main import main
from blockflow.control.auth import TokenAuth, read_token
from blockflow.control.exposure import check_exposure, check_state_dir
from blockflow.control.settings import ControlSettings, is_address, is_loopback
from blockflow.control.system import System
from blockflow.core.errors import BlockFlowError, SystemError_
from blockflow.tensormq.curve import LINK_FILE, make_link_key
from blockflow.tensormq.keys import (
    KEY_BYTES,
    KeyPair,
    Keyring,
    client_keys,
    public_key,
    read_key_file,
    write_key_file,
)
from blockflow.tensormq.private_files import private_folder, read_private, write_private


def mode(path: Path) -> int:
    return stat.S_IMODE(path.lstat().st_mode)


def refused(code: str = "UNAUTHORIZED") -> pytest.RaisesExc[BlockFlowError]:
    return pytest.RaisesExc(BlockFlowError, check=lambda e: e.code == code)


@pytest.fixture
def ring(tmp_path: Path) -> Keyring:
    made = Keyring(tmp_path / "keys")
    made.create()
    return made


def test_key_files_are_private_and_come_back(tmp_path: Path) -> None:
    pair = KeyPair.make()
    assert len(pair.public) == len(pair.secret) == KEY_BYTES
    assert pair.secret.hex() not in repr(pair)
    path = tmp_path / "a.key"
    before = os.umask(0)  # the file is private whatever the umask
    try:
        write_key_file(path, pair)
    finally:
        os.umask(before)
    assert mode(path) == 0o600
    assert read_key_file(path) == pair
    with refused():
        write_key_file(path, pair)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "{}",
        "[]",
        "not json",
        '{"public": 1, "secret": 2}',
        json.dumps({"public": "0" * 63, "secret": "0" * 64}),
        json.dumps({"public": "0" * 64, "secret": "1" * 64}),  # not of one pair
    ],
)
def test_a_damaged_key_file_is_refused(tmp_path: Path, text: str) -> None:
    path = tmp_path / "a.key"
    write_private(path, text.encode())
    with refused():
        read_key_file(path)


def test_secrets_that_others_may_have_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "secret"
    write_private(path, b"x" * 40)
    assert read_private(path, "it", 100) == b"x" * 40
    assert read_private(path, "it", 10) == b"x" * 10
    for bits in (0o640, 0o604, 0o660, 0o666):
        path.chmod(bits)
        with refused():
            read_private(path, "it", 100)
    path.chmod(0o600)
    link = tmp_path / "link"
    link.symlink_to(path)
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe, 0o600)
    for other in (link, pipe, tmp_path, tmp_path / "none"):
        with refused():
            read_private(other, "it", 100)


def test_a_folder_that_others_can_write_to_holds_no_keys(ring: Keyring) -> None:
    assert mode(ring.folder) == 0o700
    ring.server()
    ring.folder.chmod(0o770)
    with refused():
        ring.server()
    with refused():
        private_folder(ring.folder)
    ring.folder.chmod(0o700)
    (link := ring.folder.with_name("link")).symlink_to(ring.folder)
    with refused():
        private_folder(link)


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT])
def test_of_a_secret_that_does_not_fit_nothing_is_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    def full(fd: int) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(os, "fsync", full)
    with refused("NO_SPACE"):
        write_private(tmp_path / "a.key", b"secret")
    assert not (tmp_path / "a.key").exists()


def test_a_new_pair_keeps_the_token_and_replaces_what_was_public(tmp_path: Path) -> None:
    ring = Keyring(tmp_path / "keys")
    ring.folder.mkdir(mode=0o700)
    write_private(ring.token_file, b"t" * 40)
    (ring.folder / "server.pub").write_text("of a pair that is gone")
    before = os.umask(0o077)
    try:
        pair = ring.create()
    finally:
        os.umask(before)
    assert ring.token_file.read_bytes() == b"t" * 40
    assert public_key((ring.folder / "server.pub").read_text().upper()) == pair.public
    assert mode(ring.folder / "server.pub") == 0o644, "others may read it"


def test_what_init_makes(ring: Keyring) -> None:
    public = ring.server().public
    assert public_key((ring.folder / "server.pub").read_text()) == public
    assert mode(ring.folder / "server.key") == mode(ring.token_file) == 0o600
    assert len(read_token(ring.token_file)) >= 32
    with refused():  # never over what is there
        ring.create()
    assert ring.server().public == public


def test_clients_come_and_go_at_once(ring: Keyring) -> None:
    alice, bob = KeyPair.make().public, KeyPair.make().public
    assert not ring.allows(alice)
    ring.authorise("alice", alice)
    assert ring.allows(alice) and not ring.allows(bob)
    for taken in (("alice", bob), ("bob", alice)):
        with refused():
            ring.authorise(*taken)
    ring.authorise("bob", bob)
    ring.revoke("alice")
    assert not ring.allows(alice) and ring.allows(bob)
    with refused():
        ring.revoke("alice")
    assert os.listdir(ring.folder / "clients") == [bob.hex()]


@pytest.mark.parametrize("name", ["", "..", "../x", "a/b", ".a", "a\n", "a" * 65])
def test_a_clients_name_is_no_path(ring: Keyring, name: str) -> None:
    with refused():
        ring.authorise(name, bytes(KEY_BYTES))
    with refused():
        ring.revoke(name)


def test_a_damaged_or_foreign_file_authorises_nobody(ring: Keyring) -> None:
    folder, key = ring.folder / "clients", KeyPair.make().public
    (folder / key.hex()[:63]).write_text("short")
    (folder / KeyPair.make().public.hex()).write_bytes(b"\xff" * 64)
    (folder / KeyPair.make().public.hex()).write_bytes(b"")
    (folder / KeyPair.make().public.hex()).mkdir()
    (folder / KeyPair.make().public.hex()).symlink_to("/etc/hostname")
    for content in ("no/name", "", "a b"):
        write_private(folder / KeyPair.make().public.hex(), content.encode())
    open_ = folder / key.hex()
    open_.write_text("mallory")
    open_.chmod(0o666)
    assert ring.clients() == {}
    assert not ring.allows(key)


def test_whom_a_client_talks_to(ring: Keyring, tmp_path: Path) -> None:
    server, own = ring.server().public, KeyPair.make()
    full, bare = tmp_path / "full.key", tmp_path / "bare.key"
    write_key_file(full, own, server)
    write_key_file(bare, own)
    assert client_keys(full).server == server
    assert client_keys(full, "ab" * 32).server == bytes.fromhex("ab" * 32)  # said explicitly
    assert client_keys(bare, str(ring.folder / "server.pub")).server == server
    for wrong in (None, "zz", str(tmp_path / "none")):
        with refused():
            client_keys(bare, wrong)


# --- the token ------------------------------------------------------------------------------------


@pytest.mark.parametrize("text", ["", "\n \n", "s" * 31, "two words " + "s" * 32, "ü" * 40])
def test_a_weak_token_is_fatal(tmp_path: Path, text: str) -> None:
    path = tmp_path / "to ken"
    write_private(path, text.encode())
    with refused() as e:
        TokenAuth(path)
    assert f"> '{path}'" in e.value.hint


def test_a_token_is_compared_as_a_whole(tmp_path: Path) -> None:
    path = tmp_path / "token"
    write_private(path, b"s" * 40 + b"\n")
    auth = TokenAuth(path)
    for right in ("Bearer " + "s" * 40, "bearer " + "s" * 40, "BEARER  " + "s" * 40 + " "):
        auth.check(right)
    wrongs = [None, "", "Bearer", "Bearer ", "Bearer " + "s" * 39, "Basic " + "s" * 40, "ü"]
    for wrong in (*wrongs, "Bearer ü", "Bearer \udcff", "s" * 40, "Bearer " + "s" * 41):
        with refused():
            auth.check(wrong)
    path.unlink()
    write_private(path, b" " + b"s" * 32)
    TokenAuth(path).check("Bearer " + "s" * 32)


# --- exposure -------------------------------------------------------------------------------------


def test_what_is_loopback() -> None:
    assert all(is_loopback(h) for h in ("127.0.0.1", "127.9.9.9", "::1", "[::1]", "localhost"))
    assert not any(is_loopback(h) for h in ("0.0.0.0", "::", "192.0.2.1", "localhost.example", ""))
    assert is_address("192.0.2.1") and not is_address("192.0.2.1.example.com")


@pytest.mark.parametrize("host", ["0.0.0.0", "192.0.2.1", "::", "example.com", ""])
@pytest.mark.parametrize("which", ["host", "client_host"])
def test_no_open_address_without_keys(which: str, host: str, tmp_path: Path) -> None:
    token = tmp_path / "token"
    write_private(token, b"s" * 40)
    for more in ({}, {"token_file": token}):
        with refused("INVALID_REQUEST"):
            check_exposure(ControlSettings(**{which: host, **more}))  # type: ignore[arg-type]


def test_keys_need_a_token_and_the_token_needs_a_secret(ring: Keyring) -> None:
    settings = ControlSettings(client_host="0.0.0.0", keys=ring.folder)
    auth = check_exposure(settings)
    assert auth is not None
    auth.check("Bearer " + ring.token_file.read_text().strip())
    other = ring.folder / "other"
    write_private(other, b"s" * 40)
    named = check_exposure(replace(settings, token_file=other))
    assert named is not None
    named.check("Bearer " + "s" * 40)
    ring.token_file.write_text("")
    with refused():
        check_exposure(settings)
    ring.token_file.unlink()
    with refused():
        check_exposure(settings)


def test_loopback_needs_nothing(tmp_path: Path) -> None:
    assert check_exposure(ControlSettings()) is None
    with refused():  # but what is named must be there
        check_exposure(ControlSettings(keys=tmp_path / "none"))
    with refused():
        check_exposure(ControlSettings(token_file=tmp_path / "none"))


# --- the command ----------------------------------------------------------------------------------


def test_the_keys_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("BLOCKFLOW_KEYS", "keys")
    ring = Keyring(tmp_path / "keys")

    def run(*args: str, status: int = 0) -> dict[str, object]:
        assert main(["keys", *args, "--json"]) == status
        return dict(json.loads(capsys.readouterr().out))

    run("list", status=2)  # there are none yet
    assert run("init")["public"] == ring.server().public.hex()
    run("init", status=2)
    made = run("new", "alice")
    own = client_keys(tmp_path / "alice.key")
    assert made["public"] == own.own.public.hex() and own.server == ring.server().public
    assert ring.allows(own.own.public)
    run("new", "alice", "-o", "again.key", status=2)
    assert not (tmp_path / "again.key").exists()  # a key that opens nothing is not left about
    public = run("make", "-o", "bob.key")["public"]
    run("authorise", "bob", str(public))
    assert run("list")["clients"] == [
        {"name": "alice", "public": own.own.public.hex()},
        {"name": "bob", "public": public},
    ]
    run("revoke", "alice")
    assert not ring.allows(own.own.public)
    assert main(["keys", "list"]) == 0
    text = capsys.readouterr().out
    assert "bob" in text and "alice" not in text
    for wrong, why in (
        (["new"], "needs a client's NAME"),
        (["authorise", "x"], "needs the client's public KEY"),
        (["init", "x"], "takes no NAME"),
        (["list", "x"], "takes no NAME"),
        (["make", "x", "ab" * 32], "takes no KEY"),
        (["revoke", "bob", "-o", "x"], "writes no key file"),
        (["authorise", "x", "ab" * 32, "-o", "x"], "writes no key file"),
    ):
        error = run(*wrong, status=2)["error"]
        assert isinstance(error, dict) and why in error["message"]
    run("authorise", "x", "ab" * 32, "--keys", "none", status=2)
    assert not (tmp_path / "none").exists()


def test_a_torn_link_key_of_a_former_control_plane_is_replaced(tmp_path: Path) -> None:
    path = tmp_path / LINK_FILE
    make_link_key(tmp_path)
    first = read_key_file(path)
    path.write_bytes(path.read_bytes()[:20])
    make_link_key(tmp_path)
    assert read_key_file(path) != first
    assert path.stat().st_mode & 0o777 == 0o600


@pytest.mark.parametrize("loose", [0o770, 0o707, 0o1777])
def test_a_state_folder_that_others_may_write_to_is_refused(tmp_path: Path, loose: int) -> None:
    """Who writes there decides what is deployed at the next start."""
    folder = tmp_path / "state"
    check_state_dir(folder)  # not there yet: it will be made private
    folder.mkdir()
    folder.chmod(0o755)
    check_state_dir(folder)
    folder.chmod(loose)
    with refused("STATE_UNUSABLE"):
        check_state_dir(folder)
    system = System(repository=tmp_path, state_dir=folder, rest_port=0, client_port=0)
    with refused("STATE_UNUSABLE"), system:
        pass
    assert not list(folder.iterdir())


def test_a_state_folder_of_another_user_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("os.geteuid", lambda: os.getuid() + 1)
    if tmp_path.stat().st_uid == 0:
        check_state_dir(tmp_path)  # root can do everything anyway
        os.chown(tmp_path, os.geteuid() + 1, -1)
    with refused("STATE_UNUSABLE"):
        check_state_dir(tmp_path)


def test_of_many_who_authorise_one_name_at_once_one_does(ring: Keyring) -> None:
    keys = [KeyPair.make().public for _ in range(16)]
    begin = threading.Barrier(len(keys))

    def authorise(public: bytes) -> bool:
        begin.wait()
        try:
            Keyring(ring.folder).authorise("robot", public)
        except SystemError_:
            return False
        return True

    with ThreadPoolExecutor(len(keys)) as pool:
        done = list(pool.map(authorise, keys))
    assert done.count(True) == 1
    assert [ring.allows(k) for k in keys] == done


def test_a_revoked_name_has_no_other_key(ring: Keyring) -> None:
    """As of two folders that were put together."""
    keys = [KeyPair.make().public for _ in range(3)]
    for key in keys:
        write_private(ring.folder / "clients" / key.hex(), b"robot\n")
    ring.revoke("robot")
    assert not any(map(ring.allows, keys)) and ring.clients() == {}
