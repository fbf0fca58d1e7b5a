"""The batching benchmark's arithmetic: visits, ratios, verdicts, searches, arms, tables."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from rich.progress import Progress

from blockflow.batching.facts import StageFacts
from blockflow.batching.registry import policy_problems
from blockflow.bench.batching import cost, diversity, grids, lbci, shared
from blockflow.bench.batching import figures as f
from blockflow.bench.batching.blocks import folder_of, recipes_of
from blockflow.bench.batching.ladder import Ladder, peak_figures, within
from blockflow.bench.batching.plan import (
    ALEXNET,
    BATCHSIZE,
    COST,
    DELAYBATCH,
    DELAYS,
    DVABATCH,
    DVABATCH_LOADS,
    ENCODER,
    EXPERIMENTS,
    FULL,
    INPUT,
    LBCI,
    LBCI_ARM,
    LENGTHS,
    LOAD,
    QUICK,
    SERIAL,
    SHARED,
    TINY,
    TRUNK,
    ZEROBATCH,
    Diversity,
    Plan,
    Recipe,
    rotated,
)
from blockflow.bench.batching.predict import mean_ms
from blockflow.bench.batching.rig import TASK, Rig, chain_topology
from blockflow.bench.batching.run import GRIDS, PLANS, earlier, parse_args
from blockflow.bench.batching.traffic import (
    Cell,
    Inputs,
    inputs_for,
    poisson,
    replay,
    saturate,
)
from blockflow.bench.decisions import SPECS
from blockflow.bench.results import Figure, ResultFile, latency_figure
from blockflow.bench.simulation.arrivals import Arrival, Mix, parse_arrivals
from blockflow.bench.simulation.sizes import parse_sizes
from blockflow.bench.simulation.workload import Workload
from blockflow.bench.statistics import Interval, Verdict
from blockflow.client.collector import Record
from blockflow.core.errors import RequestError, TopologyError
from blockflow.core.model import BlockInfo, Contract, TensorSpec
from blockflow.core.profile import Point, StageProfile
from blockflow.core.topology import parse_topology

SPEC = TensorSpec("float32", ("rows", 4))
ONE = Mix([(TASK, 1.0)], parse_sizes("1", ""))
LABELS: Mapping[str, Any] = {"experiment": LBCI, "load": "1", "rate": 20.0, "x_serial": 0.6}


def profile(block: str, ms: float = 10.0, lengths: Sequence[int] = ()) -> StageProfile:
    """Half of a row's time is for the batch as a whole; the length does not matter."""
    points = tuple(
        Point(1, b, length, 30, t, t, t, t, t, t, 0.0, 0)
        for length in lengths or (None,)
        for b in (1, 2, 4, 8, 16, 32)
        for t in [ms * (1 + b) / 2]
    )
    return StageProfile(block, "0" * 64, "exported", "fp32", "here", points)


def cell(*times: float, over: float = 0.0, failed: tuple[str, ...] = ()) -> Cell:
    return Cell(times, len(times) + len(failed), over, 10.0, 0.1, failed)


# --- plans ----------------------------------------------------------------------------------------


def test_every_arm_is_first_in_turn() -> None:
    assert [rotated("abc", i) for i in range(4)] == [
        *(["a", "b", "c"], ["b", "c", "a"], ["c", "a", "b"], ["a", "b", "c"]),
    ]


@pytest.mark.parametrize("plan", PLANS.values(), ids=PLANS)
def test_a_plan_names_the_models_of_its_experiments(plan: Plan) -> None:
    for name in EXPERIMENTS:
        needed = plan.recipes([name])
        assert needed
        for recipe in needed:
            assert len(recipe.blocks) == len(recipe.cuts) + 1
            assert recipe.input.dims[0] == "rows"
    everything = plan.recipes(EXPERIMENTS)
    assert len({r.name for r in everything}) == len(everything)


def test_plans_share_names_only_where_they_mean_the_same() -> None:
    """The child that exports knows recipes by name."""
    known = recipes_of(FULL, TINY)
    for plan in (FULL, QUICK, TINY):
        for recipe in plan.recipes(EXPERIMENTS):
            assert known[recipe.name] == recipe


def test_other_blocks_lie_in_another_folder(tmp_path: Path) -> None:
    assert ALEXNET.digest(b"zoo") == ALEXNET.digest(b"zoo")
    assert ALEXNET.digest(b"zoo") != ALEXNET.digest(b"another zoo")
    assert Recipe("a", "alexnet", size=160).digest(b"") != Recipe("a", "alexnet").digest(b"")
    assert folder_of(tmp_path, [ALEXNET, TRUNK]) == folder_of(tmp_path, [TRUNK, ALEXNET])
    assert folder_of(tmp_path, [ALEXNET]) != folder_of(tmp_path, [TRUNK])


def test_the_input_is_the_zoos_unless_a_recipe_says_otherwise() -> None:
    assert ALEXNET.input.dims == ("rows", 3, 224, 224)
    assert TRUNK.input.dims == ("rows", 3, 160, 160)
    assert ENCODER.input.ranges == {"length": (1, 256)}
    assert parse_sizes(LENGTHS, "").largest <= 256


# --- arms -----------------------------------------------------------------------------------------


def infos(names: Sequence[str]) -> Mapping[str, BlockInfo]:
    return {n: BlockInfo(n, "1", "0" * 64, "pt2", Contract(SPEC, SPEC), 0, 0) for n in names}


def test_the_arms_are_valid_policies() -> None:
    facts = [StageFacts(b, max_rows=64, profile=profile(b)) for b in ("a", "b")]
    arms = {**lbci.policies(320.0)}
    for name in (LOAD, "operator"):
        arms |= {
            f"{name} {arm}": policy
            for arm, policy in diversity.policies(FULL.diversities[name], 5.0, padded=False).items()
        }
    for arm, policy in arms.items():
        assert policy_problems(policy, arm, facts) == []


def test_only_padded_blocks_get_classes() -> None:
    one = FULL.diversities[INPUT]
    assert all("classes" not in p for p in diversity.policies(one, 1.0, padded=False).values())
    arms = diversity.policies(one, 1.0, padded=True)
    assert arms[ZEROBATCH]["classes"] == [256]
    assert arms[DELAYBATCH] == {**arms[ZEROBATCH], "max_delay_ms": 1.0}
    assert len(arms[DVABATCH]["classes"]) > 1


def test_a_chain_is_one_worker_of_one_thread() -> None:
    names = ALEXNET.blocks
    body = chain_topology(names, {"policy": "window"}, 64)
    found = parse_topology(body, infos(names).__getitem__)
    assert {s.worker for s in found.blocks.values()} == {"chain"}
    assert {s.threads for s in found.blocks.values()} == {1}
    assert found.max_rows == 64


def test_tasks_share_the_trunk_and_no_full_model() -> None:
    names = (*TRUNK.blocks, *FULL.whole.blocks)
    body = shared.topology(FULL, {"policy": "none"})
    found = parse_topology(body, infos(names).__getitem__)
    assert len(found.tasks) == 16
    paths = [found.tasks[f"shared{i}"].path for i in range(8)]
    assert len({tuple(p[:3]) for p in paths}) == 1
    assert len({p[3] for p in paths}) == 8
    assert {found.blocks[p[3]].worker for p in paths} == {"heads"}
    full = [found.tasks[f"full{i}"].path for i in range(8)]
    assert len({found.blocks[p[0]].worker for p in full}) == 8
    # What the arms differ by is the shared blocks' policy alone.
    other = parse_topology(shared.topology(FULL, shared.window(FULL)), infos(names).__getitem__)
    changed = [b for b in found.blocks if found.blocks[b].batching != other.blocks[b].batching]
    assert len(changed) == 11


# --- traffic --------------------------------------------------------------------------------------


class FakeClient:
    """Answers at once, or as it is told."""

    def __init__(self, error: Exception | None = None) -> None:
        self.error = error
        self.sent: list[tuple[str, Any]] = []

    def infer(self, task: str, x: Any, **_: Any) -> Any:
        return self.submit(task, x).result()

    def submit(self, task: str, x: Any, **_: Any) -> Future[Any]:
        self.sent.append((task, x))
        future: Future[Any] = Future()
        if self.error is None:
            future.set_result(x)
        else:
            future.set_exception(self.error)
        return future


def test_queries_are_those_that_a_simulated_run_has() -> None:
    queries = poisson(ONE, 50.0, 2.0, seed=3, multiple=10)
    simulated = list(Workload(parse_arrivals("poisson"), ONE, 50.0, 2.0, 3).queries())
    assert len(queries) % 10 == 0
    assert queries == simulated[: len(queries)]
    assert len(simulated) - len(queries) < 10


def test_there_is_at_least_one_batch_of_queries() -> None:
    assert len(poisson(ONE, 0.5, 0.1, seed=1, multiple=10)) >= 10


def test_inputs_fit_the_contract() -> None:
    make = inputs_for(ENCODER.input, 4096)
    x = make(Arrival(0, TASK, 2, 17))
    assert (x.shape, x.dtype) == ((2, 17), np.int64)
    assert x.min() >= 1  # 0 is padding
    assert make(Arrival(5, TASK, 2, 17)) is x
    assert inputs_for(SPEC, 2)(Arrival(0, TASK, 3, None)).shape == (3, 4)


def queries_and_inputs(count: int) -> tuple[list[Arrival], Inputs]:
    return [Arrival(i * 1000, TASK, 1 + i % 2, None) for i in range(count)], inputs_for(SPEC, 2)


def test_every_query_is_sent_once_and_recorded() -> None:
    queries, inputs = queries_and_inputs(7)
    client: Any = FakeClient()
    records = replay(client, queries, inputs)
    assert [len(x) for _, x in client.sent] == [q.rows for q in queries]
    assert [(r.rows, r.outcome) for r in records] == [(q.rows, "OK") for q in queries]
    assert all(r.latency_ms >= 0 for r in records)


def test_failures_are_outcomes_of_a_visit_and_end_a_saturation() -> None:
    queries, inputs = queries_and_inputs(3)
    client: Any = FakeClient(RequestError("OVERLOADED", "full"))
    assert {r.outcome for r in replay(client, queries, inputs)} == {"OVERLOADED"}
    with pytest.raises(RequestError, match="full"):
        saturate(client, queries, inputs, 2, 0.01)


def test_saturation_goes_through_the_queries_again_and_again() -> None:
    queries, inputs = queries_and_inputs(2)
    client: Any = FakeClient()
    assert saturate(client, queries, inputs, 3, 0.01) > 0
    assert len(client.sent) >= 5


def test_a_visit_in_figures() -> None:
    records = [
        Record(TASK, 1, 0.0, 0.0, 10.0, "OK"),
        Record(TASK, 2, 100.0, 103.0, 150.0, "OK"),
        Record(TASK, 1, 200.0, 200.0, 201.0, "DEADLINE_EXCEEDED"),
    ]
    found = Cell.of(records, bound_ms=20.0)
    assert found.times_ms == (10.0, 50.0)
    assert found.mean_ms == 30.0
    assert found.over == pytest.approx(2 / 3)
    assert found.rows_per_s == pytest.approx(3 / 0.201)
    assert found.lag_ms == 3.0
    assert found.failed == ("DEADLINE_EXCEEDED",)
    assert not within(found, 100.0)  # not all were answered
    assert within(cell(10.0, 50.0), 50.0)
    assert not within(cell(10.0, 50.0), 49.0)


def test_the_simulator_meets_the_same_queries() -> None:
    profiles = [profile("a"), profile("b", 20.0)]
    apart = [Arrival(i * 100_000_000, TASK, 1, None) for i in range(10)]
    assert mean_ms(profiles, {"policy": "none"}, apart, 32, 1) == pytest.approx(30.0)
    at_once = [Arrival(0, TASK, 1, None)] * 10
    static = {"policy": "window", "max_rows": 10, "max_delay_ms": 60_000}
    assert mean_ms(profiles, static, at_once, 32, 1) == pytest.approx(30 * 5.5)
    # What a queue gathers is waited for, not turned away.
    crowd = [Arrival(0, TASK, 1, None)] * 300
    assert mean_ms(profiles, {"policy": "none"}, crowd, 32, 1) == pytest.approx(30 * 150.5)
    # A static batch waits for its last query.
    assert mean_ms(profiles, static, apart, 32, 1) == pytest.approx(450 + 30 * 5.5)


# --- figures --------------------------------------------------------------------------------------


def test_an_arm_at_a_load_pools_its_visits() -> None:
    found = {
        g.name: g
        for g in f.time_figures(SERIAL, [cell(1.0, 3.0), cell(5.0, 7.0, over=0.5)], LABELS)
    }
    time = found[f.TIME]
    assert (time.value, time.n, time.p99_ms) == (4.0, 4, 7.0)
    assert (time.low, time.high) == (2.0, 6.0)  # of the visits' means
    assert found[f.OVER].value == 25.0
    assert "failed" not in time.labels


def test_a_load_without_answers_has_no_time() -> None:
    found = f.time_figures(SERIAL, [cell(failed=("OVERLOADED",), over=1.0)], LABELS)
    assert {g.name for g in found} == {f.RATE, f.OVER}
    assert all(g.labels["failed"] == "OVERLOADED" for g in found)


def compare(ours: Sequence[Cell], others: Sequence[Cell], base: str, load: str) -> list[Figure]:
    labels = {**LABELS, "load": load}
    return f.against(LBCI_ARM, ours, base, others, labels, f.LBCI_PAPER, f.LBCI_PAPER)


def test_ratios_are_paired_by_visit() -> None:
    found = {
        g.name: g
        for g in compare(
            [cell(7.0), cell(70.0), cell(1.0)], [cell(10.0), cell(100.0), cell()], SERIAL, "1"
        )
    }
    ratio = found[f.TIME_RATIO]
    assert (ratio.value, ratio.n) == (pytest.approx(0.7), 2)
    assert ratio.labels["paper"] == ratio.labels["goal"] == pytest.approx(0.7388)
    assert ratio.labels["verdict"] == Verdict.MET
    assert "verdict" not in found[f.TAIL_RATIO].labels
    assert compare([cell(1.0)], [cell()], SERIAL, "1") == []


@pytest.mark.parametrize(
    ("serial", "static", "verdict"),
    [(10.0, 30.0, "met"), (10.0, 15.0, "missed"), (8.0, 30.0, "missed")],
)
def test_a_load_is_met_when_both_aims_are(serial: float, static: float, verdict: str) -> None:
    """At the second load: no slower than serial, and 52% below the static batch."""
    ours = [cell(9.0), cell(9.0)]
    found = compare(ours, [cell(serial)] * 2, SERIAL, "2")
    found += compare(ours, [cell(static)] * 2, BATCHSIZE, "2")
    assert f.load_verdicts(found, LBCI, LBCI_ARM) == {"2": verdict}


def test_a_load_that_nobody_can_tell_is_noise() -> None:
    found = compare([cell(8.0), cell(12.0)], [cell(10.0)] * 2, SERIAL, "4")
    assert f.load_verdicts(found, LBCI, LBCI_ARM) == {"4": Verdict.NOISE}


def searched(limit: float, start: float, probes: int) -> f.Search:
    search = f.Search(start)
    for _ in range(probes):
        search.tell(search.rate <= limit)
    return search


@pytest.mark.parametrize("start", [20.0, 100.0, 400.0])
def test_a_search_brackets_the_peak(start: float) -> None:
    found = searched(100.0, start, 12).found
    assert found is not None
    assert found.low <= 100.0 <= found.high
    assert found.high / found.low < 1.05


def test_a_search_that_contradicts_itself_believes_the_lower() -> None:
    search = f.Search(100.0)
    search.tell(True)
    search._next = 90.0  # as if the machine had slowed down meanwhile
    search.tell(False)
    assert search.found is None
    assert search.rate < 90.0
    search.tell(True)
    assert search.found is not None
    assert search.found.value < 90.0


def test_peaks_are_beside_the_base() -> None:
    searches = {
        ZEROBATCH: searched(50.0, 40.0, 8),
        DVABATCH: searched(100.0, 40.0, 8),
        DELAYBATCH: searched(0.0, 40.0, 8),
    }
    found = {(g.name, g.mode): g for g in peak_figures(LOAD, searches, 300.0, ZEROBATCH)}
    assert found[f.PEAK_RATIO, DVABATCH].value == pytest.approx(2.0, rel=0.1)
    assert (f.PEAK, DELAYBATCH) not in found  # nothing held, and that is said
    assert any(name == f.NOTE and mode.startswith(DELAYBATCH) for name, mode in found)


# --- whole experiments, on a system that answers at once ------------------------------------------


class FakeSystem:
    """Takes every topology, but classes only if its blocks pad."""

    def __init__(self, *, pads: bool = True) -> None:
        self.pads = pads
        self.applied: list[Mapping[str, Any]] = []

    def apply(self, topology: Mapping[str, Any]) -> None:
        if not self.pads and any("classes" in b["batching"] for b in topology["blocks"]):
            raise TopologyError("INVALID_TOPOLOGY", "no padding")
        self.applied.append(topology)

    def status(self) -> dict[str, Any]:
        workers = {b["worker"] for b in self.applied[-1]["blocks"]}
        return {"workers": [{"worker": w, "pid": os.getpid()} for w in sorted(workers)]}


BRIEF = replace(TINY, seconds=0.02, probes=2)


def rig_of(system: FakeSystem) -> Rig:
    anything: Any = system
    client: Any = FakeClient()
    return Rig(Path("blocks"), anything, client, Progress(disable=True))


def ladder_of(system: FakeSystem, name: str, one: Diversity) -> Ladder:
    profiles = [profile(b, lengths=one.recipe.lengths) for b in one.recipe.blocks]
    return Ladder(rig_of(system), BRIEF, name, one.recipe, profiles, one.bs_max, 32, one.lengths)


def policies_of(system: FakeSystem) -> list[Mapping[str, Any]]:
    """In the order in which they were applied; each topology has one."""
    return [t["blocks"][0]["batching"] for t in system.applied]


@pytest.mark.parametrize("pads", [True, False])
def test_dvabatch_meets_its_rivals_at_every_load(pads: bool) -> None:
    system = FakeSystem(pads=pads)
    one = BRIEF.diversities[INPUT]
    found = diversity.measure(ladder_of(system, INPUT, one), one)
    arms = {(g.labels["load"], g.mode) for g in found if g.name == f.TIME}
    assert arms == {(x, a) for x in DVABATCH_LOADS for a in (ZEROBATCH, DELAYBATCH, DVABATCH)}
    ratios = {(g.labels["load"], g.labels["base"]) for g in found if g.name == f.TIME_RATIO}
    assert ratios == {(x, a) for x in DVABATCH_LOADS for a in (ZEROBATCH, DELAYBATCH)}
    assert {g.mode for g in found if g.name == f.PEAK} <= {ZEROBATCH, DELAYBATCH, DVABATCH}
    notes = [g.mode for g in found if g.name == f.NOTE]
    assert any("do not promise padding" in n for n in notes) is not pads
    assert any("classes" in p for p in policies_of(system)) is pads
    # Of delays that answer all in time, the shortest; all four were tried.
    delays = {p["max_delay_ms"] for p in policies_of(system) if "max_delay_ms" in p}
    assert len(delays) == len(DELAYS)


def test_each_policy_takes_its_turn_alone() -> None:
    system = FakeSystem()
    found = cost.measure(ladder_of(system, COST, BRIEF.diversities[LOAD]), 20)
    alone = {g.mode for g in found if g.name == f.ALONE_RATIO}
    assert len(alone) == len({str(p) for p in policies_of(system)}) - 1  # beside none
    spent = [g for g in found if g.name == f.DECISION]
    assert len(spent) == len(SPECS)
    assert all(g.labels["verdict"] in ("met", "missed") for g in spent)


class FakeBound:
    """Computes at a fixed rate."""

    def __init__(self, *_: Any) -> None:
        pass

    def rate(self) -> float:
        return 1000.0

    def alone_ms(self) -> float:
        return 20.0


class FakeRepository:
    """Weights: a head has 60 MiB, a whole model 100, the rest 20."""

    def __init__(self, _root: Path) -> None:
        pass

    def info(self, name: str) -> BlockInfo:
        size = {BRIEF.trunk.blocks[-1]: 60, BRIEF.whole.blocks[0]: 100}.get(name, 20)
        return BlockInfo(name, "1", "0" * 64, "pt2", Contract(SPEC, SPEC), 0, size * 2**20)


def test_the_shared_trunk_is_weighed_against_full_models(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shared, "_Bound", FakeBound)
    monkeypatch.setattr(shared, "BlockRepository", FakeRepository)
    found = shared.measure(BRIEF, rig_of(FakeSystem()))
    rates = {g.mode: g for g in found if g.name == f.SATURATED}
    assert set(rates) == {shared.BATCHED, shared.UNBATCHED, shared.FULL_MODELS, shared.IN_PROCESS}
    share = {g.mode: g for g in found if g.name == f.OF_BOUND}
    assert share[shared.BATCHED].value == pytest.approx(rates[shared.BATCHED].value / 1000)
    assert share[shared.BATCHED].labels["goal"] == 0.9
    assert "verdict" not in share[shared.UNBATCHED].labels
    sizes = {(g.mode, g.labels["kind"]): g.value for g in found if g.name == f.MEMORY}
    trunk = 20 * (len(BRIEF.trunk.blocks) - 1)
    assert sizes[shared.SHARED_HOME, "weights"] == trunk + 60 * BRIEF.tasks
    assert sizes[shared.FULL_HOME, "weights"] == 100 * BRIEF.tasks
    (ratio,) = [g for g in found if g.name == f.MEMORY_RATIO]
    assert ratio.labels["goal"] == 0.25
    assert grids.shared_grid(found).rows


# --- tables ---------------------------------------------------------------------------------------


def everything() -> list[Figure]:
    out: list[Figure] = []
    for experiment, arms in ((LBCI, (SERIAL, BATCHSIZE, LBCI_ARM)), (LOAD, (ZEROBATCH, DVABATCH))):
        labels = {**LABELS, "experiment": experiment}
        for arm in arms:
            out += f.time_figures(arm, [cell(1.0, 2.0), cell(3.0)], labels)
        out.append(Figure(f.SIMULATED, arms[0], None, None, None, 1.5, "ms", 2, labels=labels))
        pair = [cell(9.0)], [cell(10.0)]
        out += f.against(arms[-1], pair[0], arms[0], pair[1], labels, f.LBCI_PAPER, {})
    sizes = {"experiment": LBCI, "load": "small", "largest": 10}
    out += [latency_figure(f.TEST, arm, None, [1000.0], sizes) for arm in (SERIAL, LBCI_ARM)]
    one = Interval(0.8, 0.7, 0.9, 3)
    out.append(f.ratio_figure(f.TEST_RATIO, LBCI_ARM, SERIAL, one, sizes, f.LBCI_PAPER, 0.77))
    out += peak_figures(LOAD, {ZEROBATCH: searched(50.0, 40.0, 4)}, 300.0, ZEROBATCH)
    home = {"experiment": SHARED, "home": "shared trunk"}
    out.append(Figure(f.SATURATED, "batched", 1, None, None, 20.0, "1/s", 3, labels=home))
    out.append(f.ratio_figure(f.OF_BOUND, "batched", "in process", one, home, goal=0.9))
    for kind in ("weights", "uss", "pss"):
        labels = {"experiment": SHARED, "kind": kind}
        out.append(Figure(f.MEMORY, "shared trunk", None, None, None, 9.0, "MiB", 4, labels=labels))
    cost = {"experiment": COST}
    more = {**cost, "verdict": "met", "goal": 50.0}
    out.append(Figure(f.DECISION, "window", None, None, None, 20.0, "us", 9, labels=more))
    out.append(f.ratio_figure(f.ALONE_RATIO, "window", "none", one, cost, goal=1.02))
    return [*out, f.note(LBCI, "a note")]


def test_every_table_shows_what_was_measured() -> None:
    found = everything()
    # Those of the reasons have a test of their own.
    for make in (*(m for m in GRIDS if m.__module__ == grids.__name__), grids.note_grid):
        grid = make(found)
        assert grid.rows, grid.title
        assert all(not row or len(row) == len(grid.heads) for row in grid.rows)
        assert make([]).rows in ([], ())
    rows = {row[3]: row for row in grids.lbci_grid(found).rows if row}
    assert rows[SERIAL][4:6] == ("2.00", "3.00")
    (row,) = grids.lbci_ratio_grid(found).rows
    assert row[:6] == (LBCI, "1", SERIAL, "-10%", "-10%..-10%", "-26%")
    assert grids.remarks(found) == ["lbci: a note"]


def test_figures_survive_their_file(tmp_path: Path) -> None:
    path = tmp_path / "batching.jsonl"
    found = everything()
    ResultFile(path, "batching").write(found)
    stored = [Figure.from_dict(line) for line in ResultFile(path, "batching").read()]
    for make in GRIDS:
        assert make(stored).rows == make(found).rows


def test_a_run_of_some_experiments_keeps_the_others(tmp_path: Path) -> None:
    path = tmp_path / "batching.jsonl"
    assert earlier(path, [LBCI]) == []
    steady = Figure("fixed work", "begin", None, 1.0, None, 1.0, "ms", 1)
    ResultFile(path, "batching").write([*everything(), steady])
    kept = {g.labels["experiment"] for g in earlier(path, [LBCI])}
    assert kept == {LOAD, SHARED, COST}
    ResultFile(path, "batching").write(everything(), machine={"cpu": "another"})
    assert earlier(path, [LBCI]) == []


def test_the_command_line() -> None:
    args = parse_args(["--quick", "--only", "lbci,cost"])
    assert (args.extent, args.experiments) == ("quick", ["lbci", "cost"])
    assert parse_args([]).experiments == list(EXPERIMENTS)
    for wrong in (["--only", "lbc"], ["--quick", "--tiny"]):
        with pytest.raises(SystemExit):
            parse_args(wrong)
