"""Who watches the Manager: when silence is enough, under virtual time."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from blockflow.control.vigil import Vigil, VigilPolicy, gone_since
from blockflow.launch.vitals import Vitals

S = 1_000_000_000
POLICY = VigilPolicy()


def asleep(since_ns: int) -> Vitals:
    return Vitals("S", 0, 0, False)


def stopped(since_ns: int) -> Vitals:
    return Vitals("T", 0, 0, False)


def spinning(since_ns: int) -> Vitals:
    return Vitals("S", since_ns, 0, False)


def at_the_disk(since_ns: int) -> Vitals:
    return Vitals("D", 0, 0, True)


def killed(
    how: Callable[[int], Vitals | None],
    seconds: float,
    *,
    signs: float = 1.0,
    until: float = 0.0,
    away: tuple[float, float] = (0.0, 0.0),
) -> tuple[float, str] | None:
    """When and why a Manager is given up that gives signs of life up to ``until``."""
    start = 1000 * S
    vigil = Vigil(start)
    for step in range(int(seconds * 20)):
        since = step / 20
        now = start + int(since * S)
        if since <= until and (since / signs).is_integer():
            vigil.heard(now)
        if away[0] <= since < away[1]:
            continue
        if now >= vigil.deadline():
            cause = vigil.look(how(now - start), now)
            if cause:
                return since, cause
    return None


def test_one_that_turns_lives() -> None:
    assert killed(asleep, 200, until=200) is None
    assert killed(spinning, 200, until=200, signs=5.0) is None


@pytest.mark.parametrize(
    ("how", "patience", "word"),
    [
        (asleep, POLICY.asleep, "asleep"),
        (stopped, POLICY.asleep, "stopped"),
        (spinning, POLICY.busy, "busy"),
        (at_the_disk, POLICY.busy, "busy"),
    ],
)
def test_one_that_hangs_is_given_up(
    how: Callable[[int], Vitals], patience: float, word: str
) -> None:
    found = killed(how, 200, until=20)
    assert found is not None
    at, cause = found
    assert patience <= at - 20 <= patience + 2 * POLICY.look
    assert word in cause and "silent" in cause


def test_before_its_first_sign_it_has_longer() -> None:
    found = killed(asleep, 200, until=-1)
    assert found is not None
    assert POLICY.first <= found[0] <= POLICY.first + 2 * POLICY.look


def test_one_that_is_traced_or_gone_is_left_alone() -> None:
    assert killed(lambda _: Vitals("t", 0, 0, False), 200, until=20) is None
    assert killed(lambda _: None, 200, until=20) is None


def test_a_guardian_that_was_away_begins_to_count_anew() -> None:
    found = killed(asleep, 200, until=20, away=(22, 100))
    assert found is not None
    assert found[0] >= 100 + POLICY.asleep


def test_a_pause_that_ends_is_forgiven() -> None:
    """Stopped for five seconds, now and then."""
    assert killed(stopped, 200, until=200, signs=5.0) is None


def test_one_that_waited_for_the_disk_has_its_time_though_it_sleeps_when_it_is_looked_at() -> None:
    def at_first(since_ns: int) -> Vitals:
        return at_the_disk(since_ns) if since_ns < 2 * S else asleep(since_ns)

    found = killed(at_first, 60)
    assert found is not None and found[0] >= POLICY.busy


def test_one_that_sleeps_since_its_last_sign_is_asleep_however_busy_it_was_before() -> None:
    found = killed(lambda since: spinning(min(since, 20 * S)), 60, until=20, signs=5.0)
    assert found is not None and "asleep" in found[1]
    assert found[0] - 20 <= POLICY.asleep + 2 * POLICY.look


def test_nobody_was_there_from_the_end_on_or_from_a_long_silence() -> None:
    spoke, prompt = 100_000_000_000, 2_000_000_000
    assert gone_since(spoke, spoke + prompt) == spoke + prompt
    assert gone_since(spoke, spoke + prompt + 1) == spoke
    assert gone_since(0, spoke) == spoke
