"""REST over TLS: the certificate, and connections whose handshake keeps nobody else waiting.

cheroot's own adapter shakes hands in the thread that accepts connections: a peer that connects and
says nothing would hold up everybody for ten seconds. Here the handshake belongs to the first read,
in the thread of that connection, once something has come on it. A renewed pair of files is taken up
by the next connection.
"""

from __future__ import annotations

import logging
import socket
import ssl
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

from cheroot.errors import FatalSSLAlert
from cheroot.makefile import MakeFile
from cheroot.ssl import Adapter

from blockflow.control.auth import looks
from blockflow.core.errors import BlockFlowError, RequestError
from blockflow.core.scarcity import is_scarcity
from blockflow.tensormq.private_files import read_private

_MAX_KEY_BYTES = 64 * 1024

log = logging.getLogger("blockflow.control")


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


def _nobody() -> None: ...


class Certificate:
    """A certificate and its key, also what takes their place: the files are looked at for each
    connection. Connections that there are keep theirs. Files that are away, unfit or not a pair (of
    which one is renewed, and the other not yet) change nothing; those that there is no room to read
    (a descriptor, memory) are read for the next connection: the one in force may expire soon.

    Args:
        certificate, key: as of :func:`tls_context`.
        in_force: a context until the files give another one; None = they must give one now.
        tell: is called when the files' pair comes into force, the first one too; from any thread.

    Raises:
        RequestError, SystemError_: as :func:`tls_context`; never with one ``in_force``.
    """

    def __init__(
        self,
        certificate: Path,
        key: Path,
        in_force: ssl.SSLContext | None = None,
        tell: Callable[[], None] = _nobody,
    ) -> None:
        self._files = certificate, key
        self._tell = tell
        self._lock = threading.Lock()
        self._seen = self._look()  # before they are read: a change from here on is seen
        if in_force is None:
            self._context = tls_context(certificate, key)
            tell()
        else:
            self._context = in_force
            if not self._take():
                self._seen = []

    def context(self) -> ssl.SSLContext:
        """That of a connection that is made now."""
        if self._look() != self._seen:
            with self._lock:
                seen, before = self._look(), self._context
                if seen != self._seen and self._take():  # else another thread was first
                    self._seen = seen
                if self._context is not before:
                    log.info("the certificate of REST is another one from now on")
        return self._context

    def _take(self) -> bool:
        """Whether the files have said what they have to say; False: there was no room to read."""
        try:
            self._context = tls_context(*self._files)
        except BlockFlowError as e:
            log.warning("%s; the certificate that was in force stays so", e)
            return not is_scarcity(e)
        self._tell()
        return True

    def _look(self) -> list[tuple[int, ...] | None]:
        return [looks(path, follow=True) for path in self._files]  # a renewal moves links


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
        certificate: its context is that of each new connection.
    """

    def __init__(self, certificate: Certificate) -> None:
        self._certificate = certificate

    def bind(self, sock: socket.socket) -> socket.socket:
        return sock

    def wrap(self, sock: socket.socket) -> tuple[ssl.SSLSocket, dict[str, str]]:
        """A new connection."""
        try:
            context = self._certificate.context()
            made = context.wrap_socket(sock, server_side=True, do_handshake_on_connect=False)
        except OSError as e:
            raise FatalSSLAlert(*e.args) from e
        return made, self.get_environ()

    def get_environ(self) -> dict[str, str]:
        return {"wsgi.url_scheme": "https", "HTTPS": "on"}

    def makefile(self, sock: ssl.SSLSocket, mode: str = "r", bufsize: int = -1) -> Any:
        """Asked for by cheroot; the connections make their own."""
        return MakeFile(sock, mode, bufsize)
