"""What ``blockflow profile`` prints: whole numbers, what the marks mean, the command to repeat."""

from __future__ import annotations

import io
import shlex
from dataclasses import asdict

import pytest
from rich.console import Console, RenderableType

from blockflow.bench.profiling.plan import Effort
from blockflow.bench.profiling.report import legend, profile_table
from blockflow.bench.profiling.stored import Shelf, stored_tables
from blockflow.cli.main import load
from blockflow.cli.options import typed_command
from blockflow.core.profile import StageProfile
from blockflow.repository.profile_record import ProfileKey, ProfileRecord
from tests.unit.test_profile_table import point

EFFORT = Effort(confidence=0.01, seconds=0.3)


def shown(*what: RenderableType, width: int = 80) -> str:
    out = io.StringIO()
    for piece in what:
        Console(file=out, width=width, highlight=False).print(piece)
    return out.getvalue()


@pytest.mark.parametrize("width", range(28, 84, 4))
def test_no_figure_is_cut_off(width: int) -> None:
    points = [
        point(rows, ms, threads, length, runs=500, outliers=123, spread=1.234)
        for threads in (1, 16)
        for length, rows, ms in ((16384, 1, 0.023456), (16384, 4096, 123456.7))
    ]
    text = shown(profile_table("t", points, EFFORT), width=width)
    assert "…" not in text and "e+" not in text
    for figure in ("0.02346", "123457", "30.14", "0.02580", "135802", "123.4%", "500", "123"):
        assert figure in text.split()
    assert text.split().count("2.00%!") == 4


def test_more_time_is_offered_only_where_it_helps() -> None:
    sure = point(1, 1.0, low_ms=1.0, high_ms=1.0)
    slow, spent = point(2, 90.0, runs=4), point(4, 0.1, runs=EFFORT.max_runs)
    assert legend([sure], EFFORT) == ""
    assert legend([sure, slow, slow], EFFORT) == (
        "! less sure than ±1%: 2 cells after 0.3 s: --seconds gives more time"
    )
    told = legend([spent], EFFORT)
    assert "1 cell after 500 runs" in told and "--seconds" not in told
    both = legend([slow, spent], EFFORT)
    assert "1 cell after 0.3 s" in both and "1 cell after 500 runs" in both
    assert "±0.01%" in legend([slow], Effort(confidence=0.0001))
    assert "±7%" in legend([point(1, 1.0, high_ms=2.0)], Effort(confidence=0.07))


@pytest.mark.parametrize("settings", [asdict(EFFORT), {}, {"confidence": "x"}])
def test_stored_tables_have_the_marks_of_what_was_asked(settings: dict[str, object]) -> None:
    unsure, sure = point(1, 2.0), point(2, 2.0, low_ms=2.0, high_ms=2.0)
    table = StageProfile("a", "ab" * 32, "echo", "fp32", "m1", (unsure, sure))
    key = ProfileKey(("a",), "echo", "fp32")
    record = ProfileRecord(key, table, (), {}, {}, settings, True, "2026-01-01T00:00:00+00:00")
    pieces = stored_tables(Shelf("a", "m1", ((record, ()),), {}, ("echo", "fp32")))
    text = shown(*pieces)
    assert (text.count("%!"), "! less sure than ±1%: 1 cell" in text) == (
        (1, True) if len(settings) > 1 else (0, False)
    )


@pytest.mark.parametrize(
    "words",
    [
        "profile small --threads 1 --rows 1,2,4,8 --seconds 0.3",
        "profile a b --repository 'my blocks' --option k=1 --option 'j=a b' --again --json",
        "profile --chain trunk,head --results out.jsonl",
        "profile --task digit --topology t.json",
        "profile",
        "simulate --example --policy none --policy 'lbci:t_opt_ms=100,stages=[1, 2]' --apart",
    ],
)
def test_a_command_is_given_back_as_it_was_typed(words: str) -> None:
    name, *rest = shlex.split(words)
    context = load(name).make_context(name, list(rest))
    given = typed_command(context)
    assert shlex.split(given)[:2] == ["blockflow", name]
    again = load(name).make_context(name, shlex.split(given)[2:])
    assert again.params == context.params
    assert sorted(shlex.split(given)[2:]) == sorted(rest)
    if name == "profile":
        assert shlex.split(typed_command(context, "again")).count("--again") == 1
