"""Everything killed at once under load: what is left then, and when does it serve again?"""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable
from contextlib import ExitStack, suppress
from pathlib import Path

import numpy as np
import psutil

from blockflow.bench.chaos.watch import bearers, marked
from blockflow.bench.demo.server import Server
from blockflow.bench.fuzz.run import JsonRest
from blockflow.bench.reliability import figures as names
from blockflow.bench.reliability.figures import timed
from blockflow.bench.results import Figure
from blockflow.client import Client
from blockflow.core.errors import BlockFlowError
from blockflow.core.model import TensorSpec
from blockflow.repository.echo import save_echo
from blockflow.repository.repository import BlockRepository

TASK = "t"
_X = np.ones((1, 4), np.float32)
_START_S = 120.0


def measure(folder: Path, rounds: int, say: Callable[[str], None]) -> list[Figure]:
    """Start, load, kill all, start again, ``rounds`` times."""
    repository = BlockRepository(folder / "blocks")
    for name in ("a", "b"):
        save_echo(repository, name, TensorSpec("float32", ("rows", 4)))
    left, back_ms = 0, []
    with ExitStack() as stack:
        server, mark = _begin(stack, folder)
        server.rest.post(
            "/v1/system-update",
            {"blocks": ["a", "b"], "tasks": {TASK: ["a", "b"]}},
            timeout_s=_START_S,
        )
        for turn in range(rounds):
            say(f"everything killed, {turn + 1} of {rounds}")
            family = _kill_all(server)
            begin = time.monotonic()
            old, old_mark = server, mark
            server, mark = _begin(stack, folder)
            with Client(server.client_address) as client:
                client.wait_ready([TASK], timeout_s=_START_S)
                client.infer(TASK, _X)
            back_ms.append(1e3 * (time.monotonic() - begin))
            old.stop()  # reaps what was killed
            # Who was started while the others were killed is in no list.
            strays = {p for p in family if p.is_running()} | bearers(old_mark)
            left += old.run_dir.exists() + len(strays)
    return [
        Figure.of(names.LEFT, names.AFTER_ALL, float(left), "1", rounds),
        timed(names.BACK, "all", back_ms),
    ]


def _begin(stack: ExitStack, folder: Path) -> tuple[Server, str]:
    """A server, and the mark of all its processes."""
    with marked() as mark:
        return _start(stack, folder), mark


def _start(stack: ExitStack, folder: Path) -> Server:
    server = stack.enter_context(Server(folder / "blocks", folder, JsonRest))
    server.start()
    return server


def _kill_all(server: Server) -> list[psutil.Process]:
    """SIGKILL for the control plane and all below it while requests pass; those processes."""
    stop = threading.Event()
    asking = threading.Thread(target=_ask, args=(server.client_address, stop))
    asking.start()
    try:
        time.sleep(0.5)
        root = psutil.Process(server.pid)
        family = [root, *root.children(recursive=True)]
        for process in family:
            with suppress(ProcessLookupError):
                os.kill(process.pid, signal.SIGKILL)
    finally:
        stop.set()
        asking.join()
    psutil.wait_procs(family[1:], timeout=10)
    return family


def _ask(address: str, stop: threading.Event) -> None:
    with Client(address) as client:
        while not stop.is_set():
            with suppress(BlockFlowError):
                client.infer(TASK, _X, deadline_s=1.0)
