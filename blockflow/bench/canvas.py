"""A blank page for plots, by matplotlib, which is an optional package: without it whatever draws
raises what :func:`new_page` raises."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from blockflow.core.errors import make_error
from blockflow.engine.extras import how_to_install

PALETTE = ("#17779b", "#5a4a78", "#6a994e", "#f2b134", "#e4572e", "#bdbdbd", "#7f7f7f")
"""Colours of what is told apart by its order."""


def new_page(width: float, height: float, dpi: int = 120) -> Any:
    """An empty matplotlib figure of so many inches that needs no display.

    Raises:
        SystemError_: MISSING_EXTRA when matplotlib is not installed.
    """
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError as exc:
        raise make_error(
            "MISSING_EXTRA",
            "the picture is drawn by matplotlib, which is not installed",
            hint=how_to_install("demo"),
        ) from exc
    # No pyplot: it keeps figures in global state and looks for a display.
    page = Figure(figsize=(width, height), dpi=dpi, layout="constrained")
    FigureCanvasAgg(page)
    return page


def label_ticks(axis: Any) -> None:
    """Numbers at 1, 2 and 5 of each decade of a logarithmic axis, which by default may show a
    single one."""
    from matplotlib.ticker import LogLocator, NullLocator, StrMethodFormatter

    axis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axis.set_major_formatter(StrMethodFormatter("{x:g}"))
    axis.set_minor_locator(NullLocator())


def save_page(page: Any, path: Path) -> None:
    """Write a PNG without a date or version in it, so that the same plot is the same file. No plot
    has a frame."""
    for ax in page.axes:
        ax.spines[["top", "right"]].set_visible(False)
    path.parent.mkdir(parents=True, exist_ok=True)
    page.savefig(path, metadata={"Software": None})
