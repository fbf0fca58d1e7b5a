"""Latency bounds of MLPerf Inference v0.5 (table 3 of the paper), and the options' text forms."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import isfinite
from typing import Final

from blockflow.bench.numerals import given
from blockflow.bench.options import nonsense
from blockflow.core.errors import RequestError


@dataclass(frozen=True, slots=True)
class Preset:
    """Bounds of a task: interval of multistream arrivals, server bound (ms), server percentile."""

    multistream_ms: float
    server_ms: float
    percentile: float = 0.99


PRESETS: Final[Mapping[str, Preset]] = {
    "image-classification-heavy": Preset(50, 15),
    "image-classification-light": Preset(50, 10),
    "object-detection-heavy": Preset(66, 100),
    "object-detection-light": Preset(50, 10),
    "machine-translation": Preset(100, 250, 0.97),
}

MAX_WEIGHT: Final = 1000


def parse_weights(texts: Sequence[str]) -> dict[str, int]:
    """``digit=2,parity=1`` or ``digit``: how often each task is asked, relative to the others.

    Raises:
        RequestError: INVALID_REQUEST.
    """
    weights: dict[str, int] = {}
    for part in (p.strip() for text in texts for p in text.split(",")):
        name, sign, value = (p.strip() for p in part.partition("="))
        if not name:
            raise nonsense("a task's name is missing", "--task", "for example digit=2,parity=1")
        if name in weights:
            raise nonsense(f"{name!r} stands twice", "--task")
        if sign and not (value.isdecimal() and 1 <= int(value) <= MAX_WEIGHT):
            raise nonsense(f"weight {value!r} is no whole number 1..{MAX_WEIGHT}", "--task")
        weights[name] = int(value) if sign else 1
    if not weights:
        raise nonsense("no task to ask for", "--task", "`blockflow tasks` lists them")
    return weights


def per_task(text: str, tasks: Sequence[str], where: str) -> dict[str, str]:
    """``15`` for all tasks, or ``digit=15,parity=10``; tasks that are not named are left out.

    Raises:
        RequestError: INVALID_REQUEST, UNKNOWN_TASK.
    """
    if not text.strip():
        return {}
    if "=" not in text:
        return dict.fromkeys(tasks, text.strip())
    found: dict[str, str] = {}
    for part in text.split(","):
        name, sign, value = (p.strip() for p in part.partition("="))
        if not sign or not value or name in found:
            raise nonsense(f"{part.strip()!r} is not TASK=VALUE, once per task", where)
        if name not in tasks:
            raise RequestError(
                "UNKNOWN_TASK",
                f"{name!r} is no task of this run",
                where=where,
                hint=f"the run's tasks: {', '.join(tasks)}",
            )
        found[name] = value
    return found


def numbers(found: Mapping[str, str], where: str, above: float, below: float) -> dict[str, float]:
    """Values between two bounds, both excluded.

    Raises:
        RequestError: INVALID_REQUEST.
    """
    out = {}
    for task, text in found.items():
        try:
            value = float(text)
        except ValueError:
            raise nonsense(f"{text!r} is no number", f"{where} {task}") from None
        if not isfinite(value) or not above < value < below:
            raise nonsense(
                f"{text} is not between {given(above)} and {given(below)}", f"{where} {task}"
            )
        out[task] = value
    return out


def presets(found: Mapping[str, str], where: str) -> dict[str, Preset]:
    """Presets by name.

    Raises:
        RequestError: INVALID_REQUEST.
    """
    for name in found.values():
        if name not in PRESETS:
            raise nonsense(f"no preset {name!r}", where, f"known: {', '.join(PRESETS)}")
    return {task: PRESETS[name] for task, name in found.items()}
