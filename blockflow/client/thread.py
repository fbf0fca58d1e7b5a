"""A client's thread: whose answer it waits for (another client's, in a callback), and its locks."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, ClassVar

from blockflow.core.errors import RequestError


class ClientThread(threading.Thread):
    """Receives a client's answers and runs its callbacks.

    Attributes:
        waits_for: the thread that a callback in this one waits for; None where none does.
    """

    waits_for: ClientThread | None = None

    def __init__(self, target: Callable[[], None]) -> None:
        super().__init__(target=target, name="blockflow-client", daemon=True)
        self._maker = threading.get_native_id()
        self._feigned = False

    def run(self) -> None:
        # Where threads take turns in one of the system's, its first wait would be everybody's.
        self._feigned = threading.get_native_id() == self._maker
        if not self._feigned:
            super().run()

    def check(self, address: str) -> None:
        """Once it was started.

        Raises:
            RequestError: INVALID_REQUEST: it is no thread of the system, and has not run.
        """
        if self._feigned:
            raise RequestError(
                "INVALID_REQUEST",
                "a client needs a thread, and there are none here (gevent has put its own"
                " in their place)",
                where=address,
                hint="monkey.patch_all(thread=False), and calls in gevent's own pool of threads",
            )

    def awaited(self, address: str) -> AbstractContextManager[None]:
        """While the caller waits for an answer that this thread, of the client of ``address``, has
        to receive.

        Raises:
            RequestError: INVALID_REQUEST: this thread waits for the caller's, directly or by way of
                others. None of them would ever go on.
        """
        caller = threading.current_thread()
        if isinstance(caller, ClientThread):
            return self._awaited_by(caller, address)
        return nullcontext()

    @contextmanager
    def _awaited_by(self, caller: ClientThread, address: str) -> Iterator[None]:
        # Said before it is looked at: of two that begin at once, one at least sees the other.
        caller.waits_for = self
        try:
            if _leads_to(self, caller):
                raise RequestError(
                    "INVALID_REQUEST",
                    "a callback cannot wait for a client that waits, in a callback, for this one",
                    where=address,
                    hint="use submit there, with a callback of its own, or wait in another thread",
                )
            yield
        finally:
            caller.waits_for = None


def _leads_to(thread: ClientThread, end: ClientThread) -> bool:
    """Whether ``thread`` waits for ``end``."""
    # Others may be in a ring of their own, just before they see it.
    met: set[ClientThread] = set()
    on: ClientThread | None = thread
    while on is not None and on not in met:
        met.add(on)
        on = on.waits_for
    return end in met


class Held(threading.local):
    """What this very thread holds of clients' :class:`SharedLock`.

    Attributes:
        depth: how many times it holds one, or is about to.
    """

    depth = 0


class SharedLock:
    """An RLock that a client's thread takes as well as its callers.

    A signal's handler runs in the middle of its thread, which may hold such a lock: there it must
    not wait for a client's thread, which could not get it, be it in a callback that calls another
    client. Who asks ``held``, which is of all clients, knows. For a ``threading.Condition`` too.
    """

    held: ClassVar[Held] = Held()

    def __init__(self) -> None:
        self._held = self.held
        self._lock: Any = threading.RLock()

    def acquire(self, blocking: bool = True, timeout: float = -1) -> bool:
        self._held.depth += 1
        taken = False
        try:
            taken = self._lock.acquire(blocking, timeout)
        finally:
            if not taken:
                self._held.depth -= 1
        return taken

    def release(self) -> None:
        self._lock.release()
        self._held.depth -= 1

    def locked(self) -> bool:
        """Somebody holds it. (A Condition of Python 3.14 has this, too; an RLock before it not.)"""
        if self._is_owned():
            return True
        free: bool = self._lock.acquire(blocking=False)
        if free:
            self._lock.release()
        return not free

    def gets_free(self, patience_s: float) -> bool:
        """Whether nobody holds it, be it after a while."""
        free = self.acquire(timeout=patience_s)
        if free:
            self.release()
        return free

    __enter__ = acquire

    def __exit__(self, *_: object) -> None:
        # What a signal's handler raises may come while a Condition has given it up, and is told.
        if self._lock._is_owned():
            self.release()

    # What a Condition asks of an RLock: who waits in it holds it no more, however often he did.

    def _is_owned(self) -> bool:
        return bool(self._lock._is_owned())

    def _release_save(self) -> Any:
        state = self._lock._release_save()
        self._held.depth -= state[0]
        return state

    def _acquire_restore(self, state: Any) -> None:
        self._held.depth += state[0]
        self._lock._acquire_restore(state)
