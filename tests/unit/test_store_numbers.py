"""Numbers that the store gives out: never twice, whatever happens to its files."""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import suppress
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

from blockflow.control.store import CURRENT, PREVIOUS, StateStore
from blockflow.control.stored import NUMBER_STRIDE

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
        assert store.state == before


class Lives(RuleBasedStateMachine):
    """Control planes on one state folder: they take numbers, store epochs, are killed in the middle
    of it; the current file is torn meanwhile. No number has two owners, no epoch two meanings."""

    def __init__(self) -> None:
        super().__init__()
        self.scratch = TemporaryDirectory()
        self.root = Path(self.scratch.name)
        self.taken: set[tuple[str, int]] = set()
        self.meant: dict[int, int] = {}
        self.posted = 0
        self.store = StateStore(self.root)

    def take(self, kind: str, count: int) -> None:
        for _ in range(count):
            number = (kind, getattr(self.store, f"take_{kind}")())
            assert number not in self.taken
            self.taken.add(number)

    @rule(kind=KINDS, count=st.sampled_from([1, 3, NUMBER_STRIDE + 1]))
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
            self.take(kind, NUMBER_STRIDE + 1)
        self.again()

    @rule()
    def again(self) -> None:
        self.store.close()
        self.store = StateStore(self.root)
        self.holds()

    @precondition(lambda self: (self.root / PREVIOUS).exists())
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
    run_state_machine_as_test(
        Lives,
        settings=settings(
            max_examples=60, stateful_step_count=25, derandomize=True, database=None, deadline=None
        ),
    )
