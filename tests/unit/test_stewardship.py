"""What a Manager makes of the stored topology when it takes over from one that has died."""

from __future__ import annotations

import errno
import json
import os
import shutil
import threading
from dataclasses import asdict, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NoReturn, cast
from unittest.mock import MagicMock

import pytest
from control_rig import World, echo_repository

from blockflow.control import disk, manager, stewardship
from blockflow.control.adoption import Adoption, plan_adoption
from blockflow.control.journal import NAME, Journal, JournalFile
from blockflow.control.manager import Manager
from blockflow.control.roomy import RoomyFile
from blockflow.control.settings import ControlSettings
from blockflow.control.stewardship import Biography, inherit
from blockflow.control.store import StateStore
from blockflow.control.succession import Outcome
from blockflow.core.errors import BlockFlowError, SystemError_
from blockflow.core.placement import desired_workers
from blockflow.launch.ward import Ward, awaited
from tests.unit.test_stages import profile

LBCI = {"policy": "lbci", "t_opt_ms": 500}
BODY = {
    "blocks": [{"name": "a", "threads": 1}, {"name": "b", "threads": 1, "batching": LBCI}],
    "tasks": {"t": ["a", "b"]},
}
NONE = {"policy": "none"}


def in_force(policy: dict[str, Any]) -> Journal:
    """What a Manager has written down whose worker of ``b`` batches by this policy."""
    world = World().up()
    world.apply(["a", {"name": "b", "batching": policy}], {"t": ["a", "b"]})
    return world.journal()


@pytest.mark.parametrize(
    ("policy", "measured", "gives_way"),
    [
        pytest.param(NONE, False, True, id="it gave way before"),
        pytest.param(NONE, True, False, id="it can work again"),
        pytest.param(LBCI, False, False, id="it works, by what it was told once"),
    ],
)
def test_a_policy_of_another_epoch_gives_way_where_it_cannot_work(
    tmp_path: Path, policy: dict[str, Any], measured: bool, gives_way: bool
) -> None:
    """The former Manager died between storing the epoch and putting it in force."""
    repository = echo_repository(tmp_path / "blocks")
    profile(repository, {"b": (1.0, 0.1)})
    if not measured:
        shutil.rmtree(tmp_path / "blocks" / "b" / "profiles")
    settings = ControlSettings(
        repository=tmp_path / "blocks", state_dir=tmp_path / "state", cores=(0, 1)
    )
    JournalFile(tmp_path).write(json.dumps(asdict(in_force(policy))))
    with StateStore(settings.state_dir) as store:
        digests = {n: repository.info(n).digest for n in "ab"}
        store.commit(2, BODY, BODY, digests)
        found = inherit(settings, store, cast(Ward, SimpleNamespace(run_dir=tmp_path)))
    assert found.topology is not None
    kept = found.topology.blocks["b"].batching.model_dump()
    assert kept == (NONE if gives_way else LBCI)
    told = [n for n in found.notes if "b: without a batching policy until it is applied" in n]
    assert len(told) == gives_way and len(found.notes) == len(told)


@pytest.mark.parametrize("policy", [NONE, LBCI])
def test_of_the_epoch_in_force_nothing_is_asked_of_the_repository(
    tmp_path: Path, policy: dict[str, Any]
) -> None:
    """It may not answer, and what was measured since counts from the next update on."""
    notes, costs = ("b: without a batching policy until it is applied again",), {"a": 2.5}
    written = in_force(policy)
    assert written.standing is not None
    standing = replace(written.standing, costs=costs, notes=notes)
    JournalFile(tmp_path).write(json.dumps(asdict(replace(written, standing=standing))))
    nowhere = ControlSettings(repository=tmp_path / "away", state_dir=tmp_path / "state")
    with StateStore(nowhere.state_dir) as store:
        store.commit(1, BODY, BODY, DIGESTS)
        found = inherit(nowhere, store, cast(Ward, SimpleNamespace(run_dir=tmp_path)))
    assert found.topology is not None and found.notes == notes
    assert found.topology.blocks["b"].batching.model_dump() == policy
    assert found.topology.digests() == DIGESTS and found.topology.costs == costs
    assert found.topology.overlap == {"a": 1, "b": 1}


def test_what_was_stored_and_could_not_be_deployed_is_deployed_as_at_a_start(
    tmp_path: Path,
) -> None:
    """Nothing serves: the start was waiting for its repository."""
    world = World().up()
    world.brain.restore_failed(1, SystemError_("TIMEOUT", "silent"), world.now)
    JournalFile(tmp_path).write(json.dumps(asdict(world.journal())))
    nowhere = ControlSettings(repository=tmp_path / "away", state_dir=tmp_path / "state")
    with StateStore(nowhere.state_dir) as store:
        store.commit(1, BODY, BODY, DIGESTS)
        found = inherit(nowhere, store, cast(Ward, SimpleNamespace(run_dir=tmp_path)))
    assert found.topology is None and found.epoch == 1


DIGESTS = {n: f"{n}-digest" for n in "ab"}


@pytest.mark.parametrize("lost", ["blocks", "blocks/b"])
def test_a_dead_worker_whose_block_cannot_be_looked_up_costs_the_others_nothing(
    tmp_path: Path, lost: str
) -> None:
    """The repository is away, say: the one waits for it, while who lives serves on."""
    echo_repository(tmp_path / "blocks")
    world = World().up()
    world.apply(["a", "b"], {"t": ["a", "b"]})
    world.die("b#0")
    JournalFile(tmp_path).write(json.dumps(asdict(world.journal())))
    shutil.rmtree(tmp_path / lost)
    settings = ControlSettings(
        repository=tmp_path / "blocks", state_dir=tmp_path / "state", cores=(0, 1)
    )
    ward = SimpleNamespace(run_dir=tmp_path, line=SimpleNamespace(anew=None))
    body = {"blocks": ["a", "b"], "tasks": {"t": ["a", "b"]}}
    with StateStore(settings.state_dir) as store:
        store.commit(1, body, body, DIGESTS)
        found = inherit(settings, store, cast(Ward, ward))
    assert found.topology is not None
    desired = desired_workers(found.topology, settings.cores)
    adoption = plan_adoption(found.journal, found.epoch, desired)
    assert [s.name for s, _ in adoption.keep] == ["a#0", "b#0"] and not adoption.start


@pytest.mark.parametrize(
    "lost", ["nothing", "the files of what runs", "the journal", "room for the journal", "a block"]
)
def test_what_cannot_be_taken_over_is_told_to_the_guardian(tmp_path: Path, lost: str) -> None:
    """What has become of the file of an artifact that runs is no reason."""
    echo_repository(tmp_path / "blocks")
    settings = ControlSettings(
        repository=tmp_path / "blocks", state_dir=tmp_path / "state", cores=(0, 1)
    )
    if lost == "the files of what runs":
        shutil.rmtree(tmp_path / "blocks" / "a")
    if lost != "the journal":
        JournalFile(tmp_path).write(json.dumps(asdict(in_force(LBCI))))
    if lost == "room for the journal":
        (tmp_path / f".{NAME}.new").unlink()
        (tmp_path / f".{NAME}.new").mkdir()
        with pytest.raises(OSError, match="directory"):
            JournalFile(tmp_path).write("{}")
    body = {"blocks": ["gone"], "tasks": {"t": ["gone"]}} if lost == "a block" else BODY
    told: list[str] = []
    ward = SimpleNamespace(run_dir=tmp_path, line=SimpleNamespace(anew=told.append))
    with StateStore(settings.state_dir) as store:
        store.commit(1, body, body, DIGESTS)
        if lost in ("the journal", "room for the journal", "a block"):
            with pytest.raises(SystemError_) as e:
                inherit(settings, store, cast(Ward, ward))
            code = "NO_SPACE" if lost == "room for the journal" else "INTERNAL"
            assert e.value.code == code and len(told) == 1
        else:
            found = inherit(settings, store, cast(Ward, ward))
            assert told == [] and found.topology is not None
            assert found.topology.digests() == DIGESTS


@pytest.mark.parametrize(
    ("lacks", "code"),
    [
        pytest.param("journal", "NO_SPACE", id="room for the journal"),
        pytest.param("room", "NO_SPACE", id="room for a block"),
        pytest.param("block", "UNKNOWN_BLOCK", id="repository is away"),
        pytest.param("answer", "TIMEOUT", id="repository is silent"),
    ],
)
def test_what_cannot_be_read_at_present_is_left_to_the_next_successor(
    tmp_path: Path, lacks: str, code: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else who serves would be ended, for what may be there in a second. The epoch's own block is
    nobody's yet."""
    end, opened, threads = threading.Event(), os.open, set(threading.enumerate())

    def refuse(*_: object) -> NoReturn:
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    def refuse_blocks(path: Any, *args: Any, **kwargs: Any) -> int:
        if "blocks" in os.fspath(path):
            refuse()
        return opened(path, *args, **kwargs)

    JournalFile(tmp_path).write(json.dumps(asdict(in_force(LBCI))))
    if lacks == "journal":
        monkeypatch.setattr(RoomyFile, "read", refuse)
    elif lacks == "room":
        echo_repository(tmp_path / "blocks")
        monkeypatch.setattr(os, "open", refuse_blocks)
    elif lacks == "answer":
        monkeypatch.setattr(disk.Disk.ask, "__defaults__", (0.05,))
        monkeypatch.setattr(disk.Disk.is_there, "__defaults__", (0.05,))
        monkeypatch.setattr(os.path, "isdir", lambda _: end.wait())
    settings = ControlSettings(repository=tmp_path / "blocks", state_dir=tmp_path / "state")
    told: list[str] = []
    ward = SimpleNamespace(run_dir=tmp_path, line=SimpleNamespace(anew=told.append))
    body = {"blocks": ["a", "tail"], "tasks": {"t": ["a", "tail"]}}
    with StateStore(settings.state_dir) as store:
        store.commit(2, body, body, {"a": "a-digest", "tail": "tail-digest"})
        with pytest.raises(BlockFlowError) as e:
            inherit(settings, store, cast(Ward, ward))
    end.set()
    for thread in set(threading.enumerate()) - threads:
        thread.join()
    assert e.value.code == code and awaited(e.value) and told == []


class Ended(BaseException):
    """Of the process, by os._exit."""


@pytest.mark.parametrize(
    ("cause", "said"),
    [
        (OSError(errno.ENFILE, "Too many open files in system"), [("failing", "NO_SPACE")]),
        (KeyError("a#0"), [("anew", "taking over failed: KeyError: 'a#0'")]),
    ],
)
def test_a_takeover_that_finds_no_room_is_left_to_the_next_successor(
    cause: Exception,
    said: list[tuple[str, str]],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """There is one each second: the guardian says why, and only once."""

    def ends(_status: int) -> NoReturn:
        raise Ended

    def fails(*_: object) -> NoReturn:
        raise cause

    told: list[tuple[str, str]] = []
    line = SimpleNamespace(
        failing=lambda error: told.append(("failing", error.code)),
        anew=lambda why: told.append(("anew", why)),
    )
    monkeypatch.setattr(manager.os, "_exit", ends)
    monkeypatch.setattr(manager, "Succession", fails)
    with pytest.raises(Ended):
        Manager._succeed(MagicMock(), MagicMock(), cast(Ward, SimpleNamespace(line=line)))
    assert told == said and bool(caplog.records) is isinstance(cause, KeyError)


def test_what_status_tells_of_the_managers(monkeypatch: pytest.MonkeyPatch) -> None:
    first = Biography(None)
    first.serving()
    alone = first.to_dict(None)
    assert first.pid == alone["pid"] == os.getpid()
    assert (alone["restarts"], alone["away_ms"], alone["adopted"]) == (0, None, [])
    monkeypatch.setattr(stewardship.time, "monotonic_ns", lambda: 4_500_000_000)
    ward = SimpleNamespace(
        guardian=7, deaths=2, died_ns=3_000_000_000, began_ns=1_000_000_000, cause="killed"
    )
    second = Biography(cast(Ward, ward))
    assert second.pid == 7 and second.to_dict(None)["away_ms"] is None  # not served yet
    second.serving()
    told = second.to_dict(Outcome(cast(Adoption, None), ("a#0",), ()))
    assert (told["restarts"], told["cause"], told["away_ms"]) == (2, "killed", 1500.0)
    assert told["adopted"] == ["a#0"] and told["pid"] == os.getpid()
    # The system goes on when its Manager is replaced.
    assert (second.uptime_s(), told["uptime_s"]) == (3.5, 0.0)
