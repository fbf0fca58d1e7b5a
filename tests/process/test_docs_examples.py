"""The documents are true: their examples run.

Their commands are those of a warm interpreter (warm_python.py), as each alone imports for seconds.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from docs_rig import ROOT, Example, documents, examples, name, runs
from warm_python import warm_commands
from warm_rig import Warm

from blockflow.bench.demo.server import Server
from blockflow.monitor.rest import RestClient

TIMEOUT_S = 90
WORK, BLOCKS, UP = "work", "blocks", "up"


def starts(path: Path) -> bool:
    return any(e.options.get("test") == UP for e in examples(path))


def stops(path: Path) -> bool:
    return any("blockflow stop --yes" in e.commands for e in examples(path) if runs(e))


RUNNABLE = sorted((p for p in documents() if any(runs(e) for e in examples(p))), key=stops)
"""Who stops the system comes last."""


@pytest.fixture(scope="module")
def commands(tmp_path_factory: pytest.TempPathFactory, warm: Warm) -> Iterator[dict[str, str]]:
    """The environment in which ``python`` and ``blockflow`` are those of this very checkout."""
    folder = tmp_path_factory.mktemp("commands") / "bin"
    environment = {
        **os.environ,
        "PATH": f"{folder}{os.pathsep}{os.environ.get('PATH', '')}",
        "PYTHONPATH": str(ROOT),
    }
    with warm_commands(folder, environment, start=warm.popen):
        yield environment


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory, warm: Warm) -> Iterator[Server]:
    """One ``blockflow up`` for all documents, with the blocks of the folder in which they run."""
    folder = tmp_path_factory.mktemp("up")
    (folder / WORK / BLOCKS).mkdir(parents=True)
    with Server(folder / WORK / BLOCKS, folder, RestClient) as server:
        with warm.spawning():
            server.start()
        yield server


@pytest.fixture
def work(path: Path, request: pytest.FixtureRequest) -> Iterator[Path]:
    """An empty folder to run in. If the document starts the system, that is there, with nothing
    deployed: ``blockflow up`` is a matter of seconds."""
    if not starts(path):
        folder = request.getfixturevalue("tmp_path") / WORK
        folder.mkdir()
        yield folder
        return
    server: Server = request.getfixturevalue("server")
    folder = server.log.parent / WORK
    yield folder
    for left in (x for x in folder.iterdir() if x.name != BLOCKS):
        shutil.rmtree(left) if left.is_dir() else left.unlink()
    if not stops(path):
        server.rest.post("/v1/system-update", {"blocks": [], "tasks": {}}, timeout_s=TIMEOUT_S)
    for block in (folder / BLOCKS).iterdir():
        shutil.rmtree(block)


@pytest.mark.timeout(300)
@pytest.mark.parametrize("path", RUNNABLE, ids=name)
def test_examples_run(
    path: Path, work: Path, commands: dict[str, str], request: pytest.FixtureRequest
) -> None:
    environment = dict(commands)
    for example in examples(path):
        if "file" in example.options:
            (work / example.options["file"]).write_text(example.text + "\n", encoding="utf-8")
        elif example.options.get("test") == UP:
            server = request.getfixturevalue("server")
            assert server.rest.get("/v1/status")["blocks"] == []
            environment["BLOCKFLOW_URL"] = server.rest_url
            environment["BLOCKFLOW_ADDRESS"] = server.client_address
        elif runs(example):
            run_example(example, work, environment)


def run_example(example: Example, work: Path, environment: dict[str, str]) -> None:
    if example.language == "python":
        command = ["python", "-c", example.text]
    else:
        assert example.language in ("console", "bash"), f"{example.where}: cannot be run"
        lines = example.commands if example.language == "console" else [example.text]
        command = ["bash", "-ec", "\n".join(lines)]
    done = subprocess.run(
        ["/usr/bin/env", *command],  # looks in the PATH of its own environment
        cwd=work,
        env=environment,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
        check=False,
    )
    assert done.returncode == 0, f"{example.where}\n{done.stdout}\n{done.stderr}"
