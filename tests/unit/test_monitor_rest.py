"""The commands' REST client: whom it takes for BlockFlow, and for how long it waits."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from fake_rest import FakeRest

from blockflow.control.auth import API, API_HEADER
from blockflow.core.errors import BlockFlowError
from blockflow.monitor import rest
from blockflow.monitor.rest import RestClient

ANSWER = f"HTTP/1.1 200 OK\r\n{API_HEADER}: {API}\r\nContent-Length: 13\r\n\r\n" + '{"live":true}'


def test_what_answers_as_blockflow_does_and_is_another_service() -> None:
    with FakeRest({"GET /v1/epoch": (200, {}), "POST /v1/system-update": (200, {})}) as fake:
        client = RestClient(fake.url)
        assert client.get("/v1/epoch") == {}
        fake.headers.clear()
        for ask in (client.get, client.post):
            for path in ("/v1/epoch", "/v1/system-update", "/v1/none"):
                with pytest.raises(BlockFlowError, match="is not BlockFlow") as e:
                    ask(path)
                assert (e.value.code, e.value.where) == ("NOT_RUNNING", fake.url)


@contextmanager
def dripping(answer: str, whole: int) -> Iterator[str]:
    """A server whose answer comes at once up to ``whole`` bytes, and then byte by byte."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        gone = threading.Event()

        def serve() -> None:
            with listener.accept()[0] as peer, suppress(OSError):
                peer.recv(65536)
                peer.sendall(answer[:whole].encode())
                for byte in answer[whole:].encode():
                    gone.wait(0.1)
                    peer.sendall(bytes([byte]))
                peer.shutdown(socket.SHUT_WR)
                while peer.recv(65536):  # unread, a body that came later would make it a reset
                    pass

        thread = threading.Thread(target=serve)
        thread.start()
        try:
            yield f"http://127.0.0.1:{listener.getsockname()[1]}"
        finally:
            gone.set()
            thread.join()


@pytest.mark.parametrize("whole", [0, len(ANSWER) - 13])
def test_an_answer_in_drops_has_one_time_as_a_whole(whole: int) -> None:
    with dripping(ANSWER, whole) as url, pytest.raises(BlockFlowError) as e:
        RestClient(url, timeout_s=0.3).get("/v1/health/live")
    assert (e.value.code, e.value.where) == ("TIMEOUT", f"{url}/v1/health/live")


def test_an_answer_in_drops_that_has_time_is_read() -> None:
    with dripping(ANSWER, len(ANSWER) - 2) as url:
        assert RestClient(url).get("/v1/health/live") == {"live": True}


def test_an_answer_that_ends_the_connection_is_read_whole() -> None:
    closing = ANSWER.replace("Content-Length: 13", "Connection: close")
    with dripping(closing, len(closing) - 1) as url:
        assert RestClient(url).get("/v1/health/live") == {"live": True}


def test_an_answer_that_breaks_off_is_no_other_service() -> None:
    with (
        dripping(ANSWER[:-1], len(ANSWER)) as url,
        pytest.raises(BlockFlowError, match="broke off") as e,
    ):
        RestClient(url).get("/v1/health/live")
    assert (e.value.code, e.value.hint) == ("CONNECTION_LOST", "ask again")


@pytest.mark.parametrize("said", ["", ANSWER[:40], ANSWER[:-13]])
def test_who_hears_no_answer_is_not_told_that_nothing_was_done(said: str) -> None:
    with dripping(said, len(said)) as url, pytest.raises(BlockFlowError) as e:
        RestClient(url).post("/v1/system-update", {})
    assert (e.value.code, e.value.where, e.value.retryable) == ("CONNECTION_LOST", url, True)
    assert "whether it took effect is not known" in e.value.message
    assert "https" not in e.value.message and "blockflow history" in e.value.hint
    with dripping(said, len(said)) as url, pytest.raises(BlockFlowError) as e:
        RestClient(url).post("/v1/rollback", {})
    assert (e.value.code, e.value.retryable) == ("CONNECTION_LOST", False)  # that would go forth


def test_what_speaks_no_http_is_no_control_plane() -> None:
    said = "\x15\x03\x01\x00\x02\x02"  # a TLS alert
    with dripping(said, len(said)) as url, pytest.raises(BlockFlowError, match="https://") as e:
        RestClient(url).post("/v1/system-update", {})
    assert e.value.code == "NOT_RUNNING"


def test_the_addresses_of_a_host_share_the_time(monkeypatch: pytest.MonkeyPatch) -> None:
    now, given = [100.0], list[tuple[str, float]]()

    def silent(address: tuple[str, int], timeout: float) -> socket.socket:
        given.append((address[0], timeout))
        now[0] += 4
        raise TimeoutError("timed out")

    found = [(socket.AF_INET, 1, 6, "", (f"192.0.2.{n}", 1)) for n in (1, 2, 3, 4)]
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: found)
    monkeypatch.setattr(socket, "create_connection", silent)
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    with pytest.raises(TimeoutError):
        rest._connected("some.example", 1, 110.0)
    assert given == [("192.0.2.1", 10), ("192.0.2.2", 6), ("192.0.2.3", 2)]


def test_a_handshake_has_what_the_connection_left(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[tuple[float | None, str]] = []

    def wrap(sock: socket.socket, server_hostname: str) -> socket.socket:
        seen.append((sock.gettimeout(), server_hostname))
        return sock

    client: Any = RestClient("https://localhost")
    near, far = socket.socketpair()
    with near, far:
        near.settimeout(100.0)
        monkeypatch.setattr(rest, "_connected", lambda *_: near)
        client._tls = SimpleNamespace(wrap_socket=wrap)
        assert client._dial(time.monotonic() + 10) is near
    ((left, name),) = seen
    assert left is not None and 0 < left <= 10 and name == "localhost"


def test_the_first_address_that_takes_it_serves(monkeypatch: pytest.MonkeyPatch) -> None:
    look_up = socket.getaddrinfo

    def both(host: str, *args: Any, **kw: Any) -> Any:
        hosts = ("127.9.9.9", "127.0.0.1") if host == "some.example" else (host,)
        return [found for each in hosts for found in look_up(each, *args, **kw)]

    with socket.create_server(("127.0.0.1", 0)) as listener:
        monkeypatch.setattr(socket, "getaddrinfo", both)
        port = listener.getsockname()[1]
        with rest._connected("some.example", port, time.monotonic() + 10) as sock:
            assert sock.getpeername() == ("127.0.0.1", port)
            assert sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)


def test_an_answer_is_read_up_to_its_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    with FakeRest({"GET /v1/a": b'{"a": 1}', "GET /v1/b": b'{"a": 12}'}) as fake:
        monkeypatch.setattr(rest, "MAX_ANSWER_BYTES", 8)
        assert RestClient(fake.url).get("/v1/a") == {"a": 1}
        with pytest.raises(BlockFlowError, match="9 bytes") as e:
            RestClient(fake.url).get("/v1/b")
        assert e.value.code == "NOT_RUNNING"


def test_what_is_given_counts_more_than_the_environment(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    for variable in (rest.URL_VARIABLE, rest.TOKEN_VARIABLE, rest.CA_VARIABLE):
        monkeypatch.setenv(variable, str(tmp_path / "none"))
    token = tmp_path / "token"
    token.write_text("s" * 40)
    token.chmod(0o600)
    with FakeRest({"GET /below/v1/a": (200, {"a": 1})}) as fake:
        client = RestClient(f"{fake.url}/below/", token_file=token)
        assert client.url == f"{fake.url}/below"
        assert client.get("/v1/a") == {"a": 1}
    with pytest.raises(BlockFlowError) as e:
        RestClient(fake.url)
    assert (e.value.code, e.value.where) == ("UNAUTHORIZED", str(tmp_path / "none"))
    assert "a copy of the service's token" in e.value.hint  # a new one would be of no use
    with pytest.raises(BlockFlowError) as e:
        RestClient("https://localhost", token_file=token, ca_file=token)
    assert (e.value.code, e.value.where) == ("INVALID_REQUEST", str(token))


def test_the_ports_that_need_not_be_said() -> None:
    assert [RestClient(f"{s}://localhost")._port for s in ("http", "https")] == [80, 443]


def test_a_call_may_be_given_more_time_than_the_others() -> None:
    def slow(_: bytes) -> tuple[int, Any]:
        time.sleep(0.3)
        return 200, {}

    with FakeRest({"POST /v1/a": slow}) as fake:
        client = RestClient(fake.url, timeout_s=0.05)
        assert client.post("/v1/a", timeout_s=10.0) == {}
        with pytest.raises(BlockFlowError, match=r"within 0\.05 s") as e:
            client.post("/v1/a")
        assert e.value.code == "TIMEOUT"


def test_localhost_is_where_up_listens(monkeypatch: pytest.MonkeyPatch) -> None:
    """At the other address of that name any user may listen, while the system runs too."""
    v6, v4 = (socket.AF_INET6, ("::1", 0, 0, 0)), (socket.AF_INET, ("127.0.0.1", 0))
    both = [(family, socket.SOCK_STREAM, 6, "", address) for family, address in (v6, v4)]
    asked: list[str] = []

    def refuse(address: tuple[str, int], _timeout: float) -> None:
        asked.append(address[0])
        raise ConnectionRefusedError

    monkeypatch.setattr(socket, "getaddrinfo", lambda *_a, **_kw: both)
    monkeypatch.setattr(socket, "create_connection", refuse)
    with pytest.raises(BlockFlowError, match="NOT_RUNNING"):
        RestClient("http://localhost:1").get("/v1/epoch")
    assert asked == ["127.0.0.1", "::1"]


def test_a_name_is_one_segment() -> None:
    assert rest.segment("a/b#0 %") == "a%2Fb%230%20%25"


def test_a_request_goes_out_whole_or_in_time_not_at_all() -> None:
    near, far = socket.socketpair()
    data = bytes(range(256)) * 4096 * 2
    with near, far:
        got = bytearray()
        reader = threading.Thread(
            target=lambda: got.extend(b"".join(iter(lambda: far.recv(65536), b"")))
        )
        reader.start()
        rest._Timed(near, time.monotonic() + 10).sendall(data)
        near.shutdown(socket.SHUT_WR)
        reader.join()
        assert got == data
    near, far = socket.socketpair()
    near.setblocking(False)
    with near, far, pytest.raises(TimeoutError):
        rest._Timed(near, time.monotonic() + 0.1).sendall(data)  # which nobody takes
