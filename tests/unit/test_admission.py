"""Credits: who may enter, and what a refused one is told."""

from __future__ import annotations

import pytest

from blockflow.core.model import Contract, TensorSpec
from blockflow.core.routing import TaskRoute
from blockflow.dispatcher.admission import ADMIT, Admission, Reject

SECOND = 1_000_000_000


def decide(admission: Admission, **changes: int) -> object:
    given = {"inflight": 0, "of_client": 0, "charged": 0, "nbytes": 10, "now_ns": 0, **changes}
    return admission.decide(b"c", ("t",), budget_ns=10 * SECOND, **given)


@pytest.fixture
def admission() -> Admission:
    return Admission(4, 2, 100)


def test_a_free_credit_admits(admission: Admission) -> None:
    assert decide(admission) is ADMIT
    assert decide(admission, inflight=3, of_client=1, charged=90) is ADMIT


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"inflight": 4}, "4 credits"),
        ({"of_client": 2}, "share"),
        ({"charged": 91}, "room for 10 bytes"),
    ],
)
def test_each_bound_rejects_with_a_time_to_come_back(
    admission: Admission, changes: dict[str, int], said: str
) -> None:
    verdict = decide(admission, **changes)
    assert isinstance(verdict, Reject)
    assert verdict.error.code == "OVERLOADED"
    assert verdict.error.retryable
    assert said in verdict.error.message
    assert verdict.error.retry_after_ms == 100
    assert "100 ms" in verdict.error.hint


def test_who_waits_for_a_worker_is_told_to_come_in_a_second(admission: Admission) -> None:
    assert admission.no_place("nothing runs it", 4, 0).error.retry_after_ms == 1000
    assert admission.no_edge("w", 4, 0).error.retry_after_ms == 100
    assert admission.refused == {"waiting": 1, "edge": 1}


def test_the_time_follows_the_recent_rate(admission: Admission) -> None:
    for i in range(1000):  # 1000 a second
        admission.leave(i, i * SECOND // 1000)
    assert admission.retry_after_ms(8, SECOND) == 5  # bounded from below
    assert admission.retry_after_ms(800, SECOND) == 100  # an eighth of them
    assert admission.retry_after_ms(10**6, SECOND) == 1000  # ... and from above
    assert admission.retry_after_ms(8, 100 * SECOND) == 100  # long ago: nothing is known
    for second in (100, 103):  # less than one a second
        admission.leave(1, second * SECOND)
    assert admission.retry_after_ms(8, 104 * SECOND) == 1000


@pytest.mark.parametrize("credits", [(0, 1), (1, 0)])
def test_nonsense_is_refused(credits: tuple[int, int]) -> None:
    with pytest.raises(ValueError, match="positive"):
        Admission(*credits, 1)
    assert decide(Admission(1, 1, 10)) is ADMIT


def enter(admission: Admission, key: int, client: bytes, task: str, now: int) -> None:
    admission.enter(key, client, (task,), 10 * SECOND, now)


def ask(admission: Admission, *tasks: str) -> object:
    """The verdict on a request of the only client there is."""
    return admission.decide(
        b"gateway",
        tasks,
        inflight=admission.inflight,
        of_client=admission.inflight,
        charged=0,
        nbytes=1,
        budget_ns=10 * SECOND,
        now_ns=0,
    )


def test_one_clients_slow_task_leaves_credits_to_its_others() -> None:
    admission = Admission(16, 16, 10_000, adaptive=False)

    for key in range(16):  # as long as nobody else is there it has everything
        assert ask(admission, "slow") is ADMIT
        enter(admission, key, b"gateway", "slow", 0)
    refused = ask(admission, "quick")
    assert isinstance(refused, Reject) and "credits are in use" in refused.error.message
    for key in range(8):
        admission.leave(key, 0)
    told = []
    for key in range(8):  # what ends is not for the slow one again
        verdict = ask(admission, "slow")
        if isinstance(verdict, Reject):
            told.append(verdict.error.message)
        else:
            enter(admission, 100 + key, b"gateway", "slow", 0)
    assert told[-1] == "14 requests for slow are in flight, their fair share of the credits"
    assert admission.refused["share"] == len(told)
    assert ask(admission, "quick") is ADMIT


def test_what_never_fits_is_not_told_to_come_back(admission: Admission) -> None:
    assert decide(admission, nbytes=100) is ADMIT
    for inflight in (0, 4):
        verdict = decide(admission, inflight=inflight, nbytes=101)
        assert isinstance(verdict, Reject)
        assert (verdict.error.code, verdict.error.retryable) == ("TOO_LARGE", False)
    assert admission.figures()["refused"] == {}


def test_the_order_of_a_requests_tasks_makes_no_further_share() -> None:
    admission, key = Admission(12, 12, 10_000, adaptive=False), 0

    def admitted(*tasks: str) -> bool:
        nonlocal key
        if ask(admission, *tasks) is not ADMIT:
            return False
        key += 1
        admission.enter(key, b"gateway", tasks, 10 * SECOND, 0)
        return True

    for _ in range(99):
        admission._by_task.shares.refused(("c",))
    taken = sum([admitted(*tasks) for _ in range(9) for tasks in (("a", "b"), ("b", "a"))])
    assert taken == 6
    assert sum([admitted("c") for _ in range(9)]) == 6


@pytest.mark.parametrize("blocks", ["a", "abc"])
def test_what_came_before_its_path_changed_teaches_the_new_limit_nothing(blocks: str) -> None:
    admission = Admission(64, 64, 10_000)

    def publish(path: str) -> None:
        spec = TensorSpec("float32", ("rows", 4))
        admission.publish({"t": TaskRoute("t", tuple(path), Contract(spec, spec))})

    publish("a")
    for key in range(32):
        enter(admission, key, b"c", "t", 0)
    publish(blocks)
    for key in range(32):  # it had queued for most of its time
        admission.answered(key, "t", 9 * SECOND, SECOND // 100, 9 * SECOND + key * SECOND // 50)
        admission.leave(key, 9 * SECOND)
    assert (admission.limit("t") < 64) == (blocks == "a")
    assert admission.inflight == 0
