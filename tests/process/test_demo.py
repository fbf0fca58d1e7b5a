"""The demo as a user runs it, in a small variant: real training, processes, requests, picture."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from blockflow.bench.demo.blocks import FULL, INPUT, SHARED
from blockflow.repository.echo import save_echo
from blockflow.repository.repository import BlockRepository
from tests.warm_rig import Warm

ROOT = Path(__file__).resolve().parents[2]
pytestmark = pytest.mark.timeout(300)

SMALL = ["--images", "4", "--requests", "2"]
WAIT_S = 120
RUN_S = 280
"""For the whole run, beside whatever else the machine does."""


def command(*args: str) -> list[str]:
    return [sys.executable, "-m", "blockflow", *args]


def environment(**more: str) -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": str(ROOT), **more}


def run(
    *args: str, start: Callable[..., subprocess.Popen[Any]] = subprocess.Popen, **more: str
) -> subprocess.CompletedProcess[str]:
    process = start(
        command(*args),
        cwd=ROOT,
        env=environment(**more),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    with process:
        try:
            output, errors = process.communicate(timeout=RUN_S)
        finally:
            process.kill()
    return subprocess.CompletedProcess(args, process.returncode, output, errors)


def document(done: subprocess.CompletedProcess[str]) -> dict[str, Any]:
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    found = json.loads(done.stdout)
    assert isinstance(found, dict)
    return found


@pytest.fixture(scope="module")
def demo_run(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    """One whole run: folder and what it printed. Its blocks serve another test."""
    folder = tmp_path_factory.mktemp("demo")
    done = run(
        *("demo", "--json", "--epochs", "2", "--images", "100", "--requests", "2"),
        *("--repository", str(folder / "blocks"), "--results", str(folder / "results")),
    )
    return folder, document(done)


def test_the_demo_measures_and_leaves_nothing_behind(
    demo_run: tuple[Path, dict[str, Any]],
) -> None:
    _, found = demo_run
    assert found["left_behind"] == []
    assert Path(found["picture"]).read_bytes().startswith(b"\x89PNG")
    lines = [json.loads(x) for x in Path(found["figures_file"]).read_text().splitlines()]
    values = {(f["name"], f["mode"]): f["value"] for f in lines}
    assert values["accuracy", "modular/digit"] >= 97.0
    for name in ("accuracy", "latency", "throughput"):
        for task in ("digit", "parity", "high"):
            assert values[name, f"modular/{task}"] > 0
    # The same weights in every deployment: the same answers.
    for task in ("digit", "parity", "high"):
        accuracies = {
            values["accuracy", f"{d}/{task}"] for d in ("modular", "one worker", "separate")
        }
        assert len(accuracies) == 1
    for block in ("trunk1", "trunk2", "head_digit", "head_parity", "head_high"):
        for part in ("transit", "wait", "overhead", "compute"):
            assert values[part, f"modular/{block}"] >= 0
        assert values["compute", f"modular/{block}"] > 0
    assert values["state", "modular"] < 0.4 * values["state", "separate"]
    assert values["uss", "modular"] > values["state", "modular"]
    assert 0 < values["whole run", "all"] < RUN_S
    assert all(line["machine"]["cores"] for line in lines)


def test_a_kept_system_serves_on_until_it_is_stopped(
    demo_run: tuple[Path, dict[str, Any]], tmp_path: Path, warm: Warm
) -> None:
    folder, _ = demo_run
    forked = partial(run, start=warm.popen)
    scratch = {"TMPDIR": str(tmp_path)}
    kept = document(
        forked(
            *("demo", "--json", "--keep", "--reuse", *SMALL, "--rest-port", "0"),
            *("--client-port", "0", "--repository", str(folder / "blocks")),
            *("--results", str(tmp_path)),
            **scratch,
        )
    )
    at = {"BLOCKFLOW_URL": kept["rest"], "BLOCKFLOW_ADDRESS": kept["clients"]}
    try:
        assert kept["left_behind"] is None
        answer = document(forked("infer", "digit", "parity", "high", "--random", "--json", **at))
        assert set(answer["results"]) == {"digit", "parity", "high"}
        tasks = json.dumps(document(forked("topology", "--json", **at)))
        assert "head_digit" in tasks
    finally:
        stopped = forked("stop", "--yes", **at)
    assert stopped.returncode == 0, stopped.stderr
    # That all of its processes end is what the session's leak check waits for.


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
def test_an_interrupted_demo_takes_its_system_along(
    tmp_path: Path, number: signal.Signals, warm: Warm
) -> None:
    """The blocks are echoes with the demo's names: nothing has to be imported to load them."""
    repository = BlockRepository(tmp_path / "blocks")
    for name in (*SHARED, *FULL):
        save_echo(repository, name, INPUT)
    run_root = tmp_path.parent / f"r{number.value}"  # short: socket paths are limited
    run_root.mkdir(mode=0o700)
    process = warm.popen(
        command(
            *("demo", "--reuse", "--requests", "100000", "--repository", str(repository.root)),
            *("--results", str(tmp_path)),
        ),
        cwd=ROOT,
        env=environment(
            BLOCKFLOW_RUN_ROOT=str(run_root),
            TMPDIR=str(tmp_path),
        ),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    try:
        wait_for(lambda: any(run_root.glob("*/*.sock")), "the system to start", process)
        wait_for(lambda: len(list(run_root.glob("*/arena-*"))) > 1, "workers to start", process)
        process.send_signal(number)
        output, _ = process.communicate(timeout=60)
    finally:
        process.kill()
        process.wait()
    if number != signal.SIGKILL:
        assert process.returncode == 130, output
        assert "Interrupted" in output
    wait_for(lambda: not any(run_root.iterdir()), "the system to end", None)


def wait_for(condition: Any, what: str, process: subprocess.Popen[str] | None) -> None:
    until = time.monotonic() + WAIT_S
    while not condition():
        ended = process is not None and process.poll() is not None
        assert not ended, f"ended while waiting for {what}: {process.stdout.read()}"  # type: ignore[union-attr]
        assert time.monotonic() < until, f"no sign of {what}"
        time.sleep(0.02)
