"""Listening: what may stand in the way of it, and how that is told."""

from __future__ import annotations

import os
import socket as std_socket
import stat
from pathlib import Path

from blockflow.core.errors import RequestError, SystemError_
from blockflow.tensormq.janitor import MAX_PATH_CHARS


def clear_stale(endpoint: str) -> None:
    """Remove a socket file without a listener. libzmq would take over a live one's, too."""
    path = Path(endpoint.removeprefix("ipc://"))
    if len(os.fsencode(path)) > MAX_PATH_CHARS:
        raise RequestError(
            "INVALID_REQUEST",
            f"the path of a socket is limited to {MAX_PATH_CHARS} characters",
            where=endpoint,
            hint="choose a shorter run root",
        )
    try:
        mode = path.lstat().st_mode
    except FileNotFoundError:
        return
    if not stat.S_ISSOCK(mode):
        raise in_use(endpoint)
    with std_socket.socket(std_socket.AF_UNIX, std_socket.SOCK_STREAM) as probe:
        probe.setblocking(False)
        try:
            probe.connect(str(path))
        except ConnectionRefusedError:
            path.unlink(missing_ok=True)
            return
        except OSError:
            pass  # e.g. EAGAIN: somebody listens, with a full backlog
    raise in_use(endpoint)


def in_use(endpoint: str) -> SystemError_:
    """For an address that is somebody else's."""
    return SystemError_(
        "PORT_IN_USE",
        f"another process listens on {endpoint}, or its file is in the way",
        where=endpoint,
        hint="stop that process or choose another address; port 0 takes a free one",
    )


def no_port(endpoint: str) -> SystemError_:
    """For an address without a number, where the machine has none left: some will be free again."""
    return SystemError_(
        "NO_SPACE",
        f"no port is free to listen on {endpoint}",
        where=endpoint,
        hint="end what holds so many, or widen net.ipv4.ip_local_port_range (sysctl)",
    )


def full(endpoint: str, exc: Exception) -> SystemError_:
    """For want of a descriptor, memory or a thread."""
    return SystemError_(
        "NO_SPACE",
        f"cannot listen on {endpoint!r}: {getattr(exc, 'strerror', exc)}",
        where=endpoint,
        hint="close what is open, raise the limit of descriptors (ulimit -n), or make room",
    )
