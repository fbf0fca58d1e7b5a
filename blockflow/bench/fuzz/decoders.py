"""Decoders: everything that turns foreign bytes into values, with valid samples to begin from."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from blockflow.bench.fuzz.decoder import Decoder
from blockflow.bench.fuzz.documents import BLOCK, document_decoders
from blockflow.control.rest.body import parse_json
from blockflow.core.errors import BlockFlowError
from blockflow.core.model import BlockInfo
from blockflow.core.onnxfile import ExternalData, NotOnnx, refuse_external
from blockflow.core.routing import merge_paths
from blockflow.core.topology import parse_topology
from blockflow.launch.child import Order
from blockflow.repository.manifest import parse_manifest
from blockflow.wire import client, control, data, grants
from blockflow.wire.tensor import Handle, TensorDesc

DIMS = (1, 4)
_ORDER = Order("a.b:c", {"cores": [0]}, "a#0")
_BODY = {"blocks": ["a", {"name": "b", "replicas": 2}], "tasks": {"t": ["a", "b"]}}


def item(stage: int = 1) -> data.Item:
    """A request's item at a stage."""
    return data.Item(bytes(range(16)), 1, 1, merge_paths([[stage]])[0], 0, 1, 10_000)


def data_frames() -> list[bytes]:
    """What workers and Dispatcher send each other."""
    sender, stage = 999, 1
    handle = Handle(sender, 0, 0, 1, 0)
    failure = BlockFlowError("BLOCK_FAILED", "it failed", where="a")
    return [
        data.encode_data(data.Data(sender, 1, TensorDesc("float32", DIMS), (item(stage),))),
        data.encode_data(data.Data(sender, 1, TensorDesc("float32", DIMS, handle), (item(stage),))),
        data.encode_failure(data.Failure(sender, 1, failure, (item(stage),))),
        data.encode_withdraw(data.Withdraw(sender, ((bytes(range(16)), 1),))),
    ]


def request_frames(task: str = "t") -> list[bytes]:
    """What clients send."""
    rid, desc = bytes(range(16)), TensorDesc("float32", DIMS)
    messages: list[client.ToDispatcher] = [
        client.Request(rid, (task,), 5000, desc),
        client.Request(rid, (task,), 5000, desc, (1, 0)),
        client.Cancel(rid),
        client.Describe(rid),
        client.Invite(rid),
    ]
    return [client.encode_to_dispatcher(m) for m in messages]


def control_frames() -> list[bytes]:
    """What processes send the Controller, and it them."""
    incarnation, error = 1, {"code": "INTERNAL", "message": "x"}
    messages: list[control.ControlMessage] = [
        control.Hello("worker", "a#0", incarnation, 1, "0"),
        control.Ready(incarnation, "ipc:///nowhere"),
        control.StartFailed(incarnation, error),
        control.Pong(incarnation, 7, "ready", 6),
        control.Stats(incarnation, 1, [], {}),
        control.RoutesApplied(incarnation, 1),
        control.Drained(incarnation, 1),
        control.PolicyRefused(incarnation, 1, 1, {"policy": "none"}, error),
        control.Routes({"version": 1, "epoch": 1, "stages": {}, "tasks": []}),
        control.Ping(7),
        control.Drain(),
        control.Undrain(),
        control.Stop(),
        control.Monitor(4.0),
        control.PeerGone(incarnation, [bytes(18)]),
        control.SetPolicy(1, {"policy": "none"}),
        control.SetThreads(1, 2),
    ]
    return [control.encode_control(m) for m in messages]


def reply_frames() -> list[bytes]:
    """What the Dispatcher sends clients."""
    rid, desc = bytes(range(16)), TensorDesc("float32", DIMS)
    timings = (client.Timing("a", data.HopTiming(0, 1, 2, 3, 4)),)
    failure = BlockFlowError("BLOCK_FAILED", "it failed", where="a")
    messages: list[client.ToClient] = [
        client.Reply(rid, 1, (client.TaskResult("t", desc, None, timings, 1, 1, 1),), 1),
        client.Reply(
            rid, 1, (client.TaskResult("t", desc, None, timings, place=client.Place(1, 0, 1)),), 1
        ),
        client.Reply(rid, 1, (client.TaskResult("t", None, failure),), 1),
        client.Description(rid, 1, ({"name": "t"},), {"max_inflight": 8}),
        client.Invitation(rid, "/nowhere", bytes(client.TOKEN_BYTES), ""),
        client.Invitation(rid, "", b"", "not on this host"),
    ]
    return [client.encode_to_client(m) for m in messages]


def side_frames() -> list[bytes]:
    """What clients say on the side connection for granted memory."""
    up = next(iter(grants.Direction))
    return [grants.encode_side(grants.Attach(bytes(16))), grants.encode_side(grants.Ask(up, 65536))]


def body_frames() -> list[bytes]:
    """REST bodies."""
    return [json.dumps(b).encode() for b in (_BODY, {"on": True, "hz": 4.0}, {"file": "x"}, {})]


def onnx_files() -> list[bytes]:
    """A model of one weight."""
    weight = b"\x08\x04\x10\x01\x42\x01w\x4a\x10" + bytes(16)
    graph = bytes((0x2A, len(weight))) + weight
    return [b"\x08\x09" + bytes((0x3A, len(graph))) + graph]


def decoders() -> Mapping[str, Decoder]:
    """All of them, by name."""
    up = next(iter(grants.Direction))
    return {
        "data plane": Decoder(data.decode_data_plane, data_frames()),
        "client to dispatcher": Decoder(client.decode_to_dispatcher, request_frames()),
        "dispatcher to client": Decoder(client.decode_to_client, reply_frames()),
        "control": Decoder(control.decode_control, control_frames()),
        "side, from a client": Decoder(grants.decode_from_client, side_frames()),
        "side, to a client": Decoder(
            grants.decode_from_dispatcher,
            [
                grants.encode_side(grants.Granted(1, up, 65536, 4)),
                grants.encode_side(grants.Refused(up, 65536, "full")),
            ],
        ),
        "launch order": Decoder(Order.from_bytes, [_ORDER.to_bytes()]),
        "manifest": Decoder(_manifest, [_MANIFEST]),
        "REST body": Decoder(parse_json, body_frames()),
        "topology": Decoder(_topology, body_frames()[:1]),
        "ONNX file": Decoder(refuse_external, onnx_files(), (ExternalData, NotOnnx)),
        **document_decoders(),
    }


def _manifest(raw: bytes) -> object:
    return parse_manifest(raw, where="fuzz", folder="a")


def _topology(raw: bytes) -> object:
    return parse_topology(parse_json(raw)[0], _lookup)


def _lookup(name: str) -> BlockInfo:
    return replace(BLOCK, name=name)


def _tensor() -> dict[str, Any]:
    return {"dtype": "float32", "dims": ["rows", 4], "ranges": {}}


_MANIFEST = json.dumps(
    {
        "name": "a",
        "version": "1",
        "format": "echo",
        "artifact": "x.echo",
        "sha256": "0" * 64,
        "size": 1,
        "contract": {"input": _tensor(), "output": _tensor()},
        "parameters": 0,
        "state_bytes": 0,
        "source": {"model": "echo"},
        "created": "2026-01-01T00:00:00+00:00",
    }
).encode()
