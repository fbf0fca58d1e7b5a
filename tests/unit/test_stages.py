"""``"stages": "auto"``: how many stages are best, and how an update gets its numbers."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from control_rig import echo_repository
from hypothesis import given, settings
from hypothesis import strategies as st

from blockflow.batching.facts import StageFacts
from blockflow.batching.registry import policy_problems, with_overlap
from blockflow.bench.simulation.plan import check_policies
from blockflow.bench.simulation.sources import Costs, topology_system
from blockflow.bench.simulation.system import chain
from blockflow.control.events import Launch
from blockflow.control.policies import policy_misfits, with_fitting, with_stages
from blockflow.control.profiles import ProfileShelf
from blockflow.control.stages import resolved
from blockflow.core.engines import select
from blockflow.core.errors import RequestError, TopologyError
from blockflow.core.launchspec import StageSpec
from blockflow.core.profile import Point, StageProfile
from blockflow.core.topology import Topology, parse_topology
from blockflow.repository.profile_record import ProfileKey, ProfileRecord, ran_by
from blockflow.repository.profiles import ProfileStore
from blockflow.repository.repository import BlockRepository
from blockflow.tuning.slicing import Slicing, slice_evenly
from blockflow.tuning.stages import CHOICES, best_stages, estimate

MS = 1e6
COSTS = Costs(2, 0.0, 0.0, 64, 16, 1, 1, 32, 1000.0)
GAIN = (10.0, 1.0)  # ms of a batch, and of each of its rows: joining pays
EACH = (0.0, 3.0)  # nothing is gained from a batch


def table(costs: Sequence[tuple[float, float]], rows: int) -> list[list[float]]:
    return [[0.0, *((a + b * n) * MS for n in range(1, rows + 1))] for a, b in costs]


def test_where_joins_pay_there_are_boundaries_to_join_at() -> None:
    sizes = best_stages(table([GAIN] * 8, 16), 16, joins=True, splits=False)
    assert sum(sizes) == 8 and 1 < len(sizes) <= 8


@pytest.mark.parametrize(
    ("costs", "rows", "joins"),
    [
        ([EACH] * 8, 16, True),
        ([GAIN] * 8, 16, False),
        ([GAIN] * 8, 1, True),
        ([(0.01, 0.001)] * 8, 16, True),
        ([GAIN], 16, True),
    ],
    ids=["no gain", "no joins", "no batch", "shorter than a decision", "one block"],
)
def test_where_a_boundary_is_good_for_nothing_there_is_none(
    costs: list[tuple[float, float]], rows: int, joins: bool
) -> None:
    assert best_stages(table(costs, rows), rows, joins=joins, splits=False) == (len(costs),)


def test_where_halves_are_as_fast_there_are_boundaries_to_split_at() -> None:
    assert len(best_stages(table([EACH] * 8, 16), 16, joins=False, splits=True)) > 1


def test_a_batch_is_split_at_the_best_boundary() -> None:
    times = table([EACH] * 8, 16)
    coarse, fine = (
        estimate(times, slicing, 16, joins=False, splits=True)
        for slicing in (Slicing((0, 4, 8), (4, 4)), Slicing((0, 4, 7, 8), (4, 3, 1)))
    )
    assert fine == pytest.approx(coarse, rel=0.01), "one more costs its decision, and no more"


def test_stages_are_of_even_time() -> None:
    costs = [(1.0, 0.1)] * 6 + [(6.0, 0.6)]
    sizes = best_stages(table([(10 * a, 10 * b) for a, b in costs], 8), 8, joins=True, splits=False)
    assert sizes[-1] == 1  # the long block is a stage of its own


@settings(max_examples=60, deadline=None)
@given(
    costs=st.lists(st.tuples(st.floats(0.01, 20), st.floats(0.001, 5)), min_size=1, max_size=20),
    rows=st.integers(2, 32),
    joins=st.booleans(),
    splits=st.booleans(),
)
def test_the_best_of_those_tried_is_kept(
    costs: list[tuple[float, float]], rows: int, joins: bool, splits: bool
) -> None:
    times = table(costs, rows)
    sizes = best_stages(times, rows, joins=joins, splits=splits)
    assert sum(sizes) == len(costs) and min(sizes) > 0

    def score(n: int) -> float:
        sliced = slice_evenly([t[rows // 2] for t in times], n)
        return estimate(times, sliced, rows, joins=joins, splits=splits)

    tried = [n for n in CHOICES if n <= len(costs)]
    assert score(len(sizes)) == min(map(score, tried))


def test_the_rows_that_a_chain_carries_are_those_of_its_narrowest_block() -> None:
    def facts(most: int | None) -> StageFacts:
        points = [Point(1, b, None, 9, *[10.0 + b] * 6, spread=0.0, outliers=0) for b in (1, 8)]
        made = StageProfile("b", "0" * 64, "example", "fp32", "test", tuple(points))
        return StageFacts("b", most, profile=made)

    policy = {"policy": "dvabatch", "stages": "auto"}
    for most, joined in (((None, 16, 8), False), ((16, 1, None), True), ((None,) * 3, False)):
        found = resolved(policy, [facts(n) for n in most])
        assert sum(found["stages"]) == 3
        assert (found["stages"] == [3]) is joined  # with a row at a time there is nobody to join


# --- an update ------------------------------------------------------------------------------------


def profile(
    repository: BlockRepository,
    costs: Mapping[str, tuple[float, float]],
    threads: Sequence[int] = (1,),
) -> None:
    """Store made-up times (ms of a batch, ms of each row) as if they were measured here."""
    store = ProfileStore(repository.root)
    for name, (fixed, each) in costs.items():
        info = repository.info(name)
        chosen = select(info, machine=store.machine)
        points = [
            Point(n, b, None, 30, t, t, t, t, t, t, 0.01, 0)
            for n in threads
            for b in (1, 2, 4, 8, 16, 32)
            for t in [fixed + each * b]
        ]
        store.save(
            ProfileRecord(
                ProfileKey.of([name], [chosen]),
                StageProfile(
                    name, info.digest, chosen.engine, chosen.precision, store.machine, tuple(points)
                ),
                (),
                ran_by([info], [chosen]),
                store.facts,
                {},
                True,
                "2026-01-01T00:00:00+00:00",
            )
        )


@pytest.fixture
def repository(tmp_path: Path) -> BlockRepository:
    return echo_repository(tmp_path / "blocks")


def body(stages: Any = "auto", ways: Mapping[str, list[str]] | None = None) -> dict[str, Any]:
    policy = {"policy": "dvabatch", "stages": stages}
    shared = {"worker": "w", "threads": 1, "lanes": 1, "batching": policy}
    return {
        "blocks": [{"name": "d"}, *({"name": b, **shared} for b in "abc")],
        "tasks": dict(ways or {"t": ["a", "b", "c", "d"], "early": ["a"]}),
    }


def accepted(repository: BlockRepository, posted: Any) -> tuple[Topology, list[Any]]:
    """As the acceptance of an update does it."""
    shelf = ProfileShelf(repository.root)
    topology = shelf.with_costs(parse_topology(posted, repository.info, policy_problems))
    topology = with_stages(topology, (0, 1), shelf)
    return topology, policy_misfits(topology, (0, 1), shelf)


def test_an_update_gets_numbers_and_a_note_of_them(repository: BlockRepository) -> None:
    profile(repository, {"a": (9.0, 0.1), "b": (9.0, 0.1), "c": (18.0, 0.2)})
    topology, problems = accepted(repository, body())
    assert problems == []
    stages = {b: s.batching.model_dump().get("stages") for b, s in topology.blocks.items()}
    assert stages["a"] == stages["b"] == stages["c"] and stages["d"] is None
    assert sum(stages["a"]) == 3 and len(stages["a"]) > 1 and stages["a"][-1] == 1
    (note,) = topology.notes
    assert note.startswith("worker w: stages a") and note.endswith(", c")
    shelf = ProfileShelf(repository.root)
    noted = replace(parse_topology(body(), repository.info, policy_problems), notes=("earlier",))
    assert with_stages(noted, (0, 1), shelf).notes == ("earlier", note)
    again = parse_topology(topology.to_dict(), repository.info, policy_problems)
    assert again.to_dict() == topology.to_dict()  # what is stored needs no profile any more


def test_it_is_found_anew_when_the_profiles_have_changed(repository: BlockRepository) -> None:
    profile(repository, dict.fromkeys("abc", (9.0, 0.1)))
    before, _ = accepted(repository, body())
    profile(repository, dict.fromkeys("abc", (0.0, 3.0)))
    after, problems = accepted(repository, body())
    assert problems == [] and after.notes == ("worker w: stages a+b+c",)
    assert before.blocks["a"].batching != after.blocks["a"].batching
    assert after.overlap["a"] == 1 < before.overlap["a"]


def test_blocks_of_a_worker_with_other_options_are_judged_by_themselves(
    repository: BlockRepository,
) -> None:
    profile(repository, dict.fromkeys("abcd", (9.0, 0.1)))
    posted = body([2])
    posted["blocks"][-1]["batching"] = {"policy": "dvabatch", "stages": [1]}
    assert accepted(repository, posted)[1] == []


def test_stages_that_fit_no_more_give_way_and_their_lanes_with_them(
    repository: BlockRepository,
) -> None:
    """Unless all of them work: what was told to a process before, it goes on with."""
    topology = with_overlap(parse_topology(body([2, 2]), repository.info, policy_problems))
    shelf = ProfileShelf(repository.root)
    for working in ("", "a", "ab"):
        found, (note,) = with_fitting(topology, (0, 1), shelf, working)
        assert found.blocks["a"].batching.model_dump() == {"policy": "none"}
        assert found.overlap["a"] == 1 < topology.overlap["a"]
        assert note.startswith("a, b, c: without a batching policy")
    assert with_fitting(topology, (0, 1), shelf, "abc") == (topology, [])


def test_without_a_profile_the_command_is_named(repository: BlockRepository) -> None:
    profile(repository, {"b": (9.0, 0.1)})
    topology, (problem,) = accepted(repository, body())
    assert topology.notes == ()
    assert problem.path == "$.blocks[1].batching" and "needs a profile of a, c" in problem.message
    assert problem.hint == "run: blockflow profile a c"


@pytest.mark.parametrize(
    ("stages", "ways", "why"),
    [
        ([2, 2], None, "slices 4 blocks, the worker has 3"),
        ([1, 1], None, "slices 2 blocks, the worker has 3"),
        ([3], {"t": ["a", "b"], "u": ["a", "c"]}, "task 'u' runs a, c"),
        ("auto", {"t": ["a", "b"], "u": ["a", "c"]}, "task 'u' runs a, c"),
        ([1, 2], {"t": ["a", "b", "c"], "u": ["b", "c"]}, "task 'u' runs b, c"),
        ([1, 2], {"t": ["a", "b", "d", "c"]}, "task 't' runs a, b, c"),
    ],
)
def test_what_cannot_be_sliced_is_refused(
    repository: BlockRepository, stages: Any, ways: Any, why: str, tmp_path: Path
) -> None:
    profile(repository, dict.fromkeys("abcd", (9.0, 0.1)))
    posted = body(stages, ways)
    _, (problem,) = accepted(repository, posted)
    assert problem.path == "$.blocks[1].batching.stages" and why in problem.message
    file = tmp_path / "topology.json"
    file.write_text(json.dumps(posted), encoding="utf-8")
    with pytest.raises(TopologyError) as refused:
        topology_system(file, repository.root, [], {}, COSTS)
    assert list(refused.value.problems) == [problem]


def test_threads_without_a_profile_are_told_before_what_follows_from_that(
    repository: BlockRepository, tmp_path: Path
) -> None:
    """Of lengths at so many threads nothing is known: that there are none would be untrue."""
    profile(repository, dict.fromkeys("abcd", (9.0, 0.1)), threads=(2,))
    posted = body()
    for block in posted["blocks"]:
        if isinstance(block, dict):
            block["batching"] = {"policy": "window", "max_rows": 8, "classes": [16, 64]}
    file = tmp_path / "topology.json"
    file.write_text(json.dumps(posted), encoding="utf-8")
    with pytest.raises(RequestError, match="1 thread was not measured"):
        topology_system(file, repository.root, [], {}, COSTS)


def test_the_simulator_slices_like_an_update(repository: BlockRepository, tmp_path: Path) -> None:
    profile(repository, {"a": (9.0, 0.1), "b": (9.0, 0.1), "c": (18.0, 0.2), "d": (1.0, 1.0)})
    topology, _ = accepted(repository, body())
    file = tmp_path / "topology.json"
    file.write_text(json.dumps(body()), encoding="utf-8")
    system = topology_system(file, repository.root, [], {}, COSTS)
    found = {s.block: s.policy.get("stages") for w in system.workers for s in w.stages}
    assert found == {b: s.batching.model_dump().get("stages") for b, s in topology.blocks.items()}


def test_a_policy_of_the_command_line_is_sliced_for_each_worker() -> None:
    def made(block: str) -> StageProfile:
        cells = [
            Point(1, b, None, 9, t, t, t, t, t, t, 0.0, 0) for b in (1, 8) for t in [9.0 + 0.1 * b]
        ]
        return StageProfile(block, "0" * 64, "echo", "fp32", "here", tuple(cells))

    system = chain([made(b) for b in "abcd"], max_rows=8)
    spec = {"policy": "dvabatch", "stages": "auto"}
    check_policies(system, [spec])
    sizes = system.with_policy(spec).workers[0].stages[0].policy["stages"]
    assert sum(sizes) == 4 and len(sizes) > 1
    with pytest.raises(TopologyError) as refused:
        check_policies(system, [{**spec, "stages": [2, 3]}])
    assert "slices 5 blocks, the worker has 4" in str(refused.value.problems)


def test_a_process_is_told_the_points_for_its_threads(repository: BlockRepository) -> None:
    """An order has a bound: that of many blocks would not fit with whole tables."""
    profile(repository, {"a": (9.0, 0.1)}, threads=(1, 2, 4))
    shelf, stage = ProfileShelf(repository.root), StageSpec(1, repository.info("a")).to_dict()
    for own, threads in ((None, 2), (4, 4)):
        spec = {"stages": [{**stage, "threads": own}], "device": "cpu", "threads": 2}
        order = shelf.attach(Launch(1, "worker", "a#0", "m:f", spec))
        told = StageProfile.from_dict(order.spec["stages"][0]["profile"])
        assert told.threads_measured() == (threads,)
