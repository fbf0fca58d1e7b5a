"""Commands as processes: what they import, the live screen on a terminal, pipes, the script."""

from __future__ import annotations

import json
import os
import pty
import runpy
import select
import subprocess
import sys
import termios
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import IO

import pytest
from fake_rest import FakeRest

ROOT = Path(__file__).parent.parent.parent
STATUS = json.loads((ROOT / "tests" / "data" / "status.json").read_text())


SEVERAL = """
import json, os, sys
from contextlib import suppress
import blockflow.cli.look, blockflow.monitor.rest, blockflow.monitor.text
from blockflow.cli.main import main
from pydantic import AfterValidator, Field, TypeAdapter  # typer would, at its first command

statuses = []
for words, environment in json.loads(sys.argv[1]):
    if (pid := os.fork()) == 0:
        os.environ.update(environment)
        sys.exit(main(words))
    statuses.append(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
    with suppress(OSError):  # it is closed
        os.write(2, b"END\\n")
os.write(int(sys.argv[2]), json.dumps(statuses).encode())
"""
"""Commands one after the other, each with all of an interpreter's start and end, whose imports are
made once."""


def several(
    *commands: list[str],
    environments: Sequence[dict[str, str]] | None = None,
    closed: str = "",
    stdout: int | IO[str] = subprocess.PIPE,
) -> tuple[list[int], str, list[str]]:
    """How commands ended, what they wrote to their common output, and each one's errors."""
    given = json.dumps(list(zip(commands, environments or [{}] * len(commands), strict=True)))
    read, write = os.pipe()
    words = [sys.executable, "-c", SEVERAL, given, str(write)]
    done = subprocess.run(
        ["bash", "-c", f'exec "$@" {closed}', "bash", *words],
        stdout=stdout,
        stderr=subprocess.PIPE,
        text=True,
        cwd=ROOT,
        check=False,
        pass_fds=(write,),
    )
    os.close(write)
    with open(read) as f:
        statuses: list[int] = json.loads(f.read() or "[]")
    return statuses, done.stdout, done.stderr.split("END\n")


@pytest.fixture
def rest() -> Iterator[FakeRest]:
    with FakeRest({"GET /v1/status": (200, STATUS)}) as fake:
        yield fake


def test_status_imports_no_torch(rest: FakeRest) -> None:
    code = (
        "import sys\nfrom blockflow.cli.main import main\n"
        f"status = main(['status', '--json', '--url', {rest.url!r}])\n"
        "print(sorted({m.partition('.')[0] for m in sys.modules}), file=sys.stderr)\n"
        "sys.exit(status)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT
    )
    assert json.loads(done.stdout) == STATUS
    loaded = set(done.stderr.replace("'", '"').strip("[]\n").replace('"', "").split(", "))
    assert "blockflow" in loaded
    assert not loaded & {"torch", "numpy", "zmq", "cherrypy", "psutil", "matplotlib", "sklearn"}


def test_the_package_stands_for_the_command(rest: FakeRest) -> None:
    """Its exit status, too: there are none of its own."""
    for words, status in ((["status", "--json", "--url", rest.url], 0), (["nonsense"], 2)):
        done = subprocess.run(
            [sys.executable, "-m", "blockflow", *words], capture_output=True, text=True, cwd=ROOT
        )
        assert done.returncode == status, done.stderr
        assert (json.loads(done.stdout) == STATUS) if status == 0 else "Usage" in done.stderr


def test_the_script_stands_for_top(rest: FakeRest) -> None:
    done = subprocess.run(
        [sys.executable, ROOT / "tools" / "monitor.py", "--url", rest.url],
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.startswith("BlockFlow 0.1.0: ready")


def test_the_other_script_stands_for_export(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Here: a process of its own would import torch and all that exports need for it alone."""
    (tmp_path / "tiny_for_script.py").write_text(
        "from torch import nn\n\n\ndef net():\n    return nn.Sequential(nn.Linear(4, 2)).eval()\n"
    )
    script = str(ROOT / "tools" / "export_block.py")
    words = ["tiny_for_script:net", "--input", "float32[rows,4]", "--name", "tiny", "--json"]
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", [script, *words])
    monkeypatch.setattr(sys, "path", [str(ROOT / "tools"), *sys.path])  # as python does it
    with pytest.raises(SystemExit) as ended:
        runpy.run_path(script, run_name="__main__")
    sys.modules.pop("tiny_for_script", None)
    output, errors = capsys.readouterr()
    assert ended.value.code == 0, errors
    json.loads(output)
    assert (tmp_path / "blocks" / "tiny" / "manifest.json").is_file()
    with open("/dev/full", "w") as full:  # what goes wrong is told as the command tells it
        done = subprocess.run(
            [sys.executable, script, "--list"],
            stdout=full,
            stderr=subprocess.PIPE,
            text=True,
            check=False,
        )
    assert done.returncode == 5 and "No space left" in done.stderr
    assert "Traceback" not in done.stderr


def test_top_on_a_terminal_is_live_and_leaves_it_as_it_was(rest: FakeRest) -> None:
    command = [sys.executable, "-m", "blockflow", "top", "-n", "0.1", "--url", rest.url]
    master, slave = pty.openpty()
    was = termios.tcgetattr(master)
    environment = os.environ | {"TERM": "xterm", "COLUMNS": "100", "LINES": "50"}
    with subprocess.Popen(
        command, stdin=slave, stdout=slave, stderr=slave, cwd=ROOT, env=environment
    ) as child:
        os.close(slave)
        seen = b""
        arrow = asked_to_end = False
        end = time.monotonic() + 30
        while time.monotonic() < end:
            if select.select([master], [], [], 0.1)[0]:
                try:
                    seen += os.read(master, 65536)
                except OSError:  # the child's side is closed
                    break
            if not arrow and seen.count(b"BlockFlow 0.1.0") >= 1:
                os.write(master, b"\x1b[A")  # begins with Escape, and ends nothing
                arrow = True
            if not asked_to_end and seen.count(b"BlockFlow 0.1.0") >= 4:
                os.write(master, b"q")
                asked_to_end = True
        assert child.wait(10) == 0
    assert termios.tcgetattr(master) == was
    os.close(master)
    assert b"\x1b[?1049h" in seen  # the alternative screen, and back
    assert seen.rindex(b"\x1b[?1049l") > seen.rindex(b"\x1b[?1049h")
    assert len(rest.asked) >= 3


def test_a_reader_that_has_enough_is_no_error(rest: FakeRest) -> None:
    command = [sys.executable, "-m", "blockflow", "status", "--json", "--url", rest.url]
    # More than a pipe holds, and nobody reads it.
    rest.answers["GET /v1/status"] = (200, STATUS | {"filler": "x" * 300_000})
    child = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, cwd=ROOT)
    assert child.stdout is not None
    assert child.stderr is not None
    child.stdout.read(1)
    child.stdout.close()
    assert child.wait(20) == 0
    assert child.stderr.read() == b""
    child.stderr.close()


def test_an_output_that_takes_nothing_is_said_once(rest: FakeRest) -> None:
    nobody = "http://127.0.0.1:9"
    ways = ((rest.url, "No space left"), (nobody, "NOT_RUNNING"))
    commands = [["status", "--url", url, *more] for url, _ in ways for more in ([], ["--json"])]
    with open("/dev/full", "w") as full:
        statuses, _, (*errors, last) = several(*commands, stdout=full)
    assert (statuses, last) == ([5, 5, 3, 3], "")
    for said, word in zip(errors, [word for _, word in ways for _ in range(2)], strict=True):
        (line,) = said.splitlines()
        assert line.startswith("blockflow: ") and word in line


def test_no_columns_are_as_many_as_ever(rest: FakeRest) -> None:
    command = ["status", "--url", rest.url]
    columns = [{"COLUMNS": n} for n in ("0", "80")]
    statuses, shown, _ = several(command, command, environments=columns)
    assert statuses == [0, 0]
    assert shown and shown[: len(shown) // 2] == shown[len(shown) // 2 :]


def test_a_reader_of_help_that_has_enough_is_no_error() -> None:
    reader = subprocess.Popen(
        [sys.executable, "-m", "blockflow", "--help"], stdout=subprocess.PIPE, cwd=ROOT
    )
    assert reader.stdout is not None
    reader.stdout.close()
    assert reader.wait(60) == 0


@pytest.mark.parametrize("closed", [">&-", "<&- >&-", ">&- 2>&-", "<&- >&- 2>&-"])
def test_streams_that_the_caller_has_closed_are_no_error(rest: FakeRest, closed: str) -> None:
    command = ["status", "--url", rest.url]
    found = several(command, [*command, "--json"], closed=closed)
    assert found == ([0, 0], "", [""] if "2>&-" in closed else ["", "", ""])
