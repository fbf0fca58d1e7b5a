"""Stage executors and buffer pairs: the tables, the docs' diagram, serial and overlapped rows."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from blockflow.batching.stage import (
    BUFFER_TABLE,
    EXECUTOR_TABLE,
    Buffer,
    Event,
    Executor,
    IllegalMove,
    Pipeline,
    Use,
    advance,
    diagram,
    use,
)

DOCS = Path(__file__).resolve().parents[2] / "docs" / "batching.md"


def run(row: Pipeline, level: int, pair: int) -> None:
    row.start(level, pair)
    row.finish(level, pair)


def test_the_docs_show_the_tables() -> None:
    assert diagram() in DOCS.read_text(encoding="utf-8"), f"put this into it:\n{diagram()}"


def test_tables_name_all_states_and_lead_on_from_each() -> None:
    assert {s for s, _ in EXECUTOR_TABLE} == set(Executor)
    assert {s for s, _ in BUFFER_TABLE} | {Buffer.WRITING} == set(Buffer)
    assert {e for _, e in EXECUTOR_TABLE} == set(Event) and {u for _, u in BUFFER_TABLE} == set(Use)


def test_illegal_moves_raise() -> None:
    with pytest.raises(IllegalMove, match="inactive"):
        advance(Executor.INACTIVE, Event.TAKE)
    with pytest.raises(IllegalMove, match="in-reading"):
        use(Buffer.READING, Use.WRITE)
    row = Pipeline(2, 1)
    row.start(0, 0)
    with pytest.raises(IllegalMove):
        row.start(0, 0)


def test_one_pair_keeps_everybody_inactive_until_the_batch_has_left() -> None:
    row = Pipeline(3, 1)
    assert row.enter(0) == 0
    for level in range(3):
        assert row.can_start(level, 0)
        row.start(level, 0)
        assert row.enter(0) is None
        if level < 2:
            row.finish(level, 0)
            assert row.executors[: level + 1] == [Executor.INACTIVE] * (level + 1)
            assert row.enter(0) is None
    row.finish(2, 0)
    assert row.at_rest and row.enter(0) == 0


def test_two_pairs_let_batches_overlap() -> None:
    row = Pipeline(3, 2)
    assert row.enter(0) == 0
    run(row, 0, 0)
    assert row.enter(0) == 1  # the second follows while the first goes on
    row.start(0, 1)
    run(row, 1, 0)
    row.finish(0, 1)
    # The third may use pair 0 again: executor 1 is active again and has released it.
    assert row.enter(0) == 0
    row.start(2, 0)
    row.start(0, 0)
    row.start(1, 1)
    row.finish(0, 0)
    # What it wrote lies where the first batch's data were read: executor 1 has to wait until
    # executor 2 is active again.
    row.finish(1, 1)
    assert not row.can_start(1, 0) and row.executors[1] is Executor.INACTIVE
    row.finish(2, 0)
    assert row.can_start(1, 0)
    row.start(1, 0)
    run(row, 2, 1)
    row.finish(1, 0)
    run(row, 2, 0)
    assert row.at_rest


def test_an_executor_checks_while_its_batch_is_on_the_wrong_pair() -> None:
    row = Pipeline(3, 2)
    for _ in range(2):  # the first goes on to executor 2's queue, the second comes on its pair
        assert row.enter(0) == 0
        run(row, 0, 0)
        if row.can_start(1, 0):
            run(row, 1, 0)
    assert row.legal(1, 1) and not row.legal(1, 0)
    assert row.executors[1] is Executor.CHECKING
    row.vacate(1, 0)
    assert row.executors[1] is Executor.ACTIVE


def test_a_batch_that_was_checked_for_and_has_run_is_not_gone_when_the_next_one_is() -> None:
    row = Pipeline(2, 1)
    assert row.enter(0) == row.enter(1) == 0
    assert not row.can_start(0, 0)
    run(row, 1, 0)
    run(row, 0, 0)
    row.vacate(1, 0)
    assert row.enter(0) == 0
    row.vacate(0, 0)
    assert row.at_rest


def test_a_batch_that_is_gone_frees_its_checking_executor_and_its_pair() -> None:
    row = Pipeline(2, 1)
    assert row.enter(0) == 0
    run(row, 0, 0)
    row.vacate(1, 0)
    assert row.at_rest
    row.vacate(2, 0)  # past the end: nothing
    assert row.at_rest


def test_who_leaves_early_is_not_followed_through_all_stages(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Of a tree of 200 heads each would be followed through all heads behind its own."""
    row, asked = Pipeline(200, 2), list[int]()
    legal = row.legal
    monkeypatch.setattr(row, "legal", lambda level, pair: asked.append(level) or legal(level, pair))
    assert row.enter(3) == 0
    run(row, 3, 0)
    row.vacate(4, 0)
    assert row.at_rest and len(asked) < 10


def test_stages_can_be_entered_late_left_early_and_skipped() -> None:
    row = Pipeline(4, 1)
    assert row.enter(2) == 0
    run(row, 2, 0)
    row.vacate(3, 0)
    assert row.at_rest
    assert row.enter(1) == 0
    run(row, 1, 0)
    assert row.enter(1) is None
    assert row.skip(2, 0)
    assert row.enter(1) == 0, "there is room as soon as it has left"
    row.vacate(1, 0)
    assert row.can_start(3, 0)
    run(row, 3, 0)
    assert row.at_rest


def test_an_executor_does_not_go_on_checking_for_a_batch_that_skips_it() -> None:
    row = Pipeline(2, 1)
    assert row.enter(0) == 0
    assert row.enter(1) == 0
    assert not row.can_start(0, 0)
    assert row.executors[0] is Executor.CHECKING
    run(row, 1, 0)
    assert row.skip(0, 0)
    assert row.executors[0] is Executor.ACTIVE
    row.vacate(1, 0)
    assert row.at_rest


@settings(max_examples=150, deadline=None)
@given(
    levels=st.integers(1, 5),
    pairs=st.integers(1, 3),
    moves=st.lists(st.tuples(st.integers(0, 5), st.integers(0, 9)), max_size=60),
)
def test_any_traffic_comes_to_rest(levels: int, pairs: int, moves: list[tuple[int, int]]) -> None:
    """Batches enter anywhere, run, skip and vanish in any order; what is there can always go on in
    the end, no two are ever in one buffer, and everything is free afterwards."""
    row = Pipeline(levels, pairs)
    resting: list[tuple[int, int]] = []
    running: list[tuple[int, int]] = []

    def landed(level: int, pair: int) -> None:
        if level < levels:
            resting.append((level, pair))

    def move(what: int, which: int) -> bool:
        if what == 0:
            level = which % levels
            pair = row.enter(level)
            if pair is not None:
                resting.append((level, pair))
        elif what == 1 and running:
            level, pair = running.pop(which % len(running))
            row.finish(level, pair)
            landed(level + 1, pair)
        elif what == 2 and resting:
            row.vacate(*resting.pop(which % len(resting)))
        elif what == 3 and resting:
            level, pair = resting[which % len(resting)]
            if row.skip(level, pair):
                resting.remove((level, pair))
                landed(level + 1, pair)
        else:
            for item in resting:
                if row.can_start(*item):
                    row.start(*item)
                    resting.remove(item)
                    running.append(item)
                    return True
            return False
        return True

    for what, which in moves:
        move(what, which)
        assert len({*resting, *running}) == len(resting) + len(running)
        assert len({level for level, _ in running}) == len(running)
    while resting or running:
        if not move(4, 0):
            assert running, f"stuck: {resting}"
            move(1, 0)
    assert row.at_rest
