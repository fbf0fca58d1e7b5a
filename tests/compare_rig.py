"""A repository with a benchmark that says what it is told, for tests of ``bench-compare``."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest

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
