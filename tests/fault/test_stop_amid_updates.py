"""The system is to stop while somebody waits for an update: nobody waits for who waits."""

from __future__ import annotations

import json
import signal
import subprocess
import threading
from pathlib import Path

import plain_http
import pytest
import takeover_rig
from dispatcher_rig import wait_until
from takeover_rig import AC, PATIENCE_S, members, started
from up_rig import command
from warm_rig import Warm

root = takeover_rig.root

STALLED = {"BLOCKFLOW_FAILPOINTS": "before_load=stall:c"}
END_S = 30.0
"""A small part of that is needed; a guardian kills its Manager after sixty seconds."""


def test_who_waits_for_an_update_hears_that_it_failed(root: Path, warm: Warm) -> None:
    answers: list[tuple[int, str]] = []
    with started(root, STALLED, start=warm.popen) as it:

        def ask() -> None:
            url = f"{it.ready['rest']}/v1/system-update"
            answer = plain_http.post(url, json=AC, timeout=PATIENCE_S)
            answers.append((answer.status_code, answer.json()["error"]["code"]))

        asking = threading.Thread(target=ask)
        asking.start()
        it.until(lambda s: members(s).get("c#0", (None, 0))[0])
        it.process.terminate()
        assert it.process.wait(END_S) == 0, it.log()
        asking.join(PATIENCE_S)
        assert answers == [(500, "UPDATE_FAILED")]


def test_so_it_is_with_the_topology_that_it_was_started_with(
    root: Path, warm: Warm, monkeypatch: pytest.MonkeyPatch
) -> None:
    (root / "topology.json").write_text(json.dumps(AC))
    for name, value in STALLED.items():
        monkeypatch.setenv(name, value)
    process = warm.popen(
        command(root, "--topology", str(root / "topology.json")),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        wait_until(lambda: any((root / "state").glob("logs/c*")), PATIENCE_S)
        process.send_signal(signal.SIGINT)
        output, errors = process.communicate(timeout=END_S)
        assert (process.returncode, output) == (0, ""), errors
        assert "topology.json:" not in errors  # that it did not come about is no fault of it
    finally:
        process.kill()
        process.communicate()
