"""EdgeBook: no worker's slots may all wait for workers that wait for its own. Pure.

A tensor on its way from worker A to worker B holds a slot of A until B has run it. Paths that lead
both from A to B and from B to A could fill both arenas with tensors for each other: then neither
has a slot for its next output, and nothing moves before deadlines pass. So the workers are put in
an order, along the paths as far as that is possible; a request that goes *back* in that order is
admitted only while its worker keeps a slot that no such request can take.

Why that is enough: suppose some workers were stuck, every slot of theirs held by tensors for others
that are stuck. The last of them in the order has only tensors that go back, and one slot which
those cannot have: it is not stuck. Where no paths are opposed, none goes back, and nothing is
refused. Between stages of one worker no slot is held that a stall does not free.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import pairwise

from blockflow.core.routing import PathTree, RouteTable, StageRoute

_BY_HANDLE = "tensormq"


class EdgeBook:
    """The order of the workers, and how many requests hold slots against it.

    Requests that set out before the order changed count as they did then: an update that turns a
    path round can be slowed by them, until they have ended.
    """

    __slots__ = ("_held", "_rank", "_room")

    def __init__(self) -> None:
        self._rank: dict[str, int] = {}
        self._room: dict[int, tuple[str, int]] = {}
        self._held: dict[int, int] = {}

    def publish(self, table: RouteTable) -> None:
        """New requests go by ``table``."""
        groups: dict[str, dict[str, None]] = {}
        for route in table.stages.values():
            groups.setdefault(route.block, {})[group_of(route)] = None
        after: dict[str, dict[str, None]] = {}
        for task in table.tasks.values():
            for path in (task.path, task.canary.path if task.canary else ()):
                for here, there in pairwise(path):
                    for a in groups.get(here, ()):
                        after.setdefault(a, {}).update(groups.get(there, {}))
        self._rank = {g: i for i, g in enumerate(_ordered(after))}
        # One slot stays free for what goes forward. Workers of a topology have two at least; one
        # that has a single one lends it to one request at a time, and relies on its deadline.
        self._room = {
            r.incarnation: (r.worker, max(1, r.slots - 1)) for r in table.stages.values() if r.slots
        }

    def guards(self, tree: PathTree, routes: Sequence[StageRoute]) -> tuple[int, ...]:
        """Incarnations whose slots a request holds on its way back, one entry per slot.

        Args:
            tree: its path.
            routes: per node.
        """
        found = []
        for node, route in enumerate(routes):
            nexts = [routes[child] for child in tree.children(node)]
            if any(self._goes_back(route, n) for n in nexts):
                found.append(route.incarnation)
        return tuple(found)

    def full(self, guards: Iterable[int]) -> str:
        """A worker that has no room for one more request with these guards; '' when all have."""
        asked: dict[int, int] = {}
        for incarnation in guards:
            asked[incarnation] = asked.get(incarnation, 0) + 1
        for incarnation, slots in asked.items():
            worker, room = self._room.get(incarnation, ("", 0))
            held = self._held.get(incarnation, 0)
            # One that needs more than there are slots at all goes alone.
            if room and held and held + slots > room:
                return worker
        return ""

    def take(self, guards: Iterable[int]) -> None:
        """A request sets out."""
        for incarnation in guards:
            self._held[incarnation] = self._held.get(incarnation, 0) + 1

    def give_back(self, guards: Iterable[int]) -> None:
        """A request has ended."""
        for incarnation in guards:
            left = self._held[incarnation] - 1
            if left:
                self._held[incarnation] = left
            else:
                del self._held[incarnation]

    def _goes_back(self, here: StageRoute, there: StageRoute) -> bool:
        if here.incarnation == there.incarnation or there.mode != _BY_HANDLE:
            return False
        rank = self._rank
        return rank.get(group_of(there), 0) <= rank.get(group_of(here), 0)


def group_of(route: StageRoute) -> str:
    """The worker that a replica is one of: ``trunk1`` for ``trunk1#0``."""
    return route.worker.rpartition("#")[0] or route.worker


def _ordered(after: dict[str, dict[str, None]]) -> list[str]:
    """All nodes, those with an edge to another before it wherever no ring forbids that."""
    done: list[str] = []
    seen: set[str] = set()
    for root in after:
        if root in seen:
            continue
        seen.add(root)
        way = [(root, iter(after[root]))]
        while way:
            node, rest = way[-1]
            following = next(rest, None)
            if following is None:
                done.append(node)
                way.pop()
            elif following not in seen:
                seen.add(following)
                way.append((following, iter(after.get(following, ()))))
    return done[::-1]
