"""The demo's report: tables for people, figures for files."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from rich.console import Console
from rich.table import Table

from blockflow.bench.demo.data import TASKS
from blockflow.bench.demo.measure import IN_FLIGHT, Deployment, Memory
from blockflow.bench.results import MORE_IS_BETTER, Figure, latency_figure
from blockflow.bench.statistics import judge_value, percentile
from blockflow.client.collector import BlockMeans

MIB = 2**20
WHOLE_RUN = "whole run"
AIM_S = 180.0
"""Seconds from the command to its end, once everything is installed."""

QUESTIONS = {"digit": "which of 0-9", "parity": "odd or even", "high": "five or more"}


def task_table(deployment: Deployment) -> Table:
    """Accuracy, latency and throughput per task, and of all tasks in one request."""
    table = _table("Tasks")
    table.add_column("task")
    for head in ("accuracy", "p50 ms", "p99 ms", "requests/s"):
        table.add_column(head, justify="right")
    for name, task in deployment.tasks.items():
        table.add_row(
            f"{name}: {QUESTIONS[name]}",
            f"{task.accuracy:.2%}",
            f"{task.p50_ms:.2f}",
            f"{task.p99_ms:.2f}",
            f"{task.per_second:.0f}",
        )
    joint = deployment.joint
    if joint is not None:
        apart = {name: task.accuracy for name, task in deployment.tasks.items()}
        table.add_section()
        table.add_row(
            "all three in one request",
            "as above" if dict(joint.accuracy) == apart else _shares(joint.accuracy),
            f"{percentile(joint.latencies_ms, 50):.2f}",
            f"{percentile(joint.latencies_ms, 99):.2f}",
            f"{joint.per_second:.0f}",
        )
    table.caption = (
        f"Latency: one request at a time, as the client sees it. Throughput: {IN_FLIGHT} under way."
    )
    return table


def _shares(accuracy: Mapping[str, float]) -> str:
    return " ".join(f"{share:.1%}" for share in accuracy.values())


def block_table(deployment: Deployment) -> Table:
    """Where a single request's time went, block by block."""
    table = _table("Where the time went (mean ms per request, one at a time)")
    table.add_column("block")
    for head in ("visits", "on the way", "wait", "overhead", "compute"):
        table.add_column(head, justify="right")
    for b in block_means(deployment):
        table.add_row(
            b.block,
            str(b.count),
            f"{b.transit_ms:.3f}",
            f"{b.wait_ms:.3f}",
            f"{b.overhead_ms:.3f}",
            f"{b.compute_ms:.3f}",
        )
    return table


def block_means(deployment: Deployment) -> tuple[BlockMeans, ...]:
    """Means over the visits of all tasks; a shared block was visited by each of them."""
    visits: dict[str, list[BlockMeans]] = {}
    for task in deployment.tasks.values():
        for means in task.blocks:
            visits.setdefault(means.block, []).append(means)
    return tuple(_merged(block, parts) for block, parts in visits.items())


def _merged(block: str, parts: Sequence[BlockMeans]) -> BlockMeans:
    count = sum(p.count for p in parts)

    def mean(values: Iterable[float]) -> float:
        weighted = sum(v * p.count for v, p in zip(values, parts, strict=True))
        return weighted / count

    return BlockMeans(
        block,
        count,
        mean(p.transit_ms for p in parts),
        mean(p.wait_ms for p in parts),
        mean(p.overhead_ms for p in parts),
        mean(p.compute_ms for p in parts),
    )


def memory_table(deployments: Sequence[Deployment]) -> Table:
    """Memory and speed of the ways to serve the same three tasks."""
    table = _table("Modular against separate models")
    table.add_column("deployment")
    heads = ("workers", "weights MiB", "private MiB", "PSS MiB", "p50 ms", "req/s")
    for head in heads:
        table.add_column(head, justify="right")
    for d in deployments:
        digit = d.tasks[TASKS[0]]
        table.add_row(
            d.name,
            str(d.memory.workers),
            *(f"{size / MIB:.1f}" for size in (d.memory.state, d.memory.uss, d.memory.pss)),
            f"{digit.p50_ms:.2f}",
            f"{digit.per_second:.0f}",
        )
    table.caption = (
        "Weights: parameters and buffers. Private (USS): not shared with any process. "
        "PSS: with each process's part of what is shared. Speed: task digit."
    )
    return table


def verdict(modular: Memory, separate: Memory) -> str:
    """What the memory figures show, in a sentence or two, whichever way they fell out."""
    weights, private = modular.state / separate.state, modular.uss / separate.uss
    text = (
        f"The shared trunk is stored once: the weights take {weights:.0%} of what separate models "
        f"take. The workers' private memory is {private:.0%}"
    )
    if private <= 1:
        return text + "."
    each = (modular.uss - modular.state) / modular.workers / MIB
    return text + (
        f": with a model this small, {modular.workers} processes of {each:.0f} MiB each outweigh "
        "the weights that are saved."
    )


def together(deployment: Deployment) -> str:
    """What asking all tasks at once is worth; empty where it was not measured."""
    joint = deployment.joint
    if joint is None:
        return ""
    apart = sum(task.p50_ms for task in deployment.tasks.values())
    return (
        f"All three answers take {percentile(joint.latencies_ms, 50):.2f} ms in one request and "
        f"{apart:.2f} ms in three, one after the other (medians)."
    )


def figures(deployments: Sequence[Deployment], whole_run_s: float | None = None) -> list[Figure]:
    """One figure per number; the deployment's name is the mode's first part.

    Args:
        deployments: what was measured of each.
        whole_run_s: of a run that left nothing out.
    """
    out: list[Figure] = []
    if whole_run_s is not None:
        verdict = judge_value(whole_run_s, AIM_S)
        labels = {"goal": AIM_S, "verdict": str(verdict)}
        out.append(Figure.of(WHOLE_RUN, "all", whole_run_s, "s", 1, labels))
    for d in deployments:
        for name, task in d.tasks.items():
            mode = f"{d.name}/{name}"
            n = task.images
            share = task.accuracy * 100
            out.append(Figure.of("accuracy", mode, share, "%", n, MORE_IS_BETTER, batch=1))
            out.append(latency_figure("latency", mode, 1, task.latencies_ms))
            out.append(Figure.of("throughput", mode, task.per_second, "1/s", n, batch=1))
        if d.joint is not None:
            mode = f"{d.name}/all"
            out.append(latency_figure("latency", mode, 1, d.joint.latencies_ms))
            rate, n = d.joint.per_second, d.joint.images
            out.append(Figure.of("throughput", mode, rate, "1/s", n, batch=1))
        for b in block_means(d):
            for part in ("transit", "wait", "overhead", "compute"):
                value = float(getattr(b, f"{part}_ms"))
                out.append(Figure.of(part, f"{d.name}/{b.block}", value, "ms", b.count, batch=1))
        for part in ("state", "uss", "pss"):
            size = getattr(d.memory, part) / MIB
            out.append(Figure.of(part, d.name, size, "MiB", d.memory.workers))
    return out


def print_report(console: Console, deployments: Sequence[Deployment], separate: Deployment) -> None:
    """All tables; the first deployment is the modular one that the demo is about."""
    modular = deployments[0]
    for table in (task_table(modular), block_table(modular), memory_table(deployments)):
        console.print(table)
        console.print()
    console.print(together(modular))
    console.print(verdict(modular.memory, separate.memory))


def _table(title: str) -> Table:
    return Table(title=title, title_justify="left", title_style="bold", caption_justify="left")
