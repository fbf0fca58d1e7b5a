"""WaitingRoom: requests that cannot set out at the moment. Pure.

New ones and further attempts wait alike, by the same rule: for a worker of a block that will have
one again, for a slot on opposed paths, and what may have killed a worker for others of its kind.
They hold their credits and their memory meanwhile, which is why not all may wait.
"""

from __future__ import annotations

from blockflow.core.errors import BlockFlowError, RequestError
from blockflow.dispatcher.entry import EDGE, QUARANTINE, Entry
from blockflow.dispatcher.plan import Plan, Planner
from blockflow.dispatcher.recovery import begun_before, may_have_run, not_again


class WaitingRoom:
    """Requests before their first attempt, or between two.

    Args:
        planner: by whose routes they will go.

    Attributes:
        waiting: by ticket, in the order in which they came.
        parked_new: requests that had to wait before their first attempt, ever.
    """

    def __init__(self, planner: Planner) -> None:
        self._planner = planner
        self._suspects: dict[bytes, Entry] = {}
        self.waiting: dict[bytes, Entry] = {}
        self.parked_new = 0

    @property
    def suspects(self) -> int:
        """Requests under way that may have killed a worker."""
        return len(self._suspects)

    def refusal(self, client: bytes, nbytes: int, places: int, max_bytes: int) -> str:
        """Why a new request of ``client`` may not wait; '' = it may.

        What waits for one block must not take the credits and the memory that others work with: it
        gets half of both. While half of that is taken each client may have an even share of it; one
        that has less may go beyond, by half, for nobody leaves before the worker comes.

        Args:
            nbytes: of its input.
            places: credits in all.
            max_bytes: memory for inputs in all.
        """
        count, most = len(self.waiting), max(1, places // 2)
        if sum([e.charged for e in self.waiting.values()]) + nbytes > max_bytes // 2:
            return "the memory for requests that wait for a worker is used up"
        if 2 * count < most:
            return ""
        clients = [e.client for e in self.waiting.values()]
        share = most // len({*clients, client})
        if clients.count(client) < share and count < most + most // 2:
            return ""
        return f"{count} requests wait for a worker already"

    def park(self, entry: Entry) -> None:
        """It has come, and its plan is an outline only."""
        self.parked_new += 1
        entry.waits_for = _worker_of(entry.plan.absent)
        self.waiting[entry.ticket] = entry

    def enter(self, entry: Entry) -> None:
        """Its attempt has been left; :meth:`next_plan` says how it goes on."""
        self._suspects.pop(entry.ticket, None)
        self.waiting[entry.ticket] = entry

    def leave(self, entry: Entry) -> bool:
        """The request has ended.

        Returns:
            True when others may have waited for just that.
        """
        waited = self.waiting.pop(entry.ticket, None)
        suspect = self._suspects.pop(entry.ticket, None)
        return suspect is not None or (waited is None and entry.plan.guards != ())

    def start(self, entry: Entry) -> None:
        """It is under way (again)."""
        del self.waiting[entry.ticket]
        entry.waits_for = ""
        if entry.deaths:
            self._suspects[entry.ticket] = entry

    def hopeless(self, entry: Entry) -> dict[str, BlockFlowError]:
        """The open tasks that can not be run (again), each with the reason: an update has changed
        them, or nothing will run a block of theirs. The others can go on without them."""
        found: dict[str, BlockFlowError] = {}
        tried: dict[str, BlockFlowError] = {}
        admitted = {t.name: t for t in entry.plan.tasks}
        for name in entry.open:
            route = self._planner.published(name)
            if (
                route is None
                or route.contract != admitted[name].contract
                or route.max_rows < entry.rows
            ):
                found[name] = _changed(entry, f"an update changed task {name!r} meanwhile")
            elif why := self._planner.hopeless(route.path):
                where = tried if route.canary and name in entry.plan.turns else found
                where[name] = why
        rest = [self._planner.task(name) for name in entry.open if name not in found]
        if tried and not self._planner.tries(rest, entry.plan.turns):
            found |= tried  # the others need not end because a canary does not go with them
        return found

    def next_plan(self, entry: Entry) -> Plan | BlockFlowError | None:
        """The way of its next attempt, why there will be none, or None: it has to wait. None of its
        open tasks is :meth:`hopeless`."""
        tasks = [self._planner.task(name) for name in entry.open]
        if self._planner.epoch != entry.plan.epoch and any(
            not isinstance(k.outcome, BlockFlowError) for k in entry.kept.values()
        ):
            return _changed(entry, "the results of one reply do not come from two epochs")
        try:
            plan = self._planner.plan_again(tasks, entry.plan.turns)
        except RequestError as exc:
            if exc.code != "BLOCK_UNAVAILABLE":
                return _changed(entry, exc.message)
            if self._planner.down(exc.where):
                return exc
            entry.waits_for = _worker_of(exc.where)
            return None
        refusal = may_have_run(entry.request_id, plan) if entry.again else None
        if refusal is not None:  # its outline did not say what its blocks are like
            return refusal
        begun = begun_before(entry, plan)
        if begun:
            return not_again(_changed(entry, "its next attempt would go another way"), begun)
        if entry.deaths and self._contested(plan):
            entry.waits_for = QUARANTINE
            return None
        if self._planner.edges.full(plan.guards):
            entry.waits_for = EDGE
            return None
        return plan

    def _contested(self, plan: Plan) -> bool:
        mine = plan.lost_with.keys()
        return any(not mine.isdisjoint(s.plan.lost_with) for s in self._suspects.values())


def _worker_of(block: str) -> str:
    return f"a worker of block {block!r}"


def _changed(entry: Entry, why: str) -> RequestError:
    if entry.plan.absent:  # nothing was lost: it has never set out
        code, text = "BLOCK_UNAVAILABLE", f"the request waited for a worker, and {why}"
    else:
        code, text = "WORKER_LOST", f"the request's worker died, and {why}"
    return RequestError(code, text, where=entry.request_id.hex(), hint="send it again")
