"""``blockflow bench``: the client as LoadGen's system under test, and what is done before a run."""

from __future__ import annotations

import json
import threading
from collections.abc import Sequence
from concurrent.futures import Future
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from blockflow.bench.mlperf import calibrate as calibrating
from blockflow.bench.mlperf import run as running
from blockflow.bench.mlperf.calibrate import FAILURES, Calibration, calibrate, check_bounds
from blockflow.bench.mlperf.detail_log import DetailLog
from blockflow.bench.mlperf.driver import GIVEN_UP, leave
from blockflow.bench.mlperf.job import LATENCIES, OUTCOME, TASK, Job, disk
from blockflow.bench.mlperf.library import Library
from blockflow.bench.mlperf.settings import (
    Mode,
    Scenario,
    Target,
    make_settings,
)
from blockflow.bench.mlperf.sut import Sut, TaskData
from blockflow.bench.mlperf.tally import GIVE_UP_AFTER, Counts, Tally
from blockflow.bench.mlperf.verdict import judge
from blockflow.cli.main import main
from blockflow.core.errors import BlockFlowError, make_error
from blockflow.engine.extras import how_to_install

FREE = {"a": Target(0.9)}
LOG = DetailLog({"result_validity": "VALID", "num_errors": 0})


# --- the system under test -----------------------------------------------------------------------


class FakeClient:
    """Answers at once with what it was sent, or with the next planned error."""

    def __init__(self, *plan: BaseException | None) -> None:
        self.plan = list(plan)
        self.sent: list[tuple[str, int]] = []

    def submit(self, tasks: str, x: Any, *, deadline_s: float, dtype: str | None) -> Future[Any]:
        self.sent.append((tasks, len(x)))
        error = self.plan.pop(0) if self.plan else None
        future: Future[Any] = Future()
        if error is not None:
            future.set_exception(error)
        else:
            future.set_result(SimpleNamespace(value=x, timings=()))
        return future


def sut_of(
    client: Any, scenario: Scenario, most: int = 1
) -> tuple[Sut, Tally, list[tuple[Sequence[int], Sequence[Any]]]]:
    rows = [np.full((1, 4), i, np.float32) for i in range(10)]
    done: list[tuple[Sequence[int], Sequence[Any]]] = []
    tally = Tally(["a"], deadline_s=1.0)
    data = {"a": TaskData(rows, "float32", most)}
    settings = make_settings(scenario, Mode.PERFORMANCE, FREE, short=True, in_flight=2)
    sut = Sut(
        client,
        Library.once({"a": 10}),
        data,
        settings,
        tally,
        lambda ids, outputs: done.append((ids, outputs)),
    )
    return sut, tally, done


def test_every_sample_gets_its_own_row_back() -> None:
    client = FakeClient()
    sut, tally, done = sut_of(client, Scenario.OFFLINE, most=4)
    sut.issue(range(100, 110), list(range(10)))
    assert [n for _, n in client.sent] == [4, 4, 2]
    answers = {i: x for ids, outputs in done for i, x in zip(ids, outputs, strict=True)}
    assert {i: float(x[0]) for i, x in answers.items()} == {100 + i: i for i in range(10)}
    assert tally.counts() == Counts(10, 10, queries={"a": 1})


def test_a_failing_system_completes_every_sample_and_counts_it() -> None:
    client = FakeClient(make_error("BLOCK_FAILED", "no"), None, RuntimeError("what"))
    sut, tally, done = sut_of(client, Scenario.SINGLE_STREAM)
    for i in range(4):
        sut.issue([i], [i])
    assert [ids for ids, _ in done] == [[0], [1], [2], [3]]
    assert [outputs[0] is None for _, outputs in done] == [True, False, True, False]
    assert tally.counts() == Counts(4, 2, 0, {"BLOCK_FAILED": 1, "INTERNAL": 1}, {"a": 4})
    settings = make_settings(Scenario.SINGLE_STREAM, Mode.PERFORMANCE, FREE, short=True)
    assert not judge(settings, LOG, tally.counts(), tally.latencies()).valid


def test_a_client_that_refuses_completes_the_sample_too() -> None:
    class Refusing(FakeClient):
        def submit(self, *args: Any, **kw: Any) -> Future[Any]:
            raise make_error("OVERLOADED", "too many")

    sut, tally, done = sut_of(Refusing(), Scenario.SERVER)
    sut.issue([1], [0])
    assert len(done) == 1
    assert tally.counts().failed == {"OVERLOADED": 1}


def test_an_answer_with_other_rows_is_a_failure() -> None:
    class Short(FakeClient):
        def submit(self, tasks: str, x: Any, **kw: Any) -> Future[Any]:
            return super().submit(tasks, x[:-1], **kw)

    sut, tally, done = sut_of(Short(), Scenario.MULTISTREAM, most=4)
    sut.issue([1, 2, 3, 4], [0, 1, 2, 3])
    assert len(done) == 1
    assert tally.counts().failures == 4


def test_offline_a_full_system_is_asked_again() -> None:
    full = make_error("OVERLOADED", "full", retry_after_ms=1)
    sut, tally, done = sut_of(FakeClient(full, None, full), Scenario.OFFLINE)
    sut.issue([0, 1, 2], [0, 1, 2])
    assert sorted(i for ids, _ in done for i in ids) == [0, 1, 2]
    assert tally.counts() == Counts(3, 3, 2, queries={"a": 1})


def test_a_query_of_several_samples_ends_with_its_last_answer() -> None:
    class Held(FakeClient):
        def __init__(self) -> None:
            super().__init__()
            self.open: list[tuple[Future[Any], Any]] = []

        def submit(self, tasks: str, x: Any, **kw: Any) -> Future[Any]:
            future: Future[Any] = Future()
            self.open.append((future, x))
            return future

    client = Held()
    sut, tally, _ = sut_of(client, Scenario.MULTISTREAM, most=4)
    sut.issue(range(8), list(range(8)))
    (first, x), (second, _) = client.open
    first.set_result(SimpleNamespace(value=x, timings=()))
    assert tally.queries_ms() == []
    second.set_exception(make_error("BLOCK_FAILED", "no"))  # it is late for its query all the same
    (query_ms,) = tally.queries_ms()
    assert query_ms == max(tally.latencies()["a"])
    assert tally.counts().queries == {"a": 1}
    sut, tally, _ = sut_of(FakeClient(), Scenario.SINGLE_STREAM)
    sut.issue([0], [0])
    assert tally.queries_ms() == []  # the sample says it


def test_a_run_is_given_up_when_the_system_is_gone_or_fails_without_end() -> None:
    tally = Tally(["a"], deadline_s=30.0)
    for _ in range(GIVE_UP_AFTER - 1):
        tally.failed("a", 1, 1.0, "BLOCK_FAILED", "no")
    assert not tally.given_up.is_set()
    tally.answered("a", 1, 1.0, ())
    tally.failed("a", 1, 1.0, "BLOCK_FAILED", "no")
    assert not tally.given_up.is_set()
    tally.failed("a", 1, 1.0, "CONNECTION_LOST", "gone")
    assert tally.given_up.is_set()
    assert (tally.code, tally.reason) == ("CONNECTION_LOST", "gone")


def test_a_run_is_given_up_when_nothing_was_answered_for_two_deadlines() -> None:
    clock = [1000.0]

    def late(tally: Tally) -> bool:
        clock[0] += 30.0
        tally.failed("a", 1, 30_000.0, "DEADLINE_EXCEEDED", "late")
        return tally.given_up.is_set()

    tally = Tally(["a"], 30.0, lambda: clock[0])
    assert [late(tally) for _ in range(3)] == [False, False, True]
    assert "3 failures in a row, no answer for 90 s; the first: late" in tally.reason
    tally = Tally(["a"], 30.0, lambda: clock[0])
    for _ in range(10):
        assert not late(tally)
        assert not late(tally)
        tally.answered("a", 1, 1.0, ())
    # Offline a request's time is that of the run so far, and says nothing about the last answer.
    for _ in range(GIVE_UP_AFTER - 1):
        tally.failed("a", 1, 900_000.0, "BLOCK_FAILED", "no")
    assert not tally.given_up.is_set()


def test_what_is_written_of_a_run_that_is_given_up_is_of_the_same_samples(tmp_path: Path) -> None:
    """Answers come in until the process has gone."""

    class Late(Tally):
        def latencies(self) -> dict[str, list[float]]:
            return self._then_one_more(super().latencies())

        def counts(self) -> Counts:
            return self._then_one_more(super().counts())

        def _then_one_more(self, found: Any) -> Any:
            answer = threading.Thread(target=self.answered, args=("a", 1, 1.0, ()), daemon=True)
            answer.start()
            answer.join(0.2)  # it comes to its end at once, or waits
            return found

    tally = Late(["a"], deadline_s=1.0)
    tally.issued(9, ["a"])
    tally.answered("a", 1, 1.0, ())
    tally.give_up("DEADLINE_EXCEEDED", "it is lost")
    assert leave(tmp_path, tally) == GIVEN_UP
    answered = json.loads((tmp_path / OUTCOME).read_text())["counts"]["answered"]
    with np.load(tmp_path / LATENCIES) as found:
        assert len(found[TASK + "a"]) == answered == 1


# --- before the run ------------------------------------------------------------------------------


def test_calibration_measures_and_a_failure_is_raised(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(calibrating, "LEAST_S", 0.03)
    data = {"a": TaskData([np.zeros((1, 4), np.float32)], "float32", 8)}
    settings = make_settings(Scenario.OFFLINE, Mode.PERFORMANCE, FREE, short=True)
    found = calibrate(FakeClient(), Library.once({"a": 1}), data, settings)
    assert found.rate > 0
    assert found.offline > 0
    assert 0 < found.expected_ms < found.fastest_ms["a"]
    failing = FakeClient(*[make_error("BLOCK_FAILED", "no")] * 100)
    with pytest.raises(BlockFlowError) as caught:
        calibrate(failing, Library.once({"a": 1}), data, settings)
    assert caught.value.code == "BLOCK_FAILED"
    assert len(failing.sent) == FAILURES  # each might take a deadline
    # Rows that fail are the run's to judge: what was answered before says enough to begin.
    some = FakeClient(None, *[make_error("BLOCK_FAILED", "no")] * FAILURES)
    assert calibrate(some, Library.once({"a": 1}), data, settings).fastest_ms["a"] > 0


def test_calibration_counts_what_was_answered_and_no_quick_failures(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A worker that fails at once would make the search begin far above what there is."""
    clock = [0.0]

    class Half(FakeClient):
        def submit(self, tasks: str, x: Any, *, deadline_s: float, dtype: str | None) -> Any:
            clock[0] += 0.01
            self.plan = [make_error("BLOCK_FAILED", "no") if len(self.sent) % 2 else None]
            return super().submit(tasks, x, deadline_s=deadline_s, dtype=dtype)

    monkeypatch.setattr(calibrating, "time", SimpleNamespace(monotonic=lambda: clock[0]))
    data = {"a": TaskData([np.zeros((1, 4), np.float32)], "float32", 1)}
    settings = make_settings(Scenario.SERVER, Mode.PERFORMANCE, FREE, short=True)
    found = calibrate(Half(), Library.once({"a": 1}), data, settings)
    assert found.rate == pytest.approx(50.0)


def test_calibration_waits_for_no_second_answer_that_does_not_come(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    clock = [0.0]

    class Silent(FakeClient):
        def submit(self, tasks: str, x: Any, *, deadline_s: float, dtype: str | None) -> Any:
            clock[0] += deadline_s
            return super().submit(tasks, x, deadline_s=deadline_s, dtype=dtype)

    monkeypatch.setattr(calibrating, "time", SimpleNamespace(monotonic=lambda: clock[0]))
    data = {"a": TaskData([np.zeros((1, 4), np.float32)], "float32", 8)}
    settings = make_settings(Scenario.OFFLINE, Mode.PERFORMANCE, FREE, short=True)
    silent = Silent(*[make_error("DEADLINE_EXCEEDED", "late")] * 100)
    with pytest.raises(BlockFlowError, match="late"):
        calibrate(silent, Library.once({"a": 1}), data, settings)
    assert clock[0] == settings.deadline_s


def test_an_impossible_bound_is_refused_before_the_run() -> None:
    found = Calibration({"a": 2.0}, 100.0, 100.0)
    check_bounds(found, {"a": Target(0.99, 2.5)})
    with pytest.raises(BlockFlowError) as caught:
        check_bounds(found, {"a": Target(0.99, 1.5)})
    assert caught.value.code == "INVALID_REQUEST"
    assert "1.5 ms" in caught.value.message
    near = Calibration({"a": 2.2534}, 100.0, 100.0)
    with pytest.raises(BlockFlowError, match=r"keep 2\.253 ms: .* took 2\.2534 ms"):
        check_bounds(near, {"a": Target(0.99, 2.253)})


def test_without_loadgen_the_command_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(running, "find_spec", lambda name: None)
    assert main(["bench", "--task", "a", "--json"]) == 2
    error = json.loads(capsys.readouterr().out)["error"]
    assert error["code"] == "MISSING_EXTRA"
    assert error["hint"] == how_to_install("bench")


def test_a_disk_without_room_is_noticed_before_the_run(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(running, "find_spec", lambda name: True)
    monkeypatch.setattr(running.shutil, "disk_usage", lambda path: SimpleNamespace(free=1 << 20))
    settings = make_settings(Scenario.OFFLINE, Mode.PERFORMANCE, FREE, short=True)
    job = Job("tcp://127.0.0.1:1", "", str(tmp_path), {"a": 1}, {"a": 1}, settings)
    with pytest.raises(BlockFlowError) as caught:
        running.run(job, tmp_path / "run", lambda counts: None)
    assert caught.value.code == "NO_SPACE"


def test_a_disk_that_fills_up_is_a_typed_error(tmp_path: Path) -> None:
    with pytest.raises(BlockFlowError) as caught, disk(tmp_path):
        Path("/dev/full").write_bytes(b"x")
    assert caught.value.code == "NO_SPACE"
