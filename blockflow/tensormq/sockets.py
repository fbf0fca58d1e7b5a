"""ZeroMQ sockets with the options that the project relies on, and the cache of sending sockets.

ZeroMQ's defaults are unlimited queues, unlimited messages and an endless linger. Here every queue
is finite (what comes by tcp is bounded by who reads it), no send ever waits, a message to nobody is
an error, and closing is bounded.
"""

from __future__ import annotations

import ctypes
import os
import secrets
import socket as std_socket
from collections.abc import Iterable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import zmq

from blockflow.core import limits
from blockflow.core.errors import BlockFlowError, RequestError, SystemError_
from blockflow.core.scarcity import SCARCE, failure, no_room
from blockflow.tensormq.curve import Protect
from blockflow.tensormq.entrance import HANDSHAKE_MS, watch_entrance
from blockflow.tensormq.janitor import data_socket_path
from blockflow.tensormq.listening import clear_stale, full, in_use, no_port
from blockflow.tensormq.ports import is_tcp, is_v6, listen_beside
from blockflow.tensormq.zmq_threads import THREADS, check_threads

OLDEST_LIBZMQ = (4, 3, 3)
"""Older ones have a remote stack overflow in their handshake (CVE-2019-13132) and others."""

DATA_HWM = 256
"""Messages in one data socket's queue; credits keep the real number far below."""

CONTROL_HWM = 1000
LINGER_MS = 1000
_BACKLOG = 512
"""Connections that wait to be accepted; whoever comes beyond them tries again a second later."""

CURVE_BYTES = 33
"""What CURVE adds to a frame: the command's name, a nonce, the box's overhead, and flags."""

SLOWEST_NS_PER_BYTE = 250
"""A large frame may take a second for every 4 MB: slow links are given so long."""


_UNACKNOWLEDGED_MS = 5000
"""By the kernel; a window that is shut for so long counts as well, whatever is acknowledged."""
_CIPHERS_MS = 10_000
"""... and so much longer with CURVE: ZeroMQ's thread reads for nobody while it en- and decrypts one
frame after the other, half a second for the largest, and several where cores are short."""
_HEARTBEAT_MS = 1000
_HEARTBEAT_TIMEOUT_MS = 5000
"""... and as long as the largest frame may take: see :func:`watch_peer`."""

_CONNECT_MS = 3000
"""An attempt by tcp; the next follows. The kernel's own is long: it asks ever more seldom."""
_RECONNECT_MS = 50
_RECONNECT_MAX_MS = 1000
_MAX_PORT = 65535

_DESCRIPTORS = 6
"""Of a context with its first socket."""

_ZERO_COPY_RECV = 10
"""Of a context (``zmq.h``); pyzmq has no name for it."""


def new_context() -> zmq.Context[zmq.Socket[bytes]]:
    """A context of this process; make it after a fork, never before.

    Raises:
        SystemError_: MISSING_EXTRA: libzmq is too old to be safe; NO_SPACE: this process gets no
            thread or descriptor, INTERNAL: its threads are not allowed what they do, and libzmq
            would end it.
    """
    version = zmq.zmq_version_info()
    if version < OLDEST_LIBZMQ:
        raise SystemError_(
            "MISSING_EXTRA",
            f"libzmq {version} is older than {OLDEST_LIBZMQ}",
            hint="install a current pyzmq; its wheels bring libzmq along",
        )
    _try_descriptors()
    check_threads(THREADS)
    # A ROUTER names who has no name by a counter, and ends the process when a name is taken. The
    # counter begins at C's rand(), which begins at the same number in every process: a peer could
    # give itself the name that comes next.
    ctypes.CDLL(None).srand(secrets.randbits(32))
    context = zmq.Context()
    # Else each small frame keeps the whole buffer that it was read with: a peer that sends 40 bytes
    # at a time takes 200 times as much memory as it sends.
    with suppress(zmq.ZMQError):
        context.set(_ZERO_COPY_RECV, 0)
    return context


def _try_descriptors() -> None:
    free: list[int] = []
    try:
        for _ in range(_DESCRIPTORS):
            free.append(os.eventfd(0, os.EFD_CLOEXEC))
    except OSError as e:
        raise failure(e, f"ZeroMQ needs {_DESCRIPTORS} descriptors: {e}", "libzmq") from e
    finally:
        for fd in free:
            os.close(fd)


def bind_pull(
    ctx: zmq.Context[zmq.Socket[bytes]],
    transport: str,
    run_dir: Path,
    incarnation: int,
    host: str = "127.0.0.1",
    hwm: int = DATA_HWM,
    protect: Protect | None = None,
) -> tuple[zmq.Socket[bytes], str]:
    """The data socket of a worker or the Dispatcher, and the endpoint that reaches it.

    libzmq leaves the file of an ipc socket behind when it is closed: the process removes it with
    :func:`~blockflow.tensormq.janitor.remove_leavings`. Who may keep a connection to a tcp port,
    which is open to all of the machine, :mod:`~blockflow.tensormq.entrance` says.

    Args:
        transport: ``ipc`` (a socket file in the run directory) or ``tcp`` (a free port of
            ``host``).
        protect: sets CURVE up; for tcp alone.

    Raises:
        SystemError_: PORT_IN_USE, or NO_SPACE: no port, descriptor, memory or thread is left for
            it.
        RequestError: INVALID_REQUEST: an unknown transport or a bad address.
    """
    if transport == "ipc":
        address = f"ipc://{data_socket_path(run_dir, incarnation)}"
    elif transport == "tcp":
        address = f"tcp://{host}:0"
    else:
        raise RequestError("INVALID_REQUEST", f"transport {transport!r} is neither ipc nor tcp")
    sock = _socket(ctx, zmq.PULL, limits.MAX_MESSAGE_BYTES, hwm)
    sock.set(zmq.BACKLOG, _BACKLOG)
    sock.set(zmq.HANDSHAKE_IVL, HANDSHAKE_MS)
    bound = _bind(sock, address, protect)
    if transport == "tcp":
        try:
            watch_entrance(ctx, sock, bound)
        except (zmq.ZMQError, OSError, RuntimeError) as exc:
            sock.close(0)
            raise full(bound, exc) from exc
    return sock, bound


def bind_router(
    ctx: zmq.Context[zmq.Socket[bytes]],
    endpoints: Sequence[str],
    max_bytes: int = limits.MAX_MESSAGE_BYTES,
    hwm: int = CONTROL_HWM,
    protect: Protect | None = None,
) -> tuple[zmq.Socket[bytes], list[str]]:
    """A ROUTER on all of ``endpoints``, and those as bound (port 0 replaced by the real one).

    ``protect`` sets CURVE up for the tcp ones. When one cannot be bound, nothing is left of the
    others.

    Sending to a peer that is not connected raises ``zmq.ZMQError`` EHOSTUNREACH, to one that does
    not read EAGAIN: neither waits nor loses a message in silence. A frame over ``max_bytes`` closes
    the connection that it came on.

    Raises:
        SystemError_: PORT_IN_USE, with the address; NO_SPACE as in :func:`bind_pull`.
        RequestError: INVALID_REQUEST: not an address of this machine.
    """
    sock = _socket(ctx, zmq.ROUTER, max_bytes, hwm)
    sock.set(zmq.ROUTER_MANDATORY, 1)
    sock.set(zmq.BACKLOG, _BACKLOG)
    sock.set(zmq.HANDSHAKE_IVL, HANDSHAKE_MS)
    bound: dict[str, str] = {}
    try:
        # A bound address keeps the settings of that moment: those without CURVE come first.
        for endpoint in sorted(endpoints, key=is_tcp):
            bound[endpoint] = _bind(sock, endpoint, protect)
    except BlockFlowError:
        remove_socket_files(bound)
        raise
    return sock, [bound[e] for e in endpoints]


def remove_socket_files(endpoints: Iterable[str]) -> None:
    """Remove the files of ipc endpoints, which libzmq leaves behind."""
    for endpoint in endpoints:
        if endpoint.startswith("ipc://"):
            Path(endpoint.removeprefix("ipc://")).unlink(missing_ok=True)


def connect_dealer(
    ctx: zmq.Context[zmq.Socket[bytes]],
    endpoint: str,
    identity: str | bytes = b"",
    max_bytes: int = limits.MAX_MESSAGE_BYTES,
    hwm: int = CONTROL_HWM,
) -> zmq.Socket[bytes]:
    """A DEALER towards a ROUTER; what is sent before the connection stands is queued."""
    sock = _socket(ctx, zmq.DEALER, max_bytes, hwm)
    if identity:
        sock.set(zmq.IDENTITY, identity.encode() if isinstance(identity, str) else identity)
    _connect(sock, endpoint)
    return sock


def connect_push(
    ctx: zmq.Context[zmq.Socket[bytes]],
    endpoint: str,
    hwm: int = DATA_HWM,
    protect: Protect | None = None,
) -> zmq.Socket[bytes]:
    """A PUSH that queues for a standing connection only (IMMEDIATE).

    Messages for a peer that does not exist stay with the caller (EAGAIN), who knows what they are
    worth; ZeroMQ would hold them in a queue that nobody can look into. ``protect`` sets CURVE up
    where ``endpoint`` is tcp.
    """
    sock = _socket(ctx, zmq.PUSH, limits.MAX_MESSAGE_BYTES, hwm)
    sock.set(zmq.IMMEDIATE, 1)
    if protect is not None and is_tcp(endpoint):
        protect(sock)
    _connect(sock, endpoint)
    return sock


def _socket(
    ctx: zmq.Context[zmq.Socket[bytes]], kind: int, max_bytes: int, hwm: int
) -> zmq.Socket[bytes]:
    try:
        sock = ctx.socket(kind)
    except zmq.ZMQError as exc:
        raise no_room(exc, f"no socket can be made: {exc.strerror}", "") or exc from exc
    sock.set(zmq.SNDHWM, hwm)
    sock.set(zmq.RCVHWM, hwm)
    sock.set(zmq.LINGER, LINGER_MS)
    sock.set(zmq.SNDTIMEO, 0)
    # The limit is per frame; the largest one carries a tensor, or is a header or control message.
    # How many frames a message has, nothing here bounds: see dispatcher/unread.py.
    bound_frames(sock, max(max_bytes, limits.MAX_HEADER_BYTES))
    sock.set(zmq.RECONNECT_IVL, _RECONNECT_MS)
    sock.set(zmq.RECONNECT_IVL_MAX, _RECONNECT_MAX_MS)
    return sock


def bound_frames(sock: zmq.Socket[Any], max_bytes: int) -> None:
    """Have ZeroMQ end connections that bring a longer frame.

    It compares what is on the wire, where CURVE makes a frame longer. Who reads it looks again.
    """
    sock.set(zmq.MAXMSGSIZE, max_bytes + CURVE_BYTES)


def end_message(sock: zmq.Socket[Any]) -> None:
    """End a message of which a further frame could not be sent (for want of memory, say). Left open
    it would go on with the next message's frames; ended early it is malformed, and the next one is
    read."""
    with suppress(zmq.ZMQError):
        sock.send(b"", zmq.NOBLOCK)


def watch_peer(sock: zmq.Socket[Any]) -> None:
    """End tcp connections whose peer has vanished without a word, which TCP takes a quarter of an
    hour to notice, and attempts that nobody answers. Call it after :func:`bound_frames`, and after
    CURVE was set up.

    Something is sent every second, and the peer's kernel has some seconds to acknowledge it,
    whatever else is under way. That ZeroMQ answers at the other end is waited for longer: its word
    comes behind the frame that is under way, and until a frame is whole libzmq hears nothing, so
    that a time-out shorter than the largest one takes would end the very connections that need
    their time.
    """
    frame_ms = int(sock.get(zmq.MAXMSGSIZE)) * SLOWEST_NS_PER_BYTE // 1_000_000
    sock.set(zmq.CONNECT_TIMEOUT, _CONNECT_MS)
    plain = sock.get(zmq.MECHANISM) == zmq.NULL
    # TCP_USER_TIMEOUT, in milliseconds
    sock.set(zmq.TCP_MAXRT, _UNACKNOWLEDGED_MS + (0 if plain else _CIPHERS_MS))
    sock.set(zmq.HEARTBEAT_IVL, _HEARTBEAT_MS)
    sock.set(zmq.HEARTBEAT_TIMEOUT, _HEARTBEAT_TIMEOUT_MS + frame_ms)
    sock.set(zmq.HEARTBEAT_TTL, _HEARTBEAT_TIMEOUT_MS + frame_ms)


def _prepare(sock: zmq.Socket[bytes], endpoint: str) -> None:
    """What an endpoint asks for before the socket is bound or connected to it.

    The kernel tells of the end of a unix socket's peer, unless a child that the peer has forked
    holds it open.
    """
    if is_tcp(endpoint):
        port = endpoint.rpartition(":")[2]
        if port.isdecimal() and int(port) > _MAX_PORT:  # libzmq would take it modulo 65536
            sock.close(0)
            raise RequestError(
                "INVALID_REQUEST", f"port {port} is over {_MAX_PORT}", where=endpoint
            )
        # Only where it is needed: a socket with it takes of a name's addresses the IPv6 one, and
        # says of IPv4 ones that they are mapped.
        sock.set(zmq.IPV6, is_v6(endpoint))
        watch_peer(sock)
        # libzmq ends this process (zeromq/libzmq#4364) when it has stopped reading a connection, as
        # the high-water mark is reached, the peer resets that, and a heartbeat is due or still
        # to be decoded. So it never stops; what waits to be read, others bound: by credits between
        # workers, of clients by bytes (dispatcher/unread.py).
        sock.set(zmq.RCVHWM, 0)


def _connect(sock: zmq.Socket[bytes], endpoint: str) -> None:
    _prepare(sock, endpoint)
    try:
        sock.connect(endpoint)
    except zmq.ZMQError as exc:
        sock.close(0)
        raise RequestError(
            "INVALID_REQUEST", f"cannot connect to {endpoint!r}: {exc.strerror}", where=endpoint
        ) from exc


def _bind(sock: zmq.Socket[bytes], endpoint: str, protect: Protect | None = None) -> str:
    """Bind and return the actual endpoint; the socket is closed when that fails."""
    try:
        if protect is not None and is_tcp(endpoint):
            protect(sock)
        _prepare(sock, endpoint)
        if endpoint.startswith("ipc://"):
            clear_stale(endpoint)
        elif is_tcp(endpoint) and endpoint.endswith(":0"):
            endpoint = endpoint[:-1] + "*"
        try:
            sock.bind(endpoint)
        except zmq.ZMQError as exc:
            if exc.errno != zmq.EADDRINUSE or not is_tcp(endpoint) or endpoint.endswith("*"):
                raise
            _bind_held(sock, endpoint)
    except (zmq.ZMQError, OSError) as exc:  # a probe of who listens wants a descriptor and a path
        sock.close(0)
        if isinstance(exc, zmq.ZMQError) and exc.errno == zmq.EADDRINUSE:
            raise (no_port if endpoint.endswith(":*") else in_use)(endpoint) from exc
        if exc.errno in SCARCE:
            raise full(endpoint, exc) from exc
        raise RequestError(
            "INVALID_REQUEST", f"cannot listen on {endpoint!r}: {exc.strerror}", where=endpoint
        ) from exc
    except BlockFlowError:
        sock.close(0)
        raise
    bound = sock.get(zmq.LAST_ENDPOINT)
    return bound.rstrip(b"\0").decode() if isinstance(bound, bytes) else endpoint


def _bind_held(sock: zmq.Socket[bytes], endpoint: str) -> None:
    """Listen where the control plane holds the port for whoever comes next.

    Raises:
        zmq.ZMQError: EADDRINUSE: it is somebody else's.
        OSError: no descriptor or memory is left.
    """
    host, _, port = endpoint.removeprefix("tcp://").rpartition(":")
    family = std_socket.AF_INET6 if is_v6(endpoint) else std_socket.AF_INET
    try:
        listener = listen_beside(host.strip("[]"), int(port), family, _BACKLOG)
    except OSError as exc:
        if exc.errno in SCARCE:
            raise
        raise zmq.ZMQError(zmq.EADDRINUSE) from exc
    sock.set(zmq.USE_FD, listener.detach())  # libzmq's, which closes it
    try:
        sock.bind(endpoint)
    finally:
        sock.set(zmq.USE_FD, -1)
