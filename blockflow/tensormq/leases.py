"""The producer's book of slots: who still reads which bytes, and when they may be reused.

Pure: no memory is touched here. A *slot* is an entry of the book with an extent of the arena; a
*lane* is one consumer's release mark on it. A slot is free again when every lane has been released
and nobody holds it. The generation counts a slot's publications, so that a mark or a handle from an
earlier life is told from a current one (the ABA problem of every recycled index).

A message with a handle may be lost (a tcp connection that is reset), and then nobody ever releases
its lane. So a consumer marks what it opens, too, and what nobody has opened when nobody waits for
it any more is *revoked*: no handle to it can be opened from then on. Only a while later, when who
was just about to open it has done so or been refused, its lanes count as released.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from enum import StrEnum

from blockflow.core import limits
from blockflow.tensormq.extents import Extents

_WORD = 2**32 - 1
MAX_GENERATION = _WORD - 1
"""The mark of one more, once opened, would be 0: what every lane shows before anybody opens it."""

NEVER_NS = 2**63 - 1

REVOKE_NS = 1_000_000_000
"""So long after its last deadline an unopened slot is revoked; so long after that it is free."""


def opened_mark(generation: int) -> int:
    """What a consumer writes into its lane when it opens that generation, 0..2**32-1. When it
    releases it, it writes the generation itself."""
    return generation ^ _WORD


class SlotState(StrEnum):
    FREE = "free"
    RESERVED = "reserved"
    PUBLISHED = "published"


TRANSITIONS: Mapping[str, tuple[SlotState, SlotState]] = {
    "reserve": (SlotState.FREE, SlotState.RESERVED),
    "discard": (SlotState.RESERVED, SlotState.FREE),
    "publish": (SlotState.RESERVED, SlotState.PUBLISHED),
    "publish again": (SlotState.PUBLISHED, SlotState.PUBLISHED),
    "free": (SlotState.PUBLISHED, SlotState.FREE),
}
"""Event -> (the state it is legal in, the state after it); "publish again" only while held."""


class LeaseError(RuntimeError):
    """An illegal move: a defect in the caller, never the effect of what a peer sent."""


class Lease:
    """One slot's entry.

    Attributes:
        slot: its index.
        offset: first byte of its extent in the arena.
        size: bytes of the extent.
        generation: of the last publication, 1..MAX_GENERATION; 0 before the first.
        lanes: lane -> incarnation of the consumer that has yet to release it.
        used_lanes: lanes given out under this generation; they are not reused before the next one.
        holds: how often it is held.
        until_ns: when the last one who waits for what was published gives up.
        revoked_ns: when its handles were revoked, 0 = they are not.
    """

    __slots__ = (
        "generation",
        "holds",
        "lanes",
        "offset",
        "revoked_ns",
        "size",
        "slot",
        "state",
        "until_ns",
        "used_lanes",
    )

    def __init__(self, slot: int) -> None:
        self.slot = slot
        self.offset = 0
        self.size = 0
        self.generation = 0
        self.lanes: dict[int, int] = {}
        self.used_lanes = 0
        self.holds = 0
        self.until_ns = NEVER_NS
        self.revoked_ns = 0
        self.state = SlotState.FREE

    def move(self, event: str) -> None:
        legal, after = TRANSITIONS[event]
        if self.state is not legal:
            raise LeaseError(f"slot {self.slot}: {event} while {self.state}")
        self.state = after


class LeaseTable:
    """``slots`` leases over ``capacity`` bytes, each with up to ``lanes`` consumers.

    ``outstanding`` slots are not free. Counters: ``stalls`` (reserve found nothing), ``stale``
    (releases of another generation or lane), ``lost`` (lanes that nobody had opened in time),
    ``high_water`` (most bytes in use at once), ``high_slots`` (most slots).
    """

    def __init__(
        self, capacity: int, slots: int, lanes: int = 32, align: int = limits.ARENA_ALIGN
    ) -> None:
        if slots < 1 or not 1 <= lanes <= 256:
            raise ValueError(f"{slots} slots with {lanes} lanes: at least 1, lanes up to 256")
        self.lanes = lanes
        self.slots = slots
        self.extents = Extents(capacity, align)
        self.outstanding = 0
        self.stalls = 0
        self.stale = 0
        self.lost = 0
        self.high_water = 0
        self.high_slots = 0
        self._leases = [Lease(i) for i in range(slots)]
        self._free = list(range(slots - 1, -1, -1))
        self._published: dict[int, Lease] = {}

    def __getitem__(self, slot: int) -> Lease:
        return self._leases[slot]

    @property
    def used(self) -> int:
        """Bytes that are not free."""
        return self.extents.used

    @property
    def taken(self) -> int:
        """Slots that are not to be had: those that are out, or more where the bytes run out first.
        Gaps may leave the last half of the bytes to nobody."""
        extents = self.extents
        return max(
            self.outstanding,
            min(self.slots, limits.ARENA_GAPS * self.slots * extents.used // extents.capacity),
        )

    def fits(self, nbytes: int) -> bool:
        """Whether ``nbytes`` could be reserved in an empty arena."""
        return self.extents.size_of(nbytes) <= self.extents.capacity

    def reserve(self, nbytes: int) -> Lease | None:
        """A slot with room for ``nbytes``, or None: no slot or no gap is free now."""
        size = self.extents.size_of(nbytes)
        offset = self.extents.take(size) if self._free else None
        if offset is None:
            self.stalls += size <= self.extents.capacity
            return None
        lease = self._leases[self._free.pop()]
        lease.move("reserve")
        lease.offset = offset
        lease.size = size
        self.outstanding += 1
        if self.extents.used > self.high_water:
            self.high_water = self.extents.used
        if self.outstanding > self.high_slots:
            self.high_slots = self.outstanding
        return lease

    def discard(self, slot: int) -> None:
        """Give back a reserved slot that will not be published."""
        lease = self._leases[slot]
        if lease.holds:
            raise LeaseError(f"slot {slot}: discard while it is held")
        lease.move("discard")
        self._give_back(lease)

    def publish(self, slot: int, consumers: Sequence[int], until_ns: int = NEVER_NS) -> range:
        """Lease the slot to ``consumers`` (incarnations; one may come twice), of whom nobody needs
        to open it after ``until_ns``.

        Returns:
            The lanes, in the order of the consumers.

        Raises:
            LeaseError: nobody to publish to, more consumers than lanes are left, or a slot that is
                neither reserved nor held.
        """
        lease = self._leases[slot]
        again = lease.state is SlotState.PUBLISHED
        if again and not lease.holds:
            raise LeaseError(f"slot {slot}: published again without being held")
        # While some lane is out its mark must go on counting, so its generation goes on too.
        first = lease.used_lanes if lease.lanes else 0
        stop = first + len(consumers)
        if not first < stop <= self.lanes:
            raise LeaseError(f"slot {slot}: {len(consumers)} consumers, {self.lanes - first} lanes")
        lease.move("publish again" if again else "publish")
        if not lease.lanes:
            lease.generation = lease.generation % MAX_GENERATION + 1
            lease.until_ns = lease.revoked_ns = 0
        lease.until_ns = max(lease.until_ns, until_ns)
        lease.used_lanes = stop
        lane = first
        for consumer in consumers:
            lease.lanes[lane] = consumer
            lane += 1
        self._published[slot] = lease
        return range(first, stop)

    def release(self, slot: int, lane: int, generation: int) -> bool:
        """One consumer is done; a release that is not current is counted and ignored.

        Returns:
            True when that freed the slot.
        """
        lease = self._published.get(slot)
        if lease is None or lease.generation != generation or lane not in lease.lanes:
            self.stale += 1
            return False
        del lease.lanes[lane]
        return self._free_if_done(lease)

    def sweep(self, marks: Sequence[int]) -> list[int]:
        """Apply the consumers' marks: ``marks[slot * lanes + lane]`` is the released generation.

        Returns:
            The slots that became free.
        """
        freed: list[int] = []
        width = self.lanes
        released = [
            (lease, lane)
            for lease in self._published.values()
            for lane in lease.lanes
            if marks[lease.slot * width + lane] == lease.generation
        ]
        for lease, lane in released:
            del lease.lanes[lane]
            if self._free_if_done(lease):
                freed.append(lease.slot)
        return freed

    def reclaim(self, marks: Sequence[int], now_ns: int) -> tuple[list[int], list[int]]:
        """Take back what nobody has opened and nobody waits for; sweep before.

        What a consumer has opened stays with it, and so does what is held.

        Returns:
            The slots to revoke now, all their handles, and the slots that became free.
        """
        revoked: list[int] = []
        freed: list[int] = []
        for lease in list(self._published.values()):
            if lease.holds or now_ns - lease.until_ns < REVOKE_NS:
                continue
            opened, first = opened_mark(lease.generation), lease.slot * self.lanes
            lost = [lane for lane in lease.lanes if marks[first + lane] != opened]
            if lost and not lease.revoked_ns:
                lease.revoked_ns = now_ns
                revoked.append(lease.slot)
            elif lost and now_ns - lease.revoked_ns >= REVOKE_NS:
                for lane in lost:
                    del lease.lanes[lane]
                self.lost += len(lost)
                if self._free_if_done(lease):
                    freed.append(lease.slot)
        return revoked, freed

    def peer_gone(self, incarnation: int) -> tuple[int, list[int]]:
        """A consumer is proven dead: release all its lanes.

        Returns:
            How many lanes those were, and the slots that became free.
        """
        count = 0
        freed: list[int] = []
        for lease in list(self._published.values()):
            done = [lane for lane, consumer in lease.lanes.items() if consumer == incarnation]
            for lane in done:
                del lease.lanes[lane]
            count += len(done)
            if done and self._free_if_done(lease):
                freed.append(lease.slot)
        return count, freed

    def hold(self, slot: int) -> None:
        """Keep the slot whatever its consumers release, until :meth:`unhold`. Holds are counted."""
        lease = self._leases[slot]
        if lease.state is SlotState.FREE:
            raise LeaseError(f"slot {slot}: held while free")
        lease.holds += 1

    def unhold(self, slot: int) -> bool:
        """End one hold; True when that freed the slot. A slot still reserved stays reserved."""
        lease = self._leases[slot]
        if not lease.holds:
            raise LeaseError(f"slot {slot}: unheld more often than held")
        lease.holds -= 1
        return lease.state is SlotState.PUBLISHED and self._free_if_done(lease)

    def _free_if_done(self, lease: Lease) -> bool:
        if lease.lanes or lease.holds:
            return False
        lease.move("free")
        del self._published[lease.slot]
        self._give_back(lease)
        return True

    def _give_back(self, lease: Lease) -> None:
        self.extents.give(lease.offset, lease.size)
        self._free.append(lease.slot)
        self.outstanding -= 1
