"""bench/profiling: sessions and choices with made-up measurers."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from blockflow.bench.profiling.candidates import Candidate
from blockflow.bench.profiling.choice import Judged, choose
from blockflow.bench.profiling.measurer import Measurer
from blockflow.bench.profiling.plan import Cell, Effort, cells_of
from blockflow.bench.profiling.session import Session
from blockflow.core.engines import Selection
from blockflow.core.errors import BlockError, BlockFlowError
from blockflow.core.model import BlockInfo, TensorSpec
from blockflow.repository.echo import save_echo
from blockflow.repository.profiles import ProfileStore
from blockflow.repository.repository import BlockRepository

SPEC = TensorSpec("float32", ("rows", 4))
EFFORT = Effort(confidence=0.05, seconds=1.0)
CELLS = cells_of([1, 2], [1, 4], [None])
CHECK = [Cell(1, 1), Cell(1, 3)]


def candidate(engine: str, precision: str = "fp32", reason: str = "") -> Candidate:
    selections = () if reason else (Selection(engine, precision, {}, None),)
    return Candidate(engine, precision, {}, selections, reason)


REFERENCE, FAST, ROUGH, BROKEN = map(candidate, ("exported", "openvino", "rough", "broken"))


class Lab:
    """Opens made-up measurers and keeps a log of what was asked."""

    def __init__(self) -> None:
        self.row_ms = {"exported": 10.0, "openvino": 5.0, "rough": 2.0, "broken": 1.0}
        self.error = {"exported": 0.0, "openvino": 1e-5, "rough": 0.5, "broken": 0.0}
        self.fails: dict[str, Callable[[str, Cell | None], None]] = {}
        self.log: list[tuple[str, str, Any]] = []
        self.firsts: list[bool] = []
        self.alive = 0
        self.random = random.Random(7)

    def open(self, asked: Candidate, threads: int) -> Measurer:
        self.log.append(("open", asked.engine, threads))
        self.trouble(asked.engine, "open", None)
        self.alive += 1
        return _Made(self, asked.engine)

    def trouble(self, engine: str, what: str, cell: Cell | None) -> None:
        if engine in self.fails:
            self.fails[engine](what, cell)

    def measured(self) -> list[tuple[str, Cell]]:
        return [(e, c) for what, e, c in self.log if what == "measure"]


class _Made(Measurer):
    def __init__(self, lab: Lab, engine: str) -> None:
        self.lab, self.engine = lab, engine

    def measure(self, cell: Cell, runs: int, limit_s: float, *, first: bool) -> list[list[float]]:
        self.lab.log.append(("measure", self.engine, cell))
        self.lab.firsts.append(first)
        self.lab.trouble(self.engine, "measure", cell)
        ms = self.lab.row_ms[self.engine] * cell.rows / cell.threads
        return [[ms * self.lab.random.uniform(0.98, 1.02)] for _ in range(runs)]

    def errors(self, cells: Sequence[Cell], *, store: bool = False) -> list[float]:
        self.lab.log.append(("store" if store else "compare", self.engine, list(cells)))
        self.lab.trouble(self.engine, "errors", None)
        return [self.lab.error[self.engine] * (i + 1) / len(cells) for i in range(len(cells))]

    def close(self) -> None:
        self.lab.alive -= 1


class Watcher:
    def __init__(self) -> None:
        self.left: list[float] = []

    def start(self, seconds: float) -> None:
        self.left.append(seconds)

    def step(self, candidate: Candidate, cell: Cell, left_s: float) -> None:
        self.left.append(left_s)


@pytest.fixture
def lab() -> Lab:
    return Lab()


@pytest.fixture
def store(tmp_path: Path) -> ProfileStore:
    save_echo(BlockRepository(tmp_path), "a", SPEC)
    return ProfileStore(tmp_path, "m1", {"cpu": "X"})


@pytest.fixture
def info(store: ProfileStore) -> BlockInfo:
    return BlockRepository(store.root).info("a")


def session(info: BlockInfo, store: ProfileStore, lab: Lab, **kw: Any) -> Session:
    return Session([info], store, lab.open, kw.pop("effort", EFFORT), Watcher(), **kw)


def raises(error: BaseException, at: str, cell: Cell | None = None) -> Callable[..., None]:
    def trouble(what: str, where: Cell | None) -> None:
        if what == at and (cell is None or where == cell):
            raise error

    return trouble


def test_every_cell_is_measured_and_stored(info: BlockInfo, store: ProfileStore, lab: Lab) -> None:
    (outcome,) = session(info, store, lab).run([REFERENCE], CELLS)
    assert set(outcome.points) == set(CELLS)
    assert outcome.points[Cell(2, 4)].p50_ms == pytest.approx(20, rel=0.05)
    record = store.fresh([info], REFERENCE.selections)
    assert record.profile.points == tuple(outcome.points[c] for c in CELLS)
    assert record.profile.digest == info.digest
    assert lab.alive == 0
    assert [e[2] for e in lab.log if e[0] == "open"] == [1, 2]  # a process per thread count


def test_candidates_take_turns(info: BlockInfo, store: ProfileStore, lab: Lab) -> None:
    session(info, store, lab).run([REFERENCE, FAST], CELLS[:1])
    order = [e for e, _ in lab.measured()]
    assert order[:6] == ["exported", "openvino"] * 3
    assert lab.firsts[:6] == [True, True, False, False, False, False], "warmed up once each"


def test_an_interrupted_session_goes_on(info: BlockInfo, store: ProfileStore, lab: Lab) -> None:
    lab.fails["exported"] = raises(KeyboardInterrupt(), "measure", Cell(1, 4))
    with pytest.raises(KeyboardInterrupt):
        session(info, store, lab).run([REFERENCE], CELLS)
    assert lab.alive == 0
    with pytest.raises(BlockFlowError, match="interrupted"):
        store.fresh([info], REFERENCE.selections)
    lab.fails.clear()
    lab.log.clear()
    (outcome,) = session(info, store, lab).run([REFERENCE], CELLS)
    assert outcome.reused == 1
    assert Cell(1, 1) not in {c for _, c in lab.measured()}
    assert store.fresh([info], REFERENCE.selections)


def test_what_is_there_is_not_measured_again_unless_asked(
    info: BlockInfo, store: ProfileStore, lab: Lab
) -> None:
    session(info, store, lab).run([REFERENCE], CELLS)
    before = store.fresh([info], REFERENCE.selections)
    lab.log.clear()
    (outcome,) = session(info, store, lab).run([REFERENCE], CELLS)
    assert (outcome.reused, lab.log) == (4, [])
    assert store.fresh([info], REFERENCE.selections) == before
    assert session(info, store, lab).run([REFERENCE], CELLS[:1])[0].reused == 1
    session(info, store, lab, again=True).run([REFERENCE], CELLS[:1])
    assert {c for _, c in lab.measured()} == {CELLS[0]}
    assert len(store.fresh([info], REFERENCE.selections).profile.points) == 4


def test_more_confidence_measures_all_of_it_again(
    info: BlockInfo, store: ProfileStore, lab: Lab
) -> None:
    session(info, store, lab).run([REFERENCE], CELLS)
    lab.log.clear()
    stricter = Effort(confidence=0.01, seconds=1.0)
    (outcome,) = session(info, store, lab, effort=stricter).run([REFERENCE], CELLS[:2])
    assert outcome.reused == 0
    assert set(outcome.points) == set(CELLS), "it knows no less than before"
    assert {c for _, c in lab.measured()} == set(CELLS)


def test_what_was_measured_holds_while_it_is_measured_again(
    info: BlockInfo, store: ProfileStore, lab: Lab
) -> None:
    session(info, store, lab).run([REFERENCE], CELLS)
    before = store.fresh([info], REFERENCE.selections)
    stop = raises(KeyboardInterrupt(), "measure", CELLS[2])
    lab.fails["exported"] = stop
    with pytest.raises(KeyboardInterrupt):
        session(info, store, lab, again=True).run([REFERENCE], CELLS)
    assert store.fresh([info], REFERENCE.selections) == before
    lab.fails.clear()
    lab.log.clear()
    (outcome,) = session(info, store, lab).run([REFERENCE], CELLS)
    assert outcome.reused == 2 and {c for _, c in lab.measured()} == set(CELLS[2:])
    assert store.fresh([info], REFERENCE.selections) != before


@pytest.mark.parametrize(
    "kw",
    [{"again": True}, {"effort": Effort(confidence=0.02, seconds=1.0)}],
    ids=["again", "surer"],
)
def test_what_replaces_a_table_knows_no_less_whoever_finishes_it(
    info: BlockInfo, store: ProfileStore, lab: Lab, kw: dict[str, Any]
) -> None:
    session(info, store, lab).run([REFERENCE], CELLS)
    lab.fails["exported"] = raises(KeyboardInterrupt(), "measure", CELLS[1])
    with pytest.raises(KeyboardInterrupt):
        session(info, store, lab, **kw).run([REFERENCE], CELLS)
    lab.fails.clear()
    lab.log.clear()
    session(info, store, lab).run([REFERENCE], CELLS[:1])
    assert {c for _, c in lab.measured()} == set(CELLS[1:])
    assert len(store.fresh([info], REFERENCE.selections).profile.points) == len(CELLS)


@pytest.mark.parametrize("change", ["digest", "facts", "torn"])
def test_a_stale_record_is_measured_anew(
    info: BlockInfo, store: ProfileStore, lab: Lab, change: str
) -> None:
    session(info, store, lab).run([REFERENCE], CELLS)
    if change == "digest":
        info = replace(info, digest="cd" * 32)
    elif change == "facts":
        store = ProfileStore(store.root, "m1", {"cpu": "Z"})
    else:
        (path,) = (store.root / "a" / "profiles").iterdir()
        path.write_text("{")
    (outcome,) = session(info, store, lab).run([REFERENCE], CELLS)
    assert outcome.reused == 0
    assert store.fresh([info], REFERENCE.selections)


def test_a_candidate_that_cannot_load_has_its_reason(
    info: BlockInfo, store: ProfileStore, lab: Lab
) -> None:
    lab.fails["broken"] = raises(BlockError("LOAD_FAILED", "bad file", hint="mend it"), "open")
    absent = candidate("absent", reason="not installed")
    bad, good, none = session(info, store, lab).run([BROKEN, REFERENCE, absent], CELLS)
    assert not good.reason and set(good.points) == set(CELLS)
    assert bad.reason == "bad file -- mend it"
    assert none.reason == "not installed"
    assert [e[2] for e in lab.log if e[:2] == ("open", "broken")] == [1]  # not tried again
    assert store.load(good_key(info, REFERENCE)) is not None
    assert len(store.records("a")) == 1


def good_key(info: BlockInfo, of: Candidate) -> Any:
    from blockflow.repository.profile_record import ProfileKey

    return ProfileKey.of([info.name], of.selections)


def test_a_candidate_that_dies_on_the_way_keeps_what_it_had(
    info: BlockInfo, store: ProfileStore, lab: Lab
) -> None:
    lab.fails["broken"] = raises(BlockError("BLOCK_FAILED", "gone"), "measure", Cell(1, 4))
    good, bad = session(info, store, lab).run([REFERENCE, BROKEN], CELLS)
    assert bad.reason == "at 4 rows: gone"
    assert set(bad.points) == {Cell(1, 1)}
    assert set(good.points) == set(CELLS)
    assert lab.alive == 0


def test_a_comparison_is_of_the_same_minutes(
    info: BlockInfo, store: ProfileStore, lab: Lab
) -> None:
    session(info, store, lab).run([REFERENCE], CELLS)
    lab.log.clear()
    outcomes = session(info, store, lab).run([REFERENCE, FAST], CELLS, CHECK)
    assert {c for e, c in lab.measured() if e == "exported"} == set(CELLS)
    assert [o.reused for o in outcomes] == [0, 0]
    lab.log.clear()
    outcomes = session(info, store, lab).run([REFERENCE, FAST], CELLS, CHECK)
    assert [o.reused for o in outcomes] == [4, 4]
    assert lab.measured() == []  # the errors are compared anew, the times are paired already
    assert [o.error for o in outcomes] == [0.0, 1e-5]
    assert [e[:2] for e in lab.log if e[0] in ("store", "compare")] == [
        ("store", "exported"),
        ("compare", "openvino"),
    ]


def test_a_table_holds_until_it_was_compared_anew(info: Any, store: Any, lab: Lab) -> None:
    session(info, store, lab).run([REFERENCE, FAST], CELLS, CHECK)
    before = store.fresh([info], REFERENCE.selections)
    lab.fails["exported"] = raises(KeyboardInterrupt(), "measure", CELLS[1])
    with pytest.raises(KeyboardInterrupt):
        session(info, store, lab).run([REFERENCE, FAST, ROUGH], CELLS, CHECK)
    assert store.fresh([info], REFERENCE.selections) == before


def test_a_chain_has_its_parts(store: ProfileStore, lab: Lab) -> None:
    repository = BlockRepository(store.root)
    save_echo(repository, "b", SPEC)
    infos = [repository.info("a"), repository.info("b")]
    both = replace(REFERENCE, selections=REFERENCE.selections * 2)

    class Two(_Made):
        def measure(self, cell: Cell, runs: int, limit_s: float, *, first: bool) -> Any:
            return [[3.0, 1.0] for _ in range(runs)]

    def open_(asked: Candidate, threads: int) -> Measurer:
        lab.alive += 1
        return Two(lab, asked.engine)

    (outcome,) = Session(infos, store, open_, EFFORT, Watcher()).run([both], CELLS)
    assert outcome.points[CELLS[0]].p50_ms == 4.0
    record = store.fresh(infos, both.selections)
    assert [p.block for p in record.parts] == ["a", "b"]
    assert [p.points[0].p50_ms for p in record.parts] == [3.0, 1.0]
    lab.log.clear()
    (again,) = Session(infos, store, open_, EFFORT, Watcher()).run([both], CELLS)
    assert again.reused == 4
    assert again.parts[1][CELLS[0]].p50_ms == 1.0


def test_the_remaining_time_falls(info: BlockInfo, store: ProfileStore, lab: Lab) -> None:
    watcher = Watcher()
    Session([info], store, lab.open, EFFORT, watcher).run([REFERENCE], CELLS)
    assert watcher.left[0] == 4 * EFFORT.seconds
    assert watcher.left[-1] < watcher.left[1]


# --- choices ------------------------------------------------------------------------------------


def judged(info: BlockInfo, store: ProfileStore, lab: Lab, *others: Candidate) -> list[Judged]:
    outcomes = session(info, store, lab).run([REFERENCE, *others], CELLS, CHECK)
    return choose(outcomes, CELLS, 1e-2)


def chosen(found: Sequence[Judged]) -> str:
    (one,) = [j.outcome.candidate.engine for j in found if j.chosen]
    return one


def test_the_fastest_within_the_tolerance_is_chosen(
    info: BlockInfo, store: ProfileStore, lab: Lab
) -> None:
    found = judged(info, store, lab, FAST, ROUGH)
    assert chosen(found) == "openvino"
    assert found[1].ratio == pytest.approx(0.5, rel=0.05)
    assert found[0].row_ms == pytest.approx(10 / math.sqrt(2), rel=0.05)
    assert "exceeds the tolerance" in found[2].verdict
    assert found[0].verdict == "slower"


def test_of_the_equally_fast_the_most_exact_is_chosen(
    info: BlockInfo, store: ProfileStore, lab: Lab
) -> None:
    lab.row_ms["openvino"] = 9.95
    found = judged(info, store, lab, FAST)
    assert chosen(found) == "exported"
    assert found[1].verdict == "as fast, less exact"


@pytest.mark.parametrize("error", [math.inf, math.nan, 0.011])
def test_wrong_outputs_are_never_chosen(
    info: BlockInfo, store: ProfileStore, lab: Lab, error: float
) -> None:
    lab.error["openvino"] = error
    found = judged(info, store, lab, FAST)
    assert chosen(found) == "exported"
    assert not found[1].chosen


@pytest.mark.parametrize("at", ["open", "measure", "errors"])
def test_a_candidate_that_fails_is_not_chosen(
    info: BlockInfo, store: ProfileStore, lab: Lab, at: str
) -> None:
    lab.fails["openvino"] = raises(BlockError("BLOCK_FAILED", "no"), at)
    found = judged(info, store, lab, FAST)
    assert chosen(found) == "exported"
    assert "no" in found[1].verdict


@pytest.mark.parametrize("at", ["open", "measure", "errors"])
def test_without_the_reference_nothing_is_chosen(
    info: BlockInfo, store: ProfileStore, lab: Lab, at: str
) -> None:
    lab.fails["exported"] = raises(BlockError("BLOCK_FAILED", "no"), at)
    outcomes = session(info, store, lab).run([REFERENCE, FAST], CELLS, CHECK)
    if at != "measure":
        assert outcomes[1].error is None  # never compared with itself
    with pytest.raises(BlockError, match="cannot be compared with"):
        choose(outcomes, CELLS, 1e-2)


def test_a_reference_that_is_not_finite_is_none(
    info: BlockInfo, store: ProfileStore, lab: Lab
) -> None:
    lab.error["exported"] = math.inf
    outcomes = session(info, store, lab).run([REFERENCE], CELLS, CHECK)
    with pytest.raises(BlockError, match="not finite"):
        choose(outcomes, CELLS, 1e-2)
