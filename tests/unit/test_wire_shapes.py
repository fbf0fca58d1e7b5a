"""Every field of another kind, or of another length, is malformed: by hand, where fuzzers draw.

All else about the message is right, so that nothing but this field can have it refused.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from copy import deepcopy
from typing import Any

import pytest
from wire_messages import V

from blockflow.core import limits
from blockflow.core.errors import WireError
from blockflow.core.routing import PathNode, PathTree
from blockflow.wire import client, control, data
from blockflow.wire.codec import encode

RID, TEXT = bytes(16), "x" * 16
DESC = [1, [1], [1], [1, 0, 0, 1, 0]]
PLAIN = [1, [1], None, None]
ERROR = {"code": "EXPIRED", "message": ""}
TREE = PathTree((PathNode(1, -1, True),)).wire
ITEM = [RID, 1, 1, TREE, 0, 1, bytes(data.HOP_BYTES), 0, False]
STAMPS = bytes(8) + (1).to_bytes(4, "little")
RECORD = RID + b"\1"
NUMBERS: list[Any] = ["1", b"1", None, True, -1, 1.0]

GOOD: dict[str, list[Any]] = {
    "request": [V, client.KIND_REQUEST, RID, ["t"], 1, PLAIN, [1, 0], 0],
    "cancel": [V, client.KIND_CANCEL, RID],
    "reply": [
        *[V, client.KIND_REPLY, RID, 1],
        [["t", PLAIN, None, ["b"], [0, 1, 2, 3, 4], 0, 0, 0, [1, 0, 1], False]],
        0,
    ],
    "refusal": [
        *[V, client.KIND_REPLY, RID, 1],
        [["t", None, ERROR, [], [], 0, 0, 0, None, False]],
        0,
    ],
    "description": [V, client.KIND_DESCRIPTION, RID, 1, [{}], {}],
    "invitation": [V, client.KIND_INVITATION, RID, "/x", RID, ""],
    "data": [V, data.KIND_DATA, 1, DESC, [ITEM], STAMPS],
    "failure": [V, data.KIND_FAILURE, 1, ERROR, [ITEM], STAMPS],
    "withdraw": [V, data.KIND_WITHDRAW, 1, RECORD],
}
DECODE: dict[str, Callable[[bytes], Any]] = {
    **dict.fromkeys(GOOD, client.decode_to_client),
    **dict.fromkeys(("request", "cancel"), client.decode_to_dispatcher),
    **dict.fromkeys(("data", "failure", "withdraw"), data.decode_data_plane),
}
ENVELOPE: dict[tuple[int, ...], list[Any]] = {
    (): [{}, 5, "x", []],
    (0,): [V + 1, str(V)],
    (1,): [99, "1", None],
}
TO_A_CLIENT = {**ENVELOPE, (2,): [RID[1:], RID + b"x", TEXT, None]}
PLANE = {
    **ENVELOPE,
    (2,): NUMBERS,
    (4,): [[], {}, None, b"x"],
    (4, 0): [ITEM[:-1], [*ITEM, 0], {}, None],
    (4, 0, 0): [RID[1:], TEXT],
    (4, 0, 1): [*NUMBERS, 256],
    (4, 0, 3): [TREE[1:], TEXT, None],
    (4, 0, 4): [*NUMBERS, 1],
    (4, 0, 6): [b"x", TEXT, None, bytes(data.HOP_BYTES * (limits.MAX_PATH_NODES + 1))],
    (4, 0, 8): [0, 1, None],
    (5,): [STAMPS[1:], STAMPS + b"x", bytes(8), "x" * 12],
}
TENSOR: dict[tuple[int, ...], list[Any]] = {
    (): [PLAIN[:3], [*PLAIN, None], {}, b"\1\1\0\0"],
    (0,): [*NUMBERS, 99],
    (1,): [[], {}, b"\1", None],
    (1, 0): NUMBERS,
}
SIDES: dict[tuple[int, ...], list[Any]] = {
    (2,): [{}, b"\1", [1, 1], ["1"]],
    (3,): [[1, 0, 0, 1], [1, 0, 0, 1, 0, 0], b"\1\0\0\1\0", {}],
    **{(3, field): NUMBERS for field in range(5)},
}


def at(place: tuple[int, ...], cases: dict[tuple[int, ...], list[Any]]) -> dict[Any, list[Any]]:
    return {place + path: wrong for path, wrong in cases.items()}


WRONG: dict[str, dict[tuple[int, ...], list[Any]]] = {
    "request": {
        **TO_A_CLIENT,
        (3,): ["t", {"t": 1}, None],
        (3, 0): [b"t", 1, None],
        (4,): NUMBERS,
        **at((5,), TENSOR),
        (6,): [b"\1\0", [1], [1, 0, 0], {}, [True, 0], [1, "0"]],
        (7,): NUMBERS,
    },
    "cancel": TO_A_CLIENT,
    "reply": {
        **TO_A_CLIENT,
        (3,): NUMBERS,
        (4,): [{}, None, b"x"],
        (4, 0): [{}, None],
        (4, 0, 0): [b"t", None],
        **at((4, 0, 1), TENSOR),
        (4, 0, 3): ["b", None, [b"b"]],
        (4, 0, 4): [b"12345", None, [0, 1, 2, 3, "4"], [0, 1, 2, 3, True]],
        (4, 0, 8): [b"\1\0\1", [1, 0], [1, 0, 1, 1], [1, 0, "1"]],
        (5,): NUMBERS,
    },
    "refusal": {(4, 0, 2): [None, "x", []]},
    "description": {**TO_A_CLIENT, (3,): NUMBERS, (4,): [{}, None, ["t"]], (5,): [[], None]},
    "invitation": {**TO_A_CLIENT, (3,): [b"/x", None], (4,): [TEXT, None], (5,): [b"", None]},
    "data": {**PLANE, **at((3,), TENSOR), **at((3,), SIDES)},
    "failure": {**PLANE, (3,): [[], None, "x"]},
    "withdraw": {
        **ENVELOPE,
        (2,): NUMBERS,
        (3,): [
            *[b"", RECORD[1:], RID + b"\0", "x" * 17, None],
            RECORD * (limits.MAX_WITHDRAWN_PER_MESSAGE + 1),
        ],
    },
}


def wrong_ones(kind: str) -> Iterator[tuple[str, Any]]:
    yield "one field less", GOOD[kind][:-1]
    yield "one field more", [*GOOD[kind], None]
    for path, values in WRONG[kind].items():
        for value in values:
            made: Any = [deepcopy(GOOD[kind])]
            inner, *steps = made, 0, *path
            for step in steps[:-1]:
                inner = inner[step]
            inner[steps[-1]] = value
            yield f"{value!r} at {path}"[:200], made[0]


@pytest.mark.parametrize("kind", GOOD)
def test_a_field_of_another_kind_is_malformed(kind: str) -> None:
    DECODE[kind](encode(GOOD[kind]))
    for what, value in wrong_ones(kind):
        try:
            DECODE[kind](encode(value))
        except WireError:
            continue
        raise AssertionError(f"{what} is taken")


@pytest.mark.parametrize("value", [[], 5, {"v": V}, {"v": V, "k": 5}, {"v": V, "k": ["drain"]}])
def test_a_control_message_is_a_map_that_names_its_kind(value: Any) -> None:
    with pytest.raises(WireError):
        control.decode_control(encode(value))


def test_an_id_is_read_of_what_is_malformed_only_where_it_is_one() -> None:
    for rid, read in ((RID, RID), (RID[1:], None), (TEXT, None), (5, None)):
        assert client.request_id_of(encode([V, 99, rid, "rest"])) == read
    assert client.request_id_of(encode([V, 99])) is None
