"""Run some of the thesis's experiments in turn; one that fails does not take the others with it."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from pathlib import Path
from typing import Any, Protocol

from blockflow.bench.calibration import Steadiness, calibrate, compare
from blockflow.bench.interrupts import heard
from blockflow.bench.mlperf.job import disk
from blockflow.bench.options import nonsense
from blockflow.bench.thesis.experiment import (
    Advance,
    Context,
    Experiment,
    Settings,
    Workshop,
    skip,
)
from blockflow.bench.thesis.outcome import (
    Call,
    Outcome,
    State,
    broken_off,
    make_document,
    write_outcome,
)
from blockflow.core.errors import BlockFlowError, make_error

_FIXED_S = 0.5


class Screen(Protocol):
    """Who watches a call."""

    def begins(self, experiment: Experiment, number: int, count: int) -> None:
        """The ``number``-th of ``count`` experiments, from 1."""

    def step(self, what: str, parts: int | None) -> AbstractContextManager[Advance]:
        """Shown while it lasts, see :data:`blockflow.bench.thesis.experiment.Step`."""

    def ended(self, outcome: Outcome) -> None:
        """With tables to show."""


class Session:
    """One call.

    Attributes:
        outcomes: what became of those that were begun.
        documents: the same as JSON.
        interrupted: Ctrl-C or SIGTERM came.
    """

    def __init__(
        self, experiments: Sequence[Experiment], call: Call, out: Path, screen: Screen
    ) -> None:
        self._experiments = experiments
        self._call = call
        self._out = out
        self._screen = screen
        self.outcomes: list[Outcome] = []
        self.documents: list[dict[str, Any]] = []
        self.interrupted = False

    @property
    def failed(self) -> list[Outcome]:
        """Those that broke off or found something wrong."""
        return [o for o in self.outcomes if o.state is State.FAILED]

    def run(self) -> None:
        """All experiments.

        Raises:
            BlockFlowError: there is no room for scratch files, or ``out`` cannot be made: nothing
                was begun.
        """
        with disk(self._out):
            self._out.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix="bf-thesis-", ignore_cleanup_errors=True) as folder:
            workshop = Workshop(Path(folder) / "blocks")
            for number, experiment in enumerate(self._experiments, 1):
                self._screen.begins(experiment, number, len(self._experiments))
                scratch = Path(folder) / f"{number}"
                scratch.mkdir()
                context = Context(self._call.settings, workshop, scratch, self._screen.step)
                outcome = self._one(experiment, context)
                try:
                    outcome = self._store(outcome)
                except KeyboardInterrupt:
                    # The first one is the only one (bench.interrupts): now it is written whole.
                    self.interrupted = True
                    outcome = self._store(outcome)
                self.outcomes.append(outcome)
                self._screen.ended(outcome)
                if self.interrupted:
                    break

    def _one(self, experiment: Experiment, context: Context) -> Outcome:
        reason = _missing(experiment, context.settings)
        if reason is not None:
            return Outcome(experiment, skip(reason))
        start = time.monotonic()
        before = calibrate(_FIXED_S)
        try:
            findings = experiment.run(context)
        except (KeyboardInterrupt, Exception) as exc:
            if isinstance(exc, KeyboardInterrupt) or heard():  # amid an import it is another error
                self.interrupted = True
                error = make_error("CANCELLED", "interrupted before the end")
                return broken_off(experiment, error, context.kept, time.monotonic() - start)
            steady = self._after(before)
            seconds = time.monotonic() - start
            return broken_off(experiment, _typed(exc), context.kept, seconds, steady)
        if findings.skipped is not None:
            return Outcome(experiment, findings)
        steady = self._after(before)
        return Outcome(experiment, findings, time.monotonic() - start, steady)

    def _after(self, before: Sequence[float]) -> Steadiness | None:
        """The fixed work beside that of before; None after Ctrl-C, which costs nothing else of an
        experiment that has ended."""
        try:
            return compare(before, calibrate(_FIXED_S))
        except KeyboardInterrupt:
            self.interrupted = True
            return None

    def _store(self, outcome: Outcome) -> Outcome:
        """Write it; where that fails the outcome says so, and what it found is on the screen."""
        try:
            self.documents.append(write_outcome(outcome, self._call, self._out))
        except Exception as exc:  # a picture that cannot be made ends no other experiment
            if heard() and not self.interrupted:
                raise KeyboardInterrupt from exc
            outcome = replace(outcome, error=outcome.error or _typed(exc))
            self.documents.append(make_document(outcome, self._call))
        return outcome


def choose(registry: Sequence[Experiment], only: Sequence[str]) -> list[Experiment]:
    """Those of these names, in the registry's order; all of them without names.

    Raises:
        RequestError: INVALID_REQUEST for a name that none has.
    """
    known = {e.name for e in registry}
    unknown = [name for name in only if name not in known]
    if unknown:
        raise nonsense(
            f"no such experiment: {', '.join(unknown)}",
            "--only",
            f"there are {', '.join(e.name for e in registry)}",
        )
    return [e for e in registry if not only or e.name in only]


def _missing(experiment: Experiment, settings: Settings) -> str | None:
    return next((r for need in experiment.needs if (r := need(settings)) is not None), None)


def _typed(exc: Exception) -> BlockFlowError:
    """Any failure of an experiment as one of ours: the disk's by its own code."""
    if isinstance(exc, BlockFlowError):
        return exc
    if isinstance(exc, OSError) and not isinstance(exc, TimeoutError | ConnectionError):
        try:
            with disk(Path(exc.filename or ".")):
                raise exc
        except BlockFlowError as found:
            return found
    if isinstance(exc, TimeoutError):
        return make_error("TIMEOUT", str(exc) or "no answer in time")
    return make_error("INTERNAL", repr(exc), hint="this is a defect of the experiment; report it")
