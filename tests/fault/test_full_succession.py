"""The control plane dies while its state's disk takes nothing more: its successor takes over."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import numpy as np
import pytest
from small_disk import on_small_disk
from takeover_rig import AC, Load, Up, X, furnish, members, started

from blockflow.client.sync import Client
from blockflow.control.journal import NAME

pytestmark = pytest.mark.timeout(600)


@contextmanager
def full_disk(root: Path) -> Iterator[tuple[Up, Callable[[], None]]]:
    """A system whose state lies on a small tmpfs, in a mount namespace of its own, and which has
    started before that took nothing more; and what to call to empty it."""
    furnish(root)
    state = root / "state"
    state.mkdir(mode=0o700)
    with started(root, before=on_small_disk(state, "size=1m,nr_inodes=200")) as it:
        disk = Path(f"/proc/{it.process.pid}/root{state}")
        with pytest.raises(OSError, match="No space left"):
            use_up(disk)
        yield it, lambda: use_up(disk, remove=True)


def use_up(disk: Path, *, remove: bool = False) -> None:
    """Every file that there may be on it, so that no temporary one can be made."""
    for n in range(200):
        path = disk / f"ballast{n}"
        path.unlink(missing_ok=True) if remove else path.touch()


def replaced(it: Up, name: str) -> int:
    """Kill this worker; the incarnation of the one that takes its place."""
    pid, old = members(it.status())[name]
    os.kill(pid, signal.SIGKILL)
    after = it.until(lambda s: s["ready"] and members(s)[name][1] > old)
    return members(after)[name][1]


def test_a_successor_takes_over_though_the_states_disk_is_full(tmp_path: Path) -> None:
    with full_disk(tmp_path) as (it, empty):
        before = it.status()
        given = [incarnation for _, incarnation in members(before).values()]
        with Load(it.address) as load:
            for restarts in (1, 2):  # two in a row are no exception
                load.more()
                it.kill_manager()
                after = it.taken_over(restarts)
                assert members(after) == members(before)
                assert after["run_dir"] == before["run_dir"]
                assert any("numbers that were reserved" in w for w in after["warnings"])
        assert load.failed == []
        # Whoever dies now has a successor too, with a number that nobody had.
        given += [replaced(it, name) for name in ("a#0", "b#0", "a#0")]
        refused = httpx.post(f"{it.ready['rest']}/v1/system-update", json=AC, timeout=60)
        assert refused.status_code == 507, refused.text
        empty()
        given.append(replaced(it, "a#0"))
        assert len(set(given)) == len(given)
        assert given[3:] == sorted(given)[3:]
        it.post(AC)
        with Client(it.address) as client:
            assert np.array_equal(client.infer("t", X, deadline_s=30).value, X + 101)


def test_what_is_begun_anew_on_a_full_disk_has_new_numbers_too(tmp_path: Path) -> None:
    with full_disk(tmp_path) as (it, _):
        before = it.status()
        os.kill(before["manager"]["pid"], signal.SIGSTOP)  # it must not write another journal
        (Path(it.ready["run_dir"]) / NAME).write_bytes(b"torn")
        os.kill(before["manager"]["pid"], signal.SIGKILL)
        after = it.until(lambda s: s["run_dir"] != before["run_dir"] and s["ready"])
        assert after["epoch"] == 1 and after["manager"]["adopted"] == []
        old, new = ([i for _, i in members(s).values()] for s in (before, after))
        assert min(new) > max(old)
        with Client(it.address) as client:
            assert np.array_equal(client.infer("t", X, deadline_s=30).value, X + 11)
