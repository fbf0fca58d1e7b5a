"""Birth certificates reach the new process whole: nothing in these is as it would be by default."""

from __future__ import annotations

import json
from dataclasses import MISSING, fields
from typing import Any

from blockflow.core.launchspec import DispatcherLaunch, StageSpec, WorkerLaunch
from blockflow.core.model import BlockInfo, Contract, TensorSpec

SPEC = TensorSpec("float32", ("rows", 4))
BLOCK = BlockInfo("b", "1", "0" * 64, "pt2", Contract(SPEC, SPEC), 5, 20)
STAGE = StageSpec(
    3,
    BLOCK,
    "eager",
    "bf16",
    {"policy": "window", "rows": 4},
    {"kernels": "own"},
    8,
    250,
    {"rows": [1, 2]},
    2,
)
WORKER = WorkerLaunch(
    "b#0",
    11,
    (STAGE,),
    "/repository",
    "/run",
    "ipc:///run/control",
    "tcp",
    "zeromq",
    "cuda:1",
    2,
    (0, 3),
    1 << 20,
    8,
    1.5,
    "/log",
    2,
    ("onnxruntime",),
    True,
)
DISPATCHER = DispatcherLaunch(
    "dispatcher",
    12,
    "/run",
    "ipc:///run/control",
    ("tcp://127.0.0.1:0", "ipc:///run/clients"),
    "tcp",
    (1, 2),
    1 << 20,
    8,
    16,
    4,
    False,
    1 << 10,
    1.5,
    "/log",
    "/keys",
)


def carried(spec: Any) -> Any:
    for f in fields(spec):
        default = f.default if f.default_factory is MISSING else f.default_factory()
        assert getattr(spec, f.name) != default, f.name
    return type(spec).from_dict(json.loads(json.dumps(spec.to_dict())))


def test_of_a_worker_and_its_blocks() -> None:
    assert carried(STAGE) == STAGE
    assert carried(WORKER) == WORKER


def test_of_a_dispatcher() -> None:
    assert carried(DISPATCHER) == DISPATCHER
