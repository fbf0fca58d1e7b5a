"""What this client does with memory that the Dispatcher grants it (tensormq/grants.py). Pure.

Large tensors go through slots where there are free ones, and in messages otherwise: nothing ever
waits for a slot. The first large tensor of a size makes the client ask; those after it find slots.

A slot that holds an input is free again when the Dispatcher has read it, which a reply to its
request, *or to one sent later*, says (PROTOCOL.md, "Client"). A reply that comes too late for its
caller says so as well; the end of a caller's patience does not.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from enum import StrEnum
from typing import Literal

from blockflow.core import limits
from blockflow.tensormq.grants import MIN_TENSOR_BYTES, geometry
from blockflow.wire.client import Invitation, Invite, encode_to_dispatcher
from blockflow.wire.grants import Ask, Attach, Direction, Granted, Refused

RETRY_NS = 10_000_000_000
"""After a refusal, messages it is for so long; then the next large tensor asks again."""

ANSWER_NS = 10_000_000_000
"""A Dispatcher that has not answered an Invite by then is asked once more."""

_REASON_CHARS = 500

INVITE_ID = b"\x01" * 16

Wish = Literal["auto", "off"]


class SharingState(StrEnum):
    """How far a client is with granted memory."""

    OFF = "off"
    UNUSED = "unused"
    ASKED = "asked"
    ATTACHING = "attaching"
    ATTACHED = "attached"
    UNAVAILABLE = "unavailable"


@dataclass(frozen=True, slots=True)
class SharedMemory:
    """Whether tensors go through granted memory, and if not, why.

    Attributes:
        state: ``off`` (by the caller's wish), ``unused`` (no large tensor yet), ``asked`` and
            ``attaching`` (on the way), ``attached``, ``unavailable``.
        reason: why tensors, or those of some size, travel in messages; '' when there is none.
        upload_slots, result_slots: that the Dispatcher has granted.
        nbytes: of all segments; pages cost memory when they are first written.
    """

    state: SharingState
    reason: str
    upload_slots: int
    result_slots: int
    nbytes: int


@dataclass(frozen=True, slots=True)
class Slot:
    """One slot of a granted segment."""

    grant: int
    index: int


@dataclass(slots=True)
class _Uploads:
    """A segment for inputs; ``free`` are indices, the lowest last."""

    slot_bytes: int
    free: list[int]


class Sharing:
    """State of one connection's granted memory.

    Instructions to the shell queue up in :attr:`invites` (headers for the Dispatcher),
    :attr:`way` (where to connect) and :attr:`packets` (for the side connection).
    """

    def __init__(self, wish: Wish) -> None:
        self.state = SharingState.OFF if wish == "off" else SharingState.UNUSED
        self.invites: deque[bytes] = deque()
        self.way: tuple[str, Attach] | None = None
        self.packets: deque[Ask] = deque()
        self._reason = "switched off by the caller" if wish == "off" else ""
        self._retry_ns = 0
        self._number = 0
        self._forget()

    def _forget(self) -> None:
        self._uploads: dict[int, _Uploads] = {}
        self._grants: dict[int, Granted] = {}
        self._under_way: deque[tuple[int, bytes, Slot]] = deque()
        self._wanted: dict[tuple[Direction, int], int] = {}
        self._asked: dict[tuple[Direction, int], int | None] = {}
        self.way = None
        self.packets.clear()
        self.invites.clear()

    def info(self) -> SharedMemory:
        """For people and logs."""
        grants = list(self._grants.values())  # asked for from any thread
        slots = [sum(g.slots for g in grants if g.direction is d) for d in Direction]
        nbytes = sum(g.slots * g.slot_bytes for g in grants)
        return SharedMemory(self.state, self._reason, slots[0], slots[1], nbytes)

    # --- uploads

    def take(self, nbytes: int, now_ns: int) -> Slot | None:
        """A slot for an input, the smallest that holds it; None: it goes in the message."""
        if self.state is SharingState.OFF or nbytes < MIN_TENSOR_BYTES:
            return None
        fitting = [
            (u.slot_bytes, number)
            for number, u in self._uploads.items()
            if u.free and u.slot_bytes >= nbytes
        ]
        if fitting:
            number = min(fitting)[1]
            return Slot(number, self._uploads[number].free.pop())
        self.want(Direction.UPLOAD, nbytes, now_ns)
        return None

    def holds(self, slot: Slot) -> bool:
        """Whether a slot that was taken is still this client's."""
        return slot.grant in self._uploads

    def sent(self, request_id: bytes, slot: Slot | None) -> int:
        """A request has left, with its input in ``slot`` or (None) in the message.

        Returns:
            Its number: requests are handled in the order of these.
        """
        self._number += 1
        if slot is not None:
            self._under_way.append((self._number, request_id, slot))
        return self._number

    def put_back(self, slot: Slot) -> None:
        """A slot that was taken is free."""
        uploads = self._uploads.get(slot.grant)
        if uploads is not None:
            uploads.free.append(slot.index)
            uploads.free.sort(reverse=True)  # the lowest is used first: its pages are warm

    def on_reply(self, request_id: bytes, number: int) -> None:
        """The Dispatcher has handled this request, and with it all that were sent before.

        ``number`` is 0 when the request has ended here already: its own slot tells it then.
        """
        under_way = self._under_way
        if not number:
            number = next((n for n, rid, _ in under_way if rid == request_id), 0)
        while under_way and under_way[0][0] <= number:
            self.put_back(under_way.popleft()[2])

    # --- the way to slots

    def want(self, direction: Direction, nbytes: int, now_ns: int) -> None:
        """A large tensor travels in a message: see to it that the next one need not."""
        if not MIN_TENSOR_BYTES <= nbytes <= limits.MAX_MESSAGE_BYTES:
            return
        if self.state is SharingState.OFF:
            return
        if self.state is SharingState.ASKED and now_ns >= self._retry_ns:
            self.lost("the Dispatcher has not said how", now_ns - RETRY_NS)
        if self.state is SharingState.UNAVAILABLE:
            if now_ns < self._retry_ns:
                return
            self.state = SharingState.UNUSED
        key = direction, geometry(nbytes)[0]
        if key in self._asked:
            again = self._asked[key]
            if again is None or now_ns < again:
                return
        self._wanted[key] = nbytes
        if self.state is SharingState.UNUSED:
            self.state = SharingState.ASKED
            self._retry_ns = now_ns + ANSWER_NS
            self.invites.append(encode_to_dispatcher(Invite(INVITE_ID)))
        elif self.state is SharingState.ATTACHED:
            self._ask_for_wanted()

    def on_invitation(self, msg: Invitation, now_ns: int) -> bool:
        """The Dispatcher's answer to the question for a way; False: nobody had asked."""
        if self.state is not SharingState.ASKED:
            return False
        if msg.reason:
            self.lost(msg.reason, now_ns)
            return True
        self.state = SharingState.ATTACHING
        self.way = msg.path, Attach(msg.token)
        return True

    def on_nonsense(self, why: str, now_ns: int) -> bool:
        """That answer cannot be read; False: nobody had asked."""
        asked = self.state is SharingState.ASKED
        if asked:
            self.lost(f"the Dispatcher's invitation cannot be read: {why}"[:_REASON_CHARS], now_ns)
        return asked

    def on_attached(self) -> None:
        """The side connection stands."""
        self.state = SharingState.ATTACHED
        self._reason = ""
        self.way = None
        self._ask_for_wanted()

    def on_packet(self, msg: Granted | Refused, now_ns: int) -> None:
        """What came on the side connection (and was mapped)."""
        if isinstance(msg, Refused):
            self._reason = msg.reason
            self._asked[msg.direction, geometry(msg.nbytes)[0]] = now_ns + RETRY_NS
            return
        self._grants[msg.grant] = msg
        if msg.direction is Direction.UPLOAD:
            free = list(range(msg.slots - 1, -1, -1))
            self._uploads[msg.grant] = _Uploads(msg.slot_bytes, free)

    def lost(self, reason: str, now_ns: int) -> None:
        """There is no side connection, or none any more."""
        if self.state is SharingState.OFF:
            return
        self._forget()
        self.state = SharingState.UNAVAILABLE
        self._reason = reason
        self._retry_ns = now_ns + RETRY_NS

    def reset(self) -> None:
        """The connection to the Dispatcher is another one: nothing of the old one holds."""
        if self.state is not SharingState.OFF:
            self._forget()
            self.state = SharingState.UNUSED
            self._reason = ""

    def _ask_for_wanted(self) -> None:
        for key, nbytes in self._wanted.items():
            self._asked[key] = None
            self.packets.append(Ask(key[0], nbytes))
        self._wanted.clear()
