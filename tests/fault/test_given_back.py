"""After a burst of large requests memory is as it was before: the Dispatcher's heap, and what the
arenas take of a small /dev/shm, whose other users it would be missing to."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import small_disk
from small_disk import told_there
from warm_rig import Warm

from blockflow.client import Client
from blockflow.control.system import System
from blockflow.core.errors import BlockFlowError
from blockflow.core.model import TensorSpec
from blockflow.launch.base import Launcher
from blockflow.repository.echo import save_echo
from blockflow.repository.repository import BlockRepository
from tests.system_rig import served

mount = small_disk.mount
MIB = 1 << 20
ROWS = 30
PATIENCE_S = 20.0


@pytest.fixture(scope="module")
def system(tmp_path_factory: pytest.TempPathFactory, launcher: Launcher) -> Iterator[System]:
    root = tmp_path_factory.mktemp("burst")
    save_echo(BlockRepository(root / "blocks"), "a", TensorSpec("float32", ("rows", MIB // 4)))
    with served(root, {"blocks": ["a"], "tasks": {"t": ["a"]}}, launcher) as running:
        yield running


def private_bytes(pid: int) -> int:
    """A process's, without shared memory."""
    _, resident, shared = map(int, Path(f"/proc/{pid}/statm").read_text().split()[:3])
    return (resident - shared) * os.sysconf("SC_PAGE_SIZE")


def settles(read: object, below: int) -> int:
    """What ``read`` gives when it is below that, or at the end of patience."""
    end = time.monotonic() + PATIENCE_S
    while (value := read()) >= below and time.monotonic() < end:  # type: ignore[operator]
        time.sleep(0.1)
    return value  # type: ignore[no-any-return]


def burst(system: System, x: np.ndarray, clients: int, pid: int) -> tuple[set[str], int]:
    """Three requests from each of so many clients at once: what came of them, and the most that the
    process had meanwhile."""
    seen: set[str] = set()

    def one() -> None:
        with Client(system.client_endpoint, shared_memory="off") as client:
            for _ in range(3):
                try:
                    answer = client.infer("t", x, deadline_s=60).value
                    seen.add("OK" if np.array_equal(answer, x) else "wrong")
                except BlockFlowError as exc:
                    seen.add(exc.code)

    threads = [threading.Thread(target=one) for _ in range(clients)]
    for thread in threads:
        thread.start()
    most = 0
    for thread in threads:
        while thread.is_alive():
            most = max(most, private_bytes(pid))
            thread.join(0.002)
    return seen, most


@pytest.mark.parametrize(("dtype", "code"), [("float32", "OK"), ("float64", "CONTRACT_MISMATCH")])
def test_the_dispatchers_heap_is_given_back(system: System, dtype: str, code: str) -> None:
    """Of requests that were served, and of those that were refused as soon as they were read."""
    pid = system.status()["dispatcher"]["pid"]
    before = private_bytes(pid)
    seen, most = burst(system, np.ones((ROWS, MIB // 4), dtype), 6, pid)
    assert seen == {code}
    assert most - before > 64 * MIB, "a burst that would show"
    assert settles(lambda: private_bytes(pid) - before, 32 * MIB) < 32 * MIB


SCRIPT = """
import json, os, sys, time
from pathlib import Path

import numpy as np

from blockflow.client import Client
from blockflow.control.settings import ControlSettings
from blockflow.control.system import System
from blockflow.core.errors import BlockFlowError
from blockflow.core.model import TensorSpec
from blockflow.repository.echo import save_echo
from blockflow.repository.repository import BlockRepository

mount, work = Path(sys.argv[1]), Path(sys.argv[2])
MIB = 1 << 20
repository = BlockRepository(work / "blocks")
for name in ("a", "b"):
    save_echo(repository, name, TensorSpec("float32", ("rows", MIB // 4)))
settings = ControlSettings(
    repository=work / "blocks", state_dir=work / "state", run_root=mount, rest_port=0, client_port=0
)


def infer(task, rows):
    x = np.ones((rows, MIB // 4), np.float32)
    try:
        return bool(np.array_equal(client.infer(task, x, deadline_s=5).value, x))
    except BlockFlowError as e:
        return e.code


def in_the_end(task, rows):
    end = time.monotonic() + 25
    while (seen := infer(task, rows)) is not True and time.monotonic() < end:
        time.sleep(0.5)
    return seen


out = {}
with System(settings) as system:
    system.apply({"blocks": ["a", "b"], "tasks": {"ta": ["a"], "tb": ["b"]}})
    with Client(system.client_endpoint) as client:
        out["burst"] = infer("ta", 6)
        out["another, at once"] = infer("tb", 6)
        out["another, later"] = in_the_end("tb", 6)
        out["the first, later"] = in_the_end("ta", 6)
print(json.dumps(out))
"""


def test_one_blocks_burst_does_not_take_a_small_shm_from_the_others(
    tmp_path: Path, warm: Warm, mount: Path
) -> None:
    """16 MiB: room for the burst of one task in two arenas, and not for a third one."""
    told, errors = told_there(warm, SCRIPT, mount, "size=16m", str(tmp_path))
    assert told == {
        "burst": True,
        "another, at once": "NO_SPACE",
        "another, later": True,
        "the first, later": True,
    }, errors
