"""A clients' ledger for tests of what chaos makes of it."""

from __future__ import annotations

from blockflow.bench.chaos.ledger import NO_REPLY, OK, Ledger


def rid(number: int) -> bytes:
    return number.to_bytes(16, "big")


def ledger(*ends: tuple[str, float, float, str], good: int = 100) -> Ledger:
    """Requests with a deadline of 1 s: task, sent, done, outcome; and ``good`` ones of a task of
    their own, so that enough are answered."""
    out = Ledger()
    others = [("other", 0.0, 0.1, OK)] * good
    for number, (task, sent, done, outcome) in enumerate([*ends, *others]):
        out.sent(rid(number), task, sent, 1.0)
        out.carried(rid(number), 1)
        if outcome != NO_REPLY:
            out.replied(rid(number), 1, done)
        out.done(rid(number), outcome, done)
    return out
