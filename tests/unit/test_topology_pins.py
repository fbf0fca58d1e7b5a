"""Digests in a topology: the extended form means the very artifacts that are in force."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from control_rig import SPEC

from blockflow.core.errors import BlockFlowError, Problem, RepositoryError, TopologyError
from blockflow.core.model import BlockInfo, Contract
from blockflow.core.placement import desired_workers
from blockflow.core.topology import Topology, parse_topology

OLD, NEW, GONE = "a" * 64, "b" * 64, "c" * 64


def now(name: str) -> BlockInfo:
    """What names mean now."""
    digest = OLD if name.endswith("@1") else NEW
    stored = name.partition("@")[0]
    return BlockInfo(stored, "1", digest, "echo", Contract(SPEC, SPEC), 0, 0)


def pinned(name: str, digest: str) -> BlockInfo:
    if digest not in (OLD, NEW):
        raise RepositoryError("ARTIFACT_MISSING", "no such version", hint="export it")
    return replace(now(name), digest=digest)


def parsed(blocks: list[Any], tasks: dict[str, Any] | None = None) -> Topology:
    return parse_topology({"blocks": blocks, "tasks": tasks or {}}, now, pinned=pinned)


def found(blocks: list[Any]) -> tuple[Problem, ...]:
    with pytest.raises(TopologyError) as e:
        parsed(blocks)
    return e.value.problems


def test_the_extended_form_brings_back_what_is_in_force() -> None:
    """As after a rollback: it was posted without a version, and the name means another one now."""
    blocks = [{"name": "a", "digest": OLD}, "b@1", {"name": "c", "block": "b", "version": "1"}]
    in_force = parsed(blocks, {"t": ["a", "b@1"]})
    again = parse_topology(in_force.extended(), now, pinned=pinned)
    assert again.to_dict() == in_force.to_dict() and again.digests() == in_force.digests()
    workers = [[w.identity() for w in desired_workers(t, (0,))] for t in (in_force, again)]
    assert workers[0] == workers[1]
    plain = parse_topology(in_force.to_dict(), now, pinned=pinned)
    assert plain.digests()["a"] == NEW


def test_a_digest_alone_replaces_no_worker() -> None:
    named, meant = parsed(["b@1"]), parsed([{"name": "b@1", "digest": OLD}])
    assert desired_workers(named, (0,))[0].identity() == desired_workers(meant, (0,))[0].identity()
    assert named.to_dict() == meant.to_dict()


def test_what_is_stored_no_more_is_a_problem_of_its_digest() -> None:
    (problem,) = found([{"name": "a", "digest": GONE}])
    assert (problem.path, problem.code) == ("$.blocks[0].digest", "ARTIFACT_MISSING")
    assert "leave digest out" in problem.hint
    assert problem.to_dict()["code"] == "ARTIFACT_MISSING"


def test_what_else_is_wrong_with_a_block_is_none_of_its_digest() -> None:
    """One without a digest may be missing too: an epoch that is gone back to means it."""

    def wrong(block: Any, code: str) -> tuple[str, str]:
        def fails(*asked: str) -> BlockInfo:
            raise RepositoryError(code, "no", hint="its own")

        with pytest.raises(TopologyError) as e:
            parse_topology({"blocks": [block], "tasks": {}}, fails, pinned=fails)
        (problem,) = e.value.problems
        return problem.path, problem.hint

    assert wrong("a", "ARTIFACT_MISSING") == ("$.blocks[0]", "its own")
    assert wrong({"name": "a", "digest": OLD}, "UNKNOWN_BLOCK") == ("$.blocks[0]", "its own")


def test_one_stored_name_means_one_artifact() -> None:
    one, other = {"name": "x", "block": "a", "digest": OLD}, {"name": "y", "block": "a"}
    assert [p.path for p in found([one, other])] == ["$.blocks[1].digest"]
    assert parsed([one, {**other, "digest": OLD}]).digests() == {"a": OLD}


@pytest.mark.parametrize("digest", ["", "abc", "A" * 64, 7])
def test_a_digest_is_64_hexadecimal_digits(digest: Any) -> None:
    assert found([{"name": "a", "digest": digest}])[0].path == "$.blocks[0].digest"


def test_who_knows_one_artifact_per_name_gives_that_or_none() -> None:
    body = {"blocks": [{"name": "a", "digest": NEW}], "tasks": {}}
    assert parse_topology(body, now).infos["a"].digest == NEW
    body["blocks"][0]["digest"] = OLD  # type: ignore[index]
    with pytest.raises(BlockFlowError) as e:
        parse_topology(body, now)
    assert "ARTIFACT_MISSING" in str(e.value)
