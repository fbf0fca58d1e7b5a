"""Client SDK: needs pyzmq, msgpack and numpy alone; torch tensors pass if the caller uses torch.

Names load their modules on first use, so that a sync client does not pay for asyncio and a command
that only asks for the version pays for nothing.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from blockflow.client.address import ADDRESS_VARIABLE, DEFAULT_ADDRESS
    from blockflow.client.aio import AsyncClient
    from blockflow.client.collector import Collector, Record, Summary
    from blockflow.client.generator import TaskGenerator
    from blockflow.client.pending import PendingRequest
    from blockflow.client.result import BlockTiming, Leg, Result
    from blockflow.client.sharing import SharedMemory
    from blockflow.client.sync import Client

_HOMES = {
    "ADDRESS_VARIABLE": "address",
    "AsyncClient": "aio",
    "BlockTiming": "result",
    "Client": "sync",
    "Collector": "collector",
    "DEFAULT_ADDRESS": "address",
    "Leg": "result",
    "PendingRequest": "pending",
    "Record": "collector",
    "Result": "result",
    "SharedMemory": "sharing",
    "Summary": "collector",
    "TaskGenerator": "generator",
}

__all__ = [
    "ADDRESS_VARIABLE",
    "DEFAULT_ADDRESS",
    "AsyncClient",
    "BlockTiming",
    "Client",
    "Collector",
    "Leg",
    "PendingRequest",
    "Record",
    "Result",
    "SharedMemory",
    "Summary",
    "TaskGenerator",
]


if not TYPE_CHECKING:  # for a type checker any name would be one of the package's

    def __getattr__(name: str) -> Any:
        home = _HOMES.get(name)
        if home is None:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        return getattr(import_module(f"{__name__}.{home}"), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *_HOMES})
