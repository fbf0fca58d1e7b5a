"""CURVE on TCP sockets: encryption both ways, and who may connect at all.

A server socket proves itself by its key, a client by one that the server's side has authorised;
the rest never gets past the handshake. Unix sockets need none of this: the kernel's file
permissions are the fence there. ZeroMQ asks whether a client's key is welcome by ZAP (RFC 27),
which :class:`Gatekeeper` answers.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from pathlib import Path

import zmq

from blockflow.core.errors import SystemError_
from blockflow.core.scarcity import is_scarcity
from blockflow.core.text import worth_a_line
from blockflow.tensormq.keys import (
    ClientKeys,
    KeyPair,
    read_key_file,
    require_curve,
    write_key_file,
)

Protect = Callable[[zmq.Socket[bytes]], None]
"""Sets a socket up before it is bound or connected by TCP."""

LINK_FILE = "link.key"
CLIENTS = "clients"
WORKERS = "workers"

_ENDPOINT = "inproc://zeromq.zap.01"
_VERSION = b"1.0"
_FRAMES = 7
"""Of a request with CURVE: version, id, domain, address, identity, mechanism, key."""

_TAKEN = b"200", b"OK"
_LATER = b"300", b"it cannot be judged just now"
_REFUSED = b"400", b"this key is not authorised"
"""Answers. On 300 ZeroMQ says nothing, and the peer makes another connection in the end."""

_ROOM_S = 0.5
_AGAIN_S = 0.02
"""Where there is no descriptor or memory to look a key up, it is tried again for half a second."""

_LOG = logging.getLogger("blockflow.tensormq")


def as_client(keys: ClientKeys) -> Protect:
    """Connect as the owner of ``keys``, to their server and no other."""

    def protect(sock: zmq.Socket[bytes]) -> None:
        require_curve()
        sock.set(zmq.CURVE_SERVERKEY, keys.server)
        sock.set(zmq.CURVE_PUBLICKEY, keys.own.public)
        sock.set(zmq.CURVE_SECRETKEY, keys.own.secret)

    return protect


class Gatekeeper:
    """Answers, in a thread of its own, which keys may connect to the sockets of a context.

    Args:
        context: its sockets are guarded. The thread ends with it.

    Attributes:
        refused: connections turned away so far.
    """

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]]) -> None:
        # A shadow: destroying the context must not close the thread's socket under its feet.
        self._context = zmq.Context(shadow=context)
        self._domains: dict[bytes, Callable[[bytes], bool]] = {}
        self._thread: threading.Thread | None = None
        self.refused = 0

    def protect(self, domain: str, own: KeyPair, allows: Callable[[bytes], bool]) -> Protect:
        """How to make a socket a server that only those connect to whose key ``allows`` takes.

        Args:
            domain: name of this kind of socket.
            own: the server's pair.
            allows: asked with 32 bytes at each new connection, in the Gatekeeper's thread.
        """
        require_curve()
        self._domains[domain.encode()] = allows
        self._start()

        def protect(sock: zmq.Socket[bytes]) -> None:
            sock.set(zmq.ZAP_DOMAIN, domain.encode())
            # Without this, ZeroMQ lets everybody in when nobody answers for the domain.
            sock.set(zmq.ZAP_ENFORCE_DOMAIN, 1)
            sock.set(zmq.CURVE_SERVER, 1)
            sock.set(zmq.CURVE_SECRETKEY, own.secret)

        return protect

    def _start(self) -> None:
        if self._thread is not None:
            return
        sock = self._context.socket(zmq.ROUTER)
        sock.set(zmq.LINGER, 0)
        sock.bind(_ENDPOINT)
        self._thread = threading.Thread(
            target=self._run, args=(sock,), name="bf-gatekeeper", daemon=True
        )
        self._thread.start()

    def _run(self, sock: zmq.Socket[bytes]) -> None:
        try:
            while True:
                frames = sock.recv_multipart()
                answer = self._answer(frames)
                if answer is not None:
                    sock.send_multipart(answer)
        except zmq.ContextTerminated:
            pass
        except zmq.ZMQError:
            _LOG.exception("the gatekeeper ends: nobody can connect any more")
        finally:
            sock.close(0)

    def _answer(self, frames: list[bytes]) -> list[bytes] | None:
        """The reply to one ZAP request; None for what is none."""
        if b"" not in frames:
            return None
        split = frames.index(b"") + 1
        envelope, request = frames[:split], frames[split:]
        if len(request) < 2:
            return None
        status = _REFUSED
        if len(request) == _FRAMES and request[0] == _VERSION and request[5] == b"CURVE":
            allows = self._domains.get(request[2])
            if allows is not None:
                status = _judged(allows, request[6])
        if status is _REFUSED:
            self.refused += 1
            address = request[3].decode("ascii", "replace") if len(request) > 3 else "?"
            if worth_a_line(self.refused):
                _LOG.warning("%s may not connect (%d refused so far)", address, self.refused)
        return [*envelope, _VERSION, request[1], *status, b"", b""]


def _judged(allows: Callable[[bytes], bool], key: bytes) -> tuple[bytes, bytes]:
    """The answer to a key. A peer that is refused for want of room here would be told that it is
    not authorised, and try no more."""
    end = time.monotonic() + _ROOM_S
    while True:
        try:
            return _TAKEN if allows(key) else _REFUSED
        except Exception as e:  # a defect must not open the gate, nor end the thread
            if not is_scarcity(e):
                _LOG.exception("a key could not be judged")
                return _REFUSED
            if time.monotonic() >= end:
                _LOG.warning("a key could not be judged, its owner may come again: %s", e)
                return _LATER
        time.sleep(_AGAIN_S)


class LinkGuard:
    """Protection of the TCP links between the processes of one instance.

    All of them share one key pair, which lies in the instance's private run directory: who can
    read it is one of them. Without that file the links are plain.

    Args:
        keeper: answers for the bound sockets of this process.
        run_dir: of the instance.

    Attributes:
        connect: for sockets that connect; None = plain.

    Raises:
        SystemError_: UNAUTHORIZED: the file is there and unfit.
    """

    def __init__(self, keeper: Gatekeeper, run_dir: Path) -> None:
        self.connect: Protect | None = None
        self._keeper = keeper
        self._pair: KeyPair | None = None
        path = self._path = run_dir / LINK_FILE
        if path.exists():
            pair = self._pair = read_key_file(path)
            self.connect = as_client(ClientKeys(pair, pair.public))

    def bind(self, transport: str) -> Protect | None:
        """For a data socket that this process binds; starts the Gatekeeper if it is needed."""
        pair = self._pair
        if pair is None or transport != "tcp":
            return None
        return self._keeper.protect(WORKERS, pair, lambda key: key == pair.public)

    def lost(self) -> SystemError_ | None:
        """What keeps a process that has started just now from being reached by TCP, if the key of
        an instance that has one is not there any more: its links are plain, and those of all others
        are not. This process may itself have started too late to read it."""
        if self._path.exists():
            return None
        return SystemError_(
            "UNAUTHORIZED",
            "the key of the links between processes is gone: who starts now cannot be reached",
            where=str(self._path),
            hint="nobody but `blockflow up` removes files there: end it, and start it again",
        )


def make_link_key(run_dir: Path) -> None:
    """Protect the TCP links of the instance that ``run_dir`` belongs to; before its first launch.

    A key of a control plane that was here before, and of whose processes none goes on, is replaced:
    it may be torn.

    Raises:
        SystemError_: MISSING_EXTRA, UNAUTHORIZED.
    """
    path = run_dir / LINK_FILE
    path.unlink(missing_ok=True)
    write_key_file(path, KeyPair.make())
