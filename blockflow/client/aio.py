"""The async client: the same connection, awaited."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Sequence
from typing import Any, Literal, Self, Unpack, overload

from blockflow.client.base import BaseClient
from blockflow.client.calls import Either, Names, Options
from blockflow.client.connection import Errors, RequestId, Results
from blockflow.client.result import Result
from blockflow.core.routing import TaskRoute


class AsyncClient(BaseClient):
    """As :class:`~blockflow.client.sync.Client`, for asyncio; usable from several event loops.

    Cancelling an awaiting task (or an ``asyncio.timeout`` around it) cancels the request in the
    system too.
    """

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

    async def tasks(self, *, timeout_s: float = 5.0) -> dict[str, TaskRoute]:
        """The published tasks: path, contract, limits."""
        return await asyncio.wrap_future(self._connection.tasks(timeout_s))

    async def wait_ready(
        self, tasks: str | Iterable[str] = (), *, timeout_s: float = 30.0
    ) -> dict[str, TaskRoute]:
        """See :meth:`blockflow.client.sync.Client.wait_ready`."""
        return await asyncio.wrap_future(self._connection.wait_ready(tasks, timeout_s))

    async def close(self) -> None:
        """Cancel what is in flight and end the connection's thread."""
        await asyncio.wrap_future(self._connection.close())
        self._connection.join()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()
