"""Data-plane messages: worker -> worker, Dispatcher -> worker, worker -> Dispatcher.

A message is one header frame and, when the tensor does not lie in a slot, one frame of raw
elements. Several requests may ride in one message as items: rows of one batch that go the same way.
The layout is wire/PROTOCOL.md, section "Data plane".
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import Any, NamedTuple

from blockflow.core import limits
from blockflow.core.errors import BlockFlowError, from_dict
from blockflow.core.records import record
from blockflow.core.routing import PathTree
from blockflow.wire.codec import (
    check_depth,
    cut_texts,
    encode,
    is_int,
    malformed,
    unpack,
    wrong_version,
)
from blockflow.wire.tensor import TensorDesc, desc_from_wire

KIND_DATA = 1
KIND_FAILURE = 2
KIND_WITHDRAW = 3

REQUEST_ID_BYTES = 16
PROBE_EPOCH = 0
"""Epoch of the control plane's readiness probes, which belong to no topology (those begin at 1)."""
_U64 = 2**64 - 1
_INTS = {int}
_WHAT = "data message"

_HOP = struct.Struct("<B4Q")
HOP_BYTES = _HOP.size
"""A hop's times on the wire: node and four durations."""
pack_timing = _HOP.pack
"""The fields of one :class:`HopTiming`, as :func:`pack_timings` packs those of several."""
_SENT = struct.Struct("<Q")
_LEFT = struct.Struct("<I")
_WITHDRAWN = struct.Struct(f"{REQUEST_ID_BYTES}sB")


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


_timing: Callable[[Iterable[int]], HopTiming] = partial(tuple.__new__, HopTiming)
"""As ``HopTiming._make``, of as many fields for certain."""


@record
class Item:
    """One request's share of a message.

    Attributes:
        request_id: 16 bytes, unique per request.
        attempt: 1 for the first run of the path.
        epoch: of the topology that admitted the request; :data:`PROBE_EPOCH` for none.
        path: the request's whole path tree.
        hop: index of the path node that receives (or, towards the Dispatcher, that has finished).
        rows: how many rows of the message's tensor are this request's, in item order.
        remaining_ms: time left to the deadline when the message was sent.
        timings: of the hops done so far, packed: nobody on the way looks into them.
        task: index into the route table's shares: what this request may claim at shared blocks.
        alone: run it unbatched: it was at work in a worker that died, and may be the cause.
    """

    request_id: bytes
    attempt: int
    epoch: int
    path: PathTree
    hop: int
    rows: int
    remaining_ms: int
    timings: bytes = b""
    task: int = 0
    alone: bool = False

    @property
    def hops(self) -> tuple[HopTiming, ...]:
        """``timings`` unpacked."""
        return tuple(map(_timing, _HOP.iter_unpack(self.timings)))

    def to_wire(self) -> list[Any]:
        """Without ``remaining_ms``, which is among the message's stamps."""
        return _item_to_wire(self, self.hop)


def pack_timings(hops: Iterable[HopTiming]) -> bytes:
    """Inverse of :attr:`Item.hops`."""
    return b"".join([pack_timing(*h) for h in hops])


def _item_to_wire(item: Item, hop: int) -> list[Any]:
    return [
        item.request_id,
        item.attempt,
        item.epoch,
        item.path.wire,
        hop,
        item.rows,
        item.timings,
        item.task,
        item.alone,
    ]


@record
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


@dataclass(frozen=True, slots=True)
class Withdraw:
    """Requests that nobody waits for any more: (request id, newest attempt) each.

    From the Dispatcher to the workers where they may be. It is answered by nobody.
    """

    sender: int
    requests: tuple[tuple[bytes, int], ...]


def encode_withdraw(msg: Withdraw) -> bytes:
    packed = b"".join([_WITHDRAWN.pack(*r) for r in msg.requests])
    return encode([limits.PROTOCOL_VERSION, KIND_WITHDRAW, msg.sender, packed])


def _withdraw_from_wire(sender: int, packed: Any) -> Withdraw:
    if type(packed) is not bytes or not packed or len(packed) % _WITHDRAWN.size:
        raise malformed(_WHAT, f"withdrawn requests are records of {_WITHDRAWN.size} bytes")
    if len(packed) > _WITHDRAWN.size * limits.MAX_WITHDRAWN_PER_MESSAGE:
        raise malformed(_WHAT, f"1..{limits.MAX_WITHDRAWN_PER_MESSAGE} requests are withdrawn")
    requests = tuple(_WITHDRAWN.iter_unpack(packed))
    if not all(attempt for _, attempt in requests):
        raise malformed(_WHAT, "attempts count from 1")
    return Withdraw(sender, requests)


def encode_data(msg: Data) -> bytes:
    return _encode(KIND_DATA, msg.sender, msg.tensor.to_wire(), msg.sent_ns, msg.items)


def _encode(kind: int, sender: int, body: Any, sent_ns: int, items: Sequence[Item]) -> bytes:
    stamps = _SENT.pack(sent_ns) + b"".join([_LEFT.pack(i.remaining_ms) for i in items])
    wire = [i.to_wire() for i in items]
    return encode([limits.PROTOCOL_VERSION, kind, sender, body, wire, stamps])


class Draft:
    """A data message that is complete but for the times, which nobody knows before the computation.

    What costs most of a message's making is done while the receiver sleeps anyway; what is left for
    the moment when the result is there is to write a few numbers into the ready bytes.

    Args:
        sender: incarnation.
        tensor: that it announces.
        items: with the node that each goes to; the items themselves are as they were received.
    """

    __slots__ = ("_at", "_header", "_layout")

    def __init__(self, sender: int, tensor: TensorDesc, items: Sequence[tuple[Item, int]]) -> None:
        self._layout = _layout(len(items))
        self._header = bytearray(
            encode(
                [
                    limits.PROTOCOL_VERSION,
                    KIND_DATA,
                    sender,
                    tensor.to_wire(),
                    [_item_to_wire(item, hop) for item, hop in items],
                    bytes(self._layout.size),
                ]
            )
        )
        self._at = len(self._header) - self._layout.size

    def finish(self, sent_ns: int, remaining_ms: Sequence[int], hops: Iterable[int]) -> bytearray:
        """The header.

        Args:
            sent_ns: the monotonic clock now.
            remaining_ms: per item.
            hops: the fields of every item's newest :class:`HopTiming`, one after the other.
        """
        self._layout.pack_into(self._header, self._at, sent_ns, *remaining_ms, *hops)
        return self._header


@lru_cache(maxsize=limits.MAX_ITEMS_PER_MESSAGE)
def _layout(items: int) -> struct.Struct:
    """The stamps of a message: when it was sent, the time left and the newest hop of each item."""
    return struct.Struct(f"<Q{items}I{'B4Q' * items}")


_TEXT_LIMIT = 600
"""Longest error text in a Failure, in bytes: the header limit holds for any script."""


def encode_failure(msg: Failure) -> bytes:
    """Encode a failure; long texts are cut so that the header stays within its limit."""
    err = cut_texts(msg.error.to_dict(), _TEXT_LIMIT)
    err.pop("details", None)
    return _encode(KIND_FAILURE, msg.sender, err, msg.sent_ns, msg.items)


def decode_data_plane(header: bytes | memoryview) -> Data | Failure | Withdraw:
    """Decode one header frame.

    Raises:
        WireError: MALFORMED_MESSAGE or UNSUPPORTED_VERSION.
    """
    raw = unpack(header, max_bytes=limits.MAX_HEADER_BYTES, what=_WHAT)
    try:
        return _message_from_wire(raw)
    except RecursionError:  # in quoting a field: a header has room for a thousand levels
        raise malformed(_WHAT, "nested too deeply") from None


def _message_from_wire(raw: Any) -> Data | Failure | Withdraw:
    if type(raw) is not list or not raw:
        raise malformed(_WHAT, "not an array")
    if raw[0] != limits.PROTOCOL_VERSION:
        raise wrong_version(_WHAT, raw[0])
    if len(raw) == 4 and raw[1] == KIND_WITHDRAW and is_int(raw[2], 1, _U64):
        return _withdraw_from_wire(raw[2], raw[3])
    if len(raw) != 6:
        raise malformed(_WHAT, f"{len(raw)} fields instead of 6")
    _, kind, sender, body, items_raw, stamps = raw
    if type(sender) is not int or not 1 <= sender <= _U64:
        raise malformed(_WHAT, "bad sender")
    if type(items_raw) is not list or not 1 <= len(items_raw) <= limits.MAX_ITEMS_PER_MESSAGE:
        raise malformed(_WHAT, f"1..{limits.MAX_ITEMS_PER_MESSAGE} items expected")
    sent_ns, items = _items_from_wire(items_raw, stamps)
    if kind == KIND_DATA:
        tensor = desc_from_wire(body, _WHAT)
        if sum([i.rows for i in items]) != tensor.dims[0]:
            raise malformed(_WHAT, "the items' rows do not add up to the tensor's")
        return Data(sender, sent_ns, tensor, items)
    if kind == KIND_FAILURE:
        if type(body) is not dict:
            raise malformed(_WHAT, "a failure carries an error map")
        check_depth(body, limits.MAX_NESTING, _WHAT)
        return Failure(sender, sent_ns, from_dict(body), items)
    raise malformed(_WHAT, f"unknown kind {kind!r}")


def _items_from_wire(raw: list[Any], stamps: Any) -> tuple[int, tuple[Item, ...]]:
    """The items, each with what the message's stamps say of it."""
    count = len(raw)
    short = _SENT.size + count * _LEFT.size
    if type(stamps) is not bytes or len(stamps) not in (short, short + count * HOP_BYTES):
        raise malformed(_WHAT, "the stamps are not those of its items")
    items = []
    left, hop = _SENT.size, short
    for one in raw:
        # with a bare beginning (the Dispatcher, a failure) this slice is empty
        newest = stamps[hop : hop + HOP_BYTES]
        items.append(_item_from_wire(one, _LEFT.unpack_from(stamps, left)[0], newest))
        left += _LEFT.size
        hop += HOP_BYTES
    return _SENT.unpack_from(stamps)[0], tuple(items)


def _item_from_wire(raw: Any, remaining: int, newest: bytes) -> Item:
    if type(raw) is not list or len(raw) != 9:
        raise malformed(_WHAT, "an item has 9 fields")
    rid, attempt, epoch, path, hop, rows, timings, task, alone = raw
    if type(rid) is not bytes or len(rid) != REQUEST_ID_BYTES:
        raise malformed(_WHAT, f"a request id has {REQUEST_ID_BYTES} bytes")
    if {type(attempt), type(epoch), type(rows), type(task)} != _INTS or not (
        1 <= attempt <= 255
        and 0 <= epoch <= _U64
        and 1 <= rows <= limits.MAX_ROWS
        and 0 <= task <= limits.MAX_SHARES
        and remaining <= limits.MAX_DEADLINE_MS
        and type(alone) is bool
    ):
        raise malformed(_WHAT, "item field out of range")
    tree = path_from_wire(path)
    if type(hop) is not int or not 0 <= hop < len(tree.nodes):
        raise malformed(_WHAT, f"hop {hop!r} is not on the path")
    if type(timings) is not bytes or len(timings) % HOP_BYTES:
        raise malformed(_WHAT, f"timings are records of {HOP_BYTES} bytes")
    if len(timings) + len(newest) > HOP_BYTES * limits.MAX_PATH_NODES:
        raise malformed(_WHAT, "more timings than a path has nodes")
    return Item(rid, attempt, epoch, tree, hop, rows, remaining, timings + newest, task, alone)


def path_from_wire(raw: Any) -> PathTree:
    """Decode a packed path; a :class:`WireError` says what is wrong with it."""
    if type(raw) is not bytes:
        raise malformed(_WHAT, "a path is a byte string")
    try:
        return _known_path(raw) if len(raw) <= _SHORT else _known_long_path(raw)
    except ValueError as exc:
        raise malformed(_WHAT, str(exc)) from exc


_SHORT = 80
"""Bytes of a path of eight nodes."""


@lru_cache(maxsize=1024)
def _known_path(packed: bytes) -> PathTree:
    """Requests travel few different paths: building and checking one anew costs 30 us a hop."""
    return PathTree.from_wire(packed)


@lru_cache(maxsize=128)
def _known_long_path(packed: bytes) -> PathTree:
    """Up to eight times as long, and so fewer: a client that names the tasks in ever another order
    has 20 MB of the longest kept in each process otherwise."""
    return PathTree.from_wire(packed)


def timings_from_wire(raw: Any, what: str) -> tuple[HopTiming, ...]:
    """Decode flat quintuples (node, transit, wait, overhead, compute)."""
    if type(raw) is not list or len(raw) % 5 or len(raw) > 5 * limits.MAX_PATH_NODES:
        raise malformed(what, "timings are quintuples")
    if raw and (set(map(type, raw)) != {int} or min(raw) < 0 or max(raw) > _U64):
        raise malformed(what, "timing out of range")
    return tuple([_timing(raw[i : i + 5]) for i in range(0, len(raw), 5)])
