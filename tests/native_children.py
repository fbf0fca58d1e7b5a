"""What processes of their own do with engines outside torch: the tests of these look from outside.

Each runs in a child of the session's template, which has torch, and of the frameworks none yet.
"""

from __future__ import annotations

import faulthandler
import json
import signal
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from blockflow.engine.base import Engine, EngineOptions
from blockflow.engine.registry import create_engine
from blockflow.repository.repository import BlockRepository


def loaded(spec: Mapping[str, Any], engine: str, **extra: Any) -> Engine:
    repo = BlockRepository(Path(spec["repository"]))
    info = repo.info(spec["block"])
    made = create_engine(info, EngineOptions(extra=extra), engine)
    with repo.artifact(info.name, variant=made.variant) as path:
        made.load(path)
    return made


def own_mib() -> int:
    text = Path("/proc/self/smaps_rollup").read_text()
    return int(text.split("Anonymous:")[1].split()[0]) >> 10


def fills_a_slot(spec: Mapping[str, Any]) -> int:
    """Reports what the engine says that it has copied, and by how much the process has grown."""
    made = loaded(spec, "openvino", **spec["options"])
    x, out = torch.rand(spec["dims"]), torch.zeros(spec["dims"])
    before = own_mib()
    for _ in range(2):
        made.run(x, out)
    Path(spec["report"]).write_text(json.dumps([made.copied.outputs, own_mib() - before]))
    return 0


def meets_many_dims(spec: Mapping[str, Any]) -> int:
    """Reports by how much the process has grown over the lengths from ``spec["longest"]`` down, but
    for the first ``spec["used_to"]``."""
    made = loaded(spec, "openvino")
    for length in range(spec["longest"], spec["longest"] - spec["used_to"], -1):
        made.run(torch.zeros(1, 4, length))
    before = own_mib()
    for length in range(spec["longest"] - spec["used_to"], spec["shortest"], -1):
        made.run(torch.zeros(1, 4, length))
    Path(spec["report"]).write_text(json.dumps(own_mib() - before))
    return 0


def outlives_engines(spec: Mapping[str, Any]) -> int:
    faulthandler.enable()  # it has a signal stack, too
    for name in spec["engines"]:
        engines = [loaded(spec, name) for _ in range(3)]
        for engine in engines:
            engine.close()
        del engine, engines
    heard: list[int] = []
    signal.signal(signal.SIGTERM, lambda number, frame: heard.append(number))
    signal.raise_signal(signal.SIGTERM)
    return 0 if heard == [signal.SIGTERM] else 1
