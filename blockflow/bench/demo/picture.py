"""The demo's picture: accuracy, latency, time per block and memory on one page."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from blockflow.bench.canvas import new_page, save_page
from blockflow.bench.demo.data import TASKS
from blockflow.bench.demo.measure import Deployment
from blockflow.bench.demo.report import MIB, block_means
from blockflow.bench.statistics import percentile

PARTS = (
    ("transit_ms", "on the way", "#bdbdbd"),
    ("wait_ms", "wait", "#f2b134"),
    ("overhead_ms", "overhead", "#e4572e"),
    ("compute_ms", "compute", "#17779b"),
)
COLOURS = {"digit": "#17779b", "parity": "#e4572e", "high": "#6a994e", "all three": "#5a4a78"}
MEMORY = (
    ("state", "parameters", "#17779b"),
    ("uss", "private (USS)", "#f2b134"),
    ("pss", "PSS", "#bdbdbd"),
)


def draw(deployments: Sequence[Deployment], machine: str, path: Path) -> None:
    """Save the picture as PNG.

    Args:
        deployments: the modular one first.
        machine: one line about where this was measured.
        path: where to; missing folders are made.

    Raises:
        SystemError_: MISSING_EXTRA when matplotlib is not installed.
    """
    figure = new_page(12, 8.4)
    axes = figure.subplots(2, 2)
    _accuracy(axes[0][0], deployments[0])
    _latency(axes[0][1], deployments[0])
    _blocks(axes[1][0], deployments[0])
    _memory(axes[1][1], deployments)
    figure.suptitle("BlockFlow: three tasks from one shared trunk", fontsize=15, fontweight="bold")
    figure.supxlabel(machine, fontsize=8, color="#666666")
    save_page(figure, path)


def _accuracy(ax: Any, modular: Deployment) -> None:
    values = [modular.tasks[t].accuracy * 100 for t in TASKS]
    bars = ax.barh(range(len(TASKS)), values, color=[COLOURS[t] for t in TASKS], height=0.55)
    ax.bar_label(bars, labels=[f"{v:.2f}%" for v in values], padding=4)
    ax.set_yticks(range(len(TASKS)), TASKS)
    ax.invert_yaxis()
    ax.set_xlim(min(90.0, *(v - 2 for v in values)), 101.5)
    ax.set_xlabel("right answers on held-out images, % (axis cut)")
    ax.set_title("Accuracy", loc="left")


def _latency(ax: Any, modular: Deployment) -> None:
    runs = {t: modular.tasks[t].latencies_ms for t in TASKS}
    if modular.joint is not None:
        runs["all three"] = modular.joint.latencies_ms
    for name, samples in runs.items():
        ordered = sorted(samples)
        shares = [(i + 1) / len(ordered) * 100 for i in range(len(ordered))]
        p50, p99 = percentile(samples, 50), percentile(samples, 99)
        label = f"{name}: p50 {p50:.2f}, p99 {p99:.2f}"
        ax.step(ordered, shares, where="post", color=COLOURS[name], label=label, linewidth=1.8)
    # The few slowest would squeeze the rest into a corner; the legend tells their p99.
    ax.set_xlim(0, 1.25 * max(percentile(s, 99) for s in runs.values()))
    ax.set_ylim(0, 102)
    ax.set_xlabel("ms end to end, one request at a time")
    ax.set_ylabel("% of requests at most")
    ax.grid(alpha=0.25)
    ax.legend(loc="lower right", fontsize=8, frameon=False)
    ax.set_title("Latency", loc="left")


def _blocks(ax: Any, modular: Deployment) -> None:
    means = block_means(modular)
    left = [0.0] * len(means)
    for field, label, colour in PARTS:
        values = [getattr(m, field) for m in means]
        ax.barh(range(len(means)), values, left=left, color=colour, label=label, height=0.6)
        left = [a + b for a, b in zip(left, values, strict=True)]
    for i, total in enumerate(left):
        ax.annotate(
            f"{total:.2f}", (total, i), xytext=(4, 0), textcoords="offset points", va="center"
        )
    ax.set_yticks(range(len(means)), [m.block for m in means])
    ax.invert_yaxis()
    ax.set_xlim(0, 1.15 * max(left))
    ax.set_xlabel("mean ms per visit")
    _legend_above(ax, len(PARTS))
    ax.set_title("Where the time goes", loc="left")


def _memory(ax: Any, deployments: Sequence[Deployment]) -> None:
    width = 0.8 / len(MEMORY)
    for i, (field, label, colour) in enumerate(MEMORY):
        values = [getattr(d.memory, field) / MIB for d in deployments]
        at = [x + (i - (len(MEMORY) - 1) / 2) * width for x in range(len(deployments))]
        bars = ax.bar(at, values, width, color=colour, label=label)
        ax.bar_label(bars, labels=[f"{v:.0f}" for v in values], fontsize=8, padding=2)
    names = [
        f"{d.name}\n{d.memory.workers} process{'es' * (d.memory.workers > 1)}" for d in deployments
    ]
    ax.set_xticks(range(len(deployments)), names)
    ax.set_ylabel("MiB, all workers together")
    _legend_above(ax, len(MEMORY))
    ax.set_title("Memory", loc="left")


def _legend_above(ax: Any, columns: int) -> None:
    """In one line above the axes: within, a bar may end anywhere."""
    ax.legend(
        loc="lower right",
        bbox_to_anchor=(1.0, 0.99),
        ncols=columns,
        fontsize=8,
        frameon=False,
        handlelength=1.0,
        handletextpad=0.5,
        columnspacing=1.2,
        borderaxespad=0.2,
    )
