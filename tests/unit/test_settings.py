"""Where things are by default, and which addresses only this machine can reach."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from blockflow.control.settings import (
    ControlSettings,
    bare,
    default_keys,
    default_state_dir,
    is_address,
    is_loopback,
    with_port,
)
from blockflow.core.errors import RequestError, SystemError_


@pytest.mark.parametrize(
    ("variable", "default", "ask", "last"),
    [
        ("XDG_STATE_HOME", "h/.local/state", default_state_dir, "blockflow"),
        ("XDG_CONFIG_HOME", "h/.config", default_keys, "blockflow/keys"),
    ],
)
def test_folders_of_a_user(
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    variable: str,
    default: str,
    ask: Callable[[], Path],
    last: str,
) -> None:
    """A path that is relative does not count, as the XDG directories' specification has it."""
    monkeypatch.setenv("HOME", str(tmp_path / "h"))
    for value, base in (("/x", Path("/x")), ("x", tmp_path / default), ("", tmp_path / default)):
        monkeypatch.setenv(variable, value)
        assert ask() == base / last


@pytest.mark.parametrize("ask", [default_state_dir, default_keys])
def test_a_user_without_a_home(monkeypatch: pytest.MonkeyPatch, ask: Callable[[], Path]) -> None:
    """A container may run as a number that no user has."""
    for variable in ("HOME", "XDG_STATE_HOME", "XDG_CONFIG_HOME"):
        monkeypatch.delenv(variable, raising=False)
    monkeypatch.setattr(os, "getuid", lambda: 2_000_000_000)
    with pytest.raises(SystemError_) as e:
        ask()
    assert e.value.code == "STATE_UNUSABLE" and "--state-dir" in e.value.hint
    monkeypatch.setenv("XDG_STATE_HOME", "/data")
    monkeypatch.setenv("XDG_CONFIG_HOME", "/data")
    assert ask().is_relative_to("/data")


def test_where_instances_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BLOCKFLOW_RUN_ROOT", "/x")
    assert ControlSettings(Path("/s"), Path("/s")).run_root == Path("/x")
    monkeypatch.setenv("BLOCKFLOW_RUN_ROOT", "")
    assert ControlSettings(Path("/s"), Path("/s")).run_root == Path(
        f"/dev/shm/blockflow-{os.geteuid()}"
    )


@pytest.mark.parametrize(
    ("host", "plain", "address", "loopback"),
    [
        ("localhost", "localhost", False, True),
        ("127.9.8.7", "127.9.8.7", True, True),
        ("::1", "::1", True, True),
        ("[::1]", "::1", True, True),
        ("10.0.0.1", "10.0.0.1", True, False),
        ("0.0.0.0", "0.0.0.0", True, False),
        ("[fe80::1]", "fe80::1", True, False),
        ("localhost.example", "localhost.example", False, False),
        ("[::1", "[::1", False, False),
        ("::1]", "::1]", False, False),
        ("", "", False, False),
    ],
)
def test_hosts(host: str, plain: str, address: bool, loopback: bool) -> None:
    assert (bare(host), is_address(host), is_loopback(host)) == (plain, address, loopback)


def test_hosts_lose_their_brackets_and_get_them_back() -> None:
    settings = ControlSettings(host="[::1]", client_host="[::]")
    assert (settings.host, settings.client_host) == ("::1", "::")
    assert with_port(settings.host, 1) == "[::1]:1" and with_port("h", 2) == "h:2"


@pytest.mark.parametrize(
    ("name", "where"),
    [
        ("repository", "--repository"),
        ("state_dir", "--state-dir"),
        ("run_root", "BLOCKFLOW_RUN_ROOT"),
        ("keys", "--keys"),
    ],
)
def test_a_folder_whose_name_is_no_text_is_refused(name: str, where: str) -> None:
    """Orders to processes and answers are UTF-8."""
    folder = Path(os.fsdecode(b"/x/caf\xe9"))
    given = ControlSettings(**{"state_dir": Path("/s"), name: folder})  # type: ignore[arg-type]
    with pytest.raises(RequestError, match="INVALID_REQUEST") as refused:
        given.lasting()
    assert refused.value.where == where
    assert r"caf\udce9' is not UTF-8" in str(refused.value)
    assert "rename the folder" in refused.value.hint
