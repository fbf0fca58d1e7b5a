"""Numbers on the command lines of benchmarks, and where a run of less puts its figures."""

from __future__ import annotations

import argparse
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from blockflow.bench import hops, overload, updates
from blockflow.bench.faultsim import run as faultsim
from blockflow.bench.fuzz import run as fuzz
from blockflow.bench.options import count, parse_rounds, positive, result_path, some_of


def test_numbers_have_bounds() -> None:
    assert (count("7"), positive("0.5")) == (7, 0.5)
    for text in ("0", "-1", "1.5", "x", "", "inf"):
        with pytest.raises(argparse.ArgumentTypeError, match="from 1 on"):
            count(text)
    for text in ("0", "-1", "x", "", "inf", "nan", "1e999"):
        with pytest.raises(argparse.ArgumentTypeError, match="above 0"):
            positive(text)


def test_names_are_some_of_those_that_are_known() -> None:
    names = some_of(("a", "b"))
    assert (names("b, a"), names("")) == (["b", "a"], [])
    with pytest.raises(argparse.ArgumentTypeError, match="some of: a, b"):
        names("a,c")


def test_rounds_change_the_plan_and_less_has_a_file_of_its_own() -> None:
    def call(*words: str) -> tuple[hops.Plan, str]:
        plan, args = parse_rounds(words, "hops", "", hops.FULL, hops.QUICK)
        return plan, result_path(args, "hops", whole=plan.rounds >= hops.FULL.rounds).name

    assert call() == (hops.FULL, "hops.jsonl")
    assert call("--rounds", "13") == (replace(hops.FULL, rounds=13), "hops.jsonl")
    assert call("--rounds", "3")[1] == "hops-part.jsonl"
    assert call("--quick") == (hops.QUICK, "hops-quick.jsonl")
    assert call("--rounds", "3", "--json", "x.jsonl")[1] == "x.jsonl"


@pytest.mark.parametrize(
    ("main", "words"),
    [
        (hops.main, "--rounds 0"),
        (updates.main, "--updates 0"),
        (updates.main, "--updates 999"),
        (updates.main, "--clients 0"),
        (overload.main, "--seconds nan"),
        (faultsim.main, "--hours inf"),
        (faultsim.main, "--processes 0"),
        (fuzz.main, "--frames 0"),
        (fuzz.main, "--decoder-frames -1"),
    ],
)
def test_nonsense_is_refused_before_anything_starts(
    main: Any, words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        main(words.split())
    assert words.split()[0] in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "name"),
    [
        ("--seeds 1 --hours 24", "faultsim-part.jsonl"),
        ("--seeds 1000 --hours 1", "faultsim-part.jsonl"),
        ("--seeds 1000 --only stop", "faultsim-part.jsonl"),
        ("--seeds 1001 --hours 24", "faultsim.jsonl"),
    ],
)
def test_less_of_faultsim_does_not_take_the_place_of_a_whole_run(
    words: str, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def at_once(seeds: range, *_: Any) -> list[faultsim.Found]:
        return [faultsim.Found(seed, 1.0, 1, 1, 1, {"ok": 1}, {}) for seed in seeds]

    monkeypatch.setattr(faultsim, "run", at_once)
    monkeypatch.chdir(tmp_path)
    assert faultsim.main(words.split()) == 0
    assert [p.name for p in (tmp_path / "results").iterdir()] == [name]
