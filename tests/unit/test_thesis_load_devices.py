"""The thesis's experiments under load: blocks that are spread over cores or GPUs."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from thesis_rig import CHAIN, HANDLES, TENSORS, record

from blockflow.bench.thesis.beside import thesis_cell
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
from blockflow.bench.thesis.rates_figures import REFUSED
from blockflow.bench.thesis.served import ARMS, TWICE, WAYS
from blockflow.client.result import BlockTiming


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


def device_visit(overhead_ms: float, blocks: int = 4) -> DeviceVisit:
    timings = [
        BlockTiming(f"w.pt2.block{n}", overhead_ms / 4, 9.0, overhead_ms * 3 / 4, 5.0 * n)
        for n in range(1, blocks + 1)
    ]
    return DeviceVisit.of([record(0, 1, timings=timings), record(0, 1, "TIMEOUT")])


def test_a_visit_s_times_are_those_of_what_was_answered() -> None:
    visit = device_visit(2.0)
    assert visit.compute == {"block1": 5, "block2": 10, "block3": 15, "block4": 20}
    assert visit.overhead["block3"] == pytest.approx(2.0)
    assert visit.total_overhead == pytest.approx(8.0)  # waiting is no overhead
    with pytest.raises(ValueError, match="no request"):
        DeviceVisit.of([record(0, 1, "TIMEOUT")])


def test_requests_that_were_refused_are_told_of() -> None:
    """Whoever is refused takes no time: a way that refuses its slow requests is no faster."""
    timings = [BlockTiming("w.pt2.block1", 1.0, 0.0, 1.0, 5.0)]
    answered, refused = record(0, 1, timings=timings), record(0, 1, "OVERLOADED")
    calm, busy = DeviceVisit.of([answered] * 4), DeviceVisit.of([answered, refused])
    assert (calm.refused, busy.refused) == (0.0, 0.5)
    visits = {(HANDLES, 1): [calm] * 5, (TENSORS, 1): [calm] * 4 + [busy], (TWICE, 1): [calm] * 5}
    made = Distribution(visits, Places(CORES, ["0"]), 30.0, {})
    shares = {f.mode: f.interval.high for f in made.figures() if f.name == REFUSED}
    assert shares == {HANDLES: 0.0, TENSORS: 0.5, TWICE: 0.0}
    assert made.refusals() == [
        f"10.0% of the requests by {TENSORS} at PDI 100 were refused: they have no time"
    ]


def test_overhead_by_distribution_stands_beside_the_thesis_s() -> None:
    costs = {(HANDLES, 1): 1.0, (TENSORS, 1): 5.0, (TWICE, 1): 1.0}
    costs |= {(HANDLES, 2): 1.5, (TENSORS, 2): 4.5, (TWICE, 2): 1.5}
    visits = {arm: [device_visit(cost)] * 5 for arm, cost in costs.items()}
    made = Distribution(visits, Places(GPUS, ["cuda:0", "cuda:1"]), 30.0, {})
    found = {f.labels["pdi"]: f for f in made.figures() if f.name == LESS}
    assert {pdi: f.value for pdi, f in found.items()} == pytest.approx({25.0: 5.0, 50.0: 3.0})
    assert {pdi: f.labels["thesis"] for pdi, f in found.items()} == {25.0: 5.26, 50.0: 3.56}
    assert "PDI 25: 5.00 times as much" in made.says()
    # A core is no GPU: whose figure it is stands beside it.
    assert made.says().count("times as much on GPUs)") == 2
    assert {thesis_cell(f) for f in found.values()} == {"5.26 x on GPUs", "3.56 x on GPUs"}
    three = {(arm, 2): [device_visit(1.0, blocks=3)] * 5 for arm in ARMS}  # no such PDI there
    assert "thesis" not in Distribution(three, Places(CORES, ["0", "1"]), 30.0, {}).says()
    assert {f.labels["noise"] for f in found.values()} == {0.0}
    assert {f.mode for f in made.table()} == {
        "PDI 25 (4 blocks, 1 GPU)",
        "PDI 50 (4 blocks, 2 GPUs)",
    }


def test_each_number_of_devices_is_judged_by_its_own_noise() -> None:
    """On one device equal things were half as dear again; on two they were the same."""
    costs = {(HANDLES, 1): 2.0, (TENSORS, 1): 2.5, (TWICE, 1): 3.0}
    costs |= {(HANDLES, 2): 2.0, (TENSORS, 2): 2.5, (TWICE, 2): 2.0}
    visits = {arm: [device_visit(cost)] * 5 for arm, cost in costs.items()}
    made = Distribution(visits, Places(CORES, ["0", "1"]), 30.0, {})
    noise = {f.labels["pdi"]: f.labels["noise"] for f in made.figures() if f.name == LESS}
    assert noise == pytest.approx({25.0: 0.5, 50.0: 0.0})
    assert "PDI 25: not told apart (1.25 times" in made.says()
    assert "noise 50.0%" in made.says()
    assert "PDI 50: 1.25 times as much" in made.says()
