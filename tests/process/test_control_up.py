"""``blockflow up`` as a user starts it: announcement, ends, and nothing left behind."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import time
from pathlib import Path

import httpx
import pytest
from control_rig import echo_repository
from up_rig import command, family, gone, up

from blockflow.cli.main import main as cli


@pytest.fixture
def root(tmp_path: Path) -> Path:
    echo_repository(tmp_path / "blocks")
    topology = {"blocks": ["a", "b"], "tasks": {"t": ["a", "b"]}}
    (tmp_path / "topology.json").write_text(json.dumps(topology))
    return tmp_path


@pytest.mark.parametrize("how", ["SIGTERM", "SIGINT", "SIGHUP", "stop", "SIGKILL"])
def test_it_serves_and_ends_without_a_trace(root: Path, how: str) -> None:
    with up(root, "--topology", str(root / "topology.json")) as (process, ready):
        assert ready["event"] == "ready" and ready["pid"] == process.pid and ready["epoch"] == 1
        assert [a.split(":")[0] for a in ready["clients"]] == ["tcp", "ipc"]
        run_dir = Path(ready["run_dir"])
        assert run_dir.stat().st_mode & 0o077 == 0
        assert httpx.get(ready["rest"] + "/v1/health/ready").status_code == 200
        children = family(process.pid)
        assert len(children) == 5  # manager, template, dispatcher, two workers
        if how == "stop":
            assert cli(["stop", "--yes", "--url", ready["rest"]]) == 0
            assert process.poll() is not None, "stop returned before the end"
        else:
            process.send_signal(getattr(signal, how))
        status = process.wait(30)
        assert status == (-signal.SIGKILL if how == "SIGKILL" else 0), (root / "err").read_text()
        assert gone(children, run_dir)


def test_a_closed_terminal_does_not_end_what_was_started_with_nohup(root: Path) -> None:
    with up(root, before=["nohup"]) as (process, ready):
        children = family(process.pid)
        process.send_signal(signal.SIGHUP)
        children[0].send_signal(signal.SIGHUP)
        assert cli(["ping", "--url", ready["rest"]]) == 0
        process.terminate()
        assert process.wait(30) == 0, (root / "err").read_text()
        assert "the control plane ended" not in (root / "err").read_text()
        assert gone(children, Path(ready["run_dir"]))


def test_state_of_a_killed_system_comes_back(root: Path) -> None:
    with up(root, "--topology", str(root / "topology.json")) as (process, ready):
        children = family(process.pid)
        process.kill()
        process.wait(30)
        assert gone(children, Path(ready["run_dir"]))
    with up(root) as (process, ready):
        assert ready["epoch"] == 1
        assert httpx.get(ready["rest"] + "/v1/health/ready").status_code == 200
        children = family(process.pid)
        process.terminate()
        assert process.wait(30) == 0
        assert gone(children, Path(ready["run_dir"]))


def test_a_signal_during_the_start_is_heeded(root: Path) -> None:
    process = subprocess.Popen(
        command(root), stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    )
    try:
        lock = root / "state" / "lock"
        end = time.monotonic() + 30
        while not lock.exists() and time.monotonic() < end:
            time.sleep(0.01)
        process.terminate()
        output, _ = process.communicate(timeout=60)
        assert process.returncode == 0
        assert output == "" or json.loads(output)["event"] == "ready"
    finally:
        process.kill()
        process.wait()


@pytest.mark.parametrize(
    ("arguments", "code"),
    [
        (["--host", "0.0.0.0"], "INVALID_REQUEST"),
        (["--topology", "/nonexistent.json"], "INVALID_REQUEST"),
    ],
)
def test_what_cannot_work_is_refused_at_once(root: Path, arguments: list[str], code: str) -> None:
    done = subprocess.run(
        command(root, *arguments), capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 2
    assert json.loads(done.stdout)["error"]["code"] == code
    assert code in done.stderr


def test_a_topology_that_fails_leaves_the_system_up(root: Path) -> None:
    bad = root / "bad.json"
    bad.write_text('{"blocks": ["nope"], "tasks": {}}')
    with up(root, "--topology", str(bad)) as (process, ready):
        assert ready["epoch"] == 0
        assert "UNKNOWN_BLOCK" in (root / "err").read_text()
        os.kill(process.pid, signal.SIGTERM)
        assert process.wait(30) == 0


@pytest.mark.parametrize("output", ["closed", "unread", "full"])
def test_it_serves_on_when_its_output_takes_nothing(root: Path, output: str) -> None:
    words = [w for w in command(root) if w != "--json"]
    with socket.create_server(("127.0.0.1", 0)) as free:
        url = f"http://127.0.0.1:{free.getsockname()[1]}"
    words[words.index("--port") + 1] = url.rpartition(":")[2]
    if output == "closed":
        words = ["bash", "-c", 'exec "$@" >&-', "bash", *words]
    read, write = os.pipe()
    os.close(read)
    full = os.open("/dev/full", os.O_WRONLY)
    try:
        process = subprocess.Popen(
            words, stdout=full if output == "full" else write, stderr=subprocess.PIPE, text=True
        )
    finally:
        os.close(write)
        os.close(full)
    try:
        assert process.stderr is not None
        if output != "closed":
            assert any("serves on" in line for line in process.stderr)
        end = time.monotonic() + 60
        while cli(["ping", "--url", url]) != 0 and time.monotonic() < end:
            time.sleep(0.1)
        assert cli(["stop", "--yes", "--url", url]) == 0
        assert process.wait(30) == 0
    finally:
        process.kill()
        process.communicate()
