"""README.md's figures, and passages that are written into pages."""

from __future__ import annotations

from pathlib import Path

import pytest

from blockflow.bench.docs import front_figures, read_all
from blockflow.bench.passage import Passage
from blockflow.bench.pipeline_figures import APART, HOP, LESS, RATIO, TENSORMQ, ZEROMQ
from blockflow.bench.readme import COSTS, costs
from blockflow.bench.readme import PAGE as FRONT_PAGE
from blockflow.bench.results import Figure

DOCS = Path(__file__).resolve().parents[2] / "docs"


def test_the_front_page_says_what_make_bench_has_found() -> None:
    page = (DOCS.parent / FRONT_PAGE).read_text(encoding="utf-8")
    stored, _, _ = read_all(DOCS)
    assert page == COSTS.fill(page, front_figures(stored)), "run: make bench-docs"
    assert "make bench" in front_figures({})


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


def test_a_passage_stands_between_its_marks() -> None:
    passage = Passage("things")
    page = f"before\n{passage.begin}\n\nold\n\n{passage.end}\nafter\n"
    once = passage.fill(page, "new")
    assert once == f"before\n{passage.begin}\n\nnew\n\n{passage.end}\nafter\n"
    assert passage.fill(once, "new") == once
    with pytest.raises(ValueError, match="no place"):
        passage.fill("no marks", "new")
