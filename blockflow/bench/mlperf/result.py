"""Results: what a run and a scenario have found, whole or not. Pure."""

from __future__ import annotations

import traceback
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from blockflow.bench.mlperf.accuracy import Accuracy
from blockflow.bench.mlperf.batch_sizes import BatchSizes
from blockflow.bench.mlperf.search import TRIES
from blockflow.bench.mlperf.settings import RunSettings
from blockflow.bench.mlperf.tally import TOO_FAST, Counts
from blockflow.bench.mlperf.verdict import RunVerdict
from blockflow.client.collector import BlockMeans
from blockflow.core.errors import BlockFlowError, make_error


@dataclass(frozen=True, slots=True)
class RunResult:
    """What a run found, whole or not.

    Attributes:
        folder: with LoadGen's logs.
        blocks: mean times per block.
        batches: their batch sizes, where REST told.
        latencies: ms per task.
        error: why it broke off; None if it did not. What was measured until then is here.
    """

    folder: Path
    settings: RunSettings
    verdict: RunVerdict
    counts: Counts
    blocks: tuple[BlockMeans, ...]
    latencies: Mapping[str, Sequence[float]] = field(repr=False)
    error: BlockFlowError | None = None
    batches: tuple[BatchSizes, ...] = ()

    @property
    def kind(self) -> str:
        """What a reader has to know of it: that it broke off, or by which rules it went."""
        return "partial" if self.error is not None else self.settings.kind

    @property
    def broke_off(self) -> bool:
        """Something went wrong. A rate that is too high is refused, or the run is given up for it:
        that is no more than INVALID."""
        return self.error is not None and self.error.code not in TOO_FAST

    def to_dict(self) -> dict[str, Any]:
        return {
            "folder": self.folder.name,
            "kind": self.kind,
            "official": self.settings.official,
            "partial": self.error is not None,
            "broke_off": self.broke_off,
            "settings": asdict(self.settings),
            **self.verdict.to_dict(),
            "samples": self.counts.to_dict(),
            "blocks": [asdict(b) for b in self.blocks],
            "batches": [b.to_dict() for b in self.batches],
            "error": None if self.error is None else self.error.to_dict(),
        }


@dataclass(frozen=True, slots=True)
class ScenarioResult:
    """A scenario's result and how it was come by.

    Attributes:
        search: every run that led to it, those of full length included; ``result`` among them.
        precision: that the search was to reach, as a share; 0: the rate was given.
        server_runs: if VALID, ``result`` is the least of so many at its rate, all of them VALID.
    """

    result: RunResult
    search: Sequence[RunResult] = ()
    accuracy: Sequence[Accuracy] = ()
    precision: float = 0.0
    server_runs: int = 1

    @property
    def limit(self) -> RunResult | None:
        """The run at the lowest rate above the result's that was found INVALID, by preference one
        of the result's kind; None: nobody knows how much more there might be.

        What a probe was denied by early stopping alone says nothing of the longer runs: the fewer
        the queries, the stricter the percentile by which LoadGen stops early.
        """
        rate = self.result.settings.rate
        above = [r for r in self.search if r.settings.rate > rate and self._denied(r)]
        return min(
            above,
            key=lambda r: (r.settings.rate, self._other(r)),
            default=None,
        )

    def _denied(self, run: RunResult) -> bool:
        """It says of the result's kind of run that its rate is too high."""
        verdict = run.verdict
        return not (verdict.valid or run.broke_off or (verdict.only_early and self._other(run)))

    def _other(self, run: RunResult) -> bool:
        """It is shorter, or longer, than the result is."""
        return run.settings.probe is not self.result.settings.probe

    @property
    def precise(self) -> bool:
        """The result is the highest VALID rate, as closely as asked for, and neither it nor the
        INVALID one above it is chance: each was found twice, or by a long run that confirms."""
        high, low = self.limit, self.result
        if high is None or not low.verdict.valid:
            return False
        at = high.settings.rate
        held = sum(r.settings.rate == low.settings.rate and r.verdict.valid for r in self.search)
        failed = sum(r.settings.rate == at and self._denied(r) for r in self.search)
        confirms = any(r.settings.probe for r in self.search)
        sure_low = held >= TRIES or (confirms and not low.settings.probe)
        sure_high = failed >= TRIES or (confirms and not high.settings.probe)
        # A step of a search is as large as its precision, but for the last binary digit.
        most = low.settings.rate * (1 + self.precision) * (1 + 1e-9)
        return sure_low and sure_high and at <= most

    def to_dict(self) -> dict[str, Any]:
        return {
            "scenario": str(self.result.settings.scenario),
            "mode": str(self.result.settings.mode),
            **self.result.to_dict(),
            "search": [
                {
                    "folder": r.folder.name,
                    "rate": r.settings.rate,
                    "kind": r.kind,
                    "verdict": r.verdict.word,
                    "reasons": list(r.verdict.reasons),
                    "metric": None if r.verdict.metric is None else asdict(r.verdict.metric),
                    "latency_ms": dict(r.verdict.latency_ms),
                    "judged_ms": r.verdict.judged_ms,
                }
                for r in self.search
            ],
            "found": self._found() if self.precision else None,
            "least_of": self.server_runs if self.result.verdict.valid else 1,
            "accuracy": [asdict(a) for a in self.accuracy],
        }

    def _found(self) -> dict[str, Any]:
        limit = self.limit
        return {
            "bracketed": self.result.verdict.valid and limit is not None,
            "precise": self.precise,
            "precision": self.precision,
            "invalid_at": None if limit is None else limit.settings.rate,
            # Its length, where that is not the result's own.
            "invalid_s": limit.settings.min_duration_s if limit and self._other(limit) else None,
        }


def broken_off(result: RunResult, error: BlockFlowError) -> RunResult:
    """What was found before ``error`` kept the next run from being begun: kept, and INVALID."""
    reasons = (*result.verdict.reasons, f"what had to follow broke off: {error.message}")
    return replace(
        result, error=error, verdict=replace(result.verdict, valid=False, reasons=reasons)
    )


def interrupted(where: str = "") -> BlockFlowError:
    """Ctrl-C or SIGTERM: what was measured until then is kept."""
    return make_error("CANCELLED", "interrupted before the end", where=where)


def as_error(exc: BaseException) -> BlockFlowError:
    """What ended a measurement, as an error that a summary can hold.

    Hours of results are not thrown away for a defect: what is no typed error is INTERNAL, with its
    traceback in the details.
    """
    if isinstance(exc, BlockFlowError):
        return exc
    if isinstance(exc, KeyboardInterrupt):
        return interrupted()
    told = "".join(traceback.format_exception(exc))
    return make_error("INTERNAL", f"{type(exc).__name__}: {exc}", details={"traceback": told})
