"""Two revisions of a small repository are compared; the worktree is gone, however that ends."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import compare_rig
import pytest
from compare_rig import Repo, leftovers, results

from blockflow.bench.compare.arms import imported_from, run_benchmark
from blockflow.bench.compare.run import main
from blockflow.bench.compare.trees import Tree, state_of, worktree
from blockflow.core.errors import BlockFlowError

pytestmark = pytest.mark.skipif(shutil.which("git") is None, reason="needs git")

repo = compare_rig.repo
WAIT_S = 60.0


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


def test_a_benchmark_that_fails_is_told_with_its_last_words(
    repo: Repo, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    repo.write(10.0, works=False)
    repo.commit()
    assert main(repo.arguments(tmp_path / "out.jsonl")) == 2
    assert "broken on purpose" in capsys.readouterr().out
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


def test_equal_sources_are_within_noise_beside_names_and_changes_that_are_no_utf8(
    repo: Repo, tmp_path: Path
) -> None:
    latin = repo.folder / "notes.txt"
    latin.write_bytes(b"plain\n")
    repo.write(10.0)
    repo.commit()
    latin.write_bytes("caf\xe9\n".encode("latin-1"))
    Path(os.fsdecode(os.fsencode(repo.folder) + b"/caf\xe9")).touch()
    states = [state_of(repo.folder)]
    latin.write_bytes("caf\xe8\n".encode("latin-1"))
    states.append(state_of(repo.folder))
    Path(os.fsdecode(os.fsencode(repo.folder) + b"/caf\xe8")).touch()
    states.append(state_of(repo.folder))
    assert len(set(states)) == 3
    target = tmp_path / "out.jsonl"
    assert main(repo.arguments(target, "--rounds", "5", "--fail")) == 0
    assert results(target)["latency, x"]["labels"]["verdict"] == "within noise"


def test_an_unknown_revision_is_an_error(
    repo: Repo, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    repo.write(10.0)
    repo.commit()
    for revision, told in (("nonsense", "no commit 'nonsense'"), ("", "'' is not a revision")):
        assert main([revision, *repo.arguments(tmp_path / "out.jsonl")[1:]]) == 2
        assert f"INVALID_REQUEST: {told}" in capsys.readouterr().out
    assert leftovers(tmp_path) == []


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
