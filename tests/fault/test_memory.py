"""Processes that run out of memory: typed errors, or a death that costs nobody else anything.

By a limit on a process's data (the allocator is refused), and by a memory cgroup (the kernel kills
whoever has most). A request for so many MiB is one whose first element says so.
"""

from __future__ import annotations

import re
import resource
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from io import BytesIO
from pathlib import Path
from typing import Any

import cgroup_rig
import numpy as np
import psutil
import pytest
import torch
from control_rig import SPEC, echo_repository

from blockflow.client import Client
from blockflow.control.system import System
from blockflow.control.update import Kind
from blockflow.core.errors import BlockFlowError
from blockflow.core.model import Contract, TensorSpec
from blockflow.launch import cgroup as groups
from blockflow.launch.base import Launcher
from blockflow.repository.echo import save_echo
from blockflow.repository.manifest import new_manifest
from blockflow.repository.repository import BlockRepository
from tests.system_rig import served, worker

MIB = 1 << 20
LONG_S = 60.0
SMALL, LARGE = 1, 400
"""MiB of a request that there is room for under the limits below, and of one that there is not."""

ROOM = 160 * MIB
BODY = {
    "blocks": ["greedy", "a", "wide"],
    "tasks": {"g": ["greedy"], "t": ["a"], "w": ["wide"]},
}


class Greedy(torch.nn.Module):
    """Gives back its input, and needs as many MiB for it as its first element says."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        need = torch.ones(int(x[0, 0].item()) * 262_144, dtype=torch.float32)
        return x + (need.mean() - 1)


def save_greedy(repository: BlockRepository) -> None:
    artifact = BytesIO()
    torch.jit.save(torch.jit.script(Greedy()), artifact)
    manifest = new_manifest("greedy", "torchscript-scripted", Contract(SPEC, SPEC))
    repository.save(manifest, artifact.getvalue())


@pytest.fixture(scope="module")
def system(tmp_path_factory: pytest.TempPathFactory, launcher: Launcher) -> Iterator[System]:
    root = tmp_path_factory.mktemp("memory")
    repository = echo_repository(root / "blocks")
    save_greedy(repository)
    save_echo(repository, "wide", TensorSpec("float32", ("rows", MIB)))
    with served(root, BODY, launcher) as running:
        yield running


@pytest.fixture
def client(system: System) -> Iterator[Client]:
    """Tensors in messages; at the end every request has had one outcome."""
    with Client(system.client_endpoint, connect_timeout_s=LONG_S, shared_memory="off") as made:
        yield made
        counters = made.counters()
        assert counters.submitted == counters.answered + counters.failed
        assert counters.late_replies == 0


def asks(mib: float) -> np.ndarray[Any, Any]:
    return np.full((1, 4), mib, np.float32)


def outcome(client: Client, task: str, x: np.ndarray[Any, Any]) -> str:
    """``OK`` with the right value, else the code."""
    try:
        assert np.array_equal(client.infer(task, x, deadline_s=LONG_S).value, x)
    except BlockFlowError as e:
        return e.code
    return "OK"


def fresh(system: System) -> dict[str, Any]:
    """A worker of the greedy block whose allocator has nothing in store."""
    assert system.commands.operate(Kind.RESTART, "greedy")["update"]["state"] == "done"
    (made,) = [w for w in system.commands.workers() if w["name"].startswith("greedy#")]
    return worker(system, made["name"])


def serves(system: System, client: Client) -> None:
    """Every worker is up again, and every task is answered."""

    def settled() -> bool | None:
        realm = system.manager.brain.realm
        return not realm.reasons_not_ready() or None

    assert system.manager.wait(settled, LONG_S)
    assert [outcome(client, t, asks(SMALL)) for t in ("g", "t")] == ["OK", "OK"]


@contextmanager
def limited(pid: int, room: int) -> Iterator[None]:
    """The process's allocator gets ``room`` bytes more, and no more than that."""
    found = re.search(r"VmData:\s+(\d+) kB", Path(f"/proc/{pid}/status").read_text())
    assert found is not None
    before = resource.prlimit(pid, resource.RLIMIT_DATA)
    now = int(found[1]) * 1024
    resource.prlimit(pid, resource.RLIMIT_DATA, (now + room, before[1]))
    try:
        yield
    finally:
        with suppress(ProcessLookupError):
            resource.prlimit(pid, resource.RLIMIT_DATA, before)


def test_a_forward_that_gets_no_memory_is_an_error(system: System, client: Client) -> None:
    """Its worker lives, and computes what there is room for."""
    old = fresh(system)
    with limited(old["pid"], ROOM):
        with pytest.raises(BlockFlowError) as e:
            client.infer("g", asks(LARGE), deadline_s=LONG_S)
        assert e.value.code == "BLOCK_FAILED"
        assert "memory" in e.value.message
        assert outcome(client, "g", asks(SMALL)) == "OK"
        assert outcome(client, "t", asks(SMALL)) == "OK"
    assert outcome(client, "g", asks(LARGE)) == "OK"  # it was the limit
    assert worker(system, old["name"])["pid"] == old["pid"]


def test_a_worker_without_any_memory_left(system: System, client: Client) -> None:
    """Whatever it was doing when it got none, it answers, or dies and is replaced."""
    old = fresh(system)
    with limited(old["pid"], 0):
        pending = [client.submit("g", asks(32 + n), deadline_s=LONG_S) for n in range(20)]
        for n, future in enumerate(pending):
            answer = future.exception(LONG_S) or future.result().value
            if isinstance(answer, np.ndarray):
                assert np.array_equal(answer, asks(32 + n))
            else:
                assert isinstance(answer, BlockFlowError), answer
                assert answer.code in ("BLOCK_FAILED", "NO_SPACE", "WORKER_LOST", "POISON")
        assert outcome(client, "t", asks(SMALL)) == "OK"
    serves(system, client)


def test_a_dispatcher_that_gets_no_memory(system: System, client: Client) -> None:
    """A message that it has no room for ends its sender's connection, and nobody else's."""
    old = worker(system, "dispatcher")
    large = np.ones((28, MIB), np.float32)  # more than the allocator keeps in store
    with (
        limited(old["pid"], 16 * MIB),
        Client(system.client_endpoint, connect_timeout_s=LONG_S, shared_memory="off") as other,
    ):
        assert outcome(other, "w", large) == "CONNECTION_LOST"
        assert outcome(client, "t", asks(SMALL)) == "OK"
    assert outcome(client, "w", large) == "OK"
    assert worker(system, "dispatcher")["pid"] == old["pid"]


# --- the kernel kills ----------------------------------------------------------------------------


@pytest.fixture
def cgroup() -> Iterator[Path]:
    """A memory cgroup with little room."""
    with cgroup_rig.cgroup("memory", "memory.limit_in_bytes", ROOM) as made:
        yield made


def spacious(template: int) -> int:
    """MiB that this template and a worker have room in, however large its libraries are."""
    return psutil.Process(template).memory_info().rss // MIB + 128


def kills(cgroup: Path) -> int:
    found = re.search(r"oom_kill (\d+)", (cgroup / "memory.oom_control").read_text())
    return int(found[1]) if found else 0


def test_a_worker_that_the_kernel_kills_is_replaced(
    system: System, client: Client, cgroup: Path
) -> None:
    """Its successor has room: the request gets its result."""
    old = fresh(system)
    (cgroup / "cgroup.procs").write_text(str(old["pid"]))
    assert outcome(client, "g", asks(LARGE)) == "OK"
    serves(system, client)
    new = worker(system, old["name"])
    assert new["pid"] != old["pid"]
    assert new["crash"]["cause"] == "killed by SIGKILL"
    (work,) = new["crash"]["work"]
    assert (work["block"], work["requests"]) == ("greedy", 1)


def test_a_request_that_no_worker_has_memory_for_is_poison(
    system: System, client: Client, cgroup: Path
) -> None:
    """Its worker and that one's successor are killed for it, and no third one. Version 1 counts
    kills in the group itself, which is not the Manager's here: it does not learn what for."""
    template = system.status()["control"]["template"]["pid"]
    limit = spacious(template)
    (cgroup / "memory.limit_in_bytes").write_text(str(limit * MIB))
    old = fresh(system)
    for pid in (old["pid"], template):  # what is forked from it is in the cgroup as well
        (cgroup / "cgroup.procs").write_text(str(pid))
    mates = [client.submit("g", asks(SMALL), deadline_s=LONG_S) for _ in range(4)]
    assert outcome(client, "g", asks(1.5 * limit)) == "POISON"
    for future in mates:
        assert np.array_equal(future.result(LONG_S).value, asks(SMALL))
    serves(system, client)
    assert worker(system, old["name"])["restarts"] == old["restarts"] + 2
    assert system.status()["control"]["template"]["pid"] == template


def test_a_request_that_is_too_much_for_the_managers_own_limit_is_not_blamed(
    system: System, client: Client, cgroup: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As in a container: cause and error name the memory, and the block comes back.

    The Manager, which lives in pytest's own process, looks at the group but is not in it: while a
    process that was killed gives back its gigabyte, the kernel no longer counts it among those that
    it may kill, and whoever asks for a page in that moment is killed as well.
    """
    template = system.status()["control"]["template"]["pid"]
    limit = spacious(template)
    (cgroup / "memory.limit_in_bytes").write_text(str(limit * MIB))
    old = fresh(system)
    for pid in (old["pid"], template):
        (cgroup / "cgroup.procs").write_text(str(pid))
    monkeypatch.setattr(groups, "OWN", Path("/proc", str(template), "cgroup"))
    with pytest.raises(BlockFlowError) as e:
        client.infer("g", asks(1.5 * limit), deadline_s=LONG_S)
    assert (e.value.code, e.value.retryable) == ("WORKER_LOST", True)
    assert "memory" in e.value.message and "max_rows" in e.value.hint
    serves(system, client)
    assert kills(cgroup) == 2
    crash = worker(system, old["name"])["crash"]
    assert crash["cause"] == f"killed by SIGKILL: out of memory (limit {limit} MiB)"
    assert (crash["error"]["code"], crash["work"][0]["block"]) == ("NO_SPACE", "greedy")
    assert worker(system, old["name"])["restarts"] == old["restarts"] + 2
