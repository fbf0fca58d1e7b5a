"""Strangers: processes below a guardian that no Manager has started are left alone, and other users
cannot take its clients' port."""

from __future__ import annotations

import json
import os
import signal
import sys
from dataclasses import asdict, replace
from pathlib import Path

import psutil
import pytest
import takeover_rig
from sockets_rig import a_stranger_takes
from takeover_rig import PATIENCE_S, X, members, started
from up_rig import family, gone
from warm_rig import Warm

from blockflow.client import Client
from blockflow.control.journal import JournalFile
from blockflow.launch.process import readable

pytestmark = pytest.mark.timeout(600)

root = takeover_rig.root

BECOMES = """
import runpy, subprocess, sys

subprocess.Popen(["sleep", "1000"])
sys.argv = sys.argv[3:]  # after "python -m"
runpy.run_module("blockflow", run_name="__main__", alter_sys=True)
"""
BESIDE = [sys.executable, "-c", BECOMES]
"""As a shell does it that becomes ``blockflow up`` and has started something before."""


def test_a_job_of_the_shell_outlives_managers_and_guardian(root: Path, warm: Warm) -> None:
    with started(root, before=BESIDE, start=warm.popen) as it:
        children = psutil.Process(it.process.pid).children()
        (job,) = [c for c in children if c.name() == "sleep"]
        try:
            it.kill_manager()
            it.taken_over(1)
            assert job.is_running() and "is in no journal" not in it.log()
            ours = [c for c in family(it.process.pid) if c != job]
            it.process.terminate()
            assert it.process.wait(PATIENCE_S) == 0, it.log()
            assert gone(ours, Path(it.ready["run_dir"]))
            assert job.is_running()
        finally:
            job.kill()


def test_whom_a_manager_has_started_is_ended_where_no_journal_names_it(
    root: Path, warm: Warm
) -> None:
    """It was launched just before that Manager died."""
    with started(root, start=warm.popen) as it:
        before = it.status()
        os.kill(before["manager"]["pid"], signal.SIGSTOP)  # it must not write another one
        file = JournalFile(Path(before["run_dir"]))
        written = file.read()
        rest = tuple(s for s in written.seats if s.name != "b#0")
        file.write(json.dumps(asdict(replace(written, seats=rest))))
        os.kill(before["manager"]["pid"], signal.SIGKILL)
        after = it.taken_over(1)
        assert after["manager"]["adopted"] == ["a#0", "dispatcher"]
        pid, _ = members(before)["b#0"]
        assert f"process {pid} is in no journal and is ended" in it.log()
        assert not psutil.pid_exists(pid)


@pytest.mark.skipif(os.getuid() != 0, reason="only root can be another user")
def test_another_user_cannot_take_the_clients_port_while_no_dispatcher_lives(
    root: Path, warm: Warm
) -> None:
    with started(root, start=warm.popen) as it:
        port = int(it.address.rpartition(":")[2])
        it.kill_manager()
        status = it.taken_over(1)
        os.kill(status["manager"]["pid"], signal.SIGSTOP)  # it must not start the next one
        pid, _ = members(status)["dispatcher"]
        pidfd = os.pidfd_open(pid)
        os.kill(pid, signal.SIGKILL)
        assert readable(pidfd, PATIENCE_S)  # it has ended
        os.close(pidfd)
        assert a_stranger_takes(port) == ""
        os.kill(status["manager"]["pid"], signal.SIGCONT)
        with Client(it.address, connect_timeout_s=PATIENCE_S) as client:
            assert (client.infer("t", X, deadline_s=60.0).value == X + 11).all()
        it.process.terminate()
        assert it.process.wait(PATIENCE_S) == 0, it.log()
    assert a_stranger_takes(port) != ""
