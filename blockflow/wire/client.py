"""Client messages: SDK <-> Dispatcher (DEALER <-> ROUTER). Layout: wire/PROTOCOL.md, "Client".

A client never names an arena or a handle: its tensors travel as raw frames, or lie in slots of
segments that are its own and that the Dispatcher has granted to it (tensormq/grants.py).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from blockflow.core import limits
from blockflow.core.errors import BlockFlowError, from_dict
from blockflow.core.records import record
from blockflow.wire.codec import (
    cut_texts,
    decode,
    encode,
    first_values,
    is_int,
    joined,
    malformed,
    wrong_version,
)
from blockflow.wire.data import REQUEST_ID_BYTES, HopTiming, timings_from_wire
from blockflow.wire.tensor import TensorDesc, desc_from_wire

KIND_REQUEST = 10
KIND_CANCEL = 11
KIND_DESCRIBE = 12
KIND_INVITE = 13
KIND_REPLY = 20
KIND_DESCRIPTION = 21
KIND_INVITATION = 22

_WHAT = "client message"
_U64 = 2**64 - 1
_U32 = 2**32 - 1
_INTS = {int}
_STRS = {str}
_TEXT_LIMIT = 4000
"""Bytes of each text of an error."""

MAX_TRIES = 255
"""Sendings of one request under the same id."""

TOKEN_BYTES = 16
"""An invitation's secret; the side connection that shows it belongs to that client."""


@dataclass(frozen=True, slots=True)
class Place:
    """A result in a slot of a segment that was granted to the receiver.

    The receiver releases it by writing ``generation`` into the slot's mark.
    """

    grant: int
    slot: int
    generation: int


@record
class Request:
    """One call: ``tasks`` on one input tensor, to be answered within ``deadline_ms``.

    The elements are the message's second frame or, where ``upload`` names a granted slot as (grant,
    slot), that slot's content: it is read before this client's next message is. ``tries`` says that
    the client may send it again under the same id (0 = never), and the how manyth time this is.
    """

    request_id: bytes
    tasks: tuple[str, ...]
    deadline_ms: int
    tensor: TensorDesc
    upload: tuple[int, int] | None = None
    tries: int = 0


UNASKED = bytes(16)
"""The ``request_id`` of a Description that answers no question: the tasks have changed."""


@dataclass(frozen=True, slots=True)
class Cancel:
    request_id: bytes


@dataclass(frozen=True, slots=True)
class Describe:
    """Asks for the published tasks; ``request_id`` pairs the answer with the question."""

    request_id: bytes


@dataclass(frozen=True, slots=True)
class Invite:
    """Asks how to come by granted memory; ``request_id`` pairs the answer with the question."""

    request_id: bytes


@record
class Timing:
    """A node of the path with the name of its block."""

    block: str
    hop: HopTiming


@record
class TaskResult:
    """Outcome of one task: ``tensor`` (its frame follows the header) or ``error``.

    ``timings`` are the hops on this task's path, ``total_ns`` is from receipt at the Dispatcher to
    the encoding of this reply, ``ingress_ns`` from that receipt to the send of the attempt that
    ended it, ``egress_ns`` from the last block's stamp to that encoding (the final transit is in
    it): the parts add up.
    With ``place`` the elements lie in a granted slot, and there is no frame. ``canary`` says that
    the request took the path that is being tried.
    """

    task: str
    tensor: TensorDesc | None
    error: BlockFlowError | None
    timings: tuple[Timing, ...] = ()
    ingress_ns: int = 0
    egress_ns: int = 0
    total_ns: int = 0
    place: Place | None = None
    canary: bool = False


@record
class Reply:
    """The one terminal reply of a request: a result per task, in the order asked.

    ``epoch`` is that of the topology that served it (0 when none did), ``received_ns`` the
    Dispatcher's monotonic clock when the request came (0 when that is not known): a client of the
    same host can tell the way there from the way back.
    """

    request_id: bytes
    epoch: int
    results: tuple[TaskResult, ...]
    received_ns: int = 0


@dataclass(frozen=True, slots=True)
class Description:
    """The published tasks (RouteTable's TaskRoute dicts) and the admission limits."""

    request_id: bytes
    epoch: int
    tasks: tuple[Mapping[str, Any], ...]
    limits: Mapping[str, int]


@dataclass(frozen=True, slots=True)
class Invitation:
    """Where to connect, and the secret to show there; else ``reason`` says why there is no way.

    ``path`` is that of a unix socket of the Dispatcher.
    """

    request_id: bytes
    path: str
    token: bytes
    reason: str


ToDispatcher = Request | Cancel | Describe | Invite
ToClient = Reply | Description | Invitation


_BARE: Mapping[int, type[Cancel] | type[Describe] | type[Invite]] = {
    KIND_CANCEL: Cancel,
    KIND_DESCRIBE: Describe,
    KIND_INVITE: Invite,
}
"""Kinds that say nothing but a request id."""

_BARE_KINDS: Mapping[type, int] = {message: kind for kind, message in _BARE.items()}


def encode_to_dispatcher(msg: ToDispatcher) -> bytes:
    """Header frame of a client's message (a Request's tensor frame follows it)."""
    v = limits.PROTOCOL_VERSION
    if isinstance(msg, Request):
        return encode(
            [
                v,
                KIND_REQUEST,
                msg.request_id,
                list(msg.tasks),
                msg.deadline_ms,
                msg.tensor.to_wire(),
                None if msg.upload is None else list(msg.upload),
                msg.tries,
            ]
        )
    return encode([v, _BARE_KINDS[type(msg)], msg.request_id])


def decode_to_dispatcher(header: bytes | memoryview) -> ToDispatcher:
    """Decode what a client sent. Raises WireError whatever the bytes are."""
    raw = decode(header, max_bytes=limits.MAX_HEADER_BYTES, what=_WHAT)
    rid = _check_envelope(raw)
    kind = raw[1]
    if len(raw) == 3 and type(kind) is int and kind in _BARE:
        return _BARE[kind](rid)
    if kind != KIND_REQUEST or len(raw) != 8:
        raise malformed(_WHAT, f"unknown kind {kind!r} with {len(raw)} fields")
    tasks, deadline_ms, tensor, upload, tries = raw[3:]
    if (
        type(tasks) is not list
        or not 1 <= len(tasks) <= limits.MAX_TASKS_PER_REQUEST
        or set(map(type, tasks)) != _STRS
        or not 0 < min(map(len, tasks)) <= max(map(len, tasks)) <= limits.MAX_NAME_CHARS
    ):
        raise malformed(_WHAT, f"1..{limits.MAX_TASKS_PER_REQUEST} task names expected")
    if type(deadline_ms) is not int or not 1 <= deadline_ms <= limits.MAX_DEADLINE_MS:
        raise malformed(_WHAT, f"deadline_ms {deadline_ms!r} outside 1..{limits.MAX_DEADLINE_MS}")
    desc = desc_from_wire(tensor, _WHAT)
    if desc.handle is not None or desc.strides is not None:
        raise malformed(_WHAT, "a client's tensor is contiguous and has no handle")
    if type(tries) is not int or not 0 <= tries <= MAX_TRIES:
        raise malformed(_WHAT, f"tries {tries!r} outside 0..{MAX_TRIES}")
    if upload is None:
        return Request(rid, tuple(tasks), deadline_ms, desc, None, tries)
    if type(upload) is not list or len(upload) != 2 or not _is_slot(*upload):
        raise malformed(_WHAT, f"{upload!r} is no granted slot")
    return Request(rid, tuple(tasks), deadline_ms, desc, (upload[0], upload[1]), tries)


def _is_slot(grant: Any, slot: Any) -> bool:
    return is_int(grant, 1, _U32) and is_int(slot, 0, limits.MAX_GRANT_SLOTS - 1)


def request_id_of(header: bytes | memoryview) -> bytes | None:
    """Best effort: the id in a header that cannot be decoded otherwise, or is too long for it."""
    rid = first_values(header, 3)[2:]
    return rid[0] if rid and type(rid[0]) is bytes and len(rid[0]) == REQUEST_ID_BYTES else None


def encode_to_client(msg: ToClient) -> bytes:
    v = limits.PROTOCOL_VERSION
    if isinstance(msg, Description):
        body = description_body(msg.epoch, msg.tasks, msg.limits)
        return encode_description(msg.request_id, body)
    if isinstance(msg, Invitation):
        return encode([v, KIND_INVITATION, msg.request_id, msg.path, msg.token, msg.reason])
    results = [_result_to_wire(r) for r in msg.results]
    return encode([v, KIND_REPLY, msg.request_id, msg.epoch, results, msg.received_ns])


def description_body(
    epoch: int, tasks: Iterable[Mapping[str, Any]], bounds: Mapping[str, int]
) -> list[bytes]:
    """The encoded part of a :class:`Description` that is the same for whoever asks: of thousands of
    tasks it takes tens of milliseconds to write."""
    return [encode(epoch), encode([dict(t) for t in tasks]), encode(dict(bounds))]


def encode_description(request_id: bytes, body: Sequence[bytes]) -> bytes:
    """Header frame of a :class:`Description` with that body."""
    head = map(encode, (limits.PROTOCOL_VERSION, KIND_DESCRIPTION, request_id))
    return joined([*head, *body])


def _result_to_wire(r: TaskResult) -> list[Any]:
    error = None if r.error is None else cut_texts(r.error.to_dict(), _TEXT_LIMIT)
    return [
        r.task,
        None if r.tensor is None else r.tensor.to_wire(),
        error,
        [t.block for t in r.timings],
        [
            x
            for t in r.timings
            for x in (t.hop.node, t.hop.transit, t.hop.wait, t.hop.overhead, t.hop.compute)
        ],
        r.ingress_ns,
        r.egress_ns,
        r.total_ns,
        None if r.place is None else [r.place.grant, r.place.slot, r.place.generation],
        r.canary,
    ]


def decode_to_client(header: bytes | memoryview) -> ToClient:
    """Decode what the Dispatcher sent. Raises WireError."""
    raw = decode(header, max_bytes=limits.MAX_DESCRIPTION_BYTES, what=_WHAT)
    rid = _check_envelope(raw)
    kind = raw[1]
    if kind != KIND_DESCRIPTION and len(header) > limits.MAX_CONTROL_BYTES:
        raise malformed(_WHAT, f"{len(header)} bytes of kind {kind!r}"[:200])
    if kind == KIND_DESCRIPTION and len(raw) == 6:
        epoch, tasks, lim = raw[3:]
        if not is_int(epoch, 0, _U64) or type(tasks) is not list or type(lim) is not dict:
            raise malformed(_WHAT, "bad description")
        if not all(type(t) is dict for t in tasks):
            raise malformed(_WHAT, "a task is a map")
        return Description(rid, epoch, tuple(tasks), lim)
    if kind == KIND_INVITATION and len(raw) == 6:
        path, token, reason = raw[3:]
        if type(path) is not str or type(reason) is not str or type(token) is not bytes:
            raise malformed(_WHAT, "bad invitation")
        if not reason and (not path or len(token) != TOKEN_BYTES):
            raise malformed(_WHAT, "an invitation without a way or a reason")
        return Invitation(rid, path, token, reason)
    if kind == KIND_REPLY and len(raw) == 6:
        epoch, results, received_ns = raw[3:]
        if (
            not is_int(epoch, 0, _U64)
            or not is_int(received_ns, 0, _U64)
            or type(results) is not list
            or len(results) > limits.MAX_TASKS_PER_REQUEST
        ):
            raise malformed(_WHAT, "bad reply")
        return Reply(rid, epoch, tuple([_result_from_wire(r) for r in results]), received_ns)
    raise malformed(_WHAT, f"unknown kind {kind!r} with {len(raw)} fields")


def _result_from_wire(raw: Any) -> TaskResult:
    if type(raw) is not list or len(raw) != 10:
        raise malformed(_WHAT, "a result has 10 fields")
    task, tensor, error, blocks, flat, ingress, egress, total, place, canary = raw
    if type(canary) is not bool:
        raise malformed(_WHAT, "canary is a boolean")
    if type(task) is not str or (tensor is None) == (error is None):
        raise malformed(_WHAT, "a result is a tensor or an error")
    if error is not None and type(error) is not dict:
        raise malformed(_WHAT, "an error is a map")
    if {type(ingress), type(egress), type(total)} != _INTS or not (
        0 <= ingress <= _U64 and 0 <= egress <= _U64 and 0 <= total <= _U64
    ):
        raise malformed(_WHAT, "time out of range")
    desc = None if tensor is None else desc_from_wire(tensor, _WHAT)
    if desc is not None and (desc.handle is not None or desc.strides is not None):
        raise malformed(_WHAT, "a result is contiguous and has no handle")
    hops = timings_from_wire(flat, _WHAT)
    if type(blocks) is not list or len(blocks) != len(hops) or not set(map(type, blocks)) <= _STRS:
        raise malformed(_WHAT, "a block name per timing expected")
    return TaskResult(
        task,
        desc,
        None if error is None else from_dict(error),
        tuple([Timing(b, h) for b, h in zip(blocks, hops, strict=True)]),
        ingress,
        egress,
        total,
        None if place is None else _place_from_wire(place, tensor),
        canary,
    )


def _place_from_wire(raw: Any, tensor: Any) -> Place:
    if type(raw) is not list or len(raw) != 3 or not _is_slot(raw[0], raw[1]):
        raise malformed(_WHAT, f"{raw!r} is no granted slot")
    if tensor is None or not is_int(raw[2], 1, _U32):
        raise malformed(_WHAT, "a place without a tensor or a generation")
    return Place(*raw)


def _check_envelope(raw: Any) -> bytes:
    if type(raw) is not list or len(raw) < 3:
        raise malformed(_WHAT, "not an array of at least 3 fields")
    if raw[0] != limits.PROTOCOL_VERSION:
        raise wrong_version(_WHAT, raw[0])
    rid = raw[2]
    if type(rid) is not bytes or len(rid) != REQUEST_ID_BYTES:
        raise malformed(_WHAT, f"a request id has {REQUEST_ID_BYTES} bytes")
    return rid
