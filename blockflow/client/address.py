"""Where a Dispatcher listens for clients."""

from __future__ import annotations

import os
import re

from blockflow.core.errors import RequestError

DEFAULT_ADDRESS = "tcp://127.0.0.1:5755"
ADDRESS_VARIABLE = "BLOCKFLOW_ADDRESS"

_TCP = re.compile(r"tcp://(\[[0-9A-Fa-f:.%\w]+\]|[^\s:/\[\]*]+):(\d{1,5})")
_IPC = re.compile(r"ipc://\S+")


def is_local(address: str) -> bool:
    """Whether only a process of this host can have the address: its clock is ours then."""
    host = address.removeprefix("tcp://")
    return address.startswith("ipc://") or host.startswith(("127.", "localhost:", "[::1]:"))


def dispatcher_address(given: str | None) -> str:
    """The address given, else the environment's, else the default one.

    Raises:
        RequestError: INVALID_REQUEST; libzmq itself would retry a port 99999 for ever.
    """
    address = given or os.environ.get(ADDRESS_VARIABLE) or DEFAULT_ADDRESS
    tcp = _TCP.fullmatch(address)
    if (tcp and 1 <= int(tcp[2]) <= 65535) or _IPC.fullmatch(address):
        return address
    raise RequestError(
        "INVALID_REQUEST",
        "not the address of a Dispatcher",
        where=address,
        hint="use tcp://host:port or ipc://path",
    )
