"""Tables on a terminal: no number is cut off, however narrow it is."""

from __future__ import annotations

import io

import pytest
from rich.console import Console, RenderableType

from blockflow.bench.grid import (
    BREAK,
    Grid,
    bounds,
    digits,
    size_text,
    with_bounds,
)
from blockflow.bench.numerals import plain, significant
from blockflow.bench.results import Figure, figure_table, latency_figure

HEADS = ("scenario", "deployment", "MiB, modular", "95%", "memory")
ROWS = [
    ("1", "blocks 1+2 fused", "9421.07", "12.9 to 13.1", "too few rounds to conclude"),
    BREAK,
    ("2", "1+2 and 3+4 fused", "75840.25", "-0.6 to -0.5", "less"),
]
GRID = Grid("saved", HEADS, ROWS, frozenset({"deployment", "memory"}))


def shown(what: RenderableType, width: int) -> list[str]:
    out = io.StringIO()
    Console(file=out, width=width).print(what)
    return out.getvalue().splitlines()


@pytest.mark.parametrize("width", [60, 64, 70, 80])
def test_texts_are_broken_before_numbers(width: int) -> None:
    lines = shown(GRID.rich(), width)
    assert max(map(len, lines)) <= width
    text = "\n".join(lines)
    for row in ROWS:
        for cell in (c for i, c in enumerate(row) if i in (0, 2, 3)):
            assert cell in text
    assert "…" not in text
    assert "too few" in text
    assert "deployment" in text  # nor is a word


def test_a_table_that_fits_is_not_broken_anywhere() -> None:
    assert len(shown(GRID.rich(), 200)) == 8
    assert any("1+2 and 3+4 fused" in line for line in shown(GRID.rich(), 90))


def test_where_nothing_fits_nothing_is_lost() -> None:
    lines = shown(GRID.rich(), 30)
    assert max(map(len, lines)) <= 30
    told = "".join(c for line in lines for c in line if not c.isspace() and c != "─")
    assert "…" not in told
    for row in (HEADS, *ROWS):
        assert sum(map(told.count, "".join(row))) >= len("".join(row).replace(" ", ""))


@pytest.mark.parametrize("width", range(24, 46, 3))
def test_numbers_that_do_not_fit_side_by_side_come_in_a_further_table(width: int) -> None:
    lines = shown(GRID.rich(), width)
    assert max(map(len, lines)) <= width
    words = " ".join(lines).split()
    for row in (ROWS[0], ROWS[2]):
        assert all(part in words for part in (*row[2].split(), *row[3].split()))
        assert words.count(row[0]) > 1, "each table says what its rows are about"
    assert words.count("saved") == 1


def test_keys_lead_every_part_and_each_other_column_comes_once() -> None:
    heads = ("thr", "rows", "ms", "p90")
    grid = Grid("t", heads, [("1", "32", "0.02310", "0.02400"), BREAK], keys=2)
    assert [part.heads for part in grid.narrowed(18)] == [heads[:3], ("thr", "rows", "p90")]
    assert [part.title for part in grid.narrowed(18)] == ["t", ""]
    assert [part.heads for part in grid.narrowed(1)] == [heads[:3], ("thr", "rows", "p90")]
    assert [part.heads for part in grid.narrowed(80)] == [heads]
    assert [part.keys for part in grid.split("thr")] == [1]
    assert len(Grid("t", ("a",), [("1",)]).narrowed(1)) == 1


def test_lines_of_a_cell_stand_below_each_other() -> None:
    cell = "0.0231\n0.0229-0.0234"
    grid = Grid("", ("policy", "mean ms", "p50"), [("none", cell, "12345")], frozenset({"policy"}))
    text = "\n".join(shown(grid.rich(), 32))
    assert all(part in text for part in (*cell.split(), "12345"))
    assert "none" in text and len(shown(grid.rich(), 32)) == len(shown(grid.rich(), 80))


def test_brackets_are_no_markup() -> None:
    grid = Grid("t[a]", ("h[b]", "n"), [("x[red]y", "1")], frozenset({"h[b]"}))
    text = "\n".join(shown(grid.rich(), 80))
    assert all(part in text for part in ("t[a]", "h[b]", "x[red]y"))


def test_numbers_have_no_exponent() -> None:
    values = (0.0, 13698.7, 0.0231, 9999.6, 1e-5, -12.345, 53.2)
    assert [significant(v) for v in values] == [
        *("0", "13699", "0.02310", "10000", "0.00001000", "-12.35", "53.20"),
    ]
    assert significant(99.96, 3) == "100"
    assert [plain(v) for v in (30.0, 42.4, 13698.7, 1e6, 0.5)] == [
        *("30", "42.4", "13699", "1000000", "0.5"),
    ]


def test_figures_have_no_empty_columns_and_whole_names() -> None:
    counted = Figure("requests", "CONNECTION_LOST", None, None, None, 70, "requests", 5)
    lines = shown(figure_table("5 seeds", [counted]), 60)
    assert "CONNECTION_LOST" in "\n".join(lines)
    assert "p50" not in lines[2] and "batch" not in lines[2]
    timed = shown(figure_table("", [counted, latency_figure("a", "b", 8, [1.5])]), 80)
    assert all(head in "\n".join(timed) for head in ("batch", "p50 ms", "p90 ms"))


def test_a_grid_is_the_same_on_terminal_and_page() -> None:
    grid = Grid("t", ("a", "n"), [("x", "1"), BREAK, ("y", "2")], frozenset({"a"}))
    assert grid.markdown() == "| a | n |\n| --- | --: |\n| x | 1 |\n| y | 2 |"
    assert Grid("t", ("a",), [("x|y\nz",)]).markdown().endswith("| x\\|y z |")
    assert grid.rich().row_count == 2
    assert [(g.title, list(g.rows)) for g in grid.split("a")] == [
        ("t: x", [("1",)]),
        ("t: y", [("2",)]),
    ]


def test_numbers_keep_three_digits_that_mean_something() -> None:
    assert [digits(v) for v in (0, 0.01234, 1.234, 12.34, 1234.5)] == [
        *("0", "0.012", "1.23", "12.3"),
        "1234",
    ]
    assert [digits(v) for v in (0.002, -0.0004, 0.00999, 0.01)] == [
        *("0.0020", "-0.00040", "0.0100"),
        "0.010",
    ]
    assert bounds(None, None) == ""
    assert bounds(-3.2, -1.0) == "-3.20 to -1.00"
    assert with_bounds(1.0, 0.98, 1.02) == "1.000 (0.980-1.02)"
    assert with_bounds(1.0, None, None) == "1.000"
    assert [size_text(n) for n in (200, 1024, 16 * 1024, 100 * 2**20)] == [
        *("200 B", "1 KiB", "16 KiB", "100 MiB"),
    ]
