"""Every process of a system is killed at once, under load; then a new one takes its place."""

from __future__ import annotations

import json
import signal
from contextlib import suppress
from pathlib import Path

import numpy as np
import psutil
import pytest
from control_rig import save_echoes
from dispatcher_rig import wait_until
from up_rig import family, outcome, up
from warm_rig import Warm

from blockflow.client import Client

X = np.arange(4, dtype=np.float32).reshape(1, 4)
PATIENCE_S = 60.0
BODY = {
    "blocks": ["a", {"name": "slow", "batching": "none"}],
    "tasks": {"t": ["a", "slow"], "q": ["a"]},
}


@pytest.mark.timeout(400)  # on a machine that others share
def test_everything_is_killed_at_once(tmp_path: Path, warm: Warm) -> None:
    save_echoes(tmp_path / "blocks", "a", slow={"row_ms": 100})
    (tmp_path / "topology.json").write_text(json.dumps(BODY))
    topology = str(tmp_path / "topology.json")
    with up(tmp_path, "--topology", topology, start=warm.popen) as (process, ready):
        first = Path(ready["run_dir"])
        with Client(ready["clients"][0], connect_timeout_s=PATIENCE_S) as client:
            assert outcome(client.submit("q", X, deadline_s=PATIENCE_S), X) == "OK"
            asked = [client.submit("t", X, deadline_s=PATIENCE_S) for _ in range(100)]
            wait_until(lambda: asked[0].done())  # the others are queued, computed, on their way
            alive = [psutil.Process(process.pid), *family(process.pid)]
            assert len(alive) == 6  # guardian, manager, template, dispatcher, two workers
            for number in (signal.SIGSTOP, signal.SIGKILL):  # so that nobody comes to clean up
                for one in alive:
                    with suppress(psutil.NoSuchProcess):  # it has followed one killed before it
                        one.send_signal(number)
            process.wait(PATIENCE_S)
            outcomes = [outcome(future, X) for future in asked]
            assert {"OK", "CONNECTION_LOST"} <= set(outcomes)
            assert set(outcomes) <= {"OK", "CONNECTION_LOST", "OVERLOADED"}
            counters, lost = client.counters(), outcomes.count("CONNECTION_LOST")
            assert (counters.answered, counters.failed) == (101 - lost, lost)
            assert counters.late_replies == 0
        _, left = psutil.wait_procs(alive, PATIENCE_S)
        assert not left
    assert first.exists()  # nobody was left to remove it
    with up(tmp_path, start=warm.popen) as (process, ready):
        assert ready["epoch"] == 1
        assert not first.exists()
        with Client(ready["clients"][0]) as client:
            assert outcome(client.submit("t", X, deadline_s=PATIENCE_S), X) == "OK"
        process.terminate()
        assert process.wait(PATIENCE_S) == 0
