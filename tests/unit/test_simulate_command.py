"""``blockflow simulate``: what it takes and refuses; and its helper processes."""

from __future__ import annotations

import errno
import io
import json
import os
import re
import signal
import subprocess
from dataclasses import replace
from itertools import count
from pathlib import Path
from typing import Any

import pytest
from control_rig import save_echoes

from blockflow.batching import registry
from blockflow.batching.none import NonePolicy
from blockflow.bench.grid import digits
from blockflow.bench.simulation import child, farm
from blockflow.bench.simulation.example import example_profiles
from blockflow.bench.simulation.experiment import Cell, Runner
from blockflow.bench.simulation.outcome import Outcome
from blockflow.bench.simulation.watch import InvariantBroken
from blockflow.cli.exits import ExitCode
from blockflow.cli.main import main
from blockflow.core.errors import BlockFlowError, make_error
from blockflow.core.model import TensorSpec
from blockflow.core.profile import StageProfile
from blockflow.repository.echo import save_echo
from blockflow.repository.machine import describe, fingerprint
from blockflow.repository.profile_record import ProfileKey, ProfileRecord, ran_by
from blockflow.repository.profiles import ProfileStore
from blockflow.repository.repository import BlockRepository
from tests.simulate_rig import PLAN, SHORT, document, refused, simulate


def test_closed_loops_and_traces(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    (closed,) = document(capsys, *SHORT, "--arrivals", "closed:4")["entries"]
    assert closed["throughput"]["value"] == pytest.approx(42, rel=0.15)
    trace = tmp_path / "t.csv"
    trace.write_text("time,rows\n0.1,1\n0.2,2\n0.3,3\n")
    found = document(capsys, "--example", "--arrivals", str(trace), "--warmup", "0", "--seeds", "1")
    assert found["queries"] == 3
    assert found["experiment"]["duration_s"] == pytest.approx(0.301)
    assert [(e["rate"], e["load"]) for e in (closed, *found["entries"])] == [(None, None)] * 2


def test_a_stored_profile_is_used(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    repository, store = save_echoes(tmp_path, "a", "b"), ProfileStore(tmp_path)
    where = ("--repository", str(tmp_path), "--blocks", "a,b", "--seeds", "1", "--duration", "1")
    error = refused(capsys, *where)
    assert error["code"] == "NO_PROFILE"
    first, second = error["hint"].removeprefix("measure them: ").split(" && ")
    assert first.startswith("blockflow profile a ")
    assert second.startswith("blockflow profile b ")
    from blockflow.core.engines import select

    for name in ("a", "b"):
        info = repository.info(name)
        selection = select(info, machine=store.machine)
        points = example_profiles()[0].points
        key = ProfileKey.of([name], [selection])
        profile = StageProfile(
            name, info.digest, selection.engine, selection.precision, fingerprint(), points
        )
        ran = ran_by([info], [selection])
        store.save(ProfileRecord(key, profile, (), ran, describe(), {}, True, "2026-01-01"))
    found = document(capsys, *where)
    assert [s["block"] for s in found["experiment"]["system"]["workers"][0]["stages"]] == ["a", "b"]
    topology = tmp_path / "topology.json"
    blocks = [{"name": "x", "block": "a", "batching": {"policy": "window", "max_rows": 4}}, "b"]
    topology.write_text(json.dumps({"blocks": blocks, "tasks": {"t": ["x", "b"], "u": ["b"]}}))
    where = ("-r", str(tmp_path), "--topology", str(topology), *SHORT[1:], "--seeds", "1")
    found = document(capsys, *where, "--cores", "2", "--task", "t@3")
    assert [w["name"] for w in found["experiment"]["system"]["workers"]] == ["x", "b"]
    assert list(found["entries"][0]["tasks"]) == ["t"]
    assert found["entries"][0]["policy"] == "topology"
    assert [w["lanes"] for w in found["experiment"]["system"]["workers"]] == [1, 1]
    # Planned as when it is deployed: a policy that overlaps gets the core that is left.
    blocks = [{"name": n, "worker": "w", "threads": 1, "batching": "dvabatch"} for n in ("a", "b")]
    pair = tmp_path / "pair.json"
    pair.write_text(json.dumps({"blocks": blocks, "tasks": {"t": ["a", "b"]}}))
    again = [str(pair) if a == str(topology) else a for a in where]
    found = document(capsys, *again, "--cores", "2")
    assert [w["lanes"] for w in found["experiment"]["system"]["workers"]] == [2]
    assert refused(capsys, *where, "--task", "v")["message"] == "task 'v' is not in the topology"
    for option in ("blocks", "replicas", "threads", "lanes", "slots", "max-rows", "deadline-ms"):
        error = refused(capsys, *where, f"--{option}", "2")
        assert (error["message"], error["where"]) == ("the topology says that", f"--{option}")
    # Blocks that none of the tasks needs are not asked for a profile.
    save_echo(repository, "c", TensorSpec("float32", ("rows", 4)))
    more = {"blocks": [*blocks, "c"], "tasks": {"t": ["a", "b"], "u": ["c"]}}
    pair.write_text(json.dumps(more))
    assert document(capsys, *again, "--cores", "2", "--task", "t")
    assert refused(capsys, *again, "--cores", "2")["code"] == "NO_PROFILE"
    # What cannot work is told where it stands.
    late = {"name": "x", "block": "a", "batching": {"policy": "lbci", "t_opt_ms": 0.001}}
    topology.write_text(json.dumps({"blocks": ["b", late], "tasks": {"t": ["x", "b"]}}))
    (problem,) = refused(capsys, *where)["problems"]
    assert problem["path"].startswith("$.blocks[1].batching")
    # So are the tasks' shares: what --share says of a task stands in the place of the topology's.
    asked = {"weight": 2.0, "priority": 3, "max_batch_rows": 4}
    tasks = {"t": {"path": ["x", "b"], **asked}, "u": {"path": ["b"], "priority": 1}}
    topology.write_text(json.dumps({"blocks": ["b", {"name": "x", "block": "a"}], "tasks": tasks}))
    found = document(capsys, *where, "--cores", "2", "--share", "u:weight=5")
    shares = {t["name"]: t["share"] for t in found["experiment"]["system"]["tasks"]}
    assert shares == {"t": asked, "u": {"weight": 5, "priority": 0, "max_batch_rows": 0}}


# --- what it refuses -----------------------------------------------------------------------------


def test_blocks_that_do_not_follow_one_another(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    repository = BlockRepository(tmp_path)
    for name, width in (("a", 4), ("b", 5)):
        save_echo(repository, name, TensorSpec("float32", ("rows", width)))
    for path in (["--blocks", "a,b"], ["--task", "t=a,b"]):
        error = refused(capsys, "-r", str(tmp_path), *path)
        assert error["message"].startswith("b does not take what a gives")


@pytest.mark.parametrize(
    ("args", "says"),
    [
        ([], "nothing to simulate"),
        (["--example", "--topology", "t.json"], "more than one source"),
        (["--example", "--blocks", "a", "--task", "t=a"], "--blocks is one task"),
        (["--example", "--blocks", "stem,nose"], "no profile of 'nose'"),
        (["--example", "--load", "0.5", "--rate", "3"], "exclude each other"),
        (["--example", "--load", "0.5,x"], "'x' is no number"),
        (["--example", "--load", "0"], "not above 0"),
        (["--example", "--rate", "3,3"], "stands twice"),
        (["--example", "--rate", "1e6"], "would take hours"),
        (["--example", "--arrivals", "closed:2", "--rate", "3"], "has its own rate"),
        (["--example", "--rows", "64"], "more than a batch may have"),
        (["--example", "--lengths", "8"], "no block has a variable length"),
        (["--example", "--warmup", "60"], "warm-up"),
        (["--example", "--policy", "none", "--policy", "none"], "named twice"),
        (["--example", "--policy", "topology"], "goes with --topology"),
        (["--example", "--threads", "3", "--cores", "4"], "were not measured"),
        (["--example", "--threads", "3", "--cores", "4"], "3 threads were not measured for stem"),
        (["--example", "--threads", "2", "--cores", "1"], "2 threads on 1 core"),
        (["--example", "--lanes", "2", "--apart"], "2 lanes for the one block"),
        (["--example", "--share", "task:weight=0"], "weight"),
        (["--profile", "nowhere.json"], "no profile can be read"),
        (["--topology", "nowhere.json"], "cannot be read"),
        (["--topology", "t.json", "--apart"], "the topology says that"),
        (["--topology", "t.json", "--replicas", "1"], "the topology says that"),
    ],
)
def test_nonsense_is_refused(
    capsys: pytest.CaptureFixture[str], args: list[str], says: str
) -> None:
    error = refused(capsys, *args)
    assert says in error["message"]
    assert error["code"] == "INVALID_REQUEST"


@pytest.mark.parametrize("command", [["simulate"], ["profile", "--show", "--task", "t"]])
@pytest.mark.parametrize(
    ("said", "code"),
    [('{"blocks": [], "tasks": {}, "tasks": {"t": []}}', "BAD_BODY"), (" " * 2**21, "TOO_LARGE")],
)
def test_a_topology_is_read_as_one_that_is_applied(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, command: list[str], said: str, code: str
) -> None:
    (tmp_path / "t.json").write_text(said)
    where = ["--topology", str(tmp_path / "t.json"), "--repository", str(tmp_path), "--json"]
    assert main([*command, *where]) == ExitCode.BAD_INPUT
    assert json.loads(capsys.readouterr().out)["error"]["code"] == code


@pytest.mark.parametrize(
    ("policy", "says"),
    [
        ("windw", "unknown policy 'windw'"),
        ("window:rows=3", "no option 'rows'"),
        ("lbci:t_opt_ms=2", "cannot be met"),
        ("window:max_rows=64", "laid out for"),
    ],
)
def test_policies_that_cannot_be(
    capsys: pytest.CaptureFixture[str], policy: str, says: str
) -> None:
    error = refused(capsys, "--example", "--policy", policy)
    assert error["code"] == "INVALID_TOPOLOGY"
    assert says in error["problems"][0]["message"]


@pytest.fixture
def encoder(tmp_path: Path) -> tuple[str, ...]:
    """A block of variable length, twice as fast at length 16 as at 64, for a second."""
    points = tuple(
        replace(p, length=n, p50_ms=p.p50_ms * times)
        for n, times in ((16, 1), (64, 2))
        for p in example_profiles()[0].points
    )
    file = tmp_path / "encoder.json"
    file.write_text(json.dumps(replace(example_profiles()[0], points=points).to_dict()))
    return ("--profile", str(file), "--seeds", "1", "--duration", "1")


def test_a_trace_that_tells_all_lengths_needs_no_others(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, encoder: tuple[str, ...]
) -> None:
    trace = tmp_path / "trace.csv"
    source = (*encoder, "--arrivals", str(trace), "--warmup", "0", "--exact")
    trace.write_text("time,length\n0.1,16\n0.5,16\n")
    short = document(capsys, *source)
    trace.write_text("time,length\n0.1,64\n0.5,64\n")
    long = document(capsys, *source)
    assert short["capacity"] > 1.5 * long["capacity"]
    assert short["entries"][0]["mean_ms"]["value"] < long["entries"][0]["mean_ms"]["value"]
    trace.write_text("time,length\n0.1,16\n0.5,\n")  # the second one's is to be drawn
    assert refused(capsys, *source)["where"] == "--lengths"
    trace.write_text("time,length\n0.1,65\n")
    assert "longest measured" in refused(capsys, *source)["message"]


def test_variable_blocks_need_lengths_that_were_measured(
    capsys: pytest.CaptureFixture[str], encoder: tuple[str, ...]
) -> None:
    source = encoder
    assert "max=64" in refused(capsys, *source)["hint"]
    assert "longest" in refused(capsys, *source, "--lengths", "uniform:1-65")["message"]
    classes = ("--policy", "window:max_rows=8,classes=[16,64]")
    assert document(capsys, *source, "--lengths", "lognormal:median=16,max=64", *classes)


def test_nothing_is_longer_than_the_last_class(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, encoder: tuple[str, ...]
) -> None:
    """A deployed system refuses that at the door: it is not to be seen as served."""
    policy = ("--policy", "none", "--policy", "window:classes=[8,16]")
    error = refused(capsys, *encoder, *policy, "--lengths", "uniform:1-17")
    assert error["message"] == "length 17 is over the last class 16: it would be refused"
    assert document(capsys, *encoder, *policy, "--lengths", "uniform:1-16")
    trace = tmp_path / "trace.csv"
    source = (*encoder, *policy, "--arrivals", str(trace), "--warmup", "0")
    trace.write_text("time,length\n0.1,40\n0.5,\n")
    found = refused(capsys, *source, "--lengths", "uniform:1-16")
    assert "length 40 is over" in found["message"]


# --- helper processes ----------------------------------------------------------------------------


def test_processes_find_what_one_finds(monkeypatch: pytest.MonkeyPatch) -> None:
    alone: dict[Cell, Outcome] = farm.run_all(PLAN, 1, lambda cell, outcome: None)
    assert set(alone) == set(PLAN.cells())
    monkeypatch.setattr(farm, "PAYS_S", 0.0)
    seen: list[Cell] = []
    assert farm.run_all(PLAN, 2, lambda cell, outcome: seen.append(cell)) == alone
    assert sorted(map(str, seen)) == sorted(map(str, alone))


def test_a_child_says_what_went_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    errors = {
        1: InvariantBroken("in order", 5, "planted"),
        2: make_error("INVALID_REQUEST", "planted too"),
    }
    errors[1].add_note("seed 1")
    real = Runner.run

    def run(self: Runner, cell: Cell) -> Outcome:
        if cell.seed in errors:
            raise errors[cell.seed]
        return real(self, cell)

    monkeypatch.setattr(Runner, "run", run)
    answers = io.StringIO()
    lines = [PLAN.to_dict(), [0, 0, 1], [0, 0, 2], [0, 0, 3]]
    child.serve(io.StringIO("".join(json.dumps(line) + "\n" for line in lines)), answers)
    broken, error, fine = map(json.loads, answers.getvalue().splitlines())
    with pytest.raises(InvariantBroken, match="in order: planted") as caught:
        farm._outcome(broken)
    assert caught.value.__notes__ == ["seed 1"]
    with pytest.raises(BlockFlowError, match="planted too"):
        farm._outcome(error)
    assert farm._outcome(fine).offered > 0


def test_a_child_that_ends_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(farm, "PAYS_S", 0.0)
    monkeypatch.setattr(farm.sys, "executable", "/bin/false")
    with pytest.raises(BlockFlowError, match="ended"):
        farm.run_all(PLAN, 2, lambda cell, outcome: None)


def test_no_child_is_left_where_another_cannot_be_started(monkeypatch: pytest.MonkeyPatch) -> None:
    begun: list[subprocess.Popen[str]] = []
    groups: list[int] = []
    start = subprocess.Popen

    def popen(_: Any, **pipes: Any) -> subprocess.Popen[str]:
        if begun:
            raise OSError(errno.EMFILE, "Too many open files")
        begun.append(start(["cat"], **pipes))
        groups.append(os.getpgid(begun[0].pid))
        return begun[0]

    monkeypatch.setattr(farm, "PAYS_S", 0.0)
    monkeypatch.setattr(farm.subprocess, "Popen", popen)
    with pytest.raises(OSError, match="Too many"):
        farm.run_all(PLAN, 2, lambda cell, outcome: None)
    (child,) = begun
    with child:
        assert child.returncode == -signal.SIGKILL
    assert groups == [child.pid]  # Ctrl-C goes to all of a group


def test_the_page_on_batching_shows_what_its_commands_say(
    capsys: pytest.CaptureFixture[str],
) -> None:
    page = (Path(__file__).resolve().parents[2] / "docs" / "batching.md").read_text()
    section = page.partition("## Threads or lanes?")[2].partition("\n## ")[0]
    commands = re.findall(r"^\$ blockflow simulate (.+)$", section, re.MULTILINE)
    alone = ("--processes", "1")  # finds the same, and starts no interpreters
    columns = [
        {
            e["rate"]: e["mean_ms"]["value"]
            for e in document(capsys, *command.split(), *alone)["entries"]
        }
        for command in commands
    ]
    assert len(columns) == 2
    for rate in columns[0]:
        cells = (f"{rate:g}", *(digits(column[rate]) for column in columns))
        assert f"| {' | '.join(cells)} |" in section
    threads, lanes = columns
    assert threads[min(threads)] < lanes[min(lanes)]
    assert threads[max(threads)] > lanes[max(lanes)]


@pytest.mark.parametrize("call", ["decide", "arrive", "done"])
def test_a_policy_of_ones_own_that_fails_is_told_as_such(
    call: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    calls, right = count(), getattr(NonePolicy, call)

    def fails(*given: Any) -> Any:
        if next(calls) >= good:
            raise ValueError("own")
        return right(*given)

    own = type("Own", (NonePolicy,), {"NAME": "own", call: fails})
    monkeypatch.setitem(registry.POLICIES, "own", own)
    good = 0  # so that its trial finds it
    status, out = simulate(capsys, *SHORT, "--policy", "own", "--json")
    error = json.loads(out)["error"]
    assert status == 2 and error["code"] == "INVALID_TOPOLOGY"
    assert f"policy 'own': {call}() failed with ValueError: own" in out
    good = 100
    status, out = simulate(capsys, *SHORT, "--policy", "own", "--json")
    error = json.loads(out)["error"]
    assert status == 1 and error["code"] == "INTERNAL"
    assert "policy 'own' raised ValueError: own" in error["message"]
    assert "seed 0" in error["where"] or "seed 1" in error["where"]
    assert "docs/writing-a-policy.md" in error["hint"]
