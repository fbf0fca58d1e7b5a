"""One family of errors with stable codes."""

from __future__ import annotations

import copy
import json
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from blockflow.core import errors
from blockflow.core.errors import (
    CODES,
    BlockFlowError,
    Fault,
    Problem,
    RequestError,
    TopologyError,
    codes_table,
    from_dict,
    make_error,
)
from blockflow.tensormq.cuda_api import CudaError

DOC = Path(__file__).parents[2] / "docs" / "errors.md"


def test_the_document_lists_every_code() -> None:
    assert codes_table() in DOC.read_text(), (
        "docs/errors.md is out of step: replace its table by the output of "
        "python -c 'from blockflow.core.errors import codes_table; print(codes_table())'"
    )


def test_each_code_is_complete() -> None:
    table = codes_table()
    for code, info in CODES.items():
        assert code.isupper() and f"\n| `{code}` |" in table
        assert info.meaning, code
        assert 400 <= info.http < 600, code
        # What the client did wrong is 4xx (3xx and 2xx are no errors); a lost system may say 503
        # for an address where nobody listens.
        elsewhere = code in ("NOT_RUNNING", "MISSING_EXTRA")
        assert info.fault is not Fault.CLIENT or info.http < 500 or elsewhere, code
        made = make_error(code, "what was wrong")
        told = (made.family, made.fault, made.retryable)
        assert told == (info.family, info.fault, info.retryable), code


def test_the_json_form_survives_the_wire() -> None:
    for code in CODES:
        made = make_error(
            code, "text", where="$.a", hint="do this", details={"n": 1}, retry_after_ms=50
        )
        again = from_dict(json.loads(json.dumps(made.to_dict())))
        assert type(again) is type(made), code
        assert again.to_dict() == made.to_dict(), code
        assert str(again) == f"{code}: text (at $.a) -- do this"


@pytest.mark.parametrize("code", ["WORKER_LOST", "CONTRACT_MISMATCH"])
def test_an_error_may_be_less_retryable_than_its_code_and_never_more(code: str) -> None:
    assert not make_error(code, "text", retryable=False).retryable
    assert make_error(code, "text", retryable=True).retryable is CODES[code].retryable
    again = from_dict(json.loads(json.dumps(make_error(code, "t", retryable=False).to_dict())))
    assert again.retryable is again.to_dict()["retryable"] is False
    plain = {"code": code, "message": "from a peer that says nothing of it"}
    assert from_dict(plain).retryable is CODES[code].retryable


def test_problems_travel_with_a_topology_error() -> None:
    made = TopologyError(
        "INVALID_TOPOLOGY",
        "2 problems",
        problems=[Problem("$.x", "bad", "mend"), Problem("$", "y")],
    )
    again = from_dict(json.loads(json.dumps(made.to_dict())))
    assert isinstance(again, TopologyError)
    assert again.problems == made.problems
    assert str(again).endswith("\n  $.x: bad -- mend\n  $: y")
    assert "problems" not in TopologyError("UPDATE_FAILED", "none").to_dict()


COPIES: dict[str, Callable[[BlockFlowError], BlockFlowError]] = {
    "pickle": lambda e: pickle.loads(pickle.dumps(e)),  # noqa: S301 -- its own bytes
    "deepcopy": copy.deepcopy,
}


def _errors_of_all_families() -> list[BlockFlowError]:
    facts: dict[str, Any] = {
        "where": "$.a",
        "hint": "do this",
        "details": {"n": [1]},
        "retry_after_ms": 50,
        "retryable": False,
    }
    found = [make_error(code, "text", **facts) for code in CODES]
    found.append(BlockFlowError("INTERNAL", "bare"))
    found.append(TopologyError("INVALID_TOPOLOGY", "t", problems=[Problem("$.x", "bad", "mend")]))
    found.append(CudaError("cuMemAlloc", 2, "out of memory"))
    return found


@pytest.mark.parametrize("way", COPIES.values(), ids=COPIES)
def test_an_error_can_be_copied(way: Callable[[BlockFlowError], BlockFlowError]) -> None:
    for error in _errors_of_all_families():
        again = way(error)
        assert type(again) is type(error) and again is not error
        assert again.args == error.args and str(again) == str(error)
        assert vars(again) == vars(error) and again.details is not error.details
        assert again.to_dict() == error.to_dict()


def test_what_is_not_known_is_not_told() -> None:
    bare = RequestError("CANCELLED", "text")
    assert str(bare) == "CANCELLED: text"
    assert bare.to_dict() == {
        "code": "CANCELLED",
        "message": "text",
        "fault": str(bare.fault),
        "retryable": bare.retryable,
    }
    assert str(RequestError("CANCELLED", "text", hint="do this")) == "CANCELLED: text -- do this"


def test_at_once_is_a_time_to_try_again() -> None:
    told = make_error("OVERLOADED", "x", retry_after_ms=0).to_dict()
    assert from_dict(told).retry_after_ms == 0


def test_an_unknown_code_is_a_defect_not_a_crash() -> None:
    assert make_error("NO_SUCH_CODE", "x").code == "INTERNAL"
    assert RequestError("NO_SUCH_CODE", "x").code == "INTERNAL"
    read = from_dict({"code": "NO_SUCH_CODE", "message": "x"})
    assert (read.code, read.message) == ("INTERNAL", "unknown error code 'NO_SUCH_CODE': x")


@pytest.mark.parametrize(
    "data",
    [
        {},
        {"code": 7},
        {"code": None, "message": None, "where": 3, "hint": [], "details": "x"},
        {"code": "OVERLOADED", "retry_after_ms": "soon"},
        {"code": "INVALID_TOPOLOGY", "problems": 5},
        {"code": "INVALID_TOPOLOGY", "problems": ["x", {"path": 1}]},
    ],
)
def test_nonsense_from_a_peer_becomes_some_error(data: dict[str, object]) -> None:
    assert isinstance(from_dict(data), BlockFlowError)


def test_families_have_their_own_class() -> None:
    families = {info.family for info in CODES.values()}
    assert families <= set(errors._FAMILIES)
