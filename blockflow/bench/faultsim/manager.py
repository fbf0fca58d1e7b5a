"""SimManager: the real Brain and Heartbeat, with processes, kernel and disk that are simulated.

It does what :class:`~blockflow.control.manager.Manager` and its Health do: what has come in is
taken first, then time, then the look at the processes. It may be late with all of it, and it may
die: then another one takes over, as :class:`~blockflow.control.succession.Succession` does.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from blockflow.bench.faultsim.dispatcher import SimDispatcher
from blockflow.bench.faultsim.process import Hang as Seizure
from blockflow.bench.faultsim.process import SimProcess
from blockflow.bench.faultsim.worker import SimWorker
from blockflow.control.adoption import Inheritance, install
from blockflow.control.brain import Brain
from blockflow.control.crew import ns
from blockflow.control.events import (
    Commit,
    CommitFailed,
    Committed,
    Event,
    Exited,
    Instruction,
    Kill,
    Launch,
    Launched,
    Prove,
    Proved,
    Received,
    Send,
)
from blockflow.control.fleet import Place
from blockflow.control.health import SERVING
from blockflow.control.heartbeat import Hang, Heartbeat
from blockflow.control.journal import Journal
from blockflow.control.settings import ControlSettings, Timing
from blockflow.core.errors import BlockFlowError, SystemError_
from blockflow.core.lifecycle import State
from blockflow.core.topology import Topology
from blockflow.wire.control import ControlMessage, Ping, Pong

if TYPE_CHECKING:
    from blockflow.bench.faultsim.world import World

TIMING = Timing(start=20.0, stop=2.0, drain=8.0)
_FORK_NS = (2_000_000, 20_000_000)
_PROBE_NS = (2_000_000, 30_000_000)
_COMMIT_NS = (1_000_000, 40_000_000)
_PIDFD_NS = (50_000, 5_000_000)
_GRACE_NS = 500_000_000
_SOON_NS = 1_000_000_000
_AWAY_NS = (300_000_000, 2_500_000_000)


class _Numbers:
    """Incarnations, stages and epochs, from 1."""

    def __init__(self) -> None:
        self._incarnation = 0
        self._stage = 0

    def take_incarnation(self) -> int:
        self._incarnation += 1
        return self._incarnation

    def take_stage(self) -> int:
        self._stage += 1
        return self._stage

    def epoch_after(self, epoch: int) -> int:
        return epoch + 1


class SimManager:
    """The control plane's one thread.

    Attributes:
        brain: the real one.
        heartbeat: the real one.
        disk_full: the next commit fails.
        away: it has died, and nobody has taken over yet.
    """

    def __init__(self, world: World, cores: int, max_inflight: int) -> None:
        self._settings = ControlSettings(
            repository=Path("/sim/blocks"),
            state_dir=Path("/sim/state"),
            cores=tuple(range(cores)),
            max_inflight=max_inflight,
            max_inflight_per_client=max_inflight,
            dispatcher_slots=2 * max_inflight,
            timing=TIMING,
        )
        self._numbers = _Numbers()
        self._world = world
        self._begin()
        self.disk_full = False
        self._stored: tuple[int, Topology | None, Mapping[str, Any] | None] = (0, None, None)
        self._life = 1
        self._doomed = False
        self.away = False
        self._kept: list[tuple[int, ControlMessage]] = []
        self._fallen: dict[int, Exited] = {}
        self._inbox: deque[Callable[[int], None]] = deque()
        self._late_until = 0
        self._armed: int | None = None
        self._looking = False
        self._seq = 0
        self._ask_ns = 0

    def _begin(self) -> None:
        place = Place("/sim/run", "ipc:///sim/control", "")
        self.brain = Brain(self._settings, place, self._numbers)
        self.heartbeat = Heartbeat(ns(TIMING.beat), ns(TIMING.silence), ns(TIMING.hang))

    # --- what reaches it

    def hear(self, now: int, told: tuple[int, ControlMessage]) -> None:
        """A message of a process has come to the Controller."""
        incarnation, message = told
        if self.away:
            self._kept.append(told)  # by the process, until there is somebody to take it
        elif isinstance(message, Pong):
            self._post(
                now, lambda at: self.heartbeat.pong(incarnation, message.seq, message.heard, at)
            )
        else:
            self.event(now, Received(incarnation, message))

    def event(self, now: int, event: Event) -> None:
        """Something else has happened."""
        self._post(now, lambda at: self.brain.handle(event, at))

    def call(self, now: int, command: Callable[[Brain, int], object]) -> None:
        """An operator's command; a refusal is an answer like others."""
        if self.away:
            return

        def run(at: int) -> None:
            with suppress(BlockFlowError):
                command(self.brain, at)

        self._post(now, run)

    def died(self, process: SimProcess, status: int, work: tuple[Any, ...], now: int) -> None:
        """The kernel tells of a death."""
        exited = Exited(process.incarnation, status, (), work)
        self._fallen[process.incarnation] = exited
        if self.away:
            return  # who takes over finds it dead, and is not told once more

        def reap(at: int, _: object) -> None:
            self._post(at, lambda then: self._reap(exited, then))

        self._later(now + self._world.rng.randint(*_PIDFD_NS), reap, None)

    def _reap(self, exited: Exited, now: int) -> None:
        self._fallen.pop(exited.incarnation, None)
        self.heartbeat.forget(exited.incarnation)
        self._world.judge.reaped(exited.incarnation, now)
        self.brain.handle(exited, now)
        self._world.reap(exited.incarnation)

    def be_late(self, now: int, until_ns: int) -> None:
        """It gets no cpu time until then."""
        self._late_until = max(until_ns, self._late_until)
        self._arm(self._late_until)

    # --- its death

    def doom(self, now: int) -> None:
        """It dies soon: in the midst of what it does next."""
        self._doomed = True

        def at_last(then: int, _: object) -> None:
            if self._doomed:
                self._die(then)

        self._later(now + _SOON_NS, at_last, None)

    def spare(self) -> None:
        """It does not die after all."""
        self._doomed = False

    def _die(self, now: int) -> None:
        """What it has decided is written down; what it has not done, nobody does."""
        self._doomed, self.away = False, True
        self._life += 1
        self._inbox.clear()
        self._world.note("the manager dies")
        journal = Journal.of(self.brain.realm)
        at = now + self._world.rng.randint(*_AWAY_NS)
        self._world.loop.plan(at, self._succeed, journal)

    def _succeed(self, now: int, journal: Journal) -> None:
        """Another one takes over whoever lives and answers."""
        self._begin()
        adoption = install(self.brain.realm, Inheritance(journal, *self._stored))
        lives = {life.incarnation: life for life in self.brain.crew.lives()}
        for process in list(self._world.processes.values()):
            life = lives.get(process.incarnation)
            if life is not None and process.hang in (Seizure.STOPPED, Seizure.SILENT):
                life.condemned, life.innocent = "it does not answer", True
            if process.alive and (life is None or life.condemned):
                process.die(-9)
        self.away = False
        self._life += 1
        self._world.note("another manager takes over")
        for incarnation in lives:
            known = self._world.processes.get(incarnation)
            if known is None or not known.alive:
                self._reap(self._fallen.get(incarnation, Exited(incarnation, -9)), now)
        self.brain.crew.take_back()
        self.brain.readopt(adoption, now)
        kept, self._kept = self._kept, []
        for told in kept:
            self.hear(now, told)
        self._run(now)

    def _later(self, at: int, call: Callable[[int, Any], None], arg: Any) -> None:
        """``call(at, arg)``, unless this Manager has died by then."""
        life = self._life

        def run(then: int, given: Any) -> None:
            if life == self._life:
                call(then, given)

        self._world.loop.plan(at, run, arg)

    # --- its loop

    def start(self, now: int) -> None:
        """The Dispatcher first."""
        self._post(now, self.brain.crew.start_dispatcher)

    def look_again(self, now: int) -> None:
        """Watch the processes, until the world is at rest."""
        if not self._looking:
            self._looking = True
            self._look(now)

    def _post(self, now: int, what: Callable[[int], None]) -> None:
        self._inbox.append(what)
        self._run(now)

    def _run(self, now: int, _: object = None) -> None:
        if self._armed is not None and self._armed <= now:
            self._armed = None
        if self.away:
            return
        if now < self._late_until:
            self._arm(self._late_until)
            return
        while self._inbox:
            self._inbox.popleft()(now)
        due = self.brain.deadline()
        if due is not None and due <= now:
            self.brain.tick(now)
            due = self.brain.deadline()
        orders = self.brain.take()
        if self._doomed and orders:
            for what in orders[: self._world.rng.randrange(len(orders))]:
                self._carry_out(what, now)
            self._die(now)
            return
        for what in orders:
            self._carry_out(what, now)
        if due is not None:
            self._arm(max(due, now + 1))

    def _arm(self, at: int) -> None:
        if self._armed is None or at < self._armed:
            self._armed = at
            self._world.loop.plan(at, self._run)

    # --- watching

    def _look(self, now: int, _: object = None) -> None:
        if self.away or now < self._late_until:
            self._world.loop.plan(max(self._late_until, now + ns(TIMING.beat)), self._look)
            return
        self._run(now)
        if now >= self._ask_ns:
            self._ask_ns = now + ns(TIMING.health)
            self._ask(now)
        seen = {}
        for life in self.brain.crew.lives():
            process = self._world.processes.get(life.incarnation)
            if not life.pid or life.state is State.STOPPING or process is None:
                self.heartbeat.forget(life.incarnation)
            elif process.alive:
                seen[life.incarnation] = process.vitals(now)
        for hang in [*self.heartbeat.look(seen, now), *self._overdue(now)]:
            self._world.judge.condemned(self._world.processes[hang.incarnation], hang.cause, now)
            self.brain.condemn(hang, now)
        self._run(now)
        if self._world.watched:
            due = self.heartbeat.deadline() or 0
            self._world.loop.plan(due if due > now else now + ns(TIMING.beat), self._look)
        else:
            self._looking = False

    def _ask(self, now: int) -> None:
        lives = [x for x in self.brain.crew.lives() if x.connected and x.state in SERVING]
        self._seq += 1
        seq = self._seq
        for life in lives:
            self._send(Send(life.incarnation, Ping(seq)))
        self.heartbeat.asked(seq, [life.incarnation for life in lives])

        def echoed(at: int, _: object) -> None:
            self._post(at, lambda then: self.heartbeat.echoed(seq, then))

        self._later(now + 50_000, echoed, None)

    def _overdue(self, now: int) -> list[Hang]:
        hangs = []
        for replica in self.brain.crew.fleet:
            process = self._world.processes.get(replica.life.incarnation)
            for work in process.work() if process is not None and process.alive else ():
                block, limit_ms = replica.limit(work.stage)
                if now - work.started_ns > limit_ms * 1_000_000 + _GRACE_NS:
                    text = f"hung: a forward of {block} has not ended"
                    hangs.append(Hang(replica.life.incarnation, text))
        return hangs

    # --- instructions

    def _carry_out(self, what: Instruction, now: int) -> None:
        world = self._world
        if isinstance(what, Launch):
            self._launch(what, now)
        elif isinstance(what, Send):
            self._send(what)
        elif isinstance(what, Kill):
            process = world.processes.get(what.incarnation)
            if process is not None:
                process.die(-9)
        elif isinstance(what, Prove):
            at = now + world.rng.randint(*_PROBE_NS)
            self._later(at, self._prove, what.incarnation)
        elif isinstance(what, Commit):
            self._later(now + world.rng.randint(*_COMMIT_NS), self._commit, what)

    def _commit(self, now: int, order: Commit) -> None:
        done: Event = Committed(order.update_id)
        if self.disk_full:
            self.disk_full = False
            done = CommitFailed(order.update_id, SystemError_("NO_SPACE", "the disk is full"))
        elif (update := self.brain.runner.updates.get(order.update_id)) is not None:
            self._stored = order.epoch, update.target, order.posted
        self.event(now, done)

    def _launch(self, order: Launch, now: int) -> None:
        world = self._world
        replica = self.brain.crew.fleet.by_incarnation(order.incarnation)
        world.judge.launches(order.name, None if replica is None else replica.ledger, now)
        kind = SimWorker if order.role == "worker" else SimDispatcher
        process = kind(world, order)
        world.processes[order.incarnation] = process
        at = now + world.rng.randint(*_FORK_NS)
        self._later(at, self.event, Launched(order.incarnation, order.incarnation))
        world.loop.plan(at, process.load)

    def _send(self, send: Send) -> None:
        process = self._world.processes.get(send.incarnation)
        if process is not None:
            self._world.network.send(0, send.incarnation, process.control, send.message)

    def _prove(self, now: int, incarnation: int) -> None:
        process = self._world.processes.get(incarnation)
        if process is not None and process.when_well(now, self._prove, incarnation):
            self.event(now, Proved(incarnation, process.probe(), 1.0))
