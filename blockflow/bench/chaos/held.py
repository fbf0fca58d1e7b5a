"""Held: what a system still keeps when nobody asks for anything any more.

A slot that no reader gives back, or a credit, costs no request its reply, and nobody would notice
until there are none left.
"""

from __future__ import annotations

import re
import time
from collections.abc import Collection, Iterable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from blockflow.bench.chaos.remote import RemoteSystem
from blockflow.core.errors import BlockFlowError
from blockflow.tensormq.arena import DEVICE_BIT

SPARE_S = 15.0
"""A handle that was lost on its way is taken back some seconds after its request was due."""

_LOOK_S = 0.25
_OF_A_PROCESS = re.compile(r"(?:arena|marks|work)-(\d+)")


def held(processes: Iterable[Mapping[str, Any]]) -> list[str]:
    """Of workers and Dispatcher, as REST tells of them."""
    out: list[str] = []
    for process in processes:
        name = process.get("name", "?")
        if slots := (process.get("process") or {}).get("slots_used"):
            out.append(f"{name} has {slots} slots in use")
        if requests := (process.get("kpi") or {}).get("inflight"):
            out.append(f"{name} has {requests} requests in flight")
        for stage in process.get("stages") or ():
            if waiting := (stage.get("kpi") or {}).get("queue"):
                out.append(f"{name} has {waiting} requests that wait for {stage['block']}")
    return out


def strays(names: Iterable[str], known: Collection[int]) -> list[str]:
    """The files among ``names``, of a run directory, that belong to none of these incarnations."""
    found = [(name, _OF_A_PROCESS.fullmatch(name)) for name in sorted(names)]
    return [name for name, of in found if of and int(of[1]) & ~DEVICE_BIT not in known]


def kept(system: RemoteSystem, patience_s: float) -> list[str]:
    """What a system keeps that was asked for the last time just now, and should not have after
    ``patience_s``; in words."""
    end = time.monotonic() + patience_s
    while True:
        out = ["it could not be asked for what it still holds"]
        with suppress(BlockFlowError):  # it is too busy to say
            out = _look(system)
        if not out or time.monotonic() >= end:
            return out
        time.sleep(_LOOK_S)


def _look(system: RemoteSystem) -> list[str]:
    commands = system.commands
    # The files first: whoever comes later has none among them.
    names = [path.name for path in Path(system.run_dir).iterdir()]
    processes = [*commands.workers(), commands.worker("dispatcher")]
    known = {p.get("incarnation", 0) for p in processes}
    return held(processes) + [f"a file of the dead: {name}" for name in strays(names, known)]
