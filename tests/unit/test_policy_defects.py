"""Policies that are anybody's code: what is wrong with one is a finding that names it, no INTERNAL;
and what its author can ask of the tools."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from typing import Any, ClassVar

import pytest
from policy_rig import facts_for
from pydantic import ValidationError

from blockflow.batching import registry
from blockflow.batching.facts import StageFacts
from blockflow.batching.none import NonePolicy
from blockflow.batching.options import Integer, option_problems
from blockflow.batching.policy import Decision, Query, Run, WaitUntil
from blockflow.batching.registry import create_policy, largest_batch, policy_problems
from blockflow.bench import decisions
from blockflow.core.errors import Problem, TopologyError
from blockflow.core.specs import BlockSpec

PATH = "$.blocks[1].batching"
FACTS = list(facts_for((1, 2)).values())
METHODS = ("problems", "overlap", "batch_rows", "boundaries", "unfit", "idle")


class Own(NonePolicy):
    """Somebody's policy."""

    NAME: ClassVar[str] = "own"
    fails: ClassVar[str] = ""
    says: ClassVar[Any] = None

    @classmethod
    def _maybe(cls, method: str, answer: Any) -> Any:
        if cls.fails != method:
            return answer
        if cls.says is None:
            raise KeyError("no such thing")
        return cls.says

    @classmethod
    def problems(cls, options: Mapping[str, Any], path: str) -> list[Problem]:
        kinds = {"stages": Integer(1, 9), "classes": Integer(1, 9), "depth": Integer(1, 9)}
        found = option_problems("policy 'own'", options, kinds, path)
        return cls._maybe("problems", found)

    @classmethod
    def overlap(cls, options: Mapping[str, Any]) -> int:
        return cls._maybe("overlap", 2)

    @classmethod
    def batch_rows(cls, options: Mapping[str, Any], laid_out: int) -> int:
        return cls._maybe("batch_rows", laid_out)

    @classmethod
    def boundaries(cls, options: Mapping[str, Any]) -> frozenset[str]:
        return cls._maybe("boundaries", frozenset({"join"}))

    @classmethod
    def unfit(
        cls,
        options: Mapping[str, Any],
        stages: Sequence[StageFacts],
        path: str,
        ways: Sequence[Sequence[int]],
    ) -> list[Problem]:
        return cls._maybe("unfit", [])

    @classmethod
    def idle(
        cls, options: Mapping[str, Any], stages: Sequence[StageFacts], path: str
    ) -> list[Problem]:
        return cls._maybe("idle", [])


@pytest.fixture
def own(monkeypatch: pytest.MonkeyPatch) -> type[Own]:
    made = type("Own", (Own,), {})
    monkeypatch.setattr(registry, "POLICIES", {**registry.POLICIES, "own": made})
    return made


def test_a_good_one_is_taken(own: type[Own]) -> None:
    assert policy_problems({"policy": "own", "depth": 3}, PATH, FACTS) == []
    assert isinstance(create_policy({"policy": "own"}, (1, 2)), Own)


@pytest.mark.parametrize("method", METHODS)
def test_one_that_raises_is_named(own: type[Own], method: str) -> None:
    own.fails = method
    (problem,) = policy_problems({"policy": "own"}, PATH, FACTS)
    assert problem.path == PATH
    assert f"policy 'own': {method}() failed with KeyError: 'no such thing'" in problem.message
    assert "(test_policy_defects.py:" in problem.message and "defect" in problem.hint


class AtWork(Own):
    """What it is asked about its options it answers well."""

    def __init__(self, *args: Any, **more: Any) -> None:
        self._fail("__init__")
        super().__init__(*args, **more)

    def _fail(self, method: str) -> None:
        if self.fails == method:
            raise KeyError("no such thing")

    def arrive(self, query: Query, now: int) -> None:
        self._fail("arrive" if query.first else "arrive again")
        super().arrive(query, now)

    def drop(self, key: int, now: int) -> None:
        self._fail("drop")
        super().drop(key, now)

    def decide(self, now: int, busy: Collection[int] = ()) -> Decision:
        self._fail("decide")
        made = super().decide(now, busy)
        if self.fails == "says" and isinstance(made, Run):
            return self.says(made)
        return made

    def done(self, stage: int, keys: Sequence[int], now: int) -> None:
        self._fail("done")
        super().done(stage, keys, now)


@pytest.mark.parametrize(
    "fails", ["__init__", "arrive", "arrive again", "drop", "decide", "done", "says"]
)
def test_one_that_raises_at_work_is_found_before_it_works(
    monkeypatch: pytest.MonkeyPatch, fails: str
) -> None:
    says = staticmethod(lambda run: 7)
    made = type("Own", (AtWork,), {"fails": fails, "says": says})
    monkeypatch.setattr(registry, "POLICIES", {**registry.POLICIES, "own": made})
    (problem,) = policy_problems({"policy": "own"}, PATH, FACTS)
    method = {"says": "decide"}.get(fails, fails.split()[0])
    assert f"policy 'own': {method}() failed with" in problem.message
    assert policy_problems({"policy": "own"}, PATH) == [], "the options themselves are right"


@pytest.mark.parametrize(
    ("says", "word"),
    [
        (lambda run: replace(run, keys=()), "one at least"),
        (lambda run: replace(run, keys=(99,)), "does not wait"),
        (lambda run: replace(run, stage=9), "not one of its own"),
        (lambda run: replace(run, stage=1 - run.stage), "it waits at"),
        (lambda run: replace(run, pad_to=(0,)), "pads key"),
        (lambda run: "run", "not Run"),
    ],
)
def test_one_that_decides_what_it_may_not(
    monkeypatch: pytest.MonkeyPatch, says: Callable[[Run], Any], word: str
) -> None:
    made = type("Own", (AtWork,), {"fails": "says", "says": staticmethod(says)})
    monkeypatch.setattr(registry, "POLICIES", {**registry.POLICIES, "own": made})
    (problem,) = policy_problems({"policy": "own"}, PATH, FACTS)
    assert "policy 'own': decide() failed with" in problem.message and word in problem.message


def test_one_that_waits_for_more_than_a_trial_has_is_no_defect(own: type[Own]) -> None:
    def never(*_: Any) -> Decision:
        return None

    def later(_: Any, now: int, *__: Any) -> Decision:
        return WaitUntil(now)

    for waits in (never, later):
        own.decide = waits  # type: ignore[method-assign, assignment]
        assert policy_problems({"policy": "own"}, PATH, FACTS) == []


@pytest.mark.parametrize(
    ("method", "says"),
    [
        ("problems", 7),
        ("overlap", 0),
        ("overlap", "two"),
        ("batch_rows", 2.5),
        ("boundaries", {"jion"}),
        ("unfit", 7),
        ("idle", 7),
    ],
)
def test_one_that_says_what_makes_no_sense_is_named(own: type[Own], method: str, says: Any) -> None:
    own.fails, own.says = method, says
    (problem,) = policy_problems({"policy": "own"}, PATH, FACTS)
    assert f"policy 'own': {method}() failed" in problem.message


def test_one_that_raises_only_later_is_named_as_well(own: type[Own]) -> None:
    own.fails = "batch_rows"
    with pytest.raises(TopologyError) as e:
        largest_batch({"policy": "own"}, 8)
    assert e.value.code == "INVALID_TOPOLOGY" and "'own'" in e.value.problems[0].message


@pytest.mark.parametrize("option", ["stages", "classes"])
def test_reserved_names_mean_one_thing(own: type[Own], option: str) -> None:
    """Who reads them beside the policy would stumble over its number."""
    (problem,) = policy_problems({"policy": "own", option: 3}, PATH)
    assert problem.path == f"{PATH}.{option}"
    assert "for every policy" in problem.message and "'own'" in problem.hint


def test_a_policy_in_capitals_and_options_without_a_policy() -> None:
    (problem,) = policy_problems({"policy": "LBCI"}, PATH)
    assert problem.hint == "did you mean lbci?"
    (problem,) = policy_problems({"policy": "none", "max_rows": 3}, PATH)
    assert "name the policy" in problem.hint


def test_a_new_policys_decisions_can_be_measured(
    own: type[Own], capsys: pytest.CaptureFixture[str]
) -> None:
    few = ["--queued", "3", "--tasks", "2", "--decisions", "20"]
    assert decisions.main([*few, "--policy", "own:depth=2", "--policy", "window"]) == 0
    shown = capsys.readouterr().out
    assert "own depth=2, decision: p99" in shown and "window, turn: p99" in shown
    assert "dvabatch" not in shown
    for wrong, says in (("own:depth=20", "is not an integer"), (":", "names no policy")):
        with pytest.raises(SystemExit):
            decisions.main(["--policy", wrong])
        assert says in capsys.readouterr().err


@pytest.mark.parametrize("batching", [[], 3, None, True])
def test_what_is_no_policy_at_all_is_told_what_one_is(batching: Any) -> None:
    with pytest.raises(ValidationError, match=r"expected a policy's name, or \{") as e:
        BlockSpec.model_validate({"name": "trunk", "batching": batching})
    assert e.value.errors()[0]["loc"] == ("batching",)
