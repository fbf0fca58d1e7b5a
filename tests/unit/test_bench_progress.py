"""``blockflow bench``: the line that tells how far it is, and what an option says of itself."""

from __future__ import annotations

from io import StringIO
from typing import get_type_hints

import pytest
from rich.console import Console

from blockflow.bench.mlperf.settings import PERCENTILE, Scenario
from blockflow.bench.mlperf.tally import Counts
from blockflow.cli import bench


def said(*, terminal: bool, counts: Counts | None) -> str:
    """What is written where the last thing that is shown is this."""
    text = StringIO()
    console = Console(file=text, force_terminal=terminal, width=100, highlight=False)
    with bench.shown(console) as show:
        show("single-stream", None)
        if counts is not None:
            show("single-stream", counts)
    return text.getvalue()


@pytest.mark.parametrize(
    ("counts", "line"),
    [
        (None, "single-stream"),
        (Counts(9, 7), "single-stream: 7 of 9 samples"),
        (
            Counts(9, 4, failed={"BLOCK_FAILED": 2, "OVERLOADED": 1}),
            "single-stream: 4 of 9 samples, 3 failed",
        ),
    ],
)
def test_a_terminal_has_one_line_that_tells_how_far_it_is(counts: Counts | None, line: str) -> None:
    shown = said(terminal=True, counts=counts)
    assert line in shown
    assert ("failed" in shown) is ("failed" in line)
    assert "\n" not in shown.partition(line)[0].replace("\r", "")


def test_what_is_no_terminal_has_a_line_per_step_and_none_per_heartbeat() -> None:
    assert said(terminal=False, counts=Counts(9, 7)) == "single-stream\n"


def test_the_options_name_the_percentiles_that_are_in_force() -> None:
    hints = get_type_hints(bench.bench, include_extras=True)
    (option,) = hints["percentile"].__metadata__
    for scenario in (Scenario.SINGLE_STREAM, Scenario.MULTISTREAM, Scenario.SERVER):
        told = option.help.partition("Default: ")[2]
        figure = next(part for part in told.split(",") if str(scenario) in part)
        assert f"{100 * PERCENTILE[scenario]:g}" in figure
    assert "preset" in option.help
