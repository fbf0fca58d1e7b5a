"""Where a client connects to: what needs a look-up, and which address comes next."""

from __future__ import annotations

import socket
from collections.abc import Callable
from typing import Any

import pytest

from blockflow.client import names
from blockflow.client.address import dispatcher_address
from blockflow.client.names import Whereabouts, names_a_host, resolve
from blockflow.core.errors import RequestError
from blockflow.tensormq.ports import is_v6

V4, V6 = socket.AF_INET, socket.AF_INET6


def lists(monkeypatch: pytest.MonkeyPatch, *found: tuple[int, tuple[Any, ...]]) -> None:
    """Have every name stand for these."""
    answer = [(family, socket.SOCK_STREAM, 6, "", where) for family, where in found]
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: answer)


@pytest.mark.parametrize(
    ("address", "named"),
    [
        ("tcp://127.0.0.1:1", False),
        ("tcp://[::1]:1", False),
        ("tcp://[fe80::1%eth0]:1", False),
        ("ipc:///tmp/localhost:1", False),
        ("tcp://localhost:1", True),
        ("tcp://[localhost]:1", True),
        ("tcp://300.1.1.1:1", True),
    ],
)
def test_what_needs_a_look_up(address: str, named: bool) -> None:
    assert names_a_host(address) == named


def test_ipv6_comes_after_ipv4(monkeypatch: pytest.MonkeyPatch) -> None:
    six, link_local = (V6, ("2001:db8::1", 0, 0, 0)), (V6, ("fe80::1", 0, 0, 2))
    lists(monkeypatch, six, (V4, ("192.0.2.2", 0)), (V4, ("192.0.2.1", 0)), (V4, ("192.0.2.2", 0)))
    assert resolve("both") == ["192.0.2.2", "192.0.2.1", "[2001:db8::1]"]
    assert not is_v6("tcp://both:1")  # as everybody
    lists(monkeypatch, six, link_local)
    assert resolve("six") == ["[2001:db8::1]", "[fe80::1%2]"]
    assert is_v6("tcp://six:1")


@pytest.mark.parametrize(
    "host", ["-a", "_a", "a;b", "a b", "\u00e4", "\ud800", "a\n", "*", "[a b]"]
)
def test_what_libzmq_takes_for_no_name_is_none(host: str) -> None:
    with pytest.raises(RequestError, match="not the address"):
        dispatcher_address(f"tcp://{host}:1")


def test_a_path_may_have_spaces() -> None:
    assert dispatcher_address("ipc:///run/a b/clients.sock") == "ipc:///run/a b/clients.sock"
    for none in ("ipc://", "ipc:///a\nb", "ipc:///a\0"):
        with pytest.raises(RequestError, match="not the address"):
            dispatcher_address(none)


def whereabouts(monkeypatch: pytest.MonkeyPatch, *found: str) -> tuple[Whereabouts, Any]:
    """Of a name that stands for ``found``, and what gives the next endpoint."""
    monkeypatch.setattr(names, "resolve", lambda host: list(found))

    class Inline:
        def __init__(self, target: Callable[[], None], **_: object) -> None:
            self.start = target

    monkeypatch.setattr(names.threading, "Thread", Inline)
    where = Whereabouts("tcp://host:7", lambda act: act())

    def following() -> str | None:
        assert where.found() is None
        where.ask()
        return where.found()

    return where, following


def test_each_attempt_has_the_next_address(monkeypatch: pytest.MonkeyPatch) -> None:
    _, following = whereabouts(monkeypatch, "1.1.1.1", "2.2.2.2", "3.3.3.3")
    tried = [following() for _ in range(7)]
    assert tried == [f"tcp://{n}.{n}.{n}.{n}:7" for n in (1, 2, 3, 1, 2, 3, 1)]


def test_what_worked_comes_first_and_then_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    where, following = whereabouts(monkeypatch, "1.1.1.1", "2.2.2.2", "3.3.3.3")
    assert [following(), following()] == ["tcp://1.1.1.1:7", "tcp://2.2.2.2:7"]
    where.worked("tcp://2.2.2.2:7")
    assert not where.further
    tried = [(following(), where.further) for _ in range(4)]
    order = [(2, True), (1, True), (3, False), (2, True)]
    assert tried == [(f"tcp://{n}.{n}.{n}.{n}:7", further) for n, further in order]


def test_the_other_family_comes_later_once_one_has_worked(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its packets may be lost without a word, and the Dispatcher be back in a moment."""
    where, following = whereabouts(monkeypatch, "1.1.1.1", "[2::2]")
    assert [following(), following()] == ["tcp://1.1.1.1:7", "tcp://[2::2]:7"]
    where.worked("tcp://1.1.1.1:7")
    tried = [following() for _ in range(7)]
    assert tried == ["tcp://1.1.1.1:7"] * 4 + [
        "tcp://[2::2]:7",
        "tcp://1.1.1.1:7",
        "tcp://[2::2]:7",
    ]
    where.worked("tcp://[2::2]:7")
    monkeypatch.setattr(names, "resolve", lambda host: ["1.1.1.1"])
    assert following() == "tcp://1.1.1.1:7"


def test_addresses_may_change(monkeypatch: pytest.MonkeyPatch) -> None:
    where, following = whereabouts(monkeypatch, "1.1.1.1")
    assert following() == "tcp://1.1.1.1:7"
    where.worked("tcp://1.1.1.1:7")
    monkeypatch.setattr(names, "resolve", lambda host: ["2.2.2.2"])
    assert [following(), following()] == ["tcp://2.2.2.2:7"] * 2


def test_a_failure_is_told_until_the_name_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    where, following = whereabouts(monkeypatch)
    assert following() == ""
    assert where.trouble == "no address was found for the name 'host': it has none"
    monkeypatch.setattr(names, "resolve", lambda host: ["1.1.1.1"])
    assert following() == "tcp://1.1.1.1:7"
    assert where.trouble == ""


def test_want_of_threads_is_a_failure_like_others(monkeypatch: pytest.MonkeyPatch) -> None:
    where, following = whereabouts(monkeypatch, "1.1.1.1")

    def no_thread(**_: object) -> None:
        raise RuntimeError("can't start new thread")

    class None_:
        def __init__(self, **_: object) -> None:
            self.start = no_thread

    monkeypatch.setattr(names.threading, "Thread", None_)
    assert following() == ""
    assert where.trouble == "the name 'host' cannot be looked up: can't start new thread"
