"""``blockflow bench thesis``: one experiment after the other; what is kept of those that fail."""

from __future__ import annotations

import csv
import errno
import json
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import pytest
from thesis_rig import silent

from blockflow.bench.canvas import new_page
from blockflow.bench.grid import Grid
from blockflow.bench.results import PARTIAL, Figure, ResultFile
from blockflow.bench.thesis.experiment import (
    Advance,
    Context,
    Data,
    Experiment,
    Findings,
    Plot,
    Settings,
    skip,
)
from blockflow.bench.thesis.outcome import Call, Outcome, State
from blockflow.bench.thesis.report import write_report
from blockflow.bench.thesis.run import Session, choose
from blockflow.cli import thesis as command
from blockflow.cli.exits import ExitCode
from blockflow.cli.main import main
from blockflow.core.errors import BlockFlowError, SystemError_, make_error

FIGURE = Figure("time", "handles", 1, 2.0, 3.0, 2.0, "ms", 5, labels={"thesis": 16.0})
CALL = Call(Settings(quick=True), "blockflow bench thesis", {"cpu": "a CPU", "cores": 2})


def good(_context: Context) -> Findings:
    page = new_page(2, 2)
    page.subplots().plot([1, 2])
    return Findings(
        "handles are <quicker>",
        [FIGURE],
        [Grid("Table 4.3", ("what", "ms"), [("time", "2.00"), (), ("more", "3.00")])],
        [Plot("A picture", "picture", page)],
        [Data("samples", ("round", "ms"), [(0, 2.0), (1, 3.5)])],
        ["a note"],
    )


def experiment(name: str, run: Callable[[Context], Findings], **more: Any) -> Experiment:
    return Experiment(name, (f"table of {name}",), f"title of {name}", run, **more)


class Screen:
    """Remembers what was shown."""

    def __init__(self) -> None:
        self.begun: list[tuple[str, int, int]] = []
        self.ended_with: list[Outcome] = []

    def begins(self, experiment: Experiment, number: int, count: int) -> None:
        self.begun.append((experiment.name, number, count))

    def step(self, what: str, parts: int | None) -> AbstractContextManager[Advance]:
        return silent(what, parts)

    def ended(self, outcome: Outcome) -> None:
        self.ended_with.append(outcome)


def session(out: Path, *experiments: Experiment) -> tuple[Session, Screen]:
    screen = Screen()
    made = Session(experiments, CALL, out, screen)
    made.run()
    return made, screen


def failing(exc: BaseException) -> Callable[[Context], Findings]:
    def run(context: Context) -> Findings:
        context.keep([FIGURE])
        raise exc

    return run


@pytest.fixture(autouse=True)
def quick_calibration(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("blockflow.bench.thesis.run.calibrate", lambda _s: [1.0] * 5)


def test_everything_of_an_experiment_is_written(tmp_path: Path) -> None:
    made, screen = session(tmp_path / "out", experiment("first", good))
    assert screen.begun == [("first", 1, 1)]
    assert [o.state for o in screen.ended_with] == [State.DONE]
    [document] = made.documents
    assert json.loads((tmp_path / "out" / "first.json").read_text()) == document
    assert {p.name for p in (tmp_path / "out").iterdir()} == {"first.json", *document["files"]}
    assert document["tables"][0]["rows"] == [["time", "2.00"], ["more", "3.00"]]
    assert document["pictures"] == [{"title": "A picture", "file": "first-picture.png"}]
    assert document["settings"]["quick"]
    lines = ResultFile(tmp_path / "out" / "first.jsonl", "").read()
    assert Figure.from_dict(lines[0]) == FIGURE
    assert lines[0]["benchmark"] == "thesis-first"
    assert lines[0]["command"] == CALL.command
    assert {line["name"] for line in lines} == {"time", "fixed work"}
    with (tmp_path / "out" / "first.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert (rows[0]["value"], rows[0]["unit"], rows[0]["thesis"]) == ("2.0", "ms", "16.0")
    assert rows[1]["thesis"] == ""
    with (tmp_path / "out" / "first-samples.csv").open(newline="") as file:
        assert list(csv.reader(file)) == [["round", "ms"], ["0", "2.0"], ["1", "3.5"]]


FULL = OSError(errno.ENOSPC, "No space left on device", "samples.csv")


@pytest.mark.parametrize(
    ("exc", "code"),
    [
        (make_error("BLOCK_UNAVAILABLE", "the system died"), "BLOCK_UNAVAILABLE"),
        (FULL, "NO_SPACE"),
        (TimeoutError("no answer"), "TIMEOUT"),
        (ZeroDivisionError("a defect"), "INTERNAL"),
        (ConnectionResetError("gone"), "INTERNAL"),
    ],
)
def test_one_that_fails_keeps_what_it_had_and_the_others(
    exc: Exception, code: str, tmp_path: Path
) -> None:
    made, _ = session(tmp_path, experiment("bad", failing(exc)), experiment("good", good))
    bad, other = made.outcomes
    assert (bad.state, other.state) == (State.FAILED, State.DONE)
    assert bad.error is not None
    assert bad.error.code == code
    assert made.failed == [bad]
    document = json.loads((tmp_path / "bad.json").read_text())
    assert document["partial"]
    assert document["error"]["code"] == code
    lines = ResultFile(tmp_path / "bad.jsonl", "").read()
    kept = [Figure.from_dict(line) for line in lines if line["name"] == "time"]
    assert [f.labels[PARTIAL] for f in kept] == [True]
    assert kept[0].value == FIGURE.value


def test_what_cannot_run_here_is_skipped_with_its_reason(tmp_path: Path) -> None:
    def never(_context: Context) -> Findings:
        raise AssertionError("it was run")

    needing = experiment("needing", never, needs=(lambda _s: None, lambda _s: "one device"))
    made, _ = session(tmp_path, needing, experiment("asking", lambda _c: skip("no meter")))
    assert [o.state for o in made.outcomes] == [State.SKIPPED, State.SKIPPED]
    assert [d["skipped"] for d in made.documents] == ["one device", "no meter"]
    assert made.failed == []
    assert {p.name for p in tmp_path.iterdir()} == {"needing.json", "asking.json"}


def test_a_finding_may_be_a_failure_without_an_error(tmp_path: Path) -> None:
    def wrong(_context: Context) -> Findings:
        return Findings("a table does not come out", [FIGURE], failed=True)

    made, _ = session(tmp_path, experiment("wrong", wrong))
    assert [o.state for o in made.failed] == [State.FAILED]
    assert not made.documents[0]["partial"]


def test_an_interrupt_keeps_what_there_is_and_ends_the_call(tmp_path: Path) -> None:
    interrupted = experiment("interrupted", failing(KeyboardInterrupt()))
    made, screen = session(tmp_path, interrupted, experiment("later", good))
    assert made.interrupted
    assert [name for name, _, _ in screen.begun] == ["interrupted"]
    assert json.loads((tmp_path / "interrupted.json").read_text())["error"]["code"] == "CANCELLED"


def test_a_picture_that_cannot_be_drawn_costs_no_other_experiment(tmp_path: Path) -> None:
    def undrawable(context: Context) -> Findings:
        found = good(context)
        return Findings(found.says, found.figures, plots=[Plot("A picture", "picture", None)])

    ran, _ = session(tmp_path, experiment("first", undrawable), experiment("second", good))
    first, second = ran.outcomes
    assert first.error is not None and first.error.code == "INTERNAL"
    assert second.error is None and (tmp_path / "second.json").exists()


def test_a_full_disk_costs_the_files_and_not_the_next_experiment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(_page: object, path: Path) -> None:
        if path.name.startswith("first"):
            raise OSError(errno.ENOSPC, "No space left on device", str(path))

    monkeypatch.setattr("blockflow.bench.thesis.outcome.save_page", full)
    made, screen = session(tmp_path, experiment("first", good), experiment("second", good))
    first, second = made.outcomes
    assert first.error is not None
    assert first.error.code == "NO_SPACE"
    assert first.findings.tables  # on the screen it is whole
    assert screen.ended_with == [first, second]
    assert second.state is State.DONE
    assert (tmp_path / "second.json").exists()


def test_scratch_folders_are_gone_afterwards(tmp_path: Path) -> None:
    seen: list[Path] = []

    def look(context: Context) -> Findings:
        seen.append(context.scratch)
        (context.scratch / "file").write_text("x")
        return Findings("looked")

    session(tmp_path, experiment("one", look), experiment("two", look))
    assert len(set(seen)) == 2
    assert not any(path.exists() for path in seen)


def test_a_later_run_leaves_nothing_of_an_earlier_one(tmp_path: Path) -> None:
    session(tmp_path, experiment("first", good), experiment("other", good))
    (tmp_path / "first.json").write_text(
        (tmp_path / "first.json").read_text().replace("first.csv", "../first.csv")
    )
    session(tmp_path, experiment("first", lambda _c: Findings("now nothing but this")))
    left = {p.name for p in tmp_path.iterdir() if p.name.startswith("first")}
    # The fixed work's figures are there; the picture and the samples are not.
    assert left == {"first.json", "first.jsonl", "first.csv"}
    assert (tmp_path / "other-picture.png").exists()


def test_the_report_has_every_experiment_and_says_what_is_partial(tmp_path: Path) -> None:
    names = ["first", "bad", "needing"]
    session(
        tmp_path,
        experiment("first", good),
        experiment("bad", failing(make_error("TIMEOUT", "too late", hint="wait longer"))),
        experiment("needing", lambda _c: skip("one device")),
    )
    write_report(tmp_path, names)
    text = (tmp_path / "report.md").read_text()
    assert "| bad | table of bad | failed, PARTIAL |" in text
    assert "| needing | table of needing | skipped | not run: one device |" in text
    assert "# title of first (table of first)" in text
    assert "![A picture](first-picture.png)" in text
    assert "PARTIAL: the experiment broke off" in text
    assert "wait longer" in text
    page = (tmp_path / "report.html").read_text()
    assert "handles are &lt;quicker&gt;" in page
    assert "<quicker>" not in page
    # A second call with one of them leaves the others in the report.
    session(tmp_path, experiment("bad", good))
    write_report(tmp_path, names)
    text = (tmp_path / "report.md").read_text()
    assert "| first | table of first | done |" in text
    assert "| bad | table of bad | done |" in text


def test_names_are_chosen_in_the_registrys_order() -> None:
    registry = [experiment(name, good) for name in ("a", "b", "c")]
    assert [e.name for e in choose(registry, [])] == ["a", "b", "c"]
    assert [e.name for e in choose(registry, ["c", "a"])] == ["a", "c"]
    with pytest.raises(BlockFlowError, match=r"no such experiment: x.*a, b, c"):
        choose(registry, ["a", "x"])


# --- the command ---------------------------------------------------------------------------------


def call(*args: str, out: Path) -> int:
    return main(["bench", "thesis", "--device", "cpu", "--out", str(out), *args])


def test_the_command_writes_and_says_all(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(command, "EXPERIMENTS", (experiment("first", good),))
    assert call("--quick", "--json", out=tmp_path) == ExitCode.OK
    captured = capsys.readouterr()
    document = json.loads(captured.out)
    assert [e["name"] for e in document["experiments"]] == ["first"]
    assert document["experiments"][0]["settings"]["model"] == "resnet18"
    assert "Table 4.3" in captured.err
    assert "=> handles are <quicker>" in captured.err
    assert (tmp_path / "report.html").exists()


@pytest.mark.parametrize(
    ("run", "status"),
    [
        (failing(make_error("NOT_RUNNING", "gone")), ExitCode.NOT_RUNNING),
        (failing(FULL), ExitCode.FAILED),
        (failing(ZeroDivisionError()), ExitCode.INTERNAL),
        (failing(KeyboardInterrupt()), ExitCode.INTERRUPTED),
        (lambda _c: Findings("wrong", failed=True), ExitCode.FAILED),
        (lambda _c: skip("one device"), ExitCode.OK),
    ],
)
def test_the_exit_status_tells(
    run: Callable[[Context], Findings],
    status: int,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(command, "EXPERIMENTS", (experiment("it", run), experiment("next", good)))
    assert call("--json", out=tmp_path) == status
    document = json.loads(capsys.readouterr().out)  # one document, whatever happened
    assert document["experiments"][0]["name"] == "it"
    assert (tmp_path / "report.md").exists()
    assert (tmp_path / "next.json").exists() == (status != ExitCode.INTERRUPTED)


def test_wrong_arguments_are_refused_before_anything_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(command, "EXPERIMENTS", (experiment("first", good),))
    out = tmp_path / "out"
    for args in (
        ["--only", "x"],
        ["--model", "transformer"],
        ["--engine", "x"],
        ["--device", "gpu"],
        ["--constants", "x"],
    ):
        assert call(*args, out=out) == ExitCode.BAD_INPUT, args
    assert not out.exists()
    file = tmp_path / "file"
    file.write_text("")
    assert call(out=file / "below") == ExitCode.BAD_INPUT
    assert "--out" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("asked", "there", "used"),
    [("auto", True, "cuda:0"), ("auto", False, "cpu"), ("cuda:1", True, "cuda:1")],
)
def test_the_device_is_the_gpu_where_there_is_one(
    asked: str, there: bool, used: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(command, "find_device", gpu(there))
    seen: list[str] = []

    def look(context: Context) -> Findings:
        seen.append(context.settings.device)
        return Findings("looked")

    monkeypatch.setattr(command, "EXPERIMENTS", (experiment("first", look),))
    assert main(["bench", "thesis", "--device", asked, "--out", str(tmp_path)]) == ExitCode.OK
    assert seen == [used]


def test_a_gpu_that_is_not_there_is_refused(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(command, "find_device", gpu(True))  # of which two are there
    assert call("--device", "cuda:9", out=tmp_path / "out") == ExitCode.BAD_INPUT
    assert "no GPU cuda:9" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def gpu(there: bool) -> Callable[[str], Any]:
    class Api:
        def close(self) -> None:
            pass

    def find(name: str) -> Api:
        if not there or name not in ("cuda:0", "cuda:1"):
            raise SystemError_("MISSING_EXTRA", f"no GPU {name} on this machine")
        return Api()

    return find


def test_the_list_says_what_there_is(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    needing = experiment("needing", good, needs=(lambda _s: "one device",))
    monkeypatch.setattr(command, "EXPERIMENTS", (experiment("first", good), needing))
    assert call("--list", "--json", out=tmp_path / "out") == 0
    listed = json.loads(capsys.readouterr().out)["experiments"]
    assert [(e["name"], e["skipped"]) for e in listed] == [
        ("first", None),
        ("needing", "one device"),
    ]
    assert call("--list", out=tmp_path / "out") == 0
    assert "title of first" in capsys.readouterr().out
    assert not (tmp_path / "out").exists()


def test_bench_itself_still_wants_a_task(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench"]) == 2
    assert "Missing option '--task'" in capsys.readouterr().err
    assert main(["bench", "--task", "a", "thesis", "--list"]) == 2
    assert "not its own" in capsys.readouterr().err
    assert main(["bench", "nonsense"]) == 2
