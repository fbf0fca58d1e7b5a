"""PROTOCOL.md and the code say the same."""

from __future__ import annotations

import re
from dataclasses import fields
from pathlib import Path

import pytest

import blockflow.wire
from blockflow.core import limits
from blockflow.core.errors import WireError
from blockflow.core.model import DTYPE_BYTES, Contract, TensorSpec
from blockflow.core.routing import PathNode, PathTree, RouteTable, TaskRoute
from blockflow.dispatcher.replies import Descriptions
from blockflow.wire import client, control, data, grants
from blockflow.wire.codec import decode, encode, joined
from blockflow.wire.tensor import DTYPES, TensorDesc

TEXT = (Path(next(iter(blockflow.wire.__path__))) / "PROTOCOL.md").read_text()

IMAGE = TensorSpec("uint8", ("rows", 4))


def section(title: str) -> str:
    found = re.search(rf"^## {title}\n(.*?)(?=^## |\Z)", TEXT, re.M | re.S)
    assert found, title
    return found[1]


def rows(text: str) -> list[list[str]]:
    """Cells of all table rows, without header and rule."""
    out = []
    for table in re.findall(r"(?:^\|.*\|\n)+", text, re.M):
        for line in table.splitlines()[2:]:
            out.append([cell.strip() for cell in line.strip("|").split("|")])
    return out


def unpack(frame: bytes) -> object:
    return decode(frame, max_bytes=len(frame), what="test")


def test_version() -> None:
    found = re.search(r"^Version: \*\*(\d+)\*\*$", TEXT, re.M)
    assert found
    assert int(found[1]) == limits.PROTOCOL_VERSION
    assert re.search(rf"^- {limits.PROTOCOL_VERSION}: ", section("Changes"), re.M)


def test_limits() -> None:
    documented = {name: int(value) for name, value in rows(section("Limits"))}
    assert documented == {name: getattr(limits, name) for name in documented}
    used = set()
    for module in ("codec", "tensor", "data", "client", "grants", "control"):
        code = (Path(next(iter(blockflow.wire.__path__))) / f"{module}.py").read_text()
        used |= set(re.findall(r"limits\.(MAX_\w+)", code))
    assert used <= documented.keys(), "a limit that the code checks is not documented"


def test_dtypes() -> None:
    documented = [name for _, name in sorted(rows(section("Tensors")), key=lambda r: int(r[0]))]
    assert documented == list(DTYPES)
    assert set(DTYPES) == DTYPE_BYTES.keys()


def test_data_kinds_and_items() -> None:
    table = rows(section("Data plane"))
    kinds = {int(r[0]): (r[1], r[2].split(", ")) for r in table if r[0].isdecimal()}
    assert {k: name for k, (name, _) in kinds.items()} == {
        data.KIND_DATA: "Data",
        data.KIND_FAILURE: "Failure",
        data.KIND_WITHDRAW: "Withdraw",
    }
    withdraw = data.Withdraw(1, ((bytes(16), 1),))
    raw = unpack(data.encode_withdraw(withdraw))
    assert isinstance(raw, list)
    assert len(raw) == len(kinds[data.KIND_WITHDRAW][1])
    assert kinds[data.KIND_WITHDRAW][1][2:] == [f.name for f in fields(withdraw)]
    item_fields = [r[0] for r in table if not r[0].isdecimal()]
    stamped = {"remaining_ms"}
    assert item_fields == [f.name for f in fields(data.Item) if f.name not in stamped]
    item = data.Item(bytes(16), 1, 1, PathTree((PathNode(1, -1, True),)), 0, 1, 1)
    assert len(item.to_wire()) == len(item_fields)
    raw = unpack(data.encode_data(data.Data(1, 1, TensorDesc("uint8", (1,)), (item,))))
    assert isinstance(raw, list)
    assert len(raw) == len(kinds[data.KIND_DATA][1])


def test_of_long_paths_fewer_are_remembered() -> None:
    """Any order of a request's tasks is another path; the longest takes 20 KB."""

    def paths(nodes: int) -> list[bytes]:
        below = tuple(PathNode(n, 0, True) for n in range(2, nodes + 1))
        return [PathTree((PathNode(99 + i, -1, False), *below)).wire for i in range(200)]

    def remembered(packed: list[bytes]) -> int:
        made = [data.path_from_wire(path) for path in packed]
        return sum(data.path_from_wire(path) is made[i] for i, path in enumerate(packed))

    assert remembered(paths(8)) == 200
    assert remembered(paths(limits.MAX_PATH_NODES)) == 0, "the oldest are forgotten first"
    assert remembered(paths(limits.MAX_PATH_NODES)[:128]) == 128


def test_client_kinds_and_results() -> None:
    table = rows(section("Client"))
    kinds = {int(r[0]): (r[1], r[2].split(", ")) for r in table if r[0].isdecimal()}
    rid = bytes(16)
    messages: dict[int, client.ToDispatcher | client.ToClient] = {
        client.KIND_REQUEST: client.Request(rid, ("t",), 1, TensorDesc("uint8", (1,))),
        client.KIND_CANCEL: client.Cancel(rid),
        client.KIND_DESCRIBE: client.Describe(rid),
        client.KIND_INVITE: client.Invite(rid),
        client.KIND_REPLY: client.Reply(rid, 1, ()),
        client.KIND_DESCRIPTION: client.Description(rid, 1, (), {}),
        client.KIND_INVITATION: client.Invitation(rid, "/x", bytes(16), ""),
    }
    assert kinds.keys() == messages.keys()
    for kind, message in messages.items():
        name, names = kinds[kind]
        assert name == type(message).__name__
        assert names[2:] == [f.name for f in fields(message)]
        if isinstance(message, client.Reply | client.Description | client.Invitation):
            raw = unpack(client.encode_to_client(message))
        else:
            raw = unpack(client.encode_to_dispatcher(message))
        assert isinstance(raw, list)
        assert (raw[1], len(raw)) == (kind, len(names))
    result_fields = [r[0] for r in table if not r[0].isdecimal()]
    error = WireError("MALFORMED_MESSAGE", "x")
    reply = client.Reply(rid, 1, (client.TaskResult("t", None, error),))
    raw = unpack(client.encode_to_client(reply))
    assert isinstance(raw, list)
    assert len(raw[4][0]) == len(result_fields)


def test_descriptions() -> None:
    route = TaskRoute("t", ("b",), Contract(IMAGE, IMAGE))
    assert {r[0] for r in rows(section("Descriptions"))} == route.to_dict().keys()
    named = set(re.findall(r"`(\w+)`", section("Descriptions").partition("`limits`: ")[2]))
    table = RouteTable(1, 1, tasks={"t": route})
    told = Descriptions({"max_inflight": 1, "max_inflight_per_client": 1}).answer(bytes(16), table)
    description = client.decode_to_client(told)
    assert isinstance(description, client.Description)
    assert named == description.limits.keys()


def test_side_kinds() -> None:
    table = rows(section("Grants"))
    kinds = {int(r[0]): (r[1], r[2], r[3].split(", ")) for r in table}
    up = grants.Direction.UPLOAD
    messages: dict[int, grants.FromClient | grants.FromDispatcher] = {
        grants.KIND_ATTACH: grants.Attach(bytes(client.TOKEN_BYTES)),
        grants.KIND_ASK: grants.Ask(up, 1),
        grants.KIND_GRANTED: grants.Granted(1, up, 4096, 2),
        grants.KIND_REFUSED: grants.Refused(up, 1, "full"),
    }
    assert kinds.keys() == messages.keys()
    for kind, message in messages.items():
        name, sender, names = kinds[kind]
        assert name == type(message).__name__
        assert names[2:] == [f.name for f in fields(message)]
        packet = grants.encode_side(message)
        raw = unpack(packet)
        assert isinstance(raw, list)
        assert (raw[1], len(raw)) == (kind, len(names))
        decoder = {
            "client": grants.decode_from_client,
            "Dispatcher": grants.decode_from_dispatcher,
        }[sender]
        assert decoder(packet) == message


def test_control_kinds_and_fields() -> None:
    documented = {}
    for kind, described in rows(section("Control")):
        pairs = [p.split(": ") for p in described.split(", ") if p]
        documented[kind] = dict(pairs)
    code = {
        kind: {name: typ.__name__ for name, typ in named.items()}
        for kind, named in control._FIELDS.items()
    }
    assert documented == code


@pytest.mark.parametrize("number", [0, 1, 3, -1, "2", None])
def test_another_version_is_named_as_such(number: object) -> None:
    rid = bytes(16)
    frames = [
        (data.decode_data_plane, encode([number, 1, 1, 1, [], []])),
        (client.decode_to_dispatcher, encode([number, 12, rid])),
        (client.decode_to_client, encode([number, 20, rid, 1, [], 0])),
        (grants.decode_from_client, encode([number, 30, rid])),
        (grants.decode_from_dispatcher, encode([number, 41, 0, 1, ""])),
        (control.decode_control, encode({"v": number, "k": "drain"})),
    ]
    for decoder, frame in frames:
        with pytest.raises(WireError) as info:
            decoder(frame)
        assert info.value.code == "UNSUPPORTED_VERSION"


@pytest.mark.parametrize("n", [0, 1, 6, 15, 16, 70_000])
def test_joined_parts_are_the_list_of_them(n: int) -> None:
    values = [[1, "x", None, {"a": b"b"}, -(2**40)][i % 5] for i in range(n)]
    assert joined([encode(v) for v in values]) == encode(values)
