"""Two revisions of a small repository are compared; the worktree is gone, however that ends."""

from __future__ import annotations

import errno
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest

from blockflow.bench.compare.arms import imported_from, run_benchmark
from blockflow.bench.compare.run import main
from blockflow.bench.compare.trees import Tree, state_of, worktree
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

    def ran_times(self, least: int) -> str:
        """For the benchmark: it has run at least so often before."""
        self.log.touch()
        return f"len(open({str(self.log)!r}).readlines()) >= {least}"

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
    repo.write(10.0, works=f"not {repo.ran_times(5)}")
    repo.commit()
    target = tmp_path / "out.jsonl"
    assert main(repo.arguments(target, "--rounds", "5")) == 2
    assert "partial result, ended early after 3 of 10 visits" in capsys.readouterr().out
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


@contextmanager
def hanging(repo: Repo, tmp_path: Path, *more: str) -> Iterator[subprocess.Popen[str]]:
    """A comparison of its own, whose benchmark hangs; it has ended afterwards."""
    arguments = repo.arguments(tmp_path / "out.jsonl", "--timeout", "300", *more)
    # A shell may have this process ignore Ctrl-C, and its children would too.
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        running = subprocess.Popen(
            [sys.executable, "-m", "blockflow.bench.compare.run", *arguments],
            cwd=ROOT,
            env={**os.environ, "PYTHONPATH": str(ROOT), "TMPDIR": str(tmp_path / "tmp")},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )
    finally:
        signal.signal(signal.SIGINT, before)
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
    repo: Repo, tmp_path: Path, number: signal.Signals
) -> None:
    repo.write(10.0, hang=repo.ran_times(5))
    repo.commit()
    with hanging(repo, tmp_path, "--rounds", "5") as running:
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
    repo: Repo, tmp_path: Path
) -> None:
    repo.write(10.0, hang=True)
    repo.commit()
    with hanging(repo, tmp_path) as running:
        running.terminate()
        printed, _ = running.communicate(timeout=WAIT_S)
    assert running.returncode == 130
    assert "CANCELLED" in printed
    assert not (tmp_path / "out.jsonl").exists()
    assert (repo.worktrees(), leftovers(tmp_path)) == (1, [])
    with hanging(repo, tmp_path) as running:
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


@pytest.mark.parametrize(
    ("base", "tree", "more"),
    [
        (["latency"], ["latency"], ["--only", "^renamed"]),
        (["latency"], ["delay"], []),
        ([], [], []),
    ],
    ids=["nothing chosen", "nothing in both", "nothing measured"],
)
def test_a_guard_with_nothing_to_compare_fails_before_it_measures(
    repo: Repo,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    base: list[str],
    tree: list[str],
    more: list[str],
) -> None:
    repo.write(10.0, names=base)
    repo.commit()
    repo.write(20.0, names=tree)
    assert main(repo.arguments(tmp_path / "out.jsonl", "--fail", *more)) == 2
    printed = capsys.readouterr().out
    assert "INVALID_REQUEST: nothing to compare" in printed
    assert f"the tree measures {', x; '.join(tree) + ', x' if tree else 'nothing'}" in printed
    assert len(repo.ran()) == 2
    assert (repo.worktrees(), leftovers(tmp_path)) == (1, [])


def test_a_guard_without_any_verdict_fails(
    repo: Repo, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    repo.write(10.0)
    repo.commit()
    repo.write(20.0)
    target = tmp_path / "out.jsonl"
    assert main(repo.arguments(target, "--rounds", "2", "--fail")) == 2
    printed = capsys.readouterr().out
    assert "2.000 (2.00-2.00)" in printed
    assert "too few rounds to conclude" in printed
    assert "INVALID_REQUEST: nothing was compared" in printed
    assert results(target)["latency, x"]["value"] == 2.0


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


def test_what_are_no_figures_is_a_typed_error(repo: Repo) -> None:
    repo.write(10.0, works="[TARGET.write_text('{\"name\": 1}'), sys.exit(0)]")
    with pytest.raises(BlockFlowError, match="no figures"):
        run_benchmark(Tree(repo.folder, "the tree"), ["blockflow.fake"], WAIT_S)
    repo.write(10.0, works="[TARGET.write_text('half a li'), sys.exit(0)]")
    with pytest.raises(BlockFlowError, match="no figures"):
        run_benchmark(Tree(repo.folder, "the tree"), ["blockflow.fake"], WAIT_S)


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
