"""README.md's figures, and passages that are written into pages."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from blockflow.bench.batching.figures import MEMORY_RATIO, SATURATED_RATIO
from blockflow.bench.batching.plan import HEADS, SEVERAL, SHARED
from blockflow.bench.batching.several_figures import ALL, ALONE_RATIO, EACH, FULL_MODELS
from blockflow.bench.docs import front_page, read_all
from blockflow.bench.passage import Passage
from blockflow.bench.pipeline_figures import (
    APART,
    HOP,
    LESS,
    RATIO,
    TENSORMQ,
    TENSORMQ_AWAKE,
    ZEROMQ,
)
from blockflow.bench.readme import PAGE as FRONT_PAGE
from blockflow.bench.readme import costs, savings
from blockflow.bench.results import Figure

DOCS = Path(__file__).resolve().parents[2] / "docs"


def test_the_front_page_says_what_make_bench_has_found() -> None:
    page = (DOCS.parent / FRONT_PAGE).read_text(encoding="utf-8")
    stored, _, _ = read_all(DOCS)
    assert page == front_page(page, stored), "run: make bench-docs"
    empty = front_page(page, {})
    assert "yet: `make bench`" in empty and "yet: `make bench-batching`" in empty


def test_all_machines_of_a_sentence_are_named() -> None:
    stored, _, _ = read_all(DOCS)
    page = (DOCS.parent / FRONT_PAGE).read_text(encoding="utf-8")
    batching = stored["batching"]
    runs = [
        replace(run, machine={**run.machine, "cpu": f"CPU {i % 2}"})
        for i, run in enumerate(batching.runs)
    ]
    told = " ".join(front_page(page, {"batching": replace(batching, runs=runs)}).split())
    assert "2 cores, CPU 0 and CPU 1)" in told


def test_costs_are_told_by_rows() -> None:
    def figure(name: str, mode: str, rows: int, value: float) -> Figure:
        return Figure(name, mode, rows, value, None, value, "x", 5)

    found = [
        *(figure(RATIO, TENSORMQ, rows, 1 + 0.1 / rows) for rows in (1, 8)),
        *(figure(RATIO, APART, rows, 1.0) for rows in (1, 8)),
        *(figure(HOP, TENSORMQ, rows, 0.771) for rows in (8, 1)),
        *(figure(LESS, ZEROMQ, rows, 6.68) for rows in (1, 8)),
    ]
    assert " ".join(costs(found, {"cores": 2, "cpu": "a CPU"}).split()) == (
        "With 1 and 8 rows the four processes took 1.10 and 1.01 times as long as the one (bare "
        "processes that take turns, without BlockFlow: 1.00 and 1.00), on 2 cores (a CPU). A hop "
        "cost 0.77 and 0.77 ms, one with whole tensors 6.68 and 6.68 times as much."
    )
    found += [figure(HOP, TENSORMQ_AWAKE, rows, rows / 4) for rows in (1, 8)]
    assert "0.77 and 0.77 ms (0.25 and 2.00 with idle cores kept awake: a task's " in " ".join(
        costs(found, {}).split()
    )


def test_savings_are_told_by_where_the_tasks_part() -> None:
    def figure(name: str, mode: str, value: float, **labels: object) -> Figure:
        return Figure(name, mode, None, None, None, value, "x", 5, labels=labels)

    several = {"experiment": SEVERAL, "tasks": 8}
    found = [figure(MEMORY_RATIO, "any", 0.62, experiment=SHARED)]
    found += [figure(MEMORY_RATIO, "any", 0.22, experiment=HEADS)]
    for own, more, less in (("layer4", 2.61, 0.4), ("fc", 7.1, 0.16)):
        for base, by in ((FULL_MODELS, 1.0), (EACH, 2.0)):
            mine = {**several, "own": own, "base": base}
            found += [figure(SATURATED_RATIO, ALL, more / by, **mine)]
            found += [figure(ALONE_RATIO, ALL, less * by, **mine)]
    text = " ".join(savings(found, {"cores": 2, "cpu": "a CPU"}).split())
    assert "classifier, beside 8 whole models: 7.10 times as many answers per second" in text
    assert "in 0.16 of the time, and 0.22 of the memory." in text
    assert "(`layer4`) of their own as well: 2.61 times" in text
    assert text.endswith("in 0.40 of the time, and 0.62 of the memory. (2 cores, a CPU)")


def test_a_passage_stands_between_its_marks() -> None:
    passage = Passage("things")
    page = f"before\n{passage.begin}\n\nold\n\n{passage.end}\nafter\n"
    once = passage.fill(page, "new")
    assert once == f"before\n{passage.begin}\n\nnew\n\n{passage.end}\nafter\n"
    assert passage.fill(once, "new") == once
    with pytest.raises(ValueError, match="no place"):
        passage.fill("no marks", "new")
