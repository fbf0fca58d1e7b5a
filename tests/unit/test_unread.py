"""What clients leave unread: who is cut off, and who never is."""

from __future__ import annotations

from blockflow.core import limits
from blockflow.dispatcher import unread
from blockflow.dispatcher.unread import Unread, wire_bytes
from blockflow.tensormq.sockets import CURVE_BYTES

MIB = 1024 * 1024
SECOND = 1_000_000_000
HELD = 0
OVER = unread.CONNECTION_BYTES + MIB


class Links:
    """A book, and what its connections have brought."""

    def __init__(self, *fds: int) -> None:
        self.book = Unread()
        self.received = dict.fromkeys(fds, 0)
        self.private = 50 * MIB
        self.now = 0
        for fd in fds:
            self.book.began(fd)
        assert self.look() == []

    def look(self, *, drained: bool = True) -> list[int]:
        self.now += SECOND // 20
        return self.book.look(self.now, self.received, self.private, HELD, drained=drained)

    def bring(self, fd: int, nbytes: int, memory: int | None = None) -> None:
        self.received[fd] += nbytes
        self.private += nbytes if memory is None else memory


def test_the_largest_message_may_come_slowly_and_be_followed_by_another() -> None:
    links = Links(7)
    for _ in range(64):
        links.bring(7, limits.MAX_MESSAGE_BYTES // 64)
        assert links.look() == []
    links.book.delivered(7, limits.MAX_MESSAGE_BYTES)
    links.private -= limits.MAX_MESSAGE_BYTES
    links.bring(7, 200 * MIB)
    assert links.look() == links.look() == []
    assert not links.book.suspects


def test_more_than_a_message_is_cut_off_at_the_second_look() -> None:
    links = Links(7, 8)
    links.bring(7, OVER)
    assert (links.look(), links.book.suspects) == ([], 1)
    assert links.look() == [7]
    links.book.ended(7)
    assert links.look() == []


def test_a_suspicion_that_was_unfounded_is_forgotten() -> None:
    links = Links(7, 8)
    for _ in range(3):
        links.bring(7, OVER)
        assert links.look() == []
        links.book.delivered(7, OVER)  # a message and the beginning of the next
        links.private -= OVER
        assert (links.look(), links.book.suspects) == ([], 0)


def test_frames_are_of_the_lengths_that_are_on_the_wire() -> None:
    plain = {0: 2, 1: 3, 255: 257, 256: 265}
    for nbytes, total in plain.items():
        assert wire_bytes([nbytes], encrypted=False) == total
        body = nbytes + CURVE_BYTES
        assert wire_bytes([nbytes], encrypted=True) == body + (2 if body < 256 else 9)
    assert wire_bytes(plain, encrypted=False) == sum(plain.values())


def test_whole_messages_that_wait_are_no_offence_up_to_the_bound() -> None:
    links = Links(7, 8)
    links.bring(7, limits.MAX_UNANSWERED_BYTES)
    for _ in range(20):
        assert links.look(drained=False) == [] and not links.book.suspects
    links.bring(7, 2 * limits.MAX_MESSAGE_BYTES)
    assert links.look(drained=False) == links.look(drained=False) == []
    links.book.delivered(7, 2 * limits.MAX_MESSAGE_BYTES)  # it has had its turn
    links.private -= 2 * limits.MAX_MESSAGE_BYTES
    assert links.look() == links.look() == [] and not links.book.suspects


def test_who_brings_messages_faster_than_they_are_read_is_cut_off() -> None:
    """Each of them is a whole one, and some are delivered between any two looks."""
    links = Links(7, 8)
    cut: list[int] = []
    while not cut:
        links.bring(7, 30 * MIB)
        links.book.delivered(7, 10 * MIB)
        cut = links.look(drained=False)
        assert links.received[7] < 3 * OVER
    assert cut == [7]


def test_small_messages_that_pile_up_are_seen_by_the_memory_that_they_take() -> None:
    links = Links(7, 8)
    cut: list[int] = []
    while not cut:
        links.bring(7, 2 * MIB, memory=16 * MIB)
        links.book.delivered(7, MIB // 4)
        links.private -= 2 * MIB
        cut = links.look(drained=False)
        assert links.private < 400 * MIB
    assert cut == [7]


def test_a_long_rest_is_no_credit_for_an_endless_message() -> None:
    links = Links(7)
    for _ in range(30 * 24):
        links.now += 3600 * SECOND
        links.bring(7, 16 * 3600, memory=0)  # heartbeats
        assert links.look() == [] and not links.book.suspects
    links.bring(7, 7 * MIB, memory=7 * unread.FRAME_BYTES_PER_BYTE * MIB)
    assert links.look() == [] and links.look() == [7]


def test_an_endless_message_is_one_however_slowly_it_comes() -> None:
    links = Links(7)
    for _ in range(2):
        links.bring(7, unread.CONNECTION_BYTES // 2)
        links.now += 3 * 3600 * SECOND
        assert links.look() == [] and not links.book.suspects
    links.bring(7, unread.CONNECTION_BYTES // 2)
    assert links.look() == [] and links.look() == [7]


def test_what_had_been_taken_when_it_was_nearly_read_is_not_its_fault_later() -> None:
    links = Links(7)
    links.bring(7, 10 * MIB)
    links.book.delivered(7, 9 * MIB)
    links.private += 150 * MIB  # others'
    assert links.look(drained=False) == []
    links.bring(7, 5 * MIB)
    assert links.look(drained=False) == [] and not links.book.suspects


def test_framing_is_no_backlog() -> None:
    """Messages for hours, so that there is always one unread: what they take on the wire besides
    their content must not add up."""
    links = Links(7)
    size = wire_bytes([40, 600], encrypted=False)
    for _ in range(100):
        for _ in range(1000):
            links.bring(7, 1000 * size, memory=0)
            links.book.delivered(7, 1000 * size)
        assert links.look(drained=False) == [] and not links.book.suspects


def test_a_message_laid_on_another_connection_is_no_credit() -> None:
    links = Links(7)
    links.book.delivered(7, 10 * OVER)
    assert links.look(drained=False) == []
    links.bring(7, OVER)
    assert links.look() == [] and links.look() == [7]


def test_a_flood_of_others_messages_is_no_hiding_place() -> None:
    links = Links(7, 8)
    links.bring(7, OVER)
    assert links.look(drained=False) == []
    for _ in range(3):
        links.book.delivered(8, 100)
    assert links.look(drained=False) == []
    links.book.delivered(8, 100)  # the others have had their turns, twice
    assert links.look(drained=False) == [7]


def test_nor_is_a_message_that_takes_long_to_be_read() -> None:
    links = Links(7, 8)
    links.bring(7, OVER)
    assert [links.look(drained=False) for _ in range(6)] == [[], [], [], [], [], [7]]


def test_all_together_are_bounded() -> None:
    links = Links(*range(10, 20))
    for fd in links.received:
        links.bring(fd, (100 + fd) * MIB)
    assert links.look() == []
    assert links.look() == [19]
    links.book.ended(19)
    del links.received[19]
    for _ in range(3):
        for fd in links.look():
            links.book.ended(fd)
            del links.received[fd]
    assert sum(links.received.values()) <= unread.TOTAL_BYTES


def test_frames_that_take_more_memory_than_bytes() -> None:
    links = Links(7, 8)
    for _ in range(4):
        links.bring(7, MIB, memory=32 * MIB)
        links.bring(8, MIB // 2)
        assert links.look() == []
    links.bring(7, MIB, memory=32 * MIB)
    assert links.look() == [] and links.book.unexplained
    assert links.look() == [7]


def test_what_others_bring_is_explained_and_who_is_gone_is_forgotten() -> None:
    links = Links(7, 8)
    links.bring(7, 5 * MIB)
    for _ in range(4):
        links.bring(8, 60 * MIB)
        assert links.look() == [] and not links.book.suspects
    links.private -= links.received.pop(8)
    assert links.look() == [] and not links.book.suspects


def test_one_that_sends_many_messages_at_once_does_not_blame_the_slow() -> None:
    links = Links(7, 8)
    links.bring(8, 250 * MIB)  # 25 messages, of which one is delivered now and then
    for _ in range(20):
        links.bring(7, MIB)
        links.book.delivered(8, 10 * MIB)
        links.private -= 10 * MIB
        assert links.look(drained=False) == [] and not links.book.suspects


def test_memory_that_was_given_back_in_between_convicts_nobody() -> None:
    links = Links(7)
    links.bring(7, 5 * MIB, memory=200 * MIB)
    assert links.look() == [] and links.book.unexplained
    links.private -= 150 * MIB
    assert links.look() == [] and not links.book.unexplained


def test_bursts_come_and_go_within_memory_that_was_here_before() -> None:
    """Six send large messages at once; what is read is kept by the allocator for a while."""
    links = Links(*range(10, 16))
    links.private = 500 * MIB
    assert links.look() == []
    links.book.trimmed()
    links.private = 100 * MIB
    for fd in range(11, 16):
        links.bring(fd, 40 * MIB, memory=60 * MIB)
    links.bring(10, 40 * MIB)
    links.book.delivered(10, 40 * MIB)
    assert links.look() == []
    for fd in range(11, 15):
        links.book.delivered(fd, 40 * MIB)
        links.bring(10, MIB)
        assert links.look() == [] and not links.book.suspects
    links.bring(10, 10 * MIB, memory=400 * MIB)  # more than was here then
    assert links.look() == [] and links.book.unexplained
    assert links.look() == [15]


def test_round_for_round_no_stranger_raises_what_was_here_before() -> None:
    """Each lets the Dispatcher grow by less than the bound, goes, and has it give memory back."""
    links, grown = Links(), 0
    for fd in range(10, 50):
        links.book.began(fd)
        links.received[fd] = 0
        assert links.look() == []
        links.bring(fd, 250 * MIB)
        grown += 120 * MIB
        links.private += grown
        if links.look() + links.look():
            break
        del links.received[fd]
        links.private -= 250 * MIB
        assert links.look() == []
        links.book.trimmed()
        links.private -= grown
        assert links.look() == []
    assert grown < unread.TOTAL_BYTES + 2 * unread.UNEXPLAINED_BYTES


def test_a_new_connection_does_not_answer_for_all_that_was_here_before() -> None:
    """It brings a large message at once, and others wait to be read as well."""
    links = Links(7)
    links.private = 500 * MIB
    assert links.look() == []
    for fd in (8, 9):
        links.book.began(fd)
        links.received[fd] = 0
        links.bring(fd, 40 * MIB)
        for _ in range(3):
            assert links.look(drained=False) == [] and not links.book.suspects
    links.bring(9, 10 * MIB, memory=200 * MIB)
    assert links.look(drained=False) == links.look(drained=False) == []
    assert links.book.unexplained


def test_nor_does_who_comes_before_the_first_look() -> None:
    book = Unread(2 * unread.UNEXPLAINED_BYTES)
    book.began(7)
    private = 2 * unread.UNEXPLAINED_BYTES + 30 * MIB
    for n in range(1, 20):
        assert book.look(n * SECOND // 20, {7: 30 * MIB}, private, HELD, drained=n > 1) == []
    assert not book.suspects


def test_who_was_idle_does_not_answer_for_what_others_took() -> None:
    links = Links(7, 8)
    for _ in range(5):
        links.bring(8, 60 * MIB)
        links.book.delivered(8, 60 * MIB)  # the allocator keeps it
        assert links.look() == [] and not links.book.suspects
    for _ in range(20):  # a large message, by a slow line
        links.bring(7, 2 * MIB)
        assert links.look() == [] and not links.book.suspects


def test_what_may_be_of_others_for_a_moment_convicts_nobody() -> None:
    """Copies of a large reply that is being encrypted, while a request comes slowly."""
    links = Links(7)
    links.bring(7, 40 * MIB)
    links.private += 400 * MIB

    def look(passing: int) -> list[int]:
        now, book = links.now, links.book
        return book.look(now, links.received, links.private, HELD, passing, drained=True)

    assert look(400 * MIB) == look(400 * MIB) == [] and not links.book.suspects
    assert look(0) == [] and look(0) == [7]


def test_what_is_held_elsewhere_is_no_clients_fault() -> None:
    book = Unread()
    book.began(7)
    book.look(0, {7: 0}, 0, 0, drained=True)
    for now in (1, 2, 3):
        assert book.look(now, {7: MIB}, 500 * MIB, 450 * MIB, drained=True) == []


def test_what_is_let_go_of_elsewhere_does_not_count_as_growth() -> None:
    book = Unread()
    book.began(7)
    book.look(0, {7: 0}, 500 * MIB, 200 * MIB, drained=True)
    for now in (1, 2, 3):
        assert book.look(now, {7: 4 * MIB}, 500 * MIB, 200 * MIB, drained=True) == []
    assert not book.suspects
    book.look(4, {7: 5 * MIB}, 500 * MIB, 0, drained=True)
    assert book.unexplained


def test_memory_that_heartbeats_cannot_take_cuts_nobody_off() -> None:
    links = Links(*range(10, 40))
    links.private += 150 * MIB
    for _ in range(60):
        for fd in links.received:
            links.bring(fd, 80, memory=0)
            links.now += SECOND // 30
        assert links.look() == [] and not links.book.suspects
    for _ in range(2):  # a few bytes of a message are no reason either
        links.bring(20, 1000)
        assert links.look() == [] and not links.book.suspects
    links.bring(30, 5 * MIB, memory=160 * MIB)
    assert links.look() == [] and links.book.unexplained
    assert links.look() == [30]


def test_heartbeats_of_years_are_no_message() -> None:
    links = Links(7)
    for year in range(1, 11):
        links.now = year * 365 * 86_400 * SECOND
        links.bring(7, 80 * 365 * 86_400, memory=0)
        assert links.look() == links.look() == []


def test_a_descriptor_that_is_used_again_begins_anew() -> None:
    links = Links(7)
    links.bring(7, OVER)
    links.look()
    links.book.began(7)
    links.received[7] = 5
    assert links.look() == links.look() == []
