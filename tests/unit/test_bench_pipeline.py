"""The pipeline benchmark's arithmetic: shares, paired ratios, verdicts, tables, plans."""

from __future__ import annotations

import io
import json
from contextlib import nullcontext
from pathlib import Path

import pytest
from rich.console import Console

from blockflow.bench import pipeline
from blockflow.bench import pipeline_figures as pf
from blockflow.bench.contenders import CONTENDERS, Model
from blockflow.bench.in_process import Chain, Pipeline, example
from blockflow.bench.interrupts import INTERRUPTED
from blockflow.bench.kpi_reader import COPIES_IN, Counted
from blockflow.bench.pipeline import without_awake
from blockflow.bench.pipeline_figures import Sample, Series
from blockflow.bench.pipeline_plan import BENCH, PIPELINE, QUICK, parse_args
from blockflow.bench.pipeline_ways import (
    OUTSTANDING,
    WAYS,
    block_names,
    in_process_sample,
    task_name,
    topology,
)
from blockflow.bench.results import PARTIAL, Figure, ResultFile
from blockflow.bench.statistics import MIN_PAIRS
from blockflow.bench.worker_start import start_figures
from blockflow.core.model import BlockInfo, Contract, TensorSpec
from blockflow.engine.base import EngineOptions
from blockflow.engine.echo import EchoEngine

TAGS = {"engine": "exported", "precision": "fp32", "model": "digits"}
CHAIN = Model("resnet50").chain(CONTENDERS["exported"], Path("blocks"))


def sample(total: float, compute: float, overhead: float = 0.0, edge: float = 0.0) -> Sample:
    """Four equal hops."""
    hop = (overhead / 2, 0.0, overhead / 2, compute)
    return Sample(total, (hop,) * 4, edge)


def series(ratio: float, *, rows: int = 1, again: float = 1.0, precision: str = "fp32") -> Series:
    """Twelve rounds on a machine that gets twice as slow; ``ratio``: tensormq to in-process."""
    slow = [1 + i / 12 for i in range(12)]
    latency = {
        pf.IN_PROCESS: [sample(100 * s, 25 * s) for s in slow],
        pf.AGAIN: [sample(100 * s * again, 25 * s) for s in slow],
        pf.TENSORMQ: [sample(100 * s * ratio, 25 * s, 1.0) for s in slow],
    }
    return Series(rows, {**TAGS, "precision": precision}, latency)


def by_name(figures: list[Figure]) -> dict[tuple[str, str], Figure]:
    return {(f.name, f.mode): f for f in figures}


def test_parts_of_a_sample() -> None:
    one = sample(total=100.0, compute=20.0, overhead=4.0, edge=1.0)
    assert one.compute == 80.0
    assert one.hop_overhead == 4.0
    assert one.accounted == pytest.approx(0.97)
    assert in_process_sample([1.0, 2.0]).accounted == 1.0


def test_ratios_are_paired_by_round() -> None:
    found = by_name(series(1.04).figures())
    ratio = found[pf.RATIO, pf.TENSORMQ]
    assert (ratio.value, ratio.low, ratio.high) == pytest.approx((1.04, 1.04, 1.04))
    assert ratio.labels["verdict"] == "met"
    assert found[pf.COMPUTE_RATIO, pf.TENSORMQ].value == pytest.approx(1.0)
    assert found[pf.HOP, pf.TENSORMQ].p90_ms == 1.0
    assert (pf.HOP, pf.IN_PROCESS) not in found
    assert (pf.HOP, pf.AGAIN) not in found
    # A machine that gets slower looks as if its begin were apart: a third goes at most.
    assert found[pf.LATENCY, pf.IN_PROCESS].n == 8


def test_rounds_of_the_warm_up_of_any_way_count_for_none() -> None:
    latency = {way: [sample(100.0, 25.0, 1.0)] * 12 for way in (pf.IN_PROCESS, pf.TENSORMQ)}
    latency[pf.TENSORMQ] = [sample(900.0, 25.0, 200.0)] * 2 + latency[pf.TENSORMQ][2:]
    found = by_name(Series(1, TAGS, latency).figures())
    assert {found[pf.LATENCY, way].n for way in latency} == {10}
    assert found[pf.HOP, pf.TENSORMQ].p90_ms == 1.0
    few = by_name(Series(1, TAGS, {way: runs[:6] for way, runs in latency.items()}).figures())
    assert few[pf.LATENCY, pf.TENSORMQ].n == 5  # as many as a conclusion needs


@pytest.mark.parametrize(
    ("ratio", "rows", "again", "precision", "verdict"),
    [
        (1.06, 1, 1.0, "fp32", "missed"),
        (1.06, 1, 1.02, "fp32", "within noise"),
        (1.14, 1, 1.0, "bf16", "met"),
        (1.04, 8, 1.0, "fp32", "missed"),
        (1.02, 8, 1.0, "bf16", "met"),
    ],
)
def test_aims_depend_on_batch_and_precision_and_noise(
    ratio: float, rows: int, again: float, precision: str, verdict: str
) -> None:
    found = by_name(series(ratio, rows=rows, again=again, precision=precision).figures())
    assert found[pf.RATIO, pf.TENSORMQ].labels["verdict"] == verdict


def test_there_is_no_aim_for_what_nobody_asked() -> None:
    found = by_name(series(1.5, rows=32).figures())
    assert "verdict" not in found[pf.RATIO, pf.TENSORMQ].labels
    assert "verdict" not in found[pf.RATIO, pf.AGAIN].labels


@pytest.mark.parametrize(
    ("engine", "counted", "verdict"),
    [
        ("onnxruntime", Counted(0.0, 0.0, 8.0), ["met"]),
        ("openvino-bf16-rows", Counted(0.0, 0.0, 8.0), ["met"]),
        ("openvino", Counted(0.0, 1.0, 8.0), ["missed"]),
        ("openvino-bf16", Counted(0.25, 0.0, 8.0), ["missed"]),
        ("exported", Counted(0.0, 1.0, 8.0), []),
    ],
)
def test_native_engines_are_to_copy_nothing_by_handle(
    engine: str, counted: Counted, verdict: list[str]
) -> None:
    one = Series(8, {**TAGS, "engine": engine})
    one.counted = {pf.TENSORMQ: counted, pf.ZEROMQ: Counted(1.0, 1.0, 8.0)}
    rows = pf.aim_grid(one.figures()).rows
    assert [(row[0], row[1], row[2], row[-1]) for row in rows] == [
        (engine, "8", "tensormq: copies", v) for v in verdict
    ]


def test_what_processes_cost_by_themselves_is_told_apart() -> None:
    one = series(1.12)
    one.latency[pf.APART] = [sample(1.10 * s.total, s.compute) for s in one.latency[pf.IN_PROCESS]]
    found = by_name(one.figures())
    assert found[pf.RATIO, pf.APART].value == pytest.approx(1.10)
    assert found[pf.TO_APART, pf.TENSORMQ].value == pytest.approx(1.12 / 1.10)
    assert (pf.TO_APART, pf.APART) not in found and (pf.HOP, pf.APART) not in found
    assert (pf.TO_APART, pf.TENSORMQ) not in by_name(series(1.12).figures())


def test_what_was_measured_before_a_failure_lies_beside_an_earlier_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    class Dying:
        def __init__(self, *_: object) -> None:
            self.found = series(1.04).figures()

        def run(self) -> None:
            raise KeyboardInterrupt

    for name, double in (
        ("System", lambda *_: nullcontext()),
        ("Bench", Dying),
        ("calibrate", lambda: None),
        ("prepare_apart", lambda *_: None),
    ):
        monkeypatch.setattr(pipeline, name, double)
    earlier = tmp_path / "bench.jsonl"
    earlier.write_text("whole")
    assert pipeline.main(["--json", str(earlier)]) == INTERRUPTED
    assert earlier.read_text() == "whole"
    kept = [Figure.from_dict(f) for f in ResultFile(tmp_path / "bench-partial.jsonl", "").read()]
    assert [f.name for f in kept] == [f.name for f in series(1.04).figures()]
    assert all(f.labels[PARTIAL] for f in kept)
    assert "bench-partial.jsonl" in capsys.readouterr().out.replace("\n", "")


@pytest.mark.parametrize("text", ["x", "1,", "0", "8,-1", ""])
def test_nonsense_is_no_list_of_numbers(text: str, capsys: pytest.CaptureFixture[str]) -> None:
    for option in ("--batches", "--rounds"):
        with pytest.raises(SystemExit):
            parse_args([f"{option}={text}"])
        assert "is no list of numbers from 1 on" in capsys.readouterr().err


def test_throughput_is_a_share_of_the_bound() -> None:
    rates = {pf.BOUND: [20.0, 10.0, 20.0, 10.0, 20.0], pf.TENSORMQ: [19.8, 9.9, 19.8, 9.9, 19.8]}
    found = by_name(Series(8, TAGS, rates=rates).figures())
    ratio = found[pf.TO_BOUND, pf.TENSORMQ]
    assert ratio.value == pytest.approx(0.99)
    assert ratio.labels["verdict"] == "met"
    assert found[pf.THROUGHPUT, pf.BOUND].value == 20.0
    assert (pf.TO_BOUND, pf.BOUND) not in found


def test_tables_show_every_way_and_the_aims() -> None:
    one, load = series(1.04), series(1.3, rows=8)
    one.counted = {pf.TENSORMQ: Counted(0.0, 0.0, 2048.0)}
    one.memory = {pf.IN_PROCESS: 100.0, pf.TENSORMQ: 180.0}
    load.rates = {pf.BOUND: [20.0] * 5, pf.TENSORMQ: [19.0] * 5, pf.REPLICATED: [19.0] * 5}
    figures = [*one.figures(), *load.figures(), *start_figures(STARTS)]
    assert len([r for r in pf.latency_grid(figures).rows if r]) == 6
    assert len(pf.throughput_grid(figures).rows) == 3
    assert [row[2] for row in pf.cost_grid(figures).rows] == [pf.TENSORMQ, pf.IN_PROCESS]
    assert [row[3] for row in pf.cost_grid(figures).rows] == ["0 + 0", ""]
    old = [f for f in figures if f.name != COPIES_IN]  # results from before inputs were counted
    assert pf.cost_grid(old).rows[0][3] == "0"
    assert [row[-1] for row in pf.aim_grid(figures).rows] == [
        *("met", "missed", "missed", "missed"),
    ]
    assert [row[0] for row in pf.start_grid(figures).rows] == [
        f.name for f in start_figures(STARTS)
    ]
    for make in (pf.latency_grid, pf.throughput_grid, pf.cost_grid, pf.aim_grid):
        (part,) = make(figures).split("engine")
        assert part.title.endswith("exported")
        out = io.StringIO()
        Console(file=out, width=80).print(part.rich())
        assert "…" not in out.getvalue(), "something is cut on a terminal of 80 columns"


def test_what_could_not_run_is_said() -> None:
    reason = "UNSUPPORTED_ENGINE: this CPU does not compute in 'bf16' under OpenVINO"
    labels = {**TAGS, "engine": "openvino-bf16", "reason": reason}
    missing = Figure(pf.NOT_RUN, "openvino-bf16", None, None, None, 0.0, "1", 0, labels=labels)
    assert len(pf.missing_grid([missing]).rows) == 1
    assert pf.remarks([missing]) == [f"openvino-bf16 was not run: {reason}"]
    again = Figure.from_dict(json.loads(json.dumps(missing.to_dict())))
    assert again == missing


STARTS = [
    {"start_ms": 300.0, "load_ms": 200.0, "uss_mib": 9.0},
    {"start_ms": 500.0, "load_ms": 420.0, "uss_mib": 11.0},
]


def test_start_figures_leave_the_artifact_out() -> None:
    ready, without, uss = start_figures(STARTS)
    assert ready.value == 400.0
    assert without.p90_ms == 100.0
    assert uss.value == 11.0


def test_topology_serves_the_same_blocks_every_way() -> None:
    ways = (*WAYS, pf.REPLICATED, pf.IN_LANES)
    wanted = topology(CHAIN, ways, seats=2)
    assert set(wanted["tasks"]) == {task_name(w) for w in ways}
    blocks = {b["name"]: b for b in wanted["blocks"]}
    assert {b["block"] for b in blocks.values()} == set(CHAIN.blocks)
    assert all(b["threads"] == 1 for b in blocks.values())
    for name in block_names(pf.ZEROMQ, CHAIN):
        assert blocks[name]["mode"] == "zeromq"
    for way, replicas, lanes in (
        (pf.ONE_WORKER, 1, "auto"),
        (pf.REPLICATED, 2, "auto"),
        (pf.IN_LANES, 1, 2),
    ):
        mine = [blocks[name] for name in block_names(way, CHAIN)]
        assert {b["worker"] for b in mine} == {task_name(way)}
        assert {b.get("replicas", 1) for b in mine} == {replicas}
        assert {b.get("lanes", "auto") for b in mine} == {lanes}


def test_ways_that_keep_cores_awake_are_tasks_on_the_same_blocks() -> None:
    wanted = topology(CHAIN, WAYS)
    tasks = wanted["tasks"]
    for base, awake in ((pf.TENSORMQ, pf.TENSORMQ_AWAKE), (pf.ONE_WORKER, pf.ONE_WORKER_AWAKE)):
        assert tasks[task_name(awake)] == {**tasks[task_name(base)], "cpu_latency_us": 0}
    assert len(wanted["blocks"]) == 3 * len(CHAIN.blocks)


def test_without_leave_to_keep_cores_awake_the_rest_is_measured_and_it_is_said() -> None:
    plan, not_run = without_awake(BENCH)
    assert plan.ways == (pf.TENSORMQ, pf.ZEROMQ, pf.ONE_WORKER)
    assert [f.mode for f in not_run] == [pf.ONE_WORKER_AWAKE, pf.TENSORMQ_AWAKE]
    assert "no leave to write" in pf.remarks(not_run)[0]


def test_plans_follow_the_arguments() -> None:
    assert parse_args([])[0] == BENCH
    assert parse_args(["--all"])[0] == PIPELINE
    assert parse_args(["--quick"])[0] == QUICK
    plan, _ = parse_args(["--all", "--engines", "exported", "--batches", "8", "--rounds", "2"])
    assert plan.engines == ("exported",)
    assert plan.batches == {8: 2}
    assert list(plan.loads) == [8]
    assert parse_args(["--model", "digits", "--starts", "0"])[0].starts == 0
    for wrong in (["--engines", "nonsense"], ["--rounds", "1,2"]):
        with pytest.raises(SystemExit):
            parse_args(wrong)


def test_a_plan_of_less_or_of_something_else_covers_no_whole_one() -> None:
    assert BENCH.covers(BENCH) and PIPELINE.covers(PIPELINE)
    assert not QUICK.covers(BENCH) and not BENCH.covers(PIPELINE)
    assert parse_args(["--rounds", "60,16,7"])[0].covers(BENCH)
    for less in (
        ["--rounds", "60,16,5"],
        ["--batches", "1"],
        ["--starts", "1"],
        ["--model", "resnet18"],
        ["--engines", "onnxruntime"],
    ):
        assert not parse_args(less)[0].covers(BENCH)


def test_what_a_whole_run_judges_has_enough_rounds() -> None:
    assert min(load.rounds for load in PIPELINE.loads.values()) >= MIN_PAIRS
    assert min(BENCH.batches.values()) >= MIN_PAIRS


def test_eight_requests_of_each_size_are_outstanding_at_once() -> None:
    assert OUTSTANDING == 8
    assert set(PIPELINE.batches) == set(PIPELINE.loads) == {1, 8, 32}
    for rows, load in PIPELINE.loads.items():
        assert load.of("torchscript") and load.of("openvino-bf16")
        assert pf.TENSORMQ in load.ways
        assert load.of("onnxruntime") == (rows < 32), "the dearest are for two engines alone"
    named, _ = parse_args(["--all", "--engines", "onnxruntime"])
    assert all(load.of("onnxruntime") for load in named.loads.values())
    assert {n: (a.rounds, a.seconds, a.ways) for n, a in named.loads.items()} == {
        n: (a.rounds, a.seconds, a.ways) for n, a in PIPELINE.loads.items()
    }


def test_a_chain_names_its_contenders_blocks() -> None:
    chain = Model("digits").chain(CONTENDERS["openvino-bf16"], Path("x"))
    assert chain == Chain(Path("x"), ("pt2.block1", "pt2.block2", "pt2.block3"), "openvino", "bf16")


def test_the_in_process_run_calls_the_engines_in_turn(tmp_path: Path) -> None:
    spec = TensorSpec("float32", ("rows", 4))
    info = BlockInfo("echo", "1", "0" * 64, "echo", Contract(spec, spec), 0, 0)
    artifact = tmp_path / "artifact"
    artifact.write_text('{"still": true}')
    engines = [EchoEngine(info, EngineOptions()) for _ in range(3)]
    for engine in engines:
        engine.load(artifact)
    pipeline = Pipeline(engines)
    assert len(pipeline.run(2)) == 3
    assert pipeline.rate(2, 0.0) > 0
    assert example(spec, 2).shape == (2, 4)
    assert (example(spec, 2) == example(spec, 2)).all()
