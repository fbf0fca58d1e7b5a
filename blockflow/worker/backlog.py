"""Backlog: what waits in a worker, and the slots that it holds meanwhile. Used under its lock.

A tensor that waits stays in the slot in which it came: nothing is copied. That must not cost others
anything, though. Where what waits lies in this worker's own slots, a batch that needs one would
wait for itself. And a worker that computes more slowly than its neighbours, who read from the same
arena, would end up with all of its slots: whoever owns it could send nothing any more, to nobody.
So what waits is copied then, and its slot given back.

What a reader may keep is the dynamic threshold of shared-memory switches (Choudhury and Hahne,
IEEE/ACM Transactions on Networking 6(2), 1998, with alpha = 1): as many slots as are left. One slow
reader ends up with half of them, two with a third each, and some are always left.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from functools import partial
from typing import Any

from blockflow.core.errors import SystemError_
from blockflow.worker.stage import Stage
from blockflow.worker.ticket import Source, Ticket

MOST_BYTES = 256 * 2**20
"""Of copies of what came from other workers. What is more stays in its slots."""

Copied = Callable[[Any], Any]
"""Gives a copy of a tensor in memory of its own; torch's RuntimeError without memory for it."""


class Backlog:
    """Lets go of slots.

    Args:
        copied: makes the copies.
        most_bytes: of copies of what came from other workers, at once.

    Attributes:
        copies: how many of these there were.
    """

    def __init__(self, copied: Copied, most_bytes: int = MOST_BYTES) -> None:
        self._copied = copied
        self._most_bytes = most_bytes
        self.copies = 0
        self._own: dict[int, tuple[Stage, Source]] = {}
        self._bytes = 0  # of copies that are still needed

    def holds(self, source: Source, stage: Stage) -> None:
        """``source``, an output of ``stage``, waits in a slot of this worker."""
        self._own[id(source)] = stage, source

    def gone(self, source: Source) -> None:
        """It does so no more."""
        del self._own[id(source)]

    def free_own(self, read: Collection[int], where: str) -> None:
        """No slot of this worker is free: what waits here may itself hold them.

        Args:
            read: ids of the sources that are being computed; these let go by themselves.
            where: the block that needs a slot.

        Raises:
            SystemError_: NO_SPACE: there is no memory for a copy. Who needs the slot is to fail
                then, so that what waits can go on.
        """
        for key, (stage, source) in list(self._own.items()):
            try:
                if key not in read and source.detach(self._copied):
                    stage.meter.copies_out += 1
            except RuntimeError as exc:
                raise SystemError_(
                    "NO_SPACE",
                    "no slot is free for an output, nor memory to copy what holds them",
                    where=where,
                    hint="try again later, or send less at once",
                ) from exc

    def share(self, arrived: Source, waiting: Iterable[Ticket], read: Collection[int]) -> None:
        """Give back what is more than this worker's share of another one's slots.

        Args:
            arrived: what has just come from there.
            waiting: what waits here, the last first: it waits longest, so it is copied first.
            read: ids of the sources that are being computed.
        """
        lender, excess = arrived.lender, arrived.excess
        for ticket in waiting:
            if not excess:
                return
            source, nbytes = ticket.source, ticket.source.nbytes
            fits = self._bytes + nbytes <= self._most_bytes
            if source.lender != lender or id(source) in read or not fits:
                continue
            try:
                source.detach(self._copied, partial(self._gone, nbytes))
            except RuntimeError:
                return  # no memory for a copy: it stays where it is
            self._bytes += nbytes
            self.copies += 1
            excess -= 1

    def _gone(self, nbytes: int) -> None:
        """Nobody needs a copy of so many bytes any more."""
        self._bytes -= nbytes
