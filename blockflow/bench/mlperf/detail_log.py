"""LoadGen's detail log: what it measured, what it holds against a run, and its errors. Pure."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from blockflow.bench.mlperf.settings import Mode

_MARK = ":::MLLOG "
_ERROR = "error"
_RAN_OUT = "Ending early"
"""Begin of the error by which LoadGen says that it had prepared too few queries."""

_SUFFIXES = ("_percentile_per_query_latency_ns", "_percentile_latency_ns")
_ESTIMATES = ("early_stopping_latency_ss", "early_stopping_latency_ms")
"""Of single-stream, and of multistream: that "ms" is no unit, both are nanoseconds."""
_LAST = {Mode.PERFORMANCE: "num_errors", Mode.ACCURACY: "power_end"}
"""LoadGen's last entry: a log without it broke off."""


@dataclass(frozen=True, slots=True)
class DetailLog:
    """A log, as far as it goes.

    Attributes:
        values: key -> last value.
        errors: LoadGen's own, in words, each once.
    """

    values: Mapping[str, Any] = field(default_factory=dict)
    errors: tuple[str, ...] = ()

    def is_whole(self, mode: Mode) -> bool:
        """LoadGen has written it to its end."""
        return _LAST[mode] in self.values

    def number(self, key: str) -> float | None:
        """A measured value; None where there is none."""
        value = self.values.get(key)
        if not isinstance(value, int | float) or isinstance(value, bool):
            return None
        return float(value)

    @property
    def latency_ms(self) -> dict[str, float]:
        """Percentile ("50.00") -> ms: of queries, where a query has several samples."""
        suffix = next(
            (s for s in _SUFFIXES if any(self._is_percentile(k, s) for k in self.values)),
            _SUFFIXES[-1],
        )
        return {
            key.removeprefix("result_").removesuffix(suffix): float(value) / 1e6
            for key, value in self.values.items()
            if self._is_percentile(key, suffix)
        }

    @staticmethod
    def _is_percentile(key: str, suffix: str) -> bool:
        return key.startswith("result_") and key.endswith(suffix) and key[7:8].isdigit()

    def percentile_ms(self, percent: float) -> float | None:
        """The latency at exactly this percentile (0..100); LoadGen logs only a few of them."""
        name = f"{percent:.2f}"
        # 99.999 is not what it would be rounded to.
        return self.latency_ms.get(name) if abs(float(name) - percent) < 1e-9 else None

    @property
    def estimate_ms(self) -> float | None:
        """LoadGen's early-stopping estimate (single-stream, multistream): with 99% confidence its
        percentile is no higher. None: there were too few queries, or it makes none."""
        return max(self.number(key) or 0.0 for key in _ESTIMATES) / 1e6 or None

    @property
    def missed(self) -> set[str]:
        """What LoadGen says was not met, whatever its verdict is: some of it it only notes."""
        return {k for k, v in self.values.items() if k.endswith("_met") and v is False}

    @property
    def only_ran_out(self) -> bool:
        """LoadGen's errors, if there are any, say no more than that it had too few queries."""
        counted = self.number("num_errors") or 0
        return counted <= len(self.errors) and all(e.startswith(_RAN_OUT) for e in self.errors)

    @property
    def complaints(self) -> list[str]:
        """Errors in words; their number where LoadGen does not say what they were."""
        counted = int(self.number("num_errors") or 0)
        if counted and not self.errors:
            return [f"{counted} errors, see its log"]
        return list(self.errors)


def read_log(text: str) -> DetailLog:
    """LoadGen's detail log; lines that broke off are passed over."""
    found: dict[str, Any] = {}
    errors: dict[str, None] = {}
    for line in text.splitlines():
        if not line.startswith(_MARK):
            continue
        try:
            entry = json.loads(line.removeprefix(_MARK))
            key, value = str(entry["key"]), entry["value"]
            said = entry.get("metadata", {}).get("is_error") is True
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
            continue
        found[key] = value
        if said or key.startswith(_ERROR):
            errors[str(value)] = None
    return DetailLog(found, tuple(errors))
