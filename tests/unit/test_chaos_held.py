"""What a system still keeps after the last request: the judge of chaos sees it."""

from __future__ import annotations

from pathlib import Path
from typing import Any, cast

from blockflow.bench.chaos import held
from blockflow.core.errors import SystemError_
from blockflow.tensormq.arena import DEVICE_BIT


def worker(name: str, slots: int = 0, queue: int = 0) -> dict[str, Any]:
    stages = [{"block": "a", "kpi": {"queue": queue}}, {"block": "b", "kpi": {}}]
    return {"name": name, "incarnation": 7, "process": {"slots_used": slots}, "stages": stages}


class System:
    """One whose worker gives a slot back at every look."""

    def __init__(self, run_dir: Path, slots: int) -> None:
        self.run_dir = run_dir
        self.slots = slots
        self.commands = self

    def workers(self) -> list[dict[str, Any]]:
        self.slots -= 1
        if self.slots == 2:
            raise SystemError_("NOT_RUNNING", "a successor takes over")
        return [worker("a#0", max(0, self.slots))]

    def worker(self, name: str) -> dict[str, Any]:
        return {"name": name, "incarnation": 3}


def test_slots_credits_and_queues_are_told_of() -> None:
    idle = [{"name": "b#0", "process": None}, {"name": "dispatcher", "kpi": {"inflight": 0}}]
    assert held.held([worker("a#0"), *idle]) == []
    assert held.held([worker("a#0", slots=2, queue=1), {"name": "d", "kpi": {"inflight": 3}}]) == [
        "a#0 has 2 slots in use",
        "a#0 has 1 requests that wait for a",
        "d has 3 requests in flight",
    ]


def test_files_of_the_dead_are_told_of() -> None:
    names = ["arena-3", f"marks-{7 | DEVICE_BIT}", "work-8", "d8.sock", "lock", "arena-8"]
    assert held.strays(names, {3, 7}) == ["arena-8", "work-8"]


def test_what_is_given_back_in_time_is_no_finding(tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setattr(held, "_LOOK_S", 0.0)
    (tmp_path / "arena-7").touch()
    assert held.kept(cast(Any, System(tmp_path, slots=5)), 60.0) == []
    (tmp_path / "arena-5").touch()
    system = System(tmp_path, slots=3)
    assert held.kept(cast(Any, system), 0.0) == ["it could not be asked for what it still holds"]
    assert held.kept(cast(Any, system), 0.0) == [
        "a#0 has 1 slots in use",
        "a file of the dead: arena-5",
    ]
