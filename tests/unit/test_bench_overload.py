"""The overload benchmark's bookkeeping: what counts, what is said of it, what is written."""

from __future__ import annotations

import time
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pytest

from blockflow.bench import overload
from blockflow.bench.canvas import save_page
from blockflow.bench.overload import QUICK, Plan, parse_args
from blockflow.bench.overload_clients import offer, outcome_of
from blockflow.bench.overload_figures import (
    ANSWER,
    GOODPUT,
    IN_FLIGHT,
    MEMORY,
    QUEUED,
    REJECTION,
    Depth,
    Ended,
    Load,
    draw,
    figures,
    load_grid,
    remarks,
)
from blockflow.core.errors import RequestError

MEMORY_SEEN = [(0.2 * n, 100.0 + (n > 8)) for n in range(12)]


def load(times: float, good: int, rejected: int, waits: int = 10) -> Load:
    """Ten seconds with so many answers of 20 ms and rejections of 2 ms per second, and so many
    requests under way, half of them in queues."""
    made = Load(times, 50.0 * times, 10.0, 12.0 * times, limit=9)
    for second in range(11):  # the last ones are done after the time
        made.ended += [Ended(second, second + 0.02, "ok")] * good
        made.ended += [Ended(second, second + 0.002, "rejected")] * rejected
    made.depths = [Depth(0.25 * n, waits + n % 2, waits // 2) for n in range(40)]
    return made


def test_only_what_is_done_in_the_time_that_counts_is_counted() -> None:
    one = load(1.0, 40, 0)
    assert one.per_s("ok") == pytest.approx(40 * 7 / 7.5)  # seconds 3 to 9 of 2.5 to 10
    assert one.per_s("rejected") == 0.0
    assert one.took_ms("ok") == pytest.approx([20.0] * 280)


def test_the_deepest_moment_may_be_an_early_one() -> None:
    one = load(1.0, 40, 0)
    one.depths = [Depth(3.0, 9, 5), Depth(8.0, 2, 1), Depth(10.5, 99, 99)]  # after its end
    assert [(f.value, dict(f.labels)) for f in one.depth_figures()] == [
        (2, {"first half": 9, "max": 9}),
        (1, {"first half": 5, "max": 5}),
    ]


def test_a_rejection_is_told_by_the_slowest() -> None:
    one = load(1.0, 0, 0)
    one.ended = [Ended(5.0, 5.0 + n / 1e3, "rejected") for n in range(1, 101)]
    (row,) = load_grid(figures([one], [])).rows
    assert row[-2] == "99.0"


def test_figures_and_remarks() -> None:
    loads = [load(1.0, 40, 0), load(3.0, 38, 90)]
    found = figures(loads, MEMORY_SEEN)
    by = {(f.name, f.mode): f for f in found if f.name != MEMORY}
    assert set(by) == {
        (GOODPUT, "1x"),
        (ANSWER, "1x"),
        (GOODPUT, "3x"),
        (ANSWER, "3x"),
        (REJECTION, "3x"),
        *((name, mode) for name in (IN_FLIGHT, QUEUED) for mode in ("1x", "3x")),
    }
    assert by[IN_FLIGHT, "3x"].value == 11
    assert by[IN_FLIGHT, "3x"].labels == {"first half": 10, "max": 11}
    assert by[QUEUED, "3x"].value == 5.0
    assert by[GOODPUT, "3x"].labels["offered"] == 150.0
    assert by[GOODPUT, "3x"].labels["rejected"] == 84.0
    assert by[REJECTION, "3x"].p99_ms == pytest.approx(2.0)
    assert [f.value for f in found if f.name == MEMORY] == [mib for _, mib in MEMORY_SEEN]
    rows = {row[0]: row for row in load_grid(found).rows}
    assert rows["3x"][:5] == ("3x", "150", "35.5", "95%", "84.0")
    said = remarks(loads, MEMORY_SEEN)
    assert said[1] == "3x: 95% of the peak's goodput, limit 9, rejections p99 2.0 ms"
    assert said[-1] == "resident memory: 100 MiB in the first quarter, 101 at last"


def test_the_picture(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    found = figures([load(1.0, 40, 0), load(3.0, 38, 90)], MEMORY_SEEN)
    save_page(draw(found), tmp_path / "o.png")
    assert (tmp_path / "o.png").stat().st_size > 1000


@pytest.mark.parametrize(
    ("error", "outcome"),
    [
        (None, "ok"),
        (RequestError("OVERLOADED", "full"), "rejected"),
        (RequestError("DEADLINE_EXCEEDED", "late"), "late"),
        (RequestError("WORKER_LOST", "dead"), "failed"),
        (ValueError("a defect"), "failed"),
    ],
)
def test_outcomes(error: Exception | None, outcome: str) -> None:
    future: Future[Any] = Future()
    if error is None:
        future.set_result(1)
    else:
        future.set_exception(error)
    assert outcome_of(future) == outcome


class Held:
    """A client that is held up for a quarter of a second once, and answers at once."""

    def __init__(self) -> None:
        self.sent = 0

    def submit(self, _task: str, _x: Any, *, deadline_s: float) -> Future[Any]:
        self.sent += 1
        if self.sent == 2:
            time.sleep(0.25)
        answer: Future[Any] = Future()
        answer.set_result(deadline_s)
        return answer


def test_a_sender_that_is_held_up_hides_nothing() -> None:
    client = Held()
    ended = sorted(offer(client, 1.0, 100.0, 0.3, 1.0), key=lambda e: e.due_s)  # type: ignore[arg-type]
    held = [e for e in ended if ended[1].due_s <= e.due_s <= ended[1].done_s - 0.05]
    assert len(held) > 5  # came due meanwhile, by their draws
    assert all(e.done_s >= ended[1].due_s + 0.25 for e in held)
    load = Load(1.0, 100.0, 0.3, 0.0, ended=ended)
    assert max(load.took_ms("ok")) > 50.0
    # Who was late was not the system.
    assert all(e.lag_s >= e.done_s - e.due_s - 0.05 for e in held[1:])


def test_queues_are_told_only_of_a_load_that_was_looked_at() -> None:
    one = load(1.0, 40, 0)
    one.depths = [d for d in one.depths if d.at_s < 6.0]
    assert one.depth_figures() == []


@pytest.mark.parametrize(
    ("arguments", "waits", "status"), [([], 10, 0), ([], 60, 1), (["--quick"], 60, 0)]
)
def test_a_broken_promise_is_the_exit_status(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, arguments: list[str], waits: int, status: int
) -> None:
    """Sixty requests wait at three times the capacity, where ten do at one and a half."""
    loads = [load(1.0, 40, 0), load(1.5, 40, 20), load(3.0, 40, 90, waits)]
    monkeypatch.setattr(overload, "measure", lambda _plan, _say: (loads, MEMORY_SEEN))
    drawn: list[Path] = []
    monkeypatch.setattr(overload, "draw", list)
    monkeypatch.setattr(overload, "save_page", lambda _page, path: drawn.append(path))
    files = ["--json", str(tmp_path / "o.jsonl"), "--plot", str(tmp_path / "o.png")]
    assert overload.main([*arguments, *files]) == status
    assert drawn == [tmp_path / "o.png"] and (tmp_path / "o.jsonl").exists()


def test_arguments() -> None:
    assert parse_args([])[0] == Plan()
    assert parse_args(["--quick"])[0] == QUICK
    plan, args = parse_args(["--seconds", "3", "--fixed"])
    assert (plan.seconds, plan.adaptive, args.fixed) == (3.0, False, True)


def test_the_machines_lag_is_told_apart() -> None:
    load = Load(3.0, 300.0, 10.0, 0.0)
    load.ended = [Ended(5.0, 5.004, "rejected"), Ended(6.0, 6.030, "rejected", 0.025)]
    load.ended += [Ended(7.0, 7.001, "rejected", 0.5)]  # no shorter than nothing
    (rejection,) = [f for f in figures([load], []) if f.name == REJECTION]
    assert rejection.p99_ms == pytest.approx(30.0)
    assert rejection.labels["beyond_lag"] == pytest.approx(5.0)
    assert load.beyond_lag_ms("rejected") == pytest.approx([4.0, 5.0, 0.0])
