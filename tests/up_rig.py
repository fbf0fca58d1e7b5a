"""``blockflow up`` as a process of its own, for tests that kill it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import psutil

from blockflow.client.pending import PendingRequest
from blockflow.core.errors import BlockFlowError

GONE_S = 10.0
ANSWER_S = 60.0


def command(root: Path, *more: str) -> list[str]:
    return [
        *(sys.executable, "-m", "blockflow", "up", "--json", "--port", "0"),
        *("--client-port", "0", "--repository", str(root / "blocks")),
        *("--state-dir", str(root / "state"), *more),
    ]


@contextmanager
def up(
    root: Path,
    *more: str,
    env: Mapping[str, str] | None = None,
    before: Sequence[str] = (),
    start: Callable[..., subprocess.Popen[Any]] = subprocess.Popen,
) -> Iterator[tuple[subprocess.Popen[str], dict[str, Any]]]:
    """A running system and its announcement; killed at the end if the test did not end it.

    ``before`` is a command that runs the command that follows it; ``start`` may be another than
    ``Popen`` (``warm_rig.Warm.popen``).
    """
    with (root / "err").open("w") as err:
        process = start(
            [*before, *command(root, *more)],
            stdout=subprocess.PIPE,
            stderr=err,
            text=True,
            env={**os.environ, **(env or {})},
        )
    try:
        assert process.stdout is not None
        line = process.stdout.readline()
        if not line.endswith("}\n"):  # why it did not start
            raise AssertionError(line + process.stdout.read() + (root / "err").read_text())
        yield process, json.loads(line)
    finally:
        process.kill()
        process.wait()
        if process.stdout is not None:
            process.stdout.close()


def refused(process: subprocess.Popen[str]) -> tuple[str, str]:
    """What a start says that ends with status 2 by itself: output (if it is read) and errors."""
    try:
        output, errors = process.communicate(timeout=60)
    finally:
        process.kill()
        process.wait()
    assert process.returncode == 2
    return output, errors


def without_torch(folder: Path) -> dict[str, str]:
    """The environment of a system that has no torch, whose import is most of what a start costs.

    For tests of systems that start no worker: nobody else needs it, and the template goes without
    what is not there. ``folder`` gets a folder with the module that is found instead.
    """
    instead = folder / "without"
    instead.mkdir(exist_ok=True)
    (instead / "torch.py").write_text("raise ImportError('there is no torch here')\n")
    before = os.environ.get("PYTHONPATH", "")
    return {"PYTHONPATH": os.pathsep.join(filter(None, (str(instead), before)))}


def family(pid: int) -> list[psutil.Process]:
    return psutil.Process(pid).children(recursive=True)


def gone(processes: list[psutil.Process], run_dir: Path) -> bool:
    """All of them ended and the run directory vanished, within the time."""
    _, alive = psutil.wait_procs(processes, GONE_S)
    end = time.monotonic() + GONE_S
    while run_dir.exists() and time.monotonic() < end:
        time.sleep(0.02)
    return not alive and not run_dir.exists()


def outcome(request: PendingRequest[Any], right: Any) -> str:
    """``OK`` with the ``right`` value, else the code."""
    try:
        assert np.array_equal(request.result(ANSWER_S).value, right)
    except BlockFlowError as e:
        return e.code
    return "OK"
