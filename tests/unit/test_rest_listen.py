"""Where REST cannot listen, and what is said of it."""

from __future__ import annotations

import errno
from collections.abc import Callable
from typing import Any

import pytest
from cheroot.wsgi import Server

from blockflow.cli.main import main
from blockflow.control import system
from blockflow.control.rest.server import RestServer
from blockflow.core.errors import BlockFlowError, SystemError_


@pytest.mark.parametrize("host", ["127.0.0.1", "0.0.0.0"])
def test_one_port_for_both_is_refused(host: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["up", "--port", "5", "--client-port", "5", "--client-host", host]) == 2
    assert "port 5 is asked for REST and for clients" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("number", "text", "code", "where", "hint"),
    [
        (errno.EADDRINUSE, "", "PORT_IN_USE", "http://127.0.0.1:80", "another --port"),
        (None, "[Errno 13] Permission denied", "INVALID_REQUEST", "port", "below 1024"),
        (errno.EADDRNOTAVAIL, "", "INVALID_REQUEST", "host", ""),
        (errno.EMFILE, "", "NO_SPACE", "http://127.0.0.1:80", "ulimit"),
        (None, "No socket: [Errno 24] Too many open files", "NO_SPACE", "http://127.0.0.1:80", ""),
    ],
)
def test_why_it_cannot_listen(
    number: int | None,
    text: str,
    code: str,
    where: str,
    hint: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def prepare(_: Any) -> None:
        raise OSError(text) if number is None else OSError(number, "no")

    monkeypatch.setattr(Server, "prepare", prepare)
    commands: Any = None
    with pytest.raises(BlockFlowError) as e:
        RestServer(commands, "", lambda: None, host="127.0.0.1", port=80)
    assert (e.value.code, e.value.where) == (code, where) and hint in e.value.hint


def test_where_no_port_is_free_it_is_no_other_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither REST's nor the clients': any would do."""

    def none_left(*_: Any) -> None:
        raise OSError(errno.EADDRINUSE, "Address already in use")

    monkeypatch.setattr(Server, "prepare", none_left)
    monkeypatch.setattr(system, "hold", none_left)
    commands: Any = None
    asked: list[Callable[[], Any]] = [
        lambda: RestServer(commands, "", lambda: None, host="127.0.0.1", port=0),
        lambda: system.hold_address("127.0.0.1", 0),
    ]
    for ask in asked:
        with pytest.raises(SystemError_) as e:
            ask()
        assert e.value.code == "NO_SPACE" and "no port is free" in e.value.message


@pytest.mark.parametrize("names", [("",), ("server.example", " ")])
def test_an_empty_name_is_no_name(names: tuple[str, ...]) -> None:
    """A request without a Host would be one to it."""
    commands: Any = None
    with pytest.raises(BlockFlowError) as e:
        RestServer(commands, "", lambda: None, host="127.0.0.1", port=0, names=names)
    assert (e.value.code, e.value.where) == ("INVALID_REQUEST", "name")
