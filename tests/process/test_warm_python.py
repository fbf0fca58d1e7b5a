"""The commands of a warm interpreter end as those of a cold one do: or no example could fail."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from warm_python import warm_commands

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def environment(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, str]]:
    folder = tmp_path_factory.mktemp("warm") / "bin"
    found = {**os.environ, "PATH": f"{folder}:{os.environ['PATH']}", "PYTHONPATH": str(ROOT)}
    with warm_commands(folder, found, ["blockflow.cli.main"]):
        yield found


def run(
    environment: dict[str, str], *command: str, **more: str
) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        ["/usr/bin/env", *command],
        env={**environment, **more},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


@pytest.mark.parametrize(
    ("code", "status", "output", "errors"),
    [
        ("print('here')", 0, "here\n", ""),
        ("raise SystemExit(3)", 3, "", ""),
        ("raise SystemExit('no')", 1, "", "no\n"),
        ("assert 1 == 2", 1, "", "AssertionError"),
        ("import os; os.kill(os.getpid(), 9)", 128 + signal.SIGKILL, "", ""),
        ("import sys; print(sys.argv[1:])", 0, "['a b', '$c']\n", ""),
        ("import os; print(os.environ['SEEN'])", 0, "seen\n", ""),
        ("import atexit; atexit.register(print, 'last')", 0, "last\n", ""),
        (
            "import threading, time\n"
            "threading.Thread(target=lambda: (time.sleep(0.1), print('late'))).start()",
            0,
            "late\n",
            "",
        ),
    ],
)
def test_code_ends_as_it_should(
    environment: dict[str, str], code: str, status: int, output: str, errors: str
) -> None:
    done = run(environment, "python", "-c", code, "a b", "$c", SEEN="seen")
    assert (done.returncode, done.stdout) == (status, output), done.stderr
    assert errors in done.stderr
    assert bool(errors) == bool(done.stderr)


def test_files_and_modules_are_run(environment: dict[str, str], tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    (tmp_path / "beside.py").write_text("WORD = 'beside'")
    script.write_text("import beside, sys\nprint(__name__, beside.WORD, sys.argv[1])")
    assert run(environment, "python", str(script), "x").stdout == "__main__ beside x\n"
    assert run(environment, "blockflow", "no-such-command").returncode == 2
    assert "Usage: blockflow" in run(environment, "blockflow", "--help").stdout


def test_a_command_ends_with_whoever_waits_for_it(
    environment: dict[str, str], tmp_path: Path
) -> None:
    """It holds the other end of this pipe, which is told when it is gone."""
    code = "import time; print('started', flush=True); time.sleep(600)"
    with subprocess.Popen(
        ["/usr/bin/env", "python", "-c", code], env=environment, stdout=subprocess.PIPE, text=True
    ) as waits:
        assert waits.stdout is not None
        assert waits.stdout.readline() == "started\n"
        waits.kill()
        assert waits.stdout.read() == ""
