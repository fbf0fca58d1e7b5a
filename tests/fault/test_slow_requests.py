"""REST among requests without an end, answers that nobody takes, and what is no HTTP."""

from __future__ import annotations

import os
import random
import resource
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from typing import cast

import httpx
import plain_http
import psutil
import pytest
from rest_rig import error_of

from blockflow.control.auth import TokenAuth
from blockflow.control.commands import Commands
from blockflow.control.rest import patience
from blockflow.control.rest.server import RestServer
from blockflow.launch.process import raise_descriptor_limit

PATIENCE_S = 20.0
TAKEN_S = 6.0
"""Less than a time-out of ten seconds for each write would let it take."""

PACE_S = 0.02
DRIPPING = 40
HALVES = 300
MIB = 1024 * 1024
GROWTH = 48 * MIB
HALF_A_HEAD = b"GET /openapi.json HTTP/1.1\r\nHost: localhost\r\nX: "
HALF_A_BODY = (
    b"POST /v1/shutdown HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    b"Content-Length: 100000\r\n\r\n["
)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RestServer]:
    """Wants a token; its commands are not asked for anything. As in ``blockflow up`` it may have as
    many connections as the system allows, which is more than the usual soft limit leaves."""
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    raise_descriptor_limit()
    token = tmp_path_factory.mktemp("rest") / "token"
    token.write_text("s" * 40)
    token.chmod(0o600)
    commands, auth = cast(Commands, None), TokenAuth(token)
    made = RestServer(commands, "", lambda: None, host="127.0.0.1", port=0, auth=auth)
    made.start()
    yield made
    made.stop()
    resource.setrlimit(resource.RLIMIT_NOFILE, limits)


def answers(server: RestServer) -> float:
    """Seconds for one request of somebody with a token."""
    began = time.monotonic()
    headers = {"Authorization": "Bearer " + "s" * 40}
    got = plain_http.get(f"{server.url}/openapi.json", headers=headers, timeout=PATIENCE_S)
    assert got.status_code == 200, got.text
    return time.monotonic() - began


def connect(server: RestServer, text: bytes) -> socket.socket:
    sock = socket.create_connection((server.host, server.port), PATIENCE_S)
    sock.sendall(text)
    return sock


@contextmanager
def dripping(server: RestServer, count: int, text: bytes) -> Iterator[list[int]]:
    """So many requests that go on byte by byte; each that is ended is begun anew, and counted."""
    stop, ended = threading.Event(), [0]
    socks = [connect(server, text) for _ in range(count)]

    def drip() -> None:
        while not stop.wait(0.1):
            for i, sock in enumerate(socks):
                try:
                    sock.sendall(b" ")
                    sock.settimeout(0)
                    if sock.recv(1000):
                        raise ConnectionError
                except BlockingIOError:
                    continue
                except OSError:
                    ended[0] += 1
                    sock.close()
                    socks[i] = connect(server, text)

    thread = threading.Thread(target=drip)
    thread.start()
    try:
        yield ended
    finally:
        stop.set()
        thread.join()
        for sock in socks:
            sock.close()


@pytest.mark.parametrize("text", [HALF_A_HEAD, HALF_A_BODY], ids=["heads", "bodies"])
def test_requests_that_drip_keep_nobody_out(server: RestServer, text: bytes) -> None:
    with dripping(server, DRIPPING, text) as ended:
        asked, end = 0, time.monotonic() + PATIENCE_S
        while asked < 5 or not ended[0]:
            assert answers(server) < PATIENCE_S / 2
            assert time.monotonic() < end, "none was ended"
            asked += 1
    assert answers(server) < PATIENCE_S / 2


def test_many_half_requests_keep_nobody_out(server: RestServer) -> None:
    with ExitStack() as stack:
        for _ in range(HALVES):
            stack.enter_context(connect(server, HALF_A_HEAD))
        for _ in range(3):
            assert answers(server) < PATIENCE_S / 2


def test_a_request_alone_has_its_time_as_a_whole(
    server: RestServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However often a byte comes."""
    monkeypatch.setattr(patience, "WHOLE_S", 1.0)
    for text, status in ((HALF_A_HEAD, b" 400 "), (HALF_A_BODY, b" 401 ")):
        began = time.monotonic()
        head = b""
        with connect(server, text) as sock:
            sock.settimeout(0.05)
            while not head and time.monotonic() < began + PATIENCE_S:
                sock.sendall(b" ")
                with suppress(TimeoutError):
                    head = sock.recv(1000)
        assert status in head


def test_answers_that_nobody_takes_keep_nobody_out(
    server: RestServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    ask = b"GET /openapi.json HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer " + b"s" * 40
    with ExitStack() as stack:
        for _ in range(DRIPPING):
            sock = stack.enter_context(socket.socket())
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1)
            sock.connect((server.host, server.port))
            sock.sendall((ask + b"\r\n\r\n") * 200)
        # Until all of them have filled what the kernel holds for them, and a few times more.
        end = time.monotonic() + 5
        while time.monotonic() < end:
            assert answers(server) < TAKEN_S
            time.sleep(PACE_S)  # what it takes is for those that write to the others


# --- what is no request ---------------------------------------------------------------------------

POST = b"POST /v1/system-update HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
CHUNKED = POST + b"Transfer-Encoding: chunked\r\n"


def exchange(server: RestServer, parts: Callable[[], Iterator[bytes]]) -> bytes:
    """Say all this, or as much of it as is listened to, and read what is answered."""
    with connect(server, b"") as sock:
        with suppress(OSError):
            for part in parts():
                sock.sendall(part)
            sock.shutdown(socket.SHUT_WR)
        got = b""
        with suppress(OSError):
            while more := sock.recv(65536):
                got += more
        return got


class Memory:
    """The most that this process, the server's, has come to hold since."""

    def __enter__(self) -> Memory:
        self._process = psutil.Process(os.getpid())
        self._before = self.most = self._process.memory_info().rss
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._watch)
        self._thread.start()
        return self

    def _watch(self) -> None:
        while not self._stop.wait(0.005):
            self.most = max(self.most, self._process.memory_info().rss)

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()

    def growth(self) -> int:
        return self.most - self._before


def endless(head: bytes, piece: bytes, mib: int) -> Callable[[], Iterator[bytes]]:
    def parts() -> Iterator[bytes]:
        yield head
        whole = piece * (MIB // len(piece))
        for _ in range(mib):
            yield whole

    return parts


ENDLESS = {
    "size of a chunk": endless(CHUNKED + b"\r\n", b"0", 200),
    "extension of a chunk": endless(CHUNKED + b"\r\n5;x=", b"y", 200),
    "chunks": endless(CHUNKED + b"\r\n", b"5\r\n00000\r\n", 200),
    "chunks for a GET": endless(
        b"GET /openapi.json HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\n",
        b"0",
        200,
    ),
    "chunks in HTTP/1.0": endless(CHUNKED.replace(b"1.1", b"1.0") + b"\r\n", b"0", 200),
    "request line": endless(b"GET /", b"a", 200),
    "line of the head": endless(POST + b"X: ", b"a", 200),
    "lines of the head": endless(POST, b"X: y\r\n", 200),
    "folded lines": endless(POST + b"X: y\r\n", b" y\r\n", 200),
    "empty lines": endless(b"", b"\r\n", 200),
    "body without a length": endless(POST + b"\r\n", b"a", 200),
    "body of a negative length": endless(POST + b"Content-Length: -1\r\n\r\n", b"a", 200),
    "body of a huge length": endless(POST + b"Content-Length: 999999999999\r\n\r\n", b"a", 200),
    "body of an odd length": endless(POST + b"Content-Length: 4_000_000\r\n\r\n", b"a", 200),
}


@pytest.mark.parametrize("kind", ENDLESS)
def test_what_has_no_end_is_not_kept(server: RestServer, kind: str) -> None:
    answers(server)
    with Memory() as memory:
        exchange(server, ENDLESS[kind])
        assert answers(server) < PATIENCE_S / 2
    assert memory.growth() < GROWTH, f"{memory.growth() / MIB:.0f} MiB"


def test_a_planted_growth_is_seen() -> None:
    with Memory() as memory:
        kept = bytearray(os.urandom(1024) * (2 * GROWTH // 1024))
        deadline = time.monotonic() + PATIENCE_S
        while memory.growth() < GROWTH and time.monotonic() < deadline:
            memory._stop.wait(0.01)
    assert memory.growth() > GROWTH and kept


def read(answer: bytes) -> httpx.Response:
    head, _, body = answer.partition(b"\r\n\r\n")
    first, *lines = head.split(b"\r\n")
    pairs = [(name, value.strip()) for name, _, value in (x.partition(b":") for x in lines)]
    return httpx.Response(int(first.split()[1]), headers=pairs, content=body)


@pytest.mark.parametrize("method", [b"POST", b"GET", b"PUT"])
@pytest.mark.parametrize("path", [b"/v1/system-update", b"/v1/ping", b"/openapi.json", b"/nothing"])
@pytest.mark.parametrize("coding", [b"chunked", b"gzip, chunked", b"identity", b"", b"\tChunked"])
def test_a_body_in_chunks_is_refused_wherever_it_goes(
    server: RestServer, method: bytes, path: bytes, coding: bytes
) -> None:
    """And what follows it is not taken for a request."""
    raw = method + b" " + path + b" HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: " + coding
    smuggled = b"GET /openapi.json HTTP/1.1\r\nHost: localhost\r\n\r\n"
    got = exchange(server, lambda: iter([raw + b"\r\n\r\n0\r\n\r\n" + smuggled]))
    assert got.startswith(b"HTTP/1.1 400 ") and got.count(b"HTTP/1.1") == 1, got
    assert error_of(read(got))["code"] == "INVALID_REQUEST"
    assert read(got).headers["connection"] == "close"


def test_every_refusal_is_an_error_with_a_code(server: RestServer) -> None:
    for raw, status, code in (
        (b"GET\r\n\r\n", 400, "INVALID_REQUEST"),
        (b"GET / HTTP/9.9\r\n\r\n", 400, "INVALID_REQUEST"),
        (b"GET / HTTP/1 .1\r\n\r\n", 400, "INVALID_REQUEST"),
        (b"GET / HTTP/1.1\r\n folded: x\r\n\r\n", 400, "INVALID_REQUEST"),
        (b"CONNECT a:1 HTTP/1.1\r\n\r\n", 405, "METHOD_NOT_ALLOWED"),
        (POST + b"Content-Length: x\r\n\r\n", 400, "INVALID_REQUEST"),
        (POST + b"Content-Length: -3\r\n\r\nabc", 400, "INVALID_REQUEST"),
        (POST + b"Content-Length: %d\r\n\r\n" % (64 * MIB), 413, "BODY_TOO_LARGE"),
        (b"GET /" + b"a" * 70_000 + b" HTTP/1.1\r\n\r\n", 400, "INVALID_REQUEST"),
        (POST + b"X: y\r\n" * 20_000 + b"\r\n", 413, "BODY_TOO_LARGE"),
    ):
        got = exchange(server, lambda raw=raw: iter([raw]))  # type: ignore[misc]
        assert got.startswith(b"HTTP/1.1 %d " % status), (raw[:40], got[:200])
        assert error_of(read(got))["code"] == code


def test_mangled_requests_end_in_an_answer_or_an_end(server: RestServer) -> None:
    """Random bytes put into, cut from and doubled in sound and unsound requests."""
    seeds = (
        b"GET /v1/status HTTP/1.1\r\nHost: localhost\r\n\r\n",
        POST + b"Content-Length: 2\r\n\r\n{}",
        CHUNKED + b"\r\n2\r\n{}\r\n0\r\n\r\n",
        POST + b"Expect: 100-continue\r\nContent-Length: 2\r\n\r\n{}",
        b"GET /a%2fb?wait=true#x HTTP/1.0\r\nHost: localhost\r\nConnection: Keep-Alive\r\n\r\n",
    )
    pick = random.Random(20)
    answers(server)
    with Memory() as memory:
        for _ in range(800):
            raw = bytearray(pick.choice(seeds))
            for _ in range(pick.randint(1, 6)):
                at = pick.randrange(len(raw) + 1)
                match pick.randrange(4):
                    case 0:
                        raw[at:at] = pick.choice((b"\r\n", b":", b"\0", b" ", b"\xff\xfe", b"%"))
                    case 1:
                        del raw[at : at + pick.randint(1, 20)]
                    case 2:
                        raw[at:at] = raw[at : at + 40] * pick.choice((1, 2, 500))
                    case _:
                        raw[at : at + 1] = bytes([pick.randrange(256)])
            got = exchange(server, lambda raw=bytes(raw): iter([raw]))  # type: ignore[misc]
            assert not got or got.startswith(b"HTTP/1.1 "), (bytes(raw), got)
            assert b" 500 " not in got.partition(b"\r\n")[0], (bytes(raw), got)
    assert answers(server) < PATIENCE_S / 2
    assert memory.growth() < GROWTH
