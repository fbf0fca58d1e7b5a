"""Data-plane messages: worker -> worker, Dispatcher -> worker, worker -> Dispatcher.

A message is one header frame and, when the tensor does not lie in a slot, one frame of raw
elements. Several requests may ride in one message as items: rows of one batch that go the same way.
The layout is wire/PROTOCOL.md, section "Data plane".
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from itertools import chain
from typing import Any, NamedTuple

from blockflow.core import limits
from blockflow.core.errors import BlockFlowError, WireError, from_dict
from blockflow.core.routing import PathTree
from blockflow.wire.codec import check_depth, encode, is_int, malformed, unpack, wrong_version
from blockflow.wire.tensor import TensorDesc, desc_from_wire

KIND_DATA = 1
KIND_FAILURE = 2

REQUEST_ID_BYTES = 16
_U64 = 2**64 - 1
_WHAT = "data message"


class HopTiming(NamedTuple):
    """Where a request's time went at one node of its path, in nanoseconds (thesis, eq. 4.1).

    ``transit`` is from the previous sender's stamp to the receipt here (encode, send, socket);
    ``wait`` in the stage's queue; ``overhead`` everything here that is neither waiting nor the
    engine's forward; ``compute`` the forward. Transit and overhead together are the paper's ``o``.
    """

    node: int
    transit: int
    wait: int
    overhead: int
    compute: int


@dataclass(frozen=True, slots=True)
class Item:
    """One request's share of a message.

    Attributes:
        request_id: 16 bytes, unique per request.
        attempt: 1 for the first run of the path.
        epoch: of the topology that admitted the request.
        path: the request's whole path tree.
        hop: index of the path node that receives (or, towards the Dispatcher, that has finished).
        rows: how many rows of the message's tensor are this request's, in item order.
        remaining_ms: time left to the deadline when the message was sent.
        timings: hops done so far.
    """

    request_id: bytes
    attempt: int
    epoch: int
    path: PathTree
    hop: int
    rows: int
    remaining_ms: int
    timings: tuple[HopTiming, ...] = ()

    def to_wire(self) -> list[Any]:
        return [
            self.request_id,
            self.attempt,
            self.epoch,
            self.path.to_wire(),
            self.hop,
            self.rows,
            self.remaining_ms,
            list(chain.from_iterable(self.timings)),
        ]


@dataclass(frozen=True, slots=True)
class Data:
    """A tensor and the requests whose rows it holds.

    ``sender`` is the sending incarnation, ``sent_ns`` the sender's monotonic clock just before
    encoding (comparable on one host).
    """

    sender: int
    sent_ns: int
    tensor: TensorDesc
    items: tuple[Item, ...]


@dataclass(frozen=True, slots=True)
class Failure:
    """A typed failure of some requests at one hop; goes straight to the Dispatcher."""

    sender: int
    sent_ns: int
    error: BlockFlowError
    items: tuple[Item, ...]


def encode_data(msg: Data) -> bytes:
    return encode(
        [
            limits.PROTOCOL_VERSION,
            KIND_DATA,
            msg.sender,
            msg.sent_ns,
            msg.tensor.to_wire(),
            [i.to_wire() for i in msg.items],
        ]
    )


_TEXT_LIMIT = 600
"""Longest error text in a Failure, so that the header limit holds with MAX_ITEMS items."""


def encode_failure(msg: Failure) -> bytes:
    """Encode a failure; long texts are cut so that the header stays within its limit."""
    err = msg.error.to_dict()
    err.pop("details", None)
    for key in ("message", "where", "hint"):
        if key in err:
            err[key] = err[key][:_TEXT_LIMIT]
    return encode(
        [
            limits.PROTOCOL_VERSION,
            KIND_FAILURE,
            msg.sender,
            msg.sent_ns,
            err,
            [i.to_wire() for i in msg.items],
        ]
    )


def decode_data_plane(header: bytes | memoryview) -> Data | Failure:
    """Decode one header frame.

    Raises:
        WireError: MALFORMED_MESSAGE or UNSUPPORTED_VERSION.
    """
    raw = unpack(header, max_bytes=limits.MAX_HEADER_BYTES, what=_WHAT)
    if type(raw) is not list or not raw:
        raise malformed(_WHAT, "not an array")
    if raw[0] != limits.PROTOCOL_VERSION:
        raise wrong_version(_WHAT, raw[0])
    if len(raw) != 6:
        raise malformed(_WHAT, f"{len(raw)} fields instead of 6")
    _, kind, sender, sent_ns, body, items_raw = raw
    if not is_int(sender, 1, _U64) or not is_int(sent_ns, 0, _U64):
        raise malformed(_WHAT, "bad sender or time")
    if type(items_raw) is not list or not 1 <= len(items_raw) <= limits.MAX_ITEMS_PER_MESSAGE:
        raise malformed(_WHAT, f"1..{limits.MAX_ITEMS_PER_MESSAGE} items expected")
    items = tuple([_item_from_wire(i) for i in items_raw])
    if kind == KIND_DATA:
        tensor = desc_from_wire(body, _WHAT)
        if sum(i.rows for i in items) != tensor.dims[0]:
            raise malformed(_WHAT, "the items' rows do not add up to the tensor's")
        return Data(sender, sent_ns, tensor, items)
    if kind == KIND_FAILURE:
        if type(body) is not dict:
            raise malformed(_WHAT, "a failure carries an error map")
        check_depth(body, limits.MAX_NESTING, _WHAT)
        return Failure(sender, sent_ns, from_dict(body), items)
    raise malformed(_WHAT, f"unknown kind {kind!r}")


def _item_from_wire(raw: Any) -> Item:
    if type(raw) is not list or len(raw) != 8:
        raise malformed(_WHAT, "an item has 8 fields")
    rid, attempt, epoch, path, hop, rows, remaining, timings = raw
    if type(rid) is not bytes or len(rid) != REQUEST_ID_BYTES:
        raise malformed(_WHAT, f"a request id has {REQUEST_ID_BYTES} bytes")
    if not (
        is_int(attempt, 1, 255)
        and is_int(epoch, 0, _U64)
        and is_int(rows, 1, limits.MAX_ROWS)
        and is_int(remaining, 0, limits.MAX_DEADLINE_MS)
    ):
        raise malformed(_WHAT, "item field out of range")
    tree = path_from_wire(path)
    if not is_int(hop, 0, len(tree.nodes) - 1):
        raise malformed(_WHAT, f"hop {hop!r} is not on the path")
    return Item(rid, attempt, epoch, tree, hop, rows, remaining, timings_from_wire(timings, _WHAT))


def path_from_wire(raw: Any) -> PathTree:
    """Decode a flat path; a :class:`WireError` says what is wrong with it."""
    # The set of types first: 1.0 and True would find the cached path of 1.
    if type(raw) is not list or set(map(type, raw)) != {int}:
        raise malformed(_WHAT, "a path is a list of integers")
    try:
        return _known_path(tuple(raw))
    except ValueError as exc:
        raise malformed(_WHAT, str(exc)) from exc


@lru_cache(maxsize=1024)
def _known_path(flat: tuple[int, ...]) -> PathTree:
    """Requests travel few different paths: building and checking one anew costs 30 us a hop."""
    if min(flat) < 0 or max(flat) > _U64:
        raise ValueError("a number of the path is out of range")
    return PathTree.from_wire(flat)


def timings_from_wire(raw: Any, what: str) -> tuple[HopTiming, ...]:
    """Decode flat quintuples (node, transit, wait, overhead, compute)."""
    if type(raw) is not list or len(raw) % 5 or len(raw) > 5 * limits.MAX_PATH_NODES:
        raise malformed(what, "timings are quintuples")
    if raw and (set(map(type, raw)) != {int} or min(raw) < 0 or max(raw) > _U64):
        raise malformed(what, "timing out of range")
    return tuple([HopTiming(*raw[i : i + 5]) for i in range(0, len(raw), 5)])


__all__ = [
    "Data",
    "Failure",
    "HopTiming",
    "Item",
    "WireError",
    "decode_data_plane",
    "encode_data",
    "encode_failure",
    "path_from_wire",
    "timings_from_wire",
]
