"""Crew: launching, stopping and giving up the processes of one instance. Pure.

It knows lives and deadlines, not topologies: what shall run is the Brain's business.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator

from blockflow import __version__
from blockflow.control.endings import (
    describe_end,
    ended_outside,
    judge,
    lacking,
    last_words,
    last_work,
)
from blockflow.control.events import Exited, Instruction, Kill, Launch, Prove, Proved, Send
from blockflow.control.fleet import (
    CRASHES_KEPT,
    DISPATCHER_ENTRY,
    DISPATCHER_NAME,
    WORKER_ENTRY,
    Crash,
    Fleet,
    Life,
    Numbers,
    Place,
    Replica,
    Role,
    dispatcher_launch,
    remember,
    worker_launch,
)
from blockflow.control.heartbeat import Hang
from blockflow.control.memory import Shortage, aside, is_aside, killed, starved
from blockflow.control.release import REMEDY
from blockflow.control.settings import ControlSettings, with_port
from blockflow.control.supervision import (
    ASIDE_S,
    DISPATCHER_POLICY,
    SCARCE_CAP_S,
    GiveUp,
    RestartAt,
    RestartLedger,
    SetAside,
)
from blockflow.core.errors import BlockFlowError, SystemError_, WireError, from_dict
from blockflow.core.lifecycle import TABLE, Event, State
from blockflow.core.plan import Start
from blockflow.core.threads import Share
from blockflow.wire.control import (
    OUT_OF_MEMORY,
    ControlMessage,
    Hello,
    PeerGone,
    Ready,
    StartFailed,
    Stop,
)

STARTING = frozenset({State.LAUNCHING, State.LOADING, State.PROVING})


def ns(seconds: float) -> int:
    return int(seconds * 1e9)


class Crew:
    """The processes: replicas' lives and the Dispatcher's.

    Attributes:
        fleet: the replicas.
        dispatcher: the Dispatcher's latest life, None before the first.
        dispatcher_crashes: its latest crashes, oldest first.
        hz: KPI rate that new processes start with.
        place: where this instance lives.
        client_endpoints: where the next Dispatcher shall take clients.
        out: instructions for the shell, in order; the Brain hands them over.
        strays: messages that came from the dead, or did not fit the sender's state.
    """

    def __init__(self, settings: ControlSettings, place: Place, numbers: Numbers) -> None:
        self.fleet = Fleet()
        self.dispatcher: Life | None = None
        self.dispatcher_ledger = RestartLedger(DISPATCHER_POLICY)
        self.dispatcher_restart_ns: int | None = None
        self.dispatcher_crashes: deque[Crash] = deque(maxlen=CRASHES_KEPT)
        self.hz = settings.monitor_hz
        self.out: list[Instruction] = []
        self.strays = 0
        self._settings = settings
        self.place = place
        self._numbers = numbers
        self.client_endpoints: tuple[str, ...] = (
            f"tcp://{with_port(settings.client_host, settings.client_port)}",
            f"ipc://{place.run_dir}/clients.sock",
        )

    # --- looking --------------------------------------------------------------------------------

    def lives(self) -> Iterator[Life]:
        """Every process that was not reaped yet."""
        if self.dispatcher is not None and not self.dispatcher.reaped:
            yield self.dispatcher
        for replica in self.fleet:
            if not replica.life.reaped:
                yield replica.life

    def find(self, incarnation: int) -> Life | None:
        for life in self.lives():
            if life.incarnation == incarnation:
                return life
        return None

    @property
    def dispatcher_crash(self) -> Crash | None:
        """The latest."""
        return self.dispatcher_crashes[-1] if self.dispatcher_crashes else None

    @property
    def dispatcher_ready(self) -> bool:
        return self.dispatcher is not None and self.dispatcher.state is State.READY

    def deadline(self) -> int | None:
        """When :meth:`tick` has something to do; asked twice a message of every process, so that no
        generator takes a turn, and no list gets a place, for each of those that have no time."""
        times = [self.dispatcher_restart_ns]
        if (first := self.dispatcher) is not None and not first.reaped:
            times.append(first.deadline_ns)
        for replica in self.fleet.replicas:
            life, restart_ns = replica.life, replica.restart_at_ns
            if restart_ns is not None or life.deadline_ns is not None:
                times += [restart_ns, None if life.reaped else life.deadline_ns]
        return min((t for t in times if t is not None), default=None)

    # --- doing ----------------------------------------------------------------------------------

    def start_dispatcher(self, now_ns: int) -> None:
        """Launch the Dispatcher, or its successor on the same client addresses."""
        life = self._new_life(DISPATCHER_NAME, (), now_ns)
        self.dispatcher = life
        self.dispatcher_restart_ns = None
        spec = dispatcher_launch(
            life, self.place, self._settings, self.client_endpoints, self.hz
        ).to_dict()
        self.out.append(Launch(life.incarnation, "dispatcher", life.name, DISPATCHER_ENTRY, spec))

    def start_replica(
        self, start: Start, share: Share, planned: int, role: Role, now_ns: int
    ) -> Replica:
        """Launch the first life of a new replica: with the threads and lanes of ``share`` for now,
        and with policies that predict for the ``planned`` threads."""
        spec, name = start.spec, start.replica
        life = self._new_life(name, spec.blocks, now_ns, share, planned)
        replica = Replica(name, spec, role, life, planned, spec.policies())
        self.fleet.replicas.append(replica)
        self._launch(replica)
        return replica

    def stop(self, life: Life, now_ns: int) -> None:
        """Ask a process to end; it is killed when it does not."""
        if life.state is State.STOPPING:
            return
        life.on(Event.STOP)
        # Who has not said Hello cannot hear Stop and has nothing in hand.
        message = Send(life.incarnation, Stop()) if life.connected else Kill(life.incarnation)
        self.out.append(message)
        life.deadline_ns = now_ns + ns(self._settings.timing.stop)

    def broadcast(self, message: ControlMessage) -> None:
        """Send to every process that said Hello."""
        self.out += [Send(life.incarnation, message) for life in self.lives() if life.connected]

    # --- events ---------------------------------------------------------------------------------

    def launched(self, incarnation: int, pid: int, started: int = 0) -> None:
        life = self.find(incarnation)
        if life is not None:
            life.pid, life.started = pid, started

    def hello(self, life: Life, message: Hello) -> None:
        if self._moves(life, Event.HELLO):
            life.hello = True
            life.pid = life.pid or message.pid
            if life.state is State.STOPPING:
                self.out.append(Send(life.incarnation, Stop()))
            elif message.release != __version__:
                self._refuse(life, message.release)

    def _refuse(self, life: Life, release: str) -> None:
        """What it is sent, and what it has in memory, may mean something else to it."""
        told = f"it is of release {release}, the control plane of {__version__}"
        life.on(Event.START_FAILED)
        life.error = WireError("UNSUPPORTED_VERSION", told, where=life.name, hint=REMEDY)
        life.condemned = told
        self.out.append(Kill(life.incarnation))

    def ready(self, life: Life, message: Ready, now_ns: int) -> bool:
        """It has loaded. True when that makes it READY: a worker has to prove itself first."""
        if not self._moves(life, Event.LOADED) or life.state is not State.PROVING:
            return False
        life.endpoint = message.endpoint
        life.endpoints = tuple(message.endpoints)
        life.load_ms, life.warm_ms = message.load_ms, message.warm_ms
        if life is self.dispatcher:
            if life.endpoints:
                # A successor must come up where the clients are already connected to.
                self.client_endpoints = life.endpoints
            return self._proved(life, now_ns)
        replica = self.fleet.by_incarnation(life.incarnation)
        if replica is not None:
            blocks = tuple((life.stages[s.spec.name], s.info) for s in replica.spec.stages)
            mode = replica.spec.mode
            self.out.append(Prove(life.incarnation, life.endpoint, mode, blocks))
        return False

    def proved(self, event: Proved, now_ns: int) -> bool:
        """True when the life became READY by it."""
        life = self.find(event.incarnation)
        if life is None or life.state is not State.PROVING:
            return False  # it was stopped, or died, meanwhile
        life.probe_ms = event.took_ms
        if event.error is None:
            return self._proved(life, now_ns)
        life.on(Event.START_FAILED)
        life.error = event.error
        life.condemned = f"its readiness probe failed: {event.error.code}: {event.error.message}"
        life.deadline_ns = now_ns + ns(self._settings.timing.stop)
        self.out.append(Send(life.incarnation, Stop()))
        return False

    def _proved(self, life: Life, now_ns: int) -> bool:
        life.on(Event.PROVED)
        life.ready_ns = now_ns
        life.deadline_ns = None
        return True

    def condemn(self, hang: Hang) -> None:
        """A process that hangs is killed; its exit, which follows, does the rest."""
        life = self.find(hang.incarnation)
        if life is not None and life.state is not State.STOPPING and not life.condemned:
            life.condemned = hang.cause
            life.innocent = life.outside = hang.outside
            self.out.append(Kill(life.incarnation))

    def killed(self, life: Life, claim: Callable[[], Shortage | None]) -> None:
        """SIGKILL has ended it, and its exit follows. If nobody here has ordered that, ``claim``
        says whether the kernel did, for want of memory."""
        if life.state is State.STOPPING or life.condemned or life.error is not None:
            return
        shortage = claim()
        if shortage is None:
            return
        when = " while it started" if life.state in STARTING else ""
        life.condemned, life.outside = f"killed by SIGKILL{when}: {shortage}", True
        if shortage.own:  # who may as well have been killed by hand has crashed like others
            life.error = killed(life.name, shortage, life.condemned)

    def start_failed(self, life: Life, message: StartFailed, now_ns: int) -> None:
        """The exit follows; it is what ends the life, and it is waited for only briefly."""
        if self._moves(life, Event.START_FAILED):
            life.error = from_dict(message.error)
            life.deadline_ns = now_ns + ns(self._settings.timing.stop)

    def exited(self, event: Exited, now_ns: int) -> tuple[Life, Crash | None] | None:
        """A process was reaped: its leases are reclaimed everywhere.

        Returns:
            The life and, unless it was told to stop, its Crash; None for an unknown incarnation.
        """
        life = self.find(event.incarnation)
        if life is None:
            self.strays += 1
            return None
        told = life.state is State.STOPPING
        starting = life.state in STARTING
        life.on(Event.EXITED)
        life.reaped = True
        life.deadline_ns = None
        self._tell_gone(event, life.error, blame=not (told or life.innocent))
        if told:
            return life, None
        cause = describe_end(life, event, starting)
        if starting and life.error is None and not life.condemned:
            life.error = lacking(life.name, last_words(event.status, event.log_tail), cause)
        return life, Crash(
            event.incarnation,
            now_ns,
            cause,
            life.error,
            event.log_tail,
            life.error is None
            or life.error.retryable
            or not life.lasting
            or life.error.code == "INTERNAL",  # a defect may be one of that moment
            last_work(life, event.work, now_ns),
            ended_outside(life, event),
        )

    def _tell_gone(self, event: Exited, error: BlockFlowError | None, *, blame: bool) -> None:
        """The Dispatcher also learns what it was executing, if that may have been the reason."""
        records = [r for w in event.work for r in w.records] if blame else []
        if starved(error):
            records.append(OUT_OF_MEMORY)
        for life in self.lives():
            if life.connected:
                mine = records if life is self.dispatcher else []
                self.out.append(Send(life.incarnation, PeerGone(event.incarnation, mine)))

    def supervise(self, replica: Replica, crash: Crash, now_ns: int) -> None:
        """Decide about an active replica's next life."""
        remember(replica.crashes, crash)
        verdict = judge(replica.ledger, crash, crash.retryable, now_ns)
        if isinstance(verdict, GiveUp):
            replica.given_up = verdict.reason
            return
        replica.restart_at_ns = verdict.at_ns
        if isinstance(verdict, SetAside):
            # For whoever asks for its blocks it is given up: what piled up meanwhile would come
            # all at once, and be too much again.
            replica.given_up = aside(crash.error, ASIDE_S)

    def supervise_dispatcher(self, crash: Crash, now_ns: int) -> None:
        remember(self.dispatcher_crashes, crash)
        verdict = judge(self.dispatcher_ledger, crash, True, now_ns)
        if isinstance(verdict, RestartAt):
            self.dispatcher_restart_ns = verdict.at_ns

    def tick(self, now_ns: int) -> None:
        """Start what is due, kill what is overdue."""
        for life in list(self.lives()):
            if life.deadline_ns is None or now_ns < life.deadline_ns:
                continue
            if life.state in STARTING:
                text = f"{life.name} was not ready within {self._settings.timing.start:g} s"
                life.error = SystemError_("START_TIMEOUT", text)
            self.out.append(Kill(life.incarnation))
            life.deadline_ns = now_ns + ns(self._settings.timing.stop)
        for replica in self.fleet:
            if replica.restart_at_ns is not None and now_ns >= replica.restart_at_ns:
                share = replica.life.threads, replica.life.lanes
                known = replica.name, replica.spec.blocks, now_ns, share, replica.planned
                try:
                    replica.life = self._new_life(*known)
                except BlockFlowError:  # no number is left: the disk is full, which the store tells
                    replica.restart_at_ns = now_ns + ns(SCARCE_CAP_S)
                    continue
                replica.restart_at_ns, replica.given_up = None, ""
                replica.policies, replica.refused = replica.spec.policies(), {}
                self._launch(replica)
        if self.dispatcher_restart_ns is not None and now_ns >= self.dispatcher_restart_ns:
            self.dispatcher_restart_ns = now_ns + ns(SCARCE_CAP_S)  # where no number is left
            self.start_dispatcher(now_ns)

    def take_back(self) -> None:
        """For a successor of a dead Manager, who does not know until when they were set aside."""
        for replica in self.fleet:
            if is_aside(replica.given_up):
                replica.given_up = ""

    def cancel_restarts(self) -> None:
        """For a shutdown: what is down stays down."""
        self.dispatcher_restart_ns = None
        for replica in self.fleet:
            replica.restart_at_ns = None

    def _launch(self, replica: Replica) -> None:
        life = replica.life
        spec = worker_launch(replica.spec, life, self.place, self._settings, self.hz).to_dict()
        self.out.append(Launch(life.incarnation, "worker", life.name, WORKER_ENTRY, spec))

    def _new_life(
        self,
        name: str,
        blocks: tuple[str, ...],
        now_ns: int,
        share: Share = (1, 1),
        planned: int = 0,
    ) -> Life:
        return Life(
            name,
            self._numbers.take_incarnation(),
            now_ns,
            {b: self._numbers.take_stage() for b in blocks},
            *share,
            planned,
            deadline_ns=now_ns + ns(self._settings.timing.start),
            hz=self.hz,
        )

    def _moves(self, life: Life, event: Event) -> bool:
        """A message that does not fit the state is a peer's defect, not a reason to fall over."""
        if (life.state, event) not in TABLE:
            self.strays += 1
            return False
        life.on(event)
        return True
