"""Deaths and hangs of real workers: when they are noticed, replaced, and what becomes of requests.

Times are the Manager's own: when he had taken a death in, and when he had published the routes
with the successor.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import psutil

from blockflow.bench.own_system import own_settings
from blockflow.bench.reliability import figures as names
from blockflow.bench.reliability.figures import counted, timed
from blockflow.bench.reliability.possessions import Possessions, family, look, settled
from blockflow.bench.results import Figure
from blockflow.client import Client
from blockflow.control.fleet import Crash, Life
from blockflow.control.system import System
from blockflow.core.errors import BlockFlowError
from blockflow.core.lifecycle import State
from blockflow.core.model import TensorSpec
from blockflow.launch.local import TemplateLauncher
from blockflow.repository.echo import save_echo
from blockflow.repository.repository import BlockRepository
from blockflow.worker.failpoints import ENV

SPEC = TensorSpec("float32", ("rows", 4))
TIMEOUT_MS = 500
_POISON = 666.0
_MATES = 7
_WAIT_S = 120.0
_DEADLINE_S = 60.0
_POINTS = {names.STUCK: "before_forward", names.FROZEN: "after_forward"}
_ACTIONS = {names.STUCK: "spin-once", names.FROZEN: "freeze-once"}


@dataclass(frozen=True, slots=True)
class Plan:
    """How many workers of each kind there are, and how often each is hit: a worker that has died
    five times within a minute would be given up."""

    workers: Mapping[str, int]
    times: int
    poisons: int = 2

    def blocks(self, kind: str) -> list[str]:
        return [f"{kind.split()[0]}{i}" for i in range(self.workers[kind])]


FULL = Plan({names.KILLED: 4, names.STOPPED: 3, names.STUCK: 3, names.FROZEN: 2}, 3)
QUICK = Plan({names.KILLED: 1, names.STUCK: 1}, 1, 1)
FRAGILE = "fragile"


@dataclass(frozen=True, slots=True)
class Death:
    """One worker's end and its successor's begin; nanoseconds on the monotonic clock."""

    begin_ns: int
    ready_ns: int
    crash: Crash
    life: Life

    @property
    def noticed_ms(self) -> float:
        return (self.crash.at_ns - self.begin_ns) / 1e6

    @property
    def replaced_ms(self) -> float:
        return (self.ready_ns - self.begin_ns) / 1e6

    @property
    def load_ms(self) -> float:
        """What loading and warming up took: a large model's time, not supervision's."""
        return (self.life.load_ms or 0.0) + (self.life.warm_ms or 0.0)


@contextmanager
def running(plan: Plan, folder: Path) -> Iterator[System]:
    """A system with a worker per block, some with a place where they hang when told to."""
    repository = BlockRepository(folder / "blocks")
    blocks: list[dict[str, Any]] = []
    for kind in plan.workers:
        for name in plan.blocks(kind):
            save_echo(repository, name, SPEC)
            block: dict[str, Any] = {"name": name}
            if kind == names.STUCK:
                block["timeout_ms"] = TIMEOUT_MS
            blocks.append(block)
    save_echo(repository, FRAGILE, SPEC, settings={"crash_on_value": _POISON})
    batching = {"policy": "window", "max_rows": 8, "max_delay_ms": 200}
    blocks.append({"name": FRAGILE, "replicas": 2, "batching": batching})
    with (
        armed_launcher() as launcher,
        System(own_settings(folder), launcher=launcher) as system,
    ):
        for point in _POINTS.values():
            disarm(system, point)
        tasks = {b["name"]: [b["name"]] for b in blocks}
        system.apply({"blocks": blocks, "tasks": tasks})
        yield system


@contextmanager
def armed_launcher() -> Iterator[TemplateLauncher]:
    """Its workers may be made to stop at points on their way, see :func:`arm`."""
    before = os.environ.get(ENV)
    os.environ[ENV] = ",".join(f"{point}={_ACTIONS[kind]}" for kind, point in _POINTS.items())
    launcher = TemplateLauncher()
    try:
        launcher.start()  # it keeps the environment that it was started with
        launcher.wait_ready()
        yield launcher
    finally:
        launcher.close()
        if before is None:
            del os.environ[ENV]
        else:
            os.environ[ENV] = before


def disarm(system: System, point: str) -> None:
    """Leave the mark of a failpoint that has been used: nobody stops there."""
    (system.run_dir / f"failpoint-{point}").touch()


def arm(system: System, point: str) -> None:
    """The next one who gets there stops, and leaves the mark again."""
    (system.run_dir / f"failpoint-{point}").unlink()


def measure(system: System, plan: Plan, say: Callable[[str], None]) -> list[Figure]:
    """Let workers die and hang in all ways; what is left after that."""
    every_block = [FRAGILE, *(name for kind in plan.workers for name in plan.blocks(kind))]
    deaths: dict[str, list[Death]] = {}
    asked = answered = 0
    with Client(system.client_endpoint) as client:
        client.wait_ready(every_block)
        for name in every_block:  # connections are made for a first request
            for _ in range(4):
                client.infer(name, _value(0.0))
        before = _see(system)
        for turn in range(plan.times):
            for kind in plan.workers:
                say(f"{kind}, {turn + 1} of {plan.times}")
                for name in plan.blocks(kind):
                    death, right = _hit(system, client, kind, name)
                    deaths.setdefault(kind, []).append(death)
                    asked += kind in _POINTS
                    answered += right
        say("poison")
        poisons = [_poison(system, client, turn) for turn in range(plan.poisons)]
        for name in every_block:
            client.infer(name, _value(0.0))
        died = sum(map(len, deaths.values())) + sum(p[2] for p in poisons)
        left = settled(names.AFTER_DEATHS, died, before, lambda: _see(system))
    found = [f for kind, ends in deaths.items() for f in _death_figures(kind, ends)]
    every = [d for ends in deaths.values() for d in ends]
    return [
        *found,
        timed(names.PROBE, "all", [d.life.probe_ms for d in every]),
        counted(names.PROBED, sum(d.life.probe_ms > 0 for d in every), len(every)),
        counted(names.AGAIN, answered, asked),
        counted(names.POISONED, sum(p[0] for p in poisons), len(poisons)),
        counted(names.MATES, sum(p[1] for p in poisons), _MATES * len(poisons)),
        counted(names.DIED_OF_IT, max(p[2] for p in poisons), len(poisons)),
        left,
    ]


def _death_figures(kind: str, ends: list[Death]) -> list[Figure]:
    noticed = [d.noticed_ms for d in ends]
    if kind == names.STUCK:
        # Since the forward began, and beyond what it was allowed.
        noticed = [d.crash.work[0].took_ms - TIMEOUT_MS for d in ends if d.crash.work]
    return [
        timed(names.NOTICED, kind, noticed),
        timed(names.REPLACED, kind, [d.replaced_ms for d in ends]),
        timed(names.BEYOND_LOAD, kind, [d.replaced_ms - d.load_ms for d in ends]),
    ]


def _hit(system: System, client: Client, kind: str, name: str) -> tuple[Death, bool]:
    """One worker; whether the request that it hung with was answered all the same."""
    replica = f"{name}#0"
    old = system.commands.worker(replica)
    if kind in _POINTS:
        arm(system, _POINTS[kind])
        begin = time.monotonic_ns()
        pending = client.submit(name, _value(1.0), deadline_s=_DEADLINE_S)
        death = _successor(system, old, begin)
        return death, bool(np.array_equal(pending.result().value, _value(1.0)))
    begin = time.monotonic_ns()
    os.kill(old["pid"], signal.SIGKILL if kind == names.KILLED else signal.SIGSTOP)
    return _successor(system, old, begin), False


def _successor(system: System, old: Mapping[str, Any], begin_ns: int) -> Death:
    """Wait until everything is ready again, and the worker another one."""
    manager = system.manager
    realm = manager.brain.realm

    def settled() -> Death | None:
        replica = next(r for r in manager.brain.crew.fleet if r.name == old["name"])
        life, crash = replica.life, replica.crash
        if life.incarnation <= old["incarnation"] or life.state is not State.READY or not crash:
            return None
        if realm.reasons_not_ready():
            return None
        return Death(begin_ns, time.monotonic_ns(), crash, life)

    found = manager.wait(settled, _WAIT_S)
    if found is None:
        raise BlockFlowError("TIMEOUT", f"{old['name']} was not replaced", where=old["name"])
    return found


def _poison(system: System, client: Client, turn: int) -> tuple[bool, int, int]:
    """A request that kills whoever runs it, amid good ones: whether it was blamed, how many of the
    others were answered, and how many workers died."""
    before = _deaths_of(system, FRAGILE)
    first = 10.0 * turn
    mates = [_value(first + n) for n in range(_MATES)]
    half = _MATES // 2
    pending = [client.submit(FRAGILE, x, deadline_s=_DEADLINE_S) for x in mates[:half]]
    poison = client.submit(FRAGILE, _value(_POISON), deadline_s=_DEADLINE_S)
    pending += [client.submit(FRAGILE, x, deadline_s=_DEADLINE_S) for x in mates[half:]]
    error = poison.exception()
    right = 0
    for x, one in zip(mates, pending, strict=True):
        right += one.exception() is None and np.array_equal(one.result().value, x)
    realm = system.manager.brain.realm
    system.manager.wait(lambda: not realm.reasons_not_ready() or None, _WAIT_S)
    blamed = isinstance(error, BlockFlowError) and error.code == "POISON"
    return blamed, right, _deaths_of(system, FRAGILE) - before


def _deaths_of(system: System, block: str) -> int:
    fleet = system.manager.brain.crew.fleet
    return system.manager.call(lambda: sum(r.ledger.total for r in fleet.hosting(block)))


def _value(number: float) -> np.ndarray[Any, np.dtype[np.float32]]:
    return np.full((1, 4), number, np.float32)


def _see(system: System) -> Possessions:
    """What the processes of the system have, but for this one: in it are clients as well."""
    status = system.status()
    members = [status["dispatcher"], *status["workers"]]
    lives = frozenset(int(m["incarnation"]) for m in members)
    return look(system.run_dir, lives, family(psutil.Process())[1:])
