"""The stored topology waits for a repository that is away, and for nothing else."""

from __future__ import annotations

import errno
import os
import threading
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from control_rig import echo_repository

from blockflow.control import restoration
from blockflow.control.manager import Manager
from blockflow.control.restoration import Restoration
from blockflow.control.stored import StoredState
from blockflow.core.errors import BlockFlowError, RepositoryError, SystemError_
from blockflow.core.topology import Topology
from tests.unit.test_stages import profile

TOPOLOGY = cast(Topology, object())
DEPLOYED = "3: deployed"
AWAY = SystemError_("TIMEOUT", "away")
UNFIT = RepositoryError("DIGEST_MISMATCH", "it is there, and another one")
BODY = {"blocks": ["gone"], "tasks": {"t": ["gone"]}}
STATE = cast(
    StoredState, SimpleNamespace(epoch=3, topology=BODY, posted={"posted": 1}, digests={"a": "0"})
)


class Brain:
    """Deploys, and writes down what it is told."""

    def __init__(self) -> None:
        self.realm = SimpleNamespace(topology=None, unrestored=object())
        self.runner = SimpleNamespace(in_the_way=None)
        self.stopping = False
        self.told: list[str] = []
        self.refusal: BlockFlowError | None = None

    def restore_failed(self, epoch: int, error: BlockFlowError, _now_ns: int) -> str:
        self.told.append(f"{epoch}: {error.message}")
        return "failed"

    def restore(self, topology: Any, epoch: int, posted: Any, *rest: Any) -> str:
        if self.refusal is not None:
            raise self.refusal
        assert (topology, posted, rest[1:]) == (TOPOLOGY, STATE.posted, (STATE.digests, ("note",)))
        self.told.append(DEPLOYED)
        assert epoch == STATE.epoch
        return "deployed"


class Restored(Restoration):
    """Finds what is to be found, time after time, and without pauses. ``before[n]`` is done while
    it waits for the n-th time."""

    def __init__(self, *found: BlockFlowError | None) -> None:
        self.found, self.pauses, self.brain = list(found), list[float](), Brain()
        self.before: dict[int, Callable[[Brain], object]] = {}
        self.reading: Callable[[], None] = lambda: None
        self.busy = 0
        self.settings = SimpleNamespace(repository=Path("blocks"), cores=(0,))
        manager = SimpleNamespace(settings=self.settings, brain=self.brain, call=self._call)
        super().__init__(cast(Manager, manager), STATE)
        self._ended = cast(Any, SimpleNamespace(wait=self._wait, set=lambda: None))

    def _call(self, act: Callable[[], Any]) -> Any:
        if self.busy:
            self.busy -= 1
            raise SystemError_("TIMEOUT", "the Manager is busy")
        return act()

    def _wait(self, pause_s: float) -> bool:
        self.pauses.append(pause_s)
        self.before.get(len(self.pauses), lambda _: None)(self.brain)
        return len(self.pauses) > 9

    def _read(self) -> tuple[Topology, tuple[str, ...]]:
        if not self.found:
            return super()._read()
        error = self.found.pop(0)
        self._away = error is AWAY
        if error is not None:
            raise error
        self.reading()
        return TOPOLOGY, ("note",)

    def told(self) -> list[str]:
        """When it has ended."""
        begun: object = self.begin()
        if self._thread is not None:
            assert self._thread.daemon
            self._thread.join(60)
        assert begun == ("deployed" if self.brain.told[0] == DEPLOYED else "failed")
        return self.brain.told


def test_what_is_there_is_deployed_at_once_or_not_at_all() -> None:
    it = Restored(None)
    assert it.told() == [DEPLOYED] and not it.pauses
    it = Restored(UNFIT, None)
    assert it.told() == [f"3: {UNFIT.message}"] and not it.pauses
    it = Restored(None)
    it.brain.refusal = UNFIT
    assert it.told() == [f"3: {UNFIT.message}"] and not it.pauses


@pytest.mark.parametrize(("folder", "away"), [("", False), ("gone", True), ("mount", True)])
def test_a_folder_may_be_away_and_a_block_is_missing(
    folder: str, away: bool, tmp_path: Path
) -> None:
    """What is left of a mount is an empty one."""
    echo_repository(tmp_path)
    (tmp_path / "mount").mkdir()
    it = Restored()
    it.settings.repository = tmp_path / folder
    assert len(it.told()) == 1 and bool(it.pauses) == away


@pytest.mark.parametrize("number", [errno.ESTALE, errno.EMFILE])
@pytest.mark.parametrize(
    ("file", "before"),
    [("manifest.json", 0), ("fp32.json", 0), ("fp32.json", 1)],
    ids=["block", "for the plan of threads", "for its policy"],
)
def test_what_cannot_be_read_just_once_costs_no_block_its_place_or_policy(
    file: str, before: int, number: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Until somebody applied the topology again."""
    profile(echo_repository(tmp_path), {"b": (1.0, 0.1)})
    lbci = {"policy": "lbci", "t_opt_ms": 500}
    body = {"blocks": [{"name": "b", "batching": lbci}], "tasks": {"t": ["b"]}}
    opened, fates = os.open, [number, *[0] * before]

    def fail_once(path: Any, *args: Any, **kwargs: Any) -> int:
        if str(path).endswith(file) and fates and (fate := fates.pop()):
            raise OSError(fate, "just now")
        return opened(path, *args, **kwargs)

    it, deployed = Restored(), list[Topology]()
    it._state = cast(Any, SimpleNamespace(epoch=3, topology=body, posted=body, digests={}))
    it.settings.repository = tmp_path
    monkeypatch.setattr(it.brain, "restore", lambda topology, *_: deployed.append(topology))
    monkeypatch.setattr(os, "open", fail_once)
    it.begin()
    assert it._thread is not None
    it._thread.join(60)
    (topology,) = deployed
    assert topology.blocks["b"].batching.model_dump() == lbci and len(it.pauses) == 1
    assert topology.costs.keys() == {"b"}


def test_what_is_away_is_awaited_ever_less_often() -> None:
    it = Restored(*[AWAY] * 7, None)
    assert it.told() == ["3: away", DEPLOYED]
    assert it.pauses == [0.25, 0.5, 1.0, 2.0, 4.0, 5.0, 5.0]


def test_what_comes_and_does_not_fit_is_told_and_not_awaited() -> None:
    it = Restored(AWAY, AWAY, UNFIT, None)
    assert it.told() == ["3: away", f"3: {UNFIT.message}"] and len(it.pauses) == 2


@pytest.mark.parametrize(
    "act",
    [
        lambda brain: setattr(brain.realm, "topology", TOPOLOGY),
        lambda brain: setattr(brain.realm, "unrestored", None),
        lambda brain: setattr(brain, "stopping", True),
    ],
)
def test_what_is_not_wanted_any_more_is_not_looked_for(act: Callable[[Brain], None]) -> None:
    it = Restored(AWAY, AWAY, None)
    it.before[2] = act
    assert it.told() == ["3: away"] and len(it.pauses) == 2 and it.found == [None]
    found_late = Restored(AWAY, None)
    found_late.reading = lambda: act(found_late.brain)
    assert found_late.told() == ["3: away"] and len(found_late.pauses) == 1


def test_an_update_that_is_under_way_and_a_busy_manager_are_awaited() -> None:
    it = Restored(AWAY, None, None)
    it.before[1] = lambda brain: setattr(brain.runner, "in_the_way", object())
    it.before[2] = lambda brain: setattr(brain.runner, "in_the_way", None)
    assert it.told() == ["3: away", DEPLOYED] and len(it.pauses) == 2
    it = Restored(AWAY, None)
    it.before[1] = lambda _: setattr(it, "busy", 2)
    assert it.told() == ["3: away", DEPLOYED] and len(it.pauses) == 3


def test_its_end_ends_the_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    it = Restored(AWAY)
    it.close()  # nothing was begun
    monkeypatch.setattr(restoration, "FIRST_S", 60.0)
    it._ended = threading.Event()
    it.begin()
    it.close()
    assert it._thread is not None and not it._thread.is_alive()
