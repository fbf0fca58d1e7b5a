"""Fleet: the replicas that shall run, their lives, and what they look like to the rest. Pure."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from enum import StrEnum
from pathlib import Path
from typing import Protocol

from blockflow.control.settings import ControlSettings
from blockflow.control.supervision import WORKER_POLICY, RestartLedger
from blockflow.core.errors import BlockFlowError
from blockflow.core.launchspec import DispatcherLaunch, StageSpec, WorkerLaunch
from blockflow.core.lifecycle import Event, State, advance
from blockflow.core.placement import StagePlan, WorkerSpec
from blockflow.core.plan import Running
from blockflow.core.scarcity import is_away
from blockflow.launch.preload import modules_of

WORKER_ENTRY = "blockflow.worker.main:run"
DISPATCHER_ENTRY = "blockflow.dispatcher.main:run"
DISPATCHER_NAME = "dispatcher"
CRASHES_KEPT = 5
TICKETS_SHOWN = 8
NO_ROOM = "NO_SPACE"
"""Code of a start that the machine had no memory, process, descriptor or disk for."""


class Numbers(Protocol):
    """Where numbers that never repeat come from; the StateStore in production."""

    def take_incarnation(self) -> int: ...

    def take_stage(self) -> int: ...

    def epoch_after(self, epoch: int) -> int: ...


@dataclass(frozen=True, slots=True)
class LastWork:
    """A forward that a process died in: of which block, after which time, for which requests
    (``requests`` of them, the first as hexadecimal Dispatcher's tickets)."""

    block: str
    took_ms: float
    requests: int
    tickets: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Crash:
    """Why a life ended that should not have: for status, REST and logs.

    ``work`` are the forwards that it died in. ``retryable`` is false when another start would end
    the same way (a load failure). ``outside``: somebody else has ended it, a user or the kernel.
    """

    incarnation: int
    at_ns: int
    cause: str
    error: BlockFlowError | None
    log_tail: tuple[str, ...]
    retryable: bool
    work: tuple[LastWork, ...] = ()
    outside: bool = False

    @property
    def no_room(self) -> bool:
        """It could not start for want of the machine's, or because the repository was away, or
        the installation broken: no fault of the block's."""
        return self.error is not None and (self.error.code == NO_ROOM or is_away(self.error))

    @property
    def passing(self) -> bool:
        """Another start may well succeed, with the block unchanged: the machine had no room or was
        too slow, what it needs was away, or somebody has ended it from outside."""
        return self.outside if self.error is None else self.error.retryable or self.no_room


def remember(crashes: deque[Crash], crash: Crash) -> None:
    """Add the latest one. Of those in a row that had no room one is kept: there may be many, and
    what they began with is what people look for."""
    if crash.no_room and crashes and crashes[-1].no_room:
        crashes.pop()
    crashes.append(crash)


@dataclass(slots=True)
class Life:
    """One process of a replica, from launch to reaping.

    ``stages`` maps block -> stage number. ``deadline_ns`` is when it must be ready, or gone once it
    was told to stop. ``lasting``: its error, if any, is the block's and not the launch's.
    ``condemned`` says why it is being ended although it runs; ``innocent``: for a reason that has
    nothing to do with what it was executing; ``outside``: somebody else has ended it, or keeps it
    from running. ``probe_ms`` is what its readiness probe took.
    ``started`` tells its process from others that may bear its ``pid``.
    ``threads`` are the intra-op threads that it was told to use, ``lanes`` its forwards at once;
    ``planned`` are the threads that its policies were told to predict for (0: not known, or one of
    them was refused); ``asked`` maps a stage to the epoch of the last update that told it a policy.
    ``hz`` is the KPI rate of its launch order.
    """

    name: str
    incarnation: int
    launched_ns: int
    stages: Mapping[str, int] = field(default_factory=dict)
    threads: int = 1
    lanes: int = 1
    planned: int = 0
    asked: dict[int, int] = field(default_factory=dict)
    state: State = State.LAUNCHING
    pid: int = 0
    started: int = 0
    hello: bool = False
    endpoint: str = ""
    endpoints: tuple[str, ...] = ()
    ready_ns: int = 0
    load_ms: float = 0.0
    warm_ms: float = 0.0
    probe_ms: float = 0.0
    deadline_ns: int | None = None
    error: BlockFlowError | None = None
    lasting: bool = True
    condemned: str = ""
    outside: bool = False
    innocent: bool = False
    reaped: bool = False
    hz: float = 0.0

    def on(self, event: Event) -> None:
        self.state = advance(self.state, event)

    @property
    def connected(self) -> bool:
        """It said Hello: messages reach it."""
        return not self.reaped and self.hello


class Role(StrEnum):
    """How a replica stands to the topology in force."""

    CANDIDATE = "candidate"
    ACTIVE = "active"
    RETIRING = "retiring"


@dataclass(slots=True)
class Replica:
    """One worker of a block set: a seat that is filled by one life after the other.

    ``policies`` are the batching policies that its process was given, ``refused`` why it keeps
    others than ``spec`` asks for, by block. ``planned`` are the threads of a forward once no update
    is under way. ``crashes`` are the latest, oldest first; ``restart_at_ns`` is set while it waits
    to be started again; ``given_up`` says why it will not be.
    """

    name: str
    spec: WorkerSpec
    role: Role
    life: Life
    planned: int
    policies: Mapping[str, Mapping[str, object]] = field(default_factory=dict)
    refused: Mapping[str, BlockFlowError] = field(default_factory=dict)
    ledger: RestartLedger = field(default_factory=lambda: RestartLedger(WORKER_POLICY))
    crashes: deque[Crash] = field(default_factory=lambda: deque(maxlen=CRASHES_KEPT))
    restart_at_ns: int | None = None
    given_up: str = ""
    stopped: bool = False

    @property
    def state(self) -> str:
        """For people and REST: the life's state, refined by what supervision intends."""
        if self.restart_at_ns is not None:
            return "restarting"
        if self.given_up:
            return "failed"
        return str(self.life.state)

    @property
    def crash(self) -> Crash | None:
        """The latest."""
        return self.crashes[-1] if self.crashes else None

    def block_of(self, stage: int) -> StagePlan | None:
        """The block that is this stage of the present life; None for a stage of another one."""
        for plan in self.spec.stages:
            if self.life.stages.get(plan.spec.name) == stage:
                return plan
        return None

    def limit(self, stage: int) -> tuple[str, int]:
        """Block of a stage of this life, and the longest time of its forward in ms (0 = none)."""
        plan = self.block_of(stage)
        return (f"stage {stage}", 0) if plan is None else (plan.spec.name, plan.spec.timeout_ms)

    @property
    def wanted(self) -> bool:
        """It runs, or supervision will see to it: an update may keep it as it is."""
        return not (self.given_up or self.stopped)

    def running(self) -> Running:
        return Running(
            self.name,
            self.life.incarnation,
            self.spec.identity(),
            {b: dict(p) for b, p in self.policies.items()},
            self.life.ready_ns == 0 or self.restart_at_ns is not None,
        )


class Fleet:
    """All replicas. Names are unique among those that are alive."""

    def __init__(self) -> None:
        self.replicas: list[Replica] = []

    def __iter__(self) -> Iterator[Replica]:
        return iter(self.replicas)

    def by_incarnation(self, incarnation: int) -> Replica | None:
        for r in self.replicas:
            if r.life.incarnation == incarnation:
                return r
        return None

    def active(self) -> list[Replica]:
        return [r for r in self.replicas if r.role is Role.ACTIVE]

    def hosting(self, block: str) -> list[Replica]:
        """Active replicas that host ``block``."""
        return [r for r in self.active() if block in r.spec.blocks]

    def hosts(self) -> dict[str, list[Replica]]:
        """:meth:`hosting` of every block that has any, for who asks about all of them."""
        found: dict[str, list[Replica]] = {}
        for replica in self.active():
            for block in replica.spec.blocks:
                found.setdefault(block, []).append(replica)
        return found

    def names(self) -> set[str]:
        return {r.name for r in self.replicas}

    def remove(self, replica: Replica) -> None:
        self.replicas.remove(replica)


@dataclass(frozen=True, slots=True)
class Place:
    """Where this instance lives: what every birth certificate says."""

    run_dir: str
    controller: str
    log_dir: str


def worker_launch(
    spec: WorkerSpec, life: Life, place: Place, settings: ControlSettings, hz: float
) -> WorkerLaunch:
    """The birth certificate of one life."""
    launch = WorkerLaunch(
        name=life.name,
        incarnation=life.incarnation,
        stages=tuple(
            StageSpec(
                stage=life.stages[s.spec.name],
                block=s.info,
                engine=s.spec.engine,
                precision=s.spec.precision,
                policy=s.spec.batching.model_dump(mode="json"),
                options=s.spec.options,
                max_rows=s.max_rows,
                timeout_ms=s.spec.timeout_ms,
                threads=life.planned or None,
            )
            for s in spec.stages
        ),
        repository=str(settings.repository),
        run_dir=place.run_dir,
        controller=place.controller,
        transport=spec.transport,
        mode=spec.mode,
        device=spec.device,
        threads=life.threads,
        lanes=life.lanes,
        cores=spec.cores,
        arena_bytes=spec.arena_bytes if spec.mode == "tensormq" else 0,
        slots=spec.slots,
        monitor_hz=hz,
        log_path=log_path(place, life),
        shared_weights=spec.replicas > 1,
    )
    return replace(launch, modules=modules_of(launch.loaders))


def dispatcher_launch(
    life: Life,
    place: Place,
    settings: ControlSettings,
    client_endpoints: tuple[str, ...],
    hz: float,
) -> DispatcherLaunch:
    return DispatcherLaunch(
        name=life.name,
        incarnation=life.incarnation,
        run_dir=place.run_dir,
        controller=place.controller,
        client_endpoints=client_endpoints,
        transport="ipc",
        cores=settings.cores,
        arena_bytes=settings.dispatcher_arena_bytes,
        slots=settings.dispatcher_slots,
        max_inflight=settings.max_inflight,
        max_inflight_per_client=settings.max_inflight_per_client,
        adaptive_limit=settings.adaptive_limit,
        result_memory_bytes=settings.result_memory_bytes,
        monitor_hz=hz,
        log_path=log_path(place, life),
        keys=str(settings.keys) if settings.keys is not None else "",
    )


def log_path(place: Place, life: Life) -> str:
    """One file per life, so that a crash's last lines are never mixed with the successor's."""
    if not place.log_dir:
        return ""
    return str(Path(place.log_dir) / f"{life.name}.{life.incarnation}.log")
