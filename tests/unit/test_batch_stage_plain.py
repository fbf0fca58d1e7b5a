"""The pipeline leaves out stages that cannot move and ways that lead to an end: beside one that
looks at all of them."""

from __future__ import annotations

from random import Random

import pytest

from blockflow.batching.stage import Event, Executor, Pipeline, advance


class Plain(Pipeline):
    """As long as anything moves it looks at every stage, and follows who has left to the end."""

    def _settle(self) -> None:
        while self._wake() or self._pass():
            pass

    def _wake(self) -> bool:
        moved = False
        for level in reversed(range(self.levels)):
            if self.executors[level] is Executor.INACTIVE and self._any_legal(level):
                self.executors[level] = advance(Executor.INACTIVE, Event.LEGAL)
                moved = True
            if self._owed[level] and self.executors[level] is not Executor.INACTIVE:
                for pair in self._owed[level]:
                    self._release(level - 1, pair)
                self._owed[level].clear()
                moved = True
        return moved

    def _pass(self) -> bool:
        for level, pair in self._empties:
            if self.legal(level, pair):
                self._empties.remove((level, pair))
                self._read(level, pair)
                self._consume(level, pair)
                if level + 1 < self.levels:
                    self._empties.append((level + 1, pair))
                return True
        return False


def state(row: Pipeline) -> tuple[object, ...]:
    places = [(level, pair) for level in range(row.levels) for pair in row.pairs]
    legal = [row.legal(*place) for place in places]
    full = [row.full(level) for level in range(row.levels)]
    return row.executors, row.buffers, legal, full, row.at_rest


@pytest.mark.parametrize("seed", range(30))
def test_who_is_not_looked_at_would_not_have_moved(seed: int) -> None:
    rng = Random(seed)
    levels, pairs = rng.randint(2, 6), rng.randint(1, 3)
    rows = Pipeline(levels, pairs), Plain(levels, pairs)
    resting: list[tuple[int, int]] = []
    running: list[tuple[int, int]] = []
    for _ in range(60):
        what = rng.random()
        if what < 0.3:
            level = rng.randrange(levels)
            avoid = [rng.randrange(pairs)] if rng.random() < 0.2 else ()
            found = {row.enter(level, avoid) for row in rows}
            assert len(found) == 1
            resting += [(level, pair) for pair in found if pair is not None]
        elif what < 0.5 and running:
            level, pair = running.pop(rng.randrange(len(running)))
            for row in rows:
                row.finish(level, pair)
            resting += [(level + 1, pair)] if level + 1 < levels else []
        elif what < 0.7 and resting:
            level, pair = resting.pop(rng.randrange(len(resting)))
            for row in rows:
                row.vacate(level, pair)
        elif resting:
            place = rng.choice(resting)
            skips = what < 0.8
            can = {row.skip(*place) if skips else row.can_start(*place) for row in rows}
            assert len(can) == 1
            if can == {True}:
                resting.remove(place)
                if not skips:
                    running.append(place)
                    for row in rows:
                        row.start(*place)
                elif place[0] + 1 < levels:
                    resting.append((place[0] + 1, place[1]))
        assert state(rows[0]) == state(rows[1])
        for level in range(levels):
            assert rows[0].working(level) is (level in dict(running))
            taken = {pair for at, pair in resting if at == level}
            assert rows[0].full(level) or len(taken) < pairs
    row = rows[0]
    while resting or running:
        going = [place for place in resting if row.can_start(*place)]
        assert going or running, "nobody waits for ever"
        for place in going[:1]:
            row.start(*place)
            resting.remove(place)
            running.append(place)
        level, pair = running.pop(0)
        row.finish(level, pair)
        resting += [(level + 1, pair)] if level + 1 < levels else []
    assert row.at_rest
