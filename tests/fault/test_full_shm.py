"""A whole system on shared memory that is full: typed errors, it serves on, and recovers."""

from __future__ import annotations

from pathlib import Path

import small_disk
from small_disk import told_there
from warm_rig import Warm

mount = small_disk.mount

SCRIPT = """
import json, os, sys
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
for name in ("a", "b", "c"):
    save_echo(repository, name, TensorSpec("float32", ("rows", MIB // 4)))
settings = ControlSettings(
    repository=work / "blocks", state_dir=work / "state", run_root=mount, rest_port=0, client_port=0
)
out = {}


def infer(rows):
    x = np.ones((rows, MIB // 4), np.float32)
    try:
        return bool(np.array_equal(client.infer("t", x, deadline_s=5).value, x))
    except BlockFlowError as e:
        return e.code


def apply(*blocks):
    try:
        told = system.apply({"blocks": list(blocks), "tasks": {"t": list(blocks)}})
        return told["update"]["state"]
    except BlockFlowError as e:
        return [e.code, e.details.get("cause", {}).get("code")]


def pids():
    return {w["name"]: w["pid"] for w in system.commands.workers()}


with System(settings) as system:
    out["applied"] = apply("a", "b")
    before = pids()
    with Client(system.client_endpoint) as client:
        out["small"] = infer(1)
        free = os.statvfs(mount)
        ballast = mount / "ballast"
        with ballast.open("wb") as f:  # all but a page
            os.posix_fallocate(f.fileno(), 0, (free.f_bavail - 1) * free.f_frsize)
        out["large, full"] = infer(3)
        out["small, full"] = [infer(1) for _ in range(3)]
        out["update, full"] = apply("a", "c")
        out["after it"] = infer(1)
        out["same processes"] = pids() == before
        out["epoch"] = system.commands.epoch()["epoch"]
        ballast.unlink()
        out["large"] = infer(3)
        out["update"] = apply("a", "c")
        out["in the end"] = infer(1)
    run_dir = system.run_dir
out["left"] = [p.name for p in mount.iterdir()]
try:
    with (mount / "ballast").open("wb") as f:
        free = os.statvfs(mount)
        os.posix_fallocate(f.fileno(), 0, free.f_bavail * free.f_frsize)
    System(settings).start()
except BlockFlowError as e:
    out["start, full"] = e.code
(mount / "ballast").unlink()
out["left then"] = [p.name for p in mount.iterdir()]
print(json.dumps(out))
"""


def test_a_system_on_a_full_tmpfs(tmp_path: Path, warm: Warm, mount: Path) -> None:
    """16 MiB in a mount namespace of its own; a ballast file takes what is left of it."""
    told, errors = told_there(warm, SCRIPT, mount, "size=16m", str(tmp_path))
    assert told.pop("large, full") in ("NO_SPACE", "OVERLOADED"), told
    assert told == {
        "applied": "done",
        "small": True,
        "small, full": [True, True, True],
        "update, full": ["UPDATE_FAILED", "NO_SPACE"],
        "after it": True,
        "same processes": True,
        "epoch": 1,
        "large": True,
        "update": "done",
        "in the end": True,
        "left": [],
        "start, full": "NO_SPACE",
        "left then": [],
    }, errors
