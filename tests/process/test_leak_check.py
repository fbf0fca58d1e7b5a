"""The session's leak check sees planted leaks, and nothing else."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

CONFTEST = Path(__file__).resolve().parents[1] / "conftest.py"

CLEAN = """
def test_nothing_is_left():
    pass
"""
PROCESS = """
import pathlib, subprocess
def test_a_process_is_left():
    child = subprocess.Popen(["sleep", "60"], start_new_session=True)
    pathlib.Path("pid").write_text(str(child.pid))
"""
ENTRY = """
import os, pathlib
def test_a_run_directory_is_left():
    pathlib.Path(os.environ["BLOCKFLOW_RUN_ROOT"], "abcdef").mkdir()
"""


def run_session(folder: Path, source: str) -> subprocess.CompletedProcess[str]:
    text = CONFTEST.read_text(encoding="utf-8")
    quick = text.replace("LEAK_GRACE_S = 10.0", "LEAK_GRACE_S = 0.2")
    assert quick != text
    (folder / "conftest.py").write_text(quick, encoding="utf-8")
    (folder / "test_planted.py").write_text(source, encoding="utf-8")
    # Without this session's marks: the inner session makes its own.
    environment = {k: v for k, v in os.environ.items() if not k.startswith(("BLOCKFLOW", "PYTEST"))}
    return subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(folder)],
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


def test_a_clean_session_passes(tmp_path: Path) -> None:
    done = run_session(tmp_path, CLEAN)
    assert done.returncode == 0, done.stdout


@pytest.mark.parametrize(
    ("source", "finding"), [(PROCESS, "processes left running"), (ENTRY, "entries left in the run")]
)
def test_a_planted_leak_fails_the_session(tmp_path: Path, source: str, finding: str) -> None:
    try:
        done = run_session(tmp_path, source)
        assert done.returncode == 1, done.stdout
        assert finding in done.stdout
        assert "1 passed, 1 error" in done.stdout
    finally:
        pid = tmp_path / "pid"
        if pid.exists():
            os.kill(int(pid.read_text()), 9)
