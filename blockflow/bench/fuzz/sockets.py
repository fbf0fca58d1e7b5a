"""Sockets: malformed frames at every socket of a running system, which must serve on."""

from __future__ import annotations

import http.client
import socket
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import zmq

from blockflow.bench.fuzz import zmtp
from blockflow.bench.fuzz.decoders import (
    body_frames,
    control_frames,
    data_frames,
    request_frames,
    side_frames,
)
from blockflow.bench.fuzz.mutate import Mutator
from blockflow.tensormq.curve import Protect
from blockflow.tensormq.janitor import grant_socket_path

SEND_S = 30.0
"""A socket that takes nothing for so long has failed."""

_PATHS = ("/v1/system-update", "/v1/monitor", "/v1/kpis/store", "/v1/blocks/a/ping", "/v1/ping")
_JSON = {"Content-Type": "application/json"}
_ELEMENTS = bytes(16)
_MANY = 2000
"""Frames of a message that has too many, or no end."""


class Target(ABC):
    """One socket of the system.

    Attributes:
        weight: its share of the frames; what costs more per frame gets fewer.
    """

    name: str
    weight = 1.0

    def __init__(self, seed: int) -> None:
        self.mutator = Mutator(self.valid(), seed)

    @abstractmethod
    def valid(self) -> list[bytes]:
        """Well-formed frames to begin from."""

    @abstractmethod
    def send(self, frame: bytes) -> None:
        """Send one; whatever is answered is read and thrown away.

        Raises:
            OSError, zmq.ZMQError: the socket takes nothing any more.
        """

    def close(self) -> None:  # noqa: B027
        """What is kept; here nothing is."""


class ZmqTarget(Target):
    """A ZeroMQ socket: a frame alone, or with one or two of elements behind it."""

    kind = zmq.PUSH

    def __init__(self, endpoint: str, seed: int, name: str, protect: Protect | None = None) -> None:
        super().__init__(seed)
        self.name = name
        self._count = 0
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._socket = self._context.socket(self.kind)
        self._socket.set(zmq.LINGER, int(SEND_S * 1000))
        self._socket.set(zmq.SNDTIMEO, int(SEND_S * 1000))
        if protect is not None:
            protect(self._socket)
        self._socket.connect(endpoint)

    def send(self, frame: bytes) -> None:
        self._count += 1
        more = [_ELEMENTS] * (self._count % 3)
        self._socket.send_multipart([frame, *more])

    def close(self) -> None:
        self._socket.close()
        self._context.term()


class DataTarget(ZmqTarget):
    """A worker's data socket, or the one that the Dispatcher gets results at."""

    def valid(self) -> list[bytes]:
        return data_frames()


class ClientTarget(ZmqTarget):
    """The Dispatcher's socket for clients."""

    kind = zmq.DEALER

    def valid(self) -> list[bytes]:
        return request_frames()

    def send(self, frame: bytes) -> None:
        super().send(frame)
        with suppress(zmq.Again):
            while True:
                self._socket.recv_multipart(zmq.NOBLOCK)


class ControllerTarget(ClientTarget):
    """The Controller's ROUTER, for a stranger."""

    def valid(self) -> list[bytes]:
        return control_frames()


class TcpTarget(Target):
    """A tcp port, by connections of its own."""

    def __init__(self, host: str, port: int, seed: int) -> None:
        super().__init__(seed)
        self._address = host, port
        self._count = 0


class HandshakeTarget(TcpTarget):
    """The clients' tcp port before ZeroMQ's handshake: one connection per frame."""

    name = "handshake"
    weight = 0.02

    def valid(self) -> list[bytes]:
        hello = b"\x05HELLO\x01\x00" + bytes(192)
        return [
            zmtp.greeting(mechanism) + zmtp.command(body)
            for mechanism in (b"NULL", b"CURVE")
            for body in (zmtp.READY, hello)
        ]

    def send(self, frame: bytes) -> None:
        with socket.create_connection(self._address, SEND_S) as sock, suppress(ConnectionError):
            sock.sendall(frame)


class EndlessTarget(TcpTarget):
    """The clients' tcp port: a message without an end, or with far too many frames."""

    name = "endless messages"
    weight = 0.01

    def valid(self) -> list[bytes]:
        return request_frames()

    def send(self, frame: bytes) -> None:
        self._count += 1
        filler = bytes(self._count % 3 * 40)
        frames = zmtp.frame(frame, more=True) + zmtp.frame(filler, more=True) * _MANY
        end = zmtp.frame(filler, more=False) if self._count % 2 else b""
        # It may be cut off before all of it has been sent.
        with zmtp.connect(*self._address, SEND_S) as sock, suppress(ConnectionError):
            sock.sendall(frames + end)


class SideTarget(Target):
    """The unix socket where the Dispatcher grants memory: a connection until it is closed."""

    name = "grant side"
    weight = 0.2

    def __init__(self, path: Path, seed: int) -> None:
        super().__init__(seed)
        self._path = str(path)
        self._socket: socket.socket | None = None

    def valid(self) -> list[bytes]:
        return side_frames()

    def send(self, frame: bytes) -> None:
        for _ in range(2):
            if self._socket is None:
                self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
                self._socket.settimeout(SEND_S)
                self._socket.connect(self._path)
            try:
                self._socket.send(frame)
                return
            except (BrokenPipeError, ConnectionResetError):  # it had closed on the one before
                self.close()

    def close(self) -> None:
        if self._socket is not None:
            self._socket.close()
            self._socket = None


class RestTarget(TcpTarget):
    """REST: bodies for every resource that takes one, over connections that are kept."""

    name = "REST"
    weight = 0.02

    def __init__(self, host: str, port: int, seed: int) -> None:
        super().__init__(host, port, seed)
        self._connection = self._connect()

    def _connect(self) -> http.client.HTTPConnection:
        return http.client.HTTPConnection(*self._address, timeout=SEND_S)

    def valid(self) -> list[bytes]:
        return body_frames()

    def send(self, frame: bytes) -> None:
        self._count += 1
        path = _PATHS[self._count % len(_PATHS)]
        query = "?dry_run=true" if path == _PATHS[0] else ""
        try:
            self._connection.request("POST", path + query, frame, _JSON)
            self._connection.getresponse().read()
        except (http.client.HTTPException, ConnectionError):
            self._connection.close()
            self._connection = self._connect()

    def close(self) -> None:
        self._connection.close()


@contextmanager
def targets(status: Mapping[str, Any], seed: int) -> Iterator[list[Target]]:
    """Connections to every socket of a system."""
    run_dir = Path(status["run_dir"])
    dispatcher, worker = status["dispatcher"], status["workers"][0]
    host, _, port = str(status["rest"]).removeprefix("http://").rpartition(":")
    made: list[Target] = []
    try:
        for endpoint in dispatcher["clients"]:
            kind = endpoint.partition("://")[0]
            made.append(ClientTarget(endpoint, seed, f"clients, {kind}"))
            if kind == "tcp":
                made.append(HandshakeTarget(*zmtp.place(endpoint), seed))
                made.append(EndlessTarget(*zmtp.place(endpoint), seed))
        made.append(DataTarget(dispatcher["endpoint"], seed, "results"))
        made.append(DataTarget(worker["endpoint"], seed, "worker"))
        made.append(ControllerTarget(f"ipc://{run_dir}/control.sock", seed, "controller"))
        made.append(SideTarget(grant_socket_path(run_dir, dispatcher["incarnation"]), seed))
        made.append(RestTarget(host, int(port), seed))
        yield made
    finally:
        for target in made:
            target.close()
