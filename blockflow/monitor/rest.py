"""A REST client for commands: standard library only, typed errors, never a hang.

The same codes come back that the service raised: an error body is turned into the exception it was.
"""

from __future__ import annotations

import http.client
import io
import json
import os
import socket
import ssl
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from urllib.parse import quote, urlencode, urlsplit

from blockflow.control.auth import API_HEADER, TOKEN_VARIABLE, read_token
from blockflow.core.errors import (
    BlockFlowError,
    RequestError,
    SystemError_,
    from_dict,
    make_error,
)

DEFAULT_URL = "http://127.0.0.1:5780"
URL_VARIABLE = "BLOCKFLOW_URL"
CA_VARIABLE = "BLOCKFLOW_CA_FILE"
MAX_ANSWER_BYTES = 32 * 1024 * 1024

_PATH_SIGNS = "/%!$&'()*+,;=:@"
"""That stand in a URL's path for themselves (RFC 3986), beside letters, digits and ``-._~``."""
_BROKEN_OFF = (ConnectionError, http.client.IncompleteRead, ssl.SSLEOFError)
"""Of a peer that took a request. What says something else than HTTP is another matter."""


class RestClient:
    """One control plane. A connection per call: commands make few.

    Args:
        url: ``http://host:port`` or ``https://host:port``; by default the environment's
            BLOCKFLOW_URL, else ``http://127.0.0.1:5780``.
        timeout_s: for each call as a whole, from the connection to the answer's last byte.
        token_file: private file with the service's token; by default the environment's
            BLOCKFLOW_TOKEN_FILE, else no token is sent.
        ca_file: PEM file with the only certificates that are trusted over https (of an authority,
            or the service's own); by default the environment's BLOCKFLOW_CA_FILE, else those of
            this machine.

    Raises:
        RequestError: INVALID_REQUEST, the URL is none, or the CA file cannot be used.
        SystemError_: UNAUTHORIZED, the token file is unfit.
    """

    def __init__(
        self,
        url: str | None = None,
        *,
        timeout_s: float = 10.0,
        token_file: str | Path | None = None,
        ca_file: str | Path | None = None,
    ) -> None:
        self.url = (url or os.environ.get(URL_VARIABLE) or DEFAULT_URL).rstrip("/")
        self._timeout_s = timeout_s
        try:
            parts = urlsplit(self.url)
            host, port = parts.hostname, parts.port
            (host or "").encode("idna")  # as a connection does
            if quote(parts.path, safe=_PATH_SIGNS) != parts.path:
                raise ValueError  # it cannot be sent as it is
        except ValueError:
            parts, host, port = urlsplit(""), None, None
        if parts.scheme not in ("http", "https") or not host:
            raise RequestError(
                "INVALID_REQUEST",
                "not the URL of a control plane",
                where=self.url,
                hint="use http://host:port or https://host:port",
            )
        self._host, self._prefix = host, parts.path
        self._tls = _trust(ca_file) if parts.scheme == "https" else None
        self._port = port or (80 if self._tls is None else 443)
        file = token_file or os.environ.get(TOKEN_VARIABLE)
        hint = f"let {TOKEN_VARIABLE} name a copy of the service's token, readable by you alone"
        self._token = read_token(Path(file), hint).decode("ascii") if file else ""

    def get(self, path: str) -> Any:
        """GET a resource; returns its JSON document.

        Raises:
            BlockFlowError: the service's own error; NOT_RUNNING when nothing answers, or what does
                is no BlockFlow; CONNECTION_LOST when the answer broke off; TIMEOUT.
        """
        return self._call("GET", path, None, None, self._timeout_s)

    def post(
        self,
        path: str,
        body: bytes | Mapping[str, Any] | None = None,
        query: Mapping[str, str] | None = None,
        *,
        timeout_s: float | None = None,
    ) -> Any:
        """POST a JSON body (bytes are sent as they are); returns the JSON answer. Errors as get."""
        raw = body if isinstance(body, bytes) else json.dumps(body or {}).encode()
        return self._call("POST", path, query, raw, timeout_s or self._timeout_s)

    def _call(
        self,
        method: str,
        path: str,
        query: Mapping[str, str] | None,
        body: bytes | None,
        timeout_s: float,
    ) -> Any:
        target = self._prefix + path + (f"?{urlencode(query)}" if query else "")
        headers = {"Accept": "application/json"}
        if self._token:
            headers["Authorization"] = f"Bearer {self._token}"
        if body is not None:
            headers["Content-Type"] = "application/json"
        end = time.monotonic() + timeout_s
        with self._dial(end) as sock:
            connection = self._connection()
            connection.sock = _Timed(sock, end)
            sent = False
            try:
                connection.request(method, target, body, headers)
                sent = True
                answer = connection.getresponse()
                raw = answer.read(MAX_ANSWER_BYTES + 1)
            except TimeoutError as exc:
                raise make_error(
                    "TIMEOUT",
                    f"no answer within {timeout_s:g} s",
                    where=f"{self.url}{path}",
                    hint="it is busy, or what listens there is no control plane: `blockflow up` "
                    "shows the address (REST)",
                ) from exc
            except (OSError, http.client.HTTPException) as exc:
                # What takes requests and never answers one may as well speak HTTPS. Who only looks
                # is told so; who wanted something done is told that it may have been.
                unheard = method == "GET" and isinstance(exc, ConnectionError)
                if sent and isinstance(exc, _BROKEN_OFF) and not unheard:
                    raise self._lost(method, path) from exc
                why = f"the answer broke off: {exc!r}"
                if self._tls is None:
                    why += "; if it serves HTTPS, its address begins with https://"
                raise self._not_running(why) from exc
        known = answer.getheader(API_HEADER) is not None
        # Less came than was announced, or not even all of the head.
        if known and (not raw or answer.length) and len(raw) <= MAX_ANSWER_BYTES:
            raise self._lost(method, path)
        return self._read(answer, raw, path)

    def _connection(self) -> Any:
        """What speaks HTTP; it has no socket yet."""
        if self._tls is None:
            return http.client.HTTPConnection(self._host, self._port)
        return http.client.HTTPSConnection(self._host, self._port, context=self._tls)

    def _dial(self, end: float) -> socket.socket:
        try:
            sock = _connected(self._host, self._port, end)
            if self._tls is None:
                return sock
            sock.settimeout(_left(end))
            return self._tls.wrap_socket(sock, server_hostname=self._host)
        except ssl.SSLCertVerificationError as exc:
            raise SystemError_(
                "UNAUTHORIZED",
                f"what answers there has no certificate to be trusted: {exc.verify_message}",
                where=self.url,
                hint=f"name the PEM file of its authority, or its own, in {CA_VARIABLE}, and "
                "use a name or address that the certificate is for",
            ) from exc
        except OSError as exc:
            raise self._not_running(str(exc)) from exc

    def _read(self, answer: http.client.HTTPResponse, raw: bytes, path: str) -> Any:
        status = answer.status
        if answer.getheader(API_HEADER) is None:
            raise self._not_running(f"what answers there (HTTP {status}) is not BlockFlow")
        try:
            document = json.loads(raw) if len(raw) <= MAX_ANSWER_BYTES else None
        except (ValueError, RecursionError):
            document = None
        if not isinstance(document, dict):  # as each of its answers is
            what = f"its answer (HTTP {status}, {len(raw)} bytes) is no whole JSON object"
            raise self._not_running(what)
        if status < 400:
            return document
        error = document.get("error")
        if not isinstance(error, dict):
            raise make_error("INTERNAL", f"HTTP {status} without a reason", where=self.url + path)
        raise from_dict(error)

    def _lost(self, method: str, path: str) -> BlockFlowError:
        """The request went out whole, and may have been carried out."""
        message, hint = "the answer broke off", "ask again"
        if method != "GET":
            message += "; whether it took effect is not known"
            hint = "`blockflow status` and `blockflow history` tell what is in force"
        return make_error(
            "CONNECTION_LOST",
            message,
            where=self.url,
            hint=hint,
            retryable=path != "/v1/rollback",  # twice back may be forth again
        )

    def _not_running(self, why: str) -> BlockFlowError:
        return make_error(
            "NOT_RUNNING",
            f"no BlockFlow control plane: {why}",
            where=self.url,
            hint="start one with `blockflow up`, or pass --url",
        )


def _left(end: float) -> float:
    """Seconds until ``end``. Raises TimeoutError: it is over."""
    left = end - time.monotonic()
    if left <= 0:
        raise TimeoutError("timed out")
    return left


def _connected(host: str, port: int, end: float) -> socket.socket:
    """To the first of the host's addresses that takes it; they have one time together. Raises
    OSError."""
    refused = OSError("no address")
    found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    # localhost is 127.0.0.1, where `up` listens, and on many a machine ::1 before it, whose port of
    # that number any user may take: he would get the token.
    for address in sorted((str(a[0]) for *_, a in found), key="::1".__eq__):
        try:
            sock = socket.create_connection((address, port), _left(end))
        except OSError as exc:
            refused = exc
        else:
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            return sock
    raise refused


class _Timed:
    """A connection for http.client, whose own time-out would begin anew with every piece that is
    sent or received: all that is still to come has until ``end``. Its owner closes it."""

    def __init__(self, sock: socket.socket, end: float) -> None:
        self._sock, self._end = sock, end

    def sendall(self, data: bytes) -> None:
        rest = memoryview(data)
        while rest:
            self._sock.settimeout(_left(self._end))
            rest = rest[self._sock.send(rest) :]

    def makefile(self, _mode: str) -> io.BufferedReader:
        return io.BufferedReader(_Pieces(self._sock, self._end))

    def close(self) -> None:
        """Called before an answer that ends the connection has been read."""


class _Pieces(socket.SocketIO):
    def __init__(self, sock: socket.socket, end: float) -> None:
        super().__init__(sock, "r")
        self._peer, self._end = sock, end

    def readinto(self, buffer: Any) -> int | None:
        self._peer.settimeout(_left(self._end))
        return super().readinto(buffer)


def _trust(ca_file: str | Path | None) -> ssl.SSLContext:
    file = ca_file or os.environ.get(CA_VARIABLE)
    try:
        context = ssl.create_default_context(cafile=str(file) if file else None)
    except OSError as exc:
        raise RequestError(
            "INVALID_REQUEST",
            f"the CA file cannot be used: {exc}",
            where=str(file),
            hint="a PEM file with certificates",
        ) from exc
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    return context


def segment(name: str) -> str:
    """A name as one segment of a path.

    Raises:
        RequestError: INVALID_REQUEST: it is empty.
    """
    if not name:
        raise RequestError("INVALID_REQUEST", "the name is empty")
    return quote(name, safe="", errors="surrogateescape")
