"""The control plane dies and another one takes its processes over, while clients are served.

A system that has survived that is as good as a new one for what comes next: some tests follow each
other on one, as long as its guardian has patience.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import plain_http
import psutil
import pytest
import takeover_rig
from dispatcher_rig import wait_until
from takeover_rig import AB, AC, PATIENCE_S, Load, Relay, X, furnish, members, started
from template_gate import Gate
from up_rig import command, family, gone
from warm_rig import Warm

from blockflow.client.sync import Client
from blockflow.control.journal import NAME, JournalFile
from blockflow.control.store import CURRENT

LONG = np.repeat(X, 32, axis=0)
"""Takes the slow block longer than an update; the one row of a warm-up does not."""

pytestmark = pytest.mark.timeout(600)

root = takeover_rig.root


@pytest.fixture(scope="module")
def gate(tmp_path_factory: pytest.TempPathFactory) -> Gate:
    return Gate(tmp_path_factory.mktemp("gate") / "site")


@pytest.fixture(scope="module")
def relay(tmp_path_factory: pytest.TempPathFactory, gate: Gate, warm: Warm) -> Iterator[Relay]:
    root = tmp_path_factory.mktemp("relay")
    furnish(root)
    path = os.pathsep.join(filter(None, [str(gate.folder), os.environ.get("PYTHONPATH")]))
    relay = Relay(root, {"PYTHONPATH": path}, warm.popen)
    yield relay
    relay.close()


def test_a_manager_that_hangs_has_a_successor_too(relay: Relay) -> None:
    """It is stopped, and nobody lets it go on. Serving does not wait for that."""
    it = relay.take(crashes=1)
    before = it.status()
    with Load(it.address) as load:
        os.kill(before["manager"]["pid"], signal.SIGSTOP)
        after = it.taken_over(before["manager"]["restarts"] + 1)
        load.more()
    assert load.failed == []
    assert members(after) == members(before)
    assert after["manager"]["cause"].startswith("hung: silent for 1")
    assert "stopped" in after["manager"]["cause"]
    # Nobody was there from when it was stopped; the system has been up all the time.
    assert after["manager"]["away_ms"] > 9_000
    assert after["uptime_s"] > before["uptime_s"] + 9 > after["manager"]["uptime_s"]


def test_who_was_to_be_launched_is_launched_by_the_successor(relay: Relay, gate: Gate) -> None:
    """A launch waits for a new template when the manager dies: its journal names no process."""
    it = relay.take(crashes=1)
    before = it.status()
    restarts = before["manager"]["restarts"] + 1
    with gate.shut():
        os.kill(before["control"]["template"]["pid"], signal.SIGKILL)
        os.kill(members(before)["b#0"][0], signal.SIGKILL)
        waiting = it.until(lambda s: waits(s, members(before)["b#0"][1]))
        it.kill_manager()
        again = it.until(
            lambda s: s["manager"]["restarts"] == restarts and waits(s, members(waiting)["b#0"][1])
        )
        assert again["manager"]["adopted"] == ["a#0", "dispatcher"]
    after = it.taken_over(restarts)
    kept = ("a#0", "dispatcher")
    assert {n: members(after)[n] for n in kept} == {n: members(before)[n] for n in kept}
    assert len(family(it.process.pid)) == 5  # manager, template, dispatcher, two workers
    with Client(it.address) as client:
        assert np.array_equal(client.infer("t", X, deadline_s=30).value, X + 11)


def waits(status: dict[str, Any], incarnation: int) -> bool:
    """A life of ``b#0`` after this one is to be launched."""
    pid, later = members(status)["b#0"]
    return pid is None and later > incarnation


def test_serving_goes_on_and_a_new_manager_takes_everybody_over(relay: Relay) -> None:
    it = relay.take(crashes=2)
    before = it.status()
    died = before["manager"]["restarts"]
    assert before["pid"] == it.process.pid != before["manager"]["pid"]
    updates = [before["last_update"]["id"]]
    with Load(it.address) as load:
        load.more()
        for restarts in (died + 1, died + 2):
            it.kill_manager()
            after = it.taken_over(restarts)
            assert members(after) == members(before)
            assert after["manager"]["adopted"] == ["a#0", "b#0", "dispatcher"]
            assert after["manager"]["cause"] == "killed by SIGKILL"
            assert after["epoch"] == before["epoch"] and after["routes"] > before["routes"]
            updates.append(after["last_update"]["id"])
            load.more()
        assert load.failed == []
        assert sorted(set(updates)) == updates  # no number stands for another update
        asked = plain_http.get(f"{it.ready['rest']}/v1/updates/{updates[0]}", timeout=30)
        assert asked.status_code == 404 and "restarted since" in asked.text
        # And the new one can do all that the first one could.
        it.post(AC)
        load.more()
    assert load.failed == [] and load.sums == {11.0, 101.0}
    os.kill(it.status()["workers"][0]["pid"], signal.SIGKILL)
    healed = it.until(lambda s: s["ready"] and members(s)["a#0"] != members(before)["a#0"])
    assert members(healed)["a#0"][1] > max(i for _, i in members(before).values())
    assert "killed by SIGKILL" in healed["workers"][0]["crash"]["cause"]
    with Client(it.address) as client:
        assert np.array_equal(client.infer("t", X, deadline_s=30).value, X + 101)
    children = family(it.process.pid)
    plain_http.post(it.ready["rest"] + "/v1/shutdown", timeout=30)
    assert it.process.wait(30) == 0
    assert gone(children, Path(it.ready["run_dir"]))


def test_whoever_dies_meanwhile_is_replaced(root: Path, warm: Warm) -> None:
    """A worker, the template and then the Dispatcher, each together with the manager. The second
    time the state is torn as well: what the manager had given out since is not given again."""
    with started(root, start=warm.popen) as it:
        for restarts, name in enumerate(("b#0", "dispatcher"), start=1):
            before = it.status()
            os.kill(before["manager"]["pid"], signal.SIGSTOP)
            os.kill(members(before)[name][0], signal.SIGKILL)
            if name == "dispatcher":
                os.kill(before["control"]["template"]["pid"], signal.SIGKILL)
                (root / "state" / CURRENT).write_bytes(b"torn")
            os.kill(before["manager"]["pid"], signal.SIGKILL)
            after = it.until(lambda s, n=restarts: s["manager"]["restarts"] == n and s["ready"])
            assert members(after)[name][1] > members(before)[name][1]
            kept = [n for n in members(before) if n != name]
            assert {n: members(after)[n] for n in kept} == {n: members(before)[n] for n in kept}
            with Client(it.address) as client:
                assert np.array_equal(client.infer("t", X, deadline_s=30).value, X + 11)
        assert any("previous generation (epoch 1)" in w for w in after["warnings"])
        journal = JournalFile(Path(it.ready["run_dir"]))
        used = journal.read().highest()
        it.post(AC)
        (seat,) = [s for s in journal.read().seats if s.name == "c#0"]
        assert min(seat.life.stages.values()) > used["stage"]
        assert seat.life.incarnation > used["incarnation"]
        # Both at once, and nobody is left to look after the others.
        children = family(it.process.pid)
        for pid in (it.process.pid, after["manager"]["pid"]):
            os.kill(pid, signal.SIGKILL)
        it.process.wait(30)
        assert gone(children, Path(it.ready["run_dir"]))


def test_killed_in_the_middle_of_an_update(root: Path, warm: Warm) -> None:
    """Before the commit the old epoch serves on, after it the new one does; nobody is left over."""
    armed = {"BLOCKFLOW_FAILPOINTS": "before_load=stall:c"}
    with started(root, armed, start=warm.popen) as it:
        before = it.status()
        with Load(it.address) as load:
            it.post(AC, wait=False)
            it.until(lambda s: any(w["name"] == "c#0" and w["pid"] for w in s["workers"]))
            candidate = psutil.Process(members(it.status())["c#0"][0])
            it.kill_manager()
            after = it.taken_over(1)
            assert members(after) == members(before) and after["epoch"] == 1
            assert any("not been stored" in w for w in after["warnings"])
            psutil.wait_procs([candidate], PATIENCE_S)
            assert not candidate.is_running()
            load.more()
            assert load.failed == [] and load.sums == {11.0}

        # Requests on old routes keep an update from its end: it is committed and published.
        it.post({"blocks": ["a", "slow"], "tasks": {"t": ["a", "slow"]}})
        answers: list[Any] = []
        asking = threading.Thread(target=ask_slowly, args=(it.address, answers))
        asking.start()
        it.until(lambda s: s["dispatcher"]["kpi"].get("inflight"))
        it.post(AB, wait=False)
        retiring = it.until(lambda s: s["epoch"] == 3)
        unfinished = retiring["updating"] is not None  # unless this machine is very slow
        it.kill_manager()
        after = it.taken_over(2)
        assert after["epoch"] == 3
        asking.join(PATIENCE_S)
        assert [np.array_equal(a.value, LONG + 1) and a.epoch == 2 for a in answers] == [True]
        done = it.until(lambda s: s["updating"] is None)
        assert {n: members(retiring)[n] for n in members(done)} == members(done)
        assert set(members(done)) == {"a#0", "b#0", "dispatcher"}
        assert any("had been stored" in w for w in done["warnings"]) or not unfinished

        # With the guardian everything ends.
        # Manager, template, dispatcher, two workers; who has just ended is still to be reaped.
        wait_until(lambda: len(family(it.process.pid)) == 5, PATIENCE_S)
        children = family(it.process.pid)
        it.process.kill()
        it.process.wait(30)
        assert gone(children, Path(it.ready["run_dir"]))


def ask_slowly(address: str, answers: list[Any]) -> None:
    with Client(address) as client:
        answers.append(client.infer("t", LONG, deadline_s=50))


def test_a_torn_journal_means_to_begin_anew_and_never_empty(relay: Relay) -> None:
    it = relay.take(crashes=1)
    before = it.status()
    old = [psutil.Process(pid) for pid, _ in members(before).values()]
    os.kill(before["manager"]["pid"], signal.SIGSTOP)  # it must not write another one
    journal = Path(before["run_dir"]) / NAME
    journal.write_bytes(journal.read_bytes()[:-10])
    os.kill(before["manager"]["pid"], signal.SIGKILL)
    after = it.until(lambda s: s["run_dir"] != before["run_dir"] and s["ready"])
    assert after["epoch"] == before["epoch"] > 0 and after["manager"]["adopted"] == []
    assert "torn" in after["manager"]["cause"] and "begun anew" in it.log()
    assert any("torn" in w for w in after["warnings"])
    assert gone(old, Path(before["run_dir"]))
    assert min(i for _, i in members(after).values()) > max(i for _, i in members(before).values())
    # The clients' address is the same one.
    with Client(it.address) as client:
        assert np.array_equal(client.infer("t", X, deadline_s=30).value, X + 11)


def test_a_run_directory_that_somebody_has_removed_is_made_again(relay: Relay) -> None:
    """As a clean-up of shared memory does it, at the end of its user's last session."""
    it = relay.take(crashes=1)
    before = it.status()
    old = [psutil.Process(pid) for pid, _ in members(before).values()]
    shutil.rmtree(before["run_dir"])
    after = it.until(lambda s: s["run_dir"] != before["run_dir"] and s["ready"])
    assert after["epoch"] == before["epoch"] > 0
    assert after["manager"]["restarts"] == before["manager"]["restarts"] + 1
    assert "somebody has removed" in after["manager"]["cause"]
    assert any("somebody has removed" in w for w in after["warnings"])
    assert gone(old, Path(before["run_dir"]))
    with Client(it.address) as client:  # the address is the same one
        assert np.array_equal(client.infer("t", X, deadline_s=30).value, X + 11)


def test_a_manager_that_dies_too_often_is_given_up(relay: Relay) -> None:
    it = relay.take()
    run_dir = it.status()["run_dir"]
    children: set[psutil.Process] = set()
    end = time.monotonic() + PATIENCE_S
    while it.process.poll() is None:
        assert time.monotonic() < end, it.log()
        for child in family_of(it.process.pid):
            children.add(child)
            if name_of(child) == "bf:manager":
                with suppress(psutil.NoSuchProcess):  # it has just been collected
                    child.kill()
        time.sleep(0.02)
    assert it.process.wait(30) != 0
    assert "given up: 5 crashes within 60 s" in it.log()
    assert gone(list(children), Path(run_dir))


@pytest.mark.parametrize(
    ("number", "hint"), [(signal.SIGKILL, ""), (signal.SIGABRT, "a library aborts")]
)
def test_a_manager_that_dies_at_its_start_ends_it(
    root: Path, number: signal.Signals, hint: str
) -> None:
    process = subprocess.Popen(
        command(root), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    try:
        end = time.monotonic() + PATIENCE_S
        while not (found := [c for c in family_of(process.pid) if name_of(c) == "bf:manager"]):
            assert time.monotonic() < end and process.poll() is None
            time.sleep(0.005)
        os.kill(found[0].pid, number)
        output, errors = process.communicate(timeout=PATIENCE_S)
        assert process.returncode != 0
        assert f"killed by {number.name} while it started" in errors
        error = json.loads(output)["error"]
        assert error["code"] == "INTERNAL"
        assert (hint in error["hint"]) if hint else ("hint" not in error)
    finally:
        process.kill()
        process.wait()


def name_of(process: psutil.Process) -> str:
    """'' for one that has ended."""
    try:
        return process.name()
    except psutil.NoSuchProcess:
        return ""


def family_of(pid: int) -> list[psutil.Process]:
    try:
        return family(pid)
    except psutil.NoSuchProcess:
        return []
