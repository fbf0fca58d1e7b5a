"""The documents are true: their examples run."""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path

import pytest
from docs_rig import ROOT, Example, documents, examples, name, runs

from blockflow.bench.demo.server import Server
from blockflow.monitor.rest import RestClient

TIMEOUT_S = 90
RUNNABLE = [p for p in documents() if any(runs(e) for e in examples(p))]


@pytest.mark.timeout(300)
@pytest.mark.parametrize("path", RUNNABLE, ids=name)
def test_examples_run(path: Path, tmp_path: Path) -> None:
    work = tmp_path / "work"
    work.mkdir()
    environment = command_environment(tmp_path / "bin")
    with ExitStack() as stack:
        for example in examples(path):
            if "file" in example.options:
                (work / example.options["file"]).write_text(example.text + "\n", encoding="utf-8")
            elif example.options.get("test") == "up":
                (tmp_path / "up").mkdir()
                (work / "blocks").mkdir(exist_ok=True)
                server = stack.enter_context(Server(work / "blocks", tmp_path / "up", RestClient))
                server.start()
                environment["BLOCKFLOW_URL"] = server.rest_url
                environment["BLOCKFLOW_ADDRESS"] = server.client_address
            elif runs(example):
                run_example(example, work, environment)


def run_example(example: Example, work: Path, environment: dict[str, str]) -> None:
    if example.language == "python":
        command = [sys.executable, "-c", example.text]
    else:
        assert example.language in ("console", "bash"), f"{example.where}: cannot be run"
        lines = example.commands if example.language == "console" else [example.text]
        command = ["bash", "-ec", "\n".join(lines)]
    done = subprocess.run(
        command,
        cwd=work,
        env=environment,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
        check=False,
    )
    assert done.returncode == 0, f"{example.where}\n{done.stdout}\n{done.stderr}"


def command_environment(folder: Path) -> dict[str, str]:
    """PATH with this interpreter as ``python`` and a ``blockflow`` of this very checkout."""
    folder.mkdir()
    for command, call in (("python", ""), ("blockflow", "-m blockflow.cli.main ")):
        script = folder / command
        script.write_text(f'#!/bin/sh\nexec {shlex.quote(sys.executable)} {call}"$@"\n')
        script.chmod(0o755)
    return {
        **os.environ,
        "PATH": f"{folder}{os.pathsep}{os.environ.get('PATH', '')}",
        "PYTHONPATH": str(ROOT),
    }
