"""What people may ask of the simulator, and what they are told when it makes no sense."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any

import pytest

from blockflow.batching.shares import TaskShare
from blockflow.bench.simulation.arrivals import (
    Bursts,
    Closed,
    Mix,
    Poisson,
    Recorded,
    Step,
    parse_arrivals,
)
from blockflow.bench.simulation.example import example_profiles
from blockflow.bench.simulation.plan import Order, plan_experiment
from blockflow.bench.simulation.sizes import parse_sizes
from blockflow.bench.simulation.sources import (
    Costs,
    TaskChoice,
    parse_share,
    parse_task,
    plain_system,
    read_profiles,
)
from blockflow.bench.simulation.text import parse_policy, policy_label
from blockflow.bench.simulation.trace import read_trace
from blockflow.core.errors import RequestError

COSTS = Costs(
    cores=2,
    hop_ms=0.3,
    turn_ms=0.1,
    credits=256,
    slots=16,
    threads=1,
    replicas=1,
    max_rows=32,
    deadline_ms=1e4,
)
PROFILES = {p.block: p for p in example_profiles()}


# --- sizes ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "mean", "largest"),
    [
        ("3", 3.0, 3),
        ("fixed:5", 5.0, 5),
        ("uniform:1-8", 4.5, 8),
        ("choice:1=3,8=1", 2.75, 8),
        ("zipf:a=1,max=3", 3 / (1 + 1 / 2 + 1 / 3), 3),
        ("lognormal:median=40,sigma=0.0001,max=100", 40.0, 41),
        ("lognormal:median=1e9,max=12", 12.0, 12),
    ],
)
def test_a_distributions_mean_is_exact(text: str, mean: float, largest: int) -> None:
    sizes = parse_sizes(text, "--rows")
    assert sizes.mean == pytest.approx(mean, rel=1e-6)
    assert sizes.largest <= largest
    assert sum(sizes.shares) == pytest.approx(1.0)


def test_draws_follow_the_distribution() -> None:
    sizes = parse_sizes("lognormal:median=20,sigma=0.8,max=64", "--lengths")
    rng = Random(1)
    draws = [sizes.draw(rng) for _ in range(20_000)]
    assert sum(draws) / len(draws) == pytest.approx(sizes.mean, rel=0.02)
    assert sorted(draws)[10_000] == pytest.approx(20, abs=1)
    assert max(draws) == 64 == sizes.largest


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", "unknown distribution"),
        ("gauss:1", "known: fixed, uniform"),
        ("0", "outside 1.."),
        ("1.5", "unknown distribution"),
        ("uniform:8-1", "empty"),
        ("uniform:1", "no whole number"),
        ("choice:1", "is not key=value"),
        ("choice:", "names no value"),
        ("choice:1=0", "must be above 0"),
        ("choice:1=1,1=2", "stands twice"),
        ("zipf:b=1", "unknown key 'b'"),
        ("zipf:a=nan", "must be above 0"),
        ("lognormal:sigma=1", "median= is missing"),
        ("lognormal:median=inf", "must be above"),
        ("lognormal:median=x", "is no number"),
        ("fixed:99999999", "outside"),
    ],
)
def test_no_distribution(text: str, says: str) -> None:
    with pytest.raises(RequestError, match=says) as caught:
        parse_sizes(text, "--rows")
    assert caught.value.code == "INVALID_REQUEST"


# --- arrivals ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "factor"),
    [("poisson", 1.0), ("burst:factor=4,on_s=0.1,off_s=0.5", 1.0), ("step:factor=3,at=0.5", 2.0)],
)
def test_the_mean_rate_is_kept(text: str, factor: float) -> None:
    times = list(parse_arrivals(text).times(100.0, 100.0, Random(1)))
    assert len(times) / 10_000 == pytest.approx(factor, rel=0.06)
    assert times == sorted(times)
    assert times[0] >= 0
    assert times[-1] < 100e9


def test_bursts_are_burstier_than_poisson() -> None:
    def dispersion(text: str) -> float:
        """Variance of the counts per second relative to their mean; 1 for Poisson."""
        times = parse_arrivals(text).times(100.0, 200.0, Random(1))
        counts = [0] * 200
        for t in times:
            counts[t // 10**9] += 1
        mean = sum(counts) / 200
        return sum((c - mean) ** 2 for c in counts) / 200 / mean

    assert dispersion("poisson") == pytest.approx(1.0, abs=0.35)
    assert dispersion("burst:factor=5,on_s=1,off_s=4") > 20


def test_a_step_steps() -> None:
    times = list(Step(4.0, 0.5).times(50.0, 40.0, Random(2)))
    early = sum(t < 20e9 for t in times)
    assert (len(times) - early) / early == pytest.approx(4.0, rel=0.1)


def test_arrivals_are_parsed() -> None:
    assert parse_arrivals("poisson") == Poisson()
    assert parse_arrivals("burst") == Bursts(4.0, 1.0, 5.0)
    assert parse_arrivals("closed:8") == Closed(8)
    assert list(Closed(3).times(1.0, 1.0, Random(1))) == [0, 0, 0]


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("sometimes", "known: poisson, burst, step, closed"),
        ("poisson:rate=3", "unknown key"),
        ("burst:factor=7", "nothing comes between"),
        ("burst:factor=1", "above 1"),
        ("step:at=1", "below 1"),
        ("step:factor=1e300", "at most 1e"),
        ("step:factor=nan", "at most 1e"),
        ("closed:0", "outside 1.."),
        ("closed:many", "no whole number"),
        ("nowhere.csv", "cannot be read"),
    ],
)
def test_no_arrivals(text: str, says: str) -> None:
    with pytest.raises(RequestError, match=says):
        parse_arrivals(text)


# --- traces --------------------------------------------------------------------------------------


def test_a_trace_is_read_in_both_forms(tmp_path: Path) -> None:
    table, lines = tmp_path / "t.csv", tmp_path / "t.jsonl"
    table.write_text("time, task,rows\n0.5,a,2\n0.5,,\n1.25,b,3\n")
    lines.write_text(
        '{"time": 0.5, "task": "a", "rows": 2}\n\n{"time": 0.5, "rows": null}\n'
        '{"time": 1.25, "task": "b", "rows": 3}\n'
    )
    expected = (
        (500_000_000, "a", 2, None),
        (500_000_000, None, None, None),
        (1_250_000_000, "b", 3, None),
    )
    assert read_trace(table) == read_trace(lines) == expected


def test_a_trace_is_replayed_as_it_is_and_completed_by_draws(tmp_path: Path) -> None:
    file = tmp_path / "t.csv"
    file.write_text("time,rows,length\n0.1,2,\n0.2,,30\n9,1,1\n")
    trace = parse_arrivals(str(file))
    assert isinstance(trace, Recorded)
    mix = Mix([("only", 1.0)], parse_sizes("7", ""), parse_sizes("5", ""))
    found = list(trace.queries(1.0, 1.0, mix, "1"))
    assert found == [(100_000_000, "only", 2, 5), (200_000_000, "only", 7, 30)]


@pytest.mark.parametrize(
    ("name", "text", "says"),
    [
        ("t.csv", "", "columns are none"),
        ("t.csv", "when\n1\n", "columns are when"),
        ("t.csv", "time\n", "no entries"),
        ("t.csv", "time\nsoon\n", "'soon' is no number"),
        ("t.csv", "time\n2\n1\n", "backwards"),
        ("t.csv", "time\n-1\n", "seconds from the start"),
        ("t.csv", "time,rows\n1,0\n", "rows '0'"),
        ("t.csv", "time,rows\n1,2.5\n", "rows '2.5'"),
        ("t.csv", "time\n1,2\n", "more values"),
        ("t.csv", "time\n1700000000\n", "from a clock's times take the first one off"),
        ("t.csv", "time\n1e300\n", "seconds from"),
        ("t.csv", f"time,task\n1,{'x' * 200_000}\n", "no CSV"),
        ("t.csv", f"time,{'x' * 200_000}\n", "no CSV"),
        ("t.jsonl", '{"time": 1' + "0" * 400 + "}\n", "no number"),
        ("t.jsonl", "[" * 100_000, "no JSON"),
        ("t.jsonl", "{", "no JSON"),
        ("t.jsonl", "[1]\n", "not a JSON object"),
        ("t.jsonl", '{"rows": 1}\n', "no time"),
        ("t.jsonl", '{"time": NaN}\n', "seconds from"),
        ("t.jsonl", '{"time": true}\n', "'True' is no number"),
        ("t.jsonl", '{"time": 1, "rows": true}\n', "rows True"),
        ("t.jsonl", '{"time": 1, "task": 3}\n', "task 3"),
        ("t.jsonl", '{"time": 1, "when": 3}\n', "unknown field 'when'"),
    ],
)
def test_no_trace(tmp_path: Path, name: str, text: str, says: str) -> None:
    file = tmp_path / name
    file.write_text(text)
    with pytest.raises(RequestError) as caught:
        read_trace(file)
    assert says in f"{caught.value.message} {caught.value.hint}"
    assert str(file) in caught.value.where


def test_a_spreadsheets_mark_is_no_part_of_a_column(tmp_path: Path) -> None:
    file = tmp_path / "t.csv"
    file.write_text("time,rows\n1,2\n", encoding="utf-8-sig")
    assert read_trace(file) == ((10**9, None, 2, None),)


def test_a_traces_own_queries_count_not_the_capacity(tmp_path: Path) -> None:
    """A day with a few queries is no work; more than the system can serve is."""
    file = tmp_path / "t.csv"
    file.write_text("time\n1\n86400\n")
    system = plain_system(PROFILES, [], {}, COSTS, apart=False)
    order = Order(arrivals=str(file), seeds=1)
    experiment, _ = plan_experiment(system, order)
    assert experiment.duration_s == pytest.approx(86_400, rel=1e-3)
    file.write_text("time\n" + "1\n" * 1000)
    with pytest.raises(RequestError, match="would take hours") as caught:
        plan_experiment(system, replace(order, seeds=30_000))
    assert "--arrivals" in caught.value.where


@pytest.mark.parametrize("arrivals", ["step:factor=1e9", "burst:factor=1.5,on_s=1e-7,off_s=1e-7"])
def test_arrivals_without_end_are_refused(arrivals: str) -> None:
    system = plain_system(PROFILES, [], {}, COSTS, apart=False)
    with pytest.raises(RequestError, match="would take hours"):
        plan_experiment(system, Order(arrivals=arrivals, seeds=1))


def test_a_trace_that_is_no_text(tmp_path: Path) -> None:
    file = tmp_path / "t.csv"
    file.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(RequestError, match="cannot be read"):
        read_trace(file)


# --- policies, tasks, profiles -------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "spec"),
    [
        ("none", {"policy": "none"}),
        ("window:max_rows=8,max_delay_ms=2.5", {"max_rows": 8, "max_delay_ms": 2.5}),
        ("dvabatch:policies=[load,operator],bs_max=4", {"policies": ["load", "operator"]}),
        ("lbci:t_opt_ms=100,classes=[16,64]", {"classes": [16, 64]}),
        ("topology", {}),
    ],
)
def test_a_policy_is_parsed_and_named(text: str, spec: dict[str, Any]) -> None:
    parsed = parse_policy(text)
    assert spec.items() <= parsed.items()
    assert parse_policy(policy_label(parsed)) == parsed


@pytest.mark.parametrize("text", ["", ":x=1", "window:max_rows", "window:a=1,a=2", "x:policy=none"])
def test_no_policy(text: str) -> None:
    with pytest.raises(RequestError):
        parse_policy(text)


def test_tasks_and_shares_are_parsed() -> None:
    assert parse_task("digit@2=a,b") == TaskChoice("digit", ("a", "b"), 2.0)
    assert parse_task("digit") == TaskChoice("digit", (), 1.0)
    assert parse_share("digit:weight=2,priority=1") == ("digit", TaskShare(2, 1))
    for text in ("", "@2=a", "a@x=b", "a@0=b", "a@inf=b"):
        with pytest.raises(RequestError):
            parse_task(text)
    for text in ("a:weight=0", "a:colour=red", "a:priority=x"):
        with pytest.raises(RequestError):
            parse_share(text)


def test_profiles_are_read_from_all_forms(tmp_path: Path) -> None:
    one, many, chain = (tmp_path / f"{n}.json" for n in ("one", "many", "chain"))
    stem, middle, deep, head = (p.to_dict() for p in PROFILES.values())
    one.write_text(json.dumps(stem))
    many.write_text(json.dumps([middle, deep]))
    chain.write_text(json.dumps({"profile": stem, "parts": [head]}))
    assert read_profiles([one, many, chain]) == PROFILES
    with pytest.raises(RequestError, match="two profiles of 'stem'"):
        read_profiles([one, one])


@pytest.mark.parametrize("text", ["", "[]", "3", "{}", '{"block": "a"}', "[[", "\x00"])
def test_no_profile(tmp_path: Path, text: str) -> None:
    file = tmp_path / "p.json"
    file.write_text(text)
    with pytest.raises(RequestError, match="profile"):
        read_profiles([file])


@pytest.mark.parametrize(
    ("task", "says"),
    [
        (TaskChoice("t", ("stem", "tail"), 1.0), "no profile of 'tail'"),
        (TaskChoice("t", (), 1.0), "has no path"),
        (TaskChoice("t", ("stem", "stem"), 1.0), "stands twice"),
    ],
)
def test_no_path(task: TaskChoice, says: str) -> None:
    with pytest.raises(RequestError, match=says):
        plain_system(PROFILES, [task], {}, COSTS, apart=False)


def test_tasks_of_a_plain_system() -> None:
    tasks = [TaskChoice("a", ("stem", "head"), 2.0), TaskChoice("b", ("stem", "deep"), 1.0)]
    shares = {"a": TaskShare(weight=3)}
    one = plain_system(PROFILES, tasks, shares, COSTS, apart=False)
    assert [[s.block for s in w.stages] for w in one.workers] == [["stem", "head", "deep"]]
    assert [t.share for t in one.tasks] == [TaskShare(3), TaskShare()]
    apart = plain_system(PROFILES, [], {}, COSTS, apart=True)
    assert [w.name for w in apart.workers] == list(PROFILES)
    assert apart.tasks[0].path == tuple(PROFILES)
    with pytest.raises(RequestError, match="no task 'c'"):
        plain_system(PROFILES, tasks, {"c": TaskShare()}, COSTS, apart=False)
    with pytest.raises(RequestError, match="named twice"):
        plain_system(PROFILES, [tasks[0], tasks[0]], {}, COSTS, apart=False)
    pair = replace(COSTS, lanes=2)
    assert plain_system(PROFILES, tasks, {}, pair, apart=False).workers[0].lanes == 2
    with pytest.raises(RequestError, match="2 lanes for the one block of worker 'stem'"):
        plain_system(PROFILES, [], {}, pair, apart=True)
    for cores, threads, says in (
        (4, 3, "were not measured"),
        (2, 3, "3 threads on 2 cores"),
    ):
        costs = Costs(cores, 0.3, 0.1, 256, 16, threads, 1, 32, 1e4)
        with pytest.raises(RequestError, match=says):
            plain_system(PROFILES, [], {}, costs, apart=False)
