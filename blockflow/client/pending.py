"""The handle of a request under way."""

from __future__ import annotations

from collections.abc import Callable, Generator
from concurrent.futures import Future
from concurrent.futures._base import RUNNING
from contextlib import AbstractContextManager, suppress
from functools import partial
from threading import Condition
from typing import TYPE_CHECKING, Any, NoReturn, TypeVar

from blockflow.client.thread import SharedLock

if TYPE_CHECKING:
    import asyncio

T = TypeVar("T")


class PendingRequest(Future[T]):
    """A :class:`concurrent.futures.Future` whose ``cancel`` reaches the Dispatcher, and that can be
    awaited.

    It ends exactly once: with its value, or with a
    :class:`~blockflow.core.errors.BlockFlowError` (a cancelled one with the code CANCELLED) at the
    latest 100 ms after its deadline. So ``cancelled()`` is never true. Callbacks run in the
    connection's thread: keep them short. They cannot wait for another request of the same client
    there (INVALID_REQUEST), but may submit one.

    Args:
        request_id: of the request.
        cancel: asks for its end.
        waiting: is entered while somebody waits for its end; raises where that would never come.
        lock: for its state, which the connection's thread changes.
    """

    def __init__(
        self,
        request_id: bytes,
        cancel: Callable[[bytes], None],
        waiting: Callable[[], AbstractContextManager[None]],
        lock: SharedLock,
    ) -> None:
        super().__init__()
        # Running from the start: the base class would otherwise end it behind the core's back. Not
        # by its method, which asks under a lock who waits for it already.
        self._state = RUNNING
        # Whoever waits for several at once takes it by this name as well (concurrent.futures.wait).
        self._condition = Condition(lock)  # type: ignore[arg-type]
        self.lock = lock
        self.request_id = request_id
        self._ask_cancel = cancel
        self._waiting = waiting

    def __reduce__(self) -> NoReturn:
        """For copy and pickle, as with clients; a copy would never end."""
        raise TypeError(
            "cannot copy or pickle a PendingRequest: the answer comes to this one alone; "
            "pass on its result() instead"
        )

    def is_free(self, patience_s: float) -> bool:
        """Whether nobody holds its lock, nor that of an event in which somebody waits for several
        requests at once, be it after a while."""
        if not self._waiters:
            return self.lock.gets_free(patience_s)
        locks = [getattr(waiter.event, "_cond", None) for waiter in self._waiters]
        return self.lock.gets_free(patience_s) and all(_is_free(k, patience_s) for k in locks if k)

    def cancel(self) -> bool:
        """Ask for the end of the request; False when it has ended already.

        The Dispatcher drops what has not been computed yet. :meth:`result` then raises CANCELLED,
        or gives the answer if that was faster.

        Raises:
            RequestError: INVALID_REQUEST, the request is another process's.
        """
        if self.done():
            return False
        self._ask_cancel(self.request_id)
        return True

    def __await__(self) -> Generator[Any, Any, T]:
        """In any event loop, and in several: to cancel who awaits it is to cancel the request.

        Not by ``asyncio.wrap_future``: its callbacks and the future refer to each other, so that
        results would stay until the garbage collector comes by.
        """
        import asyncio  # sync clients do without

        try:
            if not self.done():
                with self._waiting():  # raises where a loop would wait for ever, too
                    pass
                loop = asyncio.get_running_loop()
                waiter: asyncio.Future[None] = loop.create_future()
                self.add_done_callback(partial(_wake, loop, waiter))
                try:
                    yield from waiter
                except asyncio.CancelledError:
                    self.cancel()
                    raise
            return self.result()
        finally:
            del self  # as in result()

    def result(self, timeout: float | None = None) -> T:
        """The value, once it is there; raises the request's error, or TimeoutError."""
        try:
            if self.done():
                return super().result()
            with self._waiting():
                return super().result(timeout)
        finally:
            # As the base class does: the error would refer to this frame, and by it to itself.
            del self

    def exception(self, timeout: float | None = None) -> BaseException | None:
        """The request's error, None for a value, once it has ended."""
        if self.done():
            return super().exception()
        with self._waiting():
            return super().exception(timeout)


def _is_free(lock: Any, patience_s: float) -> bool:
    free: bool = lock.acquire(timeout=patience_s)
    if free:
        lock.release()
    return free


def _wake(loop: asyncio.AbstractEventLoop, waiter: asyncio.Future[None], _: object) -> None:
    """Whoever awaits a request, from the connection's thread."""

    def wake() -> None:
        if not waiter.done():
            waiter.set_result(None)

    with suppress(RuntimeError):  # the loop is closed: nobody awaits any more
        loop.call_soon_threadsafe(wake)
