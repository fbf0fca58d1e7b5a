"""Roles: one process of each kind is killed, alone; what do the others still hold of it?

The system is one that a user would start (``blockflow up``), so that its control plane can die too.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import psutil

from blockflow.bench.chaos.faults import Injector
from blockflow.bench.chaos.kills import strike
from blockflow.bench.chaos.plan import KINDS, Fault
from blockflow.bench.chaos.remote import RemoteSystem
from blockflow.bench.reliability.figures import ROLES, TEMPLATE, WORKER
from blockflow.bench.reliability.possessions import Possessions, family, look, settled
from blockflow.bench.results import Figure
from blockflow.client import Client
from blockflow.core.errors import BlockFlowError
from blockflow.core.model import TensorSpec
from blockflow.repository.echo import save_echo
from blockflow.repository.repository import BlockRepository

TOPOLOGY: Mapping[str, Any] = {"blocks": ["a", "b"], "tasks": {"t": ["a", "b"]}}
_X = np.ones((1, 4), np.float32)
_ANSWER_S = 30.0


def measure(
    folder: Path, times: int, say: Callable[[str], None], roles: Sequence[str] = ROLES
) -> list[Figure]:
    """Kill a process of each of the ``roles`` so many ``times``, and look after each death.

    Templates come last: a new one holds more with every process that it launches in place of one
    of its predecessor's, and that is nothing left behind.
    """
    repository = BlockRepository(folder / "blocks")
    for name in TOPOLOGY["blocks"]:
        save_echo(repository, name, TensorSpec("float32", ("rows", 4)))
    system = RemoteSystem(folder)
    found: dict[str, list[Figure]] = {role: [] for role in roles}
    with system:
        system.apply(TOPOLOGY)
        begin = time.monotonic()
        injector = Injector(system, TOPOLOGY, lambda: time.monotonic() - begin, seed=1)
        with Client(system.client_endpoint, connect_timeout_s=_ANSWER_S) as client:
            _ask(client)
            for role in roles:
                for turn in range(times):
                    say(f"{role}, {turn + 1} of {times}")
                    before = see(system)
                    kill(system, injector, role)
                    _ask(client)
                    found[role].append(settled(role, 1, before, lambda: see(system)))
                    if role == TEMPLATE:
                        # One that dies while it imports is left to the next launch: this is it.
                        kill(system, injector, WORKER)
                        _ask(client)
        injector.close()
    return [_sum(series) for series in found.values()]


def _sum(series: Sequence[Figure]) -> Figure:
    """The deaths of one role together."""
    labels = {what: sum(f.labels[what] for f in series) for what in series[0].labels}
    total = sum(f.value for f in series)
    return replace(series[0], value=total, n=len(series), labels=labels)


def see(system: RemoteSystem) -> Possessions:
    """What all processes of the system hold."""
    status = system.commands.status()
    members = [status["dispatcher"], *system.commands.workers()]
    lives = frozenset(int(m["incarnation"]) for m in members)
    return look(system.run_dir, lives, family(psutil.Process(system.pid)))


def kill(system: RemoteSystem, injector: Injector, role: str) -> None:
    """One of them; returns when everything is ready again.

    Raises:
        BlockFlowError: TIMEOUT, it is not.
    """
    kind = next(k for k in KINDS if k.name == role)
    done, ready_s = strike(system, injector, Fault(0.0, kind, 0.5))
    if ready_s is None:
        raise BlockFlowError("TIMEOUT", f"{role}: {done.note or 'not ready again'}", where=role)


def _ask(client: Client) -> None:
    """Until all connections that a request needs are made again."""
    for _ in range(4):
        client.infer("t", _X, deadline_s=_ANSWER_S, retries=8)
