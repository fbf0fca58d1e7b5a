"""Slots under virtual time: who uses them, and what waits in them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from blockflow.worker.ticket import Source

if TYPE_CHECKING:
    from blockflow.bench.simulation.worker import SimWorker


class Lease:
    """A slot of ``owner``, or a part of one: ``freed`` is called when all its users have released
    it."""

    __slots__ = ("_freed", "_users", "owner")

    def __init__(
        self, users: int, freed: Callable[[], None], owner: SimWorker | None = None
    ) -> None:
        self.owner = owner
        self._users = users
        self._freed = freed

    def release(self) -> None:
        """One user less."""
        self._users -= 1
        if self._users == 0:
            self._freed()


class Hold:
    """What rows that wait in a worker keep of a slot, of this worker's own or of another one's."""

    __slots__ = ("_lease", "_over", "sources")

    def __init__(self, lease: Lease, over: Callable[[Hold], None]) -> None:
        self._lease = lease
        self._over = over
        self.sources: Sequence[Source] = ()

    def release(self) -> None:
        """They lie in the slot no more: they were computed, or copied."""
        if self.sources:
            self.sources = ()
            self._over(self)
            self._lease.release()
