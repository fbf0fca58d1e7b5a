"""Ports: one that is held is nobody else's while nobody listens on it.

A holder is bound, does not listen, and shares the port (``SO_REUSEPORT``) without letting it be
taken over (no ``SO_REUSEADDR``). By Linux's rules of conflicting binds only a process of the same
user can listen beside it then, and only one that shares the port too. That is what
:func:`listen_beside` does; a second holder cannot. Leftovers of connections (TIME_WAIT) are in
nobody's way.
"""

from __future__ import annotations

import errno
import socket

_TRIES = 8
"""A free port may be somebody else's by the time it is taken."""


def is_v6(endpoint: str) -> bool:
    """Whether its host is an IPv6 address, or a name that has no other: then a socket must be made
    ready for it (``zmq.IPV6``).

    A name is looked up, which may wait for a name server. One that is not known (yet) counts as one
    with IPv4 addresses; libzmq goes on looking it up.
    """
    if not is_tcp(endpoint):
        return False
    host = endpoint.removeprefix("tcp://").rpartition(":")[0]
    if host.startswith("["):
        return True
    try:
        found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError):
        return False
    return all(family == socket.AF_INET6 for family, *_ in found)


def is_tcp(endpoint: str) -> bool:
    """Else it is a unix socket's."""
    return endpoint.startswith("tcp://")


def hold(host: str, port: int, family: socket.AddressFamily) -> socket.socket:
    """Take a tcp port, 0 = any free one. It is given back when the socket is closed everywhere.

    Args:
        host, port: of an address of ``family``; :: is for IPv4 as well.

    Raises:
        OSError: EADDRINUSE: somebody listens there, or holds it.
    """
    if port:
        return _held(host, port, family)
    for _ in range(_TRIES - 1):
        try:
            return _held(host, _free(host, family), family)
        except OSError as exc:
            if exc.errno != errno.EADDRINUSE:
                raise
    return _held(host, _free(host, family), family)


def _held(host: str, port: int, family: socket.AddressFamily) -> socket.socket:
    held = _bound(host, port, family)
    try:
        # Only who listens is told of all conflicts. Not for a moment may a second holder get by.
        held.listen(1)
        held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 0)
        held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        held.shutdown(socket.SHUT_RD)  # it listens no more, and stays bound
    except OSError:
        held.close()
        raise
    return held


def listen_beside(
    host: str, port: int, family: socket.AddressFamily, backlog: int
) -> socket.socket:
    """Listen, without blocking, on a port that is held for this user.

    Raises:
        OSError: EADDRINUSE: it is not.
    """
    made = _bound(host, port, family, socket.SO_REUSEPORT)
    try:
        made.listen(backlog)
        made.setblocking(False)
    except OSError:
        made.close()
        raise
    return made


def _free(host: str, family: socket.AddressFamily) -> int:
    """A number to ask for by name: a port that the kernel chose goes when the socket listens no
    more."""
    with _bound(host, 0, family) as probe:
        port: int = probe.getsockname()[1]
        return port


def _bound(host: str, port: int, family: socket.AddressFamily, *options: int) -> socket.socket:
    made = socket.socket(family, socket.SOCK_STREAM)
    try:
        if family == socket.AF_INET6:  # as ZeroMQ does
            made.setsockopt(
                socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, not socket.has_dualstack_ipv6()
            )
        for option in (socket.SO_REUSEADDR, *options):
            made.setsockopt(socket.SOL_SOCKET, option, 1)
        made.bind((host, port))
    except OSError:
        made.close()
        raise
    return made
