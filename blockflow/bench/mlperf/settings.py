"""RunSettings: what one run of LoadGen is asked to do, and whether it is official. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from enum import StrEnum
from math import ceil
from typing import Any

from blockflow.bench.mlperf.counts import (
    CONFIDENCE,
    OFFLINE_SAMPLES,
    SINGLE_STREAM_QUERIES,
    count_for_share,
    early_stopping_count,
    rounded_count,
)
from blockflow.bench.mlperf.presets import Preset
from blockflow.bench.options import nonsense


class Scenario(StrEnum):
    """Who asks how (section 4.5 of the paper)."""

    SINGLE_STREAM = "single-stream"
    MULTISTREAM = "multistream"
    SERVER = "server"
    OFFLINE = "offline"


class Mode(StrEnum):
    """Measure the time, or go once through the whole data set and log every answer."""

    PERFORMANCE = "performance"
    ACCURACY = "accuracy"


OFFICIAL_S = 600.0
"""Least duration of an official run by MLCommons' present rules; the paper's was 60 s."""

SHORT_S = 5.0
DEADLINE_S = 30.0
"""Of each request: an answer that is later counts as lost."""

MOST_QUERIES = 10**8
"""Of a run: LoadGen prepares them all beforehand, in memory."""

SAMPLES_PER_QUERY = 8
"""Of a multistream query, as LoadGen's present rules have it."""

PERCENTILE = {
    Scenario.SINGLE_STREAM: 0.90,
    Scenario.MULTISTREAM: 0.99,
    Scenario.SERVER: 0.99,
    Scenario.OFFLINE: 0.90,
}


@dataclass(frozen=True, slots=True)
class Target:
    """At least ``percentile`` (0..1) of a task's queries within ``latency_ms``; None: no bound.

    ``ruled`` and ``ruled_ms`` are the percentile and the bound of the rules (None: they have none):
    with a lower percentile or a looser bound no run is official.
    """

    percentile: float
    latency_ms: float | None = None
    ruled: float = 0.0
    ruled_ms: float | None = None

    @property
    def as_ruled(self) -> bool:
        """It is not easier to keep than that of the rules."""
        loose = self.ruled_ms is not None and (
            self.latency_ms is None or self.latency_ms > self.ruled_ms
        )
        return self.percentile >= self.ruled and not loose


@dataclass(frozen=True, slots=True)
class RunSettings:
    """One run.

    Attributes:
        targets: per task.
        min_duration_s: LoadGen goes on at least so long.
        min_queries: and for so many queries (offline: samples of its one query).
        rate: queries per second: of the server scenario; offline, what is expected.
        expected_ms: shortest latency to expect (single-stream, multistream): how many queries
            LoadGen prepares follows from it.
        samples_per_query: of a multistream query.
        seed: LoadGen's own seeds follow from it.
        deadline_s: of each request.
        in_flight: offline, requests under way at once.
        full_length: duration and counts are those of the rules, for each task.
        official: percentiles, bounds and samples per query are, too.
        logged: so many answers of a performance run, drawn by LoadGen at random, go into its log.
        unique: LoadGen asks for every sample once, and for none twice.
        asked: task -> share of the queries that ask for it, at the least.
        probe: of a search, where a longer run confirms what it finds.
    """

    scenario: Scenario
    mode: Mode
    targets: Mapping[str, Target]
    min_duration_s: float
    min_queries: int
    rate: float = 1.0
    expected_ms: float = 1.0
    samples_per_query: int = SAMPLES_PER_QUERY
    seed: int = 1
    deadline_s: float = DEADLINE_S
    in_flight: int = 16
    full_length: bool = False
    official: bool = False
    logged: int = 0
    unique: bool = False
    asked: Mapping[str, float] = field(default_factory=dict)
    probe: bool = False

    @property
    def per_query(self) -> int:
        """Samples of a query of LoadGen; offline its one query has them all, one by one."""
        return self.samples_per_query if self.scenario is Scenario.MULTISTREAM else 1

    @property
    def kind(self) -> str:
        """What a reader has to know of its rules: official, full length or short."""
        return "official" if self.official else "full length" if self.full_length else "short"

    @property
    def logs_answers(self) -> bool:
        """LoadGen is given the answers' elements, not only told that they are there."""
        return self.mode is Mode.ACCURACY or self.logged > 0

    @property
    def percentile(self) -> float:
        """LoadGen knows one for all tasks: the lowest. Each task's own is judged besides."""
        return min(t.percentile for t in self.targets.values())

    @property
    def bound_ms(self) -> float | None:
        """LoadGen's one bound for all tasks: the loosest, and none if a task has none."""
        bounds = [t.latency_ms for t in self.targets.values()]
        return None if None in bounds else max(b for b in bounds if b is not None)

    @property
    def server_s(self) -> float:
        """About how long a server run takes."""
        return max(self.min_duration_s, self.min_queries / self.rate)

    def scaled(self, factor: float) -> RunSettings:
        """The same run with LoadGen told to prepare ``factor`` times as many queries.

        The server scenario's rate is what it offers, so there the count itself is raised.
        """
        if self.scenario is Scenario.SERVER:
            least = max(self.min_queries, self.rate * self.min_duration_s)
            return replace(self, min_queries=ceil(least * factor))
        return replace(self, rate=self.rate * factor, expected_ms=self.expected_ms / factor)

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> RunSettings:
        """Of what ``asdict`` has made of one, and JSON of that."""
        targets = {task: Target(**t) for task, t in data["targets"].items()}
        return cls(
            **{
                **data,
                "scenario": Scenario(data["scenario"]),
                "mode": Mode(data["mode"]),
                "targets": targets,
            }
        )


def required_queries(scenario: Scenario, percentile: float, confidence: float = CONFIDENCE) -> int:
    """The count of an official run (section 4.6, table 5); of samples for the offline scenario."""
    match scenario:
        case Scenario.SINGLE_STREAM:
            # The paper's number, unless LoadGen could not judge a higher percentile by it.
            return max(SINGLE_STREAM_QUERIES, early_stopping_count(percentile))
        case Scenario.OFFLINE:
            return OFFLINE_SAMPLES
        case Scenario.MULTISTREAM | Scenario.SERVER:
            return rounded_count(percentile, confidence)


def short_queries(scenario: Scenario, percentile: float) -> int:
    """The count of a short run: the fewest that LoadGen's early stopping can judge."""
    return 1 if scenario is Scenario.OFFLINE else early_stopping_count(percentile)


def needed_queries(settings: RunSettings, task: str) -> int:
    """Queries that have to ask for a task before a run's verdict says something about it."""
    share = settings.targets[task].percentile
    if settings.scenario is Scenario.OFFLINE:
        return 1  # its figure is of all tasks together
    if settings.full_length:
        return required_queries(settings.scenario, share)
    return short_queries(settings.scenario, share)


def targets_of(
    scenario: Scenario,
    tasks: Mapping[str, int],
    chosen: Mapping[str, Preset],
    latency_ms: Mapping[str, float],
    percentile: Mapping[str, float],
) -> dict[str, Target]:
    """What each task has to keep: its preset, over which its own figures go.

    Args:
        chosen: presets by task.
        latency_ms: bounds by task.
        percentile: by task, in percent.
    """
    found = {}
    for task in tasks:
        ruled, ruled_ms = PERCENTILE[scenario], None
        preset = chosen.get(task)
        if preset is not None and scenario in (Scenario.SERVER, Scenario.MULTISTREAM):
            server = scenario is Scenario.SERVER
            ruled, ruled_ms = (
                preset.percentile,
                preset.server_ms if server else preset.multistream_ms,
            )
        share = percentile[task] / 100 if task in percentile else ruled
        bound = None if scenario is Scenario.OFFLINE else latency_ms.get(task, ruled_ms)
        found[task] = Target(share, bound, ruled, ruled_ms)
    return found


def make_settings(
    scenario: Scenario,
    mode: Mode,
    targets: Mapping[str, Target],
    *,
    short: bool,
    duration_s: float | None = None,
    queries: int | None = None,
    confidence: float = CONFIDENCE,
    asked: Mapping[str, float] | None = None,
    **more: Any,
) -> RunSettings:
    """Official figures, or short ones, with the caller's own over either.

    A run is of full length if it takes as long, and asks for each task as often, as the rules want:
    with :data:`~blockflow.bench.mlperf.counts.CONFIDENCE` or more. It is official if its targets
    and its samples per query are those of the rules as well. A short one asks as often as LoadGen
    can judge all tasks together, and for none never.

    Args:
        asked: task -> share of the queries that ask for it; equal ones by default.

    Raises:
        RequestError: INVALID_REQUEST where a task is asked too rarely to be judged in one run.
    """
    asked = {task: 1 / len(targets) for task in targets} if asked is None else asked
    once = max(count_for_share(1, asked[task]) for task in targets)
    # Offline's one figure is of all tasks together.
    often = dict.fromkeys(targets, 1.0) if scenario is Scenario.OFFLINE else asked

    def counted(confidence: float) -> int:
        needed = {
            t: required_queries(scenario, x.percentile, confidence) for t, x in targets.items()
        }
        return max(once, *(count_for_share(n, often[task]) for task, n in needed.items()))

    strictest = max(t.percentile for t in targets.values())
    count = queries or (
        max(once, short_queries(scenario, strictest)) if short else counted(confidence)
    )
    if count > MOST_QUERIES:
        rarest = min(targets, key=lambda task: asked[task])
        alone = len(targets) == 1  # then it is no matter of the mix
        raise nonsense(
            f"{count:,} queries would be needed until {rarest!r} was asked often enough; "
            f"LoadGen prepares at most {MOST_QUERIES:,}",
            "--percentile" if alone else "--task",
            "choose a lower percentile"
            if alone
            else "mix tasks by weights that are less apart, or measure this one on its own",
        )
    seconds = duration_s or (SHORT_S if short else OFFICIAL_S)
    full = seconds >= OFFICIAL_S and count >= counted(CONFIDENCE)
    found = RunSettings(
        scenario, mode, targets, seconds, count, full_length=full, asked=asked, **more
    )
    ruled = all(t.as_ruled for t in targets.values())
    if scenario is Scenario.MULTISTREAM:
        ruled = ruled and found.samples_per_query == SAMPLES_PER_QUERY
    return replace(found, official=full and ruled)
