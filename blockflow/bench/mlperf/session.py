"""Session: one call of ``blockflow bench``: check, calibrate, run each scenario, search, sum up.

What is found is kept, whatever comes after it: a scenario that fails does not keep the later ones
from being run, and after each result the caller is told, so that it can write down what there is.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from blockflow.bench import calibration
from blockflow.bench.demo.server import Rest
from blockflow.bench.mlperf.accuracy import Truth, measure, save_truth
from blockflow.bench.mlperf.batch_sizes import BatchWatch
from blockflow.bench.mlperf.calibrate import calibrate, check_bounds
from blockflow.bench.mlperf.data import Inputs, load_hook, load_inputs
from blockflow.bench.mlperf.job import Job, alone, read_inputs, save_inputs
from blockflow.bench.mlperf.library import Library, shares
from blockflow.bench.mlperf.plan import Plan
from blockflow.bench.mlperf.rates import repeat_rate, search_rate
from blockflow.bench.mlperf.result import RunResult, ScenarioResult, as_error, broken_off
from blockflow.bench.mlperf.run import check_loadgen, run
from blockflow.bench.mlperf.search import RateSearch
from blockflow.bench.mlperf.settings import (
    Mode,
    RunSettings,
    Scenario,
    Target,
    make_settings,
    targets_of,
)
from blockflow.bench.mlperf.tally import GONE, Counts
from blockflow.bench.mlperf.validator import RUN_S, SHORT_RUN_S, CheckResult, Validator
from blockflow.bench.options import nonsense
from blockflow.client import Client
from blockflow.core import limits
from blockflow.core.errors import BlockFlowError, RequestError
from blockflow.core.routing import TaskRoute
from blockflow.repository.scratch import scratch

READY_S = 15.0
CALIBRATION_S, SHORT_CALIBRATION_S = 0.5, 0.02
"""Of the fixed work that says how steady the machine was, before and after; with ``--short``."""

ATTEMPTS = 6
"""Of one run that was too short only because LoadGen had prepared too few queries."""

FIRST_SHARE = 0.5
"""Of the throughput before the run: where the search begins, and the rate of accuracy runs."""

MANY_ROWS = frozenset({Scenario.OFFLINE, Scenario.MULTISTREAM})
"""Scenarios in which a request brings several samples."""

ENDS = GONE | {"NO_SPACE", "CANCELLED", "MISSING_EXTRA"}
"""Codes after which no further scenario is begun: there is nobody to ask, no room, or no wish."""

Show = Callable[[str, Counts | None], None]
"""Told what is going on, and how far it is."""


class Session:
    """One call.

    Args:
        rest: of the same system, for the record of what was deployed; None leaves that out.
        keep: called with the session when everything is checked, and after each result.
    """

    def __init__(
        self,
        plan: Plan,
        show: Show,
        rest: Rest | None = None,
        keep: Callable[[Session], None] | None = None,
    ) -> None:
        self.plan = plan
        self._show = show
        self._rest = rest
        self._keep = keep
        self._over = False
        self.results: list[ScenarioResult] = []
        self.checks: list[CheckResult] = []
        self.system: dict[str, Any] = {}
        self.inputs: dict[str, Inputs] = {}
        self.error: BlockFlowError | None = None
        self.ended = False
        self.steadiness: calibration.Steadiness | None = None

    @property
    def measured(self) -> bool:
        """There is something to report."""
        return bool(self.results or self.checks)

    def run(self) -> None:
        """Do everything. What was measured before something failed stays in ``results``.

        Raises:
            BlockFlowError: what is wrong before anything was measured: bounds that no load can keep
                among it, of all scenarios, and a folder that another call writes to. The first one
                of later failures is in ``error``, and each in its result.
        """
        plan = self.plan
        check_loadgen()
        targets = {
            s: targets_of(s, plan.weights, plan.presets, plan.latency_ms, plan.percentile)
            for s in plan.scenarios
        }
        for scenario in plan.scenarios:
            plan.check(scenario, targets[scenario])
        asked = {s: self._settings(s, targets[s]) for s in plan.scenarios}
        hooks = {task: load_hook(text) for task, text in plan.preprocess.items()}
        with (
            alone(plan.out),
            scratch() as folder,
            Client(plan.address or None, client_keys=plan.client_keys or None) as client,
        ):
            routes = self._routes(client)
            if any(s in MANY_ROWS for s in plan.scenarios):
                check_rows(routes, plan.rows)
            self._show("preparing the data", None)
            self.inputs = load_inputs(plan.data, routes, seed=plan.seed, hooks=hooks)
            save_inputs(self.inputs, folder)
            self.system = {
                "address": client.address,
                "tasks": {name: r.to_dict() for name, r in routes.items()},
                **self._deployed(),
            }
            seconds = SHORT_CALIBRATION_S if plan.short else CALIBRATION_S
            begin = calibration.calibrate(seconds)
            jobs = [
                self._prepared(client, routes, asked[scenario], folder)
                for scenario in plan.scenarios
            ]
            self._tell()
            for job in jobs:
                with self._kept():
                    self._scenario(job, routes, folder)
                self._tell()
                if self._over:
                    break
            with self._kept():
                self.steadiness = calibration.compare(begin, calibration.calibrate(seconds))
        self.ended = True

    @contextmanager
    def _kept(self) -> Iterator[None]:
        """An error after the first result is kept with the results, not raised over them."""
        try:
            yield
        except Exception as exc:
            if not self.measured:
                raise
            error = as_error(exc)
            self.error = self.error or error
            self._over = self._over or error.code in ENDS

    def _tell(self) -> None:
        if self._keep is not None:
            self._keep(self)

    def _routes(self, client: Client) -> dict[str, TaskRoute]:
        published = client.wait_ready(timeout_s=READY_S)
        for task in self.plan.weights:
            if task not in published:
                known = ", ".join(sorted(published)) or "none"
                raise RequestError(
                    "UNKNOWN_TASK",
                    f"no task {task!r}",
                    where="--task",
                    hint=f"published: {known}",
                )
        return {task: published[task] for task in self.plan.weights}

    def _deployed(self) -> dict[str, Any]:
        """Topology and blocks with their digests; empty where REST does not answer."""
        if self._rest is None:
            return {}
        try:
            return {
                "topology": self._rest.get("/v1/topology"),
                "blocks": self._rest.get("/v1/blocks"),
            }
        except BlockFlowError as exc:
            return {"unknown": exc.to_dict()}

    # --- one scenario ----------------------------------------------------------------------------

    def _settings(self, scenario: Scenario, targets: Mapping[str, Target]) -> RunSettings:
        """As far as they are known before the system was asked anything."""
        plan = self.plan
        several = plan.samples_per_query if scenario is Scenario.MULTISTREAM else 1
        return make_settings(
            scenario,
            Mode.PERFORMANCE,
            targets,
            short=plan.short,
            duration_s=plan.duration_s,
            queries=plan.queries,
            confidence=plan.confidence,
            asked=shares(plan.weights, several),
            samples_per_query=plan.samples_per_query,
            seed=plan.seed,
            deadline_s=plan.deadline_s,
            in_flight=plan.in_flight,
        )

    def _prepared(
        self, client: Client, routes: Mapping[str, TaskRoute], first: RunSettings, data: Path
    ) -> Job:
        """A scenario's job, by what the system does before LoadGen comes.

        Raises:
            BlockFlowError: INVALID_REQUEST for a bound that no load can keep, or nothing succeeded.
        """
        plan, scenario = self.plan, first.scenario
        many = scenario in MANY_ROWS
        most = {t: (plan.rows or rows_per_request(r)) if many else 1 for t, r in routes.items()}
        library = Library.weighted(self._rows(), plan.weights)
        self._show(f"{scenario}: calibrating", None)
        found = calibrate(client, library, read_inputs(data, most), first)
        check_bounds(found, first.targets)
        settings = replace(
            first,
            expected_ms=found.expected_ms,
            rate=found.offline
            if scenario is Scenario.OFFLINE
            else plan.rate or found.rate * FIRST_SHARE,
        )
        return Job(client.address, plan.client_keys, str(data), plan.weights, most, settings)

    def _rows(self) -> dict[str, int]:
        return {task: len(i.rows) for task, i in self.inputs.items()}

    def _scenario(self, job: Job, routes: Mapping[str, TaskRoute], data: Path) -> None:
        plan, settings = self.plan, job.settings
        for mode in plan.modes:
            if mode is Mode.ACCURACY:
                self._accuracy(job, self._rows())
            elif settings.scenario is Scenario.SERVER and plan.rate is None:
                self._show("server: searching the highest VALID rate", None)
                search = RateSearch(settings.rate, precision=plan.precision, runs=plan.search_runs)
                self.results.append(
                    search_rate(job, search, self._run, plan.confirmations, plan.server_runs)
                )
            elif settings.scenario is Scenario.SERVER and plan.server_runs > 1:
                self.results.append(repeat_rate(job, self._run, plan.server_runs))
            else:
                self.results.append(ScenarioResult(self._lengthened(job, str(settings.scenario))))
            self._tell()
            self._check_last()
        if plan.checks:
            self._validate(job, routes, data)

    def _validate(self, job: Job, routes: Mapping[str, TaskRoute], data: Path) -> None:
        plan = self.plan
        outputs = {t: r.contract.output for t, r in routes.items()}
        validator = Validator(
            job,
            self.inputs,
            {t: (spec.dtype, spec.row_bytes()) for t, spec in outputs.items()},
            data,
            self._plain,
            seconds=plan.duration_s or (SHORT_RUN_S if plan.short else RUN_S),
            tolerance=plan.tolerance,
        )
        for check in plan.checks:
            self.checks.append(validator.check(check))
            self._tell()
            error = self.checks[-1].error
            if error is not None:
                raise error

    def _check_last(self) -> None:
        """Go no further with a scenario whose run broke off."""
        last = self.results[-1].result
        if last.broke_off and last.error is not None:
            raise last.error

    def _plain(self, job: Job, name: str, what: str) -> RunResult:
        self._show(what, None)
        return run(job, self.plan.out / name, lambda counts: self._show(what, counts))

    def _run(self, job: Job, name: str, what: str) -> RunResult:
        """A run whose batch sizes are watched."""
        self._show(what, None)
        watch = BatchWatch(self._rest)

        def progress(counts: Counts) -> None:
            self._show(what, counts)
            watch.look(counts.issued > 0)

        result = run(job, self.plan.out / name, progress)
        return replace(result, batches=watch.finish({b.block: b.count for b in result.blocks}))

    def _lengthened(self, job: Job, name: str) -> RunResult:
        """A run, again with more queries prepared if it ended early for want of them."""
        result = self._run(job, name, name)
        for attempt in range(2, ATTEMPTS + 1):
            if not result.verdict.too_short:
                break
            job = replace(job, settings=job.settings.scaled(2.0))
            try:
                result = self._run(job, name, f"{name}, try {attempt}")
            except Exception as exc:
                return broken_off(result, as_error(exc))
        return result

    def _accuracy(self, job: Job, rows: Mapping[str, int]) -> None:
        settings = replace(job.settings, mode=Mode.ACCURACY)
        name = f"{settings.scenario}-accuracy"
        published = self.system["tasks"]
        truths = {
            task: Truth(i.labels.tolist(), published[task]["contract"]["output"]["dtype"])
            for task, i in self.inputs.items()
            if i.labels is not None
        }
        result = self._run(replace(job, settings=settings), name, name)
        self.results.append(ScenarioResult(result))
        if truths and result.error is None:
            save_truth(result.folder, rows, truths)
            self.results[-1] = ScenarioResult(result, accuracy=measure(result.folder))

    # --- the record ------------------------------------------------------------------------------

    def data_record(self) -> dict[str, Any]:
        """Where each task's inputs came from."""
        return {
            task: {"origin": i.origin, "rows": len(i.rows), "labels": i.labels is not None}
            for task, i in self.inputs.items()
        }


def check_rows(routes: Mapping[str, TaskRoute], wanted: int) -> None:
    """Raise INVALID_REQUEST for more rows in a request than a task takes; 0 is what it takes."""
    most = {task: rows_per_request(route) for task, route in routes.items()}
    least = min(most, key=lambda task: most[task])
    if wanted > most[least]:
        raise nonsense(
            f"a request of {least!r} brings at most {most[least]} rows, not {wanted}",
            "--rows",
            f"at most {most[least]}; or leave it out: each task then gets what it takes",
        )


def rows_per_request(route: TaskRoute) -> int:
    """Rows that one request of a task may bring: the topology's limit, and the messages'."""
    fit = limits.MAX_MESSAGE_BYTES // route.contract.input.row_bytes()
    return max(1, min(route.max_rows, fit))
