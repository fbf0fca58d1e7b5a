"""Accuracy of a classification run, from LoadGen's log of the answers.

    python -m blockflow.bench.mlperf.accuracy FOLDER

reads a run's folder again and prints what the report says.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from blockflow.bench.mlperf.job import ACCURACY_LOG, disk, write_json
from blockflow.bench.mlperf.library import Library
from blockflow.bench.options import nonsense
from blockflow.core.errors import BlockFlowError, RequestError

LABELS = "labels.json"
"""In an accuracy run's folder: the right classes and the answers' dtype, per task."""

TOP = (1, 5)


@dataclass(frozen=True, slots=True)
class Accuracy:
    """Shares 0..1 of ``rows`` whose right class is first, or among the first five.

    ``top5`` is None with fewer than six classes, where it would say nothing; ``missing`` rows had
    no answer and count as wrong.
    """

    task: str
    rows: int
    missing: int
    top1: float
    top5: float | None


@dataclass(frozen=True, slots=True)
class Truth:
    """One task's right classes, and how its answers' elements are to be read."""

    labels: Sequence[int]
    dtype: str


def decode(elements: bytes, dtype: str) -> NDArray[Any]:
    """An answer's elements as numbers, [n]; bfloat16 as float32."""
    if dtype != "bfloat16":
        return np.frombuffer(elements, np.dtype(dtype))
    # Its patterns are the upper half of a float32's.
    return (np.frombuffer(elements, np.uint16).astype(np.uint32) << 16).view(np.float32)


def in_top(logits: NDArray[Any], labels: NDArray[np.int64], k: int) -> int:
    """Rows of ``logits`` [n, classes] whose label is among the ``k`` largest.

    Of equal values the lower class comes first, so that a model that tells nothing apart is not
    right about everything. Nor is one that answers with NaN: what cannot be compared is ahead.
    """
    right = logits[np.arange(len(labels)), labels][:, None]
    columns = np.arange(logits.shape[1])[None]
    ahead = ~(logits <= right) | ((logits == right) & (columns < labels[:, None]))
    return int((ahead.sum(axis=1) < k).sum())


def classify(task: str, answers: Mapping[int, bytes], truth: Truth) -> Accuracy:
    """Top-1 and top-5 of a task.

    Args:
        answers: row -> the elements of its output [1, classes].

    Raises:
        RequestError: CONTRACT_MISMATCH when answers are no scores of classes.
    """
    rows = {r: decode(a, truth.dtype) for r, a in answers.items() if a}
    sizes = {len(r) for r in rows.values()}
    classes = next(iter(sizes), 0)
    if len(sizes) > 1 or (rows and max(truth.labels) >= classes) or min(truth.labels) < 0:
        raise RequestError(
            "CONTRACT_MISMATCH",
            f"answers of {sorted(sizes)} elements are no scores of the classes "
            f"{min(truth.labels)}..{max(truth.labels)}",
            where=task,
            hint="labels are class numbers from 0; the task's output is [rows, classes]",
        )
    n, top1, top5 = len(truth.labels), 0, 0
    if rows:
        logits = np.stack(list(rows.values()))
        labels = np.asarray([truth.labels[r] for r in rows], np.int64)
        top1, top5 = (in_top(logits, labels, k) for k in TOP)
    return Accuracy(task, n, n - len(rows), top1 / n, top5 / n if classes > TOP[1] else None)


def list_answers(text: str, library: Library) -> list[tuple[str, int, bytes]]:
    """LoadGen's accuracy log, entry by entry: task, row, elements.

    Raises:
        RequestError: INVALID_REQUEST for a log that broke off.
    """
    found = []
    try:
        for entry in json.loads(text):
            index = int(entry["qsl_idx"])
            task = library.tasks[library.task[index]]
            found.append((task, library.row[index], bytes.fromhex(entry["data"])))
    except (ValueError, KeyError, TypeError, IndexError) as exc:
        raise nonsense(f"not LoadGen's log of answers: {exc!r}", ACCURACY_LOG) from exc
    return found


def read_answers(text: str, library: Library) -> dict[str, dict[int, bytes]]:
    """LoadGen's accuracy log: task -> row -> elements.

    Raises:
        RequestError: INVALID_REQUEST for a log that broke off.
    """
    found: dict[str, dict[int, bytes]] = {task: {} for task in library.tasks}
    for task, row, elements in list_answers(text, library):
        found[task][row] = elements
    return found


def save_truth(folder: Path, rows: Mapping[str, int], truths: Mapping[str, Truth]) -> None:
    """Put what :func:`measure` needs beside the logs."""
    with disk(folder):
        write_json(
            folder / LABELS,
            {
                "rows": dict(rows),
                "truths": {
                    t: {"labels": [int(n) for n in x.labels], "dtype": x.dtype}
                    for t, x in truths.items()
                },
            },
        )


def measure(folder: Path) -> list[Accuracy]:
    """The accuracy of every task with labels, from a run's folder.

    Raises:
        RequestError: INVALID_REQUEST, CONTRACT_MISMATCH.
    """
    try:
        told = json.loads((folder / LABELS).read_text(encoding="utf-8"))
        text = (folder / ACCURACY_LOG).read_text(encoding="utf-8")
        library = Library.once(told["rows"])
        truths = {t: _truth(x, told["rows"][t]) for t, x in told["truths"].items()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as exc:
        raise nonsense(f"no accuracy run with labels: {exc!r}", str(folder)) from exc
    answers = read_answers(text, library)
    return [classify(task, answers[task], truth) for task, truth in truths.items()]


def _truth(told: Mapping[str, Any], rows: int) -> Truth:
    """As :func:`save_truth` has left it; ValueError, KeyError or TypeError for anything else."""
    labels, dtype = told["labels"], told["dtype"]
    if not labels or len(labels) != rows or not all(isinstance(n, int) for n in labels):
        raise ValueError(f"{rows} rows without a label each")
    decode(b"", dtype)  # TypeError for a name that is no dtype's
    return Truth(labels, dtype)


def main(argv: Sequence[str] | None = None) -> int:
    """Print each task's accuracy as JSON."""
    parser = argparse.ArgumentParser(
        prog="python -m blockflow.bench.mlperf.accuracy",
        description="Accuracy of a classification run, from LoadGen's log of the answers.",
    )
    parser.add_argument("folder", type=Path, help="of an accuracy run (in its call's --out)")
    try:
        found = [asdict(a) for a in measure(parser.parse_args(argv).folder)]
    except BlockFlowError as exc:
        sys.stderr.write(f"{exc}\n")
        return 2
    sys.stdout.write(json.dumps(found, indent=2) + "\n")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
