"""``blockflow bench --validate``: planted cheats are caught by runs of the real LoadGen.

Most systems here are fakes in this process, whose time is virtual: a request takes as long as the
fake says, however busy the machine is.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from fake_dispatcher import FakeDispatcher
from warm_rig import Warm

from blockflow.bench.mlperf import run as run_module
from blockflow.bench.mlperf import sut as sut_module
from blockflow.bench.mlperf import validator as validator_module
from blockflow.bench.mlperf.data import Inputs
from blockflow.bench.mlperf.document import make_document
from blockflow.bench.mlperf.driver import completer, drive, leave
from blockflow.bench.mlperf.job import Job, read_inputs, save_inputs
from blockflow.bench.mlperf.plan import Plan
from blockflow.bench.mlperf.result import RunResult
from blockflow.bench.mlperf.run import read_run
from blockflow.bench.mlperf.session import Session
from blockflow.bench.mlperf.settings import Mode, Scenario, Target, make_settings
from blockflow.bench.mlperf.sut import Sut
from blockflow.bench.mlperf.tally import Counts, Tally
from blockflow.bench.mlperf.validation import Check, Outcome
from blockflow.bench.mlperf.validator import LEAST, CheckResult, Validator
from blockflow.cli.main import main
from blockflow.core.errors import make_error

ROWS = 64
SLOW_MS, QUICK_MS = 4.0, 1.0


class Honest:
    """Computes every answer; each takes as long, but for a little noise."""

    def __init__(self) -> None:
        self.now_ns = 0
        self.asked = 0
        self.mode = Mode.PERFORMANCE

    def submit(self, tasks: str, x: Any, *, deadline_s: float, dtype: str | None) -> Future[Any]:
        self.asked += 1
        self.now_ns += round((self.cost_ms(x) + self.asked % 7 / 100) * 1e6)
        future: Future[Any] = Future()
        future.set_result(SimpleNamespace(value=self.answer(x), timings=()))
        return future

    def cost_ms(self, x: Any) -> float:
        return SLOW_MS

    def answer(self, x: Any) -> Any:
        return 2 * x + 1


class Garbage(Honest):
    """Computes nothing where nobody looks at the answers."""

    def answer(self, x: Any) -> Any:
        return super().answer(x) if self.mode is Mode.ACCURACY else np.ones_like(x)


class SometimesGarbage(Honest):
    """Answers every tenth query of a performance run with the answer before."""

    last: Any = None

    def answer(self, x: Any) -> Any:
        lazy = self.mode is Mode.PERFORMANCE and self.asked % 10 == 0 and self.last is not None
        self.last = self.last if lazy else super().answer(x)
        return self.last


class Caching(Honest):
    """Keeps every answer, and gives it again."""

    def __init__(self) -> None:
        super().__init__()
        self.known: set[bytes] = set()

    def cost_ms(self, x: Any) -> float:
        key = x.tobytes()
        if key in self.known:
            return QUICK_MS
        self.known.add(key)
        return SLOW_MS


class Tuned(Honest):
    """Knows the order of the official seed: the next query is under way before it is asked."""

    def __init__(self) -> None:
        super().__init__()
        self.learning = True
        self.pairs: set[tuple[bytes, bytes]] = set()
        self.last = b""

    def cost_ms(self, x: Any) -> float:
        pair, self.last = (self.last, x.tobytes()), x.tobytes()
        if self.learning:
            self.pairs.add(pair)
        return QUICK_MS if pair in self.pairs else SLOW_MS


def runner(system: Any, folder: Path, data: Path) -> Callable[[Job, str, str], RunResult]:
    """Runs of LoadGen in this process."""

    def run(job: Job, name: str, what: str) -> RunResult:
        system.mode = job.settings.mode
        here = folder / name
        here.mkdir(parents=True)
        rows = read_inputs(Path(job.data), job.most)
        library = job.library({task: len(d.rows) for task, d in rows.items()})
        tally = Tally(library.tasks, job.settings.deadline_s)
        complete = completer(job.settings.logs_answers)
        sut = Sut(system, library, rows, job.settings, tally, complete)
        drive(job.settings, len(library), sut, here)
        return read_run(job.settings, here, leave(here, tally), Counts())

    return run


@pytest.fixture
def validated(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., CheckResult]:
    """Does one test of one system."""

    def validate(
        system: Any, check: Check, scenario: Scenario = Scenario.SINGLE_STREAM
    ) -> CheckResult:
        clock = SimpleNamespace(
            monotonic_ns=lambda: system.now_ns, monotonic=time.monotonic, sleep=time.sleep
        )
        monkeypatch.setattr(sut_module, "time", clock)
        chance = np.random.default_rng(11)
        rows = [chance.normal(size=(1, 4)).astype(np.float32) for _ in range(ROWS)]
        inputs = {"a": Inputs(rows, "float32", None, "a test")}
        data = tmp_path / "data"
        data.mkdir()
        save_inputs(inputs, data)
        settings = make_settings(
            scenario, Mode.PERFORMANCE, {"a": Target(0.9)}, short=True, rate=1000.0
        )
        job = Job("", "", str(data), {"a": 1}, {"a": 8}, settings)
        run = runner(system, tmp_path / "out", data)
        if isinstance(system, Tuned):
            known = replace(settings, min_duration_s=0.0, min_queries=LEAST)
            run(replace(job, settings=known), "learning", "")
            system.learning = False
        return Validator(
            job,
            inputs,
            {"a": ("float32", 16)},
            data,
            run,
            seconds=0.0,  # as many queries in every run, however quick the machine is
            chance=np.random.default_rng(12),
        ).check(check)

    return validate


@pytest.mark.parametrize("check", list(Check))
def test_an_honest_system_passes(validated: Callable[..., CheckResult], check: Check) -> None:
    found = validated(Honest(), check)
    assert found.outcome is Outcome.PASSED, found.why


@pytest.mark.parametrize(
    ("system", "check"),
    [
        (Garbage, Check.ACCURACY),
        (SometimesGarbage, Check.ACCURACY),
        (Caching, Check.CACHING),
        (Tuned, Check.SEEDS),
    ],
)
def test_a_planted_cheat_is_caught(
    validated: Callable[..., CheckResult], system: Callable[[], Honest], check: Check
) -> None:
    found = validated(system(), check)
    assert found.outcome is Outcome.FAILED, found.why
    assert found.error is None
    assert found.to_dict()["outcome"] == "FAILED"


@pytest.mark.parametrize("scenario", [Scenario.MULTISTREAM, Scenario.OFFLINE])
def test_every_sample_of_the_caching_test_is_asked_once(
    validated: Callable[..., CheckResult], scenario: Scenario
) -> None:
    contents: list[bytes] = []

    class Noting(Honest):
        def submit(self, tasks: str, x: Any, **kw: Any) -> Future[Any]:
            contents.extend(row.tobytes() for row in x)
            return super().submit(tasks, x, **kw)

    found = validated(Noting(), Check.CACHING, scenario)
    rounds = len(found.runs) // 2
    # In each round as many samples in both runs; in the second all have one content.
    assert len(set(contents)) == len(contents) // 2 + rounds


def test_a_failing_system_is_not_judged(validated: Callable[..., CheckResult]) -> None:
    class Failing(Honest):
        def submit(self, tasks: str, x: Any, **kw: Any) -> Future[Any]:
            if self.asked == 20:
                self.asked += 1
                raise make_error("BLOCK_FAILED", "no")
            return super().submit(tasks, x, **kw)

    found = validated(Failing(), Check.ACCURACY)
    assert found.outcome is Outcome.UNDECIDED
    assert "1 of" in found.why


# --- the whole command, with a system behind sockets ---------------------------------------------


class CachingDispatcher(FakeDispatcher):
    """Answers a content that it has seen at once."""

    def __init__(self) -> None:
        super().__init__()
        self.delay_s = 0.02
        self.known: set[bytes] = set()

    def _answer(self, who: bytes, request: Any, body: Any) -> None:
        key = bytes(body)
        if key in self.known:
            super()._answer(who, request, body)
            return
        self.known.add(key)
        self._later.append((time.monotonic() + self.delay_s, who, request, body))


class GarbageDispatcher(FakeDispatcher):
    """Answers with zeros until it is told that somebody looks."""

    def __init__(self) -> None:
        super().__init__()
        self.looked_at = threading.Event()

    def _answer(self, who: bytes, request: Any, body: Any) -> None:
        super()._answer(who, request, body if self.looked_at.is_set() else bytes(len(body)))


@pytest.fixture
def forks(warm: Warm) -> Iterator[None]:
    """LoadGen's processes are; that one starts from nothing is shown in test_mlperf_disk.py."""
    with warm.spawning(run_module):
        yield


@pytest.mark.usefixtures("forks")
def test_a_cache_behind_sockets_is_caught_and_the_command_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(validator_module, "LEAST", 12)
    monkeypatch.setattr(validator_module, "MOST", 12)
    monkeypatch.setattr(validator_module, "LOOKS", {3: 0, 6: 0, 9: 1})
    with CachingDispatcher() as fake:
        where = ("--address", fake.endpoint, "--out", str(tmp_path))
        short = ("--short", "--duration", "0.1", "--queries", "10", "--percentile", "50")
        asked = ("--task", "echo", "--data", "synthetic:4", "--validate", "caching")
        status = main(["bench", "--json", *where, *short, *asked])
    found = json.loads(capsys.readouterr().out)
    assert status == 5
    assert not found["valid"]
    (test,) = found["validation"]
    assert (test["test"], test["outcome"]) == ("caching", "FAILED")
    assert test["ratio"]["low"] > 1.1
    assert len(test["seeds"]) == len(test["runs"]) // 2
    assert all((tmp_path / run / "mlperf_log_summary.txt").exists() for run in test["runs"])
    assert "Validation tests" in (tmp_path / "report.md").read_text()
    assert json.loads((tmp_path / "summary.json").read_text()) == found


@pytest.mark.usefixtures("forks")
def test_garbage_behind_sockets_is_caught(tmp_path: Path) -> None:
    with GarbageDispatcher() as fake:

        def show(what: str, counts: Counts | None) -> None:
            if what.endswith("accuracy: accuracy"):
                fake.looked_at.set()

        plan = Plan(
            {"echo": 1},
            [Scenario.OFFLINE],
            [],
            tmp_path / "out",
            address=fake.endpoint,
            short=True,
            duration_s=0.1,
            data="synthetic:8",
            checks=[Check.ACCURACY],
        )
        session = Session(plan, show)
        session.run()
    (found,) = session.checks
    assert found.outcome is Outcome.FAILED, found.why
    assert not make_document(session, "a test")["valid"]


@pytest.mark.usefixtures("forks")
def test_a_system_that_dies_in_a_test_leaves_what_was_found(tmp_path: Path) -> None:
    fake = FakeDispatcher()
    fake.delay_s = 0.01
    alive = [fake]

    def show(what: str, counts: Counts | None) -> None:
        if "caching" in what and counts is not None and counts.answered and alive:
            alive.pop().stop()

    plan = Plan(
        {"slow": 1},
        [Scenario.SINGLE_STREAM],
        [],
        tmp_path / "out",
        address=fake.endpoint,
        short=True,
        duration_s=0.1,
        data="synthetic:8",
        checks=[Check.ACCURACY, Check.CACHING, Check.SEEDS],
    )
    session = Session(plan, show)
    try:
        session.run()
    finally:
        for left in alive:
            left.stop()
    assert [c.outcome for c in session.checks] == [Outcome.PASSED, Outcome.UNDECIDED]
    assert session.error is not None
    document = make_document(session, "a test")
    assert (document["partial"], document["valid"]) == (True, False)
    assert document["validation"][1]["error"]["code"] == session.error.code
