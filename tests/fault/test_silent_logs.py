"""The disk with the logs does not answer, as in the moment of a snapshot or for as long as a
network's folder has lost its server: who has something to say goes on serving, and who dies is
replaced."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import zmq
from dispatcher_rig import wait_until
from small_disk import small_disk
from takeover_rig import Up, X, furnish, started
from warm_rig import Warm

from blockflow.client.sync import Client

pytestmark = pytest.mark.timeout(600)

LINE = b"1 so far)"
"""In what a process says of the first message that it cannot read."""


def within(it: Up, command: str) -> list[str]:
    """The words that run this where the system's mounts are."""
    return ["nsenter", "-t", str(it.process.pid), "-m", "sh", "-c", command]


@contextmanager
def frozen(it: Up, folder: Path) -> Iterator[None]:
    """Nothing is written there meanwhile. If this process is killed, the end of file ends that."""
    command = f"fsfreeze -f {folder} && echo frozen && read end; fsfreeze -u {folder}"
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with subprocess.Popen(within(it, command), **pipes, text=True) as holder:
        assert holder.stdout is not None
        assert holder.stdout.readline() == "frozen\n"
        yield


def talk(talker: dict[str, Any]) -> None:
    """Give it something to write; returns once one of its threads waits for the disk."""

    def waits() -> bool:
        tasks = Path(f"/proc/{talker['pid']}/task").iterdir()
        return any((t / "stat").read_text().rpartition(") ")[2].startswith("D") for t in tasks)

    with zmq.Context.instance().socket(zmq.PUSH) as push:
        push.connect(talker["endpoint"])
        push.send(b"nonsense")
        wait_until(waits)


def says(log: Path) -> bool:
    return LINE in log.read_bytes()


def member(status: dict[str, Any], name: str) -> dict[str, Any]:
    return next(m for m in [status["dispatcher"], *status["workers"]] if m["name"] == name)


def replaced(it: Up, name: str) -> dict[str, Any]:
    """Kill this process; returns the one that takes its place."""
    old = member(it.status(), name)
    os.kill(old["pid"], signal.SIGKILL)
    after = it.until(
        lambda s: s["ready"] and member(s, name)["incarnation"] > old["incarnation"],
    )
    return member(after, name)


def test_who_writes_to_a_silent_log_serves_on_and_the_dead_are_replaced(
    tmp_path: Path, warm: Warm
) -> None:
    for tool in ("mkfs.ext4", "fsfreeze"):
        if shutil.which(tool) is None:
            pytest.skip(f"no {tool} here")
    furnish(tmp_path)
    state, logs = tmp_path / "state", tmp_path / "state/logs"
    state.mkdir(mode=0o700)
    start = partial(warm.popen, disk=small_disk(state, "size=16m"))
    with started(tmp_path, start=start) as it:
        made = f"truncate -s 8M {state}/img && mkfs.ext4 -q -O ^has_journal {state}/img"
        mounted = f"{made} && mount -o loop {state}/img {logs}"
        done = subprocess.run(within(it, mounted), capture_output=True, text=True, timeout=30)
        if done.returncode:
            pytest.skip(f"no file system that can be frozen may be mounted here: {done.stderr}")
        # Whoever comes now has a log there.
        talkers = [replaced(it, name) for name in ("dispatcher", "a#0")]
        with Client(it.address) as client:
            assert np.array_equal(client.infer("t", X, deadline_s=30).value, X + 11)
            with frozen(it, logs):
                for talker in talkers:
                    talk(talker)
                for _ in range(5):
                    assert np.array_equal(client.infer("t", X, deadline_s=20).value, X + 11)
                replaced(it, "b#0")
                assert np.array_equal(client.infer("t", X, deadline_s=20).value, X + 11)
        for talker in talkers:
            name = f"{talker['name']}.{talker['incarnation']}.log"
            log = Path(f"/proc/{it.process.pid}/root{logs}/{name}")
            wait_until(partial(says, log))
