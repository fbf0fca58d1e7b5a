"""Validator: runs the validation tests of one scenario: what is cheated on in them is found out."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from math import ceil
from pathlib import Path
from typing import Any

import numpy as np

from blockflow.bench.mlperf.accuracy import list_answers, read_answers
from blockflow.bench.mlperf.data import Inputs
from blockflow.bench.mlperf.fresh import FreshRows
from blockflow.bench.mlperf.job import ACCURACY_LOG, Job, disk, save_inputs
from blockflow.bench.mlperf.library import Library
from blockflow.bench.mlperf.rates import Run
from blockflow.bench.mlperf.result import RunResult
from blockflow.bench.mlperf.settings import Mode, RunSettings, Scenario
from blockflow.bench.mlperf.validation import (
    LOOKS,
    TOLERANCE,
    Check,
    Outcome,
    Speed,
    compare_answers,
    compare_speed,
)
from blockflow.bench.statistics import percentile
from blockflow.core.errors import BlockFlowError

RUN_S, SHORT_RUN_S = 20.0, 2.0
"""Length of each of a test's runs; with ``--short``."""

LEAST = 32
"""Queries of a run."""

QUARTILE = 25

MOST = 20_000
MOST_BYTES = 64 << 20
"""Of a run's fresh inputs."""

LOGGED = 1000
LOGGED_BYTES = 64 << 20
"""Answers that LoadGen logs of a performance run, and what they may take."""

FOLDER = "validation"
"""Below the call's folder: the tests' logs."""


@dataclass(frozen=True, slots=True)
class CheckResult:
    """What a test found.

    Attributes:
        check, scenario: which test, of what.
        why: one sentence.
        runs: folders of its runs.
        seeds: that were drawn for it.
        error: why it broke off; None if it did not.
    """

    check: Check
    scenario: Scenario
    outcome: Outcome
    why: str
    figures: Mapping[str, Any] = field(default_factory=dict)
    runs: Sequence[str] = ()
    seeds: Sequence[int] = ()
    error: BlockFlowError | None = None

    def to_dict(self) -> dict[str, Any]:
        return {
            "test": str(self.check),
            "scenario": str(self.scenario),
            "outcome": str(self.outcome),
            "why": self.why,
            **self.figures,
            "runs": list(self.runs),
            "seeds": list(self.seeds),
            "error": None if self.error is None else self.error.to_dict(),
        }


@dataclass(slots=True)
class Validator:
    """Tests one scenario of a running system.

    Args:
        job: of the scenario's performance run; its settings say what the system can do.
        inputs: per task.
        outputs: dtype and bytes of a row of each task's output.
        folder: for inputs of its own.
        tolerance: by how much the quicker of two ways may be quicker, as a share.
        chance: for seeds and contents that no system can know beforehand; by default the
            operating system's.
    """

    job: Job
    inputs: Mapping[str, Inputs]
    outputs: Mapping[str, tuple[str, int]]
    folder: Path
    run: Run
    seconds: float = field(default=RUN_S, kw_only=True)
    tolerance: float = field(default=TOLERANCE, kw_only=True)
    chance: np.random.Generator = field(default_factory=np.random.default_rng, kw_only=True)
    _runs: list[str] = field(default_factory=list, init=False)
    _seeds: list[int] = field(default_factory=list, init=False)
    _costs: dict[str, list[float]] = field(default_factory=dict, init=False)

    def check(self, check: Check) -> CheckResult:
        """Do a test.

        A run that breaks off, or that leaves samples without an answer, shows nothing: the test
        is then UNDECIDED and says why, with the run's ``error`` if it has one, and keeps what the
        runs before have found.
        """
        self._runs, self._seeds, self._costs = [], [], {}
        try:
            return self._done(check)
        except BlockFlowError as exc:
            why = f"a run could not begin: {exc.message}"
            return self._result(check, Outcome.UNDECIDED, why, self._so_far(), exc)

    def _done(self, check: Check) -> CheckResult:
        match check:
            case Check.ACCURACY:
                return self._accuracy()
            case Check.CACHING:
                return self._caching()
            case Check.SEEDS:
                return self._alternate_seeds()

    def _one(self, check: Check, job: Job, name: str) -> RunResult:
        what = f"{job.settings.scenario}, {check}: {name}"
        folder = f"{FOLDER}/{job.settings.scenario}-{check}-{name}"
        self._runs.append(folder)
        return self.run(job, folder, what)

    def _result(
        self,
        check: Check,
        outcome: Outcome,
        why: str,
        figures: Mapping[str, Any] | None = None,
        error: BlockFlowError | None = None,
    ) -> CheckResult:
        return CheckResult(
            check,
            self.job.settings.scenario,
            outcome,
            why,
            figures or {},
            tuple(self._runs),
            tuple(self._seeds),
            error,
        )

    def _undecided(self, check: Check, result: RunResult) -> CheckResult | None:
        """What a run says that shows nothing; None if it can be used."""
        counts = result.counts
        if result.error is not None:
            why = f"a run broke off: {result.error.message}"
        elif counts.failures or counts.lost:
            why = f"{counts.failures + counts.lost} of {counts.issued} samples have no answer"
        elif silent := [t for t in self.job.weights if not result.latencies.get(t)]:
            # What a run costs is a mean over its tasks: without one of them it is another mean.
            why = f"a run has no latency of {', '.join(silent)}: run it for longer"
        else:
            return None
        return self._result(check, Outcome.UNDECIDED, why, self._so_far(), result.error)

    def _so_far(self) -> dict[str, Any]:
        """Figures of a test that breaks off."""
        return {"cost_ms": self._costs} if self._costs else {}

    # --- accuracy --------------------------------------------------------------------------------

    def _accuracy(self) -> CheckResult:
        check = Check.ACCURACY
        widest = max(nbytes for _, nbytes in self.outputs.values())
        timed = replace(
            self._settings(),
            logged=max(1, min(LOGGED, LOGGED_BYTES // max(1, widest))),
        )
        performance = self._one(check, replace(self.job, settings=timed), "performance")
        found = self._undecided(check, performance)
        if found is not None:
            return found
        whole = replace(self.job, settings=replace(self.job.settings, mode=Mode.ACCURACY))
        reference = self._one(check, whole, "accuracy")
        found = self._undecided(check, reference)
        if found is not None:
            return found
        rows = {task: len(i.rows) for task, i in self.inputs.items()}
        agreement = compare_answers(
            list_answers(_log(performance), self.job.library(rows)),
            read_answers(_log(reference), Library.once(rows)),
            {task: dtype for task, (dtype, _) in self.outputs.items()},
        )
        return self._result(check, agreement.outcome, agreement.sentence(), agreement.figures())

    # --- speed -----------------------------------------------------------------------------------

    def _caching(self) -> CheckResult:
        """Fresh inputs, all different, beside fresh ones that are all the same."""
        makers = {t: FreshRows(i.rows, self.chance) for t, i in self.inputs.items()}
        wanted = self._fresh_counts()

        def sides() -> dict[str, Job] | None:
            different = {t: makers[t].draw(wanted[t]) for t in wanted}
            same = {t: makers[t].like(rows) for t, rows in different.items()}
            if any(len(different[t]) < n or len(same[t]) < n for t, n in wanted.items()):
                return None
            seed = self._seed()
            parts = {"different": different, "repeated": same}
            return {name: self._fresh_job(name, rows, seed) for name, rows in parts.items()}

        found = self._compare(Check.CACHING, ("different", "repeated"), sides)
        for name in ("different", "repeated"):
            shutil.rmtree(self.folder / name, ignore_errors=True)
        if found is None:
            return self._result(
                Check.CACHING,
                Outcome.UNDECIDED,
                f"no {sum(wanted.values())} different inputs can be made that are like the data",
            )
        return found

    def _fresh_job(self, name: str, rows: Mapping[str, list[Any]], seed: int) -> Job:
        folder = self.folder / name
        shutil.rmtree(folder, ignore_errors=True)
        with disk(folder):
            folder.mkdir(parents=True)
        own = {t: Inputs(r, self.inputs[t].dtype, None, "fresh") for t, r in rows.items()}
        save_inputs(own, folder)
        samples, settings = sum(len(r) for r in rows.values()), self.job.settings
        # LoadGen ends when it has asked for each sample once.
        queries = samples // settings.per_query
        asked = replace(
            self._settings(), min_duration_s=0.0, min_queries=queries, unique=True, seed=seed
        )
        return replace(self.job, data=str(folder), settings=asked)

    def _fresh_counts(self) -> dict[str, int]:
        """Samples per task, in the proportion of the weights, and whole queries of them."""
        settings, weights = self.job.settings, self.job.weights
        per_query = settings.per_query
        if settings.scenario in (Scenario.SERVER, Scenario.OFFLINE):
            rate = settings.rate
        else:
            rate = per_query * 1e3 / (2 * settings.expected_ms)
        widest = max(row.nbytes for i in self.inputs.values() for row in i.rows)
        total = min(rate * self.seconds, MOST, MOST_BYTES / widest)
        total = max(total, LEAST * per_query)
        share = total / sum(weights.values())
        counts = {task: ceil(share * weight) for task, weight in weights.items()}
        counts[next(iter(counts))] += -sum(counts.values()) % per_query
        return counts

    def _alternate_seeds(self) -> CheckResult:
        """The seed that everybody knows beside seeds that nobody does."""

        def sides() -> dict[str, Job]:
            alternate = replace(self._settings(), seed=self._seed())
            return {
                "alternate": replace(self.job, settings=alternate),
                "official": replace(self.job, settings=self._settings()),
            }

        found = self._compare(Check.SEEDS, ("alternate", "official"), sides)
        if found is None:
            raise ValueError("every round has its two sides")
        return found

    def _compare(
        self,
        check: Check,
        names: tuple[str, str],
        sides: Callable[[], Mapping[str, Job] | None],
    ) -> CheckResult | None:
        """Pairs of runs until they tell, or there were enough; None where a side is missing."""
        costs = self._costs = {name: list[float]() for name in names}
        speed: Speed | None = None
        for number in range(1, max(LOOKS) + 1):
            jobs = sides()
            if jobs is None:
                return None
            # In turn: what the first run of a pair warms up must not help one side only.
            for name in names if number % 2 else reversed(names):
                result = self._one(check, jobs[name], f"{number:02}-{name}")
                found = self._undecided(check, result)
                if found is not None:
                    return found
                costs[name].append(cost_ms(result, self.job.weights))
            if number in LOOKS:
                slow, quick = (costs[name] for name in names)
                speed = compare_speed(slow, quick, self.tolerance, LOOKS[number])
                if speed.outcome is not Outcome.UNDECIDED:
                    break
        if speed is None:
            raise ValueError("there is a last look")
        told = {
            Check.CACHING: ("an input that is new", "one that was asked before"),
            Check.SEEDS: ("a query in another order", "one in the official order"),
        }[check]
        figures = {
            "ratio": asdict(speed.ratio),
            "noise": speed.noise,
            "tolerance": speed.tolerance,
            "cost_ms": costs,
        }
        return self._result(check, speed.outcome, speed.sentence(*told), figures)

    # --- both ------------------------------------------------------------------------------------

    def _settings(self) -> RunSettings:
        """Of a run of the scenario, as long as the tests' runs are."""
        return replace(
            self.job.settings,
            min_duration_s=self.seconds,
            min_queries=LEAST,
            full_length=False,
            official=False,
        )

    def _seed(self) -> int:
        self._seeds.append(int(self.chance.integers(2**31)))
        return self._seeds[-1]


def cost_ms(result: RunResult, weights: Mapping[str, int]) -> float:
    """What a sample costs: offline, its share of the run; else the tasks' latencies by weight.

    Of each task the lower quartile: whatever else the machine does only adds time, and one over all
    tasks would jump from one task's latencies to another's.
    """
    if result.settings.scenario is Scenario.OFFLINE and result.verdict.metric is not None:
        return 1e3 / result.verdict.metric.value
    seen = {task: w for task, w in weights.items() if result.latencies.get(task)}
    total = sum(percentile(result.latencies[task], QUARTILE) * w for task, w in seen.items())
    return total / sum(seen.values())


def _log(result: RunResult) -> str:
    with disk(result.folder):
        return (result.folder / ACCURACY_LOG).read_text(encoding="utf-8")
