"""A parallel run of which one process dies in a test: every other test is run, and the run ends."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
FILES = 8

NOTED = """
import pathlib
import socket
import pytest
@pytest.fixture(autouse=True)
def noted(request):
    connection = request.config.failures_db.sock
    assert connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY), "40 ms for each test"
    with open(pathlib.Path(__file__).parent / "ran.txt", "a") as f:
        f.write(request.node.nodeid + "\\n")
"""
PASSES = "def test_one():\n    pass\n"
DIES = """
import os, pathlib, signal
import pytest
def test_before():
    pass
def test_it_dies():
    told = pathlib.Path(__file__).with_suffix(".txt")
    if {ALWAYS} or not told.exists():
        told.touch()
        os.kill(os.getpid(), signal.SIGKILL)
def test_after():
    pass
"""


def run(folder: Path, processes: int, *options: str) -> str:
    environment = {k: v for k, v in os.environ.items() if not k.startswith(("BLOCKFLOW", "PYTEST"))}
    environment |= {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1", "PYTHONPATH": str(ROOT)}
    words = ["-q", "-p", "xdist", "-p", "pytest_rerunfailures", "-p", "no:cacheprovider"]
    spread = ["-n", str(processes), "--dist", "loadfile", "--no-loadscope-reorder"]
    done = subprocess.run(
        [sys.executable, "-m", "pytest", *words, *spread, *options, str(folder)],
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        timeout=60,  # it waits for ever otherwise
    )
    return done.stdout + done.stderr


def prepare(folder: Path, dies: dict[int, bool]) -> None:
    """So many files with tests; those that are named die, always or once."""
    hooks = ("pytest_configure", "pytest_testnodedown", "pytest_xdist_make_scheduler")
    (folder / "conftest.py").write_text(f"from tests.conftest import {', '.join(hooks)}\n{NOTED}")
    for n in range(FILES):
        text = DIES.replace("{ALWAYS}", str(dies[n])) if n in dies else PASSES
        (folder / f"test_{n:02}.py").write_text(text)


def times(folder: Path) -> Counter[str]:
    return Counter((folder / "ran.txt").read_text().splitlines())


@pytest.mark.parametrize(("processes", "dies"), [(1, [3, FILES - 1]), (2, [0, 5])], ids=str)
def test_what_a_dead_process_leaves_is_done_by_others(
    tmp_path: Path, processes: int, dies: list[int]
) -> None:
    """With ``--reruns``, as in CI: also the test that it died in."""
    prepare(tmp_path, dict.fromkeys(dies, False))
    text = run(tmp_path, processes, "--reruns", "1")
    assert re.search(rf"\b{FILES + 2 * len(dies)} passed, {len(dies)} rerun", text), text
    assert text.count("died: SIGKILL") == len(dies), text
    again = {f"test_{n:02}.py::test_it_dies": 2 for n in dies}
    assert {test: n for test, n in times(tmp_path).items() if n != 1} == again


def test_a_test_that_always_kills_fails(tmp_path: Path) -> None:
    prepare(tmp_path, {4: True})
    text = run(tmp_path, 2)
    assert re.search(rf"\b1 failed, {FILES + 1} passed", text), text
    assert "crashed while running 'test_04.py::test_it_dies'" in text
    assert set(times(tmp_path).values()) == {1}
