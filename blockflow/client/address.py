"""Where a Dispatcher listens for clients, and the keys that it asks for there."""

from __future__ import annotations

import os
import re
from pathlib import Path

from blockflow.core.errors import RequestError
from blockflow.tensormq.curve import Protect, as_client
from blockflow.tensormq.keys import client_keys as read_client_keys

DEFAULT_ADDRESS = "tcp://127.0.0.1:5755"
ADDRESS_VARIABLE = "BLOCKFLOW_ADDRESS"
CLIENT_KEYS_VARIABLE = "BLOCKFLOW_CLIENT_KEYS"
SERVER_KEY_VARIABLE = "BLOCKFLOW_SERVER_KEY"

_TCP = re.compile(r"tcp://(\[[0-9A-Za-z:._%]+\]|[0-9A-Za-z][0-9A-Za-z._-]*):(\d{1,5})", re.ASCII)
"""Of names what libzmq takes, which is not asked: it is given what they stand for (names.py)."""
_IPC = re.compile(r"ipc://[^\0-\x1f\x7f]+")


def is_local(address: str) -> bool:
    """Whether only a process of this host can have the address: its clock is ours then."""
    host = address.removeprefix("tcp://")
    return address.startswith("ipc://") or host.startswith(("127.", "localhost:", "[::1]:"))


def protection(
    address: str, client_keys: str | Path | None, server_key: str | None
) -> Protect | None:
    """CURVE for a connection to ``address``; None where there are no keys, or for a unix socket.

    Args:
        address: of the Dispatcher.
        client_keys: a key file; None takes BLOCKFLOW_CLIENT_KEYS.
        server_key: the server's public key or a file with it; None takes BLOCKFLOW_SERVER_KEY, else
            the one in the key file.

    Raises:
        SystemError_: UNAUTHORIZED: the keys are unfit.
    """
    file = client_keys or os.environ.get(CLIENT_KEYS_VARIABLE)
    server = server_key or os.environ.get(SERVER_KEY_VARIABLE) or None
    if not file and not server_key:
        return None
    if not file:
        raise RequestError(
            "INVALID_REQUEST", "server_key needs client_keys, too", hint="blockflow keys make"
        )
    found = read_client_keys(file, server)
    return None if address.startswith("ipc://") else as_client(found)


def dispatcher_address(given: str | None) -> str:
    """The address given, else the environment's, else the default one.

    Raises:
        RequestError: INVALID_REQUEST; libzmq itself would retry a port 99999 for ever.
    """
    address = given or os.environ.get(ADDRESS_VARIABLE) or DEFAULT_ADDRESS
    if isinstance(address, str):
        tcp = _TCP.fullmatch(address)
        if (tcp and 1 <= int(tcp[2]) <= 65535) or _IPC.fullmatch(address):
            return address
    raise RequestError(
        "INVALID_REQUEST",
        "not the address of a Dispatcher",
        where=str(address),
        hint="use tcp://host:port or ipc://path",
    )
