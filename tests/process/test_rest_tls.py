"""REST over TLS: answers, refusals, and peers that do not shake hands; certificates made here."""

from __future__ import annotations

import os
import shutil
import socket
import ssl
import struct
import subprocess
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import httpx
import pytest

from blockflow.bench.fuzz.mutate import Mutator
from blockflow.control import system
from blockflow.control.auth import TOKEN_VARIABLE, TokenAuth
from blockflow.control.commands import Commands
from blockflow.control.exposure import check_exposure, check_tls
from blockflow.control.kept_secrets import KeptSecrets
from blockflow.control.rest.server import RestServer
from blockflow.control.rest.tls import Certificate, tls_context
from blockflow.control.settings import ControlSettings
from blockflow.core.errors import BlockFlowError, RequestError
from blockflow.launch.ward import CERTIFICATE, KEY, Line
from blockflow.monitor.rest import CA_VARIABLE, RestClient
from blockflow.tensormq.keys import Keyring

OPENSSL = shutil.which("openssl")
pytestmark = pytest.mark.skipif(OPENSSL is None, reason="certificates are made with openssl")
PATIENCE_S = 20.0


def make_certificate(
    folder: Path, name: str, *more: str, san: str = "IP:127.0.0.1,DNS:localhost"
) -> tuple[Path, Path]:
    """A certificate that signs itself, by default for this machine, and its key."""
    certificate, key = folder / f"{name}.pem", folder / f"{name}.key"
    command = [str(OPENSSL), "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256"]
    command += ["-days", "2", "-subj", f"/CN={name}", "-keyout", str(key), "-out", str(certificate)]
    command += ["-addext", f"subjectAltName={san}"]
    subprocess.run([*command, *(more or ("-nodes",))], check=True, capture_output=True)
    key.chmod(0o600)
    return certificate, key


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    return make_certificate(tmp_path_factory.mktemp("tls"), "server")


@pytest.fixture(scope="module")
def other(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    return make_certificate(tmp_path_factory.mktemp("tls"), "other")


@contextmanager
def serving(
    pair: tuple[Path, Path], auth: TokenAuth | None = None, tls: Certificate | None = None
) -> Iterator[RestServer]:
    """A server whose commands are not asked for anything."""
    commands, tls = cast(Commands, None), tls or Certificate(*pair)
    made = RestServer(commands, "", lambda: None, host="127.0.0.1", port=0, auth=auth, tls=tls)
    made.start()
    try:
        yield made
    finally:
        made.stop()


@pytest.fixture(scope="module")
def server(pair: tuple[Path, Path]) -> Iterator[RestServer]:
    with serving(pair) as made:
        yield made


def document(server: RestServer, **trust: Any) -> Any:
    return RestClient(server.url, timeout_s=PATIENCE_S, **trust).get("/openapi.json")


@contextmanager
def refused(code: str, word: str = "") -> Iterator[None]:
    with pytest.raises(BlockFlowError) as e:
        yield
    assert e.value.code == code
    assert word in str(e.value)


def test_a_client_that_trusts_the_certificate_is_answered(
    server: RestServer, pair: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert server.url == f"https://127.0.0.1:{server.port}"
    assert document(server, ca_file=pair[0])["openapi"].startswith("3.1")
    monkeypatch.setenv(CA_VARIABLE, str(pair[0]))
    assert document(server)["openapi"].startswith("3.1")
    by_name = RestClient(f"https://localhost:{server.port}", timeout_s=PATIENCE_S)
    assert by_name.get("/openapi.json")


def test_malformed_handshakes_hold_nobody_up(server: RestServer, pair: tuple[Path, Path]) -> None:
    hello = ssl.MemoryBIO()
    talk = ssl.create_default_context().wrap_bio(ssl.MemoryBIO(), hello, server_hostname="x")
    with suppress(ssl.SSLWantReadError):
        talk.do_handshake()
    for frame in Mutator([hello.read()], 20).frames(200):
        address = ("127.0.0.1", server.port)
        with socket.create_connection(address, PATIENCE_S) as sock, suppress(ConnectionError):
            sock.sendall(frame)
    assert document(server, ca_file=pair[0])["openapi"].startswith("3.1")


def test_only_its_pages_over_tls_may_change_something(
    server: RestServer, pair: tuple[Path, Path]
) -> None:
    trust = ssl.create_default_context(cafile=str(pair[0]))
    with httpx.Client(verify=trust, timeout=PATIENCE_S) as client:
        for origin, status in ((server.url, 202), (server.url.replace("https", "http"), 403)):
            answer = client.post(f"{server.url}/v1/shutdown", headers={"Origin": origin})
            assert answer.status_code == status


def test_one_that_does_not_ends_before_its_token_has_left(
    server: RestServer, other: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(CA_VARIABLE, raising=False)
    with refused("UNAUTHORIZED", CA_VARIABLE):
        document(server)
    with refused("UNAUTHORIZED", "certificate"):
        document(server, ca_file=other[0])


def test_a_certificate_for_another_name_is_not_enough(tmp_path: Path) -> None:
    mine = make_certificate(tmp_path, "elsewhere", "-nodes", san="DNS:elsewhere.example")
    with serving(mine) as server, refused("UNAUTHORIZED", "127.0.0.1"):
        document(server, ca_file=mine[0])


def test_a_connection_serves_several_requests(server: RestServer, pair: tuple[Path, Path]) -> None:
    """Also two that come in one record: the second is known to TLS alone."""
    context = ssl.create_default_context(cafile=str(pair[0]))
    request = b"GET /v1/nothing HTTP/1.1\r\nHost: localhost\r\n\r\n"
    with (
        socket.create_connection(("127.0.0.1", server.port), PATIENCE_S) as raw,
        context.wrap_socket(raw, server_hostname="localhost") as tls,
    ):
        assert tls.version() in ("TLSv1.2", "TLSv1.3")
        seen = b""
        for count in (1, 2):
            tls.sendall(request * count)
        while seen.count(b"HTTP/1.1 404") < 3:
            got = tls.recv(65536)
            assert got, seen
            seen += got


def test_old_versions_are_refused(pair: tuple[Path, Path]) -> None:
    assert tls_context(*pair).minimum_version == ssl.TLSVersion.TLSv1_2
    assert RestClient("https://localhost")._tls.minimum_version == ssl.TLSVersion.TLSv1_2  # type: ignore[union-attr]


def test_who_does_not_shake_hands_holds_nobody_up(
    server: RestServer, pair: tuple[Path, Path], caplog: pytest.LogCaptureFixture
) -> None:
    address = ("127.0.0.1", server.port)
    with ExitStack() as stack:
        peers = [stack.enter_context(socket.create_connection(address)) for _ in range(40)]
        for peer in peers[:4]:
            peer.sendall(b"\x16\x03\x01\x02")  # a record begins, and that is all
        for peer in peers[4:8]:
            peer.sendall(b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n")
        assert document(server, ca_file=pair[0])["openapi"]
        for peer in peers[4:8]:  # plain HTTP is not answered
            peer.settimeout(PATIENCE_S)
            with suppress(ConnectionError):
                assert not peer.recv(1000).startswith(b"HTTP")
    assert document(server, ca_file=pair[0])["openapi"]
    assert "Traceback" not in caplog.text


@pytest.mark.parametrize("reset", [False, True])
def test_peers_that_go_away_leave_nothing_in_the_log(
    server: RestServer,
    pair: tuple[Path, Path],
    caplog: pytest.LogCaptureFixture,
    reset: bool,
) -> None:
    """Before their answer is there, with and without a reset; nobody has asked for a token yet."""
    caplog.set_level("INFO", "blockflow")
    context = ssl.create_default_context(cafile=str(pair[0]))
    ask = b"GET /v1/x HTTP/1.1\r\nHost: localhost\r\n\r\n"
    for n in range(40):
        raw = socket.create_connection(("127.0.0.1", server.port), PATIENCE_S)
        if reset:
            raw.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        with context.wrap_socket(raw, server_hostname="localhost") as tls:
            tls.sendall(ask * (1 + n % 3))
    assert document(server, ca_file=pair[0])["openapi"]
    assert caplog.messages == []


@pytest.mark.parametrize("reset", [False, True])
def test_what_goes_wrong_with_tls_in_a_body_is_the_peers_affair(
    server: RestServer,
    pair: tuple[Path, Path],
    caplog: pytest.LogCaptureFixture,
    reset: bool,
) -> None:
    context = ssl.create_default_context(cafile=str(pair[0]))
    head = b"POST /v1/monitor HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    for _ in range(5):
        raw = socket.create_connection(("127.0.0.1", server.port), PATIENCE_S)
        tls = context.wrap_socket(raw, server_hostname="localhost")
        tls.sendall(head + b"Content-Length: 1000\r\n\r\n{")
        with socket.socket(fileno=tls.detach()) as bare:
            if not reset:
                bare.sendall(b"\x17\x03\x03\x00\x20" + bytes(32))  # a record that is none of its
                bare.settimeout(PATIENCE_S)
                with suppress(ConnectionError):
                    while bare.recv(65536):
                        pass
    assert document(server, ca_file=pair[0])["openapi"]
    assert caplog.messages == []


def test_plain_http_to_it_says_what_may_be_wrong(server: RestServer) -> None:
    with refused("NOT_RUNNING", "https"):
        RestClient(server.url.replace("https", "http"), timeout_s=PATIENCE_S).get("/openapi.json")


# --- what may serve as a certificate --------------------------------------------------------------


def test_unfit_files_are_refused(
    pair: tuple[Path, Path], other: tuple[Path, Path], tmp_path: Path
) -> None:
    certificate, key = pair
    with refused("INVALID_REQUEST", "go together (at --rest-key)"):
        check_tls(ControlSettings(rest_cert=certificate))
    with refused("INVALID_REQUEST", "go together (at --rest-cert)"):
        check_tls(ControlSettings(rest_key=key))
    with refused("UNAUTHORIZED", "cannot be opened"):
        tls_context(certificate, tmp_path / "none")
    with refused("INVALID_REQUEST", "none.pem"):
        tls_context(tmp_path / "none.pem", key)
    with refused("INVALID_REQUEST", "cannot be used"):
        tls_context(certificate, other[1])  # of another certificate
    with refused("INVALID_REQUEST", "encrypted"):
        tls_context(*make_certificate(tmp_path, "locked", "-passout", "pass:secret"))
    open_key = tmp_path / "open.key"
    open_key.write_bytes(key.read_bytes())
    open_key.chmod(0o644)
    with refused("UNAUTHORIZED", "read by others"):
        tls_context(certificate, open_key)
    link = tmp_path / "link.key"  # as tools for renewal make them
    link.symlink_to(key)
    assert tls_context(certificate, link)
    assert check_tls(ControlSettings()) is None
    with refused("INVALID_REQUEST", "CA file"):
        RestClient("https://localhost", ca_file=key)


def test_beyond_loopback_rest_is_encrypted_unless_said_otherwise(
    pair: tuple[Path, Path], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    ring = Keyring(tmp_path / "keys")
    ring.create()

    def settings(**more: Any) -> ControlSettings:
        return ControlSettings(host="0.0.0.0", keys=ring.folder, **more)

    with refused("INVALID_REQUEST", "--rest-cert"):
        check_exposure(settings())
    assert check_exposure(settings(rest_cert=pair[0], rest_key=pair[1])) is not None
    assert "plain HTTP" not in caplog.text
    assert check_exposure(settings(rest_plain=True)) is not None
    assert "plain HTTP" in caplog.text
    with refused("INVALID_REQUEST", "CURVE keys"):  # TLS is no substitute for the token
        check_exposure(ControlSettings(host="0.0.0.0", rest_cert=pair[0], rest_key=pair[1]))


def test_a_renewed_pair_is_in_force_once_both_files_are_there(
    pair: tuple[Path, Path], other: tuple[Path, Path], tmp_path: Path
) -> None:
    certificate, key = (Path(shutil.copy(path, tmp_path)) for path in pair)
    told: list[bytes] = []
    tls = Certificate(certificate, key, tell=lambda: told.append(certificate.read_bytes()))
    first = tls.context()
    with serving(pair, tls=tls) as server:
        key.unlink()
        assert document(server, ca_file=pair[0])["openapi"], "the file is away"
        shutil.copy(other[0], certificate)
        assert document(server, ca_file=pair[0])["openapi"], "the key is not renewed yet"
        shutil.copy(other[1], tmp_path / "new.key")
        (tmp_path / "new.key").rename(key)
        assert document(server, ca_file=other[0])["openapi"]
        with refused("UNAUTHORIZED", "certificate"):
            document(server, ca_file=pair[0])
        key.chmod(0o644)
        assert document(server, ca_file=other[0])["openapi"], "an unfit file changes nothing"
    assert tls.context() is not first
    assert told == [pair[0].read_bytes(), other[0].read_bytes()]


def test_a_successor_has_the_pair_in_force_unless_the_files_have_another(
    pair: tuple[Path, Path],
    other: tuple[Path, Path],
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    certificate, key = (Path(shutil.copy(path, tmp_path)) for path in pair)
    settings = ControlSettings(rest_cert=certificate, rest_key=key)
    kept, told = KeptSecrets(), dict[str, bytes]()
    kept._line = cast(Line, SimpleNamespace(keep=lambda name, fd: told.update({name: read(fd)})))
    first = check_tls(settings, kept)
    assert told == {CERTIFICATE: pair[0].read_bytes(), KEY: pair[1].read_bytes()}
    assert caplog.messages == []

    with memory_files(told) as kept._fds:
        shutil.copy(other[1], key)  # the certificate has not been renewed yet
        with refused("INVALID_REQUEST", "pair"):
            check_tls(settings)
        successor = check_tls(settings, kept)
        assert first is not None and successor is not None
        for what in ("minimum_version", "options", "sslsocket_class", "verify_mode"):
            assert getattr(first.context(), what) == getattr(successor.context(), what)
        with serving(pair, tls=successor) as server:
            assert document(server, ca_file=pair[0])["openapi"]
    shutil.copy(other[0], certificate)
    for content in (told, {**told, KEY: other[1].read_bytes()}):  # a pair, and none
        with memory_files(dict(content)) as kept._fds:
            renewed = check_tls(settings, kept)
        with serving(pair, tls=renewed) as server:
            assert document(server, ca_file=other[0])["openapi"]


def read(fd: int) -> bytes:
    return os.pread(fd, 1 << 20, 0)


@contextmanager
def memory_files(content: dict[str, bytes]) -> Iterator[dict[str, int]]:
    with ExitStack() as stack:
        fds = {}
        for name, data in content.items():
            fds[name] = os.memfd_create(name)
            stack.callback(os.close, fds[name])
            os.write(fds[name], data)
        yield fds


def test_the_token_goes_with_it(
    pair: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(TOKEN_VARIABLE, raising=False)
    ring = Keyring(tmp_path / "keys")
    ring.create()
    with serving(pair, TokenAuth(ring.token_file)) as server:
        with refused("UNAUTHORIZED", "token"):
            document(server, ca_file=pair[0])
        assert document(server, ca_file=pair[0], token_file=ring.token_file)["openapi"]


def test_a_system_hands_its_certificate_to_rest(
    pair: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    told: dict[str, Any] = {}

    def serve(*_: Any, **options: Any) -> RestServer:
        told.update(options)
        raise RequestError("INVALID_REQUEST", "far enough")

    monkeypatch.setattr(system, "RestServer", serve)
    settings = ControlSettings(
        repository=tmp_path / "blocks",
        state_dir=tmp_path / "state",
        rest_cert=pair[0],
        rest_key=pair[1],
    )
    with refused("INVALID_REQUEST", "far enough"):
        system.System(settings).start()
    assert isinstance(told["tls"], Certificate)
