"""A system on the IPv6 loopback, as a user starts and asks it."""

from __future__ import annotations

import json
import socket
from pathlib import Path

import numpy as np
import pytest
from control_rig import echo_repository
from up_rig import up

from blockflow.cli.main import main as cli
from blockflow.client import Client

X = np.arange(8, dtype=np.float32).reshape(2, 4)


@pytest.fixture(autouse=True, scope="module")
def loopback() -> None:
    try:
        socket.create_server(("::1", 0), family=socket.AF_INET6).close()
    except OSError as e:
        pytest.skip(f"this machine has no IPv6 loopback: {e}")


def test_clients_and_commands_reach_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    echo_repository(tmp_path / "blocks")
    (tmp_path / "t.json").write_text(json.dumps({"blocks": ["a", "b"], "tasks": {"t": ["a", "b"]}}))
    np.save(tmp_path / "x.npy", X)
    hosts = ("--host", "::1", "--client-host", "[::1]")
    with up(tmp_path, *hosts, "--topology", str(tmp_path / "t.json")) as (process, ready):
        address = ready["clients"][0]
        assert address.startswith("tcp://[::1]:") and ready["rest"].startswith("http://[::1]:")
        with Client(address) as client:
            result = client.infer("t", X)
        assert np.array_equal(result.value, X)
        assert result.upload.ms is not None  # one host, one clock
        monkeypatch.setenv("BLOCKFLOW_ADDRESS", address)
        monkeypatch.setenv("BLOCKFLOW_URL", ready["rest"])
        assert cli(["infer", "t", "--input", str(tmp_path / "x.npy")]) == 0
        assert cli(["status"]) == 0
        assert f"clients  {address}" in capsys.readouterr().out
        process.terminate()
        assert process.wait(30) == 0
