"""Figures: percentiles, the JSON Lines file and the machine's fingerprint."""

from __future__ import annotations

import errno
import io
import json
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console

from blockflow.bench.docs import Stored
from blockflow.bench.git import PACKAGE, git, revision_of
from blockflow.bench.results import (
    Figure,
    ResultFile,
    Run,
    bursts_figure,
    figure_table,
    fingerprint,
    interval_figure,
    kept_runs,
    latency_figure,
    make_command,
    revision_text,
    same_machine,
)
from blockflow.bench.statistics import Interval, median_interval
from blockflow.repository import machine

REQUIRED = {"name", "mode", "batch", "p50_ms", "p90_ms", "value", "unit", "n", "machine"}


def test_a_latency_figure_tells_its_median_and_tail() -> None:
    figure = latency_figure("latency", "digit", 1, [1.0, 2.0, 3.0, 10.0])
    assert (figure.p50_ms, figure.p90_ms, figure.p99_ms, figure.value) == (2.5, 10.0, 10.0, 2.5)
    assert figure.n == 4


def test_of_bursts_only_their_medians_are_repeats() -> None:
    bursts = [[n, n, 100.0 * n] for n in (1.0, 5.0, 2.0, 4.0, 3.0)]
    figure = bursts_figure("latency", "digit", bursts, {"bytes": 8})
    assert (figure.value, figure.n, figure.labels) == (3.0, 5, {"bytes": 8})
    found = median_interval([1.0, 2.0, 3.0, 4.0, 5.0])
    assert figure.interval == found
    assert (figure.p50_ms, figure.p99_ms) == (4.0, 500.0)


def test_a_figure_has_its_interval_or_is_its_own() -> None:
    found = Interval(2.0, 1.0, 4.0, 7)
    figure = interval_figure("ratio", "digit", None, found, "x")
    assert figure.interval == found
    assert Figure.from_dict(figure.to_dict()) == figure
    assert replace(figure, low=None, high=None).interval == Interval(2.0, 2.0, 2.0, 7)


def test_what_is_not_measured_again_is_kept_with_what_its_run_says_of_itself() -> None:
    def figures(*names: str) -> list[Figure]:
        return [Figure(n, "x", None, None, None, 1.0, "x", 1) for n in names]

    runs = [Run(figures("a", "of the run", "b"), {}), Run(figures("a", "of the run"), {})]
    kept = kept_runs(runs, lambda f: None if f.name == "of the run" else f.name, {"a"})
    assert [[f.name for f in run.figures] for run in kept] == [["of the run", "b"]]


def test_a_run_replaces_the_file_of_the_one_before(tmp_path: Path) -> None:
    file = ResultFile(tmp_path / "deep" / "results.jsonl", "demo")
    figures = [
        Figure("accuracy", "digit", None, None, None, 99.2, "%", 360),
        latency_figure("latency", "digit", 1, [1.0]),
    ]
    assert file.write(figures) == 2
    assert file.write(figures[:1]) == 1
    (line,) = file.read()
    assert set(line) >= REQUIRED
    assert line["benchmark"] == "demo"
    assert line["value"] == 99.2
    assert "p99_ms" not in line
    assert [p.name for p in file.path.parent.iterdir()] == ["results.jsonl"]


def test_a_full_disk_leaves_the_file_of_before_and_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = ResultFile(tmp_path / "results.jsonl", "demo")
    figures = [latency_figure("latency", "digit", 1, [1.0])]
    file.write(figures)
    before = file.path.read_bytes()

    def full(path: Path, text: str, encoding: str) -> int:
        path.touch()
        raise OSError(errno.ENOSPC, "no space left on device")

    monkeypatch.setattr(Path, "write_text", full)
    with pytest.raises(OSError, match="no space"):
        file.write([*figures, *figures])
    assert file.path.read_bytes() == before
    assert [p.name for p in tmp_path.iterdir()] == ["results.jsonl"]


def test_the_fingerprint_names_machine_and_versions() -> None:
    facts = fingerprint()
    assert facts["cores"] >= 1
    assert facts["cpu"]
    assert facts["torch"]
    json.dumps(facts)


def package(folder: Path) -> Path:
    (folder / "package").mkdir()
    (folder / "package" / "__init__.py").write_text("")
    return folder / "package"


def commit(folder: Path) -> str:
    who = ("-c", "user.name=a", "-c", "user.email=a@b")
    git(folder, *who, "commit", "--quiet", "--all", "--message", "a commit")
    return git(folder, "rev-parse", "HEAD").strip()


def test_a_fingerprint_names_the_commit_and_whether_tracked_files_differ(tmp_path: Path) -> None:
    look = revision_of.__wrapped__  # each look anew
    sources = package(tmp_path)
    assert look(sources) == {}  # no repository
    git(tmp_path, "init", "--quiet")
    (tmp_path / "theirs.py").write_text("")
    git(tmp_path, "add", "theirs.py")
    commit(tmp_path)
    assert look(sources) == {}  # one that does not track it: somebody else's
    git(tmp_path, "add", "package")
    first = commit(tmp_path)
    assert look(sources) == {"commit": first[:12], "dirty": False}
    (sources / "new.py").write_text("")
    assert look(sources)["dirty"] is False  # not tracked
    (sources / "__init__.py").write_text("changed")
    assert look(sources) == {"commit": first[:12], "dirty": True}
    second = commit(tmp_path)
    assert look(sources) == {"commit": second[:12], "dirty": False} != {"commit": first[:12]}


def test_without_git_a_fingerprint_names_no_commit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert revision_of.__wrapped__(PACKAGE) == {}


def test_a_commit_makes_no_other_machine_and_no_stale_profile(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found: dict[str, object] = {"commit": "a" * 12, "dirty": False}
    monkeypatch.setattr("blockflow.bench.results.revision_of", lambda: found)
    facts, here = fingerprint(), machine.fingerprint()
    assert (facts["commit"], facts["dirty"]) == ("a" * 12, False)
    assert revision_text(facts) == f"commit {'a' * 12}"
    found.update({"commit": "b" * 12, "dirty": True})
    assert revision_text(fingerprint()) == f"commit {'b' * 12} with changes"
    assert same_machine(facts, fingerprint())
    assert not same_machine(facts, {**facts, "torch": "0.1"})
    machine.fingerprint.cache_clear()
    assert machine.fingerprint() == here  # what profiles and choices hold for
    # Results of before there was a commit are this machine's as well.
    old = {k: v for k, v in facts.items() if k not in found}
    assert revision_text(old) == ""
    kept = [
        Run([Figure("a", "b", None, None, None, 1.0, "x", 1, labels={"experiment": "lbci"})], m, d)
        for m, d in ((old, "2026-01-01"), (facts, "2026-01-02"))
    ]
    file = ResultFile(tmp_path / "b.jsonl", "batching")
    file.write_runs(kept)
    stored = [r.date for r in file.runs() if same_machine(r.machine, facts)]
    assert stored == ["2026-01-01", "2026-01-02"]
    assert f"2026-01-02, commit {'a' * 12}; " in Stored(kept).provenance("make x")
    assert "`make x`, 2026-01-01; " in Stored(kept).provenance("make x")


def test_the_table_shows_every_figure() -> None:
    out = io.StringIO()
    figures = [
        latency_figure("latency", "zeromq", 8, [1.5]),
        Figure("a", "b", None, None, None, 2, "x", 1),
    ]
    Console(file=out, width=100).print(figure_table("bench", figures))
    assert "zeromq" in out.getvalue()
    assert "1.500" in out.getvalue()


def test_the_command_is_one_that_can_be_typed() -> None:
    assert make_command("bench", []) == "make bench"
    assert make_command("bench", ["--rounds", "3"]) == "make bench ARGS='--rounds 3'"
