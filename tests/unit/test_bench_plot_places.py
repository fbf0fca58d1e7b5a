"""The names below a plot can be read, however many engines were measured."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any

import pytest

from blockflow.bench.contenders import CONTENDERS
from blockflow.bench.pipeline_figures import RATIO, THROUGHPUT
from blockflow.bench.plots import draw_ratios, draw_throughput
from blockflow.bench.results import Figure, interval_figure

pytest.importorskip("matplotlib")


@pytest.mark.parametrize(("name", "draw"), [(RATIO, draw_ratios), (THROUGHPUT, draw_throughput)])
@pytest.mark.parametrize("engines", [3, len(CONTENDERS)])
def test_no_name_lies_over_another(
    name: str, draw: Callable[[Sequence[Figure]], Any], engines: int
) -> None:
    found = [
        interval_figure(name, "tensormq", rows, [1.0, 1.1, 1.2], "x", {"engine": engine})
        for engine in [*CONTENDERS][-engines:]
        for rows in (1, 8, 32)
    ]
    page = draw(found)
    page.draw_without_rendering()
    (ax,) = page.axes
    boxes = [label.get_window_extent() for label in ax.get_xticklabels()]
    assert len(boxes) == 3 * engines
    assert all(one.x1 < other.x0 for one, other in pairwise(boxes))
