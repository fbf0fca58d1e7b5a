"""UpdateRunner: takes the update under way through its phases, as far as the facts allow. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from blockflow.control.beginning import ENDED_EARLY, cut_short, in_force, may_be_set_aside
from blockflow.control.crew import ns
from blockflow.control.events import Begun, Commit, Finished, Send
from blockflow.control.fleet import Crash, Life, Numbers, Replica, Role
from blockflow.control.realm import Realm
from blockflow.control.update import Kind, Phase, Update
from blockflow.core.errors import BlockFlowError, TopologyError
from blockflow.core.lifecycle import Event, State
from blockflow.core.plan import Start
from blockflow.core.scarcity import failure
from blockflow.wire.control import Drain

_HISTORY = 64


class UpdateRunner:
    """The current update and the past ones.

    Attributes:
        current: the update under way, None when none is.
        aside: one that was under way when the current one, or one before it, began: it is in force
            long since, and only waits for old requests to end, and then for who served these.
        updates: the latest updates by id; the oldest are forgotten.
    """

    def __init__(self, realm: Realm, numbers: Numbers) -> None:
        self.current: Update | None = None
        self.aside: Update | None = None
        self.updates: dict[int, Update] = {}
        self._realm = realm
        self._crew = realm.crew
        self._timing = realm.settings.timing
        self._numbers = numbers

    def begin(self, kind: Kind, epoch: int, now_ns: int, block: str = "") -> Update:
        """A new current update; the caller has made sure that none is :attr:`in_the_way`. One that
        still drains is set aside.

        Raises:
            SystemError_: NO_SPACE, STATE_UNUSABLE: no number is left for it.
        """
        # From the sequence of the incarnations: it goes on where a dead Manager or an earlier start
        # has left it, so that who still asks for an update of theirs never gets another one.
        number = self._numbers.take_incarnation()
        update = Update(number, kind, epoch, now_ns, block)
        self.updates[update.update_id] = update
        if len(self.updates) > _HISTORY:  # two of them are not final at most
            del self.updates[min(i for i, u in self.updates.items() if u.final)]
        if self.current is not None:
            self.aside = self.current
        self.current = update
        return update

    @property
    def in_the_way(self) -> Update | None:
        """The update that another one has to wait for, None where one may begin.

        One that only drains is in nobody's way: a long request must not keep an operator from
        going back. Only one at a time is set aside, as each keeps its old workers alive.
        """
        update = self.current
        if update is None or (self.aside is None and may_be_set_aside(update) and self._roomy):
            return None
        return update

    def of_epoch(self, epoch: int) -> Update | None:
        """The latest update that has put ``epoch`` in force, or taken it up; None: it is forgotten,
        or was another Manager's."""
        brought = (u for u in reversed(self.updates.values()) if u.stores or u.restores)
        over = (Phase.FAILED, Phase.UNCHANGED)
        return next((u for u in brought if u.epoch == epoch and u.phase not in over), None)

    @property
    def under_way(self) -> Update | None:
        """What people are told of: the current update, or else what is left of an earlier one."""
        return self.current or self.aside

    @property
    def settled(self) -> bool:
        """Nothing of any update is left to do."""
        return self.under_way is None

    def deadline(self) -> int | None:
        """When :meth:`progress` is due at the latest, None = not before the next event."""
        updates = (self.current, self.aside)
        due = (u.drain_deadline_ns for u in updates if u is not None)
        return min((t for t in due if t is not None), default=None)

    def start_candidates(self, update: Update, starts: Sequence[Start], now_ns: int) -> None:
        """Launch the replicas that must be ready before the update goes on."""
        if update.stores:
            self._crew.out.append(Begun(update.update_id, update.epoch))
        try:
            shares = self._realm.threads.of_new([s.spec for s in starts])
            planned = self._realm.planned(update.target or self._realm.topology)
            for start, share in zip(starts, shares, strict=True):
                threads = planned[start.spec.name]
                replica = self._crew.start_replica(start, share, threads, Role.CANDIDATE, now_ns)
                update.candidates.add(replica.life.incarnation)
                update.waiting.add(replica.life.incarnation)
        except BlockFlowError as e:  # no number could be reserved: the disk is full
            self.fail(update, e, now_ns)
        except Exception as e:  # no memory, say: what has not begun is not to be waited for
            what = f"{type(e).__name__} as its workers were to start: {e}"
            error = failure(e, what, "control plane")
            self.fail(update, error, now_ns)
            if error.code == "INTERNAL":
                raise

    def start_missing(self, update: Update, starts: Sequence[Start], now_ns: int) -> None:
        """Launch what is in force and does not run; the routes wait for it, unless it fails. What
        there are no numbers for is left to the next update: the others need not do without."""
        shares = self._realm.threads.of_new([s.spec for s in starts])
        planned = self._realm.planned(self._realm.topology)
        for start, share in zip(starts, shares, strict=True):
            threads = planned[start.spec.name]
            try:
                replica = self._crew.start_replica(start, share, threads, Role.ACTIVE, now_ns)
            except BlockFlowError as e:  # the disk is full
                update.notes.append(f"{start.replica} was not started: {e}")
                continue
            update.waiting.add(replica.life.incarnation)

    def progress(self, now_ns: int) -> None:
        """Move on what is under way. Called after every event: it acts on facts, not on events."""
        if self.aside is not None:
            self._drain(self.aside, now_ns)
        update = self.current
        if update is None:
            return
        if update.phase is Phase.PREPARING and not update.waiting:
            target = update.target
            if update.stores and target is not None:
                update.move(Phase.COMMITTING, now_ns)
                self._crew.out.append(
                    Commit(
                        update.update_id,
                        update.epoch,
                        update.posted or {},
                        target.to_dict(),
                        target.digests(),
                        str(update.kind),
                    )
                )
            else:
                self.adopt(update, now_ns)
        flipped = self._realm.publication.flipped >= update.version
        if update.phase is Phase.PUBLISHING and flipped:
            update.move(Phase.DRAINING, now_ns)
            update.drain_deadline_ns = now_ns + ns(self._timing.drain)
        if update.phase is Phase.DRAINING:
            self._drain(update, now_ns)

    def adopt(self, update: Update, now_ns: int) -> None:
        """The point of no return: what was prepared becomes what is in force."""
        realm, block = self._realm, update.block
        others = self.aside.retiring if self.aside is not None else set()
        if update.stores and update.target is not None:
            realm.take(update.target, update.epoch, update.posted, update.leaving)
        elif update.kind is Kind.DRAIN:
            realm.closed[block] = "drain"
        elif update.kind is Kind.STOP:
            realm.closed[block] = "stop"
        elif update.kind in (Kind.UNDRAIN, Kind.RESTART):
            realm.reopen(block)
        for replica in list(self._crew.fleet):
            incarnation = replica.life.incarnation
            if incarnation in update.candidates:
                replica.role = Role.ACTIVE
            elif replica.name in update.leaving:
                replica.role = Role.RETIRING
                update.retiring.add(incarnation)
                if replica.life.reaped:  # it may have been about to be started again
                    self._crew.fleet.remove(replica)
            elif replica.role is Role.RETIRING and incarnation not in others:
                update.retiring.add(incarnation)  # it outlived a re-adoption that knew no topology
        update.move(Phase.PUBLISHING, now_ns)
        # Before the routes: who must compute with less does so when the new ones get work.
        realm.threads.tell(settled=False)
        realm.publish(now_ns)
        update.version = realm.version

    def fail(self, update: Update, error: BlockFlowError, now_ns: int) -> None:
        """Give an update up: its new replicas stop, what was in force stays."""
        update.error = error
        update.move(Phase.FAILED, now_ns)
        for replica in self._crew.fleet:
            if replica.role is Role.CANDIDATE:
                self._crew.stop(replica.life, now_ns)
        self._finish(update)

    def cut_short(self, now_ns: int) -> None:
        """The system shuts down: nobody waits for an update any longer. What is in force already
        is done, whatever still drains: everything ends, and it comes back at a start."""
        for update in (self.aside, self.current):
            if update is None:
                continue
            if in_force(update):
                update.notes.append(ENDED_EARLY)
                update.move(Phase.DONE, now_ns)
                self._finish(update)
            else:
                self.fail(update, cut_short(update, self._realm.epoch), now_ns)

    def unchanged(self, update: Update, now_ns: int) -> None:
        """End an update that asks for what is there already."""
        update.move(Phase.UNCHANGED, now_ns)
        self._finish(update)

    def candidate_died(self, replica: Replica, crash: Crash, now_ns: int) -> None:
        """A replica of the current update did not live to serve."""
        update = self.current
        if update is not None and crash.incarnation in update.candidates:
            self.fail(update, start_error(replica, crash), now_ns)

    def _drain(self, update: Update, now_ns: int) -> None:
        deadline = update.drain_deadline_ns
        if deadline is not None:
            drained = self._realm.publication.drained >= update.version
            if not drained and not self._needs_no_drain(update):
                if now_ns < deadline:
                    return
                update.notes.append("time was up before the requests on the old routes ended")
            update.drain_deadline_ns = None
            self._release(update, now_ns)
        update.retiring &= {life.incarnation for life in self._crew.lives()}
        if not update.retiring:
            update.move(Phase.DONE, now_ns)
            self._finish(update)

    def _needs_no_drain(self, update: Update) -> bool:
        """Nothing of it waits for the requests on the old routes, so another update may follow
        while a long one of them goes on. What that one retires waits for all older routes."""
        opens = update.kind in (Kind.SYSTEM, Kind.ROLLBACK, Kind.UNDRAIN)
        closes_none = update.kind is Kind.READOPTION and not self._realm.closed
        return (opens or closes_none) and not update.retiring and self._roomy

    @property
    def _roomy(self) -> bool:
        """Another update may take its tasks' indices beside those of the requests in flight."""
        return self._realm.shares.roomy

    def _release(self, update: Update, now_ns: int) -> None:
        """Nothing in flight needs the old routes any more."""
        realm = self._realm
        if update.kind is Kind.STOP:
            for replica in self._crew.fleet.hosting(update.block):
                if not realm.all_closed(replica, "stop"):
                    update.notes.append(f"{replica.name} hosts other blocks and keeps running")
        # A successor carries out what an operator closed: with a dead Manager, it may be half done.
        if update.kind in (Kind.STOP, Kind.READOPTION):
            for replica in self._crew.fleet.active():
                if replica.stopped or not realm.all_closed(replica, "stop"):
                    continue
                replica.stopped = True
                replica.restart_at_ns = None
                update.retiring.add(replica.life.incarnation)
        if update.kind in (Kind.DRAIN, Kind.READOPTION):
            for replica in self._crew.fleet.active():
                if not replica.stopped and realm.all_closed(replica):
                    self._tell_drain(replica.life)
        for life in list(self._crew.lives()):
            if life.incarnation in update.retiring:
                self._crew.stop(life, now_ns)

    def _tell_drain(self, life: Life) -> None:
        if life.state is State.READY:
            life.on(Event.DRAIN)
        if life.state is State.DRAINING:  # told before, it may not have heard it
            self._crew.out.append(Send(life.incarnation, Drain()))

    def _finish(self, update: Update) -> None:
        if update is self.aside:
            self.aside = None
        else:
            self.current = None
        self._crew.out.append(Finished(update.update_id))


def start_error(replica: Replica, crash: Crash) -> TopologyError:
    """Why an update failed: the replica that did not start, its cause and last log lines."""
    details: dict[str, Any] = {"replica": replica.name, "blocks": list(replica.spec.blocks)}
    if crash.error is not None:
        details["cause"] = crash.error.to_dict()
    if crash.log_tail:
        details["log"] = list(crash.log_tail)
    mend, error = "mend the block and send the update again", crash.error
    # Not the block's fault: the machine or the installation lacks something, or the block was asked
    # for what it cannot.
    codes = ("UNSUPPORTED_ENGINE", "MISSING_EXTRA", "INTERNAL", "UNAUTHORIZED")
    if error is not None and error.hint and (crash.no_room or error.code in codes):
        mend = f"{error.hint}, then send the update again"
    elif crash.passing:
        mend = "the block need not be at fault: send the update again"
    return TopologyError(
        "UPDATE_FAILED",
        f"worker {replica.name} did not start: {crash.cause}",
        where=replica.spec.name,
        hint=f"the old epoch keeps serving; {mend}",
        details=details,
        retryable=crash.passing,
    )
