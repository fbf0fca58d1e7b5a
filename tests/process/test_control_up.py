"""``blockflow up`` as a user starts it: announcement, ends, and nothing left behind."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import plain_http
import psutil
import pytest
from control_rig import echo_repository
from up_rig import command, family, gone, refused, up, without_torch
from warm_rig import Warm

from blockflow.cli.main import main as cli


@pytest.fixture
def root(tmp_path: Path) -> Path:
    echo_repository(tmp_path / "blocks")
    topology = {"blocks": ["a", "b"], "tasks": {"t": ["a", "b"]}}
    (tmp_path / "topology.json").write_text(json.dumps(topology))
    return tmp_path


EMPTY = 3  # manager, template, dispatcher
SERVING = EMPTY + 2  # and two workers


def answers(rest: str, path: str) -> None:
    assert plain_http.get(rest + path).status_code == 200


def whole_family(pid: int, size: int) -> list[psutil.Process]:
    children = family(pid)
    assert len(children) == size
    return children


@contextmanager
def whose_output_takes_nothing(
    root: Path, output: str, look: str, env: Mapping[str, str]
) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """A system, and where its REST is: it cannot say so. It is there when the command ``look``
    finds it."""
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
            words,
            stdout=full if output == "full" else write,
            stderr=subprocess.PIPE,
            text=True,
            env=os.environ | env,
        )
    finally:
        os.close(write)
        os.close(full)
    try:
        assert process.stderr is not None
        if output != "closed":  # nor can it say that
            assert any("serves on" in line for line in process.stderr)
        end = time.monotonic() + 60
        while cli([look, "--url", url]) != 0 and time.monotonic() < end:
            time.sleep(0.1)
        yield process, url
    finally:
        process.kill()
        process.communicate()


def test_state_of_a_killed_system_comes_back(root: Path, warm: Warm) -> None:
    """It leaves no trace but that; nor does one that ends in order, though nobody has seen of it
    what it said. That one starts from nothing."""
    options = ("--topology", str(root / "topology.json"))
    with up(root, *options, start=warm.popen) as (process, ready):
        assert ready["event"] == "ready" and ready["pid"] == process.pid and ready["epoch"] == 1
        assert [a.split(":")[0] for a in ready["clients"]] == ["tcp", "ipc"]
        run_dir = Path(ready["run_dir"])
        assert run_dir.stat().st_mode & 0o077 == 0
        answers(ready["rest"], "/v1/health/ready")
        children = whole_family(process.pid, SERVING)
        process.kill()
        assert process.wait(30) == -signal.SIGKILL
        assert gone(children, run_dir)
    with whose_output_takes_nothing(root, "closed", "status", {}) as (process, url):
        answers(url, "/v1/health/ready")
        status = plain_http.get(url + "/v1/status").json()
        assert status["epoch"] == 1
        children = whole_family(process.pid, SERVING)
        process.send_signal(signal.SIGINT)
        assert process.wait(30) == 0
        assert gone(children, Path(status["run_dir"]))


@pytest.mark.parametrize(("output", "how"), [("unread", "SIGHUP"), ("full", "stop")])
def test_it_serves_and_ends_without_a_trace(root: Path, output: str, how: str) -> None:
    """Though its output takes nothing."""
    env = without_torch(root)
    with whose_output_takes_nothing(root, output, "ping", env) as (process, url):
        answers(url, "/v1/health/live")
        run_dir = Path(plain_http.get(url + "/v1/status").json()["run_dir"])
        children = whole_family(process.pid, EMPTY)
        if how == "stop":
            assert cli(["stop", "--yes", "--url", url]) == 0
            assert process.poll() is not None, "stop returned before the end"
        else:
            process.send_signal(getattr(signal, how))
        assert process.wait(30) == 0
        assert gone(children, run_dir)


def test_a_closed_terminal_does_not_end_what_was_started_with_nohup(root: Path) -> None:
    """Nor is it ended by a topology that fails."""
    bad = root / "bad.json"
    bad.write_text('{"blocks": ["nope"], "tasks": {}}')
    env = without_torch(root)
    with up(root, "--topology", str(bad), env=env, before=["nohup"]) as (process, ready):
        assert ready["epoch"] == 0
        assert "UNKNOWN_BLOCK" in (root / "err").read_text()
        children = family(process.pid)
        process.send_signal(signal.SIGHUP)
        children[0].send_signal(signal.SIGHUP)
        assert cli(["ping", "--url", ready["rest"]]) == 0
        process.terminate()
        assert process.wait(30) == 0, (root / "err").read_text()
        assert "the control plane ended" not in (root / "err").read_text()
        assert gone(children, Path(ready["run_dir"]))


def test_a_signal_during_the_start_is_heeded(root: Path) -> None:
    process = subprocess.Popen(
        command(root),
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        env=os.environ | without_torch(root),
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
    ("arguments", "code", "why"),
    [
        (["--host", "0.0.0.0"], "INVALID_REQUEST", "without a token and CURVE keys"),
        (["--topology", "/nonexistent.json"], "INVALID_REQUEST", "cannot be read"),
    ],
)
def test_what_cannot_work_is_refused_at_once(
    root: Path, warm: Warm, arguments: list[str], code: str, why: str
) -> None:
    process = warm.popen(
        command(root, *arguments), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    output, errors = refused(process)
    assert json.loads(output)["error"]["code"] == code
    assert code in errors and why in errors
    assert not (root / "state").exists()  # refused before anything was made
