"""Given up: a worker that dies again and again, and one that cannot load, are not started for ever;
requests for them are refused at once, and the others are served meanwhile."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from blockflow.bench.own_system import own_settings
from blockflow.bench.reliability import figures as names
from blockflow.bench.reliability.figures import counted
from blockflow.bench.results import Figure
from blockflow.client import Client
from blockflow.control.supervision import WORKER_POLICY
from blockflow.control.system import System
from blockflow.control.update import Kind
from blockflow.core.errors import BlockFlowError
from blockflow.core.model import TensorSpec
from blockflow.repository.echo import save_echo
from blockflow.repository.repository import BlockRepository

SPEC = TensorSpec("float32", ("rows", 4))
DYING, SPOILT, OTHER = "dying", "spoilt", "other"
_X = np.ones((1, 4), np.float32)
_WAIT_S = 60.0
_QUIET_S = 3.0
"""As long as a pause before a start may be by then: nobody comes after it either."""


@contextmanager
def running(folder: Path) -> Iterator[System]:
    """A system of three tasks that have nothing to do with each other."""
    repository = BlockRepository(folder / "blocks")
    for name in (DYING, SPOILT, OTHER):
        save_echo(repository, name, SPEC)
    with System(own_settings(folder)) as system:
        blocks = [DYING, SPOILT, OTHER]
        system.apply({"blocks": blocks, "tasks": {b: [b] for b in blocks}})
        yield system


@dataclass(slots=True)
class Bystander:
    """A client of another task, for as long as it is not told to stop."""

    address: str
    asked: int = 0
    failed: int = 0
    _stop: threading.Event = field(default_factory=threading.Event)

    def ask(self) -> None:
        with Client(self.address) as client:
            while not self._stop.wait(0.01):
                self.asked += 1
                try:
                    client.infer(OTHER, _X, deadline_s=_WAIT_S)
                except BlockFlowError:
                    self.failed += 1

    @contextmanager
    def asking(self) -> Iterator[None]:
        thread = threading.Thread(target=self.ask)
        thread.start()
        try:
            yield
        finally:
            self._stop.set()
            thread.join()


def measure(system: System, folder: Path, say: Callable[[str], None]) -> list[Figure]:
    """Kill one worker until it is given up, spoil another one's artifact and kill it once."""
    bystander = Bystander(system.client_endpoint)
    with Client(system.client_endpoint) as client:
        client.wait_ready([DYING, SPOILT, OTHER])
        with bystander.asking():
            say("a worker that dies again and again")
            loop = [
                counted(names.CRASHES, kill_until_given_up(system, DYING), WORKER_POLICY.crashes),
                counted(names.STAYS, stays(system, DYING), 1),
                counted(names.REFUSED, refused(client, DYING), 1),
            ]
            say("a worker that cannot load")
            spoil(folder / "blocks" / SPOILT)
            before = starts(system)
            kill(system, SPOILT)
            wait_for(system, SPOILT, "failed")
            again = stays(system, SPOILT) and refused(client, SPOILT)
            loads = [counted(names.LOADS, starts(system) - before, 1, {"stays": again})]
        system.commands.operate(Kind.RESTART, DYING)
        client.infer(DYING, _X, deadline_s=_WAIT_S)
    return [
        *loop,
        *loads,
        counted(names.BYSTANDERS, bystander.asked - bystander.failed, bystander.asked),
    ]


def kill_until_given_up(system: System, block: str) -> int:
    """As soon as it is ready again; how often that was, twice what is allowed at most."""
    for count in range(1, 2 * WORKER_POLICY.crashes):
        kill(system, block)
        if wait_for(system, block, "failed", "ready") == "failed":
            return count
    return 2 * WORKER_POLICY.crashes


def kill(system: System, block: str) -> None:
    """Its worker; returns when that was noticed."""
    worker = system.commands.worker(f"{block}#0")
    os.kill(worker["pid"], signal.SIGKILL)
    life, end = worker["incarnation"], time.monotonic() + _WAIT_S
    while time.monotonic() < end:
        now = system.commands.worker(f"{block}#0")
        if now["incarnation"] != life or now["state"] != "ready":
            return
        time.sleep(0.005)
    raise BlockFlowError("TIMEOUT", f"nobody noticed the death of {block}", where=block)


def wait_for(system: System, block: str, *states: str) -> str:
    """The first of the states that it is in.

    Raises:
        BlockFlowError: TIMEOUT, in none.
    """
    end = time.monotonic() + _WAIT_S
    while time.monotonic() < end:
        state = str(system.commands.worker(f"{block}#0")["state"])
        if state in states:
            return state
        time.sleep(0.005)
    raise BlockFlowError("TIMEOUT", f"{block} is {state}", where=block)


def stays(system: System, block: str) -> bool:
    """Nobody starts it after a while either."""
    before = starts(system)
    time.sleep(_QUIET_S)
    state = system.commands.worker(f"{block}#0")["state"]
    return bool(state == "failed" and starts(system) == before)


def starts(system: System) -> int:
    """The incarnation that was given last: each start takes one."""
    status = system.status()
    return max(int(w["incarnation"]) for w in (status["dispatcher"], *status["workers"]))


def refused(client: Client, block: str) -> bool:
    """A request is not left to wait for its deadline."""
    begin = time.monotonic()
    try:
        client.infer(block, _X, deadline_s=_WAIT_S)
    except BlockFlowError as e:
        return e.code == "BLOCK_UNAVAILABLE" and time.monotonic() - begin < _QUIET_S
    return False


def spoil(folder: Path) -> None:
    """Change a byte of each artifact below it: whoever loads it next will see."""
    for path in folder.rglob("*"):
        if path.is_file() and path.suffix != ".json" and not path.is_symlink():
            path.chmod(0o600)
            path.write_bytes(path.read_bytes() + b" ")
