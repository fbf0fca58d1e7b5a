"""Who outlives the manager: the template ends its children and removes what was in memory."""

from __future__ import annotations

import json
import os
import select
import shutil
import signal
import subprocess
import sys
from pathlib import Path

from blockflow.launch.process import Adoption
from tests.dispatcher_rig import wait_until
from tests.process.test_template import WAIT_S, gone, wait_gone
from tests.worker_rig import private_folder

ROOT = Path(__file__).resolve().parents[2]


MANAGER = """
import json, os, sys, time
from blockflow.launch.local import TemplateLauncher
reports, *removes = sys.argv[1:]
launcher = TemplateLauncher(removes=removes, preload=["msgpack"])
pids = []
for i, then in enumerate(["hang", "deaf"]):
    spec = {"report": os.path.join(reports, f"{i}.json"), "then": then}
    pids.append(launcher.launch("tests.process.test_orphans:hang_or_be_deaf", spec, "w").pid)
print(json.dumps([launcher.template_pid, *pids]), flush=True)
time.sleep(600)
"""


def hang_or_be_deaf(spec: dict[str, str]) -> int:
    """A child: waits at its lifeline as it should, or sleeps and never looks at it."""
    Path(spec["report"]).write_text("up")
    if spec["then"] == "hang":
        os.read(int(os.environ["BLOCKFLOW_LIFELINE_FD"]), 1)
        return 70
    while True:
        select.select([], [], [], 600)


def test_nothing_survives_the_manager(tmp_path: Path) -> None:
    root, used = private_folder("run"), private_folder("used")
    run_dir = root / "run"
    run_dir.mkdir(mode=0o700)
    for folder in (run_dir, used):
        (folder / "a.sock").write_text("")
    manager = subprocess.Popen(
        [sys.executable, "-c", MANAGER, str(tmp_path), str(run_dir), str(used), str(root)],
        stdout=subprocess.PIPE,
        cwd=ROOT,
    )
    assert manager.stdout is not None
    with manager.stdout:
        pids = json.loads(manager.stdout.readline())
    try:
        try:
            wait_until(lambda: len(list(tmp_path.glob("*.json"))) >= 2, WAIT_S)
        finally:
            manager.kill()
            manager.wait()
        wait_gone(*pids)
        wait_until(lambda: not root.exists(), WAIT_S)
        assert [path.name for path in used.iterdir()] == ["a.sock"], "not empty: somebody's"
    finally:
        for folder in (root, used):
            shutil.rmtree(folder, ignore_errors=True)


ORPHANS = """
import json, sys, time
from blockflow.launch.local import TemplateLauncher
from blockflow.launch.process import become_subreaper
become_subreaper()
launcher = TemplateLauncher(preload=["msgpack"])
entry = "tests.process.test_orphans:be_deaf_and_watch"
pid = launcher.launch(entry, {"folder": sys.argv[1]}, "w").pid
print(json.dumps([launcher.template_pid, pid]), flush=True)
time.sleep(600)
"""


def be_deaf_and_watch(spec: dict[str, str]) -> int:
    """A child that is stuck, but for what a worker does at each ping before it is."""
    adoption, parent = Adoption(), os.getppid()
    Path(spec["folder"], "up").touch()
    while os.getppid() == parent:
        adoption.check()
        select.select([], [], [], 0.01)
    adoption.check()
    Path(spec["folder"], "adopted").touch()
    while True:
        select.select([], [], [], 600)


def test_a_stuck_child_whose_template_is_dead_ends_with_the_manager(tmp_path: Path) -> None:
    manager = subprocess.Popen(
        [sys.executable, "-c", ORPHANS, str(tmp_path)], stdout=subprocess.PIPE, cwd=ROOT
    )
    assert manager.stdout is not None
    with manager.stdout:
        template, child = json.loads(manager.stdout.readline())

    try:
        wait_until((tmp_path / "up").exists, WAIT_S)
        os.kill(template, signal.SIGKILL)
        wait_until((tmp_path / "adopted").exists, WAIT_S)
        assert not gone(child)
    finally:
        manager.kill()
        manager.wait()
    wait_gone(template, child)
