"""The token while it is in force: its file changes, or is away, or a successor takes it over."""

from __future__ import annotations

import errno
import os
import select
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from blockflow.control.auth import TokenAuth
from blockflow.control.exposure import check_exposure
from blockflow.control.kept_secrets import KeptSecrets
from blockflow.control.rest import tls
from blockflow.control.rest.tls import Certificate
from blockflow.control.settings import ControlSettings
from blockflow.core.errors import BlockFlowError, SystemError_
from blockflow.launch.ward import Kept, Line, Ward
from blockflow.tensormq.keys import SERVER_FILE, Keyring
from blockflow.tensormq.private_files import write_private

OLD, NEW = b"o" * 40, b"n" * 40


def refused() -> pytest.RaisesExc[BlockFlowError]:
    return pytest.RaisesExc(BlockFlowError, check=lambda e: e.code == "UNAUTHORIZED")


def bearer(token: bytes) -> str:
    return "Bearer " + token.decode()


def in_place(path: Path, text: bytes) -> None:
    path.write_bytes(text)


def renamed(path: Path, text: bytes) -> None:
    new = path.with_suffix(".new")
    write_private(new, text)
    new.replace(path)


@pytest.mark.parametrize("change", [in_place, renamed])
def test_another_token_in_the_file_holds_at_once(
    change: Callable[[Path, bytes], None], tmp_path: Path
) -> None:
    path, told = tmp_path / "token", []
    write_private(path, OLD)
    auth = TokenAuth(path, tell=told.append)
    auth.check(bearer(OLD))
    change(path, NEW + b"\n")
    with refused():
        auth.check(bearer(OLD))
    auth.check(bearer(NEW))
    assert told == [OLD, NEW]


def weak(path: Path) -> None:
    path.write_bytes(b"")


def open_to_all(path: Path) -> None:
    path.write_bytes(NEW)
    path.chmod(0o644)


def a_link(path: Path) -> None:
    path.rename(path.with_suffix(".away"))
    path.symlink_to(path.with_suffix(".away"))


@pytest.mark.parametrize("spoil", [Path.unlink, weak, open_to_all, a_link])
def test_a_file_that_gives_no_token_changes_nothing_and_is_told_once(
    spoil: Callable[[Path], None], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "token"
    write_private(path, OLD)
    auth = TokenAuth(path)
    spoil(path)
    for _ in range(3):
        auth.check(bearer(OLD))
        for wrong in (None, "Bearer ", bearer(NEW)):
            with refused():
                auth.check(wrong)
    assert caplog.text.count("stays so") == 1
    path.unlink(missing_ok=True)
    write_private(path, NEW)
    auth.check(bearer(NEW))


def test_a_token_in_force_needs_no_file_but_one_that_is_there_counts(tmp_path: Path) -> None:
    path, told = tmp_path / "token", []
    auth = TokenAuth(path, OLD, told.append)
    auth.check(bearer(OLD))
    assert told == []
    write_private(path, NEW)
    for in_force in (OLD, NEW):
        TokenAuth(path, in_force, told.append).check(bearer(NEW))
        assert told == [NEW]


@pytest.mark.parametrize("in_force", [None, OLD])
def test_a_token_that_there_is_no_room_to_read_is_read_for_the_next_request(
    in_force: bytes | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The former one may have been revoked."""
    path, real, fails = tmp_path / "token", os.open, [errno.EMFILE]

    def opens(opened: Path, *more: Any) -> int:
        if opened == path and fails:
            raise OSError(fails[0], os.strerror(fails.pop()), str(opened))
        return real(opened, *more)

    if in_force is None:
        write_private(path, OLD)
        auth = TokenAuth(path)
        renamed(path, NEW)
        monkeypatch.setattr("os.open", opens)
        auth.check(bearer(OLD))
    else:  # a successor's
        write_private(path, NEW)
        monkeypatch.setattr("os.open", opens)
        auth = TokenAuth(path, in_force)
    assert not fails
    with refused():
        auth.check(bearer(OLD))
    auth.check(bearer(NEW))


@pytest.mark.parametrize("inherited", [False, True])
def test_a_certificate_that_there_is_no_room_to_read_is_read_for_the_next_connection(
    inherited: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The former one will expire."""
    files = tmp_path / "rest.pem", tmp_path / "rest.key"
    contexts: list[Any] = ["new", SystemError_("NO_SPACE", "no descriptor"), "old"]

    def context(*_: Path) -> Any:
        if isinstance(found := contexts.pop(), SystemError_):
            raise found
        return found

    def told(of: Certificate) -> Any:
        return of.context()

    monkeypatch.setattr(tls, "tls_context", context)
    for path in files:
        path.touch()
    if inherited:
        made = Certificate(*files, contexts.pop())
    else:
        made = Certificate(*files)
        files[0].write_text("renewed")
        assert told(made) == "old"
    assert [told(made) for _ in range(2)] == ["new", "new"] and contexts == []


# --- what a successor has of it -------------------------------------------------------------------


@pytest.fixture
def line() -> Iterator[tuple[Line, Line]]:
    """The guardian's end and the Manager's."""
    ends = Line.pair()
    yield ends
    for end in ends:
        end.close()


def ward_of(line: Line, kept: dict[str, Kept], deaths: int) -> Ward:
    return Ward(
        guardian=0,
        run_dir=Path(),
        lifeline_fd=-1,
        line=line,
        kept=kept,
        deaths=deaths,
        adopt=deaths > 0,
        died_ns=0,
        began_ns=0,
        client_port=0,
        cause="",
        stop_asked=lambda: False,
    )


def handed_up(line: Line) -> dict[str, Kept]:
    """What the guardian has got so far."""
    found = {}
    while select.select([line], [], [], 0)[0]:
        (_, name, _, _), fds = line.take()
        found[name] = Kept(fds[0], 0, 0)
    return found


def test_a_successor_has_the_token_in_force(line: tuple[Line, Line], tmp_path: Path) -> None:
    mine, theirs = line
    ring = Keyring(tmp_path / "keys")
    ring.create()
    settings = ControlSettings(client_host="0.0.0.0", keys=ring.folder)
    token = ring.token_file.read_bytes().strip()
    open_before = os.listdir("/proc/self/fd")
    first = check_exposure(settings, KeptSecrets(ward_of(theirs, {}, 0)))
    assert first is not None and set(os.listdir("/proc/self/fd")) <= set(open_before)
    kept = handed_up(mine)
    for lose in ((ring.folder / SERVER_FILE).unlink, lambda: shutil.rmtree(ring.folder)):
        lose()
        with refused():
            check_exposure(settings, KeptSecrets(ward_of(theirs, {}, 0)))
    successor = check_exposure(settings, KeptSecrets(ward_of(theirs, kept, 1)))
    assert successor is not None
    for auth in (first, successor):
        auth.check("Bearer " + token.decode())
        with refused():
            auth.check(bearer(OLD))
    with refused():  # it is never taken as "none"
        check_exposure(settings, KeptSecrets(ward_of(theirs, {}, 1)))
    (fd,) = [k.fd for k in kept.values()]
    assert not os.get_inheritable(fd) and os.fstat(fd).st_mode & 0o777 == 0o600
    os.close(fd)


def test_what_can_be_read_once_only_is_not_read_again(
    line: tuple[Line, Line], tmp_path: Path
) -> None:
    mine, theirs = line
    os.mkfifo(tmp_path / "pipe")
    KeptSecrets(ward_of(theirs, {}, 0)).keep_file("key", tmp_path / "pipe")
    assert handed_up(mine) == {}
