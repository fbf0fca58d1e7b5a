"""Brain: the Manager's decisions without its I/O (thesis, section 3.5: the Manager).

It is told what happened (events) and what is wanted (commands), each with the time, and says what
shall be done (instructions). It never blocks, has no clock and no sockets: a simulator can drive
it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from blockflow.control.adoption import Adoption, lost_state, tell_again
from blockflow.control.beginning import check_epoch, check_free
from blockflow.control.crew import ns
from blockflow.control.events import (
    AllGone,
    CommitFailed,
    Committed,
    Event,
    Exited,
    Instruction,
    Kill,
    Launched,
    LaunchFailed,
    Proved,
    Received,
    Send,
)
from blockflow.control.fleet import Numbers, Place, Role
from blockflow.control.heartbeat import Hang
from blockflow.control.orders import check_orders
from blockflow.control.realm import Realm
from blockflow.control.routes import check_size
from blockflow.control.runner import UpdateRunner
from blockflow.control.settings import ControlSettings
from blockflow.control.update import Kind, Update
from blockflow.core.errors import BlockFlowError, RequestError
from blockflow.core.lifecycle import Event as LifeEvent
from blockflow.core.lifecycle import State
from blockflow.core.plan import Plan, new_replicas
from blockflow.core.topology import Topology
from blockflow.wire.control import (
    Drain,
    Drained,
    Hello,
    Monitor,
    PolicyRefused,
    Ready,
    RoutesApplied,
    StartFailed,
    Stop,
)


class Brain:
    """The desired state, what runs, and the one change under way.

    Attributes:
        realm: what is in force.
        crew: the processes.
        runner: the update under way and the past ones.
        stopping: the system is shutting down.
    """

    def __init__(self, settings: ControlSettings, place: Place, numbers: Numbers) -> None:
        self.realm = Realm(settings, place, numbers)
        self.crew = self.realm.crew
        self.runner = UpdateRunner(self.realm, numbers)
        self.stopping = False
        self._numbers = numbers
        self._timing = settings.timing
        self._grace_ns: int | None = None
        self._stops_sent = False

    # --- commands -------------------------------------------------------------------------------

    def preview(self, topology: Topology, if_epoch: int | None = None) -> dict[str, Any]:
        """What :meth:`apply` would do, without doing it. Raises TopologyError: EPOCH_MISMATCH,
        INVALID_TOPOLOGY."""
        check_epoch(if_epoch, self.realm.epoch)
        plan = self._plan(topology)
        changed = not self.realm.unchanged(topology, plan)
        now = self.realm.epoch
        epoch = self._numbers.epoch_after(now) if changed else now
        return {"changed": changed, "epoch": epoch, "plan": self.realm.told(topology, plan)}

    def apply(
        self,
        topology: Topology,
        posted: Mapping[str, Any],
        now_ns: int,
        kind: Kind = Kind.SYSTEM,
        if_epoch: int | None = None,
    ) -> Update:
        """Accept a system update (or rollback). It goes on with the events that follow. With
        ``if_epoch`` it begins only where that epoch is in force.

        Raises:
            TopologyError: UPDATE_IN_PROGRESS, EPOCH_MISMATCH, or INVALID_TOPOLOGY when it does not
                fit the machine.
        """
        check_epoch(if_epoch, self.realm.epoch)
        check_free(self.stopping, self.runner.in_the_way)
        realm, plan = self.realm, self._plan(topology)
        if realm.unchanged(topology, plan):
            update = self.runner.begin(kind, realm.epoch, now_ns)
            update.plan = realm.told(topology, plan)
            self.runner.unchanged(update, now_ns)
            return update
        update = self.runner.begin(kind, self._numbers.epoch_after(realm.epoch), now_ns)
        update.target, update.posted, update.plan = topology, posted, realm.told(topology, plan)
        update.leaving = {r.replica for r in plan.stop}
        # What was given up or stopped counts as not running: the plan has its successor.
        update.leaving |= {r.name for r in self.crew.fleet.active() if not r.wanted}
        update.notes += [*topology.notes, *realm.cautions(topology)]
        self.runner.start_candidates(update, plan.start, now_ns)
        self.runner.progress(now_ns)
        return update

    def _plan(self, topology: Topology) -> Plan:
        """What it takes to get there. Raises TopologyError: it does not fit the machine."""
        plan = self.realm.plan(topology)
        check_size(topology)
        check_orders((s.spec for s in plan.start), self.crew.place, self.realm.settings)
        return plan

    def restore(
        self,
        topology: Topology,
        epoch: int,
        posted: Mapping[str, Any] | None,
        now_ns: int,
        digests: Mapping[str, str] | None = None,
        notes: Sequence[str] = (),
    ) -> Update:
        """Deploy the stored topology at start. What cannot start leaves the other tasks alone.
        ``digests`` are the artifacts that it was stored with, ``notes`` say what is otherwise."""
        plan = self.realm.plan(topology)
        told = self.realm.told(topology, plan)
        self.realm.take(topology, epoch, posted, set())
        self.realm.stored, self.realm.notes = digests or None, tuple(notes)
        update = self.runner.begin(Kind.RESTORE, epoch, now_ns)
        update.plan = told
        update.notes += self.realm.cautions(topology)
        self.runner.start_missing(update, plan.start, now_ns)
        self.runner.progress(now_ns)
        return update

    def readopt(self, adoption: Adoption, now_ns: int) -> Update:
        """Go on where a dead Manager was: what it had started was installed and hears us again, the
        dead are known. What is missing is started, the routes are published anew, and what only
        the old ones used is stopped once nothing in flight needs it."""
        realm, crew = self.realm, self.crew
        update = self.runner.begin(Kind.READOPTION, realm.epoch, now_ns)
        update.plan = {
            "start": [s.to_dict() for s in adoption.start],
            "keep": [r.name for r in crew.fleet.active()],
            "stop": [r.name for r in crew.fleet if r.role is not Role.ACTIVE],
        }
        tell_again(realm)
        for life in list(crew.lives()):
            if life.state is State.STOPPING:  # it may have been told so, or not
                crew.out.append(Send(life.incarnation, Stop()))
                life.deadline_ns = now_ns + ns(self._timing.stop)
        for replica in crew.fleet:
            if replica.life.reaped and replica.wanted and replica.restart_at_ns is None:
                replica.restart_at_ns = now_ns
        if crew.dispatcher is None or crew.dispatcher.reaped:
            crew.dispatcher_restart_ns = crew.dispatcher_restart_ns or now_ns
        realm.unrestored = lost_state(realm)
        if realm.unrestored is not None:
            self.runner.fail(update, realm.unrestored, now_ns)
            return update
        if realm.topology is not None:
            stored, notes = realm.stored, realm.notes
            realm.take(realm.topology, realm.epoch, realm.posted, set(), adoption.closed)
            realm.stored, realm.notes = stored, notes
        self.runner.start_missing(update, adoption.start, now_ns)
        self.runner.progress(now_ns)
        return update

    def restore_failed(self, epoch: int, error: BlockFlowError, now_ns: int) -> Update:
        """The stored topology does not fit what is there now: say so, and wait for an update."""
        self.realm.epoch, self.realm.unrestored = epoch, error
        update = self.runner.begin(Kind.RESTORE, epoch, now_ns)
        self.runner.fail(update, error, now_ns)
        return update

    def restart(self, block: str, now_ns: int) -> Update:
        """Replace the block's workers by new ones without losing a request."""
        check_free(self.stopping, self.runner.in_the_way)
        old = self.realm.hosts(block)
        update = self.runner.begin(Kind.RESTART, self.realm.epoch, now_ns, block)
        update.leaving = {r.name for r in old}
        names = self.crew.fleet.names()
        starts = [start for r in old for start in new_replicas(r.spec, 1, names)]
        update.plan = {
            "start": [start.to_dict() for start in starts],
            "stop": [r.name for r in old],
        }
        self.runner.start_candidates(update, starts, now_ns)
        self.runner.progress(now_ns)
        return update

    def close(self, block: str, kind: Kind, now_ns: int) -> Update:
        """Drain, undrain or stop one block (:class:`Kind` says which)."""
        check_free(self.stopping, self.runner.in_the_way)
        self.realm.hosts(block)
        held = self.realm.closed.get(block)
        if held == "stop" and kind is not Kind.STOP:
            raise RequestError(
                "INVALID_REQUEST",
                f"block {block!r} is stopped",
                where=block,
                hint="restart it, or send a system update",
            )
        update = self.runner.begin(kind, self.realm.epoch, now_ns, block)
        if held == {Kind.DRAIN: "drain", Kind.STOP: "stop"}.get(kind):
            self.runner.unchanged(update, now_ns)
        self.runner.progress(now_ns)
        return update

    def monitor(self, hz: float) -> None:
        """Set the rate of KPI samples everywhere; 0 turns them off."""
        self.crew.hz = hz
        self.crew.broadcast(Monitor(hz))

    def shutdown(self, now_ns: int) -> None:
        """End everything; AllGone follows when no process is left. Idempotent."""
        if self.stopping:
            return
        self.stopping = True
        self.crew.cancel_restarts()
        self.runner.cut_short(now_ns)
        dispatcher = self.crew.dispatcher
        if self.crew.dispatcher_ready and dispatcher is not None:
            dispatcher.on(LifeEvent.DRAIN)
            self._out.append(Send(dispatcher.incarnation, Drain()))
            self._grace_ns = now_ns + ns(self._timing.grace)
        else:
            self._stop_all(now_ns)
            self._go_on(now_ns)  # where nobody is left, no event will come

    # --- events ---------------------------------------------------------------------------------

    def handle(self, event: Event, now_ns: int) -> None:
        """Take one event; what it leads to is in :meth:`take`."""
        if isinstance(event, Received):
            self._received(event, now_ns)
        elif isinstance(event, Exited):
            self._exited(event, now_ns)
        elif isinstance(event, Proved):
            if self.crew.proved(event, now_ns):
                self._became_ready(event.incarnation, now_ns)
        elif isinstance(event, Launched):
            self.crew.launched(event.incarnation, event.pid, event.started)
        elif isinstance(event, LaunchFailed):
            life = self.crew.find(event.incarnation)
            if life is not None:
                life.error, life.lasting = event.error, False
                self._exited(Exited(event.incarnation, 1), now_ns)
        elif isinstance(event, Committed):
            update = self.runner.current
            if update is not None and update.update_id == event.update_id:
                self.runner.adopt(update, now_ns)
        elif isinstance(event, CommitFailed):
            update = self.runner.current
            if update is not None and update.update_id == event.update_id:
                self.runner.fail(update, event.error, now_ns)
        self._go_on(now_ns)

    def tick(self, now_ns: int) -> None:
        """Time passed: deadlines, restarts, acknowledgements that did not come."""
        self.crew.tick(now_ns)
        for order in self.realm.publication.tick(now_ns):
            if isinstance(order, Kill):
                took = f"hung: it did not take new routes within {self._timing.flip:g} s"
                self.crew.condemn(Hang(order.incarnation, took))
            else:
                self._out.append(order)
        if self._grace_ns is not None and now_ns >= self._grace_ns:
            self._stop_all(now_ns)
        self._go_on(now_ns)

    def deadline(self) -> int | None:
        """When :meth:`tick` is due at the latest; None = not before the next event."""
        rooms = (self.crew, self.realm.publication, self.runner)
        times = [self._grace_ns, *(room.deadline() for room in rooms)]
        return min((t for t in times if t is not None), default=None)

    def take(self) -> list[Instruction]:
        """The instructions since the last call, in order."""
        out, self.crew.out = self.crew.out, []
        return out

    def condemn(self, hang: Hang, now_ns: int) -> None:
        """A process hangs: it is killed and, once it is gone, replaced."""
        self.crew.condemn(hang)
        self._go_on(now_ns)

    # --- what is wanted -------------------------------------------------------------------------

    @property
    def _out(self) -> list[Instruction]:
        return self.crew.out

    # --- what happens ---------------------------------------------------------------------------

    def _received(self, event: Received, now_ns: int) -> None:
        crew = self.crew
        life = crew.find(event.incarnation)
        message = event.message
        if life is None:
            crew.strays += 1
        elif isinstance(message, Hello):
            crew.hello(life, message)
            replica = crew.fleet.by_incarnation(life.incarnation)
            if replica is not None and replica.role is Role.ACTIVE:
                # An update may have passed it on its way here.
                self.realm.policies.tell(replica, self.realm.epoch)
        elif isinstance(message, StartFailed):
            crew.start_failed(life, message, now_ns)
        elif isinstance(message, Ready):
            if life.hz != crew.hz:  # while it loaded it may not have listened
                self._out.append(Send(life.incarnation, Monitor(crew.hz)))
            if crew.ready(life, message, now_ns):
                self._became_ready(event.incarnation, now_ns)
        elif isinstance(message, RoutesApplied):
            self._out.extend(
                self.realm.publication.applied(event.incarnation, message.version, now_ns)
            )
        elif isinstance(message, PolicyRefused):
            note = self.realm.policies.refused(life, message)
            if note and (update := self.runner.of_epoch(message.epoch)) is not None:
                update.notes.append(note)
        elif isinstance(message, Drained) and life is crew.dispatcher:
            self.realm.publication.drained_below(event.incarnation, message.version)
            if self._grace_ns is not None and message.version == 0:  # nothing is in flight
                self._stop_all(now_ns)

    def _became_ready(self, incarnation: int, now_ns: int) -> None:
        update = self.runner.current
        if update is not None and incarnation in update.waiting:
            update.waiting.discard(incarnation)
            return
        # The Dispatcher, or a replica that supervision brought back: tell everybody.
        self._publish(now_ns)

    def _exited(self, event: Exited, now_ns: int) -> None:
        incarnation = event.incarnation
        replica = self.crew.fleet.by_incarnation(incarnation)
        ended = self.crew.exited(event, now_ns)
        if ended is None:
            return
        life, crash = ended
        self.realm.dead.append(incarnation)
        self._out.extend(self.realm.publication.gone(incarnation, now_ns))
        if replica is None:
            if crash is not None and not self.stopping:
                self.crew.supervise_dispatcher(crash, now_ns)
            return
        update = self.runner.current
        if replica.role is Role.ACTIVE:
            if crash is not None and not self.stopping:
                self.crew.supervise(replica, crash, now_ns)
            if update is not None:
                update.waiting.discard(incarnation)
                if crash is not None and update.restores and not life.ready_ns:
                    update.notes.append(f"{replica.name}: {crash.cause}")
            if (life.ready_ns or replica.given_up) and not replica.stopped:
                self._publish(now_ns)
            return
        self.crew.fleet.remove(replica)
        if replica.role is Role.CANDIDATE and crash is not None:
            self.runner.candidate_died(replica, crash, now_ns)

    def _publish(self, now_ns: int) -> None:
        if not self.stopping:
            self.realm.publish(now_ns)

    def _stop_all(self, now_ns: int) -> None:
        self._grace_ns = None
        self._stops_sent = True
        for life in list(self.crew.lives()):
            self.crew.stop(life, now_ns)

    def _go_on(self, now_ns: int) -> None:
        self.runner.progress(now_ns)
        self.realm.threads.tell(settled=self.runner.settled)
        if self._stops_sent and not any(True for _ in self.crew.lives()):
            self._stops_sent = False
            self._out.append(AllGone())
