"""Which of a worker's blocks the tasks run, and what it costs to find out."""

from __future__ import annotations

from blockflow.batching.registry import policy_problems
from blockflow.batching.ways import Ways

TASKS = {
    "all": [["x", "a", "b", "c"]],
    "back": [["a", "x", "b"], ["a", "b", "c"]],  # its canary goes another way
    "past": [["x"]],
}


class Path(list[str]):
    """Counts how often it is gone through."""

    walks = 0

    def __iter__(self):  # type: ignore[no-untyped-def]
        Path.walks += 1
        return super().__iter__()


def test_ways_through_a_worker() -> None:
    ways = Ways(TASKS)
    assert ways.through(["a", "b", "c"]) == [(0, 1, 2), (0,), (1,)]
    assert ways.through(["b", "a"]) == [(1, 0), (1,), (0,)], "positions are the worker's"
    assert ways.through(["nobody"]) == []
    assert Ways({"t": [["a"], ["a"]], "u": [["x", "a"]]}).through(["a"]) == [(0,)]
    assert policy_problems({"policy": "lbci", "t_opt_ms": 9}, "$", [], []) == []


def test_the_tasks_that_meet_a_worker() -> None:
    ways = Ways(TASKS)
    assert ways.meeting(["c"]) == {"all": [["x", "a", "b", "c"]], "back": [["a", "b", "c"]]}
    assert ways.meeting(["a", "x"]) == TASKS
    assert ways.meeting(["nobody"]) == {}


def test_paths_are_gone_through_once_and_not_for_each_worker() -> None:
    """A topology of a thousand blocks with paths of 64 took 13 to 30 s of a core."""
    names = [f"b{i}" for i in range(20)]
    paths = {f"t{i}": [Path(names[i:] + names[:i])] for i in range(20)}
    ways = Ways(paths)
    for name in names:
        assert ways.through([name]) == [(0,)]
        assert len(ways.meeting([name])) == 20
    assert Path.walks == 20
