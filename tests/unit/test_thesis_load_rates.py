"""The thesis's experiments under load: what is served, and how much before it is too much."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from thesis_rig import CHAIN, HANDLES, TENSORS, record

from blockflow.bench.thesis.beside import AGAIN
from blockflow.bench.thesis.clients_figures import KNEE, STEP, Clients, find_knee, find_step
from blockflow.bench.thesis.clients_figures import Visit as ClientVisit
from blockflow.bench.thesis.rates_figures import (
    CALLERS,
    HELD,
    KEEPS_UP,
    LEAST_MU,
    LIMIT,
    OF_LIMIT,
    RATIO,
    REFUSED,
    SATURATED,
    Sweep,
)
from blockflow.bench.thesis.rates_model import Calm, Capacity, Flow, flow_of, typical
from blockflow.bench.thesis.served import (
    ARMS,
    TWICE,
    WAYS,
    Asked,
    callers_of,
    patience_s,
    processes,
    served,
    short,
    task_of,
)

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
    """All ways' workers, and one that has ended."""

    def status(self) -> dict[str, object]:
        pids = {
            f"{HANDLES}.pt2.block1": 11,
            f"{HANDLES}.pt2.block2": 12,
            f"{TENSORS}.pt2.block1": 13,
            f"{HANDLES}-again.pt2.block1": 14,
            f"{HANDLES}.pt2.block3": None,
        }
        return {"workers": [{"worker": name, "pid": pid} for name, pid in pids.items()]}


def test_a_way_s_processes() -> None:
    system: Any = FakeSystem()
    assert processes(system, HANDLES) == {"block1": 11, "block2": 12}
    assert processes(system, TENSORS) == {"block1": 13}
    assert processes(system, TWICE) == {"block1": 14}


# --- figure 4.11 ---------------------------------------------------------------------------------


def test_the_knee_is_where_the_bounds_meet() -> None:
    """Two servers of 50 ms each: 100 ms alone, 20 per second at most, so the knee is at two."""
    found = find_knee([100.0, 90.0, 110.0], [20.0, 20.0, 20.0])
    assert (found.value, found.low, found.high) == pytest.approx((2.0, 1.8, 2.2))
    assert find_knee([100.0], [5.0]).value == 1.0  # never fewer than one


def test_what_a_further_client_adds_is_a_slope_per_round() -> None:
    steps = [48.0, 49.0, 50.0, 51.0, 60.0]
    latency = {n: [step * n for step in steps] for n in range(1, 11)}
    found = find_step(latency, 2.0)
    assert found is not None
    assert found.value == pytest.approx(50.0)
    assert found.n == 5
    assert found.low == pytest.approx(48.0)
    assert found.high == pytest.approx(60.0)
    assert find_step(latency, 9.0) is None  # a single number of clients lies beyond
    assert find_step(latency, 8.5) is not None


def test_the_growth_beyond_the_knee_is_told_with_its_interval() -> None:
    def visits(rounds: int) -> dict[tuple[str, int], list[ClientVisit]]:
        return {
            (arm, n): [ClientVisit(max(100.0, (48 + k) * n), 20.0) for k in range(rounds)]
            for n in range(1, 11)
            for arm in (*WAYS, TWICE)
        }

    made = Clients(visits(5), {})
    step = next(f for f in made.figures() if (f.name, f.mode) == (STEP, HANDLES))
    assert (step.value, step.n) == (pytest.approx(50.0), 5)
    assert step.low is not None and step.low < step.value < (step.high or 0)
    assert "each further one adds 50.0 ms (95% 48.0-52.0, n = 5)" in made.says()
    assert "n = 4: too few rounds to conclude)" in Clients(visits(4), {}).says()


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
    ratio = next(f for f in made.figures() if "noise" in f.labels and f.labels["clients"] == 1)
    assert (ratio.value, ratio.labels["thesis"]) == (2.5, 2.5)
    assert made.noise == 0
    assert {f.name for f in made.figures() if "noise" in f.labels} == {ratio.name}  # of no rate
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
    found = flow_of(records, 4.0, 1.0)
    assert found.offered == pytest.approx(10)  # 1000 to 3900
    assert found.answered == pytest.approx(10)  # those of 800 to 3700
    assert found.carried == pytest.approx(1)
    refused = [record(100 * n, 1, "OVERLOADED") if n % 2 else r for n, r in enumerate(records)]
    found = flow_of(refused, 4.0, 1.0)
    assert found.offered == pytest.approx(10)
    assert found.answered == pytest.approx(5)
    assert found.refused == pytest.approx(0.5)
    assert flow_of([], 4.0, 1.0).carried == 0


def flow(offered: float, most: float) -> Flow:
    answered = min(offered, most)
    return Flow(offered, answered, 1 - answered / offered, (50.0,))


def sweep(handles: float = 20.0, tensors: float = 16.0, rounds: int = 5) -> Sweep:
    """Rates up to twice the callers' 20 per second."""
    flows = {
        (arm, m): [flow(20 * m, tensors if arm == TENSORS else handles)] * rounds
        for m in (0.5, 0.9, 1.25, 2.0)
        for arm in ((*WAYS, TWICE) if m >= 1.25 else WAYS)
    }
    return Sweep(flows, calm([20.0] * rounds), 20.0, {})


def calm(callers: Sequence[float], ms: float = 40.0) -> list[Calm]:
    """One per round, of two blocks that take equally long."""
    return [Calm(Capacity({"a": ms, "b": ms}, 2), one) for one in callers]


def test_saturation_stands_beside_the_prediction_and_the_thesis() -> None:
    made = sweep()
    by = {(f.name, f.mode): f for f in made.figures()}
    assert by[SATURATED, HANDLES].value == 20
    assert by[SATURATED, HANDLES].n == 5  # a round is one sample, though it has two rates
    assert by[SATURATED, HANDLES].labels["thesis"] == 217
    assert by[RATIO, HANDLES].value == pytest.approx(1.25)
    assert by[RATIO, HANDLES].labels["thesis"] == pytest.approx(217 / 160, abs=1e-3)
    assert by[KEEPS_UP, HANDLES].value == pytest.approx(18)  # 0.9 x 20; at 1.25 it answers 0.8
    assert by[KEEPS_UP, TENSORS].value == pytest.approx(10)
    assert by[LEAST_MU, ""].value == by[LIMIT, ""].value == pytest.approx(25)
    assert by[LIMIT, ""].labels["thesis"] == pytest.approx(248.7, abs=0.1)
    assert "1.25 times as many" in made.says()
    assert {len(row) for row in made.grid().rows} == {len(made.grid().heads)}


def test_what_is_predicted_and_what_callers_get_is_found_in_every_round() -> None:
    flows = {
        (arm, m): [flow(20 * m, 20.0)] * 5
        for m in (0.5, 1.25)
        for arm in ((*WAYS, TWICE) if m >= 1.25 else WAYS)
    }
    rounds = zip((40.0, 50.0, 40.0, 50.0, 40.0), (18.0, 19.0, 20.0, 21.0, 22.0), strict=True)
    found = [one for ms, callers in rounds for one in calm([callers], ms)]
    made = Sweep(flows, found, 20.0, {})
    by = {(f.name, f.mode): f for f in made.summary()}
    for name in (LEAST_MU, LIMIT):
        limit = by[name, ""]
        assert (limit.value, limit.low, limit.high, limit.n) == (25.0, 20.0, 25.0, 5)
    callers = by[CALLERS, HANDLES]
    assert (callers.value, callers.low, callers.high, callers.n) == (20.0, 18.0, 22.0, 5)
    # By rounds: 20 of 25 and 20 of 20.
    share = by[OF_LIMIT, HANDLES]
    assert (share.value, share.low, share.high, share.n) == (0.8, 0.8, 1.0, 5)
    assert "0.80 of the predicted limit (95% 0.800-1.00) of 25.0 (95% 20.0-25.0)" in made.says()
    assert typical([c.capacity for c in found]).service_ms == {"a": 40.0, "b": 40.0}
    assert by[KEEPS_UP, HANDLES].n == 5


def test_a_way_that_still_keeps_up_is_not_called_saturated() -> None:
    """Of 25 per second, 1.25 times the callers', one of two ways answers all."""
    line = sweep(20.0, 26.0).says()
    assert line.endswith("past saturation zeromq kept up with 25.0/s: more may be possible")
    both = sweep(26.0, 26.0).says()
    assert "tensormq kept up with 25.0/s, zeromq kept up with 25.0/s: more may be" in both
    assert "kept up" not in sweep(20.0, 20.0).says()


def test_equal_ways_are_not_told_apart() -> None:
    assert "not told apart" in sweep(20.0, 20.0).says()


def test_a_round_past_saturation_is_the_mean_over_its_rates() -> None:
    flows = {
        (arm, m): [flow(100.0, most + number) for number in range(5)]
        for arm in (*WAYS, TWICE)
        for m, most in ((1.25, 10.0), (2.0, 30.0))
    }
    made = Sweep(flows, calm([20.0] * 5), 20.0, {})
    assert made.saturated.samples[HANDLES] == [20, 21, 22, 23, 24]
    assert made.saturated.cut == 0  # visits at other rates are no warm-up


def test_what_comes_too_much_may_cost_answers() -> None:
    """Handles answer as many at any rate, whole tensors half as many at the highest one."""
    flows = {
        (arm, m): [flow(100.0, 8.0 if (arm, m) == (TENSORS, 2.0) else 16.0)] * 5
        for arm in (*WAYS, TWICE)
        for m in (1.25, 2.0)
    }
    by = {(f.name, f.mode): f for f in Sweep(flows, calm([20.0] * 5), 20.0, {}).summary()}
    assert by[HELD, HANDLES].value == 1.0
    assert by[HELD, TENSORS].value == 0.5
    assert by[HELD, TENSORS].labels["thesis"] == 0.69
    assert "thesis" not in by[HELD, HANDLES].labels
    assert sweep(20.0, 0.0).held(TENSORS) is None


def test_rates_are_no_rounds() -> None:
    """Two rounds of two rates are four visits, and too few to conclude."""
    assert "too few rounds to conclude" in sweep(rounds=2).says()
    assert "too few rounds to conclude" in sweep(rounds=4).says()


def test_a_way_that_answered_nothing_is_not_compared() -> None:
    made = sweep(20.0, 0.0)
    assert made.ratio is None
    assert RATIO not in {f.name for f in made.figures()}
    assert KEEPS_UP not in {f.name for f in made.figures() if f.mode == TENSORS}
    assert "nothing can be said" in made.says()


def test_clients_that_were_refused_are_told_of() -> None:
    served_ = [ClientVisit(18.0, 55.0)] * 5
    visits = {(arm, n): list(served_) for arm in ARMS for n in (1, 10)}
    visits[HANDLES, 10][2] = ClientVisit(18.0, 55.0, 0.25)
    made = Clients(visits, {})
    shares = {(f.mode, f.labels["clients"]): f for f in made.figures() if f.name == REFUSED}
    assert {where: f.interval.high for where, f in shares.items() if f.interval.high} == {
        (HANDLES, 10): 0.25
    }
    assert made.refusals() == [
        f"5.0% of the requests of 10 clients by {HANDLES} were refused: they have no time"
    ]
    assert Asked([record(0, 1), record(0, 1, "OVERLOADED")], 1.0).refused == 0.5
