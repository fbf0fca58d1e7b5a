"""A whole system whose state's disk takes nothing more: it serves, replaces the dead, and says why
it takes no update."""

from __future__ import annotations

from typing import Any

import pytest
from small_disk import told_there
from warm_rig import Warm

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

mount, work = Path(sys.argv[1]), Path(sys.argv[2])
X = np.ones((1, 4), np.float32)
repository = BlockRepository(work / "blocks")
for name in "abcdef":
    save_echo(repository, name, TensorSpec("float32", ("rows", 4)))


def fill(kind):
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


def worker(block):
    return next(w for w in system.commands.workers() if w["name"] == f"{block}#0")


def replaced(block):
    old = worker(block)
    os.kill(old["pid"], signal.SIGKILL)
    deadline = time.monotonic() + 30
    while time.monotonic() < deadline:
        now = worker(block)
        if now["incarnation"] > old["incarnation"] and now["state"] == "ready":
            return True
        time.sleep(0.01)
    return now


def fate(kind, first, second, third):
    out = {"applied": apply(first, second)}
    epoch = system.commands.epoch()["epoch"]
    with Client(system.client_endpoint) as client:
        try:
            fill(kind)
        except OSError as e:
            out["full"] = errno.errorcode[e.errno]
        out["new worker, full"] = apply(first, third)
        out["no new worker, full"] = apply(first)
        out["epoch stays"] = system.commands.epoch()["epoch"] == epoch
        out["replaced, full"] = [replaced(first) for _ in range(2)]
        out["served"] = bool(np.array_equal(client.infer("t", X, deadline_s=30).value, X))
        out["warned"] = [w for w in system.status()["warnings"] if "no log file" in w]
        empty()
        out["replaced"] = replaced(first)
        out["logs"] = (mount / "state/logs").joinpath(
            f"{first}#0.{worker(first)['incarnation']}.log").exists()
        out["new worker"] = apply(first, third)
        out["served then"] = bool(np.array_equal(client.infer("t", X, deadline_s=30).value, X))
    return out


with System(
    repository=work / "blocks", state_dir=mount / "state", rest_port=0, client_port=0
) as system:
    # A block that crashes too often is given up: each kind has its own.
    out = {kind: fate(kind, *blocks) for kind, blocks in zip(sys.argv[3:], ("abc", "def"))}
print(json.dumps(out))
"""


KINDS = ("bytes", "inodes")
"""What the disk has none left of."""


@pytest.fixture(scope="module")
def fates(tmp_path_factory: pytest.TempPathFactory, warm: Warm) -> dict[str, Any]:
    """What becomes of one system, kind after kind, and what it has written at last. Its state lies
    on a small tmpfs in a mount namespace of its own."""
    root = tmp_path_factory.mktemp("full")
    mount = root / "disk"
    mount.mkdir()
    told, errors = told_there(warm, SCRIPT, mount, "size=1m,nr_inodes=200", str(root), *KINDS)
    return {**told, "log": errors}


@pytest.mark.parametrize("kind", KINDS)
def test_a_system_whose_disk_is_full(fates: dict[str, Any], kind: str) -> None:
    told = dict(fates[kind])
    warned = told.pop("warned")
    assert told == {
        "applied": "done",
        "full": "ENOSPC",
        "new worker, full": "NO_SPACE",
        "no new worker, full": "NO_SPACE",
        "epoch stays": True,
        "replaced, full": [True, True],
        "served": True,
        "replaced": True,
        "logs": True,
        "new worker": "done",
        "served then": True,
    }, fates["log"]
    # A file without content takes an inode and no space.
    assert len(warned) == (kind == "inodes"), fates["log"]
