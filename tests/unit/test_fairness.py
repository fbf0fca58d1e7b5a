"""Fair shares: max-min between those who want, everything for who is alone, bounded memory."""

from __future__ import annotations

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from blockflow.core.model import Contract, TensorSpec
from blockflow.core.routing import TaskRoute
from blockflow.dispatcher import fairness
from blockflow.dispatcher.admission import ADMIT, Admission, Admit
from blockflow.dispatcher.fairness import MAX_CLIENTS, FairShares, fair_level

SECOND = 1_000_000_000
MS = 1_000_000
ANY = TensorSpec("float32", ("rows", 4))
TASKS = {"t": TaskRoute("t", ("a",), Contract(ANY, ANY))}


@settings(max_examples=200, deadline=None)
@given(st.lists(st.integers(1, 500), min_size=1, max_size=40), st.integers(1, 1000))
@example([1, 2], 3)
@example([2, 2], 4)
def test_the_level_is_max_min_fair(wants: list[int], limit: int) -> None:
    level = fair_level(wants, limit)
    given_out = sum(min(w, level) for w in wants)
    if sum(wants) <= limit:
        assert level == limit  # nobody is held back
    elif limit >= len(wants):
        assert given_out == pytest.approx(limit)  # nothing is left over
    else:
        assert level == 1.0  # more clients than credits: one each, for who comes first


def test_a_lone_client_may_have_everything() -> None:
    shares = FairShares()
    for n in range(100):
        assert shares.below_share(b"a", 100, n * MS)
        shares.enter(b"a", n * MS)
    shares.refused(b"a")
    assert shares.level(100, SECOND) == 100
    assert not shares.below_share(b"a", 100, SECOND)


def test_a_greedy_client_leaves_the_others_what_they_want() -> None:
    shares = FairShares()
    for _ in range(100):
        shares.enter(b"greedy", 0)
    for _ in range(5000):
        shares.refused(b"greedy")
    for _ in range(3):
        shares.refused(b"modest")
    level = shares.level(100, 20 * MS)
    assert 90 < level < 100
    assert shares.below_share(b"modest", 100, 20 * MS)
    assert not shares.below_share(b"greedy", 100, 20 * MS)
    for _ in range(5000):
        shares.refused(b"modest")  # now it wants as much
    assert shares.level(100, 40 * MS) == 50


def test_who_wants_nothing_more_is_forgotten() -> None:
    shares = FairShares()
    for n in range(2 * MAX_CLIENTS):
        shares.refused(n.to_bytes(4, "big"))
    assert len(shares) == MAX_CLIENTS
    shares.enter(b"a", 1 * SECOND)
    shares.enter(b"a", 2 * SECOND + 1)
    shares.enter(b"a", 3 * SECOND + 2)
    assert len(shares) == 1
    for _ in range(3):
        shares.leave(b"a")
    shares.enter(b"b", 10 * SECOND)
    assert len(shares) == 1
    assert shares.inflight == 1


def test_what_was_wanted_counts_in_its_period_and_in_the_next() -> None:
    def crowd() -> FairShares:
        shares = FairShares()
        for client in 2 * [b"a"] + 12 * [b"b"]:
            shares.refused(client)
        return shares

    shares = crowd()
    for now in (0, SECOND - 10 * MS, SECOND, 2 * SECOND - 10 * MS):
        assert shares.level(10, now) == 7  # a gets the 3 that it wants
        assert len(shares) == 2
    assert shares.level(10, 2 * SECOND) == 10
    assert len(shares) == 0
    assert crowd().level(10, 2 * SECOND - 1) == 7  # so it is when nobody has looked meanwhile
    assert crowd().level(10, 2 * SECOND) == 10


def test_what_one_had_in_flight_lately_is_wanted() -> None:
    shares = FairShares()
    for _ in range(3):
        shares.enter(b"a", 0)
    for _ in range(3):
        shares.leave(b"a")
    shares.refused(b"a")
    for _ in range(99):
        shares.refused(b"b")
    assert shares.level(10, 0) == shares.level(10, SECOND) == 6


def test_who_has_something_in_flight_is_never_forgotten() -> None:
    shares = FairShares()
    assert shares.of(b"a") == 0
    shares.enter(b"a", 0)
    for now in (SECOND, 3 * SECOND, 9 * SECOND):
        shares.level(10, now)
        assert shares.of(b"a") == shares.inflight == 1
    shares.leave(b"a")
    assert shares.of(b"a") == shares.inflight == 0
    shares.level(10, 11 * SECOND)
    assert len(shares) == 0


def test_what_one_has_and_what_it_was_refused_are_wanted_together() -> None:
    shares = FairShares()
    for _ in range(2):
        shares.refused(b"a")
    for _ in range(2):
        shares.enter(b"a", 0)
    for _ in range(99):
        shares.refused(b"b")
    assert shares.level(20, 0) == 15  # a wants 4 and may have one more


def test_the_level_is_looked_at_every_hundredth_of_a_second() -> None:
    shares, now = FairShares(), 20 * MS
    shares.refused(b"a")
    assert shares.level(10, now) == 10
    for _ in range(50):
        shares.refused(b"a")
    assert shares.level(10, now + 10 * MS - 1) == 10
    assert shares.level(10, now + 10 * MS) == 10
    shares.refused(b"b")  # who makes itself known is seen at once
    assert shares.level(10, now + 10 * MS) == 8
    for _ in range(50):
        shares.refused(b"b")
    assert shares.level(10, now + 20 * MS - 1) == 8
    assert shares.level(10, now + 20 * MS) == 5
    assert shares.level(20, now + 20 * MS) == 10  # and another limit


def test_of_many_who_make_themselves_known_each_costs_no_look_at_all(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Such a look goes through all of them: a second of a thousand clients took half a second."""
    looks: list[int] = []

    def level(wants: list[int], limit: int) -> float:
        looks.append(len(wants))
        return fair_level(wants, limit)

    monkeypatch.setattr(fairness, "fair_level", level)
    shares, step = FairShares(), 10_000
    for n in range(2000):
        shares.refused(n)
        shares.level(100, n * step)
    assert looks[:64] == list(range(1, 65))
    assert len(looks) < 70
    shares.level(100, 2000 * step + 20 * MS)
    assert looks[-1] == 2000


def test_what_is_left_over_waits_for_whom_lacks_its_even_part() -> None:
    shares, now = FairShares(), 0

    def may(client: bytes) -> bool:
        nonlocal now
        now += 10 * MS
        return shares.below_share(client, 11, now)

    for client in (b"a", b"b"):
        for _ in range(3):
            assert may(client)
            shares.enter(client, now)
        shares.refused(client)
    for _ in range(9):
        shares.refused(b"c")
    for _ in range(3):  # the level is 11/3
        assert not may(b"a")
        assert may(b"c")
        shares.enter(b"c", now)
    assert may(b"a")  # nobody lacks anything
    shares.enter(b"a", now)
    assert not may(b"a")
    assert may(b"b")
    shares.leave(b"c")
    assert not may(b"b")
    now = SECOND  # c wants no more than it has, and has not been refused since
    assert may(b"b")


# --- in admission ---------------------------------------------------------------------------------


class Door:
    """An admission with clients before it that each hold as much as they get."""

    def __init__(self, credits: int, limit: int = 0) -> None:
        self.admission = Admission(credits, credits, 1 << 30)
        self.admission.publish(TASKS)
        if limit:
            self.admission._pools["t"].adaptive.limit = limit  # type: ignore[union-attr]
        self.now = 0
        self.told = ""
        self.held: dict[bytes, list[int]] = {}
        self._count = 0

    def ask(self, client: bytes) -> bool:
        mine = self.held.setdefault(client, [])
        verdict = self.admission.decide(
            client,
            ("t",),
            inflight=sum(map(len, self.held.values())),
            of_client=len(mine),
            charged=0,
            nbytes=1,
            budget_ns=10 * SECOND,
            now_ns=self.now,
        )
        if isinstance(verdict, Admit):
            self._count += 1
            mine.append(self._count)
            self.admission.enter(self._count, client, ("t",), 10 * SECOND, self.now)
        else:
            self.told = verdict.error.message
        return verdict is ADMIT

    def serve(self) -> None:
        """The oldest request ends: every client's turn comes as it came in."""
        client = min((c for c in self.held if self.held[c]), key=lambda c: self.held[c][0])
        self.admission.leave(self.held[client].pop(0), self.now)
        self.now += MS


@pytest.mark.parametrize(("credits", "limit"), [(64, 0), (256, 10)])
def test_a_modest_client_is_served_beside_a_greedy_one(credits: int, limit: int) -> None:
    door = Door(credits, limit)
    while door.ask(b"greedy"):
        pass
    refused = served = 0
    for _ in range(500):
        door.serve()
        for _ in range(10):
            door.ask(b"greedy")
        if not door.held.get(b"modest"):
            if door.ask(b"modest"):
                served += 1
            else:
                refused += 1
    assert served >= 5
    assert refused <= 2  # until the first that was refused made itself known
    greedy = len(door.held[b"greedy"])
    assert greedy >= (limit or credits) - 4  # ... who has all the rest


@settings(max_examples=15, deadline=None, derandomize=True)
@given(st.integers(2, 5), st.integers(12, 24), st.randoms(use_true_random=True))
def test_equally_greedy_clients_get_equal_parts(clients: int, credits: int, rng: object) -> None:
    door = Door(credits)
    names = [bytes([n]) for n in range(clients)]
    while door.ask(names[0]):
        pass
    for _ in range(8 * credits):
        door.serve()
        order = list(names)
        rng.shuffle(order)  # type: ignore[attr-defined]
        for name in order:
            door.ask(name)
    parts = [len(door.held[name]) for name in names]
    assert max(parts) - min(parts) <= 2
    assert sum(parts) >= credits - clients


def test_from_half_of_the_credits_on_shares_are_asked_for() -> None:
    door = Door(100)
    for client in (b"b", b"c"):
        for _ in range(200):
            door.admission._all.shares.refused(client)
    for _ in range(50):  # a third of them would be its share
        assert door.ask(b"a")
    assert not door.ask(b"a")
    assert door.told == "this client has 50 requests in flight, its fair share"
    assert door.admission.refused == {"share": 1}
    assert door.ask(b"b")


def test_who_lacks_its_share_enters_above_an_adaptive_limit_up_to_twice() -> None:
    door = Door(64, limit=10)
    for _ in range(10):
        assert door.ask(b"greedy")
    assert not door.ask(b"greedy")
    assert door.told == "10 requests of task 't' are in flight; more would only queue"
    for n in range(10):
        assert door.ask(b"%d" % n)
    assert not door.ask(b"10")
    assert door.told == "20 requests of task 't' are in flight; more would only queue"
    assert door.admission.refused == {"limit": 2}
    assert door.held[b"greedy"]
    door.serve()
    assert not door.ask(b"greedy")
    assert door.ask(b"10")


def test_refusals_are_counted_by_reason_and_hopeless_deadlines_refused() -> None:
    door = Door(64)
    admission = door.admission
    for _ in range(12):
        assert door.ask(b"a")
    for key in range(3, 13):
        admission.answered(key, "t", 980 * MS, 20 * MS, key * 20 * MS)
    verdict = admission.decide(
        b"b",
        ("t",),
        inflight=12,
        of_client=0,
        charged=0,
        nbytes=1,
        budget_ns=100 * MS,
        now_ns=300 * MS,
    )
    assert not isinstance(verdict, Admit)
    assert verdict.error.code == "OVERLOADED"
    assert verdict.error.retry_after_ms
    assert "100 ms are left" in verdict.error.message
    assert admission.refused == {"deadline": 1}

    def may(budget_ns: int) -> bool:
        given = {"inflight": 0, "of_client": 0, "charged": 0, "nbytes": 1, "now_ns": 300 * MS}
        return admission.decide(b"b", ("t",), budget_ns=budget_ns, **given) is ADMIT

    takes = admission._pools["t"].adaptive.wait_ns(13, 300 * MS)  # type: ignore[union-attr]
    assert f"takes at least {takes // MS} ms" in verdict.error.message
    assert may(takes)
    assert not may(takes - 1)
    for _ in range(8):
        door.serve()
    assert not may(0)
    door.serve()  # with less than four in flight some stage would idle
    assert may(0)
    assert admission.figures()["credits"] == 64
    assert admission.limit("t") == 64


def test_what_was_learnt_lives_as_long_as_the_task() -> None:
    door = Door(64, limit=9)
    admission = door.admission
    admission.publish(TASKS)
    assert admission.limit("t") == 9
    longer = {"t": TaskRoute("t", ("a", "b", "c"), Contract(ANY, ANY))}
    admission.publish(longer)
    assert admission.limit("t") == 64
    admission.publish({})
    assert admission.limit("t") == 0
    fixed = Admission(64, 64, 8, adaptive=False)
    fixed.publish(TASKS)
    assert fixed.limit("t") == 64
    fixed.publish(longer)
    for key in range(64):
        fixed.enter(key, b"a", ("t",), SECOND, 0)
    for key in range(64):
        fixed.expired(key, "t", (1 + key) * SECOND)
    assert fixed.limit("t") == 64


def test_each_task_of_a_request_teaches_its_own_limit() -> None:
    admission = Admission(64, 64, 1 << 30)
    admission.publish({name: TaskRoute(name, ("a",), Contract(ANY, ANY)) for name in "tu"})
    for key in range(64):
        admission.enter(key, b"a", ("t", "u"), 10 * SECOND, 0)
    for key in range(64):
        admission.answered(key, "t", 8 * SECOND, 20 * MS, 9 * SECOND + key * 20 * MS)
    assert admission.limit("t") < 20
    assert admission.limit("u") == 64
    for key in range(64):
        admission.expired(key, "u", 20 * SECOND + key * 20 * MS)
    assert admission.limit("u") < 20
