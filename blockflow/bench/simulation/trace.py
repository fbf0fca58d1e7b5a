"""Traces: recorded arrivals from a file, one query per line.

CSV with a header, or JSON Lines, with the fields ``time`` (seconds from the start, ascending), and,
where known, ``task``, ``rows`` and ``length``.
"""

from __future__ import annotations

import csv
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from blockflow.bench.options import nonsense
from blockflow.core import limits

FIELDS = ("time", "task", "rows", "length")
MAX_BYTES = 256 * 1024 * 1024
MAX_S = 366 * 24 * 3600
"""A trace's last query comes within a year; the times of a clock do not."""

Entry = tuple[int, str | None, int | None, int | None]
"""Time in nanoseconds, task, rows, length; None = not recorded."""


def read_trace(path: Path) -> tuple[Entry, ...]:
    """All entries of a trace.

    Raises:
        RequestError: INVALID_REQUEST with the line that is wrong.
    """
    try:
        if path.stat().st_size > MAX_BYTES:
            raise nonsense(f"more than {MAX_BYTES} bytes", str(path))
        text = path.read_text(encoding="utf-8-sig")  # spreadsheets put a mark in front
    except (OSError, UnicodeDecodeError) as e:
        raise nonsense(f"the trace cannot be read: {e}", str(path)) from e
    lines = _json_lines if path.suffix == ".jsonl" else _csv_lines
    entries: list[Entry] = []
    last = 0
    for number, fields in lines(text, path):
        entry = _entry(fields, f"{path}:{number}")
        if entry[0] < last:
            raise nonsense("time runs backwards", f"{path}:{number}", "sort the trace by time")
        last = entry[0]
        entries.append(entry)
    if not entries:
        raise nonsense("the trace has no entries", str(path))
    return tuple(entries)


def _csv_lines(text: str, path: Path) -> Iterator[tuple[int, Mapping[str, Any]]]:
    reader = csv.DictReader(text.splitlines())
    try:
        heads = [h.strip() for h in reader.fieldnames or ()]
        if "time" not in heads or set(heads) - set(FIELDS):
            raise nonsense(
                f"its columns are {', '.join(heads) or 'none'}",
                f"{path}:1",
                f"'time', and of these what is known: {', '.join(FIELDS[1:])}",
            )
        twice = next((h for h in heads if heads.count(h) > 1), None)
        if twice is not None:
            raise nonsense(f"the column {twice!r} stands twice", f"{path}:1", "name each once")
        reader.fieldnames = heads
        for row in reader:
            if None in row:
                raise nonsense("more values than columns", f"{path}:{reader.line_num}")
            yield reader.line_num, {k: v.strip() for k, v in row.items() if v and v.strip()}
    except csv.Error as e:
        raise nonsense(f"no CSV: {e}", f"{path}:{reader.line_num + 1}") from e


def _json_lines(text: str, path: Path) -> Iterator[tuple[int, Mapping[str, Any]]]:
    for number, line in enumerate(text.splitlines(), 1):
        if not line.strip():
            continue
        where = f"{path}:{number}"
        try:
            fields = json.loads(line)
        except (ValueError, RecursionError) as e:
            raise nonsense(f"no JSON: {e}", where) from e
        if not isinstance(fields, dict):
            raise nonsense("not a JSON object", where)
        unknown = set(fields) - set(FIELDS)
        if unknown:
            raise nonsense(f"unknown field {min(unknown)!r}", where, f"known: {', '.join(FIELDS)}")
        yield number, {k: v for k, v in fields.items() if v is not None}


def _entry(fields: Mapping[str, Any], where: str) -> Entry:
    if "time" not in fields:
        raise nonsense("no time", where)
    try:
        if isinstance(fields["time"], bool):  # JSON's true would be a second
            raise TypeError
        time_s = float(fields["time"])
    except (TypeError, ValueError, OverflowError):
        raise nonsense(f"time {str(fields['time'])[:40]!r} is no number", where) from None
    if not 0 <= time_s <= MAX_S:
        raise nonsense(
            f"time {time_s:g} is not in seconds from the start",
            where,
            f"0 to {MAX_S} (a year); from a clock's times take the first one off",
        )
    task = fields.get("task")
    if task is not None and not isinstance(task, str):
        raise nonsense(f"task {task!r} is no text", where)
    rows = _count(fields, "rows", limits.MAX_ROWS, where)
    length = _count(fields, "length", limits.MAX_DIM, where)
    return round(time_s * 1e9), task, rows, length


def _count(fields: Mapping[str, Any], name: str, most: int, where: str) -> int | None:
    value = fields.get(name)
    if value is None:
        return None
    try:
        count = int(value) if isinstance(value, str) else value
    except ValueError:
        count = None
    if isinstance(count, bool) or not isinstance(count, int) or not 1 <= count <= most:
        raise nonsense(f"{name} {value!r} is no whole number in 1..{most}", where)
    return count
