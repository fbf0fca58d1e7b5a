"""Pure views: the control plane's JSON documents as tables of text."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from blockflow.monitor.text import (
    NONE,
    age,
    amount,
    count,
    duration,
    is_number,
    ms,
    percent,
    rate,
    ratio,
    size,
)
from blockflow.monitor.view import (
    Doc,
    listing,
    part,
    path_text,
    processes,
    recent_batch,
    recent_mean,
    without_the_gone,
)

GAP = 2
"""Characters between two columns."""

_SHORTEST_NAME = 8


@dataclass(frozen=True, slots=True)
class Column:
    """``right`` columns hold figures, others names; ``wide`` ones are shown if there is room.
    ``several``: a list of names in each cell."""

    name: str
    right: bool = True
    wide: bool = False
    several: bool = False


@dataclass(frozen=True, slots=True)
class Grid:
    """A table of text: title, columns, rows of cells."""

    title: str
    columns: tuple[Column, ...]
    rows: tuple[tuple[str, ...], ...]

    def fitted(self, width: int) -> Grid:
        """As much of it as ``width`` characters hold: wide columns go first, from the right; then
        the longest names are cut short; then further columns go. Figures stay whole."""
        limits = {i: self._extent(i) for i in range(len(self.columns))}

        def excess() -> int:
            return sum(limits.values()) + GAP * (len(limits) - 1) - width

        for i in [i for i in reversed(limits) if self.columns[i].wide]:
            if excess() > 0:
                del limits[i]
        names = [i for i in limits if not self.columns[i].right]
        while excess() > 0 and names:
            longest = max(names, key=limits.__getitem__)
            if limits[longest] <= _SHORTEST_NAME:
                break
            limits[longest] -= 1
        while excess() > 0 and len(limits) > 1:
            limits.popitem()
        keep = list(limits)
        return Grid(
            self.title,
            tuple(self.columns[i] for i in keep),
            tuple(
                tuple(_cut(row[i], limits[i], self.columns[i].several) for i in keep)
                for row in self.rows
            ),
        )

    def _extent(self, column: int) -> int:
        return max(len(self.columns[column].name), *(len(row[column]) for row in self.rows), 0)


def _names(*heads: str) -> tuple[Column, ...]:
    return tuple(Column(head, right=False) for head in heads)


def _lists(*heads: str) -> tuple[Column, ...]:
    return tuple(replace(c, several=True) for c in _names(*heads))


def _figures(*heads: str) -> tuple[Column, ...]:
    return tuple(Column(head) for head in heads)


def _if_room(columns: Sequence[Column]) -> tuple[Column, ...]:
    return tuple(replace(c, wide=True) for c in columns)


def block_grid(status: Doc) -> Grid:
    """What each block is and how it stands (``blockflow status``)."""
    columns = (
        *_names("block", "state"),
        *_figures("ready"),
        *_names("engine"),
        *_figures("params"),
        *_lists("tasks"),
        *_if_room(_names("device", "mode", "input")),
    )
    rows = tuple(
        (
            str(b.get("name")),
            str(b.get("state")),
            f"{count(b.get('ready'))}/{count(b.get('replicas'))}",
            _engine(b),
            amount(b.get("parameters")),
            ", ".join(str(t) for t in b.get("tasks") or []) or NONE,
            str(b.get("device", NONE)),
            str(b.get("mode", NONE)),
            str(b.get("input", NONE)),
        )
        for b in listing(status, "blocks")
    )
    return Grid("Blocks", columns, rows)


def load_grid(status: Doc, before: Doc | None = None) -> Grid:
    """Queues, times and rates per block (``blockflow top``).

    With the former document, times are means over the interval between the two and ``-`` where
    nothing ran in it; without, means since the workers started.
    """
    columns = (
        *_names("block", "state"),
        *_figures("queue", "batch", "wait ms", "ovh ms", "comp ms", "rho", "rows/s", "fail"),
        *_if_room(_figures("requests", "wait p99", "comp p99", "expired")),
    )
    rows = []
    for b in listing(status, "blocks"):
        kpi = part(b, "kpi")
        old = None if before is None else without_the_gone(str(b.get("name")), before, status)
        rows.append(
            (
                str(b.get("name")),
                str(b.get("state")),
                count(kpi.get("queue")),
                rate(recent_batch(kpi, old)),
                *(ms(recent_mean(kpi, old, p)) for p in ("wait", "overhead", "compute")),
                ratio(kpi.get("rho")),
                rate(kpi.get("rows_per_s")),
                count(kpi.get("failures")),
                amount(kpi.get("requests")),
                ms(_if_any(part(kpi, "wait"), "p99_ms")),
                ms(_if_any(part(kpi, "compute"), "p99_ms")),
                count(kpi.get("expired")),
            )
        )
    return Grid("Blocks", columns, tuple(rows))


def process_grid(status: Doc, found: Sequence[Doc] | None = None) -> Grid:
    """Every process (or those of ``found``) with its resources; GPU columns only where a process
    has one.

    ``comp`` are the threads that compute, ``2x1`` those of two lanes (``>`` marks a change under
    way), ``thr`` all of them.
    """
    found = processes(status) if found is None else found
    watched = status.get("monitor_hz") != 0
    gpu = any(part(p, "process").get("gpu_util_percent") is not None for p in found)
    columns = [
        *_names("process", "state"),
        *_figures("pid", "comp", "cpu", "rss", "pss", "uss", "slots", "starts"),
        *_if_room(_figures("arena", "thr", "fds", "up", "start ms")),
    ]
    if gpu:
        columns[9:9] = [Column("gpu"), Column("gpu mem"), Column("watt", wide=True)]
    rows = []
    for p in found:
        k = part(p, "process")
        slots = f"{count(k['slots_used'])}/{count(k['slots'])}" if k.get("slots") else NONE
        memory = [size(k.get(f"arena_{of}")) for of in ("used", "committed", "bytes")]
        restarts: Any = p.get("restarts")
        cells = [
            str(p.get("name")),
            str(p.get("state")),
            count(p.get("pid")),
            _compute_threads(p),
            percent(k.get("cpu_percent")) if watched else NONE,
            size(k.get("rss")),
            size(k.get("pss")),
            size(k.get("uss")),
            slots,
            count(restarts + 1) if is_number(restarts) else NONE,
            "/".join(memory) if k.get("slots") else NONE,
            count(k.get("threads")),
            count(k.get("fds")),
            age(p.get("uptime_s")),
            ms(p.get("start_ms")),
        ]
        if gpu:
            figures = percent(k.get("gpu_util_percent")), size(k.get("gpu_memory"))
            cells[9:9] = [*figures, rate(k.get("gpu_power_w"))]
        rows.append(tuple(cells))
    return Grid("Processes", tuple(columns), tuple(rows))


def task_grid(status: Doc) -> Grid:
    """Each task's path and what became of its requests."""
    columns = (
        *_names("task", "path"),
        *_figures("req/s", "ok", "failed", "rejected", "p50 ms", "p99 ms"),
        *_if_room(_figures("in ms", "out ms", "rows")),
    )
    rows: list[tuple[str, ...]] = []
    for t in listing(status, "tasks"):
        kpi = part(t, "kpi")
        latency = part(kpi, "latency")
        rows.append(
            (
                str(t.get("name")),
                path_text(t),
                rate(kpi.get("per_s")),
                amount(kpi.get("ok")),
                _sum(kpi.get("failed")),
                _sum(kpi.get("rejected")),
                ms(_if_any(latency, "p50_ms")),
                ms(_if_any(latency, "p99_ms")),
                ms(_if_any(part(kpi, "ingress"), "p50_ms")),
                ms(_if_any(part(kpi, "egress"), "p50_ms")),
                amount(kpi.get("rows")),
            )
        )
        rows += _variant_rows(t, part(kpi, "variants"))
    return Grid("Tasks", columns, tuple(rows))


def _variant_rows(task: Doc, variants: Doc) -> list[tuple[str, ...]]:
    """What each path of a task with a canary has answered since the canary was published."""
    canary = part(task, "canary")
    share = canary.get("share")
    if not canary or not is_number(share):
        return []
    rows: list[tuple[str, ...]] = []
    for name, path, of in (("stable", task, 1 - share), ("canary", canary, share)):
        kpi = part(variants, name)
        latency = part(kpi, "latency")
        rows.append(
            (
                f"  {name} {100 * of:g}%",
                path_text(path),
                NONE,
                amount(kpi.get("ok")),
                _sum(kpi.get("failed")),
                NONE,
                ms(_if_any(latency, "p50_ms")),
                ms(_if_any(latency, "p99_ms")),
                NONE,
                NONE,
                NONE,
            )
        )
    return rows


def history_grid(epochs: Sequence[Doc]) -> Grid:
    """The epochs that are remembered (``blockflow history``)."""
    columns = (*_figures("epoch", "when"), *_names("how"), *_lists("tasks", "note"))
    rows = []
    for e in epochs:
        missing = e.get("missing", [])
        if isinstance(missing, list):
            note = f"gone: {', '.join(map(str, missing))}" if missing else ""
        else:
            note = "the repository is away"
        rows.append(
            (
                count(e.get("epoch")),
                str(e.get("when") or NONE),
                str(e.get("how", NONE)),
                ", ".join(part(part(e, "posted"), "tasks")),
                "in force" if e.get("in_force") else note,
            )
        )
    return Grid("Epochs", columns, tuple(rows))


def contract_grid(tasks: Sequence[Doc]) -> Grid:
    """What each task takes and gives (``blockflow tasks``)."""
    columns = (*_names("task", "path", "input", "output"), *_figures("rows", "deadline"))
    rows = tuple(
        (
            str(t.get("name")),
            path_text(t),
            str(t.get("input", NONE)),
            str(t.get("output", NONE)),
            count(t.get("max_rows")),
            duration(t.get("deadline_ms")),
        )
        for t in tasks
    )
    return Grid("Tasks", columns, rows)


def _engine(block: Doc) -> str:
    """``exported``, or ``openvino int8`` where it is not the artifact's own precision."""
    engine, precision = str(block.get("engine", NONE)), block.get("precision")
    return engine if precision in (None, "auto", "fp32") else f"{engine} {precision}"


def _compute_threads(worker: Doc) -> str:
    """``2``, two lanes of one thread each as ``2x1``; ``1>2`` while a worker has not yet taken up
    what it was told."""
    told = _lanes_and_threads(worker.get("lanes"), worker.get("threads"))
    if worker.get("threads_now") is None:
        return told
    now = _lanes_and_threads(worker.get("lanes_now"), worker["threads_now"])
    return told if now == told else f"{now}>{told}"


def _lanes_and_threads(lanes: Any, threads: Any) -> str:
    return f"{lanes}x{count(threads)}" if is_number(lanes) and lanes > 1 else count(threads)


def _cut(text: str, limit: int, several: bool) -> str:
    """The beginning of a list; of a name and of a path both ends. Names of one family differ in
    their last letters, replicas in their numbers, tasks on one trunk in their last block."""
    if len(text) <= limit:
        return text
    end = 0 if several else (limit - 1) // 2
    return f"{text[: limit - 1 - end]}…{text[len(text) - end :]}"


def _if_any(summary: Doc, name: str) -> Any:
    """A figure of a summary, None when nothing was recorded."""
    return summary.get(name) if summary.get("count") else None


def _sum(by_code: Any) -> str:
    """A count per error code, with the most frequent code named, and how many of them it has where
    there are others: ``11, 9 DEADLINE_EXCEEDED``."""
    if not isinstance(by_code, Mapping) or not by_code:
        return "0" if isinstance(by_code, Mapping) else NONE
    total = sum(n for n in by_code.values() if is_number(n))
    worst = max(by_code, key=lambda code: by_code[code] if is_number(by_code[code]) else 0)
    if len([n for n in by_code.values() if n]) > 1:
        return f"{amount(total)}, {amount(by_code[worst])} {worst}"
    return f"{amount(total)} {worst}"
