"""``blockflow bench``: the report's pictures; no LoadGen."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from mlperf_rig import server_job

from blockflow.bench.mlperf.batch_sizes import BatchSizes
from blockflow.bench.mlperf.pictures import draw
from blockflow.bench.mlperf.result import RunResult, ScenarioResult
from blockflow.bench.mlperf.settings import Mode
from blockflow.bench.mlperf.tally import Counts
from blockflow.bench.mlperf.verdict import RunVerdict
from blockflow.client.collector import BlockMeans

ALL = {"latency.png", "rate.png", "blocks.png", "batches.png"}
_PNG = b"\x89PNG"


def result(mode: Mode = Mode.PERFORMANCE, *, whole: bool = True) -> RunResult:
    settings = replace(server_job(short=True).settings, mode=mode)
    task = next(iter(settings.targets))
    return RunResult(
        Path("x"),
        settings,
        RunVerdict(True, (), None, False, {}),
        Counts(3, 3),
        (BlockMeans("trunk", 3, 0.1, 0.2, 0.3, 4.0),) if whole else (),
        {task: [4.0, 5.0, 6.0]} if whole else {},
        # One that was looked at, and one that was over before anybody looked.
        batches=(BatchSizes("trunk", 2, 3, (1.0, 2.0)), BatchSizes("head", 3, 3)) if whole else (),
    )


def test_every_part_of_what_was_measured_has_its_picture(tmp_path: Path) -> None:
    found = draw([ScenarioResult(result(), [result()], precision=0.05)], tmp_path)
    assert {name for _, name in found} == ALL == {p.name for p in tmp_path.iterdir()}
    assert all(p.read_bytes().startswith(_PNG) for p in tmp_path.iterdir())


def test_what_was_not_measured_has_none(tmp_path: Path) -> None:
    accuracy, nothing = result(Mode.ACCURACY), result(whole=False)
    assert draw([ScenarioResult(accuracy), ScenarioResult(nothing)], tmp_path) == []
    assert not list(tmp_path.iterdir())
