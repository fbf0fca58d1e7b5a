"""World: one seeded run. Faults come in episodes of load, with hours of rest between them."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from functools import partial
from random import Random

from blockflow.bench.faultsim.arena import Arenas
from blockflow.bench.faultsim.clients import Clients
from blockflow.bench.faultsim.dispatcher import SimDispatcher
from blockflow.bench.faultsim.faults import DESIGN, KINDS, Faults
from blockflow.bench.faultsim.judge import READY_AGAIN, Judge
from blockflow.bench.faultsim.manager import SimManager
from blockflow.bench.faultsim.network import Network
from blockflow.bench.faultsim.plant import Design, Plant
from blockflow.bench.faultsim.process import Hang, Message, SimProcess
from blockflow.bench.faultsim.worker import SimWorker
from blockflow.bench.simulation.loop import EventLoop
from blockflow.bench.simulation.watch import InvariantBroken
from blockflow.control.brain import Brain
from blockflow.control.update import Kind
from blockflow.core.errors import BlockError, BlockFlowError
from blockflow.tensormq.atwork import Work
from blockflow.wire.client import Reply, decode_to_client
from blockflow.wire.data import Data, decode_data_plane

SECOND = 1_000_000_000
HOUR = 3600 * SECOND
LOAD_NS = 12 * SECOND
"""Length of an episode's load; faults end with it."""
MEND_NS = 120 * SECOND
"""Then everything must be ready, and at rest, within this time."""
_LOOK_NS = SECOND
_PAUSE_S = 900.0
_TRACE = 400


class World:
    """A system and what happens to it.

    Args:
        seed: of everything that is left to chance.
        hours: virtual length.

    Attributes:
        watched: an episode is under way: the Manager looks at its processes.
        episodes: so far.
        trace: the latest of what happened, for people.
    """

    def __init__(self, seed: int, hours: float, kinds: Sequence[str] = KINDS) -> None:
        self.seed = seed
        self.rng = Random(seed)
        self.loop = EventLoop(cores=1, threads=1)
        self.network = Network(self.loop, self.rng)
        self.arenas: Arenas = {}
        self.processes: dict[int, SimProcess] = {}
        self.plant = Plant.draw(self.rng)
        self.once = self.plant.once
        self.judge = Judge(self)
        self.clients = Clients(self, self.rng.choice((1, 3, 6)))
        self.faults = Faults(self, kinds)
        self.manager = SimManager(self, self.plant.cores, self.plant.max_inflight)
        self.episodes = 0
        self.watched = False
        self.trace: deque[str] = deque(maxlen=_TRACE)
        self._end_ns = int(hours * HOUR)
        self._load_until = 0
        self._mend_until = 0
        self._must = False

    @property
    def now(self) -> int:
        """Virtual nanoseconds since the start."""
        return self.loop.now

    @property
    def dispatcher(self) -> SimDispatcher | None:
        """The present life of the Dispatcher."""
        for process in self.processes.values():
            if isinstance(process, SimDispatcher) and process.alive:
                return process
        return None

    @property
    def workers(self) -> list[SimWorker]:
        """All that live."""
        return [p for p in self.processes.values() if isinstance(p, SimWorker) and p.alive]

    @property
    def design(self) -> Design:
        """What is in force."""
        return self.plant.designs[self.in_force]

    @property
    def in_force(self) -> int:
        """Its number: the first one's until something is."""
        posted = self.manager.brain.realm.posted
        return 0 if posted is None else int(posted[DESIGN])

    def run(self) -> None:
        """From an empty machine to the end of the last episode.

        Raises:
            InvariantBroken: a defect was found.
        """
        self.manager.start(0)
        self.loop.plan(SECOND, self._first)
        try:
            self.loop.run()
        except InvariantBroken:
            raise
        except Exception as exc:  # whatever a core raises is a defect of it
            broken = InvariantBroken("no defect", self.now, f"{type(exc).__name__}: {exc}")
            raise broken from exc

    def note(self, what: str) -> None:
        """Remember what happened."""
        self.trace.append(f"{self.now / 1e9:14.6f} s  {what}")

    # --- episodes

    def _first(self, now: int, _: object) -> None:
        topology = self.plant.topology(0)
        self.manager.call(now, lambda brain, at: brain.apply(topology, {DESIGN: 0}, at))
        self._begin(now + 3 * SECOND)

    def _begin(self, at: int) -> None:
        self.loop.plan(at, self._episode)

    def _episode(self, now: int, _: object) -> None:
        self.episodes += 1
        self.note(f"episode {self.episodes}")
        self.watched = True
        self.manager.look_again(now)
        self._load_until = now + LOAD_NS
        self._mend_until = self._load_until + MEND_NS
        self.faults.plan(now, LOAD_NS)
        self._ask(now, self.rng.choice((4.0, 12.0, 30.0)))
        self.loop.plan(self._load_until, self._calm)

    def _ask(self, now: int, rate: float) -> None:
        """A Poisson process of requests."""
        at = now + int(self.rng.expovariate(rate) * SECOND)
        if at < self._load_until:
            self.loop.plan(at, self._come, rate)

    def _come(self, now: int, rate: float) -> None:
        self.clients.ask(self.rng.choice(self.design.asked), now, poison=self.faults.poison())
        self._ask(now, rate)

    def _calm(self, now: int, _: object) -> None:
        """No more faults: what was only announced does not happen any more."""
        self.faults.end()
        self._mend(now, None)

    def _mend(self, now: int, _: object) -> None:
        """Operators do what is theirs until all is well; then every task must serve once more."""
        brain = self.manager.brain
        if self._must and not self.clients.waiting:
            self._rest(now)
            return
        reasons = brain.realm.reasons_not_ready()
        if not self._must and not self.clients.waiting and self._all_ready() and not reasons:
            self._must = True
            for tasks in self.design.asked:
                self.clients.ask(tasks, now, must=True)
        elif now > self._mend_until:
            why = "; ".join(reasons) or "not every replica is ready, or a request still waits"
            raise InvariantBroken(READY_AGAIN, now, why)
        elif not self._must and brain.runner.current is None:
            for replica in brain.crew.fleet.active():
                if replica.given_up:
                    block = replica.spec.blocks[0]
                    self.manager.call(now, partial(_restart, block))
                    break
            for block, how in list(brain.realm.closed.items()):
                self.manager.call(now, partial(_restart if how == "stop" else _undrain, block))
        self.loop.plan(now + _LOOK_NS, self._mend)

    def _all_ready(self) -> bool:
        brain = self.manager.brain
        fleet = list(brain.crew.fleet)
        return (
            not self.manager.away
            and brain.runner.current is None
            and all(r.life.state == "ready" and not r.given_up for r in fleet)
            and len(fleet) == self.design.replicas
            # Who hangs, or has died while the Manager was late, may not have been found out yet:
            # what he has then is rightly lost, if a block must not run twice.
            and all(self._lives(r.life.incarnation) for r in fleet)
            and all(p.hang is Hang.NO for p in self.processes.values() if p.alive)
            and not any(w.stuck for w in self.workers)
        )

    def _lives(self, incarnation: int) -> bool:
        process = self.processes.get(incarnation)
        return process is not None and process.alive

    def _rest(self, now: int) -> None:
        self._must = False
        self.loop.plan(now + _LOOK_NS, self._at_rest)

    def _at_rest(self, now: int, _: object) -> None:
        dispatcher = self.dispatcher
        if dispatcher is not None and len(dispatcher.exchange.table) and now < self._mend_until:
            # A client that left may come back for its result: its request runs to its end, which
            # is its deadline if a message was lost.
            self.loop.plan(now + _LOOK_NS, self._at_rest)
            return
        self.judge.rest(now)
        self.note("at rest")
        self.clients.requests.clear()
        self.processes = {i: p for i, p in self.processes.items() if p.alive}
        self.watched = False
        if now < self._end_ns:
            self._begin(now + int(self.rng.expovariate(1 / _PAUSE_S) * SECOND) + SECOND)

    # --- processes

    def died(self, process: SimProcess, status: int, work: tuple[Work, ...]) -> None:
        """A process has ended."""
        self.note(f"{process.name} ({process.incarnation}) ends: {status}")
        self.judge.died(process, status, work)
        self.manager.died(process, status, work, self.now)
        if isinstance(process, SimDispatcher):
            self.clients.dispatcher_died(self.now)

    def reap(self, incarnation: int) -> None:
        """Its files are removed."""
        self.arenas.pop(incarnation, None)
        self.network.forget(incarnation)

    def load_error(self, worker: SimWorker) -> BlockFlowError | None:
        """Why it cannot load, if it cannot."""
        if self.faults.load_fails():
            return BlockError("LOAD_FAILED", "the artifact does not load", where=worker.block)
        return None

    def is_poison(self, number: int, block: str) -> bool:
        """Whether this request kills workers of that block."""
        asked = self.clients.requests.get(number)
        return asked is not None and asked.poison == block

    # --- messages

    def refused(self, source: int, endpoint: str, frames: list[bytes]) -> bool:
        """Whether the sender's queue for this endpoint has no room for a data message."""
        target = _incarnation(endpoint)
        if not self.network.refused(target):
            return False
        self.note(f"refused: {source} to {target}")
        message, sender = decode_data_plane(frames[0]), self.processes.get(source)
        if isinstance(message, Data) and isinstance(sender, SimDispatcher):
            self.judge.turned_away(sender, message)
        return True

    def carry(self, source: int, endpoint: str, frames: list[bytes]) -> bool:
        """A data message leaves; False: there is nobody to connect to."""
        target = self.processes.get(_incarnation(endpoint))
        if target is None or not target.alive:
            return False
        # Read once, for everybody that looks on: the wire is what costs most in a run.
        message = decode_data_plane(frames[0])
        parcel = source, target, message, frames
        sender = self.processes.get(source)
        if isinstance(message, Data):
            if isinstance(sender, SimDispatcher):
                self.judge.sent(sender, message)
            if self.network.lost():
                self.note(f"lost: {source} to {target.name}")
                if message.tensor.handle is not None:
                    self.judge.lost(message.tensor.handle)
                return True
        self.network.send(source, target.incarnation, self._arrive, parcel)
        to_dispatcher = isinstance(message, Data) and isinstance(target, SimDispatcher)
        if to_dispatcher and self.network.doubled():
            self.note(f"doubled: {source} to {target.name}")
            self.network.send(source, target.incarnation, self._arrive, parcel)
        return True

    def _arrive(self, now: int, parcel: tuple[int, SimProcess, Message, list[bytes]]) -> None:
        source, target, message, frames = parcel
        sender = self.processes.get(source)
        if (sender is None or not sender.alive) and self.rng.random() < 0.5:
            return  # it was still in the dead process's socket
        if isinstance(target, SimWorker | SimDispatcher) and target.alive:
            target.receive(now, (message, frames))

    def reply(self, dispatcher: SimDispatcher, client: bytes, frames: Sequence[bytes]) -> None:
        """A reply leaves the Dispatcher."""
        reply = decode_to_client(frames[0])
        if isinstance(reply, Reply):
            self.judge.replies(dispatcher, reply, frames[1:], self.now)
            self.network.send(
                dispatcher.incarnation, client, self.clients.answered, (client, reply)
            )


def _incarnation(endpoint: str) -> int:
    """Whose endpoint it is."""
    return int(endpoint.rpartition("/")[2])


def _restart(block: str, brain: Brain, now: int) -> None:
    brain.restart(block, now)


def _undrain(block: str, brain: Brain, now: int) -> None:
    brain.close(block, Kind.UNDRAIN, now)
