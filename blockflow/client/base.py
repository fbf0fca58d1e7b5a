"""BaseClient: what both clients have in common, which waits for nothing."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal, NoReturn, Unpack, overload

from blockflow.client.calls import Either, Names, Options
from blockflow.client.connection import Connection, Errors, RequestId, Results
from blockflow.client.counters import Counters
from blockflow.client.pending import PendingRequest
from blockflow.client.result import Result
from blockflow.client.sharing import SharedMemory, Wish
from blockflow.client.tap import Tap
from blockflow.core.text import a_kind


class BaseClient:
    """What returns at once."""

    def __init__(
        self,
        address: str | None = None,
        *,
        connect_timeout_s: float = 5.0,
        max_pending: int = 4096,
        shared_memory: Wish = "auto",
        client_keys: str | Path | None = None,
        server_key: str | None = None,
        tap: Tap | None = None,
    ) -> None:
        """Begin to connect, and wait for nothing; a client belongs to the process that makes it.

        Args:
            address: ``tcp://host:port`` or ``ipc://path`` of a Dispatcher; by default the
                environment's BLOCKFLOW_ADDRESS, else ``tcp://127.0.0.1:5755``.
            connect_timeout_s: a call fails when there is no connection for so long.
            max_pending: more unanswered requests than this are refused with OVERLOADED.
            shared_memory: ``auto``: large tensors go through memory that a Dispatcher of this host
                grants, in messages where it does not; ``off``: always in messages.
            client_keys: this client's key file, for a Dispatcher that asks for keys on tcp; by
                default the environment's BLOCKFLOW_CLIENT_KEYS.
            server_key: the Dispatcher's public key (64 hex digits) or a file with it; by default
                the environment's BLOCKFLOW_SERVER_KEY, else what the key file says.
            tap: is told what passes the socket, for tests and judges.
        """
        self._connection = Connection(
            address,
            connect_timeout_s=connect_timeout_s,
            max_pending=max_pending,
            shared_memory=shared_memory,
            client_keys=client_keys,
            server_key=server_key,
            tap=tap,
        )

    @property
    def address(self) -> str:
        return self._connection.address

    def __reduce__(self) -> NoReturn:
        """For copy, deepcopy and whoever would send it to another process."""
        raise TypeError(
            f"cannot copy or pickle {a_kind(self)}: it owns a connection and a thread; "
            "make one in each process (share one between threads), and pass on its address instead"
        )

    @overload
    def submit(
        self, tasks: str, x: Any, *, errors: Literal["raise"] = ..., **options: Unpack[Options]
    ) -> PendingRequest[Result]: ...
    @overload
    def submit(
        self, tasks: Names, x: Any, *, errors: Literal["raise"] = ..., **options: Unpack[Options]
    ) -> PendingRequest[dict[str, Result]]: ...
    @overload
    def submit(
        self, tasks: str, x: Any, *, errors: Literal["return"], **options: Unpack[Options]
    ) -> PendingRequest[Either]: ...
    @overload
    def submit(
        self, tasks: Names, x: Any, *, errors: Literal["return"], **options: Unpack[Options]
    ) -> PendingRequest[dict[str, Either]]: ...
    @overload
    def submit(
        self,
        tasks: str | Sequence[str],
        x: Any,
        *,
        errors: Errors = ...,
        **options: Unpack[Options],
    ) -> PendingRequest[Any]: ...
    def submit(
        self,
        tasks: str | Sequence[str],
        x: Any,
        *,
        deadline_s: float | None = None,
        request_id: RequestId = None,
        dtype: str | None = None,
        errors: Errors = "raise",
        results: Results = "copy",
        retries: int = 0,
    ) -> PendingRequest[Any]:
        """As ``infer``, but returns at once; many requests may be in flight.

        What an async client returns can be awaited, or gathered with others.
        """
        return self._connection.submit(
            tasks,
            x,
            deadline_s=deadline_s,
            request_id=request_id,
            dtype=dtype,
            errors=errors,
            results=results,
            retries=retries,
        )

    def counters(self) -> Counters:
        """What this client has sent and received."""
        return self._connection.counters()

    @property
    def shared_memory(self) -> SharedMemory:
        """Whether tensors go through memory that the Dispatcher grants, and if not, why."""
        return self._connection.shared_memory()
