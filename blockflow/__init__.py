"""BlockFlow serves many DNN tasks from shared blocks.

Importing the package costs nothing: the names below load their modules on first use.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from blockflow.client.aio import AsyncClient
    from blockflow.client.result import Result
    from blockflow.client.sync import Client
    from blockflow.core.errors import BlockFlowError

__version__ = "0.1.0"

_HOMES = {
    "AsyncClient": "blockflow.client.aio",
    "BlockFlowError": "blockflow.core.errors",
    "Client": "blockflow.client.sync",
    "Result": "blockflow.client.result",
}

__all__ = ["AsyncClient", "BlockFlowError", "Client", "Result", "__version__"]


if not TYPE_CHECKING:  # for a type checker any name would be one of the package's

    def __getattr__(name: str) -> Any:
        home = _HOMES.get(name)
        if home is None:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        return getattr(import_module(home), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *_HOMES})
