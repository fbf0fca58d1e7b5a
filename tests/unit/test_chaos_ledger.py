"""The clients' ledger, line by line."""

from __future__ import annotations

import pytest
from chaos_rig import rid

from blockflow.bench.chaos.ledger import CANCELLED, NO_REPLY, OK, PLAIN, UNHARMED, Ledger

ODD = frozenset({"CONTRACT_MISMATCH"})


def ended(
    book: Ledger,
    outcome: str,
    done_s: float = 0.5,
    wanted: frozenset[str] = PLAIN,
    far: bool = False,
) -> bytes:
    """A request of 0 s that was due at 1 s."""
    request_id = rid(book.sent_count)
    book.sent(request_id, "a", 0.0, 1.0, wanted, far=far)
    book.carried(request_id, 1)
    book.done(request_id, outcome, done_s)
    return request_id


def test_a_reply_on_a_connection_that_it_was_not_sent_on_last_is_too_many() -> None:
    book = Ledger()
    book.sent(rid(0), "a", 0.0, 1.0)
    for connection in (1, 2):
        book.carried(rid(0), connection)
    book.replied(rid(0), 1, 0.1)
    assert book.doubled == 1
    book.replied(rid(0), 2, 0.2)
    assert book.doubled == 1


def test_also_what_was_cancelled_is_replied_to() -> None:
    book = Ledger()
    cancelled = ended(book, CANCELLED)
    assert book.unanswered == 1
    book.replied(cancelled, 1, 0.6)
    assert book.unanswered == 0


def test_the_share_that_was_answered_is_of_all_good_requests() -> None:
    book = Ledger()
    ended(book, OK)
    ended(book, "CONTRACT_MISMATCH", wanted=ODD)
    assert book.answered == 1.0
    book.sent(rid(9), "a", 0.0, 1.0)
    assert book.answered == 0.5


def test_an_answer_that_should_not_be_is_not_explained() -> None:
    book = Ledger()
    ended(book, OK, wanted=ODD)
    ended(book, "CONTRACT_MISMATCH", wanted=ODD)
    ended(book, "CONTRACT_MISMATCH")
    assert book.unexplained() == {UNHARMED: 1, "CONTRACT_MISMATCH": 1}


@pytest.mark.parametrize("far", [False, True])
def test_a_cut_of_the_network_excuses_those_behind_it_alone(far: bool) -> None:
    late, alone, cut = Ledger(), Ledger(), [(0.9, 2.0)]
    ended(late, OK, 1.5, far=far)
    ended(alone, NO_REPLY, 1.1, far=far)
    assert len(late.late(0.1)) == alone.alone([]) == 1
    assert len(late.late(0.1, cuts=cut)) == alone.alone([], cut) == int(not far)
