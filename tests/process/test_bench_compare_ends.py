"""How a comparison ends before its time, and what it keeps: time-outs, Ctrl-C, SIGKILL, no room."""

from __future__ import annotations

import errno
import os
import select
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import compare_rig
import psutil
import pytest
from compare_rig import Repo, leftovers, results

from blockflow.bench.compare import arms
from blockflow.bench.compare.run import main
from blockflow.bench.compare.trees import worktree
from tests.warm_rig import Warm

pytestmark = pytest.mark.skipif(shutil.which("git") is None, reason="needs git")

repo = compare_rig.repo
ROOT = Path(__file__).resolve().parents[2]
WAIT_S = 60.0


def test_what_was_measured_before_a_failure_is_kept(
    repo: Repo, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    repo.write(10.0, works=f"not {repo.ran_times(5)}")
    repo.commit()
    target = tmp_path / "out.jsonl"
    assert main(repo.arguments(target, "--rounds", "5")) == 2
    assert "partial result, ended early after 3 of 10 visits" in capsys.readouterr().out
    kept = results(target)["latency, x"]
    assert kept["n"] == 1
    assert "broken on purpose" in kept["labels"]["flaw"]
    assert (repo.worktrees(), leftovers(tmp_path)) == (1, [])


def test_a_run_that_takes_too_long_is_ended(
    repo: Repo, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    repo.write(10.0, hang=True)
    repo.commit()
    assert main(repo.arguments(tmp_path / "out.jsonl", "--timeout", "0.5")) == 2
    assert "TIMEOUT" in capsys.readouterr().out
    assert (repo.worktrees(), leftovers(tmp_path)) == (1, [])


CHILD = """
import signal, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
print("ready", flush=True)
time.sleep(600)
"""
PARENT = f"import subprocess, sys, time; subprocess.Popen([sys.executable, '-c', {CHILD!r}])"


@pytest.mark.parametrize("last", ["time.sleep(600)", "sys.exit(1)"], ids=["hangs", "ended"])
def test_what_a_benchmark_has_started_ends_with_it(
    monkeypatch: pytest.MonkeyPatch, last: str
) -> None:
    """Also what takes no heed of SIGTERM, and lives on where the benchmark itself has ended."""
    monkeypatch.setattr(arms, "_END_S", 0.2)
    command = [sys.executable, "-c", f"{PARENT}; {last}"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, start_new_session=True) as process:
        out = process.stdout
        assert out is not None
        try:
            assert out.readline() == b"ready\n"
            arms._end(process)
            # The end of the pipe: nobody is left who holds it.
            assert select.select([out], [], [], WAIT_S)[0]
            assert out.read() == b""
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)


COMPARE = """
import sys
from blockflow.bench.compare import run
run._CALIBRATE_S = 0.0
sys.exit(run.main())
"""


@contextmanager
def hanging(warm: Warm, repo: Repo, tmp_path: Path, *more: str) -> Iterator[subprocess.Popen[str]]:
    """A comparison of its own, whose benchmark hangs; it has ended afterwards."""
    arguments = repo.arguments(tmp_path / "out.jsonl", "--timeout", "300", *more)
    running = warm.popen(
        [sys.executable, "-c", COMPARE, *arguments],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT), "TMPDIR": str(tmp_path / "tmp")},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    try:
        end = time.monotonic() + WAIT_S
        while not repo.sign.exists():
            assert time.monotonic() < end and running.poll() is None
            time.sleep(0.02)
        repo.sign.unlink()
        yield running
    finally:
        running.kill()
        running.communicate()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupted_run_keeps_what_it_has_measured(
    warm: Warm, repo: Repo, tmp_path: Path, number: signal.Signals
) -> None:
    repo.write(10.0, hang=repo.ran_times(5))
    repo.commit()
    with hanging(warm, repo, tmp_path, "--rounds", "5") as running:
        running.send_signal(number)
        printed, _ = running.communicate(timeout=WAIT_S)
    assert running.returncode == 130
    flaw = "partial result, ended early after 3 of 10 visits: CANCELLED"
    assert flaw in printed
    assert "Traceback" not in printed
    kept = results(tmp_path / "out.jsonl")["latency, x"]
    assert (kept["n"], kept["labels"]["verdict"]) == (1, "none")
    assert kept["labels"]["flaw"].startswith(flaw)
    assert (repo.worktrees(), leftovers(tmp_path)) == (1, [])


def test_a_run_interrupted_before_the_first_round_leaves_nothing_and_a_killed_one_a_worktree(
    warm: Warm, repo: Repo, tmp_path: Path
) -> None:
    repo.write(10.0, hang=True)
    repo.commit()
    with hanging(warm, repo, tmp_path) as running:
        running.terminate()
        printed, _ = running.communicate(timeout=WAIT_S)
    assert running.returncode == 130
    assert "CANCELLED" in printed
    assert not (tmp_path / "out.jsonl").exists()
    assert (repo.worktrees(), leftovers(tmp_path)) == (1, [])
    with hanging(warm, repo, tmp_path) as running:
        benchmark = only_child(running.pid)
        running.kill()
        running.wait(WAIT_S)
        os.killpg(benchmark, signal.SIGKILL)  # nobody else would
    assert repo.worktrees() == 2
    with worktree(repo.folder, "HEAD") as tree:
        assert repo.worktrees() == 2
        # What another run holds is left alone.
        with worktree(repo.folder, "HEAD"):
            assert repo.worktrees() == 3
        assert (tree.folder / "blockflow" / "fake.py").exists()
    assert repo.worktrees() == 1


def test_a_full_disk_leaves_the_verdicts_on_the_screen(
    repo: Repo,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    repo.write(10.0)
    repo.commit()
    repo.write(20.0)
    target = tmp_path / "out.jsonl"
    target.write_text("before", encoding="utf-8")
    write = Path.write_text

    def full(path: Path, *arguments: Any, **more: Any) -> int:
        if path.name.startswith(target.name):
            raise OSError(errno.ENOSPC, "No space left on device", str(path))
        return write(path, *arguments, **more)

    monkeypatch.setattr(Path, "write_text", full)
    assert main(repo.arguments(target, "--rounds", "5", "--fail")) == 2
    printed = capsys.readouterr().out
    assert "1 slower" in printed
    assert "2.000 (2.00-2.00)" in printed
    assert "NO_SPACE" in printed
    assert "--json" in printed
    assert target.read_text(encoding="utf-8") == "before"


def test_a_visit_without_room_ends_the_run_which_keeps_the_others(
    repo: Repo,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    repo.write(10.0)
    repo.commit()
    make = tempfile.mkdtemp
    made: list[str] = []

    def full(*arguments: Any, **more: Any) -> str:
        # One for the worktree, two for the visits that do not count, three for others.
        if len(made) == 6:
            raise OSError(errno.ENOSPC, "No space left on device")
        made.append(make(*arguments, **more))
        return made[-1]

    monkeypatch.setattr(tempfile, "mkdtemp", full)
    target = tmp_path / "out.jsonl"
    assert main(repo.arguments(target, "--rounds", "5")) == 2
    assert "ended early after 3 of 10 visits: NO_SPACE" in capsys.readouterr().out
    assert "TMPDIR" in results(target)["latency, x"]["labels"]["flaw"]
    assert leftovers(tmp_path) == []


def only_child(pid: int) -> int:
    (child,) = psutil.Process(pid).children()
    return child.pid
