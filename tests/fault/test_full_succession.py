"""The control plane dies while its state's disk takes nothing more: its successor takes over."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import numpy as np
import plain_http
import pytest
from small_disk import small_disk
from takeover_rig import AB, AC, Load, Up, X, furnish, members, started
from warm_rig import Warm

from blockflow.client.sync import Client
from blockflow.control.journal import NAME

pytestmark = pytest.mark.timeout(600)


class Disk:
    """What the state of a system lies on; seen through the system's mount namespace."""

    def __init__(self, it: Up, state: Path) -> None:
        self._root = Path(f"/proc/{it.process.pid}/root{state}")

    def fill(self) -> None:
        with pytest.raises(OSError, match="No space left"):
            use_up(self._root)

    def empty(self) -> None:
        use_up(self._root, remove=True)


@pytest.fixture(scope="module")
def placed(tmp_path_factory: pytest.TempPathFactory, warm: Warm) -> Iterator[tuple[Up, Disk]]:
    """A system whose state lies on a small tmpfs, in a mount namespace of its own; and that."""
    root = tmp_path_factory.mktemp("succession")
    furnish(root)
    state = root / "state"
    state.mkdir(mode=0o700)
    start = partial(warm.popen, disk=small_disk(state, "size=1m,nr_inodes=200"))
    with started(root, start=start) as it:
        yield it, Disk(it, state)


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


def test_a_successor_takes_over_though_the_states_disk_is_full(placed: tuple[Up, Disk]) -> None:
    it, disk = placed
    disk.fill()
    before = it.status()
    died = before["manager"]["restarts"]
    given = [incarnation for _, incarnation in members(before).values()]
    with Load(it.address) as load:
        for restarts in (died + 1, died + 2):  # two in a row are no exception
            load.more()
            it.kill_manager()
            after = it.taken_over(restarts)
            assert members(after) == members(before)
            assert after["run_dir"] == before["run_dir"]
            assert any("numbers that were reserved" in w for w in after["warnings"])
    assert load.failed == []
    # Whoever dies now has a successor too, with a number that nobody had.
    given += [replaced(it, name) for name in ("a#0", "b#0", "a#0")]
    refused = plain_http.post(f"{it.ready['rest']}/v1/system-update", json=AC, timeout=60)
    assert refused.status_code == 507, refused.text
    disk.empty()
    given.append(replaced(it, "a#0"))
    assert len(set(given)) == len(given)
    assert given[3:] == sorted(given)[3:]
    it.post(AC)
    with Client(it.address) as client:
        assert np.array_equal(client.infer("t", X, deadline_s=30).value, X + 101)


def test_what_is_begun_anew_on_a_full_disk_has_new_numbers_too(placed: tuple[Up, Disk]) -> None:
    it, disk = placed
    disk.empty()
    it.post(AB)
    disk.fill()
    before = it.status()
    os.kill(before["manager"]["pid"], signal.SIGSTOP)  # it must not write another journal
    (Path(before["run_dir"]) / NAME).write_bytes(b"torn")
    os.kill(before["manager"]["pid"], signal.SIGKILL)
    after = it.until(lambda s: s["run_dir"] != before["run_dir"] and s["ready"])
    assert after["epoch"] == before["epoch"] > 0 and after["manager"]["adopted"] == []
    old, new = ([i for _, i in members(s).values()] for s in (before, after))
    assert min(new) > max(old)
    with Client(it.address) as client:
        assert np.array_equal(client.infer("t", X, deadline_s=30).value, X + 11)
