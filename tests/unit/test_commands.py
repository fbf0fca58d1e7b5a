"""What many ask of the control plane at once, and who asks goes on with what he gave."""

from __future__ import annotations

import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest

from blockflow.control.commands import Commands
from blockflow.control.manager import Manager
from blockflow.control.stored import PastEpoch
from blockflow.core.errors import RequestError, TopologyError
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
