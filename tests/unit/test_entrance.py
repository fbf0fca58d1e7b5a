"""Who goes when connections to a data socket are many."""

from __future__ import annotations

from blockflow.tensormq.entrance import HANDSHAKE_MS, Doorkeeper

LAST_FD = 10
MS = 1_000_000
HANDSHAKE = 92


class Kernel:
    """Connections by descriptor, as (mark, bytes)."""

    def __init__(self) -> None:
        self.there: dict[int, tuple[int, int]] = {}
        self.shut_down: list[int] = []
        self.asked = 0
        self.counts = True
        self._marks = 100

    def connect(self, fd: int, brought: int = 0) -> None:
        self._marks += 1
        self.there[fd] = (self._marks, brought)

    def came(self, fd: int) -> int | None:
        return self.there[fd][0] if fd in self.there else None

    def brought(self, fd: int, mark: int) -> int | None:
        self.asked += 1
        found = self.there.get(fd)
        return found[1] if found is not None and found[0] == mark else None

    def shut(self, fd: int, mark: int) -> bool:
        if fd not in self.there or self.there[fd][0] != mark:
            return False
        del self.there[fd]
        self.shut_down.append(fd)
        return True

    def used(self) -> int | None:
        """With three of the process's own."""
        return 3 + len(self.there) if self.counts else None


class Scene:
    def __init__(self) -> None:
        self.kernel = Kernel()
        self.keeper = Doorkeeper(self.kernel, LAST_FD, HANDSHAKE)

    def accept(self, fd: int, at_ms: int = 0, brought: int = 0) -> list[int]:
        """Whom it costs the connection."""
        self.kernel.connect(fd, brought)
        before = len(self.kernel.shut_down)
        self.keeper.on_accepted(fd, at_ms * MS)
        return self.kernel.shut_down[before:]


def test_of_the_last_descriptors_the_longest_silent_give_way() -> None:
    """Two for each that comes, so that it gets less where it was too many."""
    scene = Scene()
    for fd in range(3, 3 + 7):
        assert scene.accept(fd, at_ms=fd) == []
    assert scene.accept(10, at_ms=10) == [3, 4]
    assert scene.accept(3, at_ms=11) == []
    assert scene.accept(4, at_ms=12) == [5, 6], "a low one, for there are too many all the same"
    assert scene.keeper.turned_away == 4


def crowd(brought: int) -> Scene:
    scene = Scene()
    for fd in range(3, 3 + 7):
        scene.accept(fd, brought=brought)
    return scene


def test_who_has_come_through_the_handshake_stays_and_is_asked_about_once() -> None:
    scene = crowd(HANDSHAKE)
    scene.kernel.connect(9, brought=HANDSHAKE - 1)
    scene.keeper.on_accepted(9, 0)
    assert scene.accept(10, brought=HANDSHAKE) == [9]
    asked = scene.kernel.asked
    assert scene.accept(9) == [9]
    assert scene.kernel.asked == asked + 1


def test_where_none_is_silent_the_newcomer_goes() -> None:
    scene = crowd(HANDSHAKE)
    assert scene.accept(10, brought=HANDSHAKE) == [10]
    assert scene.accept(10, brought=500) == [10]
    assert scene.keeper.turned_away == 2


def test_who_has_been_there_longer_than_a_handshake_takes_is_through_it() -> None:
    scene = crowd(0)
    assert scene.accept(10, at_ms=HANDSHAKE_MS + 1) == [10]
    assert scene.kernel.asked == 1


def test_a_kernel_that_does_not_count_descriptors_lends_the_lowest() -> None:
    scene = Scene()
    scene.kernel.counts = False
    assert scene.accept(LAST_FD) == []
    assert scene.accept(LAST_FD + 1) == [LAST_FD + 1]
    assert scene.keeper.turned_away == 1


def test_a_descriptor_that_is_another_connection_s_by_now_is_left_alone() -> None:
    scene = crowd(HANDSHAKE)
    scene.keeper.on_accepted(10, 0)  # it has ended before it was told of
    assert scene.keeper.turned_away == 0
    quiet = crowd(0)
    for fd in range(3, 3 + 6):
        quiet.kernel.connect(fd)  # the first has ended; that this one has come is not told yet
    assert quiet.accept(10) == [9, 10]
