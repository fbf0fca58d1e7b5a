"""Who asks for descriptions: one at a time is under way to each client."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from blockflow.dispatcher import questions as module
from blockflow.dispatcher.questions import Questions

A, B = b"a", b"b"


class Line:
    """What was sent, and was not written yet: frames are alive for so long."""

    def __init__(self) -> None:
        self.version = 1
        self.sent: list[tuple[bytes, bytes]] = []
        self.unread: dict[bytes, list[Any]] = {}
        self.copies = False
        self.gone: set[bytes] = set()
        self.questions = Questions(self.answer, self.send)

    def answer(self, question: bytes) -> bytes:
        return question + b"@%d" % self.version

    def send(self, client: bytes, frames: Sequence[Any]) -> None:
        if client in self.gone:
            self.questions.forget(client)
            return
        self.sent.append((client, bytes(frames[0])))
        if not self.copies:
            self.unread.setdefault(client, []).append(frames[0])

    def told(self) -> list[tuple[bytes, bytes]]:
        told, self.sent = self.sent, []
        return told


def test_the_next_one_is_answered_when_the_last_one_is_taken() -> None:
    line = Line()
    for question in (b"1", b"2", b"3"):
        line.questions.ask(question, A)
    line.questions.ask(b"1", B)
    assert line.told() == [(A, b"1@1"), (B, b"1@1")]
    line.questions.go_on()
    assert line.told() == []
    line.unread[A].clear()
    line.version = 2
    line.questions.ask(b"4", A)  # not before those that wait
    line.questions.go_on()
    line.questions.go_on()
    assert line.told() == [(A, b"2@2")], "by the routes of now"
    for question in (b"3", b"4"):
        line.unread[A].clear()
        line.questions.go_on()
        assert line.told() == [(A, question + b"@2")]
    line.unread.clear()
    line.questions.go_on()
    assert line.told() == []
    line.questions.ask(b"5", A, B)
    assert line.told() == [(A, b"5@2"), (B, b"5@2")]


def test_nobody_waits_for_who_takes_nothing_or_has_no_more_questions() -> None:
    line, c = Line(), b"c"
    line.questions.ask(b"1", A, B, c)
    line.questions.ask(b"2", A, c)
    line.told()
    line.unread[B].clear()
    line.unread[c].clear()
    line.questions.go_on()
    assert line.told() == [(c, b"2@1")]
    assert line.questions.under_way.keys() == {A, c}


def test_small_ones_wait_for_nothing() -> None:
    line = Line()
    line.copies = True
    for question in (b"1", b"2"):
        line.questions.ask(question, A)
    assert line.told() == [(A, b"1@1"), (A, b"2@1")]


def test_who_asks_the_same_again_and_again_is_told_once() -> None:
    line = Line()
    for _ in range(1000):
        line.questions.ask(b"1", A)
    line.told()
    for _ in range(3):
        line.unread.clear()
        line.questions.go_on()
    assert line.told() == [(A, b"1@1")]


def test_of_many_questions_the_latest_are_answered() -> None:
    line = Line()
    for count in range(module.MOST_OPEN + 3):
        line.questions.ask(b"%d" % count, A)
    assert line.told() == [(A, b"0@1")]
    told = []
    for _ in range(module.MOST_OPEN + 3):
        line.unread.clear()
        line.questions.go_on()
        told += line.told()
    assert [int(frame.split(b"@")[0]) for _, frame in told] == list(range(3, module.MOST_OPEN + 3))


def test_to_tell_one_may_show_that_all_have_gone() -> None:
    line = Line()
    for client in (A, B):
        line.questions.ask(b"1", client)
        line.questions.ask(b"2", client)
    line.told()
    line.unread.clear()

    def lost(*_: Any) -> None:
        for client in (A, B):
            line.questions.forget(client)

    line.questions._send = lost
    line.questions.go_on()
    assert line.told() == [] and not line.questions.under_way


def test_of_who_has_gone_nothing_is_left() -> None:
    line = Line()
    for _ in range(2):
        line.questions.ask(b"1", A)
    line.questions.ask(b"1", B)
    line.questions.forget(A)
    line.gone = {B}
    line.unread.clear()
    line.questions.ask(b"2", B)
    line.questions.go_on()
    assert line.told() == [(A, b"1@1"), (B, b"1@1")]
    assert not line.questions._open and not line.questions.under_way
