"""The batching benchmark's run: what is stored when, what an experiment that fails takes along."""

from __future__ import annotations

import io
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from batching_rig import profiles
from rich.console import Console
from rich.progress import Progress

from blockflow.bench.batching import run
from blockflow.bench.batching.plan import COST, FULL, INPUT, LBCI, LOAD, OPERATOR, SHARED, TINY
from blockflow.bench.batching.rig import Rig
from blockflow.bench.batching.run import Bench, Book, measure_all
from blockflow.bench.batching.steady import Steady
from blockflow.bench.calibration import NAME
from blockflow.bench.results import Figure, ResultFile
from blockflow.core.errors import RequestError


def figure(experiment: str, value: float = 1.0) -> Figure:
    return Figure("x", "y", None, None, None, value, "1", 1, labels={"experiment": experiment})


def values(path: Path) -> dict[str, float]:
    """By experiment, of all runs in the file."""
    figures = [g for r in ResultFile(path, "batching").runs() for g in r.figures]
    of = {g.labels["experiment"]: g.value for g in figures if g.labels}
    assert len(of) == len([g for g in figures if g.labels]), "something is there twice"
    return of


def book_of(path: Path, command: str, monkeypatch: pytest.MonkeyPatch) -> Book:
    monkeypatch.setattr(run, "calibrate", lambda: [1.0, 1.0])
    return Book(path, command)


def test_what_is_not_measured_anew_stays_even_if_a_run_ends_in_between(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "batching.jsonl"
    former = [figure(name) for name in (LBCI, LOAD, SHARED)]
    ResultFile(path, "batching", "make all").write(former)
    book = book_of(path, "make again", monkeypatch)
    book.add(LBCI, [figure(LBCI, 2.0)])
    # Whoever interrupts it here has the first one anew and the others as they were.
    assert values(path) == {LBCI: 2.0, LOAD: 1.0, SHARED: 1.0}
    commands = {r.command: r for r in ResultFile(path, "batching").runs()}
    assert {g.labels["experiment"] for g in commands["make all"].figures} == {LOAD, SHARED}
    # And how steady the machine was while it was measured.
    assert NAME in {g.name for g in commands["make again"].figures}
    book.add(LOAD, [figure(LOAD, 2.0)])
    book.add(COST, [figure(COST, 2.0)])
    assert values(path) == {LBCI: 2.0, LOAD: 2.0, SHARED: 1.0, COST: 2.0}
    (again,) = [r for r in ResultFile(path, "batching").runs() if r.command == "make again"]
    assert len([g for g in again.figures if g.name == NAME]) == 3  # once, not after each
    book_of(path, "make shared", monkeypatch).add(SHARED, [figure(SHARED, 3.0)])
    assert values(path) == {LBCI: 2.0, LOAD: 2.0, SHARED: 3.0, COST: 2.0}


def test_the_same_command_once_more_takes_the_place_of_its_own_figures(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "batching.jsonl"
    for value in (1.0, 2.0):
        book = book_of(path, "make all", monkeypatch)
        for name in (LBCI, LOAD)[: 2 if value == 1.0 else 1]:
            book.add(name, [figure(name, value)])
    assert values(path) == {LBCI: 2.0, LOAD: 1.0}


def test_another_machine_s_figures_do_not_stay(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "batching.jsonl"
    ResultFile(path, "batching").write([figure(LOAD)], machine={"cpu": "another"})
    book_of(path, "make", monkeypatch).add(LBCI, [figure(LBCI)])
    assert values(path) == {LBCI: 1.0}


def test_virtual_time_needs_no_steady_machine(tmp_path: Path) -> None:
    path = tmp_path / "reasons.jsonl"
    assert Book(path, "make", steady=False).add("reasons", [figure("reasons")]) is None
    (one,) = ResultFile(path, "batching").runs()
    assert [g.name for g in one.figures] == ["x"]


@pytest.mark.parametrize("error", [RequestError("OVERLOADED", "full"), ZeroDivisionError("why")])
def test_an_experiment_that_fails_ends_no_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    path = tmp_path / "batching.jsonl"
    ResultFile(path, "batching", "make all").write([figure(LOAD)])

    def measure(name: str) -> list[Figure]:
        if name == LOAD:
            raise error
        return [figure(name, 2.0)]

    said = io.StringIO()
    book = book_of(path, "make again", monkeypatch)
    assert measure_all([LBCI, LOAD, COST], measure, book, Console(file=said)) == [LOAD]
    assert values(path) == {LBCI: 2.0, LOAD: 1.0, COST: 2.0}
    assert type(error).__name__ in said.getvalue()
    assert "fixed work" in said.getvalue()


def test_an_interrupt_ends_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def measure(_name: str) -> list[Figure]:
        raise KeyboardInterrupt

    book = book_of(tmp_path / "x.jsonl", "make", monkeypatch)
    with pytest.raises(KeyboardInterrupt):
        measure_all([LBCI, LOAD], measure, book, Console(file=io.StringIO()))


def test_how_to_measure_what_failed() -> None:
    for words in (["--quick", "--only", "lbci,load"], ["--only=lbci,load", "--quick"]):
        assert run._without_only(words) == ["--quick"]


def test_a_full_run_profiles_each_model_anew_and_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is served is laid beside profiles of the same run, not of another day's machine."""
    profiled: list[tuple[str, bool]] = []

    def profile(_folder: Path, recipe: Any, *_: Any, again: bool = False) -> Any:
        profiled.append((recipe.name, again))
        return profiles(recipe.blocks, recipe.lengths)

    def nothing(*_: Any) -> Sequence[Figure]:
        return []

    monkeypatch.setattr(run, "profile", profile)
    for module in (run.lbci, run.diversity, run.cost, run.reasons):
        monkeypatch.setattr(module, "measure", nothing)
    nobody: Any = None
    for plan, again in ((FULL, True), (TINY, False)):
        profiled.clear()
        steady = Steady(0, work=lambda: 1.0)
        rig = Rig(Path("blocks"), nobody, nobody, Progress(disable=True), steady)
        bench = Bench(replace(plan, simulated=10), rig)
        for name in (LBCI, LOAD, INPUT, OPERATOR, COST):
            bench.run(name)
        models = {plan.lbci.name} | {d.recipe.name for d in plan.diversities.values()}
        assert sorted(profiled) == sorted((name, again) for name in models)
    profiled.clear()
    bench.run("reasons")  # explains the last run's figures, by its profiles
    assert {again for _, again in profiled} == {False}
