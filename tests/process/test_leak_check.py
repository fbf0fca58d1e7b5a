"""The session's leak check sees planted leaks, and nothing else; a session that is told to end does
so in order, and what a killed one leaves the next one removes."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
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


WAITS = """
import os, pathlib, subprocess
import pytest
def wait(text):
    with open("told", "w") as f:
        f.write(text)
    with open("gate") as f:
        f.read()
@pytest.fixture
def child():
    child = subprocess.Popen(["sleep", "600"], start_new_session=True)
    pathlib.Path("pid").write_text(str(child.pid))
    made = pathlib.Path(os.environ["BLOCKFLOW_RUN_ROOT"], "abcdef")
    made.mkdir()
    yield child
    wait("ends")
    child.kill()
    child.wait()
    made.rmdir()
def test_it_waits(child):
    wait(os.environ["BLOCKFLOW_RUN_ROOT"])
"""


def start_session(folder: Path, source: str) -> subprocess.Popen[str]:
    folder.mkdir(exist_ok=True)
    text = CONFTEST.read_text(encoding="utf-8")
    quick = text.replace("LEAK_GRACE_S = 10.0", "LEAK_GRACE_S = 0.2")
    assert quick != text
    (folder / "conftest.py").write_text(quick, encoding="utf-8")
    (folder / "test_planted.py").write_text(source, encoding="utf-8")
    # Without this session's marks: the inner session makes its own.
    environment = {k: v for k, v in os.environ.items() if not k.startswith(("BLOCKFLOW", "PYTEST"))}
    environment["PYTEST_DISABLE_PLUGIN_AUTOLOAD"] = "1"  # they take longer than all the rest
    return subprocess.Popen(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(folder)],
        cwd=folder,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def run_session(folder: Path, source: str) -> subprocess.CompletedProcess[str]:
    with start_session(folder, source) as session:
        output, _ = session.communicate(timeout=60)
    return subprocess.CompletedProcess(session.args, session.returncode, output)


@contextmanager
def waiting_session(folder: Path) -> Iterator[tuple[subprocess.Popen[str], Path, psutil.Process]]:
    """A session in the middle of its test, its run root, and a process that it has started. It
    waits there, and again in its end, until it is let go on."""
    folder.mkdir()
    for name in ("told", "gate"):
        os.mkfifo(folder / name)
    with start_session(folder, WAITS) as session:
        try:
            root = Path((folder / "told").read_text())
            child = psutil.Process(int((folder / "pid").read_text()))
            yield session, root, child
        finally:
            session.kill()


def go_on(folder: Path) -> None:
    (folder / "gate").write_text("")


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


def test_a_killed_session_is_swept_by_the_next_one(tmp_path: Path) -> None:
    """A clean session passes, whatever is beside it; and nothing is swept that is of none."""
    with waiting_session(tmp_path / "killed") as (session, root, child):
        done = run_session(tmp_path / "beside", CLEAN)
        assert done.returncode == 0, done.stdout
        assert child.is_running() and (root / "abcdef").exists()  # it lives, and is left alone
        session.kill()
        session.wait()
        assert child.is_running() and root.exists()
        base = root.parent
        target = tmp_path / "target"
        target.mkdir()
        other, link = base / f"{root.name}x", base / "bft-0123456789abcdef"
        other.mkdir()
        link.symlink_to(target)
        try:
            done = run_session(tmp_path / "next", CLEAN)
            assert done.returncode == 0, done.stdout
            assert not root.exists()
            assert other.exists() and link.is_symlink() and target.exists()
        finally:
            link.unlink(missing_ok=True)
            other.rmdir()
        psutil.wait_procs([child], 10)
        assert not child.is_running()


def test_a_session_that_is_told_to_end_ends_in_order(tmp_path: Path) -> None:
    """As with Ctrl-C; who is impatient changes nothing."""
    with waiting_session(tmp_path / "told") as (session, root, child):
        session.send_signal(signal.SIGTERM)
        assert (tmp_path / "told" / "told").read_text() == "ends"
        session.send_signal(signal.SIGTERM)
        go_on(tmp_path / "told")
        output, _ = session.communicate(timeout=60)
        assert session.returncode == pytest.ExitCode.INTERRUPTED, output
        assert not child.is_running() and not root.exists()
