"""A repository that does not answer keeps no thread of REST for long."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from control_rig import echo_repository, save_echoes

from blockflow.cli.up import look_at
from blockflow.control import disk, stock, system
from blockflow.control.commands import Commands
from blockflow.control.disk import Disk
from blockflow.control.manager import Manager
from blockflow.control.profiles import ProfileShelf
from blockflow.control.restoration import Restoration
from blockflow.control.stock import Stock
from blockflow.control.stored import StoredState
from blockflow.control.system import rehearsals_of
from blockflow.core.errors import RepositoryError, SystemError_
from blockflow.core.scarcity import is_away
from blockflow.core.specs import BlockSpec
from blockflow.core.topology import Topology
from blockflow.launch.preload import REHEARSAL
from blockflow.repository.repository import BlockRepository

ONE = cast(Topology, SimpleNamespace(blocks={"a": None}, infos={"a": None}))


class Silence:
    """A question without an answer, until ``over``."""

    def __init__(self) -> None:
        self.over = threading.Event()
        self.asked = 0

    def __call__(self, *_: Any) -> str:
        self.asked += 1
        self.over.wait()
        return "there"


@pytest.fixture
def silence() -> Iterator[Silence]:
    made = Silence()
    yield made
    made.over.set()
    answered()


def answered() -> None:
    for thread in threading.enumerate():
        if thread.name == "bf-disk":
            thread.join()


def timed_out(act: Callable[[], object]) -> SystemError_:
    with pytest.raises(SystemError_) as e:
        act()
    assert e.value.code == "TIMEOUT" and e.value.retryable
    return e.value


def test_a_disk_that_answers_is_asked_whatever_else_is_under_way(silence: Silence) -> None:
    it = Disk(Path("blocks"))
    timed_out(lambda: it.ask(silence, 0.0))
    assert it.ask(lambda: 7) == 7

    def broken() -> None:
        raise RepositoryError("UNKNOWN_BLOCK", "no block 'x'")

    with pytest.raises(RepositoryError, match="no block 'x'"):
        it.ask(broken)


def test_one_that_is_known_to_be_silent_is_asked_nothing_until_it_answers(
    silence: Silence, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = SimpleNamespace(now=100.0)
    with monkeypatch.context() as patch:
        patch.setattr(disk, "time", SimpleNamespace(monotonic=lambda: clock.now))
        it = Disk(Path("/mnt/blocks"))
        timed_out(lambda: it.ask(silence, 0.0))
        clock.now += disk.PATIENCE_S
        for _ in range(3):
            error = timed_out(lambda: it.ask(silence))
        assert "the repository /mnt/blocks has not answered for 8.0 s" in error.message
        assert silence.asked == 1
        asked = [t for t in threading.enumerate() if t.name == "bf-disk"]
        assert [t.daemon for t in asked] == [True], "a process may end that still waits"
        silence.over.set()
        answered()
        assert it.ask(silence, 30.0) == "there"


def test_without_a_further_thread_it_is_asked_here(monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(_self: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", refused)
    assert Disk(Path("blocks")).ask(threading.current_thread) is threading.current_thread()


def test_status_says_so_and_shows_the_rest(
    silence: Silence, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stock, "GLANCE_S", 0.0)
    monkeypatch.setattr(stock, "lost_artifact", lambda *_: silence() and "away")
    it = Stock(BlockRepository(tmp_path), ProfileShelf(tmp_path))
    (warning,) = it.lost(ONE)
    assert warning.startswith(f"the repository {tmp_path} has not answered for ")
    assert "nothing can be launched until" in warning
    silence.over.set()
    answered()
    monkeypatch.setattr(stock, "GLANCE_S", 30.0)
    assert it.lost(ONE) == ["away"]


@pytest.mark.parametrize("how", ["there", "empty", "silent"])
def test_which_artifacts_are_gone_is_not_known_while_the_repository_is_away(
    silence: Silence, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    asked = [("a", "0" * 64)]
    if how == "there":
        save_echoes(tmp_path, "a")
    elif how == "silent":
        monkeypatch.setattr(BlockRepository, "info", lambda *_, **__: silence())
        monkeypatch.setattr(disk, "wait", lambda *_: None)
    it = Stock(BlockRepository(tmp_path), ProfileShelf(tmp_path))
    assert it.gone(asked) == ({*asked} if how == "there" else None)


def test_a_thousand_blocks_may_take_longer_than_a_glance(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where one does not answer, the folder itself may still be known: a block is looked at."""
    asked: list[tuple[float, Any]] = []

    def ask(_: Disk, question: Callable[[], Any], patience_s: float = disk.PATIENCE_S) -> Any:
        asked.append((patience_s, question()))
        return asked[-1][1]

    monkeypatch.setattr(Disk, "ask", ask)
    monkeypatch.setattr(stock, "lost_artifact", lambda _repository, spec, _info: spec)
    three = {name: name for name in "abc"}
    topology = cast(Topology, SimpleNamespace(blocks=three, infos=three))
    assert Stock(BlockRepository(tmp_path), ProfileShelf(tmp_path)).lost(topology) == [*three]
    assert asked == [(disk.GLANCE_S, ["a"]), (disk.PATIENCE_S, ["b", "c"])]


@pytest.mark.parametrize(
    ("name", "complaint"),
    [(".", ""), ("none", "there is no folder "), ("x" * 300, "there is no folder ")],
)
def test_up_says_where_there_is_no_repository(
    name: str,
    complaint: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Or one that cannot be looked at: a name too long, a folder above that is closed to us."""
    monkeypatch.setattr(disk, "GLANCE_S", 30.0)
    look_at(tmp_path / name)
    told = capsys.readouterr().err
    assert complaint in told and bool(told) == bool(complaint)


def test_up_says_that_anybody_may_put_code_there(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(disk, "GLANCE_S", 30.0)
    tmp_path.chmod(0o777)
    look_at(tmp_path)
    told = capsys.readouterr().err
    assert f"anybody can write to '{tmp_path}'" in told and "chmod o-w" in told


def test_up_says_that_it_does_not_answer(
    silence: Silence, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os.path, "isdir", silence)
    monkeypatch.setattr(disk, "GLANCE_S", 0.0)
    look_at(Path("/mnt/blocks"))
    assert "TIMEOUT: the repository /mnt/blocks has not answered for" in capsys.readouterr().err


def test_what_is_stored_is_told_with_what_cannot_be_read_of_it(tmp_path: Path) -> None:
    repository = echo_repository(tmp_path)
    (tmp_path / "b" / "manifest.json").write_text("torn")
    it = Stock(repository, ProfileShelf(tmp_path))
    a, b, *_ = it.blocks()
    assert (a["name"], a["versions"], "error" in a) == ("a", ["1"], False)
    assert (b["name"], b["error"]["code"]) == ("b", "CORRUPT_MANIFEST")
    pairs = ("a", a["digest"]), ("a", "0" * 64), ("b", "0" * 64)
    assert it.gone(pairs) == set(pairs[1:])
    info = repository.info("a")
    assert it.profile(BlockSpec(name="a"), info)["fresh"] is False


def test_what_is_stored_is_deployed_when_it_answers(
    silence: Silence, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The start does not wait for it."""
    monkeypatch.setattr(disk, "PATIENCE_S", 0.0)
    monkeypatch.setattr(Disk.is_there, "__defaults__", (0.0,))
    monkeypatch.setattr(os.path, "isdir", silence)
    told: list[tuple[str, str]] = []
    deployed = threading.Event()

    class Brain:
        """Knows of an epoch that could not be deployed, and then deploys it."""

        realm = SimpleNamespace(topology=None, unrestored=object())
        runner = SimpleNamespace(in_the_way=None)
        stopping = False

        def restore_failed(self, epoch: int, error: SystemError_, now_ns: int) -> None:
            told.append((error.code, str(is_away(error))))

        def restore(self, *_: object) -> None:
            deployed.set()

    echo_repository(tmp_path)
    manager = SimpleNamespace(
        settings=SimpleNamespace(repository=tmp_path, cores=(0,)),
        brain=Brain(),
        call=lambda act: act(),
    )
    body = {"blocks": ["a"], "tasks": {"t": ["a"]}}
    state = SimpleNamespace(epoch=3, topology=body, posted=body, digests={})
    it = Restoration(cast(Manager, manager), cast(StoredState, state))
    it.begin()
    assert told == [("TIMEOUT", "True")] and not deployed.is_set()
    silence.over.set()
    assert deployed.wait(60)
    it.close()
    assert told == [("TIMEOUT", "True")]


@pytest.mark.parametrize("dry_run", [False, True])
def test_an_update_is_refused_before_it_hangs(
    silence: Silence, dry_run: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os.path, "isdir", silence)
    monkeypatch.setattr(Disk.is_there, "__defaults__", (0.0,))
    commands = Commands(cast(Manager, None), BlockRepository(tmp_path))
    timed_out(lambda: commands.preview({}) if dry_run else commands.apply({}))
    assert silence.asked == 1


def test_a_template_rehearses_with_a_repository_that_answers_only(
    silence: Silence, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It would wait for it, and nobody could be started: not the Dispatcher either."""
    repository, asked = BlockRepository(tmp_path), Disk(tmp_path)
    assert rehearsals_of(repository, asked) == [(REHEARSAL, {"repository": str(tmp_path)})]
    monkeypatch.setattr(system, "GLANCE_S", 0.0)
    monkeypatch.setattr(repository, "names", silence)
    assert rehearsals_of(repository, asked) == []
