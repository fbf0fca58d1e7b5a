"""A system on the IPv6 loopback, as it announces itself and as a user asks it."""

from __future__ import annotations

import socket
from pathlib import Path

import numpy as np
import pytest
from control_rig import echo_repository

from blockflow.cli.main import main as cli
from blockflow.client import Client
from blockflow.control.settings import ControlSettings
from blockflow.control.system import System
from blockflow.launch.base import Launcher

X = np.arange(8, dtype=np.float32).reshape(2, 4)


@pytest.fixture(autouse=True, scope="module")
def loopback() -> None:
    try:
        socket.create_server(("::1", 0), family=socket.AF_INET6).close()
    except OSError as e:
        pytest.skip(f"this machine has no IPv6 loopback: {e}")


def test_clients_and_commands_reach_it(
    tmp_path: Path,
    launcher: Launcher,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    echo_repository(tmp_path / "blocks")
    np.save(tmp_path / "x.npy", X)
    settings = ControlSettings(
        repository=tmp_path / "blocks",
        state_dir=tmp_path / "state",
        host="::1",
        client_host="[::1]",
        rest_port=0,
        client_port=0,
    )
    with System(settings, launcher=launcher) as system:
        system.apply({"blocks": ["a", "b"], "tasks": {"t": ["a", "b"]}})
        ready = system.announcement()
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
