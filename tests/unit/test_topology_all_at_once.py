"""A topology's mistakes are told together: one in a field hides none in the others."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from blockflow.batching.registry import policy_problems
from blockflow.control.engines import engine_check
from blockflow.core import guess
from blockflow.core.engines import misfits
from blockflow.core.entries import uncarried
from blockflow.core.errors import MOST_FINDINGS, Problem, TopologyError
from blockflow.core.model import BlockInfo
from blockflow.core.specs import BlockSpec
from blockflow.core.topology import draft_topology, parse_topology
from blockflow.repository.repository import BlockRepository
from tests.unit.test_topology import lookup, problems

PATH = ["block1"]


def test_a_wrong_field_hides_neither_the_block_nor_its_paths() -> None:
    body = {
        "blocks": [
            {"name": "nowhere", "replicas": 0},
            {"name": "block1", "slots": 0, "batching": "windw"},
        ],
        "tasks": {"a": ["nowhere", "block1"], "b": {"path": ["block9"], "max_rows": 0}},
    }
    with pytest.raises(TopologyError) as caught:
        parse_topology(body, lookup, policy_problems)
    found = {p.path: p.message for p in caught.value.problems}
    assert {"$.blocks[0].replicas", "$.blocks[1].slots", "$.tasks.b.max_rows"} <= found.keys()
    assert "UNKNOWN_BLOCK" in found["$.blocks[0]"] or "nowhere" in found["$.blocks[0]"]
    assert "windw" in found["$.blocks[1].batching.policy"]
    assert any("block9" in message for message in found.values())


def test_nothing_is_judged_by_limits_that_were_not_meant() -> None:
    task = {"path": PATH, "max_rows": 64}
    body = {"blocks": PATH, "tasks": {"t": task}, "limits": {"max_rows": "64"}}
    with pytest.raises(TopologyError) as caught:
        parse_topology(body, lookup, cores=(0,))
    assert [p.path for p in caught.value.problems] == ["$.limits.max_rows"]


@pytest.mark.parametrize("stable", ["block1", "nowhere"])
def test_a_block_that_is_not_stored_hides_nothing_of_a_canary(stable: str) -> None:
    other = "nowhere" if stable == "block1" else "block1"
    task = {"path": [stable], "canary": {"path": [other], "share": 0.5}}
    found = problems({"blocks": ["block1", "nowhere"], "tasks": {"t": task}})
    assert set(found) == {"$.blocks[1]"}


def test_what_cannot_be_missing_is_not_made_up() -> None:
    found = problems({"blocks": [{"name": 7}, "block1"], "tasks": {"a": {"path": 3}}})
    assert {p.partition(".name")[0] for p in found if "blocks[0]" in p} == {"$.blocks[0]"}
    assert any(p.startswith("$.tasks.a") for p in found)


@pytest.mark.parametrize(
    ("body", "hint"),
    [
        ({"limits": {"max_row": 3}}, "max_rows"),
        (
            {"tasks": {"a": {"path": ["block1"], "canary": {"path": ["block1"], "shar": 0.1}}}},
            "share",
        ),
        ({"blocks": [{"name": "block1", "replica": 2}]}, "replicas"),
    ],
)
def test_an_unknown_field_is_compared_with_those_of_its_object(
    body: dict[str, Any], hint: str
) -> None:
    with pytest.raises(TopologyError) as caught:
        parse_topology({"blocks": ["block1"], "tasks": {}, **body}, lookup)
    (found,) = [p for p in caught.value.problems if "unknown field" in p.message]
    assert hint in found.hint


def test_beside_a_pattern_stands_what_it_means() -> None:
    with pytest.raises(TopologyError) as caught:
        parse_topology({"blocks": [{"name": "block1", "device": "gpu"}], "tasks": {}}, lookup)
    (found,) = caught.value.problems
    assert (found.path, found.hint) == ("$.blocks[0].device", "cpu or cuda:N")
    with pytest.raises(TopologyError) as caught:
        parse_topology({"blocks": ["block1"], "tasks": {"block1@2": ["block1"]}}, lookup)
    (found,) = caught.value.problems
    assert found.hint.startswith("a letter, then up to 63 ")


def test_what_cannot_be_carried_is_told_by_field() -> None:
    deep: list[Any] = []
    for _ in range(20):
        deep = [deep]
    found = uncarried({"a": 1, "options": deep, "batching": [10**30]}, "$.blocks[3]")
    assert found.keys() == {"options", "batching"}
    assert found["options"].path == "$.blocks[3].options"


@pytest.mark.parametrize("value", ["\ud800", ["a", {"b": "c\udfff"}], {"\ud8ff": 1}])
def test_a_text_that_is_no_unicode_is_refused(value: Any) -> None:
    """JSON can write half of a surrogate pair; no message to a worker can."""
    (found,) = uncarried({"name": "a", "options": {"x": value}}, "$.blocks[0]").values()
    assert found.path == "$.blocks[0].options" and "surrogate" in found.message


@pytest.mark.parametrize("name", [10**30, "\ud800"])
def test_a_field_that_cannot_be_carried_is_not_called_missing_as_well(name: Any) -> None:
    with pytest.raises(TopologyError) as caught:
        parse_topology({"blocks": [{"name": name}], "tasks": {}}, lookup)
    assert [p.path for p in caught.value.problems].count("$.blocks[0].name") == 1


def test_a_mistake_in_the_frame_hides_no_lack_of_room() -> None:
    """Neither the rows of a task, nor threads: those limits are meant that are told."""
    blocks = ["block1", {"name": "block2", "max_rows": 4}]
    task = {"path": ["block1", "block2"], "max_rows": 8}
    body = {"blocks": blocks, "tasks": {"t": task}, "mode": 3, "foo": 1}
    with pytest.raises(TopologyError) as caught:
        parse_topology(body, lookup, cores=(0,))
    assert {p.path for p in caught.value.problems} == {"$.foo", "$.mode", "$.tasks.t.max_rows"}


def test_what_is_sound_of_a_draft_can_be_judged_further() -> None:
    pair = {"worker": "w"}
    body = {
        "blocks": [
            "nowhere",
            "block1",
            {"name": "block2", **pair},
            {"name": "block3", "replicas": 0, **pair},
        ],
        "tasks": {"t": ["block1"], "u": ["block1", "nowhere"], "v": {"path": ["block1"], "x": 1}},
    }
    draft = draft_topology(body, lookup, cores=(0, 1))
    assert list(draft.topology.blocks) == ["block1"] and list(draft.topology.tasks) == ["t"]
    assert not draft.whole and draft.index["block1"] == 1
    assert {p.code for p in draft.problems} == {"UNKNOWN_BLOCK", ""}


def test_findings_of_room_leave_a_draft_whole() -> None:
    task = {"path": PATH, "max_rows": 64}
    draft = draft_topology({"blocks": PATH, "tasks": {"t": task}, "foo": 1}, lookup, cores=(0,))
    assert draft.whole and list(draft.topology.tasks) == ["t"]
    assert draft.topology.mode == "tensormq" and len(draft.problems) == 2


def test_a_draft_with_other_limits_than_were_meant_is_not_whole() -> None:
    body = {"blocks": PATH, "tasks": {"t": PATH}, "limits": {"max_row": 3}}
    draft = draft_topology(body, lookup, cores=(0,))
    assert not draft.whole and list(draft.topology.tasks) == ["t"]


def test_a_block_that_stands_twice_is_no_whole_draft() -> None:
    draft = draft_topology({"blocks": PATH * 2, "tasks": {}}, lookup)
    assert not draft.whole and [p.path for p in draft.problems] == ["$.blocks[1]"]


@pytest.mark.parametrize("body", [[], {"blocks": 1, "tasks": {}}, {"tasks": {"t": PATH}}])
def test_a_draft_of_nonsense_is_empty(body: Any) -> None:
    draft = draft_topology(body, lookup, cores=(0,))
    assert draft.problems and not draft.whole and not draft.topology.blocks


@pytest.mark.parametrize(
    "many",
    [
        dict.fromkeys(map(str, range(300)), 1),
        {"cores": [None] * 300},
        dict.fromkeys(map(str, range(300)), "\ud800"),
    ],
)
def test_of_one_objects_findings_a_hundred_are_told_and_the_rest_counted(
    many: dict[str, Any],
) -> None:
    with pytest.raises(TopologyError) as caught:
        parse_topology({"blocks": [{"name": "block1", **many}], "tasks": {}}, lookup)
    *_, last = found = caught.value.problems
    assert len(found) == 101 and last.path == "$.blocks[0]"
    assert last.message == "and 200 more such findings"


MANY = dict.fromkeys((f"opt{i}" for i in range(300)), 1)


@pytest.mark.parametrize(
    "body",
    [
        {"blocks": [{"name": f"b{i}", f"opt{i}": 1} for i in range(300)], "tasks": {}},
        {"blocks": [], "tasks": {f"t{i}": {"path": ["a"], f"opt{i}": 1} for i in range(300)}},
        {"blocks": [{"name": "block1", "batching": {"policy": "lbci", **MANY}}], "tasks": {}},
        {"blocks": [{"name": "block1", "options": MANY}], "tasks": {}},
    ],
    ids=["blocks", "tasks", "policy", "engine"],
)
def test_words_that_nobody_knows_are_compared_as_often_as_one_object_may_have_them(
    body: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[str] = []

    def close(word: str, *_: object) -> list[str]:
        return asked.append(word) or []

    monkeypatch.setattr(guess, "get_close_matches", close)

    def check_engine(spec: BlockSpec, info: BlockInfo, path: str) -> list[Problem]:
        return [Problem(path, e.message) for e in misfits(info, options=spec.options)]

    draft_topology(body, lookup, policy_problems, check_engine)
    assert 0 < len([w for w in asked if w.startswith("opt")]) <= guess.WORDS


def test_of_a_policys_unknown_options_a_hundred_are_told_and_the_rest_counted() -> None:
    *told, missing, last = policy_problems({"policy": "lbci", **MANY}, "$.batching")
    assert len(told) == 100 and missing.message == "policy 'lbci' needs 't_opt_ms'"
    assert (last.path, last.message) == ("$.batching", "and 200 more such findings")


def test_what_a_finding_quotes_is_short() -> None:
    body = {"blocks": [{"name": "x" * 5000, "y" * 5000: 1}], "tasks": {"t": {"z" * 5000: 1}}}
    with pytest.raises(TopologyError) as caught:
        parse_topology(body, lookup)
    assert len(caught.value.problems) == 4
    assert all(len(p.path) < 200 and len(p.message) < 300 for p in caught.value.problems)


@pytest.mark.parametrize(
    ("name", "step"), [("a.b", "['a.b']"), ("", "['']"), ("it's", "['it\\'s']"), ("a", ".a")]
)
def test_options_of_any_name_have_json_paths(name: str, step: str, tmp_path: Path) -> None:
    """RFC 9535: a dot would lead elsewhere, or nowhere."""
    (found,) = policy_problems({"policy": "window", name: 1}, "$.b")
    assert found.path == f"$.b{step}"
    block = BlockSpec(name="block1", options={name: 1})
    check = engine_check(BlockRepository(tmp_path), ())
    paths = {p.path for p in check(block, lookup("block1"), "$.b")}
    assert f"$.b.options{step}" in paths


def test_of_a_blocks_options_a_hundred_are_told(tmp_path: Path) -> None:
    block = BlockSpec(name="block1", options={f"o{i}": 1 for i in range(2 * MOST_FINDINGS)})
    found = engine_check(BlockRepository(tmp_path), ())(block, lookup("block1"), "$.b")
    assert len(found) == MOST_FINDINGS + 1
    assert found[-1].path == "$.b" and found[-1].message.startswith("and 10")
