"""The thesis's experiments under load: CPU time, energy and memory, from samples to words."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest
from thesis_rig import HANDLES, TENSORS

from blockflow.bench.sampler import Sampler
from blockflow.bench.thesis import energy_source, util
from blockflow.bench.thesis.beside import beside_grid
from blockflow.bench.thesis.energy_figures import ABOVE, ENERGY, IDLE, Energy
from blockflow.bench.thesis.energy_figures import RATIO as ENERGY_RATIO
from blockflow.bench.thesis.energy_figures import Visit as EnergyVisit
from blockflow.bench.thesis.energy_source import Rapl, find_source, grown
from blockflow.bench.thesis.growth_blocks import COST, OWN, PROCESS, Start, draw, figures_of
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
from blockflow.bench.thesis.served import TWICE, WAYS
from blockflow.bench.thesis.util_figures import (
    DISPATCHER,
    GPU,
    GPU_RATIO,
    MEAN,
    MEAN_RATIO,
    PER_REQUEST,
    Utilisation,
)
from blockflow.bench.thesis.util_figures import MACHINE as WHOLE
from blockflow.bench.thesis.util_figures import Visit as CpuVisit

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


def looks_at(*percents: float) -> list[tuple[float, float]]:
    """At the GPU, a quarter of a second apart."""
    return [(0.25 * n, percent) for n, percent in enumerate(percents)]


def test_gpu_utilisation_stands_beside_the_thesis_s() -> None:
    def visit(gpu: float) -> CpuVisit:
        return CpuVisit(1.0, 5.0, {"a": 0.5, DISPATCHER: 0.1}, gpu=looks_at(gpu, gpu))

    visits = {HANDLES: [visit(40)] * 5, TENSORS: [visit(20)] * 5, TWICE: [visit(40)] * 5}
    made = Utilisation(visits, 2, {})
    ratio = next(f for f in made.figures() if f.name == GPU_RATIO)
    assert (ratio.value, ratio.labels["thesis"]) == (2.0, 2.0)
    assert "the GPU with handles 2.00 times as busy" in made.says()
    assert made.rows()[:2] == [("GPU", HANDLES, 0, 0.0, 40), ("GPU", HANDLES, 0, 0.25, 40)]
    _cpu, gpu, _processes = made.draw().axes
    assert len(gpu.lines) == 2 * 5  # a line per visit of either way
    assert len(Utilisation({w: [cpu_visit(0.2)] for w in visits}, 2, {}).draw().axes) == 2


def gpu_visits(*handles: Sequence[float], tensors: float = 20.0) -> Mapping[str, list[CpuVisit]]:
    """A visit per round with these looks at the GPU; the other ways' are all seen."""
    spent = {"a": 0.5, DISPATCHER: 0.1}
    seen = [CpuVisit(1.0, 5.0, spent, gpu=looks_at(tensors)) for _ in handles]
    first = [CpuVisit(1.0, 5.0, spent, gpu=looks_at(*looks)) for looks in handles]
    again = [CpuVisit(1.0, 5.0, spent, gpu=looks_at(40.0)) for _ in handles]
    return {HANDLES: first, TENSORS: seen, TWICE: again}


def test_a_gpu_that_idles_for_a_visit_is_seen_all_the_same() -> None:
    made = Utilisation(gpu_visits((0.0, 0.0), *[(40.0,)] * 5), 2, {})
    by = {(f.name, f.mode): f for f in made.figures()}
    assert (by[GPU, HANDLES].value, by[GPU, HANDLES].n) == (40, 6)
    assert 0 < by[GPU, HANDLES].interval.low < 40  # between the visit that idled and the next
    assert made.unseen == 0
    # No ratio to a GPU that did nothing; the figures stay.
    idle = Utilisation(gpu_visits(*[(40.0,)] * 5, tensors=0.0), 2, {})
    names = {f.name for f in idle.figures()}
    assert GPU in names
    assert GPU_RATIO not in names
    assert "the GPU with handles idle in some visit: not compared" in idle.says()


def test_rounds_in_which_nvml_gave_nothing_are_left_out_and_named() -> None:
    visits = gpu_visits((), *[(40.0,)] * 5)
    made = Utilisation(visits, 2, {})
    assert (made.unseen, next(f for f in made.figures() if f.name == GPU).n) == (1, 5)
    notes = util.conclude(visits, {}, "cuda:0").notes
    assert any("without 1 rounds" in note for note in notes)
    assert not any("skipped" in note for note in notes)
    never = gpu_visits(*[()] * 5)
    assert Utilisation(never, 2, {}).gpu is None
    assert any("NVML gives none" in note for note in util.conclude(never, {}, "cuda:0").notes)


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


# --- figures 4.13 and 4.14 -----------------------------------------------------------------------


def look(mib: float) -> Look:
    return Look(rss=2 * mib, pss=mib, arena=1.0)


def way(past: float, rounds: int = 5) -> Way:
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
    with pytest.raises(ValueError, match="empty data"):
        growth_mib(looks[:2])


@pytest.mark.parametrize(("past", "verdict"), [(101.0, "met"), (120.0, "missed")])
def test_memory_past_saturation_is_flat_or_not(past: float, verdict: str) -> None:
    made = way(past)
    assert made.ratio.value == pytest.approx(past / 100)
    assert made.ratio.n == 5  # a round is one sample, though it has two rates past saturation
    assert made.noise == pytest.approx(0.005)
    assert made.verdict == verdict


def test_memory_within_the_noise_is_no_verdict() -> None:
    made = way(104.9)
    made.visits[0.75] = [look(104.0)] * 5  # equal loads were already so far apart
    assert made.verdict == "within noise"


def test_rates_are_no_rounds() -> None:
    """Four rounds of two rates past saturation are eight visits, and four samples."""
    made = way(101.0, rounds=4)
    assert made.ratio.n == 4
    assert made.verdict == "too few rounds to conclude"
    assert "too few rounds" in Growth({HANDLES: made, TENSORS: made}, 20.0, {}).says()


def test_one_rate_at_which_memory_grew_is_enough() -> None:
    made = way(101.0)
    made.visits[3.0] = [look(130.0)] * 5
    assert made.ratio.value == pytest.approx(1.3)
    assert made.verdict == "missed"


def test_memory_figures() -> None:
    made = Growth({HANDLES: way(101.0), TENSORS: way(120.0)}, 20.0, {})
    by = {(f.name, f.mode): f for f in made.summary()}
    assert by[PAST_RATIO, HANDLES].labels["verdict"] == "met"
    assert by[FIRST, HANDLES].value == 10
    assert by[LONG, HANDLES].value == 6
    assert "1.01 times with tensormq" in made.says()
    # Whoever reads one line learns that memory did grow, before what is compared.
    once = "had added once 10.0 MiB with tensormq (+11%), 10.0 MiB with zeromq (+11%)"
    assert once in made.says()
    assert {len(row) for row in made.grid().rows} == {len(made.grid().heads)}
    assert len(made.rows()) == 2 * (4 * 5 + 9)


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
    # Ours is MiB; a number of the thesis's never stands there without its own unit.
    rows = {(row[0], row[1]): row for row in beside_grid("", by.values()).rows}
    assert rows[PROCESS, "block1"][4:6] == ("394 MB", "MiB")
    assert rows[COST, ""][4] == "370 MB"
    assert (by[COST, ""].value, by[COST, ""].n) == (10, 5)


def test_a_bar_ends_where_its_process_does() -> None:
    """Pages of a state that nobody has touched are not resident."""
    starts = [Start({"block1": 30.0, "block2": 30.0}, {"block1": 10.0, "block2": 10.0})] * 5
    page = draw(starts, {"block1": 8.0, "block2": 50.0}, {"model": "other"})
    tops: dict[float, float] = {}
    for bar in page.axes[0].patches:
        tops[bar.get_x()] = max(tops.get(bar.get_x(), 0.0), bar.get_y() + bar.get_height())
    assert list(tops.values()) == [30.0, 30.0]
