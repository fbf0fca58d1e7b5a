"""Which names REST answers to, whose pages may change something, and what the gatekeeper makes of
what is no question."""

from __future__ import annotations

import pytest
import zmq
from hypothesis import given, settings
from hypothesis import strategies as st

from blockflow.control.rest.app import RestApp
from blockflow.control.rest.origin import SCHEMES, check_origin
from blockflow.core.errors import BlockFlowError
from blockflow.tensormq.curve import Gatekeeper
from blockflow.tensormq.keys import KeyPair

KEY = bytes(range(32))


def answers(app: RestApp, host: str | None) -> bool:
    try:
        app._check_host(host)
    except BlockFlowError:
        return False
    return True


@pytest.mark.parametrize(
    "host", ["localhost", "127.0.0.1:5780", "[::1]", "[::1]:5780", "LOCALHOST"]
)
def test_this_machine_by_its_own_names(host: str) -> None:
    assert answers(RestApp((), "127.0.0.1", None), host)
    assert answers(RestApp((), "0.0.0.0", None), host)


@pytest.mark.parametrize(
    "host", [None, "", "evil.example", "localhost.evil.example", "127.0.0.1.evil.example:5780"]
)
def test_no_name_that_somebody_else_may_give(host: str | None) -> None:
    """A web page of that name, pointed at this machine, must not reach the service."""
    assert not answers(RestApp((), "127.0.0.1", None), host)
    assert not answers(RestApp((), "0.0.0.0", None, ("server.example",)), host)


@pytest.mark.parametrize("host", [None, "", " ", ":5780"])
def test_who_names_nobody_is_refused_whatever_the_names_are(host: str | None) -> None:
    assert not answers(RestApp((), "", None, ("",)), host)


def test_beyond_loopback_addresses_and_given_names_do() -> None:
    app = RestApp((), "0.0.0.0", None, ("Server.example",))
    for host in ("192.0.2.7:5780", "192.0.2.7", "[2001:db8::7]:5780", "server.example:5780"):
        assert answers(app, host)
    assert not answers(RestApp((), "127.0.0.1", None), "192.0.2.7")


def may(host: str, origin: str | None, site: str | None = None, *schemes: str) -> bool:
    try:
        check_origin(host, origin, site, schemes or SCHEMES)
    except BlockFlowError:
        return False
    return True


@pytest.mark.parametrize(
    ("host", "origin"),
    [
        ("127.0.0.1:5780", "http://127.0.0.1:5780"),
        ("LocalHost:5780", "http://localhost:5780"),
        ("[::1]:5780", "http://[::1]:5780"),
        ("[::1]", "http://[::1]"),
        ("server.example", "https://server.example"),  # a proxy adds the TLS
        ("server.example:443", "https://server.example"),
        ("127.0.0.1", "http://127.0.0.1:80"),
    ],
)
def test_pages_of_this_service_may(host: str, origin: str) -> None:
    assert may(host, origin)
    assert may(host, origin, "same-origin")
    assert not may(host, origin, "cross-site")


@pytest.mark.parametrize(
    "origin",
    [
        "",
        "null",
        "http://",
        "://127.0.0.1:5780",
        "127.0.0.1:5780",
        "http://127.0.0.1",
        "http://127.0.0.1:5781",
        "http://127.0.0.1:57800",
        "http://127.0.0.1:5780/",
        "http://127.0.0.1:5780@evil.example",
        "http://evil.example:5780",
        "http://127.0.0.1:5780, http://evil.example",
        "ftp://127.0.0.1:5780",
        "chrome-extension://127.0.0.1:5780",
    ],
)
def test_no_other_page_may(origin: str) -> None:
    assert not may("127.0.0.1:5780", origin)
    assert not may("127.0.0.1:5780", origin, "same-origin")


def test_where_it_speaks_tls_its_pages_do() -> None:
    assert may("server.example", "https://server.example", None, "https")
    assert not may("server.example", "http://server.example", None, "https")
    assert not may("server.example:80", "http://server.example", None, "https")


@pytest.mark.parametrize("site", ["cross-site", "same-site", "", "something-new"])
def test_a_browser_that_does_not_say_that_it_is_this_page_may_not(site: str) -> None:
    assert not may("127.0.0.1:5780", None, site)


def test_programs_say_nothing_of_pages_and_may() -> None:
    assert may("127.0.0.1:5780", None)
    assert may("127.0.0.1:5780", None, "none")


def test_what_is_no_question_opens_no_gate() -> None:
    with zmq.Context() as context:
        keeper = Gatekeeper(context)

        @settings(max_examples=300, deadline=None, derandomize=True, database=None)
        @given(st.lists(st.binary(max_size=40), max_size=10))
        def ask(frames: list[bytes]) -> None:
            answer = keeper._answer(frames)
            assert answer is None or b"200" not in answer[-4:]

        ask()


def test_only_the_domains_own_keys_open_it() -> None:
    context = zmq.Context()
    keeper = Gatekeeper(context)
    keeper.protect("clients", KeyPair.make(), lambda key: key == KEY)

    def status(domain: bytes, mechanism: bytes, key: bytes) -> bytes:
        question = [b"1.0", b"1", domain, b"192.0.2.7", b"", mechanism, key]
        answer = keeper._answer([b"peer", b"", *question])
        assert answer is not None and answer[:4] == [b"peer", b"", b"1.0", b"1"]
        return answer[4]

    assert status(b"clients", b"CURVE", KEY) == b"200"
    for wrong in (
        (b"clients", b"CURVE", bytes(32)),
        (b"workers", b"CURVE", KEY),
        (b"", b"CURVE", KEY),
        (b"clients", b"NULL", KEY),
        (b"clients", b"PLAIN", KEY),
    ):
        assert status(*wrong) == b"400"
    assert keeper.refused == 5
    context.term()  # ends the keeper's thread
