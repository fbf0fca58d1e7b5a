"""Adoption: what becomes of each process of a Manager that has died. Pure.

The stored epoch says what shall run, the journal what does. A worker that the epoch needs, and that
is what it needs by its identity, is kept; one that served and is not needed any more may be in the
way of requests in flight: it retires in order. One that belongs to an update which was not
committed has served nobody and is ended, and so is one that had not proved itself.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from blockflow.control.events import Send
from blockflow.control.fleet import Replica, Role
from blockflow.control.journal import Journal, Lived, Seat
from blockflow.control.realm import Realm
from blockflow.core.artifacts import Lookup
from blockflow.core.errors import BlockFlowError, SystemError_
from blockflow.core.launchspec import WorkerLaunch
from blockflow.core.lifecycle import State
from blockflow.core.model import BlockInfo
from blockflow.core.placement import StagePlan, WorkerSpec, desired_workers
from blockflow.core.plan import Start, new_replicas
from blockflow.core.specs import BlockSpec
from blockflow.core.topology import Topology
from blockflow.wire.control import Monitor, PeerGone, SetThreads, Undrain

_SERVING = frozenset({State.READY, State.DRAINING, State.STOPPING})

UNPROVED = "it had not proved itself when the control plane died"
UNCOMMITTED = "it belonged to an update that was not committed when the control plane died"
"""Why processes are ended that somebody else had started."""


@dataclass(frozen=True, slots=True)
class Inheritance:
    """What a new Manager takes over: the journal, and the stored epoch with its topology (None at
    epoch 0), the body as it was posted, the artifacts that it was stored with, and notes of what is
    otherwise now."""

    journal: Journal
    epoch: int
    topology: Topology | None
    posted: Mapping[str, Any] | None
    digests: Mapping[str, str] | None = None
    notes: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Adoption:
    """The decisions.

    Attributes:
        keep: seats of the stored epoch, with what it asks of them. Their processes are kept if they
            serve; the others are replaced as after any death.
        retire: seats whose workers stop once nothing in flight needs them.
        end: seats of no epoch: their processes are killed.
        start: what nobody fills.
        closed: blocks that stay drained or stopped.
    """

    keep: tuple[tuple[Seat, WorkerSpec], ...]
    retire: tuple[Seat, ...]
    end: tuple[Seat, ...]
    start: tuple[Start, ...]
    closed: Mapping[str, str]


def plan_adoption(journal: Journal, epoch: int, desired: Sequence[WorkerSpec]) -> Adoption:
    """Decide.

    Args:
        journal: what runs, or did when its Manager died.
        epoch: the stored one.
        desired: the workers that it asks for.
    """
    names = {s.name for s in journal.seats if not s.life.reaped}
    keep: list[tuple[Seat, WorkerSpec]] = []
    start: list[Start] = []
    for spec in desired:
        identity = spec.identity()
        fit = sorted(
            (s for s in journal.seats if s.identity == identity and _eligible(s, journal, epoch)),
            key=lambda s: (
                _empty(s),
                not serves(s.life),
                s.role != Role.ACTIVE,
                s.life.incarnation,
            ),
        )[: spec.replicas]
        keep += [(s, spec) for s in fit]
        names |= {s.name for s in fit}
        start += new_replicas(spec, spec.replicas - len(fit), names)
    kept = {s.life.incarnation for s, _ in keep}
    rest = [s for s in journal.seats if s.life.incarnation not in kept and not s.life.reaped]
    retire = tuple(s for s in rest if s.role != Role.CANDIDATE and serves(s.life))
    end = tuple(s for s in rest if s not in retire)
    closed = dict(journal.closed) if epoch == journal.epoch else {}  # an update opens them
    return Adoption(tuple(keep), retire, end, tuple(start), closed)


def serves(life: Lived) -> bool:
    """It takes part in serving, or did until it was told to stop."""
    return life.served and not life.reaped and State(life.state) in _SERVING


def _empty(seat: Seat) -> bool:
    """Nobody will fill it by himself."""
    return seat.stopped or bool(seat.given_up)


def _eligible(seat: Seat, journal: Journal, epoch: int) -> bool:
    if seat.role == Role.RETIRING:
        return False
    if seat.role == Role.CANDIDATE:
        # Those of a committed update are ready: it waits for that.
        return serves(seat.life) and State(seat.life.state) is not State.STOPPING
    # An update leaves behind what was given up or stopped before it.
    return epoch == journal.epoch or not _empty(seat)


def install(realm: Realm, inheritance: Inheritance) -> Adoption:
    """Put what was inherited into a realm that is empty still: nothing is asked of anybody yet.

    Raises:
        TopologyError: the stored topology does not fit this machine any more.
    """
    journal, topology = inheritance.journal, inheritance.topology
    desired = () if topology is None else desired_workers(topology, realm.settings.cores)
    adoption = plan_adoption(journal, inheritance.epoch, desired)
    crew = realm.crew
    # Where nothing is stored any more the journal tells the epoch that requests are served under.
    realm.epoch = journal.epoch if topology is None else inheritance.epoch
    realm.version = journal.version
    realm.topology, realm.posted = topology, inheritance.posted
    realm.stored, realm.notes = inheritance.digests or None, inheritance.notes
    realm.closed = dict(adoption.closed)
    realm.dead.extend(journal.dead)
    realm.shares.recall(journal.shares, journal.held, journal.version)
    crew.hz = journal.hz
    crew.client_endpoints = journal.clients
    if journal.dispatcher is not None:
        crew.dispatcher = journal.dispatcher.life()
    roles = [(s, spec, Role.ACTIVE) for s, spec in adoption.keep]
    roles += [(s, spec_of(s), Role.RETIRING) for s in adoption.retire]
    roles += [(s, spec_of(s), Role.CANDIDATE) for s in adoption.end]
    for seat, spec, role in roles:
        life = seat.life.life()
        # What its Manager meant to tell it may never have left: ``planned`` of a life that was
        # taken over is not known, so it is told all its policies again.
        replica = Replica(seat.name, spec, role, life, life.threads, seat.policies)
        replica.stopped, replica.given_up = seat.stopped, seat.given_up
        crew.fleet.replicas.append(replica)
    for life in crew.lives():
        if life.ready_ns == 0 or life.state not in _SERVING:
            life.condemned, life.innocent = UNPROVED, True
    for replica in crew.fleet:
        if replica.role is Role.CANDIDATE:
            replica.life.condemned, replica.life.innocent = UNCOMMITTED, True
    return adoption


def tell_again(realm: Realm) -> None:
    """What the former Manager has written down, it may not have come to say: who is dead (requests
    would wait for them in vain, and slots that they had opened be theirs for ever), how often to
    sample, how many threads to compute with, and to whom a block was opened again."""
    crew = realm.crew
    for incarnation in realm.dead:
        crew.broadcast(PeerGone(incarnation, []))
    crew.broadcast(Monitor(crew.hz))
    lives = [r.life for r in crew.fleet if r.life.connected]
    crew.out += [Send(x.incarnation, SetThreads(x.threads, x.lanes)) for x in lives]
    crew.out += [Send(x.incarnation, Undrain()) for x in lives if x.state is State.READY]


def lost_state(realm: Realm) -> SystemError_ | None:
    """Why a realm with routes has no topology; None for one that has it, or never had."""
    if realm.topology is not None or not realm.version:
        return None
    return SystemError_(
        "STATE_UNUSABLE",
        "it is gone from the state directory; who served it serves on, and is not replaced",
        hint="post the topology again, or put the state back and start the system anew",
    )


def spec_of(seat: Seat) -> WorkerSpec:
    """What a worker was started for, from its birth certificate: enough until it has ended.

    Its name is the seat's alone: where none was asked for it is its block's, which may have an
    ``@`` that no topology could ask for.
    """
    launch = WorkerLaunch.from_dict(seat.launch)
    names = {stage: block for block, stage in seat.life.stages.items()}
    stages = tuple(
        StagePlan(
            BlockSpec.model_validate(
                {
                    "name": names[s.stage],
                    "device": launch.device,
                    "engine": s.engine,
                    "precision": s.precision,
                    "batching": dict(s.policy),
                    "timeout_ms": s.timeout_ms,
                    "options": dict(s.options),
                }
            ),
            s.block,
            s.max_rows,
        )
        for s in launch.stages
    )
    return WorkerSpec(
        name=seat.worker,
        stages=stages,
        device=launch.device,
        replicas=1,
        threads=launch.threads,
        cores=launch.cores,
        mode=launch.mode,
        transport=launch.transport,
        arena_bytes=launch.arena_bytes,
        slots=launch.slots,
        lanes=launch.lanes,
    )


def running_lookup(journal: Journal, digests: Mapping[str, str], stored: Lookup) -> Lookup:
    """How the stored topology finds its blocks while they run: a worker has loaded the artifact,
    so what has become of its file is no reason to replace it. Nor is it a reason to end all others
    where a dead worker's block cannot be looked up: that one waits, as under the former Manager.

    Args:
        journal: says what runs, or did.
        digests: block of the repository -> the artifact that the epoch means.
        stored: for blocks that nobody runs.
    """
    running = _infos(s for s in journal.seats if not s.life.reaped)
    known = _infos(journal.seats)

    def lookup(name: str) -> BlockInfo:
        artifact = name.partition("@")[0], digests.get(name, "")
        if artifact in running:
            return running[artifact]
        try:
            return stored(name)
        except BlockFlowError:
            if artifact not in known:
                raise
            return known[artifact]

    return lookup


def _infos(seats: Iterable[Seat]) -> dict[tuple[str, str], BlockInfo]:
    infos = [BlockInfo.from_dict(stage["block"]) for s in seats for stage in s.launch["stages"]]
    return {(info.name, info.digest): info for info in infos}
