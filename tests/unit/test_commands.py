"""What many ask of the control plane at once, and who asks goes on with what he gave."""

from __future__ import annotations

import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest

from blockflow.control.commands import MAX_HZ, Commands
from blockflow.control.manager import Manager
from blockflow.control.stored import PastEpoch
from blockflow.control.update import Kind
from blockflow.core.errors import RequestError, SystemError_, TopologyError
from blockflow.launch.process_kpi import ProcessSampler
from blockflow.repository.repository import BlockRepository


def test_who_asks_while_another_is_answered_takes_no_sample_of_his_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The processor's use since a moment ago is no figure: hundreds of percent, or none."""
    manager = SimpleNamespace(
        call=lambda look: {}, settings=SimpleNamespace(), brain=None, kpis=None
    )
    commands = Commands(cast(Manager, manager), BlockRepository(tmp_path))
    taken: list[int] = []
    second = threading.Thread(target=lambda: told.append(commands.kpis()))
    told: list[dict[str, Any]] = []

    def sample(_self: ProcessSampler, now_ns: int) -> Any:
        taken.append(now_ns)
        if len(taken) == 1:
            second.start()
            second.join(0.1)  # it waits
        return SimpleNamespace(to_dict=lambda: {"sample": len(taken)})

    monkeypatch.setattr(ProcessSampler, "sample", sample)
    told.append(commands.kpis())
    second.join(10)
    assert len(taken) == 1
    assert [t["control"]["process"] for t in told] == [{"sample": 1}] * 2


def test_a_file_of_figures_is_not_replaced_by_an_empty_one(tmp_path: Path) -> None:
    lines: list[str] = ['{"worker": "w#0"}']
    manager = SimpleNamespace(
        call=lambda look: look(),
        settings=SimpleNamespace(state_dir=tmp_path),
        brain=None,
        kpis=SimpleNamespace(lines=lambda: lines),
    )
    commands = Commands(cast(Manager, manager), BlockRepository(tmp_path / "blocks"))
    told = commands.store_kpis("run1.jsonl")
    lines.clear()
    with pytest.raises(RequestError, match="none have been taken yet"):
        commands.store_kpis("run1.jsonl")
    assert Path(told["path"]).read_text() == '{"worker": "w#0"}\n'


@pytest.fixture
def applied(tmp_path: Path) -> tuple[Commands, list[Any]]:
    """Commands, and the bodies that were accepted."""
    posted: list[Any] = []
    update = SimpleNamespace(update_id=1, final=True, error=None, to_dict=lambda now: {})

    def apply(_topology: Any, body: Any, *_: Any) -> Any:
        posted.append(body)
        return update

    brain = SimpleNamespace(apply=apply, realm=SimpleNamespace(epoch=1))
    manager = SimpleNamespace(brain=brain, call=lambda look: look())
    commands = Commands(cast(Manager, manager), BlockRepository(tmp_path))
    commands._acceptance = cast(Any, SimpleNamespace(parse=lambda body, problems=(): None))
    return commands, posted


def test_what_was_posted_is_remembered_as_it_was(applied: tuple[Commands, list[Any]]) -> None:
    """An experiment changes one number and applies the same object again: a rollback would bring
    that number, too."""
    commands, posted = applied
    task: dict[str, Any] = {"path": ["a"]}
    body = {"blocks": ["a"], "tasks": {"t": task}}
    for weight in (1, 5):
        task["weight"] = weight
        commands.apply(body, wait_s=0)
    assert [p["tasks"]["t"]["weight"] for p in posted] == [1, 5]


def test_what_is_told_of_it_is_the_askers_own(tmp_path: Path) -> None:
    """The next experiment is made of what is in force: that is stored, and comes back."""
    posted: dict[str, Any] = {"blocks": ["a"], "tasks": {"t": ["a"]}}
    past = PastEpoch(1, "system-update", "", posted, {"a": "0" * 64})
    views = SimpleNamespace(topology=lambda: {"topology": {}, "posted": posted})
    manager = SimpleNamespace(
        brain=SimpleNamespace(realm=SimpleNamespace(topology=None)),
        store=SimpleNamespace(state=SimpleNamespace(epoch=1, history=(past,), posted=posted)),
        views=lambda: views,
        call=lambda look: look(),
    )
    commands = Commands(cast(Manager, manager), BlockRepository(tmp_path))
    for told in (commands.topology(), commands.history()[0]):
        told["posted"]["tasks"]["t"].append("b")
    assert posted["tasks"] == {"t": ["a"]}
    assert commands.history()[0]["missing"] is None, "an empty repository is away"


def test_what_json_has_not_is_refused_before_anything_begins(
    applied: tuple[Commands, list[Any]],
) -> None:
    """It could not be stored, and by then nothing can be refused: the update would never end."""
    commands, posted = applied
    body = {"blocks": ["a"], "tasks": {"t": {"path": ["a"], "weight": np.float32(2)}}}
    for ask in (commands.preview, commands.apply):
        with pytest.raises(TopologyError, match="1 problem") as e:
            ask(body)
        assert "float32" in e.value.problems[0].message
    assert posted == []


class World:
    """A Manager that notes what it is asked to do; epoch 5 is in force."""

    def __init__(self, tmp_path: Path) -> None:
        past = [PastEpoch(n, "system-update", "", {"n": n}, {"a": f"d{n}"}) for n in (2, 3, 5)]
        self.done: list[tuple[Any, ...]] = []
        self.update = SimpleNamespace(
            update_id=8, final=False, error=None, to_dict=lambda now: {"id": 8}
        )
        self.state = SimpleNamespace(epoch=5, history=tuple(past), posted={"n": 5})
        self.brain = SimpleNamespace(
            realm=SimpleNamespace(epoch=5, topology=None, hosts=lambda block: [Named("a#0")]),
            apply=self._apply,
            preview=lambda topology, if_epoch: self.done.append(("preview", topology, if_epoch)),
            restart=lambda block, now: self._did("restart", block),
            close=lambda block, kind, now: self._did(str(kind), block),
            monitor=lambda hz: self.done.append(("monitor", hz)),
        )
        manager = SimpleNamespace(
            brain=self.brain,
            store=SimpleNamespace(state=self.state),
            number=7,
            call=lambda act: act(),
            views=lambda: SimpleNamespace(worker=lambda name: None),
            wait_update=lambda number, wait_s: self.done.append(("waited", number, wait_s)),
            ping=lambda names: [{"worker": n} for n in ("b#0",) if names is None or n in names],
        )
        self.commands = Commands(cast(Manager, manager), BlockRepository(tmp_path))
        parse = SimpleNamespace(parse=lambda body, problems=(), digests=None: (body, digests))
        self.commands._acceptance = cast(Any, parse)

    def _apply(self, topology: Any, body: Any, now: int, kind: Kind, if_epoch: int | None) -> Any:
        return self._did("apply", topology, body, kind, if_epoch)

    def _did(self, *what: Any) -> Any:
        self.done.append(what)
        return self.update


class Named:
    def __init__(self, name: str) -> None:
        self.name = name


@pytest.fixture
def w(tmp_path: Path) -> World:
    return World(tmp_path)


def test_a_rollback_is_to_the_epoch_before_or_the_one_that_is_named(w: World) -> None:
    for to, past in ((None, w.state.history[1]), (2, w.state.history[0]), (5, w.state.history[2])):
        told = w.commands.rollback(to, wait_s=0.0, if_epoch=5)
        assert told == {"epoch": 5, "update": {"id": 8}}
        topology = past.posted, past.digests
        assert w.done.pop() == ("apply", topology, past.posted, Kind.ROLLBACK, 5)
        w.commands.rollback(to, dry_run=True)
        assert w.done.pop() == ("preview", topology, None) and not w.done
    with pytest.raises(SystemError_, match=r"epoch 9 is not remembered.*epochs: 2, 3, 5"):
        w.commands.rollback(9)
    w.state.history = w.state.history[2:]
    with pytest.raises(SystemError_, match=r"no earlier epoch is remembered.*epochs: 5"):
        w.commands.rollback()


def test_what_is_remembered_is_told_with_what_is_not_stored_any_more(
    w: World, tmp_path: Path
) -> None:
    (tmp_path / "another").mkdir()
    (tmp_path / "another" / "manifest.json").touch()  # an empty repository is away
    history = w.commands.history()
    assert [(e["epoch"], e["posted"], e["missing"]) for e in history] == [
        (n, {"n": n}, ["a"]) for n in (5, 3, 2)
    ]
    assert [e["in_force"] for e in history] == [False] * 3
    w.brain.realm.topology = object()
    assert [e["in_force"] for e in w.commands.history()] == [True, False, False]


def test_an_error_is_told_by_who_waited_for_the_end_or_where_it_was_over_at_once(w: World) -> None:
    w.update.error = TopologyError("UPDATE_FAILED", "odd")
    assert w.commands.operate(Kind.DRAIN, "a", wait_s=0.0)["epoch"] == 5
    assert w.done == [("drain", "a")]
    with pytest.raises(TopologyError, match="odd"):
        w.commands.operate(Kind.RESTART, "a", wait_s=2.5)
    assert w.done[1:] == [("restart", "a"), ("waited", 8, 2.5)]
    w.update.final = True
    with pytest.raises(TopologyError, match="odd"):
        w.commands.operate(Kind.STOP, "a", wait_s=0.0)


def test_what_is_not_there_is_not_found(w: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(w.commands, "updates", lambda: [{"id": 8}])
    assert w.commands.update(8) == {"id": 8}
    for number, told in (
        (1, "no update 1 any more"),
        (6, "no update 6 any more"),
        (7, "no update 7 --"),
        (0, "no update 0 --"),
    ):
        with pytest.raises(SystemError_, match=f"NOT_FOUND: {told}"):
            w.commands.update(number)
    with pytest.raises(SystemError_, match="NOT_FOUND: no worker 'c#0'"):
        w.commands.worker("c#0")


def test_figures_are_taken_as_often_as_may_be(w: World) -> None:
    for hz in (0, 0.5, MAX_HZ):
        assert w.commands.monitor(hz) == {"on": hz > 0, "hz": hz}
        assert w.done.pop() == ("monitor", float(hz))
    for odd in (-0.1, MAX_HZ + 1, float("nan")):
        with pytest.raises(RequestError, match="is outside 0"):
            w.commands.monitor(odd)


def test_a_process_that_is_down_answers_no_ping(w: World) -> None:
    assert w.commands.ping() == [{"worker": "b#0"}]
    assert w.commands.ping("a") == [{"worker": "a#0", "incarnation": None, "ok": False}]
