"""The disk of the state becomes read-only, as one that fails does: what serves serves on, also when
the control plane dies."""

from __future__ import annotations

import subprocess
from functools import partial
from pathlib import Path

import numpy as np
import plain_http
import pytest
from small_disk import small_disk
from takeover_rig import AC, Load, Up, X, furnish, members, started
from warm_rig import Warm

from blockflow.client.sync import Client

pytestmark = pytest.mark.timeout(600)


def within(it: Up, command: str) -> None:
    """Run this where the system's mounts are."""
    words = ["nsenter", "-t", str(it.process.pid), "-m", "sh", "-c", command]
    subprocess.run(words, check=True, timeout=30)


def test_a_successor_takes_over_though_the_states_disk_is_read_only(
    tmp_path: Path, warm: Warm
) -> None:
    furnish(tmp_path)
    state = tmp_path / "state"
    state.mkdir(mode=0o700)
    start = partial(warm.popen, disk=small_disk(state, "size=1m"))
    with started(tmp_path, start=start) as it:
        # By a second mount: the first one stays writable for who has opened the lock file.
        within(it, f"mount --bind {state} {state} && mount -o remount,ro,bind {state}")
        before = it.status()
        with Load(it.address) as load:
            it.kill_manager()
            after = it.taken_over(before["manager"]["restarts"] + 1)
            load.more()
        assert load.failed == []
        assert members(after) == members(before)
        assert any("Read-only file system" in w for w in after["warnings"])
        refused = plain_http.post(f"{it.ready['rest']}/v1/system-update", json=AC, timeout=60)
        assert refused.json()["error"]["code"] == "STATE_UNUSABLE", refused.text
        within(it, f"mount -o remount,rw,bind {state}")
        it.post(AC)
        with Client(it.address) as client:
            assert np.array_equal(client.infer("t", X, deadline_s=30).value, X + 101)
