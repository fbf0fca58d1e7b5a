"""RestServer: the HTTP server of the control plane (cheroot, the server that CherryPy uses)."""

from __future__ import annotations

import errno
import logging
import socket
import threading
from collections.abc import Callable, Collection
from typing import Any

from blockflow.control.auth import TokenAuth
from blockflow.control.commands import Commands
from blockflow.control.rest.app import RestApp
from blockflow.control.rest.connections import PatientServer
from blockflow.control.rest.defects import Defects
from blockflow.control.rest.openapi import openapi_document
from blockflow.control.rest.origin import SCHEMES
from blockflow.control.rest.resources import Handlers, resources
from blockflow.control.rest.tls import Certificate, TlsAdapter
from blockflow.control.settings import is_loopback, with_port
from blockflow.core import limits
from blockflow.core.errors import RequestError, SystemError_
from blockflow.core.scarcity import no_room
from blockflow.tensormq.listening import no_port

log = logging.getLogger("blockflow.rest")

_THREADS = 32
_IDLE_S = 10
_STOP_S = 2


class _Server(PatientServer):
    """Takes a socket that somebody else has bound; with it, nobody else can take the port."""

    listener: socket.socket | None = None
    begun: threading.Event
    failed: Exception | None = None

    def clear_stats(self) -> None:
        """cheroot lists the figures of every server that there ever was in a process, and with them
        it keeps the server, and the system behind it; nobody reads them here."""
        super().clear_stats()
        listed: dict[str, Any] = logging.statistics  # type: ignore[attr-defined]
        for key in [key for key, figures in listed.items() if figures is self.stats]:
            del listed[key]

    def serve(self) -> None:
        try:
            super().serve()
        except Exception as e:
            if self.begun.is_set():
                raise
            self.failed = e  # for who waits for the beginning
        finally:
            self.begun.set()

    def _serve_unservicable(self) -> None:
        """The last thread that it needs: it serves from now on."""
        self.begun.set()
        super()._serve_unservicable()  # type: ignore[misc]  # missing in its stubs

    def bind(self, family: int, type: int, proto: int = 0) -> Any:
        if self.listener is None:
            return super().bind(family, type, proto)
        self.socket = self.listener
        self.bind_addr = self.resolve_real_bind_addr(self.listener)
        return self.listener


class RestServer:
    """Binds at once, serves after :meth:`start`.

    Args:
        commands: what the resources do.
        repository: shown by GET /v1/repository.
        shutdown: called, after its answer is on the way, by POST /v1/shutdown; returns at once.
        host, port: where to listen; port 0 takes a free one.
        auth: token check, None = open to this machine.
        names: further names of this machine that requests may be sent to.
        tls: HTTPS with it; None = HTTP.
        listener: a socket that listens already, instead of ``host`` and ``port``; it becomes the
            server's.

    Raises:
        SystemError_: PORT_IN_USE; NO_SPACE: no port, descriptor or memory is left for it.
        RuntimeError: this process gets no thread.
        RequestError: INVALID_REQUEST for an address beyond loopback without ``auth``; an empty
            name.
    """

    def __init__(
        self,
        commands: Commands,
        repository: str,
        shutdown: Callable[[], None],
        *,
        host: str,
        port: int,
        auth: TokenAuth | None = None,
        names: Collection[str] = (),
        tls: Certificate | None = None,
        listener: socket.socket | None = None,
    ) -> None:
        if auth is None and not is_loopback(host):
            raise RequestError(
                "INVALID_REQUEST", f"refusing to listen on {host!r} without a token", where="host"
            )
        if not all(name.strip() for name in names):
            hint = "leave --name out, or name the machine as its clients do"
            raise RequestError("INVALID_REQUEST", "a name is empty", where="name", hint=hint)
        document: dict[str, Any] = {}
        handlers = Handlers(commands, repository, shutdown, lambda: document)
        table = resources(handlers)
        document.update(openapi_document(table))
        # Plain HTTP may have a proxy before it that adds the TLS.
        schemes = SCHEMES if tls is None else ("https",)
        self._server = _Server(
            (host, port),
            RestApp(table, host, auth, names, schemes).wsgi(),
            numthreads=_THREADS,
            max=_THREADS,  # cheroot's pool does not grow by itself
            server_name="blockflow",
            timeout=_IDLE_S,  # of a connection without a request
            shutdown_timeout=_STOP_S,
            request_queue_size=512,
        )
        self._server.max_request_header_size = 64 * 1024
        # One more than the limit passes, so that the application answers with its own error.
        self._server.max_request_body_size = 4 * limits.MAX_REST_BODY_BYTES
        self._server.error_log = Defects(log).of_server  # type: ignore[method-assign]
        self._scheme = "http"
        if tls is not None:
            self._server.ssl_adapter = TlsAdapter(tls)
            self._scheme = "https"
        self._server.listener = listener
        self._server.begun = threading.Event()
        try:
            self._server.prepare()
        except OSError as e:
            raise _not_listening(e, self._scheme, with_port(host, port)) from e
        self.host, self.port = host, int(self._server.bind_addr[1])
        self._thread = threading.Thread(target=self._server.serve, name="bf-rest", daemon=True)

    @property
    def url(self) -> str:
        return f"{self._scheme}://{with_port(self.host, self.port)}"

    def fileno(self) -> int:
        """Of the listening socket."""
        return int(self._server.socket.fileno())

    def start(self) -> None:
        """Serve from now on. Raises RuntimeError: this process gets no thread."""
        self._thread.start()
        self._server.begun.wait()
        if self._server.failed is not None:
            raise self._server.failed

    def stop(self) -> None:
        """Stop listening; requests under way have two seconds. Idempotent."""
        self._server.stop()
        if self._thread.is_alive():
            self._thread.join()


def _not_listening(e: OSError, scheme: str, place: str) -> SystemError_ | RequestError:
    """Why the server does not get its address."""
    if e.errno == errno.EADDRINUSE or "in use" in str(e):
        if place.endswith(":0"):
            return no_port(f"{scheme}://{place}")
        return SystemError_(
            "PORT_IN_USE",
            f"another process listens on {place}",
            where=f"{scheme}://{place}",
            hint="stop it, or choose another --port (0 takes a free one)",
        )
    why = f"cannot listen on {place}: {e}"
    if scarce := no_room(e, why, f"{scheme}://{place}"):
        return scarce
    if e.errno == errno.EACCES or "Permission denied" in str(e):
        hint = "ports below 1024 are root's: take a higher --port, behind a proxy if need be"
        return RequestError("INVALID_REQUEST", why, where="port", hint=hint)
    return RequestError("INVALID_REQUEST", why, where="host")
