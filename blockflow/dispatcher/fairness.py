"""FairShares: the credits of a pool between the clients that want some, max-min fair. Pure.

A client is a connection; tasks that compete for credits are the clients of another pool. What one
wants is what it had in flight lately and was refused lately; the pool is filled like vessels with
water: whoever wants less than the level gets all of it, the others get the level. A lone client
therefore gets everything, and a greedy one leaves the others theirs.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Iterable

REMEMBER_NS = 1_000_000_000
"""What a client had or was refused counts as wanted for one to two times as long."""

MAX_CLIENTS = 4096
"""Clients that are remembered by what they want; in flight there are fewer than credits anyway."""

_REFRESH_NS = 10_000_000
_PER_CLIENT_NS = 10_000
"""A look takes up to half a microsecond per client: of many, no more than a twentieth of the time
..."""

_FEW = 64
"""... and it comes at once, when one more makes itself known, only while there are so few: each of
many does so every second."""

_HEADROOM = 1


class _Wish:
    """A client's claims: in flight now, and the most it wanted in this period and the last."""

    __slots__ = ("before", "inflight", "most", "refused")

    def __init__(self) -> None:
        self.inflight = self.most = self.before = self.refused = 0

    def wanted(self) -> int:
        return max(self.inflight + self.refused, self.most, self.before) + _HEADROOM


class FairShares:
    """Who has how much of a pool, and who may have more."""

    __slots__ = (
        "_by_client",
        "_level",
        "_level_of",
        "_looked_ns",
        "_starving",
        "_turned_ns",
        "inflight",
    )

    def __init__(self) -> None:
        self._by_client: dict[Hashable, _Wish] = {}
        self._level = 0.0
        self._starving = False
        self._level_of = 0
        self._looked_ns: int | None = None
        self._turned_ns = 0
        self.inflight = 0

    def __len__(self) -> int:
        """Clients that are remembered."""
        return len(self._by_client)

    def of(self, client: Hashable) -> int:
        """Requests that ``client`` has in flight."""
        wish = self._by_client.get(client)
        return 0 if wish is None else wish.inflight

    def enter(self, client: Hashable, now_ns: int) -> int:
        """A request of ``client`` enters; returns how many are in flight with it."""
        self._turn(now_ns)
        wish = self._by_client.get(client)
        if wish is None:
            wish = self._by_client[client] = _Wish()
        wish.inflight += 1
        if wish.inflight > wish.most:
            wish.most = wish.inflight
        self.inflight += 1
        return self.inflight

    def leave(self, client: Hashable) -> None:
        """A request of ``client`` has ended."""
        self._by_client[client].inflight -= 1
        self.inflight -= 1

    def refused(self, client: Hashable) -> None:
        """``client`` wanted one more and did not get it."""
        wish = self._by_client.get(client)
        if wish is None:
            if len(self._by_client) >= MAX_CLIENTS:
                return
            wish = self._by_client[client] = _Wish()
        wish.refused += 1
        if wish.refused == 1 and len(self._by_client) <= _FEW:
            self._looked_ns = None  # somebody has made itself known: at once, not in a moment
        wish.most = max(wish.most, wish.inflight + wish.refused)

    def below_share(self, client: Hashable, limit: int, now_ns: int) -> bool:
        """Has ``client`` less than its fair share of ``limit``?

        What is left over when all have the same number goes to who comes first, but not while
        somebody has less and wants more: rounded up, some would get one more and the last nothing.
        """
        mine, level = self.of(client), self.level(limit, now_ns)
        return mine < math.floor(level) or (mine < level and not self._starving)

    def level(self, limit: int, now_ns: int) -> float:
        """What each client may have at most; a hundredth of a second old at most (of more than a
        thousand clients, by so much more)."""
        if (
            self._looked_ns is None
            or limit != self._level_of
            or now_ns - self._looked_ns >= max(_REFRESH_NS, _PER_CLIENT_NS * len(self._by_client))
        ):
            self._turn(now_ns)
            wishes = self._by_client.values()
            self._level = fair_level([w.wanted() for w in wishes], limit)
            whole = math.floor(self._level)
            self._starving = any(w.refused and w.inflight < whole for w in wishes)
            self._level_of, self._looked_ns = limit, now_ns
        return self._level

    def _turn(self, now_ns: int) -> None:
        """When the present period is over, begin a new one and forget who wants nothing more."""
        gone = now_ns - self._turned_ns
        if gone < REMEMBER_NS:
            return
        self._turned_ns = now_ns
        for client, wish in list(self._by_client.items()):
            wish.before = wish.most if gone < 2 * REMEMBER_NS else 0
            wish.most, wish.refused = wish.inflight, 0
            if not wish.inflight and not wish.before:
                del self._by_client[client]


def fair_level(wants: Iterable[int], limit: int) -> float:
    """The max-min fair level: the sum over all wants of ``min(want, level)`` is ``limit``.

    It is ``limit`` when all together want no more than that: nobody is held back then.
    """
    left = sorted(wants)
    room = float(limit)
    for i, want in enumerate(left):
        each = room / (len(left) - i)
        if want > each:
            return max(each, 1.0)
        room -= want
    return float(limit)
