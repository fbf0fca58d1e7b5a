"""Control messages: Controller <-> workers and Dispatcher (ROUTER <-> DEALER).

Frozen types grouped by receiver; each is a msgpack map ``{"v": version, "k": kind, ...fields}``.
Layout: wire/PROTOCOL.md, "Control".
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any, ClassVar, get_args, get_type_hints

from blockflow.core import limits
from blockflow.wire.codec import cut_texts, decode, encode, malformed, wrong_version

_WHAT = "control message"
_TEXT_LIMIT = 16_000
"""Bytes of each text of an error: enough to tell, and far from the limit of a message."""

OUT_OF_MEMORY = b"\1"
"""Among the records of :class:`PeerGone`: the kernel killed the process for want of memory, which
need not be the doing of what it was executing."""


@dataclass(frozen=True, slots=True)
class ControlMessage:
    """Base: ``KIND`` is the wire name."""

    KIND: ClassVar[str] = ""


# --- to the Controller ----------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Hello(ControlMessage):
    """First message of a process: it lives and speaks this protocol. Loading starts after it."""

    KIND: ClassVar[str] = "hello"
    role: str  # "worker" | "dispatcher"
    name: str
    incarnation: int
    pid: int
    release: str


@dataclass(frozen=True, slots=True)
class Ready(ControlMessage):
    """Loaded and warm; ``endpoint`` takes data. A Dispatcher adds its client ``endpoints``.

    ``load_ms`` is the time to load all artifacts, ``warm_ms`` that of the first runs.
    """

    KIND: ClassVar[str] = "ready"
    incarnation: int
    endpoint: str
    endpoints: list[str] = field(default_factory=list)
    load_ms: float = 0.0
    warm_ms: float = 0.0


@dataclass(frozen=True, slots=True)
class StartFailed(ControlMessage):
    """Start-up ended with ``error`` (BlockFlowError.to_dict()); the process exits."""

    KIND: ClassVar[str] = "start-failed"
    incarnation: int
    error: dict[str, Any]


@dataclass(frozen=True, slots=True)
class Pong(ControlMessage):
    """Answer to Ping ``seq``, sent by the control thread even while an inference runs.

    ``heard`` is the latest Ping that the process's main loop has taken note of: the control thread
    may answer for a main loop that hangs.
    """

    KIND: ClassVar[str] = "pong"
    incarnation: int
    seq: int
    state: str
    heard: int = 0


@dataclass(frozen=True, slots=True)
class Stats(ControlMessage):
    """KPIs since start: ``stages`` (StageKpi dicts), ``process`` (ProcessKpi dict), ``extra``."""

    KIND: ClassVar[str] = "stats"
    incarnation: int
    time_ns: int
    stages: list[dict[str, Any]]
    process: dict[str, Any]
    extra: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class RoutesApplied(ControlMessage):
    """The receiver works with route version ``version`` from now on."""

    KIND: ClassVar[str] = "routes-applied"
    incarnation: int
    version: int


@dataclass(frozen=True, slots=True)
class Drained(ControlMessage):
    """From a worker: its queue is empty after Drain. From the Dispatcher: no request in flight
    was admitted with a route version below ``version``; 0 = after Drain: none is in flight."""

    KIND: ClassVar[str] = "drained"
    incarnation: int
    version: int = 0


@dataclass(frozen=True, slots=True)
class PolicyRefused(ControlMessage):
    """The SetPolicy of ``epoch`` cannot be followed: ``stage`` keeps the policy ``kept``. ``error``
    is a BlockFlowError.to_dict(). It comes before the RoutesApplied of routes that were sent
    later."""

    KIND: ClassVar[str] = "policy-refused"
    incarnation: int
    stage: int
    epoch: int
    kept: dict[str, Any]
    error: dict[str, Any]


# --- to a worker or the Dispatcher ----------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Routes(ControlMessage):
    """A whole route table (RouteTable.to_dict()); replaces the former one."""

    KIND: ClassVar[str] = "routes"
    table: dict[str, Any]


@dataclass(frozen=True, slots=True)
class Ping(ControlMessage):
    KIND: ClassVar[str] = "ping"
    seq: int


@dataclass(frozen=True, slots=True)
class Drain(ControlMessage):
    """Finish what is queued, then say Drained. A Dispatcher: admit nothing new."""

    KIND: ClassVar[str] = "drain"


@dataclass(frozen=True, slots=True)
class Undrain(ControlMessage):
    """Take work again."""

    KIND: ClassVar[str] = "undrain"


@dataclass(frozen=True, slots=True)
class Stop(ControlMessage):
    """Clean up and exit with status 0."""

    KIND: ClassVar[str] = "stop"


@dataclass(frozen=True, slots=True)
class Monitor(ControlMessage):
    """Turn the KPI samples on (``hz`` > 0) or off (``hz`` = 0)."""

    KIND: ClassVar[str] = "monitor"
    hz: float


@dataclass(frozen=True, slots=True)
class PeerGone(ControlMessage):
    """``incarnation`` is proven dead (reaped): reclaim its leases, unmap its arena, drop its
    socket.

    ``at_work`` names the requests that it was executing when it died, each as 18 bytes: request id,
    attempt, hop (:mod:`blockflow.tensormq.atwork`); :data:`OUT_OF_MEMORY` among them says what it
    died of. The Dispatcher also decides what becomes of what was in flight there.
    """

    KIND: ClassVar[str] = "peer-gone"
    incarnation: int
    at_work: list[bytes] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class SetPolicy(ControlMessage):
    """Change the batching policy of a stage while it runs, and what it predicts from.

    ``threads`` are those of a forward once no update is under way: the number that the update was
    accepted for. ``profile`` is a StageProfile.to_dict() with the points for them; empty where
    there is none, or the repository is away: what was known for as many threads still holds, as the
    block and what runs it are the same. ``epoch`` is the update's, by which a refusal says what it
    refuses.
    """

    KIND: ClassVar[str] = "set-policy"
    stage: int
    policy: dict[str, Any]
    threads: int = 1
    profile: dict[str, Any] = field(default_factory=dict)
    epoch: int = 0


@dataclass(frozen=True, slots=True)
class SetThreads(ControlMessage):
    """Compute so many forwards at once (``lanes``), each with so many intra-op threads, from the
    next batch on."""

    KIND: ClassVar[str] = "set-threads"
    threads: int
    lanes: int = 1


_KINDS: Mapping[str, type[ControlMessage]] = {
    cls.KIND: cls
    for cls in (
        Hello,
        Ready,
        StartFailed,
        Pong,
        Stats,
        RoutesApplied,
        Drained,
        PolicyRefused,
        Routes,
        Ping,
        Drain,
        Undrain,
        Stop,
        Monitor,
        PeerGone,
        SetPolicy,
        SetThreads,
    )
}


def _base_type(hint: Any) -> type:
    """``list[str]`` -> list; only plain types and their containers occur."""
    origin = getattr(hint, "__origin__", None)
    base: type = origin if origin is not None and get_args(hint) else hint
    return base


_FIELDS: Mapping[str, Mapping[str, type]] = {
    kind: {
        name: _base_type(hint)
        for name, hint in get_type_hints(cls).items()
        if name in {f.name for f in fields(cls)}
    }
    for kind, cls in _KINDS.items()
}


def encode_control(msg: ControlMessage) -> bytes:
    body: dict[str, Any] = {"v": limits.PROTOCOL_VERSION, "k": msg.KIND}
    for f in fields(msg):
        body[f.name] = getattr(msg, f.name)
    if "error" in body:
        body["error"] = cut_texts(body["error"], _TEXT_LIMIT)
    return encode(body)


def decode_control(frame: bytes | memoryview) -> ControlMessage:
    """Decode one control message; every field is there and of its type.

    Raises:
        WireError: MALFORMED_MESSAGE or UNSUPPORTED_VERSION.
    """
    raw = decode(frame, max_bytes=limits.MAX_CONTROL_BYTES, what=_WHAT)
    if type(raw) is not dict:
        raise malformed(_WHAT, "not a map")
    version = raw.pop("v", None)
    if version != limits.PROTOCOL_VERSION:
        raise wrong_version(_WHAT, version)
    kind = raw.pop("k", None)
    cls = _KINDS.get(kind) if isinstance(kind, str) else None
    if cls is None:
        raise malformed(_WHAT, f"unknown kind {kind!r}")
    want = _FIELDS[cls.KIND]
    if raw.keys() != want.keys():
        raise malformed(_WHAT, f"{kind}: fields {sorted(map(str, raw))} instead of {sorted(want)}")
    for name, typ in want.items():
        value = raw[name]
        if typ is float and type(value) is int:
            raw[name] = float(value)
        elif type(value) is not typ or (type(value) is int and not 0 <= value < 2**64):
            raise malformed(_WHAT, f"{kind}.{name} is not a valid {typ.__name__}")
    return cls(**raw)
