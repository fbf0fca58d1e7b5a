"""What others notice of a client that reads nothing: rounds by turns, their tails, the ratio."""

from __future__ import annotations

import pytest

from blockflow.bench.reliability import figures as names
from blockflow.bench.reliability.beside import Round, compare, tails, turns
from blockflow.bench.reliability.peer import BURST, Account
from blockflow.bench.results import Figure


def rounds_of(pairs: int) -> list[Round]:
    return [Round(2.0 * i, reads) for i, reads in enumerate(turns(pairs))]


def found(p99: list[float], pairs: int) -> dict[str, Figure]:
    labels = {"reader_cut": 0.0}
    return {f.mode: f for f in compare(p99, rounds_of(pairs), labels) if f.name == names.OTHERS}


def test_each_pair_has_both_and_neighbouring_pairs_meet_in_the_same() -> None:
    order = turns(8)
    assert len(order) == 16
    assert all(order[i] != order[i + 1] for i in range(0, 16, 2))
    assert all(order[i] == order[i + 1] for i in range(1, 15, 2))


def test_a_drift_of_the_machine_falls_upon_both() -> None:
    """It grows slower from round to round, by a hundredth each: nobody is to blame for that."""
    p99 = [1.01**i for i in range(80)]
    figures = found(p99, 40)
    beside = figures[names.BESIDE]
    assert beside.value == pytest.approx(1.0, abs=0.011)
    assert beside.n == 40
    assert figures[names.ITSELF].value == pytest.approx(1.01)
    assert beside.labels["noise"] == pytest.approx(0.01)


def test_harm_is_told_by_its_size_whoever_comes_first() -> None:
    p99 = [2.0 if r.reads else 3.0 for r in rounds_of(10)]
    beside = found(p99, 10)[names.BESIDE]
    assert (beside.value, beside.low, beside.high) == (1.5, 1.5, 1.5)
    assert beside.labels == {"noise": 0.0, "p99_ms": 2.0, "reader_cut": 0.0}


def test_a_single_pair_knows_no_noise() -> None:
    assert set(found([1.0, 2.0], 1)) == {names.BESIDE}


def test_requests_count_in_the_rounds_that_they_were_felt_in() -> None:
    rounds = rounds_of(2)
    took = [(0.1, 1.0), (2.1, 2.0), (3.9, 5000.0)]  # the last one lasts until the end
    assert tails(took, rounds) == [1.0, 5000.0, 5000.0, 5000.0]


def test_who_began_before_the_first_round_counts_in_it() -> None:
    """The client asks on while the first neighbour is still connecting."""
    assert tails([(-0.5, 700.0), (0.5, 1.0)], [Round(0.0, reads=False)]) == [700.0]


def test_who_ended_before_the_first_round_counts_nowhere() -> None:
    assert tails([(-0.5, 100.0), (0.5, 1.0)], [Round(0.0, reads=False)]) == [1.0]


def test_a_round_without_requests_is_no_silence() -> None:
    with pytest.raises(ValueError, match="no samples"):
        tails([(0.1, 1.0)], rounds_of(1))


def test_who_reads_never_gets_more_than_who_does_not() -> None:
    idler, reader = Account(), Account()
    assert reader.quota(idler, BURST) == 0
    for got in (1, 0, 1, 1):
        idler.note(got)
        for _ in range(3):
            if quota := reader.quota(idler, BURST):
                assert (reader.got + quota) / (reader.rounds + 1) <= idler.got / idler.rounds
            reader.note(quota)
    assert (reader.got, reader.rounds) == (9, 12)  # just as much as the other in the end
    assert idler.mib() == 3.0
    idler.note(1000)
    assert reader.quota(idler, BURST) == BURST
