"""The SDK and the CLI against a whole real system with echo blocks."""

from __future__ import annotations

import asyncio
import json
import os
import signal
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from control_rig import save_echoes
from system_rig import served

from blockflow.cli.main import main
from blockflow.client import AsyncClient, Client, Collector, TaskGenerator
from blockflow.control.system import System
from blockflow.core.errors import BlockFlowError
from blockflow.launch.base import Launcher

TOPOLOGY = {
    "blocks": ["trunk", "head", "slow", "picky"],
    "tasks": {
        "a": ["trunk", "head"],
        "slow": ["trunk", "slow"],
        "picky": ["trunk", "picky"],
        "quick": {"path": ["trunk", "slow"], "deadline_ms": 200},
    },
}
X = np.arange(8, dtype=np.float32).reshape(2, 4)


@pytest.fixture(scope="module")
def system(tmp_path_factory: pytest.TempPathFactory, launcher: Launcher) -> Iterator[System]:
    folder = tmp_path_factory.mktemp("system")
    blocks = {"slow": {"delay_ms": 400}, "picky": {"fail_on_value": 99.0}}
    save_echoes(folder / "blocks", "trunk", "head", **blocks)
    with served(folder, TOPOLOGY, launcher) as running:
        yield running


@pytest.fixture
def client(system: System) -> Iterator[Client]:
    with Client(system.client_endpoint) as made:
        made.wait_ready(["a", "slow", "picky"])
        yield made


def test_a_result_and_its_accounts(client: Client) -> None:
    result = client.infer("a", X)
    assert np.array_equal(result.value, X)
    assert [t.block for t in result.timings] == ["trunk", "head"]
    parts = result.ingress_ms + result.egress_ms + sum(t.total_ms for t in result.timings)
    assert parts == pytest.approx(result.total_ms, rel=0.01)
    assert result.rtt_ms >= result.total_ms
    assert result.epoch == 1
    assert torch.equal(client.infer("a", torch.from_numpy(X)).value, torch.from_numpy(X))


def test_several_tasks_share_their_trunk(client: Client) -> None:
    results = client.infer(["a", "picky"], X)
    assert list(results) == ["a", "picky"]
    nodes = [{t.node for t in r.timings if t.block == "trunk"} for r in results.values()]
    assert nodes[0] == nodes[1]
    collector = Collector()
    TaskGenerator(client, ["a", "picky"], [X], count=5, collector=collector).run()
    assert {b.block: b.count for b in collector.summary().blocks} == dict.fromkeys(
        ("trunk", "head", "picky"), 5
    )


def test_errors_of_one_task_leave_the_other(client: Client) -> None:
    bad = np.full((1, 4), 99.0, np.float32)
    mixed = client.infer(["a", "picky"], bad, errors="return")
    assert np.array_equal(mixed["a"].value, bad)
    assert mixed["picky"].code == "BLOCK_FAILED"


def test_the_topologys_own_deadline_holds(client: Client) -> None:
    with pytest.raises(BlockFlowError, match="DEADLINE_EXCEEDED"):
        client.infer("quick", X)


async def test_async(system: System) -> None:
    async with AsyncClient(system.client_endpoints[1]) as client:  # over ipc
        assert "a" in await client.tasks()
        results = await asyncio.gather(*(client.infer("a", X) for _ in range(20)))
        assert all(np.array_equal(r.value, X) for r in results)


def test_commands(system: System, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    url = ["--url", system.rest_url]
    address = ["--address", system.client_endpoint]
    assert main(["status", *url]) == 0
    assert "trunk" in capsys.readouterr().out
    assert main(["infer", "a", "--random", "--rows", "2", "--json", *address]) == 0
    assert json.loads(capsys.readouterr().out)["results"]["a"]["dims"] == [2, 4]
    assert main(["ping", "--json", *url]) == 0
    assert json.loads(capsys.readouterr().out)["ok"] is True
    assert main(["drain", "picky", *url]) == 0
    assert main(["status", *url]) == 4
    assert main(["infer", "picky", "--random", *address]) == 4
    assert main(["undrain", "picky", *url]) == 0
    assert main(["status", *url]) == 0
    assert main(["infer", "picky", "--random", *address]) == 0
    (tmp_path / "bad.json").write_text(json.dumps({**TOPOLOGY, "x": 1}))
    assert main(["apply", str(tmp_path / "bad.json"), *url]) == 2
    assert "$.x" in capsys.readouterr().err
    (tmp_path / "same.json").write_text(json.dumps(TOPOLOGY))
    assert main(["apply", str(tmp_path / "same.json"), *url]) == 0
    assert main(["topology", *url]) == 0
    capsys.readouterr()
    for command in (["tasks"], ["top"], ["kpis"], ["monitor", "on"], ["restart", "head"]):
        assert main([*command, "--json", *url]) == 0
        json.loads(capsys.readouterr().out)


def test_a_killed_dispatcher_is_connection_lost_and_then_another_one(
    system: System, client: Client
) -> None:
    pid = system.status()["dispatcher"]["pid"]
    in_flight = client.submit("slow", X)
    client.infer("a", X)  # the connection keeps the order: the former request has arrived
    os.kill(pid, signal.SIGKILL)
    with pytest.raises(BlockFlowError) as info:
        in_flight.result(15)
    assert info.value.code == "CONNECTION_LOST"
    client.wait_ready(["a"], timeout_s=30)
    assert np.array_equal(client.infer("a", X).value, X)
