"""What commands ask of a canned control plane, how long they wait, and what they say then."""

from __future__ import annotations

import io
import json
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from cli_rig import document
from fake_rest import FakeRest

from blockflow.cli import act, bench
from blockflow.cli import main as cli_main
from blockflow.cli.complete import complete_block, complete_task
from blockflow.cli.exits import ExitCode, exit_code
from blockflow.cli.main import main
from blockflow.cli.options import UPDATE_S, commas, users_output
from blockflow.control.commands import WAIT_S
from blockflow.core import limits
from blockflow.core.errors import make_error
from blockflow.monitor.rest import RestClient

OUTCOME = {"epoch": 2, "update": {"id": 3, "kind": "rollback", "state": "done"}}


@pytest.fixture
def rest(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeRest]:
    with FakeRest({}) as fake:
        monkeypatch.setenv("BLOCKFLOW_URL", fake.url)
        yield fake


def test_rollback(rest: FakeRest, capsys: pytest.CaptureFixture[str]) -> None:
    rest.answers["POST /v1/rollback"] = (200, OUTCOME)
    for words in ([], ["--to", "3"], ["--no-wait"], ["--to", "1", "--dry-run"]):
        assert main(["rollback", *words]) == 0
    assert [(path, json.loads(body)) for _, path, body in rest.asked] == [
        ("/v1/rollback?wait=true", {}),
        ("/v1/rollback?wait=true", {"to": 3}),
        ("/v1/rollback?wait=false", {}),
        ("/v1/rollback?dry_run=true", {"to": 1}),
    ]
    assert capsys.readouterr().out.splitlines()[:2] == ["update 3: done", "epoch 2"]
    assert main(["rollback", "--json"]) == 0
    assert document(capsys) == OUTCOME
    assert main(["rollback", "--to", "0"]) == 2


def test_history(rest: FakeRest, capsys: pytest.CaptureFixture[str]) -> None:
    epochs = {"epochs": [{"epoch": 7, "when": "2026-01-01", "how": "rollback", "in_force": True}]}
    rest.answers["GET /v1/history"] = (200, epochs)
    assert main(["history"]) == 0
    assert "rollback" in capsys.readouterr().out
    assert main(["history", "--json"]) == 0
    assert document(capsys) == epochs


def test_topology_in_either_form(rest: FakeRest, capsys: pytest.CaptureFixture[str]) -> None:
    told = {"epoch": 1, "topology": {"blocks": ["whole"]}, "posted": {"blocks": ["short"]}}
    rest.answers["GET /v1/topology"] = (200, told)
    assert main(["topology"]) == 0
    assert document(capsys) == {"blocks": ["whole"]}
    assert main(["topology", "--posted"]) == 0
    assert document(capsys) == {"blocks": ["short"]}


@pytest.mark.parametrize("stored", [None, {"blocks": ["short"]}])
def test_a_topology_that_is_not_in_force_is_none(
    rest: FakeRest, capsys: pytest.CaptureFixture[str], stored: Any
) -> None:
    rest.answers["GET /v1/topology"] = (200, {"epoch": 3, "topology": None, "posted": stored})
    assert main(["topology"]) == ExitCode.NOT_READY
    told = capsys.readouterr()
    assert told.out == "" and "NOT_READY: no topology is in force" in told.err
    assert ("epoch 3 could not be deployed" in told.err) == (stored is not None)
    assert main(["topology", "--posted"]) == (ExitCode.OK if stored else ExitCode.NOT_READY)
    if stored:
        assert document(capsys) == stored


def test_updates_are_waited_for_longer_than_the_control_plane_does(
    rest: FakeRest, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """It tells how far it is, or what went wrong, when it gives up; who hung up does not hear."""
    times: dict[str, float | None] = {}

    def post(self: RestClient, path: str, *_: Any, timeout_s: float | None = None) -> Any:
        times[path.rpartition("/")[2]] = timeout_s
        return OUTCOME

    monkeypatch.setattr(RestClient, "post", post)
    (tmp_path / "t.json").write_text("{}")
    for words in (["apply", str(tmp_path / "t.json")], ["rollback"]):
        assert main(words) == 0
    for verb in ("drain", "undrain", "restart", "stop"):
        assert main([verb, "a"]) == 0
    assert len(times) == 6
    assert set(times.values()) == {UPDATE_S} and UPDATE_S > WAIT_S


def test_a_bench_waits_for_its_own_system_as_long(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    posted: list[tuple[Any, ...]] = []

    class Server:
        client_address = "tcp://h:1"

        def __init__(self, *_: Any) -> None:
            self.rest = SimpleNamespace(post=self.post)

        def post(self, *args: Any, timeout_s: float) -> None:
            posted.append((*args, timeout_s))

        def __enter__(self) -> Server:
            return self

        def __exit__(self, *_: object) -> None:
            pass

        def start(self) -> None:
            posted.append(("started",))

    monkeypatch.setattr(bench, "Server", Server)
    file = tmp_path / "t.json"
    file.write_text("{}")
    context: Any = SimpleNamespace(get_parameter_source=lambda name: None)
    with bench._system(context, file, tmp_path, "", "") as (rest, address):
        assert rest is not None and address == "tcp://h:1"
    assert posted == [("started",), ("/v1/system-update", b"{}", UPDATE_S)]


def test_what_goes_on_is_not_told_as_done(
    rest: FakeRest, capsys: pytest.CaptureFixture[str]
) -> None:
    for state, line in (
        ("draining", "update 3: draining"),
        ("done", "a: drained"),
        ("unchanged", "a: drained"),
    ):
        update = {"id": 3, "kind": "drain", "state": state}
        rest.answers["POST /v1/blocks/a/drain"] = (202, {"epoch": 2, "update": update})
        assert main(["drain", "a"]) == 0
        assert capsys.readouterr().out.splitlines()[0] == line
    update = {"id": 3, "kind": "drain", "state": "done", "notes": ["time was up before ..."]}
    rest.answers["POST /v1/blocks/a/drain"] = (200, {"epoch": 2, "update": update})
    assert main(["drain", "a"]) == 0
    shown = capsys.readouterr().out.splitlines()
    assert shown == ["update 3: done", "  note   time was up before ...", "epoch 2"]


def test_apply_reads_the_standard_input(
    rest: FakeRest, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    rest.answers["POST /v1/system-update"] = (200, OUTCOME)
    most = b" " * limits.MAX_REST_BODY_BYTES
    for body, status in ((b"{}", 0), (most, 0), (most + b" ", ExitCode.BAD_INPUT)):
        monkeypatch.setattr("sys.stdin", SimpleNamespace(buffer=io.BytesIO(body)))
        assert main(["apply", "-"]) == status
    assert [body for *_, body in rest.asked] == [b"{}", most]
    assert "TOO_LARGE" in capsys.readouterr().err


def test_a_file_that_is_no_json_is_named(
    rest: FakeRest, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "t.json"
    file.write_text("{")
    for code, where in (("BAD_BODY", str(file)), ("INVALID_REQUEST", "body")):
        error = make_error(code, "not JSON", where="body").to_dict()
        rest.answers["POST /v1/system-update"] = (400, {"error": error})
        assert main(["apply", str(file), "--json"]) == ExitCode.BAD_INPUT
        assert document(capsys)["error"]["where"] == where


def test_what_was_stored_where(rest: FakeRest, capsys: pytest.CaptureFixture[str]) -> None:
    rest.answers["POST /v1/kpis/store"] = (200, {"path": "/var/k.jsonl", "count": 7})
    assert main(["kpis", "store", "k.jsonl"]) == 0
    assert capsys.readouterr().out == "/var/k.jsonl: 7 records\n"
    assert json.loads(rest.asked[0][2]) == {"file": "k.jsonl"}
    assert main(["kpis", "store", "k.jsonl", "--force"]) == 0
    assert json.loads(rest.asked[1][2]) == {"file": "k.jsonl", "force": True}
    assert main(["kpis", "--force"]) == ExitCode.BAD_INPUT


def test_the_monitor_says_what_it_does(rest: FakeRest, capsys: pytest.CaptureFixture[str]) -> None:
    rest.answers["POST /v1/monitor"] = (200, {"on": True, "hz": 4.0})
    for words, line in (
        (["on"], "monitor: on, 4 samples per second"),
        (["on", "--hz", "0.5"], "monitor: on, 0.5 samples per second"),
        (["off"], "monitor: off"),
    ):
        assert main(["monitor", *words]) == 0
        assert capsys.readouterr().out == f"{line}\n"


@pytest.mark.parametrize("words", [["stop", "", "--yes", "--no-wait"], ["ping", ""]])
def test_an_empty_name_is_not_all_of_them(rest: FakeRest, words: list[str]) -> None:
    """``blockflow stop "$BLOCK" --yes`` of a script that has set no BLOCK."""
    assert main(words) == ExitCode.BAD_INPUT
    assert rest.asked == []


def test_a_system_that_does_not_end_in_time(
    rest: FakeRest, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    rest.answers["GET /v1/status"] = (200, {})
    rest.answers["POST /v1/shutdown"] = (202, {"accepted": True})
    rest.answers["GET /v1/health/live"] = (503, {"error": make_error("TIMEOUT", "x").to_dict()})
    monkeypatch.setattr(act, "_END_S", 0.25)  # it answers, if with an error: it has not ended
    assert main(["stop", "--yes"]) == ExitCode.NOT_READY
    assert "it has not ended yet" in capsys.readouterr().err
    assert [path for _, path, _ in rest.asked].count("/v1/health/live") >= 2
    rest.asked.clear()
    assert main(["stop", "--yes", "--no-wait"]) == 0
    assert [path for _, path, _ in rest.asked] == ["/v1/shutdown"]
    assert "shutting down" in capsys.readouterr().out


def test_names_to_complete_are_those_of_the_system_that_is_meant(rest: FakeRest) -> None:
    named = {"b": [{"name": "trunk"}, {"name": "head"}], "t": [{"name": "digit"}]}
    with FakeRest(
        {"GET /v1/blocks": (200, {"blocks": named["b"]}), "GET /v1/tasks": (200, {"tasks": []})}
    ) as other:
        context: Any = SimpleNamespace(params={"url": other.url})
        assert complete_block(context, "") == ["head", "trunk"]
        assert complete_block(context, "t") == ["trunk"]
        assert complete_task(context, "") == []
    rest.answers["GET /v1/tasks"] = (200, {"tasks": named["t"]})
    context = SimpleNamespace(params={})
    assert complete_task(context, "d") == ["digit"]
    assert complete_block(context, "") == []  # it answers with an error


def test_a_model_that_its_blocks_do_not_equal_is_of_no_use_to_export_again() -> None:
    assert exit_code(make_error("EXPORT_MISMATCH", "")) == ExitCode.BAD_INPUT


@pytest.mark.parametrize(
    ("code", "status", "said"),
    [
        (None, 0, ""),
        (7, 7, ""),
        ("no licence", 1, "blockflow: no licence\n"),
        ("", 1, "blockflow: \n"),
    ],
)
def test_an_end_of_the_users_own(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    code: Any,
    status: int,
    said: str,
) -> None:
    def end(*_: Any) -> None:
        raise SystemExit(code)

    monkeypatch.setattr(RestClient, "get", end)
    assert main(["status"]) == status
    assert capsys.readouterr().err == said


def test_only_up_handles_signals_by_itself() -> None:
    before = signal.getsignal(signal.SIGTERM)
    for words, own in ((["up"], True), (["drain", "up"], False), ([], False)):
        with cli_main._listening(words):
            assert (signal.getsignal(signal.SIGTERM) == cli_main._leave) is own
    assert signal.getsignal(signal.SIGTERM) == before


def test_what_a_users_code_prints_is_no_answer(capfd: pytest.CaptureFixture[str]) -> None:
    before = os.listdir("/proc/self/fd")
    with users_output():
        print("print")
        os.write(1, b"write\n")
    os.write(1, b"answer\n")
    assert len(os.listdir("/proc/self/fd")) == len(before)
    assert capfd.readouterr() == ("answer\n", "print\nwrite\n")


def test_lists_with_commas() -> None:
    assert commas(" a, b ,,c,") == ["a", "b", "c"] and commas(" , ") == []


def test_an_update_may_be_of_an_epoch(rest: FakeRest, tmp_path: Path) -> None:
    file = tmp_path / "t.json"
    file.write_text("{}")
    rest.answers |= {f"POST /v1/{way}": (200, OUTCOME) for way in ("system-update", "rollback")}
    assert main(["apply", str(file), "--if-epoch", "0"]) == 0
    assert main(["rollback", "--dry-run", "--if-epoch", "4"]) == 0
    assert [path.partition("?")[2] for _, path, _ in rest.asked] == [
        "wait=true&if_epoch=0",
        "dry_run=true&if_epoch=4",
    ]
    assert exit_code(make_error("EPOCH_MISMATCH", "x")) == ExitCode.FAILED
