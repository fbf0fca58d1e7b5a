"""Each bound of a field, from both sides: the last value that is taken, and the first that is not.

All else about the message is right, so that nothing but this field can have it refused.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgpack
import pytest
from wire_messages import U64, V

from blockflow.core import limits
from blockflow.core.errors import WireError
from blockflow.core.routing import PathNode, PathTree
from blockflow.wire import client, control, data, grants
from blockflow.wire.codec import decode, encode, first_values
from blockflow.wire.tensor import desc_from_wire

RID = bytes(16)
DESC = [1, [1], None, None]
ERROR = {"code": "EXPIRED", "message": ""}
U32 = 2**32 - 1
TASKS = limits.MAX_TASKS_PER_REQUEST
TREE = PathTree((PathNode(1, -1, True),)).wire


def request(**changed: Any) -> Any:
    good = {
        "tasks": ["t"],
        "deadline_ms": 1,
        "desc": DESC,
        "upload": None,
        "tries": 0,
    }
    fields = [V, client.KIND_REQUEST, RID, *{**good, **changed}.values()]
    return client.decode_to_dispatcher(encode(fields))


def result(**changed: Any) -> Any:
    good = {
        "task": "t",
        "desc": DESC,
        "error": None,
        "blocks": ["b"],
        "hops": [0, 1, 2, 3, 4],
        "ingress": 0,
        "egress": 0,
        "total": 0,
        "place": None,
        "canary": False,
    }
    one = list({**good, **changed}.values())
    return client.decode_to_client(encode([V, client.KIND_REPLY, RID, 1, [one], 0]))


def reply(results: int = 1, epoch: Any = 1, received_ns: Any = 0) -> Any:
    one = ["t", None, ERROR, [], [], 0, 0, 0, None, False]
    fields = [V, client.KIND_REPLY, RID, epoch, [one] * results, received_ns]
    return client.decode_to_client(encode(fields))


def invitation(path: str = "/x", token: bytes = RID, reason: str = "") -> Any:
    return client.decode_to_client(encode([V, client.KIND_INVITATION, RID, path, token, reason]))


def message(rows: int = 1, of: int = 1, sender: Any = 1, left: int = 1, task: Any = 0) -> Any:
    item = [RID, 1, 1, TREE, 0, rows, b"", task, False]
    stamps = bytes(8) + left.to_bytes(4, "little")
    fields = [V, data.KIND_DATA, sender, [1, [of], None, None], [item], stamps]
    return data.decode_data_plane(encode(fields))


def desc(dims: Any = (1,), strides: Any = None, handle: Any = None, dtype: Any = 1) -> Any:
    return desc_from_wire([dtype, list(dims), strides, handle], "t")


def ask(direction: Any = 0, nbytes: Any = 1) -> Any:
    return grants.decode_from_client(encode([V, grants.KIND_ASK, direction, nbytes]))


def attach(token: Any) -> Any:
    return grants.decode_from_client(encode([V, grants.KIND_ATTACH, token]))


def granted(grant: Any = 1, direction: Any = 0, slot_bytes: Any = 1, slots: Any = 1) -> Any:
    fields = [V, grants.KIND_GRANTED, grant, direction, slot_bytes, slots]
    return grants.decode_from_dispatcher(encode(fields))


def refused(direction: Any = 0, nbytes: Any = 1, reason: Any = "") -> Any:
    fields = [V, grants.KIND_REFUSED, direction, nbytes, reason]
    return grants.decode_from_dispatcher(encode(fields))


def drained(**fields: Any) -> Any:
    body = {"v": V, "k": "drained", "incarnation": 1, "version": 0, **fields}
    return control.decode_control(encode(body))


def monitor(hz: Any) -> Any:
    return control.decode_control(encode({"v": V, "k": "monitor", "hz": hz}))


LAST_SLOT = limits.MAX_GRANT_SLOTS - 1
MOST = limits.MAX_MESSAGE_BYTES
NAME = "x" * limits.MAX_NAME_CHARS

BOUNDS: list[tuple[Callable[..., Any], dict[str, Any], dict[str, Any]]] = [
    (request, {"tasks": ["t"] * TASKS}, {"tasks": ["t"] * (TASKS + 1)}),
    (request, {"tasks": ["t"]}, {"tasks": []}),
    (request, {"tasks": [NAME]}, {"tasks": [NAME + "x"]}),
    (request, {"tasks": ["x"]}, {"tasks": [""]}),
    (request, {"deadline_ms": 1}, {"deadline_ms": 0}),
    (request, {"deadline_ms": limits.MAX_DEADLINE_MS}, {"deadline_ms": limits.MAX_DEADLINE_MS + 1}),
    (request, {"deadline_ms": 1}, {"deadline_ms": True}),
    (request, {"desc": DESC}, {"desc": [1, [1], [1], None]}),
    (request, {"desc": DESC}, {"desc": [1, [1], None, [1, 0, 0, 1, 0]]}),
    (request, {"upload": [1, 0]}, {"upload": [0, 0]}),
    (request, {"upload": [U32, 0]}, {"upload": [U32 + 1, 0]}),
    (request, {"upload": [1, LAST_SLOT]}, {"upload": [1, LAST_SLOT + 1]}),
    (request, {"tries": client.MAX_TRIES}, {"tries": client.MAX_TRIES + 1}),
    (request, {"tries": 0}, {"tries": -1}),
    (result, {"place": [1, LAST_SLOT, 1]}, {"place": [1, LAST_SLOT + 1, 1]}),
    (result, {"place": [1, 0, 1]}, {"place": [1, 0, 0]}),
    (result, {"place": [1, 0, U32]}, {"place": [1, 0, U32 + 1]}),
    (result, {"place": [1, 0, 1]}, {"place": [1, 0, 1], "desc": None, "error": ERROR}),
    (result, {"desc": None, "error": ERROR}, {"desc": None, "error": None}),
    (result, {"desc": DESC, "error": None}, {"desc": DESC, "error": ERROR}),
    (result, {"blocks": ["b"]}, {"blocks": ["b", "c"]}),
    (result, {"hops": [0] * 5}, {"hops": [0, 0, 0, 0, -1]}),
    (result, {"hops": [U64] * 5}, {"hops": [0, 0, 0, 0]}),
    (result, {"ingress": U64}, {"ingress": -1}),
    (result, {"egress": U64}, {"egress": -1}),
    (result, {"total": U64}, {"total": -1}),
    (result, {"canary": True}, {"canary": 1}),
    (reply, {"results": TASKS}, {"results": TASKS + 1}),
    (reply, {"epoch": U64}, {"epoch": -1}),
    (reply, {"received_ns": U64}, {"received_ns": -1}),
    (invitation, {"token": RID}, {"token": RID[1:]}),
    (invitation, {"path": "/x"}, {"path": ""}),
    (invitation, {"path": "", "token": b"", "reason": "off"}, {"path": "", "token": b""}),
    (message, {"rows": 2, "of": 2}, {"rows": 1, "of": 2}),
    (message, {"rows": 2, "of": 2}, {"rows": 3, "of": 2}),
    (message, {"rows": 1, "of": 1}, {"rows": 0, "of": 0}),
    (
        message,
        {"rows": limits.MAX_ROWS, "of": limits.MAX_ROWS},
        {"rows": limits.MAX_ROWS + 1, "of": limits.MAX_ROWS + 1},
    ),
    (message, {"sender": U64}, {"sender": 0}),
    (message, {"left": limits.MAX_DEADLINE_MS}, {"left": limits.MAX_DEADLINE_MS + 1}),
    (message, {"task": limits.MAX_SHARES}, {"task": limits.MAX_SHARES + 1}),
    (desc, {"dims": [1] * limits.MAX_RANK}, {"dims": [1] * (limits.MAX_RANK + 1)}),
    (desc, {"dims": [0, limits.MAX_DIM]}, {"dims": [0, limits.MAX_DIM + 1]}),
    (desc, {"dims": [MOST]}, {"dims": [MOST + 1]}),
    (desc, {"strides": [MOST]}, {"strides": [MOST + 1]}),
    (desc, {"strides": [0]}, {"strides": [-1]}),
    (desc, {"dims": [1, 1], "strides": [1, 1]}, {"dims": [1, 1], "strides": [1]}),
    (desc, {"handle": [U64, U32, 255, U32, U64]}, {"handle": [0, 0, 0, 1, 0]}),
    (desc, {"handle": [1, 0, 0, 1, 0]}, {"handle": [1, 0, 256, 1, 0]}),
    (desc, {"handle": [1, 0, 0, 1, 0]}, {"handle": [1, 0, 0, 0, 0]}),
    (desc, {"dtype": 0}, {"dtype": -1}),
    (ask, {"direction": 1}, {"direction": 2}),
    (ask, {"nbytes": MOST}, {"nbytes": MOST + 1}),
    (ask, {"nbytes": 1}, {"nbytes": 0}),
    (attach, {"token": RID}, {"token": RID + b"x"}),
    (refused, {"direction": 1}, {"direction": 2}),
    (refused, {"nbytes": 1}, {"nbytes": 0}),
    (refused, {"nbytes": MOST}, {"nbytes": MOST + 1}),
    (refused, {"reason": "full"}, {"reason": b"full"}),
    (granted, {"grant": U32}, {"grant": 0}),
    (granted, {"slot_bytes": MOST}, {"slot_bytes": MOST + 1}),
    (granted, {"slots": limits.MAX_GRANT_SLOTS}, {"slots": limits.MAX_GRANT_SLOTS + 1}),
    (granted, {"slots": 1}, {"slots": 0}),
    (drained, {"version": U64}, {"version": -1}),
    (drained, {"version": 1}, {"version": True}),
    (drained, {"version": 1}, {"more": 1}),
    (monitor, {"hz": 4}, {"hz": "4"}),
]


@pytest.mark.parametrize(
    ("made", "taken", "refused"), BOUNDS, ids=[f"{m.__name__}-{r}"[:60] for m, _, r in BOUNDS]
)
def test_a_bound(made: Callable[..., Any], taken: dict[str, Any], refused: dict[str, Any]) -> None:
    made(**taken)
    with pytest.raises(WireError):
        made(**refused)


# --- the codec ------------------------------------------------------------------------------------


def nested(levels: int, kind: type) -> Any:
    value: Any = 1
    for _ in range(levels):
        value = [value] if kind is list else {"k": value}
    return value


@pytest.mark.parametrize("kind", [list, dict])
@pytest.mark.parametrize(
    ("most", "levels"), [(limits.MAX_HEADER_BYTES, limits.MAX_NESTING), (10**6, 12)]
)
def test_how_deep_a_value_may_be(kind: type, most: int, levels: int) -> None:
    whole = nested(levels, kind)
    assert decode(msgpack.packb(whole), max_bytes=most, what="it") == whole
    for deeper in (nested(levels + 1, kind), [0, nested(levels, kind)]):
        with pytest.raises(WireError, match="nested too deeply"):
            decode(msgpack.packb(deeper), max_bytes=most, what="it")


def test_what_can_be_read_of_a_header_that_cannot() -> None:
    values = ["a", 2, b"id", [1]]
    data = msgpack.packb(values)
    assert first_values(data, 3) == values[:3]
    assert first_values(data, 9) == values
    assert first_values(data[:-3], 9) == values[:2]
    assert first_values(msgpack.packb([1, 2]), 3) == [1, 2]
    for nothing in (b"", b"\xc1", msgpack.packb({}), msgpack.packb(5)):
        assert first_values(nothing, 3) == []
    long = msgpack.packb([1, b"x" * 4096, 3])
    assert first_values(long, 3) == [1]  # so far is looked
