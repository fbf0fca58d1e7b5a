"""``blockflow profile`` for real: processes that measure, interruption, choices, the Manager."""

from __future__ import annotations

import json
import os
import shlex
import signal
import sys
import time
from pathlib import Path
from subprocess import DEVNULL, PIPE
from typing import Any

import pytest
import torch
from torch import nn

from blockflow.bench.profiling import measurer as measurers
from blockflow.bench.profiling import run as profiling
from blockflow.bench.profiling.candidates import candidates
from blockflow.bench.profiling.child import errors_of
from blockflow.bench.profiling.measurer import Workshop
from blockflow.bench.profiling.plan import Cell, Effort
from blockflow.bench.profiling.run import Wish, measure
from blockflow.bench.results import ResultFile
from blockflow.cli.main import main
from blockflow.control.events import Launch
from blockflow.control.profiles import ProfileShelf
from blockflow.core.engines import select
from blockflow.core.errors import BlockFlowError
from blockflow.core.launchspec import StageSpec
from blockflow.core.model import TensorSpec
from blockflow.core.profile import StageProfile
from blockflow.engine.workshop import EngineWorkshop
from blockflow.launch.base import Launcher
from blockflow.repository.convert import convert_block
from blockflow.repository.echo import save_echo
from blockflow.repository.export import export_model
from blockflow.repository.machine import fingerprint
from blockflow.repository.profiles import ProfileStore
from blockflow.repository.repository import BlockRepository
from blockflow.repository.sources import LoadedModel
from tests.bench_rig import Forks
from tests.system_rig import idle_system
from tests.warm_rig import Warm

SPEC = TensorSpec("float32", ("rows", 16))
QUICK = Effort(confidence=0.5, seconds=0.2)


class Quiet:
    """Wants to know nothing."""

    def start(self, seconds: float) -> None: ...

    def step(self, candidate: Any, cell: Cell, left_s: float) -> None: ...


@pytest.fixture(scope="module")
def repository(tmp_path_factory: pytest.TempPathFactory) -> BlockRepository:
    repository = BlockRepository(tmp_path_factory.mktemp("profile") / "blocks")
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 4)).eval()
    export_model(LoadedModel(model, "net", SPEC), repository, names=["front", "back"], cuts=["2"])
    other = nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 8)).eval()
    export_model(LoadedModel(other, "other", SPEC), repository, names=["other"])
    save_echo(repository, "slow", SPEC, settings={"delay_ms": 60})
    return repository


@pytest.fixture(autouse=True)
def little_fixed_work(monkeypatch: pytest.MonkeyPatch) -> None:
    """It says how steady the machine is, which is no matter of these tests."""
    monkeypatch.setattr(profiling, "_CALIBRATE_S", 0.0)


@pytest.fixture
def forks(launcher: Launcher, monkeypatch: pytest.MonkeyPatch) -> None:
    """What measures has nothing to import. Fresh processes, as users have them, are left to the
    tests without this."""
    monkeypatch.setattr(measurers, "SubprocessLauncher", lambda: Forks(launcher))


@pytest.mark.usefixtures("forks")
def test_a_block_is_measured_chosen_and_handed_to_workers(
    repository: BlockRepository, tmp_path: Path
) -> None:
    wish = Wish(
        engines=["all"],
        precisions=["fp32", "bf16"],
        threads=[1],
        rows=[1, 4],
        effort=QUICK,
        choose=True,
        tolerance=0.05,
    )
    found = measure(repository, ["front"], wish, Quiet())
    by = {o.candidate.label: o for o in found.outcomes}
    assert by["exported fp32"].error == 0.0
    assert 0 < (by["exported bf16"].error or 0) < 0.05
    assert "blockflow convert front@1 --to onnx" in by["onnxruntime fp32"].reason
    (chosen,) = [j for j in found.judged if j.chosen]
    choice = repository.info("front").choices[fingerprint()]
    assert choice["engine"] == chosen.outcome.candidate.engine
    assert choice["tolerance"] == 0.05
    shelf = ProfileShelf(repository.root)
    stage = StageSpec(1, repository.info("front"), precision="auto").to_dict()
    order = Launch(
        1, "worker", "front#0", "m:f", {"stages": [stage], "device": "cpu", "threads": 1}
    )
    launch = shelf.attach(order)
    carried = StageSpec.from_dict(launch.spec["stages"][0]).profile
    assert carried is not None
    table = StageProfile.from_dict(carried)
    assert table.rows_measured(1) == (1, 4)
    assert table.engine == choice["engine"]
    other = Launch(1, "worker", "front#0", "m:f", {**order.spec, "device": "cuda:0"})
    assert shelf.attach(other) == other


@pytest.mark.usefixtures("forks")
def test_other_engines_are_measured_beside_the_reference(repository: BlockRepository) -> None:
    for package in ("onnx", "onnxscript", "onnxruntime", "openvino"):
        pytest.importorskip(package)
    convert_block(repository, "other", "onnx", EngineWorkshop())
    wish = Wish(
        engines=["onnxruntime", "openvino"],
        precisions=["fp32", "bf16"],
        threads=[1],
        rows=[1, 2],
        effort=QUICK,
        choose=True,
    )
    found = measure(repository, ["other"], wish, Quiet())
    by = {o.candidate.label: o for o in found.outcomes}
    assert next(iter(by)) == "exported fp32"
    for label in ("onnxruntime fp32", "openvino fp32"):
        assert by[label].error is not None and by[label].error < 1e-4, by[label].reason
        assert len(by[label].points) == 2
    assert "does not compute in 'bf16'" in by["onnxruntime bf16"].reason
    info = repository.info("other")
    chosen = select(info, machine=fingerprint())
    assert ProfileStore(repository.root).fresh([info], [chosen]).complete


@pytest.mark.usefixtures("forks")
def test_a_chain_is_measured_in_one_process(repository: BlockRepository) -> None:
    found = measure(
        repository, ["front", "back"], Wish(threads=[1], rows=[1, 2], effort=QUICK), Quiet()
    )
    (outcome,) = found.outcomes
    cell = Cell(1, 2)
    parts = sum(p[cell].mean_ms for p in outcome.parts)
    assert outcome.points[cell].mean_ms == pytest.approx(parts)
    with pytest.raises(BlockFlowError, match="back"):
        measure(repository, ["back", "front"], Wish(), Quiet())
    with pytest.raises(BlockFlowError, match="per block"):
        measure(repository, ["front", "back"], Wish(choose=True), Quiet())


def test_a_process_that_dies_is_a_reason(
    repository: BlockRepository, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("BLOCKFLOW_FAILPOINTS", "after_load=kill")
    wish = Wish(threads=[1], rows=[1], effort=QUICK, again=True)
    with pytest.raises(BlockFlowError, match="killed by SIGKILL"):
        measure(repository, ["front"], wish, Quiet())


@pytest.mark.usefixtures("forks")
def test_a_block_that_fails_is_a_reason(repository: BlockRepository, tmp_path: Path) -> None:
    save_echo(repository, "sour", SPEC, settings={"fail_on_load": 1})
    with pytest.raises(BlockFlowError, match="told to fail on load"):
        measure(repository, ["sour"], Wish(threads=[1], rows=[1], effort=QUICK), Quiet())


@pytest.mark.usefixtures("forks")
def test_a_measurer_pins_warms_and_stops_in_time(repository: BlockRepository) -> None:
    info = repository.info("slow")
    (candidate,) = candidates([info], ["echo"], ["fp32"], fingerprint())
    with Workshop([info], repository.root) as shop:
        measurer = shop.open(candidate, 1)
        times = measurer.measure(Cell(1, 2), 100, 0.2, first=False)
        assert 1 <= len(times) < 100
        assert all(t >= 60 for (t,) in times)
        assert measurer.errors([Cell(1, 2)], store=True) == [0.0]
        assert measurer.errors([Cell(1, 2)]) == [0.0]
        with pytest.raises(BlockFlowError):
            measurer.measure(Cell(1, 0), 1, 0.1, first=False)
        assert measurer.measure(Cell(1, 1), 1, 1.0, first=False)  # good for the next question
        measurer.close()
        with pytest.raises(BlockFlowError, match="ended"):
            measurer.measure(Cell(1, 1), 1, 1.0, first=False)


@pytest.mark.parametrize(
    ("y", "reference", "error"),
    [
        ([1.0, 2.0], [1.0, 4.0], 0.5),
        ([0.0], [0.0], 0.0),
        ([float("nan")], [1.0], None),
        ([1.0], [float("inf")], None),
        ([1.0, 2.0], [1.0], None),
    ],
)
def test_the_error(y: list[float], reference: list[float], error: float | None) -> None:
    assert errors_of([torch.tensor(y)], [torch.tensor(reference)]) == [error]


def command(*args: str) -> list[str]:
    return [sys.executable, "-m", "blockflow", "profile", *args]


@pytest.mark.usefixtures("forks")  # for what is measured in this process, in the end
def test_ctrl_c_keeps_what_was_measured(repository: BlockRepository, warm: Warm) -> None:
    args = ["slow", "-r", str(repository.root), "--threads", "1", "--rows", "1,2,4,8"]
    args += ["--seconds", "0.3", "--confidence", "0.9"]
    folder = repository.root / "slow" / "profiles"
    with warm.popen(command(*args), stderr=PIPE, stdout=PIPE) as child:
        deadline = time.monotonic() + 60
        while not list(folder.glob("*.json")) and time.monotonic() < deadline:
            time.sleep(0.01)
        child.send_signal(signal.SIGINT)
        out, err = child.communicate(timeout=30)
        assert child.returncode == 130, err
    assert b"the same command goes on" in out
    assert b"Traceback" not in err
    store = ProfileStore(repository.root)
    (record,) = store.records("slow")
    assert not record.complete
    assert 1 <= len(record.profile.points) < 4
    assert main(["profile", *args, "--json"]) == 0
    (record,) = store.records("slow")
    assert record.complete
    assert len(record.profile.points) == 4


def test_a_killed_one_leaves_nothing_after_the_next(
    repository: BlockRepository, warm: Warm
) -> None:
    save_echo(repository, "killed", SPEC, settings={"delay_ms": 20})
    args = ["killed", "-r", str(repository.root), "--threads", "1", "--rows", "1,2"]
    folder, root = repository.root / "killed" / "profiles", Path(os.environ["BLOCKFLOW_RUN_ROOT"])
    before = set(root.iterdir())  # of fixtures that live longer
    with warm.popen(command(*args), stderr=DEVNULL) as child:
        deadline = time.monotonic() + 60
        while not list(folder.glob("*.json")) and time.monotonic() < deadline:
            time.sleep(0.01)
        assert set(root.iterdir()) - before
        child.kill()
    # the measuring process sees its socket close and ends: the session's leak check looks for it
    with Workshop([repository.info("killed")], repository.root):
        assert len(set(root.iterdir()) - before) == 1
    assert set(root.iterdir()) == before


@pytest.mark.usefixtures("forks")
def test_the_command_prints_stores_and_draws(
    repository: BlockRepository, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    results, png = tmp_path / "profile.jsonl", tmp_path / "profile.png"
    args = ["profile", "back", "-r", str(repository.root), "--threads", "1", "--rows", "1,2,4"]
    args += ["--seconds", "0.2", "--confidence", "0.5", "--results", str(results)]
    pytest.importorskip("matplotlib")
    assert main([*args, "--plot", str(png)]) == 0
    out = capsys.readouterr().out
    assert "back: exported fp32" in out
    assert "fit for 1 thread" in out
    assert "fixed work" in out
    assert png.read_bytes().startswith(b"\x89PNG")
    lines = ResultFile(results, "profile").read()
    assert [x["batch"] for x in lines] == [1, 2, 4]
    assert all(x["benchmark"] == "profile" and x["labels"]["threads"] == 1 for x in lines)
    wanted = ["blockflow", "profile", "back", "--repository", str(repository.root), "--threads"]
    assert shlex.split(lines[0]["command"])[: len(wanted)] == wanted
    assert " --again " in lines[0]["command"], "what is stored now would not be measured"
    (again,) = {x["command"] for x in lines}
    assert main(shlex.split(again)[1:]) == 0
    repeated = ResultFile(results, "profile").read()
    assert [x["batch"] for x in repeated] == [1, 2, 4]
    assert {x["command"] for x in repeated} == {again}
    assert "cells from before" not in capsys.readouterr().out
    assert main(["profile", "back", "-r", str(repository.root), "--show", "--json"]) == 0
    (shown,) = json.loads(capsys.readouterr().out)["blocks"]
    assert shown["profiles"][0]["fresh"] is True
    assert main(["profile", "back", "-r", str(repository.root), "--show"]) == 0
    assert "holds" in capsys.readouterr().out
    (path,) = (repository.root / "back" / "profiles").glob("*.json")
    stored = json.loads(path.read_text())
    stored["facts"]["torch"] = "1.0"
    path.write_text(json.dumps(stored))
    assert main(["profile", "back", "-r", str(repository.root), "--show"]) == 2
    err = capsys.readouterr().err
    assert "STALE_PROFILE" in err
    assert "torch: measured on 1.0" in err
    assert main(["profile", "back", "-r", str(repository.root), "--show", "--json"]) == 2
    printed = capsys.readouterr()
    shown = json.loads(printed.out)  # one document: the stale table, and what is wrong with it
    assert shown["blocks"][0]["profiles"][0]["fresh"] is False
    assert shown["error"]["code"] == "STALE_PROFILE"
    assert "STALE_PROFILE" in printed.err
    assert "blockflow profile back" in err
    path.write_text("{")
    assert main(["profile", "back", "-r", str(repository.root), "--show"]) == 2
    printed = capsys.readouterr()
    assert "cannot be read" in printed.out
    assert "STALE_PROFILE" in printed.err
    assert main(["profile", "back", "-r", str(repository.root), "--show", "--json"]) == 2
    (shown,) = json.loads(capsys.readouterr().out)["blocks"]
    assert shown["profiles"] == []
    assert shown["unreadable"][0]["where"] == str(path)


@pytest.mark.parametrize(
    ("args", "text"),
    [
        (["nope"], "UNKNOWN_BLOCK"),
        (["front", "--chain", "front,back"], "name blocks, or --chain"),
        (["--chain", ","], "the chain has no blocks"),
        (["front", "--rows", "0"], "not within 1 to"),
        (["front", "--rows", "x"], "no number"),
        (["front", "--rows", "4-2"], "not within 1 to"),
        (["front", "--rows", "1-99999999"], "too wide a range"),
        (["front", "--rows", "1,100000"], "takes up to"),
        (["front", "--threads", "4096"], "cores"),
        (["front", "--lengths", "16"], "no lengths"),
        (["front", "--engines", "exportd"], "did you mean exported"),
        (["front", "--precisions", "fp31"], "did you mean"),
        (["front", "--engines", "openvino"], "blockflow convert front@1 --to onnx"),
        (["front", "--confidence", "0"], "confidence"),
        (["front", "--seconds", "-1"], "seconds"),
        (["front", "--choose", "--tolerance", "0"], "tolerance"),
        (["front", "--option", "x"], "KEY=VALUE"),
        (["--task", "t", "--topology", "/nonexistent.json"], "cannot be read"),
        (["front", "--show", "-r", "/nonexistent"], "UNKNOWN_BLOCK"),
        (["-r", "/nonexistent"], "no block to profile"),
    ],
)
def test_bad_input_is_named(
    repository: BlockRepository,
    args: list[str],
    text: str,
    capsys: pytest.CaptureFixture[str],
) -> None:
    where = [] if "-r" in args else ["-r", str(repository.root)]
    assert main(["profile", *args, *where]) in (2, 5)
    assert text in capsys.readouterr().err


@pytest.mark.usefixtures("forks")
def test_a_task_is_a_chain(
    repository: BlockRepository, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    topology = tmp_path / "topology.json"
    topology.write_text('{"blocks": ["front", "back"], "tasks": {"t": ["front", "back"]}}')
    args = ["profile", "-r", str(repository.root), "--topology", str(topology), "--task"]
    quick = ["--threads", "1", "--rows", "1", "--seconds", "0.2", "--confidence", "0.9"]
    assert main([*args, "t", *quick, "--json"]) == 0
    (found,) = json.loads(capsys.readouterr().out)["profiles"]
    assert found["blocks"] == ["front", "back"]
    assert main([*args, "u", *quick]) == 2
    assert "no task 'u'" in capsys.readouterr().err


@pytest.mark.usefixtures("forks")
def test_the_rest_document_of_a_block_says_whether_one_holds(
    repository: BlockRepository, tmp_path: Path, launcher: Launcher
) -> None:
    save_echo(repository, "plain", SPEC)
    with idle_system(repository.root, tmp_path / "state", launcher) as system:
        system.apply({"blocks": ["plain"], "tasks": {"t": ["plain"]}})
        told = system.commands.block("plain")["profile"]
        assert told["fresh"] is False
        assert told["command"].startswith("blockflow profile plain")
        measure(repository, ["plain"], Wish(threads=[1], rows=[1], effort=QUICK), Quiet())
        told = system.commands.block("plain")["profile"]
        assert told["fresh"] is True
        assert (told["engine"], told["threads"], told["points"]) == ("echo", [1], 1)
    assert os.path.isdir(repository.root / "plain" / "profiles")
