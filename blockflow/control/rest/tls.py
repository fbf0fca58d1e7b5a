"""REST over TLS: the certificate, and connections whose handshake keeps nobody else waiting.

cheroot's own adapter shakes hands in the thread that accepts connections: a peer that connects and
says nothing would hold up everybody for ten seconds. Here the handshake belongs to the first read,
in the thread of that connection, once something has come on it.
"""

from __future__ import annotations

import socket
import ssl
from pathlib import Path
from typing import Any

from cheroot.errors import FatalSSLAlert
from cheroot.makefile import MakeFile
from cheroot.ssl import Adapter

from blockflow.core.errors import RequestError
from blockflow.tensormq.private_files import read_private

_MAX_KEY_BYTES = 64 * 1024


def tls_context(certificate: Path, key: Path) -> ssl.SSLContext:
    """TLS 1.2 and later with this certificate (and those that lead to its root, in one PEM file).

    Raises:
        RequestError: INVALID_REQUEST: they cannot be used, or are not a pair.
        SystemError_: UNAUTHORIZED: others can read the key.
    """
    # A key is often reached by a link that is moved at each renewal: what it leads to counts.
    secret = key.resolve()
    read_private(secret, "the key of REST's certificate", _MAX_KEY_BYTES)
    try:
        return loaded_context(certificate, secret)
    except (OSError, ValueError) as e:  # an SSLError is an OSError
        raise RequestError(
            "INVALID_REQUEST",
            f"the certificate and its key cannot be used: {e}",
            where=str(certificate),
            hint="--rest-cert takes a PEM certificate, --rest-key its PEM key without a password",
        ) from e


def loaded_context(certificate: Path | str, key: Path | str) -> ssl.SSLContext:
    """As :func:`tls_context`, whoever can read the key. Raises OSError or ValueError."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.options |= ssl.OP_NO_RENEGOTIATION
    context.sslsocket_class = _Socket
    context.load_cert_chain(certificate, key, password=_no_password)
    return context


def _no_password() -> str:
    # Without this OpenSSL would ask for it at the terminal.
    raise ValueError("the key is encrypted")


class _Socket(ssl.SSLSocket):
    """Ends quietly with a peer that breaks the protocol, or goes away without a word."""

    def recv_into(self, *args: Any, **kwargs: Any) -> int:
        try:
            return super().recv_into(*args, **kwargs)
        except ssl.SSLError as e:
            raise FatalSSLAlert(*e.args) from e

    def send(self, *args: Any, **kwargs: Any) -> int:
        try:
            return super().send(*args, **kwargs)
        except ssl.SSLError as e:
            raise FatalSSLAlert(*e.args) from e


class TlsAdapter(Adapter):
    """What cheroot asks for a connection's socket and files.

    Args:
        context: of :func:`tls_context`.
    """

    def __init__(self, context: ssl.SSLContext) -> None:
        self.context = context

    def bind(self, sock: socket.socket) -> socket.socket:
        return sock

    def wrap(self, sock: socket.socket) -> tuple[ssl.SSLSocket, dict[str, str]]:
        """A new connection."""
        try:
            made = self.context.wrap_socket(sock, server_side=True, do_handshake_on_connect=False)
        except OSError as e:
            raise FatalSSLAlert(*e.args) from e
        return made, self.get_environ()

    def get_environ(self) -> dict[str, str]:
        return {"wsgi.url_scheme": "https", "HTTPS": "on"}

    def makefile(self, sock: ssl.SSLSocket, mode: str = "r", bufsize: int = -1) -> Any:
        """Asked for by cheroot; the connections make their own."""
        return MakeFile(sock, mode, bufsize)
