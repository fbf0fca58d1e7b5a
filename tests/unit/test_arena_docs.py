"""docs/tensormq.md: its example runs, its diagram is the transition table, its options are set."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

from blockflow.tensormq import sockets
from blockflow.tensormq.janitor import _BELOW_ROOT, MAX_PATH_CHARS
from blockflow.tensormq.leases import TRANSITIONS, LeaseTable

TEXT = (Path(__file__).parents[2] / "docs" / "tensormq.md").read_text()


def blocks(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", TEXT, re.M | re.S)


def test_the_example_runs() -> None:
    for code in blocks("python"):
        done = subprocess.run(
            [sys.executable, "-c", code], capture_output=True, text=True, timeout=60
        )
        assert done.returncode == 0, done.stderr


def test_the_diagram_is_the_table() -> None:
    (diagram,) = blocks("mermaid")
    drawn = set(re.findall(r"(\w+) --> (\w+): (.+)", diagram))
    assert drawn == {(before, after, event) for event, (before, after) in TRANSITIONS.items()}


def test_the_numbers() -> None:
    assert f"{sockets.DATA_HWM} data, {sockets.CONTROL_HWM} control" in TEXT
    assert f"up to {LeaseTable(4096, 1).lanes} *lanes*" in TEXT
    assert f"at most {MAX_PATH_CHARS - _BELOW_ROOT} characters" in TEXT
