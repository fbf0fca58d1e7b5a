"""Rigs for the control plane: a virtual world around the Brain, and small echo repositories."""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from blockflow import __version__
from blockflow.control.adoption import Inheritance, install
from blockflow.control.brain import Brain
from blockflow.control.events import (
    AllGone,
    Commit,
    CommitFailed,
    Committed,
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
from blockflow.control.journal import Journal
from blockflow.control.settings import ControlSettings, Timing
from blockflow.control.update import Update
from blockflow.core.errors import BlockFlowError, SystemError_
from blockflow.core.lifecycle import Event as LifeEvent
from blockflow.core.model import BlockInfo, Contract, TensorSpec
from blockflow.core.topology import Topology, parse_topology
from blockflow.repository.echo import save_echo
from blockflow.repository.repository import BlockRepository
from blockflow.tensormq.atwork import Work
from blockflow.wire.control import (
    Drain,
    Drained,
    Hello,
    PolicyRefused,
    Ready,
    Routes,
    RoutesApplied,
    SetPolicy,
    SetThreads,
    StartFailed,
    Stop,
)

SPEC = TensorSpec("float32", ("rows", 4))
AB = (["a", "b"], {"t": ["a", "b"]})
"""Blocks and tasks of a small topology."""
MS = 1_000_000
S = 1_000_000_000
TIMING = Timing(start=30.0, stop=5.0, ack=2.0, flip=10.0, drain=20.0, grace=2.0)


class Counter:
    """Numbers in order."""

    def __init__(self) -> None:
        self.incarnation = 0
        self.stage = 0

    def take_incarnation(self) -> int:
        self.incarnation += 1
        return self.incarnation

    def take_stage(self) -> int:
        self.stage += 1
        return self.stage

    def epoch_after(self, epoch: int) -> int:
        return epoch + 1

    def succeed(self, journal: Journal) -> None:
        """Another Manager takes over. The store forgets how many of the last numbers were used, and
        so skips some; none is ever given twice, to whom it may be."""
        self.incarnation += 1000
        self.stage += 1000


def info(name: str, digest: str = "") -> BlockInfo:
    return BlockInfo(name, "1", digest or f"{name}-digest", "echo", Contract(SPEC, SPEC), 0, 0)


def topology(
    blocks: Iterable[Any],
    tasks: dict[str, Any],
    digests: dict[str, str] | None = None,
    **more: Any,
) -> Topology:
    """A valid topology over blocks that all take and give the same; ``more`` are further fields."""
    return parse_topology(
        {"blocks": list(blocks), "tasks": tasks, **more},
        lambda n: info(n, (digests or {}).get(n, "")),
    )


class World:
    """Processes that do as they should, unless told otherwise; the clock is :attr:`now`.

    Attributes:
        log: all instructions, in order.
        start_fails: replica name -> error of its StartFailed.
        probe_fails: replica name -> what its readiness probe meets.
        mute: incarnations or names that do not answer anything.
        hold_ready: names that say Hello but not Ready, until :meth:`make_ready`.
        refuses: replica name -> why it keeps each policy that it has (``none``).
        busy: the Dispatcher has requests in flight: no Drained until :meth:`let_drain`.
        disk_full: commits fail.
        stored: epoch and topology on disk.
        threads: incarnation -> intra-op threads that it was told last, of all that ever lived.
    """

    def __init__(self, cores: int = 2, numbers: Counter | None = None) -> None:
        self.now = 1000 * S
        settings = ControlSettings(
            repository=Path("/blocks"),
            state_dir=Path("/state"),
            cores=tuple(range(cores)),
            timing=TIMING,
        )
        self._numbers = numbers or Counter()
        self.brain = Brain(settings, Place("/run", "ipc:///run/control.sock", ""), self._numbers)
        self.log: list[Instruction] = []
        self.alive: dict[int, Launch] = {}
        self.start_fails: dict[str, BlockFlowError] = {}
        self.probe_fails: dict[str, BlockFlowError] = {}
        self.mute: set[str] = set()
        self.release = __version__
        self.hold_ready: set[str] = set()
        self.refuses: dict[str, BlockFlowError] = {}
        self.busy = False
        self.owed: list[int] = []
        self.disk_full = False
        self.threads: dict[int, int] = {}
        self.gone = False
        self.stored: tuple[int, Topology | None] = (0, None)
        self._settings = settings
        self._events: deque[Any] = deque()

    # --- steering -------------------------------------------------------------------------------

    def up(self) -> World:
        """The Dispatcher is there."""
        self.brain.crew.start_dispatcher(self.now)
        self.settle()
        return self

    def apply(self, blocks: Iterable[Any], tasks: dict[str, Any], **kw: Any) -> Update:
        update = self.brain.apply(topology(blocks, tasks, **kw), {"posted": 1}, self.now)
        self.settle()
        return update

    def do(self, command: Callable[[int], Update]) -> Update:
        update = command(self.now)
        self.settle()
        return update

    def pass_time(self, seconds: float) -> None:
        """Let time pass, stopping at each deadline on the way."""
        end = self.now + int(seconds * S)
        while True:
            due = self.brain.deadline()
            if due is None or due > end:
                break
            self.now = max(self.now, due)
            self.brain.tick(self.now)
            self.settle()
        self.now = end

    def die(
        self,
        name: str,
        status: int = -9,
        tail: tuple[str, ...] = (),
        work: tuple[Work, ...] = (),
    ) -> None:
        incarnation = self.incarnation(name)
        del self.alive[incarnation]
        self.tell(Exited(incarnation, status, tail, work))

    def make_ready(self, name: str) -> None:
        self.hold_ready.discard(name)
        incarnation = self.incarnation(name)
        self.tell(Received(incarnation, self._ready(incarnation, name)))

    def make_ready_quietly(self, name: str) -> None:
        """It is ready, and the Manager notes it, but does not come to do anything about it."""
        life = self.brain.crew.find(self.incarnation(name))
        if life is None:
            raise AssertionError(name)
        life.on(LifeEvent.LOADED)
        life.on(LifeEvent.PROVED)
        life.endpoint, life.ready_ns = f"ipc:///run/d{life.incarnation}.sock", self.now

    def flip(self) -> None:
        """The Dispatcher, mute so far, takes the routes that it was sent meanwhile."""
        self.mute.discard("dispatcher")
        i, version = self.incarnation("dispatcher"), self.brain.realm.version
        self._events.append(Received(i, RoutesApplied(i, version)))
        self._events.append(Received(i, Drained(i, version)))
        self.settle()

    def let_drain(self) -> None:
        self.busy = False
        owed, self.owed = self.owed, []
        for version in owed:
            self.drained_below(version)

    def drained_below(self, version: int) -> None:
        """No request of older routes is in flight."""
        dispatcher = self.incarnation("dispatcher")
        self.tell(Received(dispatcher, Drained(dispatcher, version)))

    def journal(self) -> Journal:
        """What the Manager would have written down by now, read again."""
        return Journal.from_dict(json.loads(json.dumps(asdict(Journal.of(self.brain.realm)))))

    def succeed(self, *, killed: Iterable[str] = (), journal: Journal | None = None) -> Update:
        """The Manager dies, then the processes ``killed``, and another Manager takes over.

        What was on its way to the dead one is lost. ``journal`` is its last word, by default one
        of this moment.
        """
        last = self.journal() if journal is None else journal
        for name in killed:
            del self.alive[self.incarnation(name)]
        self._events.clear()
        self._numbers.succeed(last)
        self.brain = Brain(self._settings, self.brain.crew.place, self._numbers)
        epoch, stored = self.stored
        adoption = install(self.brain.realm, Inheritance(last, epoch, stored, {"posted": 1}))
        lives = list(self.brain.crew.lives())
        for incarnation in self.alive.keys() - {life.incarnation for life in lives}:
            del self.alive[incarnation]
        for life in lives:
            if life.condemned or life.name in self.mute:
                self.alive.pop(life.incarnation, None)
            if life.incarnation not in self.alive:
                self.brain.handle(Exited(life.incarnation, -9), self.now)
        return self.do(lambda now: self.brain.readopt(adoption, now))

    def tell(self, event: Any) -> None:
        self.brain.handle(event, self.now)
        self.settle()

    # --- looking --------------------------------------------------------------------------------

    def incarnation(self, name: str) -> int:
        """Of the youngest living process with this name."""
        return max(i for i, order in self.alive.items() if order.name == name)

    def names(self) -> list[str]:
        return sorted(order.name for order in self.alive.values())

    def computing(self) -> dict[str, int]:
        """Living worker -> intra-op threads that it was told last."""
        return {o.name: self.threads[i] for i, o in self.alive.items() if i in self.threads}

    def launched(self) -> list[str]:
        return [i.name for i in self.log if isinstance(i, Launch)]

    def admitted_blocks(self) -> dict[str, int]:
        """Block -> number of stages in the Dispatcher's latest routes."""
        out: dict[str, int] = {}
        for stage in self.admitted_stages():
            out[stage["block"]] = out.get(stage["block"], 0) + 1
        return out

    def admitted_stages(self) -> list[dict[str, Any]]:
        """The stages that new requests may take, as the Dispatcher was told last."""
        dispatcher = self.incarnation("dispatcher")
        tables = [
            i.message.table
            for i in self.log
            if isinstance(i, Send) and i.incarnation == dispatcher and isinstance(i.message, Routes)
        ]
        return [s for s in tables[-1]["stages"] if s["stage"]] if tables else []

    def sent(self, kind: type, since: int = 0) -> list[Send]:
        return [i for i in self.log[since:] if isinstance(i, Send) and isinstance(i.message, kind)]

    # --- the world ------------------------------------------------------------------------------

    def settle(self) -> None:
        """Carry out instructions and let the processes answer until all is quiet."""
        while True:
            instructions = self.brain.take()
            self.log += instructions
            for instruction in instructions:
                self._carry_out(instruction)
            if not self._events:
                if not instructions:
                    return
                continue
            while self._events:
                event = self._events.popleft()
                if isinstance(event, Exited):
                    self.alive.pop(event.incarnation, None)
                self.brain.handle(event, self.now)

    def _carry_out(self, instruction: Instruction) -> None:
        if isinstance(instruction, Launch):
            self._launch(instruction)
        elif isinstance(instruction, Send):
            self._deliver(instruction)
        elif isinstance(instruction, Prove):
            order = self.alive.get(instruction.incarnation)
            if order is not None:
                error = self.probe_fails.get(order.name)
                self._events.append(Proved(instruction.incarnation, error, 1.0))
        elif isinstance(instruction, Kill):
            if self.alive.pop(instruction.incarnation, None) is not None:
                self._events.append(Exited(instruction.incarnation, -9))
        elif isinstance(instruction, Commit):
            error = SystemError_("NO_SPACE", "full")
            failed = CommitFailed(instruction.update_id, error)
            update = self.brain.runner.current
            if not self.disk_full and update is not None:
                self.stored = (instruction.epoch, update.target)
            self._events.append(failed if self.disk_full else Committed(instruction.update_id))
        elif isinstance(instruction, AllGone):
            self.gone = True

    def _launch(self, order: Launch) -> None:
        i, name = order.incarnation, order.name
        self.alive[i] = order
        if order.role == "worker":
            self.threads[i] = order.spec["threads"]
        self._events.append(Launched(i, 10_000 + i))
        if name in self.mute:
            return
        self._events.append(Received(i, Hello(order.role, name, i, 10_000 + i, self.release)))
        if name in self.start_fails:
            error = self.start_fails[name].to_dict()
            self._events.append(Received(i, StartFailed(i, error)))
            self._events.append(Exited(i, 1, ("last words",)))
        elif name not in self.hold_ready:
            self._events.append(Received(i, self._ready(i, name)))

    def _ready(self, i: int, name: str) -> Ready:
        clients = ["tcp://127.0.0.1:5755"] if name == "dispatcher" else []
        return Ready(i, f"ipc:///run/d{i}.sock", clients, 1.0, 1.0)

    def _deliver(self, send: Send) -> None:
        i, message = send.incarnation, send.message
        order = self.alive.get(i)
        if order is None or order.name in self.mute:
            return
        if isinstance(message, SetThreads):
            self.threads[i] = message.threads
        if isinstance(message, SetPolicy) and order.name in self.refuses:
            error = self.refuses[order.name].to_dict()
            kept = {"policy": "none"}
            refusal = PolicyRefused(i, message.stage, message.epoch, kept, error)
            self._events.append(Received(i, refusal))
        if isinstance(message, Routes):
            version = message.table["version"]
            self._events.append(Received(i, RoutesApplied(i, version)))
            if order.role == "dispatcher":
                if self.busy:
                    self.owed.append(version)
                else:
                    self._events.append(Received(i, Drained(i, version)))
        elif isinstance(message, Drain) and order.role == "dispatcher" and not self.busy:
            self._events.append(Received(i, Drained(i, 0)))
        elif isinstance(message, Stop):
            del self.alive[i]
            self._events.append(Exited(i, 0))


@pytest.fixture
def world() -> World:
    return World().up()


def echo_repository(root: Path, **blocks: dict[str, Any]) -> BlockRepository:
    """Echo blocks ``a`` to ``d`` and the given ones (name -> settings), float32[rows, 4]."""
    return save_echoes(root, *"abcd", **blocks)


def save_echoes(root: Path, *names: str, **blocks: dict[str, Any]) -> BlockRepository:
    """Echo blocks, plain ones and those with settings, float32[rows, 4]."""
    repository = BlockRepository(root)
    for name, settings in ({plain: {} for plain in names} | blocks).items():
        save_echo(repository, name, SPEC, settings=settings)
    return repository
