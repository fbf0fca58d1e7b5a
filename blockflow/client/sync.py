"""The sync client."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from concurrent.futures import Future
from typing import Any, Literal, Self, TypeVar, Unpack, overload

from blockflow.client.base import BaseClient
from blockflow.client.calls import Either, Names, Options
from blockflow.client.connection import Errors, RequestId, Results
from blockflow.client.result import Result
from blockflow.core.routing import TaskRoute

T = TypeVar("T")


class Client(BaseClient):
    """Sends tasks to a BlockFlow system over one kept connection; safe to share between threads.

    The constructor does not wait for the connection; calls do.
    """

    @overload
    def infer(
        self, tasks: str, x: Any, *, errors: Literal["raise"] = ..., **options: Unpack[Options]
    ) -> Result: ...
    @overload
    def infer(
        self, tasks: Names, x: Any, *, errors: Literal["raise"] = ..., **options: Unpack[Options]
    ) -> dict[str, Result]: ...
    @overload
    def infer(
        self, tasks: str, x: Any, *, errors: Literal["return"], **options: Unpack[Options]
    ) -> Either: ...
    @overload
    def infer(
        self, tasks: Names, x: Any, *, errors: Literal["return"], **options: Unpack[Options]
    ) -> dict[str, Either]: ...
    @overload
    def infer(
        self,
        tasks: str | Sequence[str],
        x: Any,
        *,
        errors: Errors = ...,
        **options: Unpack[Options],
    ) -> Any: ...
    def infer(
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
        """Run one or several tasks on ``x`` and wait for the answer.

        Args:
            tasks: a name, or several names that share their first block: the common part of their
                paths runs once.
            x: numpy array or torch tensor; dim 0 is rows. Don't change it before the answer.
            deadline_s: up to 60; by default the one that the topology gives the task.
            request_id: 16 bytes, hex or UUID; by default random.
            dtype: the name of the type that must travel: ``"bfloat16"`` for a uint16 array of such
                patterns; for nested sequences what their numbers are made into.
            errors: ``"raise"`` the first error, or ``"return"`` errors in the place of results.
            results: ``"copy"``: values are the caller's own. ``"view"``: a large value may lie in
                granted memory, whose slot is free again when nothing refers to the value any more.
            retries: when the connection breaks with the request in flight, send it again, up to so
                many times, once there is a connection, under the same id: a Dispatcher that has the
                answer, or is about to, gives it without running anything twice.

        Returns:
            A Result, or for several names a map name -> Result (or error).

        Raises:
            BlockFlowError: with a stable code, see docs/errors.md. INVALID_REQUEST also in a
                callback of this client, whose thread has to receive the answer: submit there.
        """
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
            return _answer(pending)
        finally:
            # An error refers to this frame, and the request to the error: a circle that would hold
            # the input until the garbage collector comes by.
            del pending

    def tasks(self, *, timeout_s: float = 5.0) -> dict[str, TaskRoute]:
        """The published tasks: path, contract, limits."""
        return _answer(self._connection.tasks(timeout_s))

    def wait_ready(
        self, tasks: str | Iterable[str] = (), *, timeout_s: float = 30.0
    ) -> dict[str, TaskRoute]:
        """Wait until the task or all these tasks (any, when none is named) are published.

        Raises:
            BlockFlowError: NOT_READY, NOT_RUNNING or CONNECTION_LOST after ``timeout_s``, TIMEOUT
                if there was no answer until then; INVALID_REQUEST at once for what cannot be a
                task's name.
        """
        return _answer(self._connection.wait_ready(tasks, timeout_s))

    def close(self) -> None:
        """Cancel what is in flight and end the connection's thread."""
        self._connection.close()
        self._connection.join()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _answer(pending: Future[T]) -> T:
    try:
        return pending.result()
    except BaseException:  # Ctrl-C: nobody waits for the answer any more
        pending.cancel()
        raise
    finally:
        del pending  # see above
