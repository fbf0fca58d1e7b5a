"""The async client: the same connection, awaited."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, NoReturn, Self, Unpack, overload

from blockflow.client.calls import Either, Names, Options
from blockflow.client.connection import Connection, Errors, RequestId, Results, no_copy
from blockflow.client.counters import Counters
from blockflow.client.pending import PendingRequest
from blockflow.client.result import Result
from blockflow.client.sharing import SharedMemory, Wish
from blockflow.client.tap import Tap
from blockflow.core.routing import TaskRoute


class AsyncClient:
    """As :class:`~blockflow.client.sync.Client`, for asyncio; usable from several event loops.

    Cancelling an awaiting task (or an ``asyncio.timeout`` around it) cancels the request in the
    system too.
    """

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
        no_copy(self)

    @overload
    async def infer(
        self, tasks: str, x: Any, *, errors: Literal["raise"] = ..., **options: Unpack[Options]
    ) -> Result: ...
    @overload
    async def infer(
        self, tasks: Names, x: Any, *, errors: Literal["raise"] = ..., **options: Unpack[Options]
    ) -> dict[str, Result]: ...
    @overload
    async def infer(
        self, tasks: str, x: Any, *, errors: Literal["return"], **options: Unpack[Options]
    ) -> Either: ...
    @overload
    async def infer(
        self, tasks: Names, x: Any, *, errors: Literal["return"], **options: Unpack[Options]
    ) -> dict[str, Either]: ...
    @overload
    async def infer(
        self,
        tasks: str | Sequence[str],
        x: Any,
        *,
        errors: Errors = ...,
        **options: Unpack[Options],
    ) -> Any: ...
    async def infer(
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
    ) -> Any:
        """See :meth:`blockflow.client.sync.Client.infer`."""
        self._connection.check_may_wait()
        pending = self.submit(
            tasks,
            x,
            deadline_s=deadline_s,
            request_id=request_id,
            dtype=dtype,
            errors=errors,
            results=results,
            retries=retries,
        )
        try:
            return await pending
        finally:
            del pending  # as in the sync client: no circle of error, frame and request

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
        """Send without waiting; what is returned can be awaited, or gathered with others."""
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

    async def tasks(self, *, timeout_s: float = 5.0) -> dict[str, TaskRoute]:
        """The published tasks: path, contract, limits."""
        return await asyncio.wrap_future(self._connection.tasks(timeout_s))

    async def wait_ready(
        self, tasks: str | Iterable[str] = (), *, timeout_s: float = 30.0
    ) -> dict[str, TaskRoute]:
        """See :meth:`blockflow.client.sync.Client.wait_ready`."""
        return await asyncio.wrap_future(self._connection.wait_ready(tasks, timeout_s))

    def counters(self) -> Counters:
        """What this client has sent and received."""
        return self._connection.counters()

    @property
    def shared_memory(self) -> SharedMemory:
        """Whether tensors go through memory that the Dispatcher grants, and if not, why."""
        return self._connection.shared_memory()

    async def close(self) -> None:
        """Cancel what is in flight and end the connection's thread."""
        await asyncio.wrap_future(self._connection.close())
        self._connection.join()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        value: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await self.close()
