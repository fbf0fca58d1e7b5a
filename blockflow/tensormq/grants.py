"""Memory that the Dispatcher grants to clients of its host: the book of it. Pure.

A *grant* is one segment of equal slots for one client and one direction: inputs that the client
uploads, or results that it is handed. The client says which slot it has filled, or writes a mark
when it is done with a result; numbers, sizes and offsets are the book's, and nothing that a client
says is used as an address. What lies in a segment is as untrusted as a message, and may change at
any moment: the Dispatcher copies an upload once, and checks and keeps that copy.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from blockflow.core import limits
from blockflow.core.errors import RequestError, make_error
from blockflow.wire.client import Place
from blockflow.wire.grants import Direction

MIN_TENSOR_BYTES = 64 * 1024
"""Smaller tensors ride in the message: measured, a slot gains nothing from 1 to 32 KiB, a little at
64 KiB, and a third of the leg at 256 KiB (``bench/legs.py``)."""

HEADER_BYTES = 4096
"""The marks at the beginning of a segment; the first slot begins after them."""

MIN_SLOT_BYTES = 64 * 1024
_AIM_BYTES = 64 * 1024 * 1024
_U32 = 2**32 - 1


def geometry(nbytes: int) -> tuple[int, int]:
    """(bytes per slot, slots) of a segment for tensors of ``nbytes``.

    Slots are powers of two, so that a client that sends many sizes has few segments. What is not
    written costs no memory.
    """
    slot_bytes = max(MIN_SLOT_BYTES, 1 << (nbytes - 1).bit_length())
    return slot_bytes, min(limits.MAX_GRANT_SLOTS, max(2, _AIM_BYTES // slot_bytes))


def segment_bytes(slot_bytes: int, slots: int) -> int:
    """Size of a segment."""
    return HEADER_BYTES + slot_bytes * slots


@dataclass(slots=True)
class Grant:
    """One segment in the book.

    Attributes:
        number: names it; never used again.
        generations: per slot the generation that the client has or had last.
        out: result slots that the client has not released, as far as the book has looked.
    """

    number: int
    direction: Direction
    slot_bytes: int
    slots: int
    generations: list[int] = field(default_factory=list)
    out: set[int] = field(default_factory=set)

    @property
    def nbytes(self) -> int:
        return segment_bytes(self.slot_bytes, self.slots)


class GrantBook:
    """Who has been granted what.

    Args:
        max_bytes: of all segments together.
        max_client_bytes: of one client's segments.
        max_clients: with segments at once.
    """

    def __init__(
        self,
        max_bytes: int = limits.MAX_GRANTED_BYTES,
        max_client_bytes: int = limits.MAX_CLIENT_GRANT_BYTES,
        max_clients: int = limits.MAX_GRANT_CLIENTS,
    ) -> None:
        self._max_bytes = max_bytes
        self._max_client_bytes = max_client_bytes
        self._max_clients = max_clients
        self._clients: dict[bytes, dict[int, Grant]] = {}
        self._last = 0
        self.nbytes = 0

    @property
    def clients(self) -> int:
        """How many are attached."""
        return len(self._clients)

    def __contains__(self, client: bytes) -> bool:
        return client in self._clients

    def full(self) -> str:
        """Why no further client can be attached; '' when one can."""
        if len(self._clients) >= self._max_clients:
            return f"{self._max_clients} clients share memory already"
        return ""

    def attach(self, client: bytes) -> bool:
        """Open an account; False when there is no place or it has one."""
        if client in self._clients or self.full():
            return False
        self._clients[client] = {}
        return True

    def detach(self, client: bytes) -> list[Grant]:
        """End an account; returns what is to be unmapped."""
        ended = list(self._clients.pop(client, {}).values())
        self.nbytes -= sum(g.nbytes for g in ended)
        return ended

    def ask(self, client: bytes, direction: Direction, nbytes: int) -> Grant | str:
        """One more segment for tensors of ``nbytes``, or why there is none."""
        mine = self._clients[client]
        slot_bytes, slots = geometry(nbytes)
        if any(g.direction == direction and g.slot_bytes == slot_bytes for g in mine.values()):
            return f"the slots of {slot_bytes} bytes are granted already"
        room = min(
            self._max_bytes - self.nbytes,
            self._max_client_bytes - sum(g.nbytes for g in mine.values()),
        )
        slots = min(slots, (room - HEADER_BYTES) // slot_bytes)
        if slots < 1:
            return f"no room for slots of {slot_bytes} bytes: {max(0, room)} bytes may be granted"
        self._last += 1
        grant = Grant(self._last, direction, slot_bytes, slots, [0] * slots)
        mine[grant.number] = grant
        self.nbytes += grant.nbytes
        return grant

    def revoke(self, client: bytes, number: int) -> None:
        """The segment of a grant could not be made or delivered."""
        self.nbytes -= self._clients[client].pop(number).nbytes

    def check_upload(self, client: bytes, number: int, slot: int, nbytes: int) -> None:
        """May ``client`` say that its input of ``nbytes`` lies in this slot?

        Raises:
            RequestError: CONNECTION_LOST: the client has no segments (any more);
                INVALID_REQUEST: it has none like this.
        """
        mine = self._clients.get(client)
        if mine is None:
            raise make_error(
                "CONNECTION_LOST",
                "the granted memory that the request names is gone",
                hint="send it again with its elements in the message",
            )
        grant = mine.get(number)
        if (
            grant is None
            or grant.direction is not Direction.UPLOAD
            or not 0 <= slot < grant.slots
            or nbytes > grant.slot_bytes
        ):
            raise RequestError(
                "INVALID_REQUEST",
                f"slot {slot} of grant {number} holds no upload of {nbytes} bytes",
                where="upload",
                hint="name a slot that was granted to this client",
            )

    def reserve(
        self, client: bytes, nbytes: int, marks: Callable[[int], Sequence[int]]
    ) -> Place | None:
        """A free slot for a result of ``nbytes``; None when the client has none.

        Args:
            marks: of a grant, as the client has written them: a slot is free when its mark is the
                generation of its last result. Whatever else stands there frees nothing.
        """
        fitting = [
            g
            for g in self._clients.get(client, {}).values()
            if g.direction is Direction.RESULT and g.slot_bytes >= nbytes
        ]
        for grant in sorted(fitting, key=lambda g: g.slot_bytes):
            seen, generations, out = marks(grant.number), grant.generations, grant.out
            for slot in range(grant.slots):  # the lowest: its pages are warm
                if slot in out and seen[slot] != generations[slot]:
                    continue
                out.add(slot)
                # Never 0, the mark of a slot that was never used.
                generations[slot] = generations[slot] % _U32 + 1
                return Place(grant.number, slot, generations[slot])
        return None

    def take_back(self, client: bytes, place: Place) -> None:
        """A reserved slot that the client will never be told of, and so never release."""
        grant = self._clients.get(client, {}).get(place.grant)
        if grant is not None and grant.generations[place.slot] == place.generation:
            grant.out.discard(place.slot)
