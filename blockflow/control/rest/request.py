"""What the HTTP server makes of a request's head: stricter than cheroot, and refusals as JSON."""

from __future__ import annotations

import json
import re
import socket
from contextlib import suppress
from typing import Any

from cheroot.errors import FatalSSLAlert
from cheroot.server import HeaderReader, HTTPRequest

from blockflow.control.auth import API, API_HEADER
from blockflow.control.rest.body import JSON_TYPE
from blockflow.core.errors import SystemError_

_LINGER_S = 1.0
_LINGER_BYTES = 4 * 1024 * 1024
"""So long, and for so much, a peer is listened to whose head was refused, for the same reason."""

_PIECE_BYTES = 65536
_VERSIONS = (b"HTTP/1.0", b"HTTP/1.1")


def refusal(status: str, message: str) -> SystemError_:
    """What the server itself refused, as an error with a code. ``status`` as HTTP has it."""
    known = {"404": "NOT_FOUND", "405": "METHOD_NOT_ALLOWED", "413": "BODY_TOO_LARGE"}
    other = "INTERNAL" if status.startswith("500") else "INVALID_REQUEST"
    return SystemError_(known.get(status[:3], other), f"{status}: {message}".strip(" :")[:300])


_ONCE = frozenset(
    {
        b"Host",
        b"Content-Length",
        b"Content-Type",
        b"Authorization",
        b"Origin",
        b"Sec-Fetch-Site",
    }
)
"""Headers that say who is meant, what comes, or who asks."""


_NAME = re.compile(rb"[!#$%&'*+.^_`|~0-9A-Za-z-]+")
"""Of a header (RFC 9110, 5.6.2)."""

_ENDS = re.compile(rb"[\r\0]")
"""Where others may see the end of a value."""


class _Head(dict[bytes, bytes]):
    """Headers by name. cheroot takes the last of those that come again; what stands before this
    service (a proxy that adds TLS) may have taken another one."""

    def __setitem__(self, name: bytes, value: bytes) -> None:
        if _ENDS.search(value):
            raise ValueError(f"{name.decode('ascii')} holds the end of a line, or a zero byte.")
        if name in self and name in _ONCE:
            raise ValueError(f"{name.decode('ascii')} comes more than once, or in several lines.")
        super().__setitem__(name, value)


class _StrictHeaders(HeaderReader):
    """Refuses bodies whose end only their own bytes tell, lengths that are no plain number, and
    what must stand once and comes again.

    cheroot reads the size of a chunk as a line without a bound, before anybody was asked for a
    token; and a body in chunks that nobody reads would be taken for the next request.
    """

    def __call__(self, rfile: Any, hdict: dict[bytes, bytes] | None = None) -> dict[bytes, bytes]:
        headers = _Head()
        try:
            super().__call__(rfile, headers)
        except UnboundLocalError as e:  # cheroot 11, when the first line is a folded one
            raise ValueError("Illegal header line.") from e
        if b"Transfer-Encoding" in headers:
            raise ValueError("Transfer-Encoding is not taken: send the body with a Content-Length.")
        if not headers.get(b"Content-Length", b"0").isdigit():
            raise ValueError("Malformed Content-Length Header.")
        if hdict is None:
            return headers
        hdict.update(headers)
        return hdict

    def _transform_key(self, key_name: bytes) -> bytes:
        # cheroot strips blanks: "Content-Length : 5" would announce a body here, and none to what
        # stands before this service, which would take its bytes for another request.
        if not _NAME.fullmatch(key_name):
            raise ValueError("Illegal header name.")
        name: bytes = super()._transform_key(key_name)  # type: ignore[misc]  # not in its stubs
        return name

    def _allow_header(self, key_name: bytes) -> bool:
        # WSGI has one name for "Sec_Fetch_Site" and "Sec-Fetch-Site": the one would be taken for
        # the other, past what is looked at here. Proxies leave such names out as well.
        return b"_" not in key_name


class StrictRequest(HTTPRequest):
    """A request whose refusals have the form of all other errors."""

    header_reader = _StrictHeaders()

    def read_request_line(self) -> bool:
        if not super().read_request_line():
            return False
        # cheroot takes blanks, signs and zeros in the version, of which CherryPy then makes a 500.
        if self.request_protocol not in _VERSIONS:
            self.simple_response("400 Bad Request", "Malformed Request-Line: bad version")
            return False
        return True

    def send_headers(self) -> None:
        # The rest of a body is taken first: what is closed while something is unread is reset, and
        # then the answer may be lost. If it does not come the connection ends all the same.
        try:
            while self.rfile.remaining > 0 and self.rfile.read(_PIECE_BYTES):
                pass
        except OSError:
            self.close_connection = True
        self.outheaders.append((API_HEADER.encode(), API.encode()))
        super().send_headers()

    def simple_response(self, status: Any, msg: str = "") -> None:
        """Refuse the request and end the connection."""
        self.close_connection = True
        if msg.startswith("Absolute URI") and self.uri.startswith(b"//"):
            msg = "The path begins with two slashes."  # cheroot takes what follows for a host
        error = refusal(str(status), msg)
        document = json.dumps({"error": error.to_dict()}).encode()
        head = (
            f"{self.server.protocol} {error.info.http} {error.code}\r\n"
            f"{API_HEADER}: {API}\r\n"
            f"Content-Type: {JSON_TYPE}\r\nContent-Length: {len(document)}\r\n"
            "Connection: close\r\n\r\n"
        )
        with suppress(OSError, FatalSSLAlert):
            bare = getattr(self, "method", b"") == b"HEAD"  # unset where no line could be read
            self.conn.wfile.write(head.encode("ascii") + (b"" if bare else document))
            if self.conn.reading.left() > 0:
                self._linger()

    def _linger(self) -> None:
        self.conn.socket.shutdown(socket.SHUT_WR)
        self.conn.reading.restart(_LINGER_S)
        left = _LINGER_BYTES
        while left > 0 and (taken := self.conn.rfile.read(min(left, _PIECE_BYTES))):
            left -= len(taken)
