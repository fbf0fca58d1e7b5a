"""The machine refuses what the control plane needs: who is served is served on."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest
import takeover_rig
from dispatcher_rig import wait_until
from refusals_rig import CONTROLLER_THREAD, REST_THREAD, TEMPLATES, Refusals
from takeover_rig import AB, PATIENCE_S, Load, members, started
from warm_rig import Warm

pytestmark = pytest.mark.timeout(600)

root = takeover_rig.root


@pytest.fixture
def refusals(tmp_path: Path) -> Refusals:
    return Refusals(tmp_path / "site")


def test_no_other_template_can_be_started_for_a_while(
    root: Path, refusals: Refusals, warm: Warm
) -> None:
    """Nothing is launched meanwhile, and all else goes on: updates, supervision, a successor."""
    with started(root, refusals.env, start=warm.popen) as it:
        before = it.status()
        with Load(it.address) as load:
            with refusals.of(TEMPLATES):
                os.kill(before["control"]["template"]["pid"], signal.SIGKILL)
                wait_until(lambda: "nothing can be launched until there is one" in it.log())
                it.post({**AB, "tasks": {**AB["tasks"], "u": ["a"]}})
                it.kill_manager()
                after = it.taken_over(1)
                assert members(after) == members(before)
                assert after["manager"]["adopted"] == ["a#0", "b#0", "dispatcher"]
            os.kill(members(before)["b#0"][0], signal.SIGKILL)
            healed = it.until(lambda s: s["ready"] and members(s)["b#0"] != members(before)["b#0"])
            load.more()
        assert load.failed == []
        assert healed["manager"]["restarts"] == 1
        assert {**members(healed), "b#0": 0} == {**members(before), "b#0": 0}
        assert "defect" not in it.log()


@pytest.mark.parametrize("thread", [CONTROLLER_THREAD, REST_THREAD])
def test_a_successor_that_cannot_start_leaves_all_to_the_next_one(
    root: Path, refusals: Refusals, warm: Warm, thread: str
) -> None:
    """At once: it is waited for by nobody but those who want to be looked after."""
    with started(root, refusals.env, start=warm.popen) as it:
        before = it.status()
        with Load(it.address) as load:
            with refusals.of(thread) as refused:
                it.kill_manager()
                wait_until(lambda: not refused.exists(), PATIENCE_S)
                after = it.taken_over(1)  # who finds no room does not count
            load.more()
        assert "can't start new thread" in it.log() and "hung" not in it.log()
        assert members(after) == members(before)
        assert after["manager"]["adopted"] == ["a#0", "b#0", "dispatcher"]
        assert load.failed == []
