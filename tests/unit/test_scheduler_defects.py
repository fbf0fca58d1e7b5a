"""What no policy may decide, and what one raises: told as its own, before anything is taken."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from blockflow.batching.dvabatch import DvabatchPolicy
from blockflow.batching.policy import Query, Run
from blockflow.batching.window import WindowPolicy
from blockflow.worker.scheduler import PolicyDefect, Scheduler
from blockflow.worker.ticket import Batch
from tests.scheduler_rig import ticket


@pytest.mark.parametrize(
    ("decides", "words"),
    [
        (Run(1, (9,)), "runs key 9, which does not wait"),
        (Run(1, (3,)), "runs key 3 at stage 1, it waits at 2"),
        (Run(1, (5,)), "runs key 5, which does not wait for it"),
        (Run(7, (1,)), "runs stage 7, which is not one of its own: [1, 2]"),
        (Run(1, ()), "one at least"),
        (Run(1, (1, 1)), "each once"),
        (Run(1, (1,), (3,)), "pads key 1 of [4] to [3]"),
        (Run(1, (1,), (4, 4)), "pads key 1 of [4] to [4, 4]"),
        ("now", "decides str, not Run, WaitUntil or None"),
        (RuntimeError("own"), "raised RuntimeError: own"),
    ],
)
def test_what_no_policy_may_decide_is_told_as_its_own(decides: Any, words: str) -> None:
    s = Scheduler({1: {}, 2: {}})
    s.width = lambda _: 2  # type: ignore[method-assign]
    for key in (1, 2):
        s.arrive(ticket(key), 0)
    s.arrive(ticket(3, ((2,),)), 0)
    s.arrive(ticket(5, ((2,),), alone=True), 0)
    s._running[2] = 1  # who runs alone has its stage for itself

    def decide(*_: Any) -> Any:
        if isinstance(decides, Exception):
            raise decides
        return decides

    s._policies[0].decide = decide  # type: ignore[method-assign]
    with pytest.raises(PolicyDefect) as e:
        s.decide(0)
    assert words in str(e.value) and str(e.value).startswith("policy 'none' ")
    assert len(s) == 4, "nothing has been taken"


def test_a_policy_that_does_not_take_what_waits_is_not_had(monkeypatch: pytest.MonkeyPatch) -> None:
    """Who was not handed over would wait until the deadline."""
    s = Scheduler({1: {}})
    for key in (1, 2):
        s.arrive(ticket(key), 0)

    def takes_the_first(_: object, query: Query, now: int) -> None:
        if query.key == 2:
            raise ValueError("own")

    with monkeypatch.context() as m:
        m.setattr(WindowPolicy, "arrive", takes_the_first)
        with pytest.raises(PolicyDefect):
            s.set_policy(1, {"policy": "window"}, 0)
    assert s.policy(1) == {}
    for key in (1, 2):
        batch = s.decide(1)
        assert isinstance(batch, Batch) and [t.key for t in batch.tickets] == [key]
        s.done(batch, 1)


def test_a_policy_that_is_not_had_leaves_the_turns_of_those_that_are(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Stage 2 was away, and has saved nothing up."""
    s = Scheduler({1: {}, 2: {"policy": "window", "max_rows": 1}})
    now = 1

    def run() -> int:
        nonlocal now
        batch = s.decide(now)
        assert isinstance(batch, Batch)
        batch.started_ns, now = now, now + 10
        s.done(batch, now)
        return batch.stage

    for key in range(20):
        s.arrive(ticket(key), now)
    assert [run() for _ in range(10)] == [1] * 10

    def fails(*_: object) -> None:
        raise ValueError("own")

    with monkeypatch.context() as m:
        m.setattr(DvabatchPolicy, "arrive", fails)
        with pytest.raises(PolicyDefect):
            s.set_policy(1, {"policy": "dvabatch"}, now)
    for key in range(20, 30):
        s.arrive(ticket(key, ((2,),)), now)
    assert sum(run() == 2 for _ in range(10)) <= 6


@pytest.mark.parametrize("call", ["arrive", "drop", "done"])
def test_what_a_policy_raises_names_it(call: str) -> None:
    def fails(*_: Any) -> None:
        raise ValueError("own")

    s = Scheduler({1: {}})
    s.arrive(ticket(1), 0)
    batch = s.decide(0)
    assert isinstance(batch, Batch)
    s.arrive(ticket(2, deadline=5), 0)
    setattr(s._policies[0], call, fails)
    does: dict[str, Callable[[], object]] = {
        "arrive": lambda: s.arrive(ticket(3), 0),
        "drop": lambda: s.expire(9),
        "done": lambda: s.done(batch, 1),
    }
    with pytest.raises(PolicyDefect, match="policy 'none' raised ValueError: own"):
        does[call]()


def test_of_what_runs_alone_its_policy_hears_nothing() -> None:
    def unasked(*_: Any) -> None:
        raise ValueError("own")

    s = Scheduler({1: {}})
    for call in ("arrive", "drop", "done"):
        setattr(s._policies[0], call, unasked)
    for key, deadline in ((1, 10), (2, 20), (3, 30)):
        s.arrive(ticket(key, alone=True, deadline=deadline), 0)
    assert [t.key for t in s.expire(10)] == [1]
    assert [t.key for t in s.withdraw([s._tickets[3].item], 11)] == [3]
    batch = s.decide(12)
    assert isinstance(batch, Batch)
    s.done(batch, 13)
    assert len(s) == 0


def test_a_batch_that_was_given_up_before_it_began_has_taken_no_time() -> None:
    """Policies that have had the same time take turns."""
    window = {"policy": "window", "max_rows": 1}
    s = Scheduler({1: {}, 2: window, 3: {**window, "max_rows": 2}})
    for key in range(6):
        s.arrive(ticket(key, ((1 + key // 2,),)), 0)
    stages = []
    for _ in range(4):
        batch = s.decide(10**9)
        assert isinstance(batch, Batch)
        stages.append(batch.stage)
        s.done(batch, 10**9)
    assert (stages, s._spent) == ([1, 2, 3, 1], [0, 0, 0])
