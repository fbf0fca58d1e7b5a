"""Commands against a canned control plane: what they ask, print, and exit with."""

from __future__ import annotations

import errno
import inspect
import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from cli_rig import document
from fake_rest import FakeRest

from blockflow.cli.exits import ExitCode, exit_code
from blockflow.cli.main import COMMANDS, load, main
from blockflow.control.commands import MAX_HZ
from blockflow.core.errors import CODES, make_error
from blockflow.monitor.rest import RestClient

STATUS = json.loads((Path(__file__).parent.parent / "data" / "status.json").read_text())
OUTCOME = {"epoch": 2, "update": {"id": 3, "kind": "drain", "state": "done", "duration_ms": 5.0}}


def failing(code: str, status: int, **kw: Any) -> tuple[int, Any]:
    return status, {"error": make_error(code, "it was asked to", **kw).to_dict()}


@pytest.fixture
def rest(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeRest]:
    answers: dict[str, Any] = {
        "GET /v1/status": (200, STATUS),
        "GET /v1/tasks": (200, {"tasks": STATUS["tasks"]}),
        "GET /v1/blocks": (200, {"blocks": STATUS["blocks"]}),
        "GET /v1/topology": (200, {"epoch": 1, "topology": {"blocks": []}, "posted": {"x": 1}}),
        "GET /v1/kpis": (200, {"epoch": 1}),
        "POST /v1/shutdown": (202, {"accepted": True}),
        "POST /v1/monitor": (200, {"on": True, "hz": 4.0}),
        "POST /v1/kpis/store": (200, {"path": "/var/k.jsonl", "count": 7}),
        "POST /v1/ping": (200, {"ok": True, "pings": [{"worker": "a#0", "ok": True}]}),
        "POST /v1/blocks/trunk1/ping": (
            200,
            {"ok": False, "pings": [{"worker": "trunk1#0", "ok": False}]},
        ),
        "POST /v1/system-update": (200, OUTCOME),
    }
    for verb in ("drain", "undrain", "stop", "restart"):
        answers[f"POST /v1/blocks/trunk1/{verb}"] = (200, OUTCOME)
    with FakeRest(answers) as fake:
        monkeypatch.setenv("BLOCKFLOW_URL", fake.url)
        yield fake


def test_every_command_loads_and_has_help(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--help"]) == 0
    overview = capsys.readouterr().out
    for name in COMMANDS:
        assert name in overview
        assert load(name).name == name
        assert main([name, "--help"]) == 0
        assert "--json" in capsys.readouterr().out, name


@pytest.mark.parametrize("name", COMMANDS)
def test_every_option_says_what_it_is(name: str) -> None:
    assert not [p.name for p in load(name).params if not getattr(p, "help", "")]


@pytest.mark.parametrize("name", COMMANDS)
def test_help_is_not_broken_in_the_middle_of_lines(name: str) -> None:
    """typer keeps the line breaks of all paragraphs but the first."""
    for paragraph in inspect.cleandoc(load(name).help or "").split("\n\n")[1:]:
        lines = paragraph.splitlines()
        assert len(lines) == 1 or max(map(len, lines)) <= 78, lines  # a terminal of 80


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--version"]) == 0
    assert capsys.readouterr().out.startswith("blockflow ")


@pytest.mark.parametrize(
    "args", [["nonsense"], ["drain"], ["status", "--nonsense"], ["top", "-n", "x"]]
)
def test_usage_errors(args: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(args) == 2
    assert "Usage" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("args", "asked"),
    [
        (["status"], "GET /v1/status"),
        (["top"], "GET /v1/status"),
        (["tasks"], "GET /v1/tasks"),
        (["topology"], "GET /v1/topology"),
        (["kpis"], "GET /v1/kpis"),
        (["kpis", "store", "k.jsonl"], "POST /v1/kpis/store"),
        (["ping"], "POST /v1/ping"),
        (["drain", "trunk1"], "POST /v1/blocks/trunk1/drain"),
        (["undrain", "trunk1"], "POST /v1/blocks/trunk1/undrain"),
        (["restart", "trunk1"], "POST /v1/blocks/trunk1/restart"),
        (["stop", "trunk1"], "POST /v1/blocks/trunk1/stop"),
        (["stop", "--yes", "--no-wait"], "POST /v1/shutdown"),
        (["monitor", "on"], "POST /v1/monitor"),
    ],
)
def test_commands_ask_the_right_resource_and_print_one_document(
    args: list[str], asked: str, rest: FakeRest, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*args, "--json"]) == 0
    captured = capsys.readouterr()
    assert json.loads(captured.out) == rest.answers[asked][1]  # type: ignore[index]
    assert captured.err == ""
    assert [f"{method} {path}" for method, path, _ in rest.asked] == [asked]
    assert main(args) == 0
    assert capsys.readouterr().out.strip()


def test_status_of_a_system_that_is_not_ready(
    rest: FakeRest, capsys: pytest.CaptureFixture[str]
) -> None:
    rest.answers["GET /v1/status"] = (
        200,
        STATUS | {"ready": False, "reasons": ["block a is closed"], "state": "degraded"},
    )
    assert main(["status"]) == ExitCode.NOT_READY
    assert "not ready: block a is closed" in capsys.readouterr().out
    assert main(["status", "--json"]) == ExitCode.NOT_READY
    assert document(capsys)["state"] == "degraded"


def test_a_ping_without_an_answer(rest: FakeRest, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["ping", "trunk1"]) == ExitCode.NOT_READY
    assert "no answer" in capsys.readouterr().out


def test_errors_have_code_hint_and_exit_status(
    rest: FakeRest, capsys: pytest.CaptureFixture[str]
) -> None:
    rest.answers["POST /v1/blocks/x/drain"] = failing("UNKNOWN_BLOCK", 404, hint="try trunk1")
    assert main(["drain", "x"]) == ExitCode.BAD_INPUT
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err == "blockflow: UNKNOWN_BLOCK: it was asked to -- try trunk1\n"
    assert main(["drain", "x", "--json"]) == ExitCode.BAD_INPUT
    assert document(capsys)["error"]["code"] == "UNKNOWN_BLOCK"


def test_names_that_are_no_names(rest: FakeRest, capsys: pytest.CaptureFixture[str]) -> None:
    """An argument may hold any bytes; an empty one would be another resource."""
    rest.answers["POST /v1/blocks/%FF/drain"] = failing("UNKNOWN_BLOCK", 404)
    assert main(["drain", "\udcff"]) == ExitCode.BAD_INPUT
    assert "UNKNOWN_BLOCK" in capsys.readouterr().err
    assert main(["drain", ""]) == ExitCode.BAD_INPUT
    assert "the name is empty" in capsys.readouterr().err


def test_nobody_there(capsys: pytest.CaptureFixture[str]) -> None:
    import socket

    with socket.socket() as held:
        held.bind(("127.0.0.1", 0))  # and nobody listens
        url = f"http://127.0.0.1:{held.getsockname()[1]}"
        assert main(["status", "--url", url]) == ExitCode.NOT_RUNNING
        assert "blockflow up" in capsys.readouterr().err
        assert main(["status", "--url", url, "--json"]) == ExitCode.NOT_RUNNING
    assert document(capsys)["error"]["code"] == "NOT_RUNNING"


def test_something_else_there(rest: FakeRest) -> None:
    for answer in (b"<html>", b"", b'{"a": ', b"[]", b"1"):
        rest.answers["GET /v1/status"] = answer
        assert main(["status"]) == ExitCode.NOT_RUNNING
    rest.answers["GET /v1/status"] = (500, {"no": "reason"})
    assert main(["status"]) == ExitCode.INTERNAL
    rest.answers["GET /v1/status"] = (500, ["no", "reason"])
    assert main(["status"]) == ExitCode.NOT_RUNNING


def test_an_answer_that_does_not_come_is_a_timeout() -> None:
    import socket

    with socket.create_server(("127.0.0.1", 0)) as silent:
        port = silent.getsockname()[1]
        with pytest.raises(Exception, match=r"TIMEOUT: .*is no control plane"):
            RestClient(f"http://127.0.0.1:{port}", timeout_s=0.1).get("/v1/status")


@pytest.mark.parametrize(
    "url",
    [
        *("nonsense", "https://", "http://", "http://a:b", "ftp://x:1", "http://a..b:1"),
        *("http://127.0.0.1:1/ä", "http://127.0.0.1:1/a b"),
    ],
)
def test_bad_urls(url: str) -> None:
    assert main(["status", "--url", url]) == ExitCode.BAD_INPUT


def test_stopping_all_is_confirmed(
    rest: FakeRest, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    import io

    for answer in ("n\n", ""):  # no, and nobody there
        monkeypatch.setattr("sys.stdin", io.StringIO(answer))
        assert main(["stop"]) == ExitCode.BAD_INPUT
    monkeypatch.setattr("sys.stdin", io.StringIO("y\n"))
    assert main(["stop", "--no-wait"]) == 0
    assert [path for _, path, _ in rest.asked] == ["/v1/shutdown"]
    assert main(["stop", "--json"]) == ExitCode.BAD_INPUT


def test_stop_returns_when_the_process_has_ended(
    rest: FakeRest, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "lock").touch()
    with (
        open(tmp_path / "lock") as lock,
        subprocess.Popen(["sleep", "60"], pass_fds=(lock.fileno(),)) as process,
    ):
        rest.answers["GET /v1/status"] = (200, {"pid": process.pid, "run_dir": str(tmp_path)})

        def shut_down(_: bytes) -> tuple[int, Any]:
            threading.Timer(0.2, process.kill).start()
            return 202, {"accepted": True}

        rest.answers["POST /v1/shutdown"] = shut_down
        assert main(["stop", "--yes"]) == 0
        assert process.poll() is not None
    assert "stopped" in capsys.readouterr().out


@pytest.mark.parametrize("status", [{"pid": 1, "run_dir": "/dev/shm/blockflow-0/1"}, {"pid": -7}])
def test_stop_of_another_host_returns_when_it_is_silent(
    rest: FakeRest, capsys: pytest.CaptureFixture[str], status: dict[str, Any]
) -> None:
    """A process of that number here is another one, which may live for ever, or has long gone."""
    rest.answers["GET /v1/status"] = (200, status)
    left = 3

    def live(_: bytes) -> Any:
        nonlocal left
        left -= 1
        return (200, {"live": True}) if left else b"something else has the port"

    rest.answers["GET /v1/health/live"] = live
    assert main(["stop", "--yes"]) == 0
    assert left == 0
    assert "stopped" in capsys.readouterr().out


def test_monitor_sends_the_rate(rest: FakeRest) -> None:
    assert main(["monitor", "on", "--hz", "10"]) == 0
    assert main(["monitor", "on", "--hz", f"{MAX_HZ:g}"]) == 0  # all that the control plane takes
    assert main(["monitor", "off"]) == 0
    assert [json.loads(body) for *_, body in rest.asked] == [
        {"on": True, "hz": 10.0},
        {"on": True, "hz": MAX_HZ},
        {"on": False},
    ]
    assert main(["monitor", "on", "--hz", "1000"]) == 2
    assert main(["kpis", "store"]) == 2
    assert main(["kpis", "show", "x.jsonl"]) == 2


def test_apply(
    rest: FakeRest, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: Any
) -> None:
    body = b'{"blocks": ["a"], "blocks": ["a"]}'  # sent as it is: the service judges it
    file = tmp_path / "t.json"
    file.write_bytes(body)
    assert main(["apply", str(file)]) == 0
    assert capsys.readouterr().out.splitlines()[0] == "update 3: done in 5.00 ms"
    assert main(["apply", str(file), "--no-wait", "--json"]) == 0
    assert document(capsys)["epoch"] == 2
    assert main(["apply", str(file), "--dry-run"]) == 0
    assert rest.asked == [
        ("POST", "/v1/system-update?wait=true", body),
        ("POST", "/v1/system-update?wait=false", body),
        ("POST", "/v1/system-update?dry_run=true", body),
    ]
    assert main(["apply", str(tmp_path / "none.json")]) == ExitCode.BAD_INPUT
    file.write_bytes(b" " * (2**20 + 1))
    assert main(["apply", str(file)]) == ExitCode.BAD_INPUT


def test_apply_shows_all_problems(
    rest: FakeRest, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    problems = [
        {"path": "$.blocks[1]", "message": "unknown block", "hint": "known: a"},
        {"path": "$.tasks.t", "message": "not a path"},
    ]
    error = make_error("INVALID_TOPOLOGY", "2 problems").to_dict() | {"problems": problems}
    rest.answers["POST /v1/system-update"] = (422, {"error": error})
    file = tmp_path / "t.json"
    file.write_text("{}")
    assert main(["apply", str(file)]) == ExitCode.BAD_INPUT
    lines = capsys.readouterr().err.splitlines()
    assert lines[1:] == [
        "  $.blocks[1]: unknown block -- known: a",
        "  $.tasks.t: not a path",
    ]
    assert main(["apply", str(file), "--json"]) == ExitCode.BAD_INPUT
    assert document(capsys)["error"]["problems"] == problems


def test_every_code_has_an_exit_status() -> None:
    by_code = {code: exit_code(make_error(code, "")) for code in CODES}
    assert ExitCode.OK not in by_code.values()
    assert by_code["INTERNAL"] == 1
    assert by_code["INVALID_TOPOLOGY"] == by_code["UNKNOWN_TASK"] == 2
    assert by_code["NOT_RUNNING"] == by_code["CONNECTION_LOST"] == 3
    assert by_code["NOT_READY"] == by_code["BLOCK_UNAVAILABLE"] == by_code["TIMEOUT"] == 4
    assert by_code["BLOCK_FAILED"] == by_code["OVERLOADED"] == by_code["UPDATE_IN_PROGRESS"] == 5


def test_the_page_names_every_command_and_exit_status() -> None:
    page = (Path(__file__).parents[2] / "docs" / "cli.md").read_text()
    assert [name for name in COMMANDS if f"`{name}" not in page] == []
    assert [code for code in ExitCode if f"\n| {code.value} | " not in page] == []


def test_a_defect_is_exit_status_1(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    raised: list[Exception] = [ZeroDivisionError("a defect"), OSError(errno.EMFILE, "Too many")]

    def broken(self: Any, *a: Any, **kw: Any) -> Any:
        raise raised.pop(0)

    monkeypatch.setattr(RestClient, "get", broken)
    for status, code in ((ExitCode.INTERNAL, "INTERNAL"), (ExitCode.FAILED, "NO_SPACE")):
        assert (main(["status", "--json"]), document(capsys)["error"]["code"]) == (status, code)


INSTALLED = """
import sys
sys.path.remove("")  # as of the script that is installed
from blockflow.cli.main import main
sys.exit(main())
"""


@pytest.mark.parametrize("command", ["doctor", "up"])
def test_a_working_directory_that_was_removed_is_said(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    command: str,
) -> None:
    gone = tmp_path / "gone"
    gone.mkdir()
    monkeypatch.chdir(gone)
    gone.rmdir()
    done = subprocess.run(
        [
            sys.executable,
            "-c",
            INSTALLED,
            command,
            "--json",
            "--state-dir",
            str(tmp_path / "state"),
        ],
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])},
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    assert done.returncode == ExitCode.BAD_INPUT, done.stderr
    error = json.loads(done.stdout)["error"]
    assert error["code"] == "INVALID_REQUEST" and "working directory" in error["message"]
    assert "cd" in error["hint"]
