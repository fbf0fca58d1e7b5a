"""Two revisions of a small repository are compared; the worktree is gone, however that ends."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import psutil
import pytest

from blockflow.bench.compare.arms import imported_from
from blockflow.bench.compare.run import main
from blockflow.bench.compare.trees import state_of, worktree
from blockflow.core.errors import BlockFlowError

pytestmark = pytest.mark.skipif(shutil.which("git") is None, reason="needs git")

ROOT = Path(__file__).resolve().parents[2]
WAIT_S = 60.0
FAKE = """
import json, pathlib, sys, time
import blockflow

MS = {ms}
HANG = {hang}
TARGET = pathlib.Path(sys.argv[sys.argv.index("--json") + 1])
home = pathlib.Path(blockflow.__file__).parent
if HANG:
    pathlib.Path({sign!r}).touch()
    time.sleep(600)
if not ({works}):
    sys.exit("broken on purpose")
names = {names!r}
lines = [dict(name=n, mode="x", batch=None, p50_ms=None, p90_ms=None, value=MS, unit="ms", n=3)
         for n in names]
TARGET.write_text("".join(json.dumps(dict(line, machine={{}})) + chr(10) for line in lines))
with open({log!r}, "a") as log:
    print(MS, home, file=log)
"""


def git(repo: Path, *arguments: str) -> str:
    settings = ("user.name=t", "user.email=t@example.org", "core.hooksPath=", "commit.gpgsign=no")
    options = [word for setting in settings for word in ("-c", setting)]
    command = ["git", "-C", str(repo), *options, *arguments]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout


class Repo:
    """A package of the same name, with a benchmark that says what it is told."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder / "repo"
        self.log, self.sign = folder / "log", folder / "sign"
        (self.folder / "blockflow").mkdir(parents=True)
        (self.folder / "blockflow" / "__init__.py").touch()
        (self.folder / ".gitignore").write_text("__pycache__\n", encoding="utf-8")
        git(self.folder, "init", "-q")

    def write(self, ms: float, **more: Any) -> None:
        facts = {"works": True, "hang": False, "names": ["latency"]} | more
        text = FAKE.format(ms=ms, log=str(self.log), sign=str(self.sign), **facts)
        (self.folder / "blockflow" / "fake.py").write_text(text, encoding="utf-8")

    def commit(self) -> None:
        git(self.folder, "add", ".")
        git(self.folder, "commit", "-qm", "a revision")

    def ran(self) -> list[tuple[float, Path]]:
        lines = [line.split(maxsplit=1) for line in self.log.read_text().splitlines()]
        return [(float(ms), Path(home)) for ms, home in lines]

    def worktrees(self) -> int:
        return git(self.folder, "worktree", "list").count("\n")

    def arguments(self, target: Path, *more: str) -> list[str]:
        fixed = ["--bench", "blockflow.fake", "--repo", str(self.folder), "--json", str(target)]
        return ["HEAD", *fixed, *more]


@pytest.fixture
def repo(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Repo:
    temporary = tmp_path / "tmp"
    temporary.mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(temporary))
    # The fixed work is the machine's: its verdict is no matter of these tests.
    monkeypatch.setattr("blockflow.bench.compare.run.calibrate", lambda seconds: [1.0] * 5)
    return Repo(tmp_path)


def leftovers(tmp_path: Path) -> list[str]:
    return sorted(p.name for p in (tmp_path / "tmp").iterdir())


def results(target: Path) -> dict[str, dict[str, Any]]:
    lines = [json.loads(line) for line in target.read_text(encoding="utf-8").splitlines()]
    return {line["mode"]: line for line in lines if line["name"] == "tree to base"}


def test_each_arm_runs_its_own_sources_in_turns(
    repo: Repo, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    repo.write(10.0)
    repo.commit()
    # Not committed: the working tree is compared as it is.
    repo.write(13.0, names=["latency", "new"])
    target = tmp_path / "out.jsonl"
    assert main(repo.arguments(target, "--rounds", "5", "--fail")) == 1
    ran = repo.ran()
    # One visit of each that does not count, then five rounds.
    assert [ms for ms, _ in ran] == [10, 13, *(10, 13, 13, 10), *(10, 13, 13, 10), *(10, 13)]
    homes = dict(ran)
    assert homes[13.0] == repo.folder / "blockflow"
    assert homes[10.0].parents[1].name.startswith("bf-compare-")
    found = results(target)
    assert found["latency, x"]["value"] == pytest.approx(1.3)
    assert found["latency, x"]["labels"]["verdict"] == "slower"
    assert found["new, x"]["labels"]["verdict"] == "none"
    assert "1 changed files" in found["new, x"]["labels"]["tree_revision"]
    printed = capsys.readouterr().out
    assert str(repo.folder / "blockflow" / "__init__.py") in printed
    assert "not in the base, nothing to compare with: new, x" in printed
    assert (repo.worktrees(), leftovers(tmp_path)) == (1, [])


def test_equal_revisions_are_within_noise(repo: Repo, tmp_path: Path) -> None:
    repo.write(10.0)
    repo.commit()
    target = tmp_path / "out.jsonl"
    assert main(repo.arguments(target, "--rounds", "5", "--fail")) == 0
    assert results(target)["latency, x"]["labels"]["verdict"] == "within noise"


def test_a_benchmark_that_fails_is_told_with_its_last_words(
    repo: Repo, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    repo.write(10.0, works=False)
    repo.commit()
    assert main(repo.arguments(tmp_path / "out.jsonl")) == 2
    assert "broken on purpose" in capsys.readouterr().out
    assert (repo.worktrees(), leftovers(tmp_path)) == (1, [])


def test_what_was_measured_before_a_failure_is_kept(
    repo: Repo, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    repo.write(10.0, works=f"len(open({str(repo.log)!r}).readlines()) < 5")
    repo.log.touch()
    repo.commit()
    target = tmp_path / "out.jsonl"
    assert main(repo.arguments(target, "--rounds", "5")) == 2
    assert "ended early, after 3 visits" in capsys.readouterr().out
    kept = results(target)["latency, x"]
    assert kept["n"] == 1
    assert "broken on purpose" in kept["labels"]["flaw"]
    assert (repo.worktrees(), leftovers(tmp_path)) == (1, [])


def test_a_tree_that_moves_during_the_run_is_noticed(
    repo: Repo, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    # The benchmark itself leaves a file beside its sources.
    repo.write(10.0, works="(home / 'left.txt').write_text('x')")
    repo.commit()
    before = state_of(repo.folder)
    assert main(repo.arguments(tmp_path / "out.jsonl", "--rounds", "1")) == 2
    assert "the working tree changed during the run" in capsys.readouterr().out
    assert state_of(repo.folder) != before
    (repo.folder / "blockflow" / "left.txt").unlink()
    assert state_of(repo.folder) == before
    (repo.folder / "blockflow" / "__init__.py").write_text("X = 1\n", encoding="utf-8")
    assert state_of(repo.folder) != before


def test_an_unknown_revision_is_an_error(
    repo: Repo, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    repo.write(10.0)
    repo.commit()
    for revision in ("nonsense", ""):
        assert main([revision, *repo.arguments(tmp_path / "out.jsonl")[1:]]) == 2
        assert "INVALID_REQUEST" in capsys.readouterr().out
    assert leftovers(tmp_path) == []


def test_a_run_that_takes_too_long_is_ended(
    repo: Repo, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    repo.write(10.0, hang=True)
    repo.commit()
    assert main(repo.arguments(tmp_path / "out.jsonl", "--timeout", "0.5")) == 2
    assert "TIMEOUT" in capsys.readouterr().out
    assert (repo.worktrees(), leftovers(tmp_path)) == (1, [])


def test_a_terminated_run_leaves_no_worktree_and_a_killed_one_until_the_next(
    repo: Repo, tmp_path: Path
) -> None:
    repo.write(10.0, hang=True)
    repo.commit()
    command = [sys.executable, "-m", "blockflow.bench.compare.run"]
    for number in (signal.SIGTERM, signal.SIGKILL):
        running = subprocess.Popen(
            [*command, *repo.arguments(tmp_path / "out.jsonl", "--timeout", "300")],
            cwd=ROOT,
            env={**os.environ, "PYTHONPATH": str(ROOT), "TMPDIR": str(tmp_path / "tmp")},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            start_new_session=True,
        )
        try:
            end = time.monotonic() + WAIT_S
            while not repo.sign.exists():
                assert time.monotonic() < end and running.poll() is None
                time.sleep(0.02)
            repo.sign.unlink()
            benchmark = only_child(running.pid)
            running.send_signal(number)
            running.wait(WAIT_S)
        finally:
            running.kill()
            running.wait()
            if number is signal.SIGKILL:
                os.killpg(benchmark, signal.SIGKILL)  # nobody else would
        if number is signal.SIGTERM:
            assert (repo.worktrees(), leftovers(tmp_path)) == (1, [])
    assert repo.worktrees() == 2
    with worktree(repo.folder, "HEAD") as tree:
        assert repo.worktrees() == 2
        # What another run holds is left alone.
        with worktree(repo.folder, "HEAD"):
            assert repo.worktrees() == 3
        assert (tree.folder / "blockflow" / "fake.py").exists()
    assert repo.worktrees() == 1


def test_a_tree_that_would_import_other_sources_is_refused(repo: Repo, tmp_path: Path) -> None:
    repo.write(10.0)
    (repo.folder / "blockflow" / "__init__.py").unlink()
    (repo.folder / "blockflow" / "fake.py").rename(repo.folder / "fake.py")
    repo.commit()
    with worktree(repo.folder, "HEAD") as tree, pytest.raises(BlockFlowError, match="own sources"):
        imported_from(tree)


def only_child(pid: int) -> int:
    (child,) = psutil.Process(pid).children()
    return child.pid
