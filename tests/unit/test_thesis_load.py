"""The thesis's experiments under load: what they compute from their samples, and what they say."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from blockflow.bench.in_process import Chain
from blockflow.bench.thesis import energy_source
from blockflow.bench.thesis.beside import AGAIN
from blockflow.bench.thesis.clients_figures import KNEE, Clients, find_knee
from blockflow.bench.thesis.clients_figures import Visit as ClientVisit
from blockflow.bench.thesis.devices_figures import LESS, Distribution
from blockflow.bench.thesis.devices_figures import Visit as DeviceVisit
from blockflow.bench.thesis.devices_model import (
    CORES,
    GPUS,
    Places,
    index,
    numbers,
    spread,
    spread_topology,
    way_of,
)
from blockflow.bench.thesis.energy_figures import ABOVE, ENERGY, IDLE, Energy
from blockflow.bench.thesis.energy_figures import RATIO as ENERGY_RATIO
from blockflow.bench.thesis.energy_figures import Visit as EnergyVisit
from blockflow.bench.thesis.energy_source import Rapl, find_source, grown
from blockflow.bench.thesis.growth_blocks import COST, OWN, PROCESS, Start, figures_of
from blockflow.bench.thesis.growth_figures import (
    FIRST,
    LONG,
    PAST_RATIO,
    Growth,
    Look,
    Way,
    growth_mib,
    settled,
)
from blockflow.bench.thesis.rates_figures import (
    KEEPS_UP,
    LEAST_MU,
    LIMIT,
    RATIO,
    SATURATED,
    Sweep,
)
from blockflow.bench.thesis.rates_model import Capacity, Flow, flow_of
from blockflow.bench.thesis.served import (
    TWICE,
    WAYS,
    Asked,
    callers_of,
    device_ms,
    patience_s,
    processes,
    served,
    short,
    task_of,
)
from blockflow.bench.thesis.util_figures import (
    DISPATCHER,
    GPU_RATIO,
    MEAN,
    MEAN_RATIO,
    PER_REQUEST,
    Utilisation,
)
from blockflow.bench.thesis.util_figures import MACHINE as WHOLE
from blockflow.bench.thesis.util_figures import Visit as CpuVisit
from blockflow.bench.thesis.util_watch import Sampler
from blockflow.client.collector import OK, Record
from blockflow.client.result import BlockTiming

HANDLES, TENSORS = WAYS
CHAIN = Chain(Path("blocks"), tuple(f"pt2.block{n}" for n in range(1, 5)))


def record(
    at_ms: float, took_ms: float, outcome: str = OK, timings: Sequence[BlockTiming] = ()
) -> Record:
    return Record("t", 1, at_ms, at_ms, at_ms + took_ms, outcome, tuple(timings))


# --- what is served ------------------------------------------------------------------------------


def test_the_ways_are_side_by_side_and_their_clients_share_the_blocks() -> None:
    made = served(CHAIN, "cuda:1", tasks=2)
    assert len(made["blocks"]) == 8
    assert {b["device"] for b in made["blocks"]} == {"cuda:1"}
    assert {b.get("mode") for b in made["blocks"]} == {None, "zeromq"}
    paths = {name: task["path"] for name, task in made["tasks"].items()}
    assert set(paths) == {task_of(way, n) for way in WAYS for n in range(2)}
    assert paths[task_of(HANDLES, 0)] == paths[task_of(HANDLES, 1)]
    assert [short(b) for b in paths[task_of(TENSORS)]] == ["block1", "block2", "block3", "block4"]
    assert task_of(TWICE) == task_of(HANDLES)


def test_the_rate_of_clients_in_turn_leaves_filling_and_emptying_out() -> None:
    # An answer every 100 ms from 250 ms on; the one at 1050 ms came when nobody asked any more.
    asked = Asked([record(0, 250 + 100 * n) for n in range(9)], 1.0)
    assert asked.rate == pytest.approx(10.0)
    assert asked.latency_ms[0] == 250
    # Too slow for two answers within the time: then those after it count as well.
    assert Asked([record(0, 900), record(0, 1400)], 1.0).rate == pytest.approx(2.0)
    refused = Asked([record(0, 250), record(1, 1, "OVERLOADED"), record(0, 350)], 1.0)
    assert refused.rate == pytest.approx(10.0)
    with pytest.raises(ValueError, match="1 answers"):
        _ = Asked([record(0, 5)], 1.0).rate


def test_callers_and_their_patience() -> None:
    assert callers_of(CHAIN) == 8
    assert patience_s(8, 10.0) == pytest.approx(2.4)
    assert patience_s(8, 1000.0) == 1.0


class FakeSystem:
    """Two ways' workers, and one that has ended."""

    def status(self) -> dict[str, object]:
        def worker(name: str, pid: int | None, device: dict[str, float]) -> dict[str, object]:
            kpi = {"device": device, "compute": {"p50_ms": 1.0}}
            return {"worker": name, "pid": pid, "stages": [{"block": name, "kpi": kpi}]}

        return {
            "workers": [
                worker(f"{HANDLES}.pt2.block1", 11, {"p50_ms": 4.0}),
                worker(f"{HANDLES}.pt2.block2", 12, {}),
                worker(f"{TENSORS}.pt2.block1", 13, {}),
                worker(f"{HANDLES}.pt2.block1", None, {}),
            ]
        }


def test_a_way_s_processes_and_their_times_on_the_device() -> None:
    system: Any = FakeSystem()
    assert processes(system, HANDLES) == processes(system, TWICE) == {"block1": 11, "block2": 12}
    assert processes(system, TENSORS) == {"block1": 13}
    assert device_ms(system, HANDLES)["block1"] == 4.0


# --- figure 4.6 ----------------------------------------------------------------------------------


def cpu_visit(busy: float, seconds: float = 2.0, rate: float = 10.0) -> CpuVisit:
    """Two blocks, the second one twice as busy; the Dispatcher a tenth."""
    used = {"a": busy, "b": 2 * busy, DISPATCHER: 0.1}
    looks = [(t, {n: 5 + u * t for n, u in used.items()}) for t in (0.0, 0.5, seconds)]
    return CpuVisit.of(looks, rate)


def test_utilisation_is_the_thesis_s_mean_of_the_blocks() -> None:
    visit = cpu_visit(0.2)
    assert visit.percent("a") == pytest.approx(20)
    assert visit.mean_percent == pytest.approx(30)  # of 20 and 40; the Dispatcher is no block
    assert visit.machine_percent(2) == pytest.approx(35)  # 0.7 of two cores
    assert visit.ms_per_request == pytest.approx(70)  # 0.7 s per second for 10 requests
    assert [round(p) for _, p in visit.timeline] == [30, 30]
    with pytest.raises(ValueError, match="two looks"):
        CpuVisit.of([(0.0, {"a": 1.0})], 1.0)


def test_utilisation_figures_and_line() -> None:
    visits = {
        HANDLES: [cpu_visit(0.4)] * 5,
        TENSORS: [cpu_visit(0.2)] * 5,
        TWICE: [cpu_visit(0.41)] * 5,
    }
    made = Utilisation(visits, 2, {"model": "m"})
    by = {(f.name, f.mode): f for f in made.figures()}
    assert by[MEAN, HANDLES].value == pytest.approx(60)
    assert by[MEAN_RATIO, HANDLES].value == pytest.approx(2.0)
    assert by[MEAN_RATIO, HANDLES].labels["noise"] == pytest.approx(0.025)
    assert (GPU_RATIO, HANDLES) not in by
    assert by[WHOLE, TENSORS].value == pytest.approx(35)
    assert by[PER_REQUEST, TENSORS].value == pytest.approx(70)
    assert "2.00 times as busy" in made.says()
    assert len(made.rows()) == 3 * 5 * 2


def test_gpu_utilisation_stands_beside_the_thesis_s() -> None:
    def visit(gpu: float) -> CpuVisit:
        return CpuVisit(1.0, 5.0, {"a": 0.5, DISPATCHER: 0.1}, gpu=(gpu, gpu))

    visits = {HANDLES: [visit(40)] * 5, TENSORS: [visit(20)] * 5, TWICE: [visit(40)] * 5}
    made = Utilisation(visits, 2, {})
    ratio = next(f for f in made.figures() if f.name == GPU_RATIO)
    assert (ratio.value, ratio.labels["thesis"]) == (2.0, 2.0)
    assert "the GPU with handles 2.00 times as busy" in made.says()


def test_visits_without_a_tick_of_cpu_time_are_not_compared() -> None:
    visits = {way: [cpu_visit(0.0)] * 5 for way in (*WAYS, TWICE)}
    made = Utilisation(visits, 2, {})
    assert MEAN_RATIO not in {f.name for f in made.figures()}
    assert "too short" in made.says()


def test_a_sampler_looks_at_begin_and_end_and_hands_on_what_went_wrong() -> None:
    looks = itertools.count()
    with Sampler(lambda: next(looks), 60.0) as sampler:
        pass
    assert [seen for _, seen in sampler.samples] == [0, 1]
    assert sampler.seconds >= 0

    def broken() -> int:
        raise KeyError("gone")

    with pytest.raises(KeyError, match="gone"), Sampler(broken, 60.0):
        pass


# --- figure 4.10 ---------------------------------------------------------------------------------


def test_a_counter_that_begins_again() -> None:
    assert grown(5, 9, 100) == 4
    assert grown(95, 3, 100) == 8


def zone(root: Path, place: str, name: str, energy_uj: int, maximum: int = 1000) -> Path:
    folder = root / place
    folder.mkdir()
    (folder / "name").write_text(f"{name}\n")
    (folder / "energy_uj").write_text(f"{energy_uj}\n")
    (folder / "max_energy_range_uj").write_text(f"{maximum}\n")
    return folder / "energy_uj"


def test_rapl_counts_packages_and_memory_and_nothing_twice(tmp_path: Path) -> None:
    package = zone(tmp_path, "intel-rapl:0", "package-0", 900)
    memory = zone(tmp_path, "intel-rapl:0:1", "dram", 10)
    cores = zone(tmp_path, "intel-rapl:0:0", "core", 500)
    zone(tmp_path, "intel-rapl:1", "psys", 500)
    source = find_source("cpu", tmp_path)
    assert isinstance(source, Rapl)
    assert source.part == "RAPL: package-0, dram"
    assert source.joules() == 0
    package.write_text("200\n")  # past the maximum of 1000
    memory.write_text("15\n")
    cores.write_text("900\n")
    assert source.joules() == pytest.approx(305e-6)
    assert source.joules() == pytest.approx(305e-6)


def test_why_there_is_no_energy(tmp_path: Path) -> None:
    assert "no RAPL counters" in str(find_source("cpu", tmp_path))
    zone(tmp_path, "intel-rapl:0", "package-0", 1).write_text("nonsense")
    assert "cannot be read" in str(find_source("cpu", tmp_path))
    assert "NVML gives no power" in str(find_source("cuda:99", tmp_path))


class FakeProbe:
    """A GPU of 100 J that spends one more at each look."""

    def __init__(self, device: str) -> None:
        self.device = device
        self.joules = 100.0
        self.closed = False

    def sample(self, now_ns: int, rows: int) -> dict[str, float]:
        self.joules += 1.0
        return {"gpu_power_w": 300.0, "gpu_energy_j": self.joules}

    def close(self) -> None:
        self.closed = True


def test_a_gpu_s_energy_is_nvml_s(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(energy_source, "GpuProbe", FakeProbe)
    source = find_source("cuda:1")
    assert isinstance(source, energy_source.Nvml)
    assert "cuda:1" in source.part
    assert source.joules() + 1 == source.joules()
    source.close()


def test_energy_per_row_with_and_without_what_idling_takes() -> None:
    handles = EnergyVisit(rows=10, seconds=2.0, joules=50.0, idle_w=10.0)
    assert (handles.mj, handles.mj_above_idle) == (5000, 3000)
    tensors = EnergyVisit(rows=10, seconds=4.0, joules=135.5, idle_w=10.0)
    visits = {
        (HANDLES, 1): [handles] * 5,
        (TENSORS, 1): [tensors] * 5,
        (TWICE, 1): [handles] * 5,
    }
    made = Energy(visits, {})
    by = {(f.name, f.mode): f for f in made.figures()}
    assert by[ENERGY, HANDLES].labels["thesis"] == 710
    assert by[ENERGY_RATIO, TENSORS].value == pytest.approx(2.71)
    assert by[ENERGY_RATIO, TENSORS].labels["thesis"] == 2.71
    assert by[ABOVE, TENSORS].value == pytest.approx(9550)
    assert by[IDLE, "idle"].value == 10
    assert "2.71 times as much" in made.says()
    assert len(made.rows()) == 15


# --- figure 4.11 ---------------------------------------------------------------------------------


def test_the_knee_is_where_the_bounds_meet() -> None:
    """Two servers of 50 ms each: 100 ms alone, 20 per second at most, so the knee is at two."""
    latency = {n: max(100.0, 50.0 * n) for n in range(1, 11)}
    rate = {n: min(10.0 * n, 20.0) for n in range(1, 11)}
    knee = find_knee(latency, rate)
    assert knee.clients == pytest.approx(2.0)
    assert knee.step_ms == pytest.approx(50.0)
    assert find_knee({1: 100.0}, {1: 5.0}).clients == 1.0  # never fewer than one
    assert find_knee({1: 100.0}, {1: 10.0}).step_ms is None


def test_clients_figures_stand_beside_the_thesis_s() -> None:
    visits = {
        (arm, n): [ClientVisit((2.5 if arm == TENSORS else 1.0) * max(18.0, 4.5 * n), 220.0)] * 5
        for n in range(1, 11)
        for arm in (*WAYS, TWICE)
    }
    made = Clients(visits, {})
    knee = next(f for f in made.figures() if (f.name, f.mode) == (KNEE, HANDLES))
    assert knee.value == pytest.approx(3.96)
    assert knee.labels["thesis"] == 4
    assert (knee.low, knee.high, knee.n) == (knee.value, knee.value, 5)
    ratio = next(f for f in made.figures() if f.unit == "x" and f.labels["clients"] == 1)
    assert (ratio.value, ratio.labels["thesis"]) == (2.5, 2.5)
    assert made.noise == 0
    assert "whole tensors are 2.50 times slower" in made.says()
    grid = made.grid()
    assert {len(row) for row in grid.rows} == {len(grid.heads)}
    assert len(grid.rows) == 10
    assert not any(row[0].endswith(AGAIN) for row in made.rows())


# --- figure 4.12 ---------------------------------------------------------------------------------


def test_the_thesis_s_limit_and_that_of_the_cores() -> None:
    capacity = Capacity({"a": 10.0, "b": 20.0, "c": 10.0}, seats=1)
    assert capacity.bottleneck == "b"
    assert capacity.least_mu == pytest.approx(50)
    assert capacity.rho("b", 25) == pytest.approx(0.5)
    assert capacity.shared == pytest.approx(25)
    assert capacity.limit == pytest.approx(25)  # one core for three blocks
    assert Capacity(capacity.service_ms, seats=4).limit == pytest.approx(50)
    alone = Capacity(capacity.service_ms, seats=None)
    assert (alone.shared, alone.limit) == (None, pytest.approx(50))


@given(
    st.dictionaries(st.sampled_from("abcdef"), st.floats(0.01, 1e3), min_size=1),
    st.integers(1, 64),
)
def test_at_the_limit_no_block_and_no_core_has_more_than_it_can_do(
    service_ms: dict[str, float], seats: int
) -> None:
    capacity = Capacity(service_ms, seats)
    loads = [capacity.rho(b, capacity.limit) for b in service_ms]
    assert max(loads) <= 1 + 1e-9
    assert sum(loads) <= seats * (1 + 1e-9)
    assert max(max(loads), sum(loads) / seats) == pytest.approx(1)


def test_what_flows_in_the_part_of_a_visit_that_counts() -> None:
    """Of four seconds the last three count: a request per 100 ms, each takes 200 ms."""
    records = [record(100 * n, 200) for n in range(40)]
    found = flow_of(records, 4.0)
    assert found.offered == pytest.approx(10)  # 1000 to 3900
    assert found.answered == pytest.approx(10)  # those of 800 to 3700
    assert found.carried == pytest.approx(1)
    refused = [record(100 * n, 1, "OVERLOADED") if n % 2 else r for n, r in enumerate(records)]
    found = flow_of(refused, 4.0)
    assert found.offered == pytest.approx(10)
    assert found.answered == pytest.approx(5)
    assert found.refused == pytest.approx(0.5)
    assert flow_of([], 4.0).carried == 0


def flow(offered: float, most: float) -> Flow:
    answered = min(offered, most)
    return Flow(offered, answered, 1 - answered / offered, (50.0,))


def sweep(handles: float = 20.0, tensors: float = 16.0) -> Sweep:
    """Rates up to twice the callers' 20 per second, three rounds."""
    flows = {
        (arm, m): [flow(20 * m, tensors if arm == TENSORS else handles)] * 3
        for m in (0.5, 0.9, 1.25, 2.0)
        for arm in ((*WAYS, TWICE) if m >= 1.25 else WAYS)
    }
    return Sweep(flows, Capacity({"a": 40.0, "b": 40.0}, 2), 20.0, {})


def test_saturation_stands_beside_the_prediction_and_the_thesis() -> None:
    made = sweep()
    by = {(f.name, f.mode): f for f in made.figures()}
    assert by[SATURATED, HANDLES].value == 20
    assert by[SATURATED, HANDLES].n == 6  # two rates in three rounds
    assert by[SATURATED, HANDLES].labels["thesis"] == 217
    assert by[RATIO, HANDLES].value == pytest.approx(1.25)
    assert by[RATIO, HANDLES].labels["thesis"] == pytest.approx(217 / 160, abs=1e-3)
    assert by[KEEPS_UP, HANDLES].value == pytest.approx(18)  # 0.9 x 20; at 1.25 it answers 0.8
    assert by[KEEPS_UP, TENSORS].value == pytest.approx(10)
    assert by[LEAST_MU, ""].value == by[LIMIT, ""].value == pytest.approx(25)
    assert by[LIMIT, ""].labels["thesis"] == pytest.approx(248.7, abs=0.1)
    assert "1.25 times as many" in made.says()
    assert {len(row) for row in made.grid().rows} == {len(made.grid().heads)}


def test_equal_ways_are_not_told_apart() -> None:
    assert "not told apart" in sweep(20.0, 20.0).says()


def test_a_way_that_answered_nothing_is_not_compared() -> None:
    made = sweep(20.0, 0.0)
    assert made.ratio is None
    assert RATIO not in {f.name for f in made.figures()}
    assert KEEPS_UP not in {f.name for f in made.figures() if f.mode == TENSORS}
    assert "nothing can be said" in made.says()


# --- figures 4.13 and 4.14 -----------------------------------------------------------------------


def look(mib: float) -> Look:
    return Look(rss=2 * mib, pss=mib, arena=1.0)


def way(past: float, rounds: int = 3) -> Way:
    made = Way(look(90), look(100))
    for multiple, mib in {0.5: 100.0, 0.75: 100.5, 2.0: past, 3.0: past}.items():
        made.visits[multiple] = [look(mib)] * rounds
    made.long = [(float(n), look(past + n)) for n in range(9)]
    return made


def test_what_a_visit_settles_at_and_how_far_a_long_one_grew() -> None:
    looks = [(float(n), look(10.0 * n)) for n in range(6)]
    assert settled(looks).pss == 40  # of 30, 40, 50
    assert settled(looks).gpu is None
    assert growth_mib(looks) == 40  # 45 - 5
    with pytest.raises(ValueError, match="no samples"):
        growth_mib(looks[:2])


@pytest.mark.parametrize(("past", "verdict"), [(101.0, "met"), (120.0, "missed")])
def test_memory_past_saturation_is_flat_or_not(past: float, verdict: str) -> None:
    made = way(past)
    assert made.ratio.value == pytest.approx(past / 100)
    assert made.ratio.n == 6
    assert made.noise == pytest.approx(0.005)
    assert made.verdict == verdict


def test_memory_within_the_noise_is_no_verdict() -> None:
    made = way(104.9)
    made.visits[0.75] = [look(104.0)] * 3  # equal loads were already so far apart
    assert made.verdict == "within noise"
    assert way(120.0, rounds=1).verdict == "too few rounds to conclude"


def test_memory_figures() -> None:
    made = Growth({HANDLES: way(101.0), TENSORS: way(120.0)}, 20.0, {})
    by = {(f.name, f.mode): f for f in made.summary()}
    assert by[PAST_RATIO, HANDLES].labels["verdict"] == "met"
    assert by[FIRST, HANDLES].value == 10
    assert by[LONG, HANDLES].value == 6
    assert "1.01 times with tensormq" in made.says()
    assert {len(row) for row in made.grid().rows} == {len(made.grid().heads)}
    assert len(made.rows()) == 2 * (4 * 3 + 9)


def test_a_gpu_s_memory_decides_where_there_is_one() -> None:
    assert Look(1.0, 2.0, 3.0, 4.0).main == 4.0


def test_memory_per_block() -> None:
    starts = [Start({"block1": 30.0 + n, "x": 20.0}, {"block1": 10.0, "x": 10.0}) for n in range(5)]
    by = {(f.name, f.mode): f for f in figures_of(starts, {"block1": 8.0, "x": 1.0}, {})}
    assert by[PROCESS, "block1"].value == 32
    assert by[PROCESS, "block1"].labels["thesis"] == 394
    assert by[OWN, "block1"].value == 22
    assert by[OWN, "block1"].labels["thesis"] == 26
    assert "thesis" not in by[PROCESS, "x"].labels
    assert (by[COST, ""].value, by[COST, ""].n) == (10, 5)


# --- figures 4.15 and 4.16 -----------------------------------------------------------------------


def test_blocks_are_spread_evenly_and_neighbours_stay_together() -> None:
    assert [index(n, 4) for n in (1, 2, 4)] == [25, 50, 100]
    assert numbers(4) == (1, 2, 4)
    assert numbers(3) == (1, 2, 3)
    assert numbers(1) == (1,)
    assert spread(4, 1) == (0, 0, 0, 0)
    assert spread(4, 2) == (0, 0, 1, 1)
    assert spread(4, 4) == (0, 1, 2, 3)


@given(st.integers(1, 20), st.integers(1, 20))
def test_every_device_gets_its_share(blocks: int, devices: int) -> None:
    places = spread(blocks, min(devices, blocks))
    shares = [places.count(p) for p in range(min(devices, blocks))]
    assert max(shares) - min(shares) <= 1
    assert list(places) == sorted(places)


def test_a_topology_for_cores_and_one_for_gpus() -> None:
    cores = spread_topology(CHAIN, WAYS, Places(CORES, ["3", "5"]), (1, 2))
    assert len(cores["blocks"]) == len({b["name"] for b in cores["blocks"]}) == 16
    path = cores["tasks"][way_of(HANDLES, 2)]["path"]
    by = {b["name"]: b for b in cores["blocks"]}
    assert [by[b]["cores"] for b in path] == [[3], [3], [5], [5]]
    assert {by[b]["device"] for b in path} == {"cpu"}
    assert by[cores["tasks"][way_of(TENSORS, 1)]["path"][0]]["mode"] == "zeromq"
    gpus = spread_topology(CHAIN, WAYS, Places(GPUS, ["cuda:0", "cuda:1"]), (2,))
    assert [b["device"] for b in gpus["blocks"][:4]] == ["cuda:0"] * 2 + ["cuda:1"] * 2
    assert not any("cores" in b for b in gpus["blocks"])


def device_visit(overhead_ms: float) -> DeviceVisit:
    timings = [
        BlockTiming(f"w.pt2.block{n}", overhead_ms / 4, 9.0, overhead_ms * 3 / 4, 5.0 * n)
        for n in (1, 2, 3, 4)
    ]
    return DeviceVisit.of([record(0, 1, timings=timings), record(0, 1, "TIMEOUT")])


def test_a_visit_s_times_are_those_of_what_was_answered() -> None:
    visit = device_visit(2.0)
    assert visit.compute == {"block1": 5, "block2": 10, "block3": 15, "block4": 20}
    assert visit.overhead["block3"] == pytest.approx(2.0)
    assert visit.total_overhead == pytest.approx(8.0)  # waiting is no overhead
    with pytest.raises(ValueError, match="no request"):
        DeviceVisit.of([record(0, 1, "TIMEOUT")])


def test_overhead_by_distribution_stands_beside_the_thesis_s() -> None:
    costs = {(HANDLES, 1): 1.0, (TENSORS, 1): 5.0, (TWICE, 1): 1.0}
    costs |= {(HANDLES, 2): 1.5, (TENSORS, 2): 4.5}
    visits = {arm: [device_visit(cost)] * 5 for arm, cost in costs.items()}
    made = Distribution(visits, Places(GPUS, ["cuda:0", "cuda:1"]), 30.0, {})
    found = {f.labels["pdi"]: f for f in made.figures() if f.name == LESS}
    assert {pdi: f.value for pdi, f in found.items()} == pytest.approx({25.0: 5.0, 50.0: 3.0})
    assert {pdi: f.labels["thesis"] for pdi, f in found.items()} == {25.0: 5.26, 50.0: 3.56}
    assert "PDI 25: 5.00 times as much" in made.says()
    assert made.noise == 0
    assert {f.mode for f in made.table()} == {
        "PDI 25 (4 blocks, 1 GPU)",
        "PDI 50 (4 blocks, 2 GPUs)",
    }
