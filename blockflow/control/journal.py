"""Journal: what a Manager's successor must know to take its processes over.

The stored state says what shall run; the journal says what does: which process is which life of
which replica, how far it is, how far the routes are, and what of the repository counts. It lies in
the run directory, in memory, and is as old as that: it need outlive the Manager's process, not the
machine. It is written before what it tells of is done, so that a successor may find less there than
it was told, never more.

A written journal is a whole one: another file and a rename, with room of their own, so that a full
file system does not stop it. The checksum is for what others do to it; a journal that cannot be
read is a reason to begin anew, never one to guess (for want of descriptors, say: to try again).
"""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any, Self

from blockflow.control.fleet import Life, Replica, Role, worker_launch
from blockflow.control.realm import Realm
from blockflow.control.roomy import RoomyFile
from blockflow.control.standing import Standing
from blockflow.core.launchspec import WorkerLaunch
from blockflow.core.lifecycle import State
from blockflow.core.scarcity import no_room

log = logging.getLogger("blockflow.control")

NAME = "journal.json"
FORMAT = 1
MAX_BYTES = 16 * 1024 * 1024


@dataclass(frozen=True, slots=True)
class Lived:
    """A life as far as it had come; see :class:`~blockflow.control.fleet.Life`."""

    name: str
    incarnation: int
    launched_ns: int
    stages: Mapping[str, int]
    threads: int
    lanes: int
    state: str
    pid: int
    started: int
    hello: bool
    endpoint: str
    endpoints: tuple[str, ...]
    ready_ns: int
    load_ms: float
    warm_ms: float
    probe_ms: float
    reaped: bool

    @classmethod
    def of(cls, life: Life) -> Self:
        found = {f.name: getattr(life, f.name) for f in fields(cls)}
        return cls(**{**found, "state": str(life.state), "stages": dict(life.stages)})

    def life(self) -> Life:
        """The same life, in the hands of another Manager."""
        known = {f.name: getattr(self, f.name) for f in fields(self)}
        return Life(**{**known, "state": State(self.state)})

    @property
    def served(self) -> bool:
        """It had proved itself."""
        return self.ready_ns > 0

    @classmethod
    def from_dict(cls, d: Any) -> Self:
        return cls(**{**_checked(cls, d), "endpoints": tuple(d["endpoints"])})


@dataclass(frozen=True, slots=True)
class Seat:
    """A replica; ``launch`` is the birth certificate of its life, a dead one's too."""

    name: str
    worker: str
    identity: str
    role: str
    stopped: bool
    given_up: str
    policies: Mapping[str, Any]
    life: Lived
    launch: Mapping[str, Any]

    @classmethod
    def from_dict(cls, d: Any) -> Self:
        seat = cls(**{**_checked(cls, d), "life": Lived.from_dict(d["life"])})
        Role(seat.role), State(seat.life.state)
        WorkerLaunch.from_dict(seat.launch)
        return seat


@dataclass(frozen=True, slots=True)
class Journal:
    """What runs.

    Attributes:
        epoch: in force when it was written.
        version: of the latest routes that anybody may have got.
        hz: rate of the KPI samples.
        closed: blocks that an operator drained or stopped.
        clients: where the Dispatcher takes clients, ports resolved.
        shares: index of each task's share in headers.
        held: indices of tasks that are gone, which requests in flight may carry.
        dead: incarnations of the latest that have ended.
        dispatcher: its latest life, None before the first.
        standing: what of the repository counts for the epoch, None where no topology is in force.
        seats: the replicas.
    """

    epoch: int
    version: int
    hz: float
    closed: Mapping[str, str]
    clients: tuple[str, ...]
    shares: Mapping[str, int]
    held: tuple[int, ...]
    dead: tuple[int, ...]
    dispatcher: Lived | None
    standing: Standing | None
    seats: tuple[Seat, ...]

    @classmethod
    def of(cls, realm: Realm) -> Self:
        """Of this moment."""
        seats = tuple(seat_of(realm, r) for r in realm.crew.fleet)
        return replace(cls.head(realm), standing=standing_of(realm), seats=seats)

    @classmethod
    def head(cls, realm: Realm) -> Self:
        """Of this moment, but for what is long and seldom changes."""
        crew = realm.crew
        return cls(
            epoch=realm.epoch,
            version=realm.version,
            hz=crew.hz,
            closed=dict(realm.closed),
            clients=crew.client_endpoints,
            shares=realm.shares.indices(),
            held=realm.shares.held(),
            dead=tuple(realm.dead),
            dispatcher=None if crew.dispatcher is None else Lived.of(crew.dispatcher),
            standing=None,
            seats=(),
        )

    @classmethod
    def from_dict(cls, d: Any) -> Self:
        """Inverse of ``asdict``. Raises ValueError, KeyError or TypeError."""
        found = _checked(cls, d)
        dispatcher, standing = d["dispatcher"], d["standing"]
        return cls(
            **{
                **found,
                "hz": float(d["hz"]),
                "clients": tuple(d["clients"]),
                "held": _numbers("held indices", d["held"]),
                "dead": _numbers("dead processes", d["dead"]),
                "dispatcher": None if dispatcher is None else Lived.from_dict(dispatcher),
                "standing": None if standing is None else Standing.from_dict(standing),
                "seats": tuple(Seat.from_dict(s) for s in d["seats"]),
            }
        )

    def with_policies(self) -> set[str]:
        """Blocks that are batched by a policy: by one that gave way to ``none`` they are not."""
        known = [(b, p) for s in self.seats if s.role == Role.ACTIVE for b, p in s.policies.items()]
        return {block for block, policy in known if policy.get("policy", "none") != "none"}

    def highest(self) -> dict[str, int]:
        """The highest incarnation, stage and epoch in it, those of the dead among them."""
        lives = [s.life for s in self.seats]
        if self.dispatcher is not None:
            lives.append(self.dispatcher)
        return {
            "incarnation": max((*self.dead, *(x.incarnation for x in lives)), default=0),
            "stage": max((n for x in lives for n in x.stages.values()), default=0),
            "epoch": self.epoch,
        }


class JournalFile:
    """The journal in its run directory.

    Args:
        run_dir: of the instance.
    """

    def __init__(self, run_dir: Path) -> None:
        self._file = RoomyFile(run_dir / NAME)

    @property
    def given_up(self) -> bool:
        """There is none because it could not be written."""
        return self._file.given_up

    def write(self, body: str) -> None:
        """Replace it by this JSON text of one. Raises OSError; then there is none, which is better
        than an old one."""
        packed = body.encode()
        self._file.write(_head(packed) + packed + b"}")

    def read(self) -> Journal:
        """The journal as it was written. Raises ValueError, which says what is wrong with it, or
        SystemError_: NO_SPACE."""
        try:
            raw = self._file.read(MAX_BYTES)
        except OSError as e:
            lacking = no_room(e, f"the journal cannot be read: {e.strerror}", NAME)
            if lacking is not None:
                raise lacking from e
            why = "it could not be written" if self.given_up else e.strerror
            raise ValueError(f"there is no journal: {why}") from None
        except ValueError as e:
            raise ValueError(f"the journal is {e}") from None
        body = raw[len(_head(b"")) : -1]
        if raw != _head(body) + body + b"}":
            raise ValueError("the journal is torn or altered: its checksum does not fit")
        try:
            return Journal.from_dict(json.loads(body))
        except (ValueError, KeyError, TypeError, RecursionError) as e:
            raise ValueError(f"the journal says what cannot be: {e}"[:500]) from None


class Recorder:
    """Keeps the journal true, for a successor.

    It is asked after every event, and the system may have many workers: what has not changed is
    neither looked at closely nor put into words again.

    Args:
        run_dir: of the instance.

    Attributes:
        warning: why a successor would find no journal, "" where it would.
    """

    def __init__(self, run_dir: Path) -> None:
        self.warning = ""
        self._file = JournalFile(run_dir)
        self._written: tuple[object, ...] = ()
        self._seats: dict[int, tuple[tuple[object, ...], str]] = {}
        self._standing: tuple[tuple[object, ...], str] = (), ""

    def record(self, realm: Realm) -> None:
        """Write down what has changed; call it before what follows from the change is done."""
        crew = realm.crew
        dispatcher = None if crew.dispatcher is None else _life_key(crew.dispatcher)
        seats = tuple(_seat_key(r) for r in crew.fleet)
        facts = (realm.epoch, realm.version, crew.hz, tuple(realm.closed.items()))
        now = (*facts, crew.client_endpoints, dispatcher, realm.topology, realm.notes, seats)
        if now == self._written:
            return
        try:
            self._file.write(self._text(realm, seats))
        except OSError as e:
            self._failed(e)
            return
        self._written = now
        if self.warning:
            self.warning = ""
            log.warning("the journal can be written again")

    def _failed(self, error: OSError) -> None:
        # Events go on, many a second: it is said once.
        told = (
            f"the journal cannot be written: {error.strerror}; should the control plane's process "
            "die, all is ended and begun anew"
        )
        if told != self.warning:
            self.warning = told
            log.error("%s", told)

    def _text(self, realm: Realm, keys: Sequence[tuple[object, ...]]) -> str:
        known, self._seats = self._seats, {}
        for replica, key in zip(realm.crew.fleet, keys, strict=True):
            old = known.get(replica.life.incarnation)
            if old is None or old[0] != key:
                old = key, json.dumps(asdict(seat_of(realm, replica)))
            self._seats[replica.life.incarnation] = old
        key = realm.topology, realm.notes
        if self._standing[0] != key:
            standing = standing_of(realm)
            self._standing = key, json.dumps(None if standing is None else asdict(standing))
        head = json.dumps(asdict(Journal.head(realm))).removesuffix('null, "seats": []}')
        seats = ",".join(text for _, text in self._seats.values())
        return f'{head}{self._standing[1]}, "seats": [{seats}]}}'


def _head(body: bytes) -> bytes:
    digest = hashlib.sha256(body).hexdigest()
    return f'{{"format":{FORMAT},"sha256":"{digest}","body":'.encode()


def _life_key(life: Life) -> tuple[object, ...]:
    """What the journal says of a life and may change."""
    known = (life.incarnation, life.state, life.pid, life.hello, life.endpoint, life.reaped)
    return (*known, life.ready_ns, life.threads, life.lanes)


def _seat_key(replica: Replica) -> tuple[object, ...]:
    known = (replica.name, replica.role, replica.stopped, replica.given_up, replica.policies)
    # The spec is compared by its worth too: an update may bring another one that is the same.
    return (*known, replica.spec, _life_key(replica.life))


def standing_of(realm: Realm) -> Standing | None:
    """What of the repository counts for the epoch in force."""
    return None if realm.topology is None else Standing.of(realm.topology, realm.notes)


def seat_of(realm: Realm, replica: Replica) -> Seat:
    """What the journal says of a replica."""
    life, crew = replica.life, realm.crew
    launch = worker_launch(replica.spec, life, crew.place, realm.settings, crew.hz).to_dict()
    return Seat(
        replica.name,
        replica.spec.name,
        replica.spec.identity(),
        str(replica.role),
        replica.stopped,
        replica.given_up,
        replica.policies,
        Lived.of(life),
        launch,
    )


_TYPES: Mapping[str, type | tuple[type, ...]] = {
    "str": str,
    "int": int,
    "bool": bool,
    "float": (int, float),
}


def _numbers(what: str, values: Any) -> tuple[int, ...]:
    if any(type(v) is not int for v in values):
        raise ValueError(f"{what} are no numbers")
    return tuple(values)


def _checked(cls: Any, d: Any) -> dict[str, Any]:
    """The fields of a dataclass from a dict that has them all, plain ones of their types."""
    if type(d) is not dict or set(d) != {f.name for f in fields(cls)}:
        raise ValueError(f"{cls.__name__} has other fields")
    for f in fields(cls):
        kind = _TYPES.get(str(f.type))
        value = d[f.name]
        if kind is not None and (
            not isinstance(value, kind) or (kind is int and type(value) is bool)
        ):
            raise ValueError(f"{cls.__name__}.{f.name} is {value!r:.80}")
    return dict(d)
