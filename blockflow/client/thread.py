"""A client's thread, and whose answer it waits for: another client's, in a callback."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

from blockflow.core.errors import RequestError


class ClientThread(threading.Thread):
    """Receives a client's answers and runs its callbacks.

    Attributes:
        waits_for: the thread that a callback in this one waits for; None where none does.
    """

    waits_for: ClientThread | None = None

    @contextmanager
    def awaited(self, address: str) -> Iterator[None]:
        """While the caller waits for an answer that this thread, of the client of ``address``, has
        to receive.

        Raises:
            RequestError: INVALID_REQUEST: this thread waits for the caller's, directly or by way of
                others. None of them would ever go on.
        """
        caller = threading.current_thread()
        if not isinstance(caller, ClientThread):
            yield
            return
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
