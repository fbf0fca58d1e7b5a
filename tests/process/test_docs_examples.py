"""The documents are true: their examples run.

Their commands are those of a warm interpreter (warm_python.py), as each alone imports for seconds.
"""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
from docs_rig import ROOT, Example, documents, examples, name, runs
from warm_python import warm_commands

from blockflow.bench.demo.server import Server
from blockflow.monitor.rest import RestClient

TIMEOUT_S = 90
RUNNABLE = [p for p in documents() if any(runs(e) for e in examples(p))]


@pytest.fixture(scope="module")
def commands(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, str]]:
    """The environment in which ``python`` and ``blockflow`` are those of this very checkout."""
    folder = tmp_path_factory.mktemp("commands") / "bin"
    environment = {
        **os.environ,
        "PATH": f"{folder}{os.pathsep}{os.environ.get('PATH', '')}",
        "PYTHONPATH": str(ROOT),
    }
    with warm_commands(folder, environment):
        yield environment


@pytest.mark.timeout(300)
@pytest.mark.parametrize("path", RUNNABLE, ids=name)
def test_examples_run(path: Path, tmp_path: Path, commands: dict[str, str]) -> None:
    work = tmp_path / "work"
    work.mkdir()
    environment = dict(commands)
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
