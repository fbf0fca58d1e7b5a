"""A whole system whose state's disk takes nothing more: it serves, replaces the dead, and says why
it takes no update."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from small_disk import on_small_disk

SCRIPT = """
import errno, json, os, signal, sys, time
from pathlib import Path

import numpy as np

from blockflow.client import Client
from blockflow.control.system import System
from blockflow.core.errors import BlockFlowError
from blockflow.core.model import TensorSpec
from blockflow.repository.echo import save_echo
from blockflow.repository.repository import BlockRepository

mount, work, kind = Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3]
X = np.ones((1, 4), np.float32)
repository = BlockRepository(work / "blocks")
for name in ("a", "b", "c"):
    save_echo(repository, name, TensorSpec("float32", ("rows", 4)))


def fill():
    if kind == "inodes":
        for n in range(100_000):
            (mount / f"ballast{n}").touch()
    with (mount / "ballast").open("wb", buffering=0) as f:
        while True:
            f.write(bytes(4096))


def empty():
    for path in mount.glob("ballast*"):
        path.unlink()


def apply(*blocks):
    try:
        told = system.apply({"blocks": list(blocks), "tasks": {"t": list(blocks)}})
        return told["update"]["state"]
    except BlockFlowError as e:
        return e.code


def worker(name):
    return next(w for w in system.commands.workers() if w["name"] == name)


def replaced(name):
    old = worker(name)
    os.kill(old["pid"], signal.SIGKILL)
    deadline = time.monotonic() + 30
    while time.monotonic() < deadline:
        now = worker(name)
        if now["incarnation"] > old["incarnation"] and now["state"] == "ready":
            return True
        time.sleep(0.01)
    return now


out = {}
with System(
    repository=work / "blocks", state_dir=mount / "state", rest_port=0, client_port=0
) as system:
    out["applied"] = apply("a", "b")
    with Client(system.client_endpoint) as client:
        try:
            fill()
        except OSError as e:
            out["full"] = errno.errorcode[e.errno]
        out["new worker, full"] = apply("a", "c")
        out["no new worker, full"] = apply("a")
        out["epoch"] = system.commands.epoch()["epoch"]
        out["replaced, full"] = [replaced("a#0") for _ in range(2)]
        out["served"] = bool(np.array_equal(client.infer("t", X, deadline_s=30).value, X))
        out["warned"] = [w for w in system.status()["warnings"] if "no log file" in w]
        empty()
        out["replaced"] = replaced("a#0")
        out["logs"] = (mount / "state/logs").joinpath(
            f"a#0.{worker('a#0')['incarnation']}.log").exists()
        out["new worker"] = apply("a", "c")
        out["served then"] = bool(np.array_equal(client.infer("t", X, deadline_s=30).value, X))
print(json.dumps(out))
"""


@pytest.mark.parametrize("kind", ["inodes", "bytes"])
def test_a_system_whose_disk_is_full(tmp_path: Path, kind: str) -> None:
    """A small tmpfs in a mount namespace of its own."""
    mount = tmp_path / "disk"
    mount.mkdir()
    base = on_small_disk(mount, "size=1m,nr_inodes=200")
    done = subprocess.run(
        [*base, sys.executable, "-c", SCRIPT, str(mount), str(tmp_path), kind],
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout.splitlines()[-1])
    warned = told.pop("warned")
    assert told == {
        "applied": "done",
        "full": "ENOSPC",
        "new worker, full": "NO_SPACE",
        "no new worker, full": "NO_SPACE",
        "epoch": 1,
        "replaced, full": [True, True],
        "served": True,
        "replaced": True,
        "logs": True,
        "new worker": "done",
        "served then": True,
    }, done.stderr
    # A file without content takes an inode and no space.
    assert len(warned) == (kind == "inodes"), done.stderr
