"""Numbers that the store gives out: never twice, whatever happens to its files."""

from __future__ import annotations

import os
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    precondition,
    rule,
    run_state_machine_as_test,
)
from refusals_rig import no_room

from blockflow.control import numbers, stored
from blockflow.control import store as store_module
from blockflow.control.numbers import NumbersFile, Span
from blockflow.control.store import CURRENT, LOW, PREVIOUS, StateStore
from blockflow.control.stored import NUMBER_STRIDE
from blockflow.core.errors import SystemError_

TOPOLOGY = {"blocks": [{"name": "a"}], "tasks": {"t": ["a"]}}
KINDS = st.sampled_from(["incarnation", "stage"])


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """The folder of a store in epoch 2."""
    with StateStore(tmp_path) as store:
        for epoch in (1, 2):
            store.commit(epoch, {"n": epoch}, TOPOLOGY)
    return tmp_path


def tear(root: Path) -> None:
    """Half of it, in a file of its own: both generations may be one for a moment."""
    half = (root / CURRENT).read_bytes()[:200]
    (root / CURRENT).unlink()
    (root / CURRENT).write_bytes(half)


def test_what_a_lost_generation_gave_out_is_not_given_again(root: Path) -> None:
    with StateStore(root) as store:
        given = store.take_incarnation(), store.take_stage()
        lost = store.epoch_after(2)
        store.commit(lost, {"lost": True}, TOPOLOGY)
    tear(root)
    with StateStore(root) as store:
        assert store.state.epoch == 2 and "epoch 2" in store.warning
        assert store.take_incarnation() > given[0] and store.take_stage() > given[1]
        assert store.epoch_after(2) == lost + 1
    with StateStore(root) as store:  # and it is not forgotten once all is well again
        assert store.warning == "" and store.epoch_after(2) == lost + 1


def test_the_previous_generation_does_not_fall_behind(root: Path) -> None:
    """It is torn again and again while it runs, and after each fall-back."""
    seen: list[int] = []
    for _ in range(3):
        with StateStore(root) as store:
            for _ in range(3):
                seen += [store.take_stage() for _ in range(NUMBER_STRIDE)]
                tear(root)
    assert len(set(seen)) == len(seen) and seen == sorted(seen)


def test_numbers_that_are_in_use_are_skipped(root: Path) -> None:
    """The state was put back from a backup, and what runs has come further."""
    far = 10 * NUMBER_STRIDE
    for torn in (False, True):
        with StateStore(root) as store:
            if not torn:
                store.skip(incarnation=far, stage=far, epoch=70)
            assert store.epoch_after(2) > 70
            assert store.take_incarnation() > far and store.take_stage() > far
        tear(root)
    with StateStore(root) as store:
        before = store.state
        store.skip(incarnation=1, stage=1, epoch=1)
        assert store.state == before and store.epoch_after(500) == 501


# --- a disk that takes nothing more ---------------------------------------------------------------


@contextmanager
def full() -> Iterator[None]:
    """No file can be made, nor may one grow: only what is in memory can be written."""

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("blockflow.control.store.write_file", no_room)
        yield


@pytest.fixture
def run_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("run")


def attending(root: Path, run_dir: Path) -> StateStore:
    store = StateStore(root)
    store.attend(run_dir)
    return store


def test_a_successor_on_a_full_disk_goes_on_with_what_is_left(
    root: Path, run_dir: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with attending(root, run_dir) as store:
        given = [store.take_incarnation() for _ in range(3)]
        stages = [store.take_stage()]
    with full():
        for _ in range(3):  # a line of them
            with attending(root, run_dir) as store:
                given += [store.take_incarnation() for _ in range(2)]
                stages.append(store.take_stage())
                assert "numbers that were reserved" in store.warning
                assert store.warning.count("reserved") == 1
        assert caplog.text.count("were reserved before") == 3, "each says it once"
    assert given == list(range(given[0], given[0] + 9))  # and none is wasted
    assert stages == list(range(stages[0], stages[0] + 4))
    with attending(root, run_dir) as store:  # there is room again
        assert store.warning == ""
        assert store.take_incarnation() >= given[0] + NUMBER_STRIDE


def test_a_full_disk_is_told_of_for_as_long_as_it_is_full(root: Path, run_dir: Path) -> None:
    with attending(root, run_dir) as store:
        store.take_incarnation()
    with attending(root, run_dir) as store:
        store.warn("something else")
        with full():
            store.take_incarnation()
            assert store.warning.startswith("something else; ")
            assert "numbers that were reserved" in store.warning
            store.tend(1)
            assert "numbers that were reserved" in store.warning
        store.tend(2)  # not yet again
        assert "numbers that were reserved" in store.warning
        store.tend(10_000_000_000)
        assert store.warning == "something else"


def test_who_has_no_numbers_left_on_a_full_disk_says_so(root: Path, run_dir: Path) -> None:
    with full():
        with StateStore(root) as store, pytest.raises(SystemError_) as e:
            store.take_incarnation()
        assert e.value.code == "NO_SPACE"
        with attending(root, run_dir) as store, pytest.raises(SystemError_):
            store.take_stage()
    with attending(root, run_dir) as store:
        first = store.take_stage()
        with full():
            # From the moment on at which the half of them is left.
            got = [store.take_stage() for _ in range(NUMBER_STRIDE - 1)]
            assert got == list(range(first + 1, first + NUMBER_STRIDE))
            with pytest.raises(SystemError_):
                store.take_stage()


def test_numbers_are_reserved_before_few_are_left(root: Path, run_dir: Path) -> None:
    """Whenever the disk fills up, half of what is reserved at once is there."""
    with attending(root, run_dir) as store:
        for count in (1, LOW - 1, LOW, NUMBER_STRIDE - 1, 3):
            for _ in range(count):
                store.take_stage()
            span = NumbersFile(run_dir).read()["stage"]
            assert len(span) >= LOW - 1
            assert store.state.next_stage == span.end


def test_no_number_is_lower_than_one_before_it(root: Path, run_dir: Path) -> None:
    """Receivers refuse the lower incarnation: what a predecessor has left is given before others
    are reserved, or never."""
    with attending(root, run_dir) as store:
        given = [store.take_incarnation()]
    with attending(root, run_dir) as store:
        with full():
            given += [store.take_incarnation() for _ in range(2)]
        given += [store.take_incarnation()]
    with attending(root, run_dir) as store:
        given += [store.take_incarnation()]
        with full(), suppress(SystemError_):
            while True:
                given.append(store.take_incarnation())
    assert given == sorted(set(given)) and len(given) == NUMBER_STRIDE + 4


def test_what_runs_has_used_its_numbers(root: Path, run_dir: Path) -> None:
    with attending(root, run_dir) as store:
        number = store.take_incarnation()
        store.take_stage()
    with full(), attending(root, run_dir) as store:
        store.skip(incarnation=number + 7, stage=0, epoch=0)
        assert store.take_incarnation() == number + 8


def test_what_is_in_use_is_passed_over_also_by_who_has_reserved_more(root: Path) -> None:
    with StateStore(root) as store:
        inc, stage = store.take_incarnation(), store.take_stage()
        store.skip(incarnation=inc + 7, stage=stage + 7, epoch=0)
        assert store.take_incarnation() > inc + 7
        assert store.take_stage() > stage + 7


def test_somebody_elses_numbers_are_left_out(root: Path, run_dir: Path) -> None:
    """Another instance has had the state folder, between two managers of the first."""
    with attending(root, run_dir) as store:
        given = [store.take_incarnation()]
    with StateStore(root) as other:
        others = [other.take_incarnation() for _ in range(3)]
    with attending(root, run_dir) as store:
        with full():
            given += [store.take_incarnation() for _ in range(LOW + 9)]
        after = [store.take_incarnation() for _ in range(2 * NUMBER_STRIDE)]
    assert given[-1] == given[0] + LOW + 9
    assert given[-1] < min(others) < max(others) < min(after)
    assert after == list(range(after[0], after[0] + 2 * NUMBER_STRIDE))


def test_a_state_from_a_backup_gives_nothing_twice(root: Path, run_dir: Path) -> None:
    backup = (root / CURRENT).read_bytes()
    with attending(root, run_dir) as store:
        given = {store.take_incarnation(), store.take_stage()}
        known = store.state
        for name in (CURRENT, PREVIOUS):
            (root / name).write_bytes(backup)
    with attending(root, run_dir) as store:
        assert store.state == known, "and not more is passed over"
        assert min(store.take_incarnation(), store.take_stage()) > max(given)


@pytest.mark.parametrize(
    "wreck", ["missing", "empty", "torn", "altered", "longer", "another's", "link"]
)
def test_numbers_that_cannot_be_read_are_not_guessed(root: Path, run_dir: Path, wreck: str) -> None:
    with attending(root, run_dir) as store:
        store.take_incarnation()
    path = run_dir / numbers.NAME
    raw = path.read_bytes()
    path.unlink()
    if wreck == "link":
        (run_dir / "other").write_bytes(raw)
        path.symlink_to(run_dir / "other")
    elif wreck != "missing":
        foreign = b"another" + raw[7:-4]
        altered = {"empty": b"", "torn": raw[:-1], "longer": raw + b"x"}
        altered["another's"] = foreign + numbers._CHECK.pack(zlib.crc32(foreign))
        path.write_bytes(altered.get(wreck, raw[:20] + bytes([raw[20] ^ 1]) + raw[21:]))
    assert NumbersFile(run_dir).read() == {}
    with full(), attending(root, run_dir) as store, pytest.raises(SystemError_):
        store.take_incarnation()


def test_a_span_after_a_number_begins_no_earlier_and_may_be_empty() -> None:
    span = Span(10, 20)
    assert [len(span.after(n)) for n in (3, 9, 10, 18, 19, 50)] == [10, 10, 9, 1, 0, 0]
    assert span.after(3) == span


def test_a_run_directory_without_room_costs_the_numbers_only(
    root: Path, run_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    NumbersFile(run_dir).write({"incarnation": Span(5, 9)})

    with StateStore(root) as store:
        monkeypatch.setattr("blockflow.control.numbers.os.open", no_room)
        store.attend(run_dir)
        monkeypatch.undo()
        assert store.take_incarnation() < store.take_incarnation()
    assert NumbersFile(run_dir).read() == {}  # an old one would give those again


SHORT = 64
"""The machine's stride: a whole one is taken again and again, a number at a time."""


class Lives(RuleBasedStateMachine):
    """Control planes on one state folder: they take numbers, store epochs, are killed in the middle
    of it; the current file is torn meanwhile, and now and then its disk is full. No number has two
    owners or is lower than one before it, no epoch has two meanings."""

    def __init__(self) -> None:
        super().__init__()
        self.scratch = TemporaryDirectory()
        self.root = Path(self.scratch.name)
        self.taken: set[tuple[str, int]] = set()
        self.latest: dict[str, int] = {}
        self.meant: dict[int, int] = {}
        self.posted = 0
        self.run_dir = self.root / "run"
        self.run_dir.mkdir()
        self.store = attending(self.root, self.run_dir)

    def take(self, kind: str, count: int) -> None:
        for _ in range(count):
            number = getattr(self.store, f"take_{kind}")()
            assert number > self.latest.get(kind, 0) and (kind, number) not in self.taken
            self.latest[kind] = number
            self.taken.add((kind, number))

    @rule(kind=KINDS, count=st.sampled_from([1, 3, SHORT + 1]))
    def give(self, kind: str, count: int) -> None:
        self.take(kind, count)

    @rule()
    def update(self) -> None:
        self.posted += 1
        epoch = self.store.epoch_after(self.store.state.epoch)
        self.store.commit(epoch, {"n": self.posted}, TOPOLOGY)
        self.holds()

    @rule(steps=st.integers(0, 8), kind=KINDS)
    def killed(self, steps: int, kind: str) -> None:
        """Before the so many-th of the steps of what it does to the disk."""
        left = [steps]

        def step(real: Callable[..., Any], *args: Any) -> Any:
            left[0] -= 1
            if left[0] < 0:
                raise KeyboardInterrupt
            return real(*args)

        with pytest.MonkeyPatch.context() as patch, suppress(KeyboardInterrupt):
            for name in ("link", "unlink", "replace", "write"):
                patch.setattr(os, name, partial(step, getattr(os, name)))
            self.update()
            self.take(kind, SHORT + 1)
        self.again()

    @rule(kind=KINDS, count=st.sampled_from([1, 3]), anew=st.booleans())
    def full(self, kind: str, count: int, anew: bool) -> None:
        """What is given out then was reserved before."""
        with full():
            if anew:
                self.again()
            with suppress(SystemError_):
                self.take(kind, count)

    @rule()
    def again(self) -> None:
        self.store.close()
        self.store = attending(self.root, self.run_dir)
        self.holds()

    @rule()
    def another(self) -> None:
        """An instance of its own, with no such file."""
        self.store.close()
        with StateStore(self.root) as store:
            number = store.take_stage()
            assert ("stage", number) not in self.taken
            self.taken.add(("stage", number))
        self.again()

    @precondition(lambda self: all((self.root / n).exists() for n in (CURRENT, PREVIOUS)))
    @rule()
    def torn(self) -> None:
        tear(self.root)

    def holds(self) -> None:
        state = self.store.state
        if state.epoch:
            n = (state.posted or {})["n"]
            assert self.meant.setdefault(state.epoch, n) == n

    def teardown(self) -> None:
        self.store.close()
        self.scratch.cleanup()


def test_no_number_is_given_twice_whatever_happens(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "fsync", lambda fd: None)  # what a disk loses is torn by hand here
    monkeypatch.setattr(store_module, "NUMBER_STRIDE", SHORT)
    monkeypatch.setattr(store_module, "LOW", SHORT // 2)
    monkeypatch.setattr(stored, "NUMBER_STRIDE", SHORT)
    run_state_machine_as_test(
        Lives,
        settings=settings(
            max_examples=40, stateful_step_count=25, derandomize=True, database=None, deadline=None
        ),
    )
